//! One flight on its way in: which slices have landed, and its one end.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use crate::data_plane::{ArrivedPieces, Piece, Stretch};
use crate::error::{Kind, Stage, TransportError};
use crate::handshake::Party;
use crate::receiver::{FlightRefusal, HandoffTicket, Plan, Receiver, SlicePosition};
use crate::stats::Place;

/// The node behind an endpoint, and the flights that it is taking in.
pub(crate) struct Landings {
    pub(crate) party: Arc<Party>,
    pub(crate) receiver: Arc<dyn Receiver>,
    /// Of the flights in progress: request and attempt.
    open: Mutex<BTreeSet<(u64, u32)>>,
}

impl Landings {
    pub(crate) fn new(party: Arc<Party>, receiver: Arc<dyn Receiver>) -> Self {
        Self { party, receiver, open: Mutex::new(BTreeSet::new()) }
    }

    /// Takes the flight in, or says why not. The plan has been checked.
    pub(crate) fn admit(
        self: &Arc<Self>,
        ticket: HandoffTicket,
        plan: Plan,
    ) -> Result<Landing, FlightRefusal> {
        let limits = &self.party.limits;
        let never = |why: String| FlightRefusal { retry: false, why };
        let place = Place::take(&self.party.counters, |all| &all.receiving_flights, limits.flights);
        let place = place.ok_or_else(|| FlightRefusal {
            retry: true,
            why: format!("{} flights are being received already", limits.flights),
        })?;
        if !self.with_open(|open| open.insert((ticket.request, ticket.attempt))) {
            return Err(never(format!("this very attempt is being received already: {ticket:?}")));
        }
        // From here on the entry is the landing's, which takes it out when it goes.
        let mut landing = Landing::new(self.clone(), ticket, plan, place);
        let accepted = self.receiver.offer(ticket, &plan)?;
        landing.open = true;
        if accepted.have_blocks > plan.blocks {
            let why = format!("have_blocks {} is over {} blocks", accepted.have_blocks, plan.blocks);
            landing.abort(&why);
            return Err(never(why));
        }
        landing.start_after(accepted.have_blocks);
        Ok(landing)
    }

