//! Engines that do both parts: a conversation finds its prefix as often as where the cache is all that counts.

use std::sync::Arc;

use baton_scheduler::{AdmissionMode, PolicyName, SchedulerConfig};
use baton_sim::engine::Mix;
use baton_sim::{Pool, Setup, TraceWorkload, World, profiles};
use baton_traces::Trace;
use baton_traces::synth::{Kind, Workload, workload};
use baton_types::Role;

/// Share of the prompts' tokens found in the cache, with every request served.
fn hits(policy: PolicyName, (count, mix): (u32, Mix), trace: &Arc<Trace>, speed: f64) -> f64 {
    let profile = Arc::new(profiles::named("llama3-70b-8xa100").unwrap());
    let scheduler = SchedulerConfig { policy, admission: AdmissionMode::None, ..SchedulerConfig::default() };
    let mut setup = Setup::disaggregated(0, 0, &profile, scheduler);
    setup.pools = vec![Pool { mix, ..Pool::new(Role::Both, count, profile) }];
    setup.scheduler.block_tokens = trace.block_tokens;
    let mut world = World::new(setup, Box::new(TraceWorkload::new(Arc::clone(trace), speed))).unwrap();
    world.run().unwrap();
    world.into_metrics().result(("", ""), speed, 1).token_hit_ratio
}

/// Where engines fill whole passes of 8,192 tokens it was 37 of 77 %: what was cached seemed to save nothing.
#[test]
fn conversations_find_as_much_as_where_only_the_cache_counts() {
    // Conversations that are short beside the trace: most of each is in it.
    let usual = Workload::new(Kind::Chat, 3);
    let chats = Workload { requests: 800, requests_per_s: 2.0, think_mean_ms: 15_000.0, ..usual };
    let trace = Arc::new(workload(&chats).unwrap());
    for (count, speeds) in [(16, [0.5, 2.0, 5.0]), (2, [0.1, 0.4, 0.8])] {
        for mix in [Mix::Target(90_000), Mix::Fixed(512), Mix::Fixed(8_192)] {
            for speed in speeds {
                let of = |policy| hits(policy, (count, mix), &trace, speed);
                let (ours, theirs) = (of(PolicyName::Baton), of(PolicyName::LocalCache));
                let what = format!("{count} engines, {mix:?}, speed {speed}");
                assert!(ours > 0.6 && ours >= theirs - 0.01, "{what}: {ours:.4} of {theirs:.4}");
            }
        }
    }
}
