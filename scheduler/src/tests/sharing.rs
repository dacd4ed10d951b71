//! Prompts with a common beginning: blocks that one of them holds, or is about to hold, are not computed again for
//! another.

use baton_types::{RequestId, Role};

use crate::testing::{
    BLOCK, FAST_LINK, conductor_of, failure, finished, naive_prefill_us, offer, plain, rejection, request,
    spec, started, step,
};
use crate::{AdmissionMode, Conductor, Decision, Effect, Input, InstanceSpec, PolicyName, SchedulerConfig};

/// Blocks that all prompts begin with.
const SHARED: u64 = 80;
/// Tokens of a prompt beyond those.
const OWN: u64 = 100;

fn pair() -> Conductor {
    let plain = plain(PolicyName::Baton, AdmissionMode::Slo);
    let fast = |id, role| InstanceSpec { net_bytes_per_s: FAST_LINK, ..spec(id, role) };
    let specs = [fast(0, Role::Prefill), fast(1, Role::Decode)];
    conductor_of(SchedulerConfig { explain_every: 1, ..plain }, &specs)
}

fn ask(conductor: &mut Conductor, now_us: u64, id: u64) -> alloc::vec::Vec<Effect> {
    offer(conductor, now_us, request(id, SHARED * BLOCK + OWN, SHARED))
}

/// The predicted cached tokens and work of the only prefill instance, tokens and µs.
fn predicted(effects: &[Effect]) -> (u64, u64, u64) {
    let found = effects.iter().find_map(|e| if let Effect::Explain(d) = e { Some(d.clone()) } else { None });
    let Decision { candidates, .. } = found.expect("every decision is explained");
    let terms = &candidates[0];
    (terms.cached_tokens, terms.compute_us.expect("in reach"), terms.queue_us)
}

fn reserved(conductor: &Conductor) -> u64 {
    conductor.snapshot().instances[1].reserved_tokens
}

#[test]
fn room_for_what_prompts_share_is_kept_once_until_the_last_of_them_leaves() {
    let mut conductor = pair();
    for id in 0..10 {
        let effects = ask(&mut conductor, id, id);
        assert_eq!(rejection(&effects), None, "request {id}: two would fit if each had its own");
    }
    let (block, shared) = (BLOCK, SHARED * BLOCK);
    let own = (reserved(&conductor) - shared) / 10;
    // Its own part of the prompt, and room for an answer.
    assert!(own.is_multiple_of(block) && own >= 2 * block, "{own}");
    for id in 0..10 {
        assert_eq!(reserved(&conductor), shared + (10 - id) * own);
        let effects = step(&mut conductor, 100, Input::RequestCancelled { request: RequestId(id) });
        assert_eq!(failure(&effects), None);
    }
    assert_eq!(reserved(&conductor), 0);
}

#[test]
fn who_follows_a_prefill_that_is_under_way_finds_what_it_computes() {
    let mut conductor = pair();
    let first = ask(&mut conductor, 0, 1);
    started(&first);
    let (cached, alone_us, _) = predicted(&first);
    assert_eq!(cached, 0);
    let (cached, compute_us, queue_us) = predicted(&ask(&mut conductor, 1_000, 2));
    // The own end of the first is as long, and shares its last pass.
    let half_us = crate::testing::PASS_US / 2;
    assert_eq!((cached, compute_us), (SHARED * BLOCK, naive_prefill_us(OWN) - half_us + 1));
    assert_eq!(queue_us, alone_us - 1_000, "and waits until that is over");
}

#[test]
fn what_was_under_way_is_not_when_it_is_given_up_or_over_without_a_word_of_its_blocks() {
    let ends = [finished(1), Input::RequestCancelled { request: RequestId(1) }];
    for end in ends {
        let mut conductor = pair();
        ask(&mut conductor, 0, 1);
        step(&mut conductor, 1_000, end);
        let (cached, compute_us, _) = predicted(&ask(&mut conductor, 2_000, 2));
        assert_eq!((cached, compute_us), (0, naive_prefill_us(SHARED * BLOCK + OWN) + 1));
    }
}

/// Tokens that the client has of an answer whose decode is about to be lost become part of its prompt once it is placed
/// again. Until then its room is kept for the old prompt, whose last, partial block another request shares.
#[test]
fn a_decode_that_is_about_to_be_lost_shares_what_it_shared() {
    let mut conductor = pair();
    for id in [1, 2] {
        crate::testing::decoding(&mut conductor, request(id, 2 * BLOCK + OWN, 3), 1);
    }
    // Each of these steps checks the ledgers.
    step(&mut conductor, 9_000_000, Input::TokensEmitted { request: RequestId(1), emitted_tokens: 91 });
    offer(&mut conductor, 9_100_000, request(3, 2 * BLOCK + OWN, 3));
    let room = reserved(&conductor);
    step(
        &mut conductor,
        9_200_000,
        Input::DecodeFinished { request: RequestId(2), output_tokens: 5, first_us: 0, tbt_us: 0 },
    );
    assert!(reserved(&conductor) < room);
}
