//! Several stores as one: a client that knows where a key belongs, and goes on when a server does not.
//!
//! ```no_run
//! use baton_objects::client::{Cluster, ClusterConfig};
//!
//! let config = ClusterConfig { replicas: 2, ..ClusterConfig::of("redis://a:6379,redis://b:6379,redis://c:6379")? };
//! let mut stores = Cluster::new(config)?;
//! stores.put(b"key", b"value", &Default::default())?;
//! assert_eq!(stores.get(b"key")?.as_deref(), Some(&b"value"[..]));
//! # Ok::<(), baton_objects::client::Trouble>(())
//! ```
//!
//! The client needs no directory. It ranks the servers for a key by a hash of both, so all clients agree without
//! talking to each other. A server that joins or leaves moves only the keys that rank it first. A put goes to the
//! first `replicas` servers that answer, and a get asks them in the same order. The client skips a server that does
//! not answer, until it answers again. It waits for a server that is only slow: a `PING` on another connection
//! distinguishes slow from dead. One thread uses a `Cluster`; make one for each.

mod drain;
mod member;
mod rank;

use std::time::Duration;

pub use drain::{ConflictRule, DrainProgress, DrainRun};
use member::Member;

use crate::resp::client::{Reply, Url};

/// Settings of a [`Cluster`].
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// The servers, each once.
    pub servers: Vec<Url>,
    /// Number of servers that hold each key.
    pub replicas: usize,
    /// How long a server may be silent: half of it before it is asked whether it lives, half of it to answer that.
    pub silence: Duration,
    /// How long a server that lives may take over one command.
    pub time_limit: Duration,
    /// How long a server that did not answer rests before it is looked at again, in the background; each time twice as
    /// long, up to 5 s.
    pub exclude: Duration,
}

impl ClusterConfig {
    /// Servers out of a comma separated list, with one replica and sensible times.
    ///
    /// # Errors
    /// An address that is none, or one given twice.
    pub fn of(list: &str) -> Result<Self, Trouble> {
        let servers = list.split(',').map(|url| url.trim().parse::<Url>().map_err(Trouble::Wrong));
        let servers = servers.collect::<Result<Vec<_>, _>>()?;
        let (silence, time_limit) = (Duration::from_millis(500), Duration::from_secs(30));
        Ok(Self { servers, replicas: 1, silence, time_limit, exclude: Duration::from_secs(1) })
    }

    fn check(&self) -> Result<(), Trouble> {
        let twice = |at: usize| self.servers[..at].iter().any(|url| url.address == self.servers[at].address);
        if let Some(at) = (0..self.servers.len()).find(|at| twice(*at)) {
            return Err(Trouble::Wrong(format!("servers: {} is given twice", self.servers[at].address)));
        }
        if self.servers.is_empty() || !(1..=self.servers.len()).contains(&self.replicas) {
            return Err(Trouble::Wrong(format!(
                "replicas: give from 1 to {}, the servers",
                self.servers.len()
            )));
        }
        let sensible = Duration::from_millis(10)..=Duration::from_secs(600);
        if [self.silence, self.time_limit, self.exclude].iter().all(|time| sensible.contains(time)) {
            Ok(())
        } else {
            Err(Trouble::Wrong("silence, time_limit, exclude: give from 10 ms to 600 s".into()))
        }
    }
}

/// Why something was not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// An invalid argument.
    #[error("{0}")]
    Wrong(String),
    /// The server answered that it will not; its words, which say whether to try again.
    #[error("{0}")]
    Refused(String),
    /// No server that matters answered; the words of the last.
    #[error("{0}")]
    Gone(String),
    /// A server answered with something that is no answer to the question.
    #[error("{0} was answered by something else; is this a store?")]
    Odd(String),
}

/// How a value is put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutWords {
    /// Time to live, ms.
    pub ttl_ms: Option<u64>,
    /// Leave a value that is there as it is.
    pub keep: bool,
}

/// The result of a put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// So many servers have it now. Fewer than were asked for: the words of one that has not.
    Stored(usize, Option<String>),
    /// It was to be left as it is, and is there.
    Present,
}

