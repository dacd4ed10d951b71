//! A node whose engine is a server of its own: vLLM, SGLang or another, driven over HTTP.
//!
//! The engine keeps its KV and moves it by its own protocol. This node turns orders into calls and what comes of them
//! into facts; it attaches while the engine is well, and leaves when it is not, so that the conductor never places work
//! on an engine that does not answer.

mod assumed;
mod drift;
mod follower;
mod knowledge;
mod legs;
mod life;
mod prompts;
mod remote_legs;
mod split;
#[cfg(test)]
mod tests;
mod work;

use std::sync::Arc;
use std::time::Duration;

use baton_remote::{
    ComparisonExtent, Dialect, HandoffWay, Kind, Probe, RemoteEngine, RemoteError, RemoteSettings, Sample,
    Stage,
};
use baton_types::{CostProfile, Role};
use baton_wire::v1;
use tokio_util::sync::CancellationToken;

use super::attach::{GrpcSession, NodeRuntime as _, WELCOME_WITHIN};
use super::error::NodeError;
use super::leader_locator::{LeaderLocator, Leaders};
use super::pulse::Pulse;
use super::within::InProcessSession;
use crate::conductor::{Inbox, Lead};
use crate::guard::ClusterGuard;
pub use follower::EventSource;
pub use prompts::Prompts;
use remote_legs::RemoteLegs;
use split::PromptSplitter;

/// How often the engine is asked whether it is well, and for its load.
const LOOK: Duration = Duration::from_secs(1);
/// Questions that may go unanswered in a row.
const UNANSWERED_MOST: u32 = 2;
/// Between two tries while it does not answer.
const AWAIT: Duration = Duration::from_millis(500);

/// Time between two checks of an engine that serves another model than the front door. Such an engine must be
/// restarted.
const AWAIT_OTHER: Duration = Duration::from_secs(5);

/// Prompt tokens of a pass of an engine that does not tell: vLLM's default for a server on a large GPU.
const PASS_TOKENS: u32 = 8_192;

/// The settings such a node starts with.
#[derive(Clone, Debug)]
pub struct RemoteNode {
    /// Its name: the same name is the same instance after a restart.
    pub name: String,
    /// Its part.
    pub role: Role,
    /// Whether the conductor may change that between prefill and decode: its engine can do both legs.
    pub may_change_role: bool,
    /// The conductor's control address, as `http://ADDRESS:PORT`.
    pub control: String,
    /// Where the engine is and how it is spoken to.
    pub engine: RemoteSettings,
    /// Tokens in a block, as the conductor counts them.
    pub block_tokens: u32,
    /// Tokens that its KV pool holds; what the engine says when `None`.
    pub capacity_tokens: Option<u64>,
    /// Prompt tokens of one pass at most; what the engine says when `None`.
    pub pass_tokens: Option<u32>,
    /// Requests that it runs at a time at most; what the engine says when `None`, and no limit where it says nothing.
    pub max_running: Option<u32>,
    /// Whether prompts go to it as wholes, however long a step they make.
    pub whole_prompts: bool,
    /// Rate at which KV moves between engines, for predictions, bytes/s.
    pub net_bytes_per_s: u64,
    /// Longest prompt and answer together; what the engine says when `None`.
    pub max_model_tokens: Option<u32>,
    /// Tokens that there are.
    pub vocab_tokens: u32,
    /// Tokens that end an answer, for the router.
    pub end_tokens: Vec<u32>,
    /// Texts with the tokens that it has to make of them; it is believed without.
    pub sample: Option<Arc<Sample>>,
    /// The revision that it serves, where its version does not include it.
    pub revision: Option<String>,
    /// Where it announces what happens in its cache; nothing is assumed of that then.
    pub events: Option<EventSource>,
    /// The expected costs of its passes. Measured times correct them.
    pub profile: CostProfile,
    /// The credentials that the node checks on its conductor and presents to it.
    pub guard: ClusterGuard,
}

