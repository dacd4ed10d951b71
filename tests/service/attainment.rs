//! Two classes at one and a half times a cluster's capacity: every place that shows the attained share has what clients
//! outside counted.
//!
//! The configuration is the example of docs/classes.md. Its objectives alone are replaced: by some that a run of seconds
//! can miss, and that a busy machine does not blur. Two clients that share no code count the ends of their own requests by
//! class. One is of this file. The other is `baton replay --live`, whose report has to have the service's counts. The
//! report of `baton replay CAPTURE` is no count of what was served but a prediction for the same load: it has to offer
//! the same requests, class by class, and to end each of them once under the same names.
//!
//! A client and the service measure the same times at two ends of a connection. A request within a few milliseconds of
//! its objective may be in time for one and late for the other, so that each count may differ by 1 % of the class's
//! requests and one. All that the service itself shows comes from one count, and may not differ.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::http::{self, OpenAnswer};
use super::service::{Service, completion, run, until};

const KEY: &str = "sesame";
const CLASSES: [&str; 2] = ["interactive", "batch"];
/// Ends of requests, as `baton_slo_requests_total` names them.
const OUTCOMES: [&str; 6] = ["in_slo", "late_ttft", "late_tbt", "late_e2e", "refused", "failed"];

const INTERACTIVE: Objective = Objective { ttft: Duration::from_secs(2), tbt: Duration::from_millis(500) };
const BATCH: Objective = Objective { ttft: Duration::from_secs(3), tbt: Duration::from_millis(500) };

/// With this prompt the engine prefills 22 requests a second.
const PROMPT_TOKENS: u64 = 1_500;
const ENGINE: [&str; 6] = ["--engine", "timed", "--nodes", "1p1d", "--time-scale", "0.2"];
const OUTPUT_TOKENS: u64 = 12;
/// Time between two arrivals: half as many again as the engine prefills.
const ARRIVAL_GAP: Duration = Duration::from_millis(30);
/// Requests of the client of this file, every other one of each class; with admission control.
const COUNTED: u64 = 400;
/// Requests of `baton replay --live`, three of four in the class batch; without admission control.
const REPLAYED: u64 = 260;

/// The objectives of a class, as its clients know them.
struct Objective {
    ttft: Duration,
    tbt: Duration,
}

/// Requests by class and end.
type Counts = BTreeMap<(String, String), u64>;

/// The example of the documentation with other objectives, on nodes that share no prefill with decodes, with a capture.
fn config() -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/classes.md");
    let page = std::fs::read_to_string(page).unwrap();
    let example = page.split_once("```toml\n").unwrap().1.split_once("```").unwrap().0;
    let mut config = example.to_owned();
    for (documented, here) in [
        ("tbt = \"50ms\"", "tbt = \"500ms\""),
        ("ttft = \"60s\"", "ttft = \"3s\""),
        ("tbt = \"200ms\"", "tbt = \"500ms\""),
    ] {
        assert!(config.contains(documented), "the example has another {documented}: {config}");
        config = config.replace(documented, here);
    }
    assert!(config.contains("ttft = \"2s\"") && config.contains(KEY), "{config}");
    format!("{config}capture = \"capture\"\n\n[scheduler]\nlocal_prefill = false\n")
}

/// Sends a request and reads its answer as any client does; returns how it ended.
fn ask(service: &Service, class: &str, number: u64) -> &'static str {
    let (key, objective) = if class == "batch" { ("sk-jobs", &BATCH) } else { ("sk-chat", &INTERACTIVE) };
    let mut prompt = format!("{number} of {class} ");
    prompt.push_str(&"x".repeat(PROMPT_TOKENS as usize - prompt.len()));
    let mut body = completion(&prompt, OUTPUT_TOKENS as u32);
    body["stream"] = true.into();
    let key = format!("Bearer {key}");
    let headers = [("content-type", "application/json"), ("authorization", &*key)];
    let sent = Instant::now();
    let open = OpenAnswer::new(service.clients, "POST /v1/completions", &headers, &body.to_string());
    let Ok(mut open) = open else { return "failed" };
    match open.status() {
        200 => {}
        429 => return "refused",
        _ => return "failed",
    }
    let mut tokens: Vec<Instant> = Vec::new();
    loop {
        match open.event() {
            Ok(Some(end)) if end == "[DONE]" => return judged(sent, &tokens, objective),
            Ok(Some(event)) => {
                let event: Value = serde_json::from_str(&event).unwrap();
                if let Some(code) = event["error"]["code"].as_str() {
                    // An admitted request that waits may give way to another one.
                    return if code == "costly" { "refused" } else { "failed" };
                }
                if event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
                    tokens.push(Instant::now());
                }
            }
            Ok(None) | Err(_) => return "failed",
        }
    }
}

