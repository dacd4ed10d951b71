//! The simulator and the service run the same cores: both step each of them. Each setting of the service has a reader
//! in production code.

use crate::finding::Finding;
use crate::lex::Kind;
use crate::outline::Outline;
use std::collections::BTreeMap;

/// The cores.
const CORES: &[&str] = &["baton_scheduler", "baton_legs", "baton_store", "baton_transfer"];

/// Where the simulator is, and where the service is: its own code, and the drivers of its caches and transfers.
const SIMULATOR: &[&str] = &["sim/src/"];
const SERVICE: &[&str] = &["src/conductor/", "src/node/", "store/tiers/src/", "transfer/transports/src/"];

/// Whether the production code of `source` names `word` as the head of a path.
fn imports(source: &str, word: &str) -> bool {
    let outline = Outline::of(source);
    outline.production().any(|(at, token)| {
        token.is(word) && outline.tokens.get(at + 1).is_some_and(|next| next.is(":") || next.is(";"))
    })
}

/// Cores that one of the two sides does without.
pub fn check_cores(sources: &BTreeMap<String, String>) -> Vec<Finding> {
    let mut found = Vec::new();
    for (side, places) in [("simulator", SIMULATOR), ("service", SERVICE)] {
        let inside = |path: &str| places.iter().any(|place| path.starts_with(place));
        for core in CORES {
            if !sources.iter().any(|(path, source)| inside(path) && imports(source, core)) {
                let remedy = "let it be stepped there, or say in an ADR why it is no core";
                found.push(Finding::new(places[0], 0, format!("the {side} does not import {core}"), remedy));
            }
        }
    }
    found
}

/// Structs that hold the settings of the service: where they are, and their names.
const SETTINGS: &[(&str, &str)] = &[
    ("scheduler/src/config.rs", "SchedulerConfig"),
    ("scheduler/types/src/slo.rs", "SloClass"),
    ("src/config.rs", "StoreSection"),
    ("src/config.rs", "ServiceConfig"),
    ("src/config.rs", "ApiKey"),
    ("src/config.rs", "ClassRule"),
    ("src/config.rs", "RouterSection"),
];

/// The sections of a configuration that only the simulator reads.
const SIMULATED: &[&str] = &["ClusterConfig", "NetworkConfig", "Clients", "FaultPlan"];

/// The reader of each setting: the struct, the source that reads it, and the fields.
const READERS: &[(&str, &str, &[&str])] = &[
    ("SchedulerConfig", "scheduler/src/policies.rs", &["policy"]),
    ("SchedulerConfig", "scheduler/src/config.rs", &["admission"]),
    ("SchedulerConfig", "scheduler/src/admission.rs", &["shadow", "classes"]),
    ("SchedulerConfig", "scheduler/src/admission.rs", &["max_waiting_requests"]),
    ("SchedulerConfig", "scheduler/src/placement/prefill.rs", &["block_tokens", "fetch"]),
    ("SchedulerConfig", "scheduler/src/placement/prefill.rs", &["balancing_threshold_permille"]),
    ("SchedulerConfig", "scheduler/src/placement/decode.rs", &["mixed_step_permille"]),
    ("SchedulerConfig", "scheduler/src/placement/pick.rs", &["local_prefill"]),
    ("SchedulerConfig", "scheduler/src/placement/pick.rs", &["explain_every", "candidates"]),
    ("SchedulerConfig", "scheduler/src/placement/decode.rs", &["decode_duration_us"]),
    ("SchedulerConfig", "scheduler/src/conductor.rs", &["prior_output_tokens", "seed"]),
    ("SchedulerConfig", "scheduler/src/policies/baselines/dynamo_wspt.rs", &["queue_threshold_permille"]),
    ("SchedulerConfig", "scheduler/src/replicate.rs", &["replicate"]),
    ("SchedulerConfig", "scheduler/src/failure.rs", &["max_retries"]),
    ("SloClass", "src/conductor/policy.rs", &["name"]),
    ("SloClass", "scheduler/src/admission.rs", &["ttft_us", "headroom_permille"]),
    ("SloClass", "scheduler/src/lifecycle.rs", &["target_permille"]),
    ("SloClass", "scheduler/src/placement/decode.rs", &["tbt_us"]),
    ("SloClass", "scheduler/types/src/slo.rs", &["e2e_us"]),
    ("SloClass", "scheduler/src/placement/dispatch.rs", &["weight"]),
    ("SloClass", "scheduler/src/shed.rs", &["priority", "sheddable"]),
    ("StoreSection", "src/node.rs", &["eviction", "offload", "ssd_second_touch", "ssd_io"]),
    ("ServiceConfig", "src/up.rs", &["listen", "control", "tls_cert", "tls_key"]),
    ("ServiceConfig", "src/keys.rs", &["api_keys", "admin_key", "class_rules"]),
    ("ServiceConfig", "src/up.rs", &["keep_alive_us", "max_body_bytes", "max_held_bytes", "drain_us"]),
    ("ServiceConfig", "src/guard.rs", &["cluster_key", "cluster_tls_cert", "cluster_tls_key"]),
    ("ServiceConfig", "src/guard.rs", &["cluster_tls_ca"]),
    ("ServiceConfig", "src/conductor/driver.rs", &["chain_seed", "heartbeat_us", "journal", "capture"]),
    ("ServiceConfig", "src/conductor/core.rs", &["lost_after_us"]),
    ("ServiceConfig", "src/conductor/policy.rs", &["stage_slack", "stage_floor_us"]),
    ("ServiceConfig", "src/spans.rs", &["otlp_endpoint", "trace_permille"]),
    ("ApiKey", "src/router/src/caller.rs", &["key", "tenant", "classes"]),
    ("ClassRule", "src/keys.rs", &["tenant", "model", "priority", "class"]),
    ("RouterSection", "src/config.rs", &["tool_parser", "reasoning_parser"]),
];

