//! The front door: OpenAI's API in front of whatever serves tokens.
//!
//! [`Backend`] is the port to what is behind: the router turns a client's call into token ids, a
//! block chain and sampling settings, and turns tokens back into text, streams and errors.

mod answer;
mod backend;
mod body;
mod call;
mod caller;
mod chat;
mod choices;
mod config;
mod error;
mod fields;
mod json;
mod plan;
mod receive;
mod router;
mod sampling;
mod serve;
mod stall;
mod stats;
mod stops;
mod stream;
mod tls;
mod tokenize;
mod write;

pub use backend::{Backend, Event, Fault, Model, Readiness, Refusal, Submission, Ticket, Usage};
pub use body::{Body, CutOff, Reply};
pub use config::{ApiKey, Extra, ReplyFuture, RouterConfig, TlsFiles};
pub use error::ApiError;
pub use router::Router;
pub use serve::ServeError;
pub use stats::RouterStats;
pub use tokenize::{Lineage, LoadError, Prompt, Tokenization};
