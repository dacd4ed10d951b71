//! `baton replay`: the report and what must always be true of it.

use crate::program::Place;
use crate::rows::{self, Row};
use serde_json::Value;

const COUNTS: [&str; 8] = [
    "requests",
    "completed",
    "rejected",
    "failed",
    "in_slo",
    "input_tokens",
    "input_tokens_in_slo",
    "wasted_prefill_tokens",
];
const RATIOS: [&str; 2] = ["block_hit_ratio", "oscillation_index"];
const SUMMARIES: [&str; 3] = ["ttft_s", "tbt_ms", "retry_after_s"];

/// The runs of a replay of `rows` with further arguments.
#[track_caller]
fn runs(rows: &[Row], more: &[&str]) -> Vec<Value> {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(rows));
    let args: Vec<&str> = ["replay", "t.jsonl", "--json", "out.json"].iter().chain(more).copied().collect();
    place.baton(&args).succeeded();
    let report = place.json("out.json");
    report["runs"].as_array().unwrap_or_else(|| panic!("no runs in {report:#}")).clone()
}

#[track_caller]
fn number(run: &Value, name: &str) -> f64 {
    run.pointer(name).and_then(Value::as_f64).unwrap_or_else(|| panic!("{name} is not a number: {run:#}"))
}

#[track_caller]
fn count(run: &Value, name: &str) -> u64 {
    run[name].as_u64().unwrap_or_else(|| panic!("{name} is not a count: {run:#}"))
}

#[test]
fn a_run_has_every_key_with_its_type() {
    let runs = runs(&rows::easy(), &["--policy", "baton"]);
    assert_eq!(runs.len(), 1);
    let run = &runs[0];
    for name in COUNTS {
        count(run, name);
    }
    for name in RATIOS {
        assert!(number(run, &format!("/{name}")) >= 0.0, "{name} is negative: {run:#}");
    }
    for name in SUMMARIES {
        // A figure of nothing (retry_after_s with no rejection) is null, but its key is there.
        for part in ["mean", "p50", "p90", "p99"] {
            let value = run[name].get(part).unwrap_or_else(|| panic!("{name}.{part} is missing: {run:#}"));
            assert!(value.is_number() || value.is_null(), "{name}.{part} is {value}");
        }
    }
    assert_eq!(run["policy"], "baton");
    assert!(run["admission"].is_string(), "{run:#}");
    assert!((number(run, "/speed") - 1.0).abs() < 1e-9, "{run:#}");
    assert!(number(run, "/cpu_s") >= 0.0, "{run:#}");
}

#[test]
fn every_request_ends_once_and_every_token_is_counted() {
    for rows in [rows::easy(), rows::tree(150), rows::flood()] {
        for run in runs(&rows, &["--policy", "random,mooncake,baton"]) {
            let ended = count(&run, "completed") + count(&run, "rejected") + count(&run, "failed");
            assert_eq!(ended, rows.len() as u64, "{run:#}");
            assert_eq!(count(&run, "requests"), rows.len() as u64, "{run:#}");
            assert_eq!(
                count(&run, "input_tokens"),
                rows.iter().map(|row| row.input_tokens).sum::<u64>(),
                "{run:#}"
            );
            assert!(count(&run, "in_slo") <= count(&run, "completed"), "{run:#}");
            assert!(count(&run, "input_tokens_in_slo") <= count(&run, "input_tokens"), "{run:#}");
            assert!(number(&run, "/block_hit_ratio") <= 1.0, "{run:#}");
        }
    }
}

