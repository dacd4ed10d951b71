//! What a leg does: calls the engine, and tells what comes of it.

use std::time::Instant;

use baton_remote::{
    Generation, Handoff, Kind, Next, Piece, Prefilled, RemoteEngine, RemoteError, Side, Stage, Token,
};
use baton_types::Finish;
use baton_wire::v1;
use bytes::Bytes;
use tokio::sync::oneshot;

use super::desk::Voice;
use super::work::Work;
use v1::fact::Fact;

/// The prefill leg of a pair.
pub(super) async fn prefill(engine: RemoteEngine, work: Work, voice: Voice) {
    let outcome = prefilled(&engine, &work, &voice).await;
    settle(outcome, voice).await;
}

async fn prefilled(engine: &RemoteEngine, work: &Work, voice: &Voice) -> Result<(), RemoteError> {
    let began = Instant::now();
    let mut leg = engine.prefill(work.request.clone()).await?;
    if let Some(handoff) = leg.offer() {
        voice.tell(vec![offer(handoff)]).await;
    }
    let done = leg.run().await?;
    let compute_us = us_since(began);
    let Prefilled { tokens, prompt_logprobs, counts, next } = done;
    voice.computed(&work.chain).await;
    let mut facts = Vec::new();
    if let Some(logprobs) = prompt_logprobs {
        facts.push(prompt_fact(&logprobs));
    }
    match next {
        Next::Decode(handoff) => facts.push(offer(handoff)),
        Next::Offered => {}
        Next::Answer(finish) => {
            facts.extend(token_facts(&tokens, work.given));
            facts.push(ended(finish, counts.cached_tokens));
        }
    }
    facts.push(prefilled_fact(compute_us, counts.cached_tokens));
    voice.tell(facts).await;
    Ok(())
}

/// The decode leg of a pair: its call begins as soon as the KV can be taken; its tokens wait for the word to decode.
pub(super) async fn decode(
    engine: RemoteEngine,
    (work, transfer): (Work, Bytes),
    voice: Voice,
    gate: oneshot::Receiver<()>,
) {
    let outcome = decoded(&engine, (&work, &transfer), &voice, gate).await;
    settle(outcome, voice).await;
}

async fn decoded(
    engine: &RemoteEngine,
    (work, transfer): (&Work, &Bytes),
    voice: &Voice,
    gate: oneshot::Receiver<()>,
) -> Result<(), RemoteError> {
    let handoff = Handoff::from_bytes(transfer)?;
    let generation = engine.decode(work.request.clone(), handoff).await?;
    // The desk keeps the other end for as long as the leg lives.
    let _ = gate.await;
    forward(generation, work.given, voice).await
}

/// A request that is prefilled and decoded on one engine: it waits after its first token, as orders have it.
pub(super) async fn whole(engine: RemoteEngine, work: Work, voice: Voice, gate: oneshot::Receiver<()>) {
    let outcome = alone(&engine, &work, &voice, gate).await;
    settle(outcome, voice).await;
}

async fn alone(
    engine: &RemoteEngine,
    work: &Work,
    voice: &Voice,
    gate: oneshot::Receiver<()>,
) -> Result<(), RemoteError> {
    let began = Instant::now();
    let mut generation = engine.generate(work.request.clone()).await?;
    let mut facts = Vec::new();
    let rest = loop {
        match generation.next().await.unwrap_or_else(|| Err(cut_short()))? {
            Piece::PromptLogprobs(logprobs) => facts.push(prompt_fact(&logprobs)),
            Piece::Tokens(mut tokens) => {
                let rest = tokens.split_off(1.min(tokens.len()));
                facts.extend(token_facts(&tokens, work.given));
                break rest;
            }
            Piece::Finished { finish, counts } => {
                facts.push(ended(finish, counts.cached_tokens));
                facts.push(prefilled_fact(us_since(began), counts.cached_tokens));
                voice.tell(facts).await;
                return Ok(());
            }
        }
    };
    voice.computed(&work.chain).await;
    facts.push(prefilled_fact(us_since(began), None));
    voice.tell(facts).await;
    let _ = gate.await;
    let given = work.given + 1;
    if !rest.is_empty() {
        voice.tell(token_facts(&rest, given)).await;
    }
    forward(generation, given + count(&rest), voice).await
}

/// Tells the tokens from position `next` on, and the end.
async fn forward(mut generation: Generation, mut next: u32, voice: &Voice) -> Result<(), RemoteError> {
    loop {
        match generation.next().await.unwrap_or_else(|| Err(cut_short()))? {
            // The prefill leg told them.
            Piece::PromptLogprobs(_) => {}
            Piece::Tokens(tokens) => {
                if !voice.tell(token_facts(&tokens, next)).await {
                    return Ok(());
                }
                next = next.saturating_add(count(&tokens));
            }
            Piece::Finished { finish, counts } => {
                voice.tell(vec![ended(finish, counts.cached_tokens)]).await;
                return Ok(());
            }
        }
    }
}

/// Tells a failure, and closes the leg.
async fn settle(outcome: Result<(), RemoteError>, voice: Voice) {
    if let Err(error) = outcome {
        if error.kind == Kind::Unavailable {
            voice.doubt();
        }
        let of_request = error.kind == Kind::Invalid && error.side == Side::Client;
        let stage = if error.stage == Stage::Handoff { "handoff" } else { "engine" };
        let failure = v1::Failure { stage: stage.into(), message: error.to_string(), of_request };
        voice.tell(vec![Fact::Failure(failure)]).await;
    }
    voice.close();
}

fn cut_short() -> RemoteError {
    RemoteError {
        kind: Kind::Retry,
        side: Side::Engine,
        stage: Stage::Stream,
        status: None,
        text: "the answer ended without its end".into(),
        remedy: "send the request again".into(),
    }
}

fn offer(handoff: Handoff) -> Fact {
    Fact::Offer(v1::Offer { transfer: handoff.into_bytes().into() })
}

fn prefilled_fact(compute_us: u64, cached_tokens: Option<u64>) -> Fact {
    Fact::Prefilled(v1::Prefilled { compute_us, cached_tokens: cached_tokens.unwrap_or(0) })
}

fn ended(finish: Finish, cached_tokens: Option<u64>) -> Fact {
    let finish = if finish == Finish::Stop { 1 } else { 2 };
    Fact::Ended(v1::Ended { finish, cached_tokens })
}

fn prompt_fact(logprobs: &[baton_types::TokenLogprob]) -> Fact {
    Fact::PromptLogprobs(v1::PromptLogprobs { logprobs: logprobs.iter().map(v1::Logprob::from).collect() })
}

fn token_facts(tokens: &[Token], first: u32) -> Vec<Fact> {
    let fact = |(at, token): (u32, &Token)| {
        let logprob = token.logprob.as_ref().map(v1::Logprob::from);
        Fact::Token(v1::Token { index: first + at, token: token.id, finish: 0, logprob })
    };
    (0u32..).zip(tokens).map(fact).collect()
}

fn count(tokens: &[Token]) -> u32 {
    u32::try_from(tokens.len()).unwrap_or(u32::MAX)
}

fn us_since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX)
}
