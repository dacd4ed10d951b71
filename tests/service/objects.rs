//! `baton store` as its users meet it: a process of its own, the commands that look into it, and the Python package
//! that connectors use.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
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

    /// Starts a store with these environment variables.
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

/// The most memory that a process has had at a time, bytes.
fn peak_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the peak");
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Metrics of a store.
struct Metrics(String);

impl Metrics {
    /// Of a store that was started with `--metrics`.
    fn of(store: &Store) -> Self {
        let said = std::fs::read_to_string(store.folder.path().join("err")).unwrap();
        let address = said.split_once("metrics on http://").unwrap().1.split_once('/').unwrap().0;
        Self(address.to_owned())
    }

    fn read(&self, name: &str) -> u64 {
        let mut stream = TcpStream::connect(&self.0).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name}: {text}")).parse().unwrap()
    }
}

/// A client that logs in and waits for the answer.
fn logged_in(address: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"AUTH secret\r\n").unwrap();
    let mut told = [0; 5];
    stream.read_exact(&mut told).unwrap();
    assert_eq!(&told, b"+OK\r\n");
    stream
}

/// Sends data and reads nothing, until the server has taken none for a second.
fn pour(mut stream: TcpStream, data: &[u8]) -> TcpStream {
    stream.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    // That it is not taken is what is tried here.
    let _ = stream.write_all(data);
    stream
}

fn set(stream: &mut TcpStream, name: &str, value: &[u8]) {
    let head = format!("*3\r\n$3\r\nSET\r\n${}\r\n{name}\r\n${}\r\n", name.len(), value.len());
    stream.write_all(&[head.as_bytes(), value, b"\r\n"].concat()).unwrap();
    let mut told = [0; 5];
    stream.read_exact(&mut told).unwrap();
    assert_eq!(&told, b"+OK\r\n", "{name}");
}

/// The formula is that of docs/objects.md.
#[test]
fn hostile_clients_cannot_make_the_process_larger_than_its_settings_say() {
    const MIB: u64 = 1 << 20;
    const EACH: usize = 40;
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("logins"), "default secret team-a\n").unwrap();
    let limits = ["--auth", "logins", "--connections", "300", "--value-max", "16MiB"];
    let below = ["--ssd", "below", "--ssd-size", "1GiB", "--ssd-admit", "first"];
    let store = Store::start(folder, &[&limits[..], &below[..], &["--metrics", "127.0.0.1:0"][..]].concat());
    let metrics = Metrics::of(&store);
    let address = store.url.trim_start_matches("redis://").to_owned();
    let mut good = logged_in(&address);
    let large = vec![7; 8 << 20];
    for n in 0..24 {
        set(&mut good, &format!("large{n}"), &large);
        // As fast as the disk takes them: what waits for long is passed over.
        until(Duration::from_secs(60), "it is on the disk", || {
            let values = metrics.read("baton_objects_ssd_keys");
            (values <= n).then(|| format!("{values} values"))
        });
    }
    set(&mut good, "small", &[7; 1000]);

    let readers = (0..EACH).map(|n| Arc::from(format!("GET large{}\r\n", n % 24).into_bytes()));
    let pipeline = b"GET small\r\n".repeat(800_000);
    let half = [&b"*1000001\r\n$4\r\nMSET\r\n"[..], &b"$1\r\na\r\n".repeat(900_000)].concat();
    let upload = [&b"*3\r\n$3\r\nSET\r\n$1\r\nu\r\n$16000000\r\n"[..], &large].concat();
    let stranger = b"*9\r\n$4\r\nAUTH\r\n$3900\r\n".to_vec();
    let others = [pipeline, half, upload, stranger].map(Arc::<[u8]>::from);
    let others = others.iter().flat_map(|data| std::iter::repeat_n(Arc::clone(data), EACH));
    let mut clients = Vec::new();
    for (n, data) in readers.chain(others).enumerate() {
        // The last kind does not log in.
        let stream = if n < 4 * EACH { logged_in(&address) } else { TcpStream::connect(&address).unwrap() };
        clients.push(std::thread::spawn(move || pour(stream, &data)));
    }
    let mut buffered = 0;
    until(Duration::from_secs(60), "they fill what they may", || {
        buffered = metrics.read("baton_objects_buffered_bytes").max(buffered);
        (buffered < 64 * MIB).then(|| format!("{buffered} bytes"))
    });
    let clients: Vec<TcpStream> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    // Others are answered meanwhile.
    good.write_all(b"PING\r\n").unwrap();
    let mut told = [0; 7];
    good.read_exact(&mut told).unwrap();
    assert_eq!(&told, b"+PONG\r\n");
    drop(clients);
    until(Duration::from_secs(60), "they are gone", || {
        let open = metrics.read("baton_objects_connections");
        (open > 1).then(|| format!("{open} connections"))
    });
    let asked = metrics.read("baton_objects_ssd_hits_total") + metrics.read("baton_objects_let_go_total");
    assert!(asked > 10, "the large ones came from the disk: {asked}");
    let (keys, connections) = (64 * MIB / 1024 * 250, 300 * 128 * 1024);
    let most = 64 * MIB + keys + connections + 2 * (128 * MIB + 32 * MIB) + 64 * MIB;
    let peak = peak_bytes(store.child.id());
    println!("peak {} MiB of {} MiB", peak / MIB, most / MIB);
    assert!(peak <= most, "{} MiB, {} MiB at most", peak / MIB, most / MIB);
}
