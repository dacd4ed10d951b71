//! The tier's interface to a disk.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Something that bytes can be written to and read from by offset, from several threads.
///
/// Contract: what was written completely before `flush` began is there after a power cut once
/// `flush` has succeeded. Any other write may be there, be lost, or be there in part.
pub(crate) trait Disk: Debug + Send + Sync {
    /// Reads all of `out`, or fails.
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `bytes`, or fails.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Makes lasting what was written.
    fn flush(&self) -> io::Result<()>;
    /// How long it is.
    fn len_bytes(&self) -> io::Result<u64>;
}

impl Disk for File {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(out, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use std::sync::{Mutex, MutexGuard};

    /// A disk in memory that fails or lies on request.
    #[derive(Debug, Default)]
    pub(crate) struct FailingDisk {
        pub(crate) state: Mutex<SickState>,
    }

    /// The faults of the disk.
    #[derive(Debug, Default)]
    pub(crate) struct SickState {
        pub(crate) bytes: Vec<u8>,
        pub(crate) fail_reads: u32,
        pub(crate) fail_writes: u32,
        pub(crate) fail_flushes: u32,
        pub(crate) lose_writes: u32,
        pub(crate) lose_all_writes: bool,
        pub(crate) flip_reads: u32,
        pub(crate) panic_on_read: bool,
        pub(crate) flushes: u64,
        /// Lets nothing through; not for ever, or a failing test would hang.
        pub(crate) is_held: bool,
    }

    impl FailingDisk {
        /// A well one with these bytes.
        pub(crate) fn with(bytes: Vec<u8>) -> Self {
            Self { state: Mutex::new(SickState { bytes, ..SickState::default() }) }
        }

        fn let_through(&self) -> MutexGuard<'_, SickState> {
            for _ in 0..10_000 {
                let state = self.state.lock().expect("no test panics while it holds the lock");
                if !state.is_held {
                    return state;
                }
                drop(state);
                std::thread::sleep(std::time::Duration::from_micros(500));
            }
            panic!("a test forgot to let the disk go on");
        }
    }

    fn due(count: &mut u32) -> bool {
        let due = *count > 0;
        *count = count.saturating_sub(1);
        due
    }

    impl Disk for FailingDisk {
        fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
            let mut state = self.let_through();
            if state.panic_on_read {
                drop(state);
                panic!("asked for by a test");
            }
            if due(&mut state.fail_reads) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let from = offset as usize;
            let stored = state.bytes.get(from..from + out.len());
            out.copy_from_slice(stored.ok_or(io::ErrorKind::UnexpectedEof)?);
            if due(&mut state.flip_reads) {
                out[20] ^= 1;
            }
            Ok(())
        }

        fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
            let mut state = self.let_through();
            if due(&mut state.fail_writes) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            if state.lose_all_writes || due(&mut state.lose_writes) {
                return Ok(());
            }
            let end = offset as usize + bytes.len();
            if state.bytes.len() < end {
                state.bytes.resize(end, 0);
            }
            state.bytes[offset as usize..end].copy_from_slice(bytes);
            Ok(())
        }

        fn flush(&self) -> io::Result<()> {
            let mut state = self.let_through();
            if due(&mut state.fail_flushes) {
                return Err(io::Error::other("the flush failed"));
            }
            state.flushes += 1;
            Ok(())
        }

        fn len_bytes(&self) -> io::Result<u64> {
            Ok(self.let_through().bytes.len() as u64)
        }
    }
}
