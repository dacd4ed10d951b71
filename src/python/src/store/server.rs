//! One server: connections that wait for work, and rests when it cannot be reached.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_objects::resp::client::{Client, Reply, Url};

use super::session::{Broken, PATIENCE, Session};
use super::{Answer, Key};
use crate::Failure;

/// Connections kept for the next call.
const IDLE_MAX: usize = 16;
/// Calls at once; more are refused.
const CALLS_MAX: usize = 256;
/// How long a server that failed is left alone, at first and at most.
const REST: Duration = Duration::from_millis(500);
const REST_MAX: Duration = Duration::from_secs(8);

struct State {
    idle: Vec<Session>,
    calls: usize,
    /// Not to be tried before.
    rests_until: Option<Instant>,
    rest: Duration,
    why: String,
}

/// See the module.
pub(super) struct Server {
    url: Url,
    state: Mutex<State>,
}

impl Server {
    pub(super) fn new(url: Url) -> Self {
        let state = State { idle: Vec::new(), calls: 0, rests_until: None, rest: REST, why: String::new() };
        Self { url, state: Mutex::new(state) }
    }

    /// Does something for keys of this server, and says what came of each: those that it did not come to share the
    /// reason.
    pub(super) fn answers<F>(&self, keys: &[Key], does: &F) -> Vec<Answer>
    where
        F: Fn(&mut Session, &[Key], &mut [Option<Answer>]) -> Result<(), String>,
    {
        let mut answers: Vec<Option<Answer>> = vec![None; keys.len()];
        let ended = self.run(|session| {
            let ended = does(session, keys, &mut answers);
            ended.map_err(|text| Broken { text, heard: answers.iter().any(Option::is_some) })
        });
        let text = ended.err().unwrap_or_else(|| "it gave no answer".into());
        let lost = || Err(Failure::new(Failure::SERVER, format!("store {}: {text}", self.url.address)));
        answers.into_iter().map(|answer| answer.unwrap_or_else(lost)).collect()
    }

    /// Runs something over a connection. Where a kept connection turns out to have ended (the server was
    /// restarted, say) before anything was heard on it, a fresh one is tried, once.
    pub(super) fn run<T>(
        &self,
        mut does: impl FnMut(&mut Session) -> Result<T, Broken>,
    ) -> Result<T, String> {
        let kept = self.begin()?;
        let mut outcome = None;
        if let Some(mut session) = kept {
            match does(&mut session) {
                Ok(done) => outcome = Some(Ok((session, done))),
                Err(broken) if broken.heard => outcome = Some(Err(broken.text)),
                // Whatever else is kept is as old.
                Err(_) => self.state().idle.clear(),
            }
        }
        let outcome = outcome.unwrap_or_else(|| {
            let mut session = Session::connect(&self.url)?;
            does(&mut session).map(|done| (session, done)).map_err(|broken| broken.text)
        });
        self.end(outcome)
    }

    /// Removes every value, or those whose keys are of a pattern, and says how many.
    pub(super) fn clear(&self, pattern: Option<&str>) -> Result<u64, String> {
        let mut client = Client::connect(&self.url, PATIENCE)?;
        match pattern {
            None => clear_all(&mut client),
            Some(pattern) => clear_some(&mut client, pattern.as_bytes()),
        }
    }

    fn begin(&self) -> Result<Option<Session>, String> {
        let mut state = self.state();
        if let Some(until) = state.rests_until.filter(|until| Instant::now() < *until) {
            let left = until.duration_since(Instant::now()).as_millis();
            return Err(format!("{}; tried again in {left} ms", state.why));
        }
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
                (state.rests_until, state.rest) = (None, REST);
                if state.idle.len() < IDLE_MAX {
                    state.idle.push(session);
                }
                Ok(done)
            }
            Err(text) => {
                state.idle.clear();
                state.rests_until = Some(Instant::now() + state.rest);
                state.rest = (state.rest * 2).min(REST_MAX);
                state.why.clone_from(&text);
                Err(text)
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn odd() -> String {
    "it answers as no store does".into()
}

fn clear_all(client: &mut Client) -> Result<u64, String> {
    let Reply::Integer(held) = client.call(&[b"DBSIZE"])? else { return Err(odd()) };
    client.call(&[b"FLUSHDB"]).map_err(|refusal| format!("{refusal} (baton store serve --allow-flush)"))?;
    Ok(u64::try_from(held).unwrap_or(0))
}

fn clear_some(client: &mut Client, pattern: &[u8]) -> Result<u64, String> {
    let (mut cursor, mut removed) = (b"0".to_vec(), 0);
    loop {
        let reply = client.call(&[b"SCAN", &cursor, b"MATCH", pattern, b"COUNT", b"1000"])?;
        let Reply::List(parts) = reply else { return Err(odd()) };
        let Ok([Reply::Bulk(next), Reply::List(keys)]) = <[Reply; 2]>::try_from(parts) else {
            return Err(odd());
        };
        for key in keys {
            let Reply::Bulk(key) = key else { return Err(odd()) };
            if client.call(&[b"DEL", &key])? == Reply::Integer(1) {
                removed += 1;
            }
        }
        if next == b"0" {
            return Ok(removed);
        }
        cursor = next;
    }
}
