//! The router's way in: submissions become messages, tickets cancel when they are dropped.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use baton_router::{Backend, Event, Model, Readiness, Refusal, Submission, SubmissionStream};
use baton_types::RequestId;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::inbox::{Inbox, Message};
use super::lead::Lead;

/// Events that may wait for a client that reads slowly; a client further behind is cut off.
const EVENTS_PER_CLIENT: usize = 32_768;
/// `EVENTS_PER_CLIENT` for a client that asked for logprobs: such an event takes much more memory.
const LARGE_EVENTS_PER_CLIENT: usize = 4096;
/// Events that each client may leave unread even where the shared memory is used up: seconds of an engine's work.
const EVENTS_AT_LEAST: usize = 256;
/// Upper bound of an event's size, bytes.
const EVENT_BYTES: usize = 96;
/// Upper bound of the size of an event with logprobs, bytes: 20 tokens, their logprobs and the allocator's overhead.
const LARGE_EVENT_BYTES: usize = 384;

/// Maximum number of servers whose reason for being detached is listed in one message.
const SHOWN: usize = 4;

/// The conductor as a backend of the router.
pub struct Door {
    inbox: Inbox,
    shared: Arc<Shared>,
    unread: Arc<UnreadBudget>,
}

/// Room for what clients have yet to read, all of them together.
struct UnreadBudget {
    limit_bytes: usize,
    kept_bytes: AtomicUsize,
}

/// Room that one client has until this is dropped.
struct Share {
    unread: Arc<UnreadBudget>,
    bytes: usize,
}

impl UnreadBudget {
    /// Room for as many events of a size as a client can have, up to `wanted`; a few where there is no room.
    fn share(self: &Arc<Self>, wanted: usize, event_bytes: usize) -> (usize, Share) {
        let fits = |kept: usize| self.limit_bytes.saturating_sub(kept) / event_bytes;
        let events = |kept: usize| wanted.min(fits(kept).max(EVENTS_AT_LEAST));
        let keep = |kept: usize| Some(kept + events(kept) * event_bytes);
        let before = self.kept_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, keep);
        let events = events(before.unwrap_or_else(|kept| kept));
        (events, Share { unread: Arc::clone(self), bytes: events * event_bytes })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.unread.kept_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// State that the driver publishes to the router.
#[derive(Default)]
pub(super) struct Shared {
    pub(super) model: ArcSwapOption<Model>,
    pub(super) readiness: Mutex<Option<Readiness>>,
    /// Whether this conductor leads, where several stand by.
    pub(super) lead: OnceLock<Lead>,
}

impl Door {
    /// `unread_bytes` are for what clients have yet to read, as far as each does not have a few events anyway.
    pub(super) fn new(inbox: Inbox, shared: Arc<Shared>, unread_bytes: usize) -> Self {
        let unread = UnreadBudget { limit_bytes: unread_bytes, kept_bytes: AtomicUsize::new(0) };
        Self { inbox, shared, unread: Arc::new(unread) }
    }
}

/// Cancels its request when the client disconnects. The conductor ignores it for a request that has ended.
struct Guard {
    inbox: Inbox,
    request: RequestId,
    _share: Share,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.inbox.cancel(self.request);
    }
}

impl Backend for Door {
    fn submit(&self, submission: Submission) -> SubmissionStream {
        let request = self.inbox.name_request();
        let large = submission.sampling.logprobs.is_some();
        let (most, event_bytes) = match large {
            true => (LARGE_EVENTS_PER_CLIENT, LARGE_EVENT_BYTES),
            false => (EVENTS_PER_CLIENT, EVENT_BYTES),
        };
        let wanted = most.min(submission.sampling.max_tokens as usize + 8);
        let (most, share) = self.unread.share(wanted, event_bytes);
        let (sender, events) = mpsc::channel(most);
        let message = Message::submit(request, submission, sender.clone());
        if self.inbox.offer(message).is_err() {
            // The channel is new and has room.
            let _ = sender.try_send(Event::Refused(Refusal {
                status: 503,
                reason: "conductor_busy".into(),
                message: "the conductor's inbox is full; try again shortly".into(),
                param: None,
                retry_after_us: Some(1_000_000),
                predicted_ttft_us: None,
            }));
        }
        SubmissionStream {
            events,
            guard: Box::new(Guard { inbox: self.inbox.clone(), request, _share: share }),
        }
    }

    fn model(&self) -> Option<Arc<Model>> {
        self.shared.model.load_full()
    }

    fn readiness(&self) -> Readiness {
        if let Some(Err(status)) = self.shared.lead.get().map(Lead::check) {
            return Readiness { ready: false, detail: status.message().to_owned() };
        }
        let known = self.shared.readiness.lock().clone();
        let mut known =
            known.unwrap_or_else(|| Readiness { ready: false, detail: "no node has attached yet".into() });
        if !known.ready {
            let outside = self.inbox.outside();
            outside
                .iter()
                .take(SHOWN)
                .for_each(|(name, why)| known.detail.push_str(&format!("; {name}: {why}")));
        }
        known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_out_of_bodies_that_an_engine_would_be_told() {
        for name in baton_router::IN_THE_TOKENS {
            let rule = baton_remote::rule(name);
            assert!(matches!(rule, Some(baton_remote::Rule::Ours | baton_remote::Rule::Served)), "{name}");
        }
    }

    /// A standby said that no node had attached, for which the remedy is to start nodes.
    #[test]
    fn a_conductor_that_does_not_lead_says_so() {
        let shared = Arc::new(Shared::default());
        let door = Door::new(super::super::inbox::inbox().0, Arc::clone(&shared), 0);
        assert_eq!(door.readiness().detail, "no node has attached yet");
        shared.lead.set(Lead::elected()).expect("once");
        let known = door.readiness();
        assert!(!known.ready && known.detail.contains("does not lead"), "{known:?}");
    }

    #[test]
    fn clients_share_the_room_for_what_they_have_yet_to_read() {
        let unread =
            Arc::new(UnreadBudget { limit_bytes: 1_000 * EVENT_BYTES, kept_bytes: AtomicUsize::new(0) });
        let (whole, first) = unread.share(600, EVENT_BYTES);
        let (rest, second) = unread.share(600, EVENT_BYTES);
        let (least, third) = unread.share(600, EVENT_BYTES);
        let (few, fourth) = unread.share(9, EVENT_BYTES);
        assert_eq!((whole, rest, least, few), (600, 400, EVENTS_AT_LEAST, 9));
        drop((second, third, fourth));
        assert_eq!(unread.share(600, EVENT_BYTES).0, 400, "what is given back is there for others");
        drop(first);
        assert_eq!(unread.kept_bytes.load(Ordering::Relaxed), 0);
        let (large, _share) = unread.share(600, LARGE_EVENT_BYTES);
        assert_eq!(large, 256, "a quarter as many of four times the size, and never fewer than a few");
    }

    #[test]
    fn an_event_takes_no_more_than_it_counts() {
        assert!(size_of::<Event>() + 8 <= EVENT_BYTES, "{}", size_of::<Event>());
        let top = 20 * size_of::<(u32, f32)>();
        assert!(
            size_of::<Event>() + top.next_power_of_two() + 8 <= LARGE_EVENT_BYTES,
            "{}",
            size_of::<Event>()
        );
    }
}
