//! Before a peer says or hears anything else, both sides prove that they have the cluster's key.
//!
//! The dialer opens with a challenge, and the listener answers with one of its own. The dialer proves first; only then
//! does the listener prove, and only then does the dialer greet. A stranger that dials gets a random number and a
//! refusal: a proof over a challenge that it chose would let it try keys offline, as often as it likes.

use std::time::Duration;

use crate::error::{Kind, Stage, TransportError};
use crate::frame::{FrameKind, Header};
use crate::guard::{Challenge, ClusterKey, Prover, challenge};
use crate::handshake::{Party, closed, read_preface, unexpected, write_greeting};
use crate::message::{decode_failure, encode_failure};
use crate::stats::add;
use crate::wire::{Wire, read_control, read_header, write_control};

/// The dialer's side; both prefaces have been exchanged then.
pub(crate) async fn show(party: &Party, wire: &mut Wire, key: &ClusterKey) -> Result<(), TransportError> {
    let limit = party.limits.connect_timeout();
    let ours = challenge();
    let said =
        write_greeting(&mut wire.writer, Header::new(FrameKind::Challenge, 0, 0, 0), &ours, limit).await;
    read_preface(&mut wire.reader, limit).await.map_err(|error| said.clone().err().unwrap_or(error))?;
    let (kind, body) = next(wire, limit).await?;
    said?;
    let theirs = match kind {
        FrameKind::Answer => Challenge::try_from(&body[..]).map_err(|_| unexpected(kind))?,
        FrameKind::Refused => return Err(decode_failure(&body, Stage::Handshake)),
        other => return Err(unexpected(other)),
    };
    let proof = key.prove(Prover::KvDialer, &ours, &theirs);
    let header = Header::new(FrameKind::Proof, 0, 0, 0);
    write_control(&mut wire.writer, header, &proof, limit, Stage::Handshake).await?;
    let (kind, proof) = next(wire, limit).await?;
    match kind {
        FrameKind::Proof if key.is_proof(Prover::KvListener, &theirs, &ours, &proof) => Ok(()),
        FrameKind::Proof => {
            Err(wrong("the peer's cluster key is not this node's: give all processes the same file"))
        }
        FrameKind::Refused => Err(decode_failure(&proof, Stage::Handshake)),
        other => Err(unexpected(other)),
    }
}

/// The listener's side, from the dialer's first frame on; its greeting comes next. A dialer without a proof is
/// refused with the reason, and counted.
pub(crate) async fn ask(
    party: &Party,
    wire: &mut Wire,
    (kind, body): (FrameKind, &[u8]),
) -> Result<(), TransportError> {
    let limit = party.limits.connect_timeout();
    let Some(key) = &party.guard.key else {
        let why = "this node has no cluster key and the peer has one: give both the same --cluster-key";
        return refuse(party, wire, (why, true)).await;
    };
    let theirs = Challenge::try_from(body).ok().filter(|_| kind == FrameKind::Challenge);
    let Some(theirs) = theirs else {
        let why = "this node wants the cluster's key: start the peer with --cluster-key";
        return refuse(party, wire, (why, true)).await;
    };
    let ours = challenge();
    write_greeting(&mut wire.writer, Header::new(FrameKind::Answer, 0, 0, 0), &ours, limit).await?;
    let (kind, proof) = next(wire, limit).await?;
    if kind == FrameKind::Proof && key.is_proof(Prover::KvDialer, &theirs, &ours, &proof) {
        let proof = key.prove(Prover::KvListener, &ours, &theirs);
        let header = Header::new(FrameKind::Proof, 0, 0, 0);
        return write_control(&mut wire.writer, header, &proof, limit, Stage::Handshake).await;
    }
    let why = "the peer's cluster key is not this node's: give all processes the same file";
    refuse(party, wire, (why, false)).await
}

async fn next(wire: &mut Wire, limit: Duration) -> Result<(FrameKind, bytes::Bytes), TransportError> {
    let header = read_header(&mut wire.reader, limit, limit, Stage::Handshake).await?.ok_or_else(closed)?;
    let body = read_control(&mut wire.reader, &header, limit, Stage::Handshake).await?;
    Ok((header.kind, body))
}

/// Says why, with the preface where nothing was said yet; the caller closes.
async fn refuse(party: &Party, wire: &mut Wire, (why, is_first): (&str, bool)) -> Result<(), TransportError> {
    add(&party.counters.refused_peers, 1);
    let (error, limit) = (wrong(why), party.limits.connect_timeout());
    let (header, body) = (Header::new(FrameKind::Refused, 0, 0, 0), encode_failure(&error));
    if is_first {
        write_greeting(&mut wire.writer, header, &body, limit).await?;
    } else {
        write_control(&mut wire.writer, header, &body, limit, Stage::Handshake).await?;
    }
    Err(error)
}

fn wrong(text: &str) -> TransportError {
    TransportError::new(Kind::Invalid, Stage::Handshake, text)
}
