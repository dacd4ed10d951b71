//! Agreement with a peer's replay.
//!
//! The figures are requests with TTFT ≤ 30 s (token gaps never bind) of the 12,031 of the Mooncake
//! conversation trace, as NVIDIA Dynamo 1.6's own replay gives them at each speed of the trace, over
//! 8 + 8 instances of Llama-3-70B TP8 on A100 whose cost tables the profile named here was fitted
//! to. That replay takes cached prefixes for free, hands KV off when a prefill has ended, at
//! 100 GB/s for each request, and has no cache below HBM.
//!
//! Skipped with a message where the trace is not on this machine (`BATON_TRACES`).

use std::path::PathBuf;
use std::sync::Arc;

use baton_scheduler::{AdmissionMode, PolicyName, SchedulerConfig};
use baton_sim::{Handoff, RunResult, Setup, TraceWorkload, World, profiles};
use baton_traces::Trace;

/// Policy, speed, the peer's requests in SLO.
const PEER: [(PolicyName, f64, u64); 12] = [
    (PolicyName::Dynamo, 1.0, 12_031),
    (PolicyName::Dynamo, 2.0, 12_031),
    (PolicyName::Dynamo, 2.25, 12_031),
    (PolicyName::Dynamo, 2.5, 4_021),
    (PolicyName::Dynamo, 3.0, 660),
    (PolicyName::RoundRobin, 1.0, 12_031),
    (PolicyName::RoundRobin, 2.0, 10_126),
    (PolicyName::RoundRobin, 2.25, 2_671),
    (PolicyName::RoundRobin, 3.0, 492),
    (PolicyName::DynamoWspt, 2.5, 11_868),
    (PolicyName::DynamoWspt, 3.0, 11_629),
    (PolicyName::DynamoWspt, 4.0, 10_973),
];

fn trace_path() -> Option<PathBuf> {
    let found = baton_traces::locate("conversation_trace.jsonl");
    if found.is_none() {
        eprintln!("SKIPPED: conversation_trace.jsonl is not here; name its directory in BATON_TRACES");
    }
    found
}

fn replay(trace: &Arc<Trace>, policy: PolicyName, speed: f64) -> RunResult {
    let profile = Arc::new(profiles::named("llama3-70b-8xa100-newtokens").unwrap());
    let scheduler = SchedulerConfig { policy, admission: AdmissionMode::None, ..SchedulerConfig::default() };
    let mut setup = Setup::disaggregated(8, 8, &profile, scheduler);
    (setup.handoff, setup.shared_links) = (Handoff::AfterPrefill, false);
    setup.sample_us = 0;
    let mut world = World::new(setup, Box::new(TraceWorkload::new(trace.clone(), speed))).unwrap();
    world.run().unwrap();
    world.into_metrics().result((policy.name(), "none"), speed, 1)
}

#[test]
fn goodput_agrees_with_the_peers_replay() {
    let Some(path) = trace_path() else { return };
    let trace = Arc::new(baton_traces::load(&path, &baton_traces::ReadOptions::default()).unwrap());
    println!(
        "{:12} {:>5} {:>6} {:>7} {:>7}  TTFT mean/p50/p99 s, reuse",
        "policy", "×rate", "peer", "ours", "off by"
    );
    let mut off = Vec::new();
    for (policy, speed, peer) in PEER {
        let run = replay(&trace, policy, speed);
        let apart = run.in_slo.abs_diff(peer);
        let [mean, p50, p99] =
            [run.ttft_s.mean, run.ttft_s.p50, run.ttft_s.p99].map(|x| x.unwrap_or(f64::NAN));
        let row = format!(
            "{:12} {speed:5} {peer:6} {:7} {apart:7}  {mean:.2} / {p50:.2} / {p99:.1}, {:.1} %",
            policy.name(),
            run.in_slo,
            run.block_hit_ratio * 100.0
        );
        println!("{row}");
        if apart > 300.max(peer / 10) {
            off.push(row);
        }
    }
    assert!(off.is_empty(), "more than 10 % and 300 requests off:\n{}", off.join("\n"));
}
