//! The prefill leg: the prompt is computed, and what the decode leg needs comes out, or the answer itself.

use std::time::Duration;

use baton_types::{Finish, TokenLogprob};
use http::header::{HeaderName, HeaderValue};
use serde_json::json;
use tokio::time::Instant;

use crate::answer::Progress;
use crate::completions::WholeAnswer;
use crate::engine::RemoteEngine;
use crate::error::{Kind, RemoteError, Side, Stage};
use crate::fields::{Body, Client, WrittenBody};
use crate::generation::Abort;
use crate::handoff::{Handoff, Way, now_us};
use crate::http::Call;
use crate::ids::{fresh63, leg_id};
use crate::nixl;
use crate::request::{Counts, Request, Token};
use crate::settings::{EngineRole, HandoffWay};
use crate::sglang;
use crate::vllm::{self, Leg};

/// The next step for a request whose prompt is computed.
#[derive(Debug)]
pub enum NextStep {
    /// Decode it from here.
    Decode(Handoff),
    /// Its hand-off was offered before ([`PrefillLeg::offer`]): the decode leg is under way.
    Offered,
    /// Nothing: the tokens are the whole answer.
    Answer(Finish),
}

/// A finished prefill leg.
#[derive(Debug)]
pub struct PrefillResult {
    /// The token that was drawn. It is part of the answer only with [`NextStep::Answer`]: a decode leg reports its first
    /// token itself.
    pub tokens: Vec<Token>,
    /// Logprobs of the prompt's tokens but the first, when asked for. The decode leg does not tell them.
    pub prompt_logprobs: Option<Vec<TokenLogprob>>,
    /// The usage. `cached_tokens` is the prefill engine's prefix hit, if it reports one.
    pub counts: Counts,
    /// The next step.
    pub next: NextStep,
    /// With [`NextStep::Answer`]: KV that the engine lends although nobody needs it. A decode leg that takes it and is thrown away
    /// frees it; otherwise it stays for its lease.
    pub left: Option<Handoff>,
}

/// A prefill leg that is ready to run. Nothing is sent before [`Self::run`] is polled; dropping the leg or its future
/// ends the request at the engine.
pub struct PrefillLeg {
    engine: RemoteEngine,
    request: Request,
    body: WrittenBody,
    leg: String,
    plan: Plan,
    offer: Option<Handoff>,
}

/// The way to interpret the answer.
enum Plan {
    /// One token is all that is wanted: no KV is kept for anybody.
    Answer,
    Nixl,
    Mooncake {
        engine_id: String,
        bootstrap: String,
        transfer_id: String,
    },
    Room,
}

impl std::fmt::Debug for PrefillLeg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefillLeg").field("leg", &self.leg).finish_non_exhaustive()
    }
}

impl PrefillLeg {
    /// The hand-off of an engine whose two legs have to run at once (SGLang): `Some` once, before the leg runs. Give it to
    /// the decode leg right away, and run this leg meanwhile; when one of them fails, drop the other. Engines whose decode
    /// leg comes after offer nothing here.
    pub const fn offer(&mut self) -> Option<Handoff> {
        self.offer.take()
    }

