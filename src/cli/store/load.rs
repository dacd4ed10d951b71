//! `baton store bench --url`: running stores, one client, one command at a time.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use baton_objects::client::{Cluster, ClusterConfig, PutWords, Trouble};
use baton_objects::measure::Figure;

/// Keys that are there at a time; each is put once, for KV is not written over.
const KEYS: u64 = 256;
/// Sizes of a value: room for a number that makes each another, and what a connection takes in a moment.
const VALUE_BYTES: std::ops::RangeInclusive<u64> = 8..=256 << 20;

/// The load to measure.
pub(super) struct Load<'a> {
    pub(super) url: &'a str,
    pub(super) replicas: usize,
    pub(super) value_bytes: u64,
    /// For how long puts and gets are each measured.
    pub(super) each: Duration,
}

impl Load<'_> {
    /// Puts and gets, and removes what it put.
    pub(super) fn run(&self) -> Result<Vec<Figure>> {
        let config = ClusterConfig::of(self.url).context("bench")?;
        let mut cluster =
            Cluster::new(ClusterConfig { replicas: self.replicas, ..config }).context("bench")?;
        ensure!(VALUE_BYTES.contains(&self.value_bytes), "bench: --value: give from 8 bytes to 256MiB");
        let mut value = vec![0; usize::try_from(self.value_bytes).expect("checked")];
        let mut rng = baton_types::Rng::new(1);
        for chunk in value.chunks_mut(8) {
            chunk.copy_from_slice(&rng.next_u64().to_le_bytes()[..chunk.len()]);
        }
        // Its own keys: nobody else's are touched.
        let prefix = format!("baton-bench-{}-", std::process::id());
        let key = |n: u64| format!("{prefix}{n}");
        let mut put = 0;
        let measured = self.measure(&mut cluster, &mut value, &key, &mut put);
        let left = (put.saturating_sub(KEYS + 1)..=put).filter(|n| cluster.del(key(*n).as_bytes()).is_err());
        let left = left.count();
        if left > 0 {
            note!("baton: bench: {left} keys {prefix}* may be left");
        }
        let (puts, gets) = measured.context("bench")?;
        let named = |what: &str, times: Vec<Duration>| figures(what, times, value.len());
        Ok(named("put", puts).into_iter().chain(named("get", gets)).collect())
    }

    /// Times of puts, and of gets of the last that were put. `put` counts the puts as they are made.
    fn measure(
        &self,
        cluster: &mut Cluster,
        value: &mut [u8],
        key: &impl Fn(u64) -> String,
        put: &mut u64,
    ) -> Result<(Vec<Duration>, Vec<Duration>), Trouble> {
        note!("measuring: puts");
        let puts = self.time(|n| {
            value[..8].copy_from_slice(&n.to_le_bytes());
            if let Some(old) = n.checked_sub(KEYS) {
                cluster.del(key(old).as_bytes())?;
            }
            *put = n;
            let begun = Instant::now();
            cluster.put(key(n).as_bytes(), value, &PutWords::default())?;
            Ok(begun.elapsed())
        })?;
        note!("measuring: gets");
        let there = (*put + 1).min(KEYS);
        let first = *put + 1 - there;
        let gets = self.time(|n| {
            let begun = Instant::now();
            match cluster.get(key(first + n % there).as_bytes())? {
                Some(_) => Ok(begun.elapsed()),
                None => {
                    Err(Trouble::Gone("a value is not there any more; give the stores more memory".into()))
                }
            }
        })?;
        Ok((puts, gets))
    }

    /// The duration of each call, one call after the other until the time is over.
    fn time(&self, mut call: impl FnMut(u64) -> Result<Duration, Trouble>) -> Result<Vec<Duration>, Trouble> {
        let (start, mut times) = (Instant::now(), Vec::new());
        while start.elapsed() < self.each {
            times.push(call(times.len() as u64)?);
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
        row(", bandwidth", "GB/s", times.len() as f64 * bytes as f64 / total.max(1e-9) / 1e9),
        row(", median", "us", at(50)),
        row(", 99th percentile", "us", at(99)),
    ]
}
