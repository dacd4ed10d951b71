//! The clock of leases: it never goes back, and it goes on while the machine is suspended.

/// Microseconds since the machine started, suspended time included where the system can tell.
///
/// The usual monotonic clock stands still while a machine sleeps; a lease does not. A leader that slept must find
/// its deadline passed when it wakes.
#[must_use]
pub fn now_us() -> u64 {
    #[cfg(target_os = "linux")]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
    #[cfg(not(target_os = "linux"))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;
    let now = rustix::time::clock_gettime(CLOCK);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let micros = u64::try_from(now.tv_nsec / 1000).unwrap_or(0);
    seconds * 1_000_000 + micros
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes_and_never_goes_back() {
        let first = now_us();
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(now_us() >= first + 2000);
    }
}