impl RemoteNode {
    /// Whether a node of `other` would be equal to this one: the same server, called in the same way. The credentials
    /// are those of the process, not of the server, and do not count.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        // Taken apart, so that a field that comes to them is not forgotten.
        let Self {
            name,
            role,
            may_change_role,
            control,
            engine,
            block_tokens,
            capacity_tokens,
            pass_tokens,
            max_running,
            whole_prompts,
            net_bytes_per_s,
            max_model_tokens,
            vocab_tokens,
            end_tokens,
            sample,
            revision,
            events,
            profile,
            guard: _,
        } = self;
        let roles = *role == other.role && *may_change_role == other.may_change_role;
        let place = *name == other.name && roles && *control == other.control;
        let sizes =
            (block_tokens, capacity_tokens, pass_tokens, net_bytes_per_s, max_model_tokens, vocab_tokens)
                == (
                    &other.block_tokens,
                    &other.capacity_tokens,
                    &other.pass_tokens,
                    &other.net_bytes_per_s,
                    &other.max_model_tokens,
                    &other.vocab_tokens,
                );
        let sizes = sizes && *max_running == other.max_running;
        let costs = *profile == other.profile && *whole_prompts == other.whole_prompts;
        let engine = *engine == other.engine && *events == other.events && costs;
        let tokens = *end_tokens == other.end_tokens && *sample == other.sample;
        place && sizes && engine && tokens && *revision == other.revision
    }
}

/// Where the conductor is.
pub enum Place {
    /// At the address in the node's settings, or at the leader that the receiver reports.
    Elsewhere(Option<Leaders>),
    /// In this process, for as long as it leads, beside nodes with which it shares prompts.
    Within(Inbox, Lead, Prompts),
}

/// Runs a node until `stop` is cancelled.
///
/// # Errors
/// Settings that cannot work, an engine that lacks something that is needed and has no default, or a conductor
/// that will not have this node.
pub async fn run(node: RemoteNode, place: Place, stop: CancellationToken) -> Result<(), NodeError> {
    let (way, prompts) = match place {
        Place::Elsewhere(leaders) => {
            let leader = LeaderLocator::new(node.control.clone(), leaders);
            (Way::Wire(Arc::new(leader)), Prompts::default())
        }
        Place::Within(inbox, lead, prompts) => (Way::Within(inbox, lead), prompts),
    };
    let settings = RemoteSettings { vocab_tokens: Some(node.vocab_tokens), ..node.engine.clone() };
    let engine =
        RemoteEngine::new(settings).map_err(|error| NodeError::Remote { name: node.name.clone(), error })?;
    let outside = DetachNotice { name: &node.name, of: way.inbox() };
    loop {
        let found = tokio::select! {
            found = well(&engine, &node, &outside) => found,
            () = stop.cancelled() => return Ok(()),
        };
        let hello = hello(&node, &found)?;
        let capacity_blocks = hello.capacity_tokens / u64::from(node.block_tokens);
        let (events, prompts) = (node.events.clone(), prompts.clone());
        let splitter = splits(&node, &found).then(|| PromptSplitter::new(&node.profile, node.block_tokens));
        let node_legs =
            RemoteLegs::new(engine.clone(), (node.block_tokens, capacity_blocks), events, prompts, splitter);
        let why = tokio::select! {
            ended = way.keep(hello, &node.guard, node_legs.clone(), &stop) => return ended,
            why = async {
                let (why, gone) = failing_check(&engine, &node_legs, found.start_time_s).await;
                if gone {
                    node_legs.report_engine_gone(&why).await;
                }
                why
            } => why,
        };
        tracing::warn!(node = node.name, why, "the engine is not well: this node leaves until it is");
        // Requests that wait for it are served elsewhere.
        let _ = node_legs.detached();
    }
}

/// To the conductor.
enum Way {
    Wire(Arc<LeaderLocator>),
    Within(Inbox, Lead),
}

impl Way {
    /// The conductor of this process.
    fn inbox(&self) -> Option<Inbox> {
        match self {
            Self::Wire(_) => None,
            Self::Within(inbox, _) => Some(inbox.clone()),
        }
    }

