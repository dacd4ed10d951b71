//! The task of a leg: it calls the engine and reports the result.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_remote::{
    CollectedAnswer, Dialect, Generation, Handoff, HandoffWay, Kind, NextStep, Piece, PrefillResult,
    RemoteEngine, RemoteError, Request, Side, Stage, Token,
};
use baton_types::{Finish, Sampling};
use baton_wire::v1;
use bytes::Bytes;
use futures_util::FutureExt as _;

use super::remote_legs::{FactSender, LegSignals};
use super::split::{PromptTurn, RunningAnswer};
use super::work::Work;
use v1::fact::Fact;

/// Time for which a leg goes on after its request has ended, so that no KV stays behind at the engine. A leg that ended
/// at once may leave KV that was computed an instant before, and no request will fetch it. A leg that goes on computes
/// for nothing. A busy vLLM learns of an end only after its pass: of 17 prefills that were ended after half a second, 9
/// left their KV.
const GRACE: Duration = Duration::from_secs(2);
/// Grace time of a decode leg in a room. Its KV goes with its prefill leg, so none waits for a fetch.
const GRACE_IN_ROOM: Duration = Duration::from_millis(500);
/// Tokens that go on together at most: so many fill a packet.
const TOKENS_TOGETHER: usize = 64;

/// The prefill leg of a pair.
pub(super) async fn prefill(engine: RemoteEngine, work: Work, sender: FactSender, signals: LegSignals) {
    let outcome = prefilled(&engine, &work, &sender, signals).await;
    settle(outcome, sender).await;
}

async fn prefilled(
    engine: &RemoteEngine,
    work: &Work,
    sender: &FactSender,
    signals: LegSignals,
) -> Result<(), RemoteError> {
    let began = Instant::now();
    let held = sender.held(&work.chain);
    let mut leg = engine.prefill(work.request.clone()).await?;
    if let Some(handoff) = leg.offer() {
        sender.send(vec![offer(handoff.into_bytes().into())]).await;
    }
    let grace = if lends(engine) { GRACE } else { Duration::ZERO };
    let Some(done) = until_over(leg.run(), &signals, grace).await else {
        tracing::debug!(request = &*work.request.id, "a prefill that nobody wants was cut short");
        return Ok(());
    };
    let done = done?;
    let compute_us = us_since(began);
    let PrefillResult { tokens, prompt_logprobs, counts, next, left } = done;
    sender.found(work, &held, counts.cached_tokens).await;
    sender.computed(&work.chain).await;
    let mut facts = Vec::new();
    if let Some(logprobs) = prompt_logprobs {
        facts.push(prompt_fact(&logprobs));
    }
    let lease = Duration::from_micros(engine.settings().lease.lease_us);
    // A node that stood still reads late what its engine said early: that KV may be gone, and asking for it holds more.
    let until = began + lease;
    let mut lent = Bytes::new();
    match next {
        NextStep::Decode(handoff) => {
            lent = handoff.into_bytes().into();
            facts.push(offer(lent.clone()));
        }
        NextStep::Offered => {}
        NextStep::Answer(finish) => {
            facts.extend(token_facts(&tokens, work.given));
            facts.push(ended(finish, counts.cached_tokens));
        }
    }
    facts.push(prefilled_fact(compute_us, counts.cached_tokens));
    if !signals.over.is_cancelled() {
        sender.send(facts).await;
    }
    if !lent.is_empty() {
        see_taken((work, until), lent, lease, (sender, signals)).await;
    }
    if let Some(handoff) = left {
        abandon((work, until), handoff.into_bytes().into(), sender).await;
    }
    Ok(())
}

/// Whether KV waits to be fetched under its name. In a room it goes with its leg.
fn lends(engine: &RemoteEngine) -> bool {
    matches!(engine.settings().handoff, HandoffWay::Nixl | HandoffWay::Mooncake { .. })
}

/// Waits until an offer was passed on; where it never will be, says that its KV is nobody's.
async fn see_taken(
    (work, until): (&Work, Instant),
    transfer: Bytes,
    lease: Duration,
    (sender, signals): (&FactSender, LegSignals),
) {
    let LegSignals { over, gate } = signals;
    let taken = tokio::select! {
        biased;
        // Its entry among the node's legs, with the other end, is dropped when the leg is over.
        taken = gate => taken.is_ok(),
        () = over.cancelled() => false,
        () = tokio::time::sleep(lease) => true,
    };
    if !taken {
        abandon((work, until), transfer, sender).await;
    }
}

