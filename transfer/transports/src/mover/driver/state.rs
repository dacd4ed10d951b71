//! State behind the driver's lock: the core, and the objects that its numbers stand for.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use baton_transfer::{
    BatchId, BatchRequest, Effect, Fault as CoreFault, Input, MoverCore, Op as CoreOp, PathNumber,
    PeerNumber, RailNumber, Refusal as CoreRefusal, SliceTicket,
};

use super::batch::{Batch, Op, Outcome, Refusal};
use super::openers::{Openers, Opening};
use super::outcomes::Outcomes;
use super::settings::{Layout, MoverSettings};
use super::translate::{meaning, path_of, translate};
use crate::mover::{Completion, Direction, Memory, Notice, Path, PathId, PeerId, Region, Slice, Transport};

/// A batch that lives.
struct RunningBatch {
    ops: Vec<Op>,
    verify: bool,
    notice: Option<Notice>,
    peer: PeerNumber,
    wakers: Vec<Waker>,
}

/// One life of a peer, as reached by some transports.
struct KnownPeer {
    id: PeerId,
    /// The last fault reported for the peer.
    cause: String,
}

/// A path that is being opened or is open.
struct OpenPath {
    peer: PeerNumber,
    path: Option<Box<dyn Path>>,
    /// Completions that came before the driver had reported the opening to the core.
    early: Vec<Completion>,
}

pub(super) struct State {
    pub(super) core: MoverCore,
    pub(super) layout: Layout,
    pub(super) closed: bool,
    settings: MoverSettings,
    transports: Vec<Arc<dyn Transport>>,
    started: Instant,
    /// By address, which no other memory can have while this knows of it.
    registered: BTreeMap<usize, (Weak<Memory>, u64)>,
    peers: BTreeMap<PeerNumber, KnownPeer>,
    /// By peer: its reaches, and the core's number for each.
    numbers: HashMap<PeerId, Vec<(u64, PeerNumber)>>,
    next_peer: u32,
    paths: HashMap<PathId, OpenPath>,
    batches: HashMap<BatchId, RunningBatch>,
    next_batch: u64,
    outcomes: Outcomes,
    effects: Vec<Effect>,
    /// Slices to post, by path, in the order in which paths came up.
    outgoing: Vec<(PathId, Vec<Slice>)>,
    /// To be woken once the lock is released.
    pub(super) woken: Vec<Waker>,
    pub(super) newly_ended: bool,
    refused: Option<CoreRefusal>,
}

impl State {
    pub(super) fn new(settings: MoverSettings, layout: Layout, transports: Vec<Arc<dyn Transport>>) -> Self {
        Self {
            outcomes: Outcomes::new(settings.outcomes_kept),
            core: MoverCore::new(layout.core.clone()),
            layout,
            closed: false,
            settings,
            transports,
            started: Instant::now(),
            registered: BTreeMap::new(),
            peers: BTreeMap::new(),
            numbers: HashMap::new(),
            next_peer: 0,
            paths: HashMap::new(),
            batches: HashMap::new(),
            next_batch: 0,
            effects: Vec::new(),
            outgoing: Vec::new(),
            woken: Vec::new(),
            newly_ended: false,
            refused: None,
        }
    }

