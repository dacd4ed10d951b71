//! `baton policy`: the policy of a running service, shown, changed setting by setting, compared and taken back.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Error, Result, anyhow, bail, ensure};
use http::HeaderValue;
use serde_json::Value;

use super::{out, reference};
use crate::config::{self, ConfigError};
use crate::operator::{OperatorAnswer, OperatorArgs, OperatorClient};

/// Arguments of `baton policy`.
#[derive(clap::Args)]
pub struct PolicyArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Print the policy in force and its revision, as a file may have it
    Show {
        #[command(flatten)]
        service: OperatorArgs,
    },
    /// Change settings: all that are given, or none
    #[command(
        after_help = "A setting has the name that it has in [scheduler]; one of a class is class.NAME.SETTING. \
        docs/config.md has them all.\nWhat was changed by somebody else in the meantime is never overwritten.\n\n\
        Examples:\n  \
        baton policy set class.interactive.ttft=1.5s class.interactive.tbt=50ms\n  \
        baton policy set class.batch.target=99% max_retries=3 --dry-run\n  \
        baton policy set admission=early --url https://10.0.0.5:8080 --ca cert.pem --key OPERATORS_KEY"
    )]
    Set {
        /// What to change, as class.NAME.SETTING=VALUE or SETTING=VALUE
        #[arg(required = true, value_name = "KEY=VALUE")]
        settings: Vec<String>,
        /// Check it and print what would change; change nothing
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        service: OperatorArgs,
    },
    /// Print how a file differs from the policy in force
    Diff {
        /// The TOML file [default: the one that the service was started with, as it is now]
        file: Option<PathBuf>,
        #[command(flatten)]
        service: OperatorArgs,
    },
    /// Put the policy before the last change into force again; once more takes that back
    Rollback {
        #[command(flatten)]
        service: OperatorArgs,
    },
}

