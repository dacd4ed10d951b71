//! Strangers at the control port and the KV ports: processes with the cluster's key serve, others get an error with
//! the reason.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;

use super::http;
use super::service::{baton, chat, run, until};
use super::several::{RunningProcess, free_port, ready, start};

const LONG: Duration = Duration::from_secs(60);

/// A conductor and a pair, all with `more` on their command lines; where clients are served, and nodes attach.
struct SmallCluster {
    place: TempDir,
    clients: SocketAddr,
    control: String,
    _running: Vec<RunningProcess>,
}

impl SmallCluster {
    fn start(place: TempDir, scheme: &str, more: &[&str]) -> Self {
        let (at, clients, control) = (place.path(), free_port(), free_port());
        let mut serve = baton(at);
        serve.args(["serve", "--listen", &format!("127.0.0.1:{clients}")]);
        serve.args(["--control", &format!("127.0.0.1:{control}")]).args(more);
        let mut running = vec![start(serve, at, "conductor")];
        let control = format!("{scheme}://127.0.0.1:{control}");
        for (name, role) in [("p0", "prefill"), ("d0", "decode")] {
            let mut node = baton(at);
            node.args(["node", "--name", name, "--role", role, "--engine", "zero"]);
            running.push(start(
                {
                    node.args(["--conductor", &control]).args(more);
                    node
                },
                at,
                name,
            ));
        }
        let clients = SocketAddr::from(([127, 0, 0, 1], clients));
        let cluster = Self { place, clients, control, _running: running };
        until(LONG, "a pair with what is asked for serves", || {
            (ready(cluster.clients) != Some(200)).then(|| cluster.logs())
        });
        cluster
    }

    fn logs(&self) -> String {
        let log = |name| std::fs::read_to_string(self.place.path().join(format!("{name}.err"))).unwrap();
        ["conductor", "p0", "d0"].map(log).concat()
    }

    /// A node that is not let in: what it says at its end.
    #[track_caller]
    fn turned_away(&self, control: &str, more: &[&str]) -> String {
        let node = ["node", "--name", "stranger", "--role", "prefill", "--engine", "zero"];
        let (code, _, said) = run(self.place.path(), &[&node[..], &["--conductor", control], more].concat());
        assert_eq!(code, Some(1), "{said}");
        said
    }

    fn asks(&self) {
        let json = [("content-type", "application/json")];
        let asked = chat("who goes there?", 4).to_string();
        http::call(self.clients, "POST /v1/chat/completions", &json, &asked).unwrap().ok();
    }

    fn refused(&self) -> Option<u64> {
        let page = http::call(self.clients, "GET /metrics", &[], "").unwrap().ok().text;
        let line = page.lines().find_map(|line| line.strip_prefix("baton_nodes_refused_total "))?;
        line.parse().ok()
    }
}

fn write(place: &Path, name: &str, text: &str) {
    std::fs::write(place.join(name), text).unwrap();
}

#[test]
fn who_has_the_key_attaches_and_others_are_told_why_they_do_not() {
    let place = TempDir::new().unwrap();
    write(place.path(), "cluster.key", "the key of this cluster, of 32 bytes\n");
    write(place.path(), "other.key", "the key of another cluster, of 32 bytes\n");
    let cluster = SmallCluster::start(place, "http", &["--cluster-key", "cluster.key"]);
    cluster.asks();
    assert_eq!(cluster.refused(), Some(0));
    let said = cluster.turned_away(&cluster.control, &[]);
    assert!(said.contains("start the node with --cluster-key"), "{said}");
    let said = cluster.turned_away(&cluster.control, &["--cluster-key", "other.key"]);
    assert!(said.contains("the node has another cluster key"), "{said}");
    let said = cluster.turned_away(&cluster.control, &["--cluster-key", "none.key"]);
    assert!(said.contains("none.key"), "{said}");
    // The last one has not dialled.
    assert_eq!(cluster.refused(), Some(2));
    cluster.asks();
    let logs = cluster.logs();
    assert!(!logs.contains("the key of"), "no key in a log: {logs}");
}

/// Makes a certificate authority and a certificate for 127.0.0.1.
fn certificates(place: &Path, folder: &str) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let own = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap().signed_by(&key, &ca).unwrap();
    let place = place.join(folder);
    std::fs::create_dir(&place).unwrap();
    write(&place, "cert.pem", &own.pem());
    write(&place, "key.pem", &key.serialize_pem());
    write(&place, "ca.pem", &ca.pem());
}

const TLS: [&str; 8] = [
    "--cluster-key",
    "cluster.key",
    "--cluster-tls-cert",
    "ours/cert.pem",
    "--cluster-tls-key",
    "ours/key.pem",
    "--cluster-tls-ca",
    "ours/ca.pem",
];

#[test]
fn under_tls_conductor_and_nodes_must_trust_the_same_ca() {
    let place = TempDir::new().unwrap();
    write(place.path(), "cluster.key", "the key of this cluster, of 32 bytes\n");
    certificates(place.path(), "ours");
    certificates(place.path(), "others");
    let cluster = SmallCluster::start(place, "https", &TLS);
    cluster.asks();
    // A CA that did not sign the conductor's certificate; then one that did, with a certificate that it did not.
    for wrong in [7, 3] {
        let mut more = TLS;
        more[wrong] = if wrong == 7 { "others/ca.pem" } else { "others/cert.pem" };
        more[5] = if wrong == 3 { "others/key.pem" } else { more[5] };
        let mut node = baton(cluster.place.path());
        node.args(["node", "--name", "stranger", "--role", "prefill", "--engine", "zero"]);
        node.args(["--conductor", &cluster.control]).args(more);
        let name = format!("stranger-{wrong}");
        let _stranger = start(node, cluster.place.path(), &name);
        let log = || std::fs::read_to_string(cluster.place.path().join(format!("{name}.err"))).unwrap();
        until(LONG, "it is not attached", || (!log().contains("not attached")).then(log));
    }
    let plain = cluster.control.replace("https", "http");
    let said = cluster.turned_away(&plain, &TLS);
    assert!(said.contains("write https://"), "{said}");
    let said = cluster.turned_away(&cluster.control, &TLS[..2]);
    assert!(said.contains("--cluster-tls-ca"), "{said}");
    let status = http::call(cluster.clients, "GET /admin/status", &[], "").unwrap().ok().json();
    assert_eq!(status["nodes"].as_array().unwrap().len(), 2, "{status}");
}
