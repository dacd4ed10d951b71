//! Engines that follow the predictions to the microsecond: every deviation is then the conductor's fault.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use baton_types::RequestId;

use super::{naive_prefill_us, starts, step};
use crate::{Conductor, Effect, Input, Rejection, Request};

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

/// One prefill instance: work in the order of its keys, one at a time.
#[derive(Debug, Default)]
struct Engine {
    queue: BTreeMap<u64, u64>,
    running: Option<(u64, u64)>,
}

struct Stage<'a> {
    conductor: &'a mut Conductor,
    tokens: BTreeMap<u64, u64>,
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
            self.engines.entry(at.prefill).or_default().queue.insert(*order, at.request);
        }
        self.begin(now_us);
    }

    fn begin(&mut self, now_us: u64) {
        for engine in self.engines.values_mut().filter(|e| e.running.is_none()) {
            if let Some((_, request)) = engine.queue.pop_first() {
                engine.running = Some((now_us + naive_prefill_us(self.tokens[&request]), request));
            }
        }
    }

    /// Ends the prefill that ends first; its decode is over at once.
    fn end_next(&mut self) {
        let running = self.engines.iter().filter_map(|(id, e)| e.running.map(|(end_us, _)| (end_us, *id)));
        let Some((end_us, id)) = running.min() else { return };
        let (_, request) = self.engines.get_mut(&id).and_then(|e| e.running.take()).expect("it runs");
        self.run.prefilled.insert(request, end_us);
        let compute_us = naive_prefill_us(self.tokens[&request]);
        let id = RequestId(request);
        self.feed(end_us, Input::PrefillFinished { request: id, compute_us, cached_tokens: 0 });
        self.feed(end_us, Input::HandoffFinished { request: id });
        self.feed(end_us, Input::DecodeFinished { request: id, output_tokens: 1, first_us: 0, tbt_us: 0 });
    }

    fn next_end_us(&self) -> Option<u64> {
        self.engines.values().filter_map(|e| e.running).map(|(end_us, _)| end_us).min()
    }
}

/// Plays the arrivals, sorted by moment, to the end.
pub(crate) fn run(conductor: &mut Conductor, arrivals: &[(u64, Request)]) -> Run {
    let tokens = arrivals.iter().map(|(_, r)| (r.id.0, r.prompt_tokens)).collect();
    let mut stage = Stage { conductor, tokens, engines: BTreeMap::new(), run: Run::default() };
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