    pub(super) fn now_us(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Whether the core wants to be stepped for the time alone.
    pub(super) fn is_due(&self) -> bool {
        self.core.next_deadline().is_some_and(|at_us| at_us <= self.now_us())
    }

    /// How long nothing will happen by itself, at most `limit`.
    pub(super) fn sleep(&self, limit: Duration) -> Duration {
        let next = self.core.next_deadline();
        next.map_or(limit, |at_us| Duration::from_micros(at_us.saturating_sub(self.now_us())).min(limit))
    }

    pub(super) fn registered(&mut self, memory: &Arc<Memory>, reach: u64) {
        self.registered.retain(|_, (known, _)| known.strong_count() > 0);
        self.registered.insert(Arc::as_ptr(memory) as usize, (Arc::downgrade(memory), reach));
    }

    pub(super) fn outcome(&self, batch: BatchId) -> Option<&Outcome> {
        self.outcomes.get(batch)
    }

    pub(super) fn is_running(&self, batch: BatchId) -> bool {
        self.batches.contains_key(&batch)
    }

    pub(super) fn running(&self) -> Vec<BatchId> {
        let mut all: Vec<BatchId> = self.batches.keys().copied().collect();
        all.sort_unstable();
        all
    }

    /// Wakes this when the batch ends; false if it does not live.
    pub(super) fn wake_when_ended(&mut self, batch: BatchId, waker: &Waker) -> bool {
        let Some(running) = self.batches.get_mut(&batch) else { return false };
        if !running.wakers.iter().any(|known| known.will_wake(waker)) {
            running.wakers.push(waker.clone());
        }
        true
    }

    /// Takes a batch.
    pub(super) fn submit(&mut self, batch: Batch, openers: &Openers) -> Result<BatchId, Refusal> {
        if self.closed {
            return Err(Refusal::ShutDown);
        }
        let reach = self.reach(&batch)?;
        let now_us = self.now_us();
        let peer = self.number(&batch.peer, reach, openers)?;
        let id = BatchId(self.next_batch);
        self.next_batch += 1;
        let limit_us = batch.limit.map(|limit| u64::try_from(limit.as_micros()).unwrap_or(u64::MAX));
        let request = BatchRequest {
            batch: id,
            peer,
            priority: batch.priority,
            deadline_us: limit_us.map(|limit_us| now_us.saturating_add(limit_us)),
            notice: batch.notice.is_some(),
            ops: batch.ops.iter().map(|op| self.core_op(op)).collect(),
        };
        let Batch { verify, notice, ops, .. } = batch;
        self.batches.insert(id, RunningBatch { ops, verify, notice, peer, wakers: Vec::new() });
        self.apply([Input::Submit(request)], openers);
        match self.refused.take() {
            Some(refusal) => {
                self.batches.remove(&id);
                Err(Refusal::Core(refusal))
            }
            None => Ok(id),
        }
    }

    fn core_op(&self, op: &Op) -> CoreOp {
        let locations = &self.layout.locations;
        let unlisted = u16::try_from(locations.len()).unwrap_or(u16::MAX);
        CoreOp {
            direction: match op.direction {
                Direction::Read => baton_transfer::Direction::Read,
                Direction::Write => baton_transfer::Direction::Write,
            },
            bytes: op.bytes,
            location: locations.get(&op.local.memory.location()).copied().unwrap_or(unlisted),
        }
    }

    /// The transports that reach both ends of every op.
    fn reach(&self, batch: &Batch) -> Result<u64, Refusal> {
        let invalid = |what: String| Err(Refusal::Invalid(what));
        if batch.notice.as_ref().is_some_and(|notice| notice.bytes.len() > 4_096) {
            return invalid("a notice has at most 4 KiB: send less".into());
        }
        let mut reach = (1u64 << self.transports.len()) - 1;
        for op in &batch.ops {
            let Region { memory, at } = &op.local;
            if !memory.holds(*at, op.bytes) {
                return invalid(format!("{} bytes at {at} of a memory of {}", op.bytes, memory.bytes()));
            }
            if op.remote_at.checked_add(op.bytes).is_none_or(|end| end > op.remote.bytes) {
                let (at, window) = (op.remote_at, op.remote.bytes);
                return invalid(format!("{} bytes at {at} of a window of {window}", op.bytes));
            }
            let Some((_, here)) = self.registered.get(&(Arc::as_ptr(memory) as usize)) else {
                return invalid("a local memory is not registered: register it first".into());
            };
            let named = |name: &str| op.remote.access.iter().any(|(other, _)| other == name);
            let there = self.transports.iter().enumerate().filter(|(_, transport)| named(transport.name()));
            reach &= here & there.fold(0, |bits, (index, _)| bits | 1 << index);
        }
        if reach == 0 {
            return invalid("no transport reaches all of it: see which ones the peer offers".into());
        }
        Ok(reach)
    }

    /// The core's number of a peer.
    fn number(&mut self, peer: &PeerId, reach: u64, openers: &Openers) -> Result<PeerNumber, Refusal> {
        if let Some((_, number)) = self.reaches(peer).iter().find(|(known, _)| *known == reach) {
            return Ok(*number);
        }
        let number = PeerNumber(self.next_peer);
        self.next_peer = self.next_peer.wrapping_add(1);
        let routes = self.settings.routes(&peer.address, reach, &self.layout.places, &self.transports);
        if routes.is_empty() {
            let text = format!("no transport is configured for {}: see its order", peer.address);
            return Err(Refusal::Invalid(text));
        }
        self.numbers.entry(peer.clone()).or_default().push((reach, number));
        self.peers.insert(number, KnownPeer { id: peer.clone(), cause: String::new() });
        self.apply([Input::PeerKnown { peer: number, routes }], openers);
        if !self.peers.contains_key(&number) {
            let limit = u64::from(self.layout.core.max_peers);
            let bound = baton_transfer::BoundKind::Peers;
            return Err(Refusal::Core(CoreRefusal::Full { bound, limit }));
        }
        Ok(number)
    }

    fn reaches(&self, peer: &PeerId) -> &[(u64, PeerNumber)] {
        self.numbers.get(peer).map_or(&[], Vec::as_slice)
    }

    fn forget(&mut self, number: PeerNumber, peer: &PeerId) {
        let Some(numbers) = self.numbers.get_mut(peer) else { return };
        numbers.retain(|&(_, other)| other != number);
        if numbers.is_empty() {
            self.numbers.remove(peer);
        }
    }

    /// The numbers of the peers that `is_meant` selects.
    pub(super) fn numbers(&self, is_meant: impl Fn(&PeerId) -> bool) -> Vec<PeerNumber> {
        self.peers.iter().filter(|(_, known)| is_meant(&known.id)).map(|(&number, _)| number).collect()
    }

    /// Steps the core with facts, and does what it orders, until nothing follows.
    pub(super) fn apply(&mut self, inputs: impl IntoIterator<Item = Input>, openers: &Openers) {
        let now_us = self.now_us();
        let mut effects = std::mem::take(&mut self.effects);
        for input in inputs {
            self.core.step(now_us, input, &mut effects);
        }
        let mut follow = Vec::new();
        loop {
            for effect in effects.drain(..) {
                self.carry_out(effect, openers, &mut follow);
            }
            for (path, slices) in std::mem::take(&mut self.outgoing) {
                self.post(path, &slices, &mut follow);
            }
            if follow.is_empty() {
                break;
            }
            for input in follow.drain(..) {
                self.core.step(now_us, input, &mut effects);
            }
        }
        self.effects = effects;
    }

    fn carry_out(&mut self, effect: Effect, openers: &Openers, follow: &mut Vec<Input>) {
        match effect {
            Effect::OpenPath { path, peer, rail } => self.open(path, (peer, rail), openers, follow),
            Effect::ClosePath { path } => {
                self.flush(PathId(path.0), follow);
                self.with_path(path, |path| path.close());
            }
            Effect::Post { path, ticket, batch, op, at, bytes } => {
                if let Some(slice) = self.slice((batch, op), at, bytes, ticket) {
                    self.queue(PathId(path.0), slice);
                }
            }
            Effect::Probe { path, ticket } => self.with_path(path, |path| path.probe(ticket.0)),
            Effect::Notify { path, ticket, batch } => {
                let notice = self.batches.get_mut(&batch).and_then(|running| running.notice.take());
                self.with_path(path, |path| {
                    path.notify(ticket.0, notice.unwrap_or(Notice { bytes: vec![] }))
                });
            }
            Effect::Done { batch, bytes, took_us } => {
                self.end(batch, |_| Outcome::Done { bytes, took: Duration::from_micros(took_us) });
            }
            Effect::Failed { batch, failure, remote_fenced } => {
                self.end(batch, |cause| Outcome::Failed { failure, cause, remote_fenced });
            }
            Effect::Cancelled { batch, remote_fenced } => {
                self.end(batch, |_| Outcome::Cancelled { remote_fenced });
            }
            Effect::Refused { refusal, .. } => self.refused = Some(refusal),
            Effect::PeerRefused { peer } | Effect::PeerForgotten { peer } => {
                if let Some(known) = self.peers.remove(&peer) {
                    self.forget(peer, &known.id);
                }
            }
        }
    }

    fn open(
        &mut self,
        path: PathNumber,
        (peer, rail): (PeerNumber, RailNumber),
        openers: &Openers,
        follow: &mut Vec<Input>,
    ) {
        let known = &self.peers[&peer];
        let place = &self.layout.places[usize::from(rail.0)];
        let job = Opening {
            path: PathId(path.0),
            peer: known.id.clone(),
            transport: self.transports[place.transport].clone(),
            device: place.device.clone(),
        };
        if openers.give(job).is_err() {
            return follow.push(Input::PathOpenFailed { path, fault: CoreFault::Path });
        }
        self.paths.insert(PathId(path.0), OpenPath { peer, path: None, early: Vec::new() });
    }

    fn slice(&self, (batch, op): (BatchId, u32), at: u64, bytes: u32, ticket: SliceTicket) -> Option<Slice> {
        let running = self.batches.get(&batch)?;
        let op = running.ops.get(op as usize)?;
        Some(Slice {
            ticket: ticket.0,
            direction: op.direction,
            local: Region { memory: op.local.memory.clone(), at: op.local.at + at },
            remote: op.remote.clone(),
            remote_at: op.remote_at + at,
            bytes,
            verify: running.verify,
        })
    }

    fn queue(&mut self, path: PathId, slice: Slice) {
        match self.outgoing.iter_mut().find(|(other, _)| *other == path) {
            Some((_, slices)) => slices.push(slice),
            None => self.outgoing.push((path, vec![slice])),
        }
    }

    /// Posts what is queued for a path that is about to close.
    fn flush(&mut self, path: PathId, follow: &mut Vec<Input>) {
        if let Some(at) = self.outgoing.iter().position(|(other, _)| *other == path) {
            let (_, slices) = self.outgoing.remove(at);
            self.post(path, &slices, follow);
        }
    }

    fn post(&mut self, id: PathId, slices: &[Slice], follow: &mut Vec<Input>) {
        let path = self.paths.get(&id).and_then(|open| open.path.as_ref());
        let taken = path.map_or(0, |path| path.post(slices));
        let left = slices.iter().skip(taken);
        follow.extend(
            left.map(|slice| Input::PathRefused {
                path: PathNumber(id.0),
                ticket: SliceTicket(slice.ticket),
            }),
        );
    }

    fn with_path(&self, path: PathNumber, act: impl FnOnce(&dyn Path)) {
        if let Some(path) = self.paths.get(&PathId(path.0)).and_then(|open| open.path.as_deref()) {
            act(path);
        }
    }

    fn end(&mut self, batch: BatchId, outcome: impl FnOnce(String) -> Outcome) {
        let Some(running) = self.batches.remove(&batch) else { return };
        let cause = self.peers.get(&running.peer).map(|peer| peer.cause.clone()).unwrap_or_default();
        self.outcomes.keep(batch, outcome(cause));
        self.woken.extend(running.wakers);
        self.newly_ended = true;
    }

    /// Paths that were opened, or not.
    pub(super) fn opened(&mut self, openers: &Openers) {
        for (id, result) in openers.take() {
            let path = PathNumber(id.0);
            let Some(open) = self.paths.get_mut(&id) else { continue };
            match result {
                Ok(opened) => {
                    open.path = Some(opened);
                    let early = std::mem::take(&mut open.early);
                    self.apply([Input::PathOpened { path }], openers);
                    self.complete(early, openers);
                }
                Err(fault) => {
                    let peer = open.peer;
                    self.paths.remove(&id);
                    let (fault, text) = meaning(fault);
                    self.note_cause(peer, text);
                    self.apply([Input::PathOpenFailed { path, fault }], openers);
                }
            }
        }
    }

    /// Completions, in their order.
    pub(super) fn complete(&mut self, completions: impl IntoIterator<Item = Completion>, openers: &Openers) {
        let mut inputs = Vec::new();
        let mut closed = Vec::new();
        for completion in completions {
            let id = path_of(&completion);
            match self.paths.get_mut(&id) {
                Some(open) if open.path.is_none() => open.early.push(completion),
                Some(open) => {
                    let peer = open.peer;
                    if matches!(completion, Completion::Closed { .. }) {
                        closed.push(id);
                    }
                    inputs.push(self.input(peer, completion));
                }
                None => {}
            }
        }
        self.apply(inputs, openers);
        for id in closed {
            self.paths.remove(&id);
        }
    }

    fn input(&mut self, peer: PeerNumber, completion: Completion) -> Input {
        let (input, cause) = translate(completion);
        if let Some(text) = cause {
            self.note_cause(peer, text);
        }
        input
    }

    /// Keeps what was said of a peer.
    fn note_cause(&mut self, peer: PeerNumber, text: String) {
        if let Some(known) = self.peers.get_mut(&peer) {
            known.cause = text;
        }
    }

    /// Drops every path that is left, at the end of a shutdown.
    pub(super) fn drop_paths(&mut self) {
        self.paths.clear();
    }
}
