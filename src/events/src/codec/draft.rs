//! An event while its fields are being read.

use super::Limits;
use super::field::{Field, Kind};
use crate::error::EventError;
use crate::model::{
    BlockExtra, Change, EngineHash, Event, ExtraKey, Medium, RemovedBlocks, Source, StoredBlocks,
};
use crate::msgpack::{Reader, ValueKind};

type DraftResult<T> = Result<T, EventError>;

/// Extra keys of extra keys go no deeper than this.
const EXTRA_DEPTH: usize = 4;
/// Values in the extra keys of one event.
const EXTRA_VALUES: usize = 1 << 16;

/// The remaining limits of a batch.
#[derive(Debug)]
pub(super) struct RemainingLimits {
    blocks: usize,
    tokens: usize,
    text_bytes: usize,
    extra: usize,
}

impl RemainingLimits {
    pub(super) const fn new(limits: &Limits) -> Self {
        Self {
            blocks: limits.blocks,
            tokens: limits.tokens,
            text_bytes: limits.text_bytes,
            extra: EXTRA_VALUES,
        }
    }

    fn spend(left: &mut usize, count: usize, what: &str) -> DraftResult<()> {
        let rest = left.checked_sub(count);
        *left = rest.ok_or_else(|| EventError::decode(format!("more {what} than the limit allows")))?;
        Ok(())
    }

    fn text(&self, reader: &mut Reader<'_>) -> DraftResult<String> {
        let text = reader.text()?;
        if text.len() > self.text_bytes {
            let message = format!("a text of {} bytes, at most {} are taken", text.len(), self.text_bytes);
            return Err(EventError::decode(message));
        }
        Ok(text.to_owned())
    }
}

/// The fields read so far.
#[derive(Debug, Default)]
pub(super) struct Draft {
    kind: Option<Kind>,
    word: String,
    hashes: Option<Vec<EngineHash>>,
    stored: StoredBlocks,
    /// The salt of the whole chain, which SGLang repeats in each of its parts.
    salt: Option<String>,
    source: Option<Box<Source>>,
}

impl Draft {
    /// Starts an event of the array form, whose kind comes first.
    pub(super) fn of(word: &str) -> Self {
        let kind = Kind::named(word);
        let word = if kind == Kind::Unknown { word.to_owned() } else { String::new() };
        Self { kind: Some(kind), word, ..Self::default() }
    }

    pub(super) const fn kind(&self) -> Option<Kind> {
        self.kind
    }

    /// Reads one field's value; a nil leaves the field as it is.
    pub(super) fn read(
        &mut self,
        field: Field,
        reader: &mut Reader<'_>,
        room: &mut RemainingLimits,
    ) -> DraftResult<()> {
        if field == Field::Unknown {
            return reader.skip();
        }
        if reader.nil()? {
            return Ok(());
        }
        let stored = &mut self.stored;
        match field {
            Field::Kind => {
                let word = room.text(reader)?;
                // One publisher writes both its own word and the standard's: the known one counts.
                if self.kind.is_none_or(|kind| kind == Kind::Unknown) {
                    self.kind = Some(Kind::named(&word));
                    self.word = word;
                }
            }
            Field::Hashes => self.hashes = Some(hashes(reader, room)?),
            Field::Parent => stored.parent = Some(hash(reader)?),
            Field::BaseBlock => stored.base_block = Some(reader.bits()?),
            Field::Tokens => tokens(reader, room, &mut stored.tokens)?,
            Field::BlockTokens => stored.block_tokens = reader.word()?,
            Field::LoraId => {
                let id = reader.bits()?.cast_signed();
                stored.lora.get_or_insert_with(|| id.to_string());
            }
            Field::LoraName => stored.lora = Some(room.text(reader)?).filter(|name| !name.is_empty()),
            Field::Medium => stored.medium = Some(Medium::of(&room.text(reader)?)),
            Field::ExtraKeys => stored.extra = extra_keys(reader, room)?,
            Field::ChainSalt => self.salt = Some(room.text(reader)?).filter(|salt| !salt.is_empty()),
            Field::Group => stored.group = Some(reader.word()?),
            Field::Attention => stored.attention = Some(room.text(reader)?),
            _ => return self.read_source(field, reader, room),
        }
        Ok(())
    }

    fn read_source(
        &mut self,
        field: Field,
        reader: &mut Reader<'_>,
        room: &RemainingLimits,
    ) -> DraftResult<()> {
        let source = self.source.get_or_insert_default();
        match field {
            Field::EventId => source.event_id = Some(reader.bits()?),
            Field::TimeMs => source.time_ms = Some(whole(reader.float()?)),
            Field::Model => source.model = Some(room.text(reader)?),
            Field::Salt => source.salt = Some(room.text(reader)?).filter(|salt| !salt.is_empty()),
            Field::Tenant => source.tenant = Some(room.text(reader)?),
            Field::Backend => source.backend = Some(room.text(reader)?),
            Field::DpRank => source.dp_rank = Some(reader.word()?),
            Field::Object => source.object = Some(room.text(reader)?),
            _ => reader.skip()?,
        }
        Ok(())
    }