/// How a whole answer compares with the objectives, by the definitions of docs/metrics.md.
fn judged(sent: Instant, tokens: &[Instant], objective: &Objective) -> &'static str {
    let Some(first) = tokens.first() else { return "failed" };
    let mut gaps: Vec<Duration> = tokens.windows(2).map(|two| two[1] - two[0]).collect();
    gaps.sort();
    let tenth = &gaps[gaps.len() - gaps.len().div_ceil(10)..];
    if *first - sent > objective.ttft {
        "late_ttft"
    } else if !tenth.is_empty() && tenth.iter().sum::<Duration>() / tenth.len() as u32 > objective.tbt {
        "late_tbt"
    } else {
        "in_slo"
    }
}

/// Offers requests in an open loop, whatever the answers. Returns how they ended, and the whole time.
fn overload(service: &Service) -> (Counts, Duration) {
    let (counts, begun) = (Mutex::new(Counts::new()), Instant::now());
    std::thread::scope(|scope| {
        for number in 0..COUNTED {
            std::thread::sleep((ARRIVAL_GAP * number as u32).saturating_sub(begun.elapsed()));
            let counts = &counts;
            scope.spawn(move || {
                let class = CLASSES[number as usize % 2];
                let end = ask(service, class, number);
                *counts.lock().unwrap().entry((class.to_owned(), end.to_owned())).or_default() += 1;
            });
        }
    });
    (counts.into_inner().unwrap(), begun.elapsed())
}

/// The counters that Prometheus reads; those of every class and outcome are there.
fn metrics(service: &Service) -> Counts {
    let page = service.get("/metrics").ok().text;
    let lines = page.lines().filter_map(|line| line.strip_prefix("baton_slo_requests_total{class=\""));
    let count = |line: &str| {
        let (class, rest) = line.split_once("\",outcome=\"")?;
        let (outcome, count) = rest.split_once("\"} ")?;
        Some(((class.to_owned(), outcome.to_owned()), count.parse().ok()?))
    };
    let counts: Counts = lines.filter_map(count).collect();
    for class in CLASSES {
        for outcome in OUTCOMES.iter().chain(&["cancelled"]) {
            let key = (class.to_owned(), (*outcome).to_owned());
            assert!(counts.contains_key(&key), "no series {key:?}, so its first request is no increase");
        }
    }
    counts
}

fn of(counts: &Counts, class: &str, outcome: &str) -> u64 {
    counts.get(&(class.to_owned(), outcome.to_owned())).copied().unwrap_or(0)
}

fn requests(counts: &Counts, class: &str) -> u64 {
    OUTCOMES.iter().map(|outcome| of(counts, class, outcome)).sum()
}

fn share(counts: &Counts, class: &str) -> f64 {
    of(counts, class, "in_slo") as f64 / requests(counts, class) as f64
}

/// Waits until the service has counted so many requests since `before`, and returns those.
fn counted(service: &Service, before: &Counts, requests: u64) -> Counts {
    let mut after = Counts::new();
    until(Duration::from_secs(20), "all requests are counted", || {
        after = metrics(service);
        let more = |(key, count): (&(String, String), &u64)| {
            (key.clone(), count - before.get(key).copied().unwrap_or(0))
        };
        after = after.iter().map(more).collect();
        (after.values().sum::<u64>() != requests).then(|| format!("{requests} were sent: {after:?}"))
    });
    after
}

