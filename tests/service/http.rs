//! A small HTTP/1.1 client on a plain socket: one call a connection, never longer than a deadline.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::Value;

/// No call takes longer: one that does hangs.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Headers that a call adds.
pub type Headers<'a> = &'a [(&'a str, &'a str)];

/// A whole answer.
#[derive(Debug)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    headers: Vec<(String, String)>,
    /// The body as text.
    pub text: String,
}

impl Reply {
    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("not JSON ({e}): {self:?}"))
    }

    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
    }

    /// Asserts that the call succeeded, and returns the reply.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.status, 200, "{self:?}");
        self
    }

    /// `error.code`, once it is known that the body is the error object of OpenAI's API.
    #[track_caller]
    pub fn error_code(&self) -> String {
        let error = &self.json()["error"];
        let whole = error["message"].as_str().is_some_and(|m| !m.is_empty()) && error["type"].is_string();
        assert!(whole, "no error object: {self:?}");
        error["code"].as_str().unwrap_or_default().to_owned()
    }
}

/// An answer whose body is still to come.
pub struct OpenAnswer {
    reader: BufReader<TcpStream>,
    until: Instant,
    status: u16,
    headers: Vec<(String, String)>,
    left: BodyRest,
    line: Vec<u8>,
}

/// The rest of a body.
enum BodyRest {
    Chunks,
    Bytes(usize),
    Nothing,
}

/// Calls and reads the whole answer.
///
/// # Errors
/// In words: there is no listener, the connection broke, or the deadline passed.
pub fn call(at: SocketAddr, what: &str, headers: Headers<'_>, body: &str) -> Result<Reply, String> {
    OpenAnswer::new(at, what, headers, body)?.whole()
}

impl OpenAnswer {
    /// Calls and reads the answer's head. `what` is such as `POST /v1/completions`.
    ///
    /// # Errors
    /// In words, as for [`call`].
    pub fn new(at: SocketAddr, what: &str, headers: Headers<'_>, body: &str) -> Result<Self, String> {
        Self::within(DEADLINE, at, what, headers, body)
    }

    /// Calls and reads the answer's head, with this limit of time.
    ///
    /// # Errors
    /// In words, as for [`call`].
    pub fn within(
        longest: Duration,
        at: SocketAddr,
        what: &str,
        headers: Headers<'_>,
        body: &str,
    ) -> Result<Self, String> {
        let until = Instant::now() + longest;
        let stream =
            TcpStream::connect_timeout(&at, Duration::from_secs(5)).map_err(|e| format!("connect: {e}"))?;
        stream.set_nodelay(true).map_err(|e| format!("nodelay: {e}"))?;
        let mut head = format!(
            "{what} HTTP/1.1\r\nhost: {at}\r\nconnection: close\r\ncontent-length: {}\r\n",
            body.len()
        );
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        let mut sender = &stream;
        sender.write_all(format!("{head}\r\n{body}").as_bytes()).map_err(|e| format!("send: {e}"))?;
        let reader = BufReader::new(stream);
        let mut open =
            Self { reader, until, status: 0, headers: Vec::new(), left: BodyRest::Nothing, line: Vec::new() };
        open.head()?;
        Ok(open)
    }

    fn head(&mut self) -> Result<(), String> {
        let first = self.text_line()?;
        self.status = first
            .split(' ')
            .nth(1)
            .and_then(|word| word.parse().ok())
            .ok_or_else(|| format!("no HTTP status: {first:?}"))?;
        loop {
            let line = self.text_line()?;
            let Some((name, value)) = line.split_once(':') else { break };
            let (name, value) = (name.to_ascii_lowercase(), value.trim().to_owned());
            match name.as_str() {
                "transfer-encoding" if value == "chunked" => self.left = BodyRest::Chunks,
                "content-length" => {
                    self.left =
                        BodyRest::Bytes(value.parse().map_err(|_| format!("content-length: {value}"))?);
                }
                _ => {}
            }
            self.headers.push((name, value));
        }
        Ok(())
    }

    /// HTTP status.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// The next part of the body; `None` when it is complete.
    fn part(&mut self) -> Result<Option<Vec<u8>>, String> {
        let bytes = match self.left {
            BodyRest::Nothing | BodyRest::Bytes(0) => return Ok(None),
            BodyRest::Bytes(count) => {
                self.left = BodyRest::Nothing;
                count
            }
            BodyRest::Chunks => {
                let size = self.text_line()?;
                usize::from_str_radix(&size, 16).map_err(|_| format!("chunk of {size:?} bytes"))?
            }
        };
        let mut part = vec![0; bytes];
        self.limit()?;
        self.reader.read_exact(&mut part).map_err(|e| format!("body: {e}"))?;
        if matches!(self.left, BodyRest::Chunks) {
            self.text_line()?;
            if bytes == 0 {
                self.left = BodyRest::Nothing;
                return Ok(None);
            }
        }
        Ok(Some(part))
    }

    /// The rest of the answer.
    ///
    /// # Errors
    /// In words: the connection broke, or the deadline passed.
    pub fn whole(mut self) -> Result<Reply, String> {
        let mut body = Vec::new();
        while let Some(part) = self.part()? {
            body.extend(part);
        }
        let text = String::from_utf8(body).map_err(|e| format!("body: {e}"))?;
        Ok(Reply { status: self.status, headers: self.headers, text })
    }

    /// The data of the next event of a stream; `None` after its last.
    ///
    /// # Errors
    /// In words: the connection broke before the stream's end, or the deadline passed.
    pub fn event(&mut self) -> Result<Option<String>, String> {
        loop {
            if let Some(end) = self.line.windows(2).position(|two| two == b"\n\n") {
                let event: Vec<u8> = self.line.drain(..end + 2).collect();
                let text = String::from_utf8(event).map_err(|e| format!("event: {e}"))?;
                // Comments only keep the connection alive.
                if let Some(data) = text.trim_end().strip_prefix("data: ") {
                    return Ok(Some(data.to_owned()));
                }
                continue;
            }
            match self.part()? {
                Some(part) => self.line.extend(part),
                None => return Ok(None),
            }
        }
    }

    fn text_line(&mut self) -> Result<String, String> {
        self.limit()?;
        let mut line = String::new();
        let count = self.reader.read_line(&mut line).map_err(|e| format!("read: {e}"))?;
        if count == 0 {
            return Err("the connection was closed before the answer's end".into());
        }
        Ok(line.trim_end().to_owned())
    }

    fn limit(&self) -> Result<(), String> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("hung: no whole answer within the deadline".into());
        }
        self.reader.get_ref().set_read_timeout(Some(left)).map_err(|e| format!("deadline: {e}"))
    }
}
