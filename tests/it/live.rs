//! `baton replay --live` against a small scripted server.

use std::collections::HashMap;
use std::io::BufRead as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::program::{Outcome, Place};
use crate::rows::{self, BLOCK_TOKENS, Row};
use server::{Act, Call, Server};

/// Replays `rows` against `server` with further arguments; gives the outcome and the report.
#[track_caller]
fn replay(server: &Server, rows: &[Row], more: &[&str]) -> (Outcome, Value) {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(rows));
    let url = server.url();
    let args = ["replay", "t.jsonl", "--live", &url, "--json", "out.json"];
    let outcome = place.baton(&args.iter().chain(more).copied().collect::<Vec<_>>()).succeeded();
    (outcome, place.json("out.json"))
}

fn steady(count: u64, gap_ms: u64, output_tokens: u64) -> Vec<Row> {
    (0..count).map(|i| Row::full(i * gap_ms, output_tokens, [3 * i, 3 * i + 1])).collect()
}

/// Calls by row, in order of arrival.
fn of_row(calls: &[Call], row: u64) -> Vec<&Call> {
    calls.iter().filter(|c| c.row == row).collect()
}

#[test]
fn the_loop_is_open_and_keeps_the_traces_times() {
    // Answers take longer than the whole trace: a client that waits for them would be far behind.
    let server = Server::start(|_, _| Act::answer(1500, 0));
    let (_, report) = replay(&server, &steady(8, 200, 3), &["--speed", "2"]);
    let calls = server.calls();
    assert_eq!(calls.len(), 8);
    for (at, call) in calls.iter().enumerate() {
        assert_eq!(call.row, at as u64, "the order of arrival");
        let (due_ms, came_ms) = (at as f64 * 100.0, (call.at - calls[0].at).as_secs_f64() * 1e3);
        assert!((came_ms - due_ms).abs() < 350.0, "row {at} came at {came_ms} ms, not at {due_ms}");
    }
    assert_eq!(
        (report["live"]["sent"].as_u64(), report["runs"][0]["completed"].as_u64()),
        (Some(8), Some(8))
    );
    assert_eq!(report["live"]["most_in_flight"], 8);
    assert!(report["live"]["lag_ms"]["p50"].as_f64().unwrap() < 200.0, "{report:#}");
}

#[test]
fn objectives_of_a_row_are_sent_and_judge_its_answer() {
    // Every answer keeps its class's 30 s and 100 ms.
    let server = Server::start(|_, _| Act::answer(300, 30));
    let own = [
        "",
        ", \"slo_ttft_ms\": 50",
        ", \"slo_tbt_ms\": 5.2",
        ", \"slo_ttft_ms\": 29000, \"slo_tbt_ms\": 99",
    ];
    let rows = rows::text(&steady(4, 100, 4));
    let named = rows.lines().zip(own).map(|(row, own)| row.replace('}', &format!("{own}}}\n")));
    let place = Place::new();
    place.write("t.jsonl", &named.collect::<String>());
    let args = ["replay", "t.jsonl", "--live", &server.url(), "--json", "out.json"];
    place.baton(&args).succeeded();
    let class = &place.json("out.json")["runs"][0]["classes"][0];
    let counts = ["completed", "in_slo", "late_ttft", "late_tbt"].map(|name| class[name].as_u64().unwrap());
    assert_eq!(counts, [4, 2, 1, 1], "{class:#}");
    let mut calls = server.calls();
    calls.sort_by_key(|call| call.row);
    let sent: Vec<[Option<&str>; 2]> =
        calls.iter().map(|call| call.objectives.each_ref().map(|ms| ms.as_deref())).collect();
    let expected = [[None; 2], [Some("50"), None], [None, Some("5")], [Some("29000"), Some("99")]];
    assert_eq!(sent, expected, "whole milliseconds");
}

