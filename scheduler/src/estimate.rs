//! Estimators: priors from cost profiles, corrected by what was measured.

mod correct;
mod decode;
mod excess;
mod length;
mod link;
mod margin;
mod needs;
mod prefill;
mod transfer;
mod turns;

pub(crate) use correct::Residual;
pub(crate) use decode::{
    ChainPosition, DecodeLedger, DecodeSlot, common_blocks, moments_of_stay, place_among,
};
pub(crate) use excess::{StepOutlook, WaitOutlook};
pub(crate) use length::LengthEstimator;
pub(crate) use link::LinkLedger;
pub(crate) use margin::{MarginEstimator, scale_us};
pub(crate) use needs::NeedMoments;
pub(crate) use prefill::{least_work_us, mixed_step_us, prefill_work, prior_us, stretches_steps};
pub(crate) use transfer::{alone_us, fetch_us, load_us, receive_us, send_us, stated_us};
pub(crate) use turns::NewTurn;

/// A prediction that no placement can keep: far beyond any objective, and small enough that sums do not overflow.
pub(crate) const NEVER_US: u64 = 1 << 52;

#[expect(clippy::cast_precision_loss, reason = "times and token counts are far below 2^53")]
const fn as_f64(count: u64) -> f64 {
    count as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "what is not below 2^52 is made so"
)]
const fn whole_us(us: f64) -> u64 {
    // A node may announce any costs. A time beyond the range counts as never and does not overflow.
    us.min(NEVER_US as f64) as u64
}
