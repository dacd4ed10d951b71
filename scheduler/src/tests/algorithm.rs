//! Algorithm 1 of the Mooncake paper against a naive version, and its relatives against theirs: the instance that wins
//! the conductor's search must win on paper too, to within rounding.

use alloc::vec::Vec;
use baton_types::{RequestId, Role, Tier};
use proptest::prelude::*;

use crate::testing::{
    BLOCK, PrefillStart, burden, conductor_of, hold, naive_prefill_us, offer, plain, request, shared_chain,
    spec, started,
};
use crate::{AdmissionMode, Conductor, InstanceSpec, PolicyName, SchedulerConfig};

/// The naive model: what one prefill instance holds and owes.
#[derive(Clone, Debug, Default)]
struct Paper {
    prefix_blocks: u64,
    queue_us: u64,
    egress: u64,
    ingress: u64,
    net_bytes_per_s: u64,
}

/// The decision of the paper's line 7 for one instance.
#[derive(Clone, Copy, Debug, PartialEq)]
struct InstanceCost {
    ttft_us: u64,
    fetches: bool,
}

/// Bytes of a token under the test profile.
const TOKEN_BYTES: u64 = 1000;
/// Microseconds by which integer rounding may differ.
const ROUNDING_US: u64 = 3;

fn cached_tokens(blocks: u64, prompt: u64) -> u64 {
    (blocks * BLOCK).min(prompt - 1)
}

/// Lines 4 to 21: own prefix unless the best is longer by more than the threshold; then as if it
/// had the best, plus the transfer of the difference.
fn cost(fleet: &[Paper], at: usize, prompt: u64, threshold: Option<f64>) -> InstanceCost {
    let own = fleet[at].prefix_blocks;
    let best = fleet.iter().map(|p| p.prefix_blocks).max().unwrap_or(0);
    #[expect(clippy::cast_precision_loss, reason = "block counts are small")]
    let ratio = if own > 0 { best as f64 / own as f64 } else { f64::INFINITY };
    let fetches = best > own && threshold.is_some_and(|threshold| ratio > threshold);
    if !fetches {
        let ttft_us = fleet[at].queue_us + naive_prefill_us(prompt - cached_tokens(own, prompt));
        return InstanceCost { ttft_us, fetches };
    }
    let far = cached_tokens(best, prompt);
    let bytes = (far - cached_tokens(own, prompt)) * TOKEN_BYTES;
    let seconds_us = |sharers: u64, rate: u64| bytes * sharers * 1_000_000 / rate;
    let holders = fleet.iter().enumerate().filter(|(i, p)| p.prefix_blocks == best && *i != at);
    let source = holders.map(|(_, p)| p).min_by_key(|p| p.egress).expect("someone holds the best");
    let transfer_us = seconds_us(source.egress + 1, source.net_bytes_per_s)
        .max(seconds_us(fleet[at].ingress + 1, fleet[at].net_bytes_per_s));
    InstanceCost { ttft_us: transfer_us + fleet[at].queue_us + naive_prefill_us(prompt - far), fetches }
}

/// A scene: what each prefill instance holds and owes, and the prompts that arrive.
#[derive(Clone, Debug)]
struct Scene {
    instances: Vec<(u64, u64)>,
    decodes: Vec<u64>,
    prompts: Vec<u64>,
    net_bytes_per_s: u64,
}

fn scenes() -> impl Strategy<Value = Scene> {
    let rates = [2_000_000u64, 8_000_000, 20_000_000, 1_000_000_000];
    (
        proptest::collection::vec((0u64..40, 0u64..4_000_000), 1..7),
        proptest::collection::vec(0u64..30_000, 1..4),
        proptest::collection::vec(1u64..20_000, 1..6),
        0..rates.len(),
    )
        .prop_map(move |(instances, decodes, prompts, rate)| Scene {
            instances,
            decodes,
            prompts,
            net_bytes_per_s: rates[rate],
        })
}

/// The conductor in that scene, and the naive model of it.
fn stage(config: SchedulerConfig, scene: &Scene) -> (Conductor, Vec<Paper>) {
    let prefills = u32::try_from(scene.instances.len()).expect("few");
    let roles =
        scene.instances.iter().map(|_| Role::Prefill).chain(scene.decodes.iter().map(|_| Role::Decode));
    let specs: Vec<InstanceSpec> = (0..)
        .zip(roles)
        .map(|(id, role)| InstanceSpec { net_bytes_per_s: scene.net_bytes_per_s, ..spec(id, role) })
        .collect();
    let mut conductor = conductor_of(config, &specs);
    let mut paper = Vec::new();
    for (id, (blocks, work_us)) in (0u32..).zip(&scene.instances) {
        hold(&mut conductor, id, &shared_chain(*blocks), Tier::Hbm);
        let peer = RequestId(1_000 + u64::from(id));
        let quiet = crate::Request { id: peer, ..request(0, 1, 0) };
        burden(&mut conductor, quiet, (id, prefills), *work_us);
        paper.push(Paper {
            prefix_blocks: *blocks,
            queue_us: *work_us,
            net_bytes_per_s: scene.net_bytes_per_s,
            // What keeps it busy leaves for a decode instance.
            egress: 1,
            ..Paper::default()
        });
    }
    for (at, tokens) in (0u32..).zip(&scene.decodes) {
        // A decode node holds the whole chain: the paper's pool P must not look at it.
        hold(&mut conductor, prefills + at, &shared_chain(40), Tier::Hbm);
        let load = crate::Request { id: RequestId(2_000 + u64::from(at)), ..request(0, tokens + 1, 0) };
        burden(&mut conductor, load, (0, prefills + at), 0);
        paper[0].egress += 1;
    }
    (conductor, paper)
}

