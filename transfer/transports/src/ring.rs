//! The ring: a file in shared memory through which slices pass between processes of one host.
//!
//! The dialer makes the file and tells its name in the handshake; the listener opens it; then the dialer
//! takes the name away, so the file goes when both have gone, however they go. The maker holds a lock on the
//! file while it has a name, and the kernel frees the lock of a process that dies: a file found unlocked is
//! a leaving of one killed in between, and whoever comes next clears it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;

use crate::message::RingOffer;
use crate::random::random;

const NAME_PREFIX: &str = "baton-kv-";
/// Where the nonce goes: behind the slots.
const NONCE_BYTES: u64 = 8;

/// One side's hold on a ring. Slots are of one size, which each flight sets anew.
#[derive(Debug)]
pub(crate) struct Ring {
    file: File,
    ring_bytes: u32,
}

/// A ring that still has a name.
#[derive(Debug)]
pub(crate) struct NamedRing {
    ring: Ring,
    path: PathBuf,
    offer: RingOffer,
}

impl NamedRing {
    /// Makes a ring under `dir`.
    pub(crate) fn create(dir: &Path, ring_bytes: u32) -> io::Result<Self> {
        let nonce = random();
        let name = format!("{NAME_PREFIX}{}-{nonce:016x}", std::process::id());
        let path = dir.join(&name);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        let named =
            Self { ring: Ring { file, ring_bytes }, path, offer: RingOffer { name, ring_bytes, nonce } };
        named.ring.file.try_lock()?;
        named.ring.file.set_len(u64::from(ring_bytes) + NONCE_BYTES)?;
        named.ring.file.write_all_at(&nonce.to_le_bytes(), u64::from(ring_bytes))?;
        Ok(named)
    }

    pub(crate) fn offer(&self) -> &RingOffer {
        &self.offer
    }

    /// Takes the name away and keeps the ring.
    pub(crate) fn into_ring(mut self) -> io::Result<Ring> {
        let file = self.ring.file.try_clone()?;
        let ring_bytes = self.ring.ring_bytes;
        self.unlink();
        Ok(Ring { file, ring_bytes })
    }

    fn unlink(&mut self) {
        // Gone already is as good; anything else leaves a file that the next start clears.
        let _ = fs::remove_file(&self.path);
    }
}

impl Drop for NamedRing {
    fn drop(&mut self) {
        self.unlink();
    }
}

impl Ring {
    /// Opens the ring that a peer has made under the directory that both use. The name is a stranger's: it
    /// may name only a ring, and only a file that holds the nonce is the one that the peer made.
    pub(crate) fn open(dir: &Path, offer: &RingOffer) -> io::Result<Self> {
        let plain = offer.name.starts_with(NAME_PREFIX)
            && offer.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if !plain {
            return Err(io::Error::other(format!("{:?} is not the name of a ring", offer.name)));
        }
        let no_link = i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).expect("a flag of open(2)");
        let file = OpenOptions::new().read(true).custom_flags(no_link).open(dir.join(&offer.name))?;
        let about = file.metadata()?;
        if !about.is_file() || about.size() != u64::from(offer.ring_bytes) + NONCE_BYTES {
            return Err(io::Error::other("the file of that name has another size"));
        }
        let mut nonce = [0; 8];
        file.read_exact_at(&mut nonce, u64::from(offer.ring_bytes))?;
        if u64::from_le_bytes(nonce) != offer.nonce {
            return Err(io::Error::other("the file of that name is another's"));
        }
        Ok(Self { file, ring_bytes: offer.ring_bytes })
    }

    /// How many slots of `slot_bytes` there are.
    pub(crate) fn slots(&self, slot_bytes: u32) -> u64 {
        u64::from(self.ring_bytes.checked_div(slot_bytes).unwrap_or(0))
    }

    /// Puts slice number `sequence` into its slot. Copies memory and never waits.
    pub(crate) fn write(&self, sequence: u64, bytes: &[u8]) -> io::Result<()> {
        let at = self.offset(sequence, bytes.len())?;
        self.file.write_all_at(bytes, at)
    }

    /// Takes slice number `sequence` out of its slot. Copies memory and never waits.
    pub(crate) fn read(&self, sequence: u64, slot_bytes: u32) -> io::Result<Bytes> {
        let bytes = usize::try_from(slot_bytes).expect("a usize has at least 32 bits");
        let at = self.offset(sequence, bytes)?;
        let mut slice = Vec::with_capacity(bytes);
        while slice.len() < bytes {
            let done = u64::try_from(slice.len()).expect("below 4 GiB");
            let room = rustix::buffer::spare_capacity(&mut slice);
            if rustix::io::pread(&self.file, room, at + done)? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
            }
        }
        slice.truncate(bytes);
        Ok(Bytes::from(slice))
    }

    fn offset(&self, sequence: u64, slot_bytes: usize) -> io::Result<u64> {
        let slot = u32::try_from(slot_bytes).map_err(io::Error::other)?;
        match self.slots(slot) {
            0 => Err(io::Error::other("the slice is larger than the ring")),
            slots => Ok(sequence % slots * u64::from(slot)),
        }
    }
}

