//! The client's side of TLS.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};

use super::client::Url;

/// The authorities that the system trusts, as most distributions have them.
const OF_THE_SYSTEM: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The authorities that vouch for a server's identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trust {
    /// PEM file of the authorities, or of the server's own certificate.
    pub ca: PathBuf,
}

impl Default for Trust {
    fn default() -> Self {
        Self { ca: OF_THE_SYSTEM.into() }
    }
}

/// A connection, in plain text or not.
#[derive(Debug)]
pub(super) enum Way {
    Plain(TcpStream),
    Secured(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Read for Way {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(into),
            Self::Secured(stream) => stream.read(into),
        }
    }
}

impl Write for Way {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(bytes),
            Self::Secured(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.flush(),
            Self::Secured(stream) => stream.flush(),
        }
    }
}

impl Trust {
    /// Ready to be spoken with `url`'s server, whose certificate must be for its host.
    pub(super) fn session(&self, url: &Url) -> Result<ClientConnection, String> {
        let (address, host) = (&url.address, url.host());
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| format!("tls to {address}: {host:?} is no name that a certificate can be for"))?;
        let trusted = baton_http::Trust::of_file(&self.ca).and_then(|trust| trust.config());
        let config = trusted.map_err(|why| {
            format!(
                "tls: authorities {}: {why}; give a PEM file of certificates (--ca, ?ssl_ca_certs=)",
                self.ca.display()
            )
        })?;
        ClientConnection::new(config, name).map_err(|e| format!("tls to {address}: {e}"))
    }
}

/// Begins TLS with `url`'s server.
pub(super) fn secure(mut session: ClientConnection, mut stream: TcpStream, url: &Url) -> Result<Way, String> {
    let address = &url.address;
    while session.is_handshaking() {
        session.complete_io(&mut stream).map_err(|e| match e.kind() {
            io::ErrorKind::InvalidData => format!(
                "tls to {address}: {e}; does the store speak TLS there (--tls-cert), with a certificate for {} from an \
                 authority of {}?",
                url.host(),
                url.tls.as_ref().map_or(Path::new(""), |trust| &trust.ca).display()
            ),
            _ => format!("connect to {address}: TLS: {e}; is the store running there, with --tls-cert?"),
        })?;
    }
    Ok(Way::Secured(Box::new(StreamOwned::new(session, stream))))
}
