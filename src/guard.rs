//! Admission to a conductor or a node's KV port: a peer needs the cluster's key, and a certificate where TLS is on.
//! Control and KV ports require the same two things.
//!
//! On the control port the key is proven in the call itself: the node's challenge goes with its call, the
//! conductor's comes with the answer, the node's proof in its Hello and the conductor's in its Welcome. The node comes
//! first: a stranger who dials gets nothing that the key was used for. The key never goes over the wire, and what was
//! overheard opens nothing (`baton_transports::ClusterKey`).

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use baton_transports::mover::{TcpTls, TlsPem};
use baton_transports::{Challenge, ClusterKey, Guard, Proof, Prover};
use baton_wire::PROTOCOL_VERSION;
use tonic::Status;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity, ServerTlsConfig};

use crate::config::ServiceConfig;

/// Where a challenge is in the metadata of a call, and of its answer.
const CHALLENGE: &str = "baton-challenge-bin";
/// Where the version of the control protocol is, beside a challenge: who is asked what depends on it.
const VERSION: &str = "baton-control-protocol";
/// Longest wait for a connection to a conductor.
const CONNECT_WITHIN: Duration = Duration::from_secs(2);

/// The key and the TLS settings that admit peers. The default admits every peer. Clones share what was read.
#[derive(Clone, Debug, Default)]
pub struct ClusterGuard {
    key: Option<ClusterKey>,
    tls: Option<Arc<ClusterTls>>,
}

/// The TLS certificates to present and to trust.
struct ClusterTls {
    certificate: Vec<u8>,
    key: Vec<u8>,
    ca: Vec<u8>,
    name: Option<String>,
    links: TcpTls,
}

impl fmt::Debug for ClusterTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterTls(..)")
    }
}

/// Why there is no guard: a file that it needs.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// The cluster's key; the words name its file.
    #[error("{0}")]
    Key(String),
    /// A file of TLS cannot be read.
    #[error("service.{setting} = \"{path}\": {why}; give a PEM file")]
    File {
        /// The setting that names it.
        setting: &'static str,
        /// The file.
        path: String,
        /// The system's error.
        why: std::io::Error,
    },
    /// The files of TLS do not go together.
    #[error("TLS of the cluster, service.cluster_tls_*: {0}")]
    Tls(String),
}

/// A call to attach, between the challenges of both sides and their proofs.
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    theirs: Challenge,
    ours: Challenge,
}

impl ClusterGuard {
    /// Reads the files that the settings name. `name` is what the certificates of those that are reached must be
    /// for; by default the host of their address.
    ///
    /// # Errors
    /// The file, and what is wrong with it.
    pub fn read(service: &ServiceConfig, name: Option<String>) -> Result<Self, GuardError> {
        let key = match service.cluster_key.as_str() {
            "" => None,
            path => Some(ClusterKey::read(Path::new(path)).map_err(GuardError::Key)?),
        };
        let tls = match service.cluster_tls_cert.as_str() {
            "" => None,
            _ => Some(Arc::new(read_tls(service, name)?)),
        };
        Ok(Self { key, tls })
    }

    /// Whether strangers are kept out.
    #[must_use]
    pub const fn has_key(&self) -> bool {
        self.key.is_some()
    }

    /// How control addresses begin.
    #[must_use]
    pub const fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// The requirements of a node's KV port.
    #[must_use]
    pub fn links(&self) -> Guard {
        Guard { key: self.key.clone(), tls: self.tls.as_ref().map(|tls| tls.links.clone()) }
    }

    /// TLS of a control port, if there is any.
    #[must_use]
    pub fn server_tls(&self) -> Option<ServerTlsConfig> {
        let tls = self.tls.as_ref()?;
        let own = Identity::from_pem(&tls.certificate, &tls.key);
        Some(ServerTlsConfig::new().identity(own).client_ca_root(Certificate::from_pem(&tls.ca)))
    }

