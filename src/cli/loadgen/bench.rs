//! Measures the cost that a router adds to a call: time, and processor time by call and by event.
//!
//! Every load is offered at a fixed rate, whatever the answers, or by callers who each wait for theirs, to
//! each side in turn and in several rounds, so that a machine that slows down slows all sides.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use baton_http::{Client, next_piece};
use bytes::Bytes;
use http::Method;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::process::CpuTime;
use super::sse::EventReader;
use super::target::Target;

/// Calls in flight at most; a side that falls behind further makes the load wait, which is said.
const MOST_IN_FLIGHT: u32 = 4096;
/// An answer that takes longer is an error.
const TIMEOUT: Duration = Duration::from_secs(30);

/// One side of the comparison.
pub struct Side {
    /// Its name in the table.
    pub name: &'static str,
    /// The service under load.
    pub target: Target,
    /// The process whose time counts.
    pub pid: Option<u32>,
    /// Processes that work beside it, such as nodes; their time is reported separately.
    pub beside: Vec<u32>,
}

/// Calls of one kind.
#[derive(Clone)]
pub struct Load {
    /// Its name in the table.
    pub name: &'static str,
    /// Calls a second.
    pub rate_per_s: f64,
    /// The body of the n-th call.
    pub body: Arc<dyn Fn(u64) -> Bytes + Send + Sync>,
}

/// The figures of one side under one load.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// The load.
    pub load: &'static str,
    /// The side.
    pub side: &'static str,
    /// Calls answered.
    pub answered: u64,
    /// Calls that were not, or not with 200.
    pub errors: u64,
    /// Calls answered a second, while the load lasted.
    pub answered_per_s: f64,
    /// Calls that waited because too many were in flight.
    pub waited: u64,
    /// From sending to the first byte of the answer's body, µs: median.
    pub first_byte_p50_us: Option<f64>,
    /// And 99th percentile.
    pub first_byte_p99_us: Option<f64>,
    /// From sending to the end of the answer, µs: median.
    pub whole_p50_us: Option<f64>,
    /// And 99th percentile.
    pub whole_p99_us: Option<f64>,
    /// Events of streams.
    pub events: u64,
    /// Processor time of the side's process by call, µs.
    pub cpu_us_per_call: Option<f64>,
    /// Processor time of the processes beside it by call, µs.
    pub beside_cpu_us_per_call: Option<f64>,
    /// Share of one core that the side's process kept busy.
    pub core_share: Option<f64>,
}

/// Sums of one side and load over its rounds.
#[derive(Default)]
struct Sums {
    first_us: Vec<u64>,
    whole_us: Vec<u64>,
    errors: u64,
    waited: u64,
    events: u64,
    cpu_us: u64,
    beside_cpu_us: u64,
    lasted: Duration,
}

/// The times of one call: µs to the first byte, µs in all, events.
type CallTimes = (u64, u64, u64);

/// A comparison to be run.
pub struct Comparison {
    /// The client.
    pub client: Client,
    /// The sides, each measured under the same load.
    pub sides: Vec<Side>,
    /// How long each load lasts on each side, over all rounds.
    pub duration: Duration,
    /// Rounds in which the sides take turns.
    pub rounds: u32,
    /// Callers who each send as soon as they have an answer; none: calls come at the load's rate.
    pub callers: Option<u32>,
}

