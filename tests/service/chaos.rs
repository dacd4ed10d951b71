//! Chaos: nodes are killed, stopped and cut off while answers are under way, and every answer is still,
//! token for token, what an untroubled service says.
//!
//! `BATON_SEED` repeats a run's requests and troubles; `BATON_CHAOS` is how many requests it has.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_types::Rng;
use serde_json::{Value, json};

use super::http::{self, OpenAnswer, Reply};
use super::schedule::Nodes;
use super::service::{Service, run, until};

const PATH: &str = "/v1/completions";
/// Distinct requests; each is sent many times.
const KINDS: u64 = 24;
/// Clients at a time.
const CLIENTS: usize = 8;
/// Room for everything, and room for so little that blocks are evicted and answers outgrow it.
const ENGINES: [[&str; 6]; 2] = [
    ["--blocks", "512", "--dram-blocks", "256", "--ssd-blocks", "256"],
    ["--blocks", "128", "--dram-blocks", "64", "--ssd-blocks", "128"],
];
/// Silent nodes are lost soon; who was let in is moved as often as by default.
const CONFIG: &str = "[scheduler]\nblock_tokens = 16\n\
    [[scheduler.classes]]\nname = \"default\"\nttft_us = 60_000_000\ntbt_us = 2_000_000\n\
    [service]\nheartbeat_us = 100_000\nlost_after_us = 800_000\njournal = \"journal\"\n";
/// Codes in the error for a client that could not be served: `error.code` names the stage or the reason.
pub(super) const CODES: [&str; 17] = [
    "engine_died",
    "ttft",
    "tbt",
    "room",
    "costly",
    "queue_full",
    "no_instance",
    "no_placement",
    "queue_timeout",
    "prefill_timeout",
    "handoff_timeout",
    "decode_timeout",
    "prefill_failed",
    "handoff_failed",
    "decode_failed",
    "prefill_lost",
    "decode_lost",
];

/// A whole answer: text, tokens, how it ended, how many tokens were counted.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    text: String,
    tokens: Vec<String>,
    finish: Vec<String>,
    counted: u64,
}

/// How a try ended.
#[derive(Debug)]
enum Ending {
    Whole(Answer),
    /// Refused or failed in words, at once or in the middle of a stream.
    Told {
        code: String,
        come_again: bool,
        wait: Duration,
    },
    /// The client left on purpose.
    Left,
}

/// Requests that share beginnings, greedy and drawn.
fn kinds(seed: u64) -> Vec<Value> {
    let mut rng = Rng::fork(seed, 1);
    let shared =
        ["", "Once upon a time there was a cache. ", "You are a careful runner who never drops it. "];
    let mut body = || {
        let start = shared[rng.below(3) as usize].repeat(1 + rng.below(3) as usize);
        let own: String = (0..1 + rng.below(120)).map(|_| char::from(b'a' + rng.below(26) as u8)).collect();
        let drawn = rng.below(2) == 1;
        // Answers of one token end where they are prefilled.
        let most = if rng.below(8) == 0 { 1 } else { 8 + rng.below(200) };
        json!({
            "prompt": format!("{start}{own}"),
            "max_tokens": most,
            "temperature": if drawn { 0.9 } else { 0.0 },
            "seed": rng.below(1 << 30),
            "ignore_eos": true,
            "logprobs": 1,
        })
    };
    (0..KINDS).map(|_| body()).collect()
}

fn read_choice(choice: &Value, answer: &mut Answer) {
    answer.text.push_str(choice["text"].as_str().unwrap_or_default());
    for token in choice["logprobs"]["tokens"].as_array().into_iter().flatten() {
        answer.tokens.push(token.as_str().unwrap_or_default().to_owned());
    }
    answer.finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
}

fn told(error: &Value, reply: Option<&Reply>) -> Ending {
    let code = error["code"].as_str().unwrap_or_default().to_owned();
    assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "no words: {error} {reply:?}");
    let come_again = reply.is_none_or(|r| r.header("x-should-retry") == Some("true"));
    // These clients are impatient: the service does not predict when nodes come back.
    let wait_ms = reply.and_then(|r| r.header("retry-after-ms")?.parse().ok()).unwrap_or(200).min(2_000);
    Ending::Told { code, come_again, wait: Duration::from_millis(wait_ms) }
}

