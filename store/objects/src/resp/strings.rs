//! Commands on values.

use std::sync::Arc;

use super::below;
use super::connection::{Connection, reserve};
use crate::lower::{BroughtValue, ForgottenCopies};
use crate::reading::Reading;
use crate::refusal::Refusal;
use crate::store::{OverwriteRule, PutOptions, StoreOutcome};

/// Most bytes that one `MGET` answers.
pub(super) const ANSWER_MAX_BYTES: usize = 1 << 30;

/// Longest pin of a client, who may never come back to take it off.
const PIN_MAX_MS: u64 = 3_600_000;

/// The puts.
#[derive(Clone, Copy, Debug)]
pub(super) enum PutCommand {
    /// `SET` with its options.
    Set,
    /// `SETNX`: only if the key does not exist.
    IfAbsent,
    /// `SETEX`, `PSETEX`: the unit of the time, µs.
    Timed(u64),
    /// `MSET`: several keys.
    Several,
}

/// The options of `SET` after the value.
#[derive(Default)]
struct SetWords {
    options: PutOptions,
    answer_old: bool,
    keep_ttl: bool,
}

/// Answers with a value.
pub(super) fn answer(on: &mut Connection<'_>, reading: Reading) {
    let good = if on.shared.store.verifies_reads() { reading.verify() } else { Ok(()) };
    let bytes = reading.bytes();
    if let Err(refusal) = good.and_then(|()| on.out.value(reading, 0, bytes)) {
        on.refuse(refusal);
    }
}

/// One answer of several.
pub(super) enum Answer {
    /// There is no value.
    Nothing,
    /// A value in memory.
    Here(Reading),
    /// One from below, for which memory had no room.
    Brought(Arc<BroughtValue>),
}

impl Answer {
    pub(super) fn of(reading: Option<Reading>, brought: Option<Arc<BroughtValue>>) -> Self {
        let brought = brought.map_or(Self::Nothing, Self::Brought);
        reading.map_or(brought, Self::Here)
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Here(reading) => reading.bytes(),
            Self::Brought(found) => found.bytes(),
        }
    }
}

pub(super) fn answer_all(on: &mut Connection<'_>, answers: Vec<Answer>) {
    on.out.array(answers.len());
    for answer in answers {
        match answer {
            Answer::Nothing => on.out.nothing(),
            Answer::Brought(found) => on.out.found(found),
            Answer::Here(reading) => {
                let bytes = reading.bytes();
                // Opened a moment ago; one that is gone all the same is a miss.
                if on.out.value(reading, 0, bytes).is_err() {
                    on.out.nothing();
                }
            }
        }
    }
}

pub(super) fn strlen(on: &mut Connection<'_>) {
    let stat = on.shared.store.stat(on.key(1));
    on.out.integer(stat.map_or(0, |stat| i64::from(stat.bytes)));
}

pub(super) fn getrange(on: &mut Connection<'_>) {
    let (Some(start), Some(end)) = (on.number(2), on.number(3)) else { return on.not_a_number() };
    let Some(reading) = on.shared.store.get(on.key(1)) else { return on.out.bulk(b"") };
    let bytes = i64::from(reading.stat().bytes);
    // Negative places count from the end; those before the beginning are the first byte's, unless both are negative and
    // in the wrong order.
    let place = |at: i64| if at < 0 { at.saturating_add(bytes).max(0) } else { at };
    let (from, to) = (place(start), place(end).saturating_add(1).min(bytes));
    if from >= to || (start < 0 && start > end && end < 0) {
        return on.out.bulk(b"");
    }
    let narrow = |at: i64| usize::try_from(at).expect("between 0 and the length");
    if let Err(refusal) = on.out.value(reading, narrow(from), narrow(to)) {
        on.refuse(refusal);
    }
}

pub(super) fn kind(on: &mut Connection<'_>) {
    let there = on.shared.store.exists(on.key(1));
    on.out.simple(if there { "string" } else { "none" });
}

/// Time to live in units of `unit_us`, rounded up: what is not over is not 0.
pub(super) fn ttl(on: &mut Connection<'_>, unit_us: u64) {
    let stat = on.shared.store.stat(on.key(1));
    let left = |us: u64| i64::try_from(us.div_ceil(unit_us)).unwrap_or(i64::MAX);
    on.out.integer(stat.map_or(-2, |stat| stat.ttl_us.map_or(-1, left)));
}

