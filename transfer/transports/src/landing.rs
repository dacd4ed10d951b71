//! One flight on its way in: which slices have landed, and its one end.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use crate::error::{Kind, Stage, TransportError};
use crate::frame::Header;
use crate::handshake::Party;
use crate::receiver::{Plan, Receiver, Refused, SliceAt, Ticket};
use crate::stats::{Place, add};

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

    /// Takes the flight in, or says why not.
    pub(crate) fn admit(self: &Arc<Self>, ticket: Ticket, plan: Plan) -> Result<Landing, Refused> {
        let limits = &self.party.limits;
        let never = |why: String| Refused { retry: false, why };
        plan.check(limits, Stage::Offer).map_err(|error| never(error.text))?;
        let place = Place::take(&self.party.counters, |all| &all.receiving_flights, limits.flights);
        let place = place.ok_or_else(|| Refused {
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
    ticket: Ticket,
    plan: Plan,
    have_blocks: u32,
    /// One bit a slice, layers of a block side by side.
    landed: Vec<u64>,
    landed_slices: u64,
    noted: bool,
    /// The receiver has accepted and has not been told the end.
    open: bool,
    _place: Place,
}

impl Landing {
    fn new(landings: Arc<Landings>, ticket: Ticket, plan: Plan, place: Place) -> Self {
        Self {
            landings,
            ticket,
            plan,
            have_blocks: 0,
            landed: Vec::new(),
            landed_slices: 0,
            noted: false,
            open: false,
            _place: place,
        }
    }

    fn start_after(&mut self, have_blocks: u32) {
        self.have_blocks = have_blocks;
        let words = self.plan.slices_after(have_blocks).div_ceil(64);
        self.landed = vec![0; usize::try_from(words).expect("flight_slices bounds it")];
    }

    pub(crate) fn have_blocks(&self) -> u32 {
        self.have_blocks
    }

    pub(crate) fn landed_slices(&self) -> u64 {
        self.landed_slices
    }

    /// Slices that the sender is to send.
    pub(crate) fn slices(&self) -> u64 {
        self.plan.slices_after(self.have_blocks)
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Is this the header of a slice that is still to come? Asked before its bytes are read.
    pub(crate) fn expect(&self, header: &Header) -> Result<SliceAt, TransportError> {
        let at = SliceAt { block: header.a, layer: header.b };
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
        if header.body_bytes != self.plan.layer_bytes {
            return wrong(format!("{} bytes instead of {}", header.body_bytes, self.plan.layer_bytes));
        }
        if header.c != self.landed_slices {
            return wrong(format!("sent as number {}, came as {}", header.c, self.landed_slices));
        }
        let (word, bit) = self.place_of(at);
        if self.landed[word] & bit != 0 {
            return wrong("came twice".to_owned());
        }
        Ok(at)
    }

    /// The sender's note has come and is verified: only before any slice, and only once.
    pub(crate) fn note(&mut self, bytes: Bytes) -> Result<(), TransportError> {
        if self.landed_slices > 0 || std::mem::replace(&mut self.noted, true) {
            let text = "a note after a slice, or a second one";
            return Err(TransportError::new(Kind::Bug, Stage::Serve, text));
        }
        self.landings.receiver.note(self.ticket, bytes).map_err(ended_by_receiver)
    }

    /// A slice that was expected has come and is verified.
    pub(crate) fn land(&mut self, at: SliceAt, bytes: Bytes) -> Result<(), TransportError> {
        let (word, bit) = self.place_of(at);
        self.landed[word] |= bit;
        self.landed_slices += 1;
        self.landings.receiver.slice(self.ticket, at, bytes).map_err(ended_by_receiver)
    }

    fn place_of(&self, at: SliceAt) -> (usize, u64) {
        let block = u64::from(at.block - self.have_blocks);
        let index = block * u64::from(self.plan.layers) + u64::from(at.layer);
        (usize::try_from(index / 64).expect("flight_slices bounds it"), 1 << (index % 64))
    }

    /// The sender says that all is sent: `told` slices. Completes the flight where that is so.
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
        add(&self.landings.party.counters.received_flights, 1);
        Ok(whole)
    }

    /// Ends the flight. A second end does nothing.
    pub(crate) fn abort(&mut self, why: &str) {
        if std::mem::take(&mut self.open) {
            add(&self.landings.party.counters.aborted_flights, 1);
            self.landings.receiver.abort(self.ticket, why);
        }
    }
}

fn ended_by_receiver(refused: Refused) -> TransportError {
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
