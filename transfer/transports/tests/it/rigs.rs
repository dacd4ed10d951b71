//! Rigs for the tests of the mover's port: two endpoints of one kind, in this process or in one of its own that a
//! test can kill and freeze.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use baton_transports::mover::*;
use rustix::process::{Pid, Signal, kill_process};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;

use crate::loopback::{Loopback, LoopbackNet};

/// Nothing here takes longer unless it hangs.
pub const TIME_LIMIT: Duration = Duration::from_secs(30);
const RIG: &str = "BATON_TEST_RIG";
const ADDRESS: &str = "BATON_TEST_RIG_ADDRESS";
const EPOCH: &str = "BATON_TEST_RIG_EPOCH";
/// Bytes of the window that a process of its own opens.
pub const CHILD_BYTES: u64 = 8 << 20;

/// A way to make endpoints.
pub trait Rig {
    /// The transport's name.
    const NAME: &'static str;
    /// How a path ends whose peer's process was killed.
    const KILLED: PathEnd;

    /// Whether a path can be full.
    const FILLS: bool = true;

    /// An endpoint. `address` is given to one that comes back.
    fn start(epoch: u64, address: Option<&str>) -> Node;

    /// Memory that it can reach.
    fn memory(bytes: usize) -> Arc<Memory> {
        Memory::shared(bytes, Pages::Ordinary, Location::Anywhere).unwrap()
    }
}

/// Notices that came.
#[derive(Default)]
pub struct Inbox(pub Mutex<Vec<(PeerId, Notice)>>);

impl NoticeReceiver for Inbox {
    fn notice(&self, from: &PeerId, notice: Notice) {
        self.0.lock().unwrap().push((from.clone(), notice));
    }
}

/// One endpoint.
pub struct Node {
    pub transport: Arc<dyn Transport>,
    pub exposure: Arc<Exposure>,
    pub peer: PeerId,
    pub inbox: Arc<Inbox>,
    pub damage: Arc<Damage>,
}

impl Node {
    /// Opens a window over all of a memory.
    pub fn expose(&self, memory: &Arc<Memory>, grant: Grant) -> Arc<RemoteSegment> {
        let bytes = memory.bytes() as u64;
        self.transport.register(memory).unwrap();
        let window = self.exposure.open(memory.clone(), 0, bytes, grant).unwrap();
        let access = self.transport.access(window, memory, 0, bytes).unwrap();
        Arc::new(RemoteSegment { window, bytes, access: vec![(self.transport.name().into(), access)] })
    }

    pub fn open(&self, id: u32, peer: &PeerId) -> Way {
        let queue = Arc::new(CompletionQueue::default());
        let device = self.transport.devices().remove(0);
        let path = self.transport.open(PathId(id), peer, &device, queue.clone()).unwrap();
        Way { path, queue, ends: Ends::default() }
    }
}

/// The outcomes so far.
#[derive(Default)]
pub struct Ends {
    pub slices: BTreeMap<u64, Result<(), Fault>>,
    pub notified: BTreeMap<u64, Result<(), Fault>>,
    pub broken: Option<Fault>,
    pub closed: Option<PathEnd>,
    pub room: usize,
}

/// Tickets of notices and probes start here, so that their failures differ from those of slices.
pub const NOTICES: u64 = 1 << 40;

impl Ends {
    fn add(&mut self, completion: Completion) {
        assert_eq!(self.closed, None, "Closed is the last, but then came {completion:?}");
        let once = |old: Option<Result<(), Fault>>| assert_eq!(old, None, "one completion each");
        match completion {
            Completion::Done { ticket, .. } => once(self.slices.insert(ticket, Ok(()))),
            Completion::Failed { ticket, fault, .. } if ticket >= NOTICES => {
                once(self.notified.insert(ticket, Err(fault)));
            }
            Completion::Failed { ticket, fault, .. } => once(self.slices.insert(ticket, Err(fault))),
            Completion::Notified { ticket, .. } => once(self.notified.insert(ticket, Ok(()))),
            Completion::Broken { fault, .. } => assert_eq!(self.broken.replace(fault), None, "broken once"),
            Completion::Closed { end, .. } => self.closed = Some(end),
            Completion::PathCapacity { .. } => self.room += 1,
        }
    }
}

