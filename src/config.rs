//! The configuration file: one strict TOML that the simulator and the service both read.
//!
//! Each core owns its settings, and this file nests them. The simulator's own settings have separate sections. Unknown
//! keys are rejected with the nearest known one, and impossible values with their bound. No part of Baton starts before
//! the whole file is checked. A setting may be written with a unit (see `units`).

use baton_legs::pairs::{STAGE_FLOOR_US, STAGE_SLACK};
use baton_router::{ReasoningParser, ToolParser};
use baton_scheduler::SchedulerConfig;
use baton_store::{Eviction, Offload};
use baton_tiers::IoChoice;
use baton_types::Secret;
use baton_types::simulated::{Clients, FaultPlan, NetworkConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::spans::CollectorUrl;

mod error;
#[cfg(test)]
mod fuzz;
mod read;
mod simulated;
mod units;

pub use error::{ConfigError, TextPosition};
pub use read::{bytes, load, load_or_default, load_with_blocks, parse, place, read, renamed};
pub use simulated::{ClusterConfig, MixMode, PoolConfig};
pub use units::{plain, readable, short, size};

/// Tokens in a KV block of a service and its nodes where neither the file nor the command line gives a number: the
/// default of vLLM. A replay uses its trace's.
pub const BLOCK_TOKENS: u32 = 16;

/// The whole file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// How requests are placed and admitted.
    pub scheduler: SchedulerConfig,
    /// How KV blocks are kept.
    pub store: StoreSection,
    /// How the live service runs.
    pub service: ServiceConfig,
    /// How its front door reads answers.
    pub router: RouterSection,
    /// The instances of a simulation.
    pub cluster: ClusterConfig,
    /// How simulated transfers share links.
    pub network: NetworkConfig,
    /// How simulated clients behave.
    pub clients: Clients,
    /// Faults that a simulation injects.
    pub faults: FaultPlan,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cluster: ClusterConfig::default(),
            scheduler: SchedulerConfig { block_tokens: BLOCK_TOKENS, ..SchedulerConfig::default() },
            store: StoreSection::default(),
            service: ServiceConfig::default(),
            router: RouterSection::default(),
            network: NetworkConfig::default(),
            clients: Clients::default(),
            faults: FaultPlan::default(),
        }
    }
}

/// How blocks are kept; capacities are in the pools.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StoreSection {
    /// Which unpinned block goes first when a tier is full.
    pub eviction: Eviction,
    /// When a block is copied to the next slower tier.
    pub offload: OffloadChoice,
    /// Whether SSD takes only blocks that were asked for twice.
    pub ssd_second_touch: bool,
    /// How nodes read and write their SSD.
    pub ssd_io: IoChoice,
}

/// When a block is copied to the next slower tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OffloadChoice {
    /// `write_through` where the SSD's folder outlives the node, else `on_evict`.
    #[default]
    Auto,
    /// Never.
    Off,
    /// As soon as it is readable in the faster tier.
    WriteThrough,
    /// When it is among the next to be evicted.
    OnEvict,
}

impl OffloadChoice {
    /// The policy that it stands for. After a restart, a chain can be used only from its first block on, and a chain's
    /// first block is the last to be evicted. Where blocks are to outlive the node, they are therefore copied at once.
    #[must_use]
    pub const fn of(self, lasts: bool) -> Offload {
        match self {
            Self::Auto if lasts => Offload::WriteThrough,
            Self::Auto | Self::OnEvict => Offload::OnEvict,
            Self::Off => Offload::Off,
            Self::WriteThrough => Offload::WriteThrough,
        }
    }
}

impl Default for StoreSection {
    fn default() -> Self {
        Self {
            eviction: Eviction::default(),
            offload: OffloadChoice::Auto,
            ssd_second_touch: false,
            ssd_io: IoChoice::Auto,
        }
    }
}

