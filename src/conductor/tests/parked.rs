//! Requests that were let in and fit nowhere right now: they wait, but not for ever.

use super::bench::{Bench, token};

#[tokio::test]
async fn a_request_that_lost_the_last_pair_goes_on_when_an_instance_joins() {
    for lost in ["p0", "d0"] {
        let mut bench = Bench::with(&["p0", "d0"]).await;
        bench.submit("r", 4).await;
        bench.do_prefill("r").await;
        if lost == "d0" {
            bench.do_handoff("r").await;
            bench.do_decode("r", 2).await;
        }
        let given = bench.drawn("r") as u32;
        bench.kill(lost).await;
        assert!(bench.legs("r").is_empty());
        let status = bench.status();
        assert_eq!((status.requests[0].stage.as_str(), status.counters["parked"]), ("queue", 1));
        bench.wait_alive_us(600_000, &[]).await;
        bench.join(lost).await;
        bench.wait_alive_us(200_000, &[]).await;
        assert_eq!(bench.prefill("r").given(), given);
        bench.serve("r").await;
        bench.drop_canaries().await;
        bench.quiet();
    }
}

#[tokio::test]
async fn a_request_that_waits_in_vain_hears_where() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.submit("r", 4).await;
    bench.do_prefill("r").await;
    bench.kill("p0").await;
    bench.wait_alive_us(2_800_000, &[]).await;
    assert_eq!(bench.client("r").last, None);
    bench.wait_alive_us(400_000, &[]).await;
    let (status, stage, message) = bench.client("r").trouble();
    assert_eq!((status, stage.as_str()), (503, "no_instance"));
    assert!(message.contains("pair"), "{message}");
    bench.quiet();
}

/// The last decode instance is gone: who is under way and who comes new wait for it alike, and are refused alike.
#[tokio::test]
async fn when_the_last_pair_is_gone_all_wait_for_it_alike_and_not_for_long() {
    for back in [true, false] {
        let mut bench = Bench::tuned(&["p0", "d0"], |c| c.scheduler.classes[0].ttft_us = 60_000_000).await;
        bench.submit("under way", 4).await;
        bench.do_prefill("under way").await;
        bench.submit("prefills", 4).await;
        bench.kill("d0").await;
        bench.submit("new", 4).await;
        assert!(!bench.client("new").admitted, "nobody is promised anything");
        bench.wait_alive_us(4_800_000, &[]).await;
        for name in ["under way", "prefills", "new"] {
            assert_eq!(bench.client(name).last, None, "{name} waits");
        }
        if back {
            bench.join("d0").await;
            bench.wait_alive_us(200_000, &[]).await;
            for name in ["under way", "prefills", "new"] {
                bench.serve(name).await;
            }
            bench.drop_canaries().await;
            bench.quiet();
            continue;
        }
        bench.wait_alive_us(600_000, &[]).await;
        for name in ["under way", "prefills", "new"] {
            let (status, reason, _) = bench.client(name).trouble();
            assert_eq!((status, reason.as_str()), (503, "no_instance"), "{name}");
        }
        // From now on there is nothing to wait for.
        bench.submit("later", 4).await;
        let (status, reason, _) = bench.client("later").trouble();
        assert_eq!((status, reason.as_str()), (503, "no_instance"));
        bench.quiet();
    }
}

/// A drained node does not return by itself, so no request waits for it.
#[tokio::test]
async fn nobody_waits_for_a_pair_that_was_drained() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    let (reply, _answer) = tokio::sync::oneshot::channel();
    let drain = crate::conductor::Question::Drain { node: "d0".into(), drain: true, reply };
    bench.inbox.send(crate::conductor::Message::Ask(drain)).await;
    bench.pump().await;
    bench.submit("r", 4).await;
    let (status, reason, _) = bench.client("r").trouble();
    assert_eq!((status, reason.as_str()), (503, "no_instance"));
    bench.quiet();
}

/// A request that was admitted and held back has cost no node anything: it waits like the others.
#[tokio::test]
async fn a_request_that_was_held_back_when_the_pair_was_lost_waits_too() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    for name in ["a", "b"] {
        let sampling = baton_types::Sampling { max_tokens: 2, ..baton_types::Sampling::default() };
        let mut long = Bench::submission(name, sampling);
        long.tokens = (0..50_000).collect();
        bench.send(long).await;
    }
    assert!(bench.legs("b").is_empty() && bench.client("b").admitted);
    bench.kill("p0").await;
    assert_eq!(bench.client("b").last, None);
    bench.join("p0").await;
    bench.wait_alive_us(200_000, &[]).await;
    for name in ["a", "b"] {
        bench.wait_alive_us(600_000, &[]).await;
        bench.serve(name).await;
    }
    bench.drop_canaries().await;
    bench.quiet();
}

#[tokio::test]
async fn a_client_may_leave_while_its_request_is_parked() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.submit("r", 4).await;
    bench.kill("d0").await;
    let released = bench.open_legs.releases;
    assert_eq!(released, 1, "the leg that is left was let go");
    bench.leave("r").await;
    bench.join("d0").await;
    bench.drop_canaries().await;
    bench.quiet();
    assert_eq!(bench.legs("r").len(), 0);
}

/// A node that dies again and again does not keep a request for ever.
#[tokio::test]
async fn a_request_is_not_tried_without_end() {
    let mut bench = Bench::with(&["p0", "p1", "d0"]).await;
    bench.submit("r", 40).await;
    let mut kills = 0;
    while bench.client("r").last.is_none() {
        let victim = bench.prefill("r");
        bench.send_facts(&victim, vec![token("r", victim.given(), 0)]).await;
        bench.kill(&victim.node).await;
        bench.join(&victim.node).await;
        bench.wait_alive_us(100_000, &[]).await;
        kills += 1;
        assert!(kills < 40, "tried without end");
    }
    let (status, stage, _) = bench.client("r").trouble();
    assert_eq!((status, stage.as_str(), kills), (502, "engine_died", 2));
    bench.drop_canaries().await;
    bench.quiet();
}
