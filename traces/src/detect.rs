//! Telling the dialect from a sample of a file, and settling what the dialect leaves open.

pub(crate) mod block;

use serde_json::{Map, Value};

use crate::dialect::{Dialect, csv_rows};
use crate::error::{RowFault, Stage};
use crate::flat::{self, FlatRow, Stamp};
use crate::moment::epoch_unit;
use crate::options::{Context, ReadOptions, TimeUnit};
use crate::parser::Setup;
use crate::source::CsvRows;

use block::block_of;

/// Requests a second between which a trace is believed.
const BELIEVABLE_RATE: std::ops::Range<f64> = 0.003..500.0;
/// Bytes searched for a zero, which no text has.
const BINARY_LOOK_BYTES: usize = 8192;
/// Rows with times that the unit test needs.
const FEWEST_TIMED_ROWS: usize = 16;

/// The setup that was settled, and the assumptions behind it.
#[derive(Debug)]
pub(crate) struct DetectedSetup {
    pub(crate) setup: Setup,
    pub(crate) assumptions: Vec<String>,
}

/// Settles how to read a file that begins with `sample`.
pub(crate) fn settle(sample: &[u8], whole: bool, options: &ReadOptions) -> Result<DetectedSetup, RowFault> {
    refuse_binary(sample)?;
    let lines = sample_lines(sample, whole);
    let (dialect, header) = dialect_of(sample, &lines, options)?;
    let mut assumptions = vec![match options.dialect {
        Some(_) => format!("dialect {dialect} (as told)"),
        None => format!("dialect {dialect} (from the first rows)"),
    }];
    let rows = flat_rows(dialect, &lines, options);
    let times = sample_times(dialect, sample, &rows, &header, options);
    let (unit, rebase) = unit_of(dialect, &times, options, &mut assumptions)?;
    let (block_tokens, tails_dropped) = block_of(dialect, &lines, &rows, options, &mut assumptions)?;
    let delta = context_of(dialect, &rows, options, &mut assumptions)?;
    let setup = Setup {
        dialect,
        block_tokens,
        tails_dropped,
        unit,
        rebase,
        delta,
        ordered: is_ordered(dialect, &rows),
        columns: options.columns.clone(),
        limits: options.limits,
        header,
    };
    if !setup.ordered {
        assumptions.push("rows are put into time order".into());
    }
    Ok(DetectedSetup { setup, assumptions })
}

/// Formats that are not lines, by their first bytes.
fn refuse_binary(sample: &[u8]) -> Result<(), RowFault> {
    let kinds: [(&[u8], &str); 4] = [
        (b"PAR1", "a Parquet file"),
        (b"ARROW1", "an Arrow file"),
        (b"\x28\xb5\x2f\xfd", "zstd-compressed"),
        (b"PK\x03\x04", "a zip archive"),
    ];
    let undetected =
        |problem: String, remedy: &str| Err(RowFault::new(Stage::Detect, "detect", problem, remedy));
    for (magic, kind) in kinds {
        if sample.starts_with(magic) {
            return undetected(
                format!("the file is {kind}, not rows of text"),
                "turn it into JSON lines, CSV or .gz of them first",
            );
        }
    }
    if sample.iter().take(BINARY_LOOK_BYTES).any(|byte| *byte == 0) {
        return undetected(
            "the file is binary, not rows of text".into(),
            "turn it into JSON lines, CSV or .gz of them first",
        );
    }
    if sample.trim_ascii().is_empty() {
        return undetected("the file has no rows".into(), "check the path");
    }
    Ok(())
}

/// The whole lines of a sample.
fn sample_lines(sample: &[u8], whole: bool) -> Vec<&[u8]> {
    let sample = sample.strip_prefix(b"\xef\xbb\xbf").unwrap_or(sample);
    let end = match sample.iter().rposition(|b| *b == b'\n') {
        Some(at) if !whole => &sample[..at],
        _ => sample,
    };
    end.split(|b| *b == b'\n').map(<[u8]>::trim_ascii).filter(|line| !line.is_empty()).collect()
}

/// Whether a line begins a section of TOML, like `[scheduler]` or `[[cluster.pools]]`.
fn is_section(line: &[u8]) -> bool {
    let named = |b: &u8| b.is_ascii_lowercase() || b"_.[]".contains(b);
    line.starts_with(b"[") && line.ends_with(b"]") && line.len() > 4 && line.iter().all(named)
}