    async fn keep(
        &self,
        hello: v1::Hello,
        guard: &ClusterGuard,
        runtime: RemoteLegs,
        stop: &CancellationToken,
    ) -> Result<(), NodeError> {
        match self {
            Self::Wire(leader) => {
                let (leader, guard, welcome_within) = (Arc::clone(leader), guard.clone(), WELCOME_WITHIN);
                let pulse = Pulse::default();
                GrpcSession { leader, guard, hello, runtime, welcome_within, pulse }.keep(stop).await
            }
            Self::Within(inbox, lead) => {
                InProcessSession { inbox: inbox.clone(), lead: lead.clone(), hello, runtime }.keep(stop).await
            }
        }
    }
}

/// Where operators read why a node of this process is not attached. Nothing is left there when this goes.
struct DetachNotice<'n> {
    name: &'n str,
    of: Option<Inbox>,
}

impl DetachNotice<'_> {
    fn because(&self, why: Option<String>) {
        if let Some(inbox) = &self.of {
            inbox.kept_out(self.name, why);
        }
    }
}

impl Drop for DetachNotice<'_> {
    fn drop(&mut self) {
        self.because(None);
    }
}

/// Waits until the engine answers and makes the front door's tokens, and asks what it is.
async fn well(engine: &RemoteEngine, node: &RemoteNode, outside: &DetachNotice<'_>) -> Arc<Probe> {
    let mut told = None;
    loop {
        match found(engine, node).await {
            Ok((probe, compared)) => {
                outside.because(None);
                tracing::info!(
                    node = node.name,
                    model = probe.model,
                    version = probe.version,
                    tokens = compared.map(ComparisonExtent::words),
                    "the engine is well"
                );
                if compared == Some(ComparisonExtent::Nothing) {
                    tracing::warn!(
                        node = node.name,
                        "the engine does not tell its tokens: that they are those of --model is believed"
                    );
                }
                return probe;
            }
            Err(error) => {
                if told != Some(error.stage) {
                    tracing::warn!(node = node.name, %error, "this node stays out: waiting for the engine");
                }
                told = Some(error.stage);
                outside.because(Some(error.to_string()));
                let other = error.stage == Stage::Vocabulary;
                tokio::time::sleep(if other { AWAIT_OTHER } else { AWAIT }).await;
            }
        }
    }
}

/// The engine's description of itself, and how far its tokens were compared.
async fn found(
    engine: &RemoteEngine,
    node: &RemoteNode,
) -> Result<(Arc<Probe>, Option<ComparisonExtent>), RemoteError> {
    engine.health().await?;
    let probe = engine.probe().await?;
    let compared = match &node.sample {
        Some(sample) => Some(engine.compare(sample).await?),
        None => None,
    };
    Ok((probe, compared))
}

/// Checks the engine until it does not answer any longer, or is another than the one that was probed; returns why, and
/// whether it is certainly gone.
async fn failing_check(
    engine: &RemoteEngine,
    node_legs: &RemoteLegs,
    mut started_s: Option<f64>,
) -> (String, bool) {
    let mut unanswered = 0;
    loop {
        let doubted = tokio::select! {
            () = tokio::time::sleep(LOOK) => false,
            () = node_legs.doubted() => true,
        };
        match engine.health().await {
            Ok(()) => {
                unanswered = 0;
                if doubted
                    && let Err(error) = engine.still_serves().await
                    && error.kind == Kind::Invalid
                {
                    return (error.to_string(), false);
                }
                // Load is for people and predictions: without it the engine serves as well.
                let load = engine.load().await.ok();
                node_legs.looked(load);
                let now_s = load.and_then(|load| load.start_time_s);
                // A clock that is set changes the time a little.
                if started_s.zip(now_s).is_some_and(|(before, now)| now > before + 1.0) {
                    return ("the engine was started anew".into(), false);
                }
                started_s = started_s.or(now_s);
            }
            Err(error) => {
                unanswered += 1;
                // Where nothing listens there is nobody to ask a second time, and one that has just failed and says that it
                // is not well has been asked twice.
                let certain = error.stage == Stage::Connect || (doubted && error.status.is_some());
                if unanswered >= UNANSWERED_MOST || certain {
                    return (error.to_string(), certain);
                }
            }
        }
    }
}

