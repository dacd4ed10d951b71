//! One publisher's cache, under the publisher's own names.
//!
//! A block is held from the moment it is announced, but found by tokens only once it has a *place*: a context and a
//! key there. Its parent gives it that; what comes before its parent waits with its tokens. So removals need no
//! special care: a block that left while it waited is simply not there when its place becomes known.

use baton_events::hash::Rolling;
use baton_events::{Batch, Change, Event, ExtraKey, Medium, RemovedBlocks, Source, StoredBlocks};
use baton_types::Tier;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry as Slot;
use std::hash::BuildHasher as _;

use super::orphans::{Orphan, Orphans};
use super::prefix::MEDIA;
use super::table::{ContextId, Tables};
use super::{Context, Counts, IndexLimits, Position, StreamId};
use crate::contract::Registration;

/// Where a chain of blocks lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(u16);

impl Place {
    /// Contexts there can be.
    pub(super) const CONTEXTS_MAX: u16 = u16::MAX - 1;
    /// Not known yet: the parent is missing.
    pub(crate) const UNKNOWN: Self = Self(u16::MAX);
    /// Nowhere, nor anything below it: tokens alone do not name it.
    pub(crate) const NOWHERE: Self = Self(u16::MAX - 1);

    /// A context: of the tables, or of a snapshot that is on its way into them.
    pub(crate) const fn in_context(id: ContextId) -> Self {
        Self(id.0)
    }

    pub(crate) fn context(self) -> Option<ContextId> {
        (self.0 < Self::CONTEXTS_MAX).then_some(ContextId(self.0))
    }
}

/// A block under one of the publisher's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Its name in its context, if it has one.
    pub(crate) key: u64,
    pub(crate) place: Place,
    /// Copies in each medium; never all zero.
    pub(crate) held: [u16; MEDIA],
}

impl Entry {
    fn at(&self) -> Option<(ContextId, u64)> {
        self.place.context().map(|id| (id, self.key))
    }
}

/// Where the next block of a chain goes on.
#[derive(Clone, Debug)]
struct Start {
    place: Place,
    chain: Rolling,
}

/// Blocks on their way to their places.
struct Row {
    orphan: Orphan,
    start: Start,
    /// The medium in which they were announced just now; `None` for those that waited.
    medium: Option<usize>,
}

/// One publisher's cache.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) id: StreamId,
    pub(crate) registration: Registration,
    pub(crate) position: Option<Position>,
    names: HashMap<u64, Entry>,
    orphans: Orphans,
    counts: Counts,
    seed: u64,
    max_blocks: usize,
}

