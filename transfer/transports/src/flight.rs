//! The sending side of a hand-off.

mod offers;
mod progress;

use std::collections::VecDeque;
use std::time::Duration;

use baton_transfer::Priority;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use crate::data_plane::WindowWriter;
use crate::dialer::{Dialer, LeasedConnection};
use crate::error::{Kind, Stage, TransportError};
use crate::frame::{Checksum, FrameKind, Header};
use crate::handshake::Connection;
use crate::message::{MOVED_SLICES_MAX, encode_moved, encode_offer};
use crate::mover::Region;
use crate::receiver::{HandoffTicket, PeerAddress, Plan, SlicePosition};
use crate::stats::Place;
use crate::wire::{ReadHalf, WriteHalf, write_control};
use offers::Offers;
use progress::{Progress, listen};

const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(32);
/// How long the receiver's own words are waited for when a write has failed.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// The amounts that a finished flight moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlightStats {
    /// Slices sent, all confirmed.
    pub slices: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Bytes of a flight that leave together: their checksum, and the slices that begin among them.
#[derive(Debug, Default)]
struct Portion {
    sum: Checksum,
    begun: Vec<SlicePosition>,
}

/// One hand-off on its way out. Dropped before [`Flight::finish`] returns, it is aborted at the receiver; the memory
/// that its slices lie in may be read for a moment longer, to no effect.
pub struct Flight {
    dialer: Dialer,
    peer: PeerAddress,
    plan: Plan,
    have_blocks: u32,
    connection: WriteHalf,
    /// None where nothing is to be sent.
    window: Option<WindowWriter>,
    /// Slices that have not left yet.
    gathering: Portion,
    /// Portions that have left but are not announced, in order.
    leaving: VecDeque<Portion>,
    reading: JoinHandle<Option<ReadHalf>>,
    progress: watch::Receiver<Progress>,
    stats: FlightStats,
    /// Half a frame may be on the stream: nothing may follow it.
    broken: bool,
    _permit: OwnedSemaphorePermit,
    _place: Place,
}

impl Flight {
    /// Offers the flight to the peer until it accepts. An offer that the receiver puts off (the order to
    /// expect the ticket may still be on its way to it) is repeated, from 1 ms on ever more seldom.
    ///
    /// # Errors
    /// [`Kind::Retry`] where no offer was taken before `offer_timeout_ms`, or all connections are in use;
    /// [`Kind::Invalid`] for a plan over the limits, a ticket that the receiver will not take, or
    /// fingerprints that differ; [`Kind::Unavailable`] where the peer cannot be reached.
    pub async fn start(
        dialer: &Dialer,
        peer: &PeerAddress,
        ticket: HandoffTicket,
        plan: Plan,
    ) -> Result<Self, TransportError> {
        let party = dialer.party();
        plan.check(&party.limits, Stage::Offer)?;
        let place = Place::take(&party.counters, |all| &all.sending_flights, party.limits.flights);
        let place = place.ok_or_else(|| {
            let text = format!("{} flights are on their way already", party.limits.flights);
            TransportError::new(Kind::Retry, Stage::Offer, text)
        })?;
        let offer = encode_offer(ticket, &plan);
        let mut offers = Offers { dialer, peer, offer, last_postponed: None };
        let deadline = Instant::now() + party.limits.offer_timeout();
        let (leased, have_blocks, window) = match timeout_at(deadline, offers.run(deadline)).await {
            Ok(answered) => answered?,
            Err(_) => {
                let text = format!("no answer to the offer for {} ms", party.limits.offer_timeout_ms);
                let silent = TransportError::new(Kind::Unavailable, Stage::Offer, text);
                return Err(offers.last_postponed.unwrap_or(silent));
            }
        };
        let wrong = |text: String| Err(TransportError::new(Kind::Bug, Stage::Offer, text));
        if have_blocks > plan.blocks {
            return wrong(format!("the peer says that it holds {have_blocks} of {} blocks", plan.blocks));
        }
        if window.is_none() && plan.slices_after(have_blocks) > 0 {
            return wrong("the peer takes the flight and lends no window".to_owned());
        }
        let writer =
            |lent| WindowWriter::new(&party.plane, lent, Priority::Handoff, party.limits.flight_timeout());
        let window = window.map(writer).transpose()?;
        let LeasedConnection { connection: Connection { reader, writer }, permit, .. } = leased;
        let (told, progress) = watch::channel(Progress::default());
        Ok(Self {
            dialer: dialer.clone(),
            peer: peer.clone(),
            plan,
            have_blocks,
            connection: writer,
            window,
            gathering: Portion::default(),
            leaving: VecDeque::new(),
            reading: tokio::spawn(listen(party.clone(), reader, told)),
            progress,
            stats: FlightStats { slices: 0, bytes: 0 },
            broken: false,
            _permit: permit,
            _place: place,
        })
    }

