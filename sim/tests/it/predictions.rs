//! What is predicted of first tokens and of token gaps holds as often as it should, also on engines unlike their profile and beyond what
//! they serve.

use std::sync::Arc;

use baton_scheduler::{PathFigures, SchedulerConfig};
use baton_sim::{Pool, Setup, TraceWorkload, World, profiles};
use baton_types::{Role, SloClass};

use super::beyond::steady;

/// The predictions of a run of 4,500 requests on engines of that speed, for each path that had some hundred of them.
fn predictions(roles: &[(Role, u32)], speed: f64, engine_permille: u32) -> Vec<PathFigures> {
    let classes = vec![SloClass { ttft_us: 10_000_000, tbt_us: 100_000, ..SloClass::default() }];
    let scheduler = SchedulerConfig { classes, block_tokens: 512, ..SchedulerConfig::default() };
    let profile = Arc::new(profiles::named("llama3-70b-8xa100").unwrap());
    let mut setup = Setup::disaggregated(0, 0, &profile, scheduler);
    setup.pools = roles.iter().map(|(role, count)| Pool::new(*role, *count, Arc::clone(&profile))).collect();
    setup.faults.engine_speed_permille = engine_permille;
    let trace = steady(7, (500, 9_500), (1_500, 6.0));
    let workload = TraceWorkload::new(Arc::clone(&trace), speed).repeated(3);
    let mut world = World::new(setup, Box::new(workload)).unwrap();
    world.run().unwrap();
    let result = world.into_metrics().result(("", ""), speed, 1);
    result.classes[0].predictions.iter().filter(|path| path.ttft.requests > 400).copied().collect()
}

#[test]
fn nine_of_ten_keep_to_what_is_predicted() {
    let pairs = [(Role::Prefill, 2), (Role::Decode, 2)];
    for roles in [&pairs[..], &[(Role::Both, 4)]] {
        for engine_permille in [667, 1_000, 1_500] {
            for load in [0.3, 0.6, 1.5] {
                let paths = predictions(roles, load * f64::from(engine_permille) / 1_000.0, engine_permille);
                assert!(!paths.is_empty());
                let figures = paths.iter().flat_map(|path| {
                    path.all().into_iter().take(3).map(|(target, figures)| (path.path, target, figures))
                });
                for (path, target, figures) in figures {
                    let what = format!(
                        "{roles:?}, {engine_permille}, load {load}, {path:?}, {target:?}: {figures:?}"
                    );
                    let [covered, bias] = [figures.covered, figures.bias].map(|figure| figure.unwrap());
                    assert!((0.86..0.94).contains(&covered), "{what}");
                    assert!(bias.abs() < 0.05, "{what}");
                }
            }
        }
    }
}
