//! Fetch or recompute: whichever is predicted to be sooner, for each holder and tier.

use alloc::vec::Vec;
use baton_types::{Role, Tier};
use proptest::prelude::*;

use crate::testing::{
    BLOCK, PrefillStart, TOKEN_US, burden, conductor_of, hold, naive_prefill_us, offer, plain, request,
    shared_chain, spec, started,
};
use crate::{AdmissionMode, Conductor, Effect, InstanceSpec, PolicyName, SchedulerConfig};

/// A network on which a token takes as long as computing it does.
const EVEN_BYTES_PER_S: u64 = 1000 * 1_000_000 / TOKEN_US;

/// `prefills` instances of both roles, which hand nothing off, and one that decodes, all on a network of that rate.
fn networked(prefills: u32, net_bytes_per_s: u64) -> Conductor {
    let role = |id| if id < prefills { Role::Both } else { Role::Decode };
    let specs: Vec<InstanceSpec> =
        (0..=prefills).map(|id| InstanceSpec { net_bytes_per_s, ..spec(id, role(id)) }).collect();
    let config = SchedulerConfig { explain_every: 1, ..plain(PolicyName::Baton, AdmissionMode::Slo) };
    conductor_of(config, &specs)
}

/// Keeps an instance busy for longer than any request may wait.
fn busy(conductor: &mut Conductor, instance: u32) {
    burden(conductor, request(9_000 + u64::from(instance), 1, 0), (instance, instance), 25_000_000);
}

/// Instance 0 holds 16 blocks and is busy; the request, of 20 blocks, goes to instance 1.
fn beside_a_busy_holder(net_bytes_per_s: u64) -> PrefillStart {
    let mut conductor = networked(2, net_bytes_per_s);
    hold(&mut conductor, 0, &shared_chain(16), Tier::Hbm);
    busy(&mut conductor, 0);
    let chosen = started(&offer(&mut conductor, 0, request(1, 20 * BLOCK, 16)));
    assert_eq!(chosen.prefill, 1);
    chosen
}

#[test]
fn a_fast_network_fetches_and_a_slow_one_recomputes() {
    let fast = beside_a_busy_holder(EVEN_BYTES_PER_S * 2).fetch.expect("half the time of computing");
    assert_eq!((fast.from.0, fast.blocks), (0, 16));
    assert_eq!(beside_a_busy_holder(EVEN_BYTES_PER_S / 2).fetch, None);
}

#[test]
fn fetching_can_be_switched_off() {
    let config = SchedulerConfig { fetch: false, ..plain(PolicyName::Baton, AdmissionMode::Slo) };
    let mut conductor = crate::testing::conductor(config, 2, 1);
    hold(&mut conductor, 0, &shared_chain(16), Tier::Hbm);
    busy(&mut conductor, 0);
    assert_eq!(started(&offer(&mut conductor, 0, request(1, 20 * BLOCK, 16))).fetch, None);
}

#[test]
fn the_holder_itself_is_best_while_it_is_idle() {
    let mut conductor = networked(3, EVEN_BYTES_PER_S * 10);
    hold(&mut conductor, 2, &shared_chain(16), Tier::Hbm);
    let chosen = started(&offer(&mut conductor, 0, request(1, 20 * BLOCK, 16)));
    assert_eq!((chosen.prefill, chosen.fetch), (2, None));
}

#[test]
fn a_decode_instance_may_be_the_source() {
    let mut conductor = networked(1, EVEN_BYTES_PER_S * 10);
    hold(&mut conductor, 1, &shared_chain(16), Tier::Hbm);
    let fetch = started(&offer(&mut conductor, 0, request(1, 20 * BLOCK, 16))).fetch;
    assert_eq!(fetch.map(|f| (f.from.0, f.blocks)), Some((1, 16)));
}

#[test]
fn the_longest_holder_is_the_source_and_among_equals_the_one_that_sends_least() {
    let mut conductor = networked(5, EVEN_BYTES_PER_S * 4);
    for (holder, blocks) in [(0, 8), (1, 16), (2, 16)] {
        hold(&mut conductor, holder, &shared_chain(blocks), Tier::Hbm);
        busy(&mut conductor, holder);
    }
    let sources: Vec<(u32, u32)> = (1..=2)
        .map(|id| started(&offer(&mut conductor, 0, request(id, 20 * BLOCK, 16))).fetch.expect("worth it"))
        .map(|fetch| (fetch.from.0, fetch.blocks))
        .collect();
    assert_eq!(sources, [(1, 16), (2, 16)], "the second request avoids the link that the first one uses");
}