impl Comparison {
    /// Offers `load` to every side. Blocks; call it outside the runtime.
    pub fn run(&self, load: &Load, runtime: &Handle) -> Result<Vec<Figures>> {
        let mut sums: Vec<Sums> = self.sides.iter().map(|_| Sums::default()).collect();
        let calls = (load.rate_per_s * self.duration.as_secs_f64() / f64::from(self.rounds)).ceil().max(1.0);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive count")]
        let calls = calls as u64;
        let numbers = Arc::new(AtomicU64::new(0));
        let each = self.duration / self.rounds.max(1);
        for round in 0..=self.rounds {
            for (side, sums) in self.sides.iter().zip(&mut sums) {
                // The first round warms connections and caches up and is thrown away.
                let warm_up = round == 0;
                let before = (side.pid.map(CpuTime::of).transpose()?, times(&side.beside)?);
                let began = Instant::now();
                let mut seen = if let Some(callers) = self.callers {
                    let lasts = if warm_up { each / 5 } else { each };
                    self.call_in_turn(side, load, (callers, lasts, &numbers), runtime)?
                } else {
                    let count = if warm_up { calls.div_ceil(5) } else { calls };
                    let number = numbers.fetch_add(count, Ordering::Relaxed);
                    self.offer(side, load, number..number + count, runtime)?
                };
                seen.lasted = began.elapsed();
                if let (Some(before), Some(pid)) = (before.0, side.pid) {
                    seen.cpu_us = CpuTime::of(pid)?.since_us(before);
                }
                let beside = times(&side.beside)?;
                seen.beside_cpu_us =
                    beside.iter().zip(&before.1).map(|(now, then)| now.since_us(*then)).sum();
                if !warm_up {
                    sums.first_us.append(&mut seen.first_us);
                    sums.whole_us.append(&mut seen.whole_us);
                    sums.errors += seen.errors;
                    sums.waited += seen.waited;
                    sums.events += seen.events;
                    sums.cpu_us += seen.cpu_us;
                    sums.beside_cpu_us += seen.beside_cpu_us;
                    sums.lasted += seen.lasted;
                }
            }
        }
        Ok(self.sides.iter().zip(sums).map(|(side, sums)| sums.figures(load, side)).collect())
    }

    /// Callers send one call after the other until the time is over.
    fn call_in_turn(
        &self,
        side: &Side,
        load: &Load,
        (callers, lasts, numbers): (u32, Duration, &Arc<AtomicU64>),
        runtime: &Handle,
    ) -> Result<Sums> {
        let (sums, until) = (Arc::new(Mutex::new(Sums::default())), Instant::now() + lasts);
        let calling = (0..callers).map(|_| {
            let (client, sums, load) = (self.client.clone(), Arc::clone(&sums), load.clone());
            let (target, numbers) = (side.target.clone(), Arc::clone(numbers));
            runtime.spawn(async move {
                while Instant::now() < until {
                    let body = (load.body)(numbers.fetch_add(1, Ordering::Relaxed));
                    let request = target.request(Method::POST, "/v1/chat/completions", body);
                    let outcome = tokio::time::timeout(TIMEOUT, call(&client, request)).await;
                    sums.lock().take(outcome.ok().flatten());
                }
            })
        });
        for caller in calling.collect::<Vec<_>>() {
            runtime.block_on(caller).context("bench: a caller")?;
        }
        let sums = std::mem::take(&mut *sums.lock());
        Ok(sums)
    }

    /// Calls come at the load's rate, whatever the answers.
    fn offer(
        &self,
        side: &Side,
        load: &Load,
        numbers: std::ops::Range<u64>,
        runtime: &Handle,
    ) -> Result<Sums> {
        // Bodies are made before the clock runs.
        let bodies: Vec<Bytes> = numbers.map(|n| (load.body)(n)).collect();
        let (permits, sums) =
            (Arc::new(Semaphore::new(MOST_IN_FLIGHT as usize)), Arc::new(Mutex::new(Sums::default())));
        let zero = Instant::now();
        for (at, body) in (0u32..).zip(bodies) {
            let due = zero + Duration::from_secs_f64(f64::from(at) / load.rate_per_s);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let permit = if let Ok(permit) = Arc::clone(&permits).try_acquire_owned() {
                permit
            } else {
                sums.lock().waited += 1;
                runtime.block_on(Arc::clone(&permits).acquire_owned()).context("bench")?
            };
            let (client, sums) = (self.client.clone(), Arc::clone(&sums));
            let request = side.target.request(Method::POST, "/v1/chat/completions", body);
            runtime.spawn(async move {
                let outcome = tokio::time::timeout(TIMEOUT, call(&client, request)).await;
                sums.lock().take(outcome.ok().flatten());
                drop(permit);
            });
        }
        runtime.block_on(async { permits.acquire_many(MOST_IN_FLIGHT).await.map(drop) }).context("bench")?;
        let sums = std::mem::take(&mut *sums.lock());
        Ok(sums)
    }
}

fn times(pids: &[u32]) -> Result<Vec<CpuTime>> {
    pids.iter().map(|pid| CpuTime::of(*pid)).collect()
}

