//! Engines that follow their profiles to the microsecond. Those that serve one prompt at a time follow the predictions
//! as well, if a pass has no fixed time that prompts could share: every deviation is then the conductor's fault.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use baton_types::{InstanceId, RequestId};

use super::{TOKEN_US, starts, step};
use crate::{Conductor, Effect, Input, Rejection, Request};

/// Tokens of a pass of an instance of the tests.
const PASS_TOKENS: u64 = 8192;

/// The outcome of a series of arrivals.
#[derive(Debug, Default)]
pub(crate) struct Run {
    /// (moment µs, request, instance) of each `StartPrefill`.
    pub started: Vec<(u64, u64, u32)>,
    /// When each prefill ended, µs.
    pub prefilled: BTreeMap<u64, u64>,
    /// Requests that were refused.
    pub rejected: Vec<u64>,
    /// The refusals in full.
    pub refusals: Vec<Rejection>,
}

/// One prefill instance: work in the order of its keys.
#[derive(Debug, Default)]
struct Engine {
    /// Whether a pass has as many prompts as fit, or there is one prompt at a time.
    fills_passes: bool,
    /// Fixed time of a pass, µs.
    pass_us: u64,
    /// Tokens that are left of each prompt, with what was spent on it, µs.
    queue: BTreeMap<u64, (u64, u64, f64)>,
    /// When the pass ends, µs, and the prompts that end with it: their keys.
    pass: Option<(u64, Vec<u64>)>,
}

impl Engine {
    /// Begins a pass. Its time is divided among the prompts by their tokens in it.
    fn begin(&mut self, now_us: u64) {
        let most = if self.fills_passes {
            PASS_TOKENS
        } else {
            self.queue.values().next().map_or(0, |first| first.1)
        };
        let mut room = most;
        let mut taken = Vec::new();
        for (key, (_, left, _)) in &mut self.queue {
            let tokens = room.min(*left);
            if tokens == 0 {
                break;
            }
            (room, *left) = (room - tokens, *left - tokens);
            taken.push((*key, tokens));
        }
        if taken.is_empty() {
            return;
        }
        let tokens = most - room;
        let takes_us = tokens * TOKEN_US + tokens.div_ceil(PASS_TOKENS) * self.pass_us;
        for (key, own) in &taken {
            let (.., spent_us) = self.queue.get_mut(key).expect("it was taken from there");
            *spent_us += takes_us as f64 * *own as f64 / tokens as f64;
        }
        let ends = taken.into_iter().map(|(key, _)| key).filter(|key| self.queue[key].1 == 0).collect();
        self.pass = Some((now_us + takes_us, ends));
    }
}

struct Stage<'a> {
    conductor: &'a mut Conductor,
    tokens: BTreeMap<u64, u64>,
    fills_passes: bool,
    engines: BTreeMap<u32, Engine>,
    run: Run,
}

impl Stage<'_> {
    fn feed(&mut self, now_us: u64, input: Input) {
        let effects = step(self.conductor, now_us, input);
        for effect in &effects {
            if let Effect::Reject(refusal) = effect {
                self.run.rejected.push(refusal.request.0);
                self.run.refusals.push(refusal.clone());
            }
        }
        for (at, effect) in
            starts(&effects).iter().zip(effects.iter().filter(|e| matches!(e, Effect::StartPrefill { .. })))
        {
            let Effect::StartPrefill { order, .. } = effect else { continue };
            self.run.started.push((now_us, at.request, at.prefill));
            let tokens = self.tokens[&at.request];
            let spec = &self.conductor.fleet.known(InstanceId(at.prefill)).spec;
            let pass_us = spec.profile.prefill.knots_us[0] as u64;
            let idle = Engine { fills_passes: self.fills_passes, pass_us, ..Engine::default() };
            let engine = self.engines.entry(at.prefill).or_insert(idle);
            engine.queue.insert(*order, (at.request, tokens, 0.0));
        }
        self.begin(now_us);
    }

    fn begin(&mut self, now_us: u64) {
        self.engines.values_mut().filter(|e| e.pass.is_none()).for_each(|e| e.begin(now_us));
    }

    /// Ends the pass that ends first; decodes are over at once.
    fn end_next(&mut self) {
        let passes = self.engines.iter().filter_map(|(id, e)| Some((e.pass.as_ref()?.0, *id)));
        let Some((end_us, id)) = passes.min() else { return };
        let engine = self.engines.get_mut(&id).expect("it runs");
        let (_, ends) = engine.pass.take().expect("it runs");
        let ended: Vec<_> = ends.iter().filter_map(|key| engine.queue.remove(key)).collect();
        // What is sent from here on joins the next pass.
        for (request, _, spent_us) in &ended {
            self.run.prefilled.insert(*request, end_us);
            let request = RequestId(*request);
            let compute_us = *spent_us as u64;
            self.feed(end_us, Input::PrefillFinished { request, compute_us, cached_tokens: 0 });
            self.feed(end_us, Input::HandoffFinished { request });
            self.feed(end_us, Input::DecodeFinished { request, output_tokens: 1, first_us: 0, tbt_us: 0 });
        }
        self.begin(end_us);
    }

    fn next_end_us(&self) -> Option<u64> {
        self.engines.values().filter_map(|e| e.pass.as_ref()).map(|(end_us, _)| *end_us).min()
    }
}

/// Plays the arrivals, sorted by moment, to the end, on engines that serve one prompt at a time.
pub(crate) fn run(conductor: &mut Conductor, arrivals: &[(u64, Request)]) -> Run {
    play(conductor, arrivals, false)
}

/// Plays the arrivals on engines whose passes have as many prompts as fit.
pub(crate) fn run_in_passes(conductor: &mut Conductor, arrivals: &[(u64, Request)]) -> Run {
    play(conductor, arrivals, true)
}

fn play(conductor: &mut Conductor, arrivals: &[(u64, Request)], fills_passes: bool) -> Run {
    let tokens = arrivals.iter().map(|(_, r)| (r.id.0, r.prompt_tokens)).collect();
    let mut stage = Stage { conductor, tokens, fills_passes, engines: BTreeMap::new(), run: Run::default() };
    let mut coming = arrivals.iter();
    let mut next = coming.next();
    for turn in 0.. {
        assert!(turn < 100_000, "no end: {:?}", stage.run);
        let arrival_us = next.map(|(at_us, _)| *at_us);
        let (end_us, wake_us) = (stage.next_end_us(), stage.conductor.next_deadline());
        let Some(now_us) = [arrival_us, end_us, wake_us].into_iter().flatten().min() else { break };
        if end_us == Some(now_us) {
            stage.end_next();
        } else if let Some((at_us, request)) = next.filter(|_| arrival_us == Some(now_us)) {
            stage.feed(*at_us, Input::RequestArrived(request.clone()));
            next = coming.next();
        } else {
            stage.feed(now_us, Input::TimerFired);
        }
    }
    stage.run
}
