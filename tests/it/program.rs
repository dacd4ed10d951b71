//! Runs `baton` the way a user does, and never waits for it longer than a bound.

use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longer than any command here takes on a busy machine.
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// How a run of the program ended.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code; a signal has none.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Outcome {
    /// Asserts success.
    #[track_caller]
    pub fn succeeded(self) -> Self {
        assert_eq!(self.code, Some(0), "baton failed: {self:#?}");
        self
    }

    /// Asserts a refusal that a user can act on: the exit code, no panic, and every one of `words` on standard error.
    #[track_caller]
    pub fn refused(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "baton ended otherwise: {self:#?}");
        assert!(!self.stderr.contains("panicked"), "baton panicked: {self:#?}");
        for word in words {
            assert!(self.stderr.contains(word), "standard error does not say '{word}': {self:#?}");
        }
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|e| panic!("standard output is not JSON ({e}): {self:#?}"))
    }
}

/// An empty directory that the program runs in, gone at the end of the test.
pub struct Place {
    dir: TempDir,
}

impl Place {
    /// A fresh one.
    pub fn new() -> Self {
        Self { dir: TempDir::new().unwrap() }
    }

    /// The path of `name` in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file.
    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// Reads a JSON file that the program wrote.
    #[track_caller]
    pub fn json(&self, name: &str) -> Value {
        let text = std::fs::read_to_string(self.path(name))
            .unwrap_or_else(|e| panic!("{name} was not written: {e}"));
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name} is not JSON ({e}): {text}"))
    }

    /// Runs `baton` here with `args`.
    #[track_caller]
    pub fn baton(&self, args: &[&str]) -> Outcome {
        let logs = TempDir::new().unwrap();
        let (out, err) = (logs.path().join("out"), logs.path().join("err"));
        let mut command = quiet(self.dir.path(), args);
        command.stdout(File::create(&out).unwrap()).stderr(File::create(&err).unwrap());
        let code = wait(command);
        let text = |path: &Path| String::from_utf8(std::fs::read(path).unwrap()).expect("baton prints UTF-8");
        Outcome { code, stdout: text(&out), stderr: text(&err) }
    }

    /// Runs `baton` here without a reader of its standard output.
    #[track_caller]
    pub fn baton_into_closed_pipe(&self, args: &[&str]) -> Outcome {
        let err = self.path(".err");
        let mut command = quiet(self.dir.path(), args);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.stdout(writer).stderr(File::create(&err).unwrap());
        let code = wait(command);
        Outcome { code, stdout: String::new(), stderr: std::fs::read_to_string(err).unwrap() }
    }
}

/// `baton` with no terminal, no colour and none of the caller's settings.
fn quiet(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("BATON")) {
        command.env_remove(name);
    }
    command.current_dir(dir).args(args).stdin(Stdio::null()).env("NO_COLOR", "1");
    command
}

#[track_caller]
fn wait(mut command: Command) -> Option<i32> {
    let mut child = command.spawn().unwrap();
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if started.elapsed() > TIME_LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("still running after {TIME_LIMIT:?}: {command:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
