//! Prometheus text, as far as a page of ours goes: counters by label, histograms by bucket.

use std::collections::BTreeMap;

/// One scrape.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Scrape {
    /// By name and labels, as they stand in the page.
    values: BTreeMap<String, f64>,
    histograms: BTreeMap<String, Buckets>,
}

/// A histogram: how many samples are at or below each bound.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Buckets {
    /// Upper bound and cumulative count, rising; the last bound is infinite.
    counts: Vec<(f64, f64)>,
}

impl Scrape {
    /// Reads a page; lines that are not understood are passed over.
    pub(super) fn read(page: &str) -> Self {
        let mut scrape = Self::default();
        for line in page.lines().filter(|line| !line.starts_with('#')) {
            let Some((name, value)) = line.rsplit_once(' ') else { continue };
            let Ok(value) = value.parse::<f64>() else { continue };
            match bucket(name) {
                Some((histogram, bound)) => {
                    scrape.histograms.entry(histogram.to_owned()).or_default().add(bound, value);
                }
                None => {
                    scrape.values.insert(name.to_owned(), value);
                }
            }
        }
        scrape
    }

    /// A counter or gauge, summed over its labels.
    pub(super) fn total(&self, name: &str) -> f64 {
        self.values.get(name).into_iter().chain(self.labelled(name).map(|(_, value)| value)).sum()
    }

    /// A counter's values by the value of its one label.
    pub(super) fn by_label(&self, name: &str) -> Vec<(&str, f64)> {
        self.labelled(name).map(|(label, value)| (label, *value)).collect()
    }

    fn labelled(&self, name: &str) -> impl Iterator<Item = (&str, &f64)> {
        let prefix = format!("{name}{{");
        self.values.iter().filter_map(move |(key, value)| {
            let label = key.strip_prefix(&prefix)?.split_once("=\"")?.1;
            Some((label.strip_suffix("\"}")?, value))
        })
    }

    /// A histogram, summed over its labels; empty if nothing was sampled yet.
    pub(super) fn histogram(&self, name: &str) -> Buckets {
        self.histograms.get(name).cloned().unwrap_or_default()
    }
}

/// Name and upper bound of a bucket's line.
fn bucket(name: &str) -> Option<(&str, f64)> {
    let (histogram, labels) = name.split_once("_bucket{")?;
    // The exporter writes the bound last.
    let (others, bound) = labels.strip_suffix("\"}")?.rsplit_once("le=\"")?;
    if !(others.is_empty() || others.ends_with("\",")) {
        return None;
    }
    Some((histogram, bound.parse().ok()?))
}

impl Buckets {
    /// Adds a series' count at or below a bound.
    fn add(&mut self, bound: f64, count: f64) {
        match self.counts.binary_search_by(|(known, _)| known.total_cmp(&bound)) {
            Ok(at) => self.counts[at].1 += count,
            Err(at) => self.counts.insert(at, (bound, count)),
        }
    }

    /// Samples in all.
    pub(super) fn count(&self) -> f64 {
        self.counts.last().map_or(0.0, |(_, count)| *count)
    }

    /// The increase since `before`; the whole count if the two do not fit together.
    pub(super) fn since(&self, before: &Self) -> Self {
        let fits = self.counts.len() == before.counts.len()
            && self.counts.iter().zip(&before.counts).all(|(now, was)| now.0 == was.0 && now.1 >= was.1);
        if !fits {
            return self.clone();
        }
        let counts = self.counts.iter().zip(&before.counts).map(|(now, was)| (now.0, now.1 - was.1));
        Self { counts: counts.collect() }
    }

    /// The value that a share of the samples does not exceed, straight lines within a bucket; infinite
    /// beyond the last bound, `None` without samples.
    pub(super) fn quantile(&self, share: f64) -> Option<f64> {
        let rank = share * self.count();
        let mut below = (0.0, 0.0);
        for &(bound, count) in &self.counts {
            if count >= rank && count > below.1 {
                if bound.is_infinite() {
                    return Some(f64::INFINITY);
                }
                return Some(below.0 + (bound - below.0) * (rank - below.1) / (count - below.1));
            }
            below = (bound, count);
        }
        None
    }

