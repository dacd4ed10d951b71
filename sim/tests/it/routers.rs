//! Several routers serve nearly as many requests in time as one: each knows what waits with the others.

use std::sync::Arc;

use baton_scheduler::SchedulerConfig;
use baton_sim::engine::Mix;
use baton_sim::{Setup, TraceWorkload, World, profiles};
use baton_traces::{Dialect, Record, Trace};
use baton_types::{Rng, SloClass};

const BLOCK: u64 = 512;

/// Prompts of all lengths, a few of which begin alike. Eight at a time arrive in the same moment, so that routers decide
/// without a word from each other.
fn bursts() -> Arc<Trace> {
    let mut rng = Rng::new(5);
    let mut fresh = 1_000_000;
    let record = |at: u64| {
        let input_length = 500 + rng.below(30_000);
        let blocks = input_length.div_ceil(BLOCK);
        let shared = rng.below(3) * 10;
        let own = blocks.saturating_sub(shared);
        fresh += own;
        #[expect(clippy::cast_precision_loss, reason = "a small number")]
        let timestamp_ms = (at / 8 * 1_500) as f64;
        let opening = (0..shared).map(|block| shared * 100 + block).take(usize::try_from(blocks).unwrap());
        let hash_ids = opening.chain(fresh - own..fresh).collect();
        Record { timestamp_ms, input_length, output_length: 100, hash_ids, extra: None }
    };
    let records = (0..1_200).map(record).collect();
    Arc::new(Trace { block_tokens: 512, records, assumptions: vec![], dialect: Dialect::Mooncake })
}

/// Requests that were served in time, and requests that were served late.
fn served(trace: &Arc<Trace>, routers: u32) -> (u64, u64) {
    let classes = vec![SloClass { ttft_us: 20_000_000, tbt_us: 100_000, ..SloClass::default() }];
    let scheduler = SchedulerConfig { classes, block_tokens: 512, ..SchedulerConfig::default() };
    let profile = Arc::new(profiles::named("llama3-70b-8xa100").unwrap());
    let mut setup = Setup::disaggregated(4, 4, &profile, scheduler);
    setup.pools.iter_mut().for_each(|pool| pool.mix = Mix::Fixed(pool.pass_tokens));
    (setup.routers, setup.router_sync_us) = (routers, 10_000);
    let mut world = World::new(setup, Box::new(TraceWorkload::new(Arc::clone(trace), 1.0))).unwrap();
    world.run().unwrap();
    let result = world.into_metrics().result(("", ""), 1.0, 1);
    (result.in_slo, result.completed - result.in_slo)
}

/// A regression: a router did not know what waited with the others. On the conversation trace at four times its speed eight
/// of them served 4,859 requests in time, and one 11,146.
#[test]
fn several_routers_serve_nearly_what_one_serves() {
    let trace = bursts();
    let (alone, _) = served(&trace, 1);
    assert!((600..1_100).contains(&alone), "{alone} of 1,200: there is more load than capacity");
    for (routers, permille) in [(2, 980), (4, 970), (8, 950)] {
        let (in_time, late) = served(&trace, routers);
        assert!(in_time * 1_000 >= alone * permille, "{routers} routers: {in_time} of {alone}");
        assert!(late * 50 <= in_time, "{routers} routers: {late} were let in and came too late");
    }
}
