//! Reads and writes ranges of a peer's segment.

use std::future::Future;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{Action, PIECE_BYTES, Request, STATUS_BYTES, Status};
use crate::error::{Kind, MooncakeError, Result};

/// Times of a client of a data listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataTimes {
    /// Time to connect.
    pub connect_us: u64,
    /// Time without any progress: a piece of bytes, or a status.
    pub quiet_us: u64,
}

impl Default for DataTimes {
    fn default() -> Self {
        Self { connect_us: 3_000_000, quiet_us: 30_000_000 }
    }
}

/// One connection to a data listener. After an error it is unusable, and its calls fail.
pub struct DataClient {
    peer: String,
    quiet: Duration,
    stream: Option<TcpStream>,
}

impl DataClient {
    /// Connects to `peer`, HOST:PORT.
    ///
    /// # Errors
    /// When nobody is there in time.
    pub async fn connect(peer: &str, times: DataTimes) -> Result<Self> {
        let unavailable =
            |message: String| MooncakeError::new(Kind::Unavailable, "data connection", peer, message);
        let limit = Duration::from_micros(times.connect_us);
        let stream = tokio::time::timeout(limit, TcpStream::connect(peer))
            .await
            .map_err(|_| unavailable(format!("no connection within {} ms", limit.as_millis())))?
            .map_err(|e| unavailable(format!("{e}; is the segment's owner running?")))?;
        stream.set_nodelay(true).map_err(|e| unavailable(e.to_string()))?;
        Ok(Self { peer: peer.to_owned(), quiet: Duration::from_micros(times.quiet_us), stream: Some(stream) })
    }

    /// Writes `bytes` at `address`; they are there once this returns.
    ///
    /// # Errors
    /// When the peer refuses the range, is silent, or breaks off: then some, all or none of them are there.
    pub async fn write(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        let stage = "segment write";
        let mut stream = self.take(stage)?;
        let request =
            Request { action: Action::Write, address, bytes: bytes.len() as u64, wants_status: true };
        let sent = async {
            self.step(stage, stream.write_all(&request.encode())).await?;
            for piece in bytes.chunks(PIECE_BYTES) {
                self.step(stage, stream.write_all(piece)).await?;
            }
            Ok(())
        }
        .await;
        // A peer that refuses says so and closes: its word is worth more than the broken pipe that follows.
        let answered = self.status(stage, &mut stream).await;
        match (sent, answered) {
            (_, Err(refused)) if refused.kind == Kind::Invalid => return Err(refused),
            (Err(broken), _) => return Err(broken),
            (Ok(()), answered) => answered?,
        }
        self.stream = Some(stream);
        Ok(())
    }

    /// Fills `into` with the bytes at `address`.
    ///
    /// # Errors
    /// When the peer refuses the range, is silent, or breaks off: then `into` is of no use.
    pub async fn read(&mut self, address: u64, into: &mut [u8]) -> Result<()> {
        let stage = "segment read";
        let mut stream = self.take(stage)?;
        let request = Request { action: Action::Read, address, bytes: into.len() as u64, wants_status: true };
        self.step(stage, stream.write_all(&request.encode())).await?;
        self.status(stage, &mut stream).await?;
        for piece in into.chunks_mut(PIECE_BYTES) {
            self.step(stage, stream.read_exact(piece)).await?;
        }
        self.stream = Some(stream);
        Ok(())
    }

    fn take(&mut self, stage: &'static str) -> Result<TcpStream> {
        let gone = "the connection failed before; open another";
        self.stream.take().ok_or_else(|| MooncakeError::new(Kind::Unavailable, stage, &self.peer, gone))
    }

    async fn status(&self, stage: &'static str, stream: &mut TcpStream) -> Result<()> {
        let mut status = [0; STATUS_BYTES];
        self.step(stage, stream.read_exact(&mut status)).await?;
        match Status::decode(status).map_err(|e| e.named(&self.peer))? {
            Status::Done => Ok(()),
            Status::Rejected => {
                let message =
                    "the range is not of a segment there: its owner was started anew; ask the master again";
                Err(MooncakeError::new(Kind::Invalid, stage, &self.peer, message))
            }
            Status::Other(code) => {
                let message =
                    format!("the peer says {code}, which has no meaning; nothing can be said of the bytes");
                Err(MooncakeError::new(Kind::Corrupt, stage, &self.peer, message))
            }
        }
    }

    async fn step<T>(
        &self,
        stage: &'static str,
        work: impl Future<Output = std::io::Result<T>>,
    ) -> Result<T> {
        let told = |message: String| MooncakeError::new(Kind::Unavailable, stage, &self.peer, message);
        tokio::time::timeout(self.quiet, work)
            .await
            .map_err(|_| told(format!("nothing moved for {} ms; try again", self.quiet.as_millis())))?
            .map_err(|e| told(format!("the connection broke: {e}; try again")))
    }
}
