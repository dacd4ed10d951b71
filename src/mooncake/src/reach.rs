//! Opens the segment of an engine: asks what it is, then connects to where its bytes are served.

use serde_json::Value;

use crate::data::{DataClient, DataTimes};
use crate::directory::lookup;
use crate::error::{Kind, MooncakeError, Result};
use crate::handshake;
use crate::segment::SegmentMeta;

/// Time of one look into a metadata server.
const LOOKUP_US: u64 = 3_000_000;

/// How the metadata of segments is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// The segment's name is where its engine answers handshakes.
    Handshake,
    /// In a metadata server.
    Metadata {
        /// Where it is: `http://HOST:PORT/metadata`.
        url: String,
        /// The part between `mooncake/` and the kind in its keys: empty, or a cluster's name and a slash.
        cluster: String,
    },
}

/// An open segment of a peer.
pub struct OpenSegment {
    meta: SegmentMeta,
    data: DataClient,
}

impl OpenSegment {
    /// Opens the segment `name`.
    ///
    /// # Errors
    /// When its engine or the metadata server does not answer, it is not served over TCP by the second version of the
    /// data protocol, or nobody is there.
    pub async fn open(name: &str, way: &Way, times: DataTimes) -> Result<Self> {
        let (meta, host) = match way {
            Way::Handshake => (handshake::ask(name).await?, host_of(name).to_owned()),
            Way::Metadata { url, cluster } => found(name, url, cluster).await?,
        };
        let data = DataClient::connect(&meta.data_address(&host), times).await?;
        Ok(Self { meta, data })
    }

    /// The metadata that its engine sent.
    #[must_use]
    pub const fn meta(&self) -> &SegmentMeta {
        &self.meta
    }

    /// Fills `into` with the bytes at `address`.
    ///
    /// # Errors
    /// When the range is not the segment's, or as [`DataClient::read`].
    pub async fn read(&mut self, address: u64, into: &mut [u8]) -> Result<()> {
        self.check("segment read", address, into.len())?;
        self.data.read(address, into).await
    }

    /// Writes `bytes` at `address`; they are there once this returns.
    ///
    /// # Errors
    /// When the range is not the segment's, or as [`DataClient::write`].
    pub async fn write(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        self.check("segment write", address, bytes.len())?;
        self.data.write(address, bytes).await
    }

    fn check(&self, stage: &'static str, address: u64, bytes: usize) -> Result<()> {
        if self.meta.holds(address, bytes as u64) {
            return Ok(());
        }
        let message = format!("{bytes} bytes at {address:#x} are not of this segment: ask the master again");
        Err(MooncakeError::new(Kind::Invalid, stage, &self.meta.name, message))
    }
}

async fn found(name: &str, url: &str, cluster: &str) -> Result<(SegmentMeta, String)> {
    let value = json(url, &format!("mooncake/{cluster}ram/{name}")).await?;
    let meta = SegmentMeta::parse(value).map_err(|e| e.named(url))?;
    if meta.data_host.is_some() {
        return Ok((meta, String::new()));
    }
    let address = json(url, &format!("mooncake/{cluster}rpc_meta/{name}")).await?;
    let host = address["ip_or_host_name"].as_str().unwrap_or_else(|| host_of(name)).to_owned();
    Ok((meta, host))
}

async fn json(url: &str, key: &str) -> Result<Value> {
    let value = lookup(url, key, LOOKUP_US).await?;
    serde_json::from_slice(&value).map_err(|e| {
        MooncakeError::new(Kind::Corrupt, "metadata lookup", url, format!("{key} is not JSON: {e}"))
    })
}

/// The host of HOST:PORT.
fn host_of(name: &str) -> &str {
    name.rsplit_once(':').map_or(name, |(host, _)| host)
}
