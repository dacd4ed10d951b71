//! Runs that are done: each once, also over several starts of the program where there is a file for them.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;

use anyhow::{Result, anyhow};
use baton_sim::tune::RunTally;
use hashbrown::HashMap;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct LedgerLine {
    key: String,
    tally: RunTally,
}

/// Tallies by the digest of what they came from.
pub struct RunLedger {
    known: HashMap<String, RunTally>,
    file: Option<Mutex<File>>,
}

impl RunLedger {
    /// What a file has, or nothing. A line that was cut off, as by a stop in the middle, is passed over.
    ///
    /// # Errors
    /// The file cannot be read and written, or it is another kind of file.
    pub fn open(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else { return Ok(Self { known: HashMap::new(), file: None }) };
        let wrong = |why: &dyn std::fmt::Display| {
            anyhow!("state {}: {why}; give the path of a file of baton tune, or of a new one", path.display())
        };
        let options = || OpenOptions::new().read(true).append(true).create(true).open(path);
        let mut file = options().map_err(|e| wrong(&e))?;
        let mut known = HashMap::new();
        let (mut lines, mut whole) = (0, true);
        for line in BufReader::new(&file).split(b'\n') {
            let line = line.map_err(|e| wrong(&e))?;
            lines += 1;
            match serde_json::from_slice::<LedgerLine>(&line) {
                Ok(line) => drop(known.insert(line.key, line.tally)),
                Err(_) => whole = false,
            }
        }
        if lines > 1 && known.is_empty() {
            return Err(wrong(&"it holds something else"));
        }
        if !whole {
            // What comes next starts on a line of its own.
            file.write_all(b"\n").map_err(|e| wrong(&e))?;
        }
        Ok(Self { known, file: Some(Mutex::new(file)) })
    }

    /// The tally of a run that is done.
    pub fn get(&self, key: &str) -> Option<&RunTally> {
        self.known.get(key)
    }

    /// Writes a run down as soon as it is done; [`RunLedger::add`] follows when no other run is under way.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, key: &str, tally: &RunTally) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let line = LedgerLine { key: key.to_owned(), tally: tally.clone() };
        let text = serde_json::to_string(&line)? + "\n";
        file.lock().write_all(text.as_bytes()).map_err(|e| anyhow!("state: {e}; free some space"))
    }

    /// Keeps a run's tally.
    pub fn add(&mut self, key: String, tally: RunTally) {
        self.known.insert(key, tally);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_cut_off_gives_its_whole_lines_and_goes_on() {
        let place = tempfile::tempdir().expect("a temporary folder");
        let path = place.path().join("state");
        let tally = |late_ttft| RunTally { late_ttft, ..RunTally::default() };
        let ledger = RunLedger::open(Some(&path)).expect("a new file");
        ledger.write("a", &tally(1)).expect("written");
        ledger.write("b", &tally(2)).expect("written");
        let text = std::fs::read_to_string(&path).expect("there");
        std::fs::write(&path, &text[..text.len() - 9]).expect("cut off");
        let ledger = RunLedger::open(Some(&path)).expect("the rest");
        assert_eq!((ledger.get("a"), ledger.get("b")), (Some(&tally(1)), None));
        ledger.write("c", &tally(3)).expect("written");
        let ledger = RunLedger::open(Some(&path)).expect("all of it");
        assert_eq!((ledger.get("a"), ledger.get("c")), (Some(&tally(1)), Some(&tally(3))));
    }

    #[test]
    fn another_kind_of_file_is_refused_and_stays() {
        let place = tempfile::tempdir().expect("a temporary folder");
        let path = place.path().join("notes.txt");
        std::fs::write(&path, "one\ntwo\n").expect("written");
        assert!(RunLedger::open(Some(&path)).is_err_and(|e| e.to_string().contains("something else")));
        assert_eq!(std::fs::read_to_string(&path).expect("there"), "one\ntwo\n");
    }
}
