//! How an engine is reached and how long it is waited for. All of it is given by the caller.

use baton_types::Secret;

use crate::error::{RemoteError, Stage};

/// Which engine's API is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// vLLM's OpenAI-like API: `/v1/completions` with token ids both ways.
    Vllm,
    /// SGLang's own `/generate`.
    Sglang,
    /// Any other server with `/v1/completions` that takes token ids as a prompt and returns the ids of the tokens it
    /// drew. It serves whole requests only, as it has no hand-off.
    Plain,
}

impl Dialect {
    /// Its name, as settings and errors spell it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Plain => "openai",
        }
    }
}

/// Which leg of a pair an engine was started for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineRole {
    /// Prefill legs only.
    Prefill,
    /// Decode legs only.
    Decode,
    /// Either leg, and whole requests.
    Whole,
}

/// How KV gets from a prefill engine to a decode engine. Both have to be set up alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandoffWay {
    /// No way: whole requests only.
    None,
    /// vLLM's NixlConnector: the prefill's answer says where the blocks are.
    Nixl,
    /// vLLM's MooncakeConnector: a transfer's name, and the prefill instance's bootstrap server.
    Mooncake {
        /// The bootstrap server as the decode engine reaches it, `http://host:8998`; a decode engine may leave it empty.
        bootstrap_url: String,
    },
    /// SGLang's: both legs meet in a room of the prefill instance's bootstrap server.
    Rooms {
        /// The prefill instance's host as the decode engine reaches it; that of `url` when `None`.
        host: Option<String>,
        /// Its `--disaggregation-bootstrap-port`.
        port: u16,
    },
}

/// How long each step may take, µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Opening a connection.
    pub connect_us: u64,
    /// A page: models, version, health, metrics, bootstrap.
    pub page_us: u64,
    /// A prefill leg, or another answer that comes in one piece.
    pub answer_us: u64,
    /// From the start of a decode leg or a whole request to its first token.
    pub first_token_us: u64,
    /// Between two tokens.
    pub silence_us: u64,
}

/// How much is taken of an engine, and how much is given to it at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// One event of a stream, beside the prompt's tokens. SGLang repeats the answer so far in each, except with
    /// `--incremental-streaming-output`.
    pub event_bytes: usize,
    /// An answer that comes in one piece.
    pub answer_bytes: usize,
    /// A page, `/metrics` included.
    pub page_bytes: usize,
    /// Requests in flight; one more waits, as long as its answer may take to begin.
    pub calls: usize,
    /// Connections kept open for the next request.
    pub idle_connections: usize,
}

/// How long a prefill engine keeps blocks for a decode engine that has not come yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTerms {
    /// Counted from the end of the prefill leg, µs; what the engine itself says is taken where it is shorter.
    pub lease_us: u64,
    /// So long before its end a lease counts as run out: clocks differ, and calls travel. µs
    pub margin_us: u64,
}

/// An engine: where it is, what it speaks, and its time limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteSettings {
    /// `http://host:port`; plain http, for engines have no TLS of their own.
    pub url: String,
    /// The dialect of its API.
    pub dialect: Dialect,
    /// How it hands KV over.
    pub handoff: HandoffWay,
    /// Which legs it was started for; what the probe finds when `None`. The other leg is refused before anything is sent:
    /// a vLLM that is only a producer exits over a decode leg.
    pub role: Option<EngineRole>,
    /// Sent as a bearer token, when the engine wants one.
    pub api_key: Option<Secret<String>>,
    /// The model's name in requests; what the probe finds when `None`.
    pub model: Option<String>,
    /// Tokens of the tokenizer, if known: an id far beyond them is no token of the model.
    pub vocab_tokens: Option<u32>,
    /// Which data-parallel rank of the engine is meant, when it has several.
    pub dp_rank: Option<u32>,
    /// How long each step may take.
    pub timeouts: Timeouts,
    /// Sizes and counts.
    pub bounds: Bounds,
    /// For prefill engines that lend blocks.
    pub lease: LeaseTerms,
}

