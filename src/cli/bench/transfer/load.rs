//! Driving paths: so many blocks outstanding on each, for so long.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};
use baton_transports::mover::{
    Completion, CompletionQueue, Completions, Direction, Memory, Path, PathId, Region, RemoteSegment, Slice,
};

use super::ends::{LocalEndpoint, Peer};
use crate::cli::loadgen::process::CpuTime;

/// Longer than any block takes unless something hangs.
pub const TIME_LIMIT: Duration = Duration::from_secs(10);

/// The load on each path.
#[derive(Clone, Debug)]
pub struct Load {
    pub direction: Direction,
    pub block_bytes: u32,
    pub batch: u32,
    pub verify: bool,
    pub poll: bool,
    pub duration: Duration,
}

impl Load {
    /// Whether a batch fits into the memory of one thread.
    pub fn check(&self, memory_bytes: u64) -> Result<()> {
        ensure!(
            u64::from(self.batch) * u64::from(self.block_bytes) <= memory_bytes,
            "bench: a batch is larger than its memory; raise --memory-mib"
        );
        Ok(())
    }
}

/// The measured figures.
#[derive(Clone, Debug)]
pub struct Figures {
    pub bytes: u64,
    pub blocks: u64,
    pub took: Duration,
    /// Of both processes.
    pub cpu_us: u64,
    /// From post to completion, sorted.
    pub latency_ns: Vec<u32>,
}

impl Figures {
    #[expect(clippy::cast_precision_loss, reason = "figures for a report")]
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.took.as_secs_f64() / 1e9
    }

    #[expect(clippy::cast_precision_loss, reason = "figures for a report")]
    pub fn cpu_s_per_gb(&self) -> f64 {
        self.cpu_us as f64 / 1e6 / (self.bytes as f64 / 1e9)
    }

    /// The latency that so many of a thousand are below.
    pub fn latency_us(&self, permille: usize) -> f64 {
        let at = (self.latency_ns.len() * permille / 1_000).min(self.latency_ns.len().saturating_sub(1));
        self.latency_ns.get(at).map_or(0.0, |ns| f64::from(*ns) / 1e3)
    }
}

/// The round in the middle, by rate.
pub fn middle(mut rounds: Vec<Figures>) -> Figures {
    rounds.sort_by(|a, b| a.gb_per_s().total_cmp(&b.gb_per_s()));
    rounds.swap_remove(rounds.len() / 2)
}

/// Nanoseconds, as far as 32 bits go.
pub fn nanos(duration: Duration) -> u32 {
    u32::try_from(duration.as_nanos()).unwrap_or(u32::MAX)
}

/// Time and processor time of a measurement.
pub struct Clock {
    began: Instant,
    peer: Option<u32>,
    ours: CpuTime,
    theirs: CpuTime,
}

fn cpu_of(pid: Option<u32>) -> CpuTime {
    pid.and_then(|pid| CpuTime::of(pid).ok()).unwrap_or_default()
}

impl Clock {
    /// Of this process and the peer's.
    pub fn start(peer: Option<u32>) -> Self {
        let (ours, theirs) = (cpu_of(Some(std::process::id())), cpu_of(peer));
        Self { began: Instant::now(), peer, ours, theirs }
    }

    pub fn stop(self, blocks: u64, block_bytes: u64, mut latency_ns: Vec<u32>) -> Figures {
        let took = self.began.elapsed();
        let ours = cpu_of(Some(std::process::id())).since_us(self.ours);
        let theirs = cpu_of(self.peer).since_us(self.theirs);
        latency_ns.sort_unstable();
        Figures { bytes: blocks * block_bytes, blocks, took, cpu_us: ours + theirs, latency_ns }
    }
}

/// Open paths, one for each thread.
pub struct Ways {
    ways: Vec<OneWay>,
}

struct OneWay {
    path: Box<dyn Path>,
    queue: Completions,
    memory: Arc<Memory>,
    window: Arc<RemoteSegment>,
    /// The part of both memories that is this thread's.
    from: u64,
    bytes: u64,
    next: u64,
}

