//! The two legs of a pair, as NixlConnector and MooncakeConnector have them.

use std::sync::Arc;
use std::time::Instant;

use baton_types::Finish;
use serde_json::{Map, Value, json};

use super::responses::Answer;
use super::{FakeConnector, RunningGuard, Vllm};
use crate::testing::FakeRole;
use crate::testing::body::{CompletionRequest, bad_request, server_error};
use crate::testing::fabric::Transfer;
use crate::testing::fault::Fault;
use crate::testing::nixl::{FailureMode, Reading};
use crate::testing::pool::HeldBlocks;
use crate::testing::server::{Reply, pass};

impl Vllm {
    pub(super) async fn leg(
        self: Arc<Self>,
        request: CompletionRequest,
        params: Map<String, Value>,
        rest: (String, Option<Fault>, RunningGuard),
    ) -> Reply {
        let is = |name: &str| params.get(name) == Some(&json!(true));
        match (is("do_remote_decode"), is("do_remote_prefill"), self.spec.connector) {
            (_, _, FakeConnector::None) => {
                self.stand.log.violate("kv_transfer_params to an engine that hands nothing over");
                self.whole(request, rest).await
            }
            (true, false, _) => self.prefill(request, params, rest).await,
            (false, true, _) => self.decode(request, params, rest).await,
            _ => {
                self.stand.log.violate("kv_transfer_params of both legs, or of neither");
                bad_request("kv_transfer_params")
            }
        }
    }

    async fn prefill(
        self: Arc<Self>,
        request: CompletionRequest,
        params: Map<String, Value>,
        (id, fault, running): (String, Option<Fault>, RunningGuard),
    ) -> Reply {
        if self.spec.role == FakeRole::Decode {
            self.stand.log.violate("a prefill leg to a decode engine");
        }
        if request.stream || request.sampling.max_tokens != 1 {
            self.stand.log.violate("a prefill leg that streams, or wants more than a token");
        }
        let transfer = params.get("transfer_id").and_then(Value::as_str).unwrap_or_default().to_owned();
        if self.spec.connector == FakeConnector::Mooncake
            && (transfer.is_empty()
                || !self.fabric.change(|state| state.transfer_names.insert(transfer.clone())))
        {
            self.stand.log.violate(format!("a transfer without a name of its own: {transfer:?}"));
        }
        let Some(blocks) = self.pool.fill(&request.prompt) else { return server_error() };
        let held = HeldBlocks { pool: Arc::clone(&self.pool), blocks };
        pass(self.spec.prefill_time).await;
        let cached = self.prompts.compute(&request.salt, &request.prompt).await;
        let (answer, finish) = self.draw(&request.prompt, &request.sampling);
        let mut response =
            Answer { request, id, answer, finish, cached, computed: true, params: Value::Null, fault };
        // MooncakeConnector lends only what was cut short; NixlConnector what an end token ended, too.
        let mooncake = self.spec.connector == FakeConnector::Mooncake;
        if finish == Finish::Stop && mooncake || response.request.stream {
            return self.respond(response, (held, running));
        }
        let blocks = held.keep();
        if self.spec.connector == FakeConnector::Nixl {
            response.params = self.lent(&response, &blocks);
            self.pool.lend(&response.id, blocks, self.spec.lease);
        } else {
            let until = Instant::now() + self.spec.lease;
            self.pool.lend(&transfer, blocks, self.spec.lease);
            let named =
                Transfer { tokens: response.request.prompt.clone(), until, pool: Arc::clone(&self.pool) };
            self.fabric.change(|state| state.transfers.insert((self.engine_id.clone(), transfer), named));
        }
        let nothing = HeldBlocks { pool: Arc::clone(&self.pool), blocks: Vec::new() };
        self.respond(response, (nothing, running))
    }

