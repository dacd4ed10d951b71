//! Reading the file: strict, with the place of a mistake and without quoting the file.

use std::io::Read as _;
use std::path::Path;

use super::units::{as_written, is_setting, short};
use super::{BLOCK_TOKENS, Config, ConfigError, TextPosition, plain};

/// Bytes of a configuration at most: reading it delays nobody for long.
const MOST_BYTES: usize = 4 << 20;

/// Sections and settings (`section.key`) of earlier releases: each with its new place, or why it is gone.
const REMOVED: &[(&str, &str)] = &[
    ("transfer", "its settings are the simulator's, and have moved to [network] under the same names"),
    ("transfer.max_predicted_events", NO_PREDICTIONS),
    ("network.max_predicted_events", NO_PREDICTIONS),
    ("scheduler.ttft_margin_permille", "it is learnt: delete it, and see scheduler.classes.target_permille"),
    ("scheduler.local_room_permille", "what the cluster is short of decides: delete it"),
    ("scheduler.ageing_us", "promises are kept by the order of service: delete it"),
    ("scheduler.dispatch_ahead_us", "it is derived from the engine's passes: delete it"),
    ("scheduler.first_token", FROM_DECODE),
    ("cluster.first_token", FROM_DECODE),
];
/// Words of `scheduler.policy` of earlier releases, each with the present one.
const RENAMED_POLICIES: &[(&str, &str)] = &[("foresight", "baton_informed")];
const FROM_DECODE: &str = "clients have it from the decode leg, with the second one: delete it";
const NO_PREDICTIONS: &str = "nothing read the predictions that it bounded: delete it";

/// Reads a configuration file.
pub fn load(path: &Path) -> Result<Config, ConfigError> {
    read(path).map(|(_, config)| config)
}

/// The configuration of a file, or the defaults where none is named.
pub fn load_or_default(path: Option<&Path>) -> Result<Config, ConfigError> {
    path.map_or_else(|| Ok(Config::default()), load)
}

/// As [`load_or_default`], with the block size where the file sets one.
pub fn load_with_blocks(path: Option<&Path>) -> Result<(Config, Option<u32>), ConfigError> {
    let Some(path) = path else { return Ok((Config::default(), None)) };
    let (text, config) = read(path)?;
    let given = plain(&text)?.parse().unwrap_or_default();
    let own = sets_block_tokens(&given).then_some(config.scheduler.block_tokens);
    Ok((config, own))
}

/// Whether a file sets the block size.
fn sets_block_tokens(given: &toml::Table) -> bool {
    given.get("scheduler").is_some_and(|scheduler| scheduler.get("block_tokens").is_some())
}

/// The configuration of a file, with the text that it was read from.
pub fn read(path: &Path) -> Result<(String, Config), ConfigError> {
    let unreadable = |why: String| ConfigError::Unreadable { file: path.to_owned(), why };
    let read = bytes(path).map_err(|e| unreadable(e.to_string()))?;
    let text = String::from_utf8(read).map_err(|_| unreadable("it is no text".into()))?;
    let config = parse(&text)
        .map_err(|fault| ConfigError::InFile { file: path.to_owned(), fault: Box::new(fault) })?;
    Ok((text, config))
}

/// The bytes of a file: all of them, or one more than a configuration may have.
pub fn bytes(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut read = Vec::new();
    std::fs::File::open(path)?.take(MOST_BYTES as u64 + 1).read_to_end(&mut read)?;
    Ok(read)
}

/// Parses and checks a configuration.
pub fn parse(file: &str) -> Result<Config, ConfigError> {
    if file.len() > MOST_BYTES {
        return Err(ConfigError::TooLong(MOST_BYTES));
    }
    let text = &plain(file)?;
    let wrong = |e: toml::de::Error| ConfigError::Syntax {
        position: position(&e, text),
        message: explain(e.message()),
    };
    let given: toml::Table = text.parse().map_err(wrong)?;
    refuse_removed(&given)?;
    refuse_renamed(&given)?;
    let mut config: Config = toml::from_str(text).map_err(wrong)?;
    // The core has a default of its own, made for published traces; a section without the key would bring it in.
    if !sets_block_tokens(&given) {
        config.scheduler.block_tokens = BLOCK_TOKENS;
    }
    config.validate().map_err(|error| as_written(error, file))?;
    Ok(config)
}

/// Whether a file has nothing that was removed.
///
/// # Errors
/// All that it has of [`REMOVED`].
fn refuse_removed(given: &toml::Table) -> Result<(), ConfigError> {
    let current = toml::Table::try_from(Config::default()).unwrap_or_default();
    removed(given, &current).map_or(Ok(()), |lines| Err(ConfigError::Removed(lines)))
}

