//! The fields of an event, by name in the map forms and by place in the array forms.

/// A field of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Kind,
    Hashes,
    Parent,
    BaseBlock,
    Tokens,
    BlockTokens,
    LoraId,
    LoraName,
    Medium,
    ExtraKeys,
    Group,
    Attention,
    EventId,
    TimeMs,
    Model,
    Salt,
    ChainSalt,
    Tenant,
    Backend,
    DpRank,
    Object,
    /// A field that is not known here.
    Unknown,
}

impl Field {
    /// The field behind a key of a map.
    pub(super) fn named(key: &[u8]) -> Self {
        match key {
            b"type" | b"event_type" => Self::Kind,
            b"block_hashes" | b"seq_hashes" => Self::Hashes,
            b"parent_block_hash" | b"parent_hash" => Self::Parent,
            b"base_block_idx" => Self::BaseBlock,
            b"token_ids" => Self::Tokens,
            b"block_size" => Self::BlockTokens,
            b"lora_id" => Self::LoraId,
            b"lora_name" => Self::LoraName,
            b"medium" => Self::Medium,
            b"extra_keys" => Self::ExtraKeys,
            b"group_idx" => Self::Group,
            b"kv_cache_spec_kind" => Self::Attention,
            b"event_id" => Self::EventId,
            b"timestamp" => Self::TimeMs,
            b"model_name" => Self::Model,
            b"additional_salt" => Self::Salt,
            b"cache_salt" => Self::ChainSalt,
            b"tenant_id" => Self::Tenant,
            b"backend_id" => Self::Backend,
            b"dp_rank" => Self::DpRank,
            b"object_key" => Self::Object,
            _ => Self::Unknown,
        }
    }

    /// The fields of an array form, in order, after the kind.
    pub(super) const fn placed(kind: Kind) -> &'static [Self] {
        match kind {
            Kind::Stored => &[
                Self::Hashes,
                Self::Parent,
                Self::Tokens,
                Self::BlockTokens,
                Self::LoraId,
                Self::Medium,
                Self::LoraName,
                Self::ExtraKeys,
                Self::Group,
                Self::Attention,
            ],
            Kind::Removed => &[Self::Hashes, Self::Medium, Self::Group],
            Kind::Cleared | Kind::Unknown => &[],
        }
    }
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Stored,
    Removed,
    Cleared,
    Unknown,
}

impl Kind {
    /// The kind behind an engine's word for it.
    pub(super) fn named(word: &str) -> Self {
        match word {
            "BlockStored" | "stored" => Self::Stored,
            "BlockRemoved" | "removed" => Self::Removed,
            "AllBlocksCleared" | "cleared" => Self::Cleared,
            _ => Self::Unknown,
        }
    }
}