/// Reports orphaned KV, so that another node fetches and discards it.
async fn abandon((work, until): (&Work, Instant), transfer: Bytes, sender: &FactSender) {
    let tokens = baton_wire::pack_tokens(&(&*work.request.tokens).into());
    sender.abandon(v1::Loan { transfer, tokens }, until).await;
}

/// Fetches orphaned KV from its engine and discards it.
pub(super) async fn discard(
    engine: &RemoteEngine,
    tokens: Vec<u32>,
    transfer: &[u8],
) -> Result<(), RemoteError> {
    let request = Request::of_one_token("abandoned".into(), tokens.into());
    engine.decode(request, Handoff::from_bytes(transfer)?).await?.all().await.map(drop)
}

/// The result of `call`, or `None` once the leg has been over for longer than `grace`.
async fn until_over<T>(call: impl Future<Output = T>, signals: &LegSignals, grace: Duration) -> Option<T> {
    let given_up = async {
        signals.over.cancelled().await;
        tokio::time::sleep(grace).await;
    };
    tokio::select! {
        biased;
        done = call => Some(done),
        () = given_up => None,
    }
}

/// The decode leg of a pair: its call begins as soon as the KV can be taken; its tokens wait for the word to decode.
pub(super) async fn decode(
    engine: RemoteEngine,
    (work, transfer): (Work, Bytes),
    sender: FactSender,
    signals: LegSignals,
) {
    let outcome = decoded(&engine, (&work, &transfer), &sender, signals).await;
    settle(outcome, sender).await;
}

async fn decoded(
    engine: &RemoteEngine,
    (work, transfer): (&Work, &Bytes),
    sender: &FactSender,
    mut signals: LegSignals,
) -> Result<(), RemoteError> {
    let handoff = Handoff::from_bytes(transfer)?;
    // Until the first token comes, the KV may still be where it was.
    let call = engine.decode(work.request.clone(), handoff);
    let begun = async {
        let mut generation = call.await?;
        let first = next_piece(&mut generation).await?;
        Ok::<_, RemoteError>((generation, first))
    };
    let grace = if lends(engine) { GRACE } else { GRACE_IN_ROOM };
    let Some(begun) = until_over(begun, &signals, grace).await else {
        tracing::debug!(request = &*work.request.id, "a decode that nobody wants was cut short");
        return Ok(());
    };
    let (generation, first) = begun?;
    if !goes_on(&mut signals).await {
        return Ok(());
    }
    let running = running(work, sender);
    let answer = Answer { piece: first, next: work.given, held: None, running };
    forward(generation, answer, sender, &signals).await
}

/// Waits for the word to go on; false when it will not come.
async fn goes_on(signals: &mut LegSignals) -> bool {
    tokio::select! {
        told = &mut signals.gate => told.is_ok(),
        () = signals.over.cancelled() => false,
    }
}

/// A request that is prefilled and decoded on one engine.
pub(super) async fn whole(engine: RemoteEngine, work: Work, sender: FactSender, signals: LegSignals) {
    let over = signals.over.clone();
    let outcome = tokio::select! {
        outcome = alone(&engine, &work, &sender, signals) => outcome,
        // Its call ends here, which is how the engine hears of it.
        () = over.cancelled() => Ok(()),
    };
    settle(outcome, sender).await;
}

async fn alone(
    engine: &RemoteEngine,
    work: &Work,
    sender: &FactSender,
    signals: LegSignals,
) -> Result<(), RemoteError> {
    let splitter = sender.splitter();
    let mut turn = match splitter {
        Some(splitter) => Some(splitter.turn_of(engine, work).await?),
        None => None,
    };
    let began = Instant::now();
    // A prompt that came in parts finds itself in the engine's cache.
    let mut found_tokens = turn.as_ref().and_then(|turn| turn.found_tokens);
    let held = sender.held(&work.chain);
    let mut facts = Vec::new();
    let (mut request, mut computed_us) = (work.request.clone(), None);
    if let Some((prompt, rest)) = prompt_alone(engine, &request).await? {
        computed_us = Some(compute_us(&mut turn, began));
        turn = None;
        found_tokens = Some(prompt.counts.cached_tokens.unwrap_or(0));
        facts.extend(prompt.prompt_logprobs.as_deref().map(prompt_fact));
        request = rest;
    }
    let mut generation = engine.generate(request).await?;
    let rest = loop {
        match next_piece(&mut generation).await? {
            Piece::PromptLogprobs(logprobs) => facts.push(prompt_fact(&logprobs)),
            Piece::Tokens(mut tokens) => {
                let rest = tokens.split_off(1.min(tokens.len()));
                facts.extend(token_facts(&tokens, work.given));
                break rest;
            }
            Piece::Finished { finish, counts } => {
                let cached_tokens = found_at_first(counts.cached_tokens, found_tokens);
                sender.found(work, &held, cached_tokens).await;
                facts.push(ended(finish, cached_tokens));
                let computed_us = computed_us.unwrap_or_else(|| compute_us(&mut turn, began));
                facts.push(prefilled_fact(computed_us, cached_tokens));
                sender.send(facts).await;
                return Ok(());
            }
        }
    };
    let computed_us = computed_us.unwrap_or_else(|| compute_us(&mut turn, began));
    facts.push(prefilled_fact(computed_us, found_tokens));
    drop(turn);
    let mut running = running(work, sender);
    if let Some(running) = &mut running {
        running.on_tokens(1);
    }
    sender.computed(&work.chain).await;
    sender.send(facts).await;
    let held = Some(FoundPrompt { work, held, found_tokens });
    let answer = Answer { piece: Piece::Tokens(rest), next: work.given + 1, held, running };
    forward(generation, answer, sender, &signals).await
}

