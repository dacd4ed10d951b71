//! The audit of the whole state.

use alloc::format;
use alloc::string::String;

use super::batch::{Batch, Phase};
use super::engine::MoverCore;
use super::path::{Path, PathState};
use super::peer::Peer;
use super::slices::Cargo;
use super::timers::Timer;

type Audit = Result<(), String>;

impl MoverCore {
    /// Audits every invariant: batches end once (I5), bytes are counted once (I7), bounds hold (I9), and
    /// nothing waits that nothing will wake. Costs a pass over everything: for tests and simulators.
    ///
    /// # Errors
    /// The first breach, with what it concerns.
    pub fn check(&self) -> Audit {
        self.check_counts()?;
        self.check_bounds()?;
        for (slot, batch) in self.batches.iter() {
            self.check_batch(slot, batch).map_err(|breach| format!("{breach}: {batch:?}"))?;
        }
        for (slot, path) in self.paths.iter() {
            self.check_path(slot, path).map_err(|breach| format!("{breach}: {path:?}"))?;
        }
        for (slot, peer) in self.peers.iter() {
            self.check_peer(slot, peer).map_err(|breach| format!("{breach}: {peer:?}"))?;
        }
        self.check_timers()
    }

    fn check_counts(&self) -> Audit {
        let stats = self.stats();
        if stats.submitted != stats.done + stats.failed + stats.cancelled + stats.live_batches {
            return Err(format!("I5: batches taken are not those ended and live: {stats:?}"));
        }
        let paths = self.paths.iter().map(|(_, path)| path);
        let (mut slices, mut bytes, mut closing, mut probes) = (0, 0, 0, 0);
        for path in paths {
            slices += path.outstanding.len();
            bytes += path.bytes;
            closing += u32::from(path.state == PathState::Closing);
            probes += usize::from(path.probe.is_some());
        }
        let kept = (self.outstanding as usize, self.outstanding_bytes, self.closing);
        if kept != (slices, bytes, closing) || self.slices.len() != slices + probes {
            return Err(format!(
                "I9: {kept:?} kept, {:?} on the paths, {probes} probes",
                (slices, bytes, closing)
            ));
        }
        let ops: u64 = self.batches.iter().map(|(_, batch)| batch.ops.len() as u64).sum();
        ensure(ops == self.ops, "I9: ops are not those of the batches")?;
        for (index, rail) in self.rails.iter().enumerate() {
            let on = || self.paths.iter().filter(|(_, path)| path.rail.index() == index);
            let held = (on().count(), on().map(|(_, path)| path.bytes).sum::<u64>());
            ensure(held == (rail.paths as usize, rail.bytes), "I9: a rail is not the sum of its paths")?;
        }
        Ok(())
    }

    fn check_bounds(&self) -> Audit {
        let config = &self.config;
        let slack = u64::from(config.slice_bytes_max);
        ensure(self.batches.len() <= config.max_batches as usize, "I9: batches")?;
        ensure(self.batches.len() == self.batch_slots.len(), "I9: names of batches")?;
        ensure(self.ops <= u64::from(config.max_ops), "I9: ops")?;
        ensure(self.paths.len() <= config.max_paths as usize, "I9: paths")?;
        ensure(self.paths.len() == self.path_slots.len(), "I9: names of paths")?;
        ensure(self.peers.len() <= config.max_peers as usize, "I9: peers")?;
        ensure(self.peers.len() == self.peer_slots.len(), "I9: names of peers")?;
        ensure(self.outstanding_bytes < config.max_bytes + slack, "I9: bytes outstanding")?;
        for rail in &self.rails {
            ensure(rail.bytes < rail.spec.rail_bytes + slack, "I9: bytes of a rail")?;
        }
        Ok(())
    }

    fn check_batch(&self, slot: u32, batch: &Batch) -> Audit {
        ensure(self.batch_slots.get(&batch.id) == Some(&slot), "not found under its name")?;
        let peer = self.peers.get(batch.peer).ok_or("its peer is gone")?;
        ensure(peer.batches.contains(&slot), "not among its peer's")?;
        let (mut on_way, mut bytes) = (0, 0);
        for (_, path) in self.paths.iter() {
            for &slice in &path.outstanding {
                let slice = self.slices.get(slice);
                if matches!(slice.cargo, Cargo::Data { batch, .. } | Cargo::Notice { batch } if batch == slot)
                {
                    on_way += 1;
                    bytes += slice.bytes();
                }
            }
        }
        ensure(on_way == batch.outstanding, "slices on their way")?;
        let whole = batch.done_bytes + batch.unposted_bytes + bytes == batch.bytes;
        ensure(whole || matches!(batch.phase, Phase::Ending(_)), "I7: bytes lost or counted twice")?;
        let queue = &peer.queues[batch.priority.index()];
        let places = queue.iter().filter(|&&other| other == slot).count();
        ensure(places == usize::from(batch.queued), "its place in the queue")?;
        ensure(batch.queued == (batch.unposted_bytes > 0), "bytes that wait in no queue")?;
        let in_doubt = batch.doubts.keys().all(|number| {
            let path = self.path_slots.get(number).map(|&path| &self.paths[path]);
            path.is_some_and(|path| path.state == PathState::Closing && path.doubtful.contains(&slot))
        });
        ensure(in_doubt, "doubts a path that is not closing")?;
        let held = batch.outstanding > 0 || !batch.doubts.is_empty();
        let ended = matches!(batch.phase, Phase::Ending(_)) && !held;
        let complete = batch.phase == Phase::Moving && batch.done_bytes == batch.bytes && !held;
        ensure(!ended && !complete, "I5: should have ended")?;
        let timed = batch.timer_us.is_some() || (matches!(batch.phase, Phase::Ending(_)));
        ensure(timed, "has no limit of time")
    }

