//! Written rows are read back; damaged rows are refused and never panic.
#![allow(clippy::unwrap_used, reason = "a test may fail by unwrapping")]

use std::path::Path;

use baton_traces::summary::{SummaryOptions, summarise};
use baton_traces::synth::{Kind, PublishedTrace, Workload, like, workload};
use baton_traces::write::{Output, Writer, create};
use baton_traces::{Dialect, Extra, ReadOptions, Record, TimeUnit, Trace, lint, load};
use proptest::prelude::*;

const BLOCK: u64 = 512;

fn written(records: &[Record], output: Output, renumber: bool) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), output, renumber);
    records.iter().for_each(|record| writer.write(record).unwrap());
    writer.finish().unwrap()
}

fn read_back(bytes: &[u8], options: &ReadOptions) -> Trace {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("t");
    std::fs::write(&path, bytes).unwrap();
    load(&path, options).unwrap()
}

fn name() -> impl Strategy<Value = Option<String>> {
    proptest::option::of("[a-z\"\\\\ é]{1,6}")
}

prop_compose! {
    fn extra()(
        request_id in name(), class in name(), tenant in name(), lora in name(), salt in name(), parent in name(),
        priority in proptest::option::of(-9i64..9), strict_priority in proptest::option::of(0u64..9),
        slo in proptest::option::of(0.0f64..1e6), cancel in proptest::option::of(0.0f64..1e6), own in proptest::option::of(any::<i32>()),
    ) -> Extra {
        let mut extra = Extra { request_id, class, tenant, lora, salt, parent, priority, strict_priority,
            slo_ttft_ms: slo, slo_tbt_ms: slo.map(f64::round), cancel_after_ms: cancel, ..Extra::default() };
        if let Some(own) = own {
            extra.unknown.insert("own field".into(), serde_json::json!({"deep": [own]}));
        }
        extra
    }
}

prop_compose! {
    /// Rows in time order; some are turns of sessions, whose later turns have delays.
    fn records()(rows in proptest::collection::vec(
        (0.0f64..5000.0, 1u64..5000, 1u64..900, any::<u64>(), proptest::option::of(0u8..3), extra(), any::<bool>()), 1..40)) -> Vec<Record> {
        let mut at_ms = 0.0;
        let mut turns = [0u32; 3];
        rows.into_iter().map(|(gap, input, output, id, session, mut extra, whole)| {
            at_ms += if whole { f64::round(gap) } else { gap };
            if let Some(session) = session {
                turns[session as usize] += 1;
                extra.session_id = Some(format!("s{session}"));
                extra.delay_ms = (turns[session as usize] > 1).then_some(gap / 2.0);
                extra.wait_for = vec!["x".into()];
            }
            extra.wait_for.clear();
            Record {
                timestamp_ms: at_ms,
                input_length: input,
                output_length: output,
                hash_ids: (0..input.div_ceil(BLOCK)).map(|i| id.wrapping_add(i)).collect(),
                extra: (extra != Extra::default()).then(|| Box::new(extra)),
            }
        }).collect()
    }
}

fn told() -> ReadOptions {
    ReadOptions {
        dialect: Some(Dialect::Mooncake),
        block_tokens: Some(512),
        time_unit: Some(TimeUnit::Milliseconds),
        context: Some(baton_traces::Context::Full),
        ..ReadOptions::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn mooncake_rows_come_back_whole(records in records()) {
        let trace = read_back(&written(&records, Output::Mooncake, false), &told());
        prop_assert_eq!(&trace.records, &records);
    }

    #[test]
    fn csv_rows_come_back_with_times_and_lengths(records in records()) {
        for (output, dialect) in [(Output::VidurCsv, Dialect::VidurCsv), (Output::SplitwiseCsv, Dialect::SplitwiseCsv), (Output::BurstGptCsv, Dialect::BurstGptCsv)] {
            let options = ReadOptions { dialect: None, time_unit: Some(TimeUnit::Seconds), ..told() };
            let trace = read_back(&written(&records, output, false), &options);
            prop_assert_eq!(trace.dialect, dialect);
            prop_assert_eq!(trace.records.len(), records.len());
            for (back, record) in trace.records.iter().zip(&records) {
                prop_assert!((back.timestamp_ms - record.timestamp_ms).abs() < 1e-6 * record.timestamp_ms.max(1.0));
                prop_assert_eq!((back.input_length, back.output_length), (record.input_length, record.output_length));
            }
        }
    }

    #[test]
    fn renumbered_ids_keep_the_sharing(records in records()) {
        let trace = read_back(&written(&records, Output::Mooncake, true), &told());
        let before = Trace { records, ..trace.clone() };
        let ratio = |t: &Trace| summarise(t, &SummaryOptions::default()).unbounded;
        prop_assert_eq!(ratio(&trace), ratio(&before));
        let most = trace.records.iter().flat_map(|r| &r.hash_ids).max().copied().unwrap_or(0);
        prop_assert!(most < summarise(&before, &SummaryOptions::default()).distinct_blocks);
    }

    #[test]
    fn damaged_bytes_never_panic(
        which in 0usize..SAMPLES.len(),
        hits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..6),
        strict: bool,
        named in 0usize..16,
    ) {
        let mut bytes = SAMPLES[which].as_bytes().to_vec();
        for (at, byte, how) in hits {
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                2 => { bytes.remove(at); }
                _ => bytes.truncate(at.max(1)),
            }
            if bytes.is_empty() {
                bytes.push(b'{');
            }
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("t");
        std::fs::write(&path, &bytes).unwrap();
        let dialect = baton_traces::DIALECTS.get(named).map(|(dialect, _)| *dialect);
        check_whatever(&path, &ReadOptions { strict, dialect, ..ReadOptions::default() });
        check_whatever(&path, &ReadOptions { strict, ..ReadOptions::default() });
    }
}

