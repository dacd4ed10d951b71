//! Coarse to fine: all coarse choices on a short window, the better ones on longer windows, then one knob at a time.

use super::tally::{RunTally, merit, met};

/// Windows of the coarse rounds, in thousandths of the part to tune on.
const COARSE: [u64; 2] = [250, 500];
/// A third survives each, and no fewer than this.
const SURVIVORS: usize = 4;
/// The whole part to tune on, in thousandths.
const WHOLE: u64 = 1000;
/// Survivors that are refined, each on its own.
const REFINED: usize = 2;
/// Rounds of refinement at most: each changes one knob.
const ROUNDS: usize = 6;
/// Candidates that are judged with every seed.
const FINALISTS: usize = 4;
/// Loss of merit for which a knob goes back to where it was: a thousandth of the requests.
const SIMPLER: f64 = 0.001;

/// One thing to choose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TuningKnob {
    /// What it is called in progress.
    pub name: &'static str,
    /// How many levels it has, in an order in which neighbours are alike.
    pub levels: usize,
    /// The level of the configuration at hand.
    pub base: usize,
    /// Whether the coarse rounds try all its levels, with all of the other coarse knobs.
    pub coarse: bool,
}

/// A level for each knob.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Candidate(pub Vec<usize>);

/// A run that the search wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchTrial {
    /// With these settings.
    pub candidate: Candidate,
    /// On the first part of what there is to tune on, in thousandths.
    pub window_permille: u64,
    /// With this seed, counted from 0.
    pub seed: u64,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchResult {
    /// The best candidate, with no knob turned that did not help.
    pub best: Candidate,
    /// Its merit on the part to tune on, over all seeds.
    pub best_merit: f64,
    /// The merit of the configuration at hand.
    pub base_merit: f64,
    /// Runs asked for.
    pub trials: usize,
}

/// Does the runs of a round, which has a name, and gives back a tally for each, in order.
type TrialDriver<'a, E> = dyn FnMut(&'static str, &[SearchTrial]) -> Result<Vec<RunTally>, E> + 'a;

struct SearchDriver<'a, E> {
    knobs: &'a [TuningKnob],
    targets: &'a [f64],
    runner: &'a mut TrialDriver<'a, E>,
    trials: usize,
}

/// The candidate with the most merit for classes with these target shares, judged with `seeds` seeds.
///
/// # Errors
/// As the runs.
pub fn search<'a, E>(
    knobs: &'a [TuningKnob],
    targets: &'a [f64],
    seeds: u64,
    runner: &'a mut TrialDriver<'a, E>,
) -> Result<SearchResult, E> {
    let mut search = SearchDriver { knobs, targets, runner, trials: 0 };
    let mut left = search.coarse();
    for window in COARSE {
        let keep = left.len().div_ceil(3).max(SURVIVORS);
        left =
            search.ranked("coarse", &left, window, 1)?.into_iter().map(|(one, _)| one).take(keep).collect();
    }
    let base = search.base();
    let mut finalists = Vec::new();
    for start in left.iter().take(REFINED) {
        finalists.extend(search.refine(start)?);
    }
    let mut finalists: Vec<Candidate> = search.best_of(finalists, FINALISTS);
    if !finalists.contains(&base) {
        finalists.push(base.clone());
    }
    let judged = search.ranked("final", &finalists, WHOLE, seeds)?;
    let base_merit = judged.iter().find(|(one, _)| *one == base).map_or(f64::MIN, |(_, merit)| *merit);
    let (best, best_merit) = search.simplify(judged[0].clone(), seeds)?;
    Ok(SearchResult { best, best_merit, base_merit, trials: search.trials })
}

