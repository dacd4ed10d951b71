//! How far ahead of its end an engine gets its next work, and what gathers for a pass meanwhile.

use crate::conductor::Conductor;
use crate::fleet::Instance;

impl Conductor {
    /// How long before an engine runs out of work its next prefill is sent to it, µs. Later arrivals cannot overtake a
    /// sent prefill, so this is at most a twentieth of the tightest objective. It is at most half a pass, which is
    /// enough to fill passes.
    pub(crate) fn dispatch_ahead_us(&self, instance: &Instance) -> u64 {
        #[cfg(test)]
        if let Some(ahead_us) = self.ahead_for_test_us {
            return ahead_us;
        }
        let tightest_us = self.config.classes.iter().map(|c| c.ttft_us).min().unwrap_or(0);
        (tightest_us / 20).min(half_pass_us(instance))
    }

    /// Tokens of about as much work as is sent ahead, which is what gathers for a pass while the one before it lasts. The
    /// policies of the paper and of others take each prompt for alone.
    pub(crate) fn gathered_tokens(&self, instance: &Instance) -> u64 {
        if !self.config.policy.orders_queues() {
            return 0;
        }
        let half_tokens = u64::from(instance.spec.pass_tokens / 2);
        half_tokens * self.dispatch_ahead_us(instance) / half_pass_us(instance).max(1)
    }

    /// Of the tokens of others with which a prompt might share a pass, those that gather with it.
    pub(crate) fn beside_tokens(&self, instance: &Instance, new_tokens: u64, others_tokens: u64) -> u64 {
        others_tokens.min(self.gathered_tokens(instance).saturating_sub(new_tokens))
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times are positive and far below 2^53"
)]
fn half_pass_us(instance: &Instance) -> u64 {
    let spec = &instance.spec;
    let half_us = spec.profile.prefill_us(u64::from(spec.pass_tokens / 2), 0);
    (half_us / f64::from(spec.pipeline_nodes.max(1))) as u64
}
