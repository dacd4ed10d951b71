//! The engine and the store as Python uses them, without Python.

mod engines;
mod plain_c;
mod scene;
mod stores;