fn dialect_of(
    sample: &[u8],
    lines: &[&[u8]],
    options: &ReadOptions,
) -> Result<(Dialect, Vec<String>), RowFault> {
    let undetected = |problem: String, remedy: &str| RowFault::new(Stage::Detect, "detect", problem, remedy);
    let first = lines.first().copied().unwrap_or_default();
    if is_section(first) {
        return Err(undetected(
            "the file looks like a configuration".into(),
            "give a trace: one JSON object a line, or CSV; a configuration goes with --config",
        ));
    }
    let looks_json = first.starts_with(b"{") || first.starts_with(b"[");
    if options.dialect.map_or(!looks_json, Dialect::is_csv) {
        let header = csv_header(sample, options)?;
        let known = options.dialect.or_else(|| csv_rows::dialect_of(&header));
        let dialect = known.ok_or_else(|| {
            undetected(
                format!("no dialect has the columns {}", shortened(&header.join(", "))),
                "name the dialect",
            )
        })?;
        return Ok((dialect, header));
    }
    if let Some(dialect) = options.dialect {
        return Ok((dialect, Vec::new()));
    }
    if first.starts_with(b"[") || (first == b"{") {
        return Err(undetected(
            "the file is one JSON document, not an object a line".into(),
            "write one JSON object a line, for example with jq -c '.[]' or jq -c .",
        ));
    }
    let objects: Vec<Map<String, Value>> =
        lines.iter().take(64).filter_map(|line| flat::object(line).ok()).collect();
    let Some(row) = objects.first() else {
        return Err(undetected(
            "no row of the sample is a JSON object".into(),
            "name the dialect, or fix the file",
        ));
    };
    let found = json_dialect(row, &objects, options).ok_or_else(|| {
        let keys: Vec<&str> = row.keys().map(String::as_str).take(12).collect();
        undetected(
            format!("no dialect has the fields {}", keys.join(", ")),
            "name the dialect or the columns",
        )
    })?;
    Ok((found, Vec::new()))
}

/// The beginning of a text that may be anything.
fn shortened(text: &str) -> String {
    let mut short: String = text.chars().filter(|c| !c.is_control()).take(80).collect();
    if short.len() < text.len() {
        short.push_str(" ...");
    }
    short
}

fn csv_header(sample: &[u8], options: &ReadOptions) -> Result<Vec<String>, RowFault> {
    let bytes = std::io::Cursor::new(sample.to_vec());
    let rows = CsvRows::new(Box::new(bytes), options.limits.row_bytes)?;
    Ok(rows.header().to_vec())
}

fn json_dialect(
    row: &Map<String, Value>,
    rows: &[Map<String, Value>],
    options: &ReadOptions,
) -> Option<Dialect> {
    let has = |key: &str| row.contains_key(key);
    let any = |key: &str| rows.iter().any(|row| row.contains_key(key));
    let columns = &options.columns;
    let own = |column: &Option<String>| column.as_deref().is_some_and(has);
    let is_dynamo = |map: &Map<String, Value>| {
        let schema = map.get("schema").and_then(Value::as_str).unwrap_or_default();
        schema.starts_with("dynamo.request.trace")
            || (map.contains_key("event_type") && map.contains_key("request"))
    };
    match row {
        _ if is_dynamo(row) || row.get("event").and_then(Value::as_object).is_some_and(is_dynamo) => {
            Some(Dialect::DynamoRequest)
        }
        _ if has("captureData") => Some(Dialect::SagemakerCapture),
        _ if has("requests") => Some(Dialect::Weka),
        _ if has("turns") => Some(Dialect::MultiTurn),
        _ if has("resourceSpans") || has("spans") || has("span_id") || has("spanId") => Some(Dialect::Otel),
        _ if has("chat_id") && any("parent_chat_id") => Some(Dialect::Bailian),
        _ if has("input_prompt_length") && has("num_turns") => Some(Dialect::AppliedComputeAgentic),
        _ if has("input_tokens_total") => Some(Dialect::TraceLab),
        _ if ["wait_for", "branches", "prefix_reset", "tool_wait_ms"].iter().any(|key| any(key)) => {
            Some(Dialect::AgenticMooncake)
        }
        _ if own(&columns.input_length) || own(&columns.hash_ids) => Some(Dialect::Mooncake),
        _ if [
            "input_length",
            "input_tokens",
            "text_input",
            "messages",
            "payload",
            "prompt_token_ids",
            "text",
        ]
        .iter()
        .any(|key| has(key)) =>
        {
            Some(Dialect::Mooncake)
        }
        _ => None,
    }
}

