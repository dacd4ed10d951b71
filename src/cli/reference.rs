//! The reference of every setting, made from the schema of the file, which is derived from the settings and their
//! comments, so that it cannot drift. A test compares `docs/config.md` with it.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, anyhow, ensure};
use baton_types::Secret;
use serde_json::Value;

use crate::config::{ApiKey, ClassRule, Config, ServiceConfig};
use crate::policy;

/// Top-level sections that the simulator alone reads.
const SIMULATED: [&str; 4] = ["cluster", "network", "clients", "faults"];

/// A section of the file.
pub struct Section {
    /// `[section]`, or `[[section]]` where it is a list.
    pub heading: String,
    /// Whether the simulator alone reads it.
    pub simulated: bool,
    pub settings: Vec<Setting>,
}

/// One setting.
pub struct Setting {
    pub name: String,
    /// As it stands in the table.
    default: String,
    /// The text of its comment.
    pub meaning: String,
    /// The words that it takes, and what each means; none where it takes anything else.
    pub words: Vec<(String, String)>,
    /// Whether a service takes on another value while it serves.
    pub hot: ReloadMode,
}

/// Whether a service takes on another value of a setting while it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReloadMode {
    /// Every value.
    Always,
    /// Some values.
    Sometimes,
    /// None: it is read at the start.
    Never,
}

impl ReloadMode {
    const fn name(self) -> &'static str {
        match self {
            Self::Always => "yes",
            Self::Sometimes => "some",
            Self::Never => "no",
        }
    }

    /// Asks what decides about changes of a running service.
    fn of(heading: &str, setting: &str, words: &[(String, String)]) -> Result<Self> {
        let old = varied(heading, setting, None)?;
        let others = others(heading, setting, words)?;
        let taken = |new: &&Config| {
            let changes = policy::changes(&old, new);
            !changes.is_empty() && policy::cold(&old, new, &changes).is_empty()
        };
        Ok(match others.iter().filter(taken).count() {
            0 => Self::Never,
            all if all == others.len() => Self::Always,
            _ => Self::Sometimes,
        })
    }
}

/// The defaults, with an entry in each list of the service.
pub fn base() -> Config {
    let key = ApiKey { key: Secret::default(), tenant: "one".into(), classes: Vec::new() };
    let rule = ClassRule { tenant: Some("one".into()), class: "default".into(), ..ClassRule::default() };
    let service = ServiceConfig { api_keys: vec![key], class_rules: vec![rule], ..ServiceConfig::default() };
    Config { service, ..Config::default() }
}

/// That with another value of a setting.
fn varied(heading: &str, setting: &str, value: Option<toml::Value>) -> Result<Config> {
    let mut file = toml::Table::try_from(base())?;
    let place = heading.trim_matches(['[', ']']).split('.');
    let mut section = Some(&mut file);
    for name in place {
        section = section.and_then(|section| match section.get_mut(name)? {
            toml::Value::Array(list) => list.first_mut()?.as_table_mut(),
            value => value.as_table_mut(),
        });
    }
    let section = section.with_context(|| format!("there is no {heading}"))?;
    section.extend(value.map(|value| (setting.to_owned(), value)));
    file.try_into().map_err(|e: toml::de::Error| anyhow!("{heading} {setting}: {}", e.message()))
}

/// Configurations with other values of one setting, as different as its kind allows; they need not be valid.
pub fn others(heading: &str, setting: &str, words: &[(String, String)]) -> Result<Vec<Config>> {
    let now = toml::Value::try_from(varied(heading, setting, None)?)?;
    let mut place = heading.trim_matches(['[', ']']).split('.').chain([setting]);
    let now = place.try_fold(&now, |value, name| {
        let value = value.get(name)?;
        // Of a list of tables, its first entry.
        let list = value.as_array().filter(|_| name != setting);
        Some(list.and_then(|list| list.first()).unwrap_or(value))
    });
    let values: Vec<toml::Value> = match now {
        _ if !words.is_empty() => words.iter().map(|(word, _)| word.as_str().into()).collect(),
        Some(toml::Value::Integer(n)) => vec![(n + 1).into(), (n - 1).into(), (n * 2).into(), (n / 2).into()],
        Some(toml::Value::Float(x)) => vec![(x * 2.0).into(), (x / 2.0).into()],
        Some(toml::Value::Boolean(is)) => vec![(!is).into()],
        Some(toml::Value::String(_)) => ["other", "127.0.0.1:7"].map(toml::Value::from).to_vec(),
        Some(toml::Value::Array(list)) => match list.first() {
            Some(first) => vec![toml::Value::Array(vec![first.clone(), first.clone()])],
            None => vec![vec!["default"].into(), vec!["slo"].into()],
        },
        _ => Vec::new(),
    };
    let same = varied(heading, setting, None)?;
    let varied: Vec<Config> =
        values.into_iter().filter_map(|value| varied(heading, setting, Some(value)).ok()).collect();
    let varied: Vec<Config> = varied.into_iter().filter(|config| *config != same).collect();
    ensure!(!varied.is_empty(), "{heading} {setting}: no other value is known for it");
    Ok(varied)
}

