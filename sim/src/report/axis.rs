//! From values to places in a drawing, and the ticks in between.

use super::text::short;

/// One axis of a chart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    lo: f64,
    hi: f64,
    log: bool,
}

/// Ticks aimed at on a linear axis.
const TICKS: f64 = 5.0;
/// Decades up to which a logarithmic axis names 1, 2 and 5 of each.
const NARROW_DECADES: f64 = 2.6;
/// Decades that a logarithmic axis covers at most; smaller values sit on its left end.
const MAX_DECADES: f64 = 6.0;

impl Axis {
    /// From zero to a round figure at or above `hi`.
    #[must_use]
    pub(super) fn linear(hi: f64) -> Self {
        let hi = if hi.is_finite() && hi > 0.0 { hi } else { 1.0 };
        let step = step_of(hi);
        Self { lo: 0.0, hi: (hi / step - 1e-9).ceil() * step, log: false }
    }

    /// From zero to `hi` exactly.
    #[must_use]
    pub(super) fn up_to(hi: f64) -> Self {
        Self { lo: 0.0, hi: if hi.is_finite() && hi > 0.0 { hi } else { 1.0 }, log: false }
    }

    /// Over these values, by factors; what is not above zero sits on the left end.
    #[must_use]
    pub(super) fn logarithmic(values: impl Iterator<Item = f64>) -> Self {
        let positive = values.filter(|v| v.is_finite() && *v > 0.0);
        let (lo, hi) = positive.fold((f64::INFINITY, 0.0f64), |(lo, hi), v| (lo.min(v), hi.max(v)));
        let (lo, hi) = if hi > 0.0 { (lo, hi) } else { (0.1, 1.0) };
        let lo = lo.max(hi / 10f64.powf(MAX_DECADES));
        let (lo, mut hi) = (round_down(lo), round_up(hi));
        if hi <= lo * 1.01 {
            hi = lo * 10.0;
        }
        Self { lo, hi, log: true }
    }

    /// Where a value lies: 0 at the low end, 1 at the high one, never outside.
    #[must_use]
    pub(super) fn at(&self, value: f64) -> f64 {
        let share = if self.log {
            (value.max(self.lo) / self.lo).ln() / (self.hi / self.lo).ln()
        } else {
            (value - self.lo) / (self.hi - self.lo)
        };
        share.clamp(0.0, 1.0)
    }

    /// Values to name, in order, with their names.
    #[must_use]
    pub(super) fn ticks(&self) -> Vec<(f64, String)> {
        let values = if self.log { self.log_ticks() } else { self.linear_ticks() };
        values.into_iter().map(|v| (v, short(v))).collect()
    }

    /// The axis for the script that reads values off a drawing.
    #[must_use]
    pub(super) fn data(&self) -> String {
        format!("{},{},{}", self.lo, self.hi, if self.log { "log" } else { "lin" })
    }

    fn linear_ticks(&self) -> Vec<f64> {
        let step = step_of(self.hi);
        let steps = (0..20u32).map(|i| f64::from(i) * step);
        steps.take_while(|v| *v <= self.hi * (1.0 + 1e-9)).collect()
    }

    fn log_ticks(&self) -> Vec<f64> {
        let narrow = (self.hi / self.lo).log10() < NARROW_DECADES;
        let factors: &[f64] = if narrow { &[1.0, 2.0, 5.0] } else { &[1.0] };
        #[expect(clippy::cast_possible_truncation, reason = "an exponent")]
        let (first, last) = (self.lo.log10().floor() as i32, self.hi.log10().ceil() as i32);
        let all = (first..=last).flat_map(|e| factors.iter().map(move |f| f * 10f64.powi(e)));
        all.filter(|v| *v >= self.lo * 0.999 && *v <= self.hi * 1.001).collect()
    }
}

/// A round step that gives about as many ticks as wanted.
fn step_of(hi: f64) -> f64 {
    let rough = hi / TICKS;
    let decade = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|f| rough <= f * decade * (1.0 + 1e-9));
    factor.unwrap_or(10.0) * decade
}

/// The nearest 1, 2 or 5 of a decade at or below.
fn round_down(value: f64) -> f64 {
    let decade = 10f64.powf(value.log10().floor());
    let factor = [5.0, 2.0, 1.0].into_iter().find(|f| f * decade <= value * (1.0 + 1e-9));
    factor.unwrap_or(1.0) * decade
}

/// The nearest 1, 2 or 5 of a decade at or above.
fn round_up(value: f64) -> f64 {
    let decade = 10f64.powf(value.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|f| f * decade >= value * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * decade
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(axis: Axis) -> Vec<String> {
        axis.ticks().into_iter().map(|(_, name)| name).collect()
    }

    #[test]
    fn linear_ticks_are_round_and_reach_the_end() {
        assert_eq!(names(Axis::linear(14.0)), ["0", "5", "10", "15"]);
        assert_eq!(names(Axis::linear(100.0)), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(names(Axis::linear(0.7)), ["0", "0.2", "0.4", "0.6", "0.8"]);
        assert_eq!(Axis::linear(14.0).at(15.0).to_bits(), 1f64.to_bits());
    }

    #[test]
    fn logarithmic_ticks_follow_the_width() {
        assert_eq!(
            names(Axis::logarithmic([0.03, 4.0].into_iter())),
            ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "5"]
        );
        assert_eq!(names(Axis::logarithmic([0.01, 90.0].into_iter())), ["0.01", "0.1", "1", "10", "100"]);
        let axis = Axis::logarithmic([1.0, 100.0].into_iter());
        assert!((axis.at(10.0) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn odd_values_stay_inside() {
        for axis in [
            Axis::linear(f64::NAN),
            Axis::linear(0.0),
            Axis::up_to(-1.0),
            Axis::logarithmic([0.0, f64::NAN].into_iter()),
        ] {
            for value in [-5.0, 0.0, 0.5, 1e300] {
                assert!((0.0..=1.0).contains(&axis.at(value)), "{axis:?} puts {value} at {}", axis.at(value));
            }
            assert!((2..=12).contains(&axis.ticks().len()), "{axis:?} has {} ticks", axis.ticks().len());
        }
        let one = Axis::logarithmic([5.0, 5.0].into_iter());
        assert!(one.at(5.0) < one.at(50.0));
        let wide = Axis::logarithmic([1e-30, 1e6].into_iter());
        assert!(wide.ticks().len() <= 8, "{:?}", wide.ticks());
    }
}
