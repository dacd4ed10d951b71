//! TLS under the frames: the same settings as the transfer engine's.

use std::io;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::error::{Kind, Stage, TransportError};
use crate::handshake::Party;
use crate::mover::TcpTls;
use crate::wire::Wire;

/// A connection that a peer opened, under TLS where that is set.
pub(crate) async fn accept(party: &Party, stream: TcpStream) -> Result<Wire, TransportError> {
    let Some(tls) = &party.guard.tls else {
        return Wire::tcp(stream)
            .map_err(|e| TransportError::from_io(&e, Stage::Serve, "accepting a connection"));
    };
    let accepting = TlsAcceptor::from(Arc::clone(&tls.server)).accept(stream);
    let stream = within(party, "with a peer", accepting).await?;
    let plain = stream.get_ref().0.set_nodelay(true);
    plain.map_err(|e| TransportError::from_io(&e, Stage::Handshake, "accepting a connection"))?;
    Ok(Wire::split(stream))
}

/// A connection opened here, under TLS where that is set.
pub(crate) async fn open(party: &Party, stream: TcpStream, address: &str) -> Result<Wire, TransportError> {
    let failed = |e: io::Error| TransportError::from_io(&e, Stage::Connect, "connecting");
    let Some(tls) = &party.guard.tls else { return Wire::tcp(stream).map_err(failed) };
    stream.set_nodelay(true).map_err(failed)?;
    let name = name_of(tls, address)?;
    let opening = TlsConnector::from(Arc::clone(&tls.client)).connect(name, stream);
    Ok(Wire::split(within(party, address, opening).await?))
}

fn name_of(tls: &TcpTls, address: &str) -> Result<ServerName<'static>, TransportError> {
    tls.peer_name(address).map_err(|e| {
        TransportError::new(
            Kind::Invalid,
            Stage::Connect,
            format!("{address}: {e}; no certificate can name it"),
        )
    })
}

async fn within<T>(
    party: &Party,
    peer: &str,
    shaking: impl Future<Output = io::Result<T>>,
) -> Result<T, TransportError> {
    let limit = party.limits.connect_timeout();
    let wrong = |kind, why: String| {
        let text = format!("TLS {peer}: {why}; see that both have certificates of the CA that both trust");
        TransportError::new(kind, Stage::Handshake, text)
    };
    match timeout(limit, shaking).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(wrong(Kind::Invalid, error.to_string())),
        Err(_) => Err(wrong(Kind::Unavailable, format!("no answer for {} ms", limit.as_millis()))),
    }
}
