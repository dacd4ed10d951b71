//! Tests of the conductor as a whole, one file for each thing that it promises.

mod algorithm;
mod fetch;
mod scripts;
