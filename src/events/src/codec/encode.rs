//! Writes a batch for subscribers.

use crate::model::{Batch, Change, EngineHash, ExtraKey, Medium, StoredBlocks};
use crate::msgpack::Writer;

/// The dialect to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Maps as vLLM 0.32 writes them: `BlockStored`, `BlockRemoved`, `AllBlocksCleared`.
    Vllm,
    /// Maps of RFC 1527: `stored`, `removed`, `cleared`, each with who speaks.
    Standard,
}

/// The publisher, for the standard form; the vLLM form says nothing of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Speaker {
    /// The model served.
    pub model: String,
    /// Tokens of a block, where an event does not say it.
    pub block_tokens: u32,
    /// The salt that further separates caches; empty for none.
    pub salt: String,
    /// The cache's tenant; empty means `default`.
    pub tenant: String,
    /// Name of the cache's owner.
    pub backend: String,
}

/// Writes a batch; [`decode`](super::decode) reads it back.
///
/// In the standard form every event gets `batch.sequence << 20` plus its place as its id, so ids rise along the
/// stream. Events of an unknown kind are left out: only their name was kept.
#[must_use]
pub fn encode(batch: &Batch, form: Form, speaker: &Speaker) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.array(3);
    #[expect(
        clippy::cast_precision_loss,
        reason = "a time in microseconds is below 2^53 until the year 2255"
    )]
    writer.float(batch.time_us as f64 / 1e6);
    let known = || batch.events.iter().filter(|event| !matches!(event.change, Change::Unknown(_)));
    writer.array(known().count());
    for (place, event) in known().enumerate() {
        match form {
            Form::Vllm => vllm(&mut writer, &event.change),
            Form::Standard => {
                let id = batch.sequence << 20 | (place as u64 & 0xf_ffff);
                Standard { writer: &mut writer, batch, speaker, id }.write(&event.change);
            }
        }
    }
    match batch.dp_rank {
        Some(rank) => writer.unsigned(u64::from(rank)),
        None => writer.nil(),
    }
    writer.finish()
}

fn hash(writer: &mut Writer, hash: &EngineHash) {
    match hash {
        EngineHash::Word(word) => writer.unsigned(*word),
        EngineHash::Half(bytes) => writer.raw(bytes),
        EngineHash::Full(bytes) => writer.raw(bytes),
    }
}

fn hashes(writer: &mut Writer, key: &str, all: &[EngineHash]) {
    writer.text(key);
    writer.array(all.len());
    all.iter().for_each(|one| hash(writer, one));
}

fn parent(writer: &mut Writer, key: &str, parent: Option<&EngineHash>) {
    writer.text(key);
    match parent {
        Some(parent) => hash(writer, parent),
        None => writer.nil(),
    }
}

fn tokens(writer: &mut Writer, tokens: &[u32]) {
    writer.text("token_ids");
    writer.array(tokens.len());
    tokens.iter().for_each(|token| writer.unsigned(u64::from(*token)));
}

fn text(writer: &mut Writer, key: &str, value: Option<&str>) {
    writer.text(key);
    match value {
        Some(value) => writer.text(value),
        None => writer.nil(),
    }
}

fn number(writer: &mut Writer, key: &str, value: u64) {
    writer.text(key);
    writer.unsigned(value);
}

fn extra_key(writer: &mut Writer, key: &ExtraKey) {
    match key {
        ExtraKey::Text(text) => writer.text(text),
        ExtraKey::Bytes(bytes) => writer.raw(bytes),
        ExtraKey::Number(number) => writer.unsigned(*number),
        ExtraKey::List(keys) => {
            writer.array(keys.len());
            keys.iter().for_each(|key| extra_key(writer, key));
        }
    }
}

fn extra_keys(writer: &mut Writer, stored: &StoredBlocks) {
    writer.text("extra_keys");
    writer.array(stored.hashes.len());
    let mut extra = stored.extra.iter().peekable();
    for block in 0..stored.hashes.len() {
        match extra.next_if(|extra| extra.block == block) {
            Some(extra) => {
                writer.array(extra.keys.len());
                extra.keys.iter().for_each(|key| extra_key(writer, key));
            }
            None => writer.nil(),
        }
    }
}

