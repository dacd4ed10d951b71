//! The driver against scripted nodes: what a node or a client may do wrong, and what comes of it.
//!
//! The bench steps the real driver by hand, on a clock of its own; `attach` runs it as the service does,
//! with nodes over gRPC.

mod attach;
mod bench;
mod churn;
mod clients;
mod engines;
mod faults;
mod fuzz;
mod names;
mod open_legs;
mod operator;
mod pair;
mod parked;
mod pauses;
mod random;
mod schedule;
mod slo;
mod suspects;
