//! Servers that a node drives over HTTP, from the command line.

use anyhow::{Context as _, Result, bail, ensure};
use baton_events::SubscriberConfig;
use baton_remote::{Dialect, EngineRole, HandoffWay, RemoteSettings};
use baton_types::{Role, Secret};

use crate::cli::engines::Vocabulary;
use crate::cli::node::NodeArgs;
use crate::node::{EventSource, RemoteNode};

/// Rate at which KV moves between servers when nothing is said, bytes/s: a NIC of 100 Gbit/s.
const NET_BYTES_PER_S: u64 = 12_500_000_000;

/// A server that computes: for `--engine vllm | sglang | openai`.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Servers (--engine vllm, sglang or openai)")]
pub struct RemoteArgs {
    /// Where the server is
    #[arg(long)]
    url: Option<String>,
    /// How it hands KV over: none, nixl or mooncake (vLLM's connectors), rooms (SGLang's bootstrap) [default: none for
    /// role both, else nixl for vllm and rooms for sglang]
    #[arg(long, value_parser = ["none", "nixl", "mooncake", "rooms"])]
    handoff: Option<String>,
    /// The prefill server's bootstrap server as decode servers reach it, for --handoff mooncake
    #[arg(long, value_name = "URL")]
    bootstrap_url: Option<String>,
    /// Host of the prefill server's bootstrap as decode servers reach it, for --handoff rooms [default: the URL's]
    #[arg(long, value_name = "HOST")]
    bootstrap_host: Option<String>,
    /// Port of the prefill server's bootstrap, for --handoff rooms
    #[arg(long, value_name = "PORT", default_value_t = 8998)]
    bootstrap_port: u16,
    /// Where it announces what happens in its cache, tcp://HOST:PORT (--kv-events-config of vLLM and SGLang)
    /// [default: what it computed last is assumed to be there]
    #[arg(long, value_name = "ENDPOINT")]
    events: Option<String>,
    /// Where it repeats its announcements
    #[arg(long, value_name = "ENDPOINT", requires = "events")]
    events_replay: Option<String>,
    /// Key that the server wants
    #[arg(long, value_name = "KEY", env = "BATON_ENGINE_KEY", hide_env_values = true)]
    engine_key: Option<Secret<String>>,
    /// The model's name at the server [default: the first that it lists]
    #[arg(long, value_name = "NAME")]
    served_model: Option<String>,
    /// A label of what it serves, where its version does not say: servers with different labels make no pair, as those of two
    /// versions do not
    #[arg(long, value_name = "WORD", value_parser = word)]
    revision: Option<String>,
    /// How prompts go to it that do not fit into one step beside its decodes: parts, where it keeps prefixes, or whole, for
    /// one of several pipeline stages, which computes more than two prompts at a time
    #[arg(long, value_parser = ["parts", "whole"], default_value = "parts")]
    prompts: String,
    /// Data-parallel rank of the server that is meant, when it has several
    #[arg(long, value_name = "RANK")]
    dp_rank: Option<u32>,
    /// Tokens that its KV pool holds [default: what it says]
    #[arg(long, value_name = "TOKENS")]
    capacity_tokens: Option<u64>,
    /// Longest prompt and answer together [default: what it says]
    #[arg(long, value_name = "TOKENS")]
    max_model_tokens: Option<u32>,
    /// Rate at which KV moves between servers, for predictions, bytes/s
    #[arg(long, value_name = "BYTES_PER_S", default_value_t = NET_BYTES_PER_S, value_parser = clap::value_parser!(u64).range(1..))]
    net_bytes_per_s: u64,
}

/// A name for a revision: it stands beside other words.
fn word(text: &str) -> Result<String> {
    let fits = !text.is_empty() && text.len() <= 128 && text.chars().all(|c| c.is_ascii_graphic());
    fits.then(|| text.to_owned()).context("a revision is 1 to 128 letters, digits and signs")
}

