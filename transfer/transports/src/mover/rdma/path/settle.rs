//! Handles the device's completions of a path's requests and messages, and reports them to the owner.

use std::io;

use super::{OpenMessage, OpenedPath, PLACE_SHIFT, Phase, State};
use crate::mover::rdma::mailbox::{Kind, RECEIVE, SENT};
use crate::mover::rdma::rail::WatchedEnd;
use crate::mover::rdma::verbs_queue::{FLUSHED, NO_ANSWER, REMOTE_ACCESS, WorkCompletion};
use crate::mover::{Completion, Fault};

/// Looks at the queue before others have their turn.
const LOOKS: u32 = 16;

impl OpenedPath {
    /// Books what has finished.
    fn settle(&self, state: &mut State, finished: &[WorkCompletion]) {
        let mut completed = Vec::new();
        for one in finished {
            if !matches!(state.phase, Phase::Open) {
                break;
            }
            if one.status != 0 {
                // Slices done before the failure stay done. They are reported first, in order.
                self.completions.push(completed.drain(..));
                self.refused(state, one);
                break;
            }
            if let Err(error) = self.finish(state, one, &mut completed) {
                self.completions.push(completed.drain(..));
                self.broken(state, Fault::Path(format!("{}: {error}", self.rail.name)), None);
                break;
            }
        }
        if matches!(state.phase, Phase::Open) {
            if state.full && state.slices <= self.terms.outstanding_max / 4 * 3 {
                state.full = false;
                completed.push(Completion::PathCapacity { path: self.terms.id });
            }
            self.completions.push(completed);
        }
    }

    fn finish(
        &self,
        state: &mut State,
        one: &WorkCompletion,
        completed: &mut Vec<Completion>,
    ) -> io::Result<()> {
        let Some(link) = &mut state.link else { return Ok(()) };
        let (mailbox, queue_pair) = link.mail();
        if one.id & RECEIVE != 0 {
            let message = mailbox.take(queue_pair, one.id, one.bytes)?;
            let message = message.filter(|message| message.kind == Kind::Answer);
            let message = message.ok_or_else(|| io::Error::other("the peer's message is not an answer"))?;
            self.answered(state, message.number, completed);
            return Ok(());
        }
        if one.id & SENT != 0 {
            return mailbox.sent(queue_pair, one.id);
        }
        let (place, id) = ((one.id >> PLACE_SHIFT) as usize, one.id & ((1 << PLACE_SHIFT) - 1));
        let queue = state.flying.get_mut(place).ok_or_else(|| io::Error::other("a strange completion"))?;
        // A success proves that all before it on the same queue pair are done.
        while queue.front().is_some_and(|flying| flying.id <= id) {
            let Some(flying) = queue.pop_front() else { break };
            if flying.last {
                state.slices -= 1;
                completed.push(Completion::Done { path: self.terms.id, ticket: flying.ticket });
            }
        }
        Ok(())
    }

    fn answered(&self, state: &mut State, number: u64, completed: &mut Vec<Completion>) {
        state.alive = true;
        self.changed.notify_all();
        if let Some(OpenMessage { ticket: Some(ticket), .. }) = state.asked.remove(&number) {
            completed.push(Completion::Notified { path: self.terms.id, ticket });
        }
        self.send_unsent(state);
    }

    /// A request has failed, and its queue pair with it.
    fn refused(&self, state: &mut State, one: &WorkCompletion) {
        let name = &self.rail.name;
        let fault = match one.status {
            NO_ANSWER => Fault::Silent(format!("{name}: the peer's device gave no answer")),
            FLUSHED => Fault::Path(format!("{name}: the queue pair failed, here or at the peer")),
            REMOTE_ACCESS => Fault::Path(format!("{name}: the peer refused the key of a window")),
            status => Fault::Path(format!("{name}: a request failed with status {status}")),
        };
        let place = (one.id >> PLACE_SHIFT) as usize;
        let id = one.id & ((1 << PLACE_SHIFT) - 1);
        let data = one.id & (RECEIVE | SENT) == 0;
        let queue = state.flying.get(place).filter(|_| data && one.status == REMOTE_ACCESS);
        let ticket = queue.and_then(|queue| queue.iter().find(|one| one.id == id)).map(|one| one.ticket);
        // The ranges were checked before posting, so the peer must have closed the window.
        let stale = || Fault::Stale("the peer has closed the window".into());
        self.broken(state, fault, ticket.map(|ticket| (ticket, stale())));
    }
}

impl WatchedEnd for OpenedPath {
    fn serve(&self) -> bool {
        let mut finished = Vec::new();
        for _ in 0..LOOKS {
            let mut state = self.state();
            let Some(link) = &state.link else { return false };
            // Armed before it is found empty, so that nothing comes unseen in between.
            let looked = link.poll(&mut finished).and_then(|count| match count {
                0 => link.arm().and_then(|()| link.poll(&mut finished)),
                count => Ok(count),
            });
            match looked {
                Ok(0) => return false,
                Ok(_) => self.settle(&mut state, &finished),
                Err(error) => {
                    self.broken(&mut state, Fault::Path(format!("{}: {error}", self.rail.name)), None)
                }
            }
            finished.clear();
        }
        true
    }

    fn trouble(&self, why: &str) {
        self.end(Fault::Path(why.to_owned()), true);
    }
}
