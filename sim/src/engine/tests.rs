//! Engines against a driver that gives them work, in both ways of stepping.

mod passes;
mod stepping;

use baton_types::{DecodeCost, FitReport, PrefillCost, ValidRange};
use std::collections::BTreeMap;

use super::*;

/// 1 µs a prompt token and 100 µs a pass, 100 µs a decode step and 1 µs for each 100 tokens of
/// context; 40 µs of a mixed step are paid once. With `attention_ps`, so much for each pair.
pub(super) fn profile(attention_ps: f64) -> Arc<CostProfile> {
    let profile = CostProfile {
        name: "round".into(),
        source: "made up for tests".into(),
        kv_bytes_per_token: 1000,
        kv_capacity_tokens: 1_000_000,
        layers: 10,
        shared_us: 40.0,
        fit: FitReport::default(),
        valid: ValidRange { max_prompt_tokens: 100_000, max_batch: 3, max_context_tokens: 700 },
        prefill: PrefillCost {
            knots_tokens: vec![0, 1000],
            knots_us: vec![100.0, 1100.0],
            attention_ps_per_pair: attention_ps,
        },
        decode: DecodeCost { batches: vec![1], base_us: vec![100.0], context_ps_per_token: vec![10_000.0] },
    };
    profile.validate().unwrap();
    Arc::new(profile)
}

/// An action of the driver on its engine.
#[derive(Clone, Debug)]
pub(super) enum Act {
    Prefill { slot: u32, order: u64, new: u64, prefix: u64 },
    Decode { slot: u32, tokens: u32, context: u64, first_due: bool },
    Remove(u32),
    Speed(u64),
    Die,
    Look,
}

/// The recorded outcome of one slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Story {
    pub prefilled: Option<(u64, u64)>,
    pub first_token_us: Option<u64>,
    pub decoded: Option<(u64, u32)>,
    pub gaps_us: Vec<u32>,
    pub lost: Option<LostDecode>,
}

/// Runs an engine as the world does: ends first, then acts, then planning, then late acts.
pub(super) struct Driver {
    pub engine: Engine,
    pub stories: BTreeMap<u32, Story>,
    /// Looks: when, batch, context.
    pub looks: Vec<(u64, usize, u64)>,
    now_us: u64,
    wake: Option<(u64, u32)>,
    leaving_us: VecDeque<u64>,
    ended: Vec<EngineEvent>,
}

impl Driver {
    pub(super) fn new(engine: Engine) -> Self {
        Self {
            engine,
            stories: BTreeMap::new(),
            looks: Vec::new(),
            now_us: 0,
            wake: None,
            leaving_us: VecDeque::new(),
            ended: Vec::new(),
        }
    }

    /// Plays all acts, the late ones after planning, and goes on until the engine is idle.
    pub(super) fn play(mut self, acts: &[(u64, bool, Act)]) -> Self {
        let mut acts: VecDeque<(u64, bool, Act)> = acts.iter().cloned().collect();
        acts.make_contiguous().sort_by_key(|(at_us, late, _)| (*at_us, *late));
        loop {
            let due = [acts.front().map(|a| a.0), self.wake.map(|w| w.0), self.leaving_us.front().copied()];
            let Some(now_us) = due.into_iter().flatten().min() else { break };
            assert!(now_us >= self.now_us, "time goes back");
            self.now_us = now_us;
            self.ends();
            while let Some((_, _, act)) = acts.pop_front_if(|a| a.0 == now_us && !a.1) {
                self.act(act, false);
            }
            self.plan();
            while let Some((_, _, act)) = acts.pop_front_if(|a| a.0 == now_us && a.1) {
                self.act(act, true);
            }
            self.plan();
        }
        assert_eq!(
            (self.engine.jobs(), self.engine.batch()),
            (0, 0),
            "the engine went to sleep over its work"
        );
        self
    }

    fn ends(&mut self) {
        if let Some((_, version)) = self.wake.take_if(|w| w.0 == self.now_us) {
            let leaves_us = self.engine.advance(version, &mut self.ended);
            self.leaving_us.extend(leaves_us);
        }
        while self.leaving_us.pop_front_if(|at| *at == self.now_us).is_some() {
            self.engine.drain_pipeline(self.now_us, &mut self.ended);
        }
        self.note();
        self.engine.forget_gaps();
    }

    fn plan(&mut self) {
        self.engine.join(self.now_us);
        for (slot, _) in std::mem::take(&mut self.engine.starved) {
            self.engine.extend(slot, 3);
        }
        // The engine ignores an outdated wake-up: every change gives its stride a new version.
        self.wake = self.engine.poll(self.now_us).or(self.wake);
    }

    fn act(&mut self, act: Act, planned: bool) {
        let at = Moment { now_us: self.now_us, planned };
        let (engine, ended) = (&mut self.engine, &mut self.ended);
        match act {
            Act::Prefill { slot, order, new, prefix } => {
                engine.add_job(at, Job { slot, order, left_tokens: new, prefix_tokens: prefix }, ended);
            }
            Act::Decode { slot, tokens, context, first_due } => {
                let sequence = Sequence {
                    slot,
                    left_tokens: tokens,
                    // Room costs no time: an engine that steps has it all from the start, the fast one in pieces.
                    room_tokens: if engine.step_once { tokens } else { slot % 4 },
                    context_tokens: context,
                    first_token_due: first_due,
                };
                engine.add_sequence(at, sequence, ended);
            }
            Act::Remove(slot) => engine.remove(at, slot, ended),
            Act::Speed(permille) => engine.set_speed_permille(at, permille, ended),
            Act::Die => {
                let lost = engine.clear(at, ended);
                self.wake = None;
                self.leaving_us.clear();
                for l in lost {
                    let slot = l.slot;
                    self.stories.entry(slot).or_default().lost = Some(l);
                }
            }
            Act::Look => self.looks.push((at.now_us, engine.batch(), engine.context_tokens(at.now_us))),
        }
        self.note();
    }

    fn note(&mut self) {
        for end in std::mem::take(&mut self.ended) {
            match end {
                EngineEvent::Prefilled { slot, compute_us } => {
                    let story = self.stories.entry(slot).or_default();
                    assert_eq!(
                        story.prefilled.replace((self.now_us, compute_us)),
                        None,
                        "{slot} prefilled twice"
                    );
                }
                EngineEvent::FirstToken { slot, at_us } => {
                    assert!(at_us <= self.now_us);
                    let story = self.stories.entry(slot).or_default();
                    assert_eq!(story.first_token_us.replace(at_us), None, "{slot} began twice");
                }
                EngineEvent::Decoded { slot, emitted_tokens, mark } => {
                    let story = self.stories.entry(slot).or_default();
                    assert_eq!(
                        story.decoded.replace((self.now_us, emitted_tokens)),
                        None,
                        "{slot} ended twice"
                    );
                    self.engine.gaps.collect(&mark, &mut story.gaps_us);
                }
            }
        }
    }
}

pub(super) fn prefill(slot: u32, new: u64) -> Act {
    Act::Prefill { slot, order: u64::from(slot), new, prefix: 0 }
}

pub(super) fn decode(slot: u32, tokens: u32, context: u64) -> Act {
    Act::Decode { slot, tokens, context, first_due: true }
}
