//! Failures: of a leg, of a node, of a hand-off, and of a client's time limit.

use baton_router::Submission;
use baton_scheduler::AdmissionMode;
use baton_types::{BlockKey, ChainHasher, Sampling};
use baton_wire::v1;
use baton_wire::v1::fact::Fact;

use super::bench::{Bench, PROMPT, fact_token, failure, prefilled, token};

#[tokio::test]
async fn a_hand_off_that_fails_goes_to_another_decode_instance() {
    for teller in ["prefill", "decode"] {
        let mut bench = Bench::with(&["p0", "d0", "d1"]).await;
        bench.submit("r", 3).await;
        let (prefill, old) = (bench.prefill("r"), bench.decode("r"));
        bench.do_prefill("r").await;
        let leg = if teller == "prefill" { &prefill } else { &old };
        bench.send_facts(leg, vec![Fact::Handoff(false)]).await;
        let new = bench.decode("r");
        assert_ne!(new.node, old.node);
        assert_eq!(new.attempt, prefill.attempt + 1);
        assert_eq!(new.work.token_count, PROMPT, "what was prefilled, not what was drawn since");
        let again = bench.prefill("r");
        assert_eq!((again.handoffs, again.attempt), (1, new.attempt));
        assert_eq!(again.to.unwrap().instance, bench.lines[&new.node].life.instance);
        // The conductor ignores the instance that it released.
        bench.send_facts(&old, vec![Fact::Handoff(true)]).await;
        bench.send_facts_as(&old.node, (new.request, new.attempt), vec![Fact::Handoff(true)]).await;
        assert_eq!(bench.decode("r").answer, None);
        bench.serve("r").await;
        bench.quiet();
        assert_eq!(bench.open_legs.releases, 1);
    }
}

#[tokio::test]
async fn a_prefill_instance_that_has_the_kv_no_more_is_replaced() {
    let mut bench = Bench::with(&["p0", "p1", "d0", "d1"]).await;
    bench.submit("r", 3).await;
    bench.do_prefill("r").await;
    let old = bench.prefill("r");
    bench.send_facts(&old, vec![Fact::Handoff(false)]).await;
    let asked = bench.prefill("r");
    bench.send_facts(&asked, vec![failure(false)]).await;
    let new = bench.prefill("r");
    assert_ne!(new.node, old.node);
    assert_eq!(new.given(), 1, "what the client has is not drawn again");
    bench.serve("r").await;
    bench.quiet();
}

#[tokio::test]
async fn a_prefill_that_fails_is_done_elsewhere() {
    let mut bench = Bench::with(&["p0", "p1", "d0"]).await;
    bench.submit("r", 3).await;
    let old = bench.prefill("r");
    bench.send_facts(&old, vec![failure(false)]).await;
    let new = bench.prefill("r");
    assert_ne!(new.node, old.node);
    bench.send_facts(&old, vec![fact_token(0, 7, 0), prefilled()]).await;
    bench.serve("r").await;
    bench.quiet();
}

#[tokio::test]
async fn a_decode_that_fails_goes_on_elsewhere_with_what_the_client_has() {
    let mut bench = Bench::with(&["p0", "d0", "d1"]).await;
    bench.begin_decode("r", 5).await;
    bench.do_decode("r", 3).await;
    let old = bench.decode("r");
    bench.send_facts(&old, vec![failure(false)]).await;
    let new = bench.decode("r");
    assert_ne!(new.node, old.node);
    assert_eq!((new.given(), bench.prefill("r").given()), (3, 3));
    bench.send_facts(&old, vec![token("r", 3, 0), token("r", 4, 2)]).await;
    assert_eq!(bench.client("r").tokens.len(), 3);
    bench.serve("r").await;
    assert!(
        matches!(&bench.client("r").last, Some(baton_router::Event::Finished { usage, .. }) if usage.moves == 1)
    );
    bench.quiet();
}

