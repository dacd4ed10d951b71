//! The differences between two configuration files, and whether the change is possible while serving.
//!
//! `[scheduler]` may change then, but for what its queues and caches are built on, and so may [`HOT`] settings of the
//! service. They are handed to the conductor between two decisions, and the conductor has the last word about what live
//! requests rely on. All other settings describe what was built at the start. The column "hot" of `docs/config.md` is
//! made by asking [`cold`].

use std::path::{Path, PathBuf};

use baton_membership::MembershipError;
use baton_scheduler::SchedulerConfig;
use toml::Value;

use crate::config::{Config, ConfigError};

/// The configuration that a service starts with: its file's, or the defaults.
///
/// # Errors
/// What is wrong with the file, and where.
pub fn at_start(path: Option<&Path>) -> Result<Config, ConfigError> {
    let mut config = crate::config::load_or_default(path)?;
    as_served(&mut config.scheduler);
    Ok(config)
}

/// Applies the setting that a live service always has, whatever its file says: the conductor records every decision
/// for an explanation.
pub(crate) fn as_served(scheduler: &mut SchedulerConfig) {
    scheduler.explain_every = scheduler.explain_every.max(1);
}

/// Settings outside of `[scheduler]` that change while a service serves.
const HOT: [&str; 5] = [
    "service.api_keys",
    "service.admin_key",
    "service.class_rules",
    "service.stage_slack",
    "service.stage_floor_us",
];

/// Why a policy cannot come into force.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// It is no valid configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It changes settings that take a restart.
    #[error(
        "it changes what is read at the start alone (hot \"no\" in docs/config.md); restart to change {0}, or put it back"
    )]
    ReadAtStart(String),
    /// It is to be shared, and has nothing that is shared.
    #[error("it has no [scheduler], which is what a cluster shares")]
    NoScheduler,
    /// It is shared, and has a section that is not.
    #[error("[{0}] is each conductor's own; a cluster shares [scheduler] alone: take it out")]
    OwnSection(String),
    /// It has a section that cannot change.
    #[error("[{0}] is a section that a running service cannot take")]
    UnknownSection(String),
    /// It cannot be written as TOML.
    #[error("{0}")]
    Unwritable(toml::ser::Error),
    /// It changes keys, and did not come from the configuration file.
    #[error(
        "service.admin_key and service.api_keys are read from the configuration file alone: change them there, and the \
         service follows"
    )]
    Keys,
    /// It is to come from the configuration file, and there is none.
    #[error("the service was started without a configuration file; give it a policy: {0}")]
    NoFile(&'static str),
    /// The configuration file cannot be read.
    #[error("config {}: {why}", .file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The system's words.
        why: String,
    },
    /// Clients use service classes that it drops.
    #[error(
        "clients use what it drops: service class {0}; if the file is whole and this is meant, confirm it with SIGHUP or \
         POST /admin/policy with an empty body"
    )]
    DropsClasses(String),
    /// It asks for no key where one is asked for now.
    #[error(
        "it has no {0}, so all would be let in; if the file is whole and this is meant, confirm it with SIGHUP or POST \
         /admin/policy with an empty body"
    )]
    DropsKeys(String),
    /// It is the beginning of the file in force.
    #[error(
        "it is the beginning of the file in force and ends early: it may be half-written; if it is whole, confirm it with \
         SIGHUP or POST /admin/policy with an empty body"
    )]
    EndsEarly,
    /// The scheduler cannot change to it with what is live.
    #[error("{0}")]
    Scheduler(baton_scheduler::ConfigError),
    /// There is none before it.
    #[error("no change of policy to take back")]
    NothingBefore,
    /// The cluster's members do not take it.
    #[error("{0}")]
    Cluster(MembershipError),
}

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
    fn is_of(&self, setting: &str) -> bool {
        self.key.strip_prefix(setting).is_some_and(|rest| rest.is_empty() || rest.starts_with(['[', '.']))
    }
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = |value: &str| if value.is_empty() { "nothing".to_owned() } else { value.to_owned() };
        write!(f, "{}: {} -> {}", self.key, shown(&self.old), shown(&self.new))
    }
}

