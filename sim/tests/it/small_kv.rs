//! Engines whose KV holds a few of their prompts: what is let in comes in time all the same.

use std::sync::Arc;

use baton_scheduler::SchedulerConfig;
use baton_sim::engine::Mix;
use baton_sim::{Pool, Setup, TraceWorkload, World, profiles};
use baton_traces::Trace;
use baton_types::{Rng, Role, SloClass};

use crate::beyond::steady;

/// Prompts of 1,350 tokens in the mean with answers of 225, `per_s` a second.
fn chats(per_s: f64) -> Arc<Trace> {
    let mut trace = steady(5, (200, 2_500), (8_000, per_s)).as_ref().clone();
    let mut rng = Rng::new(6);
    for row in &mut trace.records {
        // As many are of 50 tokens as of 100, of 200 and of 550.
        row.output_length = [50, 100, 200, 550][usize::try_from(rng.below(4)).unwrap()];
    }
    Arc::new(trace)
}

/// Requests in time and late on four whole servers with so many KV tokens each.
fn served(hbm_tokens: u64, per_s: f64) -> (u64, u64) {
    let classes = vec![SloClass { ttft_us: 30_000_000, tbt_us: 100_000, ..SloClass::default() }];
    let scheduler = SchedulerConfig { classes, block_tokens: 512, ..SchedulerConfig::default() };
    let profile = Arc::new(profiles::named("llama3-70b-8xa100").unwrap());
    let mut setup = Setup::disaggregated(0, 0, &profile, scheduler);
    let mix = Mix::Target(setup.scheduler.step_target_us());
    let pool = Pool::new(Role::Both, 4, profile);
    setup.pools = vec![Pool { mix, hbm_tokens: Some(hbm_tokens), ..pool }];
    let mut world = World::new(setup, Box::new(TraceWorkload::new(chats(per_s), 1.0))).unwrap();
    world.run().unwrap();
    let result = world.into_metrics().result(("", ""), 1.0, 1);
    let late = result.completed - result.in_slo;
    println!("{hbm_tokens} tokens, {per_s} a second: {} in time, {late} late", result.in_slo);
    (result.in_slo, late)
}

/// A regression: a decode that was planned for later was taken to be as short as one without prompts beside it, and what
/// waited for room as if it took none. In time and late were 4,002 and 367, 5,329 and 1,890, 4,005 and 2,317.
#[test]
fn what_is_let_in_comes_in_time_where_kv_holds_a_few_prompts() {
    for (hbm_tokens, per_s, least) in [(32_768, 15.0, 4_200), (65_536, 14.0, 6_500), (65_536, 18.0, 5_200)] {
        let (in_slo, late) = served(hbm_tokens, per_s);
        assert!(in_slo >= least, "{hbm_tokens} tokens, {per_s} a second: {in_slo} in time");
        assert!(late * 50 <= in_slo, "{hbm_tokens} tokens, {per_s} a second: {in_slo} in time, {late} late");
    }
}
