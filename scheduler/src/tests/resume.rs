//! An answer whose decode dies continues elsewhere after the client's last token.

use alloc::vec::Vec;
use baton_types::{Epoch, InstanceId, RequestId, Tier};

use crate::testing::{
    BLOCK, PrefillStart, conductor, failure, finished, foretold, hold, offer, plain, request, shared_chain,
    started, step,
};
use crate::{AdmissionMode, Conductor, Input, PolicyName, Request, SchedulerConfig};

const ONE: RequestId = RequestId(1);

/// A request that decodes, on one of two decode instances.
fn decoding(request: Request) -> (Conductor, PrefillStart) {
    let mut conductor = conductor(plain(PolicyName::Baton, AdmissionMode::Slo), 1, 2);
    let start = started(&offer(&mut conductor, 0, request));
    step(&mut conductor, 100_000, finished(1));
    step(&mut conductor, 110_000, Input::HandoffFinished { request: ONE });
    (conductor, start)
}

/// The length of its answer is reported and its decode dies; returns how it starts again.
fn resumed(conductor: &mut Conductor, start: PrefillStart, emitted_tokens: u32) -> PrefillStart {
    let input = Input::TokensEmitted { request: ONE, emitted_tokens };
    assert!(step(conductor, 5_000_000, input).is_empty());
    let lost = Input::InstanceLost { instance: InstanceId(start.decode), epoch: Epoch(1) };
    started(&step(conductor, 5_000_000, lost))
}

fn reserved(conductor: &Conductor, instance: u32) -> u64 {
    conductor.snapshot().instances[instance as usize].reserved_tokens
}

#[test]
fn what_was_emitted_is_prompt_now_and_only_the_rest_needs_room() {
    let (mut conductor, start) = decoding(foretold(1, 5 * BLOCK, 1000));
    assert_eq!(start.room_tokens, 1000);
    let again = resumed(&mut conductor, start, 600);
    assert_eq!(again.room_tokens, 400, "the others have reached the client");
    assert!(again.decode != start.decode);
    let promised = reserved(&conductor, again.decode);
    let needed = 5 * BLOCK + 600 + 400;
    assert!((needed..needed + 2 * BLOCK).contains(&promised), "{promised} for {needed}");
}

#[test]
fn the_full_blocks_of_the_prompt_still_match_and_the_partial_one_does_not() {
    let prompt = Request { chain: shared_chain(6), ..foretold(1, 5 * BLOCK + 100, 1000) };
    let (mut conductor, start) = decoding(prompt);
    // The prefill instance kept what it computed, the partial block under its own name included.
    hold(&mut conductor, 0, &shared_chain(6), Tier::Hbm);
    let explained = resumed(&mut conductor, start, 50);
    assert_eq!(explained.prefill, 0);
    // 100 + 50 tokens lie beyond the five blocks that match: 15 ms and a pass.
    let backlog_us = conductor.snapshot().instances[0].backlog_us;
    assert!((15_000..18_000).contains(&backlog_us), "{backlog_us} µs of work");
}

#[test]
fn an_estimate_without_foresight_counts_what_is_left_too() {
    let (mut conductor, start) = decoding(request(1, 5 * BLOCK, 0));
    let again = resumed(&mut conductor, start, 100);
    assert!(again.room_tokens >= 1 && again.room_tokens < start.room_tokens, "{again:?} after {start:?}");
}

#[test]
fn an_answer_longer_than_foretold_still_has_room_for_a_token() {
    let (mut conductor, start) = decoding(foretold(1, 5 * BLOCK, 100));
    assert_eq!(resumed(&mut conductor, start, 100).room_tokens, 1);
    let (mut conductor, start) = decoding(foretold(1, 5 * BLOCK, 100));
    assert_eq!(resumed(&mut conductor, start, 5_000).room_tokens, 1);
}

#[test]
fn telling_it_twice_counts_it_once() {
    let (mut conductor, start) = decoding(foretold(1, 5 * BLOCK, 1000));
    for emitted_tokens in [600, 600, 200] {
        step(&mut conductor, 5_000_000, Input::TokensEmitted { request: ONE, emitted_tokens });
    }
    let again = resumed(&mut conductor, start, 600);
    assert_eq!(again.room_tokens, 400);
    assert!(reserved(&conductor, again.decode) <= 5 * BLOCK + 1000 + 2 * BLOCK);
}

#[test]
fn a_context_that_has_outgrown_every_instance_fails_by_name() {
    let (mut conductor, start) = decoding(foretold(1, 90_000, 20_000));
    step(&mut conductor, 5_000_000, Input::TokensEmitted { request: ONE, emitted_tokens: 15_000 });
    let lost = Input::InstanceLost { instance: InstanceId(start.decode), epoch: Epoch(1) };
    let effects = step(&mut conductor, 5_000_000, lost);
    assert_eq!(failure(&effects).map(|(id, _)| id), Some(1), "105,000 tokens fit nowhere");
}

#[test]
fn nothing_has_been_emitted_before_the_decode() {
    let mut conductor = conductor(plain(PolicyName::Baton, AdmissionMode::Slo), 1, 1);
    started(&offer(&mut conductor, 0, foretold(1, 1000, 100)));
    for request in [ONE, RequestId(77)] {
        step(&mut conductor, 0, Input::TokensEmitted { request, emitted_tokens: 9 });
    }
    assert_eq!(conductor.stats().stale_inputs, 2);
}

#[test]
fn a_resumed_answer_is_not_refused_a_second_time() {
    // It was admitted and its client has half of the answer: being late now is our fault.
    let config =
        SchedulerConfig { classes: Vec::from([tight()]), ..plain(PolicyName::Baton, AdmissionMode::Slo) };
    let mut conductor = conductor(config, 1, 2);
    let start = started(&offer(&mut conductor, 0, foretold(1, 5_000, 1000)));
    step(&mut conductor, 500_000, finished(1));
    step(&mut conductor, 510_000, Input::HandoffFinished { request: ONE });
    assert!(resumed(&mut conductor, start, 600).decode != start.decode);
    assert_eq!(conductor.stats().rejected_total(), 0);
}

fn tight() -> baton_types::SloClass {
    baton_types::SloClass { ttft_us: 700_000, ..baton_types::SloClass::default() }
}