/// How the live service runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ServiceConfig {
    /// Where clients are served.
    pub listen: String,
    /// Where nodes attach.
    pub control: String,
    /// Keys that clients show as `Authorization: Bearer KEY`, each with its tenant; empty admits all clients.
    pub api_keys: Vec<ApiKey>,
    /// Key that operators show on `/admin` paths; needed there as soon as clients need keys.
    pub admin_key: Secret<String>,
    /// Classes of requests that name none by header or `service_tier`, as
    /// `[{ tenant = "acme", class = "batch" }, { model = "small", class = "batch" }, { priority = 5, class = "batch" }]`:
    /// the first rule whose fields all match gives its `class`. `tenant` is that of the key or of `x-tenant-id`, `model`
    /// is what the body asks for (else the model that is served), `priority` is a whole number in the body. A rule without
    /// `priority` is passed over where the key may not use its class. Where none matches, it is the key's first class, else
    /// the first class.
    pub class_rules: Vec<ClassRule>,
    /// Certificate chain, PEM; with `tls_key` it turns TLS on.
    pub tls_cert: String,
    /// Private key, PEM.
    pub tls_key: String,
    /// File with the key that all processes of the cluster have: a process that does not prove that it has it neither
    /// attaches nor reaches KV. Empty: all processes do.
    pub cluster_key: String,
    /// Certificate chain of control and KV ports, PEM; with the two below it turns TLS on there.
    pub cluster_tls_cert: String,
    /// Its private key, PEM.
    pub cluster_tls_key: String,
    /// Certificates that those of the other processes must come from, PEM.
    pub cluster_tls_ca: String,
    /// Secret seed of the block keys: the same on every router that shares caches, unknown to clients.
    pub chain_seed: Secret<u64>,
    /// Interval between two heartbeats of a node, µs.
    pub heartbeat_us: u64,
    /// A node without a message for this long is lost, µs.
    pub lost_after_us: u64,
    /// Stage timeout: the class's objective times this factor.
    pub stage_slack: u32,
    /// No stage is given up before this, µs.
    pub stage_floor_us: u64,
    /// Comment lines keep a silent stream alive at this interval, µs.
    pub keep_alive_us: u64,
    /// Bytes of a request's body at most.
    pub max_body_bytes: u64,
    /// Bytes that clients have at most in the process's memory, all together: their requests, whole answers that they have
    /// yet to read (beside half as much for tokens that they have yet to read). At least two of the largest bodies.
    pub max_held_bytes: u64,
    /// How long a shutdown waits for answers under way, µs.
    pub drain_us: u64,
    /// Folder that the conductor's inputs are written to, for `baton replay --journal`; none when empty.
    pub journal: String,
    /// Folder that a privacy-safe trace of what was served is written to; none when empty.
    pub capture: String,
    /// OTLP collector for spans of requests: `http://HOST:4317` is sent gRPC, `http://HOST:4318/v1/traces` HTTP, as any URL with a
    /// path, which may begin with `https://`. Empty: no spans are sent.
    pub otlp_endpoint: String,
    /// Share of requests that are traced, per mille, where the caller does not say.
    pub trace_permille: u32,
}

/// How the front door reads answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RouterSection {
    /// Tool calls looked for in chats that offer tools: `auto` (what the chat template speaks of), `none`, `hermes`, `llama3_json`, `mistral`, `pythonic`, `deepseek`.
    pub tool_parser: String,
    /// How reasoning is split from content, as `reasoning_content`: `none`, or `think` for text in `<think>` tags.
    pub reasoning_parser: String,
}

impl Default for RouterSection {
    fn default() -> Self {
        Self { tool_parser: "auto".into(), reasoning_parser: "none".into() }
    }
}

impl RouterSection {
    /// Both, if there are such.
    ///
    /// # Errors
    /// One of them is none.
    pub fn parsers(&self) -> Result<(ToolParser, ReasoningParser), ConfigError> {
        let wrong = |setting| move |why| ConfigError::Parser { setting, why };
        let tools = ToolParser::from_name(&self.tool_parser).map_err(wrong("tool_parser"))?;
        let reasoning = ReasoningParser::from_name(&self.reasoning_parser);
        Ok((tools, reasoning.map_err(wrong("reasoning_parser"))?))
    }
}

/// A key and whose it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ApiKey {
    /// The secret.
    pub key: Secret<String>,
    /// The tenant that it stands for.
    pub tenant: String,
    /// Service classes that its requests may have; those that name none have the first one. Empty: all classes.
    #[serde(default)]
    pub classes: Vec<String>,
}

/// Which class a request has that names none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClassRule {
    /// The tenant that it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The model that it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The body's `priority` that it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i64>,
    /// The class.
    pub class: String,
}

/// A rule is one line of a list, so its fields are described with the list and are no settings of their own.
impl JsonSchema for ClassRule {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ClassRule".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": "object",
            "required": ["class"],
            "propertyNames": { "enum": ["tenant", "model", "priority", "class"] },
            "additionalProperties": { "type": ["string", "integer"] },
        })
    }
}