/// It was retried until it failed: no node goes on from all the tokens.
#[tokio::test]
async fn an_answer_that_breaks_off_after_its_last_token_is_whole() {
    for loss in ["leg", "engine", "node"] {
        let mut bench = Bench::with(&["p0", "d0", "d1"]).await;
        bench.begin_decode("r", 3).await;
        let leg = bench.decode("r");
        bench.send_facts(&leg, vec![token("r", 1, 0), token("r", 2, 0)]).await;
        match loss {
            "leg" => bench.send_facts(&leg, vec![failure(false)]).await,
            "engine" => bench.send_facts(&leg, vec![super::suspects::broke(true, true)]).await,
            _ => bench.kill(&leg.node).await,
        }
        bench.ended_well("r");
        assert_eq!(bench.lines.contains_key(&leg.node), loss == "leg", "{loss}");
        bench.drop_canaries().await;
        bench.quiet();
    }
}

/// It was sent on until it failed for that, and its error did not say what had broken.
#[tokio::test]
async fn an_answer_that_no_node_goes_on_with_fails_at_once_with_what_broke() {
    let mut bench = Bench::with(&["p0", "d0", "d1"]).await;
    bench.begin_decode("r", 5).await;
    let decode = bench.decode("r");
    bench.send_facts(&decode, vec![failure(false)]).await;
    let again = bench.prefill("r");
    let cannot =
        v1::Failure { message: "it has penalties".into(), cannot_go_on: true, ..v1::Failure::default() };
    bench.send_facts(&again, vec![Fact::Failure(cannot)]).await;
    let (status, stage, message) = bench.client("r").trouble();
    assert_eq!((status, stage.as_str()), (502, "decode_failed"));
    assert!(message.contains("it broke; it has penalties"), "{message}");
    bench.drop_canaries().await;
    bench.quiet();
}

#[tokio::test]
async fn the_blocks_of_an_answer_that_goes_on_are_named_after_those_of_its_prompt() {
    let mut bench = Bench::with(&["p0", "d0", "d1"]).await;
    bench.begin_decode("r", 12).await;
    bench.do_decode("r", 8).await;
    let old = bench.decode("r");
    bench.send_facts(&old, vec![failure(false)]).await;
    let mut tokens: Vec<u32> = (0..PROMPT).map(|at| at + 3).collect();
    tokens.extend(&bench.client("r").tokens);
    let (seed, block_tokens) = bench.driver.naming();
    let mut hasher = ChainHasher::resume(seed, BlockKey::default());
    let blocks = tokens.chunks_exact(block_tokens as usize);
    let named: Vec<BlockKey> = blocks.map(|block| hasher.push_tokens(block)).collect();
    let new = bench.decode("r");
    assert_eq!((new.given(), named.len()), (8, 3), "two blocks of the prompt, one of both");
    assert_eq!(baton_wire::unpack_keys(&new.work.chain), named);
    bench.serve("r").await;
    bench.quiet();
}

#[tokio::test]
async fn an_answer_that_outgrew_every_instance_fails_at_once_and_says_so() {
    let mut bench = Bench::new(super::bench::config());
    for (name, role) in [("p0", "prefill"), ("d0", "decode")] {
        let small = v1::Hello { capacity_tokens: 64, ..super::bench::hello(name, role) };
        bench.send_hello(small).await.unwrap();
    }
    bench.drop_canaries().await;
    // So many that what fits is not all of its answer.
    let sampling = Sampling { max_tokens: 60, min_tokens: 64 - PROMPT + 2, ..Sampling::default() };
    bench.send(Bench::submission("r", sampling)).await;
    bench.do_prefill("r").await;
    bench.do_handoff("r").await;
    bench.do_decode("r", 64 - PROMPT + 1).await;
    let decode = bench.decode("r");
    bench.send_facts(&decode, vec![failure(false)]).await;
    let (status, reason, message) = bench.client("r").trouble();
    assert_eq!((status, reason.as_str()), (503, "too_long"));
    assert!(message.contains(&format!("{PROMPT} tokens and its answer 25 by now")), "{message}");
    bench.quiet();
}

