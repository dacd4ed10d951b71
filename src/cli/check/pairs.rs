//! The engines together: a conductor takes one model, one kind and one version, and a prefill engine needs a decode engine.

use std::collections::{BTreeMap, BTreeSet};

use baton_remote::HandoffWay;
use baton_types::Role;

use super::engine::FoundServer;
use super::report::Report;

/// A property that must be equal: its name, and its value for an engine.
type Property = (&'static str, fn(&FoundServer) -> Option<String>);

const EQUAL: [Property; 6] = [
    ("model", |found| Some(found.probe.model.clone())),
    ("kind", |found| Some(found.settings.dialect.name().into())),
    ("version", |found| found.probe.version.clone()),
    ("handoff", |found| Some(way(&found.settings.handoff).into())),
    ("connector", |found| found.probe.connector.clone()),
    ("vocabulary", |found| Some(found.vocab_tokens.to_string())),
];

/// Compares those that said what they are, of so many that were asked for.
pub fn examine(found: &[FoundServer], asked: usize, report: &mut Report) {
    if asked == 0 {
        return;
    }
    if found.len() < asked {
        let missing = asked - found.len();
        report.untried("engines together", format!("{missing} of {asked} engines did not say what they are"));
        return;
    }
    roles(found, report);
    if found.len() > 1 {
        for property in EQUAL {
            equal(property, found, report);
        }
        contexts(found, report);
    }
}

fn roles(found: &[FoundServer], report: &mut Report) {
    let of = |role| found.iter().filter(|one| one.role == role).count();
    let (prefill, decode, both) = (of(Role::Prefill), of(Role::Decode), of(Role::Both));
    let count = format!("{prefill} prefill, {decode} decode, {both} both");
    let remedy = "a pair is a prefill and a decode engine; an engine alone has the role both";
    if (prefill > 0) == (decode > 0) {
        report.good_at("engines together: roles", count);
    } else if both > 0 {
        report.doubtful("engines together: roles", format!("{count}: some have no peer"), remedy);
    } else {
        report.wrong("engines together: roles", format!("{count}: nobody is served"), remedy);
    }
}

/// Engines may differ in the longest context; each request has to fit into the shortest.
fn contexts(found: &[FoundServer], report: &mut Report) {
    let tokens: BTreeSet<u32> = found.iter().filter_map(|one| one.max_model_tokens).collect();
    if let (Some(least), Some(most)) = (tokens.first(), tokens.last())
        && least != most
    {
        let found = format!("the longest contexts are {least} to {most} tokens: {least} is the limit of all");
        let remedy = "start them with the same --max-model-len, or --context-length";
        report.doubtful("engines together: context", found, remedy);
    }
}

fn equal((name, property): Property, found: &[FoundServer], report: &mut Report) {
    let mut told: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for one in found {
        if let Some(value) = property(one) {
            told.entry(value).or_default().push(&one.name);
        }
    }
    let check = format!("engines together: {name}");
    if told.len() > 1 {
        let each: Vec<String> =
            told.iter().map(|(value, names)| format!("{value} at {}", names.join(" "))).collect();
        let remedy = "a conductor takes engines that are alike: start them alike, or give each kind its own";
        report.wrong(&check, each.join("; "), remedy);
    } else if let Some((value, _)) = told.pop_first() {
        let value = if name == "vocabulary" { "equal".to_owned() } else { value };
        report.good_at(&check, value);
    }
}

const fn way(handoff: &HandoffWay) -> &'static str {
    match handoff {
        HandoffWay::None => "none",
        HandoffWay::Nixl => "nixl",
        HandoffWay::Mooncake { .. } => "mooncake",
        HandoffWay::Rooms { .. } => "rooms",
    }
}
