//! Frames over a stream, with a bound on every wait.

use std::future::Future;
use std::io;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::error::{Kind, Stage, TransportError};
use crate::frame::{CONTROL_BYTES_MAX, HEADER_BYTES, Header};

/// Enough for several frames at once.
const READ_BUFFER_BYTES: usize = 16 << 10;

/// The half of a connection that is read.
pub(crate) type ReadHalf = BufReader<Box<dyn AsyncRead + Send + Sync + Unpin>>;
/// The half that is written.
pub(crate) type WriteHalf = Box<dyn AsyncWrite + Send + Sync + Unpin>;

/// A stream in two halves, before any handshake.
pub(crate) struct Wire {
    pub(crate) reader: ReadHalf,
    pub(crate) writer: WriteHalf,
}

impl Wire {
    pub(crate) fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let (read, write) = stream.into_split();
        Ok(Self::of(Box::new(read), Box::new(write)))
    }

    /// A stream whose handshake is over, if it has one.
    pub(crate) fn split(stream: impl AsyncRead + AsyncWrite + Send + Sync + 'static) -> Self {
        let (read, write) = tokio::io::split(stream);
        Self::of(Box::new(read), Box::new(write))
    }

    fn of(read: Box<dyn AsyncRead + Send + Sync + Unpin>, writer: WriteHalf) -> Self {
        Self { reader: BufReader::with_capacity(READ_BUFFER_BYTES, read), writer }
    }
}

/// Runs one read or write, at most `limit` long. `doing` completes "while ...".
pub(crate) async fn within<T>(
    limit: Duration,
    stage: Stage,
    doing: &str,
    work: impl Future<Output = io::Result<T>>,
) -> Result<T, TransportError> {
    match tokio::time::timeout(limit, work).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(TransportError::from_io(&error, stage, doing)),
        Err(_) => {
            let text = format!("no byte for {} ms while {doing}", limit.as_millis());
            Err(TransportError::new(Kind::Unavailable, stage, text))
        }
    }
}

/// Reads the next header. A peer that closes between two frames gives `None`.
pub(crate) async fn read_header(
    reader: &mut ReadHalf,
    first_byte: Duration,
    rest: Duration,
    stage: Stage,
) -> Result<Option<Header>, TransportError> {
    use tokio::io::AsyncBufReadExt;
    if within(first_byte, stage, "waiting for a frame", reader.fill_buf()).await?.is_empty() {
        return Ok(None);
    }
    let mut bytes = [0; HEADER_BYTES];
    within(rest, stage, "reading the header of a frame", reader.read_exact(&mut bytes)).await?;
    Header::decode(&bytes, stage).map(Some)
}

/// Reads a body of `body_bytes`, which the caller has bounded. Every byte restarts the clock.
pub(crate) async fn read_body(
    reader: &mut ReadHalf,
    body_bytes: u32,
    pace: Duration,
    stage: Stage,
) -> Result<Bytes, TransportError> {
    let bytes = usize::try_from(body_bytes).expect("a usize has at least 32 bits");
    let mut body = BytesMut::with_capacity(bytes);
    while body.len() < bytes {
        let left = u64::try_from(bytes - body.len()).expect("fits, for it is below 4 GiB");
        let mut limited = (&mut *reader).take(left);
        if within(pace, stage, "reading the body of a frame", limited.read_buf(&mut body)).await? == 0 {
            let end = io::Error::from(io::ErrorKind::UnexpectedEof);
            return Err(TransportError::from_io(&end, stage, "reading the body of a frame"));
        }
    }
    Ok(body.freeze())
}

/// Reads and verifies the body of a frame that carries no KV.
pub(crate) async fn read_control(
    reader: &mut ReadHalf,
    header: &Header,
    pace: Duration,
    stage: Stage,
) -> Result<Bytes, TransportError> {
    if header.body_bytes > CONTROL_BYTES_MAX {
        let text = format!("a {:?} frame of {} bytes", header.kind, header.body_bytes);
        return Err(TransportError::new(Kind::Bug, stage, text));
    }
    let body = read_body(reader, header.body_bytes, pace, stage).await?;
    verify(header, &body, stage)?;
    Ok(body)
}