/// An open path.
pub struct Way {
    pub path: Box<dyn Path>,
    pub queue: Completions,
    pub ends: Ends,
}

impl Way {
    pub fn wait(&mut self, what: &str, until: impl Fn(&Ends) -> bool) {
        let limit = Instant::now() + TIME_LIMIT;
        while !until(&self.ends) {
            assert!(Instant::now() < limit, "{what} never came");
            let mut taken = Vec::new();
            self.path.poll();
            self.queue.wait(&mut taken, Duration::from_millis(20));
            taken.into_iter().for_each(|completion| self.ends.add(completion));
        }
    }

    /// Posts all, waiting for room where there is none.
    pub fn post(&mut self, slices: &[Slice]) {
        let mut at = 0;
        while at < slices.len() {
            let rooms = self.ends.room;
            at += self.path.post(&slices[at..]);
            if at < slices.len() {
                self.wait("room", |ends| ends.room > rooms || ends.closed.is_some());
            }
        }
    }

    pub fn wait_slices(&mut self, tickets: std::ops::Range<u64>) {
        let many = usize::try_from(tickets.end - tickets.start).unwrap();
        self.wait("a slice's end", |ends| ends.slices.range(tickets.clone()).count() == many);
    }

    /// One slice from start to end.
    pub fn one(&mut self, slice: Slice) -> Result<(), Fault> {
        let ticket = slice.ticket;
        self.post(&[slice]);
        self.wait_slices(ticket..ticket + 1);
        self.ends.slices[&ticket].clone()
    }

    pub fn close(mut self) -> Ends {
        self.path.close();
        self.wait("Closed", |ends| ends.closed.is_some());
        std::thread::sleep(Duration::from_millis(20));
        let mut late = Vec::new();
        self.queue.drain(&mut late);
        assert_eq!(late, [], "nothing comes after Closed");
        self.ends
    }
}

/// A slice of `bytes` at 0 both here and there.
pub fn slice(
    ticket: u64,
    direction: Direction,
    local: &Arc<Memory>,
    remote: &Arc<RemoteSegment>,
    bytes: u32,
) -> Slice {
    let local = Region { memory: local.clone(), at: 0 };
    Slice { ticket, direction, local, remote: remote.clone(), remote_at: 0, bytes, verify: false }
}

/// Small numbers that look random and are the same each time.
pub struct TestRng(pub u64);

impl TestRng {
    pub fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }

    pub fn fill(&mut self, memory: &Memory) {
        let bytes: Vec<u8> = (0..memory.bytes()).map(|_| u8::try_from(self.roll(256)).unwrap()).collect();
        memory.write(0, &bytes);
    }
}

pub fn bytes_of(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.bytes()];
    memory.read(0, &mut bytes);
    bytes
}

/// A peer in a process of its own.
pub struct Peer {
    child: Child,
    pub id: PeerId,
    pub window: Arc<RemoteSegment>,
}