/// Reading and linting end, and what strict reading lets through is sound.
fn check_whatever(path: &Path, options: &ReadOptions) {
    if let Ok(trace) = load(path, options) {
        for record in &trace.records {
            assert_eq!(
                record.hash_ids.len() as u64,
                record.input_length.div_ceil(u64::from(trace.block_tokens))
            );
        }
        assert!(trace.records.is_sorted_by(|a, b| a.timestamp_ms <= b.timestamp_ms));
    }
    let _ = lint::lint(path, options, |_| {});
}

const SAMPLES: [&str; 10] = [
    "{\"timestamp\":0,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1,2],\"session_id\":\"a\"}\n{\"delay\":5,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1,2],\"session_id\":\"a\"}\n",
    "{\"request_id\":\"a\",\"timestamp\":0,\"input_tokens\":600,\"output_tokens\":1,\"wait_for\":[]}\n{\"request_id\":\"b\",\"wait_for\":[\"a\"],\"tool_wait_ms\":3,\"input_tokens\":6,\"output_tokens\":1}\n",
    "{\"schema\":\"dynamo.request.trace.v1\",\"event_type\":\"request_end\",\"event_time_unix_ms\":10,\"request\":{\"request_id\":\"a\",\"request_received_ms\":1,\"output_tokens\":4,\"replay\":{\"trace_block_size\":64,\"input_length\":64,\"input_sequence_hashes\":[7]}}}\n",
    "{\"num_turns\":1,\"input_prompt_length\":64,\"assistant_response_length\":[2],\"tool_call_output_length\":[2],\"tool_call_latency\":[0.5],\"final_assistant_response_length\":2}\n",
    "{\"id\":\"c\",\"block_size\":64,\"requests\":[{\"t\":0,\"in\":130,\"out\":5,\"hash_ids\":[1,2]},{\"t\":1,\"type\":\"subagent\",\"requests\":[]}]}\n",
    "{\"trace_id\":\"t\",\"spans\":[{\"startTimeUnixNano\":\"1700000000000000000\",\"attributes\":{\"gen_ai.usage.input_tokens\":70,\"gen_ai.usage.output_tokens\":3}}]}\n",
    "{\"chat_id\":1,\"parent_chat_id\":-1,\"timestamp\":1.5,\"input_length\":30,\"output_length\":2,\"hash_ids\":[1,2]}\n",
    "{\"session_id\":\"s\",\"turns\":[{\"text\":\"hello\",\"delay\":2},{\"text\":\"hello\",\"timestamp\":2}]}\n",
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n",
    "{\"session_id\":\"s\",\"input_tokens_total\":100,\"prefix_tokens\":10,\"output_tokens\":3,\"timing_events\":[{\"type\":\"text\",\"timestamp\":\"2026-01-01T00:00:00Z\"}]}\n",
];

#[test]
fn look_alikes_and_workloads_come_back_whole() {
    let mut traces: Vec<Trace> =
        vec![like(PublishedTrace::Conversation, 3), like(PublishedTrace::Synthetic, 3)];
    for kind in [Kind::Chat, Kind::Agents, Kind::Documents] {
        traces.push(
            workload(&Workload { requests: 500, closed_loop: true, ..Workload::new(kind, 1) }).unwrap(),
        );
    }
    for trace in traces {
        let back = read_back(&written(&trace.records, Output::Mooncake, false), &ReadOptions::default());
        assert_eq!(back.records, trace.records);
        assert_eq!(back.block_tokens, trace.block_tokens);
    }
}

#[test]
fn a_failed_write_leaves_the_old_file_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("t.jsonl.gz");
    std::fs::write(&path, "old").unwrap();
    let mut writer = create(&path, Output::Mooncake, false).unwrap();
    let record = like(PublishedTrace::Synthetic, 1).records.remove(0);
    writer.write(&record).unwrap();
    drop(writer);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    let mut writer = create(&path, Output::Mooncake, false).unwrap();
    writer.write(&record).unwrap();
    writer.finish().unwrap();
    assert_eq!(load(&path, &ReadOptions::default()).unwrap().records, [record]);
}