/// Runs `baton policy`.
///
/// # Errors
/// With one line for the user: what was refused or did not answer, and the remedy.
pub fn run(args: &PolicyArgs) -> Result<ExitCode> {
    let client = |service: &OperatorArgs| service.client("policy");
    let text = super::runtime(Some(1))?.block_on(async {
        match &args.action {
            Action::Show { service } => show(&client(service)?).await,
            Action::Set { settings, dry_run, service } => set(&client(service)?, settings, *dry_run).await,
            Action::Diff { file, service } => diff(&client(service)?, file.as_deref()).await,
            Action::Rollback { service } => rollback(&client(service)?).await,
        }
    })?;
    out::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The policy in force.
struct PolicyText {
    /// As TOML.
    text: String,
    tag: HeaderValue,
}

impl PolicyText {
    async fn read(client: &OperatorClient) -> Result<Self> {
        let OperatorAnswer { tag, body } = client.within(client.get("/admin/policy")).await?;
        let tag = tag.ok_or_else(|| client.version_mismatch(&"a policy without a revision"))?;
        Ok(Self { text: String::from_utf8_lossy(&body).into_owned(), tag })
    }

    /// Its number.
    fn revision(&self) -> &str {
        let tag = self.tag.to_str().unwrap_or_default().trim_matches('"');
        tag.split_once('-').map_or(tag, |(revision, _)| revision)
    }

    /// The names of its classes, in order.
    fn classes(&self) -> Vec<String> {
        let file: toml::Table = self.text.parse().unwrap_or_default();
        let classes = file.get("scheduler").and_then(|scheduler| scheduler.get("classes"));
        let classes = classes.and_then(toml::Value::as_array).into_iter().flatten();
        classes.filter_map(|class| Some(class.get("name")?.as_str()?.to_owned())).collect()
    }
}

async fn show(client: &OperatorClient) -> Result<String> {
    let now = PolicyText::read(client).await?;
    let mut text = format!("# revision {}\n", now.revision());
    for line in now.text.lines() {
        match line.split_once(" = ") {
            Some((setting, value)) => {
                let (setting, value) = config::readable(setting, value);
                text.push_str(&format!("{setting} = {value}\n"));
            }
            None => text.push_str(&format!("{line}\n")),
        }
    }
    Ok(text)
}

async fn set(client: &OperatorClient, settings: &[String], dry_run: bool) -> Result<String> {
    let now = PolicyText::read(client).await?;
    let new = edited(&now.text, settings)?;
    let checked = client.within(client.post("/admin/policy/check", &new, None)).await?;
    let (changes, _) = changes(client, &checked)?;
    let text = in_words(&changes, &now.classes());
    let revision = now.revision();
    if changes.is_empty() {
        return Ok(format!("nothing changes: revision {revision} has these values\n"));
    }
    if dry_run {
        return Ok(format!("{text}valid; nothing was changed, revision {revision} stays in force\n"));
    }
    let applied = client.within(client.post("/admin/policy", &new, Some(&now.tag))).await?;
    let (_, revision) = self::changes(client, &applied)?;
    Ok(format!("{text}revision {revision} is in force; 'baton policy rollback' takes this back\n"))
}

async fn diff(client: &OperatorClient, file: Option<&Path>) -> Result<String> {
    let now = PolicyText::read(client).await?;
    let text = match file {
        None => String::new(),
        Some(path) => {
            let (text, _) = config::read(path)?;
            crate::policy::to_share(&text).with_context(|| format!("config {}", path.display()))?
        }
    };
    let answer = client.within(client.post("/admin/policy/diff", &text, None)).await?;
    let (changes, _) = changes(client, &answer)?;
    let revision = now.revision();
    if changes.is_empty() {
        return Ok(format!("nothing differs from revision {revision}, which is in force\n"));
    }
    let text = in_words(&changes, &now.classes());
    Ok(format!("{text}on the left revision {revision}, which is in force; on the right the file\n"))
}

async fn rollback(client: &OperatorClient) -> Result<String> {
    let now = PolicyText::read(client).await?;
    let answer = client.within(client.post("/admin/policy/rollback", "", Some(&now.tag))).await?;
    let (changes, revision) = changes(client, &answer)?;
    let text = in_words(&changes, &now.classes());
    Ok(format!("{text}revision {revision} is in force; 'baton policy rollback' takes this back\n"))
}

/// The changes that an answer lists, and the revision in force after them, if it says.
fn changes(client: &OperatorClient, answer: &OperatorAnswer) -> Result<(Vec<String>, u64)> {
    let json: Value = serde_json::from_slice(&answer.body).map_err(|e| client.version_mismatch(&e))?;
    let lines = json["changed"].as_array().into_iter().flatten();
    let lines = lines.filter_map(Value::as_str).map(str::to_owned).collect();
    Ok((lines, json["revision"].as_u64().unwrap_or(0)))
}

/// Changes under the names that [`set`] takes, with units.
fn in_words(changes: &[String], classes: &[String]) -> String {
    changes.iter().map(|line| change_in_words(line, classes).unwrap_or_else(|| line.clone()) + "\n").collect()
}

fn change_in_words(line: &str, classes: &[String]) -> Option<String> {
    let (key, values) = line.strip_prefix("scheduler.")?.split_once(": ")?;
    let (values, note) =
        values.split_once(" (").map_or((values, String::new()), |(v, n)| (v, format!(" ({n}")));
    let (old, new) = values.split_once(" -> ")?;
    let (place, setting) = match key.strip_prefix("classes[").and_then(|rest| rest.split_once("].")) {
        Some((at, setting)) => (format!("class.{}.", classes.get(at.parse::<usize>().ok()?)?), setting),
        None => (String::new(), key),
    };
    let ((short, old), (name, new)) = (config::readable(setting, old), config::readable(setting, new));
    // Where one of the two is no number, the other one has the unit.
    let name = if short.len() < name.len() { short } else { name };
    Some(format!("{place}{name}: {old} -> {new}{note}"))
}

/// A policy with some settings changed.
///
/// # Errors
/// Names the setting that is wrong, and what to give.
fn edited(text: &str, settings: &[String]) -> Result<String> {
    let mut file: toml::Table = text.parse().context("policy: the service's is no TOML")?;
    for given in settings {
        edit(&mut file, given).with_context(|| format!("policy set {given}"))?;
    }
    toml::to_string(&file).context("policy")
}

fn edit(file: &mut toml::Table, given: &str) -> Result<()> {
    let (key, value) =
        given.split_once('=').context("give KEY=VALUE, such as class.interactive.ttft=1.5s")?;
    let (key, value) = (key.trim(), value.trim());
    let scheduler = file.get_mut("scheduler").and_then(toml::Value::as_table_mut);
    let scheduler = scheduler.context("the service's policy has no [scheduler]")?;
    let (setting, class) = match key.strip_prefix("class.") {
        None => (key.strip_prefix("scheduler.").unwrap_or(key), None),
        Some(rest) => {
            let (class, setting) =
                rest.rsplit_once('.').context("give class.NAME.SETTING, such as class.interactive.ttft")?;
            (setting, Some(class))
        }
    };
    let section = if class.is_some() { "[[scheduler.classes]]" } else { "[scheduler]" };
    known(section, key.strip_suffix(setting).unwrap_or_default(), setting)?;
    let table = match class {
        Some(class) => class_of(scheduler, class)?,
        None => scheduler,
    };
    let named = class.filter(|_| setting != "name").map(|class| toml::Value::from(class).to_string());
    let named = named.map_or_else(String::new, |name| format!("name = {name}\n"));
    let file = format!("{section}\n{named}{setting} = {}\n", literal(value));
    let plain = config::plain(&file).map_err(without_place)?;
    config::parse(&file).map_err(without_place)?;
    let (setting, value) = given_in(&plain)?;
    table.insert(setting, value);
    Ok(())
}

/// The last setting of a file of one section.
fn given_in(plain: &str) -> Result<(String, toml::Value)> {
    let line = plain.lines().last().unwrap_or_default();
    let one: toml::Table = line.parse().map_err(|e: toml::de::Error| anyhow!("{}", e.message()))?;
    one.into_iter().next().context("give a value")
}

/// A value as TOML: what is none by itself is a text.
fn literal(value: &str) -> String {
    let one = format!("value = {value}").parse::<toml::Table>().is_ok_and(|table| table.len() == 1);
    if one && !value.contains('\n') { value.to_owned() } else { toml::Value::from(value).to_string() }
}

/// An error without the place in a file that nobody wrote.
fn without_place(error: ConfigError) -> Error {
    match error {
        ConfigError::Syntax { message, .. } => Error::msg(message),
        other => other.into(),
    }
}

fn class_of<'t>(scheduler: &'t mut toml::Table, class: &str) -> Result<&'t mut toml::Table> {
    let classes = scheduler.get_mut("classes").and_then(toml::Value::as_array_mut);
    let (mut names, mut found) = (Vec::new(), None);
    for table in classes.into_iter().flatten().filter_map(toml::Value::as_table_mut) {
        let name = table.get("name").and_then(toml::Value::as_str).unwrap_or_default().to_owned();
        if name == class {
            found = Some(table);
        }
        names.push(name);
    }
    found.with_context(|| format!("there is no service class '{class}'; there are: {}", names.join(", ")))
}

