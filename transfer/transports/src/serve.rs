//! The listening side of one connection: flights and fetches, one after another.

mod wanted;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::data_plane::{ArrivedPieces, ReceiveWindow};
use crate::endpoint::{Phase, reached};
use crate::error::{Kind, Stage, TransportError};
use crate::frame::{FrameKind, Header};
use crate::handshake::{Connection, welcome};
use crate::landing::{Landing, Landings, land};
use crate::message::{decode_moved, decode_offer, encode_failure, encode_window};
use crate::receiver::FlightRefusal;
use crate::wire::{Wire, read_body, read_control, read_header, verify, write_control};

/// Bytes that are copied where they are: more of them go to a thread that may take its time.
const COPY_HERE_BYTES: u64 = 128 << 10;

/// Serves one stream until either side ends it.
pub(crate) async fn serve(landings: Arc<Landings>, wire: Wire, mut seen: watch::Receiver<Phase>) {
    let party = landings.party.clone();
    let whole = party.limits.connect_timeout() * 2;
    let welcomed = bounded(whole, "the handshake", welcome(&party, wire)).await;
    let Ok(mut connection) = welcomed else { return };
    while await_work(&mut connection, party.limits.idle_timeout(), &mut seen).await {
        if let Err(error) = serve_once(&landings, &mut connection).await {
            return close(connection, &error, party.limits.progress_timeout()).await;
        }
    }
}

/// Is there another frame to read? Not at the end of the stream, of the time limit, or of the endpoint.
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

/// Sends the peer the reason, then reads the bytes that it has still in flight. Closing on unread bytes would reset
/// the connection and lose the reason.
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
    // The connection ends here, with the reason sent or not.
    let _ = timeout(limit, told).await;
}

async fn serve_flight(
    landings: &Arc<Landings>,
    connection: &mut Connection,
    offer: &Header,
) -> Result<(), TransportError> {
    let pace = landings.party.limits.progress_timeout();
    let body = read_control(&mut connection.reader, offer, pace, Stage::Serve).await?;
    let (ticket, plan) = decode_offer(&body)?;
    let limits = &landings.party.limits;
    if let Err(error) = plan.check(limits, Stage::Offer) {
        return refuse_flight(landings, connection, FlightRefusal { retry: false, why: error.text }).await;
    }
    // Room first: who has accepted an offer does not take it back.
    let bytes = plan.bytes_after(0).min(limits.window_bytes.into());
    let Some(loan) = landings.party.plane.lend(bytes) else {
        let why = "no registered memory is free for its window".to_owned();
        return refuse_flight(landings, connection, FlightRefusal { retry: true, why }).await;
    };
    let landing = match landings.admit(ticket, plan) {
        Ok(landing) => landing,
        Err(refused) => return refuse_flight(landings, connection, refused).await,
    };
    let most = limits.flight_timeout();
    let window = landings.party.plane.open(loan);
    let mut taking = IncomingFlight { landing, window: window? };
    let told = bounded(most, "the flight", receive(landings, connection, &mut taking)).await;
    let told = told.inspect_err(|error| taking.landing.abort(&error.to_string()))?;
    let whole = taking.landing.complete(told)?;
    let done = Header::new(FrameKind::Done, 0, 0, whole);
    write_control(&mut connection.writer, done, &[], pace, Stage::Serve).await
}

async fn refuse_flight(
    landings: &Landings,
    connection: &mut Connection,
    refused: FlightRefusal,
) -> Result<(), TransportError> {
    refuse(connection, refused, landings.party.limits.progress_timeout()).await
}

async fn refuse(
    connection: &mut Connection,
    refused: FlightRefusal,
    pace: Duration,
) -> Result<(), TransportError> {
    let kind = if refused.retry { Kind::Retry } else { Kind::Invalid };
    let body = encode_failure(&TransportError::new(kind, Stage::Serve, refused.why));
    let header = Header::new(FrameKind::Refused, u32::from(refused.retry), 0, 0);
    write_control(&mut connection.writer, header, &body, pace, Stage::Serve).await
}

