//! Two-phase puts, leases of writers and readers, pins, time to live.

use super::{content, key, pass, small, with};
use baton_objects::{Key, OverwriteRule, PutOptions, Refusal, StoreConfig, StoreOutcome, checksum};
use baton_types::TenantId;

#[test]
fn nothing_is_readable_before_its_seal() {
    let (store, _) = small(16);
    let value = content(1, 300_000);
    let mut ticket = store.reserve(key("a"), 300_000, PutOptions::default()).unwrap();
    ticket.write_at(100_000, &value[100_000..]).unwrap();
    assert!(!store.exists(key("a")) && store.get(key("a")).is_none());
    ticket.write_at(0, &value[..100_000]).unwrap();
    assert_eq!(ticket.seal_checked(checksum(&value)).unwrap(), StoreOutcome::New { generation: 1 });
    assert!(store.get(key("a")).unwrap().to_vec().unwrap() == value);
    store.check();
}

#[test]
fn a_seal_needs_every_byte_and_the_right_sum() {
    let (store, _) = small(16);
    let mut ticket = store.reserve(key("a"), 10, PutOptions::default()).unwrap();
    ticket.append(b"12345").unwrap();
    ticket.write_at(2, b"345").unwrap();
    assert!(matches!(ticket.write_at(8, b"123"), Err(Refusal::Unfilled { .. })));
    assert_eq!(ticket.seal(), Err(Refusal::Unfilled { written: 5, bytes: 10 }));
    let mut ticket = store.reserve(key("a"), 5, PutOptions::default()).unwrap();
    ticket.append(b"12345").unwrap();
    let expected = checksum(b"12346");
    assert_eq!(ticket.seal_checked(expected), Err(Refusal::Corrupt { expected, found: checksum(b"12345") }));
    assert!(!store.exists(key("a")));
    assert_eq!(store.stats().used_bytes, 0);
    store.check();
}

#[test]
fn a_writer_that_went_is_taken_over_when_its_lease_ends() {
    let (store, hand) = small(16);
    let mut gone = store.reserve(key("a"), 5, PutOptions::default()).unwrap();
    gone.append(b"gone!").unwrap();
    assert_eq!(
        store.put(key("a"), b"later", PutOptions::default()),
        Err(Refusal::Busy { retry_after_us: 2_000_000 })
    );
    pass(&hand, 2_000_000);
    assert!(store.put(key("a"), b"later", PutOptions::default()).is_ok());
    assert_eq!(gone.write_at(0, b"x"), Err(Refusal::TakenOver));
    assert_eq!(gone.seal(), Err(Refusal::TakenOver));
    assert_eq!(store.get(key("a")).unwrap().to_vec().unwrap(), b"later");
    assert_eq!(store.stats().taken_over, 1);
    store.check();
}

#[test]
fn of_several_writers_that_replace_the_last_seal_wins() {
    let (store, hand) = small(16);
    let begin = |value: &'static [u8]| {
        let mut ticket = store.reserve(key("a"), value.len() as u64, PutOptions::REPLACE).unwrap();
        ticket.append(value).unwrap();
        ticket
    };
    let [first, second, third, gone] = [b"first", b"other", b"third", b"gone!"].map(|value| begin(value));
    assert_eq!(
        store.put(key("a"), b"same?", PutOptions::default()),
        Err(Refusal::Busy { retry_after_us: 2_000_000 })
    );
    second.seal().unwrap();
    first.seal().unwrap();
    assert_eq!(store.get(key("a")).unwrap().to_vec().unwrap(), b"first");
    store.check();
    // No writer waited for it, so none took its place either.
    pass(&hand, 2_000_000);
    third.seal().unwrap();
    assert_eq!(store.get(key("a")).unwrap().to_vec().unwrap(), b"third");
    store.remove(key("a")).unwrap();
    let late = begin(b"later");
    pass(&hand, 2_000_000);
    // A put that prefers a present value takes over from all writers whose lease has expired.
    assert!(store.put(key("a"), b"mine!", PutOptions::default()).is_ok());
    assert_eq!(store.stats().taken_over, 2);
    assert_eq!([gone, late].map(|ticket| ticket.seal()), [Err(Refusal::TakenOver); 2]);
    assert_eq!(store.get(key("a")).unwrap().to_vec().unwrap(), b"mine!");
    assert_eq!(store.stats().used_bytes, 64, "one slot");
    store.check();
}

