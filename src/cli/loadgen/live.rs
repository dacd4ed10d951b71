//! Offers a trace to a live endpoint at the trace's own times: an open loop, whatever the answers.

use std::sync::Arc;
use std::time::Duration;

use baton_http::{Client, Error, Incoming, next_piece, whole};
use baton_scheduler::RejectReason;
use baton_sim::metrics::{Outcome, Status};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use http::{Method, Request, Response};
use http_body_util::Full;

use super::answer::{Answer, ErrorBody};
use super::bodies::PlannedRequest;
use super::clock::RunClock;
use super::sse::EventReader;
use super::target::{ClassKeys, MAX_BODY_BYTES, Target};

/// How requests are sent.
pub struct Sender {
    /// The service that gets the requests.
    pub target: Target,
    /// Keys of requests of some classes, in place of the target's.
    pub class_keys: ClassKeys,
    /// Over what.
    pub client: Client,
    /// The clock of the run.
    pub clock: RunClock,
    /// Number of times that a refused request is retried, if the refusal gave a time.
    pub retries: u32,
    /// How long one attempt may take, and how long a refused client waits at most.
    pub timeout: Duration,
    /// Tokens in a block of the trace, for counting blocks.
    pub block_tokens: u32,
}

/// A refusal that a client saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenRefusal {
    /// Time of the refusal, µs.
    pub at_us: u64,
    /// The reason's name.
    pub reason: String,
    /// The delay that the refusal gave, µs.
    pub retry_after_us: Option<u64>,
    /// Whether the client came back.
    pub returned: bool,
}

/// One request of a live run, ended.
#[derive(Clone, Debug)]
pub struct SentRequest {
    /// Its outcome, in the simulator's terms. TTFT counts from the moment at which the request was due, so a late send
    /// counts as waiting time of the client.
    pub outcome: Outcome,
    /// How much later than due the first attempt went out, µs.
    pub lag_us: u64,
    /// HTTP statuses, one an attempt that was answered.
    pub statuses: Vec<u16>,
    /// Why it failed: the stage and the error's name.
    pub error: Option<String>,
    /// Refusals, in order.
    pub refusals: Vec<SeenRefusal>,
    /// The server's count of its tokens, when it came.
    pub usage: Option<super::answer::UsageFigures>,
    /// Tokens that did not come in an event of their own.
    pub merged_tokens: u64,
    /// Whether it was answered with fewer or more tokens than asked for.
    pub wrong_length: bool,
}

/// How one attempt ended.
enum Attempt {
    Answered(Answer),
    Refused { reason: String, retry_after_us: Option<u64> },
    Failed(String),
}

impl Sender {
    /// Sends a request that is due now, retries after refusals at the times they gave, and reads the answer to its end.
    pub async fn send(self: Arc<Self>, planned: PlannedRequest) -> SentRequest {
        let mut sent = self.offered(&planned);
        let time_limit = planned.arrival.cancel_after_us.map(Duration::from_micros);
        let served = self.attempts(planned, &mut sent);
        let ended = match time_limit {
            Some(time_limit) => tokio::time::timeout(time_limit, served).await.is_ok(),
            None => {
                served.await;
                true
            }
        };
        if !ended {
            sent.outcome.status = Status::Cancelled;
        }
        sent.outcome.end_us = self.clock.now_us();
        sent
    }

    /// The record of a request that is cut off by the end of the run.
    pub fn cut_off(&self, planned: &PlannedRequest) -> SentRequest {
        let mut sent = self.offered(planned);
        sent.outcome.status = Status::Cancelled;
        sent.outcome.attempts = 1;
        sent
    }

    /// A request that is offered now.
    fn offered(&self, planned: &PlannedRequest) -> SentRequest {
        SentRequest {
            outcome: self.story(planned),
            lag_us: self.clock.now_us().saturating_sub(planned.arrival.at_us),
            statuses: Vec::new(),
            error: None,
            refusals: Vec::new(),
            usage: None,
            merged_tokens: 0,
            wrong_length: false,
        }
    }

