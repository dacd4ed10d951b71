//! The certificates that vouch for the identity of servers.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};

/// Where systems keep the certificates that they trust.
const OF_SYSTEMS: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The certificates that servers are checked against, or why there are none; the first TLS connection reports
/// that. Clones share what was read.
#[derive(Clone, Debug)]
pub struct Trust(Result<Arc<ClientConfig>, Arc<str>>);

/// Why nobody is trusted.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The file cannot be read as PEM.
    #[error(transparent)]
    Unread(#[from] rustls::pki_types::pem::Error),
    /// No certificate in it is of use.
    #[error("no certificate in it")]
    Empty,
    /// The library cannot speak TLS.
    #[error(transparent)]
    Library(#[from] rustls::Error),
    /// No certificate is trusted: the reason given when this was made.
    #[error("{0}")]
    Nobody(Arc<str>),
}

impl Trust {
    /// Trusts nobody: no URL may begin with `https://`.
    #[must_use]
    pub fn nobody() -> Self {
        Self(Err("no certificates to trust were given".into()))
    }

    /// Trusts the certificates in a PEM file.
    ///
    /// # Errors
    /// When it cannot be read, or holds none that can be used.
    pub fn of_file(file: &Path) -> Result<Self, TrustError> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(file)? {
            // One of an old kind among many that serve is no reason to have none.
            let _ = roots.add(certificate?);
        }
        if roots.is_empty() {
            return Err(TrustError::Empty);
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        Ok(Self(Ok(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))))
    }

    /// Trusts what the system trusts, or the file in `SSL_CERT_FILE`.
    #[must_use]
    pub fn of_system() -> Self {
        let given = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
        let mut files = given.into_iter().chain(OF_SYSTEMS.map(PathBuf::from));
        match files.find(|file| file.exists()) {
            Some(file) => Self::of_file(&file)
                .unwrap_or_else(|why| Self(Err(format!("{}: {why}", file.display()).into()))),
            None => Self(Err("no trusted certificates; name a file in SSL_CERT_FILE".into())),
        }
    }

    /// How a client speaks TLS.
    ///
    /// # Errors
    /// When there is nobody to trust.
    pub fn config(&self) -> Result<Arc<ClientConfig>, TrustError> {
        self.0.clone().map_err(TrustError::Nobody)
    }
}