impl RemoteArgs {
    /// The node that was asked for, of a server with these tokens.
    ///
    /// # Errors
    /// Names what is missing, or does not go together.
    pub fn node(
        &self,
        args: &NodeArgs,
        (dialect, role): (Dialect, Role),
        vocabulary: Vocabulary,
    ) -> Result<RemoteNode> {
        let url = self
            .url
            .as_ref()
            .with_context(|| format!("--engine {} needs --url: where the server is", dialect.name()))?;
        ensure!(role != Role::Store, "a server is no store: give it the role prefill, decode or both");
        let way = self.way(dialect, role)?;
        if args.may_change_role && way != HandoffWay::Nixl {
            bail!(
                "--may-change-role is for vLLM with --handoff nixl, where each server can do both legs (kv_role kv_both): \
                 this {} server was started for one of them",
                dialect.name()
            );
        }
        let mut engine = RemoteSettings::new(dialect, url).with_handoff(way);
        engine.role = Some(match role {
            Role::Prefill => EngineRole::Prefill,
            Role::Decode => EngineRole::Decode,
            Role::Both | Role::Store => EngineRole::Whole,
        });
        engine.api_key.clone_from(&self.engine_key);
        engine.model.clone_from(&self.served_model);
        engine.dp_rank = self.dp_rank;
        Ok(RemoteNode {
            name: args.name.clone(),
            role,
            may_change_role: args.may_change_role,
            control: args.conductor.clone().unwrap_or_default(),
            engine,
            block_tokens: args.engines.block_tokens(),
            capacity_tokens: self.capacity_tokens,
            pass_tokens: args.engines.pass_tokens,
            max_running: args.engines.max_running,
            whole_prompts: self.prompts == "whole",
            net_bytes_per_s: self.net_bytes_per_s,
            max_model_tokens: self.max_model_tokens,
            vocab_tokens: vocabulary.tokens,
            end_tokens: vocabulary.ends,
            sample: Some(vocabulary.sample),
            events: self.events(dialect)?,
            revision: self.revision.clone(),
            profile: args.engines.profile()?,
            guard: crate::guard::ClusterGuard::default(),
        })
    }

    fn events(&self, dialect: Dialect) -> Result<Option<EventSource>> {
        let Some(endpoint) = &self.events else { return Ok(None) };
        if dialect == Dialect::Plain {
            let why = "only vllm's and sglang's announcements can be followed; without --events what was computed last is assumed";
            bail!(why);
        }
        for given in [Some(endpoint), self.events_replay.as_ref()].into_iter().flatten() {
            if !given.starts_with("tcp://") || given.contains('*') {
                bail!("'{given}' is no endpoint to connect to; give tcp://HOST:PORT");
            }
        }
        let subscriber = SubscriberConfig::new(endpoint.clone(), self.events_replay.clone());
        Ok(Some(EventSource { subscriber, dp_rank: self.dp_rank }))
    }

    fn way(&self, dialect: Dialect, role: Role) -> Result<HandoffWay> {
        let otherwise = match (role, dialect) {
            (Role::Both, _) | (_, Dialect::Plain) => "none",
            (_, Dialect::Vllm) => "nixl",
            (_, Dialect::Sglang) => "rooms",
        };
        let word = self.handoff.as_deref().unwrap_or(otherwise);
        if word == "none" && role != Role::Both {
            bail!(
                "a {} server that hands no KV over serves whole requests: give it the role both",
                dialect.name()
            );
        }
        Ok(match word {
            "nixl" => HandoffWay::Nixl,
            "mooncake" => {
                let url = self.bootstrap_url.clone();
                if url.is_none() && role != Role::Decode {
                    bail!(
                        "--handoff mooncake needs --bootstrap-url: the prefill server's VLLM_MOONCAKE_BOOTSTRAP_PORT, as http://HOST:8998"
                    );
                }
                HandoffWay::Mooncake { bootstrap_url: url.unwrap_or_default() }
            }
            "rooms" => HandoffWay::Rooms { host: self.bootstrap_host.clone(), port: self.bootstrap_port },
            _ => HandoffWay::None,
        })
    }
}
