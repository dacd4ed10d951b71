//! Processor time of the calling thread, without unsafe calls.

/// Seconds that this thread has run so far; 0 where the kernel does not say.
pub fn thread_cpu_s() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let ns: u64 = text.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
    #[expect(clippy::cast_precision_loss, reason = "a figure for a report")]
    let seconds = ns as f64 / 1e9;
    seconds
}
