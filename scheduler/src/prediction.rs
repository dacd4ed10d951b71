//! What the conductor predicts of a request when it lets it in, and how well such predictions hold.
//!
//! The core records a [`Prediction`] with the request and never reads it. A driver compares it with what it measured.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use baton_types::Role;
use serde::{Deserialize, Serialize};

/// Per mille of the answers of a kind that do not exceed the room that is kept for them.
pub(crate) const ROOM_PERMILLE: u32 = 800;

/// Per mille of the requests that do not exceed the most that is predicted of their times.
pub(crate) const MOST_PERMILLE: u32 = 900;

/// Way to a first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PredictionPath {
    /// A prefill instance, then a hand-off.
    Prefill,
    /// A decode instance prefills what it decodes.
    Local,
    /// An instance of both parts.
    Coupled,
    /// An engine that is another program's. Only a live driver knows of these.
    Remote,
}

impl PredictionPath {
    /// Every path, in the order of reports.
    pub const ALL: [Self; 4] = [Self::Prefill, Self::Local, Self::Coupled, Self::Remote];

    /// The word used in reports and labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Local => "local",
            Self::Coupled => "coupled",
            Self::Remote => "remote",
        }
    }
}

impl From<Role> for PredictionPath {
    fn from(role: Role) -> Self {
        match role {
            Role::Prefill | Role::Store => Self::Prefill,
            Role::Decode => Self::Local,
            Role::Both => Self::Coupled,
        }
    }
}

/// What a prediction is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PredictionTarget {
    /// Time to first token.
    Ttft,
    /// The mean of the longest tenth of the token gaps.
    Tbt,
    /// Time from the arrival to the start of the decode.
    DecodeStart,
    /// Length of the answer.
    OutputTokens,
}

impl PredictionTarget {
    /// Every target, in the order of reports.
    pub const ALL: [Self; 4] = [Self::Ttft, Self::Tbt, Self::DecodeStart, Self::OutputTokens];

    /// The word used in reports and labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Tbt => "tbt",
            Self::DecodeStart => "decode_start",
            Self::OutputTokens => "output_tokens",
        }
    }

    /// Its name in tables.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Ttft => "TTFT",
            Self::Tbt => "TBT",
            Self::DecodeStart => "decode start",
            Self::OutputTokens => "answer length",
        }
    }

    /// Share of requests that should not exceed the most that is predicted, 0–1.
    #[must_use]
    pub fn coverage(self) -> f64 {
        match self {
            Self::Ttft | Self::Tbt | Self::DecodeStart => f64::from(MOST_PERMILLE) / 1000.0,
            Self::OutputTokens => f64::from(ROOM_PERMILLE) / 1000.0,
        }
    }
}

/// What was predicted of a request when it was first placed. Times are µs since its arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// The way to its first token.
    pub path: PredictionPath,
    /// Time to first token: by the order of service, corrected by what requests alike took longer. Half of all take
    /// longer.
    pub ttft_us: u64,
    /// Time to first token that nine of ten do not exceed.
    pub ttft_most_us: u64,
    /// When its decode was to start.
    pub decode_start_us: u64,
    /// The start of its decode that nine of ten do not exceed.
    #[serde(default)]
    pub decode_start_most_us: u64,
    /// TBT, the mean of the longest tenth of its token gaps, µs: the step of the batch, corrected by what answers alike
    /// had. Half of all have more.
    pub tbt_us: u64,
    /// TBT that nine of ten do not exceed, µs.
    #[serde(default)]
    pub tbt_most_us: u64,
    /// Expected length of its answer.
    pub output_tokens: u32,
    /// Length for which room is kept: most answers of its kind do not exceed it.
    pub output_tokens_most: u32,
}

/// What was measured of a request that was served; none where there is nothing to measure, as the gaps of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedRequest {
    /// Time to first token, µs.
    pub ttft_us: u64,
    /// The mean of the longest tenth of its gaps, µs.
    pub tbt_us: Option<u64>,
    /// Time from its arrival to the start of its decode, µs.
    pub decode_start_us: Option<u64>,
    /// Length of its answer.
    pub output_tokens: u32,
}

/// One prediction beside its measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PredictionOutcome {
    /// What it is about.
    pub target: PredictionTarget,
    /// Measured over predicted.
    pub ratio: f64,
    /// Whether what was measured is at most the most that was predicted.
    pub covered: bool,
}

impl Prediction {
    /// Each prediction beside what was measured.
    pub fn outcomes(&self, served: &ServedRequest) -> impl Iterator<Item = PredictionOutcome> {
        let tokens = u64::from(served.output_tokens);
        let all = [
            (Some(served.ttft_us), self.ttft_us, self.ttft_most_us),
            (served.tbt_us, self.tbt_us, self.tbt_most_us),
            (served.decode_start_us, self.decode_start_us, self.decode_start_most_us),
            (Some(tokens), self.output_tokens.into(), self.output_tokens_most.into()),
        ];
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        let outcome = |(target, (measured, predicted, most)): (_, (Option<u64>, u64, u64))| {
            let measured = measured?;
            let ratio = measured as f64 / predicted.max(1) as f64;
            Some(PredictionOutcome { target, ratio, covered: measured <= most })
        };
        PredictionTarget::ALL.into_iter().zip(all).filter_map(outcome)
    }
}

