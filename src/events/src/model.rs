//! An engine's announcements as plain data, from any publisher and in any of its dialects.

use baton_types::Tier;
use std::fmt;

/// An engine's own name of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EngineHash {
    /// 64 bits; engines that write them signed and engines that do not mean the same bits.
    Word(u64),
    /// A digest of 16 bytes (xxh3-128).
    Half([u8; 16]),
    /// A digest of 32 bytes (sha-256).
    Full([u8; 32]),
}

impl EngineHash {
    /// The low 64 bits: what the same engine announces where it is set to announce integers.
    #[must_use]
    pub fn low64(&self) -> u64 {
        #[expect(clippy::cast_possible_truncation, reason = "the low half is what is asked for")]
        let low = self.name() as u64;
        low
    }

    /// The low 128 bits, which tell the blocks of one engine apart.
    ///
    /// Of a sha-256 digest half is dropped: a collision of two of n blocks is as likely as n²/2¹²⁹.
    #[must_use]
    pub fn name(&self) -> u128 {
        match self {
            Self::Word(word) => u128::from(*word),
            Self::Half(bytes) => u128::from_be_bytes(*bytes),
            Self::Full(bytes) => bytes[16..].iter().fold(0, |name, byte| name << 8 | u128::from(*byte)),
        }
    }
}

impl fmt::Display for EngineHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = |f: &mut fmt::Formatter<'_>, bytes: &[u8]| {
            bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
        };
        match self {
            Self::Word(word) => write!(f, "{word:016x}"),
            Self::Half(bytes) => hex(f, bytes),
            Self::Full(bytes) => hex(f, bytes),
        }
    }
}

/// Where an engine says that a block rests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Device memory: also what an engine means that names no medium.
    Gpu,
    /// Host memory.
    Cpu,
    /// Local flash.
    Disk,
    /// Elsewhere: another node, an object store.
    Remote,
    /// A word that is not known here.
    Other(String),
}

impl Medium {
    /// The medium behind an engine's word for it, in any case.
    #[must_use]
    pub fn of(word: &str) -> Self {
        let known: [(&[&str], Self); 4] = [
            (&["gpu", "hbm", "device", "g1"], Self::Gpu),
            (&["cpu", "cpu_pinned", "cpu_tier1", "dram", "host", "memory", "g2"], Self::Cpu),
            (&["disk", "ssd", "nvme", "cpu_tier2", "local_disk", "g3"], Self::Disk),
            (&["remote", "external", "storage", "g4"], Self::Remote),
        ];
        let same = |words: &&[&str]| words.iter().any(|known| known.eq_ignore_ascii_case(word));
        let found = known.into_iter().find(|(words, _)| same(words));
        found.map_or_else(|| Self::Other(word.to_owned()), |(_, medium)| medium)
    }

    /// The word that is written for it.
    #[must_use]
    pub fn word(&self) -> &str {
        match self {
            Self::Gpu => "GPU",
            Self::Cpu => "CPU",
            Self::Disk => "DISK",
            Self::Remote => "REMOTE",
            Self::Other(word) => word,
        }
    }

    /// Our tier; `None` where no tier of an instance is meant, or the word is not known.
    #[must_use]
    pub const fn tier(&self) -> Option<Tier> {
        match self {
            Self::Gpu => Some(Tier::Hbm),
            Self::Cpu => Some(Tier::Dram),
            Self::Disk => Some(Tier::Ssd),
            Self::Remote | Self::Other(_) => None,
        }
    }

    /// The medium of one of our tiers.
    #[must_use]
    pub const fn at(tier: Tier) -> Self {
        match tier {
            Tier::Hbm => Self::Gpu,
            Tier::Dram => Self::Cpu,
            Tier::Ssd => Self::Disk,
        }
    }
}

/// Something besides tokens that a block's hash commits to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ExtraKey {
    /// A salt, an adapter's name, the name of a picture.
    Text(String),
    /// A digest.
    Bytes(Vec<u8>),
    /// A number, as its 64 bits.
    Number(u64),
    /// Several that belong together, such as a tag and its value.
    List(Vec<Self>),
}

/// The extra keys of one block of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockExtra {
    /// Position of the block in its event.
    pub block: usize,
    /// Its keys, in the engine's order; never empty.
    pub keys: Vec<ExtraKey>,
}

