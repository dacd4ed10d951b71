//! Requests that were in an engine when it died.

use baton_wire::v1;

use super::bench::Bench;

/// The node that a request's prefill was given to.
fn at(bench: &Bench, name: &str) -> Option<String> {
    bench.legs(name).into_iter().find(|leg| leg.prefills).map(|leg| leg.node)
}

#[tokio::test]
async fn a_poisonous_request_takes_two_engines_and_is_failed_by_name() {
    let nodes = ["b0", "b1", "b2", "b3"];
    let mut bench = Bench::with(&nodes).await;
    bench.submit("poison", 4).await;
    let mut killed = Vec::new();
    while let Some(victim) = at(&bench, "poison") {
        bench.kill(&victim).await;
        killed.push(victim);
    }
    assert_eq!(killed.len(), 2, "{killed:?}");
    let (status, stage, message) = bench.client("poison").trouble();
    assert_eq!((status, stage.as_str()), (502, "engine_died"));
    assert!(message.contains("two engines") && !message.contains("b0"), "{message}");
    bench.quiet();
}

#[tokio::test]
async fn one_poisonous_request_among_others_costs_the_others_nothing() {
    let mut bench = Bench::with(&["b0", "b1", "b2"]).await;
    let names: Vec<String> = (0..9).map(|at| format!("r{at}")).collect();
    for name in &names {
        bench.submit(name, 3).await;
    }
    let poison = "r4";
    let (mut kills, mut rounds) = (0, 0);
    while names.iter().any(|name| bench.client(name).last.is_none()) {
        rounds += 1;
        assert!(rounds < 100, "somebody is never served");
        if let Some(victim) = at(&bench, poison) {
            bench.kill(&victim).await;
            kills += 1;
        }
        for name in &names {
            if name != poison && at(&bench, name).is_some() {
                bench.serve(name).await;
            }
        }
        bench.wait_alive_us(100_000, &[]).await;
    }
    assert_eq!(kills, 2, "a third engine lives");
    for name in names.iter().filter(|name| *name != poison) {
        bench.ended_well(name);
    }
    let (status, stage, _) = bench.client(poison).trouble();
    assert_eq!((status, stage.as_str()), (502, "engine_died"));
    bench.drop_canaries().await;
    bench.quiet();
}

/// As many as there are instances are tried at a time, and the next one as soon as a token has come.
#[tokio::test]
async fn who_was_in_an_engine_that_died_is_tried_in_turn() {
    let mut bench = Bench::with(&["b0"]).await;
    let names = ["a", "b", "c"];
    for name in names {
        bench.submit(name, 3).await;
        assert!(at(&bench, name).is_some());
    }
    bench.kill("b0").await;
    bench.join("b0").await;
    bench.wait_alive_us(200_000, &[]).await;
    bench.drop_canaries().await;
    for done in 0..names.len() {
        let tried: Vec<&str> = names.into_iter().filter(|name| at(&bench, name).is_some()).collect();
        assert_eq!(tried, [names[done]], "one at a time");
        bench.serve(names[done]).await;
    }
    bench.quiet();
}

/// Its own trial is over, and it draws tokens where another one is tried: that engine's death is the other's doing. It is
/// spared once, so that one which always draws a token before it kills is found all the same.
#[tokio::test]
async fn who_is_past_its_trial_is_spared_the_death_of_another_once() {
    let mut bench = Bench::with(&["b0"]).await;
    for name in ["beside", "one", "other"] {
        bench.submit(name, 5).await;
    }
    bench.kill("b0").await;
    for (node, tried) in [("b1", "one"), ("b2", "other")] {
        assert!(bench.client("beside").last.is_none(), "it is spared once");
        bench.join(node).await;
        bench.wait_alive_us(200_000, &[]).await;
        bench.drop_canaries().await;
        bench.do_prefill("beside").await;
        bench.wait_alive_us(200_000, &[]).await;
        assert!(at(&bench, tried).is_some(), "it is tried beside the one that has drawn a token");
        bench.kill(node).await;
        let (status, stage, _) = bench.client(tried).trouble();
        assert_eq!((status, stage.as_str()), (502, "engine_died"));
    }
    let (status, stage, _) = bench.client("beside").trouble();
    assert_eq!((status, stage.as_str()), (502, "engine_died"));
    bench.quiet();
}

