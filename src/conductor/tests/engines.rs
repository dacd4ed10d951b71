//! Pairs whose engines move KV by a protocol of their own.

use baton_types::{BlockKey, CacheChange, Sampling, Tier};
use baton_wire::v1;

use super::bench::{Bench, failure, prefilled, token};

fn offer(transfer: &str) -> v1::fact::Fact {
    v1::fact::Fact::Offer(v1::Offer { transfer: transfer.as_bytes().to_vec().into() })
}

/// The first token comes from the decode leg, which knows by then how to take the KV.
#[tokio::test]
async fn a_decode_leg_is_told_what_its_prefill_leg_offers() {
    let mut bench = Bench::with(&["px", "dx"]).await;
    bench.submit("r", 3).await;
    let (prefill, decode) = (bench.prefill("r"), bench.decode("r"));
    assert_eq!((&decode.work.tokens, decode.taken), (&prefill.work.tokens, None));
    bench.send_facts(&prefill, vec![offer("by lane 7"), prefilled()]).await;
    let decode = bench.decode("r");
    assert_eq!((decode.taken.as_deref(), decode.answer.as_deref()), (Some(&b"by lane 7"[..]), Some(&[][..])));
    bench.do_decode("r", 3).await;
    bench.ended_well("r");
    bench.quiet();
}

/// Some engines want both legs at once: the offer comes long before the prefill's end.
#[tokio::test]
async fn an_offer_may_come_before_the_prefill_has_ended_and_is_taken_once() {
    let mut bench = Bench::with(&["px", "dx"]).await;
    bench.submit("r", 2).await;
    let prefill = bench.prefill("r");
    bench.send_facts(&prefill, vec![offer("room 9")]).await;
    assert_eq!(bench.decode("r").answer, None, "the prefill goes on");
    bench.send_facts(&prefill, vec![offer("room 10")]).await;
    assert_eq!(bench.decode("r").taken.as_deref(), Some(&b"room 9"[..]));
    // Not the decode leg's to say.
    let decode = bench.decode("r");
    bench.send_facts(&decode, vec![offer("room 11")]).await;
    bench.send_facts(&prefill, vec![prefilled()]).await;
    bench.do_decode("r", 2).await;
    bench.ended_well("r");
    bench.quiet();
}

/// An offer is valid for its own attempt. The next attempt waits for its own offer.
#[tokio::test]
async fn an_offer_ends_with_its_attempt() {
    let mut bench = Bench::with(&["p1x", "p2x", "dx"]).await;
    bench.submit("r", 4).await;
    let first = bench.prefill("r");
    bench.send_facts(&first, vec![offer("one"), failure(false)]).await;
    let second = bench.prefill("r");
    assert_ne!(first.node, second.node);
    assert_eq!(bench.decode("r").taken, None);
    // The conductor ignores the node whose attempt failed.
    bench.send_facts(&first, vec![offer("one again")]).await;
    assert_eq!(bench.decode("r").taken, None);
    bench.send_facts(&second, vec![offer("two"), prefilled()]).await;
    assert_eq!(bench.decode("r").taken.as_deref(), Some(&b"two"[..]));
    // Lost in mid-answer, it goes on from the tokens that the client has.
    bench.do_decode("r", 2).await;
    let lost = bench.decode("r");
    bench.send_facts(&lost, vec![failure(false)]).await;
    let third = bench.prefill("r");
    assert_eq!(third.given(), 2);
    bench.send_facts(&third, vec![offer("three"), prefilled()]).await;
    bench.do_decode("r", 4).await;
    bench.ended_well("r");
    bench.quiet();
}

/// A prefill that ends the answer by itself is the answer.
#[tokio::test]
async fn an_answer_of_one_token_needs_no_offer() {
    let mut bench = Bench::with(&["px", "dx"]).await;
    bench.submit("r", 1).await;
    let prefill = bench.prefill("r");
    bench.send_facts(&prefill, vec![token("r", 0, 2), prefilled()]).await;
    bench.ended_well("r");
    bench.quiet();
}

fn ended(finish: i32, cached_tokens: Option<u64>) -> v1::fact::Fact {
    v1::fact::Fact::Ended(v1::Ended { finish, cached_tokens })
}

/// Engines that stream may know only after a token that it was the last, and then how much was cached.
#[tokio::test]
async fn an_answer_may_end_after_its_last_token() {
    let mut bench = Bench::with(&["px", "dx"]).await;
    bench.submit("r", 9).await;
    let prefill = bench.prefill("r");
    bench.send_facts(&prefill, vec![offer("it"), prefilled()]).await;
    let decode = bench.decode("r");
    bench.send_facts(&decode, vec![token("r", 0, 0), token("r", 1, 0)]).await;
    assert_eq!(bench.client("r").last, None);
    bench.send_facts(&decode, vec![ended(1, Some(32)), token("r", 2, 0)]).await;
    let Some(baton_router::Event::Finished { usage, .. }) = &bench.client("r").last else { panic!("no end") };
    assert_eq!((usage.cached_tokens, bench.client("r").tokens.len()), (32, 2));
    bench.quiet();
}