fn flat_rows(dialect: Dialect, lines: &[&[u8]], options: &ReadOptions) -> Vec<FlatRow> {
    if !matches!(
        dialect,
        Dialect::Mooncake | Dialect::MooncakeDelta | Dialect::AgenticMooncake | Dialect::Bailian
    ) {
        return Vec::new();
    }
    lines.iter().filter_map(|line| flat::parse(line, &options.columns, &options.limits).ok()).collect()
}

/// The times of the sample as written.
fn sample_times(
    dialect: Dialect,
    sample: &[u8],
    rows: &[FlatRow],
    header: &[String],
    options: &ReadOptions,
) -> Vec<Stamp> {
    if !dialect.is_csv() {
        return rows.iter().filter_map(|row| row.timestamp.clone()).collect();
    }
    let wanted = options.columns.timestamp.as_deref().map(csv_rows::comparable);
    let column = header.iter().map(|name| csv_rows::comparable(name)).position(|name| match &wanted {
        Some(own) => name == *own,
        None => ["timestamp", "arrivaltimestamp", "arrivedat"].contains(&name.as_str()),
    });
    let bytes = std::io::Cursor::new(sample.to_vec());
    let (Some(column), Ok(mut csv)) = (column, CsvRows::new(Box::new(bytes), options.limits.row_bytes))
    else {
        return Vec::new();
    };
    let mut times = Vec::new();
    while let Ok(Some(record)) = csv.next_record() {
        let text = record.get(column).unwrap_or_default();
        times.push(text.parse().map_or_else(|_| Stamp::Text(text.into()), Stamp::Number));
    }
    times
}

fn usual_unit(dialect: Dialect) -> TimeUnit {
    match dialect {
        Dialect::Bailian
        | Dialect::Weka
        | Dialect::AppliedComputeAgentic
        | Dialect::BurstGptCsv
        | Dialect::SplitwiseCsv
        | Dialect::VidurCsv => TimeUnit::Seconds,
        _ => TimeUnit::Milliseconds,
    }
}

/// The unit of the times, and whether they are dates to be moved to 0.
fn unit_of(
    dialect: Dialect,
    times: &[Stamp],
    options: &ReadOptions,
    assumptions: &mut Vec<String>,
) -> Result<(TimeUnit, bool), RowFault> {
    let numbers: Vec<f64> = times
        .iter()
        .filter_map(|t| match t {
            Stamp::Number(n) => Some(*n),
            Stamp::Text(_) => None,
        })
        .collect();
    let always_dates = matches!(
        dialect,
        Dialect::AzureCsv
            | Dialect::Otel
            | Dialect::SagemakerCapture
            | Dialect::DynamoRequest
            | Dialect::TraceLab
    );
    if always_dates || numbers.len() < times.len() {
        assumptions.push("times are dates: the first row is at 0".into());
        return Ok((options.time_unit.unwrap_or(TimeUnit::Milliseconds), true));
    }
    if let Some(unit) = numbers.first().and_then(|first| epoch_unit(*first)) {
        let unit = options.time_unit.unwrap_or(unit);
        assumptions.push(format!("times are {unit} since 1970: the first row is at 0"));
        return Ok((unit, true));
    }
    let usual = usual_unit(dialect);
    if let Some(unit) = options.time_unit {
        assumptions.push(format!("times in {unit} (as told)"));
        return Ok((unit, false));
    }
    if let Some(other) = doubtful_unit(usual, &numbers) {
        let problem = format!(
            "times in {usual} (as {dialect} has them) would mean {} requests a second, in {other} {}",
            rate_text(&numbers, usual),
            rate_text(&numbers, other)
        );
        if options.strict {
            return Err(RowFault::new(
                Stage::Detect,
                "time-unit",
                problem,
                format!("pass the time unit: {usual} or {other}"),
            ));
        }
        assumptions.push(format!("{problem}; {usual} was kept"));
    }
    assumptions.push(format!("times in {usual} (as {dialect} has them)"));
    Ok((usual, false))
}

