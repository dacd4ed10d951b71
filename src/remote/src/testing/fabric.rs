//! Where the stand-ins of a test find each other: the network between their GPUs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::pool::Pool;

/// The network of one test.
#[derive(Clone, Debug, Default)]
pub struct Fabric(pub(super) Arc<Inner>);

#[derive(Debug, Default)]
pub(super) struct Inner {
    pub(super) state: Mutex<State>,
    /// Something in `state` has changed.
    pub(super) changed: Notify,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Pools of NIXL engines, by engine.
    pub(super) pools: BTreeMap<String, Arc<Pool>>,
    /// Transfers of Mooncake engines that can be fetched, by engine and transfer.
    pub(super) transfers: BTreeMap<(String, String), Transfer>,
    /// Every transfer that was ever named.
    pub(super) transfer_names: BTreeSet<String>,
    /// Mooncake engines that are registered.
    pub(super) engines: BTreeSet<String>,
    /// Rooms, by host, port and number.
    pub(super) rooms: BTreeMap<(String, u16, u64), Room>,
    /// Bootstrap servers that listen.
    pub(super) bootstraps: BTreeSet<u16>,
}

/// A prompt that waits to be fetched.
#[derive(Clone, Debug)]
pub(super) struct Transfer {
    pub(super) tokens: Vec<u32>,
    pub(super) until: Instant,
    /// Where it is lent, by the transfer's name.
    pub(super) pool: Arc<Pool>,
}

/// Where two legs meet.
#[derive(Clone, Debug, Default)]
pub(super) struct Room {
    /// The prompt that waits to be taken.
    pub(super) prefill: Option<Vec<u32>>,
    /// A prefill leg has been in it.
    pub(super) prefilled: bool,
    /// A decode leg has been in it.
    pub(super) decoded: bool,
    /// The KV has moved.
    pub(super) moved: bool,
    /// Prefill legs that are in it now.
    pub(super) prefills: usize,
}

impl Fabric {
    /// A network with nobody in it.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits until `look` finds something in the state, or the time is over.
    pub(super) async fn wait_for<T>(
        &self,
        until: Instant,
        look: impl Fn(&mut State) -> Option<T>,
    ) -> Option<T> {
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(found) = look(&mut self.0.state.lock()) {
                return Some(found);
            }
            if tokio::time::timeout_at(until.into(), changed).await.is_err() {
                return None;
            }
        }
    }

    /// Changes the state, and notifies the waiting tasks.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let done = change(&mut self.0.state.lock());
        self.0.changed.notify_waiters();
        done
    }
}
