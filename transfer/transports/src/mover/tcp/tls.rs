//! TLS between peers, both ways of a connection by the same settings.

use std::io;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

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

impl TcpTls {
    pub(super) fn accept(&self) -> io::Result<Connection> {
        let connection = ServerConnection::new(self.server.clone()).map_err(io::Error::other)?;
        Ok(connection.into())
    }

    pub(super) fn connect(&self, address: &str) -> io::Result<ClientConnection> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let name = self.server_name.as_deref().unwrap_or(host.trim_matches(['[', ']']));
        let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        ClientConnection::new(self.client.clone(), name).map_err(io::Error::other)
    }
}