/// Those of the changes that a service does not take on while it serves.
pub fn cold<'c>(old: &Config, new: &Config, changes: &'c [Change]) -> Vec<&'c Change> {
    let fixed = old.scheduler.fixed_in(&new.scheduler);
    let is_hot = |change: &Change| {
        let fixed = fixed.iter().any(|name| change.is_of(&format!("scheduler.{name}")));
        change.is_of("scheduler") && !fixed || HOT.iter().any(|setting| change.is_of(setting))
    };
    changes.iter().filter(|change| !is_hot(change)).collect()
}

/// Changes as people read them, a line each.
pub fn in_lines(changes: &[Change]) -> Vec<String> {
    changes.iter().map(ToString::to_string).collect()
}

/// Every setting in which `new` differs from `old`, sorted by name within each section. Of a secret it says that it
/// changed, not from what to what.
pub fn changes(old: &Config, new: &Config) -> Vec<Change> {
    let value = |c: &Config| Value::try_from(c).expect("a configuration came from TOML, so it is TOML");
    let mut found = Vec::new();
    compare("", Some(&value(old)), Some(&value(new)), &mut found);
    // Secrets look alike in TOML, so two that differ are found by comparing them as they are.
    let (before, after) = (&old.service, &new.service);
    let mut secrets = vec![
        ("service.admin_key".to_owned(), before.admin_key != after.admin_key),
        ("service.chain_seed".to_owned(), before.chain_seed != after.chain_seed),
    ];
    let keys = before.api_keys.iter().zip(&after.api_keys).enumerate();
    secrets.extend(keys.map(|(at, (a, b))| (format!("service.api_keys[{at}].key"), a.key != b.key)));
    for (key, differs) in secrets {
        if differs && !found.iter().any(|change| change.key == key) {
            found.push(Change { key, old: "one secret".to_owned(), new: "another".to_owned() });
        }
    }
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

/// Settings that the command line may have set over the file, and that a service keeps from its start: those of two
/// states of the file that differ, by name.
pub fn fixed_at_start(old: &Config, new: &Config) -> Vec<&'static str> {
    let (old, new) = (&old.service, &new.service);
    [
        ("service.listen", old.listen == new.listen),
        ("service.control", old.control == new.control),
        ("service.cluster_key", old.cluster_key == new.cluster_key),
        ("service.cluster_tls_cert", old.cluster_tls_cert == new.cluster_tls_cert),
        ("service.cluster_tls_key", old.cluster_tls_key == new.cluster_tls_key),
        ("service.cluster_tls_ca", old.cluster_tls_ca == new.cluster_tls_ca),
    ]
    .into_iter()
    .filter_map(|(name, same)| (!same).then_some(name))
    .collect()
}

/// Gives a new state of the file what is no question of it: the sections that the simulator alone reads, and settings of a
/// service that it sets by itself, or that the command line may have set over the file.
pub fn keep_what_is_fixed(own: &Config, new: &mut Config) {
    as_served(&mut new.scheduler);
    new.cluster.clone_from(&own.cluster);
    new.network.clone_from(&own.network);
    new.clients.clone_from(&own.clients);
    new.faults.clone_from(&own.faults);
    let (own, new) = (&own.service, &mut new.service);
    new.listen.clone_from(&own.listen);
    new.control.clone_from(&own.control);
    new.cluster_key.clone_from(&own.cluster_key);
    new.cluster_tls_cert.clone_from(&own.cluster_tls_cert);
    new.cluster_tls_key.clone_from(&own.cluster_tls_key);
    new.cluster_tls_ca.clone_from(&own.cluster_tls_ca);
}

/// Whether a service under `old` can take on `new` without a restart, whatever is live.
///
/// # Errors
/// Names each setting that takes a restart, with both values.
pub fn can_reload(old: &Config, new: &Config) -> Result<(), PolicyError> {
    new.validate()?;
    let changes = changes(old, new);
    let cold: Vec<String> = cold(old, new, &changes).into_iter().map(Change::to_string).collect();
    if cold.is_empty() {
        return Ok(());
    }
    Err(PolicyError::ReadAtStart(cold.join("; ")))
}

