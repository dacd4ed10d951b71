//! `baton store bench --url`: running stores, one client, one command at a time.

use std::time::{Duration, Instant};

use baton_objects::client::{Cluster, ClusterConfig, PutWords, Trouble};
use baton_objects::measure::Figure;

/// Keys that are written in turn.
const KEYS: u64 = 256;
/// Largest value of a measurement.
const VALUE_MAX_BYTES: u64 = 256 << 20;

/// What is measured.
pub(super) struct Load<'a> {
    pub(super) url: &'a str,
    pub(super) replicas: usize,
    pub(super) value_bytes: u64,
    /// For how long puts and gets are each measured.
    pub(super) each: Duration,
}

impl Load<'_> {
    /// Puts and gets, and removes what it put.
    pub(super) fn run(&self) -> Result<Vec<Figure>, String> {
        let failed = |e: Trouble| format!("bench: {e}");
        let config = ClusterConfig::of(self.url).map_err(failed)?;
        let mut cluster =
            Cluster::new(ClusterConfig { replicas: self.replicas, ..config }).map_err(failed)?;
        let bytes = usize::try_from(self.value_bytes.clamp(1, VALUE_MAX_BYTES)).expect("clamped");
        let mut value = vec![0; bytes];
        let mut rng = baton_types::Rng::new(1);
        value
            .chunks_mut(8)
            .for_each(|chunk| chunk.copy_from_slice(&rng.next_u64().to_le_bytes()[..chunk.len()]));
        // Its own keys: nobody else's are touched.
        let prefix = format!("baton-bench-{}-", std::process::id());
        let key = |n: u64| format!("{prefix}{}", n % KEYS);
        eprintln!("measuring: puts");
        let puts = self.time(|n| cluster.put(key(n).as_bytes(), &value, &PutWords::default()).map(|_| true));
        eprintln!("measuring: gets");
        let written = puts.as_ref().map_or(0, |times| times.len() as u64).min(KEYS);
        let gets = puts.and_then(|puts| {
            let gets =
                self.time(|n| cluster.get(key(n % written.max(1)).as_bytes()).map(|found| found.is_some()))?;
            Ok((puts, gets))
        });
        let left = (0..KEYS).filter(|n| cluster.del(key(*n).as_bytes()).is_err()).count();
        if left > 0 {
            eprintln!("baton: bench: {left} keys {prefix}* may be left");
        }
        let (puts, gets) = gets.map_err(failed)?;
        let named = |what: &str, times: Vec<Duration>| figures(what, times, bytes);
        Ok(named("put", puts).into_iter().chain(named("get", gets)).collect())
    }

    /// Times of each call until the time is over.
    fn time(&self, mut call: impl FnMut(u64) -> Result<bool, Trouble>) -> Result<Vec<Duration>, Trouble> {
        let (start, mut times) = (Instant::now(), Vec::new());
        while start.elapsed() < self.each {
            let begun = Instant::now();
            if !call(times.len() as u64)? {
                return Err(Trouble::Gone(
                    "a value is not there any more; give the stores more memory".into(),
                ));
            }
            times.push(begun.elapsed());
        }
        Ok(times)
    }
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn figures(what: &str, mut times: Vec<Duration>, bytes: usize) -> Vec<Figure> {
    times.sort_unstable();
    let total: f64 = times.iter().map(Duration::as_secs_f64).sum();
    let at = |part: usize| times.get(times.len() * part / 100).map_or(0.0, Duration::as_secs_f64) * 1e6;
    let row = |name: &str, unit: &'static str, value: f64| Figure {
        what: format!("{what} of {bytes} bytes{name}"),
        unit,
        value,
        bar: None,
    };
    vec![
        row("", "1/s", times.len() as f64 / total.max(1e-9)),
        row("", "GB/s", times.len() as f64 * bytes as f64 / total.max(1e-9) / 1e9),
        row(", median", "us", at(50)),
        row(", 99th percentile", "us", at(99)),
    ]
}
