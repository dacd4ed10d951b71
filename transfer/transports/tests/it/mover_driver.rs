//! The driver over the loopback, sound and faulty.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_transfer::Priority;
use baton_transfer::{Fault as CoreFault, Refusal as CoreRefusal};
use baton_transports::mover::*;

use crate::loopback::{Loopback, LoopbackNet};
use crate::mover_faulty::{FaultyTransport, Trouble};

const LIMIT: Duration = Duration::from_secs(30);
const BYTES: usize = 4 << 20;

/// Whether a batch ended well.
pub trait DoneCheck {
    fn is_done(&self) -> bool;
}

impl DoneCheck for Outcome {
    fn is_done(&self) -> bool {
        matches!(self, Self::Done { .. })
    }
}

#[derive(Default)]
struct Mailbox(Mutex<Vec<Vec<u8>>>);

impl NoticeReceiver for Mailbox {
    fn notice(&self, _: &PeerId, notice: Notice) {
        self.0.lock().unwrap().push(notice.bytes);
    }
}

struct Node {
    id: PeerId,
    exposure: Arc<Exposure>,
    inbox: Arc<Mailbox>,
    loopback: Arc<Loopback>,
}

impl Node {
    fn join(net: &Arc<LoopbackNet>, address: &str, epoch: u64) -> Self {
        let (id, exposure) = (PeerId { address: address.into(), epoch }, Exposure::new());
        let inbox = Arc::new(Mailbox::default());
        let loopback = Loopback::join(net, id.clone(), exposure.clone(), inbox.clone());
        Self { id, exposure, inbox, loopback }
    }

    fn mover(&self, settings: MoverSettings, transports: Vec<Arc<dyn Transport>>) -> Mover {
        Mover::new(settings, self.exposure.clone(), transports).unwrap()
    }

    /// A window over fresh memory, reachable over transports of these names.
    fn window(&self, names: &[&str]) -> (Arc<Memory>, Arc<RemoteSegment>) {
        let memory = Memory::private(BYTES, Location::Anywhere).unwrap();
        self.loopback.register(&memory).unwrap();
        let window = self.exposure.open(memory.clone(), 0, BYTES as u64, Grant::ReadWrite).unwrap();
        let access = names.iter().map(|name| (name.to_string(), Vec::new())).collect();
        (memory, Arc::new(RemoteSegment { window, bytes: BYTES as u64, access }))
    }
}

/// Short time limits, so that tests of silence are quick; nothing depends on their being met.
fn settings() -> MoverSettings {
    let mut settings = MoverSettings::default();
    let core = &mut settings.core;
    (core.silent_us, core.probe_us, core.grace_us) = (30_000, 30_000, 50_000);
    (core.backoff_min_us, core.backoff_max_us) = (2_000, 20_000);
    settings
}

struct Scene {
    net: Arc<LoopbackNet>,
    here: Node,
    there: Node,
    transports: Vec<Arc<FaultyTransport>>,
    mover: Mover,
    local: Arc<Memory>,
    remote: Arc<Memory>,
    window: Arc<RemoteSegment>,
}

