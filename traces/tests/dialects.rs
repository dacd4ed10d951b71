//! Every dialect, read from a few rows written out here.
#![allow(clippy::unwrap_used, reason = "a test may fail by unwrapping")]

use std::io::Write;
use std::path::PathBuf;

use baton_traces::{
    Columns, Context, Dialect, Limits, ReadOptions, Record, Stage, TimeUnit, Trace, TraceError, load, open,
};
use tempfile::TempDir;

fn file(text: &str) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace");
    std::fs::write(&path, text).unwrap();
    (directory, path)
}

fn read_with(text: &str, options: &ReadOptions) -> Result<Trace, TraceError> {
    let (_directory, path) = file(text);
    load(&path, options)
}

fn read(text: &str) -> Trace {
    read_with(text, &ReadOptions::default()).unwrap()
}

fn fault(text: &str) -> TraceError {
    read_with(text, &ReadOptions::default()).unwrap_err()
}

fn times(trace: &Trace) -> Vec<f64> {
    trace.records.iter().map(|r| r.timestamp_ms).collect()
}

fn inputs(trace: &Trace) -> Vec<u64> {
    trace.records.iter().map(|r| r.input_length).collect()
}

fn delays(trace: &Trace) -> Vec<Option<f64>> {
    trace.records.iter().map(Record::delay_ms).collect()
}

fn covered(trace: &Trace) {
    for record in &trace.records {
        let blocks = record.input_length.div_ceil(u64::from(trace.block_tokens));
        assert_eq!(record.hash_ids.len() as u64, blocks, "{record:?}");
    }
}

fn shared(a: &Record, b: &Record) -> usize {
    a.hash_ids.iter().zip(&b.hash_ids).take_while(|(x, y)| x == y).count()
}

#[test]
fn mooncake_rows_are_taken_as_they_are() {
    let trace = read(
        "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [0, 1]}\n\
         {\"timestamp\": 3000, \"input_length\": 1024, \"output_length\": 6, \"hash_ids\": [0, 2], \"colour\": \"red\"}\n",
    );
    assert_eq!((trace.dialect, trace.block_tokens), (Dialect::Mooncake, 512));
    assert_eq!(times(&trace), [0.0, 3000.0]);
    assert_eq!(trace.records[0].extra, None);
    assert_eq!(trace.records[1].extra.as_ref().unwrap().unknown["colour"], "red");
    assert!(trace.assumptions.iter().any(|a| a.contains("512")), "{:?}", trace.assumptions);
    assert!(trace.assumptions.iter().any(|a| a.contains("times in ms")));
    assert!(trace.assumptions.iter().any(|a| a.contains("full context")));
}

#[test]
fn columns_and_units_of_other_tools_can_be_named() {
    let options = ReadOptions {
        block_tokens: Some(16),
        time_unit: Some(TimeUnit::Seconds),
        columns: Columns {
            timestamp: Some("ts".into()),
            input_length: Some("prompt".into()),
            output_length: Some("gen".into()),
            hash_ids: Some("blocks".into()),
        },
        ..ReadOptions::default()
    };
    let text = "{\"ts\":1.5,\"prompt\":20,\"gen\":3,\"blocks\":[4,5]}\n";
    let trace = read_with(text, &options).unwrap();
    assert_eq!((times(&trace), inputs(&trace)), (vec![1500.0], vec![20]));
}

#[test]
fn sessions_are_closed_loop() {
    let trace = read(
        "{\"session_id\":\"a\",\"timestamp\":1000,\"input_length\":2048,\"output_length\":128,\"hash_ids\":[1,2,3,4]}\n\
         {\"session_id\":\"a\",\"delay_ms\":50,\"input_length\":2560,\"output_length\":128,\"hash_ids\":[1,2,3,4,5]}\n\
         {\"session_id\":\"b\",\"timestamp\":1020,\"input_length\":512,\"output_length\":1,\"hash_ids\":[9]}\n\
         {\"session_id\":\"b\",\"timestamp\":1100,\"input_length\":512,\"output_length\":1,\"hash_ids\":[9]}\n",
    );
    assert_eq!(times(&trace), [1000.0, 1020.0, 1050.0, 1100.0]);
    assert_eq!(delays(&trace), [None, None, Some(50.0), Some(80.0)]);
}

