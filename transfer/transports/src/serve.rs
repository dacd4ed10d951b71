//! The listening side of one connection: flights and fetches, one after another.

mod wanted;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::carrier::Berth;
use crate::endpoint::{Phase, reached};
use crate::error::{Kind, Stage, TransportError};
use crate::frame::{FrameKind, Header};
use crate::handshake::{Connection, welcome};
use crate::landing::{Landing, Landings};
use crate::message::{decode_offer, encode_berth, encode_failure};
use crate::receiver::Refused;
use crate::stats::Medium;
use crate::wire::{ReadHalf, Wire, read_body, read_control, read_header, verify, write_control};

/// Landed slices are confirmed four times a window, and at least as often as this.
const CONFIRM_EVERY_SLICES_MAX: u64 = 64;
/// And when nothing more has come for so long.
const CONFIRM_DELAY: Duration = Duration::from_millis(2);

/// Serves one stream until either side ends it. Every failure is counted here.
pub(crate) async fn serve(landings: Arc<Landings>, wire: Wire, mut seen: watch::Receiver<Phase>) {
    let party = landings.party.clone();
    let whole = party.limits.connect_timeout() * 2;
    let welcomed = bounded(whole, "the handshake", welcome(&party, wire)).await;
    let mut connection = match welcomed {
        Ok(connection) => connection,
        Err(error) => return party.counters.failed(&error.at(Stage::Handshake)),
    };
    while await_work(&mut connection, party.limits.idle_timeout(), &mut seen).await {
        if let Err(error) = serve_once(&landings, &mut connection).await {
            party.counters.failed(&error);
            return close(connection, &error, party.limits.progress_timeout()).await;
        }
    }
}

/// Is there another frame to read? Not at the end of the stream, of patience, or of the endpoint.
async fn await_work(connection: &mut Connection, idle: Duration, seen: &mut watch::Receiver<Phase>) -> bool {
    tokio::select! {
        biased;
        () = reached(Phase::Draining, seen) => false,
        filled = timeout(idle, connection.reader.fill_buf()) => {
            matches!(filled, Ok(Ok(bytes)) if !bytes.is_empty())
        }
    }
}

/// Ends what goes on byte by byte, each in time, but never ends.
async fn bounded<T>(
    whole: Duration,
    what: &str,
    work: impl Future<Output = Result<T, TransportError>>,
) -> Result<T, TransportError> {
    match timeout(whole, work).await {
        Ok(done) => done,
        Err(_) => {
            let text = format!("{what} was not over after {} ms", whole.as_millis());
            Err(TransportError::new(Kind::Unavailable, Stage::Serve, text))
        }
    }
}

async fn serve_once(landings: &Arc<Landings>, connection: &mut Connection) -> Result<(), TransportError> {
    let pace = landings.party.limits.progress_timeout();
    let Some(header) = read_header(&mut connection.reader, pace, pace, Stage::Serve).await? else {
        return Ok(());
    };
    match header.kind {
        FrameKind::Offer => serve_flight(landings, connection, &header).await,
        FrameKind::Want => {
            let whole = landings.party.limits.flight_timeout();
            bounded(whole, "the fetch", wanted::serve(landings, connection, &header)).await
        }
        other => Err(unexpected(other)),
    }
}

/// Tells the peer why, and reads what it has still on its way: closing on unread bytes would reset the
/// connection and lose the reason.
async fn close(mut connection: Connection, error: &TransportError, limit: Duration) {
    let header = Header::new(FrameKind::Failed, 0, 0, 0);
    let body = encode_failure(error);
    let told = async {
        write_control(&mut connection.writer, header, &body, limit, Stage::Serve).await.ok()?;
        connection.writer.shutdown().await.ok()?;
        let mut sink = vec![0; 64 << 10];
        while connection.reader.read(&mut sink).await.ok()? > 0 {}
        Some(())
    };
    // Whether it could be told or not, this is the connection's end.
    let _ = timeout(limit, told).await;
}

