//! The line to the cluster: one connection to one endpoint, another when it fails.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use baton_types::Secret;

use super::config::EtcdConfig;
use super::fault;
use crate::error::{Kind, MembershipError, Result, Stage};
use crate::proto::AuthenticateRequest;
use crate::proto::auth_client::AuthClient;

/// Longest answer that is read, bytes: a page of members, or the events of one revision.
pub(super) const ANSWER_BYTES_MAX: usize = 16 << 20;

/// A client; clones share its connection.
#[derive(Clone)]
pub struct Etcd {
    shared: Arc<Shared>,
}

struct Shared {
    config: EtcdConfig,
    endpoints: Vec<Endpoint>,
    state: Mutex<State>,
    /// Held while connecting, so that callers who find no line make one between them.
    dialing: tokio::sync::Mutex<()>,
}

struct State {
    line: Option<Line>,
    /// The endpoint to try first.
    at: usize,
    /// Lines made so far.
    made: u64,
}

/// A connection to one endpoint.
#[derive(Clone)]
pub(super) struct Line {
    pub(super) channel: Channel,
    endpoint: usize,
    serial: u64,
    token: Option<MetadataValue<Ascii>>,
}

impl Line {
    /// `message`, with the token shown.
    pub(super) fn request<Q>(&self, message: Q) -> Request<Q> {
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.clone());
        }
        request
    }
}

/// Whether a call may be sent again when nobody knows what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repeat {
    /// It only reads, or doing it twice is doing it once.
    Safe,
    /// The caller has to look first.
    Never,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

impl Etcd {
    /// A client with `config`; it connects when it is first used.
    ///
    /// # Errors
    /// When the configuration cannot work.
    pub fn new(config: EtcdConfig) -> Result<Self> {
        let endpoints = config.lines()?;
        let state = Mutex::new(State { line: None, at: 0, made: 0 });
        let dialing = tokio::sync::Mutex::new(());
        Ok(Self { shared: Arc::new(Shared { config, endpoints, state, dialing }) })
    }

    pub(super) fn config(&self) -> &EtcdConfig {
        &self.shared.config
    }

    pub(super) fn address(&self, line: &Line) -> &str {
        &self.shared.config.endpoints[line.endpoint]
    }

    /// Makes a call, over another endpoint where one fails, at most once each and once more for a new token.
    pub(super) async fn call<A, F>(&self, stage: Stage, repeat: Repeat, send: impl Fn(Line) -> F) -> Result<A>
    where
        F: Future<Output = std::result::Result<A, Status>> + Send,
    {
        let mut tries = self.shared.endpoints.len() + 1;
        loop {
            let line = self.line(stage).await?;
            // A caller that gives up waiting does not free the connection for others.
            let mut suspect = Suspect { etcd: self, serial: Some(line.serial) };
            let waited = tokio::time::timeout(self.shared.config.request_timeout(), send(line.clone())).await;
            tries -= 1;
            let (again, error) = match waited {
                Ok(Ok(answer)) => {
                    suspect.serial = None;
                    return Ok(answer);
                }
                Ok(Err(status)) if fault::token_is_old(&status) => {
                    (true, fault::error(Stage::Authenticate, self.address(&line), &status))
                }
                Ok(Err(status)) => {
                    let down = fault::endpoint_is_down(&status);
                    if !down {
                        suspect.serial = None;
                    }
                    (down && repeat == Repeat::Safe, fault::error(stage, self.address(&line), &status))
                }
                Err(_) => (repeat == Repeat::Safe, self.silent(stage, &line)),
            };
            if !again || tries == 0 {
                return Err(error);
            }
        }
    }

    pub(super) fn silent(&self, stage: Stage, line: &Line) -> MembershipError {
        let text = format!(
            "etcd at {}: no answer in time; see whether it is overloaded or has lost its quorum",
            self.address(line)
        );
        MembershipError::new(Kind::TimedOut, stage, text)
    }

