//! The side that asks and remembers.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::records::{self, BODY_BYTES_MAX};
use crate::mover::greeting::{GREETING_BYTES, Greeting, Purpose};
use crate::mover::sockets::{KeepaliveTimes, connect, fill, set_keepalive, trouble};
use crate::mover::{Fault, PeerId, RemoteSegment};

/// Settings of [`Directory`].
#[derive(Clone, Debug)]
pub struct DirectoryConfig {
    /// Names remembered at once; those used longest ago go first.
    pub names_max: usize,
    /// Limit for one question, its answer included.
    pub time_limit: Duration,
}

impl Default for DirectoryConfig {
    fn default() -> Self {
        Self { names_max: 1_024, time_limit: Duration::from_secs(3) }
    }
}

/// The ranges that a process publishes, as it reported them.
#[derive(Debug)]
pub struct PublishedSegments {
    /// Its transports.
    pub peer: PeerId,
    ranges: BTreeMap<u64, Arc<RemoteSegment>>,
    /// Stands as long as this is what it publishes.
    connection: TcpStream,
}

/// Where an address is.
#[derive(Clone, Debug)]
pub struct Place {
    /// In which window.
    pub segment: Arc<RemoteSegment>,
    /// The offset in the window.
    pub at: u64,
    /// How many bytes there are from there on.
    pub bytes: u64,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct DirectoryAnswer {
    /// The ranges published now.
    pub published: Arc<PublishedSegments>,
    /// The life of the peer that is over, when the one that answered is another.
    pub ended: Option<PeerId>,
}

impl PublishedSegments {
    /// Where an address of that process is; none when it is not published.
    pub fn find(&self, address: u64) -> Option<Place> {
        let (start, segment) = self.ranges.range(..=address).next_back()?;
        let at = address - start;
        let bytes = segment.bytes.checked_sub(at).filter(|bytes| *bytes > 0)?;
        Some(Place { segment: segment.clone(), at, bytes })
    }

    /// The first address that is published.
    pub fn first(&self) -> Option<u64> {
        self.ranges.keys().next().copied()
    }

    /// Whether the publisher has said neither that anything has changed nor that it ends.
    fn stands(&self) -> bool {
        let mut byte = [0];
        let looked = self.connection.peek(&mut byte);
        looked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }
}

/// The state of a name.
struct DirectoryEntry {
    used: u64,
    /// Its last owner.
    peer: PeerId,
    published: Option<Arc<PublishedSegments>>,
}

#[derive(Default)]
struct State {
    known: BTreeMap<String, DirectoryEntry>,
    uses: u64,
}

/// Asks publishers by name, `host:port`, and remembers what they said for as long as it holds.
pub struct Directory {
    config: DirectoryConfig,
    state: Mutex<State>,
}

impl Directory {
    /// A directory without names.
    pub fn new(config: DirectoryConfig) -> Self {
        Self { config, state: Mutex::default() }
    }

    /// Looks up the ranges published at `name`. Asks the publisher and waits where no valid answer is cached.
    ///
    /// # Errors
    /// [`Fault::Path`] or [`Fault::Silent`] where no answer comes in time, [`Fault::Invalid`] where the answer is not
    /// a publisher's, or not of this release.
    pub fn look(&self, name: &str) -> Result<DirectoryAnswer, Fault> {
        if let Some(published) = self.remembered(name) {
            return Ok(DirectoryAnswer { published, ended: None });
        }
        let published = Arc::new(ask(name, self.config.time_limit)?);
        let mut state = self.state();
        state.uses += 1;
        let peer = published.peer.clone();
        let known = DirectoryEntry { used: state.uses, peer, published: Some(published.clone()) };
        let former = state.known.insert(name.to_owned(), known);
        if state.known.len() > self.config.names_max {
            let oldest = state.known.iter().min_by_key(|(_, known)| known.used);
            if let Some(name) = oldest.map(|(name, _)| name.clone()) {
                state.known.remove(&name);
            }
        }
        let ended = former.map(|former| former.peer).filter(|former| *former != published.peer);
        Ok(DirectoryAnswer { published, ended })
    }

    /// Drops the cached answer for `name`, so that the next lookup asks the publisher.
    pub fn forget(&self, name: &str) {
        if let Some(known) = self.state().known.get_mut(name) {
            known.published = None;
        }
    }

    fn remembered(&self, name: &str) -> Option<Arc<PublishedSegments>> {
        let mut state = self.state();
        state.uses += 1;
        let uses = state.uses;
        let known = state.known.get_mut(name)?;
        known.published = known.published.take_if(|published| published.stands());
        known.used = uses;
        known.published.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn ask(name: &str, time_limit: Duration) -> Result<PublishedSegments, Fault> {
    let until = Instant::now() + time_limit;
    let failed = |what: &str, error: &io::Error| trouble(what, name, error);
    let connected = name.to_socket_addrs().and_then(|found| connect(found, until));
    let connected = connected.and_then(|(socket, _)| socket.set_nodelay(true).map(|()| socket));
    let mut connection = connected.map_err(|error| failed("connect to", &error))?;
    let question = Greeting {
        purpose: Purpose::Look,
        to_epoch: 0,
        from_epoch: 0,
        session: 0,
        slice_bytes_max: 0,
        outstanding_max: 0,
        credit_bytes: 0,
        text: String::new(),
    };
    let mut record = [0; GREETING_BYTES];
    let answered = connection
        .set_write_timeout(Some(time_limit))
        .and_then(|()| connection.write_all(&question.encode()))
        .and_then(|()| fill(&mut &connection, &connection, &mut record, until));
    answered.map_err(|error| failed("ask", &error))?;
    let answer = Greeting::decode(&record)?.welcome()?;
    if answer.credit_bytes > BODY_BYTES_MAX {
        return Err(Fault::Invalid(format!("{name} publishes more than can be taken")));
    }
    let mut body = vec![0; usize::try_from(answer.credit_bytes).expect("at most some MiB")];
    fill(&mut &connection, &connection, &mut body, until).map_err(|error| failed("hear", &error))?;
    let ranges = records::decode(&body)?.into_iter().map(|(at, segment)| (at, Arc::new(segment))).collect();
    watch(&connection).map_err(|error| failed("keep", &error))?;
    let peer = PeerId { address: answer.text, epoch: answer.from_epoch };
    Ok(PublishedSegments { peer, ranges, connection })
}

/// Keeps the connection for one purpose from now on: to notice its end.
fn watch(connection: &TcpStream) -> io::Result<()> {
    set_keepalive(
        connection,
        KeepaliveTimes { idle: Duration::from_secs(10), step: Duration::from_secs(5), count: 3 },
    )?;
    connection.set_nonblocking(true)
}