/// Whether prompts go to the engine in parts: it decodes, takes whole requests too, and finds again what it computed. Of
/// engines in pairs vLLM's decode side with NIXL is known to.
fn splits(node: &RemoteNode, found: &Probe) -> bool {
    let takes_whole = match node.engine.handoff {
        HandoffWay::None => node.role == Role::Both,
        HandoffWay::Nixl => node.role == Role::Decode || node.may_change_role,
        HandoffWay::Mooncake { .. } | HandoffWay::Rooms { .. } => false,
    };
    // Ranks behind one address compute prompts beside each other, and each keeps its own.
    let one_rank = found.dp_ranks.is_none_or(|ranks| ranks == 1) || node.engine.dp_rank.is_some();
    takes_whole && one_rank && !node.whole_prompts && found.keeps_prefixes == Some(true)
}

/// The node's greeting to its conductor.
fn hello(node: &RemoteNode, found: &Probe) -> Result<v1::Hello, NodeError> {
    let lacks = |what, option| NodeError::NotTold { name: node.name.clone(), what, option };
    let capacity_tokens = node
        .capacity_tokens
        .or(found.capacity_tokens)
        .ok_or_else(|| lacks("KV capacity", "capacity-tokens"))?;
    let max_model_tokens = node
        .max_model_tokens
        .or(found.max_model_tokens)
        .ok_or_else(|| lacks("longest context", "max-model-tokens"))?;
    let pass_tokens = node.pass_tokens.or(found.pass_tokens).unwrap_or(PASS_TOKENS);
    let mut profile = node.profile.clone();
    profile.kv_capacity_tokens = capacity_tokens;
    let fingerprint = v1::Fingerprint {
        model: found.model.clone(),
        block_tokens: node.block_tokens,
        vocab_tokens: node.vocab_tokens,
        engine: build(node, found.version.as_deref()),
        tokenizer: node.sample.as_ref().map_or_else(String::new, |sample| {
            crate::conductor::tokenizer_name(&sample.tokens, sample.chat_tokens.as_deref())
        }),
        ..v1::Fingerprint::default()
    };
    Ok(v1::Hello {
        protocol_version: baton_wire::PROTOCOL_VERSION,
        name: node.name.clone(),
        role: v1::Role::from(node.role).into(),
        fingerprint: Some(fingerprint),
        capacity_tokens,
        pass_tokens,
        // An engine knows of no objective, which is kept where prompts come in parts. One that is there for decode legs is
        // given nothing else otherwise, and any other fills what its passes hold beside its decodes.
        mixed_chunk_tokens: match node.role == Role::Decode || node.may_change_role {
            _ if splits(node, found) => None,
            true => Some(0),
            false => Some(pass_tokens),
        },
        max_running: node.max_running.or(found.max_running),
        net_bytes_per_s: node.net_bytes_per_s,
        // The engine brings up blocks of its own cache tiers itself.
        host_bytes_per_s: 1_000_000_000,
        ssd_bytes_per_s: 0,
        kv_address: String::new(),
        host: String::new(),
        profile: Some((&profile).into()),
        max_model_tokens,
        end_tokens: node.end_tokens.clone(),
        wants_body: true,
        engine_moves_kv: true,
        proof: Vec::new().into(),
        process: super::attach::process_mark(),
        may_change_role: node.may_change_role,
    })
}

/// The text that must be equal in a pair: the way of moving KV, the engine's version, and the revision that it serves.
/// Kind and way are the first two words. An engine that serves whole requests forms no pair, so its version is left
/// out.
fn build(node: &RemoteNode, version: Option<&str>) -> String {
    let version = version.filter(|_| node.engine.handoff != HandoffWay::None).unwrap_or("");
    let words = [node.engine.dialect.name(), way(&node.engine), version];
    words.into_iter().chain(node.revision.as_deref()).collect::<Vec<_>>().join(" ")
}

const fn way(settings: &RemoteSettings) -> &'static str {
    match (&settings.handoff, settings.dialect) {
        (HandoffWay::None, Dialect::Vllm | Dialect::Sglang | Dialect::Plain) => "alone",
        (HandoffWay::Nixl, _) => "nixl",
        (HandoffWay::Mooncake { .. }, _) => "mooncake",
        (HandoffWay::Rooms { .. }, _) => "rooms",
    }
}
