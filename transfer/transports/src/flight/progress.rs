//! Reads the receiver's messages during a flight.

use std::sync::Arc;

use tokio::sync::watch;

use crate::error::{Kind, Stage, TransportError};
use crate::frame::FrameKind;
use crate::handshake::Party;
use crate::message::decode_failure;
use crate::wire::{ReadHalf, read_control, read_header};

/// The receiver's progress as reported so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    /// Bytes of the window's stream that it has taken out.
    pub(super) taken_bytes: u64,
    pub(super) end: Option<Result<u64, TransportError>>,
}

/// Reads what the receiver says until the flight's end. Gives the half back where it can be used again.
pub(super) async fn listen(
    party: Arc<Party>,
    mut reader: ReadHalf,
    told: watch::Sender<Progress>,
) -> Option<ReadHalf> {
    loop {
        let end = match listen_once(&party, &mut reader).await {
            Ok(PeerMessage::TakenOut(bytes)) => {
                told.send_modify(|progress| progress.taken_bytes = bytes);
                continue;
            }
            Ok(PeerMessage::Done(slices)) => Ok(slices),
            Err(error) => Err(error),
        };
        let reusable = end.is_ok();
        told.send_modify(|progress| progress.end = Some(end));
        return reusable.then_some(reader);
    }
}

enum PeerMessage {
    TakenOut(u64),
    Done(u64),
}

async fn listen_once(party: &Party, reader: &mut ReadHalf) -> Result<PeerMessage, TransportError> {
    let stage = Stage::Acknowledge;
    let (whole, pace) = (party.limits.flight_timeout(), party.limits.progress_timeout());
    let header = read_header(reader, whole, pace, stage).await?.ok_or_else(|| {
        TransportError::new(Kind::Closed, stage, "the peer closed the connection in the middle of a flight")
    })?;
    let body = read_control(reader, &header, pace, stage).await?;
    match header.kind {
        FrameKind::Ack => Ok(PeerMessage::TakenOut(header.c)),
        FrameKind::Done => Ok(PeerMessage::Done(header.c)),
        FrameKind::Failed => Err(decode_failure(&body, stage)),
        other => Err(TransportError::new(Kind::Bug, stage, format!("a {other:?} frame in a flight"))),
    }
}
