//! The engine and the store as Python uses them, without Python.

mod engines;
mod scene;
mod stores;