    /// Leading blocks that the receiver holds: they must not be sent.
    pub fn have_blocks(&self) -> u32 {
        self.have_blocks
    }

    /// Sends one slice, which lies at `from` and must not change before the flight is over; waits while the
    /// receiver's window is full. Positions may come in any order, each once; the receiver judges. A call that is
    /// dropped midway breaks the flight.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for a slice that the plan does not have, or memory that is too short: the flight may go on
    /// without it. Any other error ends the flight, with the receiver's reason where it gave one.
    pub async fn send(&mut self, at: SlicePosition, from: &Region) -> Result<(), TransportError> {
        self.check(at, from)?;
        self.send_checked(at, from).await
    }

    /// Sends the slices that wait to leave together, and waits until they have arrived. For a sender that has no
    /// further slice for the moment.
    ///
    /// # Errors
    /// As for [`Flight::send`].
    pub async fn flush(&mut self) -> Result<(), TransportError> {
        self.unbroken(Stage::Send)?;
        self.broken = true;
        self.submit_writes().await?;
        while self.announce().await? {}
        self.broken = false;
        Ok(())
    }

    /// Sends the receiver's program a note besides the KV: at most once, before the first slice.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for a note over the limit `note_bytes`; any other error ends the flight.
    pub async fn note(&mut self, bytes: &[u8]) -> Result<(), TransportError> {
        let most = self.dialer.party().limits.note_bytes;
        if u32::try_from(bytes.len()).is_ok_and(|bytes| bytes <= most) {
            return self.write(Header::new(FrameKind::Note, 0, 0, 0), bytes, Stage::Send).await;
        }
        let text = format!("a note of {} bytes is over the limit note_bytes {most}", bytes.len());
        Err(TransportError::new(Kind::Invalid, Stage::Send, text))
    }

    fn check(&self, at: SlicePosition, from: &Region) -> Result<(), TransportError> {
        let Plan { blocks, layers, layer_bytes } = self.plan;
        let text = if at.block >= blocks || at.layer >= layers {
            format!("slice ({}, {}) is not in the plan {:?}", at.block, at.layer, self.plan)
        } else if !from.memory.holds(from.at, layer_bytes.into()) {
            let bytes = from.memory.bytes();
            format!("a slice of {layer_bytes} bytes at {} of a memory of {bytes}", from.at)
        } else {
            return Ok(());
        };
        Err(TransportError::new(Kind::Invalid, Stage::Send, text))
    }

    fn unbroken(&self, stage: Stage) -> Result<(), TransportError> {
        if !self.broken {
            return Ok(());
        }
        let text = "an earlier call of this flight failed or was dropped midway";
        Err(TransportError::new(Kind::Closed, stage, text))
    }

    async fn send_checked(&mut self, at: SlicePosition, from: &Region) -> Result<(), TransportError> {
        self.unbroken(Stage::Send)?;
        if at.block < self.have_blocks {
            let (block, held) = (at.block, self.have_blocks);
            let text = format!("block {block}: the receiver holds the first {held} blocks already");
            return Err(TransportError::new(Kind::Corrupt, Stage::Send, text));
        }
        self.broken = true;
        let mut left = Region { memory: from.memory.clone(), at: from.at };
        let end = from.at + u64::from(self.plan.layer_bytes);
        while left.at < end {
            let Some(window) = &mut self.window else { break };
            let pushed = window.push(&left, end - left.at);
            if pushed == 0 {
                self.make_room().await?;
                continue;
            }
            if left.at == from.at {
                self.gathering.begun.push(at);
            }
            left.memory.add_to(&mut self.gathering.sum, left.at, pushed);
            left.at += pushed;
        }
        self.stats.slices += 1;
        self.stats.bytes += u64::from(self.plan.layer_bytes);
        let laden = self.window.as_ref().is_some_and(WindowWriter::has_full_batch);
        if laden || self.gathering.begun.len() >= MOVED_SLICES_MAX {
            self.submit_writes().await?;
        }
        self.broken = false;
        Ok(())
    }

    /// The window is full, or wraps: what has gathered leaves, and room comes as the receiver takes bytes out.
    async fn make_room(&mut self) -> Result<(), TransportError> {
        self.submit_writes().await?;
        while self.window.as_ref().is_some_and(|window| window.room() == 0) {
            if self.announce().await? {
                self.take_note()?;
            } else {
                let before = self.window.as_ref().map_or(0, WindowWriter::acknowledged);
                self.await_progress(Stage::Send, |told| told.taken_bytes > before).await?;
                self.take_note()?;
            }
        }
        Ok(())
    }

    /// The bytes that the receiver says it has taken out make room.
    fn take_note(&mut self) -> Result<(), TransportError> {
        let taken = self.progress.borrow_and_update().taken_bytes;
        self.window.as_mut().map_or(Ok(()), |window| window.acknowledge(taken))
    }

