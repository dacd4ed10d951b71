//! Damaged traces of every dialect: read, corrected or refused, in bounded time and memory.
#![allow(clippy::unwrap_used, reason = "a test may fail by unwrapping")]

use baton_fuzz::{Fuzz, Verdict};
use baton_traces::write::{Output, Writer};
use baton_traces::{DIALECTS, Limits, ReadOptions, lint, load};

#[global_allocator]
static COUNTING: baton_fuzz::AllocationCounter<std::alloc::System> =
    baton_fuzz::AllocationCounter(std::alloc::System);

const WORDS: &[&[u8]] = &[
    b"null",
    b"\"timestamp\":",
    b"\"delay\":",
    b"\"input_length\":",
    b"\"hash_ids\":[",
    b"\"session_id\":\"a\"",
    b"\"wait_for\":[\"a\"]",
    b"\"2026-01-01T00:00:00Z\"",
    b"9999-12-31 23:59:59.999999999",
    b"100000000",
    b"4000000",
    b"1e300",
    b"-5",
    b"\n",
];

#[test]
fn fuzz_traces() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace");
    // A thousandth of what may be read by default, so that a small input reaches the bounds.
    let limits =
        Limits { tokens: 1_000_000, ids: 4_000, sessions: 100, reorder_rows: 50, ..Limits::default() };
    let mut case = 0;
    Fuzz::new("traces").cases(400).words(WORDS).max_bytes(4 << 10).memory(8 << 20, 4_000).run(|input| {
        case += 1;
        std::fs::write(&path, input).unwrap();
        let named = DIALECTS.get(case % 32).map(|(dialect, _)| *dialect);
        let mut verdict = Verdict::Refused;
        for (dialect, strict) in [(None, true), (named, case % 2 == 0)] {
            let options = ReadOptions { dialect, strict, limits, ..ReadOptions::default() };
            if let Ok(trace) = load(&path, &options) {
                verdict = Verdict::Read;
                for record in &trace.records {
                    let blocks = record.input_length.div_ceil(u64::from(trace.block_tokens));
                    assert_eq!(record.hash_ids.len() as u64, blocks);
                    assert!(record.timestamp_ms.is_finite() && record.input_length <= limits.tokens);
                }
                assert!(trace.records.is_sorted_by(|a, b| a.timestamp_ms <= b.timestamp_ms));
                // A record that was read can be written.
                let mut writer = Writer::new(Vec::new(), Output::Mooncake, true);
                trace.records.iter().for_each(|record| writer.write(record).unwrap());
                writer.finish().unwrap();
            }
            let _ = lint::lint(&path, &options, |_| {});
        }
        verdict
    });
}
