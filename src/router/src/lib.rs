//! The front door: OpenAI's API in front of whatever serves tokens.
//!
//! [`Backend`] is the port to what is behind: the router turns a client's call into token ids, a
//! block chain and sampling settings, and turns tokens back into text, streams and errors.

mod backend;

pub use backend::{Backend, Event, Fault, Model, Readiness, Refusal, Submission, Ticket, Usage};