/// The engine's own time for a prompt whose first token is there, µs.
fn compute_us(turn: &mut Option<PromptTurn<'_>>, began: Instant) -> u64 {
    turn.as_mut().map_or_else(|| us_since(began), PromptTurn::first_token)
}

/// Computes a prompt whose logprobs are asked for at an engine that streams no answer with them. Returns them, and the request
/// for the answer, whose tokens are all drawn by the second call. `None` where one call is enough.
async fn prompt_alone(
    engine: &RemoteEngine,
    request: &Request,
) -> Result<Option<(CollectedAnswer, Request)>, RemoteError> {
    let sampling = &request.sampling;
    let streams = engine.settings().dialect == Dialect::Sglang || sampling.prompt_logprobs.is_none();
    if streams || sampling.max_tokens == 1 {
        return Ok(None);
    }
    let with = |sampling| Request { sampling: Arc::new(sampling), ..request.clone() };
    // Its token is not the answer's, and ends nothing.
    let first =
        Sampling { max_tokens: 1, ignore_eos: true, stop_token_ids: Vec::new(), ..Sampling::clone(sampling) };
    let prompt = engine.generate(with(first)).await?.all().await?;
    Ok(Some((prompt, with(Sampling { prompt_logprobs: None, ..Sampling::clone(sampling) }))))
}

/// An answer that has begun.
struct Answer<'a> {
    /// The first piece of the answer.
    piece: Piece,
    /// The position of its first token.
    next: u32,
    /// The prompt that was computed here. It is `None` for one that was computed elsewhere: the decode engine counts the KV
    /// it received as cached.
    held: Option<FoundPrompt<'a>>,
    /// Where others wait for its steps.
    running: Option<RunningAnswer>,
}

/// An answer whose first token is the next that comes, where others wait for its steps.
fn running(work: &Work, sender: &FactSender) -> Option<RunningAnswer> {
    sender.splitter().map(|splitter| RunningAnswer::new(splitter, work.request.sampling.max_tokens))
}

/// A prompt that was computed here.
struct FoundPrompt<'a> {
    work: &'a Work,
    /// The times at which its assumed blocks were last used.
    held: Vec<u64>,
    /// Tokens that the engine had of it, if it came in parts.
    found_tokens: Option<u64>,
}

/// Prompt tokens that the engine had before it was asked, out of what it counts at the end.
fn found_at_first(counted: Option<u64>, found_tokens: Option<u64>) -> Option<u64> {
    counted.map(|counted| found_tokens.map_or(counted, |found| found.min(counted)))
}

/// Reports the tokens and the end.
async fn forward(
    mut generation: Generation,
    answer: Answer<'_>,
    sender: &FactSender,
    signals: &LegSignals,
) -> Result<(), RemoteError> {
    let Answer { mut piece, mut next, held, mut running } = answer;
    loop {
        match piece {
            // The prefill leg has reported them.
            Piece::PromptLogprobs(_) => {}
            Piece::Tokens(mut tokens) => {
                let after = and_what_came_with_it(&mut generation, &mut tokens).await;
                if let Some(running) = &mut running {
                    running.on_tokens(tokens.len());
                }
                if !tokens.is_empty() && !sender.send(token_facts(&tokens, next)).await {
                    return Ok(());
                }
                next = next.saturating_add(count(&tokens));
                if let Some(after) = after {
                    piece = after?;
                    continue;
                }
            }
            Piece::Finished { finish, counts } => {
                let found = held.as_ref();
                let cached_tokens =
                    found.and_then(|prompt| found_at_first(counts.cached_tokens, prompt.found_tokens));
                if let Some(prompt) = found {
                    sender.found(prompt.work, &prompt.held, cached_tokens).await;
                }
                sender.send(vec![ended(finish, cached_tokens)]).await;
                return Ok(());
            }
        }
        let came = until_over(next_piece(&mut generation), signals, Duration::ZERO).await;
        let Some(came) = came else { return Ok(()) };
        piece = came?;
    }
}

