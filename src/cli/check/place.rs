//! Checks the ports, keys and folders that the configuration names on this machine.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use baton_http::{Client, Identity, Options, by};
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::Full;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use super::report::Report;
use crate::capture::CaptureConfig;
use crate::cli::serve::CONTROL;
use crate::conductor::journal::JournalSettings;
use crate::config::{Config, ServiceConfig};
use crate::guard::{ClusterGuard, open_port};

/// Longest wait for a connection, or for an answer.
const TIME_LIMIT: Duration = Duration::from_secs(2);
/// The first bytes of an HTTP/2 client: its preface, and a settings frame without any settings.
const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// The body of a Baton's `/health`.
const HEALTHY: &[u8] = b"{\"status\":\"ok\"}";
/// Longest answer of `/health` that is read, bytes.
const MAX_HEALTH_BYTES: usize = 4096;
/// The kind of an HTTP/2 frame that has settings.
const SETTINGS: u8 = 4;

/// The listener at an address.
#[derive(Debug, PartialEq, Eq)]
pub enum AddressState {
    /// No process listens there.
    Free,
    /// A process listens there already.
    Listens,
    /// The address is no one's on this machine, and nobody answers there.
    Away(String),
    /// It cannot be listened on.
    Denied(String),
}

/// Where clients are served, and where nodes attach.
pub async fn ports(config: &Config, report: &mut Report) {
    let listen = &config.service.listen;
    let check = format!("service.listen {listen}");
    if let Some(connect) = tried(&check, listen, report).await {
        if !config.service.tls_cert.is_empty() {
            let found = "taken; behind TLS it cannot be told by whom";
            report.doubtful(&check, found, "see that it is this service, or give another port");
        } else if is_baton(&connect).await {
            report.good_at(&check, "served by a running Baton");
        } else {
            report.wrong(&check, "taken by something else", "stop that, or give another port");
        }
    }
    // The address that `baton serve` uses when the file leaves it open: nodes have to know it.
    let told = &config.service.control;
    let control = if told.ends_with(":0") { CONTROL } else { told };
    let check = format!("service.control {control}");
    if let Some(connect) = tried(&check, control, report).await {
        if !config.service.cluster_tls_cert.is_empty() {
            let found = "taken; behind TLS it cannot be told by whom";
            report.doubtful(&check, found, "see that it is this service, or give another port");
        } else if speaks_http2(&connect).await {
            report.good_at(&check, "reached: a control port answers");
        } else {
            let found = "something listens there that is no control port";
            report.wrong(&check, found, "stop that, or give another port");
        }
    }
}

/// The address to connect to, if somebody listens there; else it has been reported.
async fn tried(check: &str, address: &str, report: &mut Report) -> Option<String> {
    match taken(address).await {
        AddressState::Listens => return Some(reachable(address)),
        AddressState::Free => report.good_at(check, "free"),
        AddressState::Away(why) => {
            let remedy = "start `baton serve` on the machine of that address, or open the way to it";
            report.wrong(check, why, remedy);
        }
        AddressState::Denied(why) => {
            report.wrong(check, why, "give a port that may be listened on, above 1023");
        }
    }
    None
}

/// The kind of listener at an address.
async fn taken(address: &str) -> AddressState {
    let failed = match TcpListener::bind(address).await {
        Ok(_) => return AddressState::Free,
        Err(error) => error,
    };
    if failed.kind() == ErrorKind::PermissionDenied {
        return AddressState::Denied(failed.to_string());
    }
    match connect(&reachable(address)).await {
        Ok(_) => AddressState::Listens,
        Err(why) => AddressState::Away(format!("{failed}; {why:#}")),
    }
}

/// Where an address that is listened on is reached from the same machine.
fn reachable(address: &str) -> String {
    match address.rsplit_once(':') {
        Some(("0.0.0.0", port)) => format!("127.0.0.1:{port}"),
        Some(("[::]", port)) => format!("[::1]:{port}"),
        _ => address.to_owned(),
    }
}

/// A connection to `HOST:PORT`.
///
/// # Errors
/// In words.
pub async fn connect(address: &str) -> Result<TcpStream> {
    match tokio::time::timeout(TIME_LIMIT, TcpStream::connect(address)).await {
        Ok(connected) => connected.with_context(|| format!("cannot connect to {address}")),
        Err(_) => bail!("cannot connect to {address} within {} s", TIME_LIMIT.as_secs()),
    }
}