#[test]
fn each_service_class_has_its_figures_and_they_add_up() {
    let place = Place::new();
    let row = |i: u64| {
        let class = if i.is_multiple_of(3) { "batch" } else { "chat" };
        format!(
            "{{\"timestamp\": {}, \"input_length\": 20480, \"output_length\": 50, \"hash_ids\": {:?}, \"class\": \"{class}\"}}\n",
            20 * i,
            (1_000 * i + 1..1_000 * i + 41).collect::<Vec<_>>(),
        )
    };
    place.write("t.jsonl", &(0..300).map(row).collect::<String>());
    place.write(
        "two.toml",
        "[[scheduler.classes]]\nname = 'chat'\nttft_us = 5000000\n\
         [[scheduler.classes]]\nname = 'batch'\nttft_us = 30000000\ntarget_permille = 900\n",
    );
    let args = [
        "replay",
        "t.jsonl",
        "--config",
        "two.toml",
        "--json",
        "out.json",
        "--html",
        "out.html",
        "--policy",
        "baton,random",
    ];
    let shown = place.baton(&args).succeeded();
    for word in ["chat", "batch", "99.5 %", "90.0 %", "late TTFT", "late TBT"] {
        assert!(shown.stdout.contains(word), "'{word}' is missing: {shown:#?}");
    }
    let page = std::fs::read_to_string(place.path("out.html")).unwrap();
    assert!(page.contains("<h3>Service classes</h3>"), "no table of classes on the page");
    for run in place.json("out.json")["runs"].as_array().unwrap() {
        let classes = run["classes"].as_array().unwrap_or_else(|| panic!("no classes: {run:#}"));
        let sum = |name: &str| classes.iter().map(|class| count(class, name)).sum::<u64>();
        for name in ["requests", "completed", "in_slo", "rejected", "failed", "cancelled"] {
            assert_eq!(sum(name), count(run, name), "{name} of {run:#}");
        }
        assert_eq!((count(&classes[0], "requests"), count(&classes[1], "requests")), (200, 100), "{run:#}");
        for (class, target) in classes.iter().zip([0.995, 0.9]) {
            assert!((number(class, "/target") - target).abs() < 1e-9, "{run:#}");
        }
        assert_eq!(sum("completed") - sum("late_ttft"), count(run, "ttft_ok"), "{run:#}");
        let late = ["late_ttft", "late_tbt", "late_e2e"].map(sum).iter().sum::<u64>();
        assert_eq!(sum("completed") - late, sum("in_slo"), "late by one objective: {run:#}");
        assert!(sum("rejected") + sum("late_ttft") > 0, "an overload: {run:#}");
    }
}

