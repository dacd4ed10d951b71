//! Commands that wait for the tiers below the memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::connection::Connection;
use super::{admin, strings};
use crate::key::Key;
use crate::lower::{Forgotten, Found, Page, Silent};
use crate::refusal::Refusal;
use crate::store::{CONFIRM_WITHIN, ObjectStore};

/// How long a client waits for a tier below before it is told of a miss.
const BRING_WITHIN: Duration = Duration::from_secs(10);
/// How long `FLUSHDB` waits for the bucket, which may have very much.
const FLUSH_WITHIN: Duration = Duration::from_secs(60);
/// Values that one `MGET` brings up at a time.
const AT_A_TIME: usize = 32;
/// Cursors of `SCAN` from here on go through the keys on the SSD, by their names without the last two bits.
const ON_SSD: u64 = 1 << 63;
/// And from here on through those in the bucket.
const IN_BUCKET: u64 = 3 << 62;
/// The bucket is silent, so a list of keys would be short without saying so.
const SILENT: &str =
    "ERR the bucket below does not answer: keys that are only there cannot be listed; ask again later";

/// A value on its way up.
pub(super) type Coming = oneshot::Receiver<Option<Arc<Found>>>;

/// Starts to bring a value up, if memory has it not and a tier below may.
pub(super) fn start(store: &ObjectStore, key: Key<'_>) -> Option<Coming> {
    if store.lower().is_none() || store.exists(key) || !store.is_below(key) {
        return None;
    }
    let (send, receive) = oneshot::channel();
    store.bring_with(key, Box::new(move |found| _ = send.send(found)));
    Some(receive)
}

/// What came.
async fn arrived(coming: Coming) -> Option<Arc<Found>> {
    tokio::time::timeout(BRING_WITHIN, coming).await.ok()?.ok()?
}

/// Brings the value of an argument up, and waits for it.
pub(super) async fn bring(on: &Connection<'_>, argument: usize) -> Option<Arc<Found>> {
    arrived(start(&on.shared.store, on.key(argument))?).await
}

/// Waits until what was forgotten cannot come back, within a bound.
pub(super) async fn confirm(store: &ObjectStore, forgotten: Forgotten) -> Result<(), Refusal> {
    if forgotten.is_nothing() {
        return Ok(());
    }
    let end = Instant::now() + CONFIRM_WITHIN;
    let mut pause = Duration::from_micros(200);
    while !forgotten.is_answered() && Instant::now() < end {
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(Duration::from_millis(5));
    }
    store.confirmed(&forgotten)
}

pub(super) async fn get(on: &mut Connection<'_>) {
    if let Some(reading) = on.shared.store.get(on.key(1)) {
        return strings::answer(on, reading);
    }
    let Some(found) = bring(on, 1).await else { return on.out.nothing() };
    match on.shared.store.get(on.key(1)) {
        Some(reading) => strings::answer(on, reading),
        // Memory is full of what is held: the client gets the value all the same.
        None => on.out.bulk(&found.value),
    }
}

pub(super) async fn mget(on: &mut Connection<'_>) {
    let keys: Vec<usize> = (1..on.incoming.count()).collect();
    let (mut found, mut bytes) = (Vec::with_capacity(keys.len()), 0);
    for some in keys.chunks(AT_A_TIME) {
        let coming: Vec<_> = some.iter().map(|at| start(&on.shared.store, on.key(*at))).collect();
        for (at, coming) in some.iter().zip(coming) {
            let brought = match coming {
                Some(coming) => arrived(coming).await,
                None => None,
            };
            let one = strings::Answer::of(on.shared.store.get(on.key(*at)), brought);
            bytes += one.bytes();
            if bytes > strings::ANSWER_MAX_BYTES {
                return on.out.error("ERR the answer would be larger than 1 GiB; ask for fewer keys");
            }
            found.push(one);
        }
    }
    strings::answer_all(on, found);
}

pub(super) async fn exists(on: &mut Connection<'_>) {
    let mut found = 0;
    for at in 1..on.incoming.count() {
        let store = &on.shared.store;
        found += i64::from(store.exists(on.key(at)) || store.is_below(on.key(at)));
    }
    on.out.integer(found);
}

pub(super) async fn del(on: &mut Connection<'_>) {
    let mut removed = 0;
    for at in 1..on.incoming.count() {
        match on.shared.store.remove_unconfirmed(on.key(at)) {
            Ok(forgotten) => {
                if let Err(refusal) = confirm(&on.shared.store, forgotten).await {
                    return on.refuse(refusal);
                }
                removed += 1;
            }
            Err(Refusal::Absent) => {}
            Err(refusal) => return on.refuse(refusal),
        }
    }
    on.out.integer(removed);
}

pub(super) async fn expire(on: &mut Connection<'_>, unit_us: u64) {
    let Some(time) = on.number(2) else { return on.not_a_number() };
    let key = on.key(1);
    // A time that has passed removes the key, as clients expect.
    let done = match u64::try_from(time) {
        Ok(time) if time > 0 => on.shared.store.set_ttl_unconfirmed(key, Some(time.saturating_mul(unit_us))),
        _ => on.shared.store.remove_unconfirmed(key),
    };
    let Ok(forgotten) = done else { return on.out.integer(0) };
    match confirm(&on.shared.store, forgotten).await {
        Ok(()) => on.out.integer(1),
        Err(refusal) => on.refuse(refusal),
    }
}