impl Ways {
    pub fn open(near: &LocalEndpoint, peer: &Peer, threads: u32) -> Result<Self> {
        let bytes = near.memory.bytes() as u64 / u64::from(threads);
        let device = near.transport.devices().remove(0);
        let one = |number: u32| {
            let queue = Arc::new(CompletionQueue::default());
            let opened = near.transport.open(PathId(number), &peer.id, &device, queue.clone());
            let path = opened.map_err(|fault| anyhow!("bench: open a path: {fault:?}"))?;
            let (memory, window) = (near.memory.clone(), peer.window.clone());
            Ok(OneWay { path, queue, memory, window, from: u64::from(number) * bytes, bytes, next: 0 })
        };
        Ok(Self { ways: (0..threads).map(one).collect::<Result<_>>()? })
    }

    /// Goes over all memory once.
    pub fn warm_up(&mut self, load: &Load) -> Result<()> {
        for way in &mut self.ways {
            let blocks = way.bytes / u64::from(load.block_bytes);
            way.run(load, &|done| done >= blocks)?;
        }
        Ok(())
    }

    /// Runs the load on all of them at once.
    pub fn run(&mut self, load: &Load, peer: &Peer) -> Result<Figures> {
        let clock = Clock::start(Some(peer.pid()));
        let until = Instant::now() + load.duration;
        let over = |_| Instant::now() >= until;
        let tallies: Vec<Result<Vec<u32>>> = std::thread::scope(|scope| {
            let start = |way| scope.spawn(|| OneWay::run(way, load, &over));
            let threads: Vec<_> = self.ways.iter_mut().map(start).collect();
            threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
        });
        let mut latency_ns = Vec::new();
        for tally in tallies {
            latency_ns.extend(tally?);
        }
        Ok(clock.stop(latency_ns.len() as u64, load.block_bytes.into(), latency_ns))
    }

    /// Closes all, and waits for their ends.
    pub fn close(self) -> Result<()> {
        for way in self.ways {
            way.path.close();
            let limit = Instant::now() + TIME_LIMIT;
            let mut taken = Vec::new();
            while !taken.iter().any(|completion| matches!(completion, Completion::Closed { .. })) {
                way.queue.wait(&mut taken, Duration::from_millis(100));
                ensure!(Instant::now() <= limit, "bench: a path did not close");
            }
        }
        Ok(())
    }
}

impl OneWay {
    fn slice(&mut self, ticket: u64, load: &Load) -> Slice {
        let slots = self.bytes / u64::from(load.block_bytes);
        let at = self.from + self.next % slots * u64::from(load.block_bytes);
        self.next += 1;
        Slice {
            ticket,
            direction: load.direction,
            local: Region { memory: self.memory.clone(), at },
            remote: self.window.clone(),
            remote_at: at,
            bytes: load.block_bytes,
            verify: load.verify,
        }
    }

    /// Keeps blocks outstanding until it is over; says how long each took.
    fn run(&mut self, load: &Load, over: &dyn Fn(u64) -> bool) -> Result<Vec<u32>> {
        let batch = usize::try_from(load.batch).expect("a usize has 32 bits");
        let mut free: Vec<u64> = (0..u64::from(load.batch)).rev().collect();
        let mut posted = vec![Instant::now(); batch];
        let (mut latency_ns, mut slices, mut came) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            if !over(latency_ns.len() as u64) {
                let now = Instant::now();
                for ticket in &free {
                    slices.push(self.slice(*ticket, load));
                    posted[usize::try_from(*ticket).expect("below the batch")] = now;
                }
                let taken = self.path.post(&slices);
                free.drain(..taken);
                slices.clear();
            } else if free.len() == batch {
                return Ok(latency_ns);
            }
            self.wait(load, &mut came)?;
            let now = Instant::now();
            for completion in came.drain(..) {
                match completion {
                    Completion::Done { ticket, .. } => {
                        let began = posted[usize::try_from(ticket).expect("one of ours")];
                        latency_ns.push(nanos(now - began));
                        free.push(ticket);
                    }
                    Completion::PathCapacity { .. } | Completion::Notified { .. } => {}
                    other => bail!("bench: a block did not arrive: {other:?}"),
                }
            }
        }
    }

    fn wait(&self, load: &Load, came: &mut Vec<Completion>) -> Result<()> {
        if !load.poll {
            self.queue.wait(came, TIME_LIMIT);
        }
        let began = Instant::now();
        while came.is_empty() {
            if !load.poll || began.elapsed() > TIME_LIMIT {
                bail!("bench: a block took longer than 10 s");
            }
            self.path.poll();
            self.queue.drain(came);
        }
        Ok(())
    }
}
