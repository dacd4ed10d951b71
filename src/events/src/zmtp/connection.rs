//! A connection after its handshake, in two halves. Every wait may be cancelled: nothing read or half written is lost.

use bytes::{Buf as _, Bytes, BytesMut};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

use super::WireLimits;
use super::frame;
use super::handshake::{self, Endpoint, GREETING_BYTES, Role};
use crate::error::{EventError, Kind, Stage};

/// Bytes read at once.
const READ_BYTES: usize = 64 * 1024;

/// Something that a peer sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PeerInput {
    /// A message of one frame or more.
    Message(Vec<Bytes>),
    /// It asks whether we live; the answer is [`ConnectionWriter::pong`] with this context.
    Ping(Bytes),
    /// It begins (`true`) or ends a subscription by command, as ZMTP 3.1 does.
    Subscribe(bool, Bytes),
}

/// The half that reads.
#[derive(Debug)]
pub(crate) struct ConnectionReader {
    stream: OwnedReadHalf,
    arrived: ReceiveBuffer,
}

/// The bytes and frames that have arrived and were not handed on yet.
#[derive(Debug)]
struct ReceiveBuffer {
    buffer: BytesMut,
    message: Vec<Bytes>,
    limits: WireLimits,
}

/// The half that writes.
#[derive(Debug)]
pub(crate) struct ConnectionWriter {
    stream: OwnedWriteHalf,
    buffer: BytesMut,
}

/// Both halves.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) incoming: ConnectionReader,
    pub(crate) outgoing: ConnectionWriter,
}

impl Connection {
    /// Connects and shakes hands, all within `within`.
    pub(crate) async fn open(
        endpoint: &Endpoint,
        role: Role,
        limits: WireLimits,
        within: Duration,
    ) -> Result<Self, EventError> {
        let opening = async {
            let stream = TcpStream::connect(endpoint.address()).await;
            let stream = stream.map_err(|error| {
                EventError::new(Kind::Unavailable, Stage::Connect, format!("{endpoint}: {error}"))
            })?;
            Self::negotiate(stream, role, limits).await
        };
        let late = || {
            let message = format!("{endpoint} has not answered within {} ms", within.as_millis());
            EventError::new(Kind::Unavailable, Stage::Connect, message)
        };
        timeout(within, opening).await.map_err(|_| late())?
    }

    /// Shakes hands over a connection that is there; the caller bounds its time.
    pub(crate) async fn negotiate(
        stream: TcpStream,
        role: Role,
        limits: WireLimits,
    ) -> Result<Self, EventError> {
        stream.set_nodelay(true).map_err(|error| EventError::io(Stage::Handshake, &error))?;
        let (read, write) = stream.into_split();
        let mut incoming = ConnectionReader { stream: read, arrived: ReceiveBuffer::new(limits) };
        let mut outgoing = ConnectionWriter { stream: write, buffer: BytesMut::new() };
        outgoing.buffer.extend_from_slice(&handshake::greeting());
        frame::put_command(&mut outgoing.buffer, "READY", &handshake::ready(role));
        outgoing.flush().await?;
        while !incoming.arrived.greeting()? {
            incoming.fill().await?;
        }
        while !incoming.arrived.ready(role)? {
            incoming.fill().await?;
        }
        Ok(Self { incoming, outgoing })
    }
}

