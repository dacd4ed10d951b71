//! The rules of legs over one flat list, searched for every question: slow, and plain to see.

use alloc::vec::Vec;

use baton_types::{FetchPlan, RequestId};

use super::CONFIG;
use crate::{Effect, Input, LegFailure, LegHoldings, STRANDED_LEASE_US, Work};

#[derive(Clone, Copy, Debug, PartialEq)]
enum NaiveLegState {
    Queued,
    Loading,
    Computing,
    Held,
    WaitingForRoom,
    Expecting,
    Landed,
    Decoding,
}

/// One leg, with every field that any of its states may have.
#[derive(Clone, Copy, Debug)]
struct Row {
    request: RequestId,
    at: NaiveLegState,
    work: Work,
    stays: bool,
    prefills: bool,
    order: u64,
    fetch: Option<FetchPlan>,
    fetches: bool,
    waits: bool,
    cached_blocks: u32,
    failed_us: Option<u64>,
    offered: bool,
}

impl Row {
    fn new(request: RequestId, work: Work, at: NaiveLegState) -> Self {
        Self {
            request,
            at,
            work,
            stays: true,
            prefills: false,
            order: 0,
            fetch: None,
            fetches: false,
            waits: false,
            cached_blocks: 0,
            failed_us: None,
            offered: false,
        }
    }

    fn cached_tokens(&self) -> u64 {
        // What is to be fetched counts as here until it is clear that it is not.
        let fetched = self.fetch.map_or(0, |plan| plan.blocks);
        let cached_tokens = u64::from(self.cached_blocks.max(fetched)) * 16;
        if cached_tokens < self.work.prompt_tokens { cached_tokens } else { self.work.prompt_tokens - 1 }
    }

    fn open(&self) -> Effect {
        let room_tokens = if self.stays { u64::from(self.work.room_tokens) } else { 0 };
        let (mut prompt_blocks, mut blocks) = (0, 0);
        while prompt_blocks * 16 < self.work.prompt_tokens {
            prompt_blocks += 1;
        }
        while blocks * 16 < room_tokens {
            blocks += 1;
        }
        let all = if prompt_blocks + blocks < 100 { prompt_blocks + blocks } else { 100 };
        let room_blocks = all - u64::from(self.work.named_blocks).min(all);
        Effect::Open { request: self.request, room_blocks: u32::try_from(room_blocks).expect("small") }
    }

    fn held(&self) -> LegHoldings {
        let engine =
            [NaiveLegState::Computing, NaiveLegState::Held, NaiveLegState::Decoding].contains(&self.at);
        LegHoldings {
            blocks: ![NaiveLegState::Queued, NaiveLegState::WaitingForRoom].contains(&self.at),
            engine,
        }
    }

    fn closed(&self) -> Effect {
        Effect::Close { request: self.request, held: self.held() }
    }
}

/// All legs, in order of arrival here.
#[derive(Default)]
pub(super) struct Naive(Vec<Row>);

impl Naive {
    fn find(&mut self, request: RequestId) -> Option<&mut Row> {
        self.0.iter_mut().find(|row| row.request == request)
    }

    fn drop_leg(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        effects.extend(self.0.iter().find(|row| row.request == request).map(Row::closed));
        self.0.retain(|row| row.request != request);
    }

    fn come(&mut self, row: Row, effects: &mut Vec<Effect>) {
        let needed_blocks = row.work.prompt_tokens.div_ceil(16);
        if needed_blocks > 100 {
            effects.push(Effect::Fail { request: row.request, why: LegFailure::TooLarge { needed_blocks } });
            effects.push(row.closed());
            return;
        }
        if row.at == NaiveLegState::WaitingForRoom {
            // A leg that is tried again is tried after those that waited before it.
            if !self.waits(true) {
                effects.push(row.open());
            }
        }
        self.0.push(row);
    }

    /// Computes a prefill that waits for nothing.
    fn settle(row: &mut Row, effects: &mut Vec<Effect>) {
        if row.at == NaiveLegState::Loading && !row.waits && !row.fetches {
            let (request, have_blocks) = (row.request, row.cached_blocks);
            if let Some(plan) = row.fetch.filter(|plan| plan.blocks > have_blocks) {
                row.fetches = true;
                effects.push(Effect::Fetch { request, have_blocks, plan });
                return;
            }
            if row.fetch.take().is_some() {
                effects.push(Effect::Fetched { request, ok: true });
            }
            row.at = NaiveLegState::Computing;
            effects.push(Effect::Compute { request: row.request, cached_tokens: row.cached_tokens() });
        }
    }