/// The fields of the struct `name` in `source`, with their lines.
fn fields<'a>(source: &'a str, name: &str) -> Vec<(usize, &'a str)> {
    let outline = Outline::of(source);
    let tokens = &outline.tokens;
    let head = |at: &usize| outline.reads(*at, &["pub", "struct", name, "{"]);
    let Some(start) = (0..tokens.len()).find(head) else { return Vec::new() };
    let inside = (start + 4..tokens.len()).take_while(|at| !tokens[*at].is("}"));
    inside
        .filter(|at| outline.reads(*at, &["pub"]) && tokens.get(at + 2).is_some_and(|colon| colon.is(":")))
        .map(|at| (tokens[at + 1].line, tokens[at + 1].text))
        .collect()
}

/// Whether the production code of `source` reads a field: `value.field`, and no call.
fn reads(source: &str, field: &str) -> bool {
    let outline = Outline::of(source);
    outline.production().any(|(at, token)| {
        let before = at.checked_sub(1).and_then(|before| outline.tokens.get(before));
        let called = outline.tokens.get(at + 1).is_some_and(|next| next.is("("));
        token.kind == Kind::Word && token.is(field) && before.is_some_and(|dot| dot.is(".")) && !called
    })
}

/// Settings of the service without a reader, and rows whose reader does not read them.
pub fn check_read(
    settings: &[(&str, &str)],
    readers: &[(&str, &str, &[&str])],
    sources: &BTreeMap<String, String>,
) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, name) in settings {
        let source = sources.get(*path).map_or("", String::as_str);
        for (line, field) in fields(source, name) {
            let row = readers.iter().find(|(of, _, read)| of == name && read.contains(&field));
            let reader = row.map(|(_, reader, _)| *reader);
            let remedy =
                "name the file of the service that reads it, or move it to a section of the simulator";
            let by = reader.and_then(|reader| sources.get(reader));
            if !by.is_some_and(|source| reads(source, field)) {
                let rule = format!("{name}.{field} is not read by {}", reader.unwrap_or("anything named"));
                found.push(Finding::new(path, line, rule, remedy));
            }
        }
    }
    found
}

/// Structs of settings within those of `settings` that are no row of it: their fields would have no reader to name.
pub fn check_nested(settings: &[(&str, &str)], sources: &BTreeMap<String, String>) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, name) in settings {
        let source = sources.get(*path).map_or("", String::as_str);
        let outline = Outline::of(source);
        for (line, field) in fields(source, name) {
            let words = outline.tokens.iter().filter(|token| token.line == line && token.kind == Kind::Word);
            let structs = words.filter(|word| !fields(source, word.text).is_empty());
            for inner in structs.filter(|word| settings.iter().all(|(_, of)| *of != word.text)) {
                let rule = format!("the settings of {} in {name}.{field} are in no list", inner.text);
                found.push(Finding::new(
                    path,
                    line,
                    rule,
                    "add it to SETTINGS, with the readers of its settings",
                ));
            }
        }
    }
    found
}

