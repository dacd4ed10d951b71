//! Five hundred requests in flight at once while processes of every kind are killed and stopped: the clients.
//!
//! An answer is the right one, token for token, or a beginning of it with a named error. Connections break only at a
//! front door that is in trouble itself, and no client waits beyond [`BOUND`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_types::Rng;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

use super::chaos::CODES;
use super::http::{self, OpenAnswer};
use super::service::until;

/// Requests in flight at once.
pub(super) const CROWD: usize = 500;
/// No call may take longer, and no request with all its tries: it hangs. Far beyond what any of them needs.
const BOUND: Duration = Duration::from_secs(150);
const PATH: &str = "/v1/completions";
/// Further codes that a client may get where front doors, conductors and servers fail as well.
const MORE_CODES: [&str; 4] = ["no_model", "engine_lost", "no_engine", "too_many_connections"];

/// One crowd at a time: two would only take the machine from each other.
pub(super) fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    let files = getrlimit(Resource::Nofile);
    // A socket for each client, and what the other tests have open: as many as the machine allows.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, maximum: files.maximum });
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number from the environment.
pub(super) fn setting(name: &str, otherwise: u64) -> u64 {
    std::env::var(name)
        .map_or(otherwise, |text| text.parse().unwrap_or_else(|e| panic!("{name} = {text}: {e}")))
}

/// A front door, and how often it was killed, stopped or ended so far.
pub(super) struct Door {
    pub(super) at: SocketAddr,
    pub(super) troubles: AtomicUsize,
}

impl Door {
    pub(super) fn new(at: SocketAddr) -> Self {
        Self { at, troubles: AtomicUsize::new(0) }
    }

    /// Whether something befell it since there were `before` troubles. Its end may be seen after the client's.
    fn was_troubled(&self, before: usize) -> bool {
        let until = Instant::now() + Duration::from_secs(70);
        loop {
            if self.troubles.load(Ordering::SeqCst) != before {
                return true;
            }
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// An answer as far as it came.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Answer {
    text: String,
    tokens: Vec<String>,
    finish: Vec<String>,
}

impl Answer {
    fn read(&mut self, choice: &Value) {
        self.text.push_str(choice["text"].as_str().unwrap_or_default());
        for token in choice["logprobs"]["tokens"].as_array().into_iter().flatten() {
            self.tokens.push(token.as_str().unwrap_or_default().to_owned());
        }
        self.finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
    }

    /// Whether it is a beginning of `whole`. Tokens say so where they were asked for: bytes of a letter that is not
    /// complete are shown when nothing follows them.
    fn begins(&self, whole: &Self) -> bool {
        whole.tokens.starts_with(&self.tokens)
            && (!whole.tokens.is_empty() || whole.text.starts_with(&self.text))
    }
}

/// How a try ended.
#[derive(Debug)]
enum Ending {
    Whole,
    /// Refused or failed in words, at once or in the middle of a stream.
    Told {
        code: String,
        come_again: bool,
        wait: Duration,
    },
    /// The connection was refused, or broke.
    Broken(String),
}

/// Requests that share beginnings, greedy and drawn, with their tokens where the engines tell them.
pub(super) fn kinds(seed: u64, count: usize, logprobs: bool) -> Vec<Value> {
    let mut rng = Rng::fork(seed, 1);
    let shared = ["", "Once upon a time there was a relay. ", "Nobody drops it on the way. "];
    let mut body = |_| {
        let start = shared[rng.below(3) as usize].repeat(1 + rng.below(2) as usize);
        let own: String = (0..1 + rng.below(60)).map(|_| char::from(b'a' + rng.below(26) as u8)).collect();
        let mut body = json!({
            "prompt": format!("{start}{own}"),
            "max_tokens": if rng.below(8) == 0 { 1 } else { 16 + rng.below(40) },
            "temperature": if rng.below(2) == 1 { 0.9 } else { 0.0 },
            "seed": rng.below(1 << 30),
            "ignore_eos": true,
        });
        if logprobs {
            body["logprobs"] = json!(1);
        }
        body
    };
    (0..count).map(&mut body).collect()
}

/// One try: what came, and how it ended.
fn attempt(at: SocketAddr, body: &Value, streams: bool) -> (Answer, Ending) {
    let mut answer = Answer::default();
    let ending = tried(at, body, streams, &mut answer).unwrap_or_else(Ending::Broken);
    (answer, ending)
}

fn tried(at: SocketAddr, body: &Value, streams: bool, answer: &mut Answer) -> Result<Ending, String> {
    let mut body = body.clone();
    body["stream"] = json!(streams);
    let json_type = [("content-type", "application/json")];
    let mut open = OpenAnswer::within(BOUND, at, &format!("POST {PATH}"), &json_type, &body.to_string())?;
    if open.status() != 200 || !streams {
        let reply = open.whole()?;
        let value: Value = serde_json::from_str(&reply.text).map_err(|e| format!("{e}: {reply:?}"))?;
        if reply.status == 200 {
            answer.read(&value["choices"][0]);
            return Ok(Ending::Whole);
        }
        let wait_ms = reply.header("retry-after-ms").and_then(|ms| ms.parse().ok()).unwrap_or(200);
        return Ok(told(&value["error"], reply.header("x-should-retry") == Some("true"), wait_ms));
    }
    loop {
        let data = open.event()?.ok_or("the stream ended without [DONE] and without an error")?;
        if data == "[DONE]" {
            return Ok(Ending::Whole);
        }
        let chunk: Value = serde_json::from_str(&data).map_err(|e| format!("{e}: {data}"))?;
        if chunk["error"].is_object() {
            return Ok(told(&chunk["error"], true, 200));
        }
        answer.read(&chunk["choices"][0]);
    }
}

fn told(error: &Value, come_again: bool, wait_ms: u64) -> Ending {
    let code = error["code"].as_str().unwrap_or_default().to_owned();
    // These clients are impatient: the service does not predict when processes come back.
    Ending::Told { code, come_again, wait: Duration::from_millis(wait_ms.clamp(50, 1_000)) }
}

/// The outcomes of all requests.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) right: usize,
    /// Tries that broke with a front door, after so many tokens or none.
    broken: usize,
    /// Requests that must not be retried, by the error code.
    failed: BTreeMap<String, usize>,
    codes: BTreeMap<String, usize>,
    wrong: Vec<String>,
    slowest: Duration,
    most_at_once: usize,
}

/// Sets the flag that stops the clients, also when a test fails.
pub(super) struct Ends<'a>(pub(super) &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Clients, their requests and the right answers.
pub(super) struct Crowd<'a> {
    pub(super) seed: u64,
    pub(super) doors: &'a [Door],
    pub(super) bodies: &'a [Value],
    pub(super) expected: &'a [Answer],
    /// Requests that are asked at this moment.
    at_once: AtomicUsize,
    tally: Mutex<Tally>,
}

