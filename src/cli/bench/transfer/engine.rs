//! Measures this load over the whole engine, in batches.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail};
use baton_transfer::Priority;
use baton_transports::mover::{Batch, Fault, Mover, MoverSettings, Op, Outcome, Region};

use super::ends::{LocalEndpoint, Peer};
use super::load::{Clock, Figures, Load, TIME_LIMIT, nanos};

/// Batches on their way at a time.
const RUNNING: usize = 2;

/// A mover over an endpoint of its own, for it ends its transports with itself.
pub struct Engine {
    mover: Mover,
    near: LocalEndpoint,
    next: u64,
}

impl Engine {
    pub fn start(near: LocalEndpoint) -> Result<Self> {
        let transports = vec![near.transport.clone()];
        let mover = Mover::new(MoverSettings::default(), near.exposure.clone(), transports);
        let failed = |fault: Fault| anyhow!("bench: mover: {fault:?}");
        let mover = mover.map_err(failed)?;
        mover.register(&near.memory).map_err(failed)?;
        Ok(Self { mover, near, next: 0 })
    }

    fn batch(&mut self, load: &Load, peer: &Peer) -> Batch {
        let block = u64::from(load.block_bytes);
        let slots = self.near.memory.bytes() as u64 / block;
        let op = |_| {
            let at = self.next % slots * block;
            self.next += 1;
            let local = Region { memory: self.near.memory.clone(), at };
            Op { direction: load.direction, local, remote: peer.window.clone(), remote_at: at, bytes: block }
        };
        let ops = (0..load.batch).map(op).collect();
        let (peer, priority) = (peer.id.clone(), Priority::Fetch);
        Batch { peer, priority, limit: Some(TIME_LIMIT), verify: load.verify, notice: None, ops }
    }

    /// Goes over all memory once.
    pub fn warm_up(&mut self, load: &Load, peer: &Peer) -> Result<()> {
        let blocks = self.near.memory.bytes() as u64 / u64::from(load.block_bytes);
        let end = self.next + blocks;
        self.drive(load, peer, |next| next < end).map(|_| ())
    }

    /// Runs the load; latencies are those of whole batches.
    pub fn run(&mut self, load: &Load, peer: &Peer) -> Result<Figures> {
        let clock = Clock::start(Some(peer.pid()));
        let until = Instant::now() + load.duration;
        let latency_ns = self.drive(load, peer, |_| Instant::now() < until)?;
        let blocks = latency_ns.len() as u64 * u64::from(load.batch);
        Ok(clock.stop(blocks, load.block_bytes.into(), latency_ns))
    }

    fn drive(&mut self, load: &Load, peer: &Peer, goes_on: impl Fn(u64) -> bool) -> Result<Vec<u32>> {
        let (mut running, mut latency_ns) = (VecDeque::new(), Vec::new());
        loop {
            while running.len() < RUNNING && goes_on(self.next) {
                let began = Instant::now();
                let batch = self.batch(load, peer);
                let id = self.mover.submit(batch).context("bench: mover")?;
                running.push_back((began, id));
            }
            let Some((began, id)) = running.pop_front() else { return Ok(latency_ns) };
            match self.mover.wait(id, 2 * TIME_LIMIT) {
                Some(Outcome::Done { .. }) => latency_ns.push(nanos(began.elapsed())),
                other => bail!("bench: mover: a batch ended as {other:?}"),
            }
        }
    }
}