/// Does the body belong to the header?
pub(crate) fn verify(header: &Header, body: &[u8], stage: Stage) -> Result<(), TransportError> {
    if header.checksum_with(body) == header.checksum {
        return Ok(());
    }
    let text =
        format!("the checksum of a {:?} frame ({}, {}) does not match", header.kind, header.a, header.b);
    Err(TransportError::new(Kind::Corrupt, stage, text))
}

/// Writes a frame. Every byte restarts the clock.
pub(crate) async fn write_control(
    writer: &mut WriteHalf,
    header: Header,
    body: &[u8],
    pace: Duration,
    stage: Stage,
) -> Result<(), TransportError> {
    let header = header.seal(body);
    let head = header.encode();
    let mut rest = Buf::chain(&head[..], body);
    while rest.has_remaining() {
        let written = within(pace, stage, "writing a frame", write_some(writer, &mut rest)).await?;
        if written == 0 {
            let end = io::Error::from(io::ErrorKind::BrokenPipe);
            return Err(TransportError::from_io(&end, stage, "writing a frame"));
        }
    }
    // Under TLS what was written may wait for the socket still.
    within(pace, stage, "writing a frame", writer.flush()).await
}

async fn write_some(writer: &mut WriteHalf, rest: &mut impl Buf) -> io::Result<usize> {
    writer.write_buf(rest).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameKind;

    const PACE: Duration = Duration::from_millis(50);

    fn pipe(buffer_bytes: usize) -> (Wire, Wire) {
        let (one, other) = tokio::io::duplex(buffer_bytes);
        (Wire::split(one), Wire::split(other))
    }

    #[tokio::test]
    async fn frames_pass_whole_and_an_end_between_frames_is_no_error() {
        let (mut near, mut far) = pipe(16);
        let body = vec![7; 1000];
        let header = Header::new(FrameKind::Offer, 1, 2, 3);
        let writing = async {
            write_control(&mut near.writer, header, &body, PACE, Stage::Offer).await.unwrap();
            near.writer.shutdown().await.unwrap();
        };
        let reading = async {
            let read = read_header(&mut far.reader, PACE, PACE, Stage::Serve).await.unwrap().unwrap();
            let got = read_control(&mut far.reader, &read, PACE, Stage::Serve).await.unwrap();
            (read.b, got, read_header(&mut far.reader, PACE, PACE, Stage::Serve).await)
        };
        let ((), (b, got, end)) = tokio::join!(writing, reading);
        assert_eq!((b, &got[..], end), (2, &body[..], Ok(None)));
    }

    #[tokio::test]
    async fn silence_names_stage_and_time() {
        let (_near, mut far) = pipe(16);
        let error = read_header(&mut far.reader, PACE, PACE, Stage::Serve).await.unwrap_err();
        assert_eq!((error.kind, error.stage), (Kind::Unavailable, Stage::Serve));
        assert!(error.text.contains("50 ms"));
    }

    #[tokio::test]
    async fn a_cut_header_and_a_cut_body_are_closed() {
        let header = Header::new(FrameKind::Offer, 1, 2, 3).seal(&[1; 8]);
        for sent in [&header.encode()[..20], &[&header.encode()[..], &[1; 3]].concat()] {
            let (mut near, mut far) = pipe(256);
            near.writer.write_all(sent).await.unwrap();
            drop(near);
            let read = async {
                let read = read_header(&mut far.reader, PACE, PACE, Stage::Serve).await?.expect("a header");
                read_control(&mut far.reader, &read, PACE, Stage::Serve).await
            };
            assert_eq!(read.await.unwrap_err().kind, Kind::Closed);
        }
    }
}