    /// The share of samples at or below `limit`: exact where it is a bound, a straight line within a
    /// bucket, the lower end of it in the last one. `None` without samples.
    pub(super) fn share_within(&self, limit: f64) -> Option<f64> {
        if self.count() <= 0.0 {
            return None;
        }
        let mut below = (0.0, 0.0);
        for &(bound, count) in &self.counts {
            if limit <= bound {
                let part = if bound.is_infinite() { 0.0 } else { (limit - below.0) / (bound - below.0) };
                return Some((below.1 + (count - below.1) * part) / self.count());
            }
            below = (bound, count);
        }
        Some(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP x y\n# TYPE baton_tbt_seconds histogram\n\
        baton_tbt_seconds_bucket{le=\"0.1\"} 50\nbaton_tbt_seconds_bucket{le=\"0.2\"} 90\n\
        baton_tbt_seconds_bucket{le=\"+Inf\"} 100\nbaton_tbt_seconds_sum 9.5\nbaton_tbt_seconds_count 100\n\
        baton_requests_total 12\nbaton_requests_refused_total{reason=\"ttft\"} 3\n\
        baton_requests_refused_total{reason=\"room\"} 4\nnonsense\nbaton_x twelve\n";

    #[test]
    fn counters_are_read_with_and_without_labels() {
        let scrape = Scrape::read(PAGE);
        assert_eq!(scrape.total("baton_requests_total"), 12.0);
        assert_eq!(scrape.total("baton_requests_refused_total"), 7.0);
        assert_eq!(scrape.by_label("baton_requests_refused_total"), [("room", 4.0), ("ttft", 3.0)]);
        assert_eq!(scrape.total("baton_requests"), 0.0, "a name is not a prefix");
    }

    #[test]
    fn the_page_that_the_exporter_writes_is_read() {
        let metrics = crate::metrics::Metrics::new().unwrap();
        (0..100).for_each(|_| metrics.first_token("a b", 150_000, 100_000));
        metrics.refused("ttft");
        metrics.arrived();
        let scrape = Scrape::read(&metrics.page());
        assert_eq!(scrape.total("baton_requests_total"), 1.0);
        assert_eq!(scrape.by_label("baton_requests_refused_total"), [("ttft", 1.0)]);
        let ttft = scrape.histogram("baton_ttft_seconds");
        assert_eq!(ttft.count(), 100.0);
        let half = ttft.quantile(0.5).unwrap();
        assert!((0.1..=0.2).contains(&half), "150 ms are in the bucket of 100 to 200 ms: {half}");
        assert_eq!(scrape.histogram("baton_ttft_error_ratio").quantile(0.99).map(|q| q > 1.25), Some(true));
    }

    #[test]
    fn quantiles_and_shares_follow_the_buckets() {
        let buckets = Scrape::read(PAGE).histogram("baton_tbt_seconds");
        let near = |found: Option<f64>, expected: f64| {
            assert!(found.is_some_and(|f| (f - expected).abs() < 1e-9), "{found:?}, not {expected}");
        };
        near(buckets.quantile(0.25), 0.05);
        near(buckets.quantile(0.5), 0.1);
        near(buckets.quantile(0.7), 0.15);
        assert_eq!(buckets.quantile(0.99), Some(f64::INFINITY));
        near(buckets.share_within(0.1), 0.5);
        near(buckets.share_within(0.15), 0.7);
        near(buckets.share_within(7.0), 0.9);
        assert_eq!((Buckets::default().quantile(0.5), Buckets::default().share_within(1.0)), (None, None));
    }

    #[test]
    fn a_difference_leaves_what_came_since_and_a_restart_starts_anew() {
        let before = Scrape::read(PAGE).histogram("baton_tbt_seconds");
        let later = PAGE.replace("} 90", "} 95").replace("} 100", "} 110");
        let now = Scrape::read(&later).histogram("baton_tbt_seconds");
        let since = now.since(&before);
        assert_eq!(since.count(), 10.0);
        assert_eq!(since.share_within(0.2), Some(0.5));
        assert_eq!(before.since(&now), before, "counts that fell are a new life");
        assert_eq!(now.since(&Buckets::default()), now);
    }
}
