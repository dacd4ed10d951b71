//! The network: inputs in, ends of transfers out.

use hashbrown::HashMap;

use crate::network::flight::Flight;
use crate::network::flows::{FlightEnd, Flows, Link, Outcome};
use crate::network::share::SharingLaw;
use crate::network::units::{ns, rate, us_ceil, whole_bytes};
use crate::network::{
    Effect, Failure, Input, LinkId, LinkSpec, NetworkConfig, NetworkStats, ProducerPace, TransferId,
    TransferRequest,
};

/// Moves bytes over shared links, in time that is handed in.
#[derive(Clone, Debug)]
pub struct Network {
    pub(crate) config: NetworkConfig,
    pub(crate) flows: Flows,
    /// Slot of each flight in progress; never iterated.
    pub(crate) slots: HashMap<TransferId, u32>,
    pub(crate) stats: NetworkStats,
    pub(crate) now_us: u64,
    ended: Vec<FlightEnd>,
}

impl Network {
    /// An engine over `links`, named by position, with nothing in flight.
    ///
    /// `config` must keep the bounds that [`NetworkConfig`] states.
    #[must_use]
    pub fn new(config: NetworkConfig, links: &[LinkSpec]) -> Self {
        let links = links.iter().copied().map(Link::new).collect();
        Self {
            flows: Flows::new(SharingLaw::new(&config), links),
            config,
            slots: HashMap::default(),
            stats: NetworkStats::default(),
            now_us: 0,
            ended: Vec::new(),
        }
    }

    /// Takes one fact in at `now_us` and appends what follows from it to `effects`.
    ///
    /// Everything due by `now_us` happens first, at the moment at which it was due, however late
    /// the call. Total: an input that names nothing known is counted and changes nothing, and time
    /// that goes back is taken as standing still (I11).
    pub fn step(&mut self, now_us: u64, input: Input, effects: &mut Vec<Effect>) {
        if now_us < self.now_us {
            self.stats.clock_regressions += 1;
        }
        self.now_us = self.now_us.max(now_us);
        self.advance(effects);
        let known = match input {
            Input::Start(request) => self.start(&request, effects),
            Input::Cancel { transfer } => self.cancel(transfer, effects),
            Input::Repace { transfer, paced } => self.repace(transfer, paced),
            Input::LinkDown { link } => self.link_down(link, effects),
            Input::LinkUp { link } => self.link_up(link),
            Input::SetRate { link, bytes_per_s } => self.set_rate(link, bytes_per_s),
            Input::TimerFired => return,
        };
        self.stats.ignored_inputs += u64::from(!known);
        self.flows.reflow(ns(self.now_us));
        self.advance(effects);
    }

    /// When to step next (with `TimerFired`) if no other input comes first. `None` when nothing
    /// will happen by itself: no flights, or all of them stalled without a deadline.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.flows.next_ns().map(us_ceil)
    }

    /// Counters since the start.
    #[must_use]
    pub fn stats(&self) -> NetworkStats {
        NetworkStats { live: self.slots.len() as u64, ..self.stats }
    }

    fn advance(&mut self, effects: &mut Vec<Effect>) {
        let mut ended = core::mem::take(&mut self.ended);
        self.flows.advance(ns(self.now_us), &mut ended);
        for end in ended.drain(..) {
            self.slots.remove(&end.id);
            match end.outcome {
                Outcome::Landed => {
                    debug_assert_eq!(whole_bytes(end.delivered), end.bytes, "I7");
                    self.finish(end.id, end.bytes, end.started_us, effects);
                }
                Outcome::Late => {
                    self.fail(end.id, Failure::Deadline, (end.bytes, end.delivered), effects);
                }
            }
        }
        self.ended = ended;
    }

    fn start(&mut self, request: &TransferRequest, effects: &mut Vec<Effect>) -> bool {
        let transfer = request.transfer;
        if let Err(reason) = self.admit(request) {
            self.stats.refused += 1;
            effects.push(Effect::Failed { transfer, reason, delivered_bytes: 0 });
            return true;
        }
        self.stats.started += 1;
        self.stats.started_bytes = self.stats.started_bytes.saturating_add(request.bytes);
        if request.bytes == 0 {
            self.stats.zero_byte += 1;
            self.finish(transfer, 0, self.now_us, effects);
            return true;
        }
        if request.deadline_us.is_some_and(|deadline_us| deadline_us <= self.now_us) {
            self.fail(transfer, Failure::Deadline, (request.bytes, 0), effects);
            return true;
        }
        let slot = self.flows.add(Flight::new(request, self.now_us));
        self.slots.insert(transfer, slot);
        true
    }

    fn cancel(&mut self, transfer: TransferId, effects: &mut Vec<Effect>) -> bool {
        let Some(slot) = self.slots.get(&transfer).copied() else { return false };
        self.abandon(slot, Failure::Cancelled, effects);
        true
    }

    fn repace(&mut self, transfer: TransferId, paced: ProducerPace) -> bool {
        let Some(slot) = self.slots.get(&transfer).copied() else { return false };
        self.flows.repace(slot, ns(self.now_us), paced)
    }

    fn link_down(&mut self, link: LinkId, effects: &mut Vec<Effect>) -> bool {
        let Some(state) = self.flows.links.get_mut(link.index()) else { return false };
        if !core::mem::replace(&mut state.up, false) {
            return false;
        }
        let mut lost = state.members.clone();
        lost.sort_unstable_by_key(|&slot| self.flows.flights[slot as usize].id);
        for slot in lost {
            self.abandon(slot, Failure::LinkDown(link), effects);
        }
        true
    }

    fn link_up(&mut self, link: LinkId) -> bool {
        let state = self.flows.links.get_mut(link.index());
        state.is_some_and(|state| !core::mem::replace(&mut state.up, true))
    }

    fn set_rate(&mut self, link: LinkId, bytes_per_s: u64) -> bool {
        if link.index() >= self.flows.links.len() {
            return false;
        }
        self.flows.set_rate(link, rate(bytes_per_s));
        true
    }

    /// Ends a flight short, now.
    fn abandon(&mut self, slot: u32, reason: Failure, effects: &mut Vec<Effect>) {
        let delivered = self.flows.remove(slot, ns(self.now_us));
        let flight = &self.flows.flights[slot as usize];
        let (id, bytes) = (flight.id, flight.bytes);
        self.slots.remove(&id);
        self.fail(id, reason, (bytes, delivered), effects);
    }

    fn finish(&mut self, id: TransferId, bytes: u64, started_us: u64, effects: &mut Vec<Effect>) {
        self.stats.finished += 1;
        self.stats.finished_bytes = self.stats.finished_bytes.saturating_add(bytes);
        effects.push(Effect::Finished { transfer: id, bytes, started_us });
    }

    /// `amounts`: the transfer's bytes, and the grains of it that had left.
    fn fail(&mut self, id: TransferId, reason: Failure, amounts: (u64, u128), effects: &mut Vec<Effect>) {
        let delivered_bytes = whole_bytes(amounts.1);
        let stats = &mut self.stats;
        match reason {
            Failure::LinkDown(_) => stats.failed_link_down += 1,
            Failure::Deadline => stats.failed_deadline += 1,
            Failure::Cancelled => stats.cancelled += 1,
            Failure::Refused(_) => debug_assert!(false, "a refused transfer has no flight"),
        }
        stats.abandoned_bytes = stats.abandoned_bytes.saturating_add(amounts.0);
        stats.wasted_bytes = stats.wasted_bytes.saturating_add(delivered_bytes);
        effects.push(Effect::Failed { transfer: id, reason, delivered_bytes });
    }
}
