//! What a changed configuration file changes, and whether that can be done while serving.
//!
//! Only `[scheduler]` may change then: its settings are handed to the conductor between two
//! decisions, and the conductor has the last word about what live requests rely on. Every other
//! section describes what was built at the start.

use toml::Value;

use crate::config::Config;

/// One setting that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Where it is in the file, such as `scheduler.classes[0].ttft_us`.
    pub key: String,
    /// Its value before, as in TOML; empty where it is new.
    pub old: String,
    /// Its value now; empty where it is gone.
    pub new: String,
}

impl Change {
    /// Whether it can be made while serving, as far as the file alone tells.
    pub fn is_live(&self) -> bool {
        self.key.starts_with("scheduler.")
    }
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = |value: &str| if value.is_empty() { "nothing".to_owned() } else { value.to_owned() };
        write!(f, "{}: {} -> {}", self.key, shown(&self.old), shown(&self.new))
    }
}

/// Every setting in which `new` differs from `old`, sorted by name within each section.
pub fn changes(old: &Config, new: &Config) -> Vec<Change> {
    let value = |c: &Config| Value::try_from(c).expect("a configuration came from TOML, so it is TOML");
    let mut found = Vec::new();
    compare("", Some(&value(old)), Some(&value(new)), &mut found);
    found
}

fn compare(key: &str, old: Option<&Value>, new: Option<&Value>, found: &mut Vec<Change>) {
    if old == new {
        return;
    }
    let table = |value: Option<&Value>| value.is_none_or(Value::is_table);
    // Lists of tables are compared entry by entry, plain lists as one value.
    let list =
        |v: Option<&Value>| v.is_none_or(|v| v.as_array().is_some_and(|l| l.iter().all(Value::is_table)));
    if table(old) && table(new) {
        let keys = |v: Option<&Value>| {
            v.and_then(Value::as_table).into_iter().flat_map(toml::Table::keys).cloned().collect::<Vec<_>>()
        };
        let mut all = keys(new);
        all.extend(keys(old).into_iter().filter(|k| new.is_none_or(|n| n.get(k).is_none())));
        for name in all {
            let path = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
            compare(&path, old.and_then(|v| v.get(&name)), new.and_then(|v| v.get(&name)), found);
        }
    } else if list(old) && list(new) {
        let count = |v: Option<&Value>| v.and_then(Value::as_array).map_or(0, Vec::len);
        for at in 0..count(old).max(count(new)) {
            compare(&format!("{key}[{at}]"), old.and_then(|v| v.get(at)), new.and_then(|v| v.get(at)), found);
        }
    } else {
        let shown = |value: Option<&Value>| value.map(Value::to_string).unwrap_or_default();
        found.push(Change { key: key.to_owned(), old: shown(old), new: shown(new) });
    }
}

/// Whether a service under `old` can take on `new` without a restart, whatever is live.
///
/// # Errors
/// Names each setting that takes a restart, with both values.
pub fn can_reload(old: &Config, new: &Config) -> Result<(), String> {
    new.validate()?;
    let changes = changes(old, new);
    let fixed: Vec<String> = changes.iter().filter(|c| !c.is_live()).map(Change::to_string).collect();
    if !fixed.is_empty() {
        return Err(format!(
            "only [scheduler] can change while serving; restart to change {}, or put it back",
            fixed.join("; ")
        ));
    }
    old.scheduler.can_become(&new.scheduler).map_err(|e| e.to_string())
}

/// What a configuration file says of the policy, as a cluster shares it: its `[scheduler]` and nothing else.
///
/// # Errors
/// What is wrong with the file, and where; or that it says nothing of the policy.
pub fn to_share(text: &str) -> Result<String, String> {
    crate::config::parse(text)?;
    let mut whole: toml::Table = text.parse().map_err(|e: toml::de::Error| e.to_string())?;
    let scheduler =
        whole.remove("scheduler").ok_or("it has no [scheduler], which is what a cluster shares")?;
    let shared = toml::Table::from_iter([("scheduler".to_owned(), scheduler)]);
    toml::to_string(&shared).map_err(|e| e.to_string())
}

