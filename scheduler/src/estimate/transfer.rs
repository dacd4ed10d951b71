//! How long it takes to bring blocks: from a slower tier of the same node, or from another node
//! over links that others use too.

use super::NEVER_US;
use crate::fleet::Instance;

/// `bytes` at `bytes_per_s` shared among `sharers`, µs.
fn shared_us(bytes: u64, bytes_per_s: u64, sharers: u32) -> u64 {
    if bytes == 0 {
        return 0;
    }
    if bytes_per_s == 0 {
        return NEVER_US;
    }
    let us = u128::from(bytes) * u128::from(sharers.max(1)) * 1_000_000 / u128::from(bytes_per_s);
    u64::try_from(us).unwrap_or(NEVER_US).min(NEVER_US)
}

/// Predicted time to fetch `tokens` tokens of KV from `source` to `target`, µs. Both links are shared with the
/// transfers in progress.
pub(crate) fn fetch_us(source: &Instance, target: &Instance, tokens: u64) -> u64 {
    let bytes = source.kv_bytes(tokens);
    let out = shared_us(bytes, source.spec.net_bytes_per_s, source.egress_flights + 1);
    let into = shared_us(bytes, target.spec.net_bytes_per_s, target.ingress_flights + 1);
    out.max(into)
}

/// Time to move `tokens` tokens of KV from `source` to `target` over idle links, µs.
pub(crate) fn alone_us(source: &Instance, target: &Instance, tokens: u64) -> u64 {
    shared_us(source.kv_bytes(tokens), source.spec.net_bytes_per_s.min(target.spec.net_bytes_per_s), 1)
}

/// Predicted time to load blocks from the instance's own DRAM and SSD into its HBM, µs.
pub(crate) fn load_us(instance: &Instance, dram_tokens: u64, ssd_tokens: u64) -> u64 {
    let dram = shared_us(instance.kv_bytes(dram_tokens + ssd_tokens), instance.spec.host_bytes_per_s, 1);
    let ssd = shared_us(instance.kv_bytes(ssd_tokens), instance.spec.ssd_bytes_per_s, 1);
    dram.max(ssd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Fleet;
    use crate::testing::spec;
    use baton_types::{InstanceId, Role};

    #[test]
    fn contention_on_either_end_slows_a_fetch() {
        let mut fleet = Fleet::default();
        fleet.join(spec(0, Role::Prefill));
        let source = fleet.get(InstanceId(0)).expect("joined").clone();
        let mut target = source.clone();
        let alone = fetch_us(&source, &target, 10_000);
        assert_eq!(alone, source.kv_bytes(10_000) * 1_000_000 / source.spec.net_bytes_per_s);
        target.ingress_flights = 3;
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
