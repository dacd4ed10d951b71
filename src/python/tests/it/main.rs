//! The engine and the store as Python uses them, without Python.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod away;
mod engines;
mod hostile;
mod plain_c;
mod scene;
mod stores;