#[test]
fn a_writer_that_stood_still_goes_on_where_nobody_took_over() {
    let (store, hand) = small(16);
    let mut slow = store.reserve(key("a"), 5, PutOptions::default()).unwrap();
    slow.append(b"slo").unwrap();
    pass(&hand, 9_000_000);
    (0..300).for_each(|n| assert!(store.put(key(&format!("{n}")), b"x", PutOptions::REPLACE).is_ok()));
    slow.append(b"w!").unwrap();
    assert!(slow.seal().is_ok());
    assert_eq!(store.get(key("a")).unwrap().to_vec().unwrap(), b"slow!");
    store.check();
}

#[test]
fn a_reservation_that_nobody_asks_for_again_ends_too() {
    let (store, hand) = small(16);
    let tickets: Vec<_> = (0..50)
        .map(|n| store.reserve(key(&format!("gone {n}")), 4_000, PutOptions::default()).unwrap())
        .collect();
    let others =
        || (0..300).for_each(|n| assert!(store.put(key(&format!("{n}")), b"x", PutOptions::REPLACE).is_ok()));
    // Its lease is over, but no other writer wants its key: it may have been paused.
    pass(&hand, 11_999_999);
    others();
    assert_eq!(store.stats().abandoned, 0);
    pass(&hand, 1);
    others();
    assert_eq!(store.stats().abandoned, 50);
    tickets.into_iter().for_each(|ticket| assert!(ticket.seal().is_err()));
    store.check();
}

#[test]
fn a_ticket_dropped_leaves_nothing() {
    let (store, _) = small(16);
    drop(store.reserve(key("a"), 9 << 19, PutOptions::default()).unwrap());
    assert_eq!(store.stats().used_bytes, 0);
    assert!(store.put(key("a"), b"x", PutOptions::default()).is_ok());
}

#[test]
fn equal_bytes_are_one_value_and_others_are_refused_or_replaced() {
    let (store, _) = small(16);
    let put = |value: &[u8], options| store.put(key("a"), value, options);
    assert_eq!(put(b"one", PutOptions::default()), Ok(StoreOutcome::New { generation: 1 }));
    assert_eq!(put(b"one", PutOptions::default()), Ok(StoreOutcome::Unchanged { generation: 1 }));
    assert_eq!(put(b"two", PutOptions::default()), Err(Refusal::Exists));
    assert_eq!(put(b"longer", PutOptions::default()), Err(Refusal::Exists));
    let keep = PutOptions { existing: OverwriteRule::Keep, ..PutOptions::REPLACE };
    assert_eq!(put(b"one", keep), Err(Refusal::Exists));
    let generation = match put(b"two", PutOptions::REPLACE) {
        Ok(StoreOutcome::New { generation }) => generation,
        other => panic!("{other:?}"),
    };
    assert!(generation > 1);
    let summed = PutOptions { checksum: Some(checksum(b"two")), ..PutOptions::REPLACE };
    assert!(
        matches!(put(b"two", summed), Ok(StoreOutcome::New { .. })),
        "the first one had no sum to compare"
    );
    let same = put(b"two", summed).unwrap();
    assert!(matches!(same, StoreOutcome::Unchanged { generation: g } if g > generation));
    let absent = PutOptions { only_if_present: true, ..PutOptions::REPLACE };
    assert_eq!(store.put(key("b"), b"x", absent), Err(Refusal::Absent));
    assert!(put(b"three", absent).is_ok());
    store.check();
}

