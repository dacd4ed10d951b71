//! The programs of the world: their actions, and the checks of their memory.

use super::*;

impl World {
    pub(super) fn submits(&mut self) {
        if !self.submitting {
            return;
        }
        self.upset();
        if self.jobs.len() < self.load && !self.free.is_empty() {
            let peer = self.rng.below(self.peers.len() as u64) as usize;
            if !self.peers[peer].free.is_empty() {
                self.submit(peer);
            }
        }
        let in_us = 1 + self.rng.below(40);
        self.happens(in_us, Happening::Submits);
    }

    /// Random actions of programs and machines: cancellations, revocations, restarts.
    fn upset(&mut self) {
        if self.rng.chance_permille(self.chances.cancel)
            && let Some(batch) = self.any_job()
        {
            self.feed(Input::Cancel { batch: BatchId(batch) });
        }
        if self.rng.chance_permille(self.chances.revoke)
            && let Some(batch) = self.any_job()
        {
            self.revoked.insert(batch);
        }
        if self.rng.chance_permille(self.chances.rebirth) {
            let peer = self.rng.below(self.peers.len() as u64) as usize;
            self.rebirth(peer);
        }
    }

    fn any_job(&mut self) -> Option<u64> {
        let at = self.rng.below(self.jobs.len() as u64) as usize;
        self.jobs.keys().nth(at).copied()
    }

    pub(crate) fn rebirth(&mut self, index: usize) {
        let peer = &mut self.peers[index];
        let old = core::mem::replace(&mut peer.number, PeerNumber(self.next_number));
        self.next_number += 1;
        let was_known = core::mem::replace(&mut peer.known, false);
        peer.life += 1;
        peer.memory.fill(0);
        peer.free = (0..self.scale.places).collect();
        peer.guards.clear();
        let paths: Vec<u32> =
            self.links.iter().filter(|(_, link)| link.peer == index).map(|(&p, _)| p).collect();
        for path in paths {
            self.links.get_mut(&path).expect("seen above").frozen = true;
            if self.rng.chance_permille(500) {
                self.happens(10, Happening::Breaks(path));
            }
        }
        if was_known && self.rng.chance_permille(500) {
            self.feed(Input::PeerEnded { peer: old });
        }
    }

    /// A batch of a few ops with some peer, which has room.
    pub(crate) fn submit(&mut self, peer: usize) -> u64 {
        let mut ranges = Vec::new();
        let mut at = self.rng.below(500) as usize;
        for _ in 0..=self.rng.below(5) {
            let direction = if self.rng.chance_permille(500) { Direction::Read } else { Direction::Write };
            let bytes = 1 + self.rng.below(12_000) as usize;
            ranges.push(Range { direction, at, bytes });
            at += bytes + self.rng.below(100) as usize;
        }
        let priority = Priority::ALL[self.rng.below(4) as usize];
        self.submit_ranges(peer, ranges, priority)
    }

    /// A batch of one write as large as a place.
    pub(crate) fn submit_whole(&mut self, peer: usize, priority: Priority) -> u64 {
        let range = Range { direction: Direction::Write, at: 0, bytes: PLACE_BYTES };
        self.submit_ranges(peer, vec![range], priority)
    }

    fn submit_ranges(&mut self, peer: usize, ranges: Vec<Range>, priority: Priority) -> u64 {
        self.introduce(peer);
        let here = self.free.pop().expect("the caller has seen that there is room");
        let there = self.peers[peer].free.pop().expect("the caller has seen that there is room");
        self.look_here(here);
        self.look_there(peer, there);
        let batch = self.next_job;
        self.next_job += 1;
        self.fill(batch, peer, (here, there), &ranges);
        let op = |range: &Range| Op { direction: range.direction, bytes: range.bytes as u64, location: 0 };
        let ops = ranges.iter().map(op).collect();
        let notice = self.rng.chance_permille(300);
        let life = self.peers[peer].life;
        let submitted_us = self.now_us;
        let job = Job { peer, life, here, there, ranges, priority, notice, noticed: 0, submitted_us };
        self.jobs.insert(batch, job);
        let hurry = self.rng.chance_permille(self.chances.hurry);
        let deadline_us = hurry.then(|| self.now_us + self.rng.below(20_000));
        let peer = self.peers[peer].number;
        let request = BatchRequest { batch: BatchId(batch), peer, priority, deadline_us, notice, ops };
        self.feed(Input::Submit(request));
        batch
    }

