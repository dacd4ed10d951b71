//! The conductor itself is away for a while: nobody is given up for that.

use baton_types::Sampling;

use super::bench::{Bench, token};

#[tokio::test]
async fn a_pause_of_the_conductor_loses_no_node_and_no_request() {
    for pause_us in [1_500_000, 3_000_000, 10_000_000, 300_000_000] {
        let mut bench = Bench::with(&["p0", "d0"]).await;
        bench.begin_decode("decodes", 4).await;
        bench.do_decode("decodes", 2).await;
        bench.submit("hands off", 4).await;
        bench.do_prefill("hands off").await;
        bench.submit("prefills", 4).await;
        bench.wait_alive_us(200_000, &[]).await;
        bench.pause_us(pause_us).await;
        let lives: Vec<_> = bench.status().nodes.iter().map(|n| (n.name.clone(), n.epoch)).collect();
        assert_eq!(lives, [("p0".to_owned(), 1), ("d0".to_owned(), 1)], "after {pause_us} µs");
        // The remaining time of each stage is unchanged by the pause.
        bench.wait_alive_us(400_000, &[]).await;
        for name in ["decodes", "hands off", "prefills"] {
            assert_eq!(bench.client(name).last, None, "{name} after {pause_us} µs");
            bench.serve(name).await;
        }
        bench.quiet();
    }
}

/// A pause in the middle of a turn is one as well.
#[tokio::test]
async fn a_turn_that_takes_seconds_loses_nobody() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.submit("r", 4).await;
    bench.stall_in_a_turn_us(5_000_000).await;
    assert_eq!(bench.status().nodes.len(), 2);
    bench.serve("r").await;
    bench.quiet();
}

/// A node that is silent after the pause is dropped as usual, and a stage that makes no progress ends.
#[tokio::test]
async fn after_a_pause_time_counts_again() {
    let mut bench = Bench::with(&["p0", "d0", "d1"]).await;
    bench.submit("r", 4).await;
    bench.pause_us(10_000_000).await;
    bench.wait_alive_us(800_000, &["d1"]).await;
    assert_eq!(bench.status().nodes.len(), 3);
    bench.wait_alive_us(400_000, &["d1"]).await;
    assert_eq!(bench.status().nodes.len(), 2, "d1 was silent for its whole time");
    let attempt = bench.prefill("r").attempt;
    bench.wait_alive_us(2_000_000, &[]).await;
    let again = bench.legs("r").iter().any(|leg| leg.attempt > attempt);
    assert!(again || bench.client("r").last.is_some(), "its prefill was given up");
}

/// A client's own limit is of its own time.
#[tokio::test]
async fn a_clients_time_limit_does_not_stop_with_the_conductor() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    let mut hurried = Bench::submission("r", Sampling { max_tokens: 4, ..Sampling::default() });
    hurried.timeout_us = Some(2_000_000);
    bench.send(hurried).await;
    bench.pause_us(3_000_000).await;
    let (status, ..) = bench.client("r").trouble();
    assert_eq!(status, 504);
    bench.quiet();
}

/// The conductor reads the messages of the pause before it treats any node as silent.
#[tokio::test]
async fn what_was_said_in_a_pause_is_heard_first() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.begin_decode("r", 3).await;
    let leg = bench.legs("r").into_iter().find(|leg| leg.answer.is_some()).unwrap();
    bench.say_in_a_pause(&leg, vec![token("r", 1, 0), token("r", 2, 2)], 5_000_000).await;
    bench.ended_well("r");
    bench.quiet();
}
