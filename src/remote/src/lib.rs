//! Real engines over HTTP: token ids in, token ids out.
//!
//! A [`RemoteEngine`] is one server of vLLM, SGLang, or another engine with `/v1/completions`. It is asked what it is
//! ([`RemoteEngine::probe`]), whether it is well, and what it has to do; it serves whole requests
//! ([`RemoteEngine::generate`]), or one leg of a pair: [`RemoteEngine::prefill`] here, [`RemoteEngine::decode`] elsewhere, and a
//! [`Handoff`] between them.
//!
//! Engines believe what they are sent: a decode server that gets the wrong blocks answers 200 with wrong tokens, and one
//! that gets too few fields exits. So nothing is sent that was not checked: a hand-off has all its fields, is of this
//! prompt, is used once, and its blocks are read within their lease or not at all.

mod answer;
mod completions;
mod digits;
mod engine;
mod error;
mod fields;
#[cfg(test)]
mod fuzz;
mod generation;
mod handoff;
mod http;
mod ids;
mod load;
mod nixl;
mod prefill;
mod probe;
mod prompt;
mod request;
mod settings;
mod sglang;
mod spent;
mod sse;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod vllm;
mod vocabulary;

pub use engine::RemoteEngine;
pub use error::{Kind, RemoteError, Side, Stage};
pub use fields::{ClientBody, FIELDS, Rule, rule};
pub use generation::{CollectedAnswer, Generation};
pub use handoff::Handoff;
pub use load::Load;
pub use prefill::{NextStep, PrefillLeg, PrefillResult};
pub use probe::Probe;
pub use prompt::{Prompt, WeakPrompt};
pub use request::{Counts, Piece, Request, Token};
pub use settings::{Bounds, Dialect, EngineRole, HandoffWay, LeaseTerms, RemoteSettings, Timeouts};
pub use vocabulary::{ComparisonExtent, Sample};