#[test]
fn deltas_are_rebuilt_with_the_answers_in_between() {
    let text = "{\"session_id\":\"s\",\"timestamp\":0,\"input_length\":4,\"output_length\":2,\"hash_ids\":[1]}\n\
                {\"session_id\":\"s\",\"delay\":5,\"input_length\":2,\"output_length\":1,\"hash_ids\":[2]}\n\
                {\"session_id\":\"s\",\"delay\":5,\"input_length\":9,\"output_length\":1,\"hash_ids\":[3,4,5]}\n";
    let options =
        ReadOptions { block_tokens: Some(4), context: Some(Context::Delta), ..ReadOptions::default() };
    let trace = read_with(text, &options).unwrap();
    assert_eq!(inputs(&trace), [4, 8, 18]);
    covered(&trace);
    assert_eq!(trace.records[0].hash_ids, [1]);
    assert_eq!(shared(&trace.records[0], &trace.records[1]), 1);
    assert_eq!(shared(&trace.records[1], &trace.records[2]), 2);
    let named = ReadOptions { dialect: Some(Dialect::MooncakeDelta), context: None, ..options };
    assert_eq!(inputs(&read_with(text, &named).unwrap()), [4, 8, 18]);
}

#[test]
fn shrinking_sessions_need_a_word() {
    let text = "{\"session_id\":\"s\",\"timestamp\":0,\"input_length\":61440,\"output_length\":2}\n\
                {\"session_id\":\"s\",\"timestamp\":9,\"input_length\":2048,\"output_length\":1}\n";
    let error = fault(text);
    assert!(error.to_string().contains("pass the context"), "{error}");
}

#[test]
fn text_rows_get_lengths_and_ids_from_their_text() {
    let long = "x".repeat(4 * 512 * 2);
    let trace = read(&format!(
        "{{\"text_input\":\"{long}tail\",\"output_length\":4,\"timestamp\":0}}\n\
         {{\"text_input\":\"{long}other\",\"output_length\":4,\"timestamp\":1}}\n\
         {{\"messages\":[{{\"role\":\"user\",\"content\":\"hello\"}}],\"output_length\":4,\"timestamp\":2}}\n"
    ));
    covered(&trace);
    assert_eq!(inputs(&trace)[..2], [1025, 1026]);
    assert_eq!(shared(&trace.records[0], &trace.records[1]), 2);
    assert!(trace.assumptions.iter().any(|a| a.contains("4 bytes")));
}

#[test]
fn agentic_rows_wait_for_others() {
    let trace = read(
        "{\"request_id\":\"a\",\"timestamp\":10,\"input_length\":9,\"output_length\":1,\"branches\":[\"b\"]}\n\
         {\"request_id\":\"b\",\"wait_for\":[\"a\"],\"delay\":5,\"tool_wait_ms\":7,\"input_length\":9,\"output_length\":1}\n",
    );
    assert_eq!(trace.dialect, Dialect::AgenticMooncake);
    let second = trace.records[1].extra.as_ref().unwrap();
    assert_eq!((second.wait_for.as_slice(), second.delay_ms), (&["a".to_string()][..], Some(12.0)));
    assert!(
        fault("{\"wait_for\":[],\"timestamp\":1,\"input_length\":9,\"output_length\":1}\n")
            .to_string()
            .contains("request_id")
    );
}

#[test]
fn dynamo_records_are_unwrapped_sorted_and_moved_to_zero() {
    let row = |id: &str, at: u64, session: &str| {
        format!(
            "{{\"schema\":\"dynamo.request.trace.v1\",\"event_type\":\"request_end\",\"event_time_unix_ms\":{},\
             \"agent_context\":{{\"session_id\":\"{session}\"}},\"request\":{{\"request_id\":\"{id}\",\"request_received_ms\":{at},\
             \"output_tokens\":4,\"total_time_ms\":100,\"replay\":{{\"trace_block_size\":64,\"input_length\":100,\"input_sequence_hashes\":[18446744073709551615,7]}}}}}}",
            at + 100
        )
    };
    let base = 1_700_000_000_000;
    let tool =
        "{\"schema\":\"dynamo.request.trace.v1\",\"event_type\":\"tool_end\",\"event_time_unix_ms\":1}";
    let text = format!(
        "{{\"timestamp\":1,\"event\":{}}}\n{tool}\n{}\n{}\n",
        row("r2", base + 500, "s"),
        row("r1", base, "t"),
        row("r3", base + 900, "s")
    );
    let trace = read(&text);
    assert_eq!((trace.dialect, trace.block_tokens), (Dialect::DynamoRequest, 64));
    assert_eq!(times(&trace), [0.0, 500.0, 900.0]);
    assert_eq!(delays(&trace), [None, None, Some(300.0)]);
    assert_eq!(trace.records[0].hash_ids[0], u64::MAX);
    let mixed = format!(
        "{}\n{}\n",
        row("a", base, "s"),
        row("b", base, "s").replace("\"agent_context\":{\"session_id\":\"s\"},", "")
    );
    assert!(fault(&mixed).to_string().contains("agent_context"));
}

