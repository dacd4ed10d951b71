//! The journal: every input of a conductor with a digest of what it ordered, so that a run can be
//! stepped again elsewhere and must come out the same (I10).
//!
//! A journal is a folder of files, `journal-000001.jsonl` and so on, of which the newest few are
//! kept. Each file stands by itself: its first line is a *header* with the whole conductor as it
//! was then (empty at the start of a service), each later line one *step*. When lines had to be
//! dropped a line says how many, and the next file starts from a fresh header. After an error of the
//! disk the file just ends; a new one is tried once a minute, and its header says how many steps are
//! in no file. Each line ends with a checksum chained over all lines before it, so damage anywhere is
//! found.

mod disk;
mod error;
#[cfg(test)]
mod fuzz;
mod reader;
mod writer;

use std::fmt::Write as _;

use baton_scheduler::{Effect, SavedConductor};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

#[cfg(test)]
mod tests;

pub use error::JournalError;
pub use reader::{ReplayReport, replay};
#[cfg(test)]
pub use writer::JournalStatus;
pub use writer::{JournalSettings, JournalWriter};

/// The format that this program writes and reads.
pub const VERSION: u32 = 12;

/// The first line of a file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// The format.
    pub version: u32,
    /// Version of the program that wrote it.
    pub program: String,
    /// When the file was begun, µs since 1970.
    pub start_unix_us: u64,
    /// Steps of this service before this file that are in no file.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lost_steps_before: u64,
    /// The conductor, settings included, as it was before the first step of this file.
    pub base: SavedConductor,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(steps: &u64) -> bool {
    *steps == 0
}

/// Why a file ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The service stopped.
    Closed,
    /// The next file goes on from here.
    Rotated,
    /// The file was full and the conductor too large for a fresh header: what followed is not recorded.
    Truncated,
}

/// One line, without its checksum.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line<Input> {
    Header(Box<Header>),
    Step {
        now_us: u64,
        input: Input,
        /// See [`digest`].
        effects: String,
    },
    /// So many lines were dropped here: the disk did not keep up.
    Lost(u64),
    End(End),
}

/// A 64-bit digest of effects in their serialised form, as 16 hexadecimal digits.
fn digest(effects: &[Effect]) -> serde_json::Result<String> {
    let bytes = serde_json::to_vec(effects)?;
    Ok(hex(xxh3_64(&bytes)))
}

fn hex(value: u64) -> String {
    let mut text = String::with_capacity(16);
    let _ = write!(text, "{value:016x}");
    text
}

/// The JSON before a line's checksum.
const SUM: &str = ",\"sum\":\"";
/// Bytes that follow a line's own text: wrapping, 16 digits, closing quote and brace.
const SUM_BYTES: usize = SUM.len() + 18;

/// The checksums of a file's lines, each over the line and the one before.
#[derive(Debug, Default)]
struct Chain(u64);

impl Chain {
    /// Adds a line's checksum and the line's end to its JSON text, an object.
    fn seal(&mut self, mut json: String) -> String {
        json.pop();
        self.0 = xxh3_64_with_seed(json.as_bytes(), self.0);
        json.push_str(SUM);
        json.push_str(&hex(self.0));
        json.push_str("\"}\n");
        json
    }

    /// The JSON text of a sealed line (its end taken off), if its checksum fits.
    fn open(&mut self, line: &str) -> Option<String> {
        let at = line.len().checked_sub(SUM_BYTES).filter(|at| line.is_char_boundary(*at))?;
        let (json, sum) = line.split_at(at);
        let sum = sum.strip_prefix(SUM)?.strip_suffix("\"}")?;
        self.0 = xxh3_64_with_seed(json.as_bytes(), self.0);
        (sum == hex(self.0)).then(|| format!("{json}}}"))
    }
}