/// A client's counts are the service's, within 1 % of the class's requests and one.
#[track_caller]
fn alike(client: &Counts, service: &Counts) {
    println!("client {client:?}\nservice {service:?}");
    for class in CLASSES {
        let all = requests(client, class);
        assert_eq!(all, requests(service, class), "{class} is not counted whole: {client:?} {service:?}");
        for outcome in OUTCOMES {
            let (client, service) = (of(client, class, outcome), of(service, class, outcome));
            assert!(client.abs_diff(service) <= all / 100 + 1, "{class} {outcome}: {client}, {service}");
        }
    }
}

fn operated(service: &Service, path: &str) -> Value {
    let key = format!("Bearer {KEY}");
    http::call(service.clients, &format!("GET {path}"), &[("authorization", &key)], "").unwrap().ok().json()
}

/// The service shows these counts wherever it shows any.
#[track_caller]
fn shown_alike(service: &Service, counts: &Counts) {
    let url = format!("http://{}", service.clients);
    let (code, top, why) = run(service.folder(), &["top", "--once", "--key", KEY, "--url", &url]);
    assert_eq!(code, Some(0), "{top}{why}");
    // The page's own status is of the last second.
    std::thread::sleep(Duration::from_secs(1));
    let (status, page) = (operated(service, "/admin/status"), operated(service, "/admin/page"));
    for (at, class) in CLASSES.into_iter().enumerate() {
        for (place, shown) in [("status", &status["slo"][at]), ("page", &page["slo"][at])] {
            assert_eq!(shown["class"], class, "{place}");
            for outcome in OUTCOMES {
                assert_eq!(shown[outcome], of(counts, class, outcome), "{place}, {class} {outcome}: {shown}");
            }
            let attained = shown["attained_1h"].as_f64().unwrap();
            assert!((attained - share(counts, class)).abs() < 1e-9, "{place}, {class}: {shown}");
        }
        // The page draws the minutes, and their sum as a share.
        let minutes = page["slo"][at]["last_15m"].as_array().unwrap();
        let sum = |of: usize| minutes.iter().map(|minute| minute[of].as_u64().unwrap()).sum::<u64>();
        assert_eq!(
            (sum(0), sum(1)),
            (of(counts, class, "in_slo"), requests(counts, class)),
            "{class}: {page}"
        );
        let n = |outcome| of(counts, class, outcome);
        let percent = (share(counts, class) * 1000.0).floor() / 10.0;
        let percent = if percent >= 100.0 { "100 %".into() } else { format!("{percent:.1} %") };
        let line = format!(
            "SLO {class}: 5 min {percent}, 1 h {percent}; of {} requests {} in SLO, late TTFT {} TBT {} E2E {}, refused {}, failed {}, ",
            requests(counts, class),
            n("in_slo"),
            n("late_ttft"),
            n("late_tbt"),
            n("late_e2e"),
            n("refused"),
            n("failed"),
        );
        assert!(top.contains(&line), "'{line}' is missing: {top}");
    }
}

/// The classes of the only run of a report of `baton replay`, under the service's names.
fn reported(service: &Service, file: &str) -> Counts {
    let report = std::fs::read_to_string(service.path(file)).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    let mut counts = Counts::new();
    for class in report["runs"][0]["classes"].as_array().unwrap() {
        let name = class["name"].as_str().unwrap();
        for outcome in OUTCOMES {
            let field = if outcome == "refused" { "rejected" } else { outcome };
            counts.insert((name.to_owned(), outcome.to_owned()), class[field].as_u64().unwrap());
        }
        assert_eq!(class["requests"], requests(&counts, name), "each request has one end: {class}");
        assert!((class["attained"].as_f64().unwrap() - share(&counts, name)).abs() < 1e-9, "{class}");
    }
    counts
}

