//! Where the two legs of a pair meet.

use std::time::Instant;

use super::{GenerateRequest, RunningRequest, Sglang, failure};
use crate::testing::fabric::{Room, State};
use crate::testing::server::Reply;

impl Sglang {
    /// A prefill leg enters its room, and waits until a decode leg has its KV.
    pub(super) async fn meet_decode(
        &self,
        request: &GenerateRequest,
        key: &(String, u16, u64),
        running: &mut RunningRequest,
    ) -> Result<(), Reply> {
        if key.1 != self.spec.bootstrap_port {
            self.stand.log.violate(format!("a prefill leg for the bootstrap port {}", key.1));
        }
        let (is_full, used) = self.fabric.change(|state| {
            let room = state.rooms.entry(key.clone()).or_default();
            let found = (room.prefills > 0, room.prefilled);
            *room = Room {
                prefill: Some(request.prompt.clone()),
                prefilled: true,
                moved: false,
                prefills: room.prefills + 1,
                ..room.clone()
            };
            found
        });
        running.room = Some(key.clone());
        if used || is_full {
            self.stand.log.violate(format!("room {} is used a second time", key.2));
        }
        if is_full {
            self.stand.log.violate("two requests in one room at once; the real prefill server exits");
            self.exit();
            return Err(Reply::Hangup);
        }
        let until = Instant::now() + self.spec.wait;
        let moved = |state: &mut State| state.rooms.get(key).filter(|room| room.moved).map(|_| ());
        let mut abort = running.abort.clone();
        tokio::select! {
            met = self.fabric.wait_for(until, moved) => met.ok_or_else(|| {
                self.stand.log.violate("only the prefill leg came");
                failure(500, "Prefill bootstrap failed: timed out in KVPoll.Bootstrapping")
            }),
            _ = abort.wait_for(|abort| *abort) => Err(failure(500, "Aborted by AbortReq.")),
        }
    }

    /// A decode leg enters its room, and takes the prefill's KV, whatever prompt that is of.
    pub(super) async fn meet_prefill(
        &self,
        request: &GenerateRequest,
        key: &(String, u16, u64),
        running: &RunningRequest,
    ) -> Result<Vec<u32>, Reply> {
        let reused = self.fabric.change(|state| {
            let room = state.rooms.entry(key.clone()).or_default();
            std::mem::replace(&mut room.decoded, true)
        });
        if reused {
            self.stand.log.violate(format!("room {} is used a second time", key.2));
        }
        let until = Instant::now() + self.spec.wait;
        let ready = |state: &mut State| {
            let room = state.rooms.get_mut(key).filter(|room| room.prefills > 0 && !room.moved)?;
            room.moved = true;
            // Removes the content: rooms are never used again, and there are many.
            room.prefill.take()
        };
        let mut abort = running.abort.clone();
        let found = tokio::select! {
            found = self.fabric.wait_for(until, ready) => found,
            _ = abort.wait_for(|abort| *abort) => return Err(failure(500, "Aborted by AbortReq.")),
        };
        let Some(theirs) = found else {
            // A prefill server that is gone is nobody's fault.
            if self.fabric.0.state.lock().bootstraps.contains(&key.1) {
                self.stand.log.violate("only the decode leg came");
            }
            return Err(failure(500, "Decode transfer failed: timed out in KVPoll.WaitingForInput"));
        };
        self.fabric.0.changed.notify_waiters();
        if theirs != request.prompt {
            self.stand.log.violate("different prompts under one room; the answer is wrong, with status 200");
        }
        Ok(theirs)
    }
}
