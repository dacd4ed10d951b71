//! Telling the dialect from a sample of a file, and settling what the dialect leaves open.

use serde_json::{Map, Value};

use crate::dialect::{Dialect, csv_rows, dynamo, weka};
use crate::error::{RowFault, Stage};
use crate::flat::{self, FlatRow, Stamp};
use crate::moment::epoch_unit;
use crate::options::{Context, ReadOptions, TimeUnit};
use crate::parser::Setup;
use crate::source::CsvRows;

/// Requests a second between which a trace is believed.
const BELIEVABLE_RATE: std::ops::Range<f64> = 0.003..500.0;
/// Rows with times that the unit test needs.
const FEWEST_TIMED_ROWS: usize = 16;

/// What was settled, and what was assumed to settle it.
#[derive(Debug)]
pub(crate) struct Settled {
    pub(crate) setup: Setup,
    pub(crate) assumptions: Vec<String>,
}

/// Settles how to read a file that begins with `sample`.
pub(crate) fn settle(sample: &[u8], whole: bool, options: &ReadOptions) -> Result<Settled, RowFault> {
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
    Ok(Settled { setup, assumptions })
}

/// Formats that are not lines, by their first bytes.
fn refuse_binary(sample: &[u8]) -> Result<(), RowFault> {
    let kinds: [(&[u8], &str); 4] = [
        (b"PAR1", "a Parquet file"),
        (b"ARROW1", "an Arrow file"),
        (b"\x28\xb5\x2f\xfd", "zstd-compressed"),
        (b"PK\x03\x04", "a zip archive"),
    ];
    let undetected = |problem: String, remedy: &str| Err(RowFault::new(Stage::Detect, "detect", problem, remedy));
    for (magic, kind) in kinds {
        if sample.starts_with(magic) {
            return undetected(format!("the file is {kind}, not rows of text"), "turn it into JSON lines, CSV or .gz of them first");
        }
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

fn dialect_of(
    sample: &[u8],
    lines: &[&[u8]],
    options: &ReadOptions,
) -> Result<(Dialect, Vec<String>), RowFault> {
    let undetected = |problem: String, remedy: &str| RowFault::new(Stage::Detect, "detect", problem, remedy);
    let first = lines.first().copied().unwrap_or_default();
    let looks_json = first.starts_with(b"{") || first.starts_with(b"[");
    if options.dialect.map_or(!looks_json, Dialect::is_csv) {
        let header = csv_header(sample, options)?;
        let known = options.dialect.or_else(|| csv_rows::dialect_of(&header));
        let dialect = known.ok_or_else(|| {
            undetected(format!("no dialect has the columns {}", header.join(", ")), "name the dialect")
        })?;
        return Ok((dialect, header));
    }
    if let Some(dialect) = options.dialect {
        return Ok((dialect, Vec::new()));
    }
    if first.starts_with(b"[") || (first == b"{") {
        return Err(undetected(
            "the file is one JSON document over several lines".into(),
            "write one JSON object a line, for example with jq -c '.[]' or jq -c .",
        ));
    }
    let objects: Vec<Map<String, Value>> =
        lines.iter().take(64).filter_map(|line| flat::object(line).ok()).collect();
    let Some(row) = objects.first() else {
        return Err(undetected("no row of the sample is a JSON object".into(), "name the dialect, or mend the file"));
    };
    let found = json_dialect(row, &objects, options).ok_or_else(|| {
        let keys: Vec<&str> = row.keys().map(String::as_str).take(12).collect();
        undetected(format!("no dialect has the fields {}", keys.join(", ")), "name the dialect or the columns")
    })?;
    Ok((found, Vec::new()))
}

fn csv_header(sample: &[u8], options: &ReadOptions) -> Result<Vec<String>, RowFault> {
    let bytes = std::io::Cursor::new(sample.to_vec());
    let rows = CsvRows::new(Box::new(bytes), options.limits.row_bytes)?;
    Ok(rows.header().to_vec())
}

fn json_dialect(row: &Map<String, Value>, rows: &[Map<String, Value>], options: &ReadOptions) -> Option<Dialect> {
    let has = |key: &str| row.contains_key(key);
    let any = |key: &str| rows.iter().any(|row| row.contains_key(key));
    let columns = &options.columns;
    let own = |column: &Option<String>| column.as_deref().is_some_and(has);
    let is_dynamo = |map: &Map<String, Value>| {
        let schema = map.get("schema").and_then(Value::as_str).unwrap_or_default();
        schema.starts_with("dynamo.request.trace") || (map.contains_key("event_type") && map.contains_key("request"))
    };
    match row {
        _ if is_dynamo(row) || row.get("event").and_then(Value::as_object).is_some_and(is_dynamo) => Some(Dialect::DynamoRequest),
        _ if has("captureData") => Some(Dialect::SagemakerCapture),
        _ if has("requests") => Some(Dialect::Weka),
        _ if has("turns") => Some(Dialect::MultiTurn),
        _ if has("resourceSpans") || has("spans") || has("span_id") || has("spanId") => Some(Dialect::Otel),
        _ if has("chat_id") && any("parent_chat_id") => Some(Dialect::Bailian),
        _ if has("input_prompt_length") && has("num_turns") => Some(Dialect::AppliedComputeAgentic),
        _ if has("input_tokens_total") => Some(Dialect::TraceLab),
        _ if ["wait_for", "branches", "prefix_reset", "tool_wait_ms"].iter().any(|key| any(key)) => Some(Dialect::AgenticMooncake),
        _ if own(&columns.input_length) || own(&columns.hash_ids) => Some(Dialect::Mooncake),
        _ if ["input_length", "input_tokens", "text_input", "messages", "payload", "prompt_token_ids", "text"]
            .iter().any(|key| has(key)) => Some(Dialect::Mooncake),
        _ => None,
    }
}

fn flat_rows(dialect: Dialect, lines: &[&[u8]], options: &ReadOptions) -> Vec<FlatRow> {
    if !matches!(dialect, Dialect::Mooncake | Dialect::MooncakeDelta | Dialect::AgenticMooncake | Dialect::Bailian) {
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
    let (Some(column), Ok(mut csv)) = (column, CsvRows::new(Box::new(bytes), options.limits.row_bytes)) else {
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
    let numbers: Vec<f64> = times.iter().filter_map(|t| match t {
        Stamp::Number(n) => Some(*n),
        Stamp::Text(_) => None,
    }).collect();
    let always_dates = matches!(dialect, Dialect::AzureCsv | Dialect::Otel | Dialect::SagemakerCapture | Dialect::DynamoRequest | Dialect::TraceLab);
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
        let problem = format!("times in {usual} (as {dialect} has them) would mean {} requests a second, in {other} {}", rate_text(&numbers, usual), rate_text(&numbers, other));
        if options.strict {
            return Err(RowFault::new(Stage::Detect, "time-unit", problem, format!("pass the time unit: {usual} or {other}")));
        }
        assumptions.push(format!("{problem}; {usual} was kept"));
    }
    assumptions.push(format!("times in {usual} (as {dialect} has them)"));
    Ok((usual, false))
}

fn rate_per_s(numbers: &[f64], unit: TimeUnit) -> Option<f64> {
    let (low, high) = numbers.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), n| (l.min(*n), h.max(*n)));
    let span_s = (high - low) * unit.in_ms() / 1000.0;
    #[expect(clippy::cast_precision_loss, reason = "a sample is small")]
    let rows = numbers.len() as f64;
    (numbers.len() >= FEWEST_TIMED_ROWS && span_s > 0.0).then(|| rows / span_s)
}

fn rate_text(numbers: &[f64], unit: TimeUnit) -> String {
    rate_per_s(numbers, unit).map_or_else(|| "unknown".into(), |rate| format!("{rate:.3}"))
}

/// The other unit (ms for s, s for ms) where the usual one gives a rate that nobody would believe
/// and the other one that anybody would.
pub(crate) fn doubtful_unit(usual: TimeUnit, numbers: &[f64]) -> Option<TimeUnit> {
    let other = match usual {
        TimeUnit::Seconds => TimeUnit::Milliseconds,
        _ => TimeUnit::Seconds,
    };
    let believable = |unit| rate_per_s(numbers, unit).is_some_and(|rate| BELIEVABLE_RATE.contains(&rate));
    let doubtful = rate_per_s(numbers, usual).is_some() && !believable(usual) && believable(other);
    doubtful.then_some(other)
}

fn usual_block(dialect: Dialect) -> u32 {
    match dialect {
        Dialect::Bailian => 16,
        Dialect::Weka | Dialect::TraceLab => 64,
        _ => 512,
    }
}

/// Block sizes for which every (ids, tokens) pair of a sample holds: `(counted, dropped)`, as
/// inclusive ranges, for tails that have an id and tails that have none.
pub(crate) fn implied_block(pairs: &[(u64, u64)]) -> (Option<(u64, u64)>, Option<(u64, u64)>) {
    let (mut counted, mut dropped) = ((1, u64::MAX), (1, u64::MAX));
    for &(ids, tokens) in pairs {
        if ids == 0 || tokens == 0 {
            continue;
        }
        let most = if ids == 1 { u64::MAX } else { tokens.div_ceil(ids - 1) - 1 };
        counted = (counted.0.max(tokens.div_ceil(ids)), counted.1.min(most));
        dropped = (dropped.0.max(tokens / (ids + 1) + 1), dropped.1.min(tokens / ids));
    }
    let some = |range: (u64, u64)| (range.0 <= range.1).then_some(range);
    (some(counted), some(dropped))
}

fn block_of(
    dialect: Dialect,
    lines: &[&[u8]],
    rows: &[FlatRow],
    options: &ReadOptions,
    assumptions: &mut Vec<String>,
) -> Result<(u32, bool), RowFault> {
    let weka_tails = dialect == Dialect::Weka;
    let embedded = match dialect {
        Dialect::DynamoRequest => lines.iter().find_map(|line| dynamo::block_tokens(line)),
        Dialect::Weka => lines.iter().find_map(|line| weka::block_tokens(line)),
        _ => None,
    };
    if options.block_tokens == Some(0) || embedded == Some(0) {
        return Err(RowFault::new(Stage::Detect, "block-size", "a block of 0 tokens", "give a block size of at least 1"));
    }
    let pairs: Vec<(u64, u64)> = rows.iter().filter_map(|row| {
        let ids = row.hash_ids.as_ref()?;
        Some((ids.len() as u64, u64::try_from(row.input_length?).ok()?))
    }).collect();
    let (counted, dropped) = implied_block(&pairs);
    let within = |range: Option<(u64, u64)>, block: u32| range.is_some_and(|(low, high)| (low..=high).contains(&u64::from(block)));
    let told = options.block_tokens.map(|b| (b, "as told")).or(embedded.map(|b| (b, "embedded in the rows")));
    if let Some((block, why)) = told {
        let tails = weka_tails || (!within(counted, block) && within(dropped, block));
        assumptions.push(format!("blocks of {block} tokens ({why}){}", tails_text(tails)));
        return Ok((block, tails));
    }
    let usual = usual_block(dialect);
    let has_ids = pairs.iter().any(|pair| pair.0 > 0);
    if within(counted, usual) || !has_ids {
        let why = if has_ids { "ids and lengths agree" } else { "no ids to tell" };
        assumptions.push(format!("blocks of {usual} tokens (usual for {dialect}; {why}){}", tails_text(weka_tails)));
        return Ok((usual, weka_tails));
    }
    if within(dropped, usual) {
        assumptions.push(format!("blocks of {usual} tokens (usual for {dialect}){}", tails_text(true)));
        return Ok((usual, true));
    }
    for (range, tails) in [(counted, false), (dropped, true)] {
        if let Some(block) = range.and_then(power_of_two_in) {
            assumptions.push(format!("blocks of {block} tokens (implied by ids and lengths; {dialect} usually has {usual}){}", tails_text(tails)));
            return Ok((block, tails));
        }
    }
    assumptions.push(format!("blocks of {usual} tokens (usual for {dialect}; ids and lengths do not agree with any one size)"));
    Ok((usual, false))
}

fn tails_text(dropped: bool) -> &'static str {
    if dropped { "; tails shorter than a block have no id and get one of their own" } else { "" }
}