impl Default for ServiceConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8080".into(),
            control: "127.0.0.1:0".into(),
            api_keys: Vec::new(),
            class_rules: Vec::new(),
            admin_key: Secret::default(),
            tls_cert: String::new(),
            tls_key: String::new(),
            cluster_key: String::new(),
            cluster_tls_cert: String::new(),
            cluster_tls_key: String::new(),
            cluster_tls_ca: String::new(),
            chain_seed: Secret::default(),
            heartbeat_us: 500_000,
            lost_after_us: 3_000_000,
            stage_slack: STAGE_SLACK,
            stage_floor_us: STAGE_FLOOR_US,
            keep_alive_us: 10_000_000,
            max_body_bytes: 64 << 20,
            max_held_bytes: 1 << 30,
            drain_us: 30_000_000,
            journal: String::new(),
            capture: String::new(),
            otlp_endpoint: String::new(),
            trace_permille: 100,
        }
    }
}

impl ServiceConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        let whole = |name: &str, value: u64, low: f64, high: f64| {
            within(&format!("service.{name}"), value as f64, low, high)
        };
        for (name, address) in [("listen", &self.listen), ("control", &self.control)] {
            let parsed = address.parse::<std::net::SocketAddr>();
            parsed.map_err(|why| ConfigError::Address { setting: name, address: address.clone(), why })?;
        }
        if self.tls_cert.is_empty() != self.tls_key.is_empty() {
            let both = "service.tls_cert and service.tls_key go together: give both or neither";
            return Err(ConfigError::Incomplete(both));
        }
        let tls = [&self.cluster_tls_cert, &self.cluster_tls_key, &self.cluster_tls_ca];
        if tls.iter().any(|file| file.is_empty()) && tls.iter().any(|file| !file.is_empty()) {
            return Err(ConfigError::Incomplete(
                "service.cluster_tls_cert, cluster_tls_key and cluster_tls_ca go together: give all three or none",
            ));
        }
        whole("heartbeat_us", self.heartbeat_us, 1e4, 6e7)?;
        whole("lost_after_us", self.lost_after_us, 2.0 * self.heartbeat_us as f64, 6e8)?;
        whole("stage_slack", self.stage_slack.into(), 1.0, 1000.0)?;
        whole("stage_floor_us", self.stage_floor_us, 1e4, 3.6e9)?;
        whole("keep_alive_us", self.keep_alive_us, 1e4, 3.6e9)?;
        whole("max_body_bytes", self.max_body_bytes, 1024.0, 4e9)?;
        // Below that there is no room for the requests of a few clients, or for two of the largest bodies.
        let least_held = self.max_body_bytes.saturating_mul(2).max(1 << 24);
        whole("max_held_bytes", self.max_held_bytes, least_held as f64, 1e12)?;
        whole("trace_permille", self.trace_permille.into(), 0.0, 1000.0)?;
        if !self.otlp_endpoint.is_empty() {
            CollectorUrl::parse(&self.otlp_endpoint)?;
        }
        whole("drain_us", self.drain_us, 0.0, 3.6e9)
    }
}

impl Config {
    /// Checks every bound.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.scheduler.validate().map_err(ConfigError::Scheduler)?;
        self.service.validate()?;
        self.check_names()?;
        self.check_key_classes()?;
        self.check_class_rules()?;
        self.router.parsers()?;
        simulated::validate_network(&self.network)?;
        self.cluster.validate()?;
        simulated::validate_clients(&self.clients)?;
        simulated::validate_faults(&self.faults)
    }

    /// Each class has a name of its own, by which requests, reports and metrics know it, and each key one tenant.
    fn check_names(&self) -> Result<(), ConfigError> {
        let (classes, keys) = (&self.scheduler.classes, &self.service.api_keys);
        for (at, class) in classes.iter().enumerate() {
            if classes[..at].iter().any(|other| other.name == class.name) {
                return Err(ConfigError::ClassTwice { at, name: class.name.clone() });
            }
        }
        for (at, key) in keys.iter().enumerate() {
            if let Some(other) = keys[..at].iter().position(|other| other.key == key.key) {
                return Err(ConfigError::KeyTwice { at, other });
            }
        }
        Ok(())
    }

    /// Rules name classes that there are, and say which requests they are about.
    fn check_class_rules(&self) -> Result<(), ConfigError> {
        let there: Vec<&str> = self.scheduler.classes.iter().map(|class| class.name.as_str()).collect();
        for (at, rule) in self.service.class_rules.iter().enumerate() {
            if !there.contains(&rule.class.as_str()) {
                let known = there.join(", ");
                return Err(ConfigError::RuleOfNoClass { at, class: rule.class.clone(), known });
            }
            if rule.tenant.is_none() && rule.model.is_none() && rule.priority.is_none() {
                return Err(ConfigError::RuleOfAll(at));
            }
        }
        Ok(())
    }

    /// Keys name classes that there are, also after a policy has changed.
    fn check_key_classes(&self) -> Result<(), ConfigError> {
        let there = || self.scheduler.classes.iter().map(|class| class.name.as_str());
        for (at, key) in self.service.api_keys.iter().enumerate() {
            if let Some(missing) = key.classes.iter().find(|name| there().all(|class| class != name.as_str()))
            {
                let known = there().collect::<Vec<_>>().join(", ");
                return Err(ConfigError::KeyOfNoClass { at, class: missing.clone(), known });
            }
        }
        Ok(())
    }
}

