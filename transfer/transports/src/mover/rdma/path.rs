//! The opener's end of a path: takes slices, turns them into work requests, and books the device's completions.

mod settle;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::link::Link;
use super::mailbox::{Kind, Message, SLOTS, TEXT_BYTES_MAX};
use super::rail::{Rail, WatchedEnd};
use super::requests::Requests;
use super::threads::Bell;
use super::verbs_queue::Work;
use crate::mover::{Completion, Completions, Fault, Memory, Notice, Path, PathEnd, PathId, Slice};

/// Notices and probes that a path takes before it refuses them.
const NOTICES_MAX: usize = 64;
/// A completion is requested at least this often, in slices and in bytes, so that a long batch reports its progress
/// in parts. It is not requested more often, because each completion wakes a thread.
const SIGNAL_SLICES: u32 = 16;
const SIGNAL_BYTES: u64 = 2 << 20;
/// Where in a request's number the place of its queue pair is.
const PLACE_SHIFT: u32 = 48;

/// The parameters of a path.
pub(super) struct Terms {
    pub id: PathId,
    pub queue_pairs: usize,
    pub outstanding_max: u32,
    /// Requests that each queue pair takes.
    pub works: u32,
}

/// A request that the device has.
struct InFlightRequest {
    id: u64,
    ticket: u64,
    /// Whether it is the last of its slice.
    last: bool,
    /// Stays mapped as long as the device may use it.
    _memory: Arc<Memory>,
}

/// A message without an answer.
struct OpenMessage {
    /// The caller's ticket; none for our own message.
    ticket: Option<u64>,
    since: Instant,
}

enum Phase {
    Open,
    Ending(Fault),
    Ended,
}

struct State {
    phase: Phase,
    link: Option<Link>,
    flying: Vec<VecDeque<InFlightRequest>>,
    slices: u32,
    next_id: u64,
    next_place: usize,
    /// By queue pair: slices and bytes since a completion was asked for.
    silent: Vec<(u32, u64)>,
    full: bool,
    /// Messages without an answer, by number.
    asked: BTreeMap<u64, OpenMessage>,
    /// Messages that wait until fewer are without an answer.
    unsent: VecDeque<Message>,
    next_message: u64,
    alive: bool,
}

/// The opener's end of a path.
pub(super) struct OpenedPath {
    terms: Terms,
    rail: Arc<Rail>,
    requests: Requests,
    completions: Completions,
    bell: Bell,
    state: Mutex<State>,
    changed: Condvar,
}