#[test]
fn prompts_share_blocks_exactly_as_the_trace_does() {
    let server = Server::start(|_, _| Act::answer(0, 0));
    let rows = rows::tree(30);
    replay(&server, &rows, &["--speed", "50"]);
    let calls = server.calls();
    let (mut id_of, mut block_of): (HashMap<Vec<u64>, u64>, HashMap<u64, Vec<u64>>) = Default::default();
    for (at, row) in rows.iter().enumerate() {
        let prompt = &of_row(&calls, at as u64)[0].prompt;
        assert_eq!(prompt.len() as u64, row.input_tokens);
        assert!(prompt.iter().all(|t| *t < 300), "a token beyond the vocabulary that the server tells");
        assert!(prompt.iter().any(|t| *t >= 256), "the told vocabulary is used");
        for (block, id) in prompt.chunks(BLOCK_TOKENS as usize).zip(&row.blocks) {
            if block.len() < BLOCK_TOKENS as usize {
                let whole = block_of.get(id).map_or(block, |whole| &whole[..block.len()]);
                assert_eq!(whole, block, "a cut block is the beginning of the whole one");
                continue;
            }
            assert_eq!(*block_of.entry(*id).or_insert_with(|| block.to_vec()), block, "id {id} changed");
            assert_eq!(*id_of.entry(block.to_vec()).or_insert(*id), *id, "two ids, one block");
            id_of.keys().filter(|other| *other != block).for_each(|other| {
                assert_ne!(other[..8], block[..8], "different ids differ at once");
            });
        }
    }
    assert!(block_of.len() > 30, "{} blocks were compared", block_of.len());
}

#[test]
fn a_call_asks_for_exactly_the_rows_answer() {
    let server = Server::start(|_, _| Act::answer(0, 0));
    let (_, report) = replay(&server, &steady(2, 10, 7), &["--api-key", "sesame"]);
    let call = &server.calls()[1];
    assert_eq!(
        (call.path.as_str(), call.authorization.as_deref()),
        ("/v1/completions", Some("Bearer sesame"))
    );
    let expected = [("max_tokens", Value::from(7)), ("ignore_eos", true.into()), ("stream", true.into())];
    for (name, value) in expected {
        assert_eq!(call.body[name], value, "{name}");
    }
    assert_eq!(
        (&call.body["model"], &call.body["stream_options"]["include_usage"]),
        (&"tiny".into(), &true.into())
    );
    assert_eq!((&report["live"]["model"], &report["live"]["vocab_tokens"]), (&"tiny".into(), &300.into()));
    let (_, report) = replay(&server, &steady(1, 10, 1), &["--vocab", "256", "--model", "other"]);
    assert_eq!((&report["live"]["model"], &report["live"]["vocab_tokens"]), (&"other".into(), &256.into()));
    assert!(server.calls()[2].prompt.iter().all(|t| *t < 256));
}

