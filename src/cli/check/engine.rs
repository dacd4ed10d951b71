//! One engine server: whether it is there, what it is, whether it works, and whether its announcements can be followed.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Error, Result};
use baton_events::Subscriber;
use baton_remote::{
    ComparisonExtent, EngineRole, HandoffWay, Probe, RemoteEngine, RemoteError, RemoteSettings, Stage,
};
use baton_types::Role;
use clap::Parser as _;

use super::place;
use super::report::Report;
use crate::cli::node::NodeArgs;
use crate::config::Config;
use crate::node::RemoteNode;

/// How long an engine may take over its answer here, µs; a node waits longer.
const ANSWER_US: u64 = 30_000_000;
/// How long a connection to what announces may take.
const EVENTS_TIME_LIMIT: Duration = Duration::from_secs(3);
/// Between two looks whether it is there.
const EVENTS_LOOK: Duration = Duration::from_millis(20);

/// The options of `baton node`.
#[derive(clap::Parser)]
#[command(name = "--engine", no_binary_name = true, disable_help_flag = true)]
struct Options {
    #[command(flatten)]
    node: NodeArgs,
}

/// A server as its node would drive it.
pub struct Target {
    node: RemoteNode,
}

/// A server that answered, and what it said.
pub struct FoundServer {
    pub name: String,
    pub role: Role,
    pub settings: RemoteSettings,
    pub vocab_tokens: u32,
    pub max_model_tokens: Option<u32>,
    pub probe: Arc<Probe>,
}

impl Target {
    /// Reads `KIND=URL[,OPTION=VALUE]...`, with the folder of those that name none.
    ///
    /// # Errors
    /// Names what cannot be read, or does not go together.
    pub fn parse(words: &str, config: &Config, model: Option<&str>) -> Result<Self> {
        let shape = "give KIND=URL[,OPTION=VALUE]..., KIND being vllm, sglang or openai";
        let mut parts = words.split(',');
        let (kind, url) = parts.next().and_then(|first| first.split_once('=')).context(shape)?;
        let mut options = vec![format!("--engine={kind}"), format!("--url={url}")];
        for part in parts {
            let (option, value) = part.split_once('=').context(shape)?;
            options.push(format!("--{option}={value}"));
        }
        let lacks = |option: &str| !options.iter().any(|given| given.starts_with(&format!("--{option}=")));
        let given = |option: &str| options.iter().find_map(|o| o.strip_prefix(&format!("--{option}=")));
        let role = given("role").unwrap_or("both").to_owned();
        let control = format!("http://{}", config.service.control);
        let defaults = [
            ("name", url.to_owned()),
            ("role", role.clone()),
            ("conductor", control),
            ("block-tokens", config.scheduler.block_tokens.to_string()),
        ];
        let more: Vec<String> = defaults
            .into_iter()
            .chain(model.map(|folder| ("model", folder.to_owned())))
            .filter(|(option, _)| lacks(option))
            .map(|(option, value)| format!("--{option}={value}"))
            .collect();
        options.extend(more);
        let read =
            Options::try_parse_from(options).map_err(|error| Error::msg(first_line(&error.to_string())))?;
        let dialect = read.node.engines.dialect().context(shape)?;
        let role = crate::conductor::parse_role(&role)?;
        let vocabulary = read.node.engines.vocabulary(dialect)?;
        let mut node = read.node.remote.node(&read.node, (dialect, role), vocabulary)?;
        node.engine.timeouts.answer_us = ANSWER_US;
        node.engine.timeouts.first_token_us = ANSWER_US;
        Ok(Self { node })
    }

    fn check(&self, of: &str) -> String {
        format!("{} {}: {of}", self.node.engine.dialect.name(), self.node.name)
    }

    /// Tries it; what it is, if it said that.
    pub async fn examine(self, config: &Config, report: &mut Report) -> Option<FoundServer> {
        let health = self.check("health");
        let engine = match RemoteEngine::new(self.node.engine.clone()) {
            Ok(engine) => engine,
            Err(error) => {
                report_error(&health, &error, report);
                return None;
            }
        };
        if let Err(error) = engine.health().await {
            report_error(&health, &error, report);
            report.untried(&self.check("all else"), "it is not well");
            return None;
        }
        report.good_at(&health, "it is well");
        let probe = self.probe(&engine, report).await?;
        self.blocks(&probe, config, report);
        self.canary(&engine, report).await;
        self.tokenizer(&engine, report).await;
        self.bootstrap(report).await;
        self.events(report).await;
        let RemoteNode { name, role, engine: settings, vocab_tokens, max_model_tokens, .. } = self.node;
        let max_model_tokens = max_model_tokens.or(probe.max_model_tokens);
        Some(FoundServer { name, role, settings, vocab_tokens, max_model_tokens, probe })
    }

