//! Damaged snapshots and registrations: refused by name, or taken in sound; never more memory than their bytes pay for.

use baton_events::{Batch, Change, EngineHash, Medium, RemovedBlocks, StoredBlocks};
use baton_fuzz::{Fuzz, Verdict};
use baton_indexer::snapshot::{Reader, footer, header, section};
use baton_indexer::{Index, IndexLimits, IndexerError, Lookup, Registration, read_config};

#[global_allocator]
static COUNTING: baton_fuzz::AllocationCounter<std::alloc::System> =
    baton_fuzz::AllocationCounter(std::alloc::System);

const HEADER_BYTES: usize = 20;
const FRAME_BYTES: usize = 17;

fn index() -> Index {
    Index::new(IndexLimits { max_streams: 16, max_contexts: 64, ..IndexLimits::default() })
}

/// The whole snapshot of an index.
fn snapshot(index: &Index) -> Vec<u8> {
    let sections: Vec<_> = index.ids().filter_map(|id| section(index, id)).collect();
    let end = footer(sections.len() as u64);
    [vec![header(IndexLimits::default().seed)], sections, vec![end]].concat().concat()
}

/// Reads a snapshot that comes in pieces of so many bytes.
fn restore(bytes: &[u8], piece: usize) -> Result<Index, IndexerError> {
    let (mut reader, mut index) = (Reader::new(IndexLimits::default().seed), index());
    for piece in bytes.chunks(piece.max(1)) {
        reader.push(piece);
        while let Some(section) = reader.next_section()? {
            section.restore(&mut index)?;
        }
    }
    reader.finish()?;
    Ok(index)
}

/// The content of an index: positions and numbers of blocks of its streams, and the blocks of each context.
fn meaning(index: &Index) -> (Vec<String>, Vec<String>) {
    let stream = |id| format!("{:?} {:?}", index.position(id), index.counts(id).blocks);
    // A context without blocks is a name that nothing uses; it is not written.
    let contexts = index.contexts().into_iter().filter(|(_, blocks)| *blocks > 0);
    let contexts = contexts.map(|(context, blocks)| format!("{context:?} {blocks}"));
    (index.ids().map(stream).collect(), contexts.collect())
}

/// Makes the lengths and checksums of the sections right, as far as they can be followed.
#[allow(clippy::ptr_arg, reason = "other formats change their length when they are sealed")]
fn seal(bytes: &mut Vec<u8>) {
    let mut at = HEADER_BYTES;
    while let Some(frame) = bytes.get(at..at + FRAME_BYTES) {
        let length = u64::from_le_bytes(frame[1..9].try_into().unwrap());
        let left = (bytes.len() - at - FRAME_BYTES) as u64;
        // The last section may have become shorter.
        let length = length.min(left);
        let end = at + FRAME_BYTES + usize::try_from(length).unwrap();
        let sum = xxhash_rust::xxh3::xxh3_64(&bytes[at + FRAME_BYTES..end]);
        bytes[at + 1..at + 9].copy_from_slice(&length.to_le_bytes());
        bytes[at + 9..at + 17].copy_from_slice(&sum.to_le_bytes());
        at = end;
    }
}

#[test]
fn fuzz_indexer_snapshots() {
    let words: &[&[u8]] =
        &[b"\"position\":null", b"\"contexts\":[]", b"\"blocks\":0", b"null", b"\"sequence\":", b"BATONIDX"];
    Fuzz::new("indexer_snapshots").cases(8_000).words(words).sealed(seal).memory(2 << 20, 200).run(|input| {
        let whole = restore(input, usize::MAX);
        if let Ok(index) = &whole {
            assert_eq!(index.check(), Ok(()));
            // A snapshot that was read can be written again, with the same content.
            let again = restore(&snapshot(index), 1_000).expect("what we write can be read");
            assert_eq!(meaning(&again), meaning(index));
        }
        assert_eq!(restore(input, 7).is_ok(), whole.is_ok());
        Verdict::of(&whole)
    });
}

#[test]
fn fuzz_registrations() {
    let words: &[&[u8]] = &[
        b"\"block_size\":0",
        b"\"dp_rank\":4294967295",
        b"\"token_ids\":[",
        b"\"hashes\":[",
        b"null",
        b"tcp://",
        b"\"type\":\"Mooncake\"",
    ];
    let index = index();
    Fuzz::new("registrations").cases(15_000).words(words).memory(256 << 10, 200).run(|input| {
        let registration = Registration::parse(input);
        if let Ok((registration, _)) = &registration {
            let written = serde_json::to_vec(registration).unwrap();
            let (again, unknown) = Registration::parse(&written).expect("what we write can be read");
            assert_eq!((&again, unknown.len()), (registration, 0));
        }
        let tokens = Lookup::by_tokens(input);
        if let Ok((lookup, tokens, _)) = &tokens {
            assert!(index.match_tokens(lookup, tokens).is_empty());
        }
        let hashes = Lookup::by_hashes(input);
        if let Ok((lookup, hashes, _)) = &hashes {
            assert!(index.match_hashes(lookup, hashes).is_empty());
        }
        let read = registration.is_ok() || tokens.is_ok() || hashes.is_ok() || read_config(input).is_ok();
        if read { Verdict::Read } else { Verdict::Refused }
    });
}

/// Writes an input of the corpus that this program makes; run by hand when the format changes.
#[test]
#[ignore = "writes into the corpus"]
fn write_corpus() {
    let mut index = index();
    for name in ["a", "b"] {
        let json = format!(
            r#"{{"endpoint":"tcp://127.0.0.1:5557","type":"vLLM","modelname":"m","block_size":2,"dp_rank":0,"instance_id":"{name}"}}"#
        );
        let (registration, _) = Registration::parse(json.as_bytes()).unwrap();
        let id = index.add(registration).unwrap();
        let stored = |parent: Option<u64>, hashes: &[u64], medium| {
            Change::Stored(StoredBlocks {
                hashes: hashes.iter().map(|hash| EngineHash::Word(*hash)).collect(),
                parent: parent.map(EngineHash::Word),
                tokens: (0..hashes.len() as u32 * 2).collect(),
                block_tokens: 2,
                medium: Some(medium),
                ..StoredBlocks::default()
            })
        };
        let removed = RemovedBlocks { hashes: vec![EngineHash::Word(3)], ..RemovedBlocks::default() };
        let events = vec![
            stored(None, &[1, 2, 3], Medium::Gpu).into(),
            stored(Some(2), &[4, 5], Medium::Cpu).into(),
            stored(Some(77), &[9], Medium::Gpu).into(),
            Change::Removed(removed).into(),
        ];
        index.apply(id, &Batch { sequence: 4, time_us: 1_700_000_000_000_000, dp_rank: None, events });
    }
    let dir =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus/indexer_snapshots");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("ok-two-streams"), snapshot(&index)).unwrap();
    std::fs::write(dir.join("ok-empty"), snapshot(&self::index())).unwrap();
}
