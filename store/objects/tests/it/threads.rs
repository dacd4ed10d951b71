//! Several threads at once: every value read is whole and is one that its key and its maker's number give.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{content, key};
use baton_objects::{Clock, ObjectStore, PutOptions, Refusal, StoreConfig};
use baton_types::Rng;

/// A value that says which key and which write it is of, and is checkable as a whole.
fn value_of(name: u64, write: u64, bytes: usize) -> Vec<u8> {
    let mut value = vec![0; 16];
    value[..8].copy_from_slice(&name.to_le_bytes());
    value[8..].copy_from_slice(&write.to_le_bytes());
    value.extend(content(name << 32 | write, bytes));
    value
}

fn judge(name: u64, value: &[u8]) {
    let number = |at: usize| u64::from_le_bytes(value[at..at + 8].try_into().unwrap());
    assert_eq!(number(0), name, "a value of another key");
    assert_eq!(value, value_of(name, number(8), value.len() - 16), "a value of several writes");
}

fn write(store: &ObjectStore, rng: &mut Rng, name: u64, number: u64) {
    let options = PutOptions::REPLACE;
    let bytes = usize::try_from(rng.below(1 << (7 + 3 * (name % 5)))).unwrap();
    let value = value_of(name, number, bytes);
    let mut ticket = match store.reserve(key(&name.to_string()), value.len() as u64, options) {
        Ok(ticket) => ticket,
        Err(Refusal::Busy { .. } | Refusal::Full { .. }) => return,
        Err(other) => panic!("{other:?}"),
    };
    let cut = usize::try_from(rng.below(value.len() as u64)).unwrap();
    if ticket.write_at(cut, &value[cut..]).and_then(|()| ticket.write_at(0, &value[..cut])).is_err() {
        return;
    }
    if rng.chance_permille(20) {
        return std::mem::forget(ticket);
    }
    match ticket.seal_checked(baton_objects::checksum(&value)) {
        Ok(_) | Err(Refusal::TakenOver) => {}
        Err(other) => panic!("{other:?}"),
    }
}

fn read(store: &ObjectStore, rng: &mut Rng, name: u64) {
    let text = name.to_string();
    let Some(reading) = store.get(key(&text)) else { return };
    let Ok(whole) = reading.to_vec() else { return };
    judge(name, &whole);
    // In pieces, with the writers at work in between.
    let mut copy = vec![0; whole.len()];
    let step = whole.len() / 3 + 1;
    for (at, part) in copy.chunks_mut(step).enumerate() {
        match reading.copy_to(at * step, part) {
            Ok(bytes) => assert_eq!(bytes, part.len()),
            Err(Refusal::Revoked) => return,
            Err(other) => panic!("{other:?}"),
        }
        std::thread::yield_now();
    }
    assert_eq!(copy, whole);
    if rng.chance_permille(5) {
        std::mem::forget(reading);
    }
}

#[test]
fn every_value_read_is_whole_and_of_its_key() {
    // Leases so short that they run out under readers and writers all the time.
    let config = StoreConfig {
        capacity_bytes: 48 << 20,
        value_max_bytes: 4 << 20,
        shards: 2,
        write_lease_us: 1_000,
        read_lease_us: 1_000,
        room_wait_us: 2_000,
        ..StoreConfig::default()
    };
    let store = ObjectStore::new(&config, Clock::machine()).unwrap();
    let numbers = AtomicU64::new(1);
    std::thread::scope(|threads| {
        for thread in 0..4u64 {
            let (store, numbers) = (&store, &numbers);
            threads.spawn(move || {
                let mut rng = Rng::fork(11, thread);
                for _ in 0..4_000 {
                    let name = rng.below(400);
                    match rng.below(10) {
                        0..4 => write(store, &mut rng, name, numbers.fetch_add(1, Ordering::Relaxed)),
                        4..9 => read(store, &mut rng, name),
                        _ => {
                            let _ = store.remove(key(&name.to_string()));
                        }
                    }
                }
            });
        }
    });
    store.check();
    let stats = store.stats();
    assert!(stats.hits > 1_000 && stats.evicted > 100, "{stats:?}");
}

#[test]
fn a_quota_holds_against_many_threads() {
    let config = StoreConfig {
        capacity_bytes: 64 << 20,
        value_max_bytes: 1 << 20,
        shards: 8,
        ..StoreConfig::default()
    };
    let store = ObjectStore::new(&config, Clock::machine()).unwrap();
    let tenant = store.open_tenant("t", 2 << 20).unwrap();
    let refused = AtomicU64::new(0);
    std::thread::scope(|threads| {
        for thread in 0..4u32 {
            let (store, refused) = (&store, &refused);
            threads.spawn(move || {
                for n in 0..1_000u32 {
                    let name = format!("{thread} {n}");
                    let at = baton_objects::Key { tenant, bytes: name.as_bytes() };
                    match store.put(at, &[1; 10_000], PutOptions::default()) {
                        Ok(_) => {}
                        Err(Refusal::OverQuota { .. }) => _ = refused.fetch_add(1, Ordering::Relaxed),
                        Err(other) => panic!("{other:?}"),
                    }
                    assert!(store.tenant_used_bytes(tenant) <= 2 << 20);
                }
            });
        }
    });
    store.check();
    assert!(store.tenant_used_bytes(tenant) > 1 << 20);
    // Its own values give way; only what others write at this very moment does not.
    assert_eq!(refused.into_inner(), 0, "of 4,000 puts");
    assert!(store.stats().evicted > 3_000);
}
