//! A pair that reports correctly, and one that reports facts twice, late, or for the other leg.

use baton_wire::v1::fact::Fact;

use super::bench::{Bench, fact_token, prefilled, token};

#[tokio::test]
async fn a_pair_serves_a_request_and_both_legs_end() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.submit("r", 4).await;
    let (prefill, decode) = (bench.prefill("r"), bench.decode("r"));
    assert_eq!((prefill.node.as_str(), decode.node.as_str()), ("p0", "d0"));
    let peer = prefill.to.clone().unwrap();
    assert_eq!((peer.instance, peer.epoch), (bench.lines["d0"].life.instance, 1));
    bench.do_prefill("r").await;
    assert_eq!(bench.client("r").tokens.len(), 0, "the client has the first token with the second");
    assert_eq!(bench.decode("r").answer, None);
    bench.do_handoff("r").await;
    assert_eq!(bench.decode("r").answer, Some(vec![super::open_legs::token_of("r", 0)]));
    bench.serve("r").await;
    bench.quiet();
    assert_eq!(bench.open_legs.releases, 0, "no leg needed a release");
}

#[tokio::test]
async fn a_node_of_both_parts_serves_alone() {
    let mut bench = Bench::with(&["b0"]).await;
    bench.submit("r", 3).await;
    assert_eq!(bench.prefill("r").to, None);
    bench.serve("r").await;
    bench.quiet();
}

#[tokio::test]
async fn kv_that_lands_before_the_prefill_is_reported_starts_the_decode_then() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.submit("r", 3).await;
    bench.do_handoff("r").await;
    assert_eq!(bench.decode("r").answer, None, "there is nothing to go on from yet");
    bench.do_prefill("r").await;
    assert!(bench.decode("r").answer.is_some());
    bench.serve("r").await;
    bench.quiet();
}

#[tokio::test]
async fn a_first_token_that_is_the_last_lets_both_legs_go() {
    for early in [false, true] {
        for names in [&["p0", "d0"][..], &["b0"]] {
            let mut bench = Bench::with(names).await;
            bench.submit("r", 2).await;
            let prefill = bench.prefill("r");
            if early && prefill.to.is_some() {
                bench.do_handoff("r").await;
            }
            bench.send_facts(&prefill, vec![token("r", 0, 1), prefilled()]).await;
            assert!(matches!(bench.client("r").last, Some(baton_router::Event::Finished { .. })));
            bench.open_legs.finished("r");
            bench.quiet();
            // A node that plays both parts needs no word.
            assert_eq!(bench.open_legs.releases, if names.len() == 2 { 2 } else { 0 });
        }
    }
}

#[tokio::test]
async fn a_prefill_that_draws_the_last_token_has_no_decode_leg() {
    let mut bench = Bench::with(&["p0", "p1", "d0"]).await;
    bench.submit("r", 1).await;
    let prefill = bench.prefill("r");
    assert_eq!((prefill.to.clone(), bench.legs("r").len()), (None, 1), "no KV has to move");
    bench.send_facts(&prefill, vec![token("r", 0, 2), prefilled()]).await;
    bench.ended_well("r");
    bench.open_legs.finished("r");
    bench.quiet();
    assert_eq!(bench.open_legs.releases, 0, "no leg needed a release");
    // The conductor retries a failed one elsewhere. If the client leaves, it releases the node that has the request.
    bench.submit("s", 1).await;
    let first = bench.prefill("s");
    bench.send_facts(&first, vec![super::bench::failure(false)]).await;
    let second = bench.prefill("s");
    assert_eq!((second.to.clone(), bench.legs("s").len()), (None, 1));
    bench.send_facts(&second, vec![token("s", 0, 2), prefilled()]).await;
    bench.ended_well("s");
    bench.open_legs.finished("s");
    bench.submit("t", 1).await;
    bench.leave("t").await;
    bench.quiet();
    // An answer that is resumed for its last token needs no pair either.
    bench.begin_decode("u", 3).await;
    bench.do_decode("u", 2).await;
    let decode = bench.legs("u").into_iter().find(|leg| leg.answer.is_some()).unwrap();
    bench.send_facts(&decode, vec![super::bench::failure(false)]).await;
    let last = bench.prefill("u");
    assert_eq!((last.to.clone(), last.given(), bench.legs("u").len()), (None, 2, 1));
    bench.send_facts(&last, vec![token("u", 2, 2), prefilled()]).await;
    bench.ended_well("u");
    bench.open_legs.finished("u");
    bench.quiet();
}

