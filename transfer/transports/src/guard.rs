//! Which peers may connect to a node: those that have the key of its cluster, and a certificate where TLS is on.
//!
//! The key never goes over the wire. Each side draws an unpredictable number, and proves that it has the key by a
//! code over both numbers ([`ClusterKey::prove`]). An overheard proof is useless the next time. That keeps strangers
//! out. TLS prevents eavesdropping and tampering.

use std::fmt;
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::mover::TcpTls;

/// Bytes of a challenge, and of a proof.
pub const PROOF_BYTES: usize = 32;
/// Shortest key. A proof that was overheard can be tried against keys offline, so a key must be beyond guessing:
/// 32 characters that a machine drew, hexadecimal ones included, are.
const KEY_BYTES_MIN: usize = 32;
/// Longest file of keys.
const FILE_BYTES_MAX: u64 = 4096;
/// Keys in a file: the one in use, and those that it follows or that follow it.
const KEYS_MAX: usize = 4;
/// Block size of SHA-256.
const HASH_BLOCK_BYTES: usize = 64;

/// A number drawn once, for one connection.
pub type Challenge = [u8; PROOF_BYTES];
/// Proof over two challenges that only a holder of the key can compute.
pub type Proof = [u8; PROOF_BYTES];

/// The secret that all processes of one cluster have. Clones share it; it does not show in logs.
#[derive(Clone)]
pub struct ClusterKey {
    keys: Arc<[Vec<u8>]>,
}

/// The role of the side that proves itself. Proofs of different roles differ, so a peer cannot send one back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prover {
    /// The peer that opens a connection for KV.
    KvDialer,
    /// The peer that accepts it.
    KvListener,
    /// A node that attaches.
    Node,
    /// The conductor that it attaches to.
    Conductor,
}

impl Prover {
    const fn label(self) -> &'static [u8] {
        match self {
            Self::KvDialer => b"baton kv dialer",
            Self::KvListener => b"baton kv listener",
            Self::Node => b"baton control node",
            Self::Conductor => b"baton control conductor",
        }
    }
}

impl ClusterKey {
    /// Reads a file: one key a line. The first is shown, any of them is taken, so that a cluster can go from one
    /// to the next without a stop.
    ///
    /// # Errors
    /// In words: the file cannot be read, or holds no key, or too short a one.
    pub fn read(path: &Path) -> Result<Self, String> {
        // A relative path says little without the folder that it is seen from.
        let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let wrong = |why: String| format!("cluster key {}: {why}", whole.display());
        let bytes = std::fs::metadata(path).map_err(|e| wrong(e.to_string()))?.len();
        if bytes > FILE_BYTES_MAX {
            return Err(wrong(format!("{bytes} bytes are no file of keys; at most {FILE_BYTES_MAX}")));
        }
        let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
        Self::parse(&text).map_err(wrong)
    }

    /// Parses the key from the text of its file.
    ///
    /// # Errors
    /// In words, and never with the key in them.
    pub fn parse(text: &str) -> Result<Self, String> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let keys: Vec<Vec<u8>> = lines.map(|line| line.as_bytes().to_vec()).collect();
        if keys.is_empty() || keys.len() > KEYS_MAX {
            let found = keys.len();
            return Err(format!("{found} keys; write 1 to {KEYS_MAX}, one a line: openssl rand -hex 32"));
        }
        if let Some(short) = keys.iter().find(|key| key.len() < KEY_BYTES_MIN) {
            let bytes = short.len();
            return Err(format!(
                "a key of {bytes} bytes can be guessed; give {KEY_BYTES_MIN} or more: openssl rand -hex 32"
            ));
        }
        Ok(Self { keys: keys.into() })
    }

    /// Shows to who drew `theirs` that we have the key; `ours` is what we drew.
    #[must_use]
    pub fn prove(&self, as_whom: Prover, ours: &Challenge, theirs: &Challenge) -> Proof {
        // There is at least one: `parse` sees to it.
        code(&self.keys[0], &[as_whom.label(), ours, theirs])
    }

    /// Whether `shown` proves that `whom`, who drew `theirs`, has one of our keys. Takes the same time whichever byte
    /// is wrong.
    #[must_use]
    pub fn is_proof(&self, whom: Prover, theirs: &Challenge, ours: &Challenge, shown: &[u8]) -> bool {
        self.keys
            .iter()
            .fold(false, |found, key| found | same(&code(key, &[whom.label(), theirs, ours]), shown))
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey(..)")
    }
}

/// Credentials that a node requires of its peers. By default none: the node serves any peer that reaches it.
#[derive(Clone, Debug, Default)]
pub struct Guard {
    /// The key that both sides have.
    pub key: Option<ClusterKey>,
    /// TLS for every connection that leaves the process, by sockets.
    pub tls: Option<TcpTls>,
}

/// An unpredictable number.
///
/// # Panics
/// Where the system has no randomness to give: nothing is safe there.
#[must_use]
pub fn challenge() -> Challenge {
    let mut drawn = [0; PROOF_BYTES];
    let source = rustls::crypto::ring::default_provider().secure_random;
    source.fill(&mut drawn).expect("the system has random numbers");
    drawn
}