impl Peer {
    /// Starts one. Its window holds zeros and grants both ways.
    pub fn start<R: Rig>(epoch: u64, address: Option<&str>) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rigs::serves_in_a_process_of_its_own", "--ignored", "--nocapture"])
            .envs([(RIG, R::NAME), (EPOCH, &epoch.to_string()), (ADDRESS, address.unwrap_or(""))])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let told = |line: String| line.split_once("PEER ").map(|(_, told)| told.to_owned());
        let told = lines.filter_map(told).next().unwrap();
        let mut words = told.split(' ');
        let mut next = || words.next().unwrap();
        let id = PeerId { address: next().into(), epoch };
        let window = WindowId(next().parse().unwrap());
        let hex = next();
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        let access = (1..hex.len()).step_by(2).map(byte).collect();
        let access = vec![(R::NAME.to_owned(), access)];
        Self { child, id, window: Arc::new(RemoteSegment { window, bytes: CHILD_BYTES, access }) }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Returns when every thread of it has stopped: the signal is taken by one of them, when it is its turn.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        let limit = Instant::now() + TIME_LIMIT;
        let stopped = |stat: &str| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" T"));
        let tasks = format!("/proc/{}/task", self.child.id());
        let frozen = || {
            let stats = std::fs::read_dir(&tasks).unwrap().map(|task| task.unwrap().path().join("stat"));
            stats.map(std::fs::read_to_string).all(|stat| stat.is_ok_and(|stat| stopped(&stat)))
        };
        while !frozen() {
            assert!(Instant::now() < limit, "it does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The body of that process.
#[test]
#[ignore = "runs in a process of its own, which other tests start"]
fn serves_in_a_process_of_its_own() {
    let var = |name| std::env::var(name).unwrap_or_default();
    let epoch = var(EPOCH).parse().unwrap_or(0);
    let address = Some(var(ADDRESS)).filter(|address| !address.is_empty());
    match var(RIG).as_str() {
        Tcp::NAME => serve::<Tcp>(epoch, address.as_deref()),
        Tls::NAME => serve::<Tls>(epoch, address.as_deref()),
        Shm::NAME => serve::<Shm>(epoch, address.as_deref()),
        other => panic!("there is no rig {other:?}"),
    }
}

fn serve<R: Rig>(epoch: u64, address: Option<&str>) {
    let node = R::start(epoch, address);
    let memory = R::memory(usize::try_from(CHILD_BYTES).unwrap());
    let window = node.expose(&memory, Grant::ReadWrite);
    let access: String = window.access[0].1.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("\nPEER {} {} x{access}", node.peer.address, window.window.0);
    // Lives as long as its parent process.
    let _ = std::io::stdin().read(&mut [0]);
    node.transport.shutdown();
}

/// Limits of time short enough for tests, long enough for a busy machine.
const QUIET_MS: u64 = 1_000;

pub struct Tcp;

impl Rig for Tcp {
    const NAME: &'static str = "tcp";
    // The peer is dead and does not answer, so it confirms nothing.
    const KILLED: PathEnd = PathEnd::PeerUnknown;

    fn start(epoch: u64, address: Option<&str>) -> Node {
        start_tcp(epoch, address, None)
    }
}

fn start_tcp(epoch: u64, address: Option<&str>, tls: Option<TcpTls>) -> Node {
    let mut config = TcpConfig::new(address.unwrap_or("127.0.0.1:0").parse().unwrap(), epoch);
    config.lanes = 2;
    config.progress_timeout_ms = QUIET_MS;
    config.outstanding_max = 256;
    config.tls = tls;
    let (exposure, inbox) = (Exposure::new(), Arc::new(Inbox::default()));
    let damage = config.damage.clone();
    let transport = TcpTransport::start(config, exposure.clone(), inbox.clone()).unwrap();
    Node { peer: transport.peer_id(), transport, exposure, inbox, damage }
}

/// TCP under TLS, each side with a certificate that the other asks for.
pub struct Tls;

/// One certificate for all processes of a test: the parent process passes it on.
fn tls() -> TcpTls {
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("baton-test-tls");
    let (certificate, key) = made_once(&dir);
    let certificate = CertificateDer::from(certificate);
    let key = || PrivateKeyDer::try_from(key.clone()).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let roots = Arc::new(roots);
    let asks = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build().unwrap();
    let server = rustls::ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(asks)
        .with_single_cert(vec![certificate.clone()], key())
        .unwrap();
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![certificate], key())
        .unwrap();
    TcpTls { server: Arc::new(server), client: Arc::new(client), server_name: Some("baton.test".into()) }
}

/// The certificate and key in a folder; the first process makes them.
fn made_once(dir: &std::path::Path) -> (Vec<u8>, Vec<u8>) {
    let read = || Some((std::fs::read(dir.join("cert")).ok()?, std::fs::read(dir.join("key")).ok()?));
    if let Some(made) = read() {
        return made;
    }
    let made = rcgen::generate_simple_self_signed(["baton.test".to_owned()]).unwrap();
    let fresh = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(fresh.path().join("cert"), made.cert.der()).unwrap();
    std::fs::write(fresh.path().join("key"), made.signing_key.serialize_der()).unwrap();
    // Only one of those who try at once succeeds, and then all read the same.
    let _ = std::fs::rename(fresh.path(), dir);
    read().unwrap()
}

impl Rig for Tls {
    const NAME: &'static str = "tls";
    const KILLED: PathEnd = PathEnd::PeerUnknown;

    fn start(epoch: u64, address: Option<&str>) -> Node {
        start_tcp(epoch, address, Some(tls()))
    }
}

/// Both ends in one process; the posting thread makes the only copy.
pub struct Loop;

impl Rig for Loop {
    const NAME: &'static str = "loopback";
    const KILLED: PathEnd = PathEnd::Fenced;
    const FILLS: bool = false;

    fn start(epoch: u64, _address: Option<&str>) -> Node {
        static NET: LazyLock<Arc<LoopbackNet>> = LazyLock::new(LoopbackNet::new);
        let peer = PeerId { address: fresh_name(), epoch };
        let (exposure, inbox) = (Exposure::new(), Arc::new(Inbox::default()));
        let transport = Loopback::join(&NET, peer.clone(), exposure.clone(), inbox.clone());
        Node { peer, transport, exposure, inbox, damage: Arc::default() }
    }
}

/// An address that no other test has.
pub fn fresh_name() -> String {
    static STARTED: AtomicU64 = AtomicU64::new(0);
    let number = STARTED.fetch_add(1, Ordering::Relaxed);
    format!("test-{}-{number}:1", std::process::id())
}

pub struct Shm;

impl Rig for Shm {
    const NAME: &'static str = "shm";
    // The kernel closes the sockets of the dead.
    const KILLED: PathEnd = PathEnd::Fenced;

    fn start(epoch: u64, address: Option<&str>) -> Node {
        let mut config = ShmConfig::new(address.map_or_else(fresh_name, str::to_owned), epoch);
        config.progress_timeout_ms = QUIET_MS;
        config.outstanding_max = 256;
        let (exposure, inbox) = (Exposure::new(), Arc::new(Inbox::default()));
        let damage = config.damage.clone();
        let transport = ShmTransport::start(config, exposure.clone(), inbox.clone()).unwrap();
        Node { peer: transport.peer_id(), transport, exposure, inbox, damage }
    }
}

/// Threads and open files of this process.
fn held() -> (usize, usize) {
    let count = |folder| std::fs::read_dir(folder).unwrap().count();
    (count("/proc/self/task"), count("/proc/self/fd"))
}

/// The body of a process that starts, moves and ends, and must then hold what it held before.
#[test]
#[ignore = "runs in a process of its own, which the tests of the promises start"]
fn leaves_nothing_behind() {
    let var = std::env::var(RIG).unwrap_or_default();
    match var.as_str() {
        Tcp::NAME => starts_moves_and_ends::<Tcp>(),
        Tls::NAME => starts_moves_and_ends::<Tls>(),
        Shm::NAME => starts_moves_and_ends::<Shm>(),
        other => panic!("there is no rig {other:?}"),
    }
}

fn starts_moves_and_ends<R: Rig>() {
    let before = held();
    for round in 0..3 {
        let (here, there) = (R::start(11, None), R::start(22 + round, None));
        let (local, theirs) = (R::memory(1 << 20), R::memory(1 << 20));
        here.transport.register(&local).unwrap();
        let window = there.expose(&theirs, Grant::ReadWrite);
        let mut ways: Vec<Way> = (0..5).map(|id| here.open(id, &there.peer)).collect();
        for way in &mut ways {
            for (ticket, direction) in (0..).zip([Direction::Read, Direction::Write]) {
                assert_eq!(way.one(slice(ticket, direction, &local, &window, 1 << 20)), Ok(()));
            }
        }
        let closed = ways.pop().unwrap();
        assert_eq!(closed.close().closed, Some(PathEnd::Fenced));
        // Two are dropped open, two end with the transport.
        ways.truncate(2);
        here.transport.shutdown();
        there.transport.shutdown();
    }
    // A thread that was joined may be listed for a moment longer.
    let limit = Instant::now() + Duration::from_secs(5);
    while held() != before && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(held(), before, "threads and files");
}

/// Runs that body.
pub fn leaves_nothing<R: Rig>() {
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "rigs::leaves_nothing_behind", "--ignored", "--test-threads", "1"])
        .env(RIG, R::NAME)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stdout));
}