    fn introduce(&mut self, index: usize) {
        if core::mem::replace(&mut self.peers[index].known, true) {
            return;
        }
        let peer = self.peers[index].number;
        let tier = |rail: u8| u8::from(self.scale.rails > 2 && rail >= self.scale.rails / 2);
        let routes =
            (0..self.scale.rails).map(|rail| Route { rail: RailNumber(rail), tier: tier(rail) }).collect();
        self.feed(Input::PeerKnown { peer, routes });
    }

    /// Sources with what the batch is to move, the rest with something else.
    fn fill(&mut self, batch: u64, peer: usize, (here, there): (usize, usize), ranges: &[Range]) {
        for range in ranges {
            let (at, bytes) = (range.at, range.bytes);
            let ours = &mut self.memory[here * PLACE_BYTES + at..][..bytes];
            let theirs = &mut self.peers[peer].memory[there * PLACE_BYTES + at..][..bytes];
            let (source, target) = match range.direction {
                Direction::Read => (theirs, ours),
                Direction::Write => (ours, theirs),
            };
            source.iter_mut().zip(at..).for_each(|(to, at)| *to = byte(batch, at));
            target.fill(!byte(batch, at));
        }
    }

    /// Every byte of the batch is where it belongs.
    pub(super) fn is_right(&self, batch: u64) {
        let job = &self.jobs[&batch];
        let there = &self.peers[job.peer];
        for range in &job.ranges {
            let found = match range.direction {
                Direction::Read => &self.memory[job.here * PLACE_BYTES + range.at..][..range.bytes],
                Direction::Write if there.life == job.life => {
                    &there.memory[job.there * PLACE_BYTES + range.at..][..range.bytes]
                }
                Direction::Write => continue,
            };
            let wrong = found.iter().zip(range.at..).position(|(&found, at)| found != byte(batch, at));
            assert_eq!(wrong, None, "a byte of batch {batch} is wrong: {range:?} of {job:?}");
        }
    }

    /// The end of a batch: its memory is used again at once, where that is allowed.
    pub(super) fn ended(&mut self, batch: u64, how: &'static str, remote_fenced: bool) {
        let job = self.jobs.remove(&batch).expect("a batch ends once");
        *self.ends.entry(how).or_default() += 1;
        if how == "done" {
            assert_eq!(job.noticed, u32::from(job.notice), "a notice is delivered once");
            self.longest_us = self.longest_us.max(self.now_us - job.submitted_us);
        }
        assert!(job.noticed <= 1, "a notice is delivered once");
        if !remote_fenced {
            self.revoked.insert(batch);
        }
        self.poison = self.poison.wrapping_add(1);
        self.memory[job.here * PLACE_BYTES..][..PLACE_BYTES].fill(self.poison);
        self.guards.insert(job.here, self.poison);
        self.free.push(job.here);
        let peer = &mut self.peers[job.peer];
        if peer.life == job.life {
            peer.memory[job.there * PLACE_BYTES..][..PLACE_BYTES].fill(self.poison);
            peer.guards.insert(job.there, self.poison);
            peer.free.push(job.there);
        }
    }

    pub(super) fn look_here(&mut self, place: usize) {
        let Some(poison) = self.guards.remove(&place) else { return };
        let bytes = &self.memory[place * PLACE_BYTES..][..PLACE_BYTES];
        assert!(bytes.iter().all(|&byte| byte == poison), "a byte has landed here after the end was told");
    }

    pub(super) fn look_there(&mut self, index: usize, place: usize) {
        let peer = &mut self.peers[index];
        let Some(poison) = peer.guards.remove(&place) else { return };
        let bytes = &peer.memory[place * PLACE_BYTES..][..PLACE_BYTES];
        assert!(bytes.iter().all(|&byte| byte == poison), "a byte has landed there after the end was told");
    }
}
