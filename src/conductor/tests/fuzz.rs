//! Damaged messages of nodes, taken in by the driver: whatever a node says, the books stay sound and others are served.

use baton_fuzz::{Fuzz, Verdict};
use baton_wire::v1;
use baton_wire::v1::fact::Fact;
use baton_wire::v1::from_node::Message as Said;
use prost::Message as _;

use super::bench::{self, Bench};
use super::open_legs::Client;
use crate::conductor::inbox::Message;

/// Inputs that one conductor receives.
const INPUTS_PER_BENCH: u32 = 40;

/// A conductor with two requests under way, one of which is in its decode.
async fn bench() -> (Bench, Vec<Client>) {
    let mut bench = Bench::with(&["p0", "d0"]).await;
    for name in ["prefilling", "decoding"] {
        bench.submit(name, 5).await;
    }
    bench.do_prefill("decoding").await;
    bench.do_handoff("decoding").await;
    // The nodes send anything from now on, so the events of their clients are no longer checked.
    let clients = std::mem::take(&mut bench.clients);
    (bench, clients.into_values().collect())
}

/// Redirects a fact about request 1 or 2 to an open request.
fn aim(bench: &Bench, fact: &mut v1::Fact) {
    let place = usize::try_from(fact.request).ok().and_then(|number| number.checked_sub(1));
    if let Some(leg) = place.and_then(|at| bench.open_legs.open.values().nth(at)) {
        fact.request = leg.request;
        if fact.attempt == 1 {
            fact.attempt = leg.attempt;
        }
    }
}

/// Sends a conductor a node's message. It fails if the input is no message.
async fn play(bench: &mut Bench, input: &[u8]) -> Result<(), String> {
    let (&who, said) = input.split_first().ok_or("empty")?;
    let told = v1::FromNode::decode(said).map_err(|e| e.to_string())?;
    let name = if who & 1 == 0 { "p0" } else { "d0" };
    match told.message.ok_or("nothing is said")? {
        Said::Hello(hello) => {
            let name = hello.name.clone();
            bench.send_hello(hello).await?;
            if bench.lines.contains_key(&name) {
                bench.let_leave(&name).await;
            }
        }
        Said::Heartbeat(beat) => {
            let Some(line) = bench.lines.get(name) else { return Ok(()) };
            let (instance, epoch) = bench::of(&line.life);
            let load = Box::new(beat.load.unwrap_or_default());
            bench.inbox.send(Message::Beat { instance, epoch, load }).await;
        }
        Said::Facts(mut facts) => {
            let Some(line) = bench.lines.get(name) else { return Ok(()) };
            let (instance, epoch) = bench::of(&line.life);
            facts.facts.iter_mut().for_each(|fact| aim(bench, fact));
            bench.inbox.send(Message::Facts { instance, epoch, facts: facts.facts }).await;
        }
    }
    bench.pump().await;
    // The conductor still answers a status request.
    bench.status();
    Ok(())
}

#[test]
fn fuzz_control_messages() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (mut bench, mut clients) = runtime.block_on(self::bench());
    let mut told = 0;
    Fuzz::new("control_messages").cases(3_000).max_bytes(4_096).run(|input| {
        if told == INPUTS_PER_BENCH || !["p0", "d0"].iter().all(|name| bench.lines.contains_key(*name)) {
            told = 0;
            (bench, clients) = runtime.block_on(self::bench());
        }
        told += 1;
        assert_eq!(clients.len(), 2, "they stay until their conductor ends");
        Verdict::of(&runtime.block_on(play(&mut bench, input)))
    });
}

/// Writes inputs of the corpus; run by hand when the messages change.
#[test]
#[ignore = "writes into the corpus"]
fn write_corpus() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus/control_messages");
    std::fs::create_dir_all(&dir).unwrap();
    let put = |name: &str, who: u8, message: Said| {
        let mut bytes = vec![who];
        v1::FromNode { message: Some(message) }.encode(&mut bytes).unwrap();
        std::fs::write(dir.join(name), bytes).unwrap();
    };
    put("hello", 0, Said::Hello(bench::hello("p1", "prefill")));
    put("hello-decode", 0, Said::Hello(bench::hello("d1", "decode")));
    let tier = v1::TierLoad {
        tier: v1::Tier::Dram.into(),
        capacity_blocks: 9,
        used_blocks: 3,
        ..Default::default()
    };
    let load = v1::NodeLoad { running: 1, waiting: 2, tiers: vec![tier], ..Default::default() };
    put("ok-heartbeat", 1, Said::Heartbeat(v1::Heartbeat { load: Some(load) }));
    let fact = |request, fact| v1::Fact { request, attempt: 1, fact: Some(fact) };
    let facts: Vec<(&str, u8, Vec<v1::Fact>)> = vec![
        ("ok-prefilled", 0, vec![fact(1, bench::prefilled()), fact(2, Fact::Handoff(true))]),
        ("ok-tokens", 1, (0..5).map(|at| fact(1, bench::fact_token(at, 1_000, 0))).collect()),
        ("ok-last-token", 1, vec![fact(1, bench::fact_token(0, 7, 1))]),
        ("ok-failure", 0, vec![fact(1, bench::failure(true)), fact(2, bench::failure(false))]),
        ("ok-fetch", 0, vec![fact(1, Fact::Fetch(false)), fact(2, Fact::Replicated(true))]),
        ("ok-ended", 1, vec![fact(2, Fact::Ended(v1::Ended { finish: 2, cached_tokens: Some(16) }))]),
        (
            "ok-offer",
            0,
            vec![fact(1, Fact::Offer(v1::Offer::default())), fact(1, Fact::Abandoned(v1::Loan::default()))],
        ),
    ];
    for (name, who, facts) in facts {
        put(name, who, Said::Facts(v1::Facts { facts }));
    }
}
