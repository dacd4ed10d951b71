//! The holder's side of a fetch.

use std::sync::Arc;
use std::time::Duration;

use baton_transfer::Priority;
use tokio::time::{Instant, timeout};

use super::{refuse, unexpected};
use crate::error::{Kind, Stage, TransportError};
use crate::frame::{FrameKind, Header};
use crate::handshake::Connection;
use crate::landing::Landings;
use crate::limits::Limits;
use crate::message::{HeldBlock, block_header, decode_berth, decode_keys, encode_held, priority_of};
use crate::receiver::{FetchedBlock, Refused, Want, answers};
use crate::stats::{Medium, Place};
use crate::wire::{read_control, read_header, write_control, write_frame};

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
        return refuse(connection, Refused { retry: false, why }, pace).await;
    }
    let place = Place::take(&landings.party.counters, |all| &all.serving_fetches, limits.flights);
    let Some(_place) = place else {
        let why = format!("{} fetches are being served already", limits.flights);
        return refuse(connection, Refused { retry: true, why }, pace).await;
    };
    let limit = Duration::from_millis(header.c).min(limits.flight_timeout());
    let deadline = Instant::now() + limit;
    let by_engine = priority_of(header.b).filter(|_| landings.party.carrier.is_some());
    let want = Want { keys: keys.clone(), epoch: header.a, priority: by_engine.unwrap_or(Priority::Fetch) };
    // Past the deadline nobody waits for the answer any more.
    let blocks = timeout(limit, landings.receiver.wanted(want)).await.unwrap_or_default();
    let blocks = fitting(limits, blocks, &keys);
    let moved = match by_engine {
        Some(priority) if blocks.iter().any(|block| !block.bytes.is_empty()) => {
            haul(landings, connection, &blocks, (priority, deadline)).await?
        }
        _ => 0,
    };
    for block in &blocks[moved..] {
        stream(landings, connection, block).await?;
    }
    let sent = u64::try_from(blocks.len()).expect("a usize has at most 64 bits");
    write_control(&mut connection.writer, Header::new(FrameKind::End, 0, 0, sent), &[], pace, Stage::Serve)
        .await
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

/// Writes blocks into windows that the asker lends, as many as it lends them for; says how many. The others go
/// over the connection.
async fn haul(
    landings: &Landings,
    connection: &mut Connection,
    blocks: &[FetchedBlock],
    (priority, deadline): (Priority, Instant),
) -> Result<usize, TransportError> {
    let pace = landings.party.limits.progress_timeout();
    let Some(carrier) = &landings.party.carrier else { return Ok(0) };
    let told = encode_held(blocks.iter().map(held));
    let count = u32::try_from(blocks.len()).expect("fetch_keys bounds it");
    let header = Header::new(FrameKind::Held, count, 0, 0);
    write_control(&mut connection.writer, header, &told, pace, Stage::Serve).await?;
    let mut moved = 0;
    while moved < blocks.len() {
        let header = read_header(&mut connection.reader, pace, pace, Stage::Serve).await?;
        let header = header.ok_or_else(|| {
            let text = "the asker closed the connection in the middle of a fetch";
            TransportError::new(Kind::Closed, Stage::Serve, text)
        })?;
        let body = read_control(&mut connection.reader, &header, pace, Stage::Serve).await?;
        if header.kind != FrameKind::Lent {
            return Err(unexpected(header.kind));
        }
        let next = blocks[moved..].get(..header.a as usize).unwrap_or_default();
        let Some(berth) = decode_berth(&body)?.filter(|_| !next.is_empty()) else { break };
        // Half of what is left, so that the other half is there for the connection.
        let limit = deadline.saturating_duration_since(Instant::now()) / 2;
        if let Err(why) = carrier.haul(berth, next, priority, limit).await {
            landings.party.fall_back(&format!("blocks go over the connection: {why}"));
            break;
        }
        next.iter().for_each(|block| landings.party.counters.sent(Medium::Engine, block.bytes.len() as u64));
        write_control(
            &mut connection.writer,
            Header::new(FrameKind::Moved, header.a, 0, 0),
            &[],
            pace,
            Stage::Serve,
        )
        .await?;
        moved += next.len();
    }
    Ok(moved)
}

fn held(block: &FetchedBlock) -> HeldBlock {
    let bytes = u32::try_from(block.bytes.len()).expect("block_bytes bounds it");
    HeldBlock { key: block.key, bytes, checksum: block.checksum }
}

/// Sends one block over the connection.
async fn stream(
    landings: &Landings,
    connection: &mut Connection,
    block: &FetchedBlock,
) -> Result<(), TransportError> {
    let mut header = block_header(block.key);
    header.body_bytes = u32::try_from(block.bytes.len()).expect("block_bytes bounds it");
    header.checksum = block.checksum;
    let pace = landings.party.limits.progress_timeout();
    write_frame(&mut connection.writer, &header, &block.bytes, pace, Stage::Serve).await?;
    landings.party.counters.sent(connection.medium, u64::from(header.body_bytes));
    Ok(())
}