/// Clears the rings under `dir` whose makers were killed before they could. Returns how many.
pub(crate) fn clear_stale(dir: &Path) -> io::Result<usize> {
    let mut cleared = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(NAME_PREFIX));
        if !ours || !entry.file_type()?.is_file() {
            continue;
        }
        // One that we may not open is another user's, and theirs to clear.
        let Ok(file) = OpenOptions::new().read(true).write(true).open(entry.path()) else { continue };
        if file.try_lock().is_ok() && fs::remove_file(entry.path()).is_ok() {
            cleared += 1;
        }
    }
    Ok(cleared)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> usize {
        fs::read_dir(dir).unwrap().count()
    }

    #[test]
    fn slices_pass_and_no_name_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let named = NamedRing::create(dir.path(), 4096).unwrap();
        let theirs = Ring::open(dir.path(), named.offer()).unwrap();
        let ours = named.into_ring().unwrap();
        assert_eq!(names(dir.path()), 0);
        assert_eq!(ours.slots(1000), 4);
        for sequence in 0..10 {
            let slice = vec![u8::try_from(sequence).unwrap(); 1000];
            ours.write(sequence, &slice).unwrap();
            assert_eq!(theirs.read(sequence, 1000).unwrap(), slice);
        }
        assert!(ours.write(0, &[0; 5000]).is_err());
        assert!(theirs.read(0, 5000).is_err());
    }

    #[test]
    fn a_ring_dropped_with_its_name_takes_the_name_along() {
        let dir = tempfile::tempdir().unwrap();
        drop(NamedRing::create(dir.path(), 64).unwrap());
        assert_eq!(names(dir.path()), 0);
    }

    #[test]
    fn only_the_very_ring_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let named = NamedRing::create(dir.path(), 64).unwrap();
        let offer = named.offer().clone();
        let refused = |offer: RingOffer| Ring::open(dir.path(), &offer).unwrap_err().to_string();
        assert!(
            refused(RingOffer { name: "../etc/passwd".into(), ..offer.clone() }).contains("name of a ring")
        );
        assert!(
            refused(RingOffer { name: "baton-kv-/x".into(), ..offer.clone() }).contains("name of a ring")
        );
        assert!(refused(RingOffer { ring_bytes: 65, ..offer.clone() }).contains("another size"));
        assert!(refused(RingOffer { nonce: offer.nonce ^ 1, ..offer.clone() }).contains("another's"));
        std::os::unix::fs::symlink(dir.path().join(&offer.name), dir.path().join("baton-kv-link")).unwrap();
        assert!(Ring::open(dir.path(), &RingOffer { name: "baton-kv-link".into(), ..offer }).is_err());
    }

    #[test]
    fn only_rings_of_the_dead_are_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let alive = NamedRing::create(dir.path(), 64).unwrap();
        fs::write(dir.path().join("baton-kv-1-dead"), b"left behind").unwrap();
        fs::write(dir.path().join("another-file"), b"not ours").unwrap();
        assert_eq!(clear_stale(dir.path()).unwrap(), 1);
        assert!(dir.path().join(&alive.offer().name).exists());
        assert!(dir.path().join("another-file").exists());
        assert_eq!(names(dir.path()), 2);
    }
}
