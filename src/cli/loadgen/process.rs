//! Processor time of another process, without unsafe calls.

use std::path::PathBuf;

use anyhow::{Context as _, Result, anyhow};

/// Processor time of a process so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// By the kernel's clock ticks, threads that have ended included, µs; 10 ms exact.
    ticks_us: u64,
    /// By the schedulers of its living threads, µs; exact.
    threads_us: u64,
}

/// A tick, as `/proc` shows them on Linux whatever the kernel was built with, µs.
const TICK_US: u64 = 10_000;

impl CpuTime {
    /// Of the process `pid`; an error when there is none or it may not be looked at.
    pub fn of(pid: u32) -> Result<Self> {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let stat = std::fs::read_to_string(folder.join("stat"))
            .map_err(|e| anyhow!("bench: processor time of process {pid}: {e}; check --pid"))?;
        let ticks = ticks(&stat).with_context(|| format!("bench: /proc/{pid}/stat is in no known form"))?;
        let tasks = std::fs::read_dir(folder.join("task")).into_iter().flatten().flatten();
        let ns: u64 = tasks.filter_map(|task| thread_ns(&task.path().join("schedstat"))).sum();
        Ok(Self { ticks_us: ticks * TICK_US, threads_us: ns / 1000 })
    }

    /// Time spent since `earlier`, µs: exact unless threads ended in between.
    pub fn since_us(self, earlier: Self) -> u64 {
        let ticks_us = self.ticks_us.saturating_sub(earlier.ticks_us);
        let threads_us = self.threads_us.saturating_sub(earlier.threads_us);
        // Time in the ticks but not in the threads' sum was spent by threads that have ended.
        if threads_us + 2 * TICK_US >= ticks_us { threads_us } else { ticks_us }
    }
}

/// User and system ticks. The name in brackets may hold anything, brackets too.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

fn thread_ns(path: &std::path::Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_does_not_shift_the_fields() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 25 17 0 0 20 0 4 0 100 0 0";
        assert_eq!(ticks(stat), Some(42));
        assert_eq!(ticks("7 (x) S 1"), None);
    }

    #[test]
    fn work_of_this_process_is_seen() {
        let before = CpuTime::of(std::process::id()).unwrap();
        let started = std::time::Instant::now();
        let mut sum = 0u64;
        while started.elapsed().as_millis() < 200 {
            sum = std::hint::black_box(sum.wrapping_mul(3).wrapping_add(1));
        }
        let spent_us = CpuTime::of(std::process::id()).unwrap().since_us(before);
        // Less than the whole where others share the processor; never nothing.
        assert!(spent_us > 10_000, "{spent_us} µs");
        assert!(CpuTime::of(u32::MAX).is_err_and(|e| e.to_string().contains("--pid")));
    }

    #[test]
    fn threads_that_ended_count_by_ticks() {
        let (earlier, later) = (
            CpuTime { ticks_us: 100_000, threads_us: 90_000 },
            CpuTime { ticks_us: 300_000, threads_us: 50_000 },
        );
        assert_eq!(later.since_us(earlier), 200_000);
        let exact = CpuTime { ticks_us: 110_000, threads_us: 96_500 };
        assert_eq!(exact.since_us(earlier), 6_500);
    }
}
