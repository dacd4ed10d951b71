//! Lint names rows and rules; the published traces and the look-alikes are clean.
#![allow(clippy::unwrap_used, reason = "a test may fail by unwrapping")]

use std::path::Path;

use baton_traces::lint::{LintReport, RULES, lint};
use baton_traces::synth::{PublishedTrace, like};
use baton_traces::write::{Output, create};
use baton_traces::{ReadOptions, locate};

fn lint_text(text: &str) -> LintReport {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("t.jsonl");
    std::fs::write(&path, text).unwrap();
    lint(&path, &ReadOptions::default(), |_| {}).unwrap()
}

fn row(at: i64, tokens: i64, ids: &[u64]) -> String {
    format!("{{\"timestamp\":{at},\"input_length\":{tokens},\"output_length\":1,\"hash_ids\":{ids:?}}}\n")
}

fn found(report: &LintReport) -> Vec<(Option<u64>, &str)> {
    report.findings.iter().map(|f| (f.row, f.rule.as_str())).collect()
}

#[test]
fn each_rule_is_found_at_its_row() {
    let good: String = (0..12).map(|i| row(0, 600, &[0, 100 + i])).collect();
    for (bad, rule) in [
        (row(-5, 600, &[0, 1]), "time-order"),
        (row(0, 0, &[]), "length"),
        (row(0, -4, &[]), "length"),
        (row(0, 600, &[0, 1, 2]), "block-count"),
        (row(0, 600, &[100, 1]), "predecessor"),
        (row(0, 1024, &[0, 100]), "partial-full"),
        ("{\"timestamp\":0}\n".to_string(), "parse"),
    ] {
        let report = lint_text(&(good.clone() + &bad));
        assert!(found(&report).contains(&(Some(13), rule)), "{rule}: {:?}", report.findings);
        assert!(RULES.iter().any(|(name, _)| *name == rule));
    }
    assert!(lint_text(&good).is_clean());
}

#[test]
fn rows_after_a_fault_are_still_checked() {
    let report =
        lint_text(&(row(0, 600, &[0, 1]) + "garbage\n" + &row(9, 600, &[0, 1, 2]) + &row(3, 600, &[0, 1])));
    assert_eq!(found(&report), [(Some(3), "block-count"), (Some(2), "parse"), (Some(4), "time-order")]);
    assert_eq!(report.records, 3);
}

#[test]
fn the_whole_file_can_be_at_fault() {
    let seconds: String = (0..20)
        .map(|i| format!("{{\"timestamp\":{},\"input_length\":9,\"output_length\":1}}\n", f64::from(i) * 0.6))
        .collect();
    assert_eq!(found(&lint_text(&seconds)), [(None, "time-unit")]);
    let told = ReadOptions { block_tokens: Some(512), ..ReadOptions::default() };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("t.jsonl");
    std::fs::write(&path, (row(0, 100, &[1, 2, 3, 4, 5, 6, 7]) + &row(0, 33, &[1, 2, 8])).repeat(4)).unwrap();
    let report = lint(&path, &told, |_| {}).unwrap();
    assert!(found(&report).contains(&(None, "block-size")), "{:?}", report.findings);
    let shrunk = "{\"session_id\":\"s\",\"timestamp\":0,\"input_length\":61440,\"output_length\":2}\n\
                  {\"session_id\":\"s\",\"timestamp\":9,\"input_length\":2048,\"output_length\":1}\n";
    assert_eq!(found(&lint_text(shrunk)), [(Some(2), "shrink")]);
}

#[test]
fn findings_are_capped_and_counted() {
    let text: String = (0..100).map(|i| row(-i * 1000, 600, &[0, 1])).collect();
    let report = lint_text(&text);
    assert_eq!(report.counts["time-order"], 99);
    assert_eq!(report.findings.len(), 20);
}

/// A service writes rows as requests end, and puts them in order when the file is complete.
#[test]
fn a_capture_under_way_may_be_in_any_order() {
    let late = "{\"session_id\":\"s\",\"timestamp\":90,\"input_length\":2048,\"output_length\":2}\n\
                {\"session_id\":\"s\",\"timestamp\":5,\"input_length\":1024,\"output_length\":1}\n";
    let unnamed = row(90, 600, &[0, 1]) + &row(5, 600, &[0, 2]);
    let directory = tempfile::tempdir().unwrap();
    for (text, rule) in [(late, "shrink"), (unnamed.as_str(), "time-order")] {
        assert_eq!(found(&lint_text(text)), [(Some(2), rule)]);
        let path = directory.path().join("capture-00000001-b512.jsonl.partial");
        std::fs::write(&path, text).unwrap();
        let report = lint(&path, &ReadOptions::default(), |_| {}).unwrap();
        assert!(report.is_clean(), "{:?}", report.findings);
        assert!(
            report.assumptions.iter().any(|said| said.contains("being written")),
            "{:?}",
            report.assumptions
        );
        // Every other rule holds from the first row on.
        std::fs::write(&path, text.to_owned() + &row(91, 0, &[])).unwrap();
        let report = lint(&path, &ReadOptions::default(), |_| {}).unwrap();
        assert_eq!(found(&report), [(Some(3), "length")]);
    }
}

fn assert_clean(path: &Path) {
    let report = lint(path, &ReadOptions::default(), |_| {}).unwrap();
    assert!(report.is_clean(), "{}: {:?}", path.display(), report.findings);
    assert!(report.records > 3000);
}

#[test]
fn the_published_traces_are_clean() {
    for name in ["conversation_trace.jsonl", "synthetic_trace.jsonl", "azure_llm_inference_code.csv"] {
        match locate(name) {
            Some(path) => assert_clean(&path),
            None => eprintln!("{name} is not on this machine (BATON_TRACES): only look-alikes were linted"),
        }
    }
}

#[test]
fn look_alikes_are_clean() {
    let directory = tempfile::tempdir().unwrap();
    for kind in [PublishedTrace::Conversation, PublishedTrace::Synthetic] {
        let path = directory.path().join(format!("{kind:?}.jsonl"));
        let mut writer = create(&path, Output::Mooncake, false).unwrap();
        like(kind, 11).records.iter().for_each(|record| writer.write(record).unwrap());
        writer.finish().unwrap();
        assert_clean(&path);
    }
}
