//! What `baton tune` may change: each knob with its levels, and the configuration that a choice stands for.
//!
//! A knob is here because runs of other loads differed by it by more than chance; docs/tune.md says why for each.

use anyhow::{Result, ensure};
use baton_scheduler::AdmissionMode;
use baton_sim::tune::{Candidate, TuningKnob};
use baton_types::Role;

use crate::cli::nodes::RoleSplit;
use crate::config::Config;

/// Ratios of prefill to decode that are tried at most.
const MOST_SPLITS: u32 = 16;

/// One thing to change, with the value of each level.
#[derive(Clone, Debug)]
enum LevelList {
    /// Nodes that prefill and that decode.
    Split(Vec<RoleSplit>),
    /// `local_prefill`.
    Local(Vec<bool>),
    /// `mixed_step_permille`.
    Step(Vec<u32>),
    Admission(Vec<AdmissionMode>),
    Replicate(Vec<bool>),
    /// How many of the classes, by TTFT, have a band above the others; the first level leaves priorities alone.
    Bands(Vec<u32>),
    /// Whether requests of the tightest class may be displaced.
    Sheddable(Vec<bool>),
    /// `headroom_permille` of all classes but the tightest.
    Headroom(Vec<u32>),
    /// `weight` of the tightest class.
    Weight(Vec<u32>),
    /// `dram_tokens` of every node.
    Dram(Vec<u64>),
    /// `ssd_tokens` of every node.
    Ssd(Vec<u64>),
}

/// What may be changed of a configuration, for a number of nodes.
#[derive(Clone, Debug)]
pub struct TuningOptions {
    base: Config,
    knobs: Vec<TuningKnob>,
    settings: Vec<LevelList>,
}

/// Bounds that an operator gives.
#[derive(Clone, Copy, Debug, Default)]
pub struct NodeRoom {
    /// KV tokens that a node may hold in DRAM; 0 leaves the setting alone.
    pub dram_tokens: u64,
    /// The same on SSD.
    pub ssd_tokens: u64,
    /// Whether the trace has several tenants.
    pub tenants: bool,
}

/// Levels in order with the present value among them, and where that is.
fn around<T: Copy + Ord>(base: T, others: &[T]) -> (Vec<T>, usize) {
    let mut levels: Vec<T> = others.iter().copied().chain([base]).collect();
    levels.sort_unstable();
    levels.dedup();
    let at = levels.binary_search(&base).unwrap_or(0);
    (levels, at)
}

/// The same for values without an order: the present one first.
fn beside<T: Copy + PartialEq>(base: T, others: &[T]) -> (Vec<T>, usize) {
    let rest = others.iter().copied().filter(|other| *other != base);
    ([base].into_iter().chain(rest).collect(), 0)
}

/// The nodes of a configuration, in its ratio.
///
/// # Errors
/// Where there are no nodes of each role to take the ratio from.
pub fn split_of(config: &Config, nodes: Option<u32>) -> Result<RoleSplit> {
    let count =
        |role| config.cluster.pools.iter().filter(|pool| pool.role == role).map(|pool| pool.count).sum();
    let (prefills, decodes): (u32, u32) = (count(Role::Prefill), count(Role::Decode));
    ensure!(
        prefills > 0 && decodes > 0 && count(Role::Both) == 0,
        "tune: it looks for a ratio of prefill to decode nodes; give [[cluster.pools]] of these two roles, and none of \
         role \"both\""
    );
    let all = prefills + decodes;
    let nodes = nodes.unwrap_or(all);
    ensure!(
        nodes >= 2,
        "tune: {nodes} nodes are too few for one that prefills and one that decodes; give 2 or more"
    );
    let scaled = (u64::from(nodes) * u64::from(prefills) * 2 + u64::from(all)) / (2 * u64::from(all));
    let prefills = u32::try_from(scaled).unwrap_or(nodes).clamp(1, nodes - 1);
    Ok(RoleSplit { prefills, decodes: nodes - prefills })
}

impl TuningOptions {
    /// What may be changed of a configuration with this many nodes.
    ///
    /// # Errors
    /// As [`split_of`] and [`RoleSplit::apply`].
    pub fn new(config: &Config, nodes: Option<u32>, room: NodeRoom) -> Result<Self> {
        let mut base = config.clone();
        let split = split_of(&base, nodes)?;
        split.apply(&mut base)?;
        let mut space = Self { base, knobs: Vec::new(), settings: Vec::new() };
        space.cluster(split, room);
        space.placement();
        space.classes(room.tenants);
        Ok(space)
    }