#[test]
fn a_collision_of_one_write_does_not_hide_the_old_value() {
    let (store, _) = small(16);
    store.put(key("a"), b"old", PutOptions::REPLACE).unwrap();
    let mut ticket = store.reserve(key("a"), 3, PutOptions::REPLACE).unwrap();
    ticket.append(b"new").unwrap();
    assert_eq!(store.get(key("a")).unwrap().to_vec().unwrap(), b"old");
    ticket.seal().unwrap();
    assert_eq!(store.get(key("a")).unwrap().to_vec().unwrap(), b"new");
}

#[test]
fn who_reads_goes_on_when_the_value_is_removed_or_replaced() {
    let (store, hand) = small(16);
    let value = content(2, 5_000_000);
    store.put(key("a"), &value, PutOptions::REPLACE).unwrap();
    let reading = store.get(key("a")).unwrap();
    store.put(key("a"), b"new", PutOptions::REPLACE).unwrap();
    store.remove(key("a")).unwrap();
    assert!(!store.exists(key("a")));
    assert!(reading.to_vec().unwrap() == value);
    let mut part = [0; 100];
    assert_eq!(reading.copy_to(4_999_950, &mut part).unwrap(), 50);
    assert_eq!(part[..50], value[4_999_950..]);
    drop(reading);
    assert_eq!(store.stats().used_bytes, 0, "the last reader frees it");
    // After the lease has expired, the memory goes when it is needed, and the reader gets an error.
    store.put(key("b"), &value, PutOptions::REPLACE).unwrap();
    let reading = store.get(key("b")).unwrap();
    store.remove(key("b")).unwrap();
    pass(&hand, 30_000_000);
    store.put(key("c"), b"x", PutOptions::REPLACE).unwrap();
    assert!(reading.to_vec() == Err(Refusal::Revoked));
    drop(reading);
    store.check();
}

#[test]
fn a_lease_keeps_from_eviction_until_its_end_and_never_gives_foreign_bytes() {
    let (store, hand) = small(8);
    let value = content(3, 1 << 20);
    store.put(key("read"), &value, PutOptions::REPLACE).unwrap();
    let reading = store.get(key("read")).unwrap();
    for n in 0..50u64 {
        store.put(key(&format!("{n}")), &content(n, 1 << 20), PutOptions::REPLACE).unwrap();
    }
    assert!(reading.to_vec().unwrap() == value);
    pass(&hand, 30_000_000);
    for n in 0..50u64 {
        store.put(key(&format!("more {n}")), &content(n, 1 << 20), PutOptions::REPLACE).unwrap();
    }
    assert!(reading.to_vec() == Err(Refusal::Revoked));
    drop(reading);
    store.check();
}

#[test]
fn looking_at_a_key_renews_nothing() {
    let (store, hand) = small(8);
    let put =
        |name: String| assert!(store.put(key(&name), &content(1, 1 << 20), PutOptions::REPLACE).is_ok());
    (0..8).for_each(|n| put(n.to_string()));
    let ttl = PutOptions { ttl_us: Some(1_000), ..PutOptions::REPLACE };
    for n in 8..40 {
        assert!(store.exists(key("0")) == (n == 8), "a look does not save from eviction");
        put(n.to_string());
    }
    store.put(key("t"), b"x", ttl).unwrap();
    pass(&hand, 600);
    assert_eq!(store.stat(key("t")).unwrap().ttl_us, Some(400));
    pass(&hand, 400);
    assert!(!store.exists(key("t")) && store.get(key("t")).is_none());
    assert_eq!(store.stats().expired, 1);
    store.check();
}