    async fn probe(&self, engine: &RemoteEngine, report: &mut Report) -> Option<Arc<Probe>> {
        let check = self.check("probe");
        let probe = match engine.probe().await {
            Ok(probe) => probe,
            // The engine reported its properties. Only the token is missing, and the canary reports that.
            Err(error) if error.stage == Stage::Canary && engine.probed().is_some() => engine.probed()?,
            Err(error) => {
                report_error(&check, &error, report);
                report.untried(&self.check("all else"), "it does not say what it is");
                return None;
            }
        };
        report.good_at(&check, words(&probe));
        let lack = |what: &str| format!("it does not tell its {what}");
        if probe.capacity_tokens.or(self.node.capacity_tokens).is_none() {
            report.wrong(&check, lack("KV capacity"), "give its node --capacity-tokens");
        }
        if probe.max_model_tokens.or(self.node.max_model_tokens).is_none() {
            report.wrong(&check, lack("longest context"), "give its node --max-model-tokens");
        }
        if probe.repeats_answer == Some(true) {
            let found = "each event of a stream repeats the answer so far";
            report.doubtful(&check, found, "start it with --incremental-streaming-output");
        }
        if probe.keeps_prefixes == Some(false) && self.node.role != Role::Prefill {
            let found = "it keeps no prefixes, so prompts cannot come in parts: each step is as long as its prompts make it";
            report.doubtful(
                &check,
                found,
                "start it with prefix caching, or with a small --max-num-batched-tokens",
            );
        }
        if let Some(ranks) = probe.dp_ranks.filter(|ranks| *ranks > 1 && self.node.engine.dp_rank.is_none()) {
            let found = format!("it has {ranks} data-parallel ranks, and none is meant");
            report.doubtful(&check, found, "give each rank a node of its own with --dp-rank");
        }
        self.part(&probe, report);
        Some(probe)
    }

    /// Checks its role and its way of handing KV over: as it reports them, and as they are set.
    fn part(&self, probe: &Probe, report: &mut Report) {
        let check = self.check("part");
        let settings = &self.node.engine;
        if let (Some(reported), Some(set)) = (probe.role, settings.role)
            && reported != set
        {
            let found = format!("it was started for {} legs, its node for {}", leg(reported), leg(set));
            return report.wrong(&check, found, "give both the same role");
        }
        let reported = probe.connector.as_deref();
        let wanted = match &settings.handoff {
            HandoffWay::None => return,
            HandoffWay::Nixl => "nixl",
            HandoffWay::Mooncake { .. } => "mooncake",
            HandoffWay::Rooms { port, .. } => return self.room(*port, probe, report),
        };
        match reported {
            Some(reported) if reported == wanted => {
                report.good_at(&check, format!("it hands over by {reported}"))
            }
            Some(reported) => {
                let found = format!("it hands over by {reported}, its node expects {wanted}");
                report.wrong(&check, found, format!("give its node --handoff {reported}"));
            }
            None => {
                let found = format!("it does not tell its connector; its node expects {wanted}");
                report.doubtful(&check, found, "see its --kv-transfer-config");
            }
        }
    }

    fn room(&self, port: u16, probe: &Probe, report: &mut Report) {
        let check = self.check("part");
        if let Some(reported) =
            probe.bootstrap_port.filter(|reported| self.node.role == Role::Prefill && *reported != port)
        {
            let found = format!("its bootstrap server is at port {reported}, its node says {port}");
            report.wrong(&check, found, format!("give its node --bootstrap-port {reported}"));
        } else {
            let over = probe.connector.as_deref().unwrap_or("what it does not tell");
            report.good_at(&check, format!("it meets in rooms, KV moves over {over}"));
        }
    }

    fn blocks(&self, probe: &Probe, config: &Config, report: &mut Report) {
        let check = self.check("blocks");
        let (ours, node) = (config.scheduler.block_tokens, self.node.block_tokens);
        let remedy =
            "make them one: scheduler.block_tokens, the node's --block-tokens, the engine's block size";
        if node != ours {
            let found = format!("its node's blocks have {node} tokens, scheduler.block_tokens is {ours}");
            return report.wrong(&check, found, remedy);
        }
        match (probe.block_tokens, self.node.events.is_some()) {
            (Some(theirs), _) if theirs == ours => {
                report.good_at(&check, format!("{ours} tokens everywhere"))
            }
            (Some(theirs), true) => {
                let found =
                    format!("{theirs} tokens at the engine, {ours} here: its events cannot be followed");
                report.wrong(&check, found, remedy);
            }
            (Some(theirs), false) => {
                let found = format!("{theirs} tokens at the engine, {ours} here: prefix hits are guessed");
                report.doubtful(&check, found, remedy);
            }
            (None, _) => report.doubtful(&check, "it does not tell how long its blocks are", remedy),
        }
    }