#[tokio::test]
async fn an_end_without_a_report_of_its_prefill_still_lets_both_legs_go() {
    type FactFunction = fn(&str) -> Fact;
    let thens: [FactFunction; 2] = [|_| super::bench::failure(false), |_| Fact::Handoff(false)];
    for then in thens {
        let mut bench = Bench::with(&["p0", "p1", "d0"]).await;
        bench.submit("r", 1).await;
        let prefill = bench.prefill("r");
        bench.send_facts(&prefill, vec![token("r", 0, 1)]).await;
        bench.send_facts(&prefill, vec![then("r")]).await;
        bench.ended_well("r");
        bench.quiet();
    }
    let mut bench = Bench::with(&["p0", "p1", "d0"]).await;
    for (name, how) in [("a", "silence"), ("b", "crash"), ("c", "peer")] {
        bench.submit(name, 1).await;
        let prefill = bench.prefill(name);
        bench.send_facts(&prefill, vec![token(name, 0, 1)]).await;
        match how {
            "silence" => bench.wait_alive_us(20_000_000, &[]).await,
            "crash" => bench.kill(&prefill.node).await,
            _ => bench.kill("d0").await,
        }
        bench.ended_well(name);
        bench.quiet();
    }
}

#[tokio::test]
async fn tokens_reach_the_client_once_and_in_order_from_any_node() {
    let mut bench = Bench::with(&["p0", "p1", "d0", "d1"]).await;
    bench.submit("r", 6).await;
    let prefill = bench.prefill("r");
    let about = (prefill.request, prefill.attempt);
    let told = |bench: &Bench| bench.client("r").tokens.len();
    // Before its turn, of another attempt, from a decode leg, from a stranger.
    bench.send_facts(&prefill, vec![fact_token(1, 7, 0)]).await;
    bench.send_facts_as(&prefill.node, (about.0, about.1 + 1), vec![fact_token(0, 7, 0)]).await;
    bench.send_facts_as(&prefill.node, (about.0, 0), vec![fact_token(0, 7, 2)]).await;
    bench.send_facts_as(&bench.decode("r").node, about, vec![fact_token(0, 7, 2)]).await;
    let stranger = if prefill.node == "p0" { "p1" } else { "p0" };
    bench.send_facts_as(stranger, about, vec![fact_token(0, 7, 2), prefilled()]).await;
    assert_eq!(told(&bench), 0);
    bench.do_prefill("r").await;
    // Again, and more than its one token.
    bench.send_facts(&prefill, vec![fact_token(0, 7, 0), fact_token(1, 7, 2), prefilled()]).await;
    assert_eq!(
        told(&bench),
        0,
        "the client has it with the second, and the hand-off is no gap in its answer"
    );
    bench.do_handoff("r").await;
    bench.do_handoff("r").await;
    let decode = bench.decode("r");
    bench.do_decode("r", 3).await;
    for wrong in [0, 2, 4, 5, u32::MAX] {
        bench.send_facts(&decode, vec![fact_token(wrong, 7, 2)]).await;
    }
    bench.send_facts_as(&prefill.node, (decode.request, decode.attempt), vec![fact_token(3, 7, 2)]).await;
    assert_eq!(told(&bench), 3);
    bench.serve("r").await;
    bench.send_facts(&decode, vec![token("r", 5, 2), token("r", 6, 2), super::bench::failure(false)]).await;
    bench.quiet();
}

#[tokio::test]
async fn reports_of_the_other_leg_are_not_believed() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.submit("r", 3).await;
    let (prefill, decode) = (bench.prefill("r"), bench.decode("r"));
    bench.send_facts(&decode, vec![prefilled()]).await;
    bench.send_facts(&prefill, vec![Fact::Handoff(true)]).await;
    bench.do_prefill("r").await;
    bench.send_facts(&prefill, vec![Fact::Handoff(true)]).await;
    assert_eq!(bench.decode("r").answer, None, "the decode leg has not said that its KV is there");
    bench.do_handoff("r").await;
    // The first leg has let go by now; what it says of failures comes too late.
    bench.send_facts(&prefill, vec![Fact::Handoff(false), super::bench::failure(true)]).await;
    bench.serve("r").await;
    bench.quiet();
    assert!(bench.total("stale_messages") >= 4);
}

#[tokio::test]
async fn logprobs_of_the_prompt_are_told_once_however_often_it_is_prefilled() {
    let mut bench = Bench::with(&["p0", "p1", "d0"]).await;
    let sampling =
        baton_types::Sampling { max_tokens: 2, prompt_logprobs: Some(1), ..baton_types::Sampling::default() };
    bench.send(Bench::submission("r", sampling)).await;
    for _ in 0..2 {
        let logprobs = Fact::PromptLogprobs(baton_wire::v1::PromptLogprobs::default());
        let prefill = bench.prefill("r");
        bench.send_facts(&prefill, vec![logprobs.clone(), logprobs]).await;
        if prefill.attempt == 1 {
            bench.send_facts(&prefill, vec![super::bench::failure(false)]).await;
        }
    }
    bench.serve("r").await;
    assert_eq!(bench.client("r").logprobs, 1);
    bench.quiet();
}
