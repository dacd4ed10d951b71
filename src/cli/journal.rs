//! `baton replay --journal FILE`: whether a conductor orders again what it ordered in service.

use std::fmt::Write as _;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow};

use super::out;
use crate::conductor::journal::{End, ReplayReport, replay};

/// Replays a file; the summary goes to the terminal and, where asked for, as JSON to a file.
pub fn run(path: &Path, json: Option<&Path>) -> Result<ExitCode> {
    let journal = || format!("journal {}", path.display());
    let file = File::open(path).map_err(|e| anyhow!("{}: {e}; give a journal-*.jsonl file", journal()))?;
    let found = replay(BufReader::with_capacity(1 << 20, file)).with_context(journal)?;
    if let Some(json) = json {
        let text = serde_json::to_string_pretty(&found).with_context(journal)?;
        out::save(json, &text)?;
    }
    out::print(&table(&found))?;
    Ok(ExitCode::SUCCESS)
}

/// The summary as text.
fn table(found: &ReplayReport) -> String {
    let mut text = format!("{} steps, identical effects\n", found.steps);
    let summary = &found.summary;
    let mut row = |name: &str, value: u64| {
        let _ = writeln!(text, "  {name:<28}{value:>12}");
    };
    if found.lost_steps_before > 0 {
        row("in no file before this one", found.lost_steps_before);
    }
    row("span, ms", found.span_us / 1000);
    row("requests", summary.requests);
    row("finished", summary.finished);
    row("cancelled", summary.cancelled);
    summary.decisions.iter().for_each(|(kind, count)| row(&format!("ordered: {kind}"), *count));
    summary.rejections.iter().for_each(|(reason, count)| row(&format!("refused: {reason}"), *count));
    summary.failures.iter().for_each(|(stage, count)| row(&format!("failed: {stage}"), *count));
    row("inputs that did not fit", summary.stale_inputs);
    text.push_str(&ending(found));
    text
}

/// A description of how the file ends, after the last step.
fn ending(found: &ReplayReport) -> String {
    match (found.end, found.lost_steps, found.torn) {
        (Some(End::Closed), ..) => "the service stopped after the last step\n".into(),
        (Some(End::Rotated), ..) => "the next file goes on from here\n".into(),
        (Some(End::Truncated), ..) => {
            "the file was full and the conductor too large for a new one: what followed is not recorded\n"
                .into()
        }
        (None, 0, true) => {
            "the last line is torn: the process died or the disk failed while it was written\n".into()
        }
        (None, 0, false) => {
            "no closing line: the process died, the disk failed, or the file is being written\n".into()
        }
        (None, lost, _) => format!("then {lost} steps were dropped: the disk did not keep up\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_journal_is_told_in_words() {
        let cases = [
            (ReplayReport { end: Some(End::Closed), ..ReplayReport::default() }, "stopped"),
            (ReplayReport { end: Some(End::Rotated), ..ReplayReport::default() }, "next file"),
            (ReplayReport { end: Some(End::Truncated), ..ReplayReport::default() }, "not recorded"),
            (ReplayReport { torn: true, ..ReplayReport::default() }, "torn"),
            (ReplayReport { lost_steps: 7, ..ReplayReport::default() }, "7 steps were dropped"),
            (ReplayReport::default(), "no closing line"),
        ];
        for (found, words) in cases {
            assert!(table(&found).contains(words), "{}", table(&found));
        }
    }

    #[test]
    fn a_recorded_run_is_summed_up_for_people_and_programs() {
        use crate::conductor::journal::{JournalSettings, JournalWriter};
        use baton_scheduler::{Conductor, Input, Request, SchedulerConfig};

        let place = tempfile::tempdir().expect("a temporary folder");
        let mut conductor = Conductor::new(SchedulerConfig::default()).expect("valid");
        let mut journal =
            JournalWriter::open(JournalSettings::new(place.path()), &conductor).expect("a folder");
        let mut effects = Vec::new();
        let arrival = Request { prompt_tokens: 9, ..Request::default() };
        journal.step(&mut conductor, 5, Input::RequestArrived(arrival), &mut effects);
        journal.step(&mut conductor, 9, Input::TimerFired, &mut effects);
        assert_eq!(journal.close().lost_steps, 0);
        let summary = place.path().join("summary.json");
        let done = run(&place.path().join("journal-000001.jsonl"), Some(&summary)).expect("the same effects");
        assert_eq!(format!("{done:?}"), format!("{:?}", ExitCode::SUCCESS));
        let text = std::fs::read_to_string(summary).expect("written");
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(json["steps"], 2);
        assert_eq!(json["summary"]["rejections"]["no_instance"], 1);
        assert_eq!(json["end"], "closed");
    }

    #[test]
    fn a_file_that_is_none_is_named() {
        let place = tempfile::tempdir().expect("a temporary folder");
        let path = place.path().join("x.jsonl");
        let error = run(&path, None).expect_err("nothing there").to_string();
        assert!(error.contains("x.jsonl") && error.contains("journal-"), "{error}");
        std::fs::write(&path, "hello\n").expect("written");
        let error = format!("{:#}", run(&path, None).expect_err("no journal"));
        assert!(error.contains("line 1"), "{error}");
    }
}