pub(super) fn persist(on: &mut Connection<'_>) {
    let had = on.shared.store.stat(on.key(1)).is_some_and(|stat| stat.ttl_us.is_some());
    let done = had && on.shared.store.set_ttl(on.key(1), None).is_ok();
    on.out.integer(i64::from(done));
}

/// `BATON.STAT key [ANY]`: all that is known of a key; with `ANY` also of a part in memory whose object is not whole.
pub(super) fn stat(on: &mut Connection<'_>) {
    let any = on.incoming.count() == 3;
    if any && !on.is(2, "ANY") {
        return on.out.error("ERR syntax error");
    }
    let store = &on.shared.store;
    let stat = if any { store.stat_hidden_too(on.key(1)) } else { store.stat(on.key(1)) };
    let Some(stat) = stat else { return on.out.nothing() };
    let whole = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let numbers = [
        ("bytes", Some(u64::from(stat.bytes))),
        ("generation", Some(stat.generation)),
        ("ttl_ms", stat.ttl_us.map(|us| us.div_ceil(1_000))),
        ("hard_pins", Some(u64::from(stat.hard_pins))),
        ("readers", Some(u64::from(stat.readers))),
    ];
    on.out.map(numbers.len() + 3);
    for (name, number) in numbers {
        on.out.bulk(name.as_bytes());
        match number {
            Some(number) => on.out.integer(whole(number)),
            None => on.out.nothing(),
        }
    }
    on.out.bulk(b"crc32c");
    match stat.checksum {
        Some(sum) => on.out.bulk(format!("{sum:08x}").as_bytes()),
        None => on.out.nothing(),
    }
    for (name, is_there) in [("lasts", stat.lasts), ("cold", stat.cold)] {
        on.out.bulk(name.as_bytes());
        on.out.integer(i64::from(is_there));
    }
}

/// `BATON.VERIFY key`: compares the value with its checksum, where it is.
pub(super) fn verify(on: &mut Connection<'_>) {
    match on.shared.store.verify(on.key(1)) {
        Ok(_) => on.out.simple("OK"),
        Err(refusal) => on.refuse(refusal),
    }
}

/// `BATON.PIN key ms`: keeps a value from eviction for so long.
pub(super) fn pin(on: &mut Connection<'_>) {
    let time = on.number(2).and_then(|ms| u64::try_from(ms).ok()).filter(|ms| (1..=PIN_MAX_MS).contains(ms));
    let Some(ms) = time else { return on.out.error("ERR give a time from 1 to 3600000 ms") };
    let done = on.shared.store.pin_softly(on.key(1), ms * 1_000);
    on.out.integer(i64::from(done.is_ok()));
}

/// Serves a put.
pub(super) async fn put(on: &mut Connection<'_>, put: PutCommand) {
    match put {
        PutCommand::Several => several(on).await,
        PutCommand::Set => set(on).await,
        PutCommand::IfAbsent => {
            let options = PutOptions { existing: OverwriteRule::Keep, ..PutOptions::REPLACE };
            let _ = below::bring(on, 1).await;
            match store(on, 1, 2, options).await {
                Ok(_) => on.out.integer(1),
                Err(Refusal::Exists) => on.out.integer(0),
                Err(refusal) => on.refuse(refusal),
            }
        }
        PutCommand::Timed(unit_us) => {
            let time = on.number(2).and_then(|time| u64::try_from(time).ok()).filter(|time| *time > 0);
            let Some(time) = time else {
                return on.out.error("ERR invalid expire time; give a whole number above 0");
            };
            let options = PutOptions { ttl_us: Some(time.saturating_mul(unit_us)), ..PutOptions::REPLACE };
            match store(on, 1, 3, options).await {
                Ok(_) => on.out.simple("OK"),
                Err(refusal) => on.refuse(refusal),
            }
        }
    }
}

async fn set(on: &mut Connection<'_>) {
    let mut words = match set_words(on) {
        Ok(words) => words,
        Err(error) => return on.out.error(error),
    };
    if words.options.existing == OverwriteRule::Keep || words.options.only_if_present || words.answer_old {
        // The result depends on the present value, so that must be in memory.
        let _ = below::bring(on, 1).await;
    }
    if words.keep_ttl {
        words.options.ttl_us = on.shared.store.stat(on.key(1)).and_then(|stat| stat.ttl_us);
    }
    let old = words.answer_old.then(|| on.shared.store.get(on.key(1))).flatten();
    let stored = store(on, 1, 2, words.options).await;
    let missed = matches!(stored, Err(Refusal::Exists | Refusal::Absent));
    match (stored, old) {
        (Err(refusal), _) if !missed => on.refuse(refusal),
        (_, Some(old)) => {
            let bytes = old.bytes();
            if let Err(refusal) = on.out.value(old, 0, bytes) {
                on.refuse(refusal);
            }
        }
        (Ok(_), None) if !words.answer_old => on.out.simple("OK"),
        _ => on.out.nothing(),
    }
}