/// The policy of a configuration file, as a cluster shares it: its `[scheduler]` and nothing else.
///
/// # Errors
/// What is wrong with the file, and where; or that it says nothing of the policy.
pub fn to_share(text: &str) -> Result<String, PolicyError> {
    crate::config::parse(text)?;
    let mut whole = table(text)?;
    let scheduler = whole.remove("scheduler").ok_or(PolicyError::NoScheduler)?;
    let shared = toml::Table::from_iter([("scheduler".to_owned(), scheduler)]);
    toml::to_string(&shared).map_err(PolicyError::Unwritable)
}

/// The policy in force as a file that can be edited and sent back.
#[must_use]
pub fn text(config: &Config) -> String {
    let whole = std::collections::BTreeMap::from([("scheduler", &config.scheduler)]);
    toml::to_string(&whole).expect("a configuration came from TOML, so it is TOML")
}

/// What distinguishes a policy from those that were in force before, at this service or another: for `ETag` and `If-Match`.
#[must_use]
pub fn tag(revision: u64, config: &Config) -> String {
    format!("\"{revision}-{:016x}\"", xxhash_rust::xxh3::xxh3_64(text(config).as_bytes()))
}

fn table(text: &str) -> Result<toml::Table, ConfigError> {
    let plain = crate::config::plain(text)?;
    plain.parse().map_err(|e: toml::de::Error| crate::config::place(&e, &plain))
}

/// A configuration with the sections that `text` names in place of its own.
///
/// # Errors
/// The mistake in the text, and its place.
pub fn over(own: &Config, text: &str) -> Result<Config, PolicyError> {
    let given = crate::config::parse(text)?;
    let named = table(text)?;
    let mut whole = own.clone();
    for section in named.keys() {
        match section.as_str() {
            "cluster" => whole.cluster = given.cluster.clone(),
            "scheduler" => whole.scheduler = given.scheduler.clone(),
            "store" => whole.store = given.store.clone(),
            "network" => whole.network = given.network,
            "service" => whole.service = given.service.clone(),
            "router" => whole.router = given.router.clone(),
            "clients" => whole.clients = given.clients,
            "faults" => whole.faults = given.faults,
            unknown => return Err(PolicyError::UnknownSection(unknown.to_owned())),
        }
    }
    if !sets_block_tokens(&named) {
        whole.scheduler.block_tokens = own.scheduler.block_tokens;
    }
    Ok(whole)
}

/// Whether a text sets the size of blocks: it is the nodes' as well, so a policy need not repeat it.
fn sets_block_tokens(text: &toml::Table) -> bool {
    text.get("scheduler").is_some_and(|scheduler| scheduler.get("block_tokens").is_some())
}