#[test]
fn a_bound_is_reported_with_the_best_run_and_the_gaps_to_both() {
    let place = Place::new();
    let rows: Vec<Row> = (0..60).map(|i| Row::full(10 * i, 3, 1_000 * i + 1..1_000 * i + 41)).collect();
    place.write("t.jsonl", &rows::text(&rows));
    place.write("c.toml", "[[cluster.pools]]\nrole = 'prefill'\n[[cluster.pools]]\nrole = 'decode'\n");
    let args = ["replay", "t.jsonl", "--config", "c.toml", "--policy", "random,baton", "--speed", "1,2"];
    let more = ["--bound", "--json", "out.json", "--html", "out.html"];
    let shown = place.baton(&[&args[..], &more].concat()).succeeded();
    for word in ["upper bound", "best run"] {
        assert!(shown.stdout.contains(word), "'{word}' is missing: {shown:#?}");
    }
    assert!(std::fs::read_to_string(place.path("out.html")).unwrap().contains("Upper bound and best run"));
    let report = place.json("out.json");
    let runs = report["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 4, "the runs that the best is looked for in are not listed");
    for run in runs {
        let bound = &run["bound"];
        let (most, best, in_slo) =
            (count(bound, "in_slo"), count(&bound["witness"], "in_slo"), count(run, "in_slo"));
        assert!(in_slo <= best && best <= most && most < 60, "{run:#}");
        assert_eq!(
            (most - in_slo, best - in_slo),
            (count(bound, "gap_to_bound"), count(bound, "gap_to_witness"))
        );
        assert!(
            bound["witness"]["policy"].is_string() && bound["witness"]["admission"].is_string(),
            "{run:#}"
        );
        assert!(
            count(bound, "input_tokens_in_slo") >= count(&bound["witness"], "input_tokens_in_slo"),
            "{run:#}"
        );
    }
    assert!(runs[0]["bound"]["gap_to_witness"] != 0, "random is not the best: {:#}", runs[0]);
    place.baton(&[&args[..], &["--json", "out.json"]].concat()).succeeded();
    assert!(place.json("out.json")["runs"][0].get("bound").is_none(), "only where it is asked for");
}

#[test]
fn decisions_are_written_with_prediction_and_measurement() {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&rows::easy()));
    place.baton(&["replay", "t.jsonl", "--policy", "random,baton", "--decisions", "d.jsonl"]).succeeded();
    let text = std::fs::read_to_string(place.path("d.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // The random policy compares no candidates, so it has nothing to record.
    let lines: Vec<&Value> = lines.iter().filter(|line| line["policy"] == "baton").collect();
    assert_eq!(lines.len(), rows::easy().len(), "a decision for each request: {text}");
    for line in lines {
        let candidates = line["candidates"].as_array().unwrap();
        let chosen = candidates.iter().find(|c| c["instance"] == line["chosen"]).unwrap();
        assert_eq!(chosen["ttft_us"], line["predicted_ttft_us"], "{line:#}");
        let ratio = number(line, "/actual_ttft_us") / number(line, "/predicted_ttft_us");
        assert!((ratio - 1.0).abs() < 0.1, "an idle cluster is predicted well: {line:#}");
    }
    place.write("c.toml", "[scheduler]\nexplain_every = 5\n");
    place.baton(&["replay", "t.jsonl", "--config", "c.toml", "--decisions", "d.jsonl"]).succeeded();
    let text = std::fs::read_to_string(place.path("d.jsonl")).unwrap();
    assert_eq!(text.lines().count(), 1, "one in five, as the file says: {text}");
    let live = ["replay", "t.jsonl", "--live", "http://127.0.0.1:1", "--decisions", "d.jsonl"];
    place.baton(&live).refused(2, &["--decisions", "--live"]);
}

#[test]
fn easy_requests_are_all_served_in_time() {
    let rows = rows::easy();
    for run in runs(&rows, &["--policy", "round_robin,mooncake,baton"]) {
        assert_eq!(count(&run, "completed"), rows.len() as u64, "{run:#}");
        assert_eq!(count(&run, "in_slo"), rows.len() as u64, "{run:#}");
        assert_eq!(count(&run, "input_tokens_in_slo"), count(&run, "input_tokens"), "{run:#}");
        assert!(number(&run, "/ttft_s/mean") > 0.0, "{run:#}");
        assert!(number(&run, "/tbt_ms/mean") > 0.0, "{run:#}");
    }
}

#[test]
fn percentiles_ascend() {
    for run in runs(&rows::tree(150), &["--policy", "random,baton"]) {
        for name in ["ttft_s", "tbt_ms"] {
            let part = |part: &str| number(&run, &format!("/{name}/{part}"));
            assert!(part("p50") <= part("p90") && part("p90") <= part("p99"), "{name} of {run:#}");
        }
    }
}

#[test]
fn policies_run_in_the_order_given_under_the_admission_and_speed_given() {
    let runs =
        runs(&rows::easy(), &["--policy", "mooncake,random,baton", "--admission", "early", "--speed", "2"]);
    let names: Vec<_> = runs.iter().map(|run| run["policy"].as_str().unwrap_or_default()).collect();
    assert_eq!(names, ["mooncake", "random", "baton"]);
    for run in &runs {
        assert_eq!(run["admission"], "early", "{run:#}");
        assert!((number(run, "/speed") - 2.0).abs() < 1e-9, "{run:#}");
    }
}

#[test]
fn the_same_seed_gives_the_same_report() {
    let run = |seed| {
        let mut runs = runs(&rows::tree(150), &["--policy", "random,mooncake,baton", "--seed", seed]);
        for run in &mut runs {
            // The one figure that is about this machine and not about the simulated one.
            run.as_object_mut().unwrap().remove("cpu_s").expect("cpu_s is reported");
        }
        runs
    };
    assert_eq!(run("7"), run("7"));
    assert_ne!(run("7")[0], run("8")[0], "the seed does not reach the random policy");
}

#[test]
fn repeated_prompts_hit_and_distinct_ones_do_not() {
    let same: Vec<Row> = (0..10).map(|i| Row::full(i * 20_000, 10, 1..9)).collect();
    let distinct: Vec<Row> = (0..10).map(|i| Row::full(i * 20_000, 10, 100 * i + 1..100 * i + 9)).collect();
    let ratio = |rows: &[Row]| number(&runs(rows, &["--policy", "baton"])[0], "/block_hit_ratio");
    // Nine of ten could hit; an engine recomputes at least the last token, so the last block may not count.
    assert!(ratio(&same) > 0.7, "{}", ratio(&same));
    assert!(ratio(&distinct).abs() < 1e-12, "{}", ratio(&distinct));
}

#[test]
fn a_flood_is_not_served_as_if_it_were_easy() {
    let runs = runs(&rows::flood(), &["--policy", "baton", "--admission", "none"]);
    assert!(count(&runs[0], "in_slo") * 2 < count(&runs[0], "requests"), "{:#}", runs[0]);
}

#[test]
fn a_report_that_cannot_be_written_is_an_error_with_its_path() {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&rows::easy()));
    place.baton(&["replay", "t.jsonl", "--json", "no/such/out.json"]).refused(1, &["no/such/out.json"]);
}

