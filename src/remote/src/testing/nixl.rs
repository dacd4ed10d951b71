//! How a decode engine takes what NIXL parameters name: as trusting as the real one.

use serde_json::{Map, Value};

use super::fabric::Fabric;
use super::pool::Standing;
use super::request_log::RequestLog;

/// How it ends when it does not end well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureMode {
    /// This request fails with a 500.
    Request,
    /// The whole server exits.
    Server,
}

/// A decode engine about to read.
pub(super) struct Reading<'a> {
    pub(super) fabric: &'a Fabric,
    pub(super) log: &'a RequestLog,
    pub(super) block_tokens: usize,
}

impl Reading<'_> {
    /// The tokens whose KV the parameters lead to, right or wrong.
    pub(super) fn read(&self, prompt: &[u32], params: &Map<String, Value>) -> Result<Vec<u32>, FailureMode> {
        let fatal = |what: &str| {
            self.log.violate(format!("decode: {what}; the real server exits"));
            Err(FailureMode::Server)
        };
        let Some(blocks) = blocks_of(params.get("remote_block_ids")) else {
            return fatal("remote_block_ids are missing or no lists of numbers");
        };
        if params.get("remote_host").and_then(Value::as_str).is_none_or(str::is_empty) {
            return fatal("remote_host is missing");
        }
        if params.get("remote_port").and_then(Value::as_u64).is_none_or(|port| port == 0) {
            return fatal("remote_port is missing");
        }
        if blocks.len() * self.block_tokens < prompt.len() {
            return fatal("fewer blocks than the prompt needs");
        }
        self.fetch(prompt, params, &blocks)
    }

    fn fetch(
        &self,
        prompt: &[u32],
        params: &Map<String, Value>,
        blocks: &[u64],
    ) -> Result<Vec<u32>, FailureMode> {
        let word = |name: &str| params.get(name).and_then(Value::as_str).unwrap_or_default();
        let pool = self.fabric.0.state.lock().pools.get(word("remote_engine_id")).cloned();
        // An engine that is gone is nobody's fault; the request fails.
        let Some(pool) = pool else { return Err(FailureMode::Request) };
        if params.get("remote_num_tokens").and_then(Value::as_u64) != Some(prompt.len() as u64) {
            self.log.violate("decode: another length than the prefill's");
            return Err(FailureMode::Request);
        }
        let Some((mut tokens, standing)) = pool.read(word("remote_request_id"), blocks) else {
            self.log.violate("decode: blocks that do not exist");
            return Err(FailureMode::Request);
        };
        if standing == Standing::NotLent {
            self.log.violate("decode: blocks that are not lent: used twice, or after the lease");
        }
        tokens.truncate(prompt.len());
        if tokens != prompt {
            self.log.violate("decode: blocks that hold another prompt; the answer is wrong, with status 200");
        }
        Ok(tokens)
    }
}

fn blocks_of(value: Option<&Value>) -> Option<Vec<u64>> {
    let groups = value?.as_array()?;
    let numbers = |list: &Vec<Value>| list.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>();
    match groups.first() {
        Some(Value::Array(first)) => numbers(first),
        _ => numbers(groups),
    }
}
