//! TLS between peers, both ways of a connection by the same settings.

use std::io;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

/// How peers speak TLS. Every node is both: it listens, and it opens paths.
#[derive(Clone, Debug)]
pub struct TcpTls {
    /// For connections that peers open; asks for their certificates where they must have one.
    pub server: Arc<ServerConfig>,
    /// For connections opened here.
    pub client: Arc<ClientConfig>,
    /// The name that peers' certificates carry; by default the host of their address.
    pub server_name: Option<String>,
}

/// The certificate and key that a process shows, and the authority that it trusts, as PEM.
#[derive(Clone, Copy, Debug)]
pub struct TlsPem<'a> {
    /// Its certificate, and those that vouch for it after it.
    pub certificate: &'a [u8],
    /// The key of that.
    pub key: &'a [u8],
    /// The certificates that peers' must come from.
    pub ca: &'a [u8],
}

impl TcpTls {
    /// Both sides show a certificate, and take only one that comes from `ca`. `server_name` is what those of
    /// peers that are reached must be for; by default the host of their address.
    ///
    /// # Errors
    /// In words: which of the three is wrong, and why.
    pub fn mutual(pem: &TlsPem<'_>, server_name: Option<String>) -> Result<Self, String> {
        let chain = certificates(pem.certificate).map_err(|why| format!("certificate: {why}"))?;
        let key = PrivateKeyDer::from_pem_slice(pem.key).map_err(|e| format!("key: {e}"))?;
        let mut roots = RootCertStore::empty();
        for one in certificates(pem.ca).map_err(|why| format!("CA: {why}"))? {
            roots.add(one).map_err(|e| format!("CA: {e}"))?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(rustls::crypto::ring::default_provider()));
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let verifier = verifier.map_err(|e| format!("CA: {e}"))?;
        let pair = |e: rustls::Error| format!("certificate and key: {e}");
        let server = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(pair)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(pair)?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(pair)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(pair)?;
        Ok(Self { server: Arc::new(server), client: Arc::new(client), server_name })
    }

    pub(super) fn accept(&self) -> io::Result<Connection> {
        let connection = ServerConnection::new(self.server.clone()).map_err(io::Error::other)?;
        Ok(connection.into())
    }

    pub(super) fn connect(&self, address: &str) -> io::Result<ClientConnection> {
        ClientConnection::new(self.client.clone(), self.peer_name(address)?).map_err(io::Error::other)
    }

    /// The name that the certificate of the peer at `address` must carry.
    pub(crate) fn peer_name(&self, address: &str) -> io::Result<ServerName<'static>> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let name = self.server_name.as_deref().unwrap_or(host.trim_matches(['[', ']']));
        ServerName::try_from(name.to_owned()).map_err(io::Error::other)
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if found.is_empty() => Err("there is none in the file; give PEM".into()),
        Ok(found) => Ok(found),
        Err(error) => Err(error.to_string()),
    }
}
