//! The asking side of a fetch.

use std::time::Duration;

use tokio::time::timeout;

use crate::carrier::Berth;
use crate::dialer::{Dialer, Leased};
use crate::error::{Kind, Stage, TransportError};
use crate::frame::{FrameKind, Header, checksum};
use crate::handshake::{Connection, Party};
use crate::message::{HeldBlock, block_key, decode_failure, decode_held, encode_berth, encode_keys, urgency};
use crate::receiver::{FetchedBlock, PeerAddress, Want, answers};
use crate::stats::{Medium, add};
use crate::wire::{read_body, read_control, read_header, write_control};

/// Fetches blocks from a peer: the leading part of those wanted that it holds, verified on arrival. Fewer
/// blocks than wanted are no error. Where both have a part in the transfer engine the peer writes them into
/// windows that are lent to it, one after another; what that cannot bring comes over the connection.
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
    let by_engine = urgency(party.carrier.as_ref().map(|_| want.priority));
    let header = Header::new(FrameKind::Want, want.epoch, by_engine, deadline_ms);
    write_control(&mut connection.writer, header, &encode_keys(&want.keys), pace, Stage::Fetch).await?;
    let mut answer = Answer { want, party, blocks: Vec::new(), bytes: 0, lending: None, streamed: false };
    loop {
        // The first block may wait for the peer's tiers: that is the deadline's to bound.
        let header = read_header(&mut connection.reader, deadline, pace, Stage::Fetch).await?;
        let header = header.ok_or_else(|| {
            TransportError::new(Kind::Closed, Stage::Fetch, "the peer closed the connection")
        })?;
        if header.kind == FrameKind::Block {
            answer.expect(&header)?;
            let bytes = read_body(&mut connection.reader, header.body_bytes, pace, Stage::Fetch).await?;
            answer.take(block_key(&header), bytes, header.checksum)?;
            party.counters.received(connection.medium, u64::from(header.body_bytes));
            continue;
        }
        let body = read_control(&mut connection.reader, &header, pace, Stage::Fetch).await?;
        match header.kind {
            FrameKind::Held => answer.held(&body)?,
            FrameKind::Moved => answer.moved(header.a).await?,
            FrameKind::End => return answer.end(header.c),
            FrameKind::Refused | FrameKind::Failed => return Err(decode_failure(&body, Stage::Fetch)),
            other => return Err(wrong(format!("a {other:?} frame in answer to a want"))),
        }
        if let Some((header, body)) = answer.lend() {
            write_control(&mut connection.writer, header, &body, pace, Stage::Fetch).await?;
        }
    }
}

fn wrong(text: String) -> TransportError {
    TransportError::new(Kind::Bug, Stage::Fetch, text)
}

/// The part of the answer that has come.
struct Answer<'a> {
    want: &'a Want,
    party: &'a Party,
    blocks: Vec<FetchedBlock>,
    bytes: u64,
    /// The holder writes by the transfer engine.
    lending: Option<Lending>,
    /// Some block came over the connection.
    streamed: bool,
}

/// What the holder says that it will write, and where to.
struct Lending {
    told: Vec<HeldBlock>,
    /// A window for so many of the next blocks.
    berth: Option<(usize, Berth)>,
}

