//! The asking side of a fetch.

use std::time::Duration;

use tokio::time::timeout;

use crate::data_plane::{ReceiveWindow, Stretch};
use crate::dialer::{Dialer, LeasedConnection};
use crate::error::{Kind, Stage, TransportError};
use crate::frame::{FrameKind, Header, checksum};
use crate::handshake::{Connection, Party};
use crate::message::{HeldBlock, decode_failure, decode_held, encode_keys, encode_window, urgency};
use crate::mover::Memory;
use crate::receiver::{FetchedBlock, PeerAddress, Want, answers};
use crate::stats::add;
use crate::wire::{read_control, read_header, write_control};

/// Fetches blocks from a peer: the leading part of those wanted that it holds, verified on arrival. Fewer
/// blocks than wanted are no error. The peer writes them into a window that is lent to it.
///
/// # Errors
/// [`Kind::Invalid`] for more keys than the limits allow; [`Kind::Unavailable`] where the peer cannot be
/// reached or the answer is not whole within `deadline`; [`Kind::Corrupt`] where a block does not match its
/// checksum; [`Kind::Retry`] where the peer serves too many already, or no memory is free for the window.
pub async fn fetch(
    dialer: &Dialer,
    peer: &PeerAddress,
    want: Want,
    deadline: Duration,
) -> Result<Vec<FetchedBlock>, TransportError> {
    match timeout(deadline, fetch_checked(dialer, peer, &want, deadline)).await {
        Ok(fetched) => fetched,
        Err(_) => {
            let (blocks, ms) = (want.keys.len(), deadline.as_millis());
            let text = format!("{blocks} blocks did not come within {ms} ms");
            Err(TransportError::new(Kind::Unavailable, Stage::Fetch, text))
        }
    }
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
        let LeasedConnection { mut connection, permit: _permit, pooled } = dialer.lease(peer).await?;
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
    let header = Header::new(FrameKind::Want, want.epoch, urgency(want.priority), deadline_ms);
    write_control(&mut connection.writer, header, &encode_keys(&want.keys), pace, Stage::Fetch).await?;
    let mut answer = Answer { want, party, held: Vec::new(), blocks: Vec::new(), window: None };
    loop {
        // The first block may wait for the peer's tiers: that is the deadline's to bound.
        let header = read_header(&mut connection.reader, deadline, pace, Stage::Fetch).await?;
        let header = header.ok_or_else(|| {
            TransportError::new(Kind::Closed, Stage::Fetch, "the peer closed the connection")
        })?;
        let body = read_control(&mut connection.reader, &header, pace, Stage::Fetch).await?;
        let reply = match header.kind {
            FrameKind::Held => answer.held(&body)?,
            FrameKind::Moved => answer.moved(header.c).await?,
            FrameKind::End => return answer.end(header.c),
            FrameKind::Refused | FrameKind::Failed => return Err(decode_failure(&body, Stage::Fetch)),
            other => return Err(wrong(format!("a {other:?} frame in answer to a want"))),
        };
        if let Some((header, body)) = reply {
            write_control(&mut connection.writer, header, &body, pace, Stage::Fetch).await?;
        }
    }
}

fn wrong(text: String) -> TransportError {
    TransportError::new(Kind::Bug, Stage::Fetch, text)
}

/// The frame to send to the holder in return.
type Reply = Option<(Header, Vec<u8>)>;

/// The part of the answer that has come.
struct Answer<'a> {
    want: &'a Want,
    party: &'a Party,
    /// The blocks that the holder has.
    held: Vec<HeldBlock>,
    /// Of those, the ones that have come whole, verified.
    blocks: Vec<FetchedBlock>,
    window: Option<(ReceiveWindow, PartialBlock)>,
}

/// The block that comes next: as much of it as is there.
#[derive(Default)]
struct PartialBlock(Vec<u8>);