fn whole(service: &Service, body: &Value) -> Result<Ending, String> {
    let json_type = [("content-type", "application/json")];
    let reply = http::call(service.clients, &format!("POST {PATH}"), &json_type, &body.to_string())?;
    let value: Value = serde_json::from_str(&reply.text).map_err(|e| format!("{e}: {reply:?}"))?;
    if reply.status != 200 {
        return Ok(told(&value["error"], Some(&reply)));
    }
    let mut answer =
        Answer { counted: value["usage"]["completion_tokens"].as_u64().unwrap_or(0), ..Answer::default() };
    read_choice(&value["choices"][0], &mut answer);
    Ok(Ending::Whole(answer))
}

fn stream(service: &Service, body: &Value, leave_after: Option<u64>) -> Result<Ending, String> {
    let mut body = body.clone();
    (body["stream"], body["stream_options"]) = (json!(true), json!({"include_usage": true}));
    let json_type = [("content-type", "application/json")];
    let mut open = OpenAnswer::new(service.clients, &format!("POST {PATH}"), &json_type, &body.to_string())?;
    if open.status() != 200 {
        let reply = open.whole()?;
        let value: Value = serde_json::from_str(&reply.text).map_err(|e| format!("{e}: {reply:?}"))?;
        return Ok(told(&value["error"], Some(&reply)));
    }
    let (mut answer, mut events) = (Answer::default(), 0);
    while leave_after != Some(events) {
        let data = open.event()?.ok_or("the stream ended without [DONE] and without an error")?;
        events += 1;
        if data == "[DONE]" {
            return Ok(Ending::Whole(answer));
        }
        let chunk: Value = serde_json::from_str(&data).map_err(|e| format!("{e}: {data}"))?;
        if chunk["error"].is_object() {
            return Ok(told(&chunk["error"], None));
        }
        read_choice(&chunk["choices"][0], &mut answer);
        answer.counted = chunk["usage"]["completion_tokens"].as_u64().unwrap_or(answer.counted);
    }
    Ok(Ending::Left)
}

/// The outcomes of all requests.
#[derive(Debug, Default)]
struct Tally {
    right: usize,
    left: usize,
    gave_up: Vec<String>,
    codes: BTreeMap<String, usize>,
    wrong: Vec<String>,
    slowest: Duration,
}

/// Sends one request, and retries as long as the service allows it, within the deadline.
fn request(service: &Service, body: &Value, expected: &Answer, mut rng: Rng, tally: &Mutex<Tally>) {
    let begun = Instant::now();
    let streams = rng.below(2) == 1;
    let leave_after = (streams && rng.below(8) == 0).then(|| rng.below(12));
    loop {
        let asked = Instant::now();
        let ending = if streams { stream(service, body, leave_after) } else { whole(service, body) };
        let mut tally = tally.lock().unwrap();
        tally.slowest = tally.slowest.max(asked.elapsed());
        match ending {
            Ok(Ending::Whole(answer)) if answer == *expected => tally.right += 1,
            Ok(Ending::Whole(answer)) => tally.wrong.push(format!("{body}: {answer:?}, not {expected:?}")),
            Ok(Ending::Left) => tally.left += 1,
            Err(why) => tally.wrong.push(format!("{body}: {why}")),
            Ok(Ending::Told { code, come_again, wait }) => {
                *tally.codes.entry(code.clone()).or_default() += 1;
                if !CODES.contains(&code.as_str()) {
                    tally.wrong.push(format!("{body}: error.code '{code}' names no stage"));
                } else if come_again && begun.elapsed() + wait < http::DEADLINE {
                    drop(tally);
                    std::thread::sleep(wait);
                    continue;
                } else {
                    tally.gave_up.push(format!("{code}, come again: {come_again}, in {wait:?}"));
                }
            }
        }
        return;
    }
}

/// The answers of an untroubled service, whole and streamed.
fn reference(bodies: &[Value]) -> Vec<Answer> {
    let service = Service::configured(CONFIG, &[&ENGINES[0][..], &["--nodes", "1b"]].concat());
    let answer = |body: &Value| {
        let answers = [whole(&service, body), stream(&service, body, None)];
        let [Ok(Ending::Whole(whole)), Ok(Ending::Whole(streamed))] = answers else { panic!("{answers:?}") };
        assert_eq!(whole, streamed);
        assert_eq!(whole.counted, body["max_tokens"].as_u64().unwrap());
        whole
    };
    bodies.iter().map(answer).collect()
}

