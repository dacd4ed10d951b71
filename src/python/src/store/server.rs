//! One server: connections that wait for work, and whether it is away.
//!
//! A server that fails a call is away from then on: calls go past it at once. A call that comes after a rest starts a
//! look at it in the background, which brings it back when it answers. No call waits for that.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_objects::resp::client::{Client, Reply, Url};

use super::session::{BrokenConnection, Session};
use super::watched::ANSWER;
use super::{Answer, Key};
use crate::Failure;

/// Connections kept for the next call.
const IDLE_MAX: usize = 16;
/// Calls at once; more are refused.
const CALLS_MAX: usize = 256;
/// How long a server that is away rests between two looks, at first and at most.
const REST: Duration = Duration::from_millis(500);
const REST_MAX: Duration = Duration::from_secs(2);
/// How long a server that answers may take to remove everything. It waits up to a minute for its bucket.
const CLEAR_LIMIT: Duration = Duration::from_secs(90);
/// A look that takes longer has lost its thread, as in the child of a process that forked.
const LOOK_MAX: Duration = Duration::from_secs(5);

/// A server that does not answer.
struct ServerPause {
    why: String,
    rest: Duration,
    /// When the server is probed next.
    look_at: Instant,
    /// When the probe in progress began.
    looking: Option<Instant>,
}

#[derive(Default)]
struct State {
    idle: Vec<Session>,
    calls: usize,
    away: Option<ServerPause>,
}

/// One store server: its idle connections, and whether it is away.
pub(super) struct Server {
    url: Url,
    state: Mutex<State>,
}

impl Server {
    pub(super) fn new(url: Url) -> Self {
        Self { url, state: Mutex::default() }
    }

    /// The failure that this server was not heard.
    pub(super) fn lost(&self, why: &str) -> Failure {
        Failure::new(Failure::SERVER, format!("store {}: {why}", self.url.address))
    }

    /// Why it is not to be asked now; none when it is. Starts a look at one that has rested.
    pub(super) fn refusal(self: &Arc<Self>) -> Option<String> {
        let mut state = self.state();
        let away = state.away.as_mut()?;
        let text = format!("{}; it is away until it answers", away.why);
        let now = Instant::now();
        let looked = away.looking.is_some_and(|since| now.duration_since(since) < LOOK_MAX);
        if now >= away.look_at && !looked {
            away.looking = Some(now);
            drop(state);
            let looks = {
                let server = self.clone();
                move || _ = server.look()
            };
            // Where no thread can be had the next look is the next chance.
            let _ = std::thread::Builder::new().name("store-look".into()).spawn(looks);
        }
        Some(text)
    }

    /// Looks whether it answers, on a fresh connection, and remembers it.
    pub(super) fn look(&self) -> bool {
        let looked = Session::connect(&self.url).and_then(|mut session| session.ping().map(|()| session));
        let mut state = self.state();
        match looked {
            Ok(session) => {
                state.away = None;
                state.keep(session);
                true
            }
            Err(why) => {
                state.leave(why);
                false
            }
        }
    }

    /// Does something for keys of this server, and says what came of each, and why those that it did not come to have
    /// no answer.
    pub(super) fn answers<F>(self: &Arc<Self>, keys: &[Key], does: &F) -> (Vec<Option<Answer>>, String)
    where
        F: Fn(&mut Session, &[Key], &mut [Option<Answer>]) -> Result<(), String>,
    {
        let mut answers: Vec<Option<Answer>> = vec![None; keys.len()];
        let ended = self.run(|session| {
            let ended = does(session, keys, &mut answers);
            ended.map_err(|text| BrokenConnection { text, received: answers.iter().any(Option::is_some) })
        });
        (answers, ended.err().unwrap_or_else(|| "it gave no answer".into()))
    }

    /// Runs something over a connection. Where a kept connection turns out to have ended (the server was
    /// restarted, say) before anything was heard on it, a fresh one is tried, once. A server that was silent is not.
    fn run<T>(
        self: &Arc<Self>,
        mut does: impl FnMut(&mut Session) -> Result<T, BrokenConnection>,
    ) -> Result<T, String> {
        let kept = self.begin()?;
        let mut outcome = None;
        if let Some(mut session) = kept {
            match does(&mut session) {
                Ok(done) => outcome = Some(Ok((session, done))),
                Err(broken) if broken.received || session.is_silent() => outcome = Some(Err(broken.text)),
                // The other kept ones are as old.
                Err(_) => self.state().idle.clear(),
            }
        }
        let outcome = outcome.unwrap_or_else(|| {
            let mut session = Session::connect(&self.url)?;
            does(&mut session).map(|done| (session, done)).map_err(|broken| broken.text)
        });
        self.end(outcome)
    }

