//! Commands that wait for the tiers below the memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::connection::Connection;
use super::{admin, strings};
use crate::key::Key;
use crate::lower::{BroughtValue, ForgottenCopies, Names, NoAnswerError, Page};
use crate::refusal::Refusal;
use crate::store::{CONFIRM_WITHIN, ObjectStore};

/// How long a command waits for a tier below before it goes on as if that had nothing.
const BRING_WITHIN: Duration = Duration::from_secs(10);
/// How long `FLUSHDB` waits for the bucket, which may have very much.
const FLUSH_WITHIN: Duration = Duration::from_secs(60);
/// Bytes that the answer to one key of an `MGET` may take beside the values in memory: a small value is copied.
const ANSWER_BYTES: usize = 1_400;
/// Too many answers wait for clients to read them.
const CROWDED: &str =
    "OOM the answer is larger than what is left for answers that wait; ask for fewer keys, or again later";
/// Values that one `MGET` brings up at a time.
const AT_A_TIME: usize = 32;
/// Keys on the SSD that one step of `FLUSHDB` reads.
const FLUSH_AT_A_TIME: usize = 1_000;
/// Cursors of `SCAN` from here on go through the keys on the SSD, by their names without the last two bits.
const ON_SSD: u64 = 1 << 63;
/// And from here on through those in the bucket.
const IN_BUCKET: u64 = 3 << 62;
/// The bucket is silent, so a list of keys would be short without saying so.
const SILENT: &str =
    "ERR the bucket below does not answer: keys that are only there cannot be listed; ask again later";
/// Error of a scan while the SSD is silent.
const SSD_SILENT: &str = "ERR the SSD below does not answer: keys that are only there cannot be listed; ask again later, look at the disk";

/// A value on its way up.
pub(super) type ValueReceiver = oneshot::Receiver<Option<Arc<BroughtValue>>>;

/// Starts to bring a value up, if memory has it not and a tier below may.
pub(super) fn start(store: &ObjectStore, key: Key<'_>) -> Option<ValueReceiver> {
    if store.lower().is_none() || store.exists(key) || !store.is_below(key) {
        return None;
    }
    let (send, receive) = oneshot::channel();
    store.bring_with(key, Box::new(move |found| _ = send.send(found)));
    Some(receive)
}

/// The value, if it came within the command's time.
async fn arrived(coming: ValueReceiver, end: Instant) -> Option<Arc<BroughtValue>> {
    tokio::time::timeout_at(end.into(), coming).await.ok()?.ok()?
}

/// Brings the value of an argument up, and waits for it.
pub(super) async fn bring(on: &Connection<'_>, argument: usize) -> Option<Arc<BroughtValue>> {
    arrived(start(&on.shared.store, on.key(argument))?, Instant::now() + BRING_WITHIN).await
}

/// Waits until what was forgotten cannot come back, within a bound.
pub(super) async fn confirm(store: &ObjectStore, forgotten: &ForgottenCopies) -> Result<(), Refusal> {
    confirm_all(store, std::slice::from_ref(forgotten)).await
}

/// Confirms several removals that are in progress at once: one flush of the disk may cover all of them.
pub(super) async fn confirm_all(store: &ObjectStore, removals: &[ForgottenCopies]) -> Result<(), Refusal> {
    let end = Instant::now() + CONFIRM_WITHIN;
    let mut result = Ok(());
    for forgotten in removals.iter().filter(|forgotten| !forgotten.is_nothing()) {
        let mut pause = Duration::from_micros(200);
        while !forgotten.is_answered() && Instant::now() < end {
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(Duration::from_millis(5));
        }
        result = result.and(store.confirmed(forgotten));
    }
    result
}

pub(super) async fn get(on: &mut Connection<'_>) {
    if let Some(reading) = on.shared.store.get(on.key(1)) {
        return strings::answer(on, reading);
    }
    let Some(found) = bring(on, 1).await else { return on.out.nothing() };
    match on.shared.store.get(on.key(1)) {
        Some(reading) => strings::answer(on, reading),
        // Memory is full of what is held: the client gets the value all the same.
        None => on.out.found(found),
    }
}

