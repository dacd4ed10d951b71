//! Making room: eviction, classes that give pages to each other, bounds, listing, weight.

use std::time::{Duration, Instant};

use super::{content, key, pass, small, with};
use baton_objects::{Key, PutOptions, Refusal, StoreConfig};

#[test]
fn what_is_read_outlives_what_is_not() {
    let (store, _) = small(16);
    let mut buffer = vec![0; 4_096];
    for n in 0..20_000u32 {
        let name = n.to_string();
        store.put(key(&name), &content(u64::from(n), 4_096), PutOptions::REPLACE).unwrap();
        assert_eq!(store.get_into(key("0"), &mut buffer), Ok(Some(4_096)), "the hot one stays ({n})");
        assert_eq!(buffer, content(0, 4_096));
    }
    let stats = store.stats();
    assert!(stats.keys >= 4_000 && stats.evicted > 15_000, "{stats:?}");
    store.check();
}

#[test]
fn memory_follows_the_sizes_that_are_written() {
    let (store, _) = small(32);
    for (round, bytes) in [200, 100_000, 4_096, 8_000_000, 64, 700_000].into_iter().enumerate() {
        let count = (96 << 20) / bytes.max(2_000);
        for n in 0..count {
            let name = format!("{round} {n}");
            store.put(key(&name), &vec![7; bytes], PutOptions::REPLACE).unwrap();
        }
        let last = format!("{round} {}", count - 1);
        assert_eq!(store.get(key(&last)).unwrap().to_vec().unwrap(), vec![7; bytes]);
        store.check();
    }
    let (listed, _) = store.list(0, 100_000);
    let now: u64 = listed.iter().filter(|l| l.key.starts_with(b"5")).map(|l| u64::from(l.stat.bytes)).sum();
    assert!(now > 16 << 20, "{now} bytes of the size written last, {:?}", store.stats());
}

#[test]
fn a_large_value_finds_room_among_shards_full_of_small_ones() {
    let config = StoreConfig {
        capacity_bytes: 64 << 20,
        value_max_bytes: 32 << 20,
        shards: 8,
        room_wait_us: 0,
        ..StoreConfig::default()
    };
    let (store, _) = with(&config);
    for n in 0..40_000u32 {
        store.put(key(&n.to_string()), &[1; 2_000], PutOptions::REPLACE).unwrap();
    }
    let value = content(1, 32 << 20);
    store.put(key("large"), &value, PutOptions::REPLACE).unwrap();
    assert_eq!(store.get(key("large")).unwrap().to_vec().unwrap(), value);
    store.check();
}

#[test]
fn full_of_leased_data_waits_within_its_bound_and_says_when_to_come_back() {
    let config = StoreConfig {
        capacity_bytes: 8 << 20,
        value_max_bytes: 4 << 20,
        shards: 1,
        room_wait_us: 60_000,
        ..StoreConfig::default()
    };
    let (store, hand) = with(&config);
    let mut readings = Vec::new();
    for n in 0..8 {
        let name = n.to_string();
        if store.put(key(&name), &content(n, 1 << 20), PutOptions::REPLACE).is_ok() {
            readings.extend(store.get(key(&name)));
        }
    }
    assert_eq!(readings.len(), 8);
    let start = Instant::now();
    let refused = store.put(key("more"), &content(1, 1 << 20), PutOptions::REPLACE).unwrap_err();
    assert!(refused.retry_after_us().is_some_and(|us| us > 0), "{refused:?}");
    assert!(start.elapsed() >= Duration::from_micros(60_000), "it waited");
    // A lease that ends while the put waits is enough.
    let last = readings.pop();
    let put = std::thread::scope(|threads| {
        threads.spawn(|| {
            std::thread::sleep(Duration::from_millis(10));
            drop(last);
        });
        let waiting = |_| store.put(key("more"), &content(1, 1 << 20), PutOptions::REPLACE).ok();
        (0..50).find_map(waiting)
    });
    assert!(put.is_some());
    pass(&hand, 30_000_000);
    assert!(
        store.put(key("yet more"), &content(1, 3 << 20), PutOptions::REPLACE).is_ok(),
        "leases have a cap"
    );
    drop(readings);
    store.check();
}

