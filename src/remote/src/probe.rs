//! Probes an engine: its properties, its health, and whether it works.

use std::sync::Arc;
use std::time::{Duration, Instant as Clock};

use bytes::Bytes;
use http::StatusCode;
use serde_json::Value;
use tokio::time::Instant;

use crate::engine::RemoteEngine;
use crate::error::{Kind, RemoteError, Side, Stage};
use crate::http::{Call, refused};
use crate::load::{self, Load, Sample};
use crate::request::Request;
use crate::settings::{Dialect, EngineRole};

/// The properties that an engine reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Probe {
    /// The model's name in requests.
    pub model: String,
    /// The path that the model was loaded from, if reported.
    pub model_path: Option<String>,
    /// Longest prompt and answer together, if reported.
    pub max_model_tokens: Option<u32>,
    /// Tokens in a KV block, if reported.
    pub block_tokens: Option<u32>,
    /// Tokens that its KV pool holds, if reported.
    pub capacity_tokens: Option<u64>,
    /// Maximum number of prompt tokens that it computes in one pass, if reported.
    pub pass_tokens: Option<u32>,
    /// Maximum number of requests that it runs at a time, if reported.
    pub max_running: Option<u32>,
    /// Its version, if reported.
    pub version: Option<String>,
    /// The connector that moves KV between instances, if reported: `nixl` or `mooncake`.
    pub connector: Option<String>,
    /// The leg that it serves, if reported.
    pub role: Option<EngineRole>,
    /// The bootstrap server's port (SGLang).
    pub bootstrap_port: Option<u16>,
    /// Data-parallel ranks, if reported.
    pub dp_ranks: Option<u32>,
    /// Whether it keeps the KV of prompts for later ones that begin alike, if reported.
    pub keeps_prefixes: Option<bool>,
    /// Whether each event of a stream repeats the answer so far, if reported (SGLang). With long answers that is a lot
    /// to send and read, and `--incremental-streaming-output` turns it off.
    pub repeats_answer: Option<bool>,
    /// When its process started, in seconds since 1970, if reported.
    pub start_time_s: Option<f64>,
}

impl RemoteEngine {
    /// Whether the engine says that it is well.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] when it does not.
    pub async fn health(&self) -> Result<(), RemoteError> {
        let (status, page) = self.page(Stage::Health, "/health").await?;
        if status.is_success() {
            return Ok(());
        }
        let error = refused(status, &page, Stage::Health);
        Err(RemoteError { kind: Kind::Unavailable, side: Side::Engine, ..error })
    }

    /// Draws a token, and returns how long that took. SGLang engines of a pair cannot serve a request by themselves: they
    /// are asked for `/health_generate`, which goes through their model.
    ///
    /// # Errors
    /// When no token comes, or the engine does not tell its id.
    pub async fn canary(&self) -> Result<Duration, RemoteError> {
        let started = Clock::now();
        let paired = self.role().is_some_and(|role| role != EngineRole::Whole)
            || !matches!(self.settings().handoff, crate::HandoffWay::None);
        if self.settings().dialect == Dialect::Sglang && paired {
            let (status, page) = self.page(Stage::Canary, "/health_generate").await?;
            return if status.is_success() {
                Ok(started.elapsed())
            } else {
                Err(refused(status, &page, Stage::Canary))
            };
        }
        let request = Request::of_one_token("baton-canary".into(), vec![1, 2, 3].into());
        let answer = self.generate(request).await.map_err(|error| error.at(Stage::Canary))?;
        let all = answer.all().await.map_err(|error| error.at(Stage::Canary))?;
        match all.tokens.len() {
            1 => Ok(started.elapsed()),
            count => Err(RemoteError::bug(Stage::Canary, format!("{count} tokens where one was asked for"))),
        }
    }

    /// Reads the engine's properties, and has it draw a token. The result sets the model's name in later requests, and
    /// is the reference for checking their hand-offs. Probe again after the engine has restarted.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] when it cannot be reached, [`Kind::Invalid`] when it is another engine than the settings say or
    /// has not the model, [`Kind::Bug`] when it does not tell the ids of its tokens.
    pub async fn probe(&self) -> Result<Arc<Probe>, RemoteError> {
        let probe = self.keep_probe(self.properties().await?);
        self.canary().await?;
        Ok(probe)
    }

