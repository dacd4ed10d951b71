//! Commands about the connection and the store.

use std::fmt::Write as _;

use baton_types::TenantId;

use super::connection::Connection;
use super::{below, command, glob};

/// Entries that a step of `FLUSHDB` looks at.
const FLUSH_STEP: u32 = 1_000;
/// Fewest and most entries that one `SCAN` looks at.
const SCAN_ENTRIES: std::ops::RangeInclusive<i64> = 10..=1_000;
/// Longest name of a connection.
const NAME_MAX_BYTES: usize = 256;

pub(super) fn ping(on: &mut Connection<'_>) {
    if on.incoming.count() == 1 { on.out.simple("PONG") } else { echo(on) }
}

pub(super) fn echo(on: &mut Connection<'_>) {
    on.out.bulk(on.incoming.text(1));
}

pub(super) fn quit(on: &mut Connection<'_>) {
    on.out.simple("OK");
    on.over = true;
}

pub(super) fn reset(on: &mut Connection<'_>) {
    on.tenant = on.shared.config.logins.is_empty().then_some(TenantId(0));
    (on.out.third, on.refusing) = (false, false);
    on.name.clear();
    on.out.simple("RESET");
}

/// Commands of a transaction would be applied one by one, and seen so: better not at all.
pub(super) fn multi(on: &mut Connection<'_>) {
    on.refusing = true;
    on.out.error(
        "ERR MULTI is not served: commands are applied one by one; send a pipeline without a transaction",
    );
}

pub(super) fn exec(on: &mut Connection<'_>) {
    if std::mem::take(&mut on.refusing) {
        on.out.error("EXECABORT nothing of the transaction was applied: MULTI is not served");
    } else {
        on.out.error("ERR EXEC without MULTI");
    }
}

pub(super) fn discard(on: &mut Connection<'_>) {
    if std::mem::take(&mut on.refusing) {
        on.out.simple("OK");
    } else {
        on.out.error("ERR DISCARD without MULTI");
    }
}

pub(super) fn select(on: &mut Connection<'_>) {
    match on.number(1) {
        Some(0) => on.out.simple("OK"),
        _ => on.out.error("ERR DB index is out of range; there is only 0, and tenants keep keys apart"),
    }
}

/// The tenant of a user with this password.
fn tenant_of(on: &Connection<'_>, user: &[u8], password: &[u8]) -> Option<TenantId> {
    let pairs = on.shared.config.logins.iter().zip(&on.shared.tenants);
    let fits = |login: &super::Login| {
        let same = equal(login.password.as_bytes(), password);
        equal(login.user.as_bytes(), user) && same
    };
    pairs.rev().find(|(login, _)| fits(login)).map(|(_, tenant)| *tenant)
}

/// Compares in a time that does not tell where the first difference is.
fn equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

pub(super) fn auth(on: &mut Connection<'_>) {
    if on.shared.config.logins.is_empty() {
        return on.out.error("ERR AUTH called although no password is set; nobody needs one here");
    }
    let (user, password) = match on.incoming.count() {
        2 => (&b"default"[..], on.incoming.text(1)),
        _ => (on.incoming.text(1), on.incoming.text(2)),
    };
    match tenant_of(on, user, password) {
        Some(tenant) => {
            on.tenant = Some(tenant);
            on.out.simple("OK");
        }
        None => on.out.error("WRONGPASS invalid username-password pair or user is disabled."),
    }
}

pub(super) fn hello(on: &mut Connection<'_>) {
    let version = if on.incoming.count() > 1 { on.number(1) } else { Some(2 + i64::from(on.out.third)) };
    let Some(version @ (2 | 3)) = version else {
        return on.out.error("NOPROTO unsupported protocol version");
    };
    let mut at = 2;
    let (mut tenant, mut name) = (on.tenant, None);
    while at < on.incoming.count() {
        if on.is(at, "AUTH") && at + 2 < on.incoming.count() {
            tenant = tenant_of(on, on.incoming.text(at + 1), on.incoming.text(at + 2));
            if tenant.is_none() {
                return on.out.error("WRONGPASS invalid username-password pair or user is disabled.");
            }
            at += 3;
        } else if on.is(at, "SETNAME") && at + 1 < on.incoming.count() {
            name = Some(on.incoming.text(at + 1).to_vec());
            at += 2;
        } else {
            return on.out.error("ERR syntax error in HELLO");
        }
    }
    if tenant.is_none() {
        return on.out.error("NOAUTH HELLO must be called with the client already authenticated");
    }
    on.tenant = tenant;
    if let Some(mut name) = name {
        name.truncate(NAME_MAX_BYTES);
        on.name = name;
    }
    on.out.third = version == 3;
    greet(on, version);
}