fn rate_per_s(numbers: &[f64], unit: TimeUnit) -> Option<f64> {
    let (low, high) =
        numbers.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), n| (l.min(*n), h.max(*n)));
    let span_s = (high - low) * unit.in_ms() / 1000.0;
    #[expect(clippy::cast_precision_loss, reason = "a sample is small")]
    let rows = numbers.len() as f64;
    (numbers.len() >= FEWEST_TIMED_ROWS && span_s > 0.0).then(|| rows / span_s)
}

fn rate_text(numbers: &[f64], unit: TimeUnit) -> String {
    rate_per_s(numbers, unit).map_or_else(|| "unknown".into(), |rate| format!("{rate:.3}"))
}

/// The other unit (ms for s, s for ms), where the usual one gives an implausible rate and the other one a plausible
/// rate.
pub(crate) fn doubtful_unit(usual: TimeUnit, numbers: &[f64]) -> Option<TimeUnit> {
    let other = match usual {
        TimeUnit::Seconds => TimeUnit::Milliseconds,
        _ => TimeUnit::Seconds,
    };
    let believable = |unit| rate_per_s(numbers, unit).is_some_and(|rate| BELIEVABLE_RATE.contains(&rate));
    let doubtful = rate_per_s(numbers, usual).is_some() && !believable(usual) && believable(other);
    doubtful.then_some(other)
}

/// Whether later turns hold only what is new.
fn context_of(
    dialect: Dialect,
    rows: &[FlatRow],
    options: &ReadOptions,
    assumptions: &mut Vec<String>,
) -> Result<bool, RowFault> {
    let delta = match options.context {
        Some(context) => context == Context::Delta,
        None => dialect == Dialect::MooncakeDelta,
    };
    let has_sessions = rows.iter().any(|row| row.extra.session_id.is_some());
    if delta {
        assumptions.push(
            "later turns of a session hold only what is new: whole prompts are rebuilt, answers included"
                .into(),
        );
        return Ok(true);
    }
    if options.context.is_none()
        && dialect == Dialect::Mooncake
        && let Some(session) = shrinking_session(rows)
    {
        let problem = format!(
            "later turns of session {session} are shorter than the ones before: full context or delta?"
        );
        if options.strict {
            return Err(RowFault::new(Stage::Detect, "shrink", problem, "pass the context: full or delta"));
        }
        assumptions.push(format!("{problem}; full context was kept"));
    }
    if has_sessions {
        assumptions.push("rows are full context; turns of a session wait for the one before, then for their delay (or the difference of times)".into());
    } else {
        assumptions.push("rows are full context and independent".into());
    }
    Ok(false)
}

/// A session of the sample where a turn is shorter than the one before and does not begin like it.
fn shrinking_session(rows: &[FlatRow]) -> Option<String> {
    let mut last: std::collections::HashMap<&str, (i64, Option<u64>)> = std::collections::HashMap::new();
    for row in rows.iter().filter(|row| row.delta.is_none()) {
        let (Some(session), Some(tokens)) = (row.extra.session_id.as_deref(), row.input_length) else {
            continue;
        };
        let first_id = row.hash_ids.as_ref().and_then(|ids| ids.first().copied());
        if let Some((before, before_id)) = last.insert(session, (tokens, first_id)) {
            let begins_alike = first_id.is_some() && first_id == before_id;
            if tokens < before && !begins_alike {
                return Some(session.to_string());
            }
        }
    }
    None
}

