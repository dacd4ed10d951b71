//! What the GPUs of this machine are, and how fast bytes go to them and back: blocks of several sizes over one,
//! two and four streams, beside one large copy in the same run.
//!
//! `cargo run --release -p baton-transports --example device_copy [LIBRARY]`

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_transports::mover::device::{
    Copier, CopierConfig, CopyOutcome, Device, DeviceFault, DeviceMemory, Driver, Pinned, Place, Transfer,
};
use baton_transports::mover::{Location, Memory};

/// Bytes of one measurement, unless the device is small.
const TOTAL_BYTES: u64 = 1 << 30;
/// Measurements of each figure; the middle one is shown.
const ROUNDS: usize = 5;
/// Longest wait for one measurement.
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    match measured() {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("{fault}");
            ExitCode::FAILURE
        }
    }
}

fn measured() -> Result<(), Box<dyn std::error::Error>> {
    let library = std::env::args().nth(1);
    let driver = match &library {
        Some(library) => Driver::load_from(Path::new(library))?,
        None => Driver::load()?,
    };
    for ordinal in 0..driver.devices()? {
        let device = Device::open(&driver, ordinal)?;
        println!("device {ordinal}: {}, {:.1} GiB", device.name(), device.bytes() as f64 / (1 << 30) as f64);
        Rig::new(&device)?.table()?;
    }
    Ok(())
}

/// A device with as much of its memory, and of pinned memory, as is measured.
struct Rig {
    device: Arc<Device>,
    there: Arc<DeviceMemory>,
    here: Arc<Pinned>,
    bytes: u64,
}

impl Rig {
    fn new(device: &Arc<Device>) -> Result<Self, Box<dyn std::error::Error>> {
        let bytes = TOTAL_BYTES.min(device.bytes() / 4) & !((16 << 20) - 1);
        let memory = Memory::private(usize::try_from(bytes)?, Location::Anywhere)?;
        let (there, here) = (device.allocate(bytes)?, device.pin(&memory)?);
        Ok(Self { device: device.clone(), there, here, bytes })
    }

    fn table(&self) -> Result<(), DeviceFault> {
        println!("  block      streams   host to device   device to host   both at once, GB/s");
        self.line("one copy", self.bytes, 1)?;
        for (name, block_bytes) in [("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("16 MiB", 16 << 20)] {
            for streams in [1, 2, 4] {
                self.line(name, block_bytes, streams)?;
            }
        }
        Ok(())
    }

    fn line(&self, name: &str, block_bytes: u64, streams: usize) -> Result<(), DeviceFault> {
        let config = CopierConfig {
            streams,
            piece_bytes: block_bytes.max(CopierConfig::default().piece_bytes),
            ..CopierConfig::default()
        };
        let copier = Copier::new(&self.device, config)?;
        let up = self.blocks(block_bytes, true)?;
        let down = self.blocks(block_bytes, false)?;
        let both = self.alternating(block_bytes.min(self.bytes / 2))?;
        let [up, down, both] = [up, down, both].map(|batch| self.rate(&copier, &batch));
        println!("  {name:9} {streams:8} {up:16.2} {down:16.2} {both:14.2}");
        Ok(())
    }

    /// Every other block up, the others down.
    fn alternating(&self, block_bytes: u64) -> Result<Vec<Transfer>, DeviceFault> {
        let pairs = self.blocks(block_bytes, true)?.into_iter().zip(self.blocks(block_bytes, false)?);
        Ok(pairs.enumerate().map(|(at, (up, down))| if at % 2 == 0 { up } else { down }).collect())
    }

    fn blocks(&self, block_bytes: u64, up: bool) -> Result<Vec<Transfer>, DeviceFault> {
        let one = |nth| {
            let at = nth * block_bytes;
            let (there, here) = (Place::device(&self.there, at), Place::host(&self.here, at));
            let (from, to) = if up { (here, there) } else { (there, here) };
            Transfer::new(from, to, block_bytes)
        };
        (0..self.bytes / block_bytes).map(one).collect()
    }

    /// The middle of some rounds, in GB/s, after one that does not count.
    fn rate(&self, copier: &Copier, batch: &[Transfer]) -> f64 {
        let bytes: u64 = batch.iter().map(Transfer::bytes).sum();
        let mut rates: Vec<f64> = (0..=ROUNDS).map(|_| bytes as f64 / 1e9 / timed(copier, batch)).collect();
        rates.remove(0);
        rates.sort_by(f64::total_cmp);
        rates[ROUNDS / 2]
    }
}

fn timed(copier: &Copier, batch: &[Transfer]) -> f64 {
    let (start, mut ended) = (Instant::now(), Vec::new());
    copier.submit(batch).expect("there is room for one batch");
    copier.wait(&mut ended, LIMIT);
    let took = start.elapsed().as_secs_f64();
    assert_eq!(ended.len(), 1, "a batch takes longer than {LIMIT:?}");
    assert_eq!(ended[0].outcome, CopyOutcome::Done);
    took
}