/// A flight being taken in.
struct IncomingFlight {
    landing: Landing,
    window: ReceiveWindow,
}

/// Takes slices until the sender says that it has sent all; returns how many it says.
async fn receive(
    landings: &Arc<Landings>,
    connection: &mut Connection,
    taking: &mut IncomingFlight,
) -> Result<u64, TransportError> {
    let (idle, pace) = (landings.party.limits.idle_timeout(), landings.party.limits.progress_timeout());
    let accepted = Header::new(FrameKind::Accepted, taking.landing.have_blocks(), 0, 0);
    let window = (taking.landing.slices() > 0).then(|| taking.window.lent());
    let body = encode_window(window.as_ref());
    write_control(&mut connection.writer, accepted, &body, pace, Stage::Serve).await?;
    loop {
        let header = read_header(&mut connection.reader, idle, pace, Stage::Serve).await?;
        let header = header.ok_or_else(|| {
            let text = "the sender closed the connection in the middle of a flight";
            TransportError::new(Kind::Closed, Stage::Serve, text)
        })?;
        if header.kind == FrameKind::Note {
            receive_note(landings, connection, &mut taking.landing, &header).await?;
            continue;
        }
        let body = read_control(&mut connection.reader, &header, pace, Stage::Serve).await?;
        match header.kind {
            FrameKind::Moved => {
                take_out(landings, taking, (header.c, &body)).await?;
                let ack = Header::new(FrameKind::Ack, 0, 0, taking.window.taken());
                write_control(&mut connection.writer, ack, &[], pace, Stage::Serve).await?;
            }
            FrameKind::Finish => return Ok(header.c),
            other => return Err(unexpected(other)),
        }
    }
}

/// Takes out of the window what has come, up to byte `upto` of the stream, and puts it where it belongs.
async fn take_out(
    landings: &Arc<Landings>,
    taking: &mut IncomingFlight,
    (upto, body): (u64, &[u8]),
) -> Result<(), TransportError> {
    let (sent, begun) = decode_moved(body)?;
    let Some(stretches) = taking.window.take(upto) else {
        let text = format!("byte {upto} is said to be there, which the window has no room for");
        return Err(TransportError::new(Kind::Bug, Stage::Serve, text));
    };
    let pieces = taking.landing.pieces(&stretches, &begun)?;
    let bytes: u64 = stretches.iter().map(|stretch| stretch.bytes).sum();
    let arrived = ArrivedPieces { memory: taking.window.memory().clone(), pieces };
    let (receiver, ticket) = (landings.receiver.clone(), taking.landing.ticket());
    if bytes <= COPY_HERE_BYTES {
        land(receiver.as_ref(), ticket, &arrived, sent)?;
    } else {
        let copy = move || land(receiver.as_ref(), ticket, &arrived, sent);
        tokio::task::spawn_blocking(copy).await.map_err(|error| {
            TransportError::new(Kind::Bug, Stage::Serve, format!("copying a flight: {error}"))
        })??;
    }
    crate::stats::add(&landings.party.counters.received_bytes, bytes);
    Ok(())
}

async fn receive_note(
    landings: &Landings,
    connection: &mut Connection,
    landing: &mut Landing,
    header: &Header,
) -> Result<(), TransportError> {
    let limits = &landings.party.limits;
    if header.body_bytes > limits.note_bytes {
        let (bytes, most) = (header.body_bytes, limits.note_bytes);
        let text = format!("a note of {bytes} bytes is over the limit note_bytes {most}");
        return Err(TransportError::new(Kind::Invalid, Stage::Serve, text));
    }
    let pace = limits.progress_timeout();
    let bytes = read_body(&mut connection.reader, header.body_bytes, pace, Stage::Serve).await?;
    verify(header, &bytes, Stage::Serve)?;
    landing.note(bytes)
}

fn unexpected(kind: FrameKind) -> TransportError {
    TransportError::new(Kind::Bug, Stage::Serve, format!("a {kind:?} frame where none belongs"))
}
