//! How long it takes to bring blocks: from a slower tier of the same node, or from another node
//! over links that others use too.

use super::{LinkLedger, NEVER_US};
use crate::fleet::Instance;

/// `bytes` at `bytes_per_s`, µs.
fn transfer_us(bytes: u64, bytes_per_s: u64) -> u64 {
    if bytes == 0 {
        return 0;
    }
    if bytes_per_s == 0 {
        return NEVER_US;
    }
    // A decision asks for many of these; 128 bits are for absurd sizes alone.
    let us = match bytes.checked_mul(1_000_000) {
        Some(scaled) => scaled / bytes_per_s,
        None => u64::try_from(u128::from(bytes) * 1_000_000 / u128::from(bytes_per_s)).unwrap_or(NEVER_US),
    };
    us.min(NEVER_US)
}

/// Predicted time to fetch `tokens` tokens of KV from `source` to `target`, µs. Both links are shared with the KV that is
/// on its way.
pub(crate) fn fetch_us(source: &Instance, target: &Instance, tokens: u64) -> u64 {
    let shared = |end: &Instance, link: &LinkLedger| {
        let stated_us = transfer_us(source.kv_bytes(tokens), end.spec.net_bytes_per_s);
        link.learnt_us(stated_us).saturating_mul(link.flights() + 1)
    };
    shared(source, &source.prefill.outbound).max(shared(target, &target.inbound)).min(NEVER_US)
}

/// Time to move `tokens` tokens of KV from `source` to `target` over idle links, µs.
pub(crate) fn alone_us(source: &Instance, target: &Instance, tokens: u64) -> u64 {
    let bytes = source.kv_bytes(tokens);
    let alone =
        |end: &Instance, link: &LinkLedger| link.learnt_us(transfer_us(bytes, end.spec.net_bytes_per_s));
    alone(source, &source.prefill.outbound).max(alone(target, &target.inbound))
}

/// Time for which `tokens` tokens of KV keep a link of the instance to themselves at the stated rate, µs.
pub(crate) fn stated_us(instance: &Instance, tokens: u64) -> u64 {
    transfer_us(instance.kv_bytes(tokens), instance.spec.net_bytes_per_s)
}

/// Time for which `tokens` tokens of KV that leave the instance keep its link to themselves, µs.
pub(crate) fn send_us(instance: &Instance, tokens: u64) -> u64 {
    instance.prefill.outbound.learnt_us(stated_us(instance, tokens))
}

/// Time for which `tokens` tokens of KV that come to the instance keep its link to themselves, µs.
pub(crate) fn receive_us(instance: &Instance, tokens: u64) -> u64 {
    instance.inbound.learnt_us(stated_us(instance, tokens))
}

/// Predicted time to load blocks from the instance's own DRAM and SSD into its HBM, µs.
pub(crate) fn load_us(instance: &Instance, dram_tokens: u64, ssd_tokens: u64) -> u64 {
    let dram = transfer_us(instance.kv_bytes(dram_tokens + ssd_tokens), instance.spec.host_bytes_per_s);
    let ssd = transfer_us(instance.kv_bytes(ssd_tokens), instance.spec.ssd_bytes_per_s);
    dram.max(ssd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Fleet;
    use crate::testing::spec;
    use baton_types::{InstanceId, RequestId, Role};

    #[test]
    fn contention_on_either_end_slows_a_fetch() {
        let mut fleet = Fleet::default();
        fleet.join(spec(0, Role::Prefill));
        let source = fleet.get(InstanceId(0)).expect("joined").clone();
        let mut target = source.clone();
        let alone = fetch_us(&source, &target, 10_000);
        assert_eq!(alone, source.kv_bytes(10_000) * 1_000_000 / source.spec.net_bytes_per_s);
        (1..4).for_each(|id| target.inbound.begin(0, RequestId(id), 1, true));
        assert_eq!(fetch_us(&source, &target, 10_000), alone * 4);
        assert_eq!(alone_us(&source, &target, 10_000), alone);
        target.spec.net_bytes_per_s /= 2;
        assert_eq!(alone_us(&source, &target, 10_000), alone * 2);
        assert_eq!(fetch_us(&source, &target, 0), 0);
    }

    #[test]
    fn the_slower_tier_decides_a_load_and_a_missing_one_never_ends() {
        let mut fleet = Fleet::default();
        fleet.join(spec(0, Role::Prefill));
        let mut one = fleet.get(InstanceId(0)).expect("joined").clone();
        one.spec.ssd_bytes_per_s = one.spec.host_bytes_per_s / 10;
        assert!(load_us(&one, 0, 1000) >= 9 * load_us(&one, 1000, 0));
        one.spec.ssd_bytes_per_s = 0;
        assert_eq!(load_us(&one, 0, 1), NEVER_US);
    }
}