/// Each class may have a key of its own; what names no class, or one without a key, has the key of all.
#[test]
fn a_class_has_its_own_key() {
    let server = Server::start(|_, _| Act::answer(0, 0));
    let place = Place::new();
    let row = |at: u64, class: &str| {
        format!(r#"{{"timestamp": {at}, "input_length": 16, "output_length": 1, "hash_ids": [1]{class}}}"#)
            + "\n"
    };
    let classes = ["", r#", "class": "batch""#, r#", "class": "chat""#];
    let text: String = (0u64..).zip(classes).map(|(at, class)| row(at, class)).collect();
    place.write("t.jsonl", &text);
    let keys = ["--api-key", "all", "--class-key", "batch=sk=b"];
    let args = ["replay", "t.jsonl", "--block-tokens", "16", "--live"];
    let url = server.url();
    place.baton(&[&args[..], &[&url], &keys].concat()).succeeded();
    let calls = server.calls();
    let shown = [0, 1, 2].map(|row| of_row(&calls, row)[0].authorization.as_deref());
    assert_eq!(shown, [Some("Bearer all"), Some("Bearer sk=b"), Some("Bearer all")]);
    for (key, code, word) in [
        ("bach=b", 1, "it has: batch, chat"),
        ("batch", 2, "like batch=sk-batch"),
        ("batch=", 2, "like batch=sk-batch"),
        ("batch=a\nb", 2, "no header may"),
    ] {
        let refused = place.baton(&[&args[..], &[&url, "--class-key", key]].concat());
        refused.refused(code, &["--class-key", word]);
    }
    let twice = ["--class-key", "batch=a", "--class-key", "batch=b"];
    place.baton(&[&args[..], &[&url], &twice].concat()).refused(1, &["given twice"]);
}

#[test]
fn a_refused_client_comes_back_when_told() {
    let act = |row: u64, attempt: u64| match (row, attempt) {
        (1, 1) => Act::Refuse { status: 429, wait_ms: Some(600) },
        (2, 1 | 2) => Act::Refuse { status: 503, wait_ms: Some(100) },
        (3, _) => Act::Refuse { status: 429, wait_ms: None },
        _ => Act::answer(0, 0),
    };
    let server = Server::start(act);
    let (outcome, report) = replay(&server, &steady(4, 10, 2), &["--obey-retry-after", "2"]);
    let calls = server.calls();
    let one = of_row(&calls, 1);
    assert_eq!((one.len(), of_row(&calls, 2).len(), of_row(&calls, 3).len()), (2, 3, 1));
    let waited = one[1].at - one[0].at;
    assert!(waited >= Duration::from_millis(600), "came back after {waited:?}");
    assert!(waited < Duration::from_millis(1400), "retry-after-ms goes before retry-after: {waited:?}");
    let run = &report["runs"][0];
    let count = |name: &str| run[name].as_u64().unwrap();
    assert_eq!((count("completed"), count("rejected"), count("refusals"), count("retries")), (3, 1, 4, 3));
    assert_eq!(run["readmitted"], 2);
    assert_eq!(run["refusals_by_reason"], serde_json::json!([["ttft", 4]]));
    // TTFT of the one that waited 600 ms counts from its last offer.
    assert!(run["ttft_s"]["max"].as_f64().unwrap() < 0.6, "{run:#}");
    let promises = &report["live"]["promises"];
    for (name, expected) in [("refusals", 4), ("told", 3), ("obeyed", 3), ("kept", 2), ("refused_again", 1)] {
        assert_eq!(promises[name], expected, "{name} of {promises:#}");
    }
    assert_eq!(report["live"]["statuses"], serde_json::json!({"200": 3, "429": 2, "503": 2}));
    assert!(outcome.stdout.contains("2 admitted and 1 refused again"), "{}", outcome.stdout);
    let (_, report) = replay(&Server::start(act), &steady(4, 10, 2), &[]);
    assert_eq!((&report["runs"][0]["rejected"], &report["runs"][0]["retries"]), (&3.into(), &0.into()));
}

/// As the service counts them: by the reason, whatever the status, and also where the status went out before.
#[test]
fn a_refusal_is_one_at_any_status_and_in_a_stream() {
    let act = |row: u64, _| match row {
        0 => Act::StreamError { tokens: 0, code: "costly" },
        1 => Act::Status(400, "objective_unreachable"),
        2 => Act::Status(503, "no_instance"),
        // What begins to be answered was not refused, and a wrong call is none of admission's.
        3 => Act::StreamError { tokens: 2, code: "costly" },
        4 => Act::Status(400, "invalid_value"),
        _ => Act::answer(0, 0),
    };
    let server = Server::start(act);
    let (_, report) = replay(&server, &steady(6, 5, 3), &["--obey-retry-after", "1"]);
    let run = &report["runs"][0];
    let counts = ["completed", "rejected", "failed", "retries"].map(|name| run[name].as_u64().unwrap());
    assert_eq!(counts, [1, 3, 2, 0], "{report:#}");
    let reasons = serde_json::json!([["costly", 1], ["objective_unreachable", 1], ["no_instance", 1]]);
    let sorted = |reasons: &Value| {
        let mut all: Vec<String> = reasons.as_array().unwrap().iter().map(Value::to_string).collect();
        all.sort();
        all
    };
    assert_eq!(sorted(&run["refusals_by_reason"]), sorted(&reasons), "{run:#}");
}

#[test]
fn every_way_of_failing_is_counted_under_its_name() {
    let act = |row: u64, _| match row {
        0 => Act::Truncate { tokens: 2 },
        1 => Act::StreamError { tokens: 1, code: "decode_lost" },
        2 => Act::Status(500, "boom"),
        3 => Act::Silence,
        4 => Act::NoStream,
        5 => Act::Nothing,
        6 => Act::Garbage,
        7 => Act::Hangup { tokens: 1 },
        _ => Act::answer(0, 0),
    };
    let server = Server::start(act);
    let (outcome, report) = replay(&server, &steady(9, 5, 3), &["--timeout", "2"]);
    let run = &report["runs"][0];
    assert_eq!((&run["failed"], &run["completed"], &run["requests"]), (&8.into(), &1.into(), &9.into()));
    let expected = serde_json::json!({
        "truncated: the stream ended before [DONE]": 1,
        "truncated: the connection broke": 1,
        "stream: decode_lost": 1,
        "500: boom": 1,
        "timeout": 1,
        "answer: not an event stream": 1,
        "answer: an event that cannot be read": 1,
        "no_token": 1,
    });
    assert_eq!(report["live"]["errors"], expected, "{report:#}");
    assert!(outcome.stdout.contains("stream: decode_lost: 1"), "{}", outcome.stdout);
}

#[test]
fn a_replay_of_which_every_request_failed_has_failed() {
    let server = Server::start(|_, _| Act::Status(500, "boom"));
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&steady(3, 5, 3)));
    let args = ["replay", "t.jsonl", "--live", &server.url(), "--json", "out.json"];
    place.baton(&args).refused(1, &["every request failed", "server's log"]);
    let report = place.json("out.json");
    assert_eq!(report["live"]["errors"], serde_json::json!({"500: boom": 3}), "the report is there");
}

