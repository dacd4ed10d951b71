//! The holder's side of a fetch.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::{refuse, unexpected};
use crate::arena::Loan;
use crate::data_plane::WindowWriter;
use crate::error::{Kind, Stage, TransportError};
use crate::frame::{FrameKind, Header};
use crate::handshake::Connection;
use crate::landing::Landings;
use crate::limits::Limits;
use crate::message::{HeldBlock, decode_keys, decode_window, encode_held, priority_of};
use crate::mover::Region;
use crate::receiver::{FetchedBlock, FlightRefusal, Want, answers};
use crate::stats::Place;
use crate::wire::{read_control, read_header, write_control};

/// Answers one want.
pub(super) async fn serve(
    landings: &Arc<Landings>,
    connection: &mut Connection,
    header: &Header,
) -> Result<(), TransportError> {
    let limits = &landings.party.limits;
    let pace = limits.progress_timeout();
    let body = read_control(&mut connection.reader, header, pace, Stage::Serve).await?;
    let keys = decode_keys(&body)?;
    if keys.len() > limits.fetch_keys {
        let why = format!("{} keys are over the limit fetch_keys {}", keys.len(), limits.fetch_keys);
        return refuse(connection, FlightRefusal { retry: false, why }, pace).await;
    }
    let place = Place::take(&landings.party.counters, |all| &all.serving_fetches, limits.flights);
    let Some(_place) = place else {
        let why = format!("{} fetches are being served already", limits.flights);
        return refuse(connection, FlightRefusal { retry: true, why }, pace).await;
    };
    let limit = Duration::from_millis(header.c).min(limits.flight_timeout());
    let deadline = Instant::now() + limit;
    let priority = priority_of(header.b);
    let want = Want { keys: keys.clone(), epoch: header.a, priority };
    // Past the deadline the asker has given up on the answer.
    let blocks = timeout(limit, landings.receiver.wanted(want)).await.unwrap_or_default();
    let blocks = fitting(limits, blocks, &keys);
    if !blocks.is_empty() {
        let told = encode_held(blocks.iter().map(held));
        let count = u32::try_from(blocks.len()).expect("fetch_keys bounds it");
        let header = Header::new(FrameKind::Held, count, 0, 0);
        write_control(&mut connection.writer, header, &told, pace, Stage::Serve).await?;
    }
    if blocks.iter().any(|block| !block.bytes.is_empty()) {
        let left = deadline.saturating_duration_since(Instant::now());
        let lent = read_expected(connection, pace, FrameKind::Lent).await?.1;
        let lent = decode_window(&lent)?.ok_or_else(|| unexpected(FrameKind::Lent))?;
        let window = WindowWriter::new(&landings.party.plane, lent, priority, left)?;
        OutgoingBlocks::new(landings, window)?.all(connection, &blocks).await?;
    }
    let sent = u64::try_from(blocks.len()).expect("a usize has at most 64 bits");
    write_control(&mut connection.writer, Header::new(FrameKind::End, 0, 0, sent), &[], pace, Stage::Serve)
        .await
}

/// Reads the asker's next frame, which has to be of this kind.
async fn read_expected(
    connection: &mut Connection,
    pace: Duration,
    kind: FrameKind,
) -> Result<(Header, bytes::Bytes), TransportError> {
    let header = read_header(&mut connection.reader, pace, pace, Stage::Serve).await?;
    let header = header.ok_or_else(|| {
        let text = "the asker closed the connection in the middle of a fetch";
        TransportError::new(Kind::Closed, Stage::Serve, text)
    })?;
    let body = read_control(&mut connection.reader, &header, pace, Stage::Serve).await?;
    if header.kind == kind { Ok((header, body)) } else { Err(unexpected(header.kind)) }
}

