//! The account of one path: what it has taken, when it is full, and how it ends. It is what makes each
//! completion of the port come once and in its place.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::port::{Completion, Completions, Fault, NOTICE_BYTES_MAX, Notice, PathEnd, PathId, Slice};

/// Notices and probes that one path takes before it refuses them.
const NOTICES_MAX: u32 = 64;

/// How much a path takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathCapacity {
    pub(super) slices: u32,
    pub(super) bytes: u64,
    pub(super) slice_bytes: u32,
}

enum Phase {
    Open,
    Ending(Fault),
    Ended,
}

struct State {
    slices: u32,
    bytes: u64,
    notices: u32,
    full: bool,
    phase: Phase,
}

/// Completions gathered in one turn of an I/O thread, and the room that they free.
#[derive(Default)]
pub(super) struct TurnSummary {
    pub(super) completions: Vec<Completion>,
    pub(super) slices: u32,
    pub(super) bytes: u64,
    pub(super) notices: u32,
}

/// The account of one path.
pub(super) struct Gate {
    id: PathId,
    completions: Completions,
    room: PathCapacity,
    state: Mutex<State>,
    ended: Condvar,
}

impl Gate {
    pub(super) fn new(id: PathId, completions: Completions, room: PathCapacity) -> Self {
        let state = State { slices: 0, bytes: 0, notices: 0, full: false, phase: Phase::Open };
        Self { id, completions, room, state: Mutex::new(state), ended: Condvar::new() }
    }

    /// The largest slice, or run of slices, that the peer takes in one piece.
    pub(super) fn slice_bytes_max(&self) -> u32 {
        self.room.slice_bytes
    }

    /// Takes as many slices as there is room for; hands on those that are sound, in order, while the gate is
    /// held, so that none comes after the path has begun to end.
    pub(super) fn take(&self, slices: &[Slice], mut on: impl FnMut(&Slice)) -> usize {
        let mut state = self.state();
        match &state.phase {
            Phase::Open => {}
            Phase::Ending(fault) => {
                self.completions.push(slices.iter().map(|slice| self.failed(slice.ticket, fault.clone())));
                return slices.len();
            }
            // Nothing may come after `Closed`, so nothing is taken.
            Phase::Ended => return 0,
        }
        for (taken, slice) in slices.iter().enumerate() {
            if let Some(fault) = slice.fault(self.room.slice_bytes) {
                self.completions.push([self.failed(slice.ticket, fault)]);
                continue;
            }
            let bytes = u64::from(slice.bytes);
            let fits = state.slices == 0 || state.bytes + bytes <= self.room.bytes;
            if state.slices >= self.room.slices || !fits {
                state.full = true;
                return taken;
            }
            state.slices += 1;
            state.bytes += bytes;
            on(slice);
        }
        slices.len()
    }

    /// Takes a notice, or fails it.
    pub(super) fn take_notice(&self, ticket: u64, notice: Option<&Notice>, on: impl FnOnce()) {
        let mut state = self.state();
        let fault = match &state.phase {
            Phase::Ended => return,
            Phase::Ending(fault) => fault.clone(),
            Phase::Open if notice.is_some_and(|notice| notice.bytes.len() > NOTICE_BYTES_MAX) => {
                Fault::Invalid(format!("a notice has at most {NOTICE_BYTES_MAX} bytes"))
            }
            Phase::Open if state.notices >= NOTICES_MAX => {
                Fault::Path(format!("{NOTICES_MAX} notices wait already; send it when one has arrived"))
            }
            Phase::Open => {
                state.notices += 1;
                return on();
            }
        };
        self.completions.push([self.failed(ticket, fault)]);
    }

    /// Books the ended entries and reports their completions.
    pub(super) fn settle(&self, settled: &mut TurnSummary) {
        if settled.completions.is_empty() {
            return;
        }
        let mut state = self.state();
        state.slices -= std::mem::take(&mut settled.slices);
        state.bytes -= std::mem::take(&mut settled.bytes);
        state.notices -= std::mem::take(&mut settled.notices);
        let roomy = state.slices <= self.room.slices / 4 * 3 && state.bytes <= self.room.bytes / 4 * 3;
        let opens = state.full && roomy && matches!(state.phase, Phase::Open);
        if opens {
            state.full = false;
            settled.completions.push(Completion::PathCapacity { path: self.id });
        }
        self.completions.push(settled.completions.drain(..));
    }

    pub(super) fn done(&self, ticket: u64) -> Completion {
        Completion::Done { path: self.id, ticket }
    }

    pub(super) fn failed(&self, ticket: u64, fault: Fault) -> Completion {
        Completion::Failed { path: self.id, ticket, fault }
    }

    pub(super) fn notified(&self, ticket: u64) -> Completion {
        Completion::Notified { path: self.id, ticket }
    }