/// A section of the file of defaults: its heading and the names of its settings.
type SettingsSection<'a> = (&'a str, Vec<&'a str>);

/// The sections as they are written: the schema sorts by name, the file keeps together what belongs together.
fn written(text: &str) -> Vec<SettingsSection<'_>> {
    let mut found: Vec<SettingsSection<'_>> = Vec::new();
    for line in text.lines() {
        if line.starts_with('[') {
            found.push((line, Vec::new()));
        } else if let (Some((name, _)), Some((_, names))) = (line.split_once(" = "), found.last_mut()) {
            names.push(name);
        }
    }
    // Of a list, its first entry.
    let mut seen = std::collections::HashSet::new();
    found.retain(|(heading, _)| seen.insert(*heading));
    found
}

/// Every section, in the order of the file; lists that are empty there come after the section that they are in.
pub fn sections() -> Result<Vec<Section>> {
    let schema = super::schema::schema()?;
    let text = toml::to_string(&Config::default())?;
    let written = written(&text);
    let mut sections = Vec::new();
    for (heading, names) in &written {
        let path = heading.trim_matches(['[', ']']);
        let section = path.split('.').fold(&schema, |at, key| entry(&at["properties"][key]));
        let lists = properties(section).filter(|(name, of)| !names.contains(name) && of["items"].is_object());
        let lists: Vec<&str> = lists.map(|(name, _)| name).collect();
        sections.push(Section::new(heading, section, names.iter().chain(&lists))?);
        for (name, list) in properties(section) {
            let heading = format!("[[{path}.{name}]]");
            if list["items"]["properties"].is_object() && written.iter().all(|(known, _)| *known != heading) {
                let needed = needed(entry(list));
                let others =
                    properties(entry(list)).map(|(name, _)| name).filter(|name| !needed.contains(name));
                let names: Vec<&str> = needed.iter().copied().chain(others).collect();
                sections.push(Section::new(&heading, entry(list), names.iter())?);
            }
        }
    }
    Ok(sections)
}

/// The schema that declares a section's settings: its own, or that of a list's entry.
fn entry(schema: &Value) -> &Value {
    if schema["items"]["properties"].is_object() { &schema["items"] } else { schema }
}

fn properties(schema: &Value) -> impl Iterator<Item = (&str, &Value)> {
    schema["properties"].as_object().into_iter().flatten().map(|(name, of)| (name.as_str(), of))
}

fn needed(schema: &Value) -> Vec<&str> {
    schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

impl Section {
    fn new<'a>(heading: &str, schema: &Value, names: impl Iterator<Item = &'a &'a str>) -> Result<Self> {
        let top = heading.trim_matches(['[', ']']).split('.').next().unwrap_or_default();
        let needed = needed(schema);
        let simulated = SIMULATED.contains(&top);
        let settings = names.map(|name| {
            let setting = Setting::new(name, &schema["properties"][*name], needed.contains(name));
            let hot =
                if simulated { Ok(ReloadMode::Never) } else { ReloadMode::of(heading, name, &setting.words) };
            Ok(Setting { hot: hot?, ..setting })
        });
        Ok(Self { heading: heading.to_owned(), simulated, settings: settings.collect::<Result<_>>()? })
    }
}