/// Whether a file names its policy as this release does.
///
/// # Errors
/// The new name.
fn refuse_renamed(given: &toml::Table) -> Result<(), ConfigError> {
    let policy = given.get("scheduler").and_then(|scheduler| scheduler.get("policy")?.as_str());
    policy.and_then(renamed).map_or(Ok(()), |why| Err(ConfigError::RenamedPolicy(why)))
}

/// The error for a policy's name of an earlier release.
pub fn renamed(policy: &str) -> Option<String> {
    let (old, new) = RENAMED_POLICIES.iter().find(|(old, _)| *old == policy)?;
    Some(format!("the policy {old} is called {new}: write that"))
}

/// The error for all of [`REMOVED`] that a file has and the `current` settings have not.
fn removed(given: &toml::Table, current: &toml::Table) -> Option<String> {
    let found = REMOVED.iter().filter(|(name, _)| has(given, name) && !has(current, name));
    let lines: Vec<String> = found
        .map(|(name, remedy)| match name.contains('.') {
            true => format!("{name} is no longer a setting: {remedy}"),
            false => format!("[{name}] is no longer a section: {remedy}"),
        })
        .collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

/// Whether a file has a section, or a setting `section.key`.
fn has(file: &toml::Table, name: &str) -> bool {
    match name.split_once('.') {
        Some((section, key)) => {
            let section = file.get(section).and_then(toml::Value::as_table);
            section.is_some_and(|section| section.contains_key(key))
        }
        None => file.contains_key(name),
    }
}

/// An error of the parser with its position, without the line itself: the line may hold a secret.
pub fn place(error: &toml::de::Error, text: &str) -> ConfigError {
    ConfigError::Syntax { position: position(error, text), message: error.message().to_owned() }
}

fn position(error: &toml::de::Error, text: &str) -> Option<TextPosition> {
    let before = text.get(..error.span()?.start)?;
    let start = before.rfind('\n').map_or(0, |at| at + 1);
    let (line, column) = (before.matches('\n').count() + 1, before[start..].chars().count() + 1);
    let key = text[start..].lines().next().and_then(|line| line.split_once('=')).map(|(key, _)| key.trim());
    let setting = key.filter(|key| is_setting(key)).map(str::to_owned);
    Some(TextPosition { line, column: Some(column), setting })
}

/// Adds the nearest known key to an error about an unknown one, with its unit or without.
fn explain(error: &str) -> String {
    let quoted: Vec<&str> = error.split('`').skip(1).step_by(2).collect();
    let unknown = error.contains("unknown field") || error.contains("unknown variant");
    let meant = match quoted.split_first() {
        Some((wrong, known)) if unknown => {
            let names = known.iter().flat_map(|name| [Some(*name), short(name).map(|(name, _)| name)]);
            baton_types::nearest(wrong, names.flatten())
        }
        _ => None,
    };
    let error = error.trim_end();
    meant.map_or_else(|| error.to_owned(), |word| format!("{error}\ndid you mean `{word}`?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renamed_policy_is_refused_with_its_new_name_which_is_known() {
        for (old, new) in RENAMED_POLICIES {
            let error =
                parse(&format!("[scheduler]\npolicy = \"{old}\"")).expect_err("an old name").to_string();
            assert!(error.contains("scheduler.policy") && error.contains(new), "{error}");
            assert!(parse(&format!("[scheduler]\npolicy = \"{new}\"")).is_ok(), "{new}");
        }
    }

    #[test]
    fn a_removed_setting_is_named_with_its_remedy_unless_it_is_known() {
        let nothing = toml::Table::new();
        for (file, words) in [
            ("[scheduler]\nttft_margin_permille = 960", "scheduler.classes.target_permille"),
            ("[scheduler]\nageing_us = 5", "scheduler.ageing_us is no longer a setting: promises are kept"),
            ("scheduler.dispatch_ahead_us = 5", "derived from the engine's passes"),
            ("[network]\nmax_predicted_events = 5", "nothing read the predictions"),
        ] {
            let given: toml::Table = file.parse().expect("TOML");
            assert!(removed(&given, &nothing).is_some_and(|error| error.contains(words)), "{file}");
            assert_eq!(removed(&given, &given), None, "{file}: a setting that there is is no removed one");
        }
        for file in ["", "scheduler = 5", "[scheduler]\nseed = 5", "[service]\nageing_us = 5"] {
            assert_eq!(removed(&file.parse().expect("TOML"), &nothing), None, "{file}");
        }
    }
}