    fn open_next(&self, effects: &mut Vec<Effect>) {
        let open = self
            .0
            .iter()
            .filter(|row| row.at == NaiveLegState::Loading || row.at == NaiveLegState::Computing);
        let tokens: u64 = open.map(|row| row.work.prompt_tokens - row.cached_tokens()).sum();
        let mut queued: Vec<&Row> = self.0.iter().filter(|row| row.at == NaiveLegState::Queued).collect();
        // A stable sort: arrival decides among equals.
        queued.sort_by_key(|row| row.order);
        if tokens < CONFIG.ahead_tokens {
            effects.extend(queued.first().map(|row| row.open()));
        }
    }

    fn opened(row: &mut Row, cached_blocks: u32, waits: bool, effects: &mut Vec<Effect>) {
        let request = row.request;
        if row.at == NaiveLegState::WaitingForRoom {
            row.at = NaiveLegState::Expecting;
            effects.push(Effect::Admit { request });
        } else if row.at == NaiveLegState::Queued {
            (row.at, row.cached_blocks, row.waits) = (NaiveLegState::Loading, cached_blocks, waits);
            Self::settle(row, effects);
        }
    }

    fn load(
        &mut self,
        request: RequestId,
        fetches: bool,
        effects: &mut Vec<Effect>,
        change: impl FnOnce(&mut Row, &mut Vec<Effect>),
    ) {
        let loads = |row: &&mut Row| row.at == NaiveLegState::Loading && row.fetches == fetches;
        if let Some(row) = self.find(request).filter(loads) {
            change(row, effects);
            Self::settle(row, effects);
        }
    }

    fn waits(&self, offered: bool) -> bool {
        self.0.iter().any(|row| row.at == NaiveLegState::WaitingForRoom && row.offered == offered)
    }

    fn offered(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        let Some(row) = self.find(request) else { return };
        match row.at {
            NaiveLegState::Expecting => row.offered = true,
            NaiveLegState::WaitingForRoom if !row.offered => {
                row.offered = true;
                effects.push(row.open());
            }
            _ => {}
        }
    }

    fn withdrawn(&mut self, request: RequestId, to: RequestId, effects: &mut Vec<Effect>) {
        if let Some(at) = self.0.iter().position(|row| row.request == request)
            && self.0[at].at == NaiveLegState::Expecting
        {
            let row = self.0.remove(at);
            self.0.push(Row { at: NaiveLegState::WaitingForRoom, ..row });
        }
        let row = self.find(to).filter(|row| row.at == NaiveLegState::WaitingForRoom);
        effects.extend(row.map(|row| row.open()));
    }

    fn no_room(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        if self.find(request).is_some_and(|row| row.at == NaiveLegState::WaitingForRoom && row.offered) {
            let lent = self.0.iter().filter(|row| row.at == NaiveLegState::Expecting && !row.offered);
            let youngest = lent.map(|row| row.request).max();
            effects.extend(youngest.map(|from| Effect::Withdraw { request: from, to: request }));
        }
        let others = self.0.iter().any(|row| row.request != request && row.held().blocks);
        if !others && self.find(request).is_some_and(|row| row.at == NaiveLegState::Queued) {
            effects.push(Effect::Fail { request, why: LegFailure::NoRoom });
            self.drop_leg(request, effects);
        }
    }

    fn not_grown(&mut self, request: RequestId, blocks: u32, effects: &mut Vec<Effect>) {
        if blocks > 1 {
            return self.starved(request, 1, effects);
        }
        // A leg that is leaving gives nothing. A leg older than the starved one is spared.
        let gives = |row: &&Row| row.held().blocks && (row.stays || !row.prefills);
        let youngest = self.0.iter().filter(gives).map(|row| row.request).max().unwrap_or(request);
        let victim = if youngest > request { youngest } else { request };
        let others = self.0.iter().any(|row| row.request != victim && row.held().blocks);
        effects.push(Effect::Fail {
            request: victim,
            why: if others { LegFailure::GaveWay } else { LegFailure::NoRoom },
        });
        self.drop_leg(victim, effects);
        self.starved(request, 4, effects);
    }

    fn starved(&mut self, request: RequestId, blocks: u32, effects: &mut Vec<Effect>) {
        if self.find(request).is_some_and(|row| row.at == NaiveLegState::Decoding) {
            effects.push(Effect::Grow { request, blocks });
        }
    }