    /// The story of a request at its beginning.
    fn story(&self, planned: &PlannedRequest) -> Outcome {
        let arrival = &planned.arrival;
        let blocks = arrival.prompt_tokens.div_ceil(u64::from(self.block_tokens.max(1)));
        Outcome {
            row: planned.row,
            status: Status::Failed,
            class: arrival.class,
            objectives: arrival.objectives,
            tenant: arrival.tenant,
            first_offer_us: arrival.at_us,
            offer_us: arrival.at_us,
            end_us: arrival.at_us,
            prompt_tokens: arrival.prompt_tokens,
            output_tokens: 0,
            cached_tokens: 0,
            hit_blocks: 0,
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            ttft_us: 0,
            gaps: baton_sim::engine::GapSummary::default(),
            attempts: 0,
            retry_after_us: 0,
            prefill: u32::MAX,
            decode: u32::MAX,
            wasted_tokens: 0,
            decode_start_us: 0,
            prediction: None,
        }
    }

    async fn attempts(&self, mut planned: PlannedRequest, sent: &mut SentRequest) {
        loop {
            sent.outcome.attempts += 1;
            // Bodies can be large and answers long: the last attempt keeps none.
            let last = sent.outcome.attempts > self.retries;
            let body = if last { std::mem::take(&mut planned.body) } else { planned.body.clone() };
            let attempt = self.attempt(self.request(&planned, body), &mut sent.statuses);
            match tokio::time::timeout(self.timeout, attempt).await {
                Err(_) => return failed(sent, "timeout".into()),
                Ok(Attempt::Failed(why)) => return failed(sent, why),
                Ok(Attempt::Answered(answer)) => return self.answered(&planned, sent, answer),
                Ok(Attempt::Refused { reason, retry_after_us }) => {
                    let now_us = self.clock.now_us();
                    let longest_us = u64::try_from(self.timeout.as_micros()).unwrap_or(u64::MAX);
                    let wait_us = retry_after_us
                        .filter(|wait| sent.outcome.attempts <= self.retries && *wait <= longest_us);
                    let returned = wait_us.is_some();
                    sent.refusals.push(SeenRefusal { at_us: now_us, reason, retry_after_us, returned });
                    sent.outcome.retry_after_us = retry_after_us.unwrap_or(0);
                    let Some(wait_us) = wait_us else {
                        sent.outcome.status = Status::Rejected;
                        return;
                    };
                    tokio::time::sleep(self.clock.until(now_us + wait_us)).await;
                    sent.outcome.offer_us = now_us + wait_us;
                }
            }
        }
    }

    fn answered(&self, planned: &PlannedRequest, sent: &mut SentRequest, mut answer: Answer) {
        answer.close();
        let Some(first_us) = answer.first_us() else {
            return failed(sent, "no_token".into());
        };
        let o = &mut sent.outcome;
        o.status = Status::Completed;
        o.ttft_us = first_us.saturating_sub(o.offer_us);
        o.output_tokens = u32::try_from(answer.token_count()).unwrap_or(u32::MAX);
        o.gaps = answer.gaps();
        o.cached_tokens = answer.usage.map_or(0, |u| u.cached_tokens()).min(o.prompt_tokens);
        // A prompt that is cached whole has its partial last block cached too.
        let whole = o.cached_tokens / u64::from(self.block_tokens.max(1));
        let hit = if o.cached_tokens == o.prompt_tokens { u64::from(o.blocks) } else { whole };
        o.hit_blocks = u32::try_from(hit).unwrap_or(u32::MAX);
        sent.usage = answer.usage;
        sent.merged_tokens = answer.merged_tokens;
        sent.wrong_length = o.output_tokens != planned.arrival.output_tokens;
    }

    async fn attempt(&self, request: Request<Full<Bytes>>, statuses: &mut Vec<u16>) -> Attempt {
        let response = match self.client.send(request).await {
            Ok(response) => response,
            Err(error) if error.is_connect() => return Attempt::Failed(format!("connect: {}", kind(&error))),
            Err(error) => return Attempt::Failed(format!("send: {}", kind(&error))),
        };
        let status = response.status().as_u16();
        statuses.push(status);
        if response.status().is_success() {
            return self.read(response).await;
        }
        let retry_after_us = retry_after_us(response.headers());
        let body = whole(response.into_body(), MAX_BODY_BYTES).await;
        let error = body.map(|body| ErrorBody::of(&body)).unwrap_or_default();
        let reason = error.name();
        if status == 429 || (status == 503 && retry_after_us.is_some()) || is_refusal(&reason) {
            return Attempt::Refused { reason, retry_after_us };
        }
        Attempt::Failed(format!("{status}: {reason}"))
    }

