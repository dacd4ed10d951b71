//! The transport of the master's calls: one connection, one call at a time, each within its time.
//!
//! A connection that failed in the middle of a call is never used again, for what is left in it would answer the next
//! call; the next call opens a new one.

use std::future::Future;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use crate::error::{Kind, MooncakeError, Result};
use crate::pack::{Reader, Shape, first_word};
use crate::release::other_release;

/// The first byte of every request and answer.
const MAGIC: u8 = 0x15;
/// Bytes before the body of a request.
pub const REQUEST_HEAD_BYTES: usize = 20;
/// Bytes before the body of an answer.
pub const ANSWER_HEAD_BYTES: usize = 16;
/// Bytes of an answer's body at most: a list of replicas has a few hundred.
const ANSWER_BYTES: usize = 4 << 20;
/// The class whose methods are called.
const SERVICE: &str = "mooncake::WrappedMasterService::";
/// How a master says that it does not know the arguments' type, or the call.
const UNKNOWN_ARGUMENTS: u8 = 4;
const UNKNOWN_CALL: u8 = 11;
/// Characters of a peer's text that go into an error.
const ERROR_CHARACTERS: usize = 200;

/// The number of the call `name`.
#[must_use]
pub fn function_id(name: &str) -> u32 {
    first_word(format!("{SERVICE}{name}").as_bytes())
}

/// The head of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHead {
    /// Which request this is; the answer says it again.
    pub sequence: u32,
    /// The id of the called function.
    pub function: u32,
    /// Bytes of the body.
    pub body_bytes: u32,
}

impl RequestHead {
    /// The head as it is sent.
    #[must_use]
    pub fn encode(&self) -> [u8; REQUEST_HEAD_BYTES] {
        let mut head = [0; REQUEST_HEAD_BYTES];
        head[0] = MAGIC;
        head[4..8].copy_from_slice(&self.sequence.to_le_bytes());
        head[8..12].copy_from_slice(&self.function.to_le_bytes());
        head[12..16].copy_from_slice(&self.body_bytes.to_le_bytes());
        head
    }
}

/// The head of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerHead {
    /// Nothing, or what was wrong with the request.
    pub error: u8,
    /// The sequence number of the answered request.
    pub sequence: u32,
    /// Bytes of the body.
    pub body_bytes: u32,
    /// Bytes after the body.
    pub attachment_bytes: u32,
}

impl AnswerHead {
    /// Reads a head.
    ///
    /// # Errors
    /// When it is none.
    pub fn decode(head: &[u8; ANSWER_HEAD_BYTES], stage: &'static str) -> Result<Self> {
        if head[0] != MAGIC {
            let message = "the answer is not of the master's protocol; is this the port of its RPC?";
            return Err(MooncakeError::corrupt(stage, message));
        }
        let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
        Ok(Self { error: head[2], sequence: word(4), body_bytes: word(8), attachment_bytes: word(12) })
    }
}

/// Times of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallTimes {
    /// Time to connect.
    pub connect_us: u64,
    /// Time for a call and its answer.
    pub call_us: u64,
}

impl Default for CallTimes {
    fn default() -> Self {
        Self { connect_us: 3_000_000, call_us: 10_000_000 }
    }
}

/// One master, called one call at a time.
pub struct Caller {
    address: String,
    times: CallTimes,
    line: Mutex<Line>,
}

#[derive(Default)]
struct Line {
    stream: Option<TcpStream>,
    sequence: u32,
}

impl Caller {
    /// Calls `address`, HOST:PORT, from now on; nothing is opened yet.
    #[must_use]
    pub fn new(address: &str, times: CallTimes) -> Self {
        Self { address: address.to_owned(), times, line: Mutex::default() }
    }

    /// The callee.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Calls `name` with a packed `body`; gives the packed answer.
    ///
    /// # Errors
    /// When nobody is there, the time is over, the answer is not of the protocol, or the master does not know the call.
    pub async fn call(&self, name: &'static str, body: &[u8]) -> Result<Vec<u8>> {
        let mut line = self.line.lock().await;
        line.sequence = line.sequence.wrapping_add(1);
        let sequence = line.sequence;
        // Taken out: a call that is dropped or fails half-way leaves no connection behind.
        let mut stream = match line.stream.take() {
            Some(stream) => stream,
            None => self.connect(name).await?,
        };
        let body_bytes =
            u32::try_from(body.len()).map_err(|_| MooncakeError::invalid(name, "the call is too long"))?;
        let head = RequestHead { sequence, function: function_id(name), body_bytes };
        let request = [&head.encode()[..], body].concat();
        let answered = self.within(name, self.times.call_us, exchange(name, &mut stream, &request)).await?;
        let (head, answer) = answered.map_err(|e| e.named(&self.address))?;
        self.check(name, sequence, &head, &answer)?;
        line.stream = Some(stream);
        Ok(answer)
    }