#[test]
fn contention_turns_fetching_into_recomputing_and_its_end_turns_it_back() {
    // Alone a fetch takes two thirds of the time of the prefill; two that share the link take four thirds.
    let mut conductor = networked(2, EVEN_BYTES_PER_S * 3 / 2);
    hold(&mut conductor, 0, &shared_chain(16), Tier::Hbm);
    busy(&mut conductor, 0);
    let mut offer_one = |id| started(&offer(&mut conductor, 0, request(id, 17 * BLOCK, 16)));
    assert!(offer_one(1).fetch.is_some());
    assert_eq!(offer_one(2).fetch, None, "the link is taken");
    let done = crate::Input::FetchFinished { request: baton_types::RequestId(1), ok: true };
    crate::testing::step(&mut conductor, 0, done);
    crate::testing::step(&mut conductor, 0, crate::testing::finished(1));
    crate::testing::step(&mut conductor, 0, crate::testing::finished(2));
    assert!(
        started(&offer(&mut conductor, 0, request(3, 17 * BLOCK, 16))).fetch.is_some(),
        "the link is free"
    );
}

/// The terms of instance 0 for a request of 20 blocks, 16 of which it holds in `tier`.
fn load_us_from(tier: Tier, spec_of: impl Fn(InstanceSpec) -> InstanceSpec) -> u64 {
    let config = SchedulerConfig { explain_every: 1, ..plain(PolicyName::Baton, AdmissionMode::None) };
    let mut conductor = conductor_of(config, &[spec_of(spec(0, Role::Prefill)), spec(1, Role::Decode)]);
    hold(&mut conductor, 0, &shared_chain(16), tier);
    let effects = offer(&mut conductor, 0, request(1, 20 * BLOCK, 16));
    let decision = effects.iter().find_map(|e| if let Effect::Explain(d) = e { Some(d) } else { None });
    decision.expect("every decision is recorded").candidates[0].load_us.expect("it can be brought")
}

#[test]
fn a_hit_in_hbm_loads_nothing_and_one_in_dram_at_the_rate_of_the_host() {
    assert_eq!(load_us_from(Tier::Hbm, |s| s), 0);
    let dram = |rate| load_us_from(Tier::Dram, |s| InstanceSpec { host_bytes_per_s: rate, ..s });
    let bytes = 16 * BLOCK * 1000;
    assert_eq!(dram(1_000_000_000), bytes / 1000);
    assert_eq!(dram(500_000_000), 2 * dram(1_000_000_000));
}

#[test]
fn a_hit_on_flash_loads_at_the_slower_of_its_two_links() {
    let ssd = |ssd, host| {
        load_us_from(Tier::Ssd, |s| InstanceSpec { ssd_bytes_per_s: ssd, host_bytes_per_s: host, ..s })
    };
    let alone = ssd(100_000_000, 1_000_000_000);
    assert_eq!(alone, 16 * BLOCK * 1000 / 100);
    assert_eq!(ssd(50_000_000, 1_000_000_000), 2 * alone);
    assert_eq!(ssd(1_000_000_000, 100_000_000), alone, "the way through the host is as narrow");
}

#[test]
fn a_slow_tier_here_can_lose_to_an_idle_instance_elsewhere() {
    let reader = InstanceSpec { ssd_bytes_per_s: EVEN_BYTES_PER_S / 10, ..spec(0, Role::Prefill) };
    let fleet = [reader, spec(1, Role::Prefill), spec(2, Role::Decode)];
    let config = SchedulerConfig { fetch: false, ..plain(PolicyName::Baton, AdmissionMode::Slo) };
    let mut conductor = conductor_of(config, &fleet);
    hold(&mut conductor, 0, &shared_chain(16), Tier::Ssd);
    assert_eq!(started(&offer(&mut conductor, 0, request(1, 20 * BLOCK, 16))).prefill, 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// The decision equals comparing seconds, away from the break-even point.
    #[test]
    fn the_sooner_way_is_taken(held in 1u64..30, own in 0u64..30, extra in 1u64..9_000, rate in 500_000u64..100_000_000) {
        prop_assume!(own < held);
        let prompt = held * BLOCK + extra;
        let mut conductor = networked(2, rate);
        hold(&mut conductor, 0, &shared_chain(held), Tier::Hbm);
        hold(&mut conductor, 1, &shared_chain(own), Tier::Hbm);
        busy(&mut conductor, 0);
        let chosen = started(&offer(&mut conductor, 0, request(1, prompt, held)));
        prop_assert_eq!(chosen.prefill, 1);
        let moved = (held - own) * BLOCK;
        let fetch_us = moved * 1000 * 1_000_000 / rate + naive_prefill_us(extra);
        let compute_us = naive_prefill_us(prompt - own * BLOCK);
        if fetch_us + 5 < compute_us {
            prop_assert_eq!(chosen.fetch.map(|f| u64::from(f.blocks)), Some(held));
        } else if compute_us + 5 < fetch_us {
            prop_assert_eq!(chosen.fetch, None);
        }
    }
}