    /// Begins the end of the path: by itself, which reports `Broken`, or on request. False when it had begun before.
    pub(super) fn end(&self, fault: Fault, by_itself: bool) -> bool {
        let mut state = self.state();
        if !matches!(state.phase, Phase::Open) {
            return false;
        }
        if by_itself {
            self.completions.push([Completion::Broken { path: self.id, fault: fault.clone() }]);
        }
        state.phase = Phase::Ending(fault);
        true
    }

    /// Why what is outstanding fails.
    pub(super) fn fault(&self) -> Fault {
        match &self.state().phase {
            Phase::Ending(fault) => fault.clone(),
            Phase::Open | Phase::Ended => Fault::Path("the path is closed".into()),
        }
    }

    /// Ends the path and reports `Closed`, once.
    pub(super) fn ended(&self, end: PathEnd) {
        let mut state = self.state();
        if !matches!(state.phase, Phase::Ended) {
            state.phase = Phase::Ended;
            self.completions.push([Completion::Closed { path: self.id, end }]);
            self.ended.notify_all();
        }
    }

    /// Waits for the end, no longer than `limit`, and says whether it came.
    pub(super) fn wait_ended(&self, limit: Duration) -> bool {
        let open = |state: &mut State| !matches!(state.phase, Phase::Ended);
        let waited = self.ended.wait_timeout_while(self.state(), limit, open);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mover::{CompletionQueue, Direction, Location, Memory, Region, RemoteSegment, WindowId};
    use std::sync::Arc;

    fn gate(slices: u32, bytes: u64) -> (Gate, Completions) {
        let queue = Arc::new(CompletionQueue::default());
        let room = PathCapacity { slices, bytes, slice_bytes: 1_000 };
        (Gate::new(PathId(1), queue.clone(), room), queue)
    }

    fn slices(many: u64, bytes: u32) -> Vec<Slice> {
        let memory = Memory::private(4_096, Location::Anywhere).unwrap();
        let remote = Arc::new(RemoteSegment { window: WindowId(0), bytes: 4_096, access: Vec::new() });
        let one = |ticket| Slice {
            ticket,
            direction: Direction::Read,
            local: Region { memory: memory.clone(), at: 0 },
            remote: remote.clone(),
            remote_at: 0,
            bytes,
            verify: false,
        };
        (0..many).map(one).collect()
    }

    fn drain(queue: &Completions) -> Vec<Completion> {
        let mut taken = Vec::new();
        queue.drain(&mut taken);
        taken
    }

    #[test]
    fn a_full_path_tells_of_room_once() {
        let (gate, queue) = gate(4, 10_000);
        assert_eq!(gate.take(&slices(6, 10), |_| {}), 4);
        let done = |tickets: std::ops::Range<u64>| TurnSummary {
            slices: u32::try_from(tickets.end - tickets.start).unwrap(),
            bytes: 10 * (tickets.end - tickets.start),
            completions: tickets.map(|ticket| gate.done(ticket)).collect(),
            notices: 0,
        };
        gate.settle(&mut done(0..1));
        assert_eq!(drain(&queue), [gate.done(0), Completion::PathCapacity { path: PathId(1) }]);
        gate.settle(&mut done(1..4));
        assert_eq!(drain(&queue).len(), 3);
    }

    #[test]
    fn bytes_fill_it_too_and_one_slice_always_fits() {
        let (gate, _queue) = gate(100, 500);
        assert_eq!(gate.take(&slices(1, 900), |_| {}), 1);
        assert_eq!(gate.take(&slices(1, 1), |_| {}), 0);
    }

    #[test]
    fn what_cannot_be_right_fails_and_the_rest_goes_on() {
        let (gate, queue) = gate(100, 10_000);
        let mut wrong = slices(3, 1_001);
        wrong[1].bytes = 0;
        wrong[2].bytes = 100;
        wrong[2].remote_at = 4_000;
        assert_eq!(gate.take(&wrong, |_| panic!("none is sound")), 3);
        let failed = |completion: &Completion| {
            matches!(completion, Completion::Failed { fault: Fault::Invalid(_), .. })
        };
        assert!(drain(&queue).iter().all(failed));
    }

    #[test]
    fn closed_is_the_last_and_comes_once() {
        let (gate, queue) = gate(100, 10_000);
        assert!(gate.end(Fault::Path("gone".into()), true));
        assert!(!gate.end(Fault::Path("again".into()), true));
        assert_eq!(gate.take(&slices(2, 10), |_| {}), 2);
        gate.ended(PathEnd::Fenced);
        gate.ended(PathEnd::PeerUnknown);
        assert!(gate.wait_ended(Duration::ZERO));
        assert_eq!(gate.take(&slices(2, 10), |_| {}), 0);
        gate.take_notice(9, None, || panic!("it has ended"));
        let all = drain(&queue);
        assert_eq!(all.len(), 4);
        assert!(matches!(all[0], Completion::Broken { .. }));
        assert_eq!(all[3], Completion::Closed { path: PathId(1), end: PathEnd::Fenced });
    }
}