    async fn canary(&self, engine: &RemoteEngine, report: &mut Report) {
        let check = self.check("canary");
        match engine.canary().await {
            Ok(took) => report.good_at(&check, format!("a token in {} ms", took.as_millis())),
            Err(error) => report_error(&check, &error, report),
        }
    }

    /// Whether it makes the tokens that the front door makes.
    async fn tokenizer(&self, engine: &RemoteEngine, report: &mut Report) {
        let check = self.check("tokenizer");
        let Some(sample) = &self.node.sample else { return };
        match engine.compare(sample).await {
            Ok(ComparisonExtent::All) => {
                report.good_at(&check, "a text and a chat have the same tokens there and here")
            }
            Ok(ComparisonExtent::Text) => {
                report.good_at(&check, "a text has the same tokens there and here; chats were not compared");
            }
            Ok(ComparisonExtent::Count) => {
                let found = "a text has as many tokens there as here; it does not tell which";
                report.doubtful(&check, found, "compare an answer with the engine's own");
            }
            Ok(ComparisonExtent::Nothing) => {
                let found = "it does not tell its tokens";
                report.doubtful(&check, found, "see that --model is the folder that it was started with");
            }
            Err(error) => report_error(&check, &error, report),
        }
    }

    /// Where decode engines meet a prefill engine.
    async fn bootstrap(&self, report: &mut Report) {
        if self.node.role == Role::Decode {
            return;
        }
        let settings = &self.node.engine;
        let address = match &settings.handoff {
            HandoffWay::Mooncake { bootstrap_url } => host_port(bootstrap_url),
            HandoffWay::Rooms { host, port } => {
                let own = host_port(&settings.url).and_then(|at| Some(at.rsplit_once(':')?.0.to_owned()));
                host.clone().or(own).map(|host| format!("{host}:{port}"))
            }
            HandoffWay::None | HandoffWay::Nixl => return,
        };
        let check = self.check("bootstrap");
        let Some(address) = address else {
            return report.wrong(&check, "its address is no URL with host and port", "give http://HOST:PORT");
        };
        match place::connect(&address).await {
            Ok(_) => report.good_at(&check, format!("{address} answers")),
            Err(why) => report.wrong(
                &check,
                format!("{why:#}"),
                "start the engine as a prefill one, and open that port",
            ),
        }
    }

    async fn events(&self, report: &mut Report) {
        let check = self.check("events");
        let Some(source) = &self.node.events else {
            return report.good_at(&check, "none are followed: what it computed last is assumed to be there");
        };
        let subscriber = match Subscriber::start(source.subscriber.clone()) {
            Ok(subscriber) => subscriber,
            Err(error) => return report.wrong(&check, error.to_string(), "give tcp://HOST:PORT"),
        };
        let connected = async {
            while !subscriber.status().connected {
                tokio::time::sleep(EVENTS_LOOK).await;
            }
        };
        let endpoint = &source.subscriber.endpoint;
        if tokio::time::timeout(EVENTS_TIME_LIMIT, connected).await.is_ok() {
            report.good_at(&check, format!("{endpoint} can be followed"));
        } else {
            let why = subscriber.status().last_error.unwrap_or_else(|| "no answer".into());
            report.wrong(
                &check,
                format!("{endpoint}: {why}"),
                "see the engine's --kv-events-config, and that port",
            );
        }
    }
}

fn report_error(check: &str, error: &RemoteError, report: &mut Report) {
    report.wrong(check, format!("{}: {}", error.stage.name(), error.text), error.remedy.to_string());
}

fn words(probe: &Probe) -> String {
    let reported = |what: Option<String>| what.unwrap_or_else(|| "not told".into());
    format!(
        "model {}, version {}, room for {} tokens, context {}",
        probe.model,
        reported(probe.version.clone()),
        reported(probe.capacity_tokens.map(|tokens| tokens.to_string())),
        reported(probe.max_model_tokens.map(|tokens| tokens.to_string())),
    )
}

const fn leg(role: EngineRole) -> &'static str {
    match role {
        EngineRole::Prefill => "prefill",
        EngineRole::Decode => "decode",
        EngineRole::Whole => "whole",
    }
}

fn host_port(url: &str) -> Option<String> {
    let uri: http::Uri = url.parse().ok()?;
    Some(format!("{}:{}", uri.host()?, uri.port_u16().unwrap_or(80)))
}

/// The fault of an option, without the usage that follows.
fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}