    /// The name under which the engine knows this leg.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.leg
    }

    /// Runs the leg to its end.
    ///
    /// # Errors
    /// When the engine fails, or gives less than a decode engine needs.
    pub async fn run(self) -> Result<PrefillResult, RemoteError> {
        let stage = Stage::Prefill;
        let wait = Duration::from_micros(self.engine.settings().timeouts.answer_us);
        let until = Instant::now() + wait;
        let room = matches!(self.plan, Plan::Room);
        let mut abort = room.then(|| Abort::new(self.engine.wire(), self.leg.clone()));
        let path = if room { "/generate" } else { "/v1/completions" };
        let headers = if room { vec![] } else { self.engine.vllm_headers(&self.leg)? };
        let call = Call { stage, path, elsewhere: None, headers, until };
        let wire = self.engine.wire();
        let answer = wire.post(self.body.clone(), call).await?;
        let bytes = wire.whole(answer, until, stage).await?;
        if let Some(abort) = &mut abort {
            abort.disarm();
        }
        self.read(&bytes)
    }

    fn read(self, bytes: &[u8]) -> Result<PrefillResult, RemoteError> {
        let sampling = &self.request.sampling;
        let stage = Stage::Prefill;
        let whole = if matches!(self.plan, Plan::Room) {
            let prompt = self.request.tokens.clone();
            let (logprobs, prompt_logprobs) = (sampling.logprobs, sampling.prompt_logprobs);
            let mut reader = sglang::Reader { stage, prompt, logprobs, prompt_logprobs, seen: Vec::new() };
            WholeAnswer { progress: reader.event(bytes)?, kv_transfer_params: None }
        } else {
            self.engine.reader(&self.request, stage).whole(bytes)?
        };
        let WholeAnswer { progress, kv_transfer_params } = whole;
        progress.check_ids(self.engine.settings().vocab_tokens, stage)?;
        let Progress { tokens, prompt_logprobs, finish, counts } = progress;
        let Some(finish) = finish else {
            return Err(RemoteError::bug(stage, "the prefill's answer does not say how it ended"));
        };
        let answers = finish == Finish::Stop || sampling.max_tokens == 1;
        let mut left = None;
        let next = match self.plan {
            Plan::Room => NextStep::Offered,
            Plan::Answer => NextStep::Answer(finish),
            Plan::Nixl => match nixl_handoff(&self.engine, &self.request, kv_transfer_params) {
                // vLLM's NixlConnector lends the KV even of a prompt whose first token ends the answer. Unusable
                // parameters of it do not make the answer invalid.
                Ok((handoff, true)) if answers => {
                    left = Some(handoff);
                    NextStep::Answer(finish)
                }
                Err(_) if answers => NextStep::Answer(finish),
                handoff => NextStep::Decode(handoff?.0),
            },
            _ if answers => NextStep::Answer(finish),
            Plan::Mooncake { engine_id, bootstrap, transfer_id } => {
                let lease = self.engine.lease(None);
                NextStep::Decode(Handoff::new(
                    &self.request,
                    Way::Mooncake { engine_id, bootstrap, transfer_id },
                    lease,
                ))
            }
        };
        if matches!(next, NextStep::Answer(_)) && tokens.is_empty() && counts.answer_tokens.unwrap_or(0) == 0
        {
            return Err(RemoteError::retry(stage, "an answer without a token"));
        }
        Ok(PrefillResult { tokens, prompt_logprobs, counts, next, left })
    }
}

/// The hand-off, and whether it is of the whole prompt.
fn nixl_handoff(
    engine: &RemoteEngine,
    request: &Request,
    params: Option<Box<serde_json::value::RawValue>>,
) -> Result<(Handoff, bool), RemoteError> {
    let Some(params) = params else {
        return Err(RemoteError::bug(Stage::Handoff, "the prefill's answer has no kv_transfer_params").remedy(
            "start the prefill engine with --kv-transfer-config and NixlConnector, or give this engine no hand-off",
        ));
    };
    let terms = nixl::check(&params, request.tokens.len() as u64, engine.block_tokens())
        .map_err(|flaw| RemoteError::bug(Stage::Handoff, flaw.to_string()))?;
    let lease = engine.lease(nixl::expiry_us(terms, now_us()));
    Ok((Handoff::new(request, Way::Nixl { params }, lease), terms.whole))
}