#[test]
fn without_json_the_report_is_for_people() {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&rows::easy()));
    let report = place.baton(&["replay", "t.jsonl", "--policy", "mooncake,baton"]).succeeded();
    for word in ["mooncake", "baton", "TTFT"] {
        assert!(report.stdout.contains(word), "'{word}' is missing: {report:#?}");
    }
}

#[test]
fn what_would_replay_nothing_or_for_ever_is_refused() {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&[Row::full(0, 10, 1..3), Row::full(400 * 86_400_000, 10, 3..5)]));
    place.baton(&["replay", "t.jsonl"]).refused(1, &["span 400 days", "--window"]);
    place.baton(&["replay", "t.jsonl", "--window", "0..10"]).succeeded();
    place.baton(&["replay", "t.jsonl", "--rows", "1"]).succeeded();
    place.baton(&["replay", "t.jsonl", "--rows", "0"]).refused(2, &["--rows", "a whole number from 1"]);
    place.baton(&["replay", "t.jsonl", "--repeat", "0"]).refused(2, &["--repeat"]);
    place.baton(&["replay", "t.jsonl", "--jobs", "99999"]).refused(2, &["--jobs", "from 1 to 1024"]);
    place.baton(&["replay", "--journal", "j", "--spread"]).refused(2, &["--journal", "--spread"]);
}

/// The share of a run counts them, those of its classes do not.
#[test]
fn cancelled_requests_have_a_column_where_there_are_some() {
    let place = Place::new();
    let row = r#"{"timestamp": 0, "input_length": 20480, "output_length": 9, "cancel_after_ms": "#;
    for (after_ms, cancelled) in [(1, true), (1_000_000, false)] {
        place.write("t.jsonl", &format!("{row}{after_ms}}}\n"));
        let out = place.baton(&["replay", "t.jsonl"]).succeeded();
        assert_eq!(out.stdout.contains("cancelled"), cancelled, "{out:#?}");
    }
}

/// TBT is of gaps, and an answer of one token has none.
#[test]
fn answers_of_one_token_have_no_tbt() {
    let tbt = |output_tokens: [u64; 2]| {
        let rows: Vec<Row> =
            (0u64..).zip(output_tokens).map(|(at, n)| Row::full(at * 20_000, n, [at])).collect();
        runs(&rows, &[])[0]["tbt_ms"].clone()
    };
    assert!(tbt([1, 1])["mean"].is_null());
    assert_eq!(tbt([1, 9])["p50"], tbt([9, 9])["p50"]);
}