    fn cluster(&mut self, split: RoleSplit, room: NodeRoom) {
        let nodes = split.prefills + split.decodes;
        let tried = (nodes - 1).min(MOST_SPLITS);
        let all: Vec<u32> = (1..=tried).map(|at| (at * nodes / (tried + 1)).clamp(1, nodes - 1)).collect();
        let (prefills, at) = around(split.prefills, &all);
        let splits = prefills.iter().map(|&prefills| RoleSplit { prefills, decodes: nodes - prefills });
        self.add("prefill and decode nodes", (LevelList::Split(splits.collect()), prefills.len(), at), true);
        let pool = &self.base.cluster.pools[0];
        let (dram, ssd) = (pool.dram_tokens, pool.ssd_tokens);
        let parts = |most: u64| [0, most / 4, most / 2, most];
        if room.dram_tokens > 0 {
            let (levels, at) = around(dram, &parts(room.dram_tokens));
            self.add("DRAM", (LevelList::Dram(levels.clone()), levels.len(), at), false);
        }
        if room.ssd_tokens > 0 {
            let (levels, at) = around(ssd, &parts(room.ssd_tokens));
            self.add("SSD", (LevelList::Ssd(levels.clone()), levels.len(), at), false);
        }
    }

    fn placement(&mut self) {
        let scheduler = self.base.scheduler.clone();
        let (levels, at) = beside(scheduler.local_prefill, &[true, false]);
        self.add("local prefill", (LevelList::Local(levels), 2, at), true);
        let (levels, at) = around(scheduler.mixed_step_permille, &[700, 800, 900, 1000]);
        self.add("mixed step", (LevelList::Step(levels.clone()), levels.len(), at), false);
        let modes =
            [AdmissionMode::Auto, AdmissionMode::Early, AdmissionMode::EarlyPredict, AdmissionMode::None];
        let (levels, at) = beside(scheduler.admission, &modes);
        self.add("admission", (LevelList::Admission(levels.clone()), levels.len(), at), false);
        let (levels, at) = beside(scheduler.replicate, &[true, false]);
        self.add("replication", (LevelList::Replicate(levels), 2, at), false);
    }

    fn classes(&mut self, tenants: bool) {
        let classes = &self.base.scheduler.classes;
        if classes.len() < 2 {
            return;
        }
        let tightest = classes[self.by_ttft()[0]].clone();
        let more = u32::try_from(classes.len()).unwrap_or(u32::MAX);
        let bands: Vec<u32> = (0..more).collect();
        self.add("priority", (LevelList::Bands(bands.clone()), bands.len(), 0), true);
        let (levels, at) = beside(tightest.sheddable, &[true, false]);
        self.add("sheddable", (LevelList::Sheddable(levels), 2, at), false);
        let order = self.by_ttft();
        let others = order[1..].iter().map(|at| self.base.scheduler.classes[*at].headroom_permille);
        let (levels, at) = around(others.max().unwrap_or(0), &[0, 100, 300]);
        self.add("headroom", (LevelList::Headroom(levels.clone()), levels.len(), at), false);
        if tenants {
            let (levels, at) = around(tightest.weight, &[1, 2, 4]);
            self.add("weight", (LevelList::Weight(levels.clone()), levels.len(), at), false);
        }
    }

    fn add(&mut self, name: &'static str, (setting, levels, base): (LevelList, usize, usize), coarse: bool) {
        self.knobs.push(TuningKnob { name, levels, base, coarse });
        self.settings.push(setting);
    }

    /// The classes by number, the one with the tightest TTFT first.
    fn by_ttft(&self) -> Vec<usize> {
        let classes = &self.base.scheduler.classes;
        let mut order: Vec<usize> = (0..classes.len()).collect();
        order.sort_by_key(|at| classes[*at].ttft_us);
        order
    }

    /// The knobs.
    pub fn knobs(&self) -> &[TuningKnob] {
        &self.knobs
    }

    /// The configuration at hand, with the nodes asked for.
    pub const fn base(&self) -> &Config {
        &self.base
    }

    /// The configuration of a candidate.
    ///
    /// # Errors
    /// Where a combination is none that a configuration may have.
    pub fn config(&self, candidate: &Candidate) -> Result<Config> {
        let mut config = self.base.clone();
        for ((setting, knob), &level) in self.settings.iter().zip(&self.knobs).zip(&candidate.0) {
            if level != knob.base {
                self.turn(&mut config, setting, level)?;
            }
        }
        config.validate()?;
        Ok(config)
    }