    fn start_decode(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        let Some(row) = self.find(request) else { return };
        if row.at == NaiveLegState::Landed {
            row.at = NaiveLegState::Decoding;
            effects.push(Effect::Decode { request });
        } else if row.at != NaiveLegState::Decoding {
            effects.push(Effect::Fail { request, why: LegFailure::NotReady });
            self.drop_leg(request, effects);
        }
    }

    fn handed_off(&mut self, request: RequestId, ok: bool, now_us: u64, effects: &mut Vec<Effect>) {
        let Some(row) = self.find(request) else { return };
        let leaves = row.at == NaiveLegState::Held && row.failed_us.is_none();
        if leaves && ok {
            self.drop_leg(request, effects);
        } else if (leaves || row.at == NaiveLegState::Computing) && !ok {
            row.failed_us = Some(now_us);
        }
    }

    pub(super) fn step(&mut self, input: Input, effects: &mut Vec<Effect>) {
        match input {
            Input::Prefill { request, work, stays, mut fetch, order } => {
                if let Some(plan) = fetch.as_mut().filter(|plan| plan.blocks > work.named_blocks) {
                    plan.blocks = work.named_blocks;
                }
                let row = Row {
                    stays,
                    fetch,
                    order,
                    prefills: true,
                    ..Row::new(request, work, NaiveLegState::Queued)
                };
                self.come(row, effects);
            }
            Input::Expect { request, work } => {
                self.come(Row::new(request, work, NaiveLegState::WaitingForRoom), effects)
            }
            Input::Offered { request } => self.offered(request, effects),
            Input::Withdrawn { request, to } => self.withdrawn(request, to, effects),
            Input::RoomFreed => {
                let offered = self.waits(true);
                let waiting = self.0.iter().filter(|row| row.at == NaiveLegState::WaitingForRoom);
                effects.extend(waiting.filter(|row| row.offered == offered).map(Row::open));
            }
            Input::OpenNext => self.open_next(effects),
            Input::Opened { request, cached_blocks, waits } => {
                if let Some(row) = self.find(request) {
                    Self::opened(row, cached_blocks, waits, effects);
                }
            }
            Input::NoRoom { request } => self.no_room(request, effects),
            Input::FetchEnded { request, cached_blocks } => {
                self.load(request, true, effects, |row, effects| {
                    effects.push(Effect::Fetched { request, ok: cached_blocks > row.cached_blocks });
                    (row.fetches, row.fetch, row.cached_blocks) = (false, None, cached_blocks);
                })
            }
            Input::Cached { request, cached_blocks, waits } => {
                self.load(request, false, effects, |row, _| {
                    (row.cached_blocks, row.waits) = (cached_blocks, waits);
                })
            }
            Input::Computed { request } => {
                if let Some(row) = self.find(request).filter(|row| row.at == NaiveLegState::Computing) {
                    row.at = if row.stays { NaiveLegState::Decoding } else { NaiveLegState::Held };
                    effects.push(Effect::Seal { request });
                }
            }
            Input::HandedOff { request, ok, now_us } => self.handed_off(request, ok, now_us, effects),
            Input::HandOff { request } => {
                match self.find(request).filter(|row| row.at == NaiveLegState::Held) {
                    Some(row) => {
                        row.failed_us = None;
                        effects.push(Effect::Send { request });
                    }
                    None => effects.push(Effect::Fail { request, why: LegFailure::NothingToSend }),
                }
            }
            Input::Landed { request } => {
                if let Some(row) = self.find(request).filter(|row| row.at == NaiveLegState::Expecting) {
                    row.at = NaiveLegState::Landed;
                    effects.push(Effect::Seal { request });
                }
            }
            Input::StartDecode { request } => self.start_decode(request, effects),
            Input::Starved { request } => self.starved(request, 4, effects),
            Input::NotGrown { request, blocks } => self.not_grown(request, blocks, effects),
            Input::Ended { request } | Input::Release { request } => self.drop_leg(request, effects),
            Input::Tick { now_us } => {
                let over = |row: &&Row| {
                    let since_us = row.failed_us.filter(|_| row.at == NaiveLegState::Held);
                    since_us.is_some_and(|since_us| now_us > since_us + STRANDED_LEASE_US)
                };
                let mut gone: Vec<RequestId> = self.0.iter().filter(over).map(|row| row.request).collect();
                gone.sort_unstable();
                gone.iter().for_each(|request| self.drop_leg(*request, effects));
            }
        }
    }
}