    /// The line in use, or a new one.
    pub(super) async fn line(&self, stage: Stage) -> Result<Line> {
        if let Some(line) = self.known() {
            return Ok(line);
        }
        let _dialing = self.shared.dialing.lock().await;
        if let Some(line) = self.known() {
            return Ok(line);
        }
        let mut failed = MembershipError::new(Kind::Unavailable, stage, "etcd: no endpoint");
        for _ in 0..self.shared.endpoints.len() {
            let at = self.next_endpoint();
            match self.dial(at).await {
                Ok((channel, token)) => {
                    let mut state = self.shared.state.lock();
                    state.made += 1;
                    let line = Line { channel, endpoint: at, serial: state.made, token };
                    state.line = Some(line.clone());
                    return Ok(line);
                }
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    /// The endpoint to dial. The one after it is next, even if the caller stops waiting.
    fn next_endpoint(&self) -> usize {
        let mut state = self.shared.state.lock();
        let at = state.at;
        state.at = (at + 1) % self.shared.endpoints.len();
        at
    }

    fn known(&self) -> Option<Line> {
        self.shared.state.lock().line.clone()
    }

    /// Forgets the line `serial`, so that the next call tries the next endpoint first.
    pub(super) fn forget(&self, serial: u64) {
        let mut state = self.shared.state.lock();
        if let Some(line) = state.line.take_if(|line| line.serial == serial) {
            state.at = (line.endpoint + 1) % self.shared.endpoints.len();
        }
    }

    pub(super) fn forget_line(&self, line: &Line) {
        self.forget(line.serial);
    }

    async fn dial(&self, at: usize) -> Result<(Channel, Option<MetadataValue<Ascii>>)> {
        let (config, address) = (&self.shared.config, &self.shared.config.endpoints[at]);
        let unreached = |why: String| {
            let text = format!("etcd at {address}: {why}; see whether it runs and can be reached from here");
            MembershipError::new(Kind::Unavailable, Stage::Connect, text)
        };
        // Tonic bounds the TCP connection; this bounds TLS and HTTP/2 too.
        let all = config.connect_timeout() + Duration::from_millis(50);
        let channel = tokio::time::timeout(all, self.shared.endpoints[at].connect()).await;
        let channel = match channel {
            Ok(Ok(channel)) => channel,
            Ok(Err(e)) => return Err(unreached(causes(&e))),
            Err(_) => return Err(unreached(format!("no connection within {all:?}"))),
        };
        let Some((name, password)) = &config.login else { return Ok((channel, None)) };
        let token =
            tokio::time::timeout(config.request_timeout(), login(channel.clone(), name, password)).await;
        match token {
            Ok(Ok(token)) => Ok((channel, token)),
            Ok(Err(status)) => Err(fault::error(Stage::Authenticate, address, &status)),
            Err(_) => Err(unreached("no answer to the login in time".to_owned())),
        }
    }
}

/// The token for a name and password; none where the cluster asks for no login.
async fn login(
    channel: Channel,
    name: &str,
    password: &Secret<String>,
) -> std::result::Result<Option<MetadataValue<Ascii>>, Status> {
    let request = AuthenticateRequest { name: name.to_owned(), password: password.expose().clone() };
    let token = match AuthClient::new(channel).authenticate(request).await {
        Ok(answer) => answer.into_inner().token,
        Err(status) if status.message().contains("authentication is not enabled") => return Ok(None),
        Err(status) => return Err(status),
    };
    let mut token: MetadataValue<Ascii> = token
        .parse()
        .map_err(|_| Status::unauthenticated("the token holds characters that no header may"))?;
    token.set_sensitive(true);
    Ok(Some(token))
}

/// An error with all that caused it: the outermost alone says "transport error".
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

/// A line that is forgotten unless its call ends well, even when the caller stops waiting.
struct Suspect<'a> {
    etcd: &'a Etcd,
    serial: Option<u64>,
}

impl Drop for Suspect<'_> {
    fn drop(&mut self) {
        if let Some(serial) = self.serial {
            self.etcd.forget(serial);
        }
    }
}
