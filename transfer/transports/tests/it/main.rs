//! The transport from outside: one conformance suite on every medium, then hostile peers and faulty pipes.

mod conformance;
mod faults;
mod proxy;
mod raw;
mod scene;