impl Setting {
    fn new(name: &str, schema: &Value, needed: bool) -> Self {
        let words = schema["oneOf"].as_array().into_iter().flatten();
        Self {
            name: name.to_owned(),
            default: match &schema["default"] {
                _ if needed => "needed".to_owned(),
                Value::Array(list) if list.iter().any(Value::is_object) => "see below".to_owned(),
                default => format!("`{default}`"),
            },
            meaning: on_one_line(&schema["description"]),
            words: words
                .map(|word| (on_one_line(&word["const"]), on_one_line(&word["description"])))
                .collect(),
            hot: ReloadMode::Never,
        }
    }
}

/// A comment's lines as one.
fn on_one_line(text: &Value) -> String {
    text.as_str().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The page.
pub fn page() -> Result<String> {
    let mut text = String::from(
        "# Settings\n\nMade by `baton config reference > docs/config.md` from the comments beside the settings; a test compares. \
         One TOML file, all of it optional; unknown keys are refused with the nearest known one. `baton config check FILE` \
         says whether a file is valid, `baton config explain FILE` prints every setting in force.\n\n\
         A setting that ends in `_us`, `_bytes` or `_permille` may be written without that end, with a unit or as a share: \
         `ttft = \"2s\"` is `ttft_us = 2000000`, `max_body = \"64MiB\"` is `max_body_bytes = 67108864`, and \
         `target = 0.995` or `target = \"99.5%\"` is `target_permille = 995`.\n\n\
         Hot: whether a running service takes on another value, when the file changes, on SIGHUP, or (all of \
         `[scheduler]`) with `baton policy set`: `yes`, `no` (restart it), or `some` values: another policy whose requests \
         wait in the same place.\n",
    );
    for Section { heading, simulated, settings } in sections()? {
        let (note, head) = match simulated {
            true => ("Read by the simulator alone.\n\n", "| setting | default | meaning |\n|---|---|---|\n"),
            false => ("", "| setting | default | hot | meaning |\n|---|---|---|---|\n"),
        };
        let _ = write!(text, "\n## `{heading}`\n\n{note}{head}");
        for Setting { name, default, meaning, hot, .. } in &settings {
            let hot = if simulated { String::new() } else { format!(" {} |", hot.name()) };
            let _ = writeln!(text, "| `{name}` | {default} |{hot} {} |", meaning.replace('|', "\\|"));
        }
        for Setting { name, words, .. } in settings.iter().filter(|setting| !setting.words.is_empty()) {
            let _ = write!(text, "\n| `{name}` | meaning |\n|---|---|\n");
            words.iter().for_each(|(word, about)| text.push_str(&format!("| `{word}` | {about} |\n")));
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_described_with_its_default() {
        let page = page().expect("the defaults are TOML");
        assert!(page.contains("| `tenant` | needed | yes |") && page.contains("| `classes` | `[]` | yes |"));
        assert!(!page.contains("| `null` |"), "a setting without a default: {page}");
        for setting in [
            "balancing_threshold_permille",
            "pipeline_nodes",
            "ttft_us",
            "handoff_weight",
            "retries",
            "eviction",
        ] {
            assert!(page.contains(&format!("| `{setting}` | `")), "{setting} is missing");
        }
        for section in sections().expect("sections") {
            for Setting { name, meaning, .. } in section.settings {
                assert!(!meaning.is_empty(), "{} {name} has no comment", section.heading);
            }
        }
    }

    #[test]
    // Sixty of the service and forty of the simulator as they were first planned; parsers of answers, durable tiers, pools that
    // may change their role and engines that run a limited number of requests have brought some more.
    fn a_service_has_at_most_sixty_two_settings() {
        let sections = sections().expect("sections");
        let count = |simulator: bool| -> usize {
            let sections = sections.iter().filter(|section| section.simulated == simulator);
            sections.map(|section| section.settings.len()).sum()
        };
        assert!(count(false) <= 61, "{} settings of the service: the budget is 61", count(false));
        assert!(count(true) <= 43, "{} settings of the simulator alone: the budget is 43", count(true));
    }

    #[test]
    fn the_committed_page_is_this_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/config.md");
        let committed = std::fs::read_to_string(path).expect("docs/config.md is in the tree");
        assert_eq!(
            committed,
            page().expect("the defaults are TOML"),
            "run: baton config reference > docs/config.md"
        );
    }
}