#[test]
fn figures_are_those_of_the_answers() {
    let server = Server::start(|_, _| Act::answer(300, 100));
    let config = "[[scheduler.classes]]\nname = 'a'\nttft_us = 5000000\ntbt_us = 5000000\n";
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&steady(3, 50, 4)));
    place.write("c.toml", config);
    let url = server.url();
    let args = ["replay", "t.jsonl", "--live", &url, "--config", "c.toml", "--compare", "--format", "json"];
    let more = ["--html", "out.html", "--requests", "out.jsonl", "--require", "goodput>=1"];
    let outcome = place.baton(&args.iter().chain(&more).copied().collect::<Vec<_>>()).succeeded();
    let report = outcome.json();
    let run = &report["runs"][0];
    let between = |pointer: &str, low: f64, high: f64| {
        let value = run.pointer(pointer).and_then(Value::as_f64).unwrap_or(f64::NAN);
        assert!((low..high).contains(&value), "{pointer} = {value}: {run:#}");
    };
    between("/ttft_s/p50", 0.29, 1.0);
    between("/tbt_ms/p50", 95.0, 500.0);
    between("/itl_ms_mean", 90.0, 400.0);
    // The server counts the first block as cached.
    between("/token_hit_ratio", 0.49, 0.51);
    between("/block_hit_ratio", 0.49, 0.51);
    assert_eq!(
        (&run["output_tokens"], &run["in_slo"], &run["policy"]),
        (&12.into(), &3.into(), &"live".into())
    );
    let usage = &report["live"]["usage"];
    assert_eq!(usage["cached_tokens"], 3 * BLOCK_TOKENS);
    assert_eq!((&usage["missing"], &usage["other_prompt_length"]), (&0.into(), &0.into()));
    assert_eq!((&report["live"]["wrong_length"], &report["live"]["merged_tokens"]), (&0.into(), &0.into()));
    compared(&report);
    let page = std::fs::read_to_string(place.path("out.html")).unwrap();
    assert!(page.contains("Live replay") && page.contains(&url), "the page names the run");
    let lines = std::fs::read_to_string(place.path("out.jsonl")).unwrap();
    assert_eq!(lines.lines().filter(|l| l.contains("\"status\":\"completed\"")).count(), 3);
}

/// What was sent live and what the simulator makes of the same trace can be compared row by row.
#[test]
fn requests_have_their_rows_live_and_simulated() {
    let server = Server::start(|_, _| Act::answer(20, 1));
    let place = Place::new();
    let trace = [Row::full(0, 3, [0, 1, 2]), Row::full(5, 4, [3]), Row::full(10, 2, [4, 5])];
    place.write("t.jsonl", &rows::text(&trace));
    let url = server.url();
    for more in [&["--live", url.as_str()][..], &[]] {
        let args = ["replay", "t.jsonl", "--requests", "out.jsonl"];
        place.baton(&[&args, more].concat()).succeeded();
        let lines = std::fs::read_to_string(place.path("out.jsonl")).unwrap();
        let rows: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let read: Vec<_> =
            rows.iter().map(|row| (row["row"].as_u64(), row["input_tokens"].as_u64())).collect();
        assert_eq!(read, [(Some(0), Some(1536)), (Some(1), Some(512)), (Some(2), Some(1024))], "{more:?}");
    }
}