    /// Removes every value of the login, or those whose keys are of a pattern, and says how many.
    pub(super) fn clear(self: &Arc<Self>, pattern: Option<&str>) -> Result<u64, String> {
        if let Some(why) = self.refusal() {
            return Err(why);
        }
        // The client tries one address; this one answers.
        let address = Session::connect(&self.url)?.address().to_string();
        let url = Url { address, ..self.url.clone() };
        let mut client = Client::connect(&url, ANSWER)?;
        client.watch(CLEAR_LIMIT, move || {
            Client::connect(&url, ANSWER).and_then(|mut client| client.call(&[b"PING"])).is_ok()
        });
        match pattern {
            None => clear_all(&mut client),
            Some(pattern) => clear_some(&mut client, pattern.as_bytes()),
        }
    }

    fn begin(self: &Arc<Self>) -> Result<Option<Session>, String> {
        if let Some(why) = self.refusal() {
            return Err(why);
        }
        let mut state = self.state();
        if state.calls >= CALLS_MAX {
            return Err(format!("{CALLS_MAX} calls are under way; make fewer at a time"));
        }
        state.calls += 1;
        Ok(state.idle.pop())
    }

    fn end<T>(&self, outcome: Result<(Session, T), String>) -> Result<T, String> {
        let mut state = self.state();
        state.calls -= 1;
        match outcome {
            Ok((session, done)) => {
                // While it is away, only a look says that its connections are good again.
                if state.away.is_none() {
                    state.keep(session);
                }
                Ok(done)
            }
            Err(text) => {
                state.leave(text.clone());
                Err(text)
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn keep(&mut self, session: Session) {
        if self.idle.len() < IDLE_MAX {
            self.idle.push(session);
        }
    }

    /// It does not answer: it is away, and rests longer each time that it is found so.
    fn leave(&mut self, why: String) {
        self.idle.clear();
        // Calls that met the same failure at the same time count as one.
        let looked = self.away.as_ref().filter(|away| away.looking.is_some());
        let rest = looked.map_or(REST, |away| (away.rest * 2).min(REST_MAX));
        self.away = Some(ServerPause { why, rest, look_at: Instant::now() + rest, looking: None });
    }
}

fn odd() -> String {
    "it answers as no store does".into()
}

/// How many values the server has in memory, of all logins.
fn held(client: &mut Client) -> Result<u64, String> {
    let Reply::Integer(held) = client.call(&[b"DBSIZE"])? else { return Err(odd()) };
    u64::try_from(held).map_err(|_| odd())
}

fn clear_all(client: &mut Client) -> Result<u64, String> {
    let before = held(client)?;
    client.call(&[b"FLUSHDB"]).map_err(|refusal| format!("{refusal} (baton store serve --allow-flush)"))?;
    // Other logins keep theirs.
    Ok(before.saturating_sub(held(client)?))
}

fn clear_some(client: &mut Client, pattern: &[u8]) -> Result<u64, String> {
    // All are listed before one is removed: a listing hides the other parts of an object that has lost one.
    let (mut cursor, mut found) = (b"0".to_vec(), Vec::new());
    loop {
        let reply = client.call(&[b"SCAN", &cursor, b"MATCH", pattern, b"COUNT", b"1000"])?;
        let Reply::List(parts) = reply else { return Err(odd()) };
        let Ok([Reply::Bulk(next), Reply::List(keys)]) = <[Reply; 2]>::try_from(parts) else {
            return Err(odd());
        };
        for key in keys {
            let Reply::Bulk(key) = key else { return Err(odd()) };
            found.push(key);
        }
        if next == b"0" {
            break;
        }
        cursor = next;
    }
    let mut removed = 0;
    for key in found {
        removed += u64::from(client.call(&[b"DEL", &key])? == Reply::Integer(1));
    }
    Ok(removed)
}