impl<E> SearchDriver<'_, E> {
    fn base(&self) -> Candidate {
        Candidate(self.knobs.iter().map(|knob| knob.base).collect())
    }

    /// Every combination of the coarse knobs, all others at their base.
    fn coarse(&self) -> Vec<Candidate> {
        let mut all = vec![self.base()];
        for (at, _) in self.knobs.iter().enumerate().filter(|(_, knob)| knob.coarse) {
            all = all.iter().flat_map(|one| self.turned(one, at, usize::MAX)).collect();
        }
        all
    }

    /// A candidate with one knob on each of its levels that are no further than `reach`, its own among them.
    fn turned(&self, one: &Candidate, at: usize, reach: usize) -> Vec<Candidate> {
        let now = one.0[at];
        (0..self.knobs[at].levels)
            .filter(|level| level.abs_diff(now) <= reach)
            .map(|level| {
                let mut other = one.clone();
                other.0[at] = level;
                other
            })
            .collect()
    }

    /// The runs of candidates, one for each seed, candidate after candidate.
    fn tallies(
        &mut self,
        round: &'static str,
        candidates: &[Candidate],
        window_permille: u64,
        seeds: u64,
    ) -> Result<Vec<RunTally>, E> {
        let trial =
            |candidate: &Candidate, seed| SearchTrial { candidate: candidate.clone(), window_permille, seed };
        let trials: Vec<SearchTrial> =
            candidates.iter().flat_map(|one| (0..seeds).map(move |seed| trial(one, seed))).collect();
        self.trials += trials.len();
        (self.runner)(round, &trials)
    }

    /// Candidates with their merit, best first; of equal ones the first stays first.
    fn ranked(
        &mut self,
        round: &'static str,
        candidates: &[Candidate],
        window_permille: u64,
        seeds: u64,
    ) -> Result<Vec<(Candidate, f64)>, E> {
        let tallies = self.tallies(round, candidates, window_permille, seeds)?;
        let each = usize::try_from(seeds).unwrap_or(1).max(1);
        let merits = tallies.chunks(each).map(|runs| merit(runs, self.targets));
        let mut ranked: Vec<(Candidate, f64)> = candidates.iter().cloned().zip(merits).collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        Ok(ranked)
    }

    /// Turns one knob at a time as long as that helps; what it came through, with merits.
    fn refine(&mut self, start: &Candidate) -> Result<Vec<(Candidate, f64)>, E> {
        let mut seen = Vec::new();
        let mut now = start.clone();
        for _ in 0..ROUNDS {
            let mut next = vec![now.clone()];
            for (at, knob) in self.knobs.iter().enumerate() {
                // The coarse rounds have seen all levels of a coarse knob: its neighbours are enough.
                let reach = if knob.coarse { 2 } else { usize::MAX };
                next.extend(self.turned(&now, at, reach).into_iter().filter(|other| *other != now));
            }
            let ranked = self.ranked("refine", &next, WHOLE, 1)?;
            let best = ranked[0].0.clone();
            seen.extend(ranked.into_iter().take(FINALISTS));
            if best == now {
                break;
            }
            now = best;
        }
        Ok(seen)
    }

    fn best_of(&self, mut seen: Vec<(Candidate, f64)>, most: usize) -> Vec<Candidate> {
        seen.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        seen.dedup_by(|a, b| a.0 == b.0);
        seen.into_iter().map(|(one, _)| one).take(most).collect()
    }

    /// Puts each knob back to its base, or nearer to it, where that costs next to nothing and misses no target that was met.
    fn simplify(&mut self, found: (Candidate, f64), seeds: u64) -> Result<(Candidate, f64), E> {
        let (mut best, mut best_merit) = found;
        let floor = best_merit - SIMPLER;
        let found = self.tallies("simplify", std::slice::from_ref(&best), WHOLE, seeds)?;
        let wanted = met(&found, self.targets);
        for (at, knob) in self.knobs.iter().enumerate() {
            let now = best.0[at];
            let mut nearer = self.turned(&best, at, usize::MAX);
            nearer.retain(|other| other.0[at].abs_diff(knob.base) < now.abs_diff(knob.base));
            if knob.coarse {
                nearer.retain(|other| other.0[at] == knob.base);
            }
            nearer.sort_by_key(|other| other.0[at].abs_diff(knob.base));
            for other in nearer {
                let runs = self.tallies("simplify", std::slice::from_ref(&other), WHOLE, seeds)?;
                let other_merit = merit(&runs, self.targets);
                let keeps = met(&runs, self.targets).iter().zip(&wanted).all(|(now, wanted)| now >= wanted);
                if keeps && other_merit >= floor {
                    (best, best_merit) = (other, other_merit);
                    break;
                }
            }
        }
        Ok((best, best_merit))
    }
}