#[test]
fn applied_compute_sessions_are_expanded() {
    let trace = read(
        "{\"num_turns\":2,\"input_prompt_length\":64,\"assistant_response_length\":[2,2],\"tool_call_output_length\":[2,2],\"tool_call_latency\":[0.5,1],\"final_assistant_response_length\":2}\n",
    );
    assert_eq!(inputs(&trace), [64, 68, 72]);
    assert_eq!(delays(&trace), [None, Some(500.0), Some(1000.0)]);
    covered(&trace);
    let wrong = "{\"num_turns\":2,\"input_prompt_length\":64,\"assistant_response_length\":[2],\"tool_call_output_length\":[2,2],\"tool_call_latency\":[0.5,1],\"final_assistant_response_length\":2}\n";
    assert_eq!(fault(wrong).row, Some(1));
}

#[test]
fn weka_conversations_keep_their_ids_apart() {
    let conversation = |id: &str| {
        format!(
            "{{\"id\":\"{id}\",\"block_size\":64,\"hash_id_scope\":\"local\",\"requests\":[\
             {{\"t\":0,\"type\":\"n\",\"in\":130,\"out\":5,\"hash_ids\":[1,2],\"api_time\":0.5}},\
             {{\"t\":1,\"type\":\"subagent\",\"agent_id\":\"x\",\"requests\":[{{\"t\":1.25,\"type\":\"s\",\"in\":64,\"out\":5,\"hash_ids\":[1]}}]}},\
             {{\"t\":2,\"type\":\"n\",\"in\":192,\"out\":5,\"hash_ids\":[1,2,3]}}]}}\n"
        )
    };
    let trace = read(&(conversation("c") + &conversation("d")));
    assert_eq!((trace.dialect, trace.block_tokens), (Dialect::Weka, 64));
    covered(&trace);
    assert_eq!(times(&trace), [0.0, 0.0, 1250.0, 1250.0, 2000.0, 2000.0]);
    assert_eq!(delays(&trace)[4], Some(1500.0));
    let of = |session: &str| -> Vec<&Record> {
        trace.records.iter().filter(|r| r.session_id() == Some(session)).collect()
    };
    assert_eq!(shared(of("c")[0], of("c")[1]), 2);
    assert_eq!(shared(of("c/x")[0], of("c")[0]), 1);
    assert_eq!(shared(of("c")[0], of("d")[0]), 0);
    let global = read(&(conversation("c") + &conversation("d")).replace("local", "global"));
    assert_eq!(shared(&global.records[0], &global.records[1]), 2);
}

#[test]
fn otel_spans_in_three_notations() {
    let bare = "{\"trace_id\":\"t\",\"span_id\":\"1\",\"start_time\":\"2026-01-01T00:00:00Z\",\"end_time\":\"2026-01-01T00:00:01Z\",\"attributes\":{\"gen_ai.usage.input_tokens\":700,\"gen_ai.usage.output_tokens\":3}}\n\
                {\"trace_id\":\"t\",\"span_id\":\"2\",\"start_time\":\"2026-01-01T00:00:03Z\",\"attributes\":{\"gen_ai.usage.input_tokens\":900,\"gen_ai.usage.output_tokens\":3}}\n\
                {\"trace_id\":\"t\",\"span_id\":\"3\",\"start_time\":\"2026-01-01T00:00:03Z\",\"attributes\":{}}\n";
    let trace = read(bare);
    assert_eq!((times(&trace), delays(&trace)), (vec![0.0, 3000.0], vec![None, Some(2000.0)]));
    covered(&trace);
    assert!(trace.assumptions.iter().any(|a| a.contains("1 spans without token usage")));
    let span = "{\"traceId\":\"t\",\"spanId\":\"1\",\"startTimeUnixNano\":\"1700000000000000000\",\"attributes\":[{\"key\":\"gen_ai.usage.input_tokens\",\"value\":{\"intValue\":\"70\"}},{\"key\":\"gen_ai.usage.output_tokens\",\"value\":{\"intValue\":\"3\"}}]}";
    let otlp = format!("{{\"resourceSpans\":[{{\"scopeSpans\":[{{\"spans\":[{span}]}}]}}]}}\n");
    assert_eq!(inputs(&read(&otlp)), [70]);
    assert_eq!(inputs(&read(&format!("{{\"trace_id\":\"t\",\"spans\":[{span},{span}]}}\n"))), [70, 70]);
}

