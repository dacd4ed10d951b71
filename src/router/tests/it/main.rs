//! The front door over real sockets, before a backend that does what a script says.

mod callers;
mod chat;
mod completions;
mod connections;
mod errors;
mod lifecycle;
mod scripted;