/// A conductor's own configuration under the policy that its cluster shares.
///
/// # Errors
/// What is wrong with the policy, and where.
pub fn under(own: &Config, shared: &str) -> Result<Config, PolicyError> {
    let mut scheduler = crate::config::parse(shared)?.scheduler;
    let whole = table(shared)?;
    if !sets_block_tokens(&whole) {
        scheduler.block_tokens = own.scheduler.block_tokens;
    }
    if let Some(other) = whole.keys().find(|section| *section != "scheduler") {
        return Err(PolicyError::OwnSection(other.clone()));
    }
    as_served(&mut scheduler);
    let both = Config { scheduler, ..own.clone() };
    both.validate()?;
    Ok(both)
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
        let found = changes(
            &config(""),
            &config("[scheduler]\nprior_output_tokens = 500\npolicy = \"baton_informed\""),
        );
        let shown: Vec<String> = found.iter().map(Change::to_string).collect();
        assert_eq!(
            shown,
            [
                "scheduler.policy: \"baton\" -> \"baton_informed\"",
                "scheduler.prior_output_tokens: 256 -> 500"
            ]
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
        let file = "[service]\nheartbeat_us = 250000\n[scheduler]\nprior_output_tokens = 500\n";
        let shared = to_share(file).expect("a valid file");
        assert_eq!(shared.trim(), "[scheduler]\nprior_output_tokens = 500");
        let own = config("[service]\nheartbeat_us = 300000\n[scheduler]\nmax_retries = 7");
        let both = under(&own, &shared).expect("a valid policy");
        assert_eq!((both.service.heartbeat_us, both.scheduler.prior_output_tokens), (300_000, 500));
        assert_eq!(both.scheduler.max_retries, Config::default().scheduler.max_retries, "it is whole");
        let wrong = |text: &str| under(&own, text).expect_err("wrong").to_string();
        assert!(wrong(file).contains("[service] is each conductor's own"));
        assert!(wrong("[scheduler]\npolicy = \"moncake\"").contains("did you mean `mooncake`"));
        assert!(to_share("[service]\n").is_err_and(|e| e.to_string().contains("no [scheduler]")));
        assert!(
            to_share("[scheduler]\nblock_tokens = 0")
                .is_err_and(|e| e.to_string().contains("block_tokens = 0"))
        );
    }

    #[test]
    fn a_changed_secret_is_named_and_not_shown() {
        let keys = |key: &str, seed: u64| {
            config(&format!(
                "[service]\nadmin_key = \"admin-{key}\"\nchain_seed = {seed}\n\
                 [[service.api_keys]]\nkey = \"client-{key}\"\ntenant = \"t\""
            ))
        };
        let lines = |old: &Config, new: &Config| in_lines(&changes(old, new)).join("; ");
        let error = lines(&keys("one", 4711), &keys("two", 1147));
        for setting in ["service.admin_key", "service.chain_seed", "service.api_keys[0].key"] {
            assert!(error.contains(setting), "{setting}: {error}");
        }
        let more = lines(&config(""), &keys("two", 1147));
        let refused =
            can_reload(&keys("one", 4711), &keys("one", 1147)).expect_err("it takes a restart").to_string();
        assert!(refused.contains("service.chain_seed") && !refused.contains("4711"), "{refused}");
        assert_eq!(can_reload(&keys("one", 4711), &keys("two", 4711)), Ok(()), "keys follow the file");
        for secret in ["one", "two", "4711", "1147"] {
            let words = |text: &str| text.replace("one secret", "");
            assert!(!words(&error).contains(secret) && !more.contains(secret), "{error}\n{more}");
        }
        assert_eq!(can_reload(&keys("one", 4711), &keys("one", 4711)), Ok(()));
    }

    #[test]
    fn sections_that_a_text_leaves_out_stay_as_they_are() {
        let own = config("[service]\nadmin_key = \"sesame\"\n[scheduler]\nmax_retries = 7");
        let new = over(&own, "[scheduler]\nprior_output_tokens = 500").expect("a valid policy");
        assert_eq!((new.scheduler.prior_output_tokens, &new.service), (500, &own.service));
        assert_eq!(
            new.scheduler.max_retries,
            Config::default().scheduler.max_retries,
            "its section is whole"
        );
        assert_eq!(over(&own, "").expect("nothing is named"), own);
        let wide = config("[scheduler]\nblock_tokens = 64");
        for new in [
            over(&wide, "[scheduler]\nprior_output_tokens = 500"),
            under(&wide, "[scheduler]\nprior_output_tokens = 500"),
        ] {
            assert_eq!(new.expect("a valid policy").scheduler.block_tokens, 64, "blocks are the nodes' too");
        }
        assert!(over(&own, "[service]").is_ok_and(|new| !new.service.admin_key.is_set()));
        // Each section of the file is one that this function knows.
        let all = toml::Table::try_from(Config::default()).expect("a config is TOML");
        for section in all.keys() {
            assert!(over(&own, &format!("[{section}]")).is_ok(), "{section}");
        }
    }

    #[test]
    fn the_policy_in_force_can_be_sent_back() {
        let mut served = config(
            "[service]\nadmin_key = \"sesame\"\n[scheduler]\nblock_tokens = 64\nshadow = [\"slo\"]\n\
             [[scheduler.classes]]\nname = \"a\"\n[[scheduler.classes]]\nname = \"b\"\nttft = \"2s\"",
        );
        as_served(&mut served.scheduler);
        let text = text(&served);
        assert!(!text.contains("sesame") && text.contains("ttft_us = 2000000"), "{text}");
        let mut back = over(&served, &text).expect("a valid policy");
        as_served(&mut back.scheduler);
        assert_eq!(back, served);
    }

    #[test]
    fn scheduling_reloads_and_the_rest_takes_a_restart() {
        let live =
            "[scheduler]\nprior_output_tokens = 500\n[[scheduler.classes]]\nname = \"x\"\nttft_us = 5000000";
        assert_eq!(can_reload(&config(""), &config(live)), Ok(()));
        for (text, named) in [
            ("[cluster]\nrouters = 2", "cluster.routers: 1 -> 2"),
            ("[store]\neviction = \"lfu\"", "store.eviction"),
            ("[network]\nmax_flights = 7\nmax_flights_per_link = 7", "network.max_flights: 65536 -> 7"),
            ("[scheduler]\nblock_tokens = 32", "scheduler.block_tokens"),
            ("[scheduler]\nseed = 16", "scheduler.seed"),
            ("[scheduler]\npolicy = \"random\"", "scheduler.policy"),
        ] {
            let error = can_reload(&config(""), &config(text)).expect_err(named).to_string();
            assert!(error.contains(named) && error.contains("restart"), "{error}");
        }
    }

    #[test]
    fn a_class_that_a_key_names_stays() {
        let with = |classes: &str, name: &str| {
            format!(
                "[[scheduler.classes]]\nname = \"{name}\"\n[[service.api_keys]]\nkey = \"k\"\ntenant = \"t\"\n{classes}"
            )
        };
        let own = config(&with("classes = [\"batch\"]", "batch"));
        let dropped = "[[scheduler.classes]]\nname = \"fast\"";
        let named = "service.api_keys[0].classes names \"batch\"";
        let reload = over(&own, dropped).and_then(|new| can_reload(&own, &new));
        assert!(reload.is_err_and(|e| e.to_string().contains(named)));
        assert!(under(&own, dropped).is_err_and(|e| e.to_string().contains(named)), "a cluster's policy too");
        let both = config(&with("", "fast"));
        assert_eq!(can_reload(&own, &both), Ok(()), "the key leaves it, too");
        let lines = in_lines(&changes(&own, &both));
        assert!(lines.contains(&"service.api_keys[0].classes: [\"batch\"] -> []".to_owned()), "{lines:?}");
    }

    #[test]
    fn class_rules_change_while_serving_and_keep_the_classes_that_they_name() {
        let classes = "[[scheduler.classes]]\nname = \"chat\"\n[[scheduler.classes]]\nname = \"batch\"\n";
        let ruled = |rules: &str| config(&format!("{classes}[service]\nclass_rules = [{rules}]\n"));
        let (none, one) = (ruled(""), ruled("{ tenant = \"lab\", class = \"batch\" }"));
        let two = ruled("{ priority = 5, class = \"chat\" }, { tenant = \"lab\", class = \"batch\" }");
        for (old, new) in [(&none, &one), (&one, &two), (&two, &none)] {
            assert_eq!(can_reload(old, new), Ok(()));
            assert!(!changes(old, new).is_empty());
        }
        let reload =
            over(&one, "[[scheduler.classes]]\nname = \"chat\"").and_then(|new| can_reload(&one, &new));
        assert!(reload.is_err_and(|e| e.to_string().contains("service.class_rules[0].class is \"batch\"")));
    }

    #[test]
    fn a_file_out_of_bounds_is_never_taken_on() {
        let mut new = Config::default();
        new.scheduler.max_retries = 17;
        assert!(
            can_reload(&Config::default(), &new).is_err_and(|e| e.to_string().contains("max_retries = 17"))
        );
    }
}
