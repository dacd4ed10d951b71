//! The server's side of TLS.

use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::config::TlsFiles;
use crate::serve::ServeError;

/// Reads certificate and key, and offers HTTP/2 before HTTP/1.1.
pub(crate) fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, ServeError> {
    let wrong = |file: &std::path::Path, e: &dyn std::fmt::Display| {
        ServeError::new(format!("{}: {e}; give PEM files of a certificate and its key", file.display()))
    };
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_file_iter(&files.certificate)
        .map_err(|e| wrong(&files.certificate, &e))?
        .collect();
    let certificates = certificates.map_err(|e| wrong(&files.certificate, &e))?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|e| wrong(&files.key, &e))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(certificates, key))
        .map_err(|e| wrong(&files.certificate, &e))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