impl<'a> Crowd<'a> {
    pub(super) fn new(seed: u64, doors: &'a [Door], bodies: &'a [Value], expected: &'a [Answer]) -> Self {
        let (at_once, tally) = (AtomicUsize::new(0), Mutex::default());
        Self { seed, doors, bodies, expected, at_once, tally }
    }

    /// All clients ask repeatedly while `trouble` goes on. Returns the outcomes.
    pub(super) fn while_in(self, trouble: impl FnOnce()) -> Tally {
        let (over, start) = (AtomicBool::new(false), Barrier::new(CROWD + 1));
        std::thread::scope(|scope| {
            for client in 0..CROWD {
                let (crowd, over, start) = (&self, &over, &start);
                let thread = std::thread::Builder::new().stack_size(512 << 10);
                let asks = move || {
                    start.wait();
                    crowd.client(client as u64, over);
                };
                thread.spawn_scoped(scope, asks).unwrap();
            }
            start.wait();
            let _ends = Ends(&over);
            trouble();
        });
        self.tally.into_inner().unwrap()
    }

    /// One client's requests, one after another.
    fn client(&self, number: u64, over: &AtomicBool) {
        let mut rng = Rng::fork(self.seed, 1_000 + number);
        loop {
            let kind = rng.below(self.bodies.len() as u64) as usize;
            self.request(kind, &mut rng);
            if over.load(Ordering::SeqCst) {
                return;
            }
            // No client retries in the same moment.
            std::thread::sleep(Duration::from_millis(rng.below(100)));
        }
    }