    /// The way to a control port. A node that has TLS never goes without.
    ///
    /// # Errors
    /// [`tonic::Code::Unauthenticated`] for an address that says otherwise, `Unavailable` for one that is none.
    pub fn line(&self, address: &str) -> Result<Endpoint, Status> {
        if !address.starts_with(&format!("{}://", self.scheme())) {
            let remedy = match self.tls {
                Some(_) => "this node speaks TLS to its cluster: write https://",
                None if !address.starts_with("https://") => "write it as http://ADDRESS:PORT",
                None => "TLS needs --cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca",
            };
            return Err(Status::unauthenticated(format!("{address}: {remedy}")));
        }
        let wrong = |e: tonic::transport::Error| Status::unavailable(format!("{address}: {e}"));
        let line = Endpoint::from_shared(address.to_owned()).map_err(wrong)?.connect_timeout(CONNECT_WITHIN);
        let Some(tls) = &self.tls else { return Ok(line) };
        let own = Identity::from_pem(&tls.certificate, &tls.key);
        let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&tls.ca)).identity(own);
        if let Some(name) = &tls.name {
            config = config.domain_name(name);
        }
        line.tls_config(config).map_err(wrong)
    }

    /// The node's challenge, put into its call; none without a key.
    pub fn challenge(&self, call: &mut MetadataMap) -> Option<Challenge> {
        self.key.as_ref()?;
        let ours = baton_transports::challenge();
        insert_challenge(&ours, call);
        Some(ours)
    }

    /// The node's proof for the conductor that was challenged by `ours`, and what that has to answer.
    ///
    /// # Errors
    /// [`tonic::Code::Unauthenticated`]: it wants no proof. [`tonic::Code::FailedPrecondition`]: it speaks another
    /// version.
    pub fn answered(&self, ours: &Challenge, answer: &MetadataMap) -> Result<(Opening, Proof), Status> {
        same_version(answer, "the conductor")?;
        let (Some(key), Some(theirs)) = (&self.key, challenge_in(answer)) else {
            return Err(Status::unauthenticated(
                "the conductor does not ask for the cluster's key: give both the same --cluster-key",
            ));
        };
        Ok((Opening { theirs, ours: *ours }, key.prove(Prover::Node, ours, &theirs)))
    }

    /// Whether a Welcome shows that the conductor has the key.
    ///
    /// # Errors
    /// [`tonic::Code::Unauthenticated`]: it does not.
    pub fn welcomed(&self, opening: &Opening, shown: &[u8]) -> Result<(), Status> {
        self.check((Prover::Conductor, "the conductor"), opening, shown).map(|_| ())
    }

    /// Opens a call on the conductor's side; `None` where no key is needed.
    ///
    /// # Errors
    /// [`tonic::Code::Unauthenticated`]: one side has a key and the other has none.
    /// [`tonic::Code::FailedPrecondition`]: the node speaks another version.
    pub fn open_call(&self, call: &MetadataMap) -> Result<Option<Opening>, Status> {
        match (&self.key, challenge_in(call)) {
            (None, None) => Ok(None),
            (Some(_), Some(theirs)) => {
                same_version(call, "the node")?;
                Ok(Some(Opening { theirs, ours: baton_transports::challenge() }))
            }
            (Some(_), None) => Err(Status::unauthenticated(
                "this conductor wants the cluster's key: start the node with --cluster-key",
            )),
            (None, Some(_)) => Err(Status::unauthenticated(
                "this conductor has no cluster key and the node has one: give both the same --cluster-key",
            )),
        }
    }

    /// The conductor's challenge, put into its answer.
    pub fn answer(&self, opening: &Opening, answer: &mut MetadataMap) {
        insert_challenge(&opening.ours, answer);
    }

    /// The conductor's proof, if a Hello shows that the node has the key.
    ///
    /// # Errors
    /// [`tonic::Code::Unauthenticated`]: it does not.
    pub fn proven(&self, opening: &Opening, shown: &[u8]) -> Result<Proof, Status> {
        let key = self.check((Prover::Node, "the node"), opening, shown)?;
        Ok(key.prove(Prover::Conductor, &opening.ours, &opening.theirs))
    }

    /// The key, if what the other side shows proves that it has the same.
    fn check(
        &self,
        (prover, name): (Prover, &str),
        opening: &Opening,
        shown: &[u8],
    ) -> Result<&ClusterKey, Status> {
        let key = self.key.as_ref();
        key.filter(|key| key.is_proof(prover, &opening.theirs, &opening.ours, shown)).ok_or_else(|| {
            Status::unauthenticated(format!(
                "{name} has another cluster key: give both the same --cluster-key"
            ))
        })
    }
}