    /// Whether the engine is the one that was probed, as far as it says. What was probed stays as it is.
    ///
    /// # Errors
    /// [`Kind::Invalid`] when it serves another model by now; otherwise when it does not answer.
    pub async fn still_serves(&self) -> Result<(), RemoteError> {
        let Some(probed) = self.probed() else { return Ok(()) };
        let found = self.properties().await?;
        if (&found.model, &found.model_path) == (&probed.model, &probed.model_path) {
            return Ok(());
        }
        let text = format!("the engine serves another model by now: {}", found.model);
        Err(RemoteError::ours(Stage::Probe, text))
    }

    async fn properties(&self) -> Result<Probe, RemoteError> {
        match self.settings().dialect {
            Dialect::Sglang => self.probe_sglang().await,
            Dialect::Vllm | Dialect::Plain => self.probe_openai().await,
        }
    }

    /// Reads the engine's load, by its own figures.
    ///
    /// # Errors
    /// When `/metrics` cannot be read, or does not have an engine's figures.
    pub async fn load(&self) -> Result<Load, RemoteError> {
        let samples = self.metrics(Stage::Load).await?;
        load::of(&samples).ok_or_else(|| {
            RemoteError::ours(Stage::Load, "/metrics has no figures of an engine's load")
                .remedy("start SGLang with --enable-metrics, llama.cpp with --metrics")
        })
    }

    async fn metrics(&self, stage: Stage) -> Result<Vec<Sample>, RemoteError> {
        let (status, page) = self.page(stage, "/metrics").await?;
        if !status.is_success() {
            return Err(refused(status, &page, stage));
        }
        Ok(load::parse(&String::from_utf8_lossy(&page)))
    }

    async fn page(&self, stage: Stage, path: &str) -> Result<(StatusCode, Bytes), RemoteError> {
        let until = Instant::now() + Duration::from_micros(self.settings().timeouts.page_us);
        self.wire().page(Call { stage, path, elsewhere: None, headers: vec![], until }).await
    }

    /// A JSON page; `None` when the engine does not have it.
    async fn json(&self, path: &str) -> Result<Option<Value>, RemoteError> {
        let (status, page) = self.page(Stage::Probe, path).await?;
        if status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        if !status.is_success() {
            return Err(refused(status, &page, Stage::Probe));
        }
        let text = |error| RemoteError::bug(Stage::Probe, format!("{path} is no JSON: {error}"));
        serde_json::from_slice(&page).map(Some).map_err(text)
    }

    async fn probe_openai(&self) -> Result<Probe, RemoteError> {
        let models = self.json("/v1/models").await?.unwrap_or_default();
        let mut probe = self.model_of(&models)?;
        if let Some(version) = self.json("/version").await? {
            probe.version = text(&version["version"]);
        }
        // Not every engine of this kind has metrics, and none needs them to serve.
        let samples = self.metrics(Stage::Probe).await.unwrap_or_default();
        let is_vllm = samples.iter().any(|sample| sample.name.starts_with("vllm:"));
        if self.settings().dialect == Dialect::Vllm && !is_vllm && !samples.is_empty() {
            return Err(RemoteError::ours(
                Stage::Probe,
                format!("{} has no vllm: metrics", self.wire().base()),
            )
            .remedy("set the engine's kind to what runs there"));
        }
        cache_of(&samples, &mut probe);
        probe.start_time_s = load::start_time_s(&samples);
        Ok(probe)
    }

    fn model_of(&self, models: &Value) -> Result<Probe, RemoteError> {
        let list = models["data"].as_array().map(Vec::as_slice).unwrap_or_default();
        let wanted = self.settings().model.as_deref();
        let found = list.iter().find(|one| wanted.is_none_or(|wanted| one["id"].as_str() == Some(wanted)));
        let Some(model) = found.and_then(|one| text(&one["id"])) else {
            let names: Vec<&str> = list.iter().filter_map(|one| one["id"].as_str()).take(8).collect();
            let asked = wanted.unwrap_or("any model");
            let error = format!("the engine does not serve {asked}; it serves {names:?}");
            return Err(RemoteError::ours(Stage::Probe, error)
                .remedy("name one of its models, or start it with this one"));
        };
        let entry = found.unwrap_or(&Value::Null);
        Ok(Probe {
            model,
            model_path: text(&entry["root"]),
            max_model_tokens: number(&entry["max_model_len"])
                .or_else(|| number(&entry["meta"]["n_ctx_train"])),
            ..Probe::default()
        })
    }