    /// Sends one request, and retries it as long as the service allows it, at any front door.
    fn request(&self, kind: usize, rng: &mut Rng) {
        let (begun, streams) = (Instant::now(), rng.below(4) > 0);
        let mut door = rng.below(self.doors.len() as u64) as usize;
        let now = self.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        loop {
            let (at, before) = (&self.doors[door], self.doors[door].troubles.load(Ordering::SeqCst));
            let (answer, ending) = attempt(at.at, &self.bodies[kind], streams);
            let mut tally = self.tally.lock().unwrap();
            tally.most_at_once = tally.most_at_once.max(now);
            tally.slowest = tally.slowest.max(begun.elapsed());
            if let Some(wrong) = self.wrong(kind, &answer, &ending) {
                break tally.wrong.push(format!("at {door} after {:?}: {wrong}", begun.elapsed()));
            }
            let wait = match ending {
                Ending::Whole => break tally.right += 1,
                Ending::Told { code, come_again, wait } => {
                    *tally.codes.entry(code.clone()).or_default() += 1;
                    if !come_again {
                        break *tally.failed.entry(code).or_default() += 1;
                    }
                    wait
                }
                Ending::Broken(why) => {
                    drop(tally);
                    let excused = at.was_troubled(before);
                    tally = self.tally.lock().unwrap();
                    tally.broken += 1;
                    if !excused {
                        break tally.wrong.push(format!("door {door} was well, but: {why}, {answer:?}"));
                    }
                    Duration::from_millis(100)
                }
            };
            if begun.elapsed() > BOUND {
                break tally.wrong.push(format!("no answer within {BOUND:?}: {}", self.bodies[kind]));
            }
            drop(tally);
            std::thread::sleep(wait);
            door = (door + 1) % self.doors.len();
        }
        self.at_once.fetch_sub(1, Ordering::SeqCst);
    }

    /// The problem with the end of a try, if there is one.
    fn wrong(&self, kind: usize, answer: &Answer, ending: &Ending) -> Option<String> {
        let (body, right) = (&self.bodies[kind], &self.expected[kind]);
        match ending {
            Ending::Whole if answer == right => None,
            Ending::Whole => Some(format!("{body}: {answer:?}, not {right:?}")),
            _ if !answer.begins(right) => Some(format!("{body}: {answer:?} begins no {right:?}: {ending:?}")),
            Ending::Told { code, .. } if !CODES.iter().chain(&MORE_CODES).any(|known| *known == code) => {
                Some(format!("{body}: error.code '{code}' names no stage"))
            }
            _ => None,
        }
    }
}

impl Tally {
    /// It is as it has to be.
    #[track_caller]
    pub(super) fn holds(&self, what: &str) {
        println!("{what}: {self:#?}");
        let failed: usize = self.failed.values().sum();
        assert!(self.wrong.is_empty(), "{what}: {self:#?}");
        assert!(self.most_at_once >= CROWD, "{what}: {self:#?}");
        assert!(self.right >= CROWD / 2, "{what}: few were served: {self:#?}");
        assert!(failed * 10 <= self.right, "{what}: more than a tenth failed for good: {self:#?}");
    }
}

/// The answers of a service at rest, whole and streamed.
#[track_caller]
pub(super) fn answers(at: SocketAddr, bodies: &[Value]) -> Vec<Answer> {
    let answer = |body: &Value| {
        let [(whole, ended), (streamed, ended_too)] = [false, true].map(|streams| attempt(at, body, streams));
        assert!(matches!((&ended, &ended_too), (Ending::Whole, Ending::Whole)), "{ended:?} {ended_too:?}");
        assert_eq!(whole, streamed);
        whole
    };
    // All at once: one after the other they would take minutes where tokens take time.
    std::thread::scope(|scope| {
        let asked: Vec<_> = bodies.iter().map(|body| scope.spawn(move || answer(body))).collect();
        asked.into_iter().map(|answer| answer.join().unwrap()).collect()
    })
}

/// Asserts that one of the doors serves so many nodes and gives the right answers again, and that no request holds
/// anything.
#[track_caller]
pub(super) fn serves_again(doors: &[Door], nodes: usize, bodies: &[Value], expected: &[Answer]) {
    let mut serving = None;
    until(BOUND, "everything is back and let go", || {
        let mut seen = String::new();
        serving = doors.iter().find(|door| {
            let status = http::call(door.at, "GET /admin/status", &[], "");
            let ready = http::call(door.at, "GET /ready", &[], "").is_ok_and(|reply| reply.status == 200);
            let (quiet, text) = status.map_or_else(|e| (false, e), |status| rests(&status.text, nodes));
            seen += &format!("ready {ready}: {text}\n");
            ready && quiet
        });
        serving.is_none().then_some(seen)
    });
    assert_eq!(answers(serving.expect("one was found").at, bodies), expected, "afterwards");
}

/// Whether a status has so many serving nodes and nothing that is held.
fn rests(status: &str, count: usize) -> (bool, String) {
    let status: Value = serde_json::from_str(status).unwrap_or_default();
    let number = |value: &Value| value.as_u64().unwrap_or(u64::MAX);
    let nodes: Vec<&Value> = status["nodes"].as_array().into_iter().flatten().collect();
    let held = nodes.iter().any(|node| {
        ["holds", "running", "reserved_tokens", "waiting", "dispatched", "decodes"]
            .iter()
            .any(|what| number(&node[*what]) > 0)
    });
    let serving = nodes.iter().filter(|node| node["state"] == "serving").count();
    (number(&status["live_requests"]) == 0 && !held && serving == count, status.to_string())
}
