//! Takes batches of copies, spreads them over streams, and tells when each has ended.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::driver_api::Device;
use super::fault::DeviceFault;
use super::lane::Lane;
use super::ledger::{CopierStats, CopyId, Declined, Ended, Ledger};
use super::transfer::{Place, Transfer};

/// How often a shutdown looks again where the caller polls.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Who sees that copies have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// A thread for each stream, asleep in the driver while copies are under way.
    Threads,
    /// The caller, whenever it calls [`Copier::poll`]: for programs that poll other queues anyhow.
    Caller,
}

/// What a copier may use.
#[derive(Clone, Copy, Debug)]
pub struct CopierConfig {
    /// Streams in each of the two directions. Copies out of the device have streams of their own, for a
    /// stream does one thing at a time and the bus carries both directions at once.
    pub streams: usize,
    /// Longest piece of a copy.
    pub piece_bytes: u64,
    /// Events under way on each stream; behind each are up to `piece_bytes` of one batch, of any number of
    /// small pieces up to 64.
    pub depth: usize,
    /// Pieces that have not ended, of all batches.
    pub pieces_max: usize,
    /// Batches that have not been told of.
    pub batches_max: usize,
    /// Who sees that copies have ended.
    pub watch: Watch,
}

impl Default for CopierConfig {
    fn default() -> Self {
        Self {
            streams: 2,
            piece_bytes: 4 << 20,
            depth: 4,
            pieces_max: 16_384,
            batches_max: 1_024,
            watch: Watch::Threads,
        }
    }
}

/// Copies between one device and the host. Dropping it leaves out what has not begun; what has begun keeps its
/// memories until its threads have seen it end. With [`Watch::Caller`] there are none, and dropping waits.
pub struct Copier {
    device: Arc<Device>,
    config: CopierConfig,
    ledger: Arc<Ledger>,
    /// First those into the device and within it, then as many out of it.
    lanes: Vec<Arc<Lane>>,
    /// Which lane of each direction is next.
    turn: [AtomicUsize; 2],
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Copier {
    /// Makes the streams and events, and starts the threads that the config asks for.
    ///
    /// # Errors
    /// [`DeviceFault::Cuda`]; [`DeviceFault::Unfit`] for a config with a zero in it, or where the system gives
    /// no thread.
    pub fn new(device: &Arc<Device>, config: CopierConfig) -> Result<Self, DeviceFault> {
        let counts = [config.streams, config.depth, config.pieces_max, config.batches_max];
        if counts.contains(&0) || config.piece_bytes == 0 {
            return Err(DeviceFault::Unfit("every number of a copier's config is at least 1"));
        }
        let ledger = Arc::new(Ledger::new(config.batches_max, config.pieces_max));
        let lane = |_| Lane::new(device, &ledger, config.depth, config.piece_bytes);
        let lanes = (0..config.streams * 2).map(lane).collect::<Result<_, _>>()?;
        let (turn, threads) = (Default::default(), Mutex::default());
        let copier = Self { device: device.clone(), config, ledger, lanes, turn, threads };
        if config.watch == Watch::Threads {
            // Dropping the copier lets those that started end.
            let started = copier.lanes.iter().try_for_each(|lane| copier.start(lane));
            started
                .map_err(|_| DeviceFault::Unfit("no thread for a stream: raise the limit of processes"))?;
        }
        Ok(copier)
    }

    fn start(&self, lane: &Arc<Lane>) -> io::Result<()> {
        let lane = lane.clone();
        let thread = std::thread::Builder::new().name("device-copy".into()).spawn(move || lane.watch())?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// Takes a batch, in no order among its copies; its ranges belong to it until its [`Ended`] is told.
    ///
    /// # Errors
    /// [`Declined`]; then nothing of it was begun.
    pub fn submit(&self, batch: &[Transfer]) -> Result<CopyId, Declined> {
        let here = |place: &Place| match place {
            Place::Device { memory, .. } => Arc::ptr_eq(memory.device(), &self.device),
            Place::Host { memory, .. } => memory.device().shares_driver(&self.device),
        };
        if !batch.iter().all(|transfer| here(transfer.from()) && here(transfer.to())) {
            return Err(Declined::Invalid("a range is of another device than the copier"));
        }
        let cut = |transfer: &Transfer| transfer.bytes().div_ceil(self.config.piece_bytes);
        let pieces = batch.iter().map(cut).fold(0, u64::saturating_add);
        let id = self.ledger.open(usize::try_from(pieces).unwrap_or(usize::MAX))?;
        for (lane, pieces) in self.lanes.iter().zip(self.spread(batch)) {
            if !pieces.is_empty() {
                lane.post(id, pieces);
            }
        }
        Ok(id)
    }

    /// The pieces of a batch, by lane.
    fn spread(&self, batch: &[Transfer]) -> Vec<Vec<Transfer>> {
        let mut spread = vec![Vec::new(); self.lanes.len()];
        for piece in batch.iter().flat_map(|transfer| transfer.pieces(self.config.piece_bytes)) {
            let direction = usize::from(piece.leaves_device());
            let turn = self.turn[direction].fetch_add(1, Ordering::Relaxed) % self.config.streams;
            spread[direction * self.config.streams + turn].push(piece);
        }
        spread
    }

    /// Leaves out what has not begun of a batch. It still ends, and is told of, when what has begun is
    /// through: done where nothing was left out.
    pub fn cancel(&self, batch: CopyId) {
        if self.ledger.renounce(batch) {
            for lane in &self.lanes {
                lane.drop_waiting(batch);
            }
        }
    }

    /// Tells which batches have ended, without waiting for any.
    pub fn poll(&self, into: &mut Vec<Ended>) {
        self.wait(into, Duration::ZERO);
    }

    /// Tells which batches have ended, waiting for the first no longer than `limit`. Returns at once where no
    /// batch is open, and with [`Watch::Caller`], where nobody else would see one end.
    pub fn wait(&self, into: &mut Vec<Ended>, limit: Duration) {
        if self.config.watch == Watch::Caller {
            self.look();
            return self.ledger.wait(into, Duration::ZERO);
        }
        self.ledger.wait(into, limit);
    }

    /// What it has done.
    pub fn stats(&self) -> CopierStats {
        self.ledger.stats()
    }

    /// Refuses further batches, leaves out what has not begun, and waits for the rest no longer than `limit`.
    /// The ends of all batches can be polled afterwards. Says how many batches are still under way, which is
    /// none but where the device hangs: their ranges stay theirs.
    pub fn shutdown(&self, limit: Duration) -> usize {
        self.close();
        if self.config.watch == Watch::Caller {
            let until = Instant::now() + limit;
            self.look();
            while self.stats().open > 0 && Instant::now() < until {
                std::thread::sleep(LOOK_AGAIN);
                self.look();
            }
        }
        let open = self.ledger.wait_all(limit);
        if open == 0 {
            let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
            for thread in threads {
                // It panics only by a bug of ours, which the caller has seen on the error output.
                let _ = thread.join();
            }
        }
        open
    }

    fn look(&self) {
        for lane in &self.lanes {
            lane.poll();
        }
    }

    fn close(&self) {
        self.ledger.close();
        for lane in &self.lanes {
            lane.close();
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.close();
    }
}
