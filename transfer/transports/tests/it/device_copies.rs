//! Copies between a device and the host, on a stand-in for the CUDA driver.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use baton_transports::mover::device::*;
use baton_transports::mover::{Location, Memory};
use proptest::prelude::*;

use crate::standin::{PATIENCE, StandIn};

const MEMORY_BYTES: u64 = 1 << 20;

/// A device with some memory, and host memory pinned for it.
struct Bench {
    device: Arc<Device>,
    there: Arc<DeviceMemory>,
    here: Arc<Pinned>,
    stand_in: StandIn,
}

impl Bench {
    fn new() -> Self {
        Self::on(StandIn::new())
    }

    fn on(stand_in: StandIn) -> Self {
        let driver = Driver::load_from(&stand_in.library()).unwrap();
        let device = Device::open(&driver, 1).unwrap();
        let there = device.allocate(MEMORY_BYTES).unwrap();
        let memory = Memory::private(MEMORY_BYTES as usize, Location::Anywhere).unwrap();
        let here = device.pin(&memory).unwrap();
        Self { device, there, here, stand_in }
    }

    fn copier(&self, config: CopierConfig) -> Copier {
        Copier::new(&self.device, config).unwrap()
    }

    fn up(&self, at: u64, bytes: u64) -> Transfer {
        Transfer::new(Place::host(&self.here, at), Place::device(&self.there, at), bytes).unwrap()
    }

    fn down(&self, at: u64, to: u64, bytes: u64) -> Transfer {
        Transfer::new(Place::device(&self.there, at), Place::host(&self.here, to), bytes).unwrap()
    }

    fn bytes(&self, at: u64, bytes: u64) -> Vec<u8> {
        let mut got = vec![0; bytes as usize];
        self.here.memory().read(at, &mut got);
        got
    }
}

fn small(streams: usize) -> CopierConfig {
    CopierConfig { streams, piece_bytes: 4_096, depth: 2, ..CopierConfig::default() }
}

/// The next batch to end.
fn next(copier: &Copier) -> Ended {
    let mut ended = Vec::new();
    copier.wait(&mut ended, PATIENCE);
    assert_eq!(ended.len(), 1, "{:?}", copier.stats());
    ended.remove(0)
}

fn all(copier: &Copier, count: usize) -> Vec<Ended> {
    let (mut ended, until) = (Vec::new(), std::time::Instant::now() + PATIENCE);
    while ended.len() < count {
        assert!(std::time::Instant::now() < until, "{} of {count}: {:?}", ended.len(), copier.stats());
        copier.wait(&mut ended, Duration::from_millis(5));
    }
    ended
}

fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| (at.wrapping_mul(31).wrapping_add(seed) >> 3) as u8 ^ at as u8).collect()
}

