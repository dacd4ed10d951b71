//! Three times the load that is served: as much of it is in time as at that load.

use std::sync::Arc;

use baton_scheduler::SchedulerConfig;
use baton_sim::engine::Mix;
use baton_sim::{Setup, TraceWorkload, World, profiles};
use baton_traces::{Dialect, Record, Trace};
use baton_types::{Rng, SloClass};

const BLOCK: u64 = 512;

/// So many prompts of `shortest` to `longest` tokens without a common beginning, at random moments, `per_s` a second.
pub(super) fn steady(seed: u64, (shortest, longest): (u64, u64), (count, per_s): (u32, f64)) -> Arc<Trace> {
    let mut rng = Rng::new(seed);
    let (mut at_ms, mut fresh) = (0.0, 0);
    let record = |_| {
        at_ms += -(1.0 - rng.unit()).ln() * 1_000.0 / per_s;
        let input_length = shortest + rng.below(longest - shortest + 1);
        let blocks = input_length.div_ceil(BLOCK);
        fresh += blocks;
        Record {
            timestamp_ms: at_ms,
            input_length,
            output_length: 32,
            hash_ids: (fresh - blocks..fresh).collect(),
            extra: None,
        }
    };
    let records = (0..count).map(record).collect();
    Arc::new(Trace { block_tokens: 512, records, assumptions: vec![], dialect: Dialect::Mooncake })
}

/// Requests that completed in time, and requests that completed late.
fn served(trace: &Arc<Trace>, speed: f64, ttft_us: u64) -> (u64, u64) {
    let classes = vec![SloClass { ttft_us, tbt_us: 100_000, ..SloClass::default() }];
    let scheduler = SchedulerConfig { classes, block_tokens: 512, ..SchedulerConfig::default() };
    let profile = Arc::new(profiles::named("llama3-70b-8xa100").unwrap());
    let mut setup = Setup::disaggregated(2, 2, &profile, scheduler);
    // Engines fill whole passes, as they do when no chunk is set.
    setup.pools.iter_mut().for_each(|pool| pool.mix = Mix::Fixed(pool.pass_tokens));
    let mut world = World::new(setup, Box::new(TraceWorkload::new(Arc::clone(trace), speed))).unwrap();
    world.run().unwrap();
    let result = world.into_metrics().result(("", ""), speed, 1);
    (result.in_slo, result.completed - result.in_slo)
}

/// Two prompts of 3,000 tokens were sent into one pass, and the first of them came 0.2 s after its objective: at three
/// times the load 310 of 587 that were let in were in time, 0.64 of what it serves.
#[test]
fn as_much_is_in_time_at_three_times_the_load() {
    for (lengths, per_s, ttft_us) in [
        ((3_000, 3_000), 6.0, 2_000_000),
        ((3_000, 3_000), 6.0, 10_000_000),
        ((500, 5_500), 6.0, 2_000_000),
        ((1_000, 1_000), 17.0, 1_000_000),
        ((10_000, 30_000), 0.7, 10_000_000),
    ] {
        for seed in [1, 2] {
            let trace = steady(seed, lengths, (1_500, per_s));
            let (at_one, _) = served(&trace, 1.0, ttft_us);
            let (at_three, late) = served(&trace, 3.0, ttft_us);
            let what =
                format!("{lengths:?} in {ttft_us} µs, seed {seed}: {at_one} and {at_three}, {late} late");
            println!("{what}");
            assert!(at_one >= 1_300, "it serves the load: {what}");
            // Three times as fast it takes a third of the time.
            assert!(at_three * 3 * 100 >= at_one * 95, "{what}");
        }
    }
}