#[test]
fn pinned_to_the_brim_is_refused_and_everything_stays() {
    let (store, _) = small(8);
    for n in 0..8 {
        let name = n.to_string();
        store.put(key(&name), &content(n, 1 << 20), PutOptions::REPLACE).unwrap();
        store.pin(key(&name)).unwrap();
    }
    assert!(matches!(store.put(key("more"), b"x", PutOptions::REPLACE), Err(Refusal::Full { .. })));
    for n in 0..8 {
        let name = n.to_string();
        assert_eq!(store.get(key(&name)).unwrap().to_vec().unwrap(), content(n, 1 << 20));
        store.unpin(key(&name)).unwrap();
    }
    assert!(store.put(key("more"), b"x", PutOptions::REPLACE).is_ok());
    store.check();
}

#[test]
fn keys_have_a_bound_even_when_values_are_empty() {
    let config = StoreConfig {
        capacity_bytes: 8 << 20,
        value_max_bytes: 1 << 20,
        keys_max: 1_000,
        shards: 1,
        room_wait_us: 0,
        ..StoreConfig::default()
    };
    let (store, _) = with(&config);
    for n in 0..5_000u32 {
        store.put(key(&n.to_string()), if n % 2 == 0 { b"" } else { b"xyz" }, PutOptions::REPLACE).unwrap();
    }
    assert_eq!(store.stats().keys, 1_000);
    store.check();
}

#[test]
fn over_the_high_mark_puts_make_more_room_than_they_need() {
    let config = StoreConfig {
        capacity_bytes: 64 << 20,
        value_max_bytes: 1 << 20,
        shards: 2,
        high_percent: 50,
        ..StoreConfig::default()
    };
    let (store, _) = with(&config);
    for n in 0..20_000u32 {
        store.put(key(&n.to_string()), &[1; 8_192], PutOptions::REPLACE).unwrap();
        assert!(store.stats().used_bytes <= (32 << 20) + 8_192 * 4);
    }
    assert!(store.stats().used_bytes > 31 << 20);
}

#[test]
fn a_listing_shows_every_key_once_while_nothing_changes() {
    let config = StoreConfig {
        capacity_bytes: 64 << 20,
        value_max_bytes: 1 << 20,
        shards: 8,
        ..StoreConfig::default()
    };
    let (store, _) = with(&config);
    let tenant = store.open_tenant("t", u64::MAX).unwrap();
    let mut expected: Vec<Vec<u8>> = (0..3_000u32).map(|n| n.to_string().into_bytes()).collect();
    expected
        .iter()
        .for_each(|bytes| assert!(store.put(Key { tenant, bytes }, bytes, PutOptions::REPLACE).is_ok()));
    let (mut found, mut cursor, mut calls) = (Vec::new(), 0, 0);
    loop {
        let (listed, next) = store.list(cursor, 100);
        assert!(listed.len() <= 100 && listed.iter().all(|l| l.tenant == tenant));
        found.extend(listed.into_iter().map(|l| l.key));
        (cursor, calls) = (next, calls + 1);
        if cursor == 0 {
            break;
        }
    }
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
    assert!(calls >= 30 && store.list(u64::MAX, 5) == (Vec::new(), 0));
}

#[test]
fn a_key_weighs_at_most_210_bytes_beside_itself() {
    for length in [42, 180, 1_000] {
        let config =
            StoreConfig { capacity_bytes: 512 << 20, value_max_bytes: 1 << 20, ..StoreConfig::default() };
        let (store, _) = with(&config);
        let count = 100_000;
        for n in 0..count {
            // As connectors name them: a model, a worker and a hash.
            let name = format!("llama@1@0@{n:0width$x}", width = length - 10);
            store.put(key(&name), &[1; 4_096], PutOptions::REPLACE).unwrap();
        }
        assert_eq!(store.stats().keys, count);
        let each = store.metadata_bytes() as u64 / count;
        assert!((80..=210).contains(&(each - length as u64)), "{each} bytes a key of {length}");
    }
}
