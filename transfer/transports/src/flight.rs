//! The sending side of a hand-off.

mod hearing;
mod offers;

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use crate::carrier::Boarding;
use crate::dialer::{Dialer, Leased};
use crate::error::{Kind, Stage, TransportError};
use crate::frame::{FrameKind, Header};
use crate::handshake::{Connection, Party};
use crate::message::encode_offer;
use crate::receiver::{PeerAddress, Plan, SliceAt, Ticket};
use crate::ring::Ring;
use crate::stats::{Medium, Place, add};
use crate::wire::{ReadHalf, WriteHalf, write_frame};
use hearing::{Progress, listen};
use offers::Offers;

/// Slices sent but not confirmed, so that the confirmations always fit the stream's own buffers.
const WINDOW_SLICES_MAX: u32 = 1024;
/// How often the receiver is told of a flight that goes by the engine.
const TELL_EVERY: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(32);
/// How long the receiver's own words are waited for when a write has failed.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// What a finished flight moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlightStats {
    /// Slices sent, all confirmed.
    pub slices: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Slices that went through shared memory.
    pub ring_slices: u64,
    /// Offers that the receiver put off before it took the flight.
    pub postponed_offers: u64,
    /// From the start of the offer to the last confirmation.
    pub duration_us: u64,
}