/// Some keys below, after a name: each with its tenant's name; and where to go on.
async fn list(store: &ObjectStore, after: Option<u64>, most: usize) -> (Vec<(String, Vec<u8>)>, Option<u64>) {
    let Some(lower) = store.lower() else { return (Vec::new(), None) };
    let (send, receive) = oneshot::channel();
    lower.list(after, most, Box::new(move |found, next| _ = send.send((found, next))));
    let listed = tokio::time::timeout(BRING_WITHIN, receive).await;
    listed.ok().and_then(Result::ok).unwrap_or_default()
}

/// Removes what a tenant has below alone. Gives the last removal on the SSD.
pub(super) async fn flush(on: &Connection<'_>) -> Forgotten {
    let (Some(tenant), store) = (on.tenant, &on.shared.store) else { return Forgotten::default() };
    let (named, mut after, mut last) = (store.tenant_name(tenant), None, Forgotten::default());
    if let Some(cold) = store.cold() {
        cold.forget_tenant(&named);
    }
    loop {
        let (found, next) = list(store, after, AT_A_TIME).await;
        for (_, key) in found.iter().filter(|(other, _)| *other == named) {
            last = store.remove_unconfirmed(Key { tenant, bytes: key }).unwrap_or_default().or(last);
        }
        after = next;
        if after.is_none() {
            return last;
        }
    }
}

/// Waits until the bucket has confirmed every removal, within a bound.
pub(super) async fn flushed(store: &ObjectStore) -> Result<(), Refusal> {
    let end = Instant::now() + FLUSH_WITHIN;
    while let Some(cold) = store.cold().filter(|cold| cold.going() > 0) {
        if Instant::now() >= end || !cold.is_on() {
            return Err(Refusal::Unconfirmed);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// `SCAN`: the keys in memory, then those that are only on the SSD, then those that are only in the bucket.
pub(super) async fn scan(on: &mut Connection<'_>) {
    let asked = match admin::scan_words(on) {
        Ok(asked) => asked,
        Err(error) => return on.out.error(error),
    };
    let listed = match asked.cursor {
        ..ON_SSD => scan_memory(on, &asked),
        ON_SSD..IN_BUCKET => scan_ssd(on, &asked).await,
        IN_BUCKET.. => match scan_bucket(on, &asked).await {
            Ok(listed) => listed,
            Err(Silent) => return on.out.error(SILENT),
        },
    };
    let (mut keys, next) = listed;
    if asked.cursor >= ON_SSD {
        let store = &on.shared.store;
        keys.retain(|key| {
            let key = on.tenant.map(|tenant| Key { tenant, bytes: key });
            key.is_some_and(|key| !store.exists(key) && store.is_whole(key))
        });
    }
    admin::scanned(on, &asked.pattern, keys, next);
}

/// The keys that a step of a `SCAN` has found, and the cursor to go on from.
type Step = (Vec<Vec<u8>>, u64);

/// The name to go on after; none at the beginning of a tier.
fn name_at(cursor: u64, tier: u64) -> Option<u64> {
    (cursor > tier).then_some(cursor << 2 | 3)
}

fn scan_memory(on: &Connection<'_>, asked: &admin::Scan) -> Step {
    let store = &on.shared.store;
    let (listed, next) = store.list(asked.cursor, asked.entries);
    let mine = listed.into_iter().filter(|listed| Some(listed.tenant) == on.tenant);
    let next = if next == 0 && store.lower().is_some() { ON_SSD } else { next };
    (mine.map(|listed| listed.key).collect(), next)
}

async fn scan_ssd(on: &Connection<'_>, asked: &admin::Scan) -> Step {
    let store = &on.shared.store;
    let tenant = on.tenant.map(|tenant| store.tenant_name(tenant)).unwrap_or_default();
    let (found, next) = list(store, name_at(asked.cursor, ON_SSD), asked.entries as usize).await;
    let mine = found.into_iter().filter(|(other, _)| *other == tenant).map(|(_, key)| key);
    let end = if store.cold().is_some() { IN_BUCKET } else { 0 };
    (mine.collect(), next.map_or(end, |name| ON_SSD | name >> 2))
}

async fn scan_bucket(on: &Connection<'_>, asked: &admin::Scan) -> Result<Step, Silent> {
    let store = &on.shared.store;
    let (Some(lower), Some(cold)) = (store.lower(), store.cold()) else { return Ok((Vec::new(), 0)) };
    let tenant = on.tenant.map(|tenant| store.tenant_name(tenant)).unwrap_or_default();
    let (send, receive) = oneshot::channel();
    let whose = (tenant, name_at(asked.cursor, IN_BUCKET));
    let reply = Box::new(move |page| _ = send.send(page));
    cold.list(whose, asked.entries as usize, |name| lower.lasts(name), reply);
    let page = tokio::time::timeout(BRING_WITHIN, receive).await;
    let Page { keys, next } = page.map_err(|_| Silent)?.map_err(|_| Silent)??;
    Ok((keys, next.map_or(0, |name| IN_BUCKET | name >> 2)))
}