    /// The event, once all its fields are read.
    pub(super) fn finish(self) -> DraftResult<Event> {
        let Self { kind, word, hashes, mut stored, salt, source } = self;
        let object = source.as_ref().is_some_and(|source| source.object.is_some());
        // A publisher that knows only the object's name has no hashes to give.
        let needed = |hashes: Option<Vec<EngineHash>>| match hashes {
            Some(hashes) => Ok(hashes),
            None if object => Ok(Vec::new()),
            None => Err(EventError::decode("an event without its hashes")),
        };
        let change = match kind {
            None => return Err(EventError::decode("an event without its type")),
            Some(Kind::Stored) => {
                stored.hashes = needed(hashes)?;
                // Keys of blocks that the event does not have say nothing.
                stored.extra.retain(|extra| extra.block < stored.hashes.len());
                // Further on it is the parent that commits to it.
                let at_root = stored.parent.is_none() && stored.base_block.unwrap_or(0) == 0;
                if let Some(salt) = salt.filter(|_| at_root) {
                    salted(&mut stored, salt);
                }
                Change::Stored(stored)
            }
            Some(Kind::Removed) => {
                let (medium, group) = (stored.medium, stored.group);
                Change::Removed(RemovedBlocks { hashes: needed(hashes)?, medium, group })
            }
            Some(Kind::Cleared) => Change::Cleared(stored.medium),
            Some(Kind::Unknown) => Change::Unknown(word),
        };
        Ok(Event { change, source })
    }
}

/// Puts a salt among the extra keys of the first block, where engines that have such keys tell it.
fn salted(stored: &mut StoredBlocks, salt: String) {
    let key = ExtraKey::List(vec![ExtraKey::Text("cache_salt".into()), ExtraKey::Text(salt)]);
    match stored.extra.first_mut().filter(|first| first.block == 0) {
        Some(first) => first.keys.push(key),
        None => stored.extra.insert(0, BlockExtra { block: 0, keys: vec![key] }),
    }
}

/// The whole number that is nearest: seconds as a fraction are a little less than the microseconds that they were, as
/// often as not. A time that is no time counts as zero.
pub(super) fn whole(value: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
    let whole = value.round() as u64;
    whole
}

fn hash(reader: &mut Reader<'_>) -> DraftResult<EngineHash> {
    let next = reader.peek()?;
    if next == ValueKind::Integer {
        return Ok(EngineHash::Word(reader.bits()?));
    }
    let raw = reader.raw()?;
    let found = match raw.len() {
        _ if next == ValueKind::Text => written_hash(raw),
        8 => raw.try_into().ok().map(|bytes| EngineHash::Word(u64::from_be_bytes(bytes))),
        16 => raw.try_into().ok().map(EngineHash::Half),
        32 => raw.try_into().ok().map(EngineHash::Full),
        _ => None,
    };
    let wrong = || format!("a hash of {} bytes is neither a digest of 8, 16 or 32 nor a number", raw.len());
    found.ok_or_else(|| EventError::decode(wrong()))
}

/// A number in text: decimal, or hexadecimal after `0x`.
fn written_hash(raw: &[u8]) -> Option<EngineHash> {
    let text = std::str::from_utf8(raw).ok()?;
    let number = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    };
    number.map(EngineHash::Word)
}

fn hashes(reader: &mut Reader<'_>, room: &mut RemainingLimits) -> DraftResult<Vec<EngineHash>> {
    let count = reader.array()?;
    RemainingLimits::spend(&mut room.blocks, count, "blocks")?;
    (0..count).map(|_| hash(reader)).collect()
}

fn tokens(reader: &mut Reader<'_>, room: &mut RemainingLimits, into: &mut Vec<u32>) -> DraftResult<()> {
    into.clear();
    if reader.peek()? == ValueKind::Array {
        let count = reader.array()?;
        RemainingLimits::spend(&mut room.tokens, count, "tokens")?;
        return reader.words(count, into);
    }
    let raw = reader.raw()?;
    if raw.len() % 4 != 0 {
        return Err(EventError::decode(format!("{} bytes are no whole number of tokens", raw.len())));
    }
    RemainingLimits::spend(&mut room.tokens, raw.len() / 4, "tokens")?;
    into.extend(raw.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])));
    Ok(())
}

fn extra_keys(reader: &mut Reader<'_>, room: &mut RemainingLimits) -> DraftResult<Vec<BlockExtra>> {
    let mut found = Vec::new();
    for block in 0..reader.array()? {
        if reader.nil()? {
            continue;
        }
        let count = reader.array()?;
        let keys = (0..count).map(|_| extra_key(reader, room, 1)).collect::<DraftResult<Vec<_>>>()?;
        if !keys.is_empty() {
            found.push(BlockExtra { block, keys });
        }
    }
    Ok(found)
}

fn extra_key(reader: &mut Reader<'_>, room: &mut RemainingLimits, depth: usize) -> DraftResult<ExtraKey> {
    RemainingLimits::spend(&mut room.extra, 1, "extra keys")?;
    match reader.peek()? {
        ValueKind::Text => Ok(ExtraKey::Text(room.text(reader)?)),
        ValueKind::Bytes => {
            let raw = reader.raw()?;
            RemainingLimits::spend(&mut room.extra, raw.len() / 64, "extra keys")?;
            Ok(ExtraKey::Bytes(raw.to_vec()))
        }
        ValueKind::Integer => Ok(ExtraKey::Number(reader.bits()?)),
        ValueKind::Array if depth < EXTRA_DEPTH => {
            let count = reader.array()?;
            let keys = (0..count).map(|_| extra_key(reader, room, depth + 1));
            Ok(ExtraKey::List(keys.collect::<DraftResult<Vec<_>>>()?))
        }
        other => Err(EventError::decode(format!("an extra key that is {other:?}"))),
    }
}
