//! The server's side of TLS.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

/// A certificate and its key, ready to be spoken with.
#[derive(Clone)]
pub struct Tls(pub(super) TlsAcceptor);

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key stays out of logs.
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads a certificate, with those that vouch for it after it, and its key from PEM files.
    ///
    /// # Errors
    /// The file that cannot be used, and why.
    pub fn of_files(certificate: &Path, key: &Path) -> Result<Self, String> {
        let wrong = |file: &Path, e: &dyn fmt::Display| {
            format!("store: tls {}: {e}; give PEM files of a certificate and its key", file.display())
        };
        let chain = CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect);
        let chain: Vec<_> = chain.map_err(|e| wrong(certificate, &e))?;
        let private = PrivateKeyDer::from_pem_file(key).map_err(|e| wrong(key, &e))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private))
            .map_err(|e| wrong(certificate, &e))?;
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }
}