    /// Where the blocks are, in NixlConnector's words.
    fn lent(&self, response: &Answer, blocks: &[u32]) -> Value {
        let mut params = json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [blocks],
            "remote_engine_id": self.engine_id, "remote_request_id": response.id, "remote_host": "127.0.0.1", "remote_port": 5600,
            "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": response.request.prompt.len(),
            "remote_blocks_expiry_time": null, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0});
        match &response.fault {
            Some(Fault::Lack(name)) => drop(params.as_object_mut().and_then(|params| params.remove(*name))),
            Some(Fault::Instead(name, value)) => {
                params[*name] = serde_json::from_str(value).unwrap_or_default()
            }
            _ => {}
        }
        params
    }

    async fn decode(
        self: Arc<Self>,
        request: CompletionRequest,
        params: Map<String, Value>,
        (id, fault, running): (String, Option<Fault>, RunningGuard),
    ) -> Reply {
        if self.spec.role == FakeRole::Prefill {
            self.stand.log.violate("a decode leg to a prefill engine; the real server exits");
            self.exit();
            return Reply::Hangup;
        }
        let Some(blocks) = self.pool.fill(&request.prompt) else { return server_error() };
        let held = HeldBlocks { pool: Arc::clone(&self.pool), blocks };
        let read = if self.spec.connector == FakeConnector::Nixl {
            let block_tokens = self.spec.block_tokens as usize;
            Reading { fabric: &self.fabric, log: &self.stand.log, block_tokens }
                .read(&request.prompt, &params)
        } else {
            self.fetch(&request.prompt, &params).await
        };
        let context = match read {
            Ok(context) => context,
            // As recorded: a stream has begun by then, so the error is an event in it.
            Err(FailureMode::Request) if request.stream => {
                let response = Answer {
                    request,
                    id,
                    answer: vec![0],
                    finish: Finish::Length,
                    cached: 0,
                    computed: false,
                    params: Value::Null,
                    fault: Some(Fault::ErrorAfter(0)),
                };
                return self.respond(response, (held, running));
            }
            Err(FailureMode::Request) => return server_error(),
            Err(FailureMode::Server) => {
                self.exit();
                return Reply::Hangup;
            }
        };
        let context = self.cached(&request).unwrap_or(context);
        if context != request.prompt {
            self.poisoned.lock().insert((request.salt.clone(), request.prompt.clone()), context.clone());
        }
        let (answer, finish) = self.draw(&context, &request.sampling);
        let response =
            Answer { request, id, answer, finish, cached: 0, computed: false, params: Value::Null, fault };
        self.respond(response, (held, running))
    }

    /// Waits for the prefill of a Mooncake transfer, and takes it.
    async fn fetch(&self, prompt: &[u32], params: &Map<String, Value>) -> Result<Vec<u32>, FailureMode> {
        let word = |name: &str| params.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (engine, transfer) = (word("remote_engine_id"), word("transfer_id"));
        if engine.is_empty() || transfer.is_empty() || word("remote_bootstrap_addr").is_empty() {
            self.stand.log.violate("decode: a Mooncake transfer without all of its names");
            return Err(FailureMode::Request);
        }
        if !self.fabric.0.state.lock().engines.contains(&engine) {
            return Err(FailureMode::Request);
        }
        let key = (engine, transfer);
        let until = Instant::now() + self.spec.wait;
        let found = self.fabric.wait_for(until, |state| state.transfers.remove(&key)).await;
        let Some(found) = found.filter(|found| found.until > Instant::now()) else {
            self.stand
                .log
                .violate("decode: a transfer that nobody has, that was taken, or whose lease is over");
            return Err(FailureMode::Request);
        };
        if found.tokens.len() < prompt.len() {
            self.stand.log.violate("decode: a longer prompt than the prefill's");
            return Err(FailureMode::Request);
        }
        // Its blocks are free now.
        found.pool.read(&key.1, &[]);
        let tokens = found.tokens[..prompt.len()].to_vec();
        if tokens != prompt {
            self.stand.log.violate("decode: a transfer of another prompt");
        }
        Ok(tokens)
    }
}
