//! A small store over the tiers below, and what it is asked from outside.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::key;
use baton_objects::{Clock, LowerConfig, ObjectStore, OperatorLog, Parts, StoreConfig};

/// The messages that a store has reported to its caller.
pub type NoticeLog = Arc<Mutex<Vec<String>>>;

/// Four MiB of memory over these tiers, and the messages about them.
pub fn over(lower: LowerConfig) -> (ObjectStore, NoticeLog) {
    over_parts(lower, None)
}

/// A store for objects of several parts, with these tiers below.
pub fn over_parts(lower: LowerConfig, parts: Option<Parts>) -> (ObjectStore, NoticeLog) {
    let config = StoreConfig {
        capacity_bytes: 4 << 20,
        value_max_bytes: 1 << 20,
        shards: 1,
        high_percent: 100,
        parts,
        ..StoreConfig::default()
    };
    let said: NoticeLog = Arc::default();
    let heard = Arc::clone(&said);
    let log: OperatorLog = Arc::new(move |words: &str| heard.lock().unwrap().push(words.to_owned()));
    let lower = LowerConfig { log: Some(log), ..lower };
    (ObjectStore::with_lower(&config, Clock::machine(), &lower).unwrap(), said)
}

/// The value of a key, from wherever it is.
pub fn read(store: &ObjectStore, name: &str) -> Option<Vec<u8>> {
    if let Some(reading) = store.get(key(name)) {
        return Some(reading.to_vec().unwrap());
    }
    store.bring(key(name)).map(|found| found.to_vec().unwrap())
}

/// Waits until everything that was offered to the tiers below is there.
pub fn settle(store: &ObjectStore) {
    assert!(store.settle(Duration::from_secs(60)), "{:?}", store.lower_stats());
}