/// Never a success with nothing in it.
#[tokio::test]
async fn an_end_without_an_answer_is_a_failure_and_tried_elsewhere() {
    let mut bench = Bench::with(&["px", "d1x", "d2x"]).await;
    bench.submit("r", 2).await;
    let prefill = bench.prefill("r");
    bench.send_facts(&prefill, vec![offer("it"), prefilled()]).await;
    let empty = bench.decode("r");
    bench.send_facts(&empty, vec![ended(1, None)]).await;
    assert_eq!(bench.client("r").last, None);
    let prefill = bench.prefill("r");
    bench.send_facts(&prefill, vec![offer("again"), prefilled()]).await;
    assert_ne!(bench.decode("r").node, empty.node);
    bench.do_decode("r", 2).await;
    bench.ended_well("r");
    bench.quiet();
}

/// A prefill may be all: its engine found that the answer ends with the first token.
#[tokio::test]
async fn a_prefill_may_end_the_answer() {
    let mut bench = Bench::with(&["px", "dx"]).await;
    bench.submit("r", 5).await;
    let prefill = bench.prefill("r");
    bench.send_facts(&prefill, vec![token("r", 0, 0), ended(1, None), prefilled()]).await;
    assert!(matches!(bench.client("r").last, Some(baton_router::Event::Finished { .. })));
    bench.quiet();
}

/// Orphaned KV at an engine is fetched and discarded by any engine that can.
#[tokio::test]
async fn kv_that_nobody_wants_any_more_is_let_go() {
    let mut bench = Bench::with(&["px", "dx"]).await;
    bench.submit("r", 5).await;
    let prefill = bench.prefill("r");
    bench.leave("r").await;
    let loan = v1::Loan { transfer: b"blocks 3 to 9".to_vec().into(), ..v1::Loan::default() };
    bench.send_facts(&prefill, vec![offer("blocks 3 to 9"), v1::fact::Fact::Abandoned(loan)]).await;
    assert_eq!(bench.open_legs.discards, [("dx".to_owned(), b"blocks 3 to 9".to_vec())]);
    bench.quiet();
}

/// A regression: the time of a prompt of which most was cached was taken for the time of all of it, so that an engine that
/// reports its hits with the end of an answer seemed quicker than it was, and was promised more than it could do.
#[tokio::test]
async fn what_a_whole_engine_took_is_judged_by_what_was_expected_in_its_cache() {
    let mut bench = Bench::with(&["bx"]).await;
    let chain = [BlockKey(11), BlockKey(12)];
    let hashes = chain.map(BlockKey::short).to_vec();
    let change = CacheChange::Stored { parent: None, hashes, tier: Tier::Hbm };
    let stored = v1::fact::Fact::Cache(v1::CacheChange::from(&change));
    bench.send_facts_as("bx", (0, 0), vec![stored]).await;
    let submission = Bench::submission("r", Sampling { max_tokens: 9, ..Sampling::default() });
    bench.send(baton_router::Submission { chain: chain.into(), ..submission }).await;
    let before = bench.driver.core.stats().cached_tokens;
    let leg = bench.prefill("r");
    bench.send_facts(&leg, vec![token("r", 0, 0), prefilled()]).await;
    assert_eq!(bench.driver.core.stats().cached_tokens - before, 32);
    bench.send_facts(&leg, vec![ended(1, Some(16))]).await;
    let Some(baton_router::Event::Finished { usage, .. }) = &bench.client("r").last else { panic!("no end") };
    assert_eq!(usage.cached_tokens, 16, "a client hears what the engine says");
    // Of a prompt whose logprobs are asked for all is computed.
    let sampling = Sampling { max_tokens: 9, prompt_logprobs: Some(1), ..Sampling::default() };
    let submission = Bench::submission("s", sampling);
    bench.send(baton_router::Submission { chain: chain.into(), ..submission }).await;
    let before = bench.driver.core.stats().cached_tokens;
    let leg = bench.prefill("s");
    bench.send_facts(&leg, vec![token("s", 0, 0), prefilled()]).await;
    assert_eq!(bench.driver.core.stats().cached_tokens - before, 0);
    bench.send_facts(&leg, vec![ended(1, Some(0))]).await;
    bench.quiet();
}
