//! Asking the receiver to take a flight, until it does.

use tokio::time::{Instant, sleep};

use super::{FIRST_PAUSE, LONGEST_PAUSE};
use crate::data_plane::LentWindow;
use crate::dialer::{Dialer, LeasedConnection};
use crate::error::{Kind, Stage, TransportError};
use crate::frame::{FrameKind, Header};
use crate::handshake::Connection;
use crate::message::{decode_failure, decode_window};
use crate::receiver::PeerAddress;
use crate::wire::{read_control, read_header, write_control};

/// The receiver's answer to an offer.
enum Answer {
    Accepted(u32, Option<LentWindow>),
    Postponed(TransportError),
}

/// The offers of one flight.
pub(super) struct Offers<'a> {
    pub(super) dialer: &'a Dialer,
    pub(super) peer: &'a PeerAddress,
    pub(super) offer: Vec<u8>,
    pub(super) last_postponed: Option<TransportError>,
}

impl Offers<'_> {
    pub(super) async fn run(
        &mut self,
        deadline: Instant,
    ) -> Result<(LeasedConnection, u32, Option<LentWindow>), TransportError> {
        let mut leased = self.dialer.lease(self.peer).await?;
        let mut pause = FIRST_PAUSE;
        loop {
            match self.once(&mut leased.connection).await {
                Ok(Answer::Accepted(have_blocks, window)) => return Ok((leased, have_blocks, window)),
                Ok(Answer::Postponed(why)) if Instant::now() + pause >= deadline => return Err(why),
                Ok(Answer::Postponed(why)) => {
                    self.last_postponed = Some(why);
                    sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                // Each such turn uses up one idle connection, so there is an end to them.
                Err(error) if error.kind == Kind::Closed && leased.pooled => {
                    drop(leased);
                    leased = self.dialer.lease(self.peer).await?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn once(&self, connection: &mut Connection) -> Result<Answer, TransportError> {
        let pace = self.dialer.party().limits.progress_timeout();
        let header = Header::new(FrameKind::Offer, 0, 0, 0);
        write_control(&mut connection.writer, header, &self.offer, pace, Stage::Offer).await?;
        let header = read_header(&mut connection.reader, pace, pace, Stage::Offer).await?;
        let header = header.ok_or_else(|| {
            TransportError::new(Kind::Closed, Stage::Offer, "the peer closed the connection")
        })?;
        let body = read_control(&mut connection.reader, &header, pace, Stage::Offer).await?;
        match header.kind {
            FrameKind::Accepted => Ok(Answer::Accepted(header.a, decode_window(&body)?)),
            FrameKind::Refused if header.a == 1 => Ok(Answer::Postponed(decode_failure(&body, Stage::Offer))),
            FrameKind::Refused | FrameKind::Failed => Err(decode_failure(&body, Stage::Offer)),
            other => {
                let text = format!("a {other:?} frame in answer to an offer");
                Err(TransportError::new(Kind::Bug, Stage::Offer, text))
            }
        }
    }
}
