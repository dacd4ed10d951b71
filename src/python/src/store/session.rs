//! One connection to one server: commands in a pipeline, values straight from and into the engine's memory.

use std::io::{self, BufRead as _, BufReader, IoSlice, Read, Write as _};
use std::net::{SocketAddr, ToSocketAddrs as _};

use baton_objects::resp::client::Url;

use super::requests::{GetMode, PutValue};
use super::value::{HEAD_BYTES, Head, Sum};
use super::watched::WatchedStream;
use super::{Answer, Key};
use crate::Failure;
use crate::raw::Span;

/// Commands outstanding, and bytes of those that have long replies: both sides can always hold that much, so that
/// none waits for the other to read.
const OUTSTANDING: usize = 128;
const OUTSTANDING_BYTES: usize = 16 << 10;
/// Values up to here are copied together, so that one call of the system sends several.
const SMALL_BYTES: u64 = 16 << 10;
const OUT_BYTES: usize = 64 << 10;
const IN_BYTES: usize = 32 << 10;
/// Longest key of a store.
const KEY_MAX_BYTES: usize = baton_objects::KEY_MAX_BYTES;

/// How a connection ended.
pub(super) struct BrokenConnection {
    pub(super) text: String,
    /// Whether some answers had come.
    pub(super) received: bool,
}

/// The first line of a reply.
enum Reply {
    Simple,
    Error(String),
    Integer(i64),
    /// So many bytes follow.
    Bulk(u64),
    Nothing,
}

/// One connection to one store server.
pub(super) struct Session {
    stream: BufReader<WatchedStream>,
    out: Vec<u8>,
}

impl Session {
    /// Connects and logs in.
    pub(super) fn connect(url: &Url) -> Result<Self, String> {
        let failed = |e: io::Error| format!("connect: {e}; is the store running there?");
        let found: Vec<SocketAddr> = url.address.to_socket_addrs().map_err(failed)?.collect();
        let stream = WatchedStream::connect(&found).map_err(failed)?;
        let mut session = Self { stream: BufReader::with_capacity(IN_BYTES, stream), out: Vec::new() };
        if let Some((user, password)) = &url.login {
            session.command(&[b"AUTH", user.as_bytes(), password.as_bytes()]);
            let reply = session.flush().and_then(|()| session.reply()).map_err(|e| format!("log in: {e}"))?;
            if let Reply::Error(text) = reply {
                return Err(format!("log in: {text}"));
            }
        }
        Ok(session)
    }

    /// The address of its name that answered.
    pub(super) fn address(&self) -> SocketAddr {
        self.stream.get_ref().address()
    }

    /// Whether the server was given up because it moved nothing, rather than that the connection ended.
    pub(super) fn is_silent(&self) -> bool {
        self.stream.get_ref().is_silent()
    }

    /// Whether the server answers.
    pub(super) fn ping(&mut self) -> Result<(), String> {
        self.command(&[b"PING"]);
        self.flush().and_then(|()| self.reply()).map(|_| ()).map_err(|e| format!("ping: {e}"))
    }

    /// 1 for each key that has a value, else 0.
    pub(super) fn exist(&mut self, keys: &[Key], answers: &mut [Option<Answer>]) -> Result<(), String> {
        self.numbers(keys, answers, "EXISTS", |number| Ok(u64::from(number == 1)))
    }

    /// How long values are.
    pub(super) fn sizes(&mut self, keys: &[Key], answers: &mut [Option<Answer>]) -> Result<(), String> {
        let size = |number: i64| u64::try_from(number).ok()?.checked_sub(HEAD_BYTES as u64);
        self.numbers(keys, answers, "STRLEN", |number| size(number).ok_or_else(absent))
    }

    /// Removes values.
    pub(super) fn remove(&mut self, keys: &[Key], answers: &mut [Option<Answer>]) -> Result<(), String> {
        self.numbers(keys, answers, "DEL", |number| if number == 1 { Ok(0) } else { Err(absent()) })
    }

    fn numbers(
        &mut self,
        keys: &[Key],
        answers: &mut [Option<Answer>],
        verb: &str,
        means: impl Fn(i64) -> Answer,
    ) -> Result<(), String> {
        self.pipeline(keys, answers, verb, |_, _, reply| match reply {
            Reply::Integer(number) => Ok(means(number)),
            _ => Err(odd()),
        })
    }

    /// Gets values; `takes` is given each one's place among all keys of the call, and its head, and reads what
    /// follows.
    pub(super) fn get(
        &mut self,
        keys: &[Key],
        answers: &mut [Option<Answer>],
        takes: impl Fn(usize, &mut Self, Head) -> io::Result<Answer>,
    ) -> Result<(), String> {
        self.pipeline(keys, answers, "GET", |at, session, reply| match reply {
            Reply::Nothing => Ok(Err(absent())),
            Reply::Bulk(bytes) => {
                let answer = session.value(at, bytes, &takes)?;
                let mut end = [0; 2];
                session.stream.read_exact(&mut end)?;
                if &end == b"\r\n" { Ok(answer) } else { Err(odd()) }
            }
            _ => Err(odd()),
        })
    }