#[test]
fn what_expires_goes_though_nobody_asks() {
    let (store, hand) = small(8);
    let ttl = PutOptions { ttl_us: Some(1_000), ..PutOptions::REPLACE };
    (0..100).for_each(|n| assert!(store.put(key(&format!("{n}")), b"x", ttl).is_ok()));
    store.set_ttl(key("7"), None).unwrap();
    store.set_ttl(key("8"), Some(5_000)).unwrap();
    pass(&hand, 1_000);
    (0..200).for_each(|n| assert!(store.put(key(&format!("new {n}")), b"x", PutOptions::REPLACE).is_ok()));
    assert_eq!((store.stats().expired, store.stats().keys), (98, 202));
    assert!(store.exists(key("7")) && store.exists(key("8")));
    store.check();
}

#[test]
fn pins_hold_and_come_off() {
    let (store, hand) = small(8);
    let big = |n: u64| content(n, 1 << 20);
    store.put(key("hard"), &big(1), PutOptions { ttl_us: Some(5), ..PutOptions::REPLACE }).unwrap();
    store.put(key("soft"), &big(2), PutOptions::REPLACE).unwrap();
    store.pin(key("hard")).unwrap();
    store.pin(key("hard")).unwrap();
    store.pin_softly(key("soft"), 1_000).unwrap();
    (0..30).for_each(|n| assert!(store.put(key(&format!("{n}")), &big(n), PutOptions::REPLACE).is_ok()));
    pass(&hand, 500);
    assert!(store.exists(key("hard")) && store.exists(key("soft")), "a pinned value does not expire");
    assert_eq!(store.remove(key("hard")), Err(Refusal::Pinned));
    assert_eq!(store.put(key("hard"), b"x", PutOptions::REPLACE), Err(Refusal::Pinned));
    pass(&hand, 500);
    (0..30).for_each(|n| assert!(store.put(key(&format!("b{n}")), &big(n), PutOptions::REPLACE).is_ok()));
    assert!(store.exists(key("hard")) && !store.exists(key("soft")));
    store.unpin(key("hard")).unwrap();
    assert!(store.exists(key("hard")));
    store.unpin(key("hard")).unwrap();
    assert!(!store.exists(key("hard")), "its time has come");
    assert!(store.unpin(key("hard")).is_err());
    assert_eq!(store.pin(key("none")), Err(Refusal::Absent));
    store.check();
}

#[test]
fn a_tenant_at_its_quota_makes_room_among_its_own_however_much_others_have() {
    for shards in [1, 4] {
        let config = StoreConfig {
            capacity_bytes: 64 << 20,
            value_max_bytes: 8 << 20,
            keys_max: 1 << 20,
            shards,
            ..StoreConfig::default()
        };
        let (store, _) = super::with(&config);
        let (big, small) =
            (store.open_tenant("big", u64::MAX).unwrap(), store.open_tenant("small", 1 << 20).unwrap());
        let put = |tenant: TenantId, name: &str, bytes: usize| {
            store.put(Key { tenant, bytes: name.as_bytes() }, &vec![1; bytes], PutOptions::default())
        };
        (0..50).for_each(|n| assert!(put(small, &format!("a{n}"), 4_096).is_ok()));
        (0..50_000).for_each(|n| assert!(put(big, &format!("b{n}"), 64).is_ok()));
        for n in 0..2_000 {
            put(small, &format!("c{n}"), 4_096).unwrap();
        }
        assert_eq!(store.stats().keys, 50_000 + 256, "nothing of others has gone");
        // A large one for many small ones, wherever they are.
        for n in 0..8 {
            put(small, &format!("large {n}"), 700_000).unwrap();
        }
        let refused = put(small, "larger than the quota", 2 << 20).unwrap_err();
        assert!(matches!(refused, Refusal::Value { max_bytes: 1_048_576, .. }), "{refused:?}");
        assert!(store.tenant_used_bytes(small) > 700_000, "and for that nothing went");
        store.check();
    }
}