#[test]
fn bailian_rows_are_seconds_and_trees() {
    let trace = read(
        "{\"chat_id\":159,\"parent_chat_id\":-1,\"timestamp\":61.114,\"input_length\":30,\"output_length\":132,\"type\":\"text\",\"turn\":1,\"hash_ids\":[1,2]}\n\
         {\"chat_id\":160,\"parent_chat_id\":159,\"timestamp\":62.5,\"input_length\":40,\"output_length\":80,\"type\":\"text\",\"turn\":2,\"hash_ids\":[1,5,6]}\n\
         {\"chat_id\":161,\"parent_chat_id\":160,\"timestamp\":63.5,\"input_length\":40,\"output_length\":80,\"type\":\"text\",\"turn\":3,\"hash_ids\":[1,5,6]}\n",
    );
    assert_eq!((trace.dialect, trace.block_tokens), (Dialect::Bailian, 16));
    assert_eq!(times(&trace), [61_114.0, 62_500.0, 63_500.0]);
    let last = trace.records[2].extra.as_ref().unwrap();
    assert_eq!((last.session_id.as_deref(), last.parent.as_deref()), (Some("159"), Some("160")));
    assert_eq!(last.unknown["type"], "text");
}

#[test]
fn multi_turn_conversations_accumulate() {
    let trace = read(
        "{\"session_id\":\"s\",\"turns\":[{\"text\":\"0123456789\",\"timestamp\":5,\"output_length\":8},{\"text\":\"more\",\"delay\":20}]}\n",
    );
    assert_eq!((times(&trace), delays(&trace)), (vec![5.0, 25.0], vec![None, Some(20.0)]));
    assert_eq!(inputs(&trace), [4, 4 + 8 + 3]);
    covered(&trace);
}

#[test]
fn tracelab_rounds_reuse_their_prefix() {
    let round = |at: &str, total: u64, prefix: u64| {
        format!(
            "{{\"session_id\":\"claude:1\",\"round_index\":0,\"input_tokens_total\":{total},\"prefix_tokens\":{prefix},\"newly_append_tokens\":{},\"output_tokens\":10,\"user\":\"u\",\
             \"timing_events\":[{{\"type\":\"user_message\",\"timestamp\":\"2026-01-01T00:00:{at}Z\"}},{{\"type\":\"text\",\"timestamp\":\"2026-01-01T00:00:{at}.5Z\"}}]}}\n",
            total - prefix
        )
    };
    let trace = read(&(round("00", 200, 0) + &round("10", 300, 200) + &round("20", 150, 64)));
    assert_eq!((trace.dialect, trace.block_tokens), (Dialect::TraceLab, 64));
    assert_eq!(inputs(&trace), [200, 300, 150]);
    assert_eq!(shared(&trace.records[0], &trace.records[1]), 3);
    assert_eq!(shared(&trace.records[1], &trace.records[2]), 1);
    assert_eq!(delays(&trace)[1], Some(9500.0));
}