#[tokio::test]
async fn failures_of_the_request_itself_are_answered_at_once() {
    for stage in ["prefill", "expect", "decode"] {
        let mut bench = Bench::with(&["p0", "p1", "d0", "d1"]).await;
        bench.submit("r", 3).await;
        let mut leg = if stage == "prefill" { bench.prefill("r") } else { bench.decode("r") };
        if stage == "decode" {
            bench.do_prefill("r").await;
            bench.do_handoff("r").await;
            leg = bench.decode("r");
        }
        bench.send_facts(&leg, vec![failure(true)]).await;
        let (status, named, message) = bench.client("r").trouble();
        assert_eq!((status, named.as_str(), message.as_str()), (400, "engine", "it broke"));
        bench.quiet();
    }
}

#[tokio::test]
async fn a_client_gets_the_status_with_which_its_engine_refused_it() {
    // A node of an earlier version names none, and a status of the engine's own failures is not the client's.
    for (named, answered) in [(422, 422), (413, 413), (0, 400), (502, 400), (70_000, 400)] {
        let mut bench = Bench::with(&["p0", "d0"]).await;
        bench.submit("r", 3).await;
        let leg = bench.prefill("r");
        let Fact::Failure(refused) = failure(true) else { panic!("no failure") };
        let refused = v1::Failure { status: named, ..refused };
        bench.send_facts(&leg, vec![Fact::Failure(refused)]).await;
        assert_eq!(bench.client("r").trouble().0, answered, "{named}");
        bench.quiet();
    }
}

#[tokio::test]
async fn tries_have_an_end_and_it_is_named() {
    let mut bench = Bench::with(&["p0", "p1", "d0", "d1"]).await;
    bench.submit("r", 3).await;
    for _ in 0..3 {
        let leg = bench.prefill("r");
        bench.send_facts(&leg, vec![failure(false)]).await;
    }
    let (status, stage, message) = bench.client("r").trouble();
    assert_eq!((status, stage.as_str()), (502, "prefill_failed"));
    assert!(message.contains("engine on p") && message.contains("it broke"), "{message}");
    bench.quiet();
}

#[tokio::test]
async fn each_stage_has_a_time_and_its_end_is_named() {
    for (stage, word, named) in [
        ("prefill", "prefill_timeout", "prefill_failed"),
        ("handoff", "handoff_timeout", "handoff_failed"),
        ("decode", "decode_timeout", "decode_failed"),
    ] {
        let mut bench = Bench::tuned(&["p0", "d0"], |c| c.scheduler.max_retries = 0).await;
        bench.submit("r", 4).await;
        if stage != "prefill" {
            bench.do_prefill("r").await;
        }
        if stage == "decode" {
            bench.do_handoff("r").await;
            bench.do_decode("r", 2).await;
        }
        bench.wait_alive_us(900_000, &[]).await;
        assert_eq!(bench.client("r").last, None, "{stage}: too early");
        bench.wait_alive_us(19_000_000, &[]).await;
        let (status, told, message) = bench.client("r").trouble();
        assert_eq!((status, told.as_str()), (502, named));
        assert!(message.contains(word), "{message}");
        bench.quiet();
    }
}

#[tokio::test]
async fn who_waits_behind_others_is_late_only_when_they_stand_still_too() {
    let mut bench = Bench::tuned(&["p0", "d0"], |c| c.scheduler.max_retries = 0).await;
    bench.submit("r", 4).await;
    bench.do_prefill("r").await;
    for other in ["a", "b", "c"] {
        bench.submit(other, 2).await;
        bench.do_prefill(other).await;
        // Longer than the stage's time of 1 s, all in all; shorter between two that get on.
        bench.wait_alive_us(900_000, &[]).await;
        bench.do_handoff(other).await;
        bench.serve(other).await;
    }
    assert_eq!(bench.client("r").last, None, "its instances got on");
    bench.wait_alive_us(2_200_000, &[]).await;
    let (status, told, message) = bench.client("r").trouble();
    assert_eq!((status, told.as_str()), (502, "handoff_failed"));
    assert!(message.contains("handoff_timeout"), "{message}");
    bench.quiet();
}