/// The least number in `1..=most` for which `suffices` holds, where more always suffices if less does.
///
/// # Errors
/// As `suffices`.
pub fn fewest<E>(most: u32, mut suffices: impl FnMut(u32) -> Result<bool, E>) -> Result<Option<u32>, E> {
    if !suffices(most)? {
        return Ok(None);
    }
    let (mut short, mut enough) = (0, most);
    while enough - short > 1 {
        let middle = short + (enough - short) / 2;
        if suffices(middle)? {
            enough = middle;
        } else {
            short = middle;
        }
    }
    Ok(Some(enough))
}

/// The factors of the load between which the largest one that is met is looked for.
pub const LOADS: (f64, f64) = (0.125, 8.0);

/// The largest factor of the load in an eighth to eight, to within 3 %, that `meets` says is met; three factors are
/// asked for at a time. None where not even an eighth is.
///
/// # Errors
/// As `meets`.
pub fn largest_load<E>(mut meets: impl FnMut(&[f64]) -> Result<Vec<bool>, E>) -> Result<Option<f64>, E> {
    // In powers of two.
    let (mut met, mut missed) = (LOADS.0.log2(), LOADS.1.log2());
    let ends = meets(&[met.exp2(), missed.exp2()])?;
    match ends[..] {
        [false, _] => return Ok(None),
        [_, true] => return Ok(Some(missed.exp2())),
        _ => {}
    }
    while missed - met > 0.04 {
        let step = (missed - met) / 4.0;
        let asked = [met + step, met + 2.0 * step, met + 3.0 * step];
        let answers = meets(&asked.map(f64::exp2))?;
        // The first that is missed ends it: a load beyond that may be met by luck.
        let first = answers.iter().position(|met| !met).unwrap_or(asked.len());
        missed = asked.get(first).copied().unwrap_or(missed);
        met = if first == 0 { met } else { asked[first - 1] };
    }
    Ok(Some(met.exp2()))
}

#[cfg(test)]
mod tests {
    use super::super::tally::tests::even;
    use super::*;
    use crate::interval::BLOCKS;

    const KNOBS: [TuningKnob; 4] = [
        TuningKnob { name: "ratio", levels: 15, base: 7, coarse: true },
        TuningKnob { name: "local", levels: 2, base: 1, coarse: true },
        TuningKnob { name: "step", levels: 4, base: 2, coarse: false },
        TuningKnob { name: "nothing", levels: 3, base: 0, coarse: false },
    ];

    /// A hill with its top at 11, 0, 3; the last knob does nothing. One class, and short windows see it from afar.
    fn hill(trial: &SearchTrial) -> RunTally {
        let [ratio, local, step, _] = trial.candidate.0[..] else { panic!("four knobs") };
        let cost = 3 * ratio.abs_diff(11) + 10 * local + 2 * step.abs_diff(3);
        let blur = if trial.window_permille < WHOLE { 2 } else { 1 };
        even(&[f64::from(u32::try_from(95 - cost / blur * blur).expect("small")) / 100.0])
    }