fn within(name: &str, value: f64, low: f64, high: f64) -> Result<(), ConfigError> {
    if value.is_finite() && (low..=high).contains(&value) {
        Ok(())
    } else {
        Err(ConfigError::Outside { setting: name.to_owned(), value, low, high })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_needed_and_defaults_round_trip() {
        let config = parse("").expect("an empty file is a valid one");
        assert_eq!(config, Config::default());
        let text = toml::to_string(&config).expect("a config is TOML");
        assert_eq!(parse(&text).expect("its own text"), config);
        // Nodes and conductor agree whatever other settings a file has.
        for (text, block_tokens) in
            [("", 16), ("[scheduler]\nmax_retries = 1", 16), ("[scheduler]\nblock_tokens = 512", 512)]
        {
            assert_eq!(parse(text).expect("valid").scheduler.block_tokens, block_tokens, "{text}");
        }
    }

    #[test]
    fn a_class_rule_names_a_class_that_there_is_and_whom_it_is_about() {
        let file = |rule: &str| {
            format!("[[scheduler.classes]]\nname = \"batch\"\n[service]\nclass_rules = [{{ {rule} }}]\n")
        };
        let rules = parse(&file("tenant = \"lab\", priority = -5, class = \"batch\"")).expect("valid");
        let [rule] = &rules.service.class_rules[..] else { panic!("one rule") };
        assert_eq!(
            (rule.tenant.as_deref(), rule.model.as_deref(), rule.priority),
            (Some("lab"), None, Some(-5))
        );
        for (rule, said) in [
            ("tenant = \"lab\", class = \"gold\"", "service.class_rules[0].class is \"gold\""),
            ("class = \"batch\"", "service.class_rules[0] has no tenant, model or priority"),
            ("tenant = \"lab\"", "class"),
            ("tenent = \"lab\", class = \"batch\"", "tenent"),
            ("priority = 1.5, class = \"batch\"", "`1.5`, expected i64"),
        ] {
            let error = parse(&file(rule)).expect_err(rule).to_string();
            assert!(error.contains(said), "{rule}: {error}");
        }
    }

    #[test]
    fn an_unknown_key_is_answered_with_the_right_one() {
        let error = parse("[scheduler]\nadmision = \"early\"").expect_err("misspelt").to_string();
        assert!(error.contains("admision") && error.contains("did you mean `admission`"), "{error}");
        let error = parse("[schedular]\n").expect_err("misspelt").to_string();
        assert!(error.contains("did you mean `scheduler`"), "{error}");
        let error = parse("[scheduler]\npolicy = \"moncake\"").expect_err("misspelt").to_string();
        assert!(error.contains("did you mean `mooncake`"), "{error}");
    }

    #[test]
    fn a_setting_of_an_earlier_release_is_answered_with_what_to_do() {
        let error = parse("[transfer]\nfloor_permille = 16").expect_err("it has moved").to_string();
        assert_eq!(
            error,
            "[transfer] is no longer a section: its settings are the simulator's, and have moved to [network] under \
             the same names"
        );
        // Not all of that section has moved.
        let gone = "max_predicted_events is no longer a setting: nothing read the predictions";
        let error = parse("[transfer]\nmax_predicted_events = 16").expect_err("it is gone").to_string();
        assert!(error.contains("[transfer] is no longer") && error.contains(gone), "{error}");
        let error = parse("[network]\nmax_predicted_events = 16").expect_err("it is gone").to_string();
        assert!(error.contains(gone), "{error}");
        for section in ["scheduler", "cluster"] {
            let text = format!("[{section}]\nfirst_token = \"prefill\"");
            let error = parse(&text).expect_err("it is gone").to_string();
            assert!(error.contains(&format!("{section}.first_token is no longer a setting")), "{error}");
        }
        let error = parse("transfers = 16").expect_err("it never was there").to_string();
        assert!(error.contains("unknown field"), "{error}");
    }

    #[test]
    fn errors_name_the_place_and_never_quote_the_file() {
        for (text, line) in [
            ("[service]\nadmin_key = \"sesame", 2),
            ("[service]\nchain_seed = \"sesame\"", 2),
            ("[service]\n\nadmin_key = sesame", 3),
            ("[[service.api_keys]]\nkey = \"sesame\" tenant", 2),
            ("[service]\nadmin_key = \"a\"\nadmin_key = \"sesame\"", 3),
            ("[service]\nadmin_key = [\"sesame\"]", 2),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.starts_with(&format!("TOML line {line}, column ")), "{text}: {error}");
            assert!(!error.contains("sesame"), "{text}: {error}");
        }
    }

    #[test]
    fn no_two_classes_have_one_name_and_no_two_keys_are_one() {
        let class = |name: &str| format!("[[scheduler.classes]]\nname = \"{name}\"\n");
        let key = |key: &str| format!("[[service.api_keys]]\nkey = \"{key}\"\ntenant = \"t\"\n");
        assert!(parse(&[class("a"), class("b"), key("sesame"), key("mellon")].concat()).is_ok());
        let error =
            parse(&[class("a"), class("b"), class("a")].concat()).expect_err("a is there twice").to_string();
        assert!(error.contains("scheduler.classes[2].name = \"a\""), "{error}");
        let error = parse(&[key("mellon"), key("sesame"), key("sesame")].concat())
            .expect_err("one twice")
            .to_string();
        assert!(error.contains("service.api_keys[2].key is that of service.api_keys[1]"), "{error}");
        assert!(!error.contains("sesame"), "{error}");
    }

    #[test]
    fn keys_name_classes_that_there_are() {
        let file = |class: &str| {
            format!(
                "[[scheduler.classes]]\nname = \"batch\"\n[[service.api_keys]]\nkey = \"sesame\"\ntenant = \"t\"\n\
                 classes = [\"{class}\"]"
            )
        };
        assert_eq!(
            parse(&file("batch")).expect("there is such a class").service.api_keys[0].classes,
            ["batch"]
        );
        let error = parse(&file("gold")).expect_err("there is none").to_string();
        assert!(
            error.contains("service.api_keys[0].classes names \"gold\"") && error.contains("has: batch"),
            "{error}"
        );
        assert!(!error.contains("sesame"), "{error}");
    }

    #[test]
    fn an_impossible_value_is_answered_with_its_bound() {
        let error = parse("[[cluster.pools]]\ncount = 0").expect_err("no instances").to_string();
        assert!(error.contains("cluster.pools[0].count = 0") && error.contains("1..=65535"), "{error}");
        let error =
            parse("[service]\notlp_endpoint = \"https://c:4317\"").expect_err("no endpoint").to_string();
        assert!(error.contains("service.otlp_endpoint = \"https://c:4317\": "), "{error}");
        parse("[service]\notlp_endpoint = \"http://127.0.0.1:4317\"").expect("an endpoint");
        let error = parse("[router]\ntool_parser = \"qwen\"").expect_err("no parser").to_string();
        assert!(error.contains("router.tool_parser") && error.contains("hermes"), "{error}");
        let error = parse("[scheduler]\nblock_tokens = 0").expect_err("no tokens").to_string();
        assert!(error.contains("block_tokens = 0 is outside 1..=65536"), "{error}");
        let held =
            |bytes: &str| parse(&format!("service.max_body = \"64MiB\"\nservice.max_held_bytes = {bytes}"));
        let error = held("134217727").expect_err("less than two bodies").to_string();
        assert!(error.contains("service.max_held_bytes = 134217727 is outside 134217728..="), "{error}");
        held("134217728").expect("two bodies");
        let chunks = "[[cluster.pools]]\nmixed_chunk_tokens = 512";
        let error = parse(chunks).expect_err("engines cut prompts by the step target").to_string();
        assert!(error.contains("mixed_chunk_tokens = 512") && error.contains("mix = \"fixed\""), "{error}");
        parse(&format!("{chunks}\nmix = \"fixed\"")).expect("a fixed budget");
        let changes =
            |role: &str| parse(&format!("[[cluster.pools]]\nrole = \"{role}\"\nmay_change_role = true"));
        let error = changes("both").expect_err("it does both parts").to_string();
        assert!(error.contains("cluster.pools[0].may_change_role has no effect on the role both"), "{error}");
        changes("decode").expect("one part");
        let pipeline = |more: &str| parse(&format!("[[cluster.pools]]\npipeline_nodes = 2\nrole = {more}"));
        for more in ["'both'", "'decode'", "'prefill'\nmay_change_role = true"] {
            let error = pipeline(more).expect_err("it decodes").to_string();
            assert!(error.contains("cluster.pools[0].pipeline_nodes = 2: a pipeline"), "{error}");
        }
        pipeline("'prefill'").expect("it only prefills");
    }
}