/// Blocks became readable.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct StoredBlocks {
    /// The blocks, each the parent of the next.
    pub hashes: Vec<EngineHash>,
    /// The block before the first; `None` at the root of a chain, or where it was not given.
    pub parent: Option<EngineHash>,
    /// Position of the first block in its chain, if given.
    pub base_block: Option<u64>,
    /// The tokens of all blocks, one block after another; empty where they were not given.
    pub tokens: Vec<u32>,
    /// Tokens of one block.
    pub block_tokens: u32,
    /// Name of the adapter, or its number where it has no name.
    pub lora: Option<String>,
    /// The medium that holds them; `None` where it was not given.
    pub medium: Option<Medium>,
    /// The further inputs of their hashes, for blocks that have such keys.
    pub extra: Vec<BlockExtra>,
    /// Cache group, of an engine whose layers differ.
    pub group: Option<u32>,
    /// The attention type of the group's layers, such as `full_attention`.
    pub attention: Option<String>,
}

/// Blocks left a medium.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RemovedBlocks {
    /// The blocks, in any order.
    pub hashes: Vec<EngineHash>,
    /// The medium that they left; `None` where it was not given.
    pub medium: Option<Medium>,
    /// Cache group, of an engine whose layers differ.
    pub group: Option<u32>,
}

/// A change in an engine's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Blocks became readable.
    Stored(StoredBlocks),
    /// Blocks left a medium.
    Removed(RemovedBlocks),
    /// Every block is gone: from one medium if it is named, else from all.
    Cleared(Option<Medium>),
    /// An event of a kind that is not known here.
    Unknown(String),
}

/// The publisher, in the standard form of RFC 1527; other forms leave it out.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Source {
    /// Order of the event in its stream.
    pub event_id: Option<u64>,
    /// Time in milliseconds since 1970.
    pub time_ms: Option<u64>,
    /// The model served.
    pub model: Option<String>,
    /// The salt that further separates caches.
    pub salt: Option<String>,
    /// The cache's tenant.
    pub tenant: Option<String>,
    /// The cache's owner.
    pub backend: Option<String>,
    /// Rank in a data-parallel group.
    pub dp_rank: Option<u32>,
    /// Name of the stored object, of a publisher that knows no block hash.
    pub object: Option<String>,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The change.
    pub change: Change,
    /// The publisher, in the standard form.
    pub source: Option<Box<Source>>,
}

impl From<Change> for Event {
    fn from(change: Change) -> Self {
        Self { change, source: None }
    }
}

/// Events that were announced together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Position in the publisher's stream, from 0 in each of its lives.
    pub sequence: u64,
    /// Time in microseconds since 1970.
    pub time_us: u64,
    /// Rank in a data-parallel group, if given.
    pub dp_rank: Option<u32>,
    /// The events, in order.
    pub events: Vec<Event>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_ends_in_what_the_engine_announces_as_an_integer() {
        let mut digest = [0xaa; 32];
        digest[24..].copy_from_slice(&0x0102_0304_0506_0708u64.to_be_bytes());
        let full = EngineHash::Full(digest);
        assert_eq!(full.low64(), 0x0102_0304_0506_0708);
        assert_eq!(full.name() >> 64, 0xaaaa_aaaa_aaaa_aaaa);
        assert_eq!(EngineHash::Word(7).name(), 7);
        assert_eq!(EngineHash::Half([1; 16]).name(), u128::from_be_bytes([1; 16]));
        assert_eq!(EngineHash::Word(255).to_string(), "00000000000000ff");
        assert_eq!(full.to_string().len(), 64);
    }

    #[test]
    fn words_for_a_medium_meet_our_tiers() {
        for (word, tier) in [
            ("GPU", Some(Tier::Hbm)),
            ("CPU_PINNED", Some(Tier::Dram)),
            ("cpu", Some(Tier::Dram)),
            ("Disk", Some(Tier::Ssd)),
            ("external", None),
            ("tape", None),
        ] {
            assert_eq!(Medium::of(word).tier(), tier, "{word}");
        }
        for tier in Tier::LOCAL {
            assert_eq!(Medium::of(Medium::at(tier).word()).tier(), Some(tier));
        }
        assert_eq!(Medium::of("tape").word(), "tape");
    }
}
