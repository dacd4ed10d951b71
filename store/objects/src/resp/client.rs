//! A small client: one connection, blocking, pipelines included. For commands, tests and measurements.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

use super::trust::{Way, secure};

pub use super::trust::Trust;

/// Largest text or list that a reply may have.
const REPLY_MAX: i64 = 4 << 30;
/// Deepest list in a list.
const DEPTH_MAX: u32 = 8;

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// `+OK` and its like.
    Simple(String),
    /// The server's error.
    Error(String),
    /// A number.
    Integer(i64),
    /// A string of bytes.
    Bulk(Vec<u8>),
    /// No value.
    Nothing,
    /// Several replies; a map's keys and values in turn.
    List(Vec<Reply>),
}

impl Reply {
    /// The reply, with the server's error as `Err`.
    ///
    /// # Errors
    /// The server's, as it says it.
    pub fn done(self) -> Result<Self, String> {
        if let Self::Error(error) = self { Err(error) } else { Ok(self) }
    }
}

/// Where a server is and how to come in: `redis://[[user]:password@]host[:port]`, over TLS
/// `rediss://...[?ssl_ca_certs=FILE]`.
#[derive(Clone, PartialEq, Eq)]
pub struct Url {
    /// Host and port.
    pub address: String,
    /// User and password.
    pub login: Option<(String, String)>,
    /// The authority that vouches for the server; plain text where there is none.
    pub tls: Option<Trust>,
}

impl std::fmt::Debug for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The password stays out of logs.
        f.debug_struct("Url").field("address", &self.address).finish_non_exhaustive()
    }
}

impl std::str::FromStr for Url {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "url: give redis://host:port, or rediss://host:port for TLS".to_owned();
        let (plain, secured) = (text.strip_prefix("redis://"), text.strip_prefix("rediss://"));
        let rest = plain.or(secured).ok_or_else(wrong)?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let tls = match (secured, query.strip_prefix("ssl_ca_certs=")) {
            (Some(_), Some(file)) if !file.is_empty() => Some(Trust { ca: file.into() }),
            (Some(_), None) if query.is_empty() => Some(Trust::default()),
            (None, None) if query.is_empty() => None,
            _ => return Err("url: after ? there is ssl_ca_certs=FILE of rediss:// and nothing else".into()),
        };
        let rest = rest.split('/').next().unwrap_or(rest);
        let (login, host) = rest.rsplit_once('@').map_or((None, rest), |(login, host)| (Some(login), host));
        let login = login.map(|login| {
            let (user, password) = login.split_once(':').unwrap_or((login, ""));
            (if user.is_empty() { "default" } else { user }.to_owned(), password.to_owned())
        });
        if host.is_empty() {
            return Err(wrong());
        }
        // The colons of an IPv6 address are inside brackets.
        let ported = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let address = if ported { host.to_owned() } else { format!("{host}:6379") };
        Ok(Self { address, login, tls })
    }
}

impl Url {
    /// The host without its port and brackets.
    pub(super) fn host(&self) -> &str {
        let host = self.address.rsplit_once(':').map_or(self.address.as_str(), |(host, _)| host);
        host.trim_start_matches('[').trim_end_matches(']')
    }
}

/// A stream on which a silence may be waited out.
struct PatientStream {
    stream: Way,
    watch: Option<(Duration, Box<dyn Fn() -> bool + Send>)>,
}

impl std::fmt::Debug for PatientStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Patient").field("stream", &self.stream).finish_non_exhaustive()
    }
}

/// Whether an error says only that nothing came or went for a while.
pub(crate) fn is_silence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

impl PatientStream {
    fn persist<T>(&mut self, mut act: impl FnMut(&mut Way) -> io::Result<T>) -> io::Result<T> {
        let start = Instant::now();
        loop {
            let done = act(&mut self.stream);
            match (&done, &self.watch) {
                (Err(e), Some((at_most, lives)))
                    if is_silence(e) && start.elapsed() < *at_most && lives() => {}
                _ => return done,
            }
        }
    }
}

impl Read for PatientStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.persist(|stream| stream.read(into))
    }
}

impl Write for PatientStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.persist(|stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.persist(Write::flush)
    }
}

/// A connection to a server of Redis' protocol.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<PatientStream>,
    out: Vec<u8>,
}

impl Client {
    /// Connects and logs in.
    ///
    /// # Errors
    /// The error of the network or the server.
    pub fn connect(url: &Url, time_limit: Duration) -> Result<Self, String> {
        let session = url.tls.as_ref().map(|trust| trust.session(url)).transpose()?;
        let failed = |e: io::Error| format!("connect to {}: {e}; is the store running there?", url.address);
        let addresses: Vec<SocketAddr> = url.address.to_socket_addrs().map_err(failed)?.collect();
        let stream = reach(&addresses, time_limit).map_err(failed)?;
        let set = stream.set_nodelay(true).and_then(|()| stream.set_read_timeout(Some(time_limit)));
        set.and_then(|()| stream.set_write_timeout(Some(time_limit))).map_err(failed)?;
        let stream = match session {
            None => Way::Plain(stream),
            Some(session) => secure(session, stream, url)?,
        };
        let mut client = Self {
            stream: BufReader::with_capacity(1 << 17, PatientStream { stream, watch: None }),
            out: Vec::new(),
        };
        if let Some((user, password)) = &url.login {
            client.call(&[b"AUTH", user.as_bytes(), password.as_bytes()])?;
        }
        Ok(client)
    }

    /// Sends a command and waits for its reply.
    ///
    /// # Errors
    /// The error of the network, or the server's refusal.
    pub fn call(&mut self, arguments: &[&[u8]]) -> Result<Reply, String> {
        self.queue(arguments);
        self.flush().and_then(|()| self.receive()).map_err(|e| format!("call: {e}"))?.done()
    }