    fn with_open<T>(&self, change: impl FnOnce(&mut BTreeSet<(u64, u32)>) -> T) -> T {
        change(&mut self.open.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// An accepted flight. It ends exactly once: completed, aborted, or, when merely dropped, aborted too.
pub(crate) struct Landing {
    landings: Arc<Landings>,
    ticket: HandoffTicket,
    plan: Plan,
    have_blocks: u32,
    /// One bit a slice, layers of a block side by side: announced by the sender.
    announced: Vec<u64>,
    announced_slices: u64,
    /// Of those, the slices that have not landed whole, in order.
    landing: VecDeque<SlicePosition>,
    /// Bytes of the first of them that have landed.
    partial_bytes: u32,
    landed_slices: u64,
    noted: bool,
    /// The receiver has accepted the flight and has not learnt of its end.
    open: bool,
    _place: Place,
}

impl Landing {
    fn new(landings: Arc<Landings>, ticket: HandoffTicket, plan: Plan, place: Place) -> Self {
        Self {
            landings,
            ticket,
            plan,
            have_blocks: 0,
            announced: Vec::new(),
            announced_slices: 0,
            landing: VecDeque::new(),
            partial_bytes: 0,
            landed_slices: 0,
            noted: false,
            open: false,
            _place: place,
        }
    }

    fn start_after(&mut self, have_blocks: u32) {
        self.have_blocks = have_blocks;
        let words = self.plan.slices_after(have_blocks).div_ceil(64);
        self.announced = vec![0; usize::try_from(words).expect("flight_slices bounds it")];
    }

    pub(crate) fn have_blocks(&self) -> u32 {
        self.have_blocks
    }

    /// Slices that the sender is to send.
    pub(crate) fn slices(&self) -> u64 {
        self.plan.slices_after(self.have_blocks)
    }

    /// The ticket under which it comes.
    pub(crate) fn ticket(&self) -> HandoffTicket {
        self.ticket
    }

    /// The pieces that lie in these stretches of the window, in which the slices `begun` begin.
    pub(crate) fn pieces(
        &mut self,
        stretches: &[Stretch],
        begun: &[SlicePosition],
    ) -> Result<Vec<Piece>, TransportError> {
        for at in begun {
            self.announce(*at)?;
        }
        let mut pieces = Vec::with_capacity(begun.len() + 2);
        for stretch in stretches {
            let (mut from, mut left) = (stretch.at, stretch.bytes);
            while left > 0 {
                let piece = self.next_piece(from, left)?;
                pieces.push(piece);
                from += u64::from(piece.bytes);
                left -= u64::from(piece.bytes);
            }
        }
        // Of those that begin here each has a byte here: what is left over has been begun, or is not there.
        if self.landing.len() > usize::from(self.partial_bytes > 0) {
            let text = "more slices are announced than there are bytes for";
            return Err(TransportError::new(Kind::Corrupt, Stage::Serve, text));
        }
        Ok(pieces)
    }

    /// The piece at `from`, no longer than `most`.
    fn next_piece(&mut self, from: u64, most: u64) -> Result<Piece, TransportError> {
        let Some(at) = self.landing.front().copied() else {
            let text = "more bytes came than the slices announced have";
            return Err(TransportError::new(Kind::Corrupt, Stage::Serve, text));
        };
        let offset = self.partial_bytes;
        let rest = self.plan.layer_bytes - offset;
        let bytes = u32::try_from(most).map_or(rest, |most| most.min(rest));
        if bytes == rest {
            self.landing.pop_front();
            self.partial_bytes = 0;
            self.landed_slices += 1;
        } else {
            self.partial_bytes += bytes;
        }
        Ok(Piece { at, offset, bytes, from })
    }

    /// Takes note of a slice that is still to come: inside the plan, not held here, and for the first time.
    fn announce(&mut self, at: SlicePosition) -> Result<(), TransportError> {
        let wrong = |what: String| {
            let text = format!("slice ({}, {}): {what}", at.block, at.layer);
            Err(TransportError::new(Kind::Corrupt, Stage::Serve, text))
        };
        if at.block >= self.plan.blocks || at.layer >= self.plan.layers {
            return wrong(format!("not in the plan {:?}", self.plan));
        }
        if at.block < self.have_blocks {
            return wrong(format!("the receiver holds the first {} blocks already", self.have_blocks));
        }
        let (word, bit) = self.place_of(at);
        if self.announced[word] & bit != 0 {
            return wrong("came twice".to_owned());
        }
        self.announced[word] |= bit;
        self.announced_slices += 1;
        self.landing.push_back(at);
        Ok(())
    }

    /// The sender's note has come and is verified: only before any slice, and only once.
    pub(crate) fn note(&mut self, bytes: Bytes) -> Result<(), TransportError> {
        if self.announced_slices > 0 || std::mem::replace(&mut self.noted, true) {
            let text = "a note after a slice, or a second one";
            return Err(TransportError::new(Kind::Bug, Stage::Serve, text));
        }
        self.landings.receiver.note(self.ticket, bytes).map_err(ended_by_receiver)
    }

    fn place_of(&self, at: SlicePosition) -> (usize, u64) {
        let block = u64::from(at.block - self.have_blocks);
        let index = block * u64::from(self.plan.layers) + u64::from(at.layer);
        (usize::try_from(index / 64).expect("flight_slices bounds it"), 1 << (index % 64))
    }

    /// Completes the flight when the sender reports its end and slice count. Fails unless exactly so many slices have
    /// landed, which must be all slices of the plan.
    pub(crate) fn complete(mut self, told: u64) -> Result<u64, TransportError> {
        let whole = self.plan.slices_after(self.have_blocks);
        if told != self.landed_slices || self.landed_slices != whole {
            let landed = self.landed_slices;
            let text = format!("{landed} of {whole} slices have landed, and the sender says {told}");
            let error = TransportError::new(Kind::Corrupt, Stage::Serve, text);
            self.abort(&error.text);
            return Err(error);
        }
        self.open = false;
        self.landings.receiver.complete(self.ticket);
        Ok(whole)
    }

    /// Ends the flight. A second end does nothing.
    pub(crate) fn abort(&mut self, why: &str) {
        if std::mem::take(&mut self.open) {
            self.landings.receiver.abort(self.ticket, why);
        }
    }
}

/// Copies what has arrived to where it belongs, and verifies there the checksum of what was sent.
pub(crate) fn land(
    receiver: &dyn Receiver,
    ticket: HandoffTicket,
    arrived: &ArrivedPieces,
    sent: u64,
) -> Result<(), TransportError> {
    let landed = receiver.land(ticket, arrived).map_err(ended_by_receiver)?;
    if landed != sent {
        let text = "the checksum over the bytes that landed is not that of the bytes that were sent";
        return Err(TransportError::new(Kind::Corrupt, Stage::Serve, text));
    }
    Ok(())
}

fn ended_by_receiver(refused: FlightRefusal) -> TransportError {
    let text = format!("the receiver ended the flight: {}", refused.why);
    TransportError::new(Kind::Closed, Stage::Serve, text)
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.abort("the endpoint ended the flight: it is shutting down, or the receiver panicked");
        let key = (self.ticket.request, self.ticket.attempt);
        self.landings.with_open(|open| open.remove(&key));
    }
}