    async fn connect(&self, stage: &'static str) -> Result<TcpStream> {
        let opened = self.within(stage, self.times.connect_us, TcpStream::connect(&self.address)).await?;
        let stream =
            opened.map_err(|e| self.unavailable(stage, &format!("{e}; is the master running there?")))?;
        // Calls are small, and each is waited for.
        stream.set_nodelay(true).map_err(|e| self.unavailable(stage, &e.to_string()))?;
        Ok(stream)
    }

    async fn within<T>(
        &self,
        stage: &'static str,
        limit_us: u64,
        work: impl Future<Output = T>,
    ) -> Result<T> {
        let limit = Duration::from_micros(limit_us);
        tokio::time::timeout(limit, work).await.map_err(|_| {
            self.unavailable(stage, &format!("no answer within {} ms; try again", limit.as_millis()))
        })
    }

    fn unavailable(&self, stage: &'static str, message: &str) -> MooncakeError {
        MooncakeError::new(Kind::Unavailable, stage, &self.address, message)
    }

    fn check(&self, stage: &'static str, sequence: u32, head: &AnswerHead, body: &[u8]) -> Result<()> {
        if head.sequence != sequence {
            let message = format!("the answer is to request {}, not {sequence}; try again", head.sequence);
            return Err(MooncakeError::new(Kind::Corrupt, stage, &self.address, message));
        }
        match head.error {
            0 => Ok(()),
            UNKNOWN_ARGUMENTS | UNKNOWN_CALL => {
                let what = format!("the master does not know this call: '{}'", error_text(body));
                Err(other_release(stage, &self.address, &what))
            }
            code => {
                let message =
                    format!("the call failed with code {code}: '{}'; see the master's log", error_text(body));
                Err(MooncakeError::new(Kind::Unavailable, stage, &self.address, message))
            }
        }
    }
}

async fn exchange(
    stage: &'static str,
    stream: &mut TcpStream,
    request: &[u8],
) -> Result<(AnswerHead, Vec<u8>)> {
    let broken = |e: std::io::Error| {
        MooncakeError::new(Kind::Unavailable, stage, "", format!("the connection broke: {e}; try again"))
    };
    stream.write_all(request).await.map_err(broken)?;
    let mut head = [0; ANSWER_HEAD_BYTES];
    stream.read_exact(&mut head).await.map_err(broken)?;
    let head = AnswerHead::decode(&head, stage)?;
    let bytes = head.body_bytes as usize + head.attachment_bytes as usize;
    if bytes > ANSWER_BYTES {
        let message =
            format!("an answer of {bytes} bytes is announced, {ANSWER_BYTES} are the most that is read");
        return Err(MooncakeError::corrupt(stage, message));
    }
    let mut body = vec![0; bytes];
    stream.read_exact(&mut body).await.map_err(broken)?;
    body.truncate(head.body_bytes as usize);
    Ok((head, body))
}

/// The readable part of a peer's error text.
fn error_text(body: &[u8]) -> String {
    let text = Reader::open(&Shape::Text, body, "error").and_then(|mut from| from.text());
    let text = text.unwrap_or_else(|_| String::from_utf8_lossy(body).into_owned());
    text.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').take(ERROR_CHARACTERS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The errors of a real master of 0.3.13.post1 for a Ping of another type, and for an unknown call.
    #[test]
    fn a_real_masters_refusals_are_read() {
        let arguments = b"w\xfa\xcf\x9d\x04\x80\x0c\x00\x0finvalid rpc arg";
        assert_eq!(error_text(arguments), "invalid rpc arg");
        let caller = Caller::new("m:1", CallTimes::default());
        for code in [UNKNOWN_ARGUMENTS, UNKNOWN_CALL] {
            let head = [0x15, 0, code, 0, 5, 0, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0];
            let head = AnswerHead::decode(&head, "Ping").unwrap();
            let refused = caller.check("Ping", 5, &head, arguments).unwrap_err();
            assert_eq!(refused.kind, Kind::Release);
            assert!(refused.to_string().contains("'invalid rpc arg'"), "{refused}");
        }
        assert_eq!(error_text(b"\x00plain\n"), "plain");
    }

    proptest! {
        #[test]
        fn any_head_is_read_or_refused(head: [u8; ANSWER_HEAD_BYTES], body in prop::collection::vec(any::<u8>(), 0..50)) {
            prop_assert_eq!(AnswerHead::decode(&head, "test").is_ok(), head[0] == MAGIC);
            prop_assert!(error_text(&body).len() <= ERROR_CHARACTERS);
        }
    }
}
