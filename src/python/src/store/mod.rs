//! The object store as Mooncake's package offers it, over one or several `baton store serve`.
//!
//! A key lives at one server, chosen by rendezvous hashing, so that a server that comes or goes moves only its own
//! keys. Values carry a checksum (`value.rs`) that the reader compares. Batches are pipelined (`session.rs`).
//! A server that does not answer costs the calls that meet it half a second, once (`watched.rs`); from then on it is
//! away until it answers a look from the background (`server.rs`). Meanwhile the second choice takes its puts, and is
//! asked for its keys (`spread.rs`).

mod places;
mod requests;
mod server;
mod session;
mod spread;
mod value;
mod watched;

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};

pub use self::requests::{GetMode, PutValue};

use self::places::RendezvousHasher;
use self::server::Server;
use self::session::Session;
use self::spread::Spread;
use crate::Failure;
use crate::raw::Span;

/// Keys that one call may have.
pub const KEYS_MAX: usize = 1 << 20;

/// The object store client behind the Python class.
pub struct Store {
    spread: Spread,
    /// In front of every key: those of a tenant are its own.
    prefix: String,
}

/// A key with its prefix, and its place among the keys of the call.
type Key = (usize, String);

/// The result for one key: a number from 0 on, or a failure.
pub type Answer = Result<u64, Failure>;

impl Store {
    /// A store over `addresses`, separated by commas: `host:port` or `redis://[user[:password]@]host:port`. No
    /// server need be there yet.
    ///
    /// # Errors
    /// When an address cannot be read.
    pub fn open(addresses: &str, tenant: &str) -> Result<Self, Failure> {
        let wrong = |text| Failure::new(Failure::ARGUMENT, format!("setup: {text}"));
        let urls = places::parse(addresses).map_err(wrong)?;
        let places = RendezvousHasher::new(urls.iter().map(|url| url.address.as_str()));
        let servers = urls.into_iter().map(|url| Arc::new(Server::new(url))).collect();
        let prefix = if ["", "default"].contains(&tenant) { String::new() } else { format!("{tenant}/") };
        Ok(Self { spread: Spread::new(places, servers), prefix })
    }

    /// How many of the servers answer now.
    pub fn reachable(&self) -> (usize, usize) {
        let servers = self.spread.servers();
        let answer = std::thread::scope(|scope| {
            let looks: Vec<_> = servers.iter().map(|server| scope.spawn(|| server.look())).collect();
            looks.into_iter().filter_map(|look| look.join().ok()).filter(|answers| *answers).count()
        });
        (answer, servers.len())
    }

    /// Whether keys have values: 1 or 0. A server that does not answer has none.
    pub fn exist(&self, keys: &[String]) -> Vec<u8> {
        let found = self.spread.each(
            &self.named(keys),
            |found| *found == Ok(0),
            |session, keys, answers| session.exist(keys, answers),
        );
        found.into_iter().map(|found| u8::from(found == Ok(1))).collect()
    }

    /// Puts values, each under its key. A key that has one keeps it, which is success: keys name their content.
    pub fn put(&self, keys: &[String], values: &[PutValue<'_>]) -> Vec<Answer> {
        let put = |session: &mut Session, keys: &[Key], answers: &mut [Option<Answer>]| {
            session.put(keys, values, answers)
        };
        self.spread.each(&self.named(keys), |_| false, put)
    }

    /// Gets values into memory, each into its parts, and says how many bytes it has. A value of another length
    /// than its parts together is a miss, unless `takes` allows shorter ones; so is one whose checksum does not
    /// hold, and that one is removed.
    pub fn get_into(&self, keys: &[String], into: &[Vec<Span>], takes: GetMode) -> Vec<Answer> {
        let answers = self.looks(keys, |session, keys, answers| {
            session.get(keys, answers, |at, session, head| session.fill_parts(head, &into[at], takes))
        });
        self.remove_damaged(keys, &answers);
        answers
    }

    /// Gets whole values.
    pub fn get(&self, keys: &[String]) -> Vec<Result<Vec<u8>, Failure>> {
        let values: Vec<Mutex<Vec<u8>>> = keys.iter().map(|_| Mutex::default()).collect();
        let answers = self.looks(keys, |session, keys, answers| {
            session.get(keys, answers, |at, session, head| {
                session.whole(head, &mut values[at].lock().unwrap_or_else(PoisonError::into_inner))
            })
        });
        self.remove_damaged(keys, &answers);
        let values =
            values.into_iter().map(|value| value.into_inner().unwrap_or_else(PoisonError::into_inner));
        answers.into_iter().zip(values).map(|(answer, value)| answer.map(|_| value)).collect()
    }

    /// How long values are.
    pub fn sizes(&self, keys: &[String]) -> Vec<Answer> {
        self.looks(keys, |session, keys, answers| session.sizes(keys, answers))
    }

    /// Removes values, from every server; one that is not there is [`Failure::ABSENT`]. A server that does not answer
    /// may have it still, which is a failure.
    pub fn remove(&self, keys: &[String]) -> Vec<Answer> {
        let remove = |session: &mut Session, keys: &[Key], answers: &mut [Option<Answer>]| {
            session.remove(keys, answers)
        };
        let removed = self.spread.everywhere(&self.named(keys), remove);
        let absent = |answer: &Answer| answer.as_ref().is_err_and(|failure| failure.code == Failure::ABSENT);
        let one = |mut answers: Vec<Answer>| {
            let failed = answers.iter().position(|answer| answer.is_err() && !absent(answer));
            let done = answers.iter().position(Result::is_ok);
            answers.swap_remove(failed.or(done).unwrap_or(0))
        };
        removed.into_iter().map(one).collect()
    }

    /// Removes everything of this tenant at every server that answers, and says how much that was.
    ///
    /// # Errors
    /// When a server did not do it; the others have.
    pub fn remove_all(&self) -> Answer {
        let pattern = (!self.prefix.is_empty()).then(|| format!("{}*", places::literal(&self.prefix)));
        let (mut removed, mut failure) = (0, None);
        for server in self.spread.servers() {
            match server.clear(pattern.as_deref()) {
                Ok(some) => removed += some,
                Err(text) => failure = Some(Failure::new(Failure::SERVER, format!("remove_all: {text}"))),
            }
        }
        failure.map_or(Ok(removed), Err)
    }

    /// Values that are not what was stored would be misses for ever, for a key that has a value keeps it.
    fn remove_damaged(&self, keys: &[String], answers: &[Answer]) {
        let damaged = |(key, answer): (&String, &Answer)| {
            let damaged = answer.as_ref().is_err_and(|failure| failure.code == Failure::DAMAGED);
            damaged.then(|| key.clone())
        };
        let damaged: Vec<String> = keys.iter().zip(answers).filter_map(damaged).collect();
        if !damaged.is_empty() {
            // One that cannot be removed now stays a miss.
            let _ = self.remove(&damaged);
        }
    }

    /// Looks something up for each key.
    fn looks<F>(&self, keys: &[String], does: F) -> Vec<Answer>
    where
        F: Fn(&mut Session, &[Key], &mut [Option<Answer>]) -> Result<(), String> + Sync,
    {
        let nothing = |answer: &Answer| answer.as_ref().is_err_and(|failure| failure.code == Failure::ABSENT);
        self.spread.each(&self.named(keys), nothing, does)
    }

    /// Keys as servers know them.
    fn named<'k>(&self, keys: &'k [String]) -> Cow<'k, [String]> {
        if self.prefix.is_empty() {
            return keys.into();
        }
        keys.iter().map(|key| format!("{}{key}", self.prefix)).collect()
    }
}