/// Predicted and measured stand side by side, and the error follows from them.
#[track_caller]
fn compared(report: &Value) {
    let rows = report["compare"].as_array().unwrap();
    for name in ["ttft", "tbt"] {
        let unit = if name == "ttft" { "s" } else { "ms" };
        for which in ["mean", "p50", "p90", "p99"] {
            let figure = format!("{name}_{which}_{unit}");
            let row =
                rows.iter().find(|r| r["figure"] == figure.as_str()).unwrap_or_else(|| panic!("no {figure}"));
            let [predicted, measured, error] =
                ["predicted", "measured", "relative_error"].map(|key| row[key].as_f64().unwrap());
            assert_eq!(predicted, report["runs"][1][format!("{name}_{unit}")][which].as_f64().unwrap());
            assert_eq!(measured, report["runs"][0][format!("{name}_{unit}")][which].as_f64().unwrap());
            assert!((error - (predicted - measured) / measured).abs() < 1e-9);
        }
    }
}

#[test]
fn a_cap_on_what_is_in_flight_is_kept_and_said() {
    let server = Server::start(|_, _| Act::answer(200, 0));
    let (outcome, report) = replay(&server, &steady(6, 1, 1), &["--concurrency-cap", "2"]);
    assert!(server.most_at_once() <= 2, "{} at once", server.most_at_once());
    assert_eq!((&report["live"]["most_in_flight"], &report["live"]["late"]), (&2.into(), &true.into()));
    assert!(report["live"]["waited_for_cap"].as_u64().unwrap() >= 2, "{report:#}");
    assert!(
        outcome.stdout.contains("WARNING") && outcome.stdout.contains("--concurrency-cap"),
        "{outcome:?}"
    );
}

#[test]
fn a_stop_reports_what_there_is() {
    let server = Server::start(|row, _| if row == 0 { Act::answer(0, 0) } else { Act::Silence });
    let place = Place::new();
    place.write(
        "t.jsonl",
        &rows::text(&steady(3, 20, 1).into_iter().chain([Row::full(3_600_000, 1, [99])]).collect::<Vec<_>>()),
    );
    let child = Command::new(env!("CARGO_BIN_EXE_baton"))
        .current_dir(place.path(""))
        .args(["replay", "t.jsonl", "--live", &server.url(), "--format", "json"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    assert!(server.wait_for_calls(3), "the first rows were not sent");
    std::thread::sleep(Duration::from_millis(300));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let report: Value = serde_json::from_slice(&ended.stdout).unwrap();
    let run = &report["runs"][0];
    assert_eq!((&run["requests"], &run["completed"], &run["cancelled"]), (&3.into(), &1.into(), &2.into()));
    assert_eq!(report["live"]["interrupted"], true);
}

#[test]
fn what_cannot_work_is_said_before_any_load() {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&steady(1, 1, 1)));
    let refused = |more: &[&str], code: i32, words: &[&str]| {
        place
            .baton(&["replay", "t.jsonl"].iter().chain(more).copied().collect::<Vec<_>>())
            .refused(code, words);
    };
    refused(&["--live", "http://127.0.0.1:1"], 1, &["/v1/models", "--model", "Connection refused"]);
    refused(&["--live", "ftp://x"], 1, &["http://host:8000"]);
    refused(&["--live", "http://127.0.0.1:1", "--speed", "1,2"], 1, &["one --speed"]);
    refused(&["--live", "http://127.0.0.1:1", "--policy", "baton"], 2, &["--policy"]);
    refused(&["--compare"], 2, &["--live"]);
    refused(&["--window", "5..2"], 2, &["600..1200"]);
    refused(&["--window", "5..9"], 1, &["no rows"]);
}

/// A server of `baton bench`, ended with the test.
struct Serving {
    child: std::process::Child,
    url: String,
}

impl Serving {
    fn start(args: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_baton"))
            .arg("bench")
            .args(args)
            .arg("--until-stdin-ends")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").expect("it says where it listens").to_owned();
        Self { child, url }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let ended = self.child.wait().unwrap();
        assert!(ended.success() || std::thread::panicking(), "it did not end with its input: {ended}");
    }
}

