//! Faults, drawn from a seed before the run starts, so that a seed names a run.

use baton_types::Rng;

/// How many faults of each kind strike during a run, and how news of caches go astray.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// Instances that die and come back empty, in a new epoch.
    pub deaths: u32,
    /// Instances that turn slow for a while.
    pub slow_nodes: u32,
    /// Links that go down for a while.
    pub lost_links: u32,
    /// Cache news that never arrive, per mille.
    pub lost_news_permille: u32,
    /// How late cache news arrive, µs.
    pub news_delay_us: u64,
    /// Seed of when and where.
    pub seed: u64,
}

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

impl FaultPlan {
    /// The faults with their times, in order, over a run of `span_us`. Everything is healed by
    /// nine tenths of it: what is admitted after that must finish.
    #[must_use]
    pub fn draw(&self, instances: u32, span_us: u64) -> Vec<(u64, Fault)> {
        let mut rng = Rng::fork(self.seed, 77);
        let mut faults = Vec::new();
        let last = (span_us / 10 * 8).max(1);
        let moment = |rng: &mut Rng| (rng.below(last), rng.below(span_us / 10 + 1) + 1);
        let pick = |rng: &mut Rng| u32::try_from(rng.below(u64::from(instances))).expect("below a u32");
        for _ in 0..self.deaths {
            let ((at, pause), instance) = (moment(&mut rng), pick(&mut rng));
            faults.push((at, Fault::Death(instance)));
            faults.push((at + pause, Fault::Rebirth(instance)));
        }
        for _ in 0..self.slow_nodes {
            let ((at, pause), instance) = (moment(&mut rng), pick(&mut rng));
            faults.push((at, Fault::Slow(instance, 200 + rng.below(600))));
            faults.push((at + pause, Fault::Slow(instance, 1000)));
        }
        for _ in 0..self.lost_links {
            let ((at, pause), instance) = (moment(&mut rng), pick(&mut rng));
            faults.push((at, Fault::LinkDown(instance)));
            faults.push((at + pause, Fault::LinkUp(instance)));
        }
        faults.sort_by_key(|(at, _)| *at);
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_names_a_plan_and_every_wound_heals() {
        let plan = FaultPlan { deaths: 3, slow_nodes: 2, lost_links: 4, seed: 9, ..FaultPlan::default() };
        let faults = plan.draw(8, 1_000_000);
        assert_eq!(faults, plan.draw(8, 1_000_000));
        assert_ne!(faults, FaultPlan { seed: 10, ..plan }.draw(8, 1_000_000));
        assert_eq!(faults.len(), 18);
        assert!(faults.is_sorted_by_key(|(at, _)| *at) && faults.iter().all(|(at, _)| *at <= 900_001));
        let count = |f: fn(&Fault) -> bool| faults.iter().filter(|(_, x)| f(x)).count();
        assert_eq!(count(|f| matches!(f, Fault::Death(_))), count(|f| matches!(f, Fault::Rebirth(_))));
        assert!(FaultPlan::default().draw(8, 1_000_000).is_empty(), "nothing is planned, nothing is drawn");
    }
}