impl Answer<'_> {
    /// Handles the holder's list of blocks, which comes before any byte of them.
    fn held(&mut self, body: &[u8]) -> Result<Reply, TransportError> {
        let told = decode_held(body)?;
        let wanted = told.len() <= self.want.keys.len()
            && told.iter().zip(&self.want.keys).all(|(block, wanted)| answers(block.key, *wanted));
        if !self.held.is_empty() || told.is_empty() || !wanted {
            return Err(wrong("blocks are told of that were not wanted like this".to_owned()));
        }
        let limits = &self.party.limits;
        let bytes: u64 = told.iter().map(|block| u64::from(block.bytes)).sum();
        if let Some(HeldBlock { key, bytes, .. }) = told.iter().find(|block| block.bytes > limits.block_bytes)
        {
            return Err(wrong(format!("block {key:032x} of {bytes} bytes is over block_bytes")));
        }
        if bytes > limits.fetch_bytes {
            return Err(wrong(format!("blocks of {bytes} bytes together are over fetch_bytes")));
        }
        self.held = told;
        if bytes == 0 {
            self.take_whole(&mut PartialBlock::default())?;
            return Ok(None);
        }
        let loan = self.party.plane.lend(bytes.min(limits.window_bytes.into())).ok_or_else(|| {
            TransportError::new(Kind::Retry, Stage::Fetch, "no registered memory is free for a window")
        })?;
        let window = self.party.plane.open(loan)?;
        let body = encode_window(Some(&window.lent()));
        self.window = Some((window, PartialBlock::default()));
        Ok(Some((Header::new(FrameKind::Lent, 0, 0, 0), body)))
    }

    /// More bytes are in the window: taken out, and verified where they end a block.
    async fn moved(&mut self, upto: u64) -> Result<Reply, TransportError> {
        let Some((mut window, mut filling)) = self.window.take() else {
            return Err(wrong("bytes are said to be in a window that was not lent".to_owned()));
        };
        let Some(stretches) = window.take(upto) else {
            return Err(wrong(format!("byte {upto} is said to be there, which the window has no room for")));
        };
        let memory = window.memory().clone();
        let sizes: Vec<HeldBlock> = self.held[self.blocks.len()..].to_vec();
        // It copies and computes for longer than a task of the runtime may.
        let taken = tokio::task::spawn_blocking(move || {
            let mut whole = Vec::new();
            take_out(&memory, &stretches, (&sizes, &mut filling, &mut whole)).map(|()| (filling, whole))
        });
        let (mut filling, whole) =
            taken.await.map_err(|error| wrong(format!("verifying a fetch: {error}")))??;
        let bytes = whole.iter().map(|block: &FetchedBlock| block.bytes.len() as u64).sum();
        add(&self.party.counters.received_bytes, bytes);
        self.blocks.extend(whole);
        self.take_whole(&mut filling)?;
        let taken = window.taken();
        self.window = Some((window, filling));
        Ok(Some((Header::new(FrameKind::Ack, 0, 0, taken), Vec::new())))
    }

    /// Blocks without bytes come by themselves.
    fn take_whole(&mut self, filling: &mut PartialBlock) -> Result<(), TransportError> {
        while filling.0.is_empty()
            && let Some(block) = self.held.get(self.blocks.len()).filter(|block| block.bytes == 0)
        {
            self.blocks.push(verified(block, Vec::new())?);
        }
        Ok(())
    }

    fn end(self, told: u64) -> Result<Vec<FetchedBlock>, TransportError> {
        if u64::try_from(self.blocks.len()) != Ok(told) || self.blocks.len() != self.held.len() {
            let (came, held) = (self.blocks.len(), self.held.len());
            return Err(wrong(format!("{came} of {held} blocks came, and the peer says {told}")));
        }
        Ok(self.blocks)
    }
}

/// Takes bytes out of the window into the blocks that come next.
fn take_out(
    memory: &Memory,
    stretches: &[Stretch],
    (held, filling, whole): (&[HeldBlock], &mut PartialBlock, &mut Vec<FetchedBlock>),
) -> Result<(), TransportError> {
    for Stretch { mut at, mut bytes } in stretches.iter().copied() {
        while bytes > 0 {
            let Some(block) = held.get(whole.len()) else {
                return Err(wrong("more bytes came than the blocks have".to_owned()));
            };
            let have = filling.0.len();
            let missing = block.bytes as usize - have;
            let now = usize::try_from(bytes).map_or(missing, |bytes| bytes.min(missing));
            filling.0.resize(have + now, 0);
            memory.read(at, &mut filling.0[have..]);
            (at, bytes) = (at + now as u64, bytes - now as u64);
            if now == missing {
                whole.push(verified(block, std::mem::take(&mut filling.0))?);
            }
        }
    }
    Ok(())
}

fn verified(held: &HeldBlock, bytes: Vec<u8>) -> Result<FetchedBlock, TransportError> {
    let HeldBlock { key, checksum: sum, .. } = *held;
    if checksum(&bytes) != sum {
        let text = format!("block {key:032x} does not match its checksum");
        return Err(TransportError::new(Kind::Corrupt, Stage::Fetch, text));
    }
    Ok(FetchedBlock { key, bytes: bytes.into(), checksum: sum })
}