impl Scene {
    fn new(settings: MoverSettings, names: &[&'static str], devices: &[&str]) -> Self {
        let net = LoopbackNet::new();
        let (here, there) = (Node::join(&net, "here:1", 1), Node::join(&net, "there:1", 1));
        let wrap = |name: &&'static str| FaultyTransport::around(here.loopback.clone(), name, devices);
        let transports: Vec<Arc<FaultyTransport>> = names.iter().map(wrap).collect();
        let dynamic = transports.iter().map(|transport| transport.clone() as Arc<dyn Transport>).collect();
        let mover = here.mover(settings, dynamic);
        let local = Memory::private(BYTES, Location::Anywhere).unwrap();
        mover.register(&local).unwrap();
        let bytes: Vec<u8> = (0..BYTES).map(|at| (at * 7 + at / 251) as u8).collect();
        local.write(0, &bytes);
        let (remote, window) = there.window(names);
        Self { net, here, there, transports, mover, local, remote, window }
    }

    fn one() -> Self {
        Self::new(settings(), &["a"], &["nic0"])
    }

    fn batch(&self, direction: Direction) -> Batch {
        let local = Region { memory: self.local.clone(), at: 0 };
        let op = Op { direction, local, remote: self.window.clone(), remote_at: 0, bytes: BYTES as u64 };
        Batch {
            peer: self.there.id.clone(),
            priority: Priority::Fetch,
            limit: None,
            verify: true,
            notice: None,
            ops: vec![op],
        }
    }

    fn write(&self) -> BatchId {
        self.mover.submit(self.batch(Direction::Write)).unwrap()
    }

    fn arrived(&self) -> bool {
        self.local.checksum(0, BYTES as u64) == self.remote.checksum(0, BYTES as u64)
    }

    fn end(&self, batch: BatchId) -> Outcome {
        let outcome = self.mover.wait(batch, LIMIT);
        let outcome = outcome.unwrap_or_else(|| panic!("has not ended: {:#?}", self.mover.stats()));
        self.mover.check().unwrap();
        outcome
    }
}

/// Waits for something that must come.
fn until(what: impl Fn() -> bool) {
    let started = std::time::Instant::now();
    while !what() {
        assert!(started.elapsed() < LIMIT, "it did not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn bytes_go_there_and_back_and_the_notice_follows_them() {
    let scene = Scene::one();
    let mut batch = scene.batch(Direction::Write);
    batch.notice = Some(Notice { bytes: b"all there".to_vec() });
    let id = scene.mover.submit(batch).unwrap();
    let Outcome::Done { bytes, .. } = scene.end(id) else { panic!("{:?}", scene.end(id)) };
    assert_eq!(bytes, BYTES as u64);
    assert!(scene.arrived());
    assert_eq!(*scene.there.inbox.0.lock().unwrap(), [b"all there".to_vec()]);
    scene.local.write(0, &vec![0; BYTES]);
    let back = scene.mover.submit(scene.batch(Direction::Read)).unwrap();
    assert!(scene.end(back).is_done());
    assert!(scene.arrived());
    assert_eq!(scene.mover.poll(BatchId(99)), Progress::Unknown);
}

#[test]
fn a_caller_that_polls_needs_no_other_thread() {
    let scene = Scene::new(MoverSettings { background: false, ..settings() }, &["a"], &["nic0"]);
    let id = scene.write();
    until(|| matches!(scene.mover.poll(id), Progress::Ended(outcome) if outcome.is_done()));
    assert!(scene.arrived());
    let ids: Vec<BatchId> = (0..8).map(|_| scene.write()).collect();
    std::thread::scope(|threads| {
        for id in ids {
            let mover = &scene.mover;
            threads.spawn(move || assert!(mover.wait(id, LIMIT).unwrap().is_done()));
        }
    });
}

#[tokio::test]
async fn an_end_can_be_awaited() {
    let scene = Scene::one();
    scene.transports[0].set(|trouble| trouble.hold = true);
    let id = scene.write();
    let awaited = tokio::spawn(scene.mover.finished(id));
    tokio::task::yield_now().await;
    assert!(!awaited.is_finished());
    until(|| scene.transports[0].held() > 0);
    scene.transports[0].release();
    assert!(awaited.await.unwrap().unwrap().is_done());
    assert!(scene.mover.finished(id).await.unwrap().is_done(), "an end can be asked for late");
    assert_eq!(scene.mover.finished(BatchId(77)).await, None);
}

#[test]
fn a_cancelled_batch_ends_when_nothing_of_it_can_land() {
    let scene = Scene::one();
    scene.transports[0].set(|trouble| trouble.hold = true);
    let id = scene.mover.submit(scene.batch(Direction::Read)).unwrap();
    until(|| scene.transports[0].held() > 0);
    scene.mover.cancel(id);
    assert_eq!(scene.end(id), Outcome::Cancelled { remote_fenced: true });
    // Its path was closed with what it held: nothing comes when the hold ends.
    let before = scene.local.checksum(0, BYTES as u64);
    scene.transports[0].release();
    assert_eq!(scene.transports[0].moved(), 0);
    assert_eq!(scene.local.checksum(0, BYTES as u64), before);
    let next = scene.write();
    assert!(scene.end(next).is_done());
}

#[test]
fn a_batch_that_is_late_fails_with_its_deadline() {
    let scene = Scene::one();
    scene.transports[0].set(|trouble| trouble.hold = true);
    let mut batch = scene.batch(Direction::Write);
    batch.limit = Some(Duration::from_millis(20));
    let id = scene.mover.submit(batch).unwrap();
    let Outcome::Failed { failure, remote_fenced, .. } = scene.end(id) else { panic!("not failed") };
    assert_eq!(failure.reason, Reason::Deadline);
    assert!(remote_fenced);
}

#[test]
fn a_path_that_breaks_in_the_middle_costs_a_repetition_and_no_byte() {
    let scene = Scene::new(settings(), &["a", "b"], &["nic0"]);
    scene.transports[0].set(|trouble| trouble.break_after = Some(7));
    let id = scene.write();
    assert!(scene.end(id).is_done());
    assert!(scene.arrived());
    assert!(scene.transports[1].moved() > 0, "the other transport carried the rest");
    assert!(scene.mover.stats().repeated_slices > 0);
}

#[test]
fn paths_that_are_all_cut_are_opened_anew_and_the_batch_goes_on() {
    let scene = Scene::new(settings(), &["a"], &["nic0", "nic1"]);
    scene.transports[0].set(|trouble| trouble.hold = true);
    let id = scene.write();
    until(|| scene.transports[0].held() > 0);
    scene.transports[0].set(|trouble| trouble.hold = false);
    scene.transports[0].cut();
    assert!(scene.end(id).is_done());
    assert!(scene.arrived());
    assert!(scene.mover.stats().paths_broken > 0);
}

#[test]
fn a_silent_path_is_given_up_and_the_other_takes_over() {
    let scene = Scene::new(settings(), &["a", "b"], &["nic0"]);
    scene.transports[0].set(|trouble| (trouble.hold, trouble.mute) = (true, true));
    let id = scene.write();
    assert!(scene.end(id).is_done());
    assert!(scene.arrived());
    assert_eq!(scene.transports[0].moved(), 0);
}

#[test]
fn a_write_whose_path_ended_unheard_fails_though_its_bytes_are_there() {
    let scene = Scene::new(settings(), &["a", "b"], &["nic0"]);
    scene.transports[0].set(|trouble| (trouble.hold, trouble.mute, trouble.unknown_end) = (true, true, true));
    let id = scene.write();
    let Outcome::Failed { failure, remote_fenced, .. } = scene.end(id) else { panic!("not failed") };
    assert_eq!((failure.stage, failure.reason), (Stage::Fence, Reason::PeerUnknown));
    assert!(!remote_fenced);
    scene.there.exposure.revoke(scene.window.window, &[]);
    // A read has written nothing there.
    let scene = Scene::new(settings(), &["a", "b"], &["nic0"]);
    scene.transports[0].set(|trouble| (trouble.hold, trouble.mute, trouble.unknown_end) = (true, true, true));
    let id = scene.mover.submit(scene.batch(Direction::Read)).unwrap();
    assert!(scene.end(id).is_done());
}

#[test]
fn the_preferred_transport_is_used_again_when_it_is_back() {
    let scene = Scene::new(settings(), &["a", "b"], &["nic0"]);
    scene.transports[0].set(|trouble| trouble.unplugged = true);
    let first = scene.write();
    assert!(scene.end(first).is_done());
    assert_eq!((scene.transports[0].moved(), scene.transports[1].moved() > 0), (0, true));
    scene.transports[0].set(|trouble| trouble.unplugged = false);
    until(|| {
        let id = scene.write();
        scene.end(id).is_done() && scene.transports[0].moved() > 0
    });
    assert!(scene.arrived());
}

#[test]
fn a_damaged_slice_goes_once_more_and_no_more() {
    let scene = Scene::one();
    scene.transports[0].set(|trouble| trouble.damage = 1);
    let id = scene.write();
    assert!(scene.end(id).is_done());
    assert!(scene.arrived());
    scene.transports[0].set(|trouble| trouble.damage = usize::MAX);
    let id = scene.write();
    let Outcome::Failed { failure, cause, .. } = scene.end(id) else { panic!("not failed") };
    assert_eq!(failure.reason, Reason::Fault(CoreFault::Corrupt));
    assert!(cause.contains("damaged by the test"), "{cause}");
}

#[test]
fn a_full_path_keeps_nothing_back_when_it_has_room_again() {
    let scene = Scene::one();
    scene.transports[0].set(|trouble| (trouble.hold, trouble.room) = (true, Some(3)));
    let id = scene.write();
    until(|| scene.transports[0].held() == 3);
    assert!(matches!(scene.mover.poll(id), Progress::Running { done_bytes: 0 }));
    scene.transports[0].release();
    assert!(scene.end(id).is_done());
    assert!(scene.arrived());
    assert!(scene.mover.stats().refused_slices > 0);
}

#[test]
fn a_window_that_is_revoked_fails_its_batch_and_no_other() {
    let scene = Scene::one();
    scene.transports[0].set(|trouble| trouble.hold = true);
    let doomed = scene.write();
    let mut other = scene.batch(Direction::Write);
    let (elsewhere, window) = scene.there.window(&["a"]);
    other.ops[0].remote = window;
    let other = scene.mover.submit(other).unwrap();
    until(|| scene.transports[0].held() > 0);
    scene.there.exposure.revoke(scene.window.window, &[]);
    scene.transports[0].release();
    let Outcome::Failed { failure, remote_fenced, .. } = scene.end(doomed) else { panic!("not failed") };
    assert_eq!(failure.reason, Reason::Fault(CoreFault::Stale));
    assert!(remote_fenced);
    assert!(scene.end(other).is_done());
    assert_eq!(elsewhere.checksum(0, BYTES as u64), scene.local.checksum(0, BYTES as u64));
    let mut nothing = vec![1; BYTES];
    scene.remote.read(0, &mut nothing);
    assert!(nothing.iter().all(|&byte| byte == 0), "nothing lands through a revoked window");
    assert_eq!(scene.mover.stats().paths_broken, 0, "a revoked window costs no path");
}

#[test]
fn a_new_life_of_a_peer_never_sees_what_was_meant_for_the_old() {
    let scene = Scene::one();
    let first = scene.write();
    assert!(scene.end(first).is_done());
    let reborn = Node::join(&scene.net, "there:1", 2);
    let (fresh, window) = reborn.window(&["a"]);
    let id = scene.write();
    let Outcome::Failed { failure, .. } = scene.end(id) else { panic!("not failed") };
    assert_eq!(failure.reason, Reason::Fault(CoreFault::Stale));
    let again = scene.mover.submit(scene.batch(Direction::Write));
    assert_eq!(again, Err(Refusal::Core(CoreRefusal::PeerEnded)));
    let mut batch = scene.batch(Direction::Write);
    (batch.peer, batch.ops[0].remote) = (reborn.id.clone(), window);
    let id = scene.mover.submit(batch).unwrap();
    assert!(scene.end(id).is_done());
    assert_eq!(fresh.checksum(0, BYTES as u64), scene.local.checksum(0, BYTES as u64));
    scene.mover.peer_ended(&reborn.id);
    let (_, window) = reborn.window(&["a"]);
    let mut batch = scene.batch(Direction::Write);
    (batch.peer, batch.ops[0].remote) = (reborn.id, window);
    assert_eq!(scene.mover.submit(batch), Err(Refusal::Core(CoreRefusal::PeerEnded)));
}

#[test]
fn a_peer_that_is_not_there_fails_its_batches_with_the_cause() {
    let scene = Scene::one();
    let mut batch = scene.batch(Direction::Write);
    batch.peer = PeerId { address: "nobody:1".into(), epoch: 1 };
    let id = scene.mover.submit(batch).unwrap();
    let Outcome::Failed { failure, cause, .. } = scene.end(id) else { panic!("not failed") };
    assert_eq!((failure.stage, failure.reason), (Stage::Connect, Reason::Fault(CoreFault::Silent)));
    assert!(cause.contains("nobody:1"), "{cause}");
}

#[test]
fn bad_calls_are_refused_with_a_reason() {
    let scene = Scene::one();
    let refused = |change: &dyn Fn(&mut Batch)| {
        let mut batch = scene.batch(Direction::Write);
        change(&mut batch);
        scene.mover.submit(batch).unwrap_err().to_string()
    };
    assert!(refused(&|batch| batch.ops.clear()).contains("nothing to move"));
    assert!(refused(&|batch| batch.ops[0].local.at = 1).contains("of a memory of"));
    assert!(refused(&|batch| batch.ops[0].remote_at = u64::MAX).contains("of a window of"));
    let stranger = Memory::private(BYTES, Location::Anywhere).unwrap();
    assert!(refused(&|batch| batch.ops[0].local.memory = stranger.clone()).contains("register"));
    let unreachable = RemoteSegment { access: vec![("carrier".into(), vec![])], ..(*scene.window).clone() };
    let unreachable = Arc::new(unreachable);
    assert!(refused(&|batch| batch.ops[0].remote = unreachable.clone()).contains("no transport reaches"));
    let long = Notice { bytes: vec![0; 5_000] };
    assert!(refused(&|batch| batch.notice = Some(long.clone())).contains("4 KiB"));
}

#[test]
fn a_shutdown_ends_what_lives_and_takes_no_more() {
    let scene = Scene::one();
    scene.transports[0].set(|trouble| trouble.hold = true);
    let ids: Vec<BatchId> = (0..5).map(|_| scene.write()).collect();
    until(|| scene.transports[0].held() > 0);
    scene.mover.shutdown();
    for id in ids {
        assert!(matches!(scene.mover.poll(id), Progress::Ended(Outcome::Cancelled { .. })));
    }
    assert_eq!(scene.mover.submit(scene.batch(Direction::Write)), Err(Refusal::ShutDown));
    let nobody = scene.here.loopback.open(PathId(9), &scene.there.id, "memory", Completions::default());
    assert!(matches!(nobody.err(), Some(Fault::Path(_))));
}

/// One caller among several: batches of its own range, each checked at its end.
fn a_caller(scene: &Scene, caller: usize) -> usize {
    let bytes = (BYTES / 8) as u64;
    let at = caller as u64 * bytes;
    let mut done = 0;
    for turn in 0..40u8 {
        scene.local.write(at, &vec![turn.wrapping_mul(7) | 1; bytes as usize]);
        let mut batch = scene.batch(Direction::Write);
        (batch.ops[0].local.at, batch.ops[0].remote_at, batch.ops[0].bytes) = (at, at, bytes);
        let id = scene.mover.submit(batch).unwrap();
        if turn % 8 == 3 {
            scene.mover.cancel(id);
        }
        let outcome = if turn % 2 == 0 {
            scene.mover.wait(id, LIMIT).unwrap()
        } else {
            until(|| !matches!(scene.mover.poll(id), Progress::Running { .. }));
            scene.mover.wait(id, LIMIT).unwrap()
        };
        if outcome.is_done() {
            done += 1;
            assert_eq!(scene.local.checksum(at, bytes), scene.remote.checksum(at, bytes));
        }
    }
    done
}

#[test]
fn callers_in_many_threads_get_their_bytes_while_paths_break() {
    let mut settings = settings();
    settings.core.slice_tries = 100;
    let scene = Scene::new(settings, &["a", "b"], &["nic0", "nic1"]);
    let done = std::thread::scope(|threads| {
        let callers: Vec<_> = (0..8)
            .map(|caller| {
                let scene = &scene;
                threads.spawn(move || a_caller(scene, caller))
            })
            .collect();
        let mut turn = 0;
        while callers.iter().any(|caller| !caller.is_finished()) {
            let transport = &scene.transports[turn % 2];
            match turn % 7 {
                0 => transport.cut(),
                1 => transport.set(|trouble| trouble.unplugged = true),
                2 => transport.set(|trouble| (trouble.hold, trouble.room) = (true, Some(5))),
                3 => transport.set(|trouble| trouble.damage = 2),
                _ => {
                    transport.set(|trouble| trouble.unplugged = false);
                    transport.release();
                }
            }
            turn += 1;
            std::thread::sleep(Duration::from_millis(2));
        }
        for transport in &scene.transports {
            transport.set(|trouble| *trouble = Trouble::default());
            transport.release();
        }
        callers.into_iter().map(|caller| caller.join().unwrap()).sum::<usize>()
    });
    assert!(done > 0);
    scene.mover.check().unwrap();
    let stats = scene.mover.stats();
    assert_eq!((stats.submitted, stats.live_batches), (320, 0));
}

#[test]
fn windows_are_opened_over_every_transport_and_revoked() {
    let scene = Scene::new(settings(), &["a", "b"], &["nic0"]);
    let window = scene.mover.open_window(&scene.local, 10, 100, Grant::Read).unwrap();
    let names: Vec<&str> = window.access.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names, window.bytes), (vec!["a", "b"], 100));
    scene.mover.revoke(window.window);
    assert!(scene.here.exposure.admit(window.window, Direction::Read, 0, 1).is_err());
    let stranger = Memory::private(BYTES, Location::Anywhere).unwrap();
    assert!(scene.mover.open_window(&stranger, 0, 1, Grant::Read).is_err());
    assert_eq!(scene.here.exposure.windows(), 0);
}