#[test]
fn a_soft_pin_gives_way_when_nothing_else_is_left() {
    let (store, _) = super::small(4);
    (0..4)
        .for_each(|n| assert!(store.put(key(&n.to_string()), &[1; 1 << 20], PutOptions::default()).is_ok()));
    ["0", "1", "2"].iter().for_each(|name| store.pin_softly(key(name), 3_600_000_000).unwrap());
    store.put(key("new"), &[2; 1 << 20], PutOptions::default()).unwrap();
    assert!(!store.exists(key("3")), "what is not pinned goes first");
    store.pin_softly(key("new"), 3_600_000_000).unwrap();
    for n in 0..10 {
        store.put(key(&format!("more {n}")), &[3; 1 << 20], PutOptions::default()).unwrap();
    }
    store.check();
    // A hard pin does not.
    let (store, _) = super::small(4);
    (0..4)
        .for_each(|n| assert!(store.put(key(&n.to_string()), &[1; 1 << 20], PutOptions::default()).is_ok()));
    ["0", "1", "2", "3"].iter().for_each(|name| store.pin(key(name)).unwrap());
    assert!(matches!(store.put(key("new"), &[2; 1 << 20], PutOptions::default()), Err(Refusal::Full { .. })));
}

#[test]
fn tenants_see_their_own_and_have_their_quota() {
    let (store, _) = small(16);
    let a = store.open_tenant("a", 1 << 20).unwrap();
    let b = store.open_tenant("b", u64::MAX).unwrap();
    let of = |tenant: TenantId, name: &'static str| Key { tenant, bytes: name.as_bytes() };
    store.put(of(a, "k"), b"of a", PutOptions::REPLACE).unwrap();
    store.put(of(b, "k"), b"of b", PutOptions::REPLACE).unwrap();
    assert!(!store.exists(key("k")));
    assert_eq!(store.get(of(a, "k")).unwrap().to_vec().unwrap(), b"of a");
    for n in 0..100u32 {
        let name = n.to_string();
        let at = Key { tenant: a, bytes: name.as_bytes() };
        store.put(at, &content(9, 60_000), PutOptions::REPLACE).unwrap();
        assert!(store.tenant_used_bytes(a) <= 1 << 20);
    }
    assert!(store.exists(of(b, "k")), "a quota evicts its own tenant's");
    assert!(store.stats().evicted > 80);
    assert!(matches!(
        store.put(of(a, "big"), &content(1, 2 << 20), PutOptions::REPLACE),
        Err(Refusal::Value { max_bytes: 1_048_576, .. })
    ));
    let stranger = Key { tenant: TenantId(77), bytes: b"k" };
    assert_eq!(store.put(stranger, b"x", PutOptions::REPLACE), Err(Refusal::Tenant));
    store.check();
}

#[test]
fn damage_at_rest_would_be_found_and_sizes_are_checked() {
    let config = StoreConfig {
        capacity_bytes: 16 << 20,
        value_max_bytes: 1 << 20,
        verify_reads: true,
        ..StoreConfig::default()
    };
    let (store, _) = with(&config);
    let value = content(4, 1_000_000);
    let options = PutOptions { checksum: Some(checksum(&value)), ..PutOptions::REPLACE };
    store.put(key("a"), &value, options).unwrap();
    let mut into = vec![0; 1_000_000];
    assert_eq!(store.get_into(key("a"), &mut into), Ok(Some(1_000_000)));
    assert_eq!((into, store.verify(key("a"))), (value.clone(), Ok(checksum(&value))));
    let wrong = PutOptions { checksum: Some(1), ..PutOptions::REPLACE };
    assert!(matches!(store.put(key("b"), &value, wrong), Err(Refusal::Corrupt { expected: 1, .. })));
    assert!(matches!(
        store.put(key("b"), &content(1, (1 << 20) + 1), PutOptions::REPLACE),
        Err(Refusal::Value { .. })
    ));
    assert!(matches!(store.put(key(""), b"x", PutOptions::REPLACE), Err(Refusal::Key { bytes: 0 })));
    assert!(store.put(key("empty"), b"", PutOptions::REPLACE).is_ok());
    assert_eq!(store.get(key("empty")).unwrap().to_vec().unwrap(), b"");
    store.check();
}
