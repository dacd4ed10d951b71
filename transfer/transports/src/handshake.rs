//! Two sides agree on version, fingerprint and medium before anything else is said.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::carrier::Carrier;
use crate::error::{Kind, Stage, TransportError};
use crate::frame::{FrameKind, Header};
use crate::guard::Guard;
use crate::limits::Limits;
use crate::message::{
    Hello, NAME_BYTES_MAX, PREFACE_BYTES, RingOffer, Welcome, check_preface, decode_failure, encode_failure,
    preface,
};
use crate::proof;
use crate::ring::{NamedRing, Ring};
use crate::stats::{Counters, Medium, TransportStats};
use crate::wire::{ReadHalf, Wire, WriteHalf, read_control, read_header, within, write_control};

/// Where Linux keeps shared memory.
const SHM_DIR: &str = "/dev/shm";

/// The directory for rings where none is configured: `/dev/shm` where there is one.
pub fn default_shm_dir() -> Option<PathBuf> {
    let dir = PathBuf::from(SHM_DIR);
    dir.is_dir().then_some(dir)
}

/// What one node is to all its peers.
#[derive(Debug)]
pub(crate) struct Party {
    pub(crate) host: String,
    pub(crate) shm_dir: Option<PathBuf>,
    pub(crate) fingerprint: u64,
    pub(crate) limits: Limits,
    pub(crate) counters: Arc<Counters>,
    /// Its part in the transfer engine, where it has one.
    pub(crate) carrier: Option<Arc<Carrier>>,
    /// What peers have to show.
    pub(crate) guard: Guard,
}

impl Party {
    /// # Errors
    /// [`Kind::Invalid`] for unsound limits or a name of the host that does not fit a frame.
    pub(crate) fn check(&self) -> Result<(), TransportError> {
        if self.host.is_empty() || self.host.len() > NAME_BYTES_MAX {
            let text = format!("the host's name {:?} is empty or over {NAME_BYTES_MAX} bytes", self.host);
            return Err(TransportError::new(Kind::Invalid, Stage::Bind, text));
        }
        self.limits.check()
    }

    /// What it has done.
    pub(crate) fn stats(&self) -> TransportStats {
        let moved = self.carrier.as_ref().map(|carrier| carrier.moved_bytes()).unwrap_or_default();
        self.counters.snapshot(&moved)
    }

    /// Shared memory cannot be used where it should: say so, and go on over TCP.
    pub(crate) fn fall_back(&self, why: &str) {
        self.counters.fell_back(why);
    }
}

/// A stream whose two sides have agreed.
pub(crate) struct Connection {
    pub(crate) reader: ReadHalf,
    pub(crate) writer: WriteHalf,
    pub(crate) medium: Medium,
    pub(crate) ring: Option<Ring>,
}

impl Connection {
    fn new(wire: Wire, ring: Option<Ring>) -> Self {
        Self { reader: wire.reader, writer: wire.writer, medium: wire.medium, ring }
    }
}

/// The dialer's side of the handshake.
pub(crate) async fn greet(
    party: &Party,
    mut wire: Wire,
    peer_host: &str,
) -> Result<Connection, TransportError> {
    let limit = party.limits.connect_timeout();
    let named = make_ring(party, wire.medium, peer_host);
    let hello = Hello {
        fingerprint: party.fingerprint,
        host: party.host.clone(),
        ring: named.as_ref().map(|ring| ring.offer().clone()),
    };
    let header = Header::new(FrameKind::Hello, 0, 0, 0);
    let said = match &party.guard.key {
        Some(key) => {
            proof::show(party, &mut wire, key).await?;
            write_control(&mut wire.writer, header, &hello.encode(), limit, Stage::Handshake).await
        }
        None => {
            // A listener that turns us away may have closed already; what it said is read all the same.
            let said = say(&mut wire.writer, header, &hello.encode(), limit).await;
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
            let ring = settle_ring(party, named, Welcome::decode(&body)?);
            Ok(Connection::new(wire, ring))
        }
        FrameKind::Refused => Err(decode_failure(&body, Stage::Handshake)),
        other => Err(unexpected(other)),
    }
}

pub(crate) async fn say(
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

/// A ring for a peer of the same host.
fn make_ring(party: &Party, medium: Medium, peer_host: &str) -> Option<NamedRing> {
    if medium != Medium::Tcp || peer_host != party.host {
        return None;
    }
    let Some(dir) = &party.shm_dir else {
        party.fall_back("no directory for shared memory is configured or found");
        return None;
    };
    match NamedRing::create(dir, party.limits.window_bytes) {
        Ok(ring) => Some(ring),
        Err(error) => {
            party.fall_back(&format!("cannot make a ring in {}: {error}", dir.display()));
            None
        }
    }
}

/// Keeps the ring where both have it, and takes its name away in any case.
fn settle_ring(party: &Party, named: Option<NamedRing>, welcome: Welcome) -> Option<Ring> {
    let named = named?;
    if let Some(why) = welcome.ring_refused {
        party.fall_back(&format!("the peer cannot use the ring: {why}"));
        return None;
    }
    match named.into_ring() {
        Ok(ring) => Some(ring),
        Err(error) => {
            party.fall_back(&format!("cannot keep the ring: {error}"));
            None
        }
    }
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
    let (ring, ring_refused) = match hello.ring.as_ref().map(|offer| open_ring(party, &hello.host, offer)) {
        None => (None, None),
        Some(Ok(ring)) => (Some(ring), None),
        Some(Err(why)) => {
            party.fall_back(&why);
            (None, Some(why))
        }
    };
    let body = Welcome { ring_refused }.encode();
    reply(&mut wire, Header::new(FrameKind::Welcome, 0, 0, 0), &body, (limit, proves)).await?;
    Ok(Connection::new(wire, ring))
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
    say(&mut wire.writer, header, body, limit).await
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

fn open_ring(party: &Party, their_host: &str, offer: &RingOffer) -> Result<Ring, String> {
    if their_host != party.host {
        return Err(format!("{their_host} is not this host, {}", party.host));
    }
    let dir = party.shm_dir.as_ref().ok_or("no directory for shared memory is configured or found")?;
    Ring::open(dir, offer).map_err(|error| format!("cannot open it in {}: {error}", dir.display()))
}

pub(crate) fn closed() -> TransportError {
    let text = "the peer closed the connection during the handshake";
    TransportError::new(Kind::Closed, Stage::Handshake, text)
}

pub(crate) fn unexpected(kind: FrameKind) -> TransportError {
    TransportError::new(Kind::Bug, Stage::Handshake, format!("a {kind:?} frame during the handshake"))
}
