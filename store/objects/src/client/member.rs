//! One server: its connection, and whether it is left out.

use std::time::{Duration, Instant};

use super::{ClusterConfig, Trouble};
use crate::resp::client::{Client, Reply, Url};

/// A server is left out no longer than this at a time.
const EXCLUDE_MAX: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Debug)]
pub(super) struct Member {
    url: Url,
    connection: Option<Client>,
    /// Until when it is left out, and for how long it was this time.
    excluded: Option<(Instant, Duration)>,
}

impl Member {
    pub(super) fn new(url: Url) -> Self {
        Self { url, connection: None, excluded: None }
    }

    pub(super) fn address(&self) -> &str {
        &self.url.address
    }

    pub(super) fn is_excluded(&self) -> bool {
        self.excluded.is_some_and(|(until, _)| Instant::now() < until)
    }

    /// Asks the server. One that does not answer is left out for a while; meanwhile it is not asked at all.
    pub(super) fn ask(&mut self, config: &ClusterConfig, command: &[&[u8]]) -> Result<Reply, Trouble> {
        if self.is_excluded() {
            return Err(Trouble::Gone(format!("{} did not answer a moment ago", self.url.address)));
        }
        let kept = self.connection.is_some();
        let mut answer = self.try_ask(config, command);
        if kept && matches!(answer, Err(Lost::Closed(_))) {
            // The server was started again since: it gets one more chance, on a new connection.
            answer = self.try_ask(config, command);
        }
        match answer {
            Ok(Reply::Error(words)) => {
                self.excluded = None;
                Err(Trouble::Refused(words))
            }
            Ok(reply) => {
                self.excluded = None;
                Ok(reply)
            }
            Err(Lost::Refused(words)) => Err(Trouble::Refused(words)),
            Err(Lost::Closed(words) | Lost::Silent(words)) => {
                let time = self.excluded.map_or(config.exclude, |(_, time)| (2 * time).min(EXCLUDE_MAX));
                self.excluded = Some((Instant::now() + time, time));
                Err(Trouble::Gone(words))
            }
        }
    }

    fn try_ask(&mut self, config: &ClusterConfig, command: &[&[u8]]) -> Result<Reply, Lost> {
        let mut client = match self.connection.take() {
            Some(client) => client,
            None => self.connect(config)?,
        };
        client.queue(command);
        let lost = |e: std::io::Error| {
            let words = format!("{}: {e}", self.url.address);
            let silent = matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
            if silent { Lost::Silent(words) } else { Lost::Closed(words) }
        };
        client.flush().map_err(lost)?;
        let end = Instant::now() + config.patience;
        while !client.wait(config.silence).map_err(lost)? {
            if Instant::now() > end || !self.lives(config) {
                return Err(Lost::Silent(format!(
                    "{}: no answer; is it stopped or overloaded?",
                    self.url.address
                )));
            }
        }
        let reply = client.receive().map_err(lost)?;
        self.connection = Some(client);
        Ok(reply)
    }

    fn connect(&self, config: &ClusterConfig) -> Result<Client, Lost> {
        Client::connect(&self.url, config.silence).map_err(|words| {
            // What it says about a password is an answer.
            if words.starts_with("connect") || words.starts_with("call") {
                Lost::Closed(words)
            } else {
                Lost::Refused(words)
            }
        })
    }

    /// Whether the server answers anything at all, on a connection of its own.
    fn lives(&self, config: &ClusterConfig) -> bool {
        let pinged = self.connect(config).map(|mut client| client.call(&[b"PING"]).is_ok());
        pinged.unwrap_or(false)
    }
}

/// Why there is no answer.
enum Lost {
    /// The connection is gone, or there never was one.
    Closed(String),
    /// Nothing comes.
    Silent(String),
    /// The server does not let us in.
    Refused(String),
}