/// HMAC-SHA256 (RFC 2104) over the parts, one after the other. Every part but the last has a fixed length for a
/// given first one, so that no two lists of parts are one text.
fn code(key: &[u8], parts: &[&[u8]]) -> Proof {
    let mut padded = [0; HASH_BLOCK_BYTES];
    if key.len() > HASH_BLOCK_BYTES {
        padded[..PROOF_BYTES].copy_from_slice(&Sha256::digest(key));
    } else {
        padded[..key.len()].copy_from_slice(key);
    }
    let with = |mask: u8| Sha256::new().chain_update(padded.map(|byte| byte ^ mask));
    let inner = parts.iter().fold(with(0x36), |hash, part| hash.chain_update(part)).finalize();
    with(0x5c).chain_update(inner).finalize().into()
}

/// Compares without a hint where they differ.
fn same(one: &Proof, other: &[u8]) -> bool {
    let differ = one.iter().zip(other).fold(0, |differ, (a, b)| black_box(differ | (a ^ b)));
    other.len() == PROOF_BYTES && black_box(differ) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Cases 1, 2 and 6 of RFC 4231.
    #[test]
    fn codes_are_those_of_the_standard() {
        for (key, parts, told) in [
            (
                vec![0x0b; 20],
                &[&b"Hi "[..], b"There"][..],
                "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7",
            ),
            (
                b"Jefe".to_vec(),
                &[&b"what do ya want for nothing?"[..]][..],
                "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
            ),
            (
                vec![0xaa; 131],
                &[&b"Test Using Larger Than Block-Size Key - Hash Key First"[..]][..],
                "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
            ),
        ] {
            assert_eq!(hex(&code(&key, parts)), told);
        }
    }

    #[test]
    fn only_the_key_proves_and_only_for_these_numbers_and_this_side() {
        let key = ClusterKey::parse("correct horse battery staple of 32 bytes").unwrap();
        let other = ClusterKey::parse("correct horse batterz staple of 32 bytes").unwrap();
        let (ours, theirs) = (challenge(), challenge());
        assert_ne!(ours, theirs);
        let proof = key.prove(Prover::KvDialer, &ours, &theirs);
        assert!(key.is_proof(Prover::KvDialer, &ours, &theirs, &proof));
        assert!(!other.is_proof(Prover::KvDialer, &ours, &theirs, &proof));
        assert!(!key.is_proof(Prover::KvListener, &ours, &theirs, &proof), "not to be sent back");
        assert!(!key.is_proof(Prover::KvDialer, &theirs, &ours, &proof));
        assert!(!key.is_proof(Prover::KvDialer, &ours, &challenge(), &proof), "not to be used again");
        for wrong in [&proof[..31], &[&proof[..], &[0]].concat(), &[]] {
            assert!(!key.is_proof(Prover::KvDialer, &ours, &theirs, wrong));
        }
        for at in 0..PROOF_BYTES {
            let mut bent = proof;
            bent[at] ^= 1;
            assert!(!key.is_proof(Prover::KvDialer, &ours, &theirs, &bent), "byte {at}");
        }
    }

    #[test]
    fn a_cluster_goes_from_one_key_to_the_next() {
        let before = ClusterKey::parse("the key before this, of 32 bytes or more").unwrap();
        let between = ClusterKey::parse(
            "the key before this, of 32 bytes or more\n\n  the key after this, of 32 bytes or more  \n",
        )
        .unwrap();
        let after = ClusterKey::parse(
            "the key after this, of 32 bytes or more\nthe key before this, of 32 bytes or more",
        )
        .unwrap();
        let (ours, theirs) = (challenge(), challenge());
        let takes = |taker: &ClusterKey, shower: &ClusterKey| {
            taker.is_proof(Prover::Node, &ours, &theirs, &shower.prove(Prover::Node, &ours, &theirs))
        };
        assert!(takes(&before, &between) && takes(&between, &after) && takes(&after, &between));
        assert!(!takes(&before, &after));
    }

    #[test]
    fn what_is_no_key_is_told_and_no_key_shows() {
        let told = |text: &str| ClusterKey::parse(text).unwrap_err();
        assert!(told(" \n").contains("0 keys"));
        assert!(told(&"0123456789abcdef0123456789abcdef\n".repeat(5)).contains("5 keys"));
        assert!(
            told(&"x".repeat(31)).contains("31 bytes")
                && told("hunter2").contains("7 bytes")
                && !told("hunter2").contains("hunter2")
        );
        let key = ClusterKey::parse("a key that is long enough, for it has 32").unwrap();
        assert!(!format!("{key:?}").contains("long"));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.key");
        assert!(ClusterKey::read(&path).unwrap_err().contains("cluster.key"));
        std::fs::write(&path, "a key that is long enough, for it has 32\n").unwrap();
        ClusterKey::read(&path).unwrap();
        std::fs::write(&path, vec![b'x'; 5000]).unwrap();
        assert!(ClusterKey::read(&path).unwrap_err().contains("5000 bytes"));
    }
}
