//! Clients that leave, read slowly, or ask for what there is not.

use baton_router::{Backend as _, Submission};
use baton_types::Sampling;
use baton_wire::v1;
use tokio::sync::{mpsc, oneshot};

use super::bench::{Bench, hello, prefilled, token};
use crate::conductor::Question;
use crate::conductor::inbox::Message;

#[tokio::test]
async fn a_client_that_leaves_frees_each_leg_once_at_any_stage() {
    for names in [&["p0", "d0"][..], &["b0"]] {
        for stage in 0..4u32 {
            let mut bench = Bench::with(names).await;
            bench.submit("r", 6).await;
            let mut held = names.len() as u64;
            if stage > 0 {
                bench.do_prefill("r").await;
            }
            if stage > 1 {
                if names.len() > 1 {
                    bench.do_handoff("r").await;
                }
                bench.do_decode("r", stage).await;
            }
            if bench.legs("r").iter().any(|leg| leg.answer.is_some()) {
                held = 1;
            }
            let legs = bench.legs("r");
            bench.leave("r").await;
            assert_eq!(bench.open_legs.releases, held, "{names:?} at stage {stage}");
            bench.quiet();
            // The nodes' later reports concern no open request.
            for leg in &legs {
                bench.send_facts(leg, vec![token("r", 0, 0), prefilled(), token("r", 1, 2)]).await;
            }
            bench.quiet();
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_while_it_waits_costs_nobody_anything() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    // Long prompts, so that the conductor holds the second one back.
    for name in ["a", "b"] {
        let mut long = Bench::submission(name, Sampling { max_tokens: 2, ..Sampling::default() });
        long.tokens = (0..50_000).collect();
        bench.send(long).await;
    }
    assert_eq!(bench.legs("a").len(), 2);
    assert_eq!(bench.legs("b").len(), 0, "it is held back");
    bench.leave("b").await;
    assert_eq!(bench.open_legs.releases, 0);
    bench.serve("a").await;
    bench.quiet();
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_off() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    let (events, mut slow) = mpsc::channel(3);
    let sampling = Sampling { max_tokens: 50, ..Sampling::default() };
    let submission = Bench::submission("slow", sampling);
    let request = bench.inbox.name_request();
    bench.inbox.send(Message::submit(request, submission, events)).await;
    bench.pump().await;
    bench.do_prefill("slow").await;
    bench.do_handoff("slow").await;
    let decode = bench.decode("slow");
    for index in 1..4 {
        bench.send_facts(&decode, vec![token("slow", index, 0)]).await;
    }
    bench.quiet();
    assert_eq!(bench.open_legs.releases, 1);
    let mut told = 0;
    while slow.recv().await.is_some() {
        told += 1;
    }
    assert_eq!(told, 3, "what it had room for, and then the end");
}

#[tokio::test]
async fn what_cannot_be_served_is_refused_with_a_reason() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    let mut unknown = Bench::submission("class", Sampling::default());
    unknown.class = Some("gold".into());
    bench.send(unknown).await;
    let (status, reason, message) = bench.client("class").trouble();
    assert_eq!((status, reason.as_str()), (400, "unknown_class"));
    assert!(message.contains("'gold'") && message.contains("default"), "{message}");

    // Clients send the API's tier names to every server, so these are accepted as classes.
    let mut tier = Bench::submission("tier", Sampling { max_tokens: 2, ..Sampling::default() });
    tier.class = Some("flex".into());
    bench.send(tier).await;
    bench.serve("tier").await;

    let mut empty = Bench::submission("empty", Sampling::default());
    empty.tokens = baton_types::Tokens::default();
    bench.send(empty).await;
    let (status, reason, _) = bench.client("empty").trouble();
    assert_eq!((status, reason.as_str()), (400, "empty_prompt"));

    let mut long = Bench::submission("long", Sampling::default());
    long.tokens = vec![5; 70_000].into();
    bench.send(long).await;
    let (status, reason, _) = bench.client("long").trouble();
    assert_eq!((status, reason.as_str()), (400, "too_long"));
    // It is remembered by the client's name, although nothing was compared.
    let (reply, mut answer) = oneshot::channel();
    bench.inbox.send(Message::Ask(Question::Explain("long".into(), reply))).await;
    bench.pump().await;
    let explained: serde_json::Value = serde_json::from_str(&answer.try_recv().unwrap().unwrap()).unwrap();
    let refused = &explained["decisions"][0]["refused"];
    assert_eq!(
        (&refused["reason"], &refused["class"]),
        (&"too_long".into(), &"default".into()),
        "{explained}"
    );
    assert_eq!(bench.status().decisions[0], "long refused reason=too_long class=default candidates=0");
    bench.quiet();
}

#[tokio::test]
async fn without_a_pair_requests_are_told_to_come_back() {
    let mut bench = Bench::new(super::bench::config());
    for nodes in [&[][..], &["p0"], &["p1"]] {
        for name in nodes {
            bench.join(name).await;
        }
        let name = format!("r{}", bench.clients.len());
        bench.submit(&name, 2).await;
        let (status, reason, message) = bench.client(&name).trouble();
        assert_eq!((status, reason.as_str()), (503, "no_instance"));
        assert!(message.contains("pair"), "{message}");
    }
    assert!(!bench.door.readiness().ready);
    bench.quiet();
}

#[tokio::test]
async fn a_conductor_that_closes_finishes_what_it_has_and_lets_nobody_in() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    bench.submit("a", 3).await;
    let (reply, mut quiet) = oneshot::channel();
    bench.inbox.send(Message::Ask(Question::Quiesce(reply))).await;
    bench.pump().await;
    let closing = bench.door.readiness();
    assert_eq!((closing.ready, closing.detail.as_str()), (false, "draining: 1 request is under way"));
    bench.submit("b", 3).await;
    let (status, reason, _) = bench.client("b").trouble();
    assert_eq!((status, reason.as_str()), (503, "shutting_down"));
    assert!(quiet.try_recv().is_err(), "one answer is still under way");
    bench.serve("a").await;
    assert_eq!(quiet.try_recv(), Ok(()));
    assert_eq!(bench.door.readiness().detail, "draining: 0 requests are under way");
    bench.quiet();
}