async fn call(client: &Client, request: http::Request<http_body_util::Full<Bytes>>) -> Option<CallTimes> {
    let sent = Instant::now();
    let since = || u64::try_from(sent.elapsed().as_micros()).unwrap_or(u64::MAX);
    let response = client.send(request).await.ok().filter(|r| r.status().is_success())?;
    let (mut body, mut reader) = (response.into_body(), EventReader::default());
    let (mut first_us, mut events) = (None, 0);
    while let Some(data) = next_piece(&mut body).await.ok()? {
        first_us.get_or_insert_with(since);
        reader.push(&data, |_| events += 1).ok()?;
    }
    Some((first_us?, since(), events))
}

impl Sums {
    fn take(&mut self, outcome: Option<CallTimes>) {
        let Some((first_us, whole_us, events)) = outcome else {
            self.errors += 1;
            return;
        };
        self.first_us.push(first_us);
        self.whole_us.push(whole_us);
        self.events += events;
    }

    #[expect(clippy::cast_precision_loss, reason = "figures for a report")]
    fn figures(mut self, load: &Load, side: &Side) -> Figures {
        self.first_us.sort_unstable();
        self.whole_us.sort_unstable();
        let answered = self.whole_us.len() as u64;
        let by_call = |us: u64, counted: bool| (counted && answered > 0).then(|| us as f64 / answered as f64);
        let lasted_us = self.lasted.as_micros().max(1) as f64;
        Figures {
            load: load.name,
            side: side.name,
            answered,
            errors: self.errors,
            answered_per_s: answered as f64 / self.lasted.as_secs_f64().max(1e-9),
            waited: self.waited,
            first_byte_p50_us: rank(&self.first_us, 50),
            first_byte_p99_us: rank(&self.first_us, 99),
            whole_p50_us: rank(&self.whole_us, 50),
            whole_p99_us: rank(&self.whole_us, 99),
            events: self.events,
            cpu_us_per_call: by_call(self.cpu_us, side.pid.is_some()),
            beside_cpu_us_per_call: by_call(self.beside_cpu_us, !side.beside.is_empty()),
            core_share: side.pid.map(|_| self.cpu_us as f64 / lasted_us),
        }
    }
}

/// Nearest rank.
#[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
fn rank(sorted: &[u64], percent: usize) -> Option<f64> {
    let at = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    sorted.get(at).map(|us| *us as f64)
}

/// Processor time of one event in a stream: what a stream's call costs beyond a call without a
/// stream, over its events.
#[expect(clippy::cast_precision_loss, reason = "a figure for a report")]
pub fn cpu_us_per_event(plain: &Figures, stream: &Figures) -> Option<f64> {
    let events_a_call = stream.events as f64 / stream.answered.max(1) as f64;
    let beyond = stream.cpu_us_per_call? - plain.cpu_us_per_call?;
    (events_a_call > 0.0).then(|| beyond / events_a_call)
}

