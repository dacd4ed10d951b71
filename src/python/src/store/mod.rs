//! The object store as Mooncake's package offers it, over one or several `baton store serve`.
//!
//! A key lives at one server, chosen by rendezvous hashing, so that a server that comes or goes moves only its own
//! keys. Values carry a checksum (`value.rs`) that whoever reads compares. Batches are pipelined (`session.rs`).
//! A server that cannot be reached is a place where nothing is: its keys are misses, its puts fail with a code, and
//! it is tried again after a rest.

mod places;
mod requests;
mod server;
mod session;
mod value;

use std::sync::{Arc, Mutex, PoisonError};

pub use self::requests::{Put, Taking};

use self::places::Places;
use self::server::Server;
use self::session::Session;
use crate::Failure;
use crate::raw::Span;

/// Keys that one call may have.
pub const KEYS_MAX: usize = 1 << 20;

/// See the module.
pub struct Store {
    places: Places,
    servers: Vec<Arc<Server>>,
    /// In front of every key: those of a tenant are its own.
    prefix: String,
}

/// A key with its prefix, and its place among the keys of the call.
type Key = (usize, String);

/// What became of one key: a number from 0 on, or why not.
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
        let places = Places::new(urls.iter().map(|url| url.address.as_str()));
        let servers = urls.into_iter().map(|url| Arc::new(Server::new(url))).collect();
        let prefix = if ["", "default"].contains(&tenant) { String::new() } else { format!("{tenant}/") };
        Ok(Self { places, servers, prefix })
    }

    /// How many of the servers answer now.
    pub fn reachable(&self) -> (usize, usize) {
        let answers = |server: &&Arc<Server>| server.run(Session::ping).is_ok();
        (self.servers.iter().filter(answers).count(), self.servers.len())
    }

    /// Whether keys have values: 1 or 0. A server that does not answer has none.
    pub fn exist(&self, keys: &[String]) -> Vec<u8> {
        let found = self.each(keys, |session, keys, answers| session.exist(keys, answers));
        found.into_iter().map(|found| u8::from(found == Ok(1))).collect()
    }

    /// Puts values, each under its key. A key that has one keeps it, which is success: keys name their content.
    pub fn put(&self, keys: &[String], values: &[Put<'_>]) -> Vec<Answer> {
        self.each(keys, |session, keys, answers| session.put(keys, values, answers))
    }

    /// Gets values into memory, each into its parts, and says how many bytes it has. A value of another length
    /// than its parts together is a miss, unless `takes` allows shorter ones; so is one whose checksum does not
    /// hold, and that one is removed.
    pub fn get_into(&self, keys: &[String], into: &[Vec<Span<'_>>], takes: Taking) -> Vec<Answer> {
        let answers = self.each(keys, |session, keys, answers| {
            session.get(keys, answers, |at, session, head| session.fill_parts(head, &into[at], takes))
        });
        self.remove_damaged(keys, &answers);
        answers
    }

    /// Gets whole values.
    pub fn get(&self, keys: &[String]) -> Vec<Result<Vec<u8>, Failure>> {
        let values: Vec<Mutex<Vec<u8>>> = keys.iter().map(|_| Mutex::default()).collect();
        let answers = self.each(keys, |session, keys, answers| {
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
        self.each(keys, |session, keys, answers| session.sizes(keys, answers))
    }

    /// Removes values; one that is not there is [`Failure::ABSENT`].
    pub fn remove(&self, keys: &[String]) -> Vec<Answer> {
        self.each(keys, |session, keys, answers| session.remove(keys, answers))
    }

    /// Removes everything of this tenant at every server that answers, and says how much that was.
    ///
    /// # Errors
    /// When a server did not do it; the others have.
    pub fn remove_all(&self) -> Answer {
        let pattern = (!self.prefix.is_empty()).then(|| format!("{}*", places::literal(&self.prefix)));
        let (mut removed, mut failure) = (0, None);
        for server in &self.servers {
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

    /// Does something for each key at its server, the servers at the same time, and gathers what came of each.
    fn each<F>(&self, keys: &[String], does: F) -> Vec<Answer>
    where
        F: Fn(&mut Session, &[Key], &mut [Option<Answer>]) -> Result<(), String> + Sync,
    {
        let mut by_server: Vec<Vec<Key>> = vec![Vec::new(); self.servers.len()];
        for (at, key) in keys.iter().enumerate() {
            by_server[self.places.of(key)].push((at, format!("{}{key}", self.prefix)));
        }
        let one = |(server, keys): (&Arc<Server>, Vec<Key>)| {
            let answers = server.answers(&keys, &does);
            keys.into_iter().map(|(at, _)| at).zip(answers).collect::<Vec<_>>()
        };
        let mut work: Vec<_> =
            self.servers.iter().zip(by_server).filter(|(_, keys)| !keys.is_empty()).collect();
        let last = work.pop();
        let mut all: Vec<Option<Answer>> = vec![None; keys.len()];
        std::thread::scope(|scope| {
            let threads: Vec<_> = work.into_iter().map(|work| scope.spawn(|| one(work))).collect();
            let mine = last.map(one).unwrap_or_default();
            let theirs = threads.into_iter().flat_map(|thread| thread.join().expect("it does not panic"));
            for (at, answer) in theirs.chain(mine) {
                all[at] = Some(answer);
            }
        });
        all.into_iter().map(|answer| answer.expect("each key has its server")).collect()
    }
}
