//! Why a journal cannot be written, read or replayed.

use std::io;
use std::path::PathBuf;

use super::VERSION;

/// The fault of a journal: with its line where it is in a file, counted from 1.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// No file can be written in the folder.
    #[error("journal {}: {why}; give a folder that can be written", .directory.display())]
    Folder {
        /// The folder.
        directory: PathBuf,
        /// The system's error.
        why: io::Error,
    },
    /// A line cannot be read.
    #[error("line {line}: {why}")]
    Unreadable {
        /// The line.
        line: u64,
        /// The system's error.
        why: io::Error,
    },
    /// A line is not as it was written.
    #[error("line {0}: damaged, its checksum does not fit; steps before it are sound")]
    Damaged(u64),
    /// A line is of no form that this version knows.
    #[error("line {line}: {why}; take the version that wrote it")]
    Unknown {
        /// The line.
        line: u64,
        /// Why it is of none.
        why: serde_json::Error,
    },
    /// The file does not begin with a header.
    #[error("line 1: no journal header; give a file that begins with one")]
    NoHeader,
    /// The file has another format.
    #[error(
        "line 1: format {version}, written by baton {program}; this baton reads format {VERSION}: replay the file with the \
         baton that wrote it"
    )]
    Format {
        /// The format.
        version: u32,
        /// The version of the program that wrote it.
        program: String,
    },
    /// A header stands in the middle.
    #[error("line {0}: a second header; the file was put together from two")]
    SecondHeader(u64),
    /// The header's conductor cannot be.
    #[error("line 1: {0}")]
    Restore(baton_scheduler::RestoreError),
    /// An instance joined with a cost profile that cannot be.
    #[error("line {line}: an instance's {why}")]
    Profile {
        /// The line.
        line: u64,
        /// What is wrong with it.
        why: baton_types::ProfileError,
    },
    /// A step has other effects than those recorded.
    #[error(
        "line {line}, step {}, at {now_us} µs: first divergence\n  input    {input}\n  recorded effects with digest \
         {recorded}\n  replayed effects with digest {replayed}: {effects}",
        .line - 1
    )]
    Divergence {
        /// The line.
        line: u64,
        /// The step's time.
        now_us: u64,
        /// Its input, as JSON.
        input: String,
        /// The digest in the file.
        recorded: String,
        /// The digest of this replay.
        replayed: String,
        /// The effects of this replay, as JSON.
        effects: String,
    },
    /// Effects cannot be written as JSON.
    #[error("{0}")]
    Unwritable(serde_json::Error),
    /// The conductor contradicts itself after the last step.
    #[error("after the last step: {0}; report this")]
    Inconsistent(String),
}