/// Puts a challenge into what is said first.
fn insert_challenge(challenge: &Challenge, metadata: &mut MetadataMap) {
    metadata.insert_bin(CHALLENGE, MetadataValue::from_bytes(challenge));
    metadata.insert(VERSION, PROTOCOL_VERSION.into());
}

/// Whether the other side proves itself as this one expects.
fn same_version(metadata: &MetadataMap, whose: &str) -> Result<(), Status> {
    let version = metadata.get(VERSION).and_then(|version| version.to_str().ok());
    if version.is_some_and(|version| version == PROTOCOL_VERSION.to_string()) {
        return Ok(());
    }
    // Up to 5 nobody said so here.
    let theirs =
        version.map_or_else(|| "an older control protocol".to_owned(), |v| format!("control protocol {v:?}"));
    // A front door answers such a call too.
    let port = if version.is_none() && whose == "the conductor" {
        ", and give nodes the control port (service.control), not the front door's"
    } else {
        ""
    };
    Err(Status::failed_precondition(format!(
        "{whose} speaks {theirs}, this side {PROTOCOL_VERSION}; run the same baton on both{port}"
    )))
}

fn challenge_in(metadata: &MetadataMap) -> Option<Challenge> {
    let bytes = metadata.get_bin(CHALLENGE)?.to_bytes().ok()?;
    Challenge::try_from(&bytes[..]).ok()
}

fn read_tls(service: &ServiceConfig, name: Option<String>) -> Result<ClusterTls, GuardError> {
    let read = |setting, path: &str| {
        std::fs::read(path).map_err(|why| GuardError::File { setting, path: path.to_owned(), why })
    };
    let certificate = read("cluster_tls_cert", &service.cluster_tls_cert)?;
    let key = read("cluster_tls_key", &service.cluster_tls_key)?;
    let ca = read("cluster_tls_ca", &service.cluster_tls_ca)?;
    let pem = TlsPem { certificate: &certificate, key: &key, ca: &ca };
    let links = TcpTls::mutual(&pem, name.clone()).map_err(GuardError::Tls)?;
    Ok(ClusterTls { certificate, key, ca, name, links })
}

/// The options of a node's command line to attach at `control`.
#[must_use]
pub fn to_attach(service: &ServiceConfig, control: std::net::SocketAddr) -> String {
    let scheme = if service.cluster_tls_cert.is_empty() { "http" } else { "https" };
    let files = [
        ("key", &service.cluster_key),
        ("tls-cert", &service.cluster_tls_cert),
        ("tls-key", &service.cluster_tls_key),
        ("tls-ca", &service.cluster_tls_ca),
    ];
    let given = files.into_iter().filter(|(_, file)| !file.is_empty());
    let options: String = given.map(|(name, file)| format!(" --cluster-{name} {file}")).collect();
    format!("--conductor {scheme}://{}{options}", seen_from_outside(control))
}

/// An address as another machine has to write it, where it is one on all interfaces: with a name in place of the host.
#[must_use]
pub fn seen_from_outside(address: std::net::SocketAddr) -> String {
    if address.ip().is_unspecified() { format!("THIS_HOST:{}", address.port()) } else { address.to_string() }
}

/// The warning for a port without a key that other machines can reach; `None` where all is well.
#[must_use]
pub fn open_port(what: &str, address: std::net::SocketAddr, guard: &ClusterGuard) -> Option<String> {
    let open = !guard.has_key() && !address.ip().is_loopback();
    open.then(|| {
        format!("{what} {address} lets in anyone who reaches it: give all processes of the cluster --cluster-key FILE")
    })
}

#[cfg(test)]
mod tests;
