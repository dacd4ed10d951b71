//! Randomly damaged files: a start either goes on or reports why not, and a read gives the written bytes or nothing.
//! Seeded; `BATON_FUZZ_SECONDS` makes it go on for so long, each case with a seed of its own, and `BATON_FUZZ_SEED`
//! begins with other seeds.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use baton_tiers::{BlobLog, BlobLogEvent, BlobLogOptions, IoChoice, Record, Source};
use baton_types::Rng;

/// Cases of a usual run.
const CASES: u64 = 150;
const BLOCK_BYTES: usize = 8 << 10;
const BLOCKS: u32 = 150;
/// Names, none of which is one that a start tries the disk with.
const NAMES: std::ops::Range<u64> = 1 << 40..(1 << 40) + 40;

struct Bytes(Vec<u8>);

impl Source for Bytes {
    fn copy(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.0[offset..offset + into.len()]);
    }
}

fn content(name: u64, version: u64) -> Vec<u8> {
    let mut rng = Rng::fork(name, version);
    let bytes = rng.below(30_000) as usize;
    (0..bytes).map(|_| rng.below(256) as u8).collect()
}

fn header(name: u64, version: u64) -> Vec<u8> {
    [name.to_le_bytes(), version.to_le_bytes()].concat()
}

fn open(dir: &Path) -> Result<BlobLog, String> {
    let (capacity_blocks, block_bytes, fingerprint) = (BLOCKS, BLOCK_BYTES, 7);
    let options = BlobLogOptions { dir, capacity_blocks, block_bytes, fingerprint, io: IoChoice::Threads };
    BlobLog::open(&options).map(|(blob_log, _)| blob_log).map_err(|error| error.to_string())
}

/// The results of the log until it is idle.
fn settle(blob_log: &mut BlobLog) -> Vec<BlobLogEvent> {
    let mut told = Vec::new();
    loop {
        blob_log.pump();
        told.extend(std::iter::from_fn(|| blob_log.next_done()));
        if !blob_log.is_waiting() {
            return told;
        }
        blob_log.wait();
    }
}

/// Fills a file with values, of which some are replaced or removed again; the version that each name has.
fn fill(dir: &Path, rng: &mut Rng) -> BTreeMap<u64, u64> {
    let (mut blob_log, mut lasting) = (open(dir).expect("a new file"), BTreeMap::new());
    for version in 1..=120 {
        let name = NAMES.start + rng.below(40);
        blob_log.remove(name, version);
        settle(&mut blob_log);
        lasting.remove(&name);
        if rng.below(4) > 0 {
            let value = content(name, version);
            let (tag, header, bytes) = (version, header(name, version), value.len() as u32);
            blob_log.put(Record { name, tag, header, bytes, source: Box::new(Bytes(value)) });
            lasting.insert(name, version);
        }
        for done in settle(&mut blob_log) {
            if let BlobLogEvent::Dropped(gone) = done {
                lasting.remove(&gone.name);
            }
        }
    }
    lasting
}

/// Damages a file once.
fn damage(bytes: &mut Vec<u8>, rng: &mut Rng) {
    // Half of it to where what is what is written.
    let end = if rng.below(2) == 0 { bytes.len() } else { bytes.len().min(40_960) } as u64;
    if end < 4096 {
        return;
    }
    let at = rng.below(end) as usize;
    let page = |rng: &mut Rng| rng.below(end / 4096) as usize * 4096;
    match rng.below(100) {
        0..70 => bytes[at] ^= 1 << rng.below(8),
        70..80 => {
            let upto = (at + rng.below(2_000) as usize).min(bytes.len());
            bytes[at..upto].iter_mut().for_each(|byte| *byte = rng.below(256) as u8);
        }
        80..97 => {
            let (one, other) = (page(rng), page(rng));
            // A page of zeros is one that was never written: put in place of the newest side of an index page it is
            // believed.
            if [one, other].iter().any(|at| bytes[*at..at + 4096].iter().all(|byte| *byte == 0)) {
                return;
            }
            let kept = bytes[one..one + 4096].to_vec();
            bytes.copy_within(other..other + 4096, one);
            bytes[other..other + 4096].copy_from_slice(&kept);
        }
        97..99 => bytes.truncate(at),
        _ => bytes.resize(bytes.len() + at % 100_000, 0xA5),
    }
}

/// Reads every name, whole or its header alone: never a byte that is not what was last put under it.
fn check(blob_log: &mut BlobLog, lasting: &BTreeMap<u64, u64>, seed: u64) -> usize {
    let mut found = 0;
    for header_only in [true, false] {
        NAMES.for_each(|name| blob_log.get(name, name, header_only));
        for done in settle(blob_log) {
            let BlobLogEvent::Got(name, Ok((read, value))) = done else { continue };
            let version = lasting.get(&name).unwrap_or_else(|| panic!("seed {seed}: {name} was removed"));
            let (read, padding) = read.split_at(16);
            assert_eq!(read, header(name, *version), "seed {seed}: {name}");
            assert!(padding.iter().all(|byte| *byte == 0), "seed {seed}: {name}");
            if !header_only {
                assert_eq!(value, content(name, *version), "seed {seed}: {name}");
                found += 1;
            }
        }
    }
    found
}

#[test]
fn fuzz_ssd_files() {
    let told = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let end = told("BATON_FUZZ_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let first = told("BATON_FUZZ_SEED").unwrap_or(0) << 32;
    let (mut found, mut refused, mut lost) = (0, 0, 0);
    let mut whole = (Vec::new(), BTreeMap::new());
    for seed in first.. {
        if seed - first >= CASES && end.is_none_or(|end| Instant::now() >= end) {
            println!("fuzz ssd_files: {} files of seed {}", seed - first, first >> 32);
            break;
        }
        let (dir, mut rng) = (tempfile::tempdir().unwrap(), Rng::fork(seed, 3));
        let path = dir.path().join("kv.slab");
        if (seed - first) % 15 == 0 {
            let lasting = fill(dir.path(), &mut rng);
            whole = (fs::read(&path).unwrap(), lasting);
        }
        let (mut bytes, lasting) = whole.clone();
        for _ in 0..1 + rng.below(6) {
            damage(&mut bytes, &mut rng);
        }
        fs::write(&path, &bytes).unwrap();
        match open(dir.path()) {
            Ok(mut blob_log) => {
                let here = check(&mut blob_log, &lasting, seed);
                found += here;
                lost += lasting.len() - here;
                // It goes on to be written to.
                let source = Box::new(Bytes(content(1_000, 1)));
                let bytes = content(1_000, 1).len() as u32;
                blob_log.put(Record { name: 1_000, tag: 1, header: vec![1], bytes, source });
                settle(&mut blob_log);
            }
            Err(why) => {
                assert!(why.contains("kv.slab"), "seed {seed}: {why}");
                refused += 1;
            }
        }
    }
    assert!(found > 500 && lost > 50 && refused > 0, "{found} found, {lost} lost, {refused} refused");
}
