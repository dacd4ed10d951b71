//! The audit of the whole state.

use alloc::format;
use alloc::string::String;

use crate::batch::{Batch, Phase};
use crate::engine::MoverCore;
use crate::path::{Path, PathState};
use crate::peer::Peer;
use crate::slices::SliceContent;
use crate::timers::Timer;

type Audit = Result<(), String>;

impl MoverCore {
    /// Audits every invariant: batches end once (I5), bytes are counted once (I7), bounds hold (I9), and
    /// nothing waits that nothing will wake. Costs a pass over everything: a service samples it.
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
        ensure(self.moved_bytes().sum::<u64>() == self.stats.moved_bytes, "I9: bytes moved by the rails")
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
                if matches!(slice.content, SliceContent::Data { batch, .. } | SliceContent::Notice { batch } if batch == slot)
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
        let seated = path.outstanding.iter().zip(0..).all(|(&slice, position)| {
            let slice = self.slices.get(slice);
            slice.position == position && slice.path == slot
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::End;
    use crate::testing::bench::*;
    use crate::*;
    use alloc::vec;
    use alloc::vec::Vec;

    /// A core with something of each kind: a busy path, one that closes with a batch in doubt, a probe, a
    /// peer in line, an idle one, and a batch that ends. Peer 0 and its path 0 are the busy ones.
    fn rich() -> MoverCore {
        let rail = RailSpec { path_slices: 3, ..RailSpec::default() };
        let config =
            MoverConfig { max_paths: 2, turn_us: 1 << 40, rails: vec![rail; 2], ..MoverConfig::default() };
        let mut bench = Bench::new(config, 4, &[0, 1]);
        bench.start(write(1, 0, 1 << 20));
        let doubtful = bench.start(write(2, 1, 1_000));
        bench.submit(write(3, 2, 1_000));
        bench.cancel(2);
        bench.broken(doubtful.path, Fault::Path);
        bench.submit(write(4, 0, 1_000));
        bench.pass(500_000);
        let core = bench.core;
        let states: Vec<_> = core.snapshot().paths.iter().map(|path| path.state).collect();
        assert_eq!(states, ["open", "closing"]);
        assert!(core.paths[0].probe.is_some() && core.paths[0].outstanding.len() == 3);
        assert_eq!((core.waiting.len(), core.batches.len()), (1, 4));
        core
    }

    type Break = (&'static str, fn(&mut MoverCore));

    fn caught(table: &[Break]) {
        assert_eq!(rich().check(), Ok(()));
        for (breach, damage) in table {
            let mut core = rich();
            damage(&mut core);
            let told = core.check().expect_err(breach);
            assert!(told.starts_with(breach), "{breach}, but told is: {told}");
        }
    }

    #[test]
    fn sums_that_are_wrong_are_caught() {
        caught(&[
            ("I5: batches taken", |core| core.stats.done += 1),
            ("I5: batches taken", |core| core.stats.submitted += 1),
            ("I5: batches taken", |core| core.stats.cancelled += 1),
            ("I9: (4,", |core| core.outstanding += 1),
            ("I9: (3,", |core| core.outstanding_bytes += 1),
            ("I9: (3,", |core| core.closing = 0),
            ("I9: (3,", |core| core.paths[0].probe = None),
            ("I9: ops are", |core| core.ops += 1),
            ("I9: a rail is", |core| core.rails[0].bytes += 1),
            ("I9: a rail is", |core| core.rails[1].paths += 1),
            ("I9: bytes moved", |core| core.rails[1].moved_bytes += 1),
        ]);
    }

    #[test]
    fn bounds_that_are_passed_are_caught() {
        caught(&[
            ("I9: batches", |core| core.config.max_batches = 3),
            ("I9: ops", |core| core.config.max_ops = 3),
            ("I9: paths", |core| core.config.max_paths = 1),
            ("I9: peers", |core| core.config.max_peers = 3),
            ("I9: names of batches", |core| core.batch_slots.extend([(BatchId(70), 0)])),
            ("I9: names of paths", |core| core.path_slots.extend([(PathNumber(70), 0)])),
            ("I9: names of peers", |core| core.peer_slots.extend([(PeerNumber(70), 0)])),
            ("I9: bytes outstanding", |core| {
                (core.config.max_bytes, core.config.slice_bytes_max) = (1, 65_536);
            }),
            ("I9: bytes of a rail", |core| {
                (core.rails[0].spec.rail_bytes, core.config.slice_bytes_max) = (1, 65_536);
            }),
            ("I9: slices on a path", |core| core.rails[0].spec.path_slices = 2),
            ("I9: bytes of a path", |core| {
                (core.rails[0].spec.path_bytes, core.config.slice_bytes_max) = (1, 65_536);
            }),
        ]);
    }

    #[test]
    fn a_batch_that_is_not_as_it_says_is_caught() {
        caught(&[
            ("not found under its name", |core| core.batches[0].id = BatchId(70)),
            ("its peer is gone", |core| core.batches[0].peer = 70),
            ("not among its peer's", |core| core.peers[0].batches.clear()),
            ("slices on their way", |core| core.batches[0].outstanding += 1),
            ("I7: bytes lost", |core| core.batches[0].done_bytes += 1),
            ("I7: bytes lost", |core| core.batches[0].unposted_bytes -= 1),
            ("its place in the queue", |core| core.batches[0].queued = false),
            ("its place in the queue", |core| core.peers[0].queues[1].push_back(0)),
            ("bytes that wait in no queue", |core| {
                core.batches[0].queued = false;
                core.peers[0].queues[1].retain(|&batch| batch != 0);
            }),
            ("doubts a path", |core| core.batches[0].doubts.extend([(PathNumber(0), true)])),
            ("doubts a path", |core| core.batches[0].doubts.extend([(PathNumber(70), true)])),
            ("doubts a path", |core| core.paths[1].doubtful.clear()),
            ("I5: should have ended", |core| core.batches[1].doubts.clear()),
            ("I5: should have ended", |core| {
                core.batches[1].doubts.clear();
                core.batches[1].phase = Phase::Moving;
                core.batches[1].done_bytes = core.batches[1].bytes;
            }),
            ("has no limit of time", |core| core.batches[0].timer_us = None),
        ]);
    }

    #[test]
    fn a_path_that_is_not_as_it_says_is_caught() {
        caught(&[
            ("not found under its name", |core| core.paths[0].number = PathNumber(70)),
            ("its peer is gone", |core| core.paths[0].peer = 70),
            ("its place at its peer", |core| core.peers[0].paths.clear()),
            ("its place at its peer", |core| core.peers[1].paths.push(1)),
            ("slices on a path not open", |core| core.paths[0].state = PathState::Opening),
            ("slices on a path not open", |core| core.paths[0].state = PathState::Trial),
            ("doubts of a path", |core| core.paths[0].doubtful.push(0)),
            ("bytes of a path", |core| {
                core.paths[0].bytes -= 1;
                (core.rails[0].bytes, core.outstanding_bytes) = (core.paths[0].bytes, core.paths[0].bytes);
            }),
            ("a slice is not in its seat", |core| core.paths[0].outstanding.swap(0, 2)),
            ("a slice is not in its seat", |core| core.slices.reseat(core.paths[0].outstanding[0], 1)),
            ("busy and not watched", |core| core.paths[0].timer_us = None),
        ]);
    }

    #[test]
    fn a_peer_that_is_not_as_it_says_is_caught() {
        caught(&[
            ("not found under its name", |core| core.peers[3].number = PeerNumber(70)),
            ("bytes to post", |core| core.peers[0].pending_bytes[1] += 1),
            ("bytes to post", |core| core.peers[3].pending_bytes[0] = 1),
            ("its place before a rail", |core| core.peers[3].ready[2] = 2),
            ("its place before a rail", |core| core.rails[1].push(3, 3)),
            ("its place among the idle", |core| core.idle_peers.clear()),
            ("its place among the idle", |core| core.idle_peers.extend([(core.peers[0].used_us, 0)])),
            ("its place in the line", |core| core.waiting.clear()),
            ("its place in the line", |core| core.peers[3].waiting = true),
            ("its place in the line", |core| core.waiting.push_back(2)),
            ("ended, with batches that go on", |core| core.peers[0].ended = true),
            ("paths closing", |core| core.peers[1].closing = 2),
            ("has work that nothing will wake", |core| {
                core.waiting.clear();
                (core.peers[2].waiting, core.peers[2].timer_us) = (false, None);
            }),
        ]);
    }

    #[test]
    fn a_timer_that_is_lost_or_has_no_owner_is_caught() {
        caught(&[
            ("a timer is lost", |core| core.batches[0].timer_us = Some(1)),
            ("a timer is lost", |core| core.paths[0].timer_us = Some(1)),
            ("a timer is lost", |core| core.peers[3].timer_us = Some(1)),
            ("a timer is lost", |core| core.turn_timer_us = Some(1)),
            ("a timer has no owner", |core| core.timers.set(Timer::Turn, &mut None, Some(1))),
            ("a timer has no owner", |core| core.timers.set(Timer::Peer(3), &mut None, Some(1))),
        ]);
    }

    #[test]
    fn a_breach_names_what_it_concerns() {
        let mut core = rich();
        core.batches[0].phase = Phase::Ending(End::Cancelled);
        core.batches[0].outstanding = 0;
        let told = core.check().unwrap_err();
        assert!(told.starts_with("slices on their way: Batch {") && told.contains("BatchId(1)"), "{told}");
    }
}