fn power_of_two_in((low, high): (u64, u64)) -> Option<u32> {
    let block = low.checked_next_power_of_two()?;
    (block <= high).then(|| u32::try_from(block).ok()).flatten()
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
        assumptions.push("later turns of a session hold only what is new: whole prompts are rebuilt, answers included".into());
        return Ok(true);
    }
    if options.context.is_none() && dialect == Dialect::Mooncake {
        if let Some(session) = shrinking_session(rows) {
            let problem = format!("later turns of session {session} are shorter than the ones before: full context or delta?");
            if options.strict {
                return Err(RowFault::new(Stage::Detect, "shrink", problem, "pass the context: full or delta"));
            }
            assumptions.push(format!("{problem}; full context was kept"));
        }
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

    fn detect(text: &str) -> Result<Settled, RowFault> {
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
            (r#"{"request_id":"a","input_length":6,"output_length":1,"wait_for":[]}"#, Dialect::AgenticMooncake),
            (r#"{"schema":"dynamo.request.trace.v1","event_type":"request_end"}"#, Dialect::DynamoRequest),
            (r#"{"timestamp":1,"event":{"schema":"dynamo.request.trace.v1"}}"#, Dialect::DynamoRequest),
            (r#"{"num_turns":1,"input_prompt_length":64}"#, Dialect::AppliedComputeAgentic),
            (r#"{"id":"a","requests":[]}"#, Dialect::Weka),
            (r#"{"session_id":"a","turns":[]}"#, Dialect::MultiTurn),
            (r#"{"trace_id":"a","spans":[]}"#, Dialect::Otel),
            (r#"{"chat_id":1,"parent_chat_id":-1,"timestamp":1.5,"input_length":5,"output_length":1}"#, Dialect::Bailian),
            (r#"{"session_id":"a","input_tokens_total":5}"#, Dialect::TraceLab),
            (r#"{"captureData":{}}"#, Dialect::SagemakerCapture),
            ("TIMESTAMP,ContextTokens,GeneratedTokens\n", Dialect::AzureCsv),
            ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n", Dialect::BurstGptCsv),
            ("request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n", Dialect::SplitwiseCsv),
            ("arrived_at,num_prefill_tokens,num_decode_tokens\n", Dialect::VidurCsv),
        ] {
            assert_eq!(dialect(text), wanted, "{text}");
        }
    }

    #[test]
    fn what_is_not_lines_is_refused_with_a_remedy() {
        for text in ["PAR1xxxx", "\n\n", "[\n{\"a\":1}\n]", "{\n\"a\":1}", "{\"what\":1}\n", "a,b\n1,2\n"] {
            let fault = detect(text).unwrap_err();
            assert_eq!(fault.stage, Stage::Detect, "{text}");
            assert!(!fault.remedy.is_empty());
        }
    }

    #[test]
    fn the_block_size_follows_from_ids_and_lengths() {
        let row = |tokens: u64, ids: u64| format!("{{\"timestamp\":0,\"input_length\":{tokens},\"output_length\":1,\"hash_ids\":{:?}}}\n", (0..ids).collect::<Vec<_>>());
        let block = |text: String| {
            let setup = detect(&text).unwrap().setup;
            (setup.block_tokens, setup.tails_dropped)
        };
        assert_eq!(block(row(600, 2) + &row(1025, 3)), (512, false));
        assert_eq!(block(row(600, 1) + &row(1025, 2)), (512, true));
        assert_eq!(block(row(100, 7) + &row(33, 3)), (16, false));
        assert_eq!(block(row(127, 1) + &row(260, 4)), (64, true));
    }

    #[test]
    fn seconds_in_a_millisecond_dialect_are_not_taken_in_silence() {
        let text: String = (0..20).map(|i| format!("{{\"timestamp\":{},\"input_length\":5,\"output_length\":1}}\n", f64::from(i) * 0.7)).collect();
        let fault = detect(&text).unwrap_err();
        assert_eq!(fault.rule, "time-unit");
        let options = ReadOptions { time_unit: Some(TimeUnit::Seconds), ..ReadOptions::default() };
        assert_eq!(settle(text.as_bytes(), true, &options).unwrap().setup.unit, TimeUnit::Seconds);
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
