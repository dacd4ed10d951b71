//! The legs of one attachment to the conductor, and what the driver keeps of each.

use std::collections::BTreeMap;
use std::time::Instant;

use baton_legs::{Legs, LegsConfig};
use baton_types::RequestId;
use baton_wire::v1;
use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::work::Work;
use crate::audit::Audit;

/// The state of one attachment to the conductor.
pub(super) struct Life {
    pub(super) facts: Option<mpsc::Sender<v1::FromNode>>,
    pub(super) chain_seed: u64,
    pub(super) legs: Legs,
    /// The driver's state of each leg.
    pub(super) jobs: BTreeMap<RequestId, Job>,
    audit: Audit,
}

impl Life {
    /// No conductor, and no leg.
    pub(super) fn new(block_tokens: u32) -> Self {
        // The engine has a queue and a pool of its own: none of its legs waits here.
        let config = LegsConfig { block_tokens, pool_blocks: u64::MAX, ahead_tokens: u64::MAX };
        let (legs, jobs) = (Legs::new(config), BTreeMap::new());
        Self { facts: None, chain_seed: 0, legs, jobs, audit: Audit::new(Instant::now()) }
    }

    pub(super) fn clear(&mut self) {
        self.legs.clear();
        self.jobs.clear();
    }

    /// How many legs there are, and how often their books were found broken.
    pub(super) fn look_over(&mut self) -> (u32, u64) {
        let begun = Instant::now();
        if self.audit.is_due(begun) {
            let found = self.legs.check().and_then(|()| {
                match self.legs.iter().map(|(id, _)| id).eq(self.jobs.keys().copied()) {
                    true => Ok(()),
                    false => Err("legs without jobs, or jobs without legs".into()),
                }
            });
            self.audit.looked("remote node", (begun, Instant::now()), found);
        }
        (u32::try_from(self.jobs.len()).unwrap_or(u32::MAX), self.audit.failures())
    }
}

/// The content of a leg, and the senders of the signals that its task waits for. [`Legs`] holds its state.
pub(super) struct Job {
    pub(super) attempt: u32,
    /// The work of its call, until the call begins.
    pub(super) work: Option<Work>,
    /// The transfer parameters of a decode leg.
    pub(super) transfer: Bytes,
    /// Its task ends: at once, or as soon as nothing would stay behind at the engine.
    pub(super) over: CancellationToken,
    /// The word that it waits for: to decode, or that its offer was passed on.
    pub(super) go: Option<oneshot::Sender<()>>,
    /// The receiving end of `go`, for the leg's task.
    pub(super) gate: Option<oneshot::Receiver<()>>,
}

impl Job {
    pub(super) fn new(attempt: u32, work: Work) -> Self {
        let (go, gate) = oneshot::channel();
        Self {
            attempt,
            work: Some(work),
            transfer: Bytes::new(),
            over: CancellationToken::new(),
            go: Some(go),
            gate: Some(gate),
        }
    }
}

impl Job {
    /// Its task need not wait any longer. One that has failed meanwhile has said so.
    pub(super) fn go_on(&mut self) {
        if let Some(go) = self.go.take() {
            let _ = go.send(());
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.over.cancel();
    }
}