/// The configuration's block size, 16, makes the blocks of a trace without ids; ids are of blocks of the trace's size.
#[test]
fn blocks_are_of_the_configurations_size_where_the_trace_does_not_say() {
    let place = Place::new();
    place.write("c.toml", "[scheduler]\nblock_tokens = 16\n");
    let row = r#"{"timestamp": 0, "input_length": 700, "output_length": 9}"#;
    place.write("none.jsonl", &format!("{row}\n"));
    place.write("ids.jsonl", &rows::text(&rows::easy()));
    let warning = "scheduler.block_tokens = 16 does not count";
    for (trace, assumed, warned) in
        [("none.jsonl", "blocks of 16 tokens", false), ("ids.jsonl", "blocks of 512 tokens", true)]
    {
        let out = place.baton(&["replay", trace, "--config", "c.toml"]).succeeded();
        assert!(out.stderr.contains(assumed) && out.stderr.contains(warning) == warned, "{out:#?}");
    }
}

#[test]
fn rows_of_a_class_that_there_is_not_are_named() {
    let place = Place::new();
    let row = |class: &str| {
        format!(
            r#"{{"timestamp": 0, "input_length": 512, "output_length": 9, "hash_ids": [1], "class": "{class}"}}"#
        )
    };
    place.write("t.jsonl", &[row("interactve"), row("batch")].join("\n"));
    place.write(
        "c.toml",
        "[[scheduler.classes]]\nname = \"interactive\"\n[[scheduler.classes]]\nname = \"batch\"\n",
    );
    let out = place.baton(&["replay", "t.jsonl", "--config", "c.toml"]).succeeded();
    let warning = "1 rows are of class interactve, which the configuration does not have; they count as class interactive";
    assert!(out.stderr.contains(warning) && !out.stderr.contains("class batch,"), "{out:#?}");
}

#[test]
fn nodes_and_admissions_are_swept_in_one_run_with_a_verdict() {
    let place = Place::new();
    place.write("t.jsonl", &rows::text(&rows::flood()));
    let args =
        ["replay", "t.jsonl", "--nodes", "1p3d,3p1d", "--admission", "slo,early", "--json", "out.json"];
    let out = place.baton(&args).succeeded();
    let report = place.json("out.json");
    let runs = report["runs"].as_array().unwrap();
    let count = |run: &Value, role: &str| {
        run["instances"].as_array().unwrap().iter().filter(|instance| instance["role"] == role).count()
    };
    let swept: Vec<_> =
        runs.iter().map(|run| (count(run, "prefill"), count(run, "decode"), &run["admission"])).collect();
    let (slo, early) = (Value::from("slo"), Value::from("early"));
    assert_eq!(swept, [(1, 3, &slo), (1, 3, &early), (3, 1, &slo), (3, 1, &early)]);
    // All come at once, and each of four nodes has one prompt in time, whichever they are.
    assert!(out.stdout.contains("verdict at ×1: 4 runs have equally many in SLO"), "{out:#?}");
    // Half a second apart, prompts are more than one prefill node takes.
    let apart: Vec<Row> = (0..200).map(|at| Row::full(at * 500, 10, at * 100..at * 100 + 30)).collect();
    place.write("apart.jsonl", &rows::text(&apart));
    place.write("apart.toml", "[scheduler]\nlocal_prefill = false\n");
    let args =
        ["replay", "apart.jsonl", "--config", "apart.toml", "--nodes", "1p3d,3p1d", "--json", "out.json"];
    let out = place.baton(&args).succeeded();
    let report = place.json("out.json");
    let in_slo: Vec<u64> =
        report["runs"].as_array().unwrap().iter().map(|run| run["in_slo"].as_u64().unwrap()).collect();
    assert!(in_slo[1] > in_slo[0], "{out:#?}");
    let named = "verdict at ×1: 3P1D, baton, slo is best by more than chance";
    assert!(
        out.stdout.contains(named) && out.stdout.contains("refusals of 1P3D baton, slo at ×1: "),
        "{out:#?}"
    );
    // One run has no rival, and so no verdict.
    let alone = place.baton(&["replay", "t.jsonl", "--nodes", "1p3d"]).succeeded();
    assert!(!alone.stdout.contains("verdict"), "{alone:#?}");
    place.baton(&["replay", "t.jsonl", "--nodes", "4p"]).refused(2, &["--nodes", "such as 12p4d"]);
    let bound = ["replay", "t.jsonl", "--nodes", "1p3d,3p1d", "--bound"];
    place.baton(&bound).refused(1, &["--bound", "one of --nodes"]);
}
