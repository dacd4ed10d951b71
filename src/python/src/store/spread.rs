//! Keys over several servers: which is asked, and which next.
//!
//! Each key ranks the servers. A put goes to the first of its ranking that answers. A look-up asks the first that
//! answers and, when that has nothing, one more: while the first was away, puts went past it.

use std::sync::Arc;

use super::places::RendezvousHasher;
use super::server::Server;
use super::session::Session;
use super::{Answer, Key};
use crate::Failure;

/// Servers that may say that a key has nothing before that is the answer.
const LOOKS: u32 = 2;

/// Servers of which a key's ranking is made.
pub(super) struct Spread {
    places: RendezvousHasher,
    servers: Vec<Arc<Server>>,
}

/// A key that has no answer yet.
struct PendingKey {
    at: usize,
    /// One bit for each server that was asked.
    asked: u64,
    looks: u32,
    /// The answer of a server that does not have the key.
    nothing: Option<Answer>,
    /// Why a server that may have it was not heard.
    lost: Option<Failure>,
}

/// The result of asking one server.
struct ServerReply {
    server: usize,
    keys: Vec<(PendingKey, Option<Answer>)>,
    /// The reason why the rest has no answer.
    why: String,
}

impl Spread {
    pub(super) fn new(places: RendezvousHasher, servers: Vec<Arc<Server>>) -> Self {
        Self { places, servers }
    }

    pub(super) fn servers(&self) -> &[Arc<Server>] {
        &self.servers
    }

    /// Does something for each key at the first server of its ranking that answers, the servers at the same time. An
    /// answer that is `nothing` is asked for at one more. Keys are as servers know them: other clients rank by these.
    pub(super) fn each<F>(&self, keys: &[String], nothing: impl Fn(&Answer) -> bool, does: F) -> Vec<Answer>
    where
        F: Fn(&mut Session, &[Key], &mut [Option<Answer>]) -> Result<(), String> + Sync,
    {
        let mut answers: Vec<Option<Answer>> = vec![None; keys.len()];
        let fresh = |at| PendingKey { at, asked: 0, looks: 0, nothing: None, lost: None };
        let mut pending: Vec<PendingKey> = (0..keys.len()).map(fresh).collect();
        while !pending.is_empty() {
            let by_server = self.assign(keys, pending, &mut answers);
            pending = Vec::new();
            for received in self.ask(by_server, keys, &does) {
                let ServerReply { server, keys, why } = received;
                for (mut key, answer) in keys {
                    key.asked |= 1 << server;
                    match answer {
                        Some(answer) if nothing(&answer) => {
                            key.looks += 1;
                            key.nothing = Some(answer);
                            pending.push(key);
                        }
                        Some(answer) => answers[key.at] = Some(answer),
                        None => {
                            key.lost.get_or_insert_with(|| self.servers[server].lost(&why));
                            pending.push(key);
                        }
                    }
                }
            }
        }
        answers.into_iter().map(|answer| answer.expect("every key ends with an answer")).collect()
    }

    /// Does something for every key at every server, and gathers what each said: none where it was not heard.
    pub(super) fn everywhere<F>(&self, keys: &[String], does: F) -> Vec<Vec<Answer>>
    where
        F: Fn(&mut Session, &[Key], &mut [Option<Answer>]) -> Result<(), String> + Sync,
    {
        let fresh = |at| PendingKey { at, asked: 0, looks: 0, nothing: None, lost: None };
        let all = self.servers.iter().map(|_| (0..keys.len()).map(fresh).collect()).collect();
        let mut gathered = vec![Vec::new(); keys.len()];
        for ServerReply { server, keys, why } in self.ask(all, keys, &does) {
            for (key, answer) in keys {
                gathered[key.at].push(answer.unwrap_or_else(|| Err(self.servers[server].lost(&why))));
            }
        }
        gathered
    }

    /// The keys that each server is asked for next. Those that no server is left for get their answer.
    fn assign(
        &self,
        keys: &[String],
        pending: Vec<PendingKey>,
        answers: &mut [Option<Answer>],
    ) -> Vec<Vec<PendingKey>> {
        let refusals: Vec<Option<String>> = self.servers.iter().map(Server::refusal).collect();
        let away =
            (0..refusals.len()).filter(|at| refusals[*at].is_some()).fold(0, |bits, at| bits | 1 << at);
        let mut by_server: Vec<Vec<PendingKey>> = self.servers.iter().map(|_| Vec::new()).collect();
        for mut key in pending {
            let next = self.places.best(&keys[key.at], key.asked | away);
            if let Some(server) = next.filter(|_| key.looks < LOOKS) {
                by_server[server].push(key);
                continue;
            }
            // A value may be where it belongs, at a server that is away: then the answer is not that there is none.
            let first = self.places.best(&keys[key.at], 0).expect("there is a server");
            let away = refusals[first].as_ref().map(|why| self.servers[first].lost(why));
            let unknown = key.lost.take().or(away).map(Err);
            answers[key.at] = unknown.or(key.nothing);
        }
        by_server
    }

    /// Asks servers at the same time.
    fn ask<F>(&self, work: Vec<Vec<PendingKey>>, keys: &[String], does: &F) -> Vec<ServerReply>
    where
        F: Fn(&mut Session, &[Key], &mut [Option<Answer>]) -> Result<(), String> + Sync,
    {
        let one = |(server, pending): (usize, Vec<PendingKey>)| {
            let asked: Vec<Key> = pending.iter().map(|key| (key.at, keys[key.at].clone())).collect();
            let (answers, why) = self.servers[server].answers(&asked, does);
            ServerReply { server, keys: pending.into_iter().zip(answers).collect(), why }
        };
        let mut work: Vec<_> = work.into_iter().enumerate().filter(|(_, keys)| !keys.is_empty()).collect();
        let last = work.pop();
        std::thread::scope(|scope| {
            let threads: Vec<_> = work.into_iter().map(|work| scope.spawn(|| one(work))).collect();
            let mut received: Vec<ServerReply> = last.map(one).into_iter().collect();
            received.extend(threads.into_iter().map(|thread| thread.join().expect("it does not panic")));
            received
        })
    }
}