/// A conductor's own configuration under the policy that its cluster shares.
///
/// # Errors
/// What is wrong with the policy, and where.
pub fn under(own: &Config, shared: &str) -> Result<Config, String> {
    let scheduler = crate::config::parse(shared)?.scheduler;
    let whole: toml::Table = shared.parse().map_err(|e: toml::de::Error| e.to_string())?;
    if let Some(other) = whole.keys().find(|section| *section != "scheduler") {
        return Err(format!(
            "[{other}] is each conductor's own; a cluster shares [scheduler] alone: take it out"
        ));
    }
    Ok(Config { scheduler, ..own.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;

    fn config(text: &str) -> Config {
        parse(text).expect("a valid file")
    }

    fn keys(old: &str, new: &str) -> Vec<String> {
        changes(&config(old), &config(new)).into_iter().map(|c| c.key).collect()
    }

    #[test]
    fn nothing_differs_from_itself() {
        assert_eq!(changes(&Config::default(), &config("")), []);
        assert_eq!(can_reload(&Config::default(), &config("")), Ok(()));
    }

    #[test]
    fn a_change_names_the_setting_and_both_values() {
        let found = changes(&config(""), &config("[scheduler]\nageing_us = 5000\npolicy = \"foresight\""));
        let shown: Vec<String> = found.iter().map(Change::to_string).collect();
        assert_eq!(
            shown,
            ["scheduler.ageing_us: 20000000 -> 5000", "scheduler.policy: \"baton\" -> \"foresight\""]
        );
    }

    #[test]
    fn lists_of_tables_are_compared_entry_by_entry() {
        let one = "[[scheduler.classes]]\nname = \"a\"";
        let two = "[[scheduler.classes]]\nname = \"a\"\nweight = 3\n[[scheduler.classes]]\nname = \"b\"";
        let found = keys(one, two);
        assert_eq!(found[0], "scheduler.classes[0].weight");
        assert!(found[1..].iter().all(|k| k.starts_with("scheduler.classes[1].")), "{found:?}");
        let back = changes(&config(two), &config(one));
        let gone = back.iter().find(|c| c.key == "scheduler.classes[1].name").expect("named");
        assert_eq!((gone.old.as_str(), gone.new.as_str()), ("\"b\"", ""));
        assert!(gone.to_string().ends_with("-> nothing"), "{gone}");
        assert_eq!(keys("", "[scheduler]\nshadow = [\"slo\"]"), ["scheduler.shadow"]);
    }

    #[test]
    fn a_cluster_shares_the_scheduler_and_nothing_else() {
        let file = "[service]\nheartbeat_us = 250000\n[scheduler]\nageing_us = 5000\n";
        let shared = to_share(file).expect("a valid file");
        assert_eq!(shared.trim(), "[scheduler]\nageing_us = 5000");
        let own = config("[service]\nheartbeat_us = 300000\n[scheduler]\nmax_retries = 7");
        let both = under(&own, &shared).expect("a valid policy");
        assert_eq!((both.service.heartbeat_us, both.scheduler.ageing_us), (300_000, 5000));
        assert_eq!(both.scheduler.max_retries, Config::default().scheduler.max_retries, "it is whole");
        let wrong = |text: &str| under(&own, text).expect_err("wrong");
        assert!(wrong(file).contains("[service] is each conductor's own"));
        assert!(wrong("[scheduler]\npolicy = \"moncake\"").contains("did you mean `mooncake`"));
        assert!(to_share("[service]\n").is_err_and(|e| e.contains("no [scheduler]")));
        assert!(to_share("[scheduler]\nblock_tokens = 0").is_err_and(|e| e.contains("block_tokens = 0")));
    }

    #[test]
    fn scheduling_reloads_and_the_rest_takes_a_restart() {
        let live = "[scheduler]\nmax_retries = 5\n[[scheduler.classes]]\nname = \"x\"\nttft_us = 5000000";
        assert_eq!(can_reload(&config(""), &config(live)), Ok(()));
        for (text, named) in [
            ("[cluster]\nrouters = 2", "cluster.routers: 1 -> 2"),
            ("[store]\neviction = \"lfu\"", "store.eviction"),
            ("[transfer]\nmax_flights = 7\nmax_flights_per_link = 7", "transfer.max_flights: 65536 -> 7"),
            ("[scheduler]\nblock_tokens = 16", "scheduler.block_tokens"),
            ("[scheduler]\nseed = 16", "scheduler.seed"),
            ("[scheduler]\npolicy = \"random\"", "scheduler.policy"),
        ] {
            let error = can_reload(&config(""), &config(text)).expect_err(named);
            assert!(error.contains(named) && error.contains("restart"), "{error}");
        }
    }

    #[test]
    fn a_file_out_of_bounds_is_never_taken_on() {
        let mut new = Config::default();
        new.scheduler.ageing_us = 0;
        assert!(can_reload(&Config::default(), &new).is_err_and(|e| e.contains("ageing_us = 0")));
    }
}