impl RemoteEngine {
    /// Makes a prefill leg of a request. With Mooncake this asks the bootstrap server for the engine's name first.
    ///
    /// # Errors
    /// When the request cannot be served, this engine has no way of handing over, or the bootstrap server does not answer.
    pub async fn prefill(&self, request: Request) -> Result<PrefillLeg, RemoteError> {
        self.check_role(EngineRole::Prefill)?;
        let client = Client::of(&request)?;
        let leg = leg_id(&request.id);
        let one = request.sampling.max_tokens == 1;
        let settings = self.settings();
        let (plan, mut body) = match &settings.handoff {
            HandoffWay::None => {
                return Err(RemoteError::ours(Stage::Prefill, "this engine has no way of handing KV over")
                    .remedy("set the engine's hand-off, or let it serve whole requests"));
            }
            HandoffWay::Rooms { .. } => (Plan::Room, sglang::body(&request, client, &leg, false)?),
            way => {
                let body = vllm::body(&request, client, Leg::Prefill, settings.dialect)?;
                let plan = match way {
                    _ if one => Plan::Answer,
                    HandoffWay::Mooncake { bootstrap_url } => self.transfer(bootstrap_url).await?,
                    _ => Plan::Nixl,
                };
                (plan, body)
            }
        };
        let mut offer = None;
        match &plan {
            Plan::Answer => {}
            // The fields that are null are those that the engine fills in.
            Plan::Nixl => body.set(
                "kv_transfer_params",
                &json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                    "remote_block_ids": null, "remote_host": null, "remote_port": null}),
            )?,
            Plan::Mooncake { transfer_id, .. } => body.set(
                "kv_transfer_params",
                &json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer_id}),
            )?,
            Plan::Room => offer = Some(self.open_room(&request, &mut body)?),
        }
        self.name_model(&mut body)?;
        let body = body.written()?;
        Ok(PrefillLeg { engine: self.clone(), request, body, leg, plan, offer })
    }

    fn open_room(&self, request: &Request, body: &mut Body) -> Result<Handoff, RemoteError> {
        let HandoffWay::Rooms { host, port } = &self.settings().handoff else {
            return Err(RemoteError::ours(Stage::Prefill, "this engine has no rooms"));
        };
        let wire = self.wire();
        let host = host.clone().unwrap_or_else(|| wire.host().to_owned());
        let rank = self.settings().dp_rank;
        let room = room_of(rank.zip(self.probed().and_then(|probe| probe.dp_ranks)))?;
        set_room(body, (&host, *port, room), rank)?;
        self.name_rank(body)?;
        Ok(Handoff::new(request, Way::Room { host, port: *port, room, rank }, self.lease(None)))
    }

    /// Names a transfer, and finds the engine's name at its bootstrap server.
    async fn transfer(&self, bootstrap_url: &str) -> Result<Plan, RemoteError> {
        let stage = Stage::Prefill;
        if bootstrap_url.is_empty() {
            return Err(RemoteError::ours(stage, "this engine has no bootstrap URL")
                .remedy("give a prefill engine its bootstrap URL, like http://host:8998"));
        }
        let until = Instant::now() + Duration::from_micros(self.settings().timeouts.page_us);
        let call = Call { stage, path: "/query", elsewhere: Some(bootstrap_url), headers: vec![], until };
        let (status, page) = self.wire().page(call).await?;
        if !status.is_success() {
            let text = format!("the bootstrap server answered {}", status.as_u16());
            return Err(
                RemoteError::new(Kind::Unavailable, Side::Engine, stage, text).status(status.as_u16())
            );
        }
        let engine_id = engine_of(&page, self.settings().dp_rank)?;
        let transfer_id = format!("xfer-{:016x}{:016x}", fresh63(), fresh63());
        Ok(Plan::Mooncake {
            engine_id,
            bootstrap: bootstrap_url.trim_end_matches('/').to_owned(),
            transfer_id,
        })
    }
}

/// A room that no request had before. Of a server with several ranks it is one of the rank that is meant: both sides find
/// the rank that prefills by the room's number.
fn room_of(rank: Option<(u32, u32)>) -> Result<u64, RemoteError> {
    let Some((rank, ranks)) = rank.filter(|(_, ranks)| *ranks > 1) else { return Ok(fresh63()) };
    let tries = 1_000 * usize::try_from(ranks).unwrap_or(usize::MAX / 1_000);
    let mut rooms = std::iter::repeat_with(fresh63).take(tries);
    rooms.find(|room| room % u64::from(ranks) == u64::from(rank)).ok_or_else(|| {
        RemoteError::ours(Stage::Prefill, format!("no room of rank {rank} of {ranks}"))
            .remedy("name a data-parallel rank that the engine has")
    })
}

