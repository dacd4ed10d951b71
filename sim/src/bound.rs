//! A bound from above: how many requests of a workload any scheduler could serve in SLO on a cluster, and how many
//! prompt tokens, if it knew everything beforehand.
//!
//! The bound is the optimum of a problem that is easier than scheduling, so no schedule exceeds it:
//!
//! 1. *Work.* Each request in SLO needs engine time, and `needs` counts less than any engine charges: free hand-offs,
//!    caches without limit, the cheapest pass and the cheapest batch.
//! 2. *Time.* That work lies between the request's arrival and its deadlines. Here it may be interrupted, divided
//!    among instances and done in any order; only engine time is limited, stretch by stretch.
//! 3. *Prices.* Put any price, not below zero, on the engine time of each pool in each stretch. A schedule buys no more
//!    engine time than there is, and a request in SLO buys at least its work at the cheapest price between its arrival
//!    and its deadline. So the value of the requests in SLO is at most
//!
//!    Σ price × engine time  +  Σ over requests of max(0, value − cheapest cost of its work)
//!
//!    (weak duality of linear programs). Every choice of prices gives a valid bound; `prices` looks for a small one.
//!
//! The value of a request is 1 for the bound on requests, and its prompt tokens for the bound on tokens.
//!
//! Clients that retry begin their TTFT anew, so that there is no deadline. Then the bound is the requests that could be
//! in SLO on an idle cluster.

mod needs;
mod prices;
#[cfg(test)]
mod tests;

use serde::Serialize;

use crate::metrics::RunResult;
use crate::setup::Setup;
use crate::workload::Workload;

use needs::Demand;
use prices::Market;

/// What no scheduler exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpperBound {
    /// Requests in SLO.
    pub in_slo: u64,
    /// Prompt tokens of requests in SLO.
    pub input_tokens_in_slo: u64,
}

/// A run beside the bound and the best run that is known. The names are relied upon by scripts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BoundResult {
    /// Requests in SLO that no scheduler exceeds.
    pub in_slo: u64,
    /// Prompt tokens of requests in SLO that no scheduler exceeds.
    pub input_tokens_in_slo: u64,
    /// Requests in SLO that the run is below the bound.
    pub gap_to_bound: u64,
    /// The run with most requests in SLO: so many are possible.
    pub witness: WitnessResult,
    /// Requests in SLO that the run is below the witness.
    pub gap_to_witness: u64,
}

/// The best run that is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WitnessResult {
    /// Placement policy.
    pub policy: String,
    /// Admission mode in force.
    pub admission: String,
    /// Requests in SLO.
    pub in_slo: u64,
    /// Prompt tokens of requests in SLO.
    pub input_tokens_in_slo: u64,
}

impl BoundResult {
    /// Puts a run beside the bound of its load and the best run of it.
    #[must_use]
    pub fn new(bound: UpperBound, best: &RunResult, run: &RunResult) -> Self {
        Self {
            in_slo: bound.in_slo,
            input_tokens_in_slo: bound.input_tokens_in_slo,
            gap_to_bound: bound.in_slo.saturating_sub(run.in_slo),
            witness: WitnessResult {
                policy: best.policy.clone(),
                admission: best.admission.clone(),
                in_slo: best.in_slo,
                input_tokens_in_slo: best.input_tokens_in_slo,
            },
            gap_to_witness: best.in_slo.saturating_sub(run.in_slo),
        }
    }
}

/// How much of the base cost of a step is charged by the room that a request's KV takes; the rest is divided by heads.
/// Any share holds for all requests of a run at once.
const ROOM_SHARES: [f64; 2] = [0.0, 0.5];
/// Rounding of sums of millions of terms stays below this part of them.
const ROUNDING: f64 = 1e-9;

impl UpperBound {
    /// The bound for a workload on the cluster of `setup`, whatever its policy and admission mode.
    ///
    /// # Errors
    /// Says which setting of the cluster is impossible.
    pub fn of(setup: &Setup, workload: &mut dyn Workload) -> Result<Self, String> {
        setup.validate()?;
        let demand = Demand::of(setup, workload);
        let requests = demand.needs.iter().map(|_| 1.0).collect::<Vec<f64>>();
        #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
        let tokens = demand.needs.iter().map(|need| need.input_tokens as f64).collect::<Vec<f64>>();
        let mut in_slo: f64 = requests.iter().sum();
        let mut input_tokens_in_slo: f64 = tokens.iter().sum();
        if setup.clients.retries == 0 {
            let markets = ROOM_SHARES.map(|room_share| Market::new(&demand, room_share));
            in_slo = in_slo.min(least_bound(&markets, &requests));
            input_tokens_in_slo = input_tokens_in_slo.min(least_bound(&markets, &tokens));
        }
        Ok(Self { in_slo: whole(in_slo), input_tokens_in_slo: whole(input_tokens_in_slo) })
    }
}

/// The least bound in the market that looks best with one price for all time.
fn least_bound(markets: &[Market<'_>], values: &[f64]) -> f64 {
    let rough = |market: &&Market<'_>| market.least_bound(values, true);
    let best = markets.iter().min_by(|a, b| rough(a).total_cmp(&rough(b)));
    best.map_or(f64::INFINITY, |market| market.least_bound(values, false))
}

/// The largest whole number that a bound allows.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a sum of values, positive and far below 2^53"
)]
fn whole(bound: f64) -> u64 {
    (bound * (1.0 + ROUNDING) + ROUNDING) as u64
}
