//! The asking side of a fetch.

use std::time::Duration;

use tokio::time::timeout;

use crate::dialer::{Dialer, Leased};
use crate::error::{Kind, Stage, TransportError};
use crate::frame::{FrameKind, Header, checksum};
use crate::handshake::{Connection, Party};
use crate::limits::Limits;
use crate::message::{block_key, decode_failure, encode_keys};
use crate::receiver::{FetchedBlock, PeerAddress, Want};
use crate::wire::{read_body, read_control, read_header, write_control};

/// Fetches blocks from a peer: the leading part of those wanted that it holds, verified on arrival. Fewer
/// blocks than wanted are no error.
///
/// # Errors
/// [`Kind::Invalid`] for more keys than the limits allow; [`Kind::Unavailable`] where the peer cannot be
/// reached or the answer is not whole within `deadline`; [`Kind::Corrupt`] where a block does not match its
/// checksum; [`Kind::Retry`] where the peer serves too many already.
pub async fn fetch(
    dialer: &Dialer,
    peer: &PeerAddress,
    want: Want,
    deadline: Duration,
) -> Result<Vec<FetchedBlock>, TransportError> {
    let fetched = match timeout(deadline, fetch_checked(dialer, peer, &want, deadline)).await {
        Ok(fetched) => fetched,
        Err(_) => {
            let (blocks, ms) = (want.keys.len(), deadline.as_millis());
            let text = format!("{blocks} blocks did not come within {ms} ms");
            Err(TransportError::new(Kind::Unavailable, Stage::Fetch, text))
        }
    };
    fetched.inspect_err(|error| dialer.party().counters.failed(error))
}

async fn fetch_checked(
    dialer: &Dialer,
    peer: &PeerAddress,
    want: &Want,
    deadline: Duration,
) -> Result<Vec<FetchedBlock>, TransportError> {
    if want.keys.is_empty() {
        return Ok(Vec::new());
    }
    let most = dialer.party().limits.fetch_keys;
    if want.keys.len() > most {
        let text = format!("{} keys are over the limit fetch_keys {most}; ask in parts", want.keys.len());
        return Err(TransportError::new(Kind::Invalid, Stage::Fetch, text));
    }
    loop {
        // The permit is held until the answer is whole.
        let Leased { mut connection, permit: _permit, pooled } = dialer.lease(peer).await?;
        match exchange(dialer.party(), &mut connection, want, deadline).await {
            Ok(blocks) => {
                dialer.give_back(peer, connection);
                return Ok(blocks);
            }
            // The peer had closed it while it was idle. Each turn uses up one, so there is an end to them.
            Err(error) if error.kind == Kind::Closed && pooled => {}
            Err(error) => return Err(error),
        }
    }
}

async fn exchange(
    party: &Party,
    connection: &mut Connection,
    want: &Want,
    deadline: Duration,
) -> Result<Vec<FetchedBlock>, TransportError> {
    let pace = party.limits.progress_timeout();
    let deadline_ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
    let header = Header::new(FrameKind::Want, want.epoch, 0, deadline_ms);
    write_control(&mut connection.writer, header, &encode_keys(&want.keys), pace, Stage::Fetch).await?;
    let mut answer = Answer { want, limits: &party.limits, blocks: Vec::new(), bytes: 0 };
    loop {
        // The first block may wait for the peer's tiers: that is the deadline's to bound.
        let header = read_header(&mut connection.reader, deadline, pace, Stage::Fetch).await?;
        let header = header.ok_or_else(|| {
            TransportError::new(Kind::Closed, Stage::Fetch, "the peer closed the connection")
        })?;
        if header.kind == FrameKind::Block {
            answer.expect(&header)?;
            let bytes = read_body(&mut connection.reader, header.body_bytes, pace, Stage::Fetch).await?;
            answer.take(&header, bytes)?;
            party.counters.received(connection.medium, u64::from(header.body_bytes));
            continue;
        }
        let body = read_control(&mut connection.reader, &header, pace, Stage::Fetch).await?;
        return match header.kind {
            FrameKind::End => answer.end(header.c),
            FrameKind::Refused | FrameKind::Failed => Err(decode_failure(&body, Stage::Fetch)),
            other => {
                let text = format!("a {other:?} frame in answer to a want");
                Err(TransportError::new(Kind::Bug, Stage::Fetch, text))
            }
        };
    }
}

/// The part of the answer that has come.
struct Answer<'a> {
    want: &'a Want,
    limits: &'a Limits,
    blocks: Vec<FetchedBlock>,
    bytes: u64,
}

impl Answer<'_> {
    /// Is this the block that comes next, and is there room for it?
    fn expect(&self, header: &Header) -> Result<(), TransportError> {
        let wrong = |text: String| Err(TransportError::new(Kind::Bug, Stage::Fetch, text));
        let key = block_key(header);
        if header.by_ring || self.want.keys.get(self.blocks.len()) != Some(&key) {
            return wrong(format!("block {key:032x} was not wanted next"));
        }
        let bytes = u64::from(header.body_bytes);
        let most = self.limits.fetch_bytes.saturating_sub(self.bytes);
        if header.body_bytes > self.limits.block_bytes || bytes > most {
            return wrong(format!("block {key:032x} of {bytes} bytes is over block_bytes or fetch_bytes"));
        }
        Ok(())
    }

    fn take(&mut self, header: &Header, bytes: bytes::Bytes) -> Result<(), TransportError> {
        let key = block_key(header);
        if checksum(&bytes) != header.checksum {
            let text = format!("block {key:032x} does not match its checksum");
            return Err(TransportError::new(Kind::Corrupt, Stage::Fetch, text));
        }
        self.bytes += u64::from(header.body_bytes);
        self.blocks.push(FetchedBlock { key, bytes, checksum: header.checksum });
        Ok(())
    }

    fn end(self, told: u64) -> Result<Vec<FetchedBlock>, TransportError> {
        if u64::try_from(self.blocks.len()) == Ok(told) {
            return Ok(self.blocks);
        }
        let text = format!("{} blocks came, but the peer says {told}", self.blocks.len());
        Err(TransportError::new(Kind::Bug, Stage::Fetch, text))
    }
}