/// Bins of a doubling of the error.
const BINS_PER_OCTAVE: i16 = 16;
/// Errors below this exponent of two, a thousandth, are none.
const LEAST_EXPONENT: i16 = -10;
/// Errors beyond this exponent of two, 64 times the prediction, are in the last bin.
const MOST_EXPONENT: i16 = 6;
const LAST_BIN: i16 = (MOST_EXPONENT - LEAST_EXPONENT) * BINS_PER_OCTAVE;

/// Relative errors in bins by sign and size, each less than 6.3 % of the error wide. At most 513 counts.
#[derive(Clone, Debug, Default)]
struct ErrorHistogram {
    counts: BTreeMap<i16, u64>,
    total: u64,
    covered: u64,
}

/// The first bits of a number's form: exponent and four bits of its fraction.
const FORM_SHIFT: u32 = 48;
/// The form of the least error that is one.
const LEAST_FORM: i16 = (1023 + LEAST_EXPONENT) * BINS_PER_OCTAVE;

/// The bin of a relative error.
fn bin_of(error: f64) -> i16 {
    let form = i16::try_from(error.abs().to_bits() >> FORM_SHIFT).unwrap_or(i16::MAX);
    let bin = form.saturating_sub(LEAST_FORM - 1).clamp(0, LAST_BIN);
    if error < 0.0 { -bin } else { bin }
}

/// The middle of a bin.
fn error_of(bin: i16) -> f64 {
    let Some(form) = bin.unsigned_abs().checked_sub(1).map(|at| at + LEAST_FORM.unsigned_abs()) else {
        return 0.0;
    };
    let size = f64::from_bits((u64::from(form) << FORM_SHIFT) | (1 << (FORM_SHIFT - 1)));
    if bin < 0 { -size } else { size }
}

impl ErrorHistogram {
    fn observe(&mut self, outcome: &PredictionOutcome) {
        *self.counts.entry(bin_of(outcome.ratio - 1.0)).or_insert(0) += 1;
        self.total += 1;
        self.covered += u64::from(outcome.covered);
    }

    /// Nearest rank among bins that come in ascending order.
    fn quantile(&self, permille: u64, mut bins: impl Iterator<Item = (i16, u64)>) -> Option<f64> {
        let rank = (self.total * permille).div_ceil(1000).max(1);
        let mut seen = 0;
        let mut reaches = |count: u64| {
            seen += count;
            seen >= rank
        };
        bins.find(|(_, count)| reaches(*count)).map(|(bin, _)| error_of(bin))
    }

    #[expect(clippy::cast_precision_loss, reason = "a share of requests")]
    fn figures(&self, target: f64) -> PredictionFigures {
        let count = |bin: i16| self.counts.get(&bin).copied().unwrap_or(0);
        let sizes = (0..=LAST_BIN).map(|bin| (bin, count(bin) + if bin > 0 { count(-bin) } else { 0 }));
        let signed = || self.counts.iter().map(|(bin, count)| (*bin, *count));
        PredictionFigures {
            requests: self.total,
            median_error: self.quantile(500, sizes),
            bias: self.quantile(500, signed()),
            p90: self.quantile(900, signed()),
            covered: (self.total > 0).then(|| self.covered as f64 / self.total as f64),
            target,
        }
    }
}

/// How one kind of prediction held. Errors are (measured − predicted) over predicted: above 0, it was more than predicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PredictionFigures {
    /// Requests that were compared.
    pub requests: u64,
    /// Median of the errors without their signs; none without a request.
    pub median_error: Option<f64>,
    /// Median of the errors.
    pub bias: Option<f64>,
    /// The error that nine of ten do not exceed.
    pub p90: Option<f64>,
    /// Share of requests that did not exceed the most that was predicted, 0–1; none without a request.
    pub covered: Option<f64>,
    /// The share that should not.
    pub target: f64,
}

/// How the predictions for one path held.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PathFigures {
    /// The way to their first tokens.
    pub path: PredictionPath,
    /// Time to first token.
    pub ttft: PredictionFigures,
    /// The mean of the longest tenth of the token gaps.
    pub tbt: PredictionFigures,
    /// Start of the decode.
    pub decode_start: PredictionFigures,
    /// Length of the answer.
    pub output_tokens: PredictionFigures,
}

impl PathFigures {
    /// Each target with its figures, in the order of reports.
    #[must_use]
    pub const fn all(&self) -> [(PredictionTarget, &PredictionFigures); 4] {
        let [ttft, tbt, decode_start, output_tokens] = PredictionTarget::ALL;
        [
            (ttft, &self.ttft),
            (tbt, &self.tbt),
            (decode_start, &self.decode_start),
            (output_tokens, &self.output_tokens),
        ]
    }
}