#[tokio::test]
async fn a_stage_whose_time_ran_out_is_tried_elsewhere() {
    let mut bench = Bench::with(&["p0", "p1", "d0", "d1"]).await;
    bench.submit("r", 4).await;
    let first = bench.prefill("r");
    bench.wait_alive_us(1_200_000, &[]).await;
    let second = bench.prefill("r");
    assert_ne!(first.node, second.node);
    bench.do_prefill("r").await;
    bench.do_handoff("r").await;
    let decode = bench.decode("r");
    bench.wait_alive_us(4_200_000, &[]).await;
    assert_ne!(bench.decode("r").node, decode.node);
    bench.serve("r").await;
    bench.quiet();
}

/// A prompt of so many tokens, and an answer of two.
fn long(name: &str, tokens: u32) -> Submission {
    let sampling = Sampling { max_tokens: 2, ..Sampling::default() };
    Submission { tokens: (0..tokens).collect(), ..Bench::submission(name, sampling) }
}

/// A prompt that is computed at once, for longer than the shortest time of a stage: it was taken away from its
/// instance in the middle and begun again elsewhere.
#[tokio::test]
async fn a_long_prefill_is_given_the_time_that_it_was_foreseen_to_take() {
    for ttft_us in [2_000_000, 1_000] {
        let mut bench = Bench::tuned(&["p0", "p1", "d0"], |config| {
            config.scheduler.admission = AdmissionMode::None;
            config.scheduler.classes[0].ttft_us = ttft_us;
            config.service.stage_floor_us = 100_000;
        })
        .await;
        // Half a second, by the profile.
        bench.send(long("r", 50_000)).await;
        let first = bench.prefill("r");
        bench.wait_alive_us(900_000, &[]).await;
        let still = bench.prefill("r");
        assert_eq!((&still.node, still.attempt), (&first.node, first.attempt), "objective {ttft_us} us");
        bench.wait_alive_us(1_400_000, &[]).await;
        assert_ne!(bench.prefill("r").attempt, first.attempt, "its time is bounded all the same");
    }
}

#[tokio::test]
async fn a_long_prefill_that_waited_for_its_instance_is_given_its_time_too() {
    let mut bench = Bench::tuned(&["p0", "d0"], |config| {
        config.service.stage_floor_us = 100_000;
    })
    .await;
    for name in ["a", "b"] {
        // 0.25 s each, by the profile.
        bench.send(long(name, 25_000)).await;
    }
    let ordered = |bench: &Bench, name: &str| {
        let mut open = bench.open_legs.open.values();
        open.any(|leg| leg.name == name && leg.prefills)
    };
    assert!(ordered(&bench, "a") && !ordered(&bench, "b"), "the instance is given one at a time");
    // Decisions about others push that about it out of mind.
    for n in 0..12 {
        bench.submit(&format!("small-{n}"), 1).await;
    }
    bench.wait_alive_us(240_000, &[]).await;
    bench.do_prefill("a").await;
    // Short ones go first, and then it is its turn.
    for n in 0..12 {
        bench.do_prefill(&format!("small-{n}")).await;
    }
    let first = bench.prefill("b");
    bench.wait_alive_us(400_000, &[]).await;
    assert_eq!(bench.prefill("b").attempt, first.attempt);
}