/// Where a value is after a put.
#[derive(Debug, Default)]
struct Copies {
    /// Servers that took it.
    stored: usize,
    /// Servers that had one already, which was to be left.
    present: usize,
    /// The last that did neither.
    trouble: Option<Trouble>,
}

/// Several stores as one: each key has its place by rendezvous hashing.
#[derive(Debug)]
pub struct Cluster {
    config: ClusterConfig,
    members: Vec<Member>,
}

impl Cluster {
    /// A client of these servers; it connects when it has something to ask.
    ///
    /// # Errors
    /// [`Trouble::Wrong`]: the setting that cannot be.
    pub fn new(config: ClusterConfig) -> Result<Self, Trouble> {
        config.check()?;
        let members = config.servers.iter().map(|url| Member::new(url.clone())).collect();
        Ok(Self { config, members })
    }

    /// Addresses of the servers, as they were given.
    pub fn servers(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(Member::address)
    }

    /// Addresses of servers that are left out at the moment.
    #[must_use]
    pub fn excluded(&self) -> Vec<&str> {
        self.members.iter().filter(|member| member.is_excluded()).map(Member::address).collect()
    }

    fn ranked(&self, key: &[u8]) -> Vec<usize> {
        rank::order(self.members.iter().map(Member::address), key)
    }

    fn request(&mut self, at: usize, command: &[&[u8]]) -> Result<Reply, Trouble> {
        self.members[at].request(&self.config, command)
    }

    /// Puts a value on the first servers of its order that take it, as many as there are to be replicas.
    ///
    /// # Errors
    /// None took it: the words of the last.
    pub fn put(&mut self, key: &[u8], value: &[u8], words: &PutWords) -> Result<PutOutcome, Trouble> {
        let Copies { stored, present, trouble } = self.put_on(key, value, words, None);
        match (stored, present) {
            (0, 0) => Err(trouble.unwrap_or_else(|| Trouble::Gone("put: no other server".into()))),
            (0, _) => Ok(PutOutcome::Present),
            _ if stored + present < self.config.replicas => {
                Ok(PutOutcome::Stored(stored, trouble.map(|why| why.to_string())))
            }
            _ => Ok(PutOutcome::Stored(stored, None)),
        }
    }

    /// Puts a value on any server but one.
    fn put_on(&mut self, key: &[u8], value: &[u8], words: &PutWords, but: Option<usize>) -> Copies {
        let ttl = words.ttl_ms.map(|ms| ms.to_string());
        let mut command: Vec<&[u8]> = vec![b"SET", key, value];
        if let Some(ms) = &ttl {
            command.extend([&b"PX"[..], ms.as_bytes()]);
        }
        if words.keep {
            command.push(b"NX");
        }
        let mut copies = Copies::default();
        for at in self.ranked(key).into_iter().filter(|at| Some(*at) != but) {
            if copies.stored + copies.present == self.config.replicas {
                break;
            }
            match self.request(at, &command) {
                Ok(Reply::Simple(_)) => copies.stored += 1,
                Ok(Reply::Nothing) => copies.present += 1,
                Ok(_) => copies.trouble = Some(Trouble::Odd("SET".into())),
                Err(why) => copies.trouble = Some(why),
            }
        }
        copies
    }

    /// Asks the servers of a key, in order, until `take` makes something of an answer. One more than there are to be
    /// replicas is asked, for a value may have gone past a server that was away.
    fn first<T>(
        &mut self,
        key: &[u8],
        command: &[&[u8]],
        take: impl Fn(Reply) -> Result<Option<T>, Trouble>,
    ) -> Result<Option<T>, Trouble> {
        let (mut asked, mut trouble) = (0, None);
        for at in self.ranked(key) {
            if asked > self.config.replicas {
                break;
            }
            match self.request(at, command) {
                Ok(reply) => {
                    asked += 1;
                    if let Some(found) = take(reply)? {
                        return Ok(Some(found));
                    }
                }
                Err(why) => trouble = Some(why),
            }
        }
        // A server that answered that it has none is an answer.
        if asked > 0 { Ok(None) } else { Err(trouble.expect("there is a server, and none answered")) }
    }

