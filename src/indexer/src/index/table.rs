//! The blocks of every context, and who holds each: most have one holder, hot ones have many.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry as Slot;

use super::prefix::MEDIA;
use super::stream::{Place, bucket};
use super::{Context, StreamId};

/// A context while somebody has blocks in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ContextId(pub(crate) u16);

/// One stream's part in a block: how many of its names for the block each medium holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) stream: StreamId,
    pub(super) held: [u8; MEDIA],
}

/// Holders of a block, sorted by stream; never none.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Holders {
    One(Holder),
    Many(Box<[Holder]>),
}

impl Holders {
    fn all(&self) -> &[Holder] {
        match self {
            Self::One(holder) => std::slice::from_ref(holder),
            Self::Many(holders) => holders,
        }
    }

    fn all_mut(&mut self) -> &mut [Holder] {
        match self {
            Self::One(holder) => std::slice::from_mut(holder),
            Self::Many(holders) => holders,
        }
    }

    fn place_of(&self, stream: StreamId) -> Result<usize, usize> {
        self.all().binary_search_by_key(&stream, |holder| holder.stream)
    }

    fn add(&mut self, stream: StreamId, medium: usize) {
        match self.place_of(stream) {
            Ok(at) => {
                let held = &mut self.all_mut()[at].held[medium];
                *held = held.saturating_add(1);
            }
            Err(at) => {
                let mut all = self.all().to_vec();
                let mut holder = Holder { stream, held: [0; MEDIA] };
                holder.held[medium] = 1;
                all.insert(at, holder);
                *self = Self::Many(all.into());
            }
        }
    }

    /// Whether anybody is left.
    fn subtract(&mut self, stream: StreamId, medium: usize) -> bool {
        let Ok(at) = self.place_of(stream) else { return true };
        let holder = &mut self.all_mut()[at];
        holder.held[medium] = holder.held[medium].saturating_sub(1);
        if holder.held != [0; MEDIA] {
            return true;
        }
        let mut rest = self.all().to_vec();
        rest.remove(at);
        match rest.as_slice() {
            [] => return false,
            [one] => *self = Self::One(*one),
            _ => *self = Self::Many(rest.into()),
        }
        true
    }
}

/// The blocks of one context.
#[derive(Debug)]
pub(super) struct Table {
    context: Context,
    blocks: HashMap<u64, Holders>,
}

impl Table {
    /// Holders of a block.
    pub(super) fn holders(&self, key: u64) -> &[Holder] {
        self.blocks.get(&key).map_or(&[], Holders::all)
    }

    /// The media in which a stream holds a block.
    pub(super) fn held(&self, key: u64, stream: StreamId) -> Option<[bool; MEDIA]> {
        let holder = self.holders(key).iter().find(|holder| holder.stream == stream)?;
        Some(holder.held.map(|names| names > 0))
    }
}

/// Every context.
#[derive(Debug)]
pub(crate) struct Tables {
    all: Vec<Option<Table>>,
    by_context: HashMap<Context, ContextId>,
    max_contexts: usize,
}

impl Tables {
    pub(super) fn new(max_contexts: usize) -> Self {
        let max_contexts = max_contexts.min(usize::from(Place::CONTEXTS_MAX));
        Self { all: Vec::new(), by_context: HashMap::new(), max_contexts }
    }

    pub(super) fn id(&self, context: &Context) -> Option<ContextId> {
        self.by_context.get(context).copied()
    }

    pub(super) fn find(&self, context: &Context) -> Option<&Table> {
        self.all.get(usize::from(self.id(context)?.0))?.as_ref()
    }

    pub(super) fn context(&self, id: ContextId) -> Option<&Context> {
        self.all.get(usize::from(id.0))?.as_ref().map(|table| &table.context)
    }

    pub(super) fn sizes(&self) -> impl Iterator<Item = (&Context, usize)> {
        self.all.iter().flatten().map(|table| (&table.context, table.blocks.len()))
    }

    /// The place of a context, made if there is room.
    pub(super) fn place(&mut self, context: Context) -> Place {
        if let Some(id) = self.id(&context) {
            return Place::in_context(id);
        }
        let free = self.all.iter().position(Option::is_none);
        let at = free.unwrap_or(self.all.len());
        if at >= self.max_contexts {
            return Place::NOWHERE;
        }
        if free.is_none() {
            self.all.push(None);
        }
        let id = ContextId(u16::try_from(at).expect("max_contexts is below 2^16"));
        self.all[at] = Some(Table { context: context.clone(), blocks: HashMap::new() });
        self.by_context.insert(context, id);
        Place::in_context(id)
    }

    pub(super) fn reserve(&mut self, id: ContextId, blocks: usize) {
        if let Some(Some(table)) = self.all.get_mut(usize::from(id.0)) {
            table.blocks.reserve(blocks);
        }
    }

    /// An order of keys that follows the memory of their table.
    pub(super) fn bucket(&self, (id, key): (ContextId, u64)) -> (ContextId, u64) {
        let table = self.all.get(usize::from(id.0)).and_then(Option::as_ref);
        (id, table.map_or(0, |table| bucket(&table.blocks, key)))
    }

    pub(super) fn publish(&mut self, (id, key): (ContextId, u64), stream: StreamId, medium: usize) {
        let Some(Some(table)) = self.all.get_mut(usize::from(id.0)) else { return };
        match table.blocks.entry(key) {
            Slot::Occupied(mut slot) => slot.get_mut().add(stream, medium),
            Slot::Vacant(slot) => {
                let mut holder = Holder { stream, held: [0; MEDIA] };
                holder.held[medium] = 1;
                slot.insert(Holders::One(holder));
            }
        }
    }

    pub(super) fn withdraw(&mut self, (id, key): (ContextId, u64), stream: StreamId, medium: usize) {
        let Some(Some(table)) = self.all.get_mut(usize::from(id.0)) else { return };
        if let Slot::Occupied(mut slot) = table.blocks.entry(key)
            && !slot.get_mut().subtract(stream, medium)
        {
            slot.remove();
        }
    }

    /// Makes room of contexts without blocks, once a stream has gone: the others' names of them stay valid only
    /// while they hold something there, so those with no holder at all can go.
    pub(super) fn drop_empty(&mut self) {
        for slot in &mut self.all {
            if let Some(table) = slot.take_if(|table| table.blocks.is_empty()) {
                self.by_context.remove(&table.context);
            }
        }
    }

    pub(super) fn copy_contexts_into(&self, other: &mut Self) {
        let empty = |table: &Table| Table { context: table.context.clone(), blocks: HashMap::new() };
        other.all = self.all.iter().map(|slot| slot.as_ref().map(empty)).collect();
        other.by_context.clone_from(&self.by_context);
    }

    /// Whether another has the same blocks.
    pub(super) fn same_blocks(&self, other: &Self) -> Result<(), String> {
        for (at, (ours, theirs)) in self.all.iter().zip(&other.all).enumerate() {
            let (ours, theirs) = (ours.as_ref().map(|t| &t.blocks), theirs.as_ref().map(|t| &t.blocks));
            if ours != theirs {
                let count = |blocks: Option<&HashMap<u64, Holders>>| blocks.map_or(0, HashMap::len);
                let (ours, theirs) = (count(ours), count(theirs));
                return Err(format!("context {at}: streams hold {ours} blocks, its table has {theirs}"));
            }
        }
        Ok(())
    }
}
