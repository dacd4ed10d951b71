//! Takes peers' handshakes: makes the other ends of their paths, and keeps and ends them.

use std::collections::BTreeMap;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::RdmaNode;
use super::config::RdmaConfig;
use super::control::tuned;
use super::link::Link;
use super::rail::Rail;
use super::session::Session;
use super::threads::{Bell, ThreadCounter, ready};
use super::wire::{End, Record};
use crate::mover::topology_gids::shared_bits;
use crate::mover::{Fault, PeerId};

/// Queue pairs that a peer may ask for.
const QUEUE_PAIRS_MAX: usize = 16;

/// Accepts handshakes of peers and owns the accepted ends of their paths.
pub(super) struct Acceptor {
    config: Arc<RdmaConfig>,
    node: RdmaNode,
    rails: Vec<Arc<Rail>>,
    threads: Arc<ThreadCounter>,
    bell: Bell,
    stopping: AtomicBool,
    /// Connections that have a thread.
    served: AtomicUsize,
    sessions: Mutex<BTreeMap<u128, Arc<Session>>>,
    left: Condvar,
}

impl Acceptor {
    pub(super) fn start(
        config: &Arc<RdmaConfig>,
        listener: TcpListener,
        node: &RdmaNode,
        rails: &[Arc<Rail>],
        threads: &Arc<ThreadCounter>,
    ) -> io::Result<Arc<Self>> {
        listener.set_nonblocking(true)?;
        let acceptor = Arc::new(Self {
            config: config.clone(),
            node: node.clone(),
            rails: rails.to_vec(),
            threads: threads.clone(),
            bell: Bell::new()?,
            stopping: AtomicBool::new(false),
            served: AtomicUsize::new(0),
            sessions: Mutex::default(),
            left: Condvar::new(),
        });
        let run = acceptor.clone();
        threads.spawn("rdma-accept", move || run.run(&listener))?;
        Ok(acceptor)
    }

    /// Paths that peers have opened to here.
    pub(super) fn sessions(&self) -> usize {
        self.open().len()
    }

