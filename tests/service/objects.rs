//! `baton store` as its users meet it: a process of its own, the commands that look into it, and the Python package
//! that connectors use.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use super::clients::{output, prepared_python};
use super::service::{baton, run, signal, until};

/// A running store.
pub struct Store {
    pub child: Child,
    pub folder: TempDir,
    pub url: String,
}

impl Store {
    pub fn start(folder: TempDir, args: &[&str]) -> Self {
        Self::start_with(folder, args, &[])
    }

    /// The same, with some variables.
    pub fn start_with(folder: TempDir, args: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = baton(folder.path());
        command.envs(variables.iter().copied());
        command.args(["store", "serve", "--listen", "127.0.0.1:0", "--memory", "64MiB"]).args(args);
        command.stderr(File::create(folder.path().join("err")).unwrap());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").expect("where it listens").to_owned();
        Self { child, folder, url }
    }

    pub fn run(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let args: Vec<&str> =
            ["store"].into_iter().chain(args.iter().copied()).chain(["--url", &self.url]).collect();
        run(self.folder.path(), &args)
    }

    #[track_caller]
    pub fn good(&self, args: &[&str]) -> String {
        let (code, out, err) = self.run(args);
        assert_eq!(code, Some(0), "{args:?}: {err}");
        out
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn values_go_in_and_come_out_by_commands() {
    let store = Store::start(TempDir::new().unwrap(), &[]);
    let value: Vec<u8> = (0..3_000_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(store.folder.path().join("value"), &value).unwrap();
    store.good(&["put", "some key", "value"]);
    store.good(&["put", "other", "value", "--ttl", "1000"]);
    assert_eq!(store.good(&["ls"]).lines().count(), 2);
    assert_eq!(store.good(&["ls", "--match", "some*"]), "some key\n");
    let stat = store.good(&["stat", "some key"]);
    assert!(stat.contains("bytes        12000000\n") && stat.contains("crc32c"), "{stat}");
    assert!(store.good(&["verify", "some key"]).contains(": good"));
    store.good(&["get", "other", "--output", "copy"]);
    assert!(std::fs::read(store.folder.path().join("copy")).unwrap() == value);
    let (code, _, err) = store.run(&["put", "other", "value", "--keep"]);
    assert!(code == Some(1) && err.contains("other is there already"), "{err}");
    assert_eq!(store.good(&["del", "other", "none"]), "1 removed\n");
    let (code, _, err) = store.run(&["get", "other"]);
    assert!(code == Some(1) && err.contains("no such key: other"), "{err}");
    let (code, _, err) = run(store.folder.path(), &["store", "ls", "--url", "redis://127.0.0.1:1"]);
    assert!(code == Some(1) && err.contains("is the store running there?"), "{err}");
}

#[test]
fn logins_metrics_and_the_end() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("logins"), "default secret team-a 32MiB\n").unwrap();
    let mut command = baton(folder.path());
    command.args(["store", "serve", "--memory", "1GB"]);
    let refused = output(command.stdout(Stdio::null()));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("64MiB"), "{refused:?}");
    let store = Store::start(folder, &["--auth", "logins", "--metrics", "127.0.0.1:0"]);
    std::fs::write(store.folder.path().join("value"), "x").unwrap();
    let (code, _, err) = store.run(&["put", "a", "value"]);
    assert!(code == Some(1) && err.contains("NOAUTH"), "{err}");
    let inside = store.url.replace("redis://", "redis://:secret@");
    let (code, _, err) = run(store.folder.path(), &["store", "put", "a", "value", "--url", &inside]);
    assert_eq!(code, Some(0), "{err}");
    let said = std::fs::read_to_string(store.folder.path().join("err")).unwrap();
    let metrics = said.split_once("metrics on http://").unwrap().1.split_once('/').unwrap().0;
    let mut stream = TcpStream::connect(metrics).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut told = String::new();
    stream.read_to_string(&mut told).unwrap();
    assert!(told.starts_with("HTTP/1.1 200") && told.contains("\nbaton_objects_keys 1\n"), "{told}");
    let mut store = store;
    signal(store.child.id(), Signal::TERM);
    let mut ended = None;
    until(Duration::from_secs(20), "the end", || {
        ended = store.child.try_wait().unwrap();
        ended.is_none().then(|| "it runs on".to_owned())
    });
    assert_eq!(ended.and_then(|status| status.code()), Some(0));
}

#[test]
fn the_redis_package_talks_to_the_store() {
    let Some(python) = prepared_python() else { return };
    let store = Store::start(TempDir::new().unwrap(), &["--allow-flush"]);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let checks = output(Command::new(python).arg(root.join("tests/clients/redis_client.py")).arg(&store.url));
    let told = String::from_utf8_lossy(&checks.stdout);
    assert!(checks.status.success(), "{told}{}", String::from_utf8_lossy(&checks.stderr));
    println!("{told}");
}