impl RemoteSettings {
    /// Settings for the engine at `url` with the defaults that the engines' own imply: leases of 30 s for NIXL and for
    /// rooms and of 10 s for Mooncake, tokens within 120 s of the start and then every 60 s.
    #[must_use]
    pub fn new(dialect: Dialect, url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            dialect,
            handoff: HandoffWay::None,
            role: None,
            api_key: None,
            model: None,
            vocab_tokens: None,
            dp_rank: None,
            timeouts: Timeouts {
                connect_us: 2_000_000,
                page_us: 5_000_000,
                answer_us: 120_000_000,
                first_token_us: 120_000_000,
                silence_us: 60_000_000,
            },
            bounds: Bounds {
                event_bytes: 4 << 20,
                answer_bytes: 32 << 20,
                page_bytes: 4 << 20,
                calls: 1_024,
                idle_connections: 64,
            },
            lease: LeaseTerms { lease_us: 30_000_000, margin_us: 3_000_000 },
        }
    }

    /// These settings with a way of handing KV over, and the lease that goes with it.
    #[must_use]
    pub fn with_handoff(mut self, handoff: HandoffWay) -> Self {
        if matches!(handoff, HandoffWay::Mooncake { .. }) {
            self.lease = LeaseTerms { lease_us: 10_000_000, margin_us: 2_000_000 };
        }
        self.handoff = handoff;
        self
    }

    /// Every setting against its bounds and against the others.
    pub(crate) fn check(&self) -> Result<(), RemoteError> {
        let wrong =
            |text: String, remedy: &'static str| Err(RemoteError::ours(Stage::Settings, text).remedy(remedy));
        let t = &self.timeouts;
        for (name, value) in [
            ("connect_us", t.connect_us),
            ("page_us", t.page_us),
            ("answer_us", t.answer_us),
            ("first_token_us", t.first_token_us),
            ("silence_us", t.silence_us),
        ] {
            if value == 0 || value > MAX_WAIT_US {
                return wrong(format!("{name} is {value}"), "give something above 0 and up to a day");
            }
        }
        let b = &self.bounds;
        if [b.event_bytes, b.answer_bytes, b.page_bytes].into_iter().any(|bytes| bytes < 1_024) {
            return wrong(format!("{b:?} has a size below 1024"), "give each size at least 1024 bytes");
        }
        if b.calls == 0 || b.calls > MAX_CALLS {
            return wrong(format!("calls is {}", b.calls), "give 1 to 65536");
        }
        if self.lease.margin_us >= self.lease.lease_us || self.lease.lease_us > MAX_WAIT_US {
            let text = format!("a lease of {} µs, margin {} µs", self.lease.lease_us, self.lease.margin_us);
            return wrong(text, "the margin is shorter than the lease, the lease at most a day");
        }
        self.check_way()
    }

    fn check_way(&self) -> Result<(), RemoteError> {
        let fits = match &self.handoff {
            HandoffWay::None => true,
            HandoffWay::Nixl | HandoffWay::Mooncake { .. } => self.dialect == Dialect::Vllm,
            HandoffWay::Rooms { .. } => self.dialect == Dialect::Sglang,
        };
        if !fits {
            let text = format!("{} does not hand over by {:?}", self.dialect.name(), self.handoff);
            return Err(RemoteError::ours(Stage::Settings, text)
                .remedy("vllm has nixl and mooncake, sglang has rooms, others have none"));
        }
        if let HandoffWay::Rooms { port: 0, .. } = self.handoff {
            return Err(RemoteError::ours(Stage::Settings, "the bootstrap port is 0")
                .remedy("give the prefill server's --disaggregation-bootstrap-port"));
        }
        if let HandoffWay::Rooms { host: Some(host), .. } = &self.handoff
            && host.trim().is_empty()
        {
            return Err(RemoteError::ours(Stage::Settings, "the bootstrap host is empty")
                .remedy("leave it out, or name the prefill server's host"));
        }
        Ok(())
    }
}

/// Longest wait, µs.
const MAX_WAIT_US: u64 = 86_400_000_000;
/// Most calls in flight.
const MAX_CALLS: usize = 65_536;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_pass_and_the_key_stays_hidden() {
        let mut settings = RemoteSettings::new(Dialect::Vllm, "http://a:1");
        settings.api_key = Some("sesame".into());
        assert_eq!(settings.check(), Ok(()));
        assert!(!format!("{settings:?}").contains("sesame"));
    }

    #[test]
    fn each_wrong_setting_is_refused_with_a_remedy() {
        let rooms = |host: Option<&str>, port| HandoffWay::Rooms { host: host.map(Into::into), port };
        type Change = fn(&mut RemoteSettings);
        let wrong: [(&str, Change); 5] = [
            ("silence_us", |s| s.timeouts.silence_us = 0),
            ("connect_us", |s| s.timeouts.connect_us = u64::MAX),
            ("below 1024", |s| s.bounds.event_bytes = 3),
            ("calls", |s| s.bounds.calls = 0),
            ("margin", |s| s.lease.margin_us = s.lease.lease_us),
        ];
        for (word, change) in wrong {
            let mut settings = RemoteSettings::new(Dialect::Vllm, "http://a:1");
            change(&mut settings);
            let error = settings.check().unwrap_err();
            assert!(error.text.contains(word), "{error}");
            assert_eq!(error.stage, Stage::Settings);
        }
        for (dialect, way) in [
            (Dialect::Vllm, rooms(None, 1)),
            (Dialect::Sglang, HandoffWay::Nixl),
            (Dialect::Plain, HandoffWay::Nixl),
            (Dialect::Sglang, rooms(None, 0)),
            (Dialect::Sglang, rooms(Some(" "), 1)),
        ] {
            assert!(RemoteSettings::new(dialect, "http://a:1").with_handoff(way).check().is_err());
        }
    }
}