/// The bootstrap fields, alike on both legs.
pub(crate) fn set_room(
    body: &mut Body,
    (host, port, room): (&str, u16, u64),
    rank: Option<u32>,
) -> Result<(), RemoteError> {
    body.set("bootstrap_host", host)?;
    body.set("bootstrap_port", &port)?;
    body.set("bootstrap_room", &room)?;
    rank.map_or(Ok(()), |rank| body.set("disagg_prefill_dp_rank", &rank))
}

/// The engine's name in a bootstrap server's answer, by data-parallel rank.
fn engine_of(page: &[u8], rank: Option<u32>) -> Result<String, RemoteError> {
    let stage = Stage::Prefill;
    let read: std::collections::BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(page).map_err(|error| {
            RemoteError::bug(stage, format!("the bootstrap server's answer cannot be read: {error}"))
        })?;
    let named = |rank: &str| read.get(rank).and_then(|one| one["engine_id"].as_str()).map(str::to_owned);
    let found = match rank {
        Some(rank) => named(&rank.to_string()),
        None if read.len() > 1 => {
            let text = format!("the bootstrap server knows {} data-parallel ranks", read.len());
            return Err(RemoteError::ours(stage, text).remedy("say which rank this engine is (dp_rank)"));
        }
        None => read.keys().next().and_then(|rank| named(rank)),
    };
    found.filter(|id| !id.is_empty()).ok_or_else(|| {
        let text = "the bootstrap server does not know the prefill engine";
        RemoteError::new(Kind::Unavailable, Side::Engine, stage, text)
            .remedy("wait until the prefill engine has registered, or fix the bootstrap URL")
    })
}

/// `X-Request-Id`, and the data-parallel rank where one is meant.
pub(crate) fn vllm_headers(
    leg: &str,
    rank: Option<u32>,
) -> Result<Vec<(HeaderName, HeaderValue)>, RemoteError> {
    let value = HeaderValue::from_str(leg).map_err(|_| {
        RemoteError::new(Kind::Bug, Side::Us, Stage::Prepare, "a request id that no header may hold")
    })?;
    let mut headers = vec![(HeaderName::from_static("x-request-id"), value)];
    if let Some(rank) = rank {
        headers.push((HeaderName::from_static("x-data-parallel-rank"), HeaderValue::from(rank)));
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_are_of_the_rank_that_is_meant_and_never_the_same() {
        let mut seen = std::collections::BTreeSet::new();
        for (rank, ranks) in [(0, 1), (0, 2), (1, 2), (6, 7), (63, 64)] {
            for _ in 0..50 {
                let room = room_of(Some((rank, ranks))).unwrap();
                assert!(ranks == 1 || room % u64::from(ranks) == u64::from(rank));
                assert!(seen.insert(room) && room <= i64::MAX as u64);
            }
        }
        assert!(seen.insert(room_of(None).unwrap()));
        assert!(room_of(Some((2, 2))).unwrap_err().text.contains("rank 2 of 2"));
    }

    #[test]
    fn the_bootstrap_server_names_the_engine() {
        // As in pd_mooncake.json.
        let seen = br#"{"0": {"engine_id": "75710752-3d2e-42cc-8c96-76bff4387671", "worker_addr": {"0": {"0": "tcp://127.0.0.1:44301"}}}}"#;
        assert_eq!(engine_of(seen, None).unwrap(), "75710752-3d2e-42cc-8c96-76bff4387671");
        assert_eq!(engine_of(seen, Some(0)).unwrap(), "75710752-3d2e-42cc-8c96-76bff4387671");
        assert_eq!(engine_of(seen, Some(1)).unwrap_err().kind, Kind::Unavailable);
        assert_eq!(engine_of(b"{}", None).unwrap_err().kind, Kind::Unavailable);
        assert_eq!(engine_of(b"[]", None).unwrap_err().kind, Kind::Bug);
        let two = br#"{"0": {"engine_id": "a"}, "1": {"engine_id": "b"}}"#;
        assert_eq!(engine_of(two, None).unwrap_err().kind, Kind::Invalid);
        assert_eq!(engine_of(two, Some(1)).unwrap(), "b");
    }
}