    /// The value of a key, from the first server that has it.
    ///
    /// # Errors
    /// No server answered.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, Trouble> {
        self.first(key, &[b"GET", key], |reply| match reply {
            Reply::Bulk(value) => Ok(Some(value)),
            Reply::Nothing => Ok(None),
            _ => Err(Trouble::Odd("GET".into())),
        })
    }

    /// The facts that a server holding the key reports about it: names and values, in its order.
    ///
    /// # Errors
    /// No server answered.
    pub fn stat(&mut self, key: &[u8]) -> Result<Option<Vec<(String, String)>>, Trouble> {
        let text = |reply: &Reply| match reply {
            Reply::Bulk(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            Reply::Integer(number) => number.to_string(),
            _ => "-".into(),
        };
        self.first(key, &[b"BATON.STAT", key], |reply| match reply {
            Reply::List(parts) => {
                Ok(Some(parts.chunks_exact(2).map(|pair| (text(&pair[0]), text(&pair[1]))).collect()))
            }
            Reply::Nothing => Ok(None),
            _ => Err(Trouble::Odd("BATON.STAT".into())),
        })
    }

    /// Has every server that holds a key compare the value with its checksum. Says how many did.
    ///
    /// # Errors
    /// A server found other bytes, or none answered.
    pub fn verify(&mut self, key: &[u8]) -> Result<usize, Trouble> {
        let (mut good, mut trouble) = (0, None);
        for at in self.ranked(key) {
            match self.request(at, &[b"BATON.VERIFY", key]) {
                Ok(_) => good += 1,
                Err(Trouble::Refused(words)) if words.contains("no such key") => {}
                Err(why @ Trouble::Refused(_)) => return Err(why),
                Err(why) => trouble = Some(why),
            }
        }
        if good > 0 { Ok(good) } else { trouble.map_or(Ok(0), Err) }
    }

    /// Removes a key everywhere. True when it was anywhere.
    ///
    /// # Errors
    /// A server that may hold it did not answer: it may be there still.
    pub fn del(&mut self, key: &[u8]) -> Result<bool, Trouble> {
        let (mut removed, mut trouble) = (false, None);
        for at in 0..self.members.len() {
            match self.request(at, &[b"DEL", key]) {
                Ok(Reply::Integer(count)) => removed |= count > 0,
                Ok(_) => trouble = Some(Trouble::Odd("DEL".into())),
                Err(why) => trouble = Some(why),
            }
        }
        trouble.map_or(Ok(removed), Err)
    }

    /// Some keys of one server that fit a pattern, from a cursor on (`0` begins), and the cursor to go on from.
    ///
    /// # Errors
    /// It does not answer, or is not one of ours.
    pub fn scan(
        &mut self,
        server: &str,
        cursor: &str,
        pattern: &str,
    ) -> Result<(Vec<Vec<u8>>, String), Trouble> {
        let at = self.number(server)?;
        let odd = || Trouble::Odd("SCAN".into());
        let words: [&[u8]; 6] = [b"SCAN", cursor.as_bytes(), b"MATCH", pattern.as_bytes(), b"COUNT", b"1000"];
        let Reply::List(parts) = self.request(at, &words)? else { return Err(odd()) };
        let Ok([Reply::Bulk(next), Reply::List(keys)]) = <[Reply; 2]>::try_from(parts) else {
            return Err(odd());
        };
        let keys = keys.into_iter().map(|key| if let Reply::Bulk(key) = key { Ok(key) } else { Err(odd()) });
        Ok((keys.collect::<Result<_, _>>()?, String::from_utf8_lossy(&next).into_owned()))
    }

    fn number(&self, server: &str) -> Result<usize, Trouble> {
        let found = self.members.iter().position(|member| member.address() == server);
        found.ok_or_else(|| Trouble::Wrong(format!("{server} is not one of the servers")))
    }
}