    fn found(knobs: &[TuningKnob]) -> (SearchResult, Vec<SearchTrial>) {
        let mut asked = Vec::new();
        let result = search(knobs, &[0.99], 2, &mut |_, trials| {
            asked.extend(trials.to_vec());
            Ok::<_, String>(trials.iter().map(hill).collect())
        });
        (result.expect("no run fails"), asked)
    }

    #[test]
    fn the_top_is_found_and_a_knob_that_does_nothing_stays() {
        let (result, asked) = found(&KNOBS);
        assert_eq!(result.best.0, [11, 0, 3, 0]);
        assert!(result.best_merit > result.base_merit);
        assert_eq!(result.trials, asked.len());
        // Far fewer than all, of which there are 15 × 2 × 4 × 3 with two seeds.
        assert!(asked.len() < 200, "{} runs", asked.len());
        assert_eq!(found(&KNOBS), (result, asked), "equal answers, equal questions");
    }

    #[test]
    fn what_is_at_the_top_already_stays() {
        let mut knobs = KNOBS;
        (knobs[0].base, knobs[1].base, knobs[2].base, knobs[3].base) = (11, 0, 3, 2);
        let (result, _) = found(&knobs);
        assert_eq!(result.best.0, [11, 0, 3, 2]);
        assert!((result.best_merit - result.base_merit).abs() < 1e-12);
    }

    /// The base has nearly the merit of the other level, but misses the target by less than half a thousandth.
    #[test]
    fn no_knob_goes_back_to_where_a_target_is_missed() {
        let knobs = [TuningKnob { name: "one", levels: 2, base: 0, coarse: true }];
        let of = |target: f64| {
            let result = search(&knobs, &[target], 1, &mut |_, trials| {
                let run = |trial: &SearchTrial| RunTally {
                    blocks: vec![vec![[2_500, 2_474 + 2 * trial.candidate.0[0] as u64]]; BLOCKS],
                    ..RunTally::default()
                };
                Ok::<_, String>(trials.iter().map(run).collect())
            });
            result.expect("no run fails").best.0
        };
        assert_eq!((of(0.99), of(0.98)), (vec![1], vec![0]));
    }

    #[test]
    fn short_windows_come_first_and_every_finalist_has_every_seed() {
        let (_, asked) = found(&KNOBS);
        let windows: Vec<u64> = asked.iter().map(|trial| trial.window_permille).collect();
        assert!(windows.is_sorted(), "windows only grow");
        assert_eq!(windows.iter().filter(|window| **window == 250).count(), 30);
        let seeds =
            |seed| asked.iter().filter(move |trial| trial.window_permille == WHOLE && trial.seed == seed);
        let base = Candidate(vec![7, 1, 2, 0]);
        assert!(seeds(1).any(|trial| trial.candidate == base), "the base is judged as the others are");
        assert!(seeds(1).count() < seeds(0).count());
    }

    #[test]
    fn a_run_that_fails_ends_the_search() {
        let result = search(&KNOBS, &[0.99], 1, &mut |_, _| Err("no room"));
        assert_eq!(result, Err("no room"));
    }

    #[test]
    fn the_fewest_that_suffice_are_those_that_a_count_finds() {
        for most in 1..20 {
            for need in 1..=most + 1 {
                let found = fewest(most, |n| Ok::<_, String>(n >= need)).expect("no error");
                assert_eq!(found, (1..=most).find(|n| *n >= need), "{need} of {most}");
            }
        }
    }

    #[test]
    fn the_largest_load_is_found_to_within_three_per_cent() {
        let of = |limit: f64| {
            largest_load(|loads| Ok::<_, String>(loads.iter().map(|load| *load <= limit).collect()))
        };
        for limit in [0.13, 0.5, 0.99, 1.0, 1.4, 3.3, 7.9] {
            let load = of(limit).expect("no error").expect("an eighth is met");
            assert!(load <= limit && load >= limit / 1.03, "{load} for {limit}");
        }
        assert_eq!((of(0.1), of(9.0)), (Ok(None), Ok(Some(8.0))));
    }
}