#[test]
fn a_router_is_measured_beside_a_plain_proxy() {
    let upstream = Serving::start(&["upstream"]);
    let router = Serving::start(&["proxy", "--to", &upstream.url]);
    let pid = router.child.id().to_string();
    let place = Place::new();
    let args = ["bench", "router", "--url", &router.url, "--direct-url", &upstream.url, "--pid", &pid];
    let more = ["--reference", "--duration", "1", "--rounds", "1", "--rate", "40", "--large-rate", "10"];
    let last = ["--stream-rate", "5", "--stream-tokens", "30", "--json", "out.json"];
    let all: Vec<&str> = args.iter().chain(&more).chain(&last).copied().collect();
    let outcome = place.baton(&all).succeeded();
    assert!(outcome.stdout.contains("large, prefix seen"), "{}", outcome.stdout);
    let report = place.json("out.json");
    let figures = report["figures"].as_array().unwrap();
    assert_eq!(figures.len(), 5 * 4, "five loads on four sides");
    for f in figures {
        assert_eq!(f["errors"], 0, "{f}");
        let expected = match f["load"].as_str().unwrap() {
            "small" => 40,
            "stream" => 5,
            _ => 10,
        };
        assert_eq!(f["answered"], expected, "{f}");
        assert!(f["first_byte_p50_us"].as_f64().unwrap() > 0.0, "{f}");
        assert_eq!(f["cpu_us_per_call"].is_null(), f["side"] == "direct", "{f}");
        // Thirty tokens, their usage and the end mark.
        assert_eq!(f["events"], if f["load"] == "stream" { 5 * 32 } else { 0 }, "{f}");
    }
    for added in report["added"].as_array().unwrap() {
        let of = |side: &Value| {
            let of_side = |f: &&Value| f["side"] == *side && f["load"] == added["load"];
            figures.iter().find(of_side).unwrap()["first_byte_p50_us"].as_f64().unwrap()
        };
        assert_eq!(added["first_byte_p50_us"].as_f64().unwrap(), of(&added["side"]) - of(&added["over"]));
    }
    assert_eq!(report["added"].as_array().unwrap().len(), 10);
}

#[test]
fn a_bench_of_nothing_says_so() {
    let place = Place::new();
    place.baton(&["bench", "router", "--url", "http://127.0.0.1:1"]).refused(1, &["/v1/models"]);
    let silent =
        ["bench", "router", "--url", "http://127.0.0.1:1", "--model", "m", "--duration", "1", "--rate", "5"];
    let slow = ["--large-rate", "1", "--stream-rate", "1", "--rounds", "1"];
    let all: Vec<&str> = silent.iter().chain(&slow).copied().collect();
    place.baton(&all).refused(1, &["answered nothing"]);
    let pid = [&all[..], &["--pid", "4294967295"]].concat();
    place.baton(&pid).refused(1, &["--pid"]);
}

/// A completion server that answers each call as a script says.
mod server {
    use std::convert::Infallible;
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use bytes::Bytes;
    use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
    use hyper::body::{Frame, Incoming};
    use hyper::service::service_fn;
    use hyper::{Request, Response};
    use hyper_util::rt::TokioIo;
    use parking_lot::Mutex;
    use serde_json::{Value, json};
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::ReceiverStream;