impl Stream {
    pub(super) fn new(id: StreamId, registration: Registration, limits: &IndexLimits) -> Self {
        Self {
            id,
            registration,
            position: None,
            names: HashMap::new(),
            orphans: Orphans::new(limits.max_orphans),
            counts: Counts::default(),
            seed: limits.seed,
            max_blocks: limits.max_blocks,
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        Counts { blocks: self.names.len() as u64, orphans: self.orphans.blocks() as u64, ..self.counts }
    }

    /// Every block, in no particular order.
    pub(crate) fn entries(&self) -> impl ExactSizeIterator<Item = (u64, &Entry)> {
        self.names.iter().map(|(name, entry)| (*name, entry))
    }

    /// The media that hold a block of this name, if it may be one of the context.
    ///
    /// A block without a known context counts in the context that the publisher was registered with.
    pub(super) fn held(
        &self,
        name: u64,
        context: Option<ContextId>,
        asked: &Context,
    ) -> Option<[bool; MEDIA]> {
        let entry = self.names.get(&name)?;
        let meant = match entry.place.context() {
            Some(id) => Some(id) == context,
            None => asked.lora == self.registration.lora && asked.salt == self.registration.salt,
        };
        meant.then(|| entry.held.map(|copies| copies > 0))
    }

    pub(super) fn clear(&mut self, tables: &mut Tables) {
        for medium in 0..MEDIA {
            self.clear_medium(medium, tables);
        }
        self.names = HashMap::new();
        self.orphans.clear();
        self.position = None;
    }

    fn clear_medium(&mut self, medium: usize, tables: &mut Tables) {
        let id = self.id;
        self.names.retain(|_, entry| {
            if std::mem::take(&mut entry.held[medium]) > 0
                && let Some(at) = entry.at()
            {
                tables.withdraw(at, id, medium);
            }
            entry.held != [0; MEDIA]
        });
    }

    pub(super) fn apply(&mut self, batch: &Batch, tables: &mut Tables) {
        batch.events.iter().for_each(|event| self.event(event, tables));
        self.position = Some(Position { sequence: batch.sequence, time_us: batch.time_us });
    }

    fn event(&mut self, event: &Event, tables: &mut Tables) {
        let source = event.source.as_deref();
        self.counts.events += 1;
        if source.is_some_and(|source| self.is_anothers(source)) {
            self.counts.elsewhere += 1;
            return;
        }
        match &event.change {
            Change::Stored(stored) => self.stored(stored, source, tables),
            Change::Removed(removed) => self.removed(removed, tables),
            Change::Cleared(None) => {
                let position = self.position;
                self.clear(tables);
                self.position = position;
            }
            Change::Cleared(Some(medium)) => {
                if let Some(medium) = own_medium(Some(medium)) {
                    self.clear_medium(medium, tables);
                }
            }
            Change::Unknown(_) => {}
        }
    }

    /// Whether an event concerns another tenant's or model's cache.
    fn is_anothers(&self, source: &Source) -> bool {
        let other = |told: &Option<String>, ours: &str| told.as_ref().is_some_and(|told| told != ours);
        other(&source.tenant, &self.registration.tenant) || other(&source.model, &self.registration.model)
    }

    fn stored(&mut self, stored: &StoredBlocks, source: Option<&Source>, tables: &mut Tables) {
        let blocks = stored.hashes.len();
        let full = |kind: &String| kind.contains("full") || kind.contains("mla");
        let counts = stored.group.unwrap_or(0) == 0 && stored.attention.as_ref().is_none_or(full);
        let Some(medium) = own_medium(stored.medium.as_ref()).filter(|_| counts) else {
            self.counts.elsewhere += blocks as u64;
            return;
        };
        let names: Vec<u64> = stored.hashes.iter().map(baton_events::EngineHash::low64).collect();
        if stored.tokens.is_empty() {
            return self.stored_without_tokens(&names, medium, (stored, source), tables);
        }
        let size = self.registration.block_tokens;
        if stored.block_tokens != size || stored.tokens.len() != blocks * size as usize {
            self.counts.odd_size += blocks as u64;
            return;
        }
        let nameable = (0..blocks).find(|at| {
            // The first block's keys at the root choose the context; later ones hide what follows.
            (*at > 0 || stored.parent.is_some()) && salts(stored, *at).next().is_some()
        });
        let parent = stored.parent.map_or(0, |parent| parent.low64());
        let tokens = stored.tokens.clone();
        let orphan = Orphan { parent, names, tokens, nameable: nameable.unwrap_or(blocks) };
        match self.start(stored, source, tables) {
            Some(start) => self.settle(Row { orphan, start, medium: Some(medium) }, tables),
            None => {
                for name in &orphan.names {
                    self.hold(*name, medium, None, tables);
                }
                self.counts.abandoned += self.orphans.park(orphan);
            }
        }
    }

    /// Where an event's first block goes on; `None` if its parent is not known.
    fn start(&self, stored: &StoredBlocks, source: Option<&Source>, tables: &mut Tables) -> Option<Start> {
        let nowhere = Start { place: Place::NOWHERE, chain: Rolling::new(self.seed) };
        match stored.parent {
            Some(parent) => {
                let entry = self.names.get(&parent.low64())?;
                let chain = Rolling::after(self.seed, entry.key);
                (entry.place != Place::UNKNOWN).then_some(Start { place: entry.place, chain })
            }
            None if stored.base_block.unwrap_or(0) > 0 => Some(nowhere),
            None => Some(Start { place: self.root(stored, source, tables), ..nowhere }),
        }
    }

    /// The context of a chain that begins with an event.
    fn root(&self, stored: &StoredBlocks, source: Option<&Source>, tables: &mut Tables) -> Place {
        let mut keys = salts(stored, 0);
        let request = match (keys.next(), keys.next()) {
            (None, _) => None,
            (Some(Some(salt)), None) => Some(salt),
            _ => return Place::NOWHERE,
        };
        let request = request.or_else(|| source.and_then(|source| source.salt.as_deref()));
        let registered = self.registration.salt.as_str();
        let salt = match request {
            None | Some("") => registered.to_owned(),
            Some(request) if registered.is_empty() || registered == request => request.to_owned(),
            Some(request) => format!("{registered}/{request}"),
        };
        let context = Context {
            tenant: self.registration.tenant.clone(),
            model: self.registration.model.clone(),
            lora: stored.lora.as_ref().unwrap_or(&self.registration.lora).clone(),
            block_tokens: self.registration.block_tokens,
            salt,
        };
        match tables.place(context.clone()) {
            Place::NOWHERE => {
                tables.drop_empty();
                tables.place(context)
            }
            place => place,
        }
    }

    /// Names alone: standard hashes are our own keys; others count where the name is known, or by name only.
    fn stored_without_tokens(
        &mut self,
        names: &[u64],
        medium: usize,
        (stored, source): (&StoredBlocks, Option<&Source>),
        tables: &mut Tables,
    ) {
        let standard = source.is_some().then(|| self.root(stored, source, tables));
        for name in names {
            let place = standard.map(|place| (place, *name));
            if place.is_none_or(|(place, _)| place.context().is_none()) {
                self.counts.unnamed += u64::from(!self.names.contains_key(name));
            }
            self.hold(*name, medium, place, tables);
        }
    }

    /// Gives blocks their places, and then whatever waited below them.
    fn settle(&mut self, row: Row, tables: &mut Tables) {
        let mut ready = vec![row];
        while let Some(Row { orphan, mut start, medium }) = ready.pop() {
            if medium.is_none() {
                self.counts.adopted += orphan.names.len() as u64;
            }
            let size = self.registration.block_tokens as usize;
            for (at, (name, tokens)) in orphan.names.iter().zip(orphan.tokens.chunks_exact(size)).enumerate()
            {
                if at >= orphan.nameable {
                    start.place = Place::NOWHERE;
                }
                self.counts.unnamed += u64::from(start.place == Place::NOWHERE);
                let place = Some((start.place, start.chain.push(tokens)));
                match medium {
                    Some(medium) => self.hold(*name, medium, place, tables),
                    None => self.give_place(*name, place, tables),
                }
                let below = self.orphans.take(*name).into_iter();
                ready.extend(below.map(|orphan| Row { orphan, start: start.clone(), medium: None }));
            }
        }
    }

    /// One more copy of a block, at a place if it is known.
    fn hold(&mut self, name: u64, medium: usize, place: Option<(Place, u64)>, tables: &mut Tables) {
        let full = self.names.len() >= self.max_blocks;
        match self.names.entry(name) {
            Slot::Vacant(_) if full => {
                self.counts.over_capacity += 1;
                return;
            }
            Slot::Vacant(slot) => {
                slot.insert(Entry { key: 0, place: Place::UNKNOWN, held: [0; MEDIA] });
            }
            Slot::Occupied(_) => {}
        }
        self.give_place(name, place, tables);
        let Some(entry) = self.names.get_mut(&name) else { return };
        let first = entry.held[medium] == 0;
        entry.held[medium] = entry.held[medium].saturating_add(1);
        if let Some(at) = entry.at().filter(|_| first) {
            tables.publish(at, self.id, medium);
        }
    }

    /// Publishes the place of a block that had none to the tables. A block with a place keeps it.
    fn give_place(&mut self, name: u64, place: Option<(Place, u64)>, tables: &mut Tables) {
        let Some(entry) = self.names.get_mut(&name) else { return };
        let Some((place, key)) = place.filter(|_| entry.place == Place::UNKNOWN) else { return };
        (entry.place, entry.key) = (place, key);
        let held = (0..MEDIA).filter(|medium| entry.held[*medium] > 0);
        if let Some(at) = entry.at() {
            held.for_each(|medium| tables.publish(at, self.id, medium));
        }
    }

    fn removed(&mut self, removed: &RemovedBlocks, tables: &mut Tables) {
        let blocks = removed.hashes.len() as u64;
        let counts = removed.group.unwrap_or(0) == 0;
        let Some(medium) = own_medium(removed.medium.as_ref()).filter(|_| counts) else {
            self.counts.elsewhere += blocks;
            return;
        };
        for hash in &removed.hashes {
            let Slot::Occupied(mut slot) = self.names.entry(hash.low64()) else {
                self.counts.unknown_removed += 1;
                continue;
            };
            let entry = slot.get_mut();
            match entry.held[medium] {
                0 => self.counts.unknown_removed += 1,
                1 => {
                    entry.held[medium] = 0;
                    if let Some(at) = entry.at() {
                        tables.withdraw(at, self.id, medium);
                    }
                }
                _ => entry.held[medium] -= 1,
            }
            if slot.get().held == [0; MEDIA] {
                slot.remove();
            }
        }
    }

    /// Puts entries back, whose places are among `places`.
    ///
    /// Millions of them come: each map is filled in the order of its buckets, which walks through memory once
    /// instead of jumping about in it.
    pub(super) fn restore(
        &mut self,
        places: &[Place],
        entries: impl ExactSizeIterator<Item = (u64, Entry)>,
        tables: &mut Tables,
    ) {
        let room = self.max_blocks.saturating_sub(self.names.len());
        self.counts.over_capacity += entries.len().saturating_sub(room) as u64;
        let placed = |(name, mut entry): (u64, Entry)| {
            if let Some(ContextId(at)) = entry.place.context() {
                entry.place = places.get(usize::from(at)).copied().unwrap_or(Place::NOWHERE);
            }
            (name, entry)
        };
        let mut all: Vec<(u64, Entry)> = entries.take(room).map(placed).collect();
        self.names.reserve(all.len());
        let names = &self.names;
        all.sort_unstable_by_key(|(name, _)| bucket(names, *name));
        // A name that comes twice counts once.
        all.retain(|(name, entry)| entry.held != [0; MEDIA] && self.names.try_insert(*name, *entry).is_ok());
        if let [place] = places
            && let Some(id) = place.context()
        {
            tables.reserve(id, all.len());
        }
        all.sort_unstable_by_key(|(_, entry)| entry.at().map(|at| tables.bucket(at)));
        for (_, entry) in all {
            let held = (0..MEDIA).filter(|medium| entry.held[*medium] > 0);
            if let Some(at) = entry.at() {
                held.for_each(|medium| tables.publish(at, self.id, medium));
            }
        }
    }

    pub(super) fn check(&self, limits: &IndexLimits) -> Result<(), String> {
        let key = self.registration.key();
        if self.names.len() > limits.max_blocks {
            return Err(format!("{key}: {} blocks, at most {}", self.names.len(), limits.max_blocks));
        }
        let empty = self.names.values().filter(|entry| entry.held == [0; MEDIA]).count();
        if empty > 0 {
            return Err(format!("{key}: {empty} blocks are listed and held nowhere"));
        }
        self.orphans.check().map_err(|e| format!("{key}: {e}"))
    }

    /// Publishes all blocks to the tables, as the audit needs.
    pub(super) fn publish_all(&self, tables: &mut Tables) {
        for entry in self.names.values() {
            let held = (0..MEDIA).filter(|medium| entry.held[*medium] > 0);
            if let Some(at) = entry.at() {
                held.for_each(|medium| tables.publish(at, self.id, medium));
            }
        }
    }
}

/// The bucket in which a map looks for a name first. It only serves to sort names in the order of memory.
pub(super) fn bucket<T>(map: &HashMap<u64, T>, name: u64) -> u64 {
    let buckets = (map.capacity() as u64 * 8 / 7).next_power_of_two();
    map.hasher().hash_one(name) & (buckets - 1)
}

/// The further inputs of a block's hash besides tokens and adapter: each is a salt, or `None` for any other key.
fn salts(stored: &StoredBlocks, block: usize) -> impl Iterator<Item = Option<&str>> {
    let extra = stored.extra.iter().filter(move |extra| extra.block == block);
    let lora = stored.lora.as_deref();
    extra.flat_map(|extra| &extra.keys).filter_map(move |key| match key {
        ExtraKey::Text(text) if Some(text.as_str()) == lora => None,
        ExtraKey::Text(text) => Some(Some(text.as_str())),
        ExtraKey::List(parts) => match parts.as_slice() {
            [ExtraKey::Text(tag), ExtraKey::Text(salt)] if tag == "cache_salt" => Some(Some(salt.as_str())),
            [ExtraKey::Text(tag), ..] if tag.starts_with("lora") => None,
            _ => Some(None),
        },
        ExtraKey::Bytes(_) | ExtraKey::Number(_) => Some(None),
    })
}

/// The publisher's own medium; one that names none means its device.
fn own_medium(medium: Option<&Medium>) -> Option<usize> {
    medium.map_or(Some(Tier::Hbm), Medium::tier).map(Tier::index)
}
