//! The cores as the driver holds them: pairs before the conductor, each step written down, its effects carried out.

use std::collections::BTreeMap;

use baton_legs::pairs::{Core, Effect, Pairs};
use baton_scheduler::{Conductor, Effect as Order, Input, Request};
use baton_types::{InstanceId, RequestId};

use super::block_keys::BlockKeys;
use super::driver::Driver;
use super::fleet::Fleet;
use super::inbox::Loss;
use super::journal::JournalWriter;
use super::session::Session;

/// The parts of the conductor that `Pairs` calls back into.
pub(super) struct LiveCore<'a> {
    conductor: &'a mut Conductor,
    journal: &'a mut Option<JournalWriter>,
    names: &'a mut BlockKeys,
    sessions: &'a BTreeMap<RequestId, Session>,
    fleet: &'a Fleet,
    naming: (u64, u32),
}

impl Core for LiveCore<'_> {
    fn step(&mut self, now_us: u64, input: Input, orders: &mut Vec<Order>) {
        match self.journal {
            Some(journal) => journal.step(self.conductor, now_us, input, orders),
            None => self.conductor.step(now_us, input, orders),
        }
        #[cfg(test)]
        assert_eq!(self.conductor.check(), Ok(()));
    }

    fn request(&mut self, request: RequestId, emitted_tokens: u32) -> Option<Request> {
        let session = self.sessions.get(&request)?;
        let submission = &session.submission;
        let chain = session.chain(emitted_tokens, self.naming);
        self.names.learn(&chain);
        Some(Request {
            id: request,
            class: session.class,
            objectives: submission.objectives,
            tenant: session.tenant,
            prompt_tokens: submission.tokens.len() as u64 + u64::from(emitted_tokens),
            chain: chain.iter().map(|key| key.short()).collect(),
            emitted_tokens,
            max_output_tokens: Some(submission.sampling.max_tokens),
            asked_output_tokens: submission.asked_tokens,
            ..Request::default()
        })
    }

    fn decodes_at_us(&self, request: RequestId) -> Option<u64> {
        self.conductor.decodes_at_us(request)
    }

    fn handoff_us(&self, request: RequestId) -> u64 {
        self.conductor.handoff_us(request).unwrap_or(0)
    }

    fn last_token_us(&self, request: RequestId) -> u64 {
        self.sessions.get(&request).map_or(0, |session| session.last_token_us)
    }

    fn moves_kv(&self, instance: InstanceId) -> bool {
        self.fleet.get(instance).is_some_and(|node| node.hello.engine_moves_kv)
    }

    fn can_serve(&self) -> bool {
        self.conductor.can_serve()
    }

    fn prefills(&self) -> usize {
        self.conductor.prefills()
    }
}

/// The description of a failure, for the errors of the requests that it affects.
#[derive(Default)]
pub(super) struct Trouble {
    /// In words.
    pub cause: String,
    /// In a word, for traces.
    pub failure: &'static str,
}

impl Driver {
    /// The seed of block keys, and the tokens in a block.
    pub(super) fn naming(&self) -> (u64, u32) {
        (*self.config.service.chain_seed.expose(), self.config.scheduler.block_tokens)
    }

    /// Does something to the pairs, and carries out what comes of it.
    pub(super) fn pair<T>(
        &mut self,
        act: impl FnOnce(&mut Pairs, u64, &mut LiveCore<'_>, &mut Vec<Effect>) -> T,
    ) -> T {
        self.pair_with_cause(&Trouble::default(), act)
    }

    /// Like `pair`, where a description of a failure is available.
    pub(super) fn pair_with_cause<T>(
        &mut self,
        trouble: &Trouble,
        act: impl FnOnce(&mut Pairs, u64, &mut LiveCore<'_>, &mut Vec<Effect>) -> T,
    ) -> T {
        let naming = self.naming();
        let mut effects = std::mem::take(&mut self.effects);
        let mut live = LiveCore {
            conductor: &mut self.core,
            journal: &mut self.journal,
            names: &mut self.names,
            sessions: &self.sessions,
            fleet: &self.fleet,
            naming,
        };
        let result = act(&mut self.pairs, self.now_us, &mut live, &mut effects);
        #[cfg(test)]
        self.ordered.extend(effects.iter().cloned());
        for effect in effects.drain(..) {
            self.carry_out(effect, trouble);
        }
        self.effects = effects;
        result
    }

    /// Puts a fact before the conductor that is about no one request.
    pub(super) fn step(&mut self, input: Input) {
        self.pair(|pairs, now_us, live, effects| pairs.step(now_us, input, live, effects));
    }

    /// Ends stages whose time is over and lives that went silent.
    pub(super) fn expire(&mut self) {
        self.pair(|pairs, now_us, live, effects| pairs.expire(now_us, live, effects));
        let since_us = self.now_us.saturating_sub(self.config.service.lost_after_us);
        for (instance, epoch) in self.fleet.silent(since_us) {
            self.gone(instance, epoch, &Loss::Died("no heartbeat".into()));
        }
    }

    /// Audits that driver and cores know the same requests.
    #[cfg(test)]
    pub(super) fn check_sessions(&self) {
        assert_eq!(self.pairs.check(|request| self.core.knows(request)), Ok(()));
        assert!(self.sessions.keys().copied().eq(self.pairs.iter().map(|(request, _)| request)));
        assert!(self.pairs.next_deadline().is_none_or(|at_us| at_us > self.now_us), "overdue");
        assert_eq!(self.core.live_requests(), self.pairs.len() - self.pairs.parked());
    }
}