/// Whether the front door of a Baton answers at `HOST:PORT`.
async fn is_baton(address: &str) -> bool {
    let Ok(request) = Request::get(format!("http://{address}/health")).body(Full::<Bytes>::default()) else {
        return false;
    };
    let client = Client::new(Options::new(TIME_LIMIT));
    let answer = by(Instant::now() + TIME_LIMIT, client.send_and_collect(request, MAX_HEALTH_BYTES)).await;
    answer.is_ok_and(|(status, body)| status == StatusCode::OK && body == HEALTHY)
}

/// Whether an HTTP/2 server answers at `HOST:PORT`: its first frame has settings.
async fn speaks_http2(address: &str) -> bool {
    let mut frame = [0; 9];
    let talk = async {
        let mut stream = connect(address).await.ok()?;
        stream.write_all(HELLO).await.ok()?;
        stream.read_exact(&mut frame).await.ok()
    };
    let answered = tokio::time::timeout(TIME_LIMIT, talk).await;
    matches!(answered, Ok(Some(_))) && frame[3] == SETTINGS
}

/// The files of TLS: both can be read, and the key is the certificate's.
pub fn tls(service: &ServiceConfig, report: &mut Report) {
    if service.tls_cert.is_empty() {
        return;
    }
    let check = "service.tls_cert, tls_key";
    match Identity::of_files(Path::new(&service.tls_cert), Path::new(&service.tls_key)) {
        Ok(identity) => {
            let count = identity.certificates();
            report.good_at(check, format!("{count} certificates, and the key is the first one's"));
        }
        Err(why) => report.wrong(
            check,
            why.to_string(),
            "see that both belong together, and that this user can read them",
        ),
    }
}

/// Checks the protection of the control port: the files can be read, and a key is set where other machines reach it.
pub fn control_guard(service: &ServiceConfig, report: &mut Report) {
    let check = "service.cluster_key, cluster_tls_*";
    let guard = match ClusterGuard::read(service, None) {
        Ok(guard) => guard,
        Err(why) => {
            return report.wrong(
                check,
                why.to_string(),
                "give files that this user can read, the same on all machines",
            );
        }
    };
    let open = service.control.parse().ok().and_then(|at| open_port("the control port", at, &guard));
    match (open, guard.has_key()) {
        (Some(why), _) => report.doubtful(
            check,
            why,
            "openssl rand -hex 32 makes a key; service.cluster_key names its file",
        ),
        (None, true) => report.good_at(check, format!("a key; nodes attach by {}", guard.scheme())),
        (None, false) => {}
    }
}

/// The folders of journal and capture: they can be written, and have room for all that they may come to hold.
pub fn folders(config: &Config, report: &mut Report) {
    let service = &config.service;
    if !service.journal.is_empty() {
        let settings = JournalSettings::new(&service.journal);
        // While it is busy a file becomes twice as long.
        let bytes = settings.rotate_bytes.saturating_mul(2 * settings.keep_files as u64);
        folder("service.journal", &settings.directory, bytes, report);
    }
    if !service.capture.is_empty() {
        let settings = CaptureConfig::new(PathBuf::from(&service.capture), 1, 0);
        let bytes = settings.file_bytes.saturating_mul(settings.files as u64 + 2);
        folder("service.capture", &settings.folder, bytes, report);
    }
}

fn folder(setting: &str, folder: &Path, needed_bytes: u64, report: &mut Report) {
    let check = format!("{setting} {}", folder.display());
    let remedy = "make the folder, and let the user that runs Baton write there";
    // It is made if it is not there: then it matters what it is made in.
    let whole = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let Some(place) = whole.ancestors().find(|place| place.exists()) else {
        let found = "neither it nor any folder above it is there";
        return report.wrong(&check, found, "give a path that begins in a folder that exists");
    };
    if let Err(why) = writable(place) {
        return report.wrong(&check, format!("{}: {why}", place.display()), remedy);
    }
    let free_bytes = match rustix::fs::statvfs(place) {
        Ok(told) => told.f_bavail.saturating_mul(told.f_frsize),
        Err(error) => return report.doubtful(&check, format!("its room is not told: {error}"), remedy),
    };
    // Existing files count as available space: files of earlier runs are part of the bound.
    let found = format!("writable; {} MiB free, at most {} MiB needed", free_bytes >> 20, needed_bytes >> 20);
    if free_bytes < needed_bytes {
        report.doubtful(&check, found, "free some room, or give a larger disk");
    } else {
        report.good_at(&check, found);
    }
}

fn writable(place: &Path) -> std::io::Result<()> {
    let probe = place.join(format!(".baton-check-{}", std::process::id()));
    std::fs::OpenOptions::new().write(true).create_new(true).open(&probe)?;
    std::fs::remove_file(&probe)
}