fn setting(name: &str, otherwise: u64) -> u64 {
    std::env::var(name)
        .map_or(otherwise, |text| text.parse().unwrap_or_else(|e| panic!("{name} = {text}: {e}")))
}

#[test]
fn no_answer_is_wrong_whatever_happens_to_nodes() {
    let seed = setting("BATON_SEED", 1);
    let count = usize::try_from(setting("BATON_CHAOS", 120)).unwrap();
    println!("BATON_SEED={seed} BATON_CHAOS={count}");
    let bodies = kinds(seed);
    let expected = reference(&bodies);
    let engine = ENGINES[usize::from(seed % 2 == 1)];
    let service = Service::configured(CONFIG, &[&engine[..], &["--processes", "--nodes", "3p3d"]].concat());
    let (tally, next, stop) = (Mutex::new(Tally::default()), AtomicUsize::new(0), AtomicBool::new(false));
    let (happened, asked) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let mut nodes = Nodes::of(&service, &engine);
    let begun = Instant::now();
    let troubles = std::thread::scope(|scope| {
        let trouble = scope.spawn(|| nodes.trouble(seed, &stop, &happened));
        let client = || {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                // Troubles come by the clock: a fast machine has to be asked for longer until enough have come.
                let enough = happened.load(Ordering::Relaxed) >= count / 10 || number >= 20 * count;
                if number >= count && enough {
                    return;
                }
                asked.fetch_add(1, Ordering::Relaxed);
                let mut rng = Rng::fork(seed, 1_000 + number as u64);
                let kind = rng.below(KINDS) as usize;
                request(&service, &bodies[kind], &expected[kind], rng, &tally);
            }
        };
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
        let ends: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
        stop.store(true, Ordering::Relaxed);
        let troubles = trouble.join().unwrap();
        assert!(ends.iter().all(Result::is_ok), "a client panicked; seed {seed}: {troubles:#?}");
        troubles
    });
    let took = begun.elapsed();
    let tally = tally.into_inner().unwrap();
    let report = format!("seed {seed}, {} troubles in {took:.1?}: {tally:#?}\n{troubles:#?}", troubles.len());
    assert!(tally.wrong.is_empty(), "{report}");
    let (asked, ended) = (asked.into_inner(), tally.right + tally.left + tally.gave_up.len());
    assert!(asked >= count, "{report}");
    assert_eq!(ended, asked, "{report}");
    let status = service.status();
    assert!(tally.gave_up.len() * 50 <= count, "more than 2 % gave up: {report}\n{status:#}");
    assert!(troubles.len() >= count / 10, "little happened: {report}");
    println!("{report}");
    let metrics = service.get("/metrics").ok().text;
    let labelled =
        ["baton_stage_timeouts_total{", "baton_leg_failures_total{", "baton_requests_refused_total{"];
    metrics
        .lines()
        .filter(|line| labelled.iter().any(|name| line.starts_with(name)))
        .for_each(|l| println!("{l}"));
    // The last trouble may have cut off all nodes a moment ago.
    until(Duration::from_secs(20), "every node is back", || {
        let status = service.status();
        let serving = |node: &&Value| node["state"] == "serving";
        let back = status["nodes"].as_array().unwrap().iter().filter(serving).count();
        (back < 6).then(|| serde_json::to_string_pretty(&status["nodes"]).unwrap())
    });
    service.quiet(Duration::from_secs(20));
    let counters = service.status()["counters"].clone();
    println!("{counters}");
    serves_as_before(&service, &bodies, &expected, seed);
    drop(nodes);
    steps_again(service);
}

/// It still gives every answer.
fn serves_as_before(service: &Service, bodies: &[Value], expected: &[Answer], seed: u64) {
    for (body, expected) in bodies.iter().zip(expected) {
        match whole(service, body) {
            Ok(Ending::Whole(answer)) => assert_eq!(answer, *expected, "afterwards; seed {seed}"),
            other => panic!("afterwards; seed {seed}: {other:?}"),
        }
    }
}

/// Replays the conductor's journal and expects the same effects.
fn steps_again(mut service: Service) {
    assert_eq!(service.stop(), Some(0), "{}", service.errors());
    let mut files: Vec<_> =
        std::fs::read_dir(service.path("journal")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "there is no journal");
    for file in files {
        let (code, out, err) = run(service.folder(), &["replay", "--journal", &file.display().to_string()]);
        assert_eq!(code, Some(0), "{}: {out}{err}", file.display());
        assert!(out.contains("identical effects"), "{out}");
    }
}