#[test]
fn sagemaker_captures_take_lengths_from_the_usage() {
    let row = |data: &str, encoding: &str| {
        format!(
            "{{\"captureData\":{{\"endpointInput\":{{\"mode\":\"INPUT\",\"data\":{data},\"encoding\":\"{encoding}\"}},\"endpointOutput\":{{\"data\":\"{{\\\"usage\\\":{{\\\"prompt_tokens\\\":600,\\\"completion_tokens\\\":30}}}}\",\"encoding\":\"JSON\"}}}},\
             \"eventMetadata\":{{\"eventId\":\"e\",\"inferenceTime\":\"2026-04-29T00:03:18Z\"}},\"eventVersion\":\"0\"}}\n"
        )
    };
    let plain =
        row("\"{\\\"messages\\\":[{\\\"role\\\":\\\"user\\\",\\\"content\\\":\\\"Hi\\\"}]}\"", "JSON");
    // The body again, in base64.
    let encoded = row("\"eyJtZXNzYWdlcyI6W3sicm9sZSI6InVzZXIiLCJjb250ZW50IjoiSGkifV19\"", "BASE64");
    let trace = read(&(plain + &encoded));
    assert_eq!((inputs(&trace), trace.records[0].output_length), (vec![600, 600], 30));
    assert_eq!(times(&trace), [0.0, 0.0]);
    assert_eq!(shared(&trace.records[0], &trace.records[1]), 2);
}

#[test]
fn csv_dialects() {
    let azure = read(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n",
    );
    assert_eq!((azure.dialect, inputs(&azure)), (Dialect::AzureCsv, vec![4808, 3180]));
    assert!((azure.records[1].timestamp_ms - 52.0).abs() < 1e-3);
    covered(&azure);
    let burst = read(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,472,18,490,Conversation log\n45,ChatGPT,10,0,10,API log\n118,ChatGPT,10,5,15,API log\n",
    );
    assert_eq!((burst.dialect, times(&burst)), (Dialect::BurstGptCsv, vec![5000.0, 118_000.0]));
    assert_eq!(burst.records[0].extra.as_ref().unwrap().unknown["Model"], "GPT-4");
    assert!(burst.assumptions.iter().any(|a| a.contains("1 failed")));
    let splitwise = read(
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n0,2,0,0.25,1,600,7\n",
    );
    assert_eq!((splitwise.dialect, times(&splitwise)), (Dialect::SplitwiseCsv, vec![250.0]));
    let vidur = read("arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,7\n");
    assert_eq!((vidur.dialect, times(&vidur)), (Dialect::VidurCsv, vec![500.0]));
    let error = fault("arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,7\n0.6,many,7\n");
    assert_eq!(error.row, Some(3));
}

#[test]
fn faults_name_the_row_and_a_remedy() {
    let good = "{\"timestamp\":5,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1,2]}\n";
    for (bad, rule, part) in [
        (
            "{\"timestamp\":5,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1]}\n",
            "block-count",
            "expected 2",
        ),
        (
            "{\"timestamp\":4,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1,2]}\n",
            "time-order",
            "after 5",
        ),
        ("{\"timestamp\":5,\"input_length\":-600,\"output_length\":1}\n", "length", "-600"),
        ("{\"timestamp\":5,\"input_length\":0,\"output_length\":1}\n", "length", "0"),
        ("{\"timestamp\":5,\"output_length\":1}\n", "parse", "input_length"),
        ("{\"timestamp\":5,\"input_length\":999999999999,\"output_length\":1}\n", "bound", "bound"),
        ("not json\n", "parse", "expected"),
    ] {
        // A dozen good rows first, so that the block size is settled by them.
        let error = fault(&(good.repeat(12) + bad));
        assert_eq!((error.rule, error.row), (rule, Some(13)), "{bad}: {error}");
        assert!(error.problem.contains(part), "{error}");
        assert!(!error.remedy.is_empty());
    }
}

#[test]
fn lenient_reading_repairs_counts_and_says_so() {
    let text = "{\"timestamp\":5,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1,2]}\n\
                {\"timestamp\":3,\"input_length\":700,\"output_length\":1,\"hash_ids\":[1]}\n\
                garbage\n\
                {\"timestamp\":9,\"input_length\":700,\"output_length\":1,\"hash_ids\":[1,2,3,4]}\n";
    let options = ReadOptions { strict: false, block_tokens: Some(512), ..ReadOptions::default() };
    let trace = read_with(text, &options).unwrap();
    assert_eq!(times(&trace), [3.0, 5.0, 9.0]);
    covered(&trace);
    let said = trace.assumptions.join("\n");
    for part in [
        "2 rows had too few or too many",
        "1 rows were out of time order",
        "1 faulty rows were left out",
        "row 3",
    ] {
        assert!(said.contains(part), "{part} is not in {said}");
    }
}

