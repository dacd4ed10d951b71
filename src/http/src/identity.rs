//! The certificate and key by which a server shows who it is.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

/// A certificate, with those that vouch for it, and its key. Clones share what was read.
#[derive(Clone)]
pub struct Identity {
    config: Arc<ServerConfig>,
    certificates: usize,
}

/// The file that cannot be used, and why.
#[derive(Debug, thiserror::Error)]
#[error("{}: {why}; give PEM files of a certificate chain, the own one first, and of its key", file.display())]
pub struct IdentityError {
    file: PathBuf,
    why: String,
}

impl Identity {
    /// Reads PEM files: of certificates, the server's own one first, and of the key that belongs to that one.
    ///
    /// # Errors
    /// When one cannot be read, or the two do not belong together.
    pub fn of_files(certificate: &Path, key: &Path) -> Result<Self, IdentityError> {
        let wrong = |file: &Path, why: &dyn fmt::Display| IdentityError {
            file: file.to_owned(),
            why: why.to_string(),
        };
        let chain =
            CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let chain = chain.map_err(|e| wrong(certificate, &e))?;
        if chain.is_empty() {
            return Err(wrong(certificate, &"it has no certificate"));
        }
        let certificates = chain.len();
        let private = PrivateKeyDer::from_pem_file(key).map_err(|e| wrong(key, &e))?;
        let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private))
            .map_err(|e| wrong(certificate, &format_args!("with the key {}: {e}", key.display())))?;
        Ok(Self { config: Arc::new(config), certificates })
    }

    /// The same, which offers these protocols (ALPN), the preferred one first.
    #[must_use]
    pub fn offering(mut self, protocols: &[&[u8]]) -> Self {
        let names = protocols.iter().map(|name| name.to_vec()).collect();
        Arc::make_mut(&mut self.config).alpn_protocols = names;
        self
    }

    /// Accepts connections over TLS.
    #[must_use]
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.config))
    }

    /// How many certificates were read.
    #[must_use]
    pub fn certificates(&self) -> usize {
        self.certificates
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key stays out of logs.
        f.debug_struct("Identity").field("certificates", &self.certificates).finish_non_exhaustive()
    }
}