async fn serve_flight(
    landings: &Arc<Landings>,
    connection: &mut Connection,
    offer: &Header,
) -> Result<(), TransportError> {
    let pace = landings.party.limits.progress_timeout();
    let body = read_control(&mut connection.reader, offer, pace, Stage::Serve).await?;
    let (ticket, plan, window_slices) = decode_offer(&body)?;
    let every = u64::from(window_slices / 4).clamp(1, CONFIRM_EVERY_SLICES_MAX);
    let landing = match landings.admit(ticket, plan) {
        Ok(landing) => landing,
        Err(refused) => {
            crate::stats::add(&landings.party.counters.refused_offers, 1);
            return refuse(connection, refused, pace).await;
        }
    };
    let most = landings.party.limits.flight_timeout();
    let carrier = landings.party.carrier.as_ref();
    let berth = carrier.and_then(|carrier| carrier.berth(landing.slices(), landing.plan().layer_bytes));
    let mut taking = Taking { landing, berth, every };
    let told = bounded(most, "the flight", receive(landings, connection, &mut taking)).await;
    let told = told.inspect_err(|error| taking.landing.abort(&error.to_string()))?;
    let whole = taking.landing.complete(told)?;
    let done = Header::new(FrameKind::Done, 0, 0, whole);
    write_control(&mut connection.writer, done, &[], pace, Stage::Serve).await
}

async fn refuse(connection: &mut Connection, refused: Refused, pace: Duration) -> Result<(), TransportError> {
    let kind = if refused.retry { Kind::Retry } else { Kind::Invalid };
    let body = encode_failure(&TransportError::new(kind, Stage::Serve, refused.why));
    let header = Header::new(FrameKind::Refused, u32::from(refused.retry), 0, 0);
    write_control(&mut connection.writer, header, &body, pace, Stage::Serve).await
}

/// A flight being taken in.
struct Taking {
    landing: Landing,
    /// Room that the sender may fill by the transfer engine.
    berth: Option<Berth>,
    /// Slices between two confirmations.
    every: u64,
}

/// Takes slices until the sender says that it has sent all; returns how many it says.
async fn receive(
    landings: &Landings,
    connection: &mut Connection,
    taking: &mut Taking,
) -> Result<u64, TransportError> {
    let (idle, pace) = (landings.party.limits.idle_timeout(), landings.party.limits.progress_timeout());
    let accepted = Header::new(FrameKind::Accepted, taking.landing.have_blocks(), 0, 0);
    let berth = encode_berth(taking.berth.as_ref().map(Berth::told).as_ref());
    write_control(&mut connection.writer, accepted, &berth, pace, Stage::Serve).await?;
    let (mut confirmed, every) = (0, taking.every);
    loop {
        let landing = &mut taking.landing;
        let landed = landing.landed_slices();
        if landed - confirmed >= every || (landed > confirmed && nothing_comes(&mut connection.reader).await)
        {
            let ack = Header::new(FrameKind::Ack, 0, 0, landed);
            write_control(&mut connection.writer, ack, &[], pace, Stage::Serve).await?;
            confirmed = landed;
        }
        let header = read_header(&mut connection.reader, idle, pace, Stage::Serve).await?;
        let header = header.ok_or_else(|| {
            let text = "the sender closed the connection in the middle of a flight";
            TransportError::new(Kind::Closed, Stage::Serve, text)
        })?;
        match header.kind {
            FrameKind::Slice => {
                // The sender does not use the engine: its room is for others.
                taking.berth = None;
                receive_slice(landings, connection, &mut taking.landing, &header).await?;
            }
            FrameKind::Note => receive_note(landings, connection, landing, &header).await?,
            FrameKind::Moved => {
                read_control(&mut connection.reader, &header, pace, Stage::Serve).await?;
            }
            FrameKind::Finish => {
                let body = read_control(&mut connection.reader, &header, pace, Stage::Serve).await?;
                take_moved(landings, taking, &body, header.c).await?;
                return Ok(header.c);
            }
            other => return Err(unexpected(other)),
        }
    }
}

