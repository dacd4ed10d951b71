//! Saves and restores a conductor: from then on both give the same effects (I10).

use alloc::string::String;
use alloc::vec::Vec;
use baton_types::{BlockHash, InstanceId, RequestId, Rng, Tier};
use serde::{Deserialize, Serialize};

use crate::cold::ColdPrefixes;
use crate::coming::PendingPrefixes;
use crate::conductor::{Conductor, LATEST_US};
use crate::estimate::{LengthEstimator, MarginEstimator};
use crate::expected::ReserveEstimator;
use crate::fleet::Fleet;
use crate::index::PrefixIndex;
use crate::last_copies::LastCopies;
use crate::replicate::Replicator;
use crate::request::{Entry, Requests};
use crate::roles::DemandWindow;
use crate::shares::FairShares;
use crate::tickets::TicketLedger;
use crate::timers::Timers;
use crate::{SchedulerConfig, SchedulerStats};

/// The whole state of a conductor in serial form. Opaque: its shape follows the version of this crate.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedConductor {
    config: SchedulerConfig,
    now_us: u64,
    fleet: Fleet,
    requests: Vec<Option<Entry>>,
    free: Vec<u32>,
    coming: PendingPrefixes,
    queued: PendingPrefixes,
    #[serde(default)]
    cold: ColdPrefixes,
    unplaced: Vec<RequestId>,
    fair: FairShares,
    tickets: TicketLedger,
    lengths: LengthEstimator,
    margins: MarginEstimator,
    #[serde(default)]
    demand: DemandWindow,
    reserve: ReserveEstimator,
    replicator: Replicator,
    last_copies: LastCopies,
    due_us: Vec<u64>,
    rng: Rng,
    turn: u64,
    sequence: u64,
    stats: SchedulerStats,
    held: Vec<IndexPiece>,
    /// The number of this router among several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    router: Option<u32>,
    /// Room was released, and not every request that waits for room was checked.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    room_came: bool,
}

/// A piece of the prefix index.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct IndexPiece {
    parent: Option<BlockHash>,
    hashes: Vec<BlockHash>,
    instance: InstanceId,
    tier: Tier,
}

/// A saved conductor that cannot have been saved by this version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoreError(pub String);

impl core::fmt::Display for RestoreError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "restore: {}; take a file written by this version", self.0)
    }
}

impl SavedConductor {
    /// The settings that were in force.
    #[must_use]
    pub const fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Latest time that it had seen, µs.
    #[must_use]
    pub const fn now_us(&self) -> u64 {
        self.now_us
    }
}

impl Conductor {
    /// Saves the state. The cost grows with the index and the live requests.
    #[must_use]
    pub fn save(&self) -> SavedConductor {
        let (requests, free) = self.requests.save();
        let mut held = Vec::new();
        self.index.export(|parent, hashes, instance, tier| {
            held.push(IndexPiece { parent, hashes: hashes.to_vec(), instance, tier });
        });
        SavedConductor {
            config: self.config.clone(),
            now_us: self.now_us,
            fleet: self.fleet.clone(),
            requests,
            free,
            coming: self.coming.clone(),
            queued: self.queued.clone(),
            cold: self.cold.clone(),
            unplaced: self.unplaced.clone(),
            fair: self.fair.clone(),
            tickets: self.tickets.clone(),
            lengths: self.lengths.clone(),
            margins: self.margins.clone(),
            demand: self.demand.clone(),
            reserve: self.reserve,
            replicator: self.replicator.clone(),
            last_copies: self.last_copies.clone(),
            due_us: self.timers.save(),
            rng: self.rng.clone(),
            turn: self.turn,
            sequence: self.sequence,
            stats: self.stats.clone(),
            held,
            router: self.router,
            room_came: self.room_came,
        }
    }

    /// Restores a conductor. It gives the same effects as the saved one would, except for blocks that an index at its
    /// memory bound refused in another order.
    ///
    /// # Errors
    /// Says what contradicts itself.
    pub fn restore(saved: SavedConductor) -> Result<Self, RestoreError> {
        let mut conductor = Self::new(saved.config).map_err(|e| RestoreError(e.0))?;
        let times = saved.requests.iter().flatten().map(|entry| entry.arrived_us).chain([saved.now_us]);
        if times.max() > Some(LATEST_US) {
            return Err(RestoreError(String::from("a time that no clock shows")));
        }
        let requests = Requests::restore(saved.requests, saved.free);
        let wrong = |what: &str| RestoreError(String::from(what));
        if saved.due_us.len() > saved.fleet.bound() {
            return Err(wrong("a timer of an instance that does not exist"));
        }
        conductor.now_us = saved.now_us;
        conductor.fleet = saved.fleet;
        conductor.fleet.keep_orders(conductor.config.step_target_us());
        conductor.requests =
            requests.ok_or_else(|| wrong("the table of live requests contradicts itself"))?;
        conductor.coming = saved.coming;
        conductor.queued = saved.queued;
        conductor.cold = saved.cold;
        conductor.unplaced = saved.unplaced;
        conductor.fair = saved.fair;
        conductor.tickets = saved.tickets;
        conductor.lengths = saved.lengths;
        conductor.margins = saved.margins;
        conductor.demand = saved.demand;
        conductor.reserve = saved.reserve;
        conductor.replicator = saved.replicator;
        conductor.last_copies = saved.last_copies;
        conductor.timers = Timers::restore(saved.due_us);
        conductor.rng = saved.rng;
        conductor.turn = saved.turn;
        conductor.sequence = saved.sequence;
        conductor.stats = saved.stats;
        conductor.router = saved.router;
        conductor.room_came = saved.room_came;
        conductor.index = PrefixIndex::new();
        for piece in saved.held {
            conductor.index.insert(piece.parent, &piece.hashes, piece.instance, piece.tier);
        }
        conductor.check().map_err(RestoreError)?;
        Ok(conductor)
    }
}