/// Plays the scene and compares each decision with the naive model, which then follows the decision.
fn compare(policy: PolicyName, permille: u32, threshold: Option<f64>, scene: &Scene) {
    let config =
        SchedulerConfig { balancing_threshold_permille: permille, ..plain(policy, AdmissionMode::None) };
    let (mut conductor, mut paper) = stage(config, scene);
    for (id, &prompt) in (0u64..).zip(&scene.prompts) {
        let reach = baton_types::blocks_for(prompt, 512);
        let mut view = paper.clone();
        view.iter_mut().for_each(|p| p.prefix_blocks = p.prefix_blocks.min(reach));
        let lightest =
            conductor.snapshot().instances.iter().skip(paper.len()).map(|i| i.reserved_tokens).min();
        let before = conductor.snapshot();
        let chosen = started(&offer(&mut conductor, 0, request(id, prompt, u64::MAX)));
        let at = chosen.prefill as usize;
        let costed = cost(&view, at, prompt, threshold);
        let least =
            (0..view.len()).map(|i| cost(&view, i, prompt, threshold).ttft_us).min().expect("not empty");
        assert!(
            costed.ttft_us <= least + ROUNDING_US,
            "{chosen:?} costs {costed:?}, {least} was to be had: {view:?}"
        );
        assert_eq!(chosen.fetch.is_some(), costed.fetches, "{chosen:?} of {view:?}");
        let decode = before.instances[chosen.decode as usize];
        assert_eq!(Some(decode.reserved_tokens), lightest, "decode is chosen by load");
        follow(&mut paper, &view, chosen, costed.ttft_us, prompt);
    }
}

/// Records a decision in the naive model.
fn follow(paper: &mut [Paper], view: &[Paper], chosen: PrefillStart, ttft_us: u64, prompt: u64) {
    let at = chosen.prefill as usize;
    let own = view[at].prefix_blocks;
    let mut blocks = own;
    if let Some(fetch) = chosen.fetch {
        let best = view.iter().map(|p| p.prefix_blocks).max();
        assert_eq!(Some(u64::from(fetch.blocks)), best, "the best holder is the source");
        assert_eq!(view[fetch.from.index()].prefix_blocks, u64::from(fetch.blocks));
        blocks = u64::from(fetch.blocks);
        paper[fetch.from.index()].egress += 1;
        paper[at].ingress += 1;
    }
    // Its own KV leaves, too.
    paper[at].egress += 1;
    let work_us = naive_prefill_us(prompt - cached_tokens(blocks, prompt));
    assert!(work_us <= ttft_us);
    paper[at].queue_us += work_us + 1;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mooncake_is_algorithm_1_as_published(scene in scenes(), permille in 1000u32..4000) {
        compare(PolicyName::Mooncake, permille, Some(f64::from(permille) / 1000.0), &scene);
    }

    #[test]
    fn global_cache_fetches_whenever_another_holds_more(scene in scenes()) {
        compare(PolicyName::GlobalCache, 1300, Some(1.0), &scene);
    }

    #[test]
    fn local_cache_never_fetches(scene in scenes()) {
        compare(PolicyName::LocalCache, 1300, None, &scene);
    }

    #[test]
    fn least_loaded_looks_at_the_queue_alone(scene in scenes()) {
        let (mut conductor, mut paper) = stage(plain(PolicyName::LeastLoaded, AdmissionMode::None), &scene);
        for (id, &prompt) in (0u64..).zip(&scene.prompts) {
            let chosen = started(&offer(&mut conductor, 0, request(id, prompt, u64::MAX)));
            let least = paper.iter().map(|p| p.queue_us).min().expect("not empty");
            let at = chosen.prefill as usize;
            prop_assert!(paper[at].queue_us <= least + ROUNDING_US);
            prop_assert_eq!(chosen.fetch, None);
            let reach = paper[at].prefix_blocks.min(baton_types::blocks_for(prompt, 512));
            paper[at].queue_us += naive_prefill_us(prompt - cached_tokens(reach, prompt)) + 1;
        }
    }
}

/// Two instances, one with 10 blocks and the other with `own`; the prompt has 12.
fn at_threshold(own: u64, permille: u32) -> PrefillStart {
    let scene = Scene {
        instances: Vec::from([(10, 20_000_000), (own, 0)]),
        decodes: Vec::from([0]),
        prompts: Vec::new(),
        net_bytes_per_s: 1 << 30,
    };
    let config = SchedulerConfig {
        balancing_threshold_permille: permille,
        ..plain(PolicyName::Mooncake, AdmissionMode::None)
    };
    let (mut conductor, _) = stage(config, &scene);
    started(&offer(&mut conductor, 0, request(1, 12 * BLOCK, u64::MAX)))
}

#[test]
fn a_prefix_no_longer_than_the_threshold_is_recomputed() {
    // The holder is too busy, so the other instance is chosen either way.
    let (equal, beyond) = (at_threshold(5, 2000), at_threshold(5, 1999));
    assert_eq!((equal.prefill, equal.fetch), (1, None), "10 / 5 does not exceed 2");
    assert_eq!((beyond.prefill, beyond.fetch.map(|f| (f.from.0, f.blocks))), (1, Some((0, 10))));
    assert!(at_threshold(0, 1_000_000).fetch.is_some(), "any prefix exceeds none at all");
}