impl OpenedPath {
    pub(super) fn new(
        terms: Terms,
        rail: &Arc<Rail>,
        requests: Requests,
        completions: Completions,
        link: Link,
    ) -> io::Result<Arc<Self>> {
        let token = link.token();
        let state = State {
            phase: Phase::Open,
            link: Some(link),
            flying: (0..terms.queue_pairs).map(|_| VecDeque::new()).collect(),
            slices: 0,
            next_id: 0,
            next_place: 0,
            silent: vec![(0, 0); terms.queue_pairs],
            full: false,
            asked: BTreeMap::new(),
            unsent: VecDeque::new(),
            next_message: 0,
            alive: false,
        };
        let opened = Arc::new(Self {
            terms,
            rail: rail.clone(),
            requests,
            completions,
            bell: Bell::new()?,
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let watched: Arc<dyn WatchedEnd> = opened.clone();
        rail.watch(token, Arc::downgrade(&watched));
        Ok(opened)
    }

    /// Rings when the path is to be ended.
    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Sends a message and waits for its answer: whether data can come through at all.
    pub(super) fn greet(&self, limit: Duration) -> Result<(), Fault> {
        let mut state = self.state();
        self.arm(&mut state);
        self.ask(&mut state, Kind::Probe, Vec::new(), None);
        let waits = |state: &mut State| !state.alive && matches!(state.phase, Phase::Open);
        let waited = self.changed.wait_timeout_while(state, limit, waits);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &state.phase {
            Phase::Ending(fault) => Err(fault.clone()),
            _ if state.alive => Ok(()),
            _ => Err(Fault::Silent(format!(
                "{}: no answer over RDMA within {limit:?}, though the peer answers over TCP",
                self.rail.name
            ))),
        }
    }

    fn arm(&self, state: &mut State) {
        if let Some(Err(error)) = state.link.as_ref().map(Link::arm) {
            self.broken(state, Fault::Path(format!("{}: {error}", self.rail.name)), None);
        }
    }

    /// Ends the path: what is outstanding fails.
    pub(super) fn end(&self, fault: Fault, by_itself: bool) {
        let mut state = self.state();
        if by_itself {
            self.broken(&mut state, fault, None);
        } else if matches!(state.phase, Phase::Open) {
            let failed = self.fail_all(&mut state, &fault, None);
            state.phase = Phase::Ending(fault);
            self.completions.push(failed);
            self.bell.ring();
        }
    }

    /// Why it ends; none while it is open.
    pub(super) fn ending(&self) -> Option<Fault> {
        match &self.state().phase {
            Phase::Open => None,
            Phase::Ending(fault) => Some(fault.clone()),
            Phase::Ended => Some(Fault::Path("the path has ended".into())),
        }
    }

    /// How long the oldest message may still be without an answer; none when there is none. When it has been
    /// for too long, the path breaks.
    pub(super) fn time_limit(&self, limit: Duration) -> Option<Duration> {
        let mut state = self.state();
        let since = state.asked.values().next()?.since;
        let left = limit.saturating_sub(since.elapsed());
        if left.is_zero() {
            let text = format!("{}: the peer has not answered a notice for {limit:?}", self.rail.name);
            self.broken(&mut state, Fault::Silent(text), None);
        }
        Some(left)
    }

    /// Waits a while for it to end by itself.
    pub(super) fn wait_ending(&self, limit: Duration) {
        let open = |state: &mut State| matches!(state.phase, Phase::Open);
        drop(self.changed.wait_timeout_while(self.state(), limit, open));
    }

    /// Destroys the queue pairs. After that nothing lands here and nothing goes out.
    pub(super) fn cut(&self) {
        let link = self.state().link.take();
        if let Some(link) = link {
            link.stop();
        }
    }

    /// The last of it.
    pub(super) fn ended(&self, end: PathEnd) {
        let mut state = self.state();
        if !matches!(state.phase, Phase::Ended) {
            state.phase = Phase::Ended;
            self.completions.push([Completion::Closed { path: self.terms.id, end }]);
        }
    }

    /// Ends a path that no caller has received, without any report.
    pub(super) fn discard(&self) {
        self.state().phase = Phase::Ended;
        self.cut();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, ticket: u64, fault: Fault) -> Completion {
        Completion::Failed { path: self.terms.id, ticket, fault }
    }

    /// Fails all that is outstanding; `special` has a fault of its own.
    fn fail_all(&self, state: &mut State, fault: &Fault, special: Option<(u64, Fault)>) -> Vec<Completion> {
        let mut failed = Vec::new();
        for flying in state.flying.iter_mut().flat_map(|queue| queue.drain(..)).filter(|one| one.last) {
            let fault = match &special {
                Some((ticket, own)) if *ticket == flying.ticket => own.clone(),
                _ => fault.clone(),
            };
            failed.push(self.failed(flying.ticket, fault));
        }
        state.slices = 0;
        state.unsent.clear();
        let asked = std::mem::take(&mut state.asked);
        let tickets = asked.into_values().filter_map(|asked| asked.ticket);
        failed.extend(tickets.map(|ticket| self.failed(ticket, fault.clone())));
        failed
    }

    fn broken(&self, state: &mut State, fault: Fault, special: Option<(u64, Fault)>) {
        if !matches!(state.phase, Phase::Open) {
            return;
        }
        let mut completed = vec![Completion::Broken { path: self.terms.id, fault: fault.clone() }];
        completed.extend(self.fail_all(state, &fault, special));
        state.phase = Phase::Ending(fault);
        // Before the answer to the greeting no caller knows the path.
        if state.alive {
            self.completions.push(completed);
        }
        self.bell.ring();
        self.changed.notify_all();
    }

    fn ask(&self, state: &mut State, kind: Kind, text: Vec<u8>, ticket: Option<u64>) {
        let number = state.next_message;
        state.next_message += 1;
        if state.asked.is_empty() {
            // The path's keeper has a time limit to watch now.
            self.bell.ring();
        }
        state.asked.insert(number, OpenMessage { ticket, since: Instant::now() });
        state.unsent.push_back(Message { kind, number, text });
        self.send_unsent(state);
    }

    /// Sends messages while fewer are without an answer than the peer has receives for.
    fn send_unsent(&self, state: &mut State) {
        while state.asked.len() - state.unsent.len() < SLOTS as usize {
            let (Some(message), Some(link)) = (state.unsent.pop_front(), &mut state.link) else { return };
            let (mailbox, queue_pair) = link.mail();
            if let Err(error) = mailbox.send(queue_pair, message) {
                return self.broken(state, Fault::Path(format!("{}: {error}", self.rail.name)), None);
            }
        }
    }

    fn notice(&self, ticket: u64, kind: Kind, text: Vec<u8>) {
        let mut state = self.state();
        let fault = match &state.phase {
            Phase::Ended => return,
            Phase::Ending(fault) => fault.clone(),
            Phase::Open if text.len() > TEXT_BYTES_MAX => {
                Fault::Invalid(format!("a notice has at most {TEXT_BYTES_MAX} bytes"))
            }
            Phase::Open if state.asked.len() >= NOTICES_MAX => {
                Fault::Path(format!("{NOTICES_MAX} notices wait already; send it when one has arrived"))
            }
            Phase::Open => return self.ask(&mut state, kind, text, Some(ticket)),
        };
        self.completions.push([self.failed(ticket, fault)]);
    }

    /// The queue pair with room for so many requests, in turn; none when all are full.
    fn place(&self, state: &mut State, works: usize) -> Option<usize> {
        let count = self.terms.queue_pairs;
        let fits = |place: &usize| {
            let held = state.flying[*place].len();
            held == 0 || held + works <= self.terms.works as usize
        };
        let place = (0..count).map(|step| (state.next_place + step) % count).find(fits)?;
        state.next_place = (place + 1) % count;
        Some(place)
    }

    /// Takes slices while there is room, and gives the requests of all to the device in one go.
    fn take(&self, state: &mut State, slices: &[Slice]) -> usize {
        let mut batches: Vec<Vec<Work>> = (0..self.terms.queue_pairs).map(|_| Vec::new()).collect();
        let mut taken = 0;
        for slice in slices {
            if state.slices >= self.terms.outstanding_max {
                state.full = true;
                break;
            }
            let works = match self.requests.of(slice, state.next_id) {
                Ok(works) => works,
                Err(fault) => {
                    self.completions.push([self.failed(slice.ticket, fault)]);
                    taken += 1;
                    continue;
                }
            };
            let Some(place) = self.place(state, works.len()) else {
                state.full = true;
                break;
            };
            self.count_posted(state, slice, (place, works), &mut batches);
            taken += 1;
        }
        self.give(state, batches);
        taken
    }

    fn count_posted(
        &self,
        state: &mut State,
        slice: &Slice,
        (place, works): (usize, Vec<Work>),
        batches: &mut [Vec<Work>],
    ) {
        state.slices += 1;
        state.next_id += works.len() as u64;
        let count = works.len();
        let silent = &mut state.silent[place];
        *silent = (silent.0 + 1, silent.1 + u64::from(slice.bytes));
        let signalled = silent.0 >= SIGNAL_SLICES || silent.1 >= SIGNAL_BYTES;
        if signalled {
            *silent = (0, 0);
        }
        for (index, mut work) in works.into_iter().enumerate() {
            let (last, memory) = (index + 1 == count, slice.local.memory.clone());
            state.flying[place].push_back(InFlightRequest {
                id: work.id,
                ticket: slice.ticket,
                last,
                _memory: memory,
            });
            work.signalled = last && signalled;
            work.id |= (place as u64) << PLACE_SHIFT;
            batches[place].push(work);
        }
    }

    fn give(&self, state: &mut State, batches: Vec<Vec<Work>>) {
        for (place, mut works) in batches.into_iter().enumerate() {
            let (Some(last), Some(link)) = (works.last_mut(), &state.link) else { continue };
            // The end of a batch always answers, so that nothing waits for a batch that may not come.
            last.signalled = true;
            state.silent[place] = (0, 0);
            if let Err(error) = link.queue_pair(place).post(&works) {
                return self.broken(state, Fault::Path(format!("{}: {error}", self.rail.name)), None);
            }
        }
    }
}

/// The handle of a path's owner.
pub(super) struct RdmaPath(pub(super) Arc<OpenedPath>);

impl Path for RdmaPath {
    fn post(&self, slices: &[Slice]) -> usize {
        let mut state = self.0.state();
        match &state.phase {
            Phase::Open => self.0.take(&mut state, slices),
            // Nothing may come after `Closed`, so nothing is taken.
            Phase::Ended => 0,
            Phase::Ending(fault) => {
                let failed = slices.iter().map(|slice| self.0.failed(slice.ticket, fault.clone()));
                self.0.completions.push(failed);
                slices.len()
            }
        }
    }

    fn notify(&self, ticket: u64, notice: Notice) {
        self.0.notice(ticket, Kind::Notice, notice.bytes);
    }

    fn probe(&self, ticket: u64) {
        self.0.notice(ticket, Kind::Probe, Vec::new());
    }

    fn close(&self) {
        self.0.end(Fault::Path("the path was closed by its owner".into()), false);
    }
}

impl Drop for RdmaPath {
    fn drop(&mut self) {
        self.close();
    }
}
