//! Tests of the conductor as a whole, one file for each thing that it promises.

mod admission;
mod algorithm;
mod classes;
mod decode;
mod explain;
mod failures;
mod fetch;
mod local;
mod peers;
mod policies;
mod replication;
mod retry_after;
mod scripts;