fn greet(on: &mut Connection<'_>, version: i64) {
    let id = i64::try_from(on.id).unwrap_or(i64::MAX);
    on.out.map(7);
    for (name, text) in
        [("server", "redis"), ("version", "7.2.0"), ("mode", "standalone"), ("role", "master")]
    {
        on.out.bulk(name.as_bytes());
        on.out.bulk(text.as_bytes());
    }
    for (name, number) in [("proto", version), ("id", id)] {
        on.out.bulk(name.as_bytes());
        on.out.integer(number);
    }
    on.out.bulk(b"modules");
    on.out.array(0);
}

pub(super) fn client(on: &mut Connection<'_>) {
    let id = i64::try_from(on.id).unwrap_or(i64::MAX);
    match () {
        () if on.is(1, "ID") => on.out.integer(id),
        () if on.is(1, "GETNAME") => {
            let name = on.name.clone();
            if name.is_empty() { on.out.nothing() } else { on.out.bulk(&name) }
        }
        () if on.is(1, "SETNAME") && on.incoming.count() == 3 => {
            let name = on.incoming.text(2);
            on.name = name[..name.len().min(NAME_MAX_BYTES)].to_vec();
            on.out.simple("OK");
        }
        // Client information has no effect here.
        () if on.is(1, "SETINFO") || on.is(1, "NO-EVICT") || on.is(1, "NO-TOUCH") => on.out.simple("OK"),
        () => on.out.error("ERR unknown subcommand of CLIENT"),
    }
}

pub(super) fn command(on: &mut Connection<'_>) {
    match () {
        () if on.incoming.count() > 1 && on.is(1, "COUNT") => {
            on.out.integer(i64::try_from(command::count()).unwrap_or(i64::MAX));
        }
        () if on.incoming.count() > 1 && on.is(1, "DOCS") => on.out.map(0),
        () => on.out.array(0),
    }
}

pub(super) fn config(on: &mut Connection<'_>) {
    if !on.is(1, "GET") || on.incoming.count() < 3 {
        return on.out.error("ERR only CONFIG GET is served; settings are given when the store starts");
    }
    let known = [
        ("maxmemory", on.shared.store.stats().capacity_bytes.to_string()),
        ("maxmemory-policy", "allkeys-lru".to_owned()),
        ("maxclients", on.shared.config.connections_max.to_string()),
        ("proto-max-bulk-len", on.shared.store.value_max_bytes().to_string()),
        ("parts", on.shared.store.parts().map(ToString::to_string).unwrap_or_default()),
        ("save", String::new()),
        ("appendonly", "no".to_owned()),
        ("databases", "1".to_owned()),
    ];
    let asked = |name: &str| {
        let mut patterns = 2..on.incoming.count();
        patterns.any(|at| glob::matches(&on.incoming.text(at).to_ascii_lowercase(), name.as_bytes()))
    };
    let found: Vec<_> = known.iter().filter(|(name, _)| asked(name)).collect();
    on.out.map(found.len());
    for (name, value) in found {
        on.out.bulk(name.as_bytes());
        on.out.bulk(value.as_bytes());
    }
}

pub(super) fn dbsize(on: &mut Connection<'_>) {
    // Of all tenants: counting one tenant's would take a visit to every key.
    on.out.integer(i64::try_from(on.shared.store.stats().keys).unwrap_or(i64::MAX));
}