/// The loads that are compared: a small call, a long conversation that is new, the same one with a
/// new turn three quarters through and with one at its end, and a stream.
pub fn loads(model: &str, rates: Rates, body_bytes: usize, stream_tokens: u32) -> Vec<Load> {
    let named =
        |name, rate_per_s, body: Arc<dyn Fn(u64) -> Bytes + Send + Sync>| Load { name, rate_per_s, body };
    let model = serde_json::Value::from(model).to_string();
    let history = Arc::new(conversation(body_bytes));
    let parts = [conversation(body_bytes / 4 * 3), conversation(body_bytes / 4)];
    let chat = move |head: &str, history: &str, tail: &str, rest: &str| -> Bytes {
        format!(
            r#"{{"model":{model},"messages":[{{"role":"system","content":"{head}"}},{history}{{"role":"user","content":"{tail}"}}],{rest}}}"#
        )
        .into()
    };
    const ONE: &str = r#""max_tokens":1"#;
    let streamed = format!(r#""max_tokens":{stream_tokens},"ignore_eos":true,"stream":true"#);
    let (small, cold, part, seen, stream) = (chat.clone(), chat.clone(), chat.clone(), chat.clone(), chat);
    let (cold_history, seen_history) = (Arc::clone(&history), history);
    vec![
        named(
            "small",
            rates.small_per_s,
            Arc::new(move |n| small("be brief", "", &format!("call {n}"), ONE)),
        ),
        named(
            "large, new",
            rates.large_per_s,
            Arc::new(move |n| cold(&format!("conversation {n}"), &cold_history, "go on", ONE)),
        ),
        named(
            "large, three quarters seen",
            rates.large_per_s,
            Arc::new(move |n| {
                let [before, after] = &parts;
                let history = format!(r#"{before}{{"role":"user","content":"turn {n}"}},{after}"#);
                part("the conversation", &history, "go on", ONE)
            }),
        ),
        named(
            "large, prefix seen",
            rates.large_per_s,
            Arc::new(move |n| seen("the conversation", &seen_history, &format!("turn {n}"), ONE)),
        ),
        named(
            "stream",
            rates.stream_per_s,
            Arc::new(move |n| stream("be long", "", &format!("call {n}"), &streamed)),
        ),
    ]
}

/// Calls a second.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// Of small calls.
    pub small_per_s: f64,
    /// Of large ones.
    pub large_per_s: f64,
    /// Of streams.
    pub stream_per_s: f64,
}

/// Text of the conversations. It never changes, so figures of different days compare, and `scripts/compare/tokenizer.py`
/// does not train on it.
const PROSE: &str = include_str!("../../../LICENSE");

/// Messages of about `bytes` bytes in total, as a piece of JSON that ends with a comma. Each message quotes the prose from a
/// random word on. Random letters would not do: a trained tokenizer makes more than twice as many tokens of them.
fn conversation(bytes: usize) -> String {
    const TURN_BYTES: usize = 4096;
    let plain = |word: &&str| !word.contains(['"', '\\']);
    let words: Vec<&str> = PROSE.split_whitespace().filter(plain).collect();
    let mut rng = baton_types::Rng::new(1);
    let mut text = String::with_capacity(bytes + TURN_BYTES);
    for turn in 0.. {
        if text.len() + 64 > bytes {
            break;
        }
        let role = if turn % 2 == 0 { "user" } else { "assistant" };
        text.push_str(&format!(r#"{{"role":"{role}","content":""#));
        let end = (text.len() + TURN_BYTES).min(bytes - 4);
        let from = usize::try_from(rng.below(words.len() as u64)).expect("a place among them");
        for word in words.iter().cycle().skip(from) {
            if text.len() >= end {
                break;
            }
            text.push_str(word);
            text.push(' ');
        }
        text.push_str(r#""},"#);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn bodies(which: usize) -> [Value; 2] {
        let rates = Rates { small_per_s: 1.0, large_per_s: 1.0, stream_per_s: 1.0 };
        let load = &loads("m", rates, 128 << 10, 50)[which];
        [1, 2].map(|n| serde_json::from_slice(&(load.body)(n)).unwrap())
    }

    #[test]
    fn a_large_body_is_as_large_as_asked_and_shares_what_its_name_says() {
        let [one, other] = bodies(1);
        let size = one.to_string().len();
        assert!((128 << 10..(128 << 10) + 400).contains(&size), "{size} bytes");
        assert_ne!(one["messages"][0], other["messages"][0], "new from the first message on");
        let [one, other] = bodies(2);
        let (one, other) = (one["messages"].as_array().unwrap(), other["messages"].as_array().unwrap());
        let alike = one.iter().zip(other).take_while(|(one, other)| one == other).map(|(one, _)| one);
        let share = alike.map(|message| message.to_string().len()).sum::<usize>() * 100 / (128 << 10);
        assert!((73..=77).contains(&share), "{share} % seen");
        let [one, other] = bodies(3);
        let turns = one["messages"].as_array().unwrap().len();
        assert_eq!(
            one["messages"].as_array().unwrap()[..turns - 1],
            other["messages"].as_array().unwrap()[..turns - 1]
        );
        assert_ne!(one["messages"][turns - 1], other["messages"][turns - 1]);
    }

    #[test]
    fn an_event_costs_what_a_stream_costs_beyond_a_call() {
        let figures = |cpu: f64, events| Figures {
            load: "",
            side: "",
            answered: 10,
            errors: 0,
            answered_per_s: 0.0,
            waited: 0,
            first_byte_p50_us: None,
            first_byte_p99_us: None,
            whole_p50_us: None,
            whole_p99_us: None,
            events,
            cpu_us_per_call: Some(cpu),
            beside_cpu_us_per_call: None,
            core_share: None,
        };
        assert_eq!(cpu_us_per_event(&figures(50.0, 0), &figures(250.0, 1000)), Some(2.0));
        assert_eq!(cpu_us_per_event(&figures(50.0, 0), &figures(250.0, 0)), None);
        assert_eq!((rank(&[1, 2, 3], 50), rank(&[1, 2, 3], 99), rank(&[], 50)), (Some(2.0), Some(3.0), None));
    }
}
