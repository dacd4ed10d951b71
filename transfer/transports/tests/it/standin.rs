//! The stand-in for the CUDA driver: built with the system's C compiler, one copy for each test, led by a plan
//! file and heard through its journal (see `standin_cuda.c`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Longest wait for something that is to happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// See the module.
pub struct StandIn {
    folder: TempDir,
}

impl StandIn {
    /// Builds it.
    pub fn new() -> Self {
        Self::built_with(&[])
    }

    /// Builds it with functions left out.
    pub fn built_with(defines: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let stand_in = Self { folder };
        // A file of its own for each, so that the loader takes them for different libraries.
        fs::write(stand_in.library(), built(defines)).unwrap();
        stand_in
    }

    pub fn library(&self) -> PathBuf {
        self.folder.path().join("libcuda_standin.so")
    }

    fn beside(&self, ending: &str) -> PathBuf {
        self.folder.path().join(format!("libcuda_standin.so.{ending}"))
    }

    /// Replaces its plan, in one step.
    pub fn plan(&self, orders: &str) {
        let next = self.beside("next");
        fs::write(&next, orders).unwrap();
        fs::rename(next, self.beside("plan")).unwrap();
    }

    /// What has happened.
    pub fn journal(&self) -> Vec<String> {
        let text = fs::read_to_string(self.beside("log")).unwrap_or_default();
        // The last line may be half written.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(str::to_owned).collect()
    }

    /// How many events begin so.
    pub fn count(&self, start: &str) -> usize {
        self.journal().iter().filter(|line| line.starts_with(start)).count()
    }

    /// Waits until so many events begin so.
    pub fn wait_for(&self, start: &str, count: usize) {
        let until = Instant::now() + PATIENCE;
        while self.count(start) < count {
            assert!(Instant::now() < until, "no {count} times '{start}' in {:#?}", self.journal());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The library, compiled once for each set of functions left out.
fn built(defines: &[&str]) -> Vec<u8> {
    static BUILT: Mutex<BTreeMap<String, Vec<u8>>> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().unwrap();
    built.entry(defines.join(" ")).or_insert_with(|| compile(defines)).clone()
}

fn compile(defines: &[&str]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/standin_cuda.c");
    let library = folder.path().join("built.so");
    let built = Command::new("cc")
        .args(["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread"])
        .args(defines.iter().map(|define| format!("-D{define}")))
        .arg(&source)
        .arg("-o")
        .arg(&library)
        .output()
        .expect("these tests build a stand-in with the C compiler `cc`: install gcc or clang");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    fs::read(library).unwrap()
}
