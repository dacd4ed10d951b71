//! The reference of every setting, made from the doc comments beside the settings themselves and
//! from their defaults, so that it cannot drift. A test compares `docs/config.md` with it.

use std::fmt::Write as _;

use baton_scheduler::PolicyName;
use baton_store::Eviction;

use crate::config::Config;

/// A section of the file: its heading, the source that declares it, the struct, where its default is.
pub struct Section {
    pub heading: &'static str,
    pub source: &'static str,
    pub name: &'static str,
    pub path: &'static [&'static str],
}

const OWN: &str = include_str!("../config.rs");
const SIMULATED_ONLY: &str = include_str!("../config/simulated.rs");
const SCHEDULER: &str = include_str!("../../scheduler/src/config.rs");
const CLASSES: &str = include_str!("../../scheduler/types/src/slo.rs");

/// Every section: first those of the service, which the simulator reads too, then the simulator's own; parents before
/// their children.
pub const SECTIONS: [Section; 11] = [
    Section { heading: "[scheduler]", source: SCHEDULER, name: "SchedulerConfig", path: &["scheduler"] },
    Section {
        heading: "[[scheduler.classes]]",
        source: CLASSES,
        name: "SloClass",
        path: &["scheduler", "classes"],
    },
    Section { heading: "[store]", source: OWN, name: "StoreSection", path: &["store"] },
    Section { heading: "[service]", source: OWN, name: "ServiceConfig", path: &["service"] },
    Section { heading: "[[service.api_keys]]", source: OWN, name: "ApiKey", path: &["service", "api_keys"] },
    Section { heading: "[router]", source: OWN, name: "RouterSection", path: &["router"] },
    Section { heading: "[cluster]", source: SIMULATED_ONLY, name: "ClusterConfig", path: &["cluster"] },
    Section {
        heading: "[[cluster.pools]]",
        source: SIMULATED_ONLY,
        name: "PoolConfig",
        path: &["cluster", "pools"],
    },
    Section { heading: "[network]", source: SIMULATED_ONLY, name: "NetworkSection", path: &["network"] },
    Section { heading: "[clients]", source: SIMULATED_ONLY, name: "ClientsConfig", path: &["clients"] },
    Section { heading: "[faults]", source: SIMULATED_ONLY, name: "FaultsConfig", path: &["faults"] },
];

/// Top-level sections that the simulator alone reads.
pub const SIMULATED: [&str; 4] = ["cluster", "network", "clients", "faults"];

/// One setting.
#[derive(Debug, Default, PartialEq)]
pub struct Setting {
    pub name: String,
    /// What its comment says.
    pub meaning: String,
    /// A list that may be left out, where no default has an entry with it.
    pub optional: bool,
}

/// The fields of a struct with their comments.
pub fn fields(source: &str, name: &str) -> Vec<Setting> {
    let head = format!("pub struct {name} {{");
    let body = source.split_once(&head).map_or("", |(_, rest)| rest);
    let body = body.split_once("\n}").map_or(body, |(body, _)| body);
    let (mut found, mut next) = (Vec::new(), Setting::default());
    for line in body.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("///") {
            next.meaning.push_str(text);
        } else if line == "#[serde(default)]" {
            next.optional = true;
        } else if let Some((field, _)) = line.strip_prefix("pub ").and_then(|l| l.split_once(':')) {
            let meaning = next.meaning.trim().to_owned();
            found.push(Setting { name: field.to_owned(), meaning, ..next });
            next = Setting::default();
        }
    }
    found
}

/// The value at a path, through the first entry of any list on the way.
fn at<'a>(value: &'a toml::Value, path: &[&str]) -> Option<&'a toml::Value> {
    path.iter().try_fold(value, |value, key| {
        let next = value.get(key)?;
        next.as_array().map_or(Some(next), |list| list.first())
    })
}

/// The default of a setting.
pub fn default_of<'a>(defaults: &'a toml::Value, section: &Section, name: &str) -> Option<&'a toml::Value> {
    at(defaults, section.path)?.get(name)
}

/// What the words of a setting mean, where a section has one whose words are policies.
pub fn policies(heading: &str) -> Option<(&'static str, Vec<(&'static str, &'static str)>)> {
    match heading {
        "[scheduler]" => Some(("policy", PolicyName::ALL.map(|p| (p.name(), p.about())).to_vec())),
        "[store]" => Some(("eviction", Eviction::ALL.map(|e| (e.name(), e.about())).to_vec())),
        _ => None,
    }
}

/// The page.
pub fn page() -> Result<String, String> {
    let defaults = toml::Value::try_from(Config::default()).map_err(|e| e.to_string())?;
    let mut text = String::from(
        "# Settings\n\nMade by `baton config reference > docs/config.md` from the comments beside the settings; a test compares. \
         One TOML file, all of it optional; unknown keys are refused with the nearest known one. `baton config check FILE` \
         says whether a file is valid, `baton config explain FILE` prints every setting in force.\n",
    );
    for section in &SECTIONS {
        let simulated = SIMULATED.contains(&section.path[0]);
        let note = if simulated { "Read by the simulator alone.\n\n" } else { "" };
        let _ = write!(
            text,
            "\n## `{}`\n\n{note}| setting | default | meaning |\n|---|---|---|\n",
            section.heading
        );
        for Setting { name, meaning, optional } in fields(section.source, section.name) {
            let default = match default_of(&defaults, section, &name) {
                Some(toml::Value::Array(list)) if list.is_empty() => "`[]`".to_owned(),
                Some(toml::Value::Array(_) | toml::Value::Table(_)) => "see below".to_owned(),
                Some(value) => format!("`{value}`"),
                None if optional => "`[]`".to_owned(),
                None => "needed".to_owned(),
            };
            let _ = writeln!(text, "| `{name}` | {default} | {} |", meaning.replace('|', "\\|"));
        }
        if let Some((setting, words)) = policies(section.heading) {
            let _ = write!(text, "\n| `{setting}` | meaning |\n|---|---|\n");
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
        assert!(!page.contains("| – |"), "a setting without a default: {page}");
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
        for section in &SECTIONS {
            for Setting { name, meaning, .. } in fields(section.source, section.name) {
                assert!(!meaning.is_empty(), "{} {name} has no comment", section.heading);
            }
        }
    }

    #[test]
    // Sixty of the service as it was first planned; parsers of answers and durable tiers have brought some more.
    fn a_service_has_at_most_sixty_two_settings() {
        let simulated = |s: &&Section| SIMULATED.contains(&s.path[0]);
        let count = |simulator: bool| -> usize {
            let sections = SECTIONS.iter().filter(|s| simulated(s) == simulator);
            sections.map(|s| fields(s.source, s.name).len()).sum()
        };
        assert!(count(false) <= 62, "{} settings of the service: the budget is 62", count(false));
        assert!(count(true) <= 38, "{} settings of the simulator alone: the budget is 38", count(true));
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