fn fault_of(ended: &Ended) -> (&'static str, String, bool) {
    match &ended.outcome {
        CopyOutcome::Failed { fault: DeviceFault::Cuda { call, name, .. }, certain } => {
            (call, name.clone(), *certain)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_missing_is_named() {
    let none = Driver::load_from(Path::new("/nowhere/libcuda.so.1")).unwrap_err();
    assert!(none.to_string().starts_with("no CUDA driver here: /nowhere/libcuda.so.1 not found;"), "{none}");
    assert!(none.to_string().contains("No such file"), "{none}");
    let partial = StandIn::built_with(&["WITHOUT_ERROR_STRING"]);
    let library = partial.library();
    let fault = Driver::load_from(&library).unwrap_err();
    assert_eq!(fault, DeviceFault::MissingSymbol { library, symbol: "cuGetErrorString" });
    let broken = StandIn::new();
    broken.plan("fail cuInit 1 201");
    let fault = Driver::load_from(&broken.library()).unwrap_err().to_string();
    assert!(fault.contains("cuInit failed with CUDA_ERROR_INVALID_CONTEXT (201)"), "{fault}");
    let driver = Driver::load_from(&broken.library()).unwrap();
    assert_eq!(Device::open(&driver, 2).unwrap_err(), DeviceFault::NoDevice { ordinal: 2, count: 2 });
    let device = Device::open(&driver, 0).unwrap();
    assert_eq!((device.name(), device.bytes(), device.ordinal()), ("Stand-in 0", 64 << 20, 0));
    let full = device.allocate(65 << 20).unwrap_err().to_string();
    assert!(full.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{full}");
}

#[test]
fn bytes_come_back_over_every_kind_of_copy() {
    for watch in [Watch::Threads, Watch::Caller] {
        let bench = Bench::new();
        let copier = bench.copier(CopierConfig { watch, ..small(3) });
        let sent = pattern(1, 100_000);
        bench.here.memory().write(7, &sent);
        let up = Transfer::new(Place::host(&bench.here, 7), Place::device(&bench.there, 1), 100_000).unwrap();
        let across =
            Transfer::new(Place::device(&bench.there, 1), Place::device(&bench.there, 200_001), 100_000);
        for transfer in [up, across.unwrap(), bench.down(200_001, 500_003, 100_000)] {
            let batch = copier.submit(&[transfer]).unwrap();
            let ended = all(&copier, 1);
            assert_eq!(ended, [Ended { batch, outcome: CopyOutcome::Done, copied_bytes: 100_000 }]);
        }
        assert_eq!(bench.bytes(500_003, 100_000), sent);
        assert_eq!(bench.bytes(500_000, 3), [0; 3]);
        assert_eq!(bench.bytes(600_003, 64), [0; 64]);
        assert_eq!(copier.shutdown(PATIENCE), 0);
        let stats = copier.stats();
        assert_eq!((stats.done, stats.copied_bytes, stats.pieces, stats.open), (3, 300_000, 0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Disjoint random ranges go up in several batches, come down elsewhere, and nothing else changes.
    #[test]
    fn random_ranges_come_back(
        streams in 1_usize..4,
        piece_bytes in 500_u64..20_000,
        caller in any::<bool>(),
        ranges in prop::collection::vec((0_u64..3_000, 1_u64..9_000), 1..40),
    ) {
        let bench = Bench::new();
        let watch = if caller { Watch::Caller } else { Watch::Threads };
        let copier = bench.copier(CopierConfig { piece_bytes, watch, ..small(streams) });
        let half = MEMORY_BYTES / 2;
        let original = pattern(7, half);
        bench.here.memory().write(0, &original);
        let mut expected = vec![0; half as usize];
        let (mut at, mut ups, mut downs) = (0, Vec::new(), Vec::new());
        for (gap, bytes) in ranges {
            at += gap;
            ups.push(bench.up(at, bytes));
            downs.push(bench.down(at, half + at, bytes));
            let range = at as usize..(at + bytes) as usize;
            expected[range.clone()].copy_from_slice(&original[range]);
            at += bytes;
        }
        for transfers in [ups, downs] {
            let batches: Vec<_> = transfers.chunks(5).map(|some| copier.submit(some).unwrap()).collect();
            let ended = all(&copier, batches.len());
            prop_assert!(ended.iter().all(|one| one.outcome == CopyOutcome::Done));
        }
        prop_assert!(bench.bytes(half, half) == expected);
        prop_assert!(bench.bytes(0, half) == original);
    }
}

#[test]
fn streams_and_directions_run_at_the_same_time() {
    let bench = Bench::new();
    bench.stand_in.plan("hold");
    let copier = bench.copier(small(2));
    copier.submit(&[bench.up(0, 8_192), bench.down(16_384, 16_384, 8_192)]).unwrap();
    // Two pieces each way, one on each of four streams: all begin though none can end.
    bench.stand_in.wait_for("begin", 4);
    assert_eq!(bench.stand_in.count("end"), 0);
    let begun = bench.stand_in.journal();
    for stream in 0..4 {
        assert_eq!(begun.iter().filter(|line| line.contains(&format!("stream {stream} "))).count(), 1);
    }
    let mut ended = Vec::new();
    copier.poll(&mut ended);
    assert_eq!(ended, []);
    bench.stand_in.plan("");
    assert_eq!(next(&copier).outcome, CopyOutcome::Done);
}

#[test]
fn many_small_copies_share_an_event_and_stay_in_order() {
    let bench = Bench::new();
    let copier = bench.copier(CopierConfig { streams: 1, ..CopierConfig::default() });
    let transfers: Vec<_> = (0..1_000).map(|at| bench.up(at * 1_000, 1_000)).collect();
    copier.submit(&transfers).unwrap();
    assert_eq!(next(&copier).copied_bytes, 1_000_000);
    let ends: Vec<_> = bench.stand_in.journal().into_iter().filter(|line| line.starts_with("end")).collect();
    assert_eq!(ends, (1..=1_000).map(|nth| format!("end {nth}")).collect::<Vec<_>>());
}

#[test]
fn a_refused_copy_fails_its_batch_when_what_was_begun_has_ended() {
    let bench = Bench::new();
    bench.stand_in.plan("hold\nfail cuMemcpyHtoDAsync_v2 3 201\nfail cuMemcpyHtoDAsync_v2 6 2");
    let copier = bench.copier(small(1));
    let three = [bench.up(0, 1_000), bench.up(2_000, 1_000), bench.up(4_000, 1_000)];
    let failing = copier.submit(&three).unwrap();
    bench.stand_in.wait_for("begin", 1);
    let mut ended = Vec::new();
    copier.wait(&mut ended, Duration::from_millis(50));
    assert_eq!(ended, [], "two of its copies are still under way");
    bench.stand_in.plan("fail cuMemcpyHtoDAsync_v2 6 2");
    let told = next(&copier);
    assert_eq!((told.batch, told.copied_bytes), (failing, 0));
    assert_eq!(fault_of(&told), ("cuMemcpyHtoDAsync_v2", "CUDA_ERROR_INVALID_CONTEXT".into(), true));
    assert_eq!((bench.stand_in.count("begin"), bench.stand_in.count("end")), (2, 2));
    // The third of ten pieces, when two are under way behind events of their own.
    copier.submit(&[bench.up(0, 40_960)]).unwrap();
    let told = next(&copier);
    assert_eq!(fault_of(&told), ("cuMemcpyHtoDAsync_v2", "CUDA_ERROR_OUT_OF_MEMORY".into(), true));
    assert_eq!(bench.stand_in.count("begin"), bench.stand_in.count("end"));
    assert!(told.copied_bytes < 40_960, "{told:?}");
    copier.submit(&[bench.up(0, 4_096)]).unwrap();
    assert_eq!(next(&copier).outcome, CopyOutcome::Done, "the copier goes on");
}

#[test]
fn a_copy_without_its_mark_is_waited_for_all_the_same() {
    let bench = Bench::new();
    bench.stand_in.plan("hold\nfail cuEventRecord 1 1");
    let copier = bench.copier(small(1));
    copier.submit(&[bench.up(0, 4_096)]).unwrap();
    bench.stand_in.wait_for("begin", 1);
    let mut ended = Vec::new();
    copier.wait(&mut ended, Duration::from_millis(50));
    assert_eq!(ended, []);
    bench.stand_in.plan("");
    assert_eq!(fault_of(&next(&copier)), ("cuEventRecord", "CUDA_ERROR_INVALID_VALUE".into(), true));
}

#[test]
fn an_error_that_shows_later_is_named_and_the_copier_goes_on() {
    for watch in [Watch::Threads, Watch::Caller] {
        let bench = Bench::new();
        bench.stand_in.plan("corrupt 1 700");
        let copier = bench.copier(CopierConfig { watch, ..small(1) });
        copier.submit(&[bench.up(0, 4_096)]).unwrap();
        let ended = all(&copier, 1);
        let fault = ("cuEventSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS".into(), true);
        assert_eq!(fault_of(&ended[0]), fault);
        copier.submit(&[bench.up(0, 4_096)]).unwrap();
        assert_eq!(all(&copier, 1)[0].outcome, CopyOutcome::Done);
    }
}

#[test]
fn a_device_that_cannot_be_asked_keeps_its_ranges_and_gets_no_more_work() {
    let bench = Bench::new();
    bench.stand_in.plan("hold\ncorrupt 1 700\nsticky");
    let copier = bench.copier(CopierConfig { depth: 1, ..small(1) });
    copier.submit(&[bench.up(0, 4_096)]).unwrap();
    copier.submit(&[bench.up(4_096, 4_096)]).unwrap();
    bench.stand_in.wait_for("begin", 1);
    bench.stand_in.plan("corrupt 1 700\nsticky");
    let ended = all(&copier, 2);
    assert!(!fault_of(&ended[0]).2, "not certain");
    assert!(fault_of(&ended[1]).2, "never begun");
    assert!(matches!(copier.submit(&[bench.up(0, 1)]), Err(Declined::Broken(_))));
    assert_eq!(copier.shutdown(PATIENCE), 0);
    let Bench { device, there, here, stand_in } = bench;
    drop((copier, there, here, device));
    assert_eq!(stand_in.count("unpinned") + stand_in.count("freed"), 0, "{:#?}", stand_in.journal());
    assert_eq!(stand_in.count("retained 0"), 0);
}

#[test]
fn a_refusal_by_a_device_that_cannot_be_asked_is_not_certain_either() {
    let bench = Bench::new();
    bench.stand_in.plan("fail cuMemcpyDtoHAsync_v2 1 700\nfail cuStreamSynchronize 1 700");
    let copier = bench.copier(small(1));
    copier.submit(&[bench.down(0, 0, 4_096)]).unwrap();
    assert_eq!(
        fault_of(&next(&copier)),
        ("cuMemcpyDtoHAsync_v2", "CUDA_ERROR_ILLEGAL_ADDRESS".into(), false)
    );
    let Bench { there, here, stand_in, .. } = bench;
    drop((copier, there, here));
    assert_eq!(stand_in.count("unpinned") + stand_in.count("freed"), 0, "{:#?}", stand_in.journal());
}

#[test]
fn nothing_touches_a_range_after_its_batch_was_told() {
    let bench = Bench::new();
    let copier = bench.copier(small(3));
    bench.stand_in.plan("fail cuMemcpyDtoHAsync_v2 40 1\ncorrupt 90 700");
    let poison = vec![0xEE; 30_000];
    for round in 0..20 {
        let batches: Vec<_> = (0..4).map(|at| (at, bench.down(0, at * 100_000, 30_000))).collect();
        let ids: Vec<_> = batches
            .iter()
            .map(|(at, one)| (copier.submit(std::slice::from_ref(one)).unwrap(), *at))
            .collect();
        if round % 3 == 0 {
            copier.cancel(ids[2].0);
        }
        let (mut ended, mut told) = (Vec::new(), 0);
        while told < ids.len() {
            copier.wait(&mut ended, PATIENCE);
            for one in ended.drain(..) {
                let (_, at) = ids.iter().find(|(id, _)| *id == one.batch).unwrap();
                bench.here.memory().write(at * 100_000, &poison);
                told += 1;
            }
        }
        for at in 0..4 {
            assert!(bench.bytes(at * 100_000, 30_000) == poison, "range {at} of round {round}");
        }
    }
    let stats = copier.stats();
    assert_eq!(stats.done + stats.failed + stats.cancelled, 80);
    assert!(stats.failed >= 1, "{stats:?}");
}

#[test]
fn a_cancelled_batch_ends_when_what_was_begun_has() {
    let bench = Bench::new();
    bench.stand_in.plan("hold");
    let copier = bench.copier(small(1));
    let batch = copier.submit(&[bench.up(0, 40_960)]).unwrap();
    bench.stand_in.wait_for("begin", 1);
    copier.cancel(batch);
    let mut ended = Vec::new();
    copier.wait(&mut ended, Duration::from_millis(50));
    assert_eq!(ended, [], "its copies under way still touch its ranges");
    assert_eq!(copier.stats().pieces, 2, "the rest is left out at once");
    bench.stand_in.plan("");
    assert_eq!(next(&copier), Ended { batch, outcome: CopyOutcome::Cancelled, copied_bytes: 8_192 });
    assert_eq!(bench.stand_in.count("begin"), 2);
    let whole = copier.submit(&[bench.up(0, 4_096)]).unwrap();
    assert_eq!(next(&copier).outcome, CopyOutcome::Done);
    copier.cancel(whole);
    assert_eq!(copier.stats().open, 0, "cancelling what has ended does nothing");
}

#[test]
fn every_bound_refuses_by_name() {
    let bench = Bench::new();
    bench.stand_in.plan("hold");
    let copier = bench.copier(CopierConfig { pieces_max: 8, batches_max: 2, ..small(1) });
    let invalid = |batch: &[Transfer]| matches!(copier.submit(batch), Err(Declined::Invalid(_)));
    assert!(invalid(&[]) && invalid(&[bench.up(0, 9 * 4_096)]));
    copier.submit(&[bench.up(0, 6 * 4_096)]).unwrap();
    assert_eq!(copier.submit(&[bench.up(0, 3 * 4_096)]), Err(Declined::Full), "pieces");
    copier.submit(&[bench.up(40_960, 4_096)]).unwrap();
    assert_eq!(copier.submit(&[bench.up(0, 1)]), Err(Declined::Full), "batches");
    bench.stand_in.plan("");
    let mut ended = Vec::new();
    while copier.stats().untold < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(copier.submit(&[bench.up(0, 1)]), Err(Declined::Full), "batches that were not told of");
    copier.poll(&mut ended);
    assert_eq!(ended.len(), 2);
    copier.submit(&[bench.up(0, 1)]).unwrap();
    let zero = CopierConfig { depth: 0, ..small(1) };
    assert!(matches!(Copier::new(&bench.device, zero), Err(DeviceFault::Unfit(_))));
}

#[test]
fn ranges_outside_are_refused_before_anything_moves() {
    let bench = Bench::new();
    let (here, there) = (&bench.here, &bench.there);
    let outside =
        |from, to, bytes| matches!(Transfer::new(from, to, bytes), Err(DeviceFault::Outside { .. }));
    assert!(outside(Place::host(here, 1), Place::device(there, 0), MEMORY_BYTES));
    assert!(outside(Place::host(here, 0), Place::device(there, 1), MEMORY_BYTES));
    assert!(outside(Place::device(there, u64::MAX), Place::host(here, 0), 2));
    assert!(outside(Place::device(there, 0), Place::host(here, 0), 0));
    let unfit = |from, to| matches!(Transfer::new(from, to, 100), Err(DeviceFault::Unfit(_)));
    assert!(unfit(Place::host(here, 0), Place::host(here, 200)));
    assert!(unfit(Place::device(there, 0), Place::device(there, 99)));
    let driver = Driver::load_from(&bench.stand_in.library()).unwrap();
    let other = Copier::new(&Device::open(&driver, 0).unwrap(), small(1)).unwrap();
    assert!(matches!(other.submit(&[bench.up(0, 1)]), Err(Declined::Invalid(_))));
    assert_eq!(bench.stand_in.count("begin"), 0);
}

#[test]
fn memory_is_unpinned_once_and_before_it_is_unmapped() {
    let bench = Bench::new();
    bench.stand_in.plan("hold");
    let again = bench.device.pin(bench.here.memory()).unwrap_err().to_string();
    assert!(again.contains("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (712)"), "{again}");
    let copier = bench.copier(small(2));
    copier.submit(&[bench.up(0, 40_960)]).unwrap();
    bench.stand_in.wait_for("begin", 2);
    let Bench { device, there, here, stand_in } = bench;
    // Everybody lets go while copies are under way: they hold on to what they touch.
    drop((copier, there, here, device));
    assert_eq!(stand_in.count("unpinned") + stand_in.count("freed") + stand_in.count("retained 0"), 0);
    stand_in.plan("");
    stand_in.wait_for("retained 0", 1);
    let journal = stand_in.journal();
    let unpinned: Vec<_> = journal.iter().filter(|line| line.starts_with("unpinned")).collect();
    assert_eq!(unpinned, ["unpinned 1048576 mapped idle"]);
    assert!(journal.contains(&"freed 1048576 idle".to_owned()), "{journal:#?}");
    assert_eq!(journal.iter().filter(|line| line.ends_with("destroyed idle")).count(), 4);
    assert_eq!(journal.last().unwrap(), "retained 0", "the device goes last");
}

#[test]
fn memory_that_the_driver_would_not_unpin_stays_mapped() {
    let bench = Bench::new();
    bench.stand_in.plan("fail cuMemHostUnregister 1 201");
    let memory = bench.here.memory().clone();
    drop(bench.here);
    assert_eq!(Arc::strong_count(&memory), 2, "one is never given back");
}

#[test]
fn a_shutdown_waits_no_longer_than_it_is_told_and_takes_no_more() {
    for watch in [Watch::Threads, Watch::Caller] {
        let bench = Bench::new();
        bench.stand_in.plan("hold");
        let copier = bench.copier(CopierConfig { watch, ..small(1) });
        copier.submit(&[bench.up(0, 40_960)]).unwrap();
        bench.stand_in.wait_for("begin", 1);
        assert_eq!(copier.shutdown(Duration::from_millis(30)), 1, "the device hangs");
        assert_eq!(copier.submit(&[bench.up(0, 1)]), Err(Declined::Closed));
        bench.stand_in.plan("");
        assert_eq!(copier.shutdown(PATIENCE), 0);
        assert_eq!(next(&copier).outcome, CopyOutcome::Cancelled);
    }
}

#[test]
fn a_range_is_exported_as_a_file() {
    let bench = Bench::new();
    let copier = bench.copier(small(1));
    bench.here.memory().write(8_192, &pattern(3, 4_096));
    copier.submit(&[bench.up(8_192, 4_096)]).unwrap();
    assert_eq!(next(&copier).outcome, CopyOutcome::Done);
    let mut file = std::fs::File::from(bench.there.dma_buf(8_192, 4_096).unwrap());
    std::io::Seek::rewind(&mut file).unwrap();
    let mut got = Vec::new();
    file.read_to_end(&mut got).unwrap();
    assert_eq!(got, pattern(3, 4_096));
    assert!(matches!(bench.there.dma_buf(MEMORY_BYTES, 1), Err(DeviceFault::Outside { .. })));
    let crooked = bench.there.dma_buf(0, 100).unwrap_err().to_string();
    assert!(crooked.contains("CUDA_ERROR_INVALID_VALUE (1)"), "{crooked}");
    let old = Bench::on(StandIn::built_with(&["WITHOUT_DMA_BUF"]));
    assert!(matches!(old.there.dma_buf(0, 4_096), Err(DeviceFault::Unfit(_))));
}