#[tokio::test]
async fn tokens_that_keep_coming_keep_a_decode_alive() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.begin_decode("r", 12).await;
    for upto in 2..12 {
        bench.wait_alive_us(3_500_000, &[]).await;
        bench.do_decode("r", upto).await;
    }
    bench.serve("r").await;
    bench.quiet();
}

#[tokio::test]
async fn a_clients_time_limit_ends_what_has_no_token_flowing() {
    let mut bench = Bench::with(&["p0", "p1", "d0"]).await;
    let mut submission = Bench::submission("r", Sampling::default());
    submission.timeout_us = Some(300_000);
    bench.send(submission).await;
    bench.wait_alive_us(400_000, &[]).await;
    let (status, stage, message) = bench.client("r").trouble();
    assert_eq!((status, stage.as_str()), (504, "prefill_timeout"));
    assert!(message.contains("the client's time"), "{message}");
    bench.quiet();
}

#[tokio::test]
async fn a_node_that_falls_silent_is_lost_and_not_believed_any_more() {
    let mut bench = Bench::with(&["p0", "d0", "d1"]).await;
    bench.begin_decode("r", 5).await;
    bench.do_decode("r", 2).await;
    let old = bench.decode("r");
    let dead = bench.lines[&old.node].life.clone();
    bench.wait_alive_us(1_200_000, &[old.node.as_str()]).await;
    assert!(!bench.lines.contains_key(&old.node), "its stream is ended");
    assert_eq!(bench.status().nodes.len(), 2);
    bench.send_facts_in(&dead, (old.request, old.attempt), vec![token("r", 2, 0)]).await;
    assert_eq!(bench.client("r").tokens.len(), 2);
    let new = bench.decode("r");
    assert_ne!(new.node, old.node);
    // It comes back: another life, in which the former one has no say.
    bench.join(&old.node).await;
    bench.send_facts_in(&dead, (new.request, new.attempt), vec![fact_token(2, 7, 2)]).await;
    bench.serve("r").await;
    bench.quiet();
}

#[tokio::test]
async fn a_crash_at_any_stage_costs_no_token() {
    for victim in ["prefill", "decode"] {
        for stage in 0..4u32 {
            let mut bench = Bench::with(&["p0", "p1", "d0", "d1"]).await;
            bench.submit("r", 6).await;
            let legs = (bench.prefill("r").node, bench.decode("r").node);
            if stage > 0 {
                bench.do_prefill("r").await;
            }
            if stage > 1 {
                bench.do_handoff("r").await;
                bench.do_decode("r", stage).await;
            }
            let crashed = if victim == "prefill" { legs.0 } else { legs.1 };
            bench.kill(&crashed).await;
            assert!(bench.legs("r").iter().all(|leg| leg.node != crashed));
            bench.serve("r").await;
            bench.quiet();
        }
    }
}

#[tokio::test]
async fn a_node_that_does_not_take_its_orders_is_lost() {
    let mut bench = Bench::with(&["p0", "p1", "d0"]).await;
    bench.submit("a", 2).await;
    let stuck = bench.prefill("a").node;
    // No node reads the orders any longer.
    let line = bench.lines.remove(&stuck).unwrap();
    bench.open_legs.lost(&stuck);
    drop(line);
    bench.leave("a").await;
    bench.submit("b", 2).await;
    bench.pump().await;
    assert_ne!(bench.prefill("b").node, stuck);
    bench.serve("b").await;
    bench.quiet();
}