#[tokio::test]
async fn a_ticket_that_is_dropped_before_it_is_taken_in_leaves_nothing() {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    let sampling = Sampling { max_tokens: 2, ..Sampling::default() };
    drop(bench.door.submit(Bench::submission("r", sampling)));
    bench.pump().await;
    bench.quiet();
}

/// An engine may be far ahead of a front door that is busy: its client reads, and has all of its answer.
#[tokio::test]
async fn an_engine_that_is_faster_than_the_front_door_costs_no_answer() {
    let mut bench = Bench::with(&["b0"]).await;
    let sampling = Sampling { max_tokens: 8_000, ..Sampling::default() };
    let mut ticket = bench.door.submit(Bench::submission("r", sampling));
    bench.pump().await;
    let leg = bench.prefill("r");
    bench.send_facts(&leg, vec![token("r", 0, 0), super::bench::prefilled()]).await;
    let all = (1..8_000).map(|at| token("r", at, if at == 7_999 { 2 } else { 0 })).collect();
    bench.send_facts(&leg, all).await;
    let mut tokens = 0;
    while let Some(event) = ticket.events.recv().await {
        match event {
            baton_router::Event::Token { .. } => tokens += 1,
            baton_router::Event::Finished { .. } => break,
            baton_router::Event::Admitted { .. } => {}
            other => panic!("{other:?} after {tokens} tokens"),
        }
    }
    assert_eq!(tokens, 8_000);
}

/// The bodies in the prefills that have left for any node, bytes.
fn bodies_sent(bench: &mut Bench) -> Vec<usize> {
    let mut bodies = Vec::new();
    for line in bench.lines.values_mut() {
        while let Ok(message) = line.orders.try_recv() {
            let Some(v1::to_node::Message::Orders(orders)) = message.message else { continue };
            bodies.extend(orders.orders.into_iter().filter_map(|one| match one.order {
                Some(v1::order::Order::Prefill(prefill)) => Some(prefill.work?.body.len()),
                _ => None,
            }));
        }
    }
    bodies
}

/// Measures a request's cost on the deciding thread, next to one parse of a 1 MiB body, which that thread once did. Its
/// nodes have engines that get the body.
#[tokio::test]
#[ignore = "a benchmark: cargo test --release -p baton --bin baton submit_with_a_large_body -- --ignored --nocapture"]
async fn submit_with_a_large_body() {
    const ROUNDS: u32 = 200;
    let mut bench = Bench::with(&[]).await;
    for (name, role) in [("p0", "prefill"), ("d0", "decode")] {
        let hello = v1::Hello { wants_body: true, ..hello(name, role) };
        bench.send_hello(hello).await.unwrap();
    }
    bench.pass_canary().await;
    let body = format!(r#"{{"model":"m","vendor":"{}"}}"#, "prose ".repeat(175_000));
    let (mut read, mut submitted) = (std::time::Duration::ZERO, std::time::Duration::ZERO);
    for round in 0..ROUNDS {
        let began = std::time::Instant::now();
        let fields: std::collections::BTreeMap<String, &serde_json::value::RawValue> =
            serde_json::from_slice(body.as_bytes()).unwrap();
        assert_eq!(fields.len(), 2);
        read += began.elapsed();
        let (events, _told) = mpsc::channel(64);
        let plain = Bench::submission(&format!("r{round}"), Sampling::default());
        let submission = Submission { body: bytes::Bytes::from(body.clone()), ..plain };
        let request = bench.inbox.name_request();
        let message = Message::submit(request, submission, events);
        let began = std::time::Instant::now();
        bench.driver.take_in(message);
        bench.driver.send_orders();
        submitted += began.elapsed();
        assert_eq!(bodies_sent(&mut bench), [body.len()], "the node got it");
        bench.driver.take_in(Message::Cancel(request));
    }
    println!("submit {:?}, one reading of the body {:?}", submitted / ROUNDS, read / ROUNDS);
}
