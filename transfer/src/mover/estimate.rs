//! How long a batch would take, from what is known now.

use super::engine::MoverCore;
use super::path::{Path, wire_ns};
use super::{PeerNumber, Route};
use crate::Priority;

impl MoverCore {
    /// Microseconds until `bytes` more of this priority would be at the peer, or here. None for a peer that
    /// is not known or has ended, or to which no route leads.
    ///
    /// Counts what is on its way over the peer's paths, what waits before it (all that is as urgent or more,
    /// and of the rest the share that its weight gives it), and the speeds that were measured. Without a path
    /// it goes by what the rail has shown, and by when its route may be tried again.
    #[must_use]
    pub fn estimate(&self, peer: PeerNumber, bytes: u64, priority: Priority) -> Option<u64> {
        let slot = *self.peer_slots.get(&peer)?;
        let peer = &self.peers[slot];
        if peer.ended {
            return None;
        }
        let ahead = self.ahead_bytes(slot, bytes, priority).saturating_add(bytes);
        let serving = peer.paths.iter().map(|&path| &self.paths[path]).filter(|path| path.serves());
        let Some(tier) = serving.clone().map(|path| path.tier).min() else {
            return self.estimate_unopened(peer.routes.iter().map(|s| (s.route, s.retry_at_us)), ahead);
        };
        let used = serving.filter(|path| path.tier == tier);
        // Together they carry the sum of their rates; rates are per nanosecond and MiB, inverted.
        let rates = used.clone().map(|path| u64::MAX / path.ns_per_mib.max(1));
        let ns_per_mib = u64::MAX / rates.fold(1, u64::saturating_add);
        let outstanding: u64 = used.clone().map(|path| path.bytes).sum();
        let overhead_ns = used.map(|path| late_ns(path, self.now_us)).min().unwrap_or(0);
        let ns = wire_ns(outstanding.saturating_add(ahead), ns_per_mib).saturating_add(overhead_ns);
        Some(ns.div_ceil(1_000))
    }

    /// The same for a peer that is not known yet, over these routes: by what their rails have shown.
    #[must_use]
    pub fn estimate_cold(&self, routes: &[Route], bytes: u64) -> Option<u64> {
        let known = routes.iter().filter(|route| route.rail.index() < self.rails.len());
        self.estimate_unopened(known.map(|&route| (route, 0)), bytes)
    }

    /// Bytes of the peer's that go before the last of `bytes` more.
    fn ahead_bytes(&self, slot: u32, bytes: u64, priority: Priority) -> u64 {
        let own = self.weights[priority.index()];
        let pending = self.peers[slot].pending_bytes.iter().zip(self.weights).enumerate();
        let ahead = pending.map(|(class, (&waiting, weight))| {
            if class <= priority.index() {
                return waiting;
            }
            let share = u128::from(bytes) * u128::from(weight) / u128::from(own);
            waiting.min(u64::try_from(share).unwrap_or(u64::MAX))
        });
        ahead.fold(0, u64::saturating_add)
    }

    fn estimate_unopened(&self, routes: impl Iterator<Item = (Route, u64)>, bytes: u64) -> Option<u64> {
        let times = routes.map(|(route, retry_at_us)| {
            let rail = &self.rails[route.rail.index()];
            let rest_us = retry_at_us.saturating_sub(self.now_us);
            let wire_us = wire_ns(bytes, rail.ns_per_mib).div_ceil(1_000);
            // Opening takes a few exchanges; then come the bytes.
            rest_us.saturating_add(rail.latency_us.saturating_mul(4)).saturating_add(wire_us)
        });
        times.min()
    }
}

/// A path's latency, and how late it is.
fn late_ns(path: &Path, now_us: u64) -> u64 {
    path.predicted_ns(0, now_us).saturating_sub(wire_ns(path.bytes, path.ns_per_mib))
}
