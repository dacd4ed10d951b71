//! Tests of the whole conductor, one file for each promise.

mod admission;
mod affinity;
mod algorithm;
mod bounds;
mod changes;
mod classes;
mod decode;
mod explain;
mod failures;
mod fetch;
mod kinds;
mod last_copies;
mod local;
mod parts;
mod peers;
mod policies;
mod replication;
mod resume;
mod retry_after;
mod room;
mod saved;
mod scripts;
mod serial;
mod sharing;
mod shedding;
mod tickets;