/// Of a trace that is read whole all rows move, so that the gaps between them stay.
#[test]
fn negative_times_of_a_whole_trace_keep_their_gaps() {
    let row = |ms: i64| format!("{{\"timestamp\":{ms},\"input_length\":600,\"output_length\":1}}\n");
    let options = ReadOptions { strict: false, ..ReadOptions::default() };
    for (text, expected) in [
        (row(-30_000) + &row(-10_000) + &row(5_000), [0.0, 20_000.0, 35_000.0]),
        (row(5_000) + &row(-30_000) + &row(-10_000), [0.0, 20_000.0, 35_000.0]),
        (row(7) + &row(9) + &row(8), [7.0, 8.0, 9.0]),
    ] {
        let trace = read_with(&text, &options).unwrap();
        assert_eq!(times(&trace), expected);
        let moved = trace.assumptions.iter().any(|said| said.contains("the earliest time is -30000 ms"));
        assert_eq!(moved, text.contains('-'), "{:?}", trace.assumptions);
    }
    assert!(fault(&row(-1)).problem.contains("negative"));
}

/// As of a call: [classes.md](../../docs/classes.md).
#[test]
fn objectives_of_rows_are_bounded() {
    for field in ["slo_ttft_ms", "slo_tbt_ms"] {
        let row = |ms: &str| {
            format!("{{\"timestamp\":5,\"input_length\":6,\"output_length\":1,\"{field}\":{ms}}}\n")
        };
        for ms in ["1", "1.5", "86400000"] {
            read(&row(ms));
        }
        for ms in ["0", "0.5", "-1", "86400001"] {
            let error = fault(&row(ms));
            assert!(error.problem.contains(field) && error.remedy.contains("86,400,000"), "{error}");
        }
    }
}

#[test]
fn gzip_streams_and_rows_can_be_capped() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.jsonl.gz");
    let mut gz =
        flate2::write::GzEncoder::new(std::fs::File::create(&path).unwrap(), flate2::Compression::fast());
    for i in 0..50 {
        writeln!(
            gz,
            "{{\"timestamp\":{},\"input_length\":9,\"output_length\":1,\"hash_ids\":[{i}]}}",
            i * 700
        )
        .unwrap();
    }
    gz.finish().unwrap();
    assert_eq!(load(&path, &ReadOptions::default()).unwrap().records.len(), 50);
    let capped = ReadOptions { max_rows: Some(7), ..ReadOptions::default() };
    assert_eq!(open(&path, &capped).unwrap().count(), 7);
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 12]).unwrap();
    let error = load(&path, &ReadOptions::default()).unwrap_err();
    assert_eq!(error.stage, Stage::Open);
}

#[test]
fn more_disorder_than_the_bound_is_an_error_when_streaming_and_none_when_loading() {
    let mut text = String::new();
    for session in 0..20 {
        for turn in 0..5 {
            text += &format!(
                "{{\"session_id\":\"s{session}\",\"timestamp\":{},\"input_length\":9,\"output_length\":1}}\n",
                turn * 1000 + session
            );
        }
    }
    let (_directory, path) = file(&text);
    let options =
        ReadOptions { limits: Limits { reorder_rows: 10, ..Limits::default() }, ..ReadOptions::default() };
    let error = open(&path, &options).unwrap().find_map(Result::err).unwrap();
    assert!(error.remedy.contains("whole"), "{error}");
    let loaded = load(&path, &options).unwrap();
    assert!(loaded.records.is_sorted_by(|a, b| a.timestamp_ms <= b.timestamp_ms));
    assert_eq!(loaded.records.len(), 100);
}

#[test]
fn too_many_sessions_are_refused() {
    let text: String = (0..40)
        .map(|i| {
            format!("{{\"session_id\":\"s{i}\",\"timestamp\":{i},\"input_length\":9,\"output_length\":1}}\n")
        })
        .collect();
    let options = ReadOptions {
        limits: Limits { sessions: 30, ..Limits::default() },
        time_unit: Some(TimeUnit::Milliseconds),
        ..ReadOptions::default()
    };
    assert_eq!(read_with(&text, &options).unwrap_err().stage, Stage::Bound);
}