/// Adds the tokens that are there already, so that those that came together go on together; the piece after them, if it
/// is there too. Nothing is waited for: the connection's own task, which hands over one piece at a time, has one turn.
async fn and_what_came_with_it(
    generation: &mut Generation,
    tokens: &mut Vec<Token>,
) -> Option<Result<Piece, RemoteError>> {
    while tokens.len() < TOKENS_TOGETHER {
        let there = match next_piece(generation).now_or_never() {
            Some(piece) => piece,
            None => {
                tokio::task::yield_now().await;
                next_piece(generation).now_or_never()?
            }
        };
        match there {
            Ok(Piece::Tokens(more)) => tokens.extend(more),
            other => return Some(other),
        }
    }
    None
}

/// Reports a failure, and closes the leg.
async fn settle(outcome: Result<(), RemoteError>, sender: FactSender) {
    if let Err(error) = outcome {
        // An engine that does not know the model that it was asked for is another one by now.
        let is_other = matches!(error.status, Some(404 | 405));
        if error.kind == Kind::Unavailable || error.cut_off || is_other {
            sender.doubt();
        }
        // vLLM answers everything that was in its engine when that died with 500, and ends a moment later.
        let broke_within = error.side == Side::Engine && error.status == Some(500);
        let asked = error.cut_off || broke_within || error.stage == Stage::Connect;
        let engine_gone = asked && sender.engine_is_gone().await;
        if engine_gone {
            sender.doubt();
        }
        let cut_off = error.cut_off || (broke_within && engine_gone);
        let of_request = error.kind == Kind::Invalid && error.side == Side::Client;
        let at_handoff = error.stage == Stage::Handoff;
        let stage = if at_handoff { v1::failure::Stage::Handoff } else { v1::failure::Stage::Engine };
        let (stage, message) = (stage.into(), error.to_string());
        let status = error.status.filter(|_| of_request).map_or(0, u32::from);
        let busy_us = error.busy_us.unwrap_or(0);
        let failure = v1::Failure {
            stage,
            message,
            of_request,
            cut_off,
            engine_gone,
            status,
            cannot_go_on: false,
            busy_us,
        };
        sender.send(vec![Fact::Failure(failure)]).await;
    }
    sender.close();
}

/// The next piece of an answer that has not ended yet.
async fn next_piece(generation: &mut Generation) -> Result<Piece, RemoteError> {
    let cut_short = || RemoteError {
        kind: Kind::Retry,
        side: Side::Engine,
        stage: Stage::Stream,
        status: None,
        text: "the answer ended without its end".into(),
        remedy: "".into(),
        cut_off: true,
        busy_us: None,
    };
    generation.next().await.unwrap_or_else(|| Err(cut_short()))
}

fn offer(transfer: Bytes) -> Fact {
    Fact::Offer(v1::Offer { transfer })
}

fn prefilled_fact(compute_us: u64, cached_tokens: Option<u64>) -> Fact {
    Fact::Prefilled(v1::Prefilled { compute_us, cached_tokens: cached_tokens.unwrap_or(0) })
}

fn ended(finish: Finish, cached_tokens: Option<u64>) -> Fact {
    Fact::Ended(v1::Ended { finish: v1::Finish::from(Some(finish)).into(), cached_tokens })
}

fn prompt_fact(logprobs: &[baton_types::TokenLogprob]) -> Fact {
    Fact::PromptLogprobs(v1::PromptLogprobs { logprobs: logprobs.iter().map(v1::Logprob::from).collect() })
}

fn token_facts(tokens: &[Token], first: u32) -> Vec<Fact> {
    let fact = |(at, token): (u32, &Token)| {
        let logprob = token.logprob.as_ref().map(v1::Logprob::from);
        Fact::Token(v1::Token { index: first + at, token: token.id, finish: 0, logprob, cached_tokens: None })
    };
    (0u32..).zip(tokens).map(fact).collect()
}

fn count(tokens: &[Token]) -> u32 {
    u32::try_from(tokens.len()).unwrap_or(u32::MAX)
}

fn us_since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX)
}