/// One hand-off on its way out. Dropped before [`Flight::finish`] returns, it is aborted at the receiver.
pub struct Flight {
    dialer: Dialer,
    peer: PeerAddress,
    plan: Plan,
    have_blocks: u32,
    writer: WriteHalf,
    medium: Medium,
    ring: Option<Ring>,
    /// The slices go by the transfer engine.
    boarding: Option<Boarding>,
    /// When the receiver last heard of it on the stream.
    told: Instant,
    reading: JoinHandle<Option<ReadHalf>>,
    progress: watch::Receiver<Progress>,
    window_slices: u64,
    stats: FlightStats,
    started: Instant,
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
        ticket: Ticket,
        plan: Plan,
    ) -> Result<Self, TransportError> {
        let started = Self::offer_until_taken(dialer, peer, ticket, plan).await;
        started.inspect_err(|error| dialer.party().counters.failed(error))
    }

    async fn offer_until_taken(
        dialer: &Dialer,
        peer: &PeerAddress,
        ticket: Ticket,
        plan: Plan,
    ) -> Result<Self, TransportError> {
        let party = dialer.party();
        plan.check(&party.limits, Stage::Offer)?;
        let place = Place::take(&party.counters, |all| &all.sending_flights, party.limits.flights);
        let place = place.ok_or_else(|| {
            let text = format!("{} flights are on their way already", party.limits.flights);
            TransportError::new(Kind::Retry, Stage::Offer, text)
        })?;
        let started = Instant::now();
        let mut offers = Offers {
            dialer,
            peer,
            offer: encode_offer(ticket, &plan, window_slices(party, &plan)),
            postponed: 0,
            last_postponed: None,
        };
        let deadline = started + party.limits.offer_timeout();
        let (leased, have_blocks, berth) = match timeout_at(deadline, offers.run(deadline)).await {
            Ok(answered) => answered?,
            Err(_) => {
                let text = format!("no answer to the offer for {} ms", party.limits.offer_timeout_ms);
                let silent = TransportError::new(Kind::Unavailable, Stage::Offer, text);
                return Err(offers.last_postponed.unwrap_or(silent));
            }
        };
        let postponed = offers.postponed;
        if have_blocks > plan.blocks {
            let text = format!("the peer says that it holds {have_blocks} of {} blocks", plan.blocks);
            return Err(TransportError::new(Kind::Bug, Stage::Offer, text));
        }
        let carrier = party.carrier.as_ref();
        let boarding = carrier.zip(berth).and_then(|(carrier, to)| carrier.board(to, &plan, have_blocks));
        let mut flight = Self::over(dialer, peer, leased, (plan, have_blocks, postponed, started, place));
        flight.boarding = boarding;
        Ok(flight)
    }

    fn over(
        dialer: &Dialer,
        peer: &PeerAddress,
        leased: Leased,
        about: (Plan, u32, u64, Instant, Place),
    ) -> Self {
        let (plan, have_blocks, postponed_offers, started, place) = about;
        let party = dialer.party();
        let Connection { reader, writer, medium, ring } = leased.connection;
        let (told, progress) = watch::channel(Progress::default());
        Self {
            dialer: dialer.clone(),
            peer: peer.clone(),
            plan,
            have_blocks,
            writer,
            medium,
            ring,
            boarding: None,
            told: Instant::now(),
            reading: tokio::spawn(listen(party.clone(), reader, told)),
            progress,
            window_slices: u64::from(window_slices(party, &plan)),
            stats: FlightStats { slices: 0, bytes: 0, ring_slices: 0, postponed_offers, duration_us: 0 },
            started,
            broken: false,
            _permit: leased.permit,
            _place: place,
        }
    }

    /// Leading blocks that the receiver holds: they must not be sent.
    pub fn have_blocks(&self) -> u32 {
        self.have_blocks
    }

    /// Does this flight go through shared memory?
    pub fn medium(&self) -> Medium {
        match (&self.boarding, &self.ring) {
            (Some(_), _) => Medium::Engine,
            (None, Some(_)) => Medium::SharedMemory,
            (None, None) => self.medium,
        }
    }

    /// Sends one slice; waits while a window of slices is unconfirmed. Positions may come in any order, each
    /// once; the receiver judges. A call that is dropped midway breaks the flight.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for a slice that the plan does not have: the flight may go on without it. Any other
    /// error ends the flight, with the receiver's reason where it gave one.
    pub async fn send(&mut self, at: SliceAt, bytes: Bytes) -> Result<(), TransportError> {
        self.check(at, &bytes)?;
        let sent = self.send_checked(at, &bytes).await;
        sent.inspect_err(|error| self.dialer.party().counters.failed(error))
    }

    /// Lets slices go that wait to leave together: for a sender that has no more for the moment.
    ///
    /// # Errors
    /// As for [`Flight::send`].
    pub async fn flush(&mut self) -> Result<(), TransportError> {
        let Some(boarding) = &mut self.boarding else { return Ok(()) };
        let left = boarding.leave().await;
        let left = match left {
            Ok(()) if self.told.elapsed() >= TELL_EVERY => {
                let header = Header::new(FrameKind::Moved, 0, 0, self.stats.slices).seal(&[]);
                self.told = Instant::now();
                self.write(&header, &[], Stage::Send).await
            }
            left => left,
        };
        left.inspect_err(|error| self.fails(error))
    }

    /// Nothing may follow; the failure is counted.
    fn fails(&mut self, error: &TransportError) {
        self.broken = true;
        self.dialer.party().counters.failed(error);
    }

    /// Tells the receiver's program something besides the KV: once at most, before the first slice.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for a note over the limit `note_bytes`; any other error ends the flight.
    pub async fn note(&mut self, bytes: &[u8]) -> Result<(), TransportError> {
        let most = self.dialer.party().limits.note_bytes;
        if u32::try_from(bytes.len()).is_ok_and(|bytes| bytes <= most) {
            let header = Header::new(FrameKind::Note, 0, 0, 0).seal(bytes);
            let told = self.write(&header, bytes, Stage::Send).await;
            return told.inspect_err(|error| self.dialer.party().counters.failed(error));
        }
        let text = format!("a note of {} bytes is over the limit note_bytes {most}", bytes.len());
        Err(TransportError::new(Kind::Invalid, Stage::Send, text))
    }

    fn check(&self, at: SliceAt, bytes: &Bytes) -> Result<(), TransportError> {
        let Plan { blocks, layers, layer_bytes } = self.plan;
        if at.block < blocks && at.layer < layers && u32::try_from(bytes.len()) == Ok(layer_bytes) {
            return Ok(());
        }
        let (block, layer, size) = (at.block, at.layer, bytes.len());
        let text = format!("slice ({block}, {layer}) of {size} bytes is not in the plan {:?}", self.plan);
        Err(TransportError::new(Kind::Invalid, Stage::Send, text))
    }

    async fn send_checked(&mut self, at: SliceAt, bytes: &Bytes) -> Result<(), TransportError> {
        if self.broken {
            let text = "an earlier call of this flight failed or was dropped midway";
            return Err(TransportError::new(Kind::Closed, Stage::Send, text));
        }
        if self.boarding.is_some() {
            return self.board(at, bytes).await;
        }
        let room_at = (self.stats.slices + 1).saturating_sub(self.window_slices);
        self.await_progress(Stage::Send, |told| told.confirmed >= room_at).await?;
        let mut header = Header::new(FrameKind::Slice, at.block, at.layer, self.stats.slices);
        header.by_ring = self.put_into_ring(bytes);
        let header = header.seal(bytes);
        let body = if header.by_ring { &[][..] } else { &bytes[..] };
        self.write(&header, body, Stage::Send).await?;
        self.stats.ring_slices += u64::from(header.by_ring);
        self.count_slice(if header.by_ring { Medium::SharedMemory } else { self.medium });
        Ok(())
    }

    async fn board(&mut self, at: SliceAt, bytes: &Bytes) -> Result<(), TransportError> {
        let Some(boarding) = &mut self.boarding else { return Ok(()) };
        if at.block < self.have_blocks {
            let (block, held) = (at.block, self.have_blocks);
            let text = format!("block {block}: the receiver holds the first {held} blocks already");
            return Err(TransportError::new(Kind::Corrupt, Stage::Send, text));
        }
        let place = self.plan.place_by_layer(at, self.have_blocks);
        let place = usize::try_from(place).expect("flight_slices bounds it");
        self.broken = true;
        if let Err(error) = boarding.load(place, bytes).await {
            return Err(self.reason(error).await);
        }
        self.broken = false;
        self.count_slice(Medium::Engine);
        Ok(())
    }

    /// The receiver's own words, where it closed the window; else what the engine says.
    async fn reason(&mut self, error: TransportError) -> TransportError {
        if error.kind == Kind::Corrupt {
            return error;
        }
        self.last_words().await.unwrap_or(error)
    }

    fn count_slice(&mut self, medium: Medium) {
        self.dialer.party().counters.sent(medium, u64::from(self.plan.layer_bytes));
        self.stats.slices += 1;
        self.stats.bytes += u64::from(self.plan.layer_bytes);
    }

    /// Is the slice in the ring now? Else it goes over the stream: shared memory may be full.
    fn put_into_ring(&self, bytes: &Bytes) -> bool {
        let Some(ring) = &self.ring else { return false };
        match ring.write(self.stats.slices, bytes) {
            Ok(()) => true,
            Err(error) => {
                self.dialer.party().fall_back(&format!("cannot write into the ring: {error}"));
                false
            }
        }
    }

    async fn write(&mut self, header: &Header, body: &[u8], stage: Stage) -> Result<(), TransportError> {
        let pace = self.dialer.party().limits.progress_timeout();
        self.broken = true;
        match write_frame(&mut self.writer, header, body, pace, stage).await {
            Ok(()) => {
                self.broken = false;
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
                None if told.confirmed > self.stats.slices => {
                    self.broken = true;
                    let (confirmed, sent) = (told.confirmed, self.stats.slices);
                    let text = format!("the peer confirms {confirmed} slices, but {sent} were sent");
                    return Err(TransportError::new(Kind::Bug, stage, text));
                }
                _ if enough(&told) => return Ok(()),
                _ => {}
            }
            let (kind, text) = match timeout(limit, self.progress.changed()).await {
                Ok(Ok(())) => continue,
                Ok(Err(_)) => (Kind::Bug, "the task that hears confirmations has gone".to_owned()),
                Err(_) => {
                    let (waiting, ms) = (self.stats.slices - told.confirmed, limit.as_millis());
                    let text = format!("nothing confirmed for {ms} ms, with {waiting} slices outstanding");
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
        let finished = self.finish_checked().await;
        finished.inspect_err(|error| self.dialer.party().counters.failed(error))?;
        add(&self.dialer.party().counters.sent_flights, 1);
        let stats = self.stats;
        self.give_back().await;
        Ok(stats)
    }

    async fn finish_checked(&mut self) -> Result<(), TransportError> {
        if self.broken {
            let text = "an earlier call of this flight failed or was dropped midway";
            return Err(TransportError::new(Kind::Closed, Stage::Finish, text));
        }
        let body = match &mut self.boarding {
            Some(boarding) => {
                self.broken = true;
                match boarding.arrived().await {
                    Ok(sum) => sum.to_le_bytes().to_vec(),
                    Err(error) => return Err(self.reason(error).await),
                }
            }
            None => Vec::new(),
        };
        let header = Header::new(FrameKind::Finish, 0, 0, self.stats.slices).seal(&body);
        self.write(&header, &body, Stage::Finish).await?;
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
        self.stats.duration_us = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        Ok(())
    }

    async fn give_back(mut self) {
        // The listening task has ended, for it has told the end; this is the moment until it has returned.
        if let Ok(Ok(Some(reader))) = timeout(LAST_WORDS, &mut self.reading).await {
            let writer = std::mem::replace(&mut self.writer, Box::new(tokio::io::sink()));
            let connection = Connection { reader, writer, medium: self.medium, ring: self.ring.take() };
            self.dialer.give_back(&self.peer, connection);
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

/// How many slices may be unconfirmed: as many as the window's bytes hold, which is the ring's size too.
fn window_slices(party: &Party, plan: &Plan) -> u32 {
    (party.limits.window_bytes / plan.layer_bytes).clamp(1, WINDOW_SLICES_MAX)
}