    /// Sends what has gathered.
    async fn submit_writes(&mut self) -> Result<(), TransportError> {
        while self.window.as_ref().is_some_and(WindowWriter::is_full) {
            self.announce().await?;
        }
        let Some(window) = &mut self.window else { return Ok(()) };
        if window.submit_writes()? {
            self.leaving.push_back(std::mem::take(&mut self.gathering));
        }
        Ok(())
    }

    /// Waits for the first portion that left, and reports its arrival to the receiver. False where nothing is in
    /// flight.
    async fn announce(&mut self) -> Result<bool, TransportError> {
        let Some(window) = &mut self.window else { return Ok(false) };
        let upto = match window.arrived().await {
            Ok(Some(upto)) => upto,
            Ok(None) => return Ok(false),
            // The receiver's own words, where it closed the window.
            Err(error) => return Err(self.last_words().await.unwrap_or(error)),
        };
        let portion = self.leaving.pop_front().unwrap_or_default();
        let body = encode_moved(portion.sum.value(), &portion.begun);
        self.write(Header::new(FrameKind::Moved, 0, 0, upto), &body, Stage::Send).await?;
        Ok(true)
    }

    async fn write(&mut self, header: Header, body: &[u8], stage: Stage) -> Result<(), TransportError> {
        let pace = self.dialer.party().limits.progress_timeout();
        let broken = std::mem::replace(&mut self.broken, true);
        match write_control(&mut self.connection, header, body, pace, stage).await {
            Ok(()) => {
                self.broken = broken;
                Ok(())
            }
            Err(error) => Err(self.last_words().await.unwrap_or(error)),
        }
    }

    /// Why the receiver ended the flight, where it said so before it closed the connection.
    async fn last_words(&mut self) -> Option<TransportError> {
        let ended = self.progress.wait_for(|told| told.end.is_some());
        match timeout(LAST_WORDS, ended).await {
            Ok(Ok(told)) => told.end.clone().and_then(Result::err),
            _ => None,
        }
    }

    /// Waits until `enough`; every confirmation restarts the clock.
    async fn await_progress(
        &mut self,
        stage: Stage,
        enough: impl Fn(&Progress) -> bool,
    ) -> Result<(), TransportError> {
        let limit = self.dialer.party().limits.progress_timeout();
        loop {
            let told = self.progress.borrow_and_update().clone();
            match told.end {
                Some(Err(error)) => {
                    self.broken = true;
                    return Err(error.at(stage));
                }
                Some(Ok(_)) if stage != Stage::Finish => {
                    self.broken = true;
                    let text = "the peer says that the flight is done, before its end";
                    return Err(TransportError::new(Kind::Bug, stage, text));
                }
                _ if enough(&told) => return Ok(()),
                _ => {}
            }
            let (kind, text) = match timeout(limit, self.progress.changed()).await {
                Ok(Ok(())) => continue,
                Ok(Err(_)) => (Kind::Bug, "the task that hears confirmations has gone".to_owned()),
                Err(_) => {
                    let waiting = self.stats.bytes.saturating_sub(told.taken_bytes);
                    let ms = limit.as_millis();
                    let text = format!("nothing confirmed for {ms} ms, with {waiting} bytes outstanding");
                    (Kind::Unavailable, text)
                }
            };
            self.broken = true;
            return Err(TransportError::new(kind, Stage::Acknowledge, text));
        }
    }

    /// Ends the flight: returns when the receiver has confirmed that every slice landed, verified and
    /// exactly once (I7). After an error the blocks may not be taken to be at the receiver.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] where slices were missing, doubled or damaged; else as for [`Flight::send`].
    pub async fn finish(mut self) -> Result<FlightStats, TransportError> {
        self.unbroken(Stage::Finish)?;
        self.flush().await?;
        self.write(Header::new(FrameKind::Finish, 0, 0, self.stats.slices), &[], Stage::Finish).await?;
        self.await_progress(Stage::Finish, |told| told.end.is_some()).await?;
        let confirmed = match &self.progress.borrow().end {
            Some(Ok(slices)) => *slices,
            _ => 0,
        };
        if confirmed != self.stats.slices || self.plan.slices_after(self.have_blocks) != confirmed {
            let sent = self.stats.slices;
            let text = format!("{sent} slices were sent, but the peer confirms {confirmed}");
            return Err(TransportError::new(Kind::Bug, Stage::Finish, text));
        }
        let stats = self.stats;
        self.give_back().await;
        Ok(stats)
    }

    async fn give_back(mut self) {
        // The listening task has reported the end and is about to return. This waits for that moment.
        if let Ok(Ok(Some(reader))) = timeout(LAST_WORDS, &mut self.reading).await {
            let writer = std::mem::replace(&mut self.connection, Box::new(tokio::io::sink()));
            self.dialer.give_back(&self.peer, Connection { reader, writer });
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.reading.abort();
    }
}

impl std::fmt::Debug for Flight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flight").field("peer", &self.peer).field("stats", &self.stats).finish_non_exhaustive()
    }
}