/// The options that follow the value.
fn set_words(on: &Connection<'_>) -> Result<SetWords, &'static str> {
    const SYNTAX: &str = "ERR syntax error";
    let mut words = SetWords { options: PutOptions::REPLACE, ..SetWords::default() };
    let mut at = 3;
    while at < on.incoming.count() {
        let unit_us = [("EX", 1_000_000), ("PX", 1_000)].into_iter().find(|(word, _)| on.is(at, word));
        if let Some((_, unit_us)) = unit_us {
            let time = on.number(at + 1).ok_or("ERR value is not an integer or out of range")?;
            let time = u64::try_from(time).ok().filter(|time| *time > 0);
            let time = time.ok_or("ERR invalid expire time in 'set' command")?;
            if words.options.ttl_us.replace(time.saturating_mul(unit_us)).is_some() {
                return Err(SYNTAX);
            }
            at += 2;
            continue;
        }
        match () {
            () if on.is(at, "NX") && !words.options.only_if_present => {
                words.options.existing = OverwriteRule::Keep;
            }
            () if on.is(at, "XX") && words.options.existing != OverwriteRule::Keep => {
                words.options.only_if_present = true;
            }
            () if on.is(at, "GET") => words.answer_old = true,
            () if on.is(at, "KEEPTTL") => words.keep_ttl = true,
            () => return Err(SYNTAX),
        }
        at += 1;
    }
    if words.keep_ttl && words.options.ttl_us.is_some() { Err(SYNTAX) } else { Ok(words) }
}

async fn several(on: &mut Connection<'_>) {
    let count = on.incoming.count();
    if count.is_multiple_of(2) {
        return on.out.error("ERR wrong number of arguments for 'mset' command");
    }
    let mut removals = Vec::new();
    for key in (1..count).step_by(2) {
        match store_unconfirmed(on, key, key + 1, PutOptions::REPLACE).await {
            Ok((_, forgotten)) => removals.push(forgotten),
            Err(refusal) => return on.refuse(refusal),
        }
    }
    let store = &on.shared.store;
    // The result is counted and reported. A bucket never fails a put.
    let _ = below::confirm_all(store, &removals).await;
    match removals.iter().try_for_each(|forgotten| store.put_confirmed(forgotten)) {
        Ok(()) => on.out.simple("OK"),
        Err(refusal) => on.refuse(refusal),
    }
}

/// Stores the value in argument `value` under the key in argument `key`.
async fn store(
    on: &mut Connection<'_>,
    key: usize,
    value: usize,
    options: PutOptions,
) -> Result<StoreOutcome, Refusal> {
    let (stored, forgotten) = store_unconfirmed(on, key, value, options).await?;
    // The result is counted and reported. A bucket never fails a put.
    let _ = below::confirm(&on.shared.store, &forgotten).await;
    on.shared.store.put_confirmed(&forgotten).map(|()| stored)
}

/// Stores a value, and returns the pending removals of the older one.
async fn store_unconfirmed(
    on: &mut Connection<'_>,
    key: usize,
    value: usize,
    options: PutOptions,
) -> Result<(StoreOutcome, ForgottenCopies), Refusal> {
    let ticket = match on.incoming.take_large(value) {
        Some(ticket) => {
            let mut ticket = ticket?;
            if options.only_if_present && !on.shared.store.exists(on.key(key)) {
                return Err(Refusal::Absent);
            }
            ticket.set_options(options);
            ticket
        }
        None => {
            // What is there stays, whatever another writer is about to do.
            if options.existing == OverwriteRule::Keep && on.shared.store.exists(on.key(key)) {
                return Err(Refusal::Exists);
            }
            let text = on.incoming.text(value);
            let mut ticket = reserve(on.shared, on.key(key), text.len() as u64, options).await?;
            ticket.append(text)?;
            ticket
        }
    };
    ticket.seal_unconfirmed(on.shared.config.checksums)
}