impl Answer<'_> {
    /// Is this the block that comes next, and is there room for it?
    fn expect(&mut self, header: &Header) -> Result<(), TransportError> {
        // The holder has fallen back on the connection for the rest: the window closes.
        self.lending = None;
        self.streamed = true;
        let key = block_key(header);
        let wanted = self.want.keys.get(self.blocks.len());
        if header.by_ring || wanted.is_none_or(|wanted| !answers(key, *wanted)) {
            return Err(wrong(format!("block {key:032x} was not wanted next")));
        }
        self.fits(self.bytes, key, header.body_bytes).map(|_| ())
    }

    /// The bytes of all with one more, where it is not too large.
    fn fits(&self, before: u64, key: u128, bytes: u32) -> Result<u64, TransportError> {
        let (limits, with) = (&self.party.limits, before + u64::from(bytes));
        if bytes > limits.block_bytes || with > limits.fetch_bytes {
            let text = format!("block {key:032x} of {bytes} bytes is over block_bytes or fetch_bytes");
            return Err(wrong(text));
        }
        Ok(with)
    }

    fn take(&mut self, key: u128, bytes: bytes::Bytes, told: u64) -> Result<(), TransportError> {
        if checksum(&bytes) != told {
            return Err(damaged(key));
        }
        self.bytes += bytes.len() as u64;
        self.blocks.push(FetchedBlock { key, bytes, checksum: told });
        Ok(())
    }

    /// The holder tells what it has, before any of it.
    fn held(&mut self, body: &[u8]) -> Result<(), TransportError> {
        let told = decode_held(body)?;
        let first = self.blocks.is_empty() && self.lending.is_none() && self.party.carrier.is_some();
        let wanted = told.len() <= self.want.keys.len()
            && told.iter().zip(&self.want.keys).all(|(block, wanted)| answers(block.key, *wanted));
        if !first || told.is_empty() || !wanted {
            return Err(wrong("blocks are told of that were not wanted like this".to_owned()));
        }
        told.iter().try_fold(0, |bytes, block| self.fits(bytes, block.key, block.bytes))?;
        self.lending = Some(Lending { told, berth: None });
        Ok(())
    }

    /// A window for the next blocks, where some are to come; an empty answer where there is no room for it.
    fn lend(&mut self) -> Option<(Header, Vec<u8>)> {
        let lending = self.lending.as_mut().filter(|lending| lending.told.len() > self.blocks.len())?;
        let sizes = lending.told[self.blocks.len()..].iter().map(|block| block.bytes);
        lending.berth = self.party.carrier.as_ref().and_then(|carrier| carrier.berth_for(sizes));
        let blocks = lending.berth.as_ref().map_or(0, |(blocks, _)| *blocks);
        let body = encode_berth(lending.berth.as_ref().map(|(_, berth)| berth.told()).as_ref());
        let blocks = u32::try_from(blocks).expect("fetch_keys bounds it");
        Some((Header::new(FrameKind::Lent, blocks, 0, 0), body))
    }

    /// The window is full: closed, verified and emptied.
    async fn moved(&mut self, blocks: u32) -> Result<(), TransportError> {
        let lent = self.lending.as_mut().and_then(|lending| lending.berth.take());
        let Some((_, berth)) = lent.filter(|(lent, _)| u32::try_from(*lent) == Ok(blocks)) else {
            return Err(wrong(format!("{blocks} blocks are said to be in a window that was not lent")));
        };
        let lending = self.lending.as_ref().expect("it lent the window");
        let next: Vec<HeldBlock> =
            lending.told.iter().skip(self.blocks.len()).take(blocks as usize).copied().collect();
        // It waits and computes for longer than a task of the runtime may.
        let taken = tokio::task::spawn_blocking(move || emptied(berth, &next)).await;
        let taken = taken.map_err(|error| wrong(format!("verifying a fetch: {error}")))??;
        for block in taken {
            let bytes = block.bytes.len() as u64;
            self.party.counters.received(Medium::Engine, bytes);
            self.bytes += bytes;
            self.blocks.push(block);
        }
        Ok(())
    }

    fn end(self, told: u64) -> Result<Vec<FetchedBlock>, TransportError> {
        if u64::try_from(self.blocks.len()) != Ok(told) {
            return Err(wrong(format!("{} blocks came, but the peer says {told}", self.blocks.len())));
        }
        let counters = &self.party.counters;
        match (self.blocks.is_empty(), self.streamed) {
            (true, _) => {}
            (false, true) => add(&counters.stream_fetches, 1),
            (false, false) => add(&counters.engine_fetches, 1),
        }
        Ok(self.blocks)
    }
}

/// Closes the window, and takes the blocks that are to be in it, if that is what they are.
fn emptied(mut berth: Berth, told: &[HeldBlock]) -> Result<Vec<FetchedBlock>, TransportError> {
    berth.close();
    let mut at = 0;
    let take = |block: &HeldBlock| {
        let bytes = berth.read_at(at, block.bytes);
        at += u64::from(block.bytes);
        let HeldBlock { key, checksum: sum, .. } = *block;
        if checksum(&bytes) == sum {
            Ok(FetchedBlock { key, bytes, checksum: sum })
        } else {
            Err(damaged(key))
        }
    };
    told.iter().map(take).collect()
}

fn damaged(key: u128) -> TransportError {
    let text = format!("block {key:032x} does not match its checksum");
    TransportError::new(Kind::Corrupt, Stage::Fetch, text)
}
