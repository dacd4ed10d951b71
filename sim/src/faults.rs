//! Faults, drawn from a seed before the run starts, so that a seed names a run.

use baton_types::Rng;
use baton_types::simulated::FaultPlan;

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The instance's process dies.
    Death(u32),
    /// It comes back, empty.
    Rebirth(u32),
    /// It slows to this speed, per mille.
    Slow(u32, u64),
    /// Its network goes down.
    LinkDown(u32),
    /// Its network comes back.
    LinkUp(u32),
}

/// The faults with their times, in order, over a run of `span_us`. Everything is healed by
/// nine tenths of it, so what is admitted after that must finish. Only speeds of engines may last.
#[must_use]
pub fn draw(plan: &FaultPlan, instances: u32, span_us: u64) -> Vec<(u64, Fault)> {
    let mut rng = Rng::fork(plan.seed, 77);
    let mut faults = Vec::new();
    let last = (span_us / 10 * 8).max(1);
    let moment = |rng: &mut Rng| (rng.below(last), rng.below(span_us / 10 + 1) + 1);
    let speed = u64::from(plan.engine_speed_permille);
    if speed != 1000 {
        faults.extend((0..instances).map(|instance| (0, Fault::Slow(instance, speed))));
    }
    let pick = |rng: &mut Rng| u32::try_from(rng.below(u64::from(instances))).expect("below a u32");
    for _ in 0..plan.deaths {
        let ((at, pause), instance) = (moment(&mut rng), pick(&mut rng));
        faults.push((at, Fault::Death(instance)));
        faults.push((at + pause, Fault::Rebirth(instance)));
    }
    for _ in 0..plan.slow_nodes {
        let ((at, pause), instance) = (moment(&mut rng), pick(&mut rng));
        let slow = Fault::Slow(instance, (200 + rng.below(600)) * speed / 1000);
        if plan.slow_nodes_last {
            faults.push((0, slow));
        } else {
            faults.push((at, slow));
            faults.push((at + pause, Fault::Slow(instance, speed)));
        }
    }
    for _ in 0..plan.lost_links {
        let ((at, pause), instance) = (moment(&mut rng), pick(&mut rng));
        faults.push((at, Fault::LinkDown(instance)));
        faults.push((at + pause, Fault::LinkUp(instance)));
    }
    faults.sort_by_key(|(at, _)| *at);
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_names_a_plan_and_every_wound_heals() {
        let plan = FaultPlan { deaths: 3, slow_nodes: 2, lost_links: 4, seed: 9, ..FaultPlan::default() };
        let faults = draw(&plan, 8, 1_000_000);
        assert_eq!(faults, draw(&plan, 8, 1_000_000));
        assert_ne!(faults, draw(&FaultPlan { seed: 10, ..plan }, 8, 1_000_000));
        assert_eq!(faults.len(), 18);
        assert!(faults.is_sorted_by_key(|(at, _)| *at) && faults.iter().all(|(at, _)| *at <= 900_001));
        let count = |f: fn(&Fault) -> bool| faults.iter().filter(|(_, x)| f(x)).count();
        assert_eq!(count(|f| matches!(f, Fault::Death(_))), count(|f| matches!(f, Fault::Rebirth(_))));
        assert!(draw(&FaultPlan::default(), 8, 1_000_000).is_empty(), "nothing is planned, nothing is drawn");
    }

    #[test]
    fn a_speed_of_all_engines_holds_from_the_first_moment_and_a_slow_node_returns_to_it() {
        let plan = FaultPlan { engine_speed_permille: 500, slow_nodes: 1, ..FaultPlan::default() };
        let faults = draw(&plan, 3, 1_000_000);
        let first: Vec<_> = (0..3).map(|instance| (0, Fault::Slow(instance, 500))).collect();
        assert_eq!(faults[..3], first);
        let [(_, Fault::Slow(_, slow)), (_, Fault::Slow(_, healed))] = faults[3..] else {
            panic!("one slow node: {faults:?}");
        };
        assert!((100..400).contains(&slow) && healed == 500, "{faults:?}");
    }

    #[test]
    fn a_node_that_stays_slow_is_so_from_the_first_moment_to_the_last() {
        let plan = FaultPlan { slow_nodes: 2, slow_nodes_last: true, seed: 3, ..FaultPlan::default() };
        let faults = draw(&plan, 8, 1_000_000);
        assert_eq!(faults.len(), 2, "nothing heals: {faults:?}");
        let slow = |(at, fault): &(u64, Fault)| *at == 0 && matches!(fault, Fault::Slow(_, 200..800));
        assert!(faults.iter().all(slow), "{faults:?}");
    }
}