pub(super) fn report(on: &mut Connection<'_>) {
    let (stats, shared) = (on.shared.store.stats(), on.shared);
    let open = shared.open.load(std::sync::atomic::Ordering::Relaxed);
    let commands = shared.commands.load(std::sync::atomic::Ordering::Relaxed);
    let mut text = String::new();
    let written = write!(
        text,
        "# Server\r\nredis_version:7.2.0\r\nserver_name:baton\r\nuptime_in_seconds:{}\r\n\r\n\
         # Clients\r\nconnected_clients:{open}\r\nmaxclients:{}\r\n\r\n\
         # Memory\r\nused_memory:{}\r\nmaxmemory:{}\r\nmaxmemory_policy:allkeys-lru\r\n\r\n\
         # Stats\r\ntotal_commands_processed:{commands}\r\nkeyspace_hits:{}\r\nkeyspace_misses:{}\r\n\
         evicted_keys:{}\r\nexpired_keys:{}\r\nsealed_puts:{}\r\nunchanged_puts:{}\r\nabandoned_puts:{}\r\n\
         taken_over_puts:{}\r\nincomplete_misses:{}\r\n\r\n\
         # Replication\r\nrole:master\r\n\r\n\
         # Keyspace\r\ndb0:keys={},expires=0,avg_ttl=0\r\n",
        shared.started.elapsed().as_secs(),
        shared.config.connections_max,
        stats.used_bytes,
        stats.capacity_bytes,
        stats.hits,
        stats.misses,
        stats.evicted,
        stats.expired,
        stats.puts,
        stats.unchanged,
        stats.abandoned,
        stats.taken_over,
        stats.incomplete,
        stats.keys,
    );
    written.expect("a string takes what it is given");
    on.out.bulk(text.as_bytes());
}

/// The arguments of `SCAN`.
pub(super) struct Scan {
    pub(super) cursor: u64,
    pub(super) pattern: Option<Vec<u8>>,
    pub(super) entries: u32,
}

/// The words of a `SCAN`.
pub(super) fn scan_words(on: &Connection<'_>) -> Result<Scan, &'static str> {
    let cursor = std::str::from_utf8(on.incoming.text(1)).ok().and_then(|text| text.parse::<u64>().ok());
    let cursor = cursor.ok_or("ERR invalid cursor")?;
    let (mut pattern, mut entries) = (None, *SCAN_ENTRIES.start());
    for at in (2..on.incoming.count()).step_by(2) {
        match () {
            () if at + 1 >= on.incoming.count() => return Err("ERR syntax error"),
            () if on.is(at, "MATCH") => pattern = Some(on.incoming.text(at + 1).to_vec()),
            () if on.is(at, "COUNT") => {
                let count = on.number(at + 1).filter(|count| *count > 0);
                let count = count.ok_or("ERR value is not an integer or out of range")?;
                entries = count.clamp(*SCAN_ENTRIES.start(), *SCAN_ENTRIES.end());
            }
            () if on.is(at, "TYPE") => {}
            () => return Err("ERR syntax error"),
        }
    }
    if pattern.as_ref().is_some_and(|pattern| pattern.len() > crate::KEY_MAX_BYTES) {
        return Err("ERR the pattern is longer than any key");
    }
    Ok(Scan { cursor, pattern, entries: u32::try_from(entries).expect("clamped") })
}

/// Answers a `SCAN`: those of `keys` that fit, and where to go on.
pub(super) fn scanned(on: &mut Connection<'_>, pattern: &Option<Vec<u8>>, mut keys: Vec<Vec<u8>>, next: u64) {
    keys.retain(|key| pattern.as_ref().is_none_or(|pattern| glob::matches(pattern, key)));
    on.out.array(2);
    on.out.bulk(next.to_string().as_bytes());
    on.out.array(keys.len());
    keys.iter().for_each(|key| on.out.bulk(key));
}

pub(super) async fn flush(on: &mut Connection<'_>) {
    if !on.shared.config.allow_flush {
        return on.out.error("ERR FLUSHDB is off; start the store with it allowed, or remove keys by name");
    }
    let (mut cursor, mut last) = (0, crate::lower::ForgottenCopies::default());
    loop {
        // The other parts of an object are hidden as soon as one is removed.
        let (found, next) = on.shared.store.list_hidden_too(cursor, FLUSH_STEP);
        for listed in found.iter().filter(|listed| Some(listed.tenant) == on.tenant) {
            // Pinned values stay; others may have gone already.
            let key = crate::Key { tenant: listed.tenant, bytes: &listed.key };
            last = on.shared.store.remove_unconfirmed(key).unwrap_or_default().or(last);
        }
        cursor = next;
        if cursor == 0 {
            last = match below::flush(on).await {
                Ok(forgotten) => forgotten.or(last),
                Err(why) => return on.out.error(why),
            };
            // On the SSD removals are confirmed in their order, or nearly so; in the bucket in any order.
            let confirmed = match below::flushed(&on.shared.store).await {
                Ok(()) => below::confirm(&on.shared.store, &last).await,
                refused => refused,
            };
            return match confirmed {
                Ok(()) => on.out.simple("OK"),
                Err(refusal) => on.refuse(refusal),
            };
        }
        tokio::task::yield_now().await;
    }
}