    fn request(&self, planned: &PlannedRequest, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = self.target.request(Method::POST, "/v1/completions", body);
        let id = format!("replay-{}", planned.row);
        let ms = |objective_us: Option<u64>| objective_us.map(|us| (us / 1000).to_string());
        let [ttft_ms, tbt_ms] =
            [planned.arrival.objectives.ttft_us, planned.arrival.objectives.tbt_us].map(ms);
        let named = [
            ("x-request-id", Some(&*id)),
            ("x-slo-class", planned.class.as_deref()),
            ("x-slo-ttft-ms", ttft_ms.as_deref()),
            ("x-slo-tbt-ms", tbt_ms.as_deref()),
            ("x-tenant-id", planned.tenant.as_deref()),
            ("x-session-id", planned.session.as_deref()),
        ];
        for (name, value) in named {
            let value = value.and_then(|v| HeaderValue::from_str(v).ok());
            value.and_then(|v| request.headers_mut().insert(name, v));
        }
        if let Some(key) = planned.class.as_deref().and_then(|class| self.class_keys.get(class)) {
            request.headers_mut().insert(AUTHORIZATION, key.clone());
        }
        request
    }

    async fn read(&self, response: Response<Incoming>) -> Attempt {
        let kind_of = response.headers().get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("");
        if !kind_of.starts_with("text/event-stream") {
            return Attempt::Failed("answer: not an event stream".into());
        }
        let (mut body, mut events, mut answer) =
            (response.into_body(), EventReader::default(), Answer::default());
        loop {
            let data = match next_piece(&mut body).await {
                Ok(Some(data)) => data,
                Ok(None) => break,
                Err(_) => return Attempt::Failed("truncated: the connection broke".into()),
            };
            let now_us = self.clock.now_us();
            let mut told = Ok(());
            let read = events.push(&data, |payload| {
                if told.is_ok() {
                    told = answer.event(payload, now_us);
                }
            });
            if read.and(told).is_err() {
                return Attempt::Failed("answer: an event that cannot be read".into());
            }
        }
        match answer.error.take() {
            // A request that was admitted and waits may be refused after its status went out.
            Some(error) if answer.seen_tokens() == 0 && is_refusal(&error.name()) => {
                Attempt::Refused { reason: error.name(), retry_after_us: None }
            }
            Some(error) => Attempt::Failed(format!("stream: {}", error.name())),
            None if answer.done => Attempt::Answered(answer),
            None => Attempt::Failed("truncated: the stream ended before [DONE]".into()),
        }
    }
}

/// Whether an error's name is one with which a conductor refuses, whatever the status.
fn is_refusal(name: &str) -> bool {
    RejectReason::ALL.iter().any(|reason| reason.name() == name)
}

fn failed(sent: &mut SentRequest, why: String) {
    sent.outcome.status = Status::Failed;
    sent.error = Some(why);
}

/// The delay that a refusal gave: `retry-after-ms` when there, else `retry-after` in seconds.
fn retry_after_us(headers: &HeaderMap) -> Option<u64> {
    let number = |name: &str| headers.get(name)?.to_str().ok()?.trim().parse::<f64>().ok();
    let us = match number("retry-after-ms") {
        Some(ms) => ms * 1e3,
        None => number(RETRY_AFTER.as_str())? * 1e6,
    };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked to be a positive time"
    )]
    (us.is_finite() && us >= 0.0).then_some(us as u64)
}

/// The innermost cause, which is the same text for the same failure.
fn kind(error: &Error) -> String {
    let text = error.to_string();
    text.rsplit(": ").next().unwrap_or(&text).chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_go_before_seconds() {
        let mut headers = HeaderMap::new();
        assert_eq!(retry_after_us(&headers), None);
        headers.insert(RETRY_AFTER, HeaderValue::from_static("2"));
        assert_eq!(retry_after_us(&headers), Some(2_000_000));
        headers.insert("retry-after-ms", HeaderValue::from_static("1500.5"));
        assert_eq!(retry_after_us(&headers), Some(1_500_500));
        headers.insert("retry-after-ms", HeaderValue::from_static("-1"));
        assert_eq!(retry_after_us(&headers), None, "a time before now is no promise");
    }
}