/// Whether a section has that setting.
///
/// # Errors
/// The nearest that it has.
fn known(section: &str, place: &str, setting: &str) -> Result<()> {
    ensure!(setting != "classes", "classes are changed setting by setting: give class.NAME.SETTING=VALUE");
    let sections = reference::sections()?;
    let settings = sections.iter().find(|known| known.heading == section).map(|known| &known.settings);
    let names = settings.into_iter().flatten().map(|setting| setting.name.as_str());
    let names: Vec<&str> =
        names.flat_map(|name| [Some(name), config::short(name).map(|s| s.0)]).flatten().collect();
    if names.contains(&setting) {
        return Ok(());
    }
    let meant = baton_types::nearest(setting, names);
    let remedy = meant.map_or_else(
        || "'baton policy show' has all that there are".to_owned(),
        |meant| format!("did you mean {place}{meant}?"),
    );
    bail!("there is no setting '{setting}' in {section}; {remedy}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: &str = "[scheduler]\nmax_retries = 2\n\n[[scheduler.classes]]\nname = \"fast.eu\"\nttft_us = 2000000\n\n\
                       [[scheduler.classes]]\nname = \"batch\"\nttft_us = 60000000\n";

    fn changed(settings: &[&str]) -> Result<config::Config> {
        let settings: Vec<String> = settings.iter().map(|&text| text.to_owned()).collect();
        Ok(config::parse(&edited(NOW, &settings)?)?)
    }

    #[test]
    fn settings_are_changed_under_any_of_their_names_and_nothing_else_is() {
        let before = config::parse(NOW).expect("valid").scheduler;
        let after = changed(&[
            "class.fast.eu.ttft=1.5s",
            "class.fast.eu.target=99%",
            "class.batch.tbt_us = 60_000",
            "class.batch.sheddable=false",
            "scheduler.max_retries=3",
            "admission=early",
            "shadow=[\"slo\"]",
            "mixed_step=0.8",
        ])
        .expect("valid")
        .scheduler;
        let mut expected = before;
        (expected.classes[0].ttft_us, expected.classes[0].target_permille) = (1_500_000, 990);
        (expected.classes[1].tbt_us, expected.classes[1].sheddable) = (60_000, false);
        (expected.max_retries, expected.mixed_step_permille) = (3, 800);
        expected.admission = baton_scheduler::AdmissionMode::Early;
        expected.shadow = vec![baton_scheduler::AdmissionMode::Slo];
        assert_eq!(after, expected);
        let renamed = changed(&["class.batch.name=night"]).expect("valid").scheduler;
        assert_eq!(renamed.classes[1].name, "night");
    }

    #[test]
    fn what_is_wrong_is_named_with_the_remedy() {
        for (given, words) in [
            ("class.batch.ttf=1s", "did you mean class.batch.ttft?"),
            ("class.batch.tttf=1s", "did you mean class.batch.ttft?"),
            ("class.batch.target=99", "target = 99 is outside 0.5..=0.999"),
            ("max_retrys=1", "did you mean max_retries?"),
            ("scheduler.max_retrys=1", "did you mean scheduler.max_retries?"),
            ("service.listen=x", "there is no setting 'service.listen' in [scheduler]"),
            ("class.gold.ttft=1s", "there is no service class 'gold'; there are: fast.eu, batch"),
            ("class.batch", "give KEY=VALUE"),
            ("class.batch=1", "give class.NAME.SETTING"),
            ("classes=[]", "setting by setting"),
            ("class.batch.ttft=fast", "give a time with its unit"),
            ("class.batch.ttft=3", "give a time with its unit"),
            ("class.batch.ttft_us=2s", "invalid type: string \"2s\", expected u64"),
            ("class.batch.ttft=1ms 1us", "a setting"),
            ("class.batch.ttft=1us", "classes[batch].ttft = \"0.001ms\" is outside \"1ms\"..="),
            ("class.batch.ttft_us=1", "classes[batch].ttft_us = 1 is outside 1000..="),
            ("class.batch.target=120%", "classes[batch].target = 1.2 is outside"),
            ("policy=moncake", "did you mean `mooncake`?"),
            ("ageing=1s", "there is no setting 'ageing'"),
            ("max_retries=1\nseed = 5", "invalid type"),
        ] {
            match changed(&[given]) {
                Err(error) => {
                    let error = format!("{error:#}");
                    assert!(error.starts_with(&format!("policy set {given}: ")), "{error}");
                    assert!(error.contains(words) && !error.contains("TOML line"), "{given}: {error}");
                }
                Ok(config) => assert_eq!((words, config.scheduler.classes[1].ttft_us), ("a setting", 1001)),
            }
        }
    }

    #[test]
    fn changes_are_shown_under_the_names_that_are_typed() {
        let classes = ["a".to_owned(), "b".to_owned()];
        for (line, words) in [
            ("scheduler.classes[1].ttft_us: 2000000 -> 1500000", "class.b.ttft: \"2s\" -> \"1.5s\""),
            ("scheduler.classes[1].e2e_us: nothing -> 60000000", "class.b.e2e: nothing -> \"60s\""),
            ("scheduler.seed: 1 -> 2 (takes a restart)", "seed: 1 -> 2 (takes a restart)"),
            ("scheduler.classes[2].name: nothing -> \"c\"", "scheduler.classes[2].name: nothing -> \"c\""),
            ("service.drain_us: 1 -> 2", "service.drain_us: 1 -> 2"),
            ("the cluster's policy is version 7", "the cluster's policy is version 7"),
        ] {
            assert_eq!(in_words(&[line.to_owned()], &classes), format!("{words}\n"));
        }
    }
}