pub(super) async fn mget(on: &mut Connection<'_>) {
    let keys: Vec<usize> = (1..on.incoming.count()).collect();
    if !on.has_room_for(keys.len() * ANSWER_BYTES) {
        return on.out.error(CROWDED);
    }
    let (mut found, mut bytes) = (Vec::with_capacity(keys.len()), 0);
    // One for all of them, or a tier that hangs would be waited for as often as there are keys.
    let end = Instant::now() + BRING_WITHIN;
    for some in keys.chunks(AT_A_TIME) {
        let coming: Vec<_> = some.iter().map(|at| start(&on.shared.store, on.key(*at))).collect();
        for (at, coming) in some.iter().zip(coming) {
            let brought = match coming {
                Some(coming) => arrived(coming, end).await,
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
    let (mut removals, mut removed, mut refused) = (Vec::new(), 0, None);
    for at in 1..on.incoming.count() {
        match on.shared.store.remove_unconfirmed(on.key(at)) {
            Ok(forgotten) => {
                removed += 1;
                removals.push(forgotten);
            }
            Err(Refusal::Absent) => {}
            Err(refusal) => refused = refused.or(Some(refusal)),
        }
    }
    let confirmed = confirm_all(&on.shared.store, &removals).await;
    match refused.map_or(confirmed, Err) {
        Ok(()) => on.out.integer(removed),
        Err(refusal) => on.refuse(refusal),
    }
}

/// `BATON.DEL key generation`: removes a value if it is the one that `BATON.STAT` gave this generation.
pub(super) async fn del_generation(on: &mut Connection<'_>) {
    let Some(generation) = on.number(2).and_then(|number| u64::try_from(number).ok()) else {
        return on.not_a_number();
    };
    let removed = on.shared.store.remove_generation(on.key(1), generation);
    let confirmed = match removed {
        Ok(forgotten) => confirm(&on.shared.store, &forgotten).await,
        Err(refusal) => Err(refusal),
    };
    match confirmed {
        Ok(()) => on.out.integer(1),
        Err(Refusal::Absent) => on.out.integer(0),
        Err(refusal) => on.refuse(refusal),
    }
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
    match confirm(&on.shared.store, &forgotten).await {
        Ok(()) => on.out.integer(1),
        Err(refusal) => on.refuse(refusal),
    }
}

/// Some keys on the SSD, after a name: each with its tenant's name; and where to go on.
async fn list(store: &ObjectStore, after: Option<u64>, most: usize) -> Result<Names, NoAnswerError> {
    let Some(lower) = store.lower() else { return Ok((Vec::new(), None)) };
    let (send, receive) = oneshot::channel();
    lower.list(after, most, Box::new(move |listed| _ = send.send(listed)));
    tokio::time::timeout(BRING_WITHIN, receive)
        .await
        .map_err(|_| NoAnswerError)?
        .map_err(|_| NoAnswerError)?
}

/// Removes what a tenant has below alone. Gives the last removal on the SSD.
///
/// # Errors
/// In words: not all of it could be found.
pub(super) async fn flush(on: &Connection<'_>) -> Result<ForgottenCopies, &'static str> {
    let (Some(tenant), store) = (on.tenant, &on.shared.store) else { return Ok(ForgottenCopies::default()) };
    let (named, mut after, mut last) = (store.tenant_name(tenant), None, ForgottenCopies::default());
    if let Some(cold) = store.cold() {
        cold.forget_tenant(&named);
    }
    loop {
        let (found, next) = list(store, after, FLUSH_AT_A_TIME).await.map_err(|_| SSD_SILENT)?;
        for (_, key) in found.iter().filter(|(other, _)| *other == named) {
            last = store.remove_unconfirmed(Key { tenant, bytes: key }).unwrap_or_default().or(last);
        }
        after = next;
        if after.is_none() {
            return Ok(last);
        }
    }
}

/// Waits until the bucket has confirmed every removal, within a bound.
pub(super) async fn flushed(store: &ObjectStore) -> Result<(), Refusal> {
    let end = Instant::now() + FLUSH_WITHIN;
    while let Some(cold) = store.cold().filter(|cold| cold.unconfirmed_removals() > 0) {
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
    if !on.has_room_for(asked.entries as usize * (crate::KEY_MAX_BYTES + 16)) {
        return on.out.error(CROWDED);
    }
    let listed = match asked.cursor {
        ..ON_SSD => Ok(scan_memory(on, &asked)),
        ON_SSD..IN_BUCKET => scan_ssd(on, &asked).await.map_err(|_| SSD_SILENT),
        IN_BUCKET.. => scan_bucket(on, &asked).await.map_err(|_| SILENT),
    };
    let (mut keys, next) = match listed {
        Ok(listed) => listed,
        Err(why) => return on.out.error(why),
    };
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

async fn scan_ssd(on: &Connection<'_>, asked: &admin::Scan) -> Result<Step, NoAnswerError> {
    let store = &on.shared.store;
    let tenant = on.tenant.map(|tenant| store.tenant_name(tenant)).unwrap_or_default();
    let (found, next) = list(store, name_at(asked.cursor, ON_SSD), asked.entries as usize).await?;
    let mine = found.into_iter().filter(|(other, _)| *other == tenant).map(|(_, key)| key);
    let end = if store.cold().is_some() { IN_BUCKET } else { 0 };
    Ok((mine.collect(), next.map_or(end, |name| ON_SSD | name >> 2)))
}

async fn scan_bucket(on: &Connection<'_>, asked: &admin::Scan) -> Result<Step, NoAnswerError> {
    let store = &on.shared.store;
    let (Some(lower), Some(cold)) = (store.lower(), store.cold()) else { return Ok((Vec::new(), 0)) };
    let tenant = on.tenant.map(|tenant| store.tenant_name(tenant)).unwrap_or_default();
    let (send, receive) = oneshot::channel();
    let whose = (tenant, name_at(asked.cursor, IN_BUCKET));
    let reply = Box::new(move |page| _ = send.send(page));
    cold.list(whose, asked.entries as usize, |name| lower.lasts(name), reply);
    let page = tokio::time::timeout(BRING_WITHIN, receive).await;
    let Page { keys, next } = page.map_err(|_| NoAnswerError)?.map_err(|_| NoAnswerError)??;
    Ok((keys, next.map_or(0, |name| IN_BUCKET | name >> 2)))
}
