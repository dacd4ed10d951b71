//! Prices of engine time that make the bound small.
//!
//! The bound is convex in the prices. The search begins with one price for the whole run and goes on to ever shorter
//! ranges of time: in each it raises or lowers the prices of all pools together, then those of each pool, as far as the
//! bound falls. Whatever comes out is a valid bound: the search affects how tight it is, and nothing else.

use super::needs::{Demand, Need, PoolCostTable};

/// Stretches of time at most. Each has one price a pool.
const MOST_STRETCHES: usize = 1_024;
/// Prices are raised by the highest that pays times a power of two from this on.
const LEAST_EXPONENT: f64 = -40.0;
/// Looks along a line, each of which leaves 0.62 of it.
const RAISING_LOOKS: usize = 20;
const LOWERING_LOOKS: usize = 10;
const GOLDEN: f64 = 0.618_033_988_749_894_9;

/// Engine time of each pool in each stretch of a run, and the requests that need it.
pub(super) struct Market<'a> {
    demand: &'a Demand,
    /// Lengths of the stretches, µs.
    stretches_us: Vec<f64>,
    windows: Vec<Window>,
    /// Of each pool and each request, its part of the base cost of its decode steps, µs.
    bases_us: Vec<Vec<f64>>,
}

/// The stretches in which a request's work may lie: from the first to the last for prefill, and to the last for decode.
#[derive(Clone, Copy, Debug)]
struct Window {
    first: usize,
    prefilled: usize,
    decoded: usize,
}

/// A range of stretches and the requests that may buy there.
struct PriceRange {
    from: usize,
    to: usize,
    requests: Vec<usize>,
}

impl<'a> Market<'a> {
    /// The market of a demand, base costs of decode steps charged by room to the given share.
    pub(super) fn new(demand: &'a Demand, room_share: f64) -> Self {
        let needs = &demand.needs;
        let borders = borders(needs);
        let end = |at_us: u64| borders.partition_point(|border| *border < at_us).max(1) - 1;
        let window = |need: &Need| Window {
            first: borders.partition_point(|border| *border <= need.release_us) - 1,
            prefilled: end(need.prefilled_us),
            decoded: end(need.decoded_us),
        };
        let base = |pool: &PoolCostTable| {
            needs.iter().map(|need| need.steps * pool.share_us(need, room_share)).collect()
        };
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        let lengths = borders.windows(2).map(|pair| (pair[1] - pair[0]) as f64).collect();
        Self {
            demand,
            stretches_us: lengths,
            windows: needs.iter().map(window).collect(),
            bases_us: demand.pools.iter().map(base).collect(),
        }
    }

    /// A small bound on the sum of `values` over requests in SLO; a rougher one if only one price is looked for.
    pub(super) fn least_bound(&self, values: &[f64], one_price: bool) -> f64 {
        let stretches = self.stretches_us.len();
        let mut prices = vec![vec![0.0; stretches]; self.demand.pools.len()];
        let shortest = if one_price { stretches } else { self.typical_window().div_ceil(2) };
        let mut size = stretches;
        while size > 0 {
            let step = if size < stretches { size.div_ceil(2) } else { size };
            for from in (0..stretches).step_by(step) {
                let range = self.range(from, (from + size).min(stretches));
                self.improve(values, &mut prices, &range);
            }
            size = if size <= shortest { 0 } else { size.div_ceil(2).max(shortest) };
        }
        self.bound(values, &prices, &self.range(0, stretches))
    }

    /// Stretches between a request's arrival and its first token, the median.
    fn typical_window(&self) -> usize {
        let mut sizes: Vec<usize> = self.windows.iter().map(|w| w.prefilled - w.first + 1).collect();
        sizes.sort_unstable();
        sizes.get(sizes.len() / 2).copied().unwrap_or(1)
    }

    fn range(&self, from: usize, to: usize) -> PriceRange {
        let buys = |(_, window): &(usize, &Window)| window.first < to && window.decoded >= from;
        let requests = self.windows.iter().enumerate().filter(buys).map(|(at, _)| at).collect();
        PriceRange { from, to, requests }
    }