/// How the predictions for the requests of one class held, path by path. Bounded, whatever the number of requests.
#[derive(Clone, Debug, Default)]
pub struct PredictionLedger {
    paths: BTreeMap<PredictionPath, [ErrorHistogram; PredictionTarget::ALL.len()]>,
}

impl PredictionLedger {
    /// Takes in a request that was served as it was first placed.
    pub fn observe(&mut self, prediction: &Prediction, served: &ServedRequest) {
        let path = self.paths.entry(prediction.path).or_default();
        for outcome in prediction.outcomes(served) {
            path[outcome.target as usize].observe(&outcome);
        }
    }

    /// The figures of each path that had a request.
    #[must_use]
    pub fn figures(&self) -> Vec<PathFigures> {
        let of_path = |(path, errors): (&PredictionPath, &[ErrorHistogram; 4])| {
            let of = |target: PredictionTarget| errors[target as usize].figures(target.coverage());
            let [ttft, tbt, decode_start, output_tokens] = PredictionTarget::ALL.map(of);
            PathFigures { path: *path, ttft, tbt, decode_start, output_tokens }
        };
        self.paths.iter().map(of_path).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn prediction() -> Prediction {
        Prediction {
            path: PredictionPath::Local,
            ttft_us: 1_000,
            ttft_most_us: 2_000,
            decode_start_us: 1_000,
            decode_start_most_us: 2_000,
            tbt_us: 40,
            tbt_most_us: 60,
            output_tokens: 100,
            output_tokens_most: 150,
        }
    }

    fn served(ttft_us: u64, output_tokens: u32) -> ServedRequest {
        ServedRequest { ttft_us, tbt_us: Some(30), decode_start_us: None, output_tokens }
    }

    fn near(value: Option<f64>, expected: f64) -> bool {
        value.is_some_and(|value| (value - expected).abs() <= expected.abs() * 0.032)
    }

    #[test]
    fn each_path_has_its_errors_and_coverage() {
        let mut ledger = PredictionLedger::default();
        for (ttft_us, tokens) in [(900, 50), (1_100, 50), (1_200, 100), (1_500, 150), (2_001, 151)] {
            ledger.observe(&prediction(), &served(ttft_us, tokens));
        }
        ledger.observe(&Prediction { path: PredictionPath::Prefill, ..prediction() }, &served(1_000, 1));
        let figures = ledger.figures();
        let [exact, local] = figures.as_slice() else { panic!("{figures:?}") };
        assert_eq!((exact.path, local.path), (PredictionPath::Prefill, PredictionPath::Local));
        assert_eq!(
            (exact.ttft.median_error, exact.ttft.bias, exact.ttft.covered),
            (Some(0.0), Some(0.0), Some(1.0))
        );
        // The errors are −10, 10, 20, 50 and 100 %.
        assert!(near(local.ttft.median_error, 0.2) && near(local.ttft.bias, 0.2), "{:?}", local.ttft);
        assert!(near(local.ttft.p90, 1.001), "{:?}", local.ttft);
        assert_eq!((local.ttft.covered, local.ttft.target), (Some(0.8), 0.9));
        assert!(near(local.tbt.bias, -0.25) && near(local.tbt.median_error, 0.25), "{:?}", local.tbt);
        assert_eq!((local.tbt.covered, local.tbt.target), (Some(1.0), 0.9));
        let nothing = PredictionFigures { target: 0.9, ..PredictionFigures::default() };
        assert_eq!(local.decode_start, nothing, "nothing was measured");
        assert!(near(local.output_tokens.bias, 0.0) && near(local.output_tokens.median_error, 0.5));
        assert_eq!((local.output_tokens.covered, local.output_tokens.target), (Some(0.8), 0.8));
    }

    #[test]
    fn what_is_beyond_all_bounds_is_in_the_last_bin() {
        let mut ledger = PredictionLedger::default();
        let none = Prediction { ttft_us: 0, output_tokens: 0, ..prediction() };
        (0..3).for_each(|_| ledger.observe(&none, &served(u64::MAX, u32::MAX)));
        let figures = ledger.figures()[0];
        assert!(figures.ttft.bias.is_some_and(|bias| (60.0..70.0).contains(&bias)), "{figures:?}");
        assert_eq!((figures.ttft.covered, figures.output_tokens.covered), (Some(0.0), Some(0.0)));
    }

    proptest! {
        #[test]
        fn an_error_is_in_the_middle_of_its_bin(error in -1.0..64.0f64) {
            let shown = error_of(bin_of(error));
            let least = 1.0 / 1024.0;
            prop_assert!((shown - error).abs() <= error.abs() * 0.032 || error.abs() < least, "{error} is shown as {shown}");
            prop_assert!(bin_of(error).abs() <= LAST_BIN);
        }

        #[test]
        fn bins_rise_with_the_error(a in -1.0..100.0f64, b in -1.0..100.0f64) {
            prop_assert!(a > b || bin_of(a) <= bin_of(b));
        }
    }
}
