//! Traces of LLM serving: read in every dialect that is lines or CSV, checked, summarised,
//! changed, made up and written.
//!
//! - [`load`] reads a file whole, [`open`] streams it; both detect the dialect and report their assumptions.
//! - [`lint`] names every row that breaks a rule; [`summary`] reports rates, lengths and hit ratios.
//! - [`scale`] speeds up, cuts, repeats and multiplies; [`synth`] makes seeded workloads.
//! - [`mod@write`] writes the canonical rows and a few other dialects.

pub mod dialect;
pub mod error;
pub mod lint;
pub mod lru;
pub mod options;
pub mod read;
pub mod record;
pub mod scale;
pub mod summary;
pub mod synth;
pub mod write;

mod detect;
mod flat;
mod histogram;
mod locate;
mod moment;
mod parser;
mod prompt;
mod seen;
mod source;
mod top;

pub use dialect::{DIALECTS, Dialect};
pub use error::{Stage, TraceError};
pub use histogram::Spread;
pub use locate::locate;
pub use options::{Columns, Context, Limits, ReadOptions, TimeUnit};
pub use read::{Reader, load, open};
pub use record::{Extra, Record, SYNTHETIC_ID_BASE, Trace};
pub use source::Progress;
pub use top::TopPrefix;