impl ConnectionReader {
    /// Waits for the next message or command.
    pub(crate) async fn next(&mut self) -> Result<PeerInput, EventError> {
        loop {
            if let Some(received) = self.arrived.parse()? {
                return Ok(received);
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Result<(), EventError> {
        self.arrived.buffer.reserve(READ_BYTES);
        let read = self.stream.read_buf(&mut self.arrived.buffer).await;
        match read.map_err(|error| EventError::io(Stage::Receive, &error))? {
            0 => Err(EventError::new(Kind::Closed, Stage::Receive, "the peer closed the connection")),
            _ => Ok(()),
        }
    }
}

impl ReceiveBuffer {
    fn new(limits: WireLimits) -> Self {
        Self { buffer: BytesMut::new(), message: Vec::new(), limits }
    }

    /// Whether the greeting is there; it is taken.
    fn greeting(&mut self) -> Result<bool, EventError> {
        if self.buffer.len() < GREETING_BYTES {
            return Ok(false);
        }
        handshake::judge_greeting(&self.buffer)?;
        self.buffer.advance(GREETING_BYTES);
        Ok(true)
    }

    /// Whether the peer's first command is there; it is taken.
    fn ready(&mut self, role: Role) -> Result<bool, EventError> {
        let Some(first) = frame::take(&mut self.buffer, 0, &WireLimits::for_requests())? else {
            return Ok(false);
        };
        if !first.command {
            let message = "the peer sends messages before its READY";
            return Err(EventError::new(Kind::Corrupt, Stage::Handshake, message));
        }
        handshake::judge_ready(role, &first.body)?;
        Ok(true)
    }

    fn parse(&mut self) -> Result<Option<PeerInput>, EventError> {
        loop {
            let used: usize = self.message.iter().map(Bytes::len).sum();
            let Some(frame) = frame::take(&mut self.buffer, used, &self.limits)? else { return Ok(None) };
            if frame.command {
                match frame::command(&frame.body) {
                    // Two bytes say how long we may be silent; the rest is to come back.
                    Some((b"PING", body)) => {
                        return Ok(Some(PeerInput::Ping(body.slice(body.len().min(2)..))));
                    }
                    Some((b"SUBSCRIBE", prefix)) => return Ok(Some(PeerInput::Subscribe(true, prefix))),
                    Some((b"CANCEL", prefix)) => return Ok(Some(PeerInput::Subscribe(false, prefix))),
                    _ => continue,
                }
            }
            self.message.push(frame.body);
            if !frame.more {
                return Ok(Some(PeerInput::Message(std::mem::take(&mut self.message))));
            }
            if self.message.len() >= self.limits.frames {
                let message = format!("a message of more than {} frames", self.limits.frames);
                return Err(EventError::new(Kind::Corrupt, Stage::Receive, message));
            }
        }
    }
}

/// The messages that a connection of `role` reads from bytes in such pieces, up to the first error.
#[cfg(test)]
pub(crate) fn take_all<const PIECES: usize>(
    role: Role,
    limits: WireLimits,
    pieces: [BytesMut; PIECES],
) -> Result<Vec<PeerInput>, (Vec<PeerInput>, EventError)> {
    let (mut arrived, mut received) = (ReceiveBuffer::new(limits), Vec::new());
    let (mut greeted, mut ready) = (false, false);
    for piece in pieces {
        arrived.buffer.extend_from_slice(&piece);
        let mut step = || {
            greeted = greeted || arrived.greeting()?;
            ready = ready || greeted && arrived.ready(role)?;
            while ready && let Some(one) = arrived.parse()? {
                received.push(one);
            }
            Ok(())
        };
        if let Err(error) = step() {
            return Err((received, error));
        }
    }
    if ready { Ok(received) } else { Err((received, EventError::decode("no handshake"))) }
}

impl ConnectionWriter {
    /// Sends a message.
    pub(crate) async fn send(&mut self, frames: &[&[u8]]) -> Result<(), EventError> {
        frame::put_message(&mut self.buffer, frames);
        self.flush().await
    }

    /// Answers a ping.
    pub(crate) async fn pong(&mut self, context: &[u8]) -> Result<(), EventError> {
        frame::put_command(&mut self.buffer, "PONG", context);
        self.flush().await
    }

    async fn flush(&mut self) -> Result<(), EventError> {
        while self.buffer.has_remaining() {
            let written = self.stream.write_buf(&mut self.buffer).await;
            if written.map_err(|error| EventError::io(Stage::Send, &error))? == 0 {
                return Err(EventError::new(Kind::Closed, Stage::Send, "the peer closed the connection"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    const WITHIN: Duration = Duration::from_secs(5);

    async fn pair(
        ours: Role,
        theirs: Role,
    ) -> (Result<Connection, EventError>, Result<Connection, EventError>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint::parse(&format!("tcp://{}", listener.local_addr().unwrap())).unwrap();
        let accepting = async {
            let (stream, _) = listener.accept().await.unwrap();
            Connection::negotiate(stream, theirs, WireLimits::for_requests()).await
        };
        tokio::join!(Connection::open(&endpoint, ours, WireLimits::for_requests(), WITHIN), accepting)
    }

    #[tokio::test]
    async fn two_ends_agree_and_messages_keep_their_frames() {
        let (ours, theirs) = pair(Role::Dealer, Role::Router).await;
        let (mut ours, mut theirs) = (ours.unwrap(), theirs.unwrap());
        let long = vec![7; 3000];
        ours.outgoing.send(&[b"", b"ask", &long]).await.unwrap();
        let PeerInput::Message(frames) = theirs.incoming.next().await.unwrap() else {
            panic!("a message was sent")
        };
        assert_eq!(frames, [&b""[..], b"ask", &long]);
        frame::put_command(&mut theirs.outgoing.buffer, "PING", b"\0\x01ctx");
        theirs.outgoing.flush().await.unwrap();
        let PeerInput::Ping(context) = ours.incoming.next().await.unwrap() else { panic!("a ping was sent") };
        ours.outgoing.pong(&context).await.unwrap();
        ours.outgoing.send(&[b"after"]).await.unwrap();
        let PeerInput::Message(frames) = theirs.incoming.next().await.unwrap() else {
            panic!("pongs are passed over")
        };
        assert_eq!((&context[..], &frames[0][..]), (&b"ctx"[..], &b"after"[..]));
        drop(theirs);
        assert_eq!(ours.incoming.next().await.unwrap_err().kind, Kind::Closed);
    }

    #[tokio::test]
    async fn sockets_that_do_not_fit_part() {
        let (ours, theirs) = pair(Role::Sub, Role::Router).await;
        assert!(ours.unwrap_err().message.contains("cannot talk to ROUTER"));
        assert!(theirs.is_err());
    }

    #[tokio::test]
    async fn more_than_the_limit_ends_the_connection() {
        let (ours, theirs) = pair(Role::Dealer, Role::Router).await;
        let (mut ours, mut theirs) = (ours.unwrap(), theirs.unwrap());
        ours.outgoing.send(&[&b""[..]; 9]).await.unwrap();
        assert!(theirs.incoming.next().await.unwrap_err().message.contains("more than 8 frames"));
        let (ours, theirs) = pair(Role::Dealer, Role::Router).await;
        let (mut ours, mut theirs) = (ours.unwrap(), theirs.unwrap());
        ours.outgoing.send(&[&[0; 5000]]).await.unwrap();
        assert!(theirs.incoming.next().await.unwrap_err().message.contains("longer than the 4096"));
    }

    #[tokio::test]
    async fn a_silent_peer_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint::parse(&format!("tcp://{}", listener.local_addr().unwrap())).unwrap();
        let within = Duration::from_millis(30);
        let silent =
            Connection::open(&endpoint, Role::Sub, WireLimits::for_requests(), within).await.unwrap_err();
        assert!(silent.kind == Kind::Unavailable && silent.message.contains("30 ms"), "{silent}");
        drop(listener);
        let gone =
            Connection::open(&endpoint, Role::Sub, WireLimits::for_requests(), WITHIN).await.unwrap_err();
        assert_eq!((gone.kind, gone.stage), (Kind::Unavailable, Stage::Connect));
    }
}