fn vllm(writer: &mut Writer, change: &Change) {
    match change {
        Change::Stored(stored) => vllm_stored(writer, stored),
        Change::Removed(removed) => {
            writer.map(4);
            text(writer, "type", Some("BlockRemoved"));
            hashes(writer, "block_hashes", &removed.hashes);
            text(writer, "medium", removed.medium.as_ref().map(Medium::word));
            number(writer, "group_idx", u64::from(removed.group.unwrap_or(0)));
        }
        Change::Cleared(medium) => {
            writer.map(1 + usize::from(medium.is_some()));
            text(writer, "type", Some("AllBlocksCleared"));
            if let Some(medium) = medium {
                text(writer, "medium", Some(medium.word()));
            }
        }
        Change::Unknown(_) => {}
    }
}

fn vllm_stored(writer: &mut Writer, stored: &StoredBlocks) {
    writer.map(11);
    text(writer, "type", Some("BlockStored"));
    hashes(writer, "block_hashes", &stored.hashes);
    parent(writer, "parent_block_hash", stored.parent.as_ref());
    tokens(writer, &stored.tokens);
    number(writer, "block_size", u64::from(stored.block_tokens));
    text(writer, "lora_id", None);
    text(writer, "medium", stored.medium.as_ref().map(Medium::word));
    text(writer, "lora_name", stored.lora.as_deref());
    extra_keys(writer, stored);
    number(writer, "group_idx", u64::from(stored.group.unwrap_or(0)));
    text(writer, "kv_cache_spec_kind", Some(stored.attention.as_deref().unwrap_or("full_attention")));
}

/// One event of the standard form.
struct Standard<'a> {
    writer: &'a mut Writer,
    batch: &'a Batch,
    speaker: &'a Speaker,
    id: u64,
}

impl Standard<'_> {
    fn write(&mut self, change: &Change) {
        match change {
            Change::Stored(stored) => self.stored(stored),
            Change::Removed(removed) => {
                self.envelope("removed", removed.medium.as_ref(), None, 1);
                hashes(self.writer, "seq_hashes", &removed.hashes);
            }
            Change::Cleared(medium) => self.envelope("cleared", medium.as_ref(), None, 0),
            Change::Unknown(_) => {}
        }
    }

    /// The publisher and its cache: the same fields before every event, and then `more`.
    fn envelope(&mut self, kind: &str, medium: Option<&Medium>, of: Option<&StoredBlocks>, more: usize) {
        let Self { writer, batch, speaker, id } = self;
        writer.map(11 + more);
        number(writer, "event_id", *id);
        number(writer, "timestamp", batch.time_us / 1000);
        text(writer, "event_type", Some(kind));
        text(writer, "model_name", Some(&speaker.model));
        let told = of.map_or(0, |stored| stored.block_tokens);
        let block_tokens = if told > 0 { told } else { speaker.block_tokens };
        number(writer, "block_size", u64::from(block_tokens));
        text(writer, "additional_salt", Some(&speaker.salt));
        text(writer, "lora_name", of.and_then(|stored| stored.lora.as_deref()));
        let tenant = if speaker.tenant.is_empty() { "default" } else { &speaker.tenant };
        text(writer, "tenant_id", Some(tenant));
        text(writer, "backend_id", Some(&speaker.backend));
        text(writer, "medium", medium.map(standard_word));
        number(writer, "dp_rank", u64::from(batch.dp_rank.unwrap_or(0)));
    }

    fn stored(&mut self, stored: &StoredBlocks) {
        let (based, keyed) = (stored.base_block.is_some(), !stored.extra.is_empty());
        let more = 3 + usize::from(based) + usize::from(keyed);
        self.envelope("stored", stored.medium.as_ref(), Some(stored), more);
        hashes(self.writer, "seq_hashes", &stored.hashes);
        parent(self.writer, "parent_hash", stored.parent.as_ref());
        tokens(self.writer, &stored.tokens);
        if let Some(base) = stored.base_block {
            number(self.writer, "base_block_idx", base);
        }
        // Not of the standard, and only where names depend on it.
        if keyed {
            extra_keys(self.writer, stored);
        }
    }
}

/// The standard's word: small letters.
fn standard_word(medium: &Medium) -> &str {
    match medium {
        Medium::Gpu => "gpu",
        Medium::Cpu => "cpu",
        Medium::Disk => "disk",
        Medium::Remote => "remote",
        Medium::Other(word) => word,
    }
}