/// A crash in which a decode is moved on keeps what the client has.
#[tokio::test]
async fn a_decode_whose_engine_died_goes_on_once() {
    let mut bench = Bench::with(&["p0", "d0", "d1", "d2"]).await;
    bench.begin_decode("r", 6).await;
    bench.do_decode("r", 3).await;
    let first = bench.legs("r").into_iter().find(|leg| leg.answer.is_some()).unwrap();
    bench.kill(&first.node).await;
    bench.do_prefill("r").await;
    bench.do_handoff("r").await;
    assert_eq!((bench.client("r").tokens.len(), bench.drawn("r")), (3, 4));
    let second = bench.legs("r").into_iter().find(|leg| leg.answer.is_some()).unwrap();
    bench.kill(&second.node).await;
    let (status, stage, _) = bench.client("r").trouble();
    assert_eq!((status, stage.as_str()), (502, "engine_died"));
    bench.quiet();
}

/// A node that leaves in order is not taken for one that died of its work.
#[tokio::test]
async fn nodes_that_leave_in_order_condemn_nobody() {
    let mut bench = Bench::with(&["b0", "b1", "b2", "b3"]).await;
    bench.submit("r", 4).await;
    for _ in 0..2 {
        let node = at(&bench, "r").expect("it is moved at once");
        bench.let_leave(&node).await;
    }
    bench.serve("r").await;
    bench.drop_canaries().await;
    bench.quiet();
}

pub(super) fn broke(cut_off: bool, engine_gone: bool) -> v1::fact::Fact {
    let (stage, message) = (v1::failure::Stage::Engine.into(), "the connection broke".into());
    v1::fact::Fact::Failure(v1::Failure { stage, message, cut_off, engine_gone, ..v1::Failure::default() })
}

/// The engine of a node dies, not the node: its node is out at once, and so is a request in a second one.
#[tokio::test]
async fn a_node_whose_engine_is_gone_is_out_at_once() {
    let mut bench = Bench::with(&["b0", "b1", "b2"]).await;
    bench.submit("poison", 4).await;
    bench.submit("beside", 4).await;
    for round in 1..=2 {
        let leg = bench.prefill("poison");
        bench.send_facts(&leg, vec![broke(true, true)]).await;
        assert!(!bench.lines.contains_key(&leg.node), "nobody is sent there any more");
        assert_eq!(bench.status().nodes.len(), 3 - round);
    }
    let (status, stage, _) = bench.client("poison").trouble();
    assert_eq!((status, stage.as_str()), (502, "engine_died"));
    bench.wait_alive_us(200_000, &[]).await;
    bench.serve("beside").await;
    bench.drop_canaries().await;
    bench.quiet();
}

/// A request that an engine never took is not suspected of its end, however often that happens.
#[tokio::test]
async fn who_never_reached_an_engine_is_not_suspected() {
    let mut bench = Bench::with(&["b0", "b1", "b2", "b3"]).await;
    bench.submit("r", 4).await;
    for _ in 0..3 {
        let leg = bench.prefill("r");
        bench.send_facts(&leg, vec![broke(false, true)]).await;
    }
    bench.serve("r").await;
    bench.drop_canaries().await;
    bench.quiet();
}

/// Its engine lives on, or is back already: the request is tried once more all the same, and the node stays.
#[tokio::test]
async fn a_request_whose_connection_broke_twice_is_failed() {
    let mut bench = Bench::with(&["b0", "b1", "b2"]).await;
    bench.submit("r", 4).await;
    for _ in 0..2 {
        let leg = bench.prefill("r");
        bench.send_facts(&leg, vec![broke(true, false)]).await;
    }
    let (status, stage, _) = bench.client("r").trouble();
    assert_eq!((status, stage.as_str()), (502, "engine_died"));
    assert_eq!(bench.status().nodes.len(), 3);
    bench.quiet();
}