/// Sections of the configuration whose settings no list here names.
pub fn check_sections(source: &str) -> Vec<Finding> {
    let outline = Outline::of(source);
    let type_of = |(line, _): &(usize, &str)| {
        let mut words = outline.tokens.iter().rev().filter(|token| token.kind == Kind::Word);
        words.find(|token| token.line == *line).map_or("", |token| token.text)
    };
    let named = |name: &str| SETTINGS.iter().any(|(_, of)| *of == name) || SIMULATED.contains(&name);
    let unnamed = fields(source, "Config").into_iter().filter(|field| !named(type_of(field)));
    let rule = |section: &str| format!("the settings of the section {section} are in no list");
    let remedy = "add it to SETTINGS, with the readers of its settings, or to SIMULATED";
    unnamed.map(|(line, section)| Finding::new("src/config.rs", line, rule(section), remedy)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::reach::house_sources;

    #[test]
    fn every_section_is_the_services_or_the_simulators() {
        assert_clean(check_sections(&house_sources()["src/config.rs"]));
        let planted = "pub struct Config {\n    pub store: StoreSection,\n    pub magic: MagicSection,\n}";
        assert_caught(&check_sections(planted), 3, "section magic");
    }

    fn planted(files: &[(&str, &str)]) -> BTreeMap<String, String> {
        files.iter().map(|&(path, text)| (path.to_owned(), text.to_owned())).collect()
    }

    #[test]
    fn the_simulator_and_the_service_step_the_same_cores() {
        assert_clean(check_cores(&house_sources()));
    }

    #[test]
    fn a_core_that_one_side_lacks_is_found() {
        let all = "use baton_scheduler::A; use baton_legs::A; use baton_store::A; use baton_transfer::A;";
        let but_legs = "use baton_scheduler::A; use baton_store::A; use baton_transfer::A; // baton_legs::A";
        let sources = |sim, node| planted(&[("sim/src/world.rs", sim), ("src/node/worker.rs", node)]);
        assert_clean(check_cores(&sources(all, all)));
        assert_caught(&check_cores(&sources(all, but_legs)), 0, "the service does not import baton_legs");
        let tests = "use baton_scheduler::A; use baton_store::A; use baton_transfer::A; #[cfg(test)] mod t { use baton_legs::A; }";
        assert_caught(&check_cores(&sources(tests, all)), 0, "the simulator does not import baton_legs");
    }

    #[test]
    fn every_setting_of_the_service_is_read_by_it() {
        assert_clean(check_read(SETTINGS, READERS, &house_sources()));
    }

    #[test]
    fn settings_within_settings_are_in_the_list() {
        assert_clean(check_nested(SETTINGS, &house_sources()));
        let inner = "pub struct S {\n    pub one: u32,\n    pub all: Vec<Inner>,\n}\npub struct Inner {\n    pub two: u32,\n}";
        let sources = planted(&[("c.rs", inner)]);
        assert_caught(&check_nested(&[("c.rs", "S")], &sources), 3, "Inner in S.all are in no list");
        assert_clean(check_nested(&[("c.rs", "S"), ("c.rs", "Inner")], &sources));
    }

    #[test]
    fn a_setting_that_nothing_reads_is_found() {
        let settings = "pub struct S {\n    /// One.\n    pub one: u32,\n    pub two: Vec<(u8, u8)>,\n}";
        let check = |reader, read: &[&str]| {
            let sources = planted(&[("c.rs", settings), ("r.rs", reader)]);
            check_read(&[("c.rs", "S")], &[("S", "r.rs", read)], &sources)
        };
        assert_clean(check("fn f(s: S) { s.one + s.two.len() }", &["one", "two"]));
        assert_caught(&check("fn f(s: S) { s.one }", &["one"]), 4, "two is not read by anything named");
        assert_caught(
            &check("fn f(s: S) { s.one + s.two() }", &["one", "two"]),
            4,
            "two is not read by r.rs",
        );
    }
}