/// Takes what the engine has put into the berth, if the sender says so: verified as a whole, then slice by slice.
async fn take_moved(
    landings: &Landings,
    taking: &mut Taking,
    body: &[u8],
    told: u64,
) -> Result<(), TransportError> {
    let Some(sum) = body.try_into().ok().map(u64::from_le_bytes) else { return Ok(()) };
    let (slices, layer_bytes) = (taking.landing.slices(), taking.landing.plan().layer_bytes);
    let Some(mut berth) = taking.berth.take().filter(|_| told == slices) else { return Ok(()) };
    // Both wait or compute for longer than a task of the runtime may.
    let closed = tokio::task::spawn_blocking(move || {
        berth.close();
        let found = berth.sum(slices, layer_bytes);
        let read = |slice| berth.read(slice, layer_bytes);
        let bytes: Vec<Bytes> = if found == sum { (0..slices).map(read).collect() } else { Vec::new() };
        (bytes, found)
    });
    let (bytes, found) = closed.await.map_err(|error| {
        TransportError::new(Kind::Bug, Stage::Serve, format!("verifying a flight: {error}"))
    })?;
    if found != sum {
        let text = "the checksum over the slices that the transfer engine moved does not match";
        return Err(TransportError::new(Kind::Corrupt, Stage::Serve, text));
    }
    for (bytes, at) in bytes.into_iter().zip(taking.landing.plan().by_layer(taking.landing.have_blocks())) {
        landings.party.counters.received(Medium::Engine, u64::from(layer_bytes));
        taking.landing.land(at, bytes)?;
    }
    Ok(())
}

/// Is there nothing to read now, nor a moment later? An error shows at the next read.
async fn nothing_comes(reader: &mut ReadHalf) -> bool {
    reader.buffer().is_empty() && timeout(CONFIRM_DELAY, reader.fill_buf()).await.is_err()
}

async fn receive_note(
    landings: &Landings,
    connection: &mut Connection,
    landing: &mut Landing,
    header: &Header,
) -> Result<(), TransportError> {
    let limits = &landings.party.limits;
    if header.by_ring || header.body_bytes > limits.note_bytes {
        let (bytes, most) = (header.body_bytes, limits.note_bytes);
        let text = format!("a note of {bytes} bytes is over the limit note_bytes {most}");
        return Err(TransportError::new(Kind::Invalid, Stage::Serve, text));
    }
    let pace = limits.progress_timeout();
    let bytes = read_body(&mut connection.reader, header.body_bytes, pace, Stage::Serve).await?;
    verify(header, &bytes, Stage::Serve)?;
    landing.note(bytes)
}

async fn receive_slice(
    landings: &Landings,
    connection: &mut Connection,
    landing: &mut Landing,
    header: &Header,
) -> Result<(), TransportError> {
    let at = landing.expect(header)?;
    let (bytes, medium) = if header.by_ring {
        let Some(ring) = &connection.ring else {
            let text = "a slice is said to be in a ring, but there is none";
            return Err(TransportError::new(Kind::Bug, Stage::Serve, text));
        };
        let read = ring.read(header.c, landing.plan().layer_bytes);
        let bytes =
            read.map_err(|error| TransportError::from_io(&error, Stage::Serve, "reading the ring"))?;
        (bytes, Medium::SharedMemory)
    } else {
        let pace = landings.party.limits.progress_timeout();
        let bytes = read_body(&mut connection.reader, header.body_bytes, pace, Stage::Serve).await?;
        (bytes, connection.medium)
    };
    verify(header, &bytes, Stage::Serve)?;
    landings.party.counters.received(medium, u64::from(header.body_bytes));
    landing.land(at, bytes)
}

fn unexpected(kind: FrameKind) -> TransportError {
    TransportError::new(Kind::Bug, Stage::Serve, format!("a {kind:?} frame where none belongs"))
}