/// A trace of the same load, with class by row.
fn write_trace(service: &Service) {
    let blocks = PROMPT_TOKENS.div_ceil(512);
    let row = |number: u64| {
        let ids: Vec<u64> = (number * blocks..(number + 1) * blocks).collect();
        let class = CLASSES[usize::from(!number.is_multiple_of(4))];
        let at_ms = number * ARRIVAL_GAP.as_millis() as u64;
        json!({"timestamp": at_ms, "input_length": PROMPT_TOKENS, "output_length": OUTPUT_TOKENS, "hash_ids": ids, "class": class})
    };
    let rows: Vec<String> = (0..REPLAYED).map(|number| row(number).to_string() + "\n").collect();
    std::fs::write(service.path("trace.jsonl"), rows.concat()).unwrap();
}

/// `baton replay --live` without admission control, so that batch is late instead of refused; its report and the
/// service's counts of it.
fn replay_live(service: &Service, before: &Counts) -> (Counts, Counts) {
    let url = format!("http://{}", service.clients);
    let operate = |words: &[&str]| {
        let args = [&["policy"][..], words, &["--key", KEY, "--url", &url]].concat();
        let (code, said, why) = run(service.folder(), &args);
        assert_eq!(code, Some(0), "{said}{why}");
        said
    };
    operate(&["set", "admission=none"]);
    std::fs::write(service.path("now.toml"), operate(&["show"])).unwrap();
    write_trace(service);
    let args = ["replay", "trace.jsonl", "--live", &url, "--api-key", "sk-chat", "--config", "now.toml"];
    let args = [&args[..], &["--time-unit", "ms", "--json", "live.json"]].concat();
    let (code, said, why) = run(service.folder(), &args);
    assert_eq!(code, Some(0), "{said}{why}");
    println!("{said}");
    (reported(service, "live.json"), counted(service, before, REPLAYED))
}

/// The service's own capture, replayed: the report offers what was offered, class by class.
fn replay_capture(service: &mut Service, offered: [u64; 2]) {
    assert_eq!(service.stop(), Some(0), "{}", service.errors());
    let files: Vec<_> =
        std::fs::read_dir(service.path("capture")).unwrap().map(|file| file.unwrap().path()).collect();
    let [capture] = files.as_slice() else { panic!("one file of a trace: {files:?}") };
    let capture = capture.display().to_string();
    let args = ["replay", &capture, "--time-unit", "ms", "--config", "baton.toml", "--json", "replay.json"];
    let (code, said, why) = run(service.folder(), &args);
    assert_eq!(code, Some(0), "{said}{why}");
    let predicted = reported(service, "replay.json");
    assert_eq!(CLASSES.map(|class| requests(&predicted, class)), offered, "{predicted:?}");
}

#[test]
fn the_attained_share_of_two_classes_is_what_clients_outside_count() {
    let mut service = Service::configured(&config(), &ENGINE);
    let nothing = metrics(&service);
    assert_eq!(nothing.values().sum::<u64>(), 0, "{nothing:?}");

    let (client, took) = overload(&service);
    let first = counted(&service, &nothing, COUNTED);
    alike(&client, &first);
    shown_alike(&service, &first);
    let served = COUNTED - CLASSES.map(|class| of(&client, class, "refused")).iter().sum::<u64>();
    let offered = 1.0 / ARRIVAL_GAP.as_secs_f64();
    let load = offered * took.as_secs_f64() / served as f64;
    println!("{load:.2} times what was served");
    assert!((1.2..2.5).contains(&load), "not the load that was meant: {load}: {client:?}");
    assert!(share(&client, "interactive") > share(&client, "batch") + 0.2, "priority: {client:?}");
    assert!(of(&client, "batch", "refused") > COUNTED / 20, "no overload: {client:?}");

    let (report, second) = replay_live(&service, &first);
    alike(&report, &second);
    assert!(of(&report, "batch", "late_ttft") > REPLAYED / 20, "none is late: {report:?}");
    let mut both = first;
    second.iter().for_each(|(key, count)| *both.entry(key.clone()).or_default() += count);
    shown_alike(&service, &both);
    replay_capture(&mut service, CLASSES.map(|class| requests(&both, class)));
}
