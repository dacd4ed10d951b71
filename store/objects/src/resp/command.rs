//! Which command it is, and what every one of them needs: arguments, keys, errors in Redis' shape.

use std::sync::atomic::Ordering;

use baton_types::TenantId;

use super::connection::Connection;
use super::{admin, below, strings};
use crate::key::Key;
use crate::refusal::Refusal;

/// A command: its name, how many arguments it has at least and at most (its name included), who serves it.
struct Command {
    name: &'static str,
    least: usize,
    most: usize,
    does: CommandAction,
}

/// The handler of a command.
#[derive(Clone, Copy)]
enum CommandAction {
    /// Something that is done at once.
    Now(fn(&mut Connection<'_>)),
    /// As `Now`, but allowed before a login too.
    Open(fn(&mut Connection<'_>)),
    /// A put, which may wait for room.
    Put(strings::PutCommand),
    /// Something about the value of the first argument, brought up first.
    Value(fn(&mut Connection<'_>)),
    /// A command that waits for the tiers below.
    Below(BelowCommand),
    /// Removes everything of the tenant.
    Flush,
}

/// Commands that wait for the tiers below.
#[derive(Clone, Copy)]
enum BelowCommand {
    Get,
    GetAll,
    Exists,
    Remove,
    /// `BATON.DEL`: removes one generation of a key.
    RemoveGeneration,
    /// `EXPIRE`, `PEXPIRE`: the unit of the time, µs.
    Expire(u64),
    Scan,
}

const MANY: usize = usize::MAX;

const fn of(name: &'static str, least: usize, most: usize, does: CommandAction) -> Command {
    Command { name, least, most, does }
}

/// Every command, the frequent ones first.
const COMMANDS: &[Command] = &[
    of("GET", 2, 2, CommandAction::Below(BelowCommand::Get)),
    of("SET", 3, 12, CommandAction::Put(strings::PutCommand::Set)),
    of("EXISTS", 2, MANY, CommandAction::Below(BelowCommand::Exists)),
    of("MGET", 2, MANY, CommandAction::Below(BelowCommand::GetAll)),
    of("MSET", 3, MANY, CommandAction::Put(strings::PutCommand::Several)),
    of("STRLEN", 2, 2, CommandAction::Value(strings::strlen)),
    of("GETRANGE", 4, 4, CommandAction::Value(strings::getrange)),
    of("SUBSTR", 4, 4, CommandAction::Value(strings::getrange)),
    of("DEL", 2, MANY, CommandAction::Below(BelowCommand::Remove)),
    of("UNLINK", 2, MANY, CommandAction::Below(BelowCommand::Remove)),
    of("SETNX", 3, 3, CommandAction::Put(strings::PutCommand::IfAbsent)),
    of("SETEX", 4, 4, CommandAction::Put(strings::PutCommand::Timed(1_000_000))),
    of("PSETEX", 4, 4, CommandAction::Put(strings::PutCommand::Timed(1_000))),
    of("TTL", 2, 2, CommandAction::Value(|on| strings::ttl(on, 1_000_000))),
    of("PTTL", 2, 2, CommandAction::Value(|on| strings::ttl(on, 1_000))),
    of("EXPIRE", 3, 3, CommandAction::Below(BelowCommand::Expire(1_000_000))),
    of("PEXPIRE", 3, 3, CommandAction::Below(BelowCommand::Expire(1_000))),
    of("PERSIST", 2, 2, CommandAction::Value(strings::persist)),
    of("TYPE", 2, 2, CommandAction::Value(strings::kind)),
    of("BATON.STAT", 2, 3, CommandAction::Value(strings::stat)),
    of("BATON.DEL", 3, 3, CommandAction::Below(BelowCommand::RemoveGeneration)),
    of("BATON.VERIFY", 2, 2, CommandAction::Value(strings::verify)),
    of("BATON.PIN", 3, 3, CommandAction::Value(strings::pin)),
    of("SCAN", 2, 8, CommandAction::Below(BelowCommand::Scan)),
    of("DBSIZE", 1, 1, CommandAction::Now(admin::dbsize)),
    of("INFO", 1, MANY, CommandAction::Now(admin::report)),
    of("CONFIG", 2, MANY, CommandAction::Now(admin::config)),
    of("FLUSHDB", 1, 2, CommandAction::Flush),
    of("FLUSHALL", 1, 2, CommandAction::Flush),
    of("SELECT", 2, 2, CommandAction::Now(admin::select)),
    of("MULTI", 1, 1, CommandAction::Now(admin::multi)),
    of("EXEC", 1, 1, CommandAction::Open(admin::exec)),
    of("DISCARD", 1, 1, CommandAction::Open(admin::discard)),
    of("PING", 1, 2, CommandAction::Now(admin::ping)),
    of("ECHO", 2, 2, CommandAction::Now(admin::echo)),
    of("COMMAND", 1, MANY, CommandAction::Now(admin::command)),
    of("CLIENT", 2, MANY, CommandAction::Now(admin::client)),
    of("HELLO", 1, 8, CommandAction::Open(admin::hello)),
    of("AUTH", 2, 3, CommandAction::Open(admin::auth)),
    of("RESET", 1, 1, CommandAction::Open(admin::reset)),
    of("QUIT", 1, MANY, CommandAction::Open(admin::quit)),
];

/// Commands that end a refused `MULTI`.
const REFUSED_ENDS: [&str; 4] = ["EXEC", "DISCARD", "RESET", "QUIT"];

/// How many commands there are.
pub(super) fn count() -> usize {
    COMMANDS.len()
}

/// Serves the command that has come in; its reply is then pending.
pub(super) async fn execute(on: &mut Connection<'_>) {
    on.shared.commands.fetch_add(1, Ordering::Relaxed);
    let name = on.incoming.text(0);
    let Some(command) = COMMANDS.iter().find(|c| name.eq_ignore_ascii_case(c.name.as_bytes())) else {
        // A browser that was lured here: what it sends may hold commands further down.
        on.over = name.eq_ignore_ascii_case(b"POST") || name.eq_ignore_ascii_case(b"HOST:");
        let name = String::from_utf8_lossy(&name[..name.len().min(64)]).into_owned();
        return on.out.error(&format!("ERR unknown command '{name}'; this is a store of strings"));
    };
    if on.refusing && !REFUSED_ENDS.contains(&command.name) {
        return on.out.error("ERR not applied: it belongs to a MULTI, which is not served");
    }
    let open = matches!(command.does, CommandAction::Open(_));
    if on.tenant.is_none() && !open {
        return on.out.error("NOAUTH Authentication required.");
    }
    if !(command.least..=command.most).contains(&on.incoming.count()) {
        let name = command.name.to_ascii_lowercase();
        return on.out.error(&format!("ERR wrong number of arguments for '{name}' command"));
    }
    match command.does {
        CommandAction::Now(serve) | CommandAction::Open(serve) => serve(on),
        CommandAction::Put(put) => strings::put(on, put).await,
        CommandAction::Flush => admin::flush(on).await,
        CommandAction::Value(serve) => {
            // A found value is in memory by now. Where there is no room, the answer is a miss.
            let _ = below::bring(on, 1).await;
            serve(on);
        }
        CommandAction::Below(which) => match which {
            BelowCommand::Get => below::get(on).await,
            BelowCommand::GetAll => below::mget(on).await,
            BelowCommand::Exists => below::exists(on).await,
            BelowCommand::Remove => below::del(on).await,
            BelowCommand::RemoveGeneration => {
                let _ = below::bring(on, 1).await;
                below::del_generation(on).await;
            }
            BelowCommand::Expire(unit_us) => {
                let _ = below::bring(on, 1).await;
                below::expire(on, unit_us).await;
            }
            BelowCommand::Scan => below::scan(on).await,
        },
    }
}

impl Connection<'_> {
    /// The key that an argument is.
    pub(super) fn key(&self, argument: usize) -> Key<'_> {
        // Commands with keys are not served before a login; a tenant that no one has sees nothing.
        Key { tenant: self.tenant.unwrap_or(TenantId(u32::MAX)), bytes: self.incoming.text(argument) }
    }

    /// The whole number that an argument is.
    pub(super) fn number(&self, argument: usize) -> Option<i64> {
        std::str::from_utf8(self.incoming.text(argument)).ok()?.parse().ok()
    }

    /// Whether an argument is this word, in upper or lower case.
    pub(super) fn is(&self, argument: usize, word: &str) -> bool {
        self.incoming.text(argument).eq_ignore_ascii_case(word.as_bytes())
    }

    pub(super) fn not_a_number(&mut self) {
        self.out.error("ERR value is not an integer or out of range");
    }

    /// A refusal, under the code by which clients of Redis know what to do.
    pub(super) fn refuse(&mut self, refusal: Refusal) {
        let code = match refusal {
            Refusal::Full { .. } | Refusal::OverQuota { .. } => "OOM",
            Refusal::Busy { .. } | Refusal::TakenOver | Refusal::Revoked | Refusal::Unconfirmed => "TRYAGAIN",
            _ => "ERR",
        };
        self.out.error(&format!("{code} {refusal}"));
    }
}
