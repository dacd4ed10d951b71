//! Handshake: two sides agree on version and fingerprint before any other frame.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::data_plane::DataPlane;
use crate::error::{Kind, Stage, TransportError};
use crate::frame::{FrameKind, Header};
use crate::guard::Guard;
use crate::limits::Limits;
use crate::message::{
    Hello, NAME_BYTES_MAX, PREFACE_BYTES, check_preface, decode_failure, encode_failure, preface,
};
use crate::proof;
use crate::stats::{Counters, TransportStats};
use crate::wire::{ReadHalf, Wire, WriteHalf, read_control, read_header, within, write_control};

/// The identity and state that one node shows to all its peers.
#[derive(Debug)]
pub(crate) struct Party {
    pub(crate) host: String,
    pub(crate) fingerprint: u64,
    pub(crate) limits: Limits,
    pub(crate) counters: Arc<Counters>,
    /// Its part in the transfer engine.
    pub(crate) plane: Arc<DataPlane>,
    /// Credentials that peers must show.
    pub(crate) guard: Guard,
}

impl Party {
    /// Counters of this node.
    pub(crate) fn stats(&self) -> TransportStats {
        self.counters.snapshot(&self.plane.moved_bytes())
    }
}

/// # Errors
/// [`Kind::Invalid`] for a name of the host that does not fit a frame.
pub(crate) fn check_host(host: &str) -> Result<(), TransportError> {
    if host.is_empty() || host.len() > NAME_BYTES_MAX {
        let text = format!("the host's name {host:?} is empty or over {NAME_BYTES_MAX} bytes");
        return Err(TransportError::new(Kind::Invalid, Stage::Bind, text));
    }
    Ok(())
}

/// A stream whose two sides have agreed.
pub(crate) struct Connection {
    pub(crate) reader: ReadHalf,
    pub(crate) writer: WriteHalf,
}

impl From<Wire> for Connection {
    fn from(Wire { reader, writer }: Wire) -> Self {
        Self { reader, writer }
    }
}

/// The dialer's side of the handshake.
pub(crate) async fn greet(party: &Party, mut wire: Wire) -> Result<Connection, TransportError> {
    let limit = party.limits.connect_timeout();
    let hello = Hello { fingerprint: party.fingerprint, host: party.host.clone() };
    let header = Header::new(FrameKind::Hello, 0, 0, 0);
    let said = match &party.guard.key {
        Some(key) => {
            proof::show(party, &mut wire, key).await?;
            write_control(&mut wire.writer, header, &hello.encode(), limit, Stage::Handshake).await
        }
        None => {
            // A listener that turns us away may have closed already; what it said is read all the same.
            let said = write_greeting(&mut wire.writer, header, &hello.encode(), limit).await;
            let read = read_preface(&mut wire.reader, limit).await;
            read.map_err(|error| said.clone().err().unwrap_or(error))?;
            said
        }
    };
    let header = read_header(&mut wire.reader, limit, limit, Stage::Handshake).await?;
    let header = header.ok_or_else(|| said.clone().err().unwrap_or_else(closed))?;
    let body = read_control(&mut wire.reader, &header, limit, Stage::Handshake).await?;
    match header.kind {
        FrameKind::Welcome => {
            said?;
            Ok(wire.into())
        }
        FrameKind::Refused => Err(decode_failure(&body, Stage::Handshake)),
        other => Err(unexpected(other)),
    }
}

pub(crate) async fn write_greeting(
    writer: &mut WriteHalf,
    header: Header,
    body: &[u8],
    limit: Duration,
) -> Result<(), TransportError> {
    within(limit, Stage::Handshake, "greeting", writer.write_all(&preface())).await?;
    write_control(writer, header, body, limit, Stage::Handshake).await
}

pub(crate) async fn read_preface(reader: &mut ReadHalf, limit: Duration) -> Result<(), TransportError> {
    let mut theirs = [0; PREFACE_BYTES];
    within(limit, Stage::Handshake, "waiting for its greeting", reader.read_exact(&mut theirs)).await?;
    check_preface(&theirs)
}

/// The listener's side of the handshake.
pub(crate) async fn welcome(party: &Party, mut wire: Wire) -> Result<Connection, TransportError> {
    let limit = party.limits.connect_timeout();
    if let Err(error) = read_preface(&mut wire.reader, limit).await {
        if error.text.contains("version") {
            // So that the other side can name both versions too.
            let _ = within(limit, Stage::Handshake, "answering", wire.writer.write_all(&preface())).await;
        }
        return Err(error);
    }
    let mut header =
        read_header(&mut wire.reader, limit, limit, Stage::Handshake).await?.ok_or_else(closed)?;
    let mut body = read_control(&mut wire.reader, &header, limit, Stage::Handshake).await?;
    let proves = party.guard.key.is_some() || header.kind == FrameKind::Challenge;
    if proves {
        proof::ask(party, &mut wire, (header.kind, &body)).await?;
        header = read_header(&mut wire.reader, limit, limit, Stage::Handshake).await?.ok_or_else(closed)?;
        body = read_control(&mut wire.reader, &header, limit, Stage::Handshake).await?;
    }
    if header.kind != FrameKind::Hello {
        return Err(unexpected(header.kind));
    }
    let hello = Hello::decode(&body)?;
    if hello.fingerprint != party.fingerprint {
        return refuse(party, wire, (&hello, proves)).await;
    }
    reply(&mut wire, Header::new(FrameKind::Welcome, 0, 0, 0), &[], (limit, proves)).await?;
    Ok(wire.into())
}

/// The answer to a greeting; the preface goes ahead of it where nothing was said yet.
async fn reply(
    wire: &mut Wire,
    header: Header,
    body: &[u8],
    (limit, has_spoken): (Duration, bool),
) -> Result<(), TransportError> {
    if has_spoken {
        return write_control(&mut wire.writer, header, body, limit, Stage::Handshake).await;
    }
    write_greeting(&mut wire.writer, header, body, limit).await
}

async fn refuse(
    party: &Party,
    mut wire: Wire,
    (hello, has_spoken): (&Hello, bool),
) -> Result<Connection, TransportError> {
    let (theirs, ours) = (hello.fingerprint, party.fingerprint);
    let text = format!(
        "fingerprint {theirs:016x} of {} is not {ours:016x} of {}: model, layout or block size differ",
        hello.host, party.host
    );
    let error = TransportError::new(Kind::Invalid, Stage::Handshake, text);
    let limit = party.limits.connect_timeout();
    let header = Header::new(FrameKind::Refused, 0, 0, 0);
    reply(&mut wire, header, &encode_failure(&error), (limit, has_spoken)).await?;
    Err(error)
}

pub(crate) fn closed() -> TransportError {
    let text = "the peer closed the connection during the handshake";
    TransportError::new(Kind::Closed, Stage::Handshake, text)
}

pub(crate) fn unexpected(kind: FrameKind) -> TransportError {
    TransportError::new(Kind::Bug, Stage::Handshake, format!("a {kind:?} frame during the handshake"))
}