    /// Refuses new handshakes and ends every path.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.bell.ring();
        self.ask_all("the peer is stopping");
    }

    /// Ends every path, and waits until their queue pairs are destroyed.
    pub(super) fn end_all(&self, why: &str) {
        self.ask_all(why);
        let waited = self.left.wait_while(self.open(), |open| !open.is_empty());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn ask_all(&self, why: &str) {
        self.open().values().for_each(|session| session.end(why.to_owned()));
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<u128, Arc<Session>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts until it is stopped. Not the acceptor of `baton-http`, which needs tokio: each path has a thread here.
    fn run(self: &Arc<Self>, listener: &TcpListener) {
        while !self.stopping.load(Ordering::Acquire) {
            ready([listener.as_fd(), self.bell.as_fd()], None);
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(_) => {
                    // Out of descriptors, most likely: the connection still waits, so not at once again.
                    std::thread::sleep(Duration::from_millis(50));
                    continue;
                }
            };
            // A connection that comes when all places are taken is cut, and may be retried.
            if self.served.fetch_add(1, Ordering::AcqRel) >= self.config.paths_max as usize {
                self.served.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let serving = self.clone();
            let started = self.threads.spawn("rdma-peer", move || {
                // After any error here, the peer sees its connection end.
                let _ = serving.serve(stream);
                serving.served.fetch_sub(1, Ordering::AcqRel);
            });
            if started.is_err() {
                self.served.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    fn serve(&self, stream: TcpStream) -> io::Result<()> {
        let until = Instant::now() + self.config.open_timeout();
        stream.set_nonblocking(false)?;
        let stream = tuned(stream, until)?;
        let epoch = self.node.id.epoch;
        match Record::receive(&stream)? {
            Record::Hello { to_epoch, .. } | Record::Fence { to_epoch, .. } if to_epoch != epoch => {
                Record::Stale { epoch }.send(&stream)
            }
            Record::Hello { from, session, end, .. } => match self.welcome(from, session, &end) {
                Ok((opened, end)) => {
                    let outcome = self.keep((session, &opened), &stream, end);
                    self.forget(session, &opened);
                    outcome.and_then(|confirm| if confirm { Record::Closed.send(&stream) } else { Ok(()) })
                }
                Err(fault) => refusal(fault).send(&stream),
            },
            Record::Fence { session, .. } => {
                if self.fence(session, until) {
                    return Record::Closed.send(&stream);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Makes the other end of a path.
    fn welcome(&self, from: PeerId, id: u128, theirs: &End) -> Result<(Arc<Session>, End), Fault> {
        let count = theirs.queue_pairs.len();
        if !(1..=QUEUE_PAIRS_MAX).contains(&count) {
            return Err(Fault::Invalid(format!("{count} queue pairs; ask for 1 to {QUEUE_PAIRS_MAX}")));
        }
        let rail = self.nearest(theirs)?;
        let broken = |error: io::Error| Fault::Path(format!("{}: {error}", rail.name));
        let count = u32::try_from(count).expect("at most 16");
        // This side sends nothing but answers.
        let link = Link::new(rail, count, 1).map_err(broken)?;
        let end = link.end(&self.config).map_err(broken)?;
        link.connect(&self.config, &end, theirs)?;
        let session = Session::new(rail, from, &self.node.inbound, link).map_err(broken)?;
        let mut open = self.open();
        if self.stopping.load(Ordering::Acquire) {
            return Err(Fault::Path("the peer is stopping".into()));
        }
        open.insert(id, session.clone());
        Ok((session, end))
    }

    /// The device of ours whose address is nearest to the peer's; among equals one of the same name, then the
    /// first.
    fn nearest(&self, theirs: &End) -> Result<&Arc<Rail>, Fault> {
        let near = |rail: &&Arc<Rail>| {
            let port = rail.port().ok().filter(|port| port.active && port.infiniband == theirs.infiniband)?;
            // InfiniBand's first half names the subnet; the rest says nothing of distance.
            let most = if port.infiniband { 64 } else { 128 };
            let bits = shared_bits(rail.gid().ok()?.1, theirs.gid).min(most);
            Some((bits, rail.name == theirs.device, std::cmp::Reverse(rail.index)))
        };
        let best =
            self.rails.iter().filter_map(|rail| Some((near(&rail)?, rail))).max_by_key(|(near, _)| *near);
        best.map(|(_, rail)| rail)
            .ok_or_else(|| Fault::Path("the peer has no active RDMA port of the same kind of network".into()))
    }

    /// Lives as long as the path; true when the other end waits for a confirmation.
    fn keep(&self, (id, session): (u128, &Arc<Session>), stream: &TcpStream, end: End) -> io::Result<bool> {
        Record::Welcome { end }.send(stream)?;
        stream.set_read_timeout(Some(self.config.fence_timeout()))?;
        loop {
            if let Some(text) = session.ending() {
                // Before anything that may take time, for others wait for this.
                self.forget(id, session);
                Record::Broken { text }.send(stream)?;
                // Its end comes next, unless it has gone for good.
                return Ok(matches!(Record::receive(stream)?, Record::Close));
            }
            let [readable, _] = ready([stream.as_fd(), session.bell().as_fd()], None);
            session.bell().clear();
            if readable {
                return Ok(matches!(Record::receive(stream)?, Record::Close));
            }
        }
    }

    /// Forgets a session after its queue pairs are destroyed.
    fn forget(&self, id: u128, session: &Arc<Session>) {
        session.cut();
        let mut open = self.open();
        if open.get(&id).is_some_and(|one| Arc::ptr_eq(one, session)) {
            open.remove(&id);
        }
        self.left.notify_all();
    }

    /// Ends a session, if there is one, and waits for that; says whether it came about in time.
    fn fence(&self, id: u128, until: Instant) -> bool {
        let open = self.open();
        if let Some(session) = open.get(&id) {
            session.end("the path was fenced".into());
        }
        let limit = until.saturating_duration_since(Instant::now());
        let waited = self.left.wait_timeout_while(open, limit, |open| open.contains_key(&id));
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

fn refusal(fault: Fault) -> Record {
    match fault {
        Fault::Invalid(text) => Record::Refused { invalid: true, text },
        Fault::Path(text) | Fault::Silent(text) | Fault::Stale(text) | Fault::Corrupt(text) => {
            Record::Refused { invalid: false, text }
        }
    }
}