/// The leading blocks that were wanted and are within the bounds.
fn fitting(limits: &Limits, mut blocks: Vec<FetchedBlock>, keys: &[u128]) -> Vec<FetchedBlock> {
    let mut left = limits.fetch_bytes;
    let fits = |(block, key): (&FetchedBlock, &u128)| {
        let bytes = u64::try_from(block.bytes.len()).expect("a usize has at most 64 bits");
        let fits = bytes <= left && bytes <= u64::from(limits.block_bytes) && answers(block.key, *key);
        left = left.saturating_sub(bytes);
        fits
    };
    let fitting = blocks.iter().zip(keys).map(fits).take_while(|fits| *fits).count();
    blocks.truncate(fitting);
    blocks
}

fn held(block: &FetchedBlock) -> HeldBlock {
    let bytes = u32::try_from(block.bytes.len()).expect("block_bytes bounds it");
    HeldBlock { key: block.key, bytes, checksum: block.checksum }
}

/// Blocks on their way into the asker's window, one after another. They are sent from a copy in registered memory, in
/// a ring of its own.
struct OutgoingBlocks {
    window: WindowWriter,
    staging: Arc<Loan>,
    pace: Duration,
}

impl OutgoingBlocks {
    fn new(landings: &Landings, window: WindowWriter) -> Result<Self, TransportError> {
        let bytes = window.window_bytes().min(landings.party.limits.window_bytes.into());
        let staging = landings.party.plane.stage(bytes).ok_or_else(|| {
            TransportError::new(Kind::Retry, Stage::Serve, "no registered memory is free for a copy")
        })?;
        let staging = Arc::new(staging);
        let window = window.reading_from(staging.clone());
        Ok(Self { window, staging, pace: landings.party.limits.progress_timeout() })
    }

    /// Sends all blocks; returns when the asker has taken all of it out.
    async fn all(
        &mut self,
        connection: &mut Connection,
        blocks: &[FetchedBlock],
    ) -> Result<(), TransportError> {
        for block in blocks {
            let mut bytes = &block.bytes[..];
            while !bytes.is_empty() {
                let room = usize::try_from(self.room()).unwrap_or(usize::MAX).min(bytes.len());
                if room == 0 {
                    self.make_room(connection).await?;
                    continue;
                }
                let at = self.staging.at() + self.window.written() % self.staging.bytes();
                let local = Region { memory: self.staging.memory().clone(), at };
                local.memory.write(at, &bytes[..room]);
                self.window.push(&local, room as u64);
                bytes = &bytes[room..];
                if self.window.has_full_batch() {
                    self.submit_writes(connection).await?;
                }
            }
        }
        self.submit_writes(connection).await?;
        while self.announce(connection).await? {}
        while self.window.acknowledged() < self.window.written() {
            self.read_ack(connection).await?;
        }
        Ok(())
    }

    /// Bytes that can be copied and pushed as one piece.
    fn room(&self) -> u64 {
        let (size, written) = (self.staging.bytes(), self.window.written());
        let free = size.saturating_sub(written - self.window.acknowledged());
        self.window.room().min(free).min(size - written % size)
    }

    async fn make_room(&mut self, connection: &mut Connection) -> Result<(), TransportError> {
        self.submit_writes(connection).await?;
        if self.announce(connection).await? { Ok(()) } else { self.read_ack(connection).await }
    }

    async fn submit_writes(&mut self, connection: &mut Connection) -> Result<(), TransportError> {
        while self.window.is_full() {
            self.announce(connection).await?;
        }
        self.window.submit_writes().map(|_| ())
    }

    /// Waits for the first portion that left, and reports its arrival to the asker. False where nothing is in flight.
    async fn announce(&mut self, connection: &mut Connection) -> Result<bool, TransportError> {
        let Some(upto) = self.window.arrived().await? else { return Ok(false) };
        let moved = Header::new(FrameKind::Moved, 0, 0, upto);
        write_control(&mut connection.writer, moved, &[], self.pace, Stage::Serve).await?;
        Ok(true)
    }

    /// Waits until the asker has taken bytes out.
    async fn read_ack(&mut self, connection: &mut Connection) -> Result<(), TransportError> {
        let (ack, _) = read_expected(connection, self.pace, FrameKind::Ack).await?;
        self.window.acknowledge(ack.c)
    }
}