    /// The server's reaction to a call.
    #[derive(Clone, Copy, Debug)]
    pub enum Act {
        /// Answer as many tokens as asked for.
        Answer { first_ms: u64, gap_ms: u64 },
        /// Refuse; `wait_ms` goes into `retry-after-ms`, a rounder value into `retry-after`.
        Refuse { status: u16, wait_ms: Option<u64> },
        /// End the stream in order, but too early.
        Truncate { tokens: u64 },
        /// Break the connection in the middle.
        Hangup { tokens: u64 },
        /// Some tokens, then an error of this code in the stream.
        StreamError { tokens: u64, code: &'static str },
        /// An error by status and code.
        Status(u16, &'static str),
        /// Never answer.
        Silence,
        /// A whole answer where a stream was wanted.
        NoStream,
        /// A stream of no token.
        Nothing,
        /// An event that is not JSON.
        Garbage,
    }

    impl Act {
        /// An answer with its first token after `first_ms` and `gap_ms` between tokens.
        pub fn answer(first_ms: u64, gap_ms: u64) -> Self {
            Self::Answer { first_ms, gap_ms }
        }
    }

    /// A call that came.
    #[derive(Clone, Debug)]
    pub struct Call {
        /// When the call came.
        pub at: Instant,
        /// Number of the row in its request id.
        pub row: u64,
        /// Its path.
        pub path: String,
        /// Its key.
        pub authorization: Option<String>,
        /// The TTFT and the TBT that its headers name.
        pub objectives: [Option<String>; 2],
        /// Its body.
        pub body: Value,
        /// Its prompt.
        pub prompt: Vec<u64>,
    }

    type Script = dyn Fn(u64, u64) -> Act + Send + Sync;

    #[derive(Default)]
    struct CallLog {
        calls: Mutex<Vec<Call>>,
        now: AtomicU64,
        most: AtomicU64,
    }

    /// The server; its threads end with it.
    pub struct Server {
        address: SocketAddr,
        seen: Arc<CallLog>,
        _runtime: tokio::runtime::Runtime,
    }

    type Body = BoxBody<Bytes, std::io::Error>;

    impl Server {
        /// Serves on a free port; `act` says what to do with a row's first, second, ... attempt.
        pub fn start(act: impl Fn(u64, u64) -> Act + Send + Sync + 'static) -> Self {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
            let address = listener.local_addr().unwrap();
            let (seen, script): (Arc<CallLog>, Arc<Script>) = (Arc::default(), Arc::new(act));
            let shared = Arc::clone(&seen);
            runtime.spawn(async move {
                loop {
                    let (stream, _) = listener.accept().await.unwrap();
                    stream.set_nodelay(true).unwrap();
                    let (seen, script) = (Arc::clone(&shared), Arc::clone(&script));
                    let service = service_fn(move |request| {
                        let (seen, script) = (Arc::clone(&seen), Arc::clone(&script));
                        async move { Ok::<_, Infallible>(serve(request, &seen, &*script).await) }
                    });
                    tokio::spawn(
                        hyper::server::conn::http1::Builder::new()
                            .serve_connection(TokioIo::new(stream), service),
                    );
                }
            });
            Self { address, seen, _runtime: runtime }
        }

        /// Where it listens.
        pub fn url(&self) -> String {
            format!("http://{}", self.address)
        }

        /// The calls so far, in order of arrival.
        pub fn calls(&self) -> Vec<Call> {
            self.seen.calls.lock().clone()
        }

        /// Most calls that were being answered at a time.
        pub fn most_at_once(&self) -> u64 {
            self.seen.most.load(Ordering::SeqCst)
        }

        /// Waits until `count` calls have come; false when they do not within a minute.
        pub fn wait_for_calls(&self, count: usize) -> bool {
            let started = Instant::now();
            while started.elapsed() < Duration::from_secs(60) {
                if self.seen.calls.lock().len() >= count {
                    return true;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            false
        }
    }

    fn whole(status: u16, body: &Value) -> Response<Body> {
        let body = Full::new(Bytes::from(body.to_string())).map_err(|never| match never {}).boxed();
        Response::builder().status(status).header("content-type", "application/json").body(body).unwrap()
    }

    async fn serve(request: Request<Incoming>, seen: &Arc<CallLog>, script: &Script) -> Response<Body> {
        if request.uri().path() == "/v1/models" {
            return whole(
                200,
                &json!({"data": [{"id": "tiny", "vocab_size": 300, "max_model_len": 1_000_000}]}),
            );
        }
        let at = Instant::now();
        let header = |name: &str| request.headers().get(name).map(|v| v.to_str().unwrap().to_owned());
        let row = header("x-request-id").unwrap().strip_prefix("replay-").unwrap().parse().unwrap();
        let (path, authorization) = (request.uri().path().to_owned(), header("authorization"));
        let objectives = ["x-slo-ttft-ms", "x-slo-tbt-ms"].map(header);
        let body: Value =
            serde_json::from_slice(&request.into_body().collect().await.unwrap().to_bytes()).unwrap();
        let prompt = body["prompt"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap()).collect();
        let (tokens, prompt_tokens) =
            (body["max_tokens"].as_u64().unwrap(), body["prompt"].as_array().unwrap().len());
        let attempt = {
            let mut calls = seen.calls.lock();
            calls.push(Call { at, row, path, authorization, objectives, body, prompt });
            calls.iter().filter(|c| c.row == row).count() as u64
        };
        match script(row, attempt) {
            Act::Answer { first_ms, gap_ms } => {
                stream(seen, Course { first_ms, gap_ms, tokens, end: End::Whole { prompt_tokens } })
            }
            Act::Truncate { tokens } => {
                stream(seen, Course { first_ms: 0, gap_ms: 0, tokens, end: End::Early })
            }
            Act::Hangup { tokens } => {
                stream(seen, Course { first_ms: 0, gap_ms: 0, tokens, end: End::Break })
            }
            Act::StreamError { tokens, code } => {
                stream(seen, Course { first_ms: 0, gap_ms: 0, tokens, end: End::Error(code) })
            }
            Act::Garbage => stream(seen, Course { first_ms: 0, gap_ms: 0, tokens: 1, end: End::Garbage }),
            Act::Nothing => stream(seen, Course { first_ms: 0, gap_ms: 0, tokens: 0, end: End::Done }),
            Act::NoStream => whole(200, &json!({"choices": [{"text": "a"}]})),
            Act::Status(status, code) => {
                whole(status, &json!({"error": {"message": "no", "type": "x", "code": code}}))
            }
            Act::Silence => std::future::pending().await,
            Act::Refuse { status, wait_ms } => refusal(status, wait_ms),
        }
    }

    fn refusal(status: u16, wait_ms: Option<u64>) -> Response<Body> {
        let mut response =
            whole(status, &json!({"error": {"message": "full", "type": "overloaded", "code": "ttft"}}));
        if let Some(ms) = wait_ms {
            response.headers_mut().insert("retry-after-ms", ms.into());
            response.headers_mut().insert("retry-after", (ms.div_ceil(1000) + 1).into());
        }
        response
    }

    /// How a stream goes.
    struct Course {
        first_ms: u64,
        gap_ms: u64,
        tokens: u64,
        end: End,
    }

    /// How it ends.
    enum End {
        Whole { prompt_tokens: usize },
        Done,
        Early,
        Break,
        Error(&'static str),
        Garbage,
    }

    fn stream(seen: &Arc<CallLog>, script: Course) -> Response<Body> {
        let (send, receive) = mpsc::channel::<Result<Frame<Bytes>, std::io::Error>>(16);
        let seen = Arc::clone(seen);
        let now = seen.now.fetch_add(1, Ordering::SeqCst) + 1;
        seen.most.fetch_max(now, Ordering::SeqCst);
        tokio::spawn(async move {
            let event = |text: String| Ok(Frame::data(Bytes::from(format!("data: {text}\n\n"))));
            for at in 0..script.tokens {
                let pause_ms = if at == 0 { script.first_ms } else { script.gap_ms };
                tokio::time::sleep(Duration::from_millis(pause_ms)).await;
                let last = at + 1 == script.tokens;
                let finish = if last { json!("length") } else { Value::Null };
                let chunk =
                    json!({"choices": [{"index": 0, "text": "a", "finish_reason": finish}], "usage": null});
                if send.send(event(chunk.to_string())).await.is_err() {
                    break;
                }
            }
            // Counted out before the client can see the end, so that its next call is never one too many.
            seen.now.fetch_sub(1, Ordering::SeqCst);
            for item in ending(&script) {
                let text = match item {
                    Ok(text) => event(text),
                    Err(error) => Err(error),
                };
                if send.send(text).await.is_err() {
                    return;
                }
            }
        });
        let body = BodyExt::boxed(StreamBody::new(ReceiverStream::new(receive)));
        Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
    }

    fn ending(script: &Course) -> Vec<Result<String, std::io::Error>> {
        match script.end {
            End::Whole { prompt_tokens } => {
                let details = json!({"cached_tokens": 512});
                let usage = json!({"prompt_tokens": prompt_tokens, "completion_tokens": script.tokens, "prompt_tokens_details": details});
                vec![Ok(json!({"choices": [], "usage": usage}).to_string()), Ok("[DONE]".into())]
            }
            End::Done => vec![Ok("[DONE]".into())],
            End::Early => vec![],
            End::Break => vec![Err(std::io::Error::other("pulled"))],
            End::Error(code) => {
                vec![Ok(json!({"error": {"message": "m", "type": "t", "code": code}}).to_string())]
            }
            End::Garbage => vec![Ok("{not json".into()), Ok("[DONE]".into())],
        }
    }
}
