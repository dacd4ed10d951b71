//! Connections of a subscription, one after another, and what is done about holes in each.

use bytes::Bytes;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

use super::live::{LivePosition, judge};
use super::replay::Replay;
use super::stream::{ConsumerGoneError, Stream};
use super::{EpochReason, SubscriberConfig, micros};
use crate::codec::sequence_of;
use crate::error::{EventError, Kind};
use crate::zmtp::{Connection, Endpoint, PeerInput, Role, WireLimits, subscription};

/// How a round of replays ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplayOutcome {
    /// Everything that was asked for came.
    Up,
    /// Not everything came, and asking again does not help.
    Short,
}

/// Why a connection is left.
enum DisconnectReason {
    Gone,
    Lost(EventError),
}

impl From<ConsumerGoneError> for DisconnectReason {
    fn from(_: ConsumerGoneError) -> Self {
        Self::Gone
    }
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) config: SubscriberConfig,
    pub(super) live: Endpoint,
    pub(super) replay: Option<Endpoint>,
}

impl Session {
    /// Follows until the consumer has gone.
    pub(super) async fn run(self, mut stream: Stream) {
        let gone = stream.gone();
        tokio::select! {
            () = gone => {}
            _ = self.follow(&mut stream) => {}
        }
    }

    async fn follow(&self, stream: &mut Stream) -> Result<(), ConsumerGoneError> {
        stream.begin(EpochReason::Started, None).await?;
        let mut backoff_us = self.config.backoff_min_us;
        loop {
            let since = Instant::now();
            let error = match self.connect().await {
                Ok(connection) => {
                    stream.count(|status| {
                        status.connected = true;
                        status.connections += 1;
                    });
                    match self.listen(connection, stream).await {
                        DisconnectReason::Gone => return Err(ConsumerGoneError),
                        DisconnectReason::Lost(error) => error,
                    }
                }
                Err(error) => error,
            };
            stream.note(&error);
            stream.count(|status| status.connected = false);
            // A peer that lets us in and throws us out at once is not hammered either.
            if since.elapsed() > micros(self.config.backoff_max_us) {
                backoff_us = self.config.backoff_min_us;
            }
            sleep(micros(backoff_us)).await;
            backoff_us = (backoff_us * 2).min(self.config.backoff_max_us);
        }
    }

    async fn connect(&self) -> Result<Connection, EventError> {
        let limits = WireLimits::for_batches(self.config.limits.batch_bytes);
        let within = micros(self.config.connect_timeout_us);
        let mut connection = Connection::open(&self.live, Role::Sub, limits, within).await?;
        connection.outgoing.send(&[&subscription(true, self.config.topic.as_bytes())]).await?;
        Ok(connection)
    }

    /// Reads one connection to its end.
    async fn listen(&self, mut connection: Connection, stream: &mut Stream) -> DisconnectReason {
        match self.listen_on(&mut connection, stream).await {
            Err(left) => left,
            Ok(never) => match never {},
        }
    }

    async fn listen_on(
        &self,
        connection: &mut Connection,
        stream: &mut Stream,
    ) -> Result<std::convert::Infallible, DisconnectReason> {
        self.rejoin(stream).await?;
        let (mut last, mut probe_us) = (None, self.config.probe_min_us);
        let mut probe_at = Instant::now() + micros(probe_us);
        loop {
            tokio::select! {
                received = connection.incoming.next() => match received.map_err(DisconnectReason::Lost)? {
                    PeerInput::Ping(context) => connection.outgoing.pong(&context).await.map_err(DisconnectReason::Lost)?,
                    PeerInput::Subscribe(..) => {}
                    PeerInput::Message(frames) => {
                        self.message(&frames, &mut last, stream).await?;
                        probe_us = self.config.probe_min_us;
                        probe_at = Instant::now() + micros(probe_us);
                    }
                },
                () = sleep_until(probe_at), if self.replay.is_some() => {
                    self.catch_up(stream, None).await?;
                    probe_us = (probe_us * 2).min(self.config.probe_max_us);
                    probe_at = Instant::now() + micros(probe_us);
                }
            }
        }
    }

    /// A new connection: finds out whether the engine is the one we knew, and gets what we missed.
    async fn rejoin(&self, stream: &mut Stream) -> Result<(), ConsumerGoneError> {
        if self.replay.is_none() {
            // Whether it is the same engine cannot be known, and what was said meanwhile is lost.
            return stream.begin(EpochReason::Lost, None).await;
        }
        match stream.last() {
            // Nothing came in this epoch yet, so nothing is lost by starting it anew.
            None => stream.begin(EpochReason::Lost, None).await?,
            Some(last) => match self.remembers(last, stream).await {
                Ok(true) => {}
                Ok(false) => stream.begin(EpochReason::Restarted, Some(0)).await?,
                Err(error) => {
                    stream.note(&error);
                    stream.begin(EpochReason::Lost, None).await?;
                }
            },
        }
        self.catch_up(stream, None).await?;
        Ok(())
    }

