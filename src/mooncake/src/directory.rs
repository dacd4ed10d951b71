//! The metadata server of Mooncake's engines, over HTTP: values under keys, last writer wins.
//!
//! Engines put what others must know of them (`/metadata?key=...`, GET, PUT and DELETE) and take it away when they end.
//! A key of an engine's address (`rpc_meta`) belongs to who put it first, for two engines under one name would answer
//! each other's peers.

mod client;
mod server;

pub use client::lookup;
pub use server::serve_directory;

use std::collections::BTreeMap;

use bytes::Bytes;
use parking_lot::Mutex;

/// Bounds of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectorySettings {
    /// Keys at most.
    pub max_keys: usize,
    /// Bytes of a key at most.
    pub key_bytes: usize,
    /// Bytes of a value at most.
    pub value_bytes: usize,
    /// Bytes of all keys and values at most.
    pub total_bytes: usize,
    /// Connections at once; further ones wait in the kernel's queue.
    pub max_connections: usize,
    /// Time for a request's head, and then for its body.
    pub receive_timeout_us: u64,
}

impl Default for DirectorySettings {
    fn default() -> Self {
        Self {
            max_keys: 65_536,
            key_bytes: 1024,
            value_bytes: 1 << 20,
            total_bytes: 256 << 20,
            max_connections: 1024,
            receive_timeout_us: 10_000_000,
        }
    }
}

/// Why a value was not put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutError {
    /// The address is another engine's.
    Taken,
    /// The value is too long.
    Long,
    /// There are too many keys, or bytes.
    Full,
}

/// Values under keys.
pub struct Directory {
    settings: DirectorySettings,
    held: Mutex<DirectoryContent>,
}

#[derive(Default)]
struct DirectoryContent {
    values: BTreeMap<String, Bytes>,
    bytes: usize,
}

/// The part of a key that marks an engine's address.
const ADDRESS_KEY: &str = "rpc_meta";

impl Directory {
    /// An empty one.
    #[must_use]
    pub fn new(settings: DirectorySettings) -> Self {
        Self { settings, held: Mutex::default() }
    }

    /// Its bounds.
    #[must_use]
    pub const fn settings(&self) -> &DirectorySettings {
        &self.settings
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<Bytes> {
        self.held.lock().values.get(key).cloned()
    }

    /// Puts a value under a key, in place of the one before.
    ///
    /// # Errors
    /// When a bound is reached, or the key is an address that is another's; the value before stays.
    pub fn put(&self, key: &str, value: Bytes) -> Result<(), PutError> {
        if value.len() > self.settings.value_bytes || key.len() > self.settings.key_bytes {
            return Err(PutError::Long);
        }
        let mut held = self.held.lock();
        let before = held.values.get(key);
        if key.contains(ADDRESS_KEY) && before.is_some_and(|before| *before != value) {
            return Err(PutError::Taken);
        }
        let (known, freed) = (before.is_some(), before.map_or(0, |before| key.len() + before.len()));
        let bytes = held.bytes - freed + key.len() + value.len();
        if bytes > self.settings.total_bytes || (!known && held.values.len() >= self.settings.max_keys) {
            return Err(PutError::Full);
        }
        held.bytes = bytes;
        // A copy of its own: the value must not keep the buffer alive that it was received in.
        held.values.insert(key.to_owned(), Bytes::copy_from_slice(&value));
        Ok(())
    }

    /// Removes a key. Returns whether it was there.
    pub fn remove(&self, key: &str) -> bool {
        let mut held = self.held.lock();
        let Some(value) = held.values.remove(key) else { return false };
        held.bytes -= key.len() + value.len();
        true
    }

    /// How many keys there are, and bytes of keys and values.
    #[must_use]
    pub fn held(&self) -> (usize, usize) {
        let held = self.held.lock();
        (held.values.len(), held.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn small() -> Directory {
        Directory::new(DirectorySettings {
            max_keys: 3,
            key_bytes: 20,
            value_bytes: 10,
            total_bytes: 40,
            ..Default::default()
        })
    }

    #[test]
    fn the_last_writer_of_a_segment_wins_and_the_first_of_an_address() {
        let directory = small();
        for value in ["one", "two"] {
            directory.put("ram/a", Bytes::from(value)).unwrap();
        }
        assert_eq!(directory.get("ram/a").unwrap(), "two");
        directory.put("rpc_meta/a", Bytes::from("one")).unwrap();
        assert_eq!(directory.put("rpc_meta/a", Bytes::from("one")), Ok(()), "said again");
        assert_eq!(directory.put("rpc_meta/a", Bytes::from("two")), Err(PutError::Taken));
        assert!(directory.remove("rpc_meta/a") && !directory.remove("rpc_meta/a"));
        assert_eq!(directory.put("rpc_meta/a", Bytes::from("two")), Ok(()));
    }

    #[test]
    fn every_bound_holds_and_what_is_removed_is_room() {
        let directory = small();
        assert_eq!(directory.put("k", Bytes::from(vec![0; 11])), Err(PutError::Long));
        assert_eq!(directory.put(&"k".repeat(21), Bytes::new()), Err(PutError::Long));
        for key in ["a", "b", "c"] {
            directory.put(key, Bytes::from(vec![0; 10])).unwrap();
        }
        assert_eq!(directory.put("d", Bytes::new()), Err(PutError::Full), "too many keys");
        directory.remove("a");
        assert_eq!(
            directory.put("a very long key, yes", Bytes::new()),
            Err(PutError::Full),
            "too many bytes"
        );
        assert_eq!(directory.put("d", Bytes::from(vec![0; 10])), Ok(()));
        assert_eq!(directory.held(), (3, 33));
    }

    proptest! {
        #[test]
        fn its_account_of_bytes_is_right(steps in prop::collection::vec((0u8..5, 0usize..12, any::<bool>()), 0..60)) {
            let directory = small();
            for (key, bytes, put) in steps {
                let key = format!("key{key}");
                if put {
                    let _ = directory.put(&key, Bytes::from(vec![1; bytes]));
                } else {
                    directory.remove(&key);
                }
                let keys = (0..5).map(|key| format!("key{key}"));
                let there: Vec<usize> =
                    keys.filter_map(|key| directory.get(&key).map(|value| key.len() + value.len())).collect();
                prop_assert_eq!(directory.held(), (there.len(), there.iter().sum()));
                prop_assert!(directory.held().1 <= 40 && there.len() <= 3);
            }
        }
    }
}