    fn value(
        &mut self,
        at: usize,
        bytes: u64,
        takes: impl Fn(usize, &mut Self, Head) -> io::Result<Answer>,
    ) -> io::Result<Answer> {
        let foreign = "the value under this key is not of this package";
        let Some(rest) = bytes.checked_sub(HEAD_BYTES as u64) else {
            self.skip(bytes)?;
            return Ok(Err(Failure::new(Failure::ABSENT, foreign)));
        };
        let mut head = [0; HEAD_BYTES];
        self.stream.read_exact(&mut head)?;
        match Head::decode(&head) {
            Some(head) if head.bytes == rest => takes(at, self, head),
            decoded => {
                self.skip(rest)?;
                Ok(Err(if decoded.is_some() { damaged() } else { Failure::new(Failure::ABSENT, foreign) }))
            }
        }
    }

    /// Reads a value into its parts.
    pub(super) fn fill_parts(&mut self, head: Head, parts: &[Span], takes: GetMode) -> io::Result<Answer> {
        let room: u64 = parts.iter().map(|part| part.bytes() as u64).sum();
        if head.bytes > room || (head.bytes < room && takes == GetMode::Exact) {
            self.skip(head.bytes)?;
            let text = format!("the value has {} bytes, the buffers have {room}", head.bytes);
            let code = if head.bytes > room { Failure::ARGUMENT } else { Failure::ABSENT };
            return Ok(Err(Failure::new(code, text)));
        }
        let (mut left, mut sum) = (head.bytes, Sum::new());
        for part in parts {
            let want = part.bytes().min(usize::try_from(left).unwrap_or(usize::MAX));
            let mut came = 0;
            while came < want {
                let mut limited = self.stream.by_ref().take((want - came) as u64);
                match part.fill(came, &mut limited) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(some) => {
                        sum.add(&part.held()[came..came + some]);
                        came += some;
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            left -= want as u64;
        }
        Ok(if sum.end() == head.sum { Ok(head.bytes) } else { Err(damaged()) })
    }

    /// Reads a value as it is.
    pub(super) fn whole(&mut self, head: Head, into: &mut Vec<u8>) -> io::Result<Answer> {
        into.clear();
        let came = self.stream.by_ref().take(head.bytes).read_to_end(into)?;
        if came as u64 != head.bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut sum = Sum::new();
        sum.add(into);
        Ok(if sum.end() == head.sum { Ok(head.bytes) } else { Err(damaged()) })
    }

    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let skipped = io::copy(&mut self.stream.by_ref().take(bytes), &mut io::sink())?;
        if skipped == bytes { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Sends a command for each key, `OUTSTANDING` ahead, and hears the replies in order.
    fn pipeline(
        &mut self,
        keys: &[Key],
        answers: &mut [Option<Answer>],
        verb: &str,
        mut hears: impl FnMut(usize, &mut Self, Reply) -> io::Result<Answer>,
    ) -> Result<(), String> {
        let lost = |e: io::Error| format!("{}: {e}", verb.to_ascii_lowercase());
        let (mut asked, mut waiting_bytes) = (0, 0);
        for received in 0..keys.len() {
            // Filled up when half is left, so that one call of the system sends many.
            let fills = asked - received <= OUTSTANDING / 2;
            while fills
                && asked < keys.len()
                && asked < received + OUTSTANDING
                && waiting_bytes < OUTSTANDING_BYTES
            {
                if allowed(&keys[asked].1) {
                    self.command(&[verb.as_bytes(), keys[asked].1.as_bytes()]);
                    waiting_bytes += keys[asked].1.len();
                }
                asked += 1;
            }
            self.flush().map_err(lost)?;
            let (at, key) = &keys[received];
            if !allowed(key) {
                answers[received] = Some(Err(wrong_key(key)));
                continue;
            }
            waiting_bytes -= key.len();
            let reply = self.reply().map_err(lost)?;
            answers[received] = Some(match reply {
                Reply::Error(text) => Err(refused(&text)),
                reply => hears(*at, self, reply).map_err(lost)?,
            });
        }
        Ok(())
    }

    /// Puts values, `OUTSTANDING` ahead of their replies, which are short.
    pub(super) fn put(
        &mut self,
        keys: &[Key],
        values: &[PutValue<'_>],
        answers: &mut [Option<Answer>],
    ) -> Result<(), String> {
        let lost = |e: io::Error| format!("put: {e}");
        let mut received = 0;
        for (sent, (at, key)) in keys.iter().enumerate() {
            if allowed(key) {
                self.set(key.as_bytes(), &values[*at]).map_err(lost)?;
            }
            if sent - received >= OUTSTANDING {
                for _ in 0..OUTSTANDING / 2 {
                    answers[received] = Some(self.stored(&keys[received].1).map_err(lost)?);
                    received += 1;
                }
            }
        }
        for received in received..keys.len() {
            answers[received] = Some(self.stored(&keys[received].1).map_err(lost)?);
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &PutValue<'_>) -> io::Result<()> {
        let mut sum = Sum::new();
        value.pieces().for_each(|piece| sum.add(piece));
        let (bytes, sum) = (value.bytes(), sum.end());
        let out = &mut self.out;
        // A vector takes what it is given.
        let _ = write!(out, "*4\r\n$3\r\nSET\r\n${}\r\n", key.len());
        out.extend_from_slice(key);
        let _ = write!(out, "\r\n${}\r\n", bytes + HEAD_BYTES as u64);
        out.extend_from_slice(&Head { bytes, sum }.encode());
        let after: &[u8] = b"\r\n$2\r\nNX\r\n";
        if bytes <= SMALL_BYTES {
            value.pieces().for_each(|piece| out.extend_from_slice(piece));
            out.extend_from_slice(after);
            return if out.len() >= OUT_BYTES { self.flush() } else { Ok(()) };
        }
        let first = std::mem::take(out);
        let pieces = value.pieces().filter(|piece| !piece.is_empty());
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(4);
        slices.push(IoSlice::new(&first));
        slices.extend(pieces.map(IoSlice::new));
        slices.push(IoSlice::new(after));
        send_all(self.stream.get_mut(), &mut slices)
    }

    /// The result of the put of a key.
    fn stored(&mut self, key: &str) -> io::Result<Answer> {
        if !allowed(key) {
            return Ok(Err(wrong_key(key)));
        }
        if !self.out.is_empty() {
            self.flush()?;
        }
        Ok(match self.reply()? {
            // Nothing is the word for a key that has a value, which is the same one: keys name their content.
            Reply::Simple | Reply::Nothing => Ok(0),
            Reply::Error(text) => Err(refused(&text)),
            Reply::Integer(_) | Reply::Bulk(_) => return Err(odd()),
        })
    }

    fn command(&mut self, words: &[&[u8]]) {
        // A vector takes what it is given.
        let _ = write!(self.out, "*{}\r\n", words.len());
        for word in words {
            let _ = write!(self.out, "${}\r\n", word.len());
            self.out.extend_from_slice(word);
            self.out.extend_from_slice(b"\r\n");
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.out.is_empty() {
            return Ok(());
        }
        let sent = self.stream.get_mut().write_all(&self.out);
        self.out.clear();
        sent
    }

    fn reply(&mut self) -> io::Result<Reply> {
        let mut line = Vec::new();
        self.stream.by_ref().take(1 << 16).read_until(b'\n', &mut line)?;
        let Some(line) = line.strip_suffix(b"\r\n") else {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server has closed the connection"));
        };
        let (kind, text) = line.split_first().ok_or_else(odd)?;
        let text = String::from_utf8_lossy(text);
        let number = || text.parse::<i64>().map_err(|_| odd());
        Ok(match kind {
            b'+' => Reply::Simple,
            b'-' => Reply::Error(text.into_owned()),
            b':' => Reply::Integer(number()?),
            b'_' => Reply::Nothing,
            b'$' => u64::try_from(number()?).map_or(Reply::Nothing, Reply::Bulk),
            _ => return Err(odd()),
        })
    }
}

fn allowed(key: &str) -> bool {
    (1..=KEY_MAX_BYTES).contains(&key.len())
}

fn wrong_key(key: &str) -> Failure {
    Failure::new(Failure::KEY, format!("a key of {} bytes; give from 1 to {KEY_MAX_BYTES}", key.len()))
}

fn absent() -> Failure {
    Failure::new(Failure::ABSENT, "no such key")
}

fn damaged() -> Failure {
    Failure::new(Failure::DAMAGED, "the value under this key is not what was stored; it is removed")
}

/// A server's refusal, under the code that says what to do.
fn refused(text: &str) -> Failure {
    let code = match text.split(' ').next() {
        Some("OOM") => Failure::FULL,
        Some("TRYAGAIN") => Failure::BUSY,
        _ => Failure::SERVER,
    };
    Failure::new(code, text)
}

fn odd() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it answers as no store does; check the address")
}

/// Sends all of it.
fn send_all(stream: &mut WatchedStream, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    while !slices.is_empty() {
        match stream.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => IoSlice::advance_slices(&mut slices, sent),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
