//! Names of objects in the bucket: a listing alone describes the content.

use object_store::path::{Path, PathPart};

/// Folders into which objects are spread, that they can be listed side by side.
pub(super) const FOLDERS: u64 = 16;

/// One copy of a value: whose it is, and which writing of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Label {
    /// Name of the key.
    pub(super) name: u64,
    /// Short name of the tenant, to find all that a tenant has.
    pub(super) tenant: u32,
    /// Hash of the value: equal bytes put again need no other copy.
    pub(super) digest: u64,
    /// Number of this very writing, never used again.
    pub(super) tag: u64,
}

/// The kind of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A value.
    Value,
    /// The word that a value of this label is not to be believed, should it ever arrive.
    Tombstone,
}

impl Kind {
    fn ending(self) -> &'static str {
        match self {
            Self::Value => "kv",
            Self::Tombstone => "grave",
        }
    }
}

impl Label {
    /// The tag of a writing: the start of the store that did it, and which of its own it was.
    pub(super) fn tag(life: u32, number: u32) -> u64 {
        u64::from(life) << 32 | u64::from(number)
    }

    /// The start of the store that wrote it.
    pub(super) fn life(&self) -> u32 {
        u32::try_from(self.tag >> 32).expect("32 bits")
    }

    /// Where it lies.
    pub(super) fn path(&self, prefix: &Path, kind: Kind) -> Path {
        let Self { name, tenant, digest, tag } = self;
        let file = format!("{name:016x}-{tenant:08x}-{digest:016x}-{tag:016x}.{}", kind.ending());
        folder(prefix, name % FOLDERS).join(PathPart::from(file))
    }

    /// Parses a name from a listing; none for an object that is not ours.
    pub(super) fn read(path: &Path) -> Option<(Self, Kind)> {
        let (words, ending) = path.filename()?.split_once('.')?;
        let kind = [Kind::Value, Kind::Tombstone].into_iter().find(|kind| kind.ending() == ending)?;
        let mut words = words.split('-');
        let mut number = |digits: usize| {
            let word = words.next().filter(|word| word.len() == digits)?;
            let plain = word.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
            u64::from_str_radix(word, 16).ok().filter(|_| plain)
        };
        let (name, tenant, digest, tag) = (number(16)?, number(8)?, number(16)?, number(16)?);
        let tenant = u32::try_from(tenant).ok()?;
        words.next().is_none().then_some((Self { name, tenant, digest, tag }, kind))
    }
}

/// One of the folders.
pub(super) fn folder(prefix: &Path, number: u64) -> Path {
    prefix.clone().join(PathPart::from(format!("{number:x}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_were_written_and_others_are_not_ours() {
        let label = Label { name: 0xab, tenant: 7, digest: u64::MAX, tag: Label::tag(3, 1) };
        assert_eq!(label.life(), 3);
        let prefix = Path::from("a/b");
        for kind in [Kind::Value, Kind::Tombstone] {
            let path = label.path(&prefix, kind);
            assert!(path.as_ref().starts_with("a/b/b/00000000000000ab-00000007-ffff"), "{path}");
            assert_eq!(Label::read(&path), Some((label, kind)));
        }
        let good = label.path(&prefix, Kind::Value).to_string();
        for bad in [
            good.replace(".kv", ".txt"),
            good.replace(".kv", ""),
            good.replace("ab-", "AB-"),
            good.replace("00ab-", "ab-"),
            good.replace(".kv", "-00.kv"),
            good.replace("-00000007", ""),
            "a/b/b/thesis.kv".into(),
            "a/b/owner".into(),
        ] {
            assert_eq!(Label::read(&Path::from(bad.clone())), None, "{bad}");
        }
    }
}