#[tokio::test]
async fn a_policy_that_looks_again_after_the_prefill_refuses_once() {
    for max_tokens in [1, 4] {
        let mut bench = Bench::tuned(&["p0", "d0"], |config| {
            config.scheduler.policy = baton_scheduler::PolicyName::Mooncake;
            config.scheduler.admission = baton_scheduler::AdmissionMode::AtDecode;
        })
        .await;
        bench.submit("r", max_tokens).await;
        // Its objective becomes one that no step meets while it prefills.
        let mut strict = bench.driver.config.clone();
        strict.scheduler.classes[0].tbt_us = 100;
        let (reply, _answer) = tokio::sync::oneshot::channel();
        bench
            .inbox
            .send(crate::conductor::inbox::Message::Ask(crate::conductor::Question::Policy(
                Box::new(crate::conductor::PolicyChange::confirmed(strict)),
                reply,
            )))
            .await;
        bench.pump().await;
        let leg = bench.prefill("r");
        bench.send_facts(&leg, vec![token("r", 0, i32::from(max_tokens == 1)), prefilled()]).await;
        if max_tokens == 1 {
            bench.ended_well("r");
        } else {
            let (status, stage, _) = bench.client("r").trouble();
            assert_eq!((status, stage.as_str()), (503, "tbt"));
        }
        bench.quiet();
    }
}

#[tokio::test]
async fn a_leg_that_was_let_go_has_no_say_while_its_request_is_held_back() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.submit("r", 3).await;
    let old = bench.prefill("r");
    // Meanwhile the only prefill instance is given so much that nothing more is sent to it.
    let sampling = baton_types::Sampling { max_tokens: 2, ..Sampling::default() };
    let mut long = Bench::submission("long", sampling);
    long.tokens = (0..60_000).collect();
    bench.send(long).await;
    assert!(!bench.legs("long").is_empty());
    bench.send_facts(&old, vec![failure(false)]).await;
    assert!(bench.legs("r").is_empty());
    assert_eq!(bench.status().requests[0].stage, "queue");
    bench.send_facts(&old, vec![fact_token(0, 7, 0), prefilled()]).await;
    assert!(bench.client("r").tokens.is_empty());
    assert_eq!(bench.status().requests[0].stage, "queue");
    bench.serve("long").await;
    bench.serve("r").await;
    bench.quiet();
}

/// A decode instance has died and the conductor has not heard of it yet: its peers have.
#[tokio::test]
async fn hand_offs_to_an_instance_that_is_dying_leave_time_to_notice() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.submit("r", 3).await;
    bench.do_prefill("r").await;
    for attempt in 1..=2 {
        let leg = bench.prefill("r");
        assert_eq!(leg.attempt, attempt);
        bench.send_facts(&leg, vec![Fact::Handoff(false)]).await;
        let decode = bench.decode("r");
        bench.send_facts(&decode, vec![Fact::Handoff(false)]).await;
    }
    assert_eq!((bench.prefill("r").attempt, bench.client("r").last.is_none()), (2, true));
    bench.kill("d0").await;
    bench.wait_alive_us(500_000, &[]).await;
    bench.join("d0").await;
    bench.wait_alive_us(200_000, &[]).await;
    bench.serve("r").await;
    bench.drop_canaries().await;
    bench.quiet();

    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.submit("r", 3).await;
    bench.do_prefill("r").await;
    for _ in 0..3 {
        let leg = bench.prefill("r");
        bench.send_facts(&leg, vec![Fact::Handoff(false)]).await;
        bench.wait_alive_us(300_000, &[]).await;
    }
    let (status, stage, _) = bench.client("r").trouble();
    assert_eq!((status, stage.as_str()), (502, "handoff_failed"), "one that lives is not tried for ever");
    bench.quiet();
}

/// One of two prefill instances fails whatever it is given: its clients do not notice.
#[tokio::test]
async fn a_prefill_instance_that_fails_everything_costs_no_client_anything() {
    let mut bench = Bench::with(&["p0", "p1", "d0", "d1"]).await;
    let mut failed = 0;
    for at in 0..100 {
        let name = format!("r{at}");
        bench.submit(&name, 3).await;
        while bench.prefill(&name).node == "p0" {
            let leg = bench.prefill(&name);
            bench.send_facts(&leg, vec![failure(false)]).await;
            failed += 1;
        }
        bench.serve(&name).await;
    }
    assert!(failed > 0, "nothing was ever sent to the one that fails");
    bench.quiet();
}