    async fn probe_sglang(&self) -> Result<Probe, RemoteError> {
        // Newer versions have the shorter name.
        let told = match self.json("/get_server_info").await? {
            Some(told) => told,
            None => self.json("/server_info").await?.ok_or_else(|| {
                RemoteError::ours(Stage::Probe, format!("{} has no /get_server_info", self.wire().base()))
                    .remedy("set the engine's kind to what runs there")
            })?,
        };
        let models = self.json("/v1/models").await?.unwrap_or_default();
        let state = &told["internal_states"][0];
        let of = |name: &str| if told[name].is_null() { &state[name] } else { &told[name] };
        let mut probe = match self.model_of(&models) {
            Ok(probe) => probe,
            Err(error) => {
                let name = text(of("served_model_name"))
                    .filter(|name| self.settings().model.as_ref().is_none_or(|m| m == name));
                let model = name.ok_or(error)?;
                Probe { model, ..Probe::default() }
            }
        };
        probe.model_path = text(of("model_path")).or(probe.model_path);
        probe.max_model_tokens = probe.max_model_tokens.or_else(|| number(of("context_length")));
        probe.block_tokens = number(of("page_size"));
        probe.capacity_tokens =
            state["memory_usage"]["token_capacity"].as_u64().or_else(|| of("max_total_num_tokens").as_u64());
        // Without chunks a prompt is computed whole, several of them as far as the second allows.
        probe.pass_tokens = ["chunked_prefill_size", "max_prefill_tokens"]
            .iter()
            .find_map(|name| number(of(name)).filter(|tokens| *tokens > 0));
        // What it came to, of each rank, and not what was asked for.
        let most = [&state["effective_max_running_requests_per_dp"], of("max_running_requests")];
        probe.max_running = most.into_iter().find_map(number).filter(|most| *most > 0);
        probe.version = text(&told["version"]);
        probe.dp_ranks = number(of("dp_size"));
        if let (Some(rank), Some(ranks)) = (self.settings().dp_rank, probe.dp_ranks)
            && rank >= ranks
        {
            let text = format!("the engine has {ranks} data-parallel ranks, and none with the number {rank}");
            return Err(RemoteError::ours(Stage::Probe, text).remedy("count them from 0"));
        }
        probe.keeps_prefixes = of("disable_radix_cache").as_bool().map(|disabled| !disabled);
        probe.repeats_answer = of("incremental_streaming_output").as_bool().map(|adds| !adds);
        probe.role = match of("disaggregation_mode").as_str() {
            Some("prefill") => Some(EngineRole::Prefill),
            Some("decode") => Some(EngineRole::Decode),
            Some("null") => Some(EngineRole::Whole),
            _ => None,
        };
        if matches!(probe.role, Some(EngineRole::Prefill | EngineRole::Decode)) {
            probe.connector = text(of("disaggregation_transfer_backend"));
            probe.bootstrap_port =
                of("disaggregation_bootstrap_port").as_u64().and_then(|port| port.try_into().ok());
        }
        Ok(probe)
    }
}

/// Reads the properties of vLLM's KV pool and connector from its metrics.
fn cache_of(samples: &[Sample], probe: &mut Probe) {
    if let Some(config) = samples.iter().find(|sample| sample.name == "vllm:cache_config_info") {
        probe.keeps_prefixes = config.label("enable_prefix_caching").map(|keeps| keeps == "True");
        probe.block_tokens = config.label("block_size").and_then(|size| size.parse().ok());
        let blocks: Option<u64> = config.label("num_gpu_blocks").and_then(|count| count.parse().ok());
        let size = config.label("kv_cache_size_tokens").and_then(|count| count.parse().ok());
        let product =
            blocks.zip(probe.block_tokens).map(|(blocks, size)| blocks.saturating_mul(u64::from(size)));
        probe.capacity_tokens = size.or(product);
    }
    let known = [("vllm:nixl_", "nixl"), ("vllm:mooncake_", "mooncake")];
    let connector =
        known.iter().find(|(prefix, _)| samples.iter().any(|sample| sample.name.starts_with(prefix)));
    probe.connector = connector.map(|(_, name)| (*name).to_owned());
    let engines: std::collections::BTreeSet<&str> = samples
        .iter()
        .filter(|sample| sample.name == "vllm:num_requests_running")
        .filter_map(|sample| sample.label("engine"))
        .collect();
    probe.dp_ranks = u32::try_from(engines.len()).ok().filter(|count| *count > 0);
}

fn text(value: &Value) -> Option<String> {
    value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

fn number(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| u32::try_from(number).ok())
}
