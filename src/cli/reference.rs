//! The reference of every setting, made from the schema of the file, which is derived from the settings and their
//! comments, so that it cannot drift. A test compares `docs/config.md` with it.

use std::fmt::Write as _;

use serde_json::Value;

use crate::config::Config;

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
pub fn sections() -> Result<Vec<Section>, String> {
    let schema = super::schema::schema()?;
    let text = toml::to_string(&Config::default()).map_err(|e| e.to_string())?;
    let written = written(&text);
    let mut sections = Vec::new();
    for (heading, names) in &written {
        let path = heading.trim_matches(['[', ']']);
        let section = path.split('.').fold(&schema, |at, key| entry(&at["properties"][key]));
        let lists = properties(section).filter(|(name, of)| !names.contains(name) && of["items"].is_object());
        let lists: Vec<&str> = lists.map(|(name, _)| name).collect();
        sections.push(Section::new(heading, section, names.iter().chain(&lists)));
        for (name, list) in properties(section) {
            let heading = format!("[[{path}.{name}]]");
            if list["items"]["properties"].is_object() && written.iter().all(|(known, _)| *known != heading) {
                let needed = needed(entry(list));
                let others =
                    properties(entry(list)).map(|(name, _)| name).filter(|name| !needed.contains(name));
                let names: Vec<&str> = needed.iter().copied().chain(others).collect();
                sections.push(Section::new(&heading, entry(list), names.iter()));
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
    fn new<'a>(heading: &str, schema: &Value, names: impl Iterator<Item = &'a &'a str>) -> Self {
        let top = heading.trim_matches(['[', ']']).split('.').next().unwrap_or_default();
        let needed = needed(schema);
        let settings =
            names.map(|name| Setting::new(name, &schema["properties"][*name], needed.contains(name)));
        Self {
            heading: heading.to_owned(),
            simulated: SIMULATED.contains(&top),
            settings: settings.collect(),
        }
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
        }
    }
}

/// A comment's lines as one.
fn on_one_line(text: &Value) -> String {
    text.as_str().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The page.
pub fn page() -> Result<String, String> {
    let mut text = String::from(
        "# Settings\n\nMade by `baton config reference > docs/config.md` from the comments beside the settings; a test compares. \
         One TOML file, all of it optional; unknown keys are refused with the nearest known one. `baton config check FILE` \
         says whether a file is valid, `baton config explain FILE` prints every setting in force.\n\n\
         A setting that ends in `_us`, `_bytes` or `_permille` may be written without that end, with a unit or as a share: \
         `ttft = \"2s\"` is `ttft_us = 2000000`, `max_body = \"64MiB\"` is `max_body_bytes = 67108864`, and \
         `target = 0.995` or `target = \"99.5%\"` is `target_permille = 995`.\n",
    );
    for Section { heading, simulated, settings } in sections()? {
        let note = if simulated { "Read by the simulator alone.\n\n" } else { "" };
        let _ = write!(text, "\n## `{heading}`\n\n{note}| setting | default | meaning |\n|---|---|---|\n");
        for Setting { name, default, meaning, .. } in &settings {
            let _ = writeln!(text, "| `{name}` | {default} | {} |", meaning.replace('|', "\\|"));
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
        assert!(page.contains("| `tenant` | needed |") && page.contains("| `classes` | `[]` |"));
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
    // Sixty of the service as it was first planned; parsers of answers and durable tiers have brought some more.
    fn a_service_has_at_most_sixty_two_settings() {
        let sections = sections().expect("sections");
        let count = |simulator: bool| -> usize {
            let sections = sections.iter().filter(|section| section.simulated == simulator);
            sections.map(|section| section.settings.len()).sum()
        };
        assert!(count(false) <= 62, "{} settings of the service: the budget is 62", count(false));
        assert!(count(true) <= 40, "{} settings of the simulator alone: the budget is 40", count(true));
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