    /// Changes the prices in a range as long as the bound falls.
    fn improve(&self, values: &[f64], prices: &mut Vec<Vec<f64>>, range: &PriceRange) {
        let pools = prices.len();
        let together = 0..pools;
        let each = (0..pools).filter(|_| pools > 1).map(|pool| pool..pool + 1);
        let most = self.highest_price(values, range);
        for pools in std::iter::once(together).chain(each) {
            let changed = |change: &dyn Fn(f64) -> f64| {
                let mut prices = prices.clone();
                for pool in &mut prices[pools.clone()] {
                    pool[range.from..range.to].iter_mut().for_each(|price| *price = change(*price));
                }
                prices
            };
            let raised = |exponent: f64| changed(&|price| price + most * exponent.exp2());
            let lowered = |factor: f64| changed(&|price| price * factor);
            let bound = |prices: &Vec<Vec<f64>>| self.bound(values, prices, range);
            let raise = least((LEAST_EXPONENT, 0.0), RAISING_LOOKS, |exponent| bound(&raised(exponent)));
            let lower = least((0.0, 1.0), LOWERING_LOOKS, |factor| bound(&lowered(factor)));
            let candidates = [raised(raise), lowered(lower), lowered(0.0)];
            let better = candidates.into_iter().min_by(|a, b| bound(a).total_cmp(&bound(b)));
            if let Some(better) = better.filter(|better| bound(better) < bound(&*prices)) {
                *prices = better;
            }
        }
    }

    /// A price at which no request of a range gains.
    fn highest_price(&self, values: &[f64], range: &PriceRange) -> f64 {
        let pools = self.demand.pools.len();
        let unit = vec![vec![1.0; self.stretches_us.len()]; pools];
        let price = |at: &usize| values[*at] / self.cost(*at, &unit);
        range.requests.iter().map(price).filter(|price| price.is_finite()).fold(0.0, f64::max)
    }

    /// The part of the bound that depends on the prices in a range.
    fn bound(&self, values: &[f64], prices: &[Vec<f64>], range: &PriceRange) -> f64 {
        let paid = |(pool, prices): (&PoolCostTable, &Vec<f64>)| {
            let times = self.stretches_us[range.from..range.to].iter().zip(&prices[range.from..range.to]);
            pool.engines * times.map(|(us, price)| us * price).sum::<f64>()
        };
        let time: f64 = self.demand.pools.iter().zip(prices).map(paid).sum();
        let gain = |at: &usize| (values[*at] - self.cost(*at, prices)).max(0.0);
        time + range.requests.iter().map(gain).sum::<f64>()
    }

    /// What a request's work costs where it is cheapest, each kind of work by itself.
    fn cost(&self, at: usize, prices: &[Vec<f64>]) -> f64 {
        let (need, window) = (&self.demand.needs[at], self.windows[at]);
        let [mut token, mut pair, mut context, mut base] = [f64::INFINITY; 4];
        for ((pool, prices), bases_us) in self.demand.pools.iter().zip(prices).zip(&self.bases_us) {
            if pool.prefills {
                let price = lowest(&prices[window.first..=window.prefilled]);
                token = token.min(price * pool.token_us);
                pair = pair.min(price * pool.pair_us);
            }
            if pool.decodes {
                let price = lowest(&prices[window.first..=window.decoded]);
                context = context.min(price * pool.context_us);
                base = base.min(price * bases_us[at]);
            }
        }
        need.tokens * token + need.pairs * pair + need.context_tokens * context + base
    }
}

fn lowest(prices: &[f64]) -> f64 {
    prices.iter().fold(f64::INFINITY, |low, price| if *price < low { *price } else { low })
}

/// Times between which prices are the same: arrivals and deadlines, or some of them evenly where there are too many.
fn borders(needs: &[Need]) -> Vec<u64> {
    let times = |need: &Need| [need.release_us, need.prefilled_us, need.decoded_us];
    let mut all: Vec<u64> = needs.iter().flat_map(times).collect();
    all.sort_unstable();
    all.dedup();
    let last = all.last().copied();
    let step = all.len().div_ceil(MOST_STRETCHES).max(1);
    let mut borders: Vec<u64> = all.into_iter().step_by(step).chain(last).collect();
    borders.dedup();
    borders
}

/// Where a function with one valley is least between two places, by golden sections.
fn least((mut low, mut high): (f64, f64), looks: usize, value: impl Fn(f64) -> f64) -> f64 {
    let left_of = |low: f64, high: f64| high - GOLDEN * (high - low);
    let right_of = |low: f64, high: f64| low + GOLDEN * (high - low);
    let (mut left, mut right) = (left_of(low, high), right_of(low, high));
    let (mut at_left, mut at_right) = (value(left), value(right));
    for _ in 0..looks {
        if at_left <= at_right {
            (high, right, at_right) = (right, left, at_left);
            left = left_of(low, high);
            at_left = value(left);
        } else {
            (low, left, at_left) = (left, right, at_right);
            right = right_of(low, high);
            at_right = value(right);
        }
    }
    if at_left <= at_right { left } else { right }
}