    /// Adds a command to those that [`Client::flush`] sends.
    pub fn queue(&mut self, arguments: &[&[u8]]) {
        // A vector takes what it is given.
        let _ = write!(self.out, "*{}\r\n", arguments.len());
        for argument in arguments {
            let _ = write!(self.out, "${}\r\n", argument.len());
            self.out.extend_from_slice(argument);
            self.out.extend_from_slice(b"\r\n");
        }
    }

    /// Sends what is queued.
    ///
    /// # Errors
    /// The error of the network.
    pub fn flush(&mut self) -> io::Result<()> {
        let sent = self.stream.get_mut().write_all(&self.out);
        self.out.clear();
        // TLS may have taken in what it has not sent yet.
        sent.and_then(|()| self.stream.get_mut().flush())
    }

    /// From now on a silence as long as the time limit that it connected with is no error while `lives` says so, nor
    /// before `at_most` is over.
    pub fn watch(&mut self, at_most: Duration, lives: impl Fn() -> bool + Send + 'static) {
        self.stream.get_mut().watch = Some((at_most, Box::new(lives)));
    }

    /// Waits for the next reply.
    ///
    /// # Errors
    /// The error of the network, or an invalid reply.
    pub fn receive(&mut self) -> io::Result<Reply> {
        read(&mut self.stream, 0)
    }
}

/// Connects to the first of a name's addresses that takes it; each has its share of the time that is left.
///
/// # Errors
/// What the last one answered, or that there is none.
pub fn reach(addresses: &[SocketAddr], time_limit: Duration) -> io::Result<TcpStream> {
    let end = Instant::now() + time_limit;
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "no such host");
    for (address, left) in addresses.iter().zip((1..=addresses.len()).rev()) {
        let share = end.saturating_duration_since(Instant::now()) / u32::try_from(left).unwrap_or(u32::MAX);
        match TcpStream::connect_timeout(address, share.max(Duration::from_millis(1))) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// A line without its end.
fn line(from: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    from.by_ref().take(1 << 16).read_until(b'\n', &mut line)?;
    match line.strip_suffix(b"\r\n") {
        Some(line) => Ok(line.to_vec()),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// A reply, which is `depth` lists deep.
pub(super) fn read(from: &mut impl BufRead, depth: u32) -> io::Result<Reply> {
    let bad = || io::Error::new(io::ErrorKind::InvalidData, "not a reply of this protocol");
    let line = line(from)?;
    let (kind, text) = line.split_first().ok_or_else(bad)?;
    let text = String::from_utf8_lossy(text).into_owned();
    let number = || text.parse::<i64>().ok().filter(|n| *n <= REPLY_MAX).ok_or_else(bad);
    let length = |times: usize| number().map(|n| usize::try_from(n).ok().map(|n| times * n));
    match kind {
        b'+' => Ok(Reply::Simple(text)),
        b'-' => Ok(Reply::Error(text)),
        b':' => text.parse().map(Reply::Integer).map_err(|_| bad()),
        b'_' => Ok(Reply::Nothing),
        b'$' => match length(1)? {
            None => Ok(Reply::Nothing),
            Some(bytes) => {
                let mut value = Vec::new();
                from.by_ref().take(bytes as u64 + 2).read_to_end(&mut value)?;
                if value.len() != bytes + 2 || !value.ends_with(b"\r\n") {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                value.truncate(bytes);
                Ok(Reply::Bulk(value))
            }
        },
        b'*' | b'%' | b'~' if depth < DEPTH_MAX => match length(if *kind == b'%' { 2 } else { 1 })? {
            None => Ok(Reply::Nothing),
            Some(count) => {
                (0..count).map(|_| read(from, depth + 1)).collect::<Result<_, _>>().map(Reply::List)
            }
        },
        _ => Err(bad()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_of_a_name_is_tried_in_order() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let good = listener.local_addr().unwrap();
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        // No host of this block answers.
        let silent: SocketAddr = "192.0.2.1:6379".parse().unwrap();
        let limit = Duration::from_millis(600);
        let start = Instant::now();
        assert_eq!(reach(&[closed, silent, good], limit).unwrap().peer_addr().unwrap(), good);
        assert!(start.elapsed() < limit);
        assert_eq!(reach(&[closed], limit).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(reach(&[], limit).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn addresses_say_where_and_who() {
        let url = |text: &str| text.parse::<Url>();
        assert_eq!(url("redis://h").unwrap(), Url { address: "h:6379".into(), login: None, tls: None });
        let full = url("redis://u:p@[::1]:7/0").unwrap();
        assert_eq!(full.address, "[::1]:7");
        assert_eq!(full.login, Some(("u".into(), "p".into())));
        assert_eq!(url("redis://:p@h:1").unwrap().login, Some(("default".into(), "p".into())));
        let trust = |ca: &str| Some(Trust { ca: ca.into() });
        let secured = url("rediss://:p@[::1]:7/0?ssl_ca_certs=/a/ca.pem").unwrap();
        assert_eq!(
            (secured.address.as_str(), secured.host(), &secured.tls),
            ("[::1]:7", "::1", &trust("/a/ca.pem"))
        );
        assert_eq!(url("rediss://h").unwrap().tls, Some(Trust::default()));
        for wrong in [
            "http://h",
            "redis://",
            "rediss://",
            "redis://h?ssl_ca_certs=a",
            "rediss://h?ssl_ca_certs=",
            "redis://h?db=1",
        ] {
            assert!(url(wrong).is_err(), "{wrong}");
        }
        assert!(!format!("{full:?}").contains("login"));
    }
}