    fn check_path(&self, slot: u32, path: &Path) -> Audit {
        ensure(self.path_slots.get(&path.number) == Some(&slot), "not found under its name")?;
        let peer = self.peers.get(path.peer).ok_or("its peer is gone")?;
        let closing = path.state == PathState::Closing;
        ensure(peer.paths.contains(&slot) != closing, "its place at its peer")?;
        ensure(path.outstanding.is_empty() || path.state == PathState::Open, "slices on a path not open")?;
        ensure(path.doubtful.is_empty() || closing, "doubts of a path that is not closing")?;
        let spec = &self.rails[path.rail.index()].spec;
        ensure(path.outstanding.len() <= spec.path_slices as usize, "I9: slices on a path")?;
        let bytes = path.outstanding.iter().map(|&slice| self.slices.get(slice).bytes()).sum::<u64>();
        ensure(bytes == path.bytes, "bytes of a path")?;
        ensure(bytes < spec.path_bytes + u64::from(self.config.slice_bytes_max), "I9: bytes of a path")?;
        let seated = path.outstanding.iter().zip(0..).all(|(&slice, seat)| {
            let slice = self.slices.get(slice);
            slice.seat == seat && slice.path == slot
        });
        ensure(seated, "a slice is not in its seat")?;
        let watched = path.outstanding.is_empty() && path.probe.is_none() && !path.full;
        ensure(watched || path.timer_us.is_some() || closing, "busy and not watched")
    }

    fn check_peer(&self, slot: u32, peer: &Peer) -> Audit {
        ensure(self.peer_slots.get(&peer.number) == Some(&slot), "not found under its name")?;
        for class in 0..peer.queues.len() {
            let pending = peer.queues[class].iter().map(|&batch| self.batches[batch].unposted_bytes);
            ensure(pending.sum::<u64>() == peer.pending_bytes[class], "bytes to post")?;
            for (index, rail) in self.rails.iter().enumerate() {
                let places = rail.queued(class).filter(|&other| other == slot).count();
                let bit = peer.ready[class] >> index & 1 == 1;
                ensure(places == usize::from(bit), "its place before a rail")?;
            }
        }
        let idle = self.idle_peers.contains(&(peer.used_us, slot));
        ensure(idle == peer.is_idle(), "its place among the idle")?;
        let places = self.waiting.iter().filter(|&&other| other == slot).count();
        ensure(places == usize::from(peer.waiting), "its place in the line")?;
        ensure(
            !peer.ended || peer.batches.iter().all(|&b| self.is_ending(b)),
            "ended, with batches that go on",
        )?;
        let closing = self.paths.iter().filter(|(_, p)| p.peer == slot && p.state == PathState::Closing);
        ensure(closing.count() == peer.closing as usize, "paths closing")?;
        let awake = peer.waiting || peer.timer_us.is_some() || !peer.paths.is_empty();
        ensure(awake || !peer.wants(), "has work that nothing will wake")
    }

    fn is_ending(&self, slot: u32) -> bool {
        matches!(self.batches[slot].phase, Phase::Ending(_))
    }

    fn check_timers(&self) -> Audit {
        let batches = self.batches.iter().map(|(slot, batch)| (Timer::Batch(slot), batch.timer_us));
        let paths = self.paths.iter().map(|(slot, path)| (Timer::Path(slot), path.timer_us));
        let peers = self.peers.iter().map(|(slot, peer)| (Timer::Peer(slot), peer.timer_us));
        let all = batches.chain(paths).chain(peers).chain([(Timer::Turn, self.turn_timer_us)]);
        let mut count = 0;
        for (timer, at_us) in all {
            let Some(at_us) = at_us else { continue };
            ensure(self.timers.holds(timer, at_us), "a timer is lost")?;
            count += 1;
        }
        ensure(count == self.timers.len(), "a timer has no owner")
    }
}

fn ensure(holds: bool, breach: &str) -> Audit {
    if holds { Ok(()) } else { Err(String::from(breach)) }
}