    /// Whether the engine's past still has the last batch that we know, byte for byte.
    async fn remembers(&self, last: u64, stream: &Stream) -> Result<bool, EventError> {
        let mut replay = self.ask(last, stream).await?;
        let first = replay.next().await?;
        Ok(first.is_some_and(|(sequence, payload)| stream.is_last(sequence, &payload)))
    }

    /// One live message.
    async fn message(
        &self,
        frames: &[Bytes],
        last: &mut Option<u64>,
        stream: &mut Stream,
    ) -> Result<(), ConsumerGoneError> {
        let read = match frames {
            [.., sequence, payload] => sequence_of(sequence).map(|sequence| (sequence, payload)),
            _ => Err(EventError::decode("a message without a number")),
        };
        let (sequence, payload) = match read {
            Ok(read) => read,
            Err(error) => {
                stream.note(&error);
                stream.count(|status| status.malformed += 1);
                return Ok(());
            }
        };
        let found = judge(sequence, stream.next(), *last);
        *last = Some(sequence);
        match found {
            // The replay socket may still have the batches before it.
            LivePosition::Next if stream.next().is_none() && sequence > 0 && self.replay.is_some() => {
                self.fill(sequence, stream).await?;
            }
            LivePosition::Next => {}
            LivePosition::Known => return Ok(()),
            LivePosition::AfterGap => {
                stream.count(|status| status.gaps += 1);
                self.fill(sequence, stream).await?;
            }
            LivePosition::Fell => {
                stream.begin(EpochReason::Restarted, Some(0)).await?;
                self.fill(sequence, stream).await?;
            }
        }
        if stream.next().is_none_or(|next| next <= sequence) {
            stream.deliver(sequence, payload).await?;
        }
        Ok(())
    }

    /// Fills the hole before `sequence`, or gives up what is in it.
    async fn fill(&self, sequence: u64, stream: &mut Stream) -> Result<(), ConsumerGoneError> {
        if self.catch_up(stream, Some(sequence)).await? == ReplayOutcome::Short {
            stream.begin(EpochReason::Lost, Some(sequence)).await?;
        }
        Ok(())
    }

    async fn ask(&self, from: u64, stream: &Stream) -> Result<Replay, EventError> {
        let Some(endpoint) = &self.replay else {
            return Err(EventError::new(
                Kind::Invalid,
                crate::Stage::Replay,
                "no replay endpoint is configured",
            ));
        };
        stream.count(|status| status.replays += 1);
        let times: (Duration, Duration) =
            (micros(self.config.connect_timeout_us), micros(self.config.replay_timeout_us));
        Replay::ask(endpoint, from, self.config.limits.batch_bytes, times).await
    }

    /// Gets what comes next by replay: up to `until`, or as much as there is.
    ///
    /// Replays may be lossy: a publisher drops what does not fit its queue. So a hole inside one is asked for
    /// again, as long as each round brings something.
    async fn catch_up(
        &self,
        stream: &mut Stream,
        until: Option<u64>,
    ) -> Result<ReplayOutcome, ConsumerGoneError> {
        let mut fruitless = 0;
        while self.replay.is_some() && fruitless < self.config.replay_attempts {
            let before = stream.next();
            // A first hole may be the network's; a second says that the publisher no longer has it.
            let sure = fruitless > 0 || self.config.replay_attempts < 2;
            let ended = self.one_replay(stream, until, sure).await?;
            let reached = until.is_some_and(|until| stream.next().is_some_and(|next| next >= until));
            match ended {
                _ if reached => return Ok(ReplayOutcome::Up),
                Ok(()) if until.is_none() => return Ok(ReplayOutcome::Up),
                Ok(()) => {}
                Err(error) => stream.note(&error),
            }
            fruitless = if stream.next() == before { fruitless + 1 } else { 0 };
        }
        Ok(ReplayOutcome::Short)
    }

    /// One replay: `Ok` within if it came to its end or to `until`, an error if it broke off or has a hole.
    ///
    /// A hole at its very beginning is given up if we are `sure` of it: the publisher keeps only so much.
    async fn one_replay(
        &self,
        stream: &mut Stream,
        until: Option<u64>,
        sure: bool,
    ) -> Result<Result<(), EventError>, ConsumerGoneError> {
        let from = stream.next().unwrap_or(0);
        let mut replay = match self.ask(from, stream).await {
            Ok(replay) => replay,
            Err(error) => return Ok(Err(error)),
        };
        let mut first = true;
        loop {
            let (sequence, payload) = match replay.next().await {
                Ok(Some(message)) => message,
                Ok(None) => return Ok(Ok(())),
                Err(error) => return Ok(Err(error)),
            };
            let next = stream.next().unwrap_or(0);
            if sequence > next && first && sure {
                stream.begin(EpochReason::Lost, Some(sequence)).await?;
            } else if sequence > next {
                let message = format!("batches {next} to {} are missing in the replay", sequence - 1);
                return Ok(Err(EventError::new(Kind::Unavailable, crate::Stage::Replay, message)));
            }
            first = false;
            if sequence >= next {
                stream.deliver(sequence, &payload).await?;
            }
            if until.is_some_and(|until| stream.next().is_some_and(|next| next >= until)) {
                return Ok(Ok(()));
            }
        }
    }
}
