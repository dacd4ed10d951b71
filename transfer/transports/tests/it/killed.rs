//! A process killed in the middle of a handshake, when its ring still has a name.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use baton_transports::*;

use crate::scene::*;

const ADDRESS: &str = "BATON_TEST_KILLED_ADDRESS";
const SHM_DIR: &str = "BATON_TEST_KILLED_SHM_DIR";

/// The body of the process that is killed: it dials somebody who never answers.
#[tokio::test]
#[ignore = "runs in a process of its own, which the test below starts"]
async fn dials_in_vain() {
    let Ok(kv_address) = std::env::var(ADDRESS) else { return };
    let shm_dir = std::env::var_os(SHM_DIR).map(Into::into);
    let limits = Limits { connect_timeout_ms: 30_000, offer_timeout_ms: 30_000, ..Limits::default() };
    let config = DialerConfig { host: "here".into(), shm_dir, fingerprint: FINGERPRINT, limits };
    let peer = PeerAddress { kv_address, host: "here".into() };
    let _ = Flight::start(&Dialer::new(config).unwrap(), &peer, ticket(1), PLAN).await;
}

fn rings(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// Whether there is a ring that its maker holds: it has its length only once it is locked.
fn is_held(dir: &Path) -> bool {
    let lengths = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
    lengths.sum::<u64>() > 0
}

async fn bind_over(dir: &Path) -> Endpoint {
    let mut config = EndpointConfig::new("127.0.0.1:0".parse().unwrap(), "here", FINGERPRINT);
    config.shm_dir = Some(dir.to_owned());
    Endpoint::bind(config, Arc::new(Node::default())).await.unwrap()
}

fn start(address: &str, dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed::dials_in_vain", "--ignored"])
        .envs([(ADDRESS, address.as_ref()), (SHM_DIR, dir.as_os_str())])
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[tokio::test]
async fn the_ring_of_a_killed_process_is_cleared_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut child = start(&silent.local_addr().unwrap().to_string(), dir.path());
    let _open = tokio::time::timeout(Duration::from_secs(20), silent.accept()).await.unwrap().unwrap();
    let held = async {
        while !is_held(dir.path()) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), held).await.expect("it makes a ring");
    let _first = bind_over(dir.path()).await;
    assert_eq!(rings(dir.path()), 1, "its maker lives and needs it");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(rings(dir.path()), 1, "killed, it could not tidy up");
    let _second = bind_over(dir.path()).await;
    assert_eq!(rings(dir.path()), 0);
}