fn is_ordered(dialect: Dialect, rows: &[FlatRow]) -> bool {
    match dialect {
        Dialect::Mooncake | Dialect::MooncakeDelta | Dialect::AgenticMooncake => {
            rows.iter().all(|row| row.extra.session_id.is_none() && row.extra.wait_for.is_empty())
        }
        Dialect::Bailian => true,
        dialect => dialect.is_csv(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(text: &str) -> Result<DetectedSetup, RowFault> {
        settle(text.as_bytes(), true, &ReadOptions::default())
    }

    fn dialect(text: &str) -> Dialect {
        detect(text).unwrap().setup.dialect
    }

    #[test]
    fn every_dialect_is_told_by_its_first_row() {
        for (text, wanted) in [
            (r#"{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1,2]}"#, Dialect::Mooncake),
            (r#"{"created_time":0,"input_tokens":6,"output_tokens":1}"#, Dialect::Mooncake),
            (r#"{"text_input":"hi","output_length":4}"#, Dialect::Mooncake),
            (
                r#"{"request_id":"a","input_length":6,"output_length":1,"wait_for":[]}"#,
                Dialect::AgenticMooncake,
            ),
            (r#"{"schema":"dynamo.request.trace.v1","event_type":"request_end"}"#, Dialect::DynamoRequest),
            (r#"{"timestamp":1,"event":{"schema":"dynamo.request.trace.v1"}}"#, Dialect::DynamoRequest),
            (r#"{"num_turns":1,"input_prompt_length":64}"#, Dialect::AppliedComputeAgentic),
            (r#"{"id":"a","requests":[]}"#, Dialect::Weka),
            (r#"{"session_id":"a","turns":[]}"#, Dialect::MultiTurn),
            (r#"{"trace_id":"a","spans":[]}"#, Dialect::Otel),
            (
                r#"{"chat_id":1,"parent_chat_id":-1,"timestamp":1.5,"input_length":5,"output_length":1}"#,
                Dialect::Bailian,
            ),
            (r#"{"session_id":"a","input_tokens_total":5}"#, Dialect::TraceLab),
            (r#"{"captureData":{}}"#, Dialect::SagemakerCapture),
            ("TIMESTAMP,ContextTokens,GeneratedTokens\n", Dialect::AzureCsv),
            ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n", Dialect::BurstGptCsv),
            (
                "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n",
                Dialect::SplitwiseCsv,
            ),
            ("arrived_at,num_prefill_tokens,num_decode_tokens\n", Dialect::VidurCsv),
        ] {
            assert_eq!(dialect(text), wanted, "{text}");
        }
    }

    #[test]
    fn what_is_not_lines_is_refused_with_a_remedy() {
        for text in
            ["PAR1xxxx", "a\0b,c\n", "\n\n", "[\n{\"a\":1}\n]", "{\n\"a\":1}", "{\"what\":1}\n", "a,b\n1,2\n"]
        {
            let fault = detect(text).unwrap_err();
            assert_eq!(fault.stage, Stage::Detect, "{text}");
            assert!(!fault.remedy.is_empty());
        }
    }

    #[test]
    fn seconds_in_a_millisecond_dialect_are_not_taken_in_silence() {
        let text: String = (0..20)
            .map(|i| {
                format!("{{\"timestamp\":{},\"input_length\":5,\"output_length\":1}}\n", f64::from(i) * 0.7)
            })
            .collect();
        let fault = detect(&text).unwrap_err();
        assert_eq!(fault.rule, "time-unit");
        let options = ReadOptions { time_unit: Some(TimeUnit::Seconds), ..ReadOptions::default() };
        assert_eq!(settle(text.as_bytes(), true, &options).unwrap().setup.unit, TimeUnit::Seconds);
    }

    #[test]
    fn a_configuration_is_told_from_a_document() {
        for (text, words) in [
            ("[scheduler]\nblock_tokens = 16\n", "configuration"),
            ("[[cluster.pools]]\ncount = 1\n", "configuration"),
            ("[\n{}\n]\n", "one JSON document"),
            ("[[1]]\n", "one JSON document"),
        ] {
            let error = format!("{:?}", detect(text).unwrap_err());
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn a_session_that_shrinks_is_not_taken_in_silence() {
        let text = "{\"session_id\":\"a\",\"timestamp\":0,\"input_length\":61440,\"output_length\":1}\n\
                    {\"session_id\":\"a\",\"timestamp\":9,\"input_length\":2048,\"output_length\":1}\n";
        assert_eq!(detect(text).unwrap_err().rule, "shrink");
        let options = ReadOptions { context: Some(Context::Delta), ..ReadOptions::default() };
        assert!(settle(text.as_bytes(), true, &options).unwrap().setup.delta);
    }
}