    fn turn(&self, config: &mut Config, setting: &LevelList, level: usize) -> Result<()> {
        let order = self.by_ttft();
        let scheduler = &mut config.scheduler;
        let computing = config.cluster.pools.iter_mut().filter(|pool| pool.role != Role::Store);
        match setting {
            LevelList::Split(splits) => splits[level].apply(config)?,
            LevelList::Local(either) => scheduler.local_prefill = either[level],
            LevelList::Step(shares) => scheduler.mixed_step_permille = shares[level],
            LevelList::Admission(modes) => scheduler.admission = modes[level],
            LevelList::Replicate(either) => scheduler.replicate = either[level],
            LevelList::Bands(above) => {
                let bands = (0..=i32::try_from(above[level]).unwrap_or(0)).rev();
                for (at, priority) in order.iter().zip(bands.chain(std::iter::repeat(0))) {
                    scheduler.classes[*at].priority = priority;
                }
            }
            LevelList::Sheddable(either) => scheduler.classes[order[0]].sheddable = either[level],
            LevelList::Headroom(shares) => {
                order[1..].iter().for_each(|at| scheduler.classes[*at].headroom_permille = shares[level]);
            }
            LevelList::Weight(weights) => scheduler.classes[order[0]].weight = weights[level],
            LevelList::Dram(tokens) => computing.for_each(|pool| pool.dram_tokens = tokens[level]),
            LevelList::Ssd(tokens) => computing.for_each(|pool| pool.ssd_tokens = tokens[level]),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(text: &str, nodes: Option<u32>, room: NodeRoom) -> TuningOptions {
        TuningOptions::new(&crate::config::parse(text).expect("valid"), nodes, room).expect("a space")
    }

    fn two_classes() -> TuningOptions {
        space(
            "[[scheduler.classes]]\nname = \"batch\"\nttft = \"60s\"\n[[scheduler.classes]]\nname = \"chat\"\nttft = \"2s\"\n",
            None,
            NodeRoom { dram_tokens: 400_000, tenants: true, ..NodeRoom::default() },
        )
    }

    fn base(space: &TuningOptions) -> Candidate {
        Candidate(space.knobs().iter().map(|knob| knob.base).collect())
    }

    #[test]
    fn the_base_is_the_configuration_at_hand() {
        let space = space("", None, NodeRoom::default());
        assert_eq!(space.config(&base(&space)).unwrap(), Config::default());
        let names: Vec<&str> = space.knobs().iter().map(|knob| knob.name).collect();
        let of_one_class =
            ["prefill and decode nodes", "local prefill", "mixed step", "admission", "replication"];
        assert_eq!(names, of_one_class);
        assert_eq!(space.knobs()[0].levels, 15);
    }

    #[test]
    fn every_level_of_every_knob_is_a_valid_configuration_of_its_own() {
        let space = two_classes();
        assert_eq!(space.knobs().len(), 10);
        let mut seen = vec![space.base().clone()];
        for (at, knob) in space.knobs().iter().enumerate() {
            for level in (0..knob.levels).filter(|level| *level != knob.base) {
                let mut candidate = base(&space);
                candidate.0[at] = level;
                let config = space.config(&candidate).expect("valid");
                assert!(!seen.contains(&config), "{} {level} changes nothing", knob.name);
                seen.push(config);
            }
        }
    }

    #[test]
    fn bands_go_by_the_tightest_objective() {
        let space = two_classes();
        let at = space.knobs().iter().position(|knob| knob.name == "priority").expect("two classes");
        let mut candidate = base(&space);
        candidate.0[at] = 1;
        let classes = space.config(&candidate).expect("valid").scheduler.classes;
        assert_eq!([classes[0].priority, classes[1].priority], [0, 1]);
    }

    #[test]
    fn other_numbers_of_nodes_have_the_ratio_of_the_configuration() {
        let config = |text| crate::config::parse(text).expect("valid");
        let three = config(
            "[[cluster.pools]]\nrole = \"prefill\"\ncount = 3\n[[cluster.pools]]\nrole = \"decode\"\n",
        );
        let of = |nodes| split_of(&three, nodes).expect("a ratio").to_string();
        assert_eq!([of(None), of(Some(16)), of(Some(2))], ["3P1D", "12P4D", "1P1D"]);
        assert!(split_of(&three, Some(1)).is_err_and(|e| e.to_string().contains("2 or more")));
        let both = config("[[cluster.pools]]\nrole = \"both\"\ncount = 4\n");
        assert!(split_of(&both, None).is_err_and(|e| e.to_string().contains("\"both\"")));
        assert!(space("", Some(400), NodeRoom::default()).knobs()[0].levels <= 17);
    }
}
