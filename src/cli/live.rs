//! `baton replay --live`: a trace against a running endpoint, and beside it what was predicted.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use baton_http::Client;
use baton_sim::metrics::Outcome;
use baton_sim::{RunResult, TraceWorkload, Workload};
use baton_traces::Trace;
use baton_types::Secret;
use http::HeaderValue;
use indicatif::ProgressBar;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use super::engines::tokenization_in;
use super::replay::{self, ReplayArgs};
use super::{out, table};
use crate::cli::loadgen::bodies::BodyPlan;
use crate::cli::loadgen::clock::RunClock;
use crate::cli::loadgen::compare::{ComparedFigure, compare};
use crate::cli::loadgen::figures::{self, RunName};
use crate::cli::loadgen::live::Sender;
use crate::cli::loadgen::pace::{Pace, PacedResult};
use crate::cli::loadgen::prompt::Vocabulary;
use crate::cli::loadgen::summary::LiveSummary;
use crate::cli::loadgen::target::{self, ClassKeys, ModelCard, Target, client_options};
use crate::config::{self, Config};

/// Ids below this are plain bytes for a byte-level tokenizer, and plain tokens for all others.
const BYTES: u32 = 256;
/// Time for building the first bodies before the clock starts.
const LEAD: Duration = Duration::from_millis(200);

/// Arguments of a live replay.
#[derive(clap::Args)]
#[command(next_help_heading = "Live replay")]
pub struct LiveArgs {
    /// Offer the trace to this endpoint at the trace's times, for example http://127.0.0.1:8000
    #[arg(long, value_name = "URL", conflicts_with_all = ["policy", "admission", "audit", "jobs"])]
    pub(super) live: Option<String>,
    /// Key that requests carry
    #[arg(long, value_name = "KEY", env = "BATON_API_KEY", hide_env_values = true)]
    api_key: Option<Secret<String>>,
    /// Key of the requests of one class, in place of --api-key; once for each class whose key is another
    #[arg(long, requires = "live", value_name = "CLASS=KEY", value_parser = class_key)]
    class_key: Vec<ClassKey>,
    /// Model to ask for [default: the first that the endpoint lists]
    #[arg(long, requires = "live")]
    model: Option<String>,
    /// Make prompts of token ids below this [default: what the endpoint reports, else 256]
    #[arg(long, requires = "live", value_name = "TOKENS")]
    vocab: Option<u32>,
    /// Make prompts of letters, a byte a token, for endpoints that take no token ids
    #[arg(long, requires = "live", conflicts_with = "vocab")]
    text: bool,
    /// Hugging Face folder of the endpoint's model. With --text, prompts are made of short words that are one token each
    /// for its tokenizer [default: letters]
    #[arg(long, requires = "text", value_name = "FOLDER")]
    tokenizer: Option<PathBuf>,
    /// Requests in flight at most
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    concurrency_cap: u32,
    /// Retry after a refusal with Retry-After, up to N times
    #[arg(long, value_name = "N", default_value_t = 0)]
    obey_retry_after: u32,
    /// Seconds that an attempt may take, and that a refused client waits at most
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Simulate the same load on the cluster that --config describes, and show predicted beside measured
    #[arg(long, requires = "live")]
    compare: bool,
    /// Format of standard output
    #[arg(long, requires = "live", value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// The format of standard output.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Tables for people.
    Table,
    /// The document that `--json` writes.
    Json,
}

/// A class, and the `authorization` of its requests.
type ClassKey = (String, HeaderValue);

fn class_key(text: &str) -> Result<ClassKey> {
    let (class, key) = text.split_once('=').unwrap_or_default();
    if class.is_empty() || key.is_empty() {
        bail!("give a class and its key, like batch=sk-batch");
    }
    Ok((class.into(), target::authorization(&Secret::from(key))?))
}

/// The keys by class, each for rows that there are.
fn class_keys(args: &LiveArgs, trace: &Trace) -> Result<ClassKeys> {
    let names: BTreeSet<&str> =
        trace.records.iter().filter_map(|row| row.extra.as_deref()?.class.as_deref()).collect();
    let mut keys = ClassKeys::new();
    for (class, key) in &args.class_key {
        if !names.contains(class.as_str()) {
            let names = Vec::from_iter(names).join(", ");
            bail!("--class-key {class}=...: no row of the trace has the class; it has: {names}");
        }
        ensure!(keys.insert(class.clone(), key.clone()).is_none(), "--class-key {class}=...: given twice");
    }
    Ok(keys)
}

/// The endpoint, and the calls to send.
struct Endpoint {
    target: Target,
    client: Client,
    model: String,
    vocabulary: Vocabulary,
    max_model_tokens: Option<u64>,
}

/// Runs `baton replay --live URL`.
pub fn run(args: &ReplayArgs) -> Result<ExitCode> {
    let [speed] = args.speed[..] else {
        bail!("live: a live replay has one --speed; replay once for each");
    };
    let config = config::load_or_default(args.config.as_deref())?;
    let mut predicted = if args.live.compare { replay::jobs(args, &config)? } else { Vec::new() };
    predicted.iter_mut().for_each(|job| {
        job.setup.clients.retries = args.live.obey_retry_after;
        job.setup.keep_outcomes = false;
    });
    let trace = Arc::new(replay::read(args, None)?);
    let class_keys = class_keys(&args.live, &trace)?;
    let runtime = Runtime::new().context("live: no threads to send from")?;
    let endpoint = runtime.block_on(endpoint(&args.live))?;
    warn(&endpoint, &trace);
    let identity = (endpoint.target.base().to_owned(), endpoint.model.clone(), endpoint.vocabulary.tokens());
    let paced = offer(args, (&config, speed), &trace, (endpoint, class_keys), &runtime)?;
    runtime.shutdown_background();
    let name = RunName {
        policy: "live",
        admission: "server",
        speed,
        seed: args.seed.unwrap_or(config.scheduler.seed),
    };
    let numbered = TraceWorkload::new(Arc::clone(&trace), speed);
    let mut runs = vec![figures::result(&paced.sent, &config.scheduler.classes, numbered.tenants(), name)];
    let trace = if paced.interrupted { first(&trace, paced.sent.len()) } else { trace };
    for job in &predicted {
        runs.push(replay::simulate(job, args, &trace, &ProgressBar::hidden())?.figures);
    }
    let summary = LiveSummary::new(&paced, identity);
    print_report(args, &config, &LiveReport { runs, paced: &paced, summary })
}

/// The first rows of a trace: as much of it as was sent.
fn first(trace: &Trace, rows: usize) -> Arc<Trace> {
    let mut trace = trace.clone();
    trace.records.truncate(rows.max(1));
    Arc::new(trace)
}

/// Asks the endpoint what it serves; without an answer, the arguments must say.
async fn endpoint(args: &LiveArgs) -> Result<Endpoint> {
    let url = args.live.as_deref().expect("a live replay has a URL");
    let target = Target::new(url, args.api_key.as_ref()).context("live")?;
    let client = Client::new(client_options());
    let listed = target.models(&client).await;
    let card: Option<ModelCard> = match (&args.model, listed) {
        (None, Err(why)) => bail!("live: {why:#}, or give --model"),
        (Some(_), Err(_)) => None,
        (Some(name), Ok(models)) => models.into_iter().find(|m| m.name == *name),
        (None, Ok(models)) => Some(
            models
                .into_iter()
                .next()
                .context("live: the endpoint lists no model; wait until it is ready, or give --model")?,
        ),
    };
    let card_vocab = card.as_ref().and_then(|c| c.vocab_tokens);
    let vocabulary = match &args.tokenizer {
        Some(folder) => Vocabulary::words(&tokenization_in(folder)?)?,
        None if args.text => Vocabulary::letters(),
        None => Vocabulary::new(args.vocab.or(card_vocab).unwrap_or(BYTES))?,
    };
    let max_model_tokens = card.as_ref().and_then(|c| c.max_model_tokens);
    let model = args.model.clone().or(card.map(|c| c.name)).expect("a model was given or listed");
    Ok(Endpoint { target, client, model, vocabulary, max_model_tokens })
}

/// Says beforehand what cannot come out as the trace has it.
fn warn(endpoint: &Endpoint, trace: &Trace) {
    if trace.block_tokens < endpoint.vocabulary.marked_tokens() {
        note!(
            "warning: blocks of {} tokens are too short to tell all block ids apart with {} token ids; some blocks may be equal by chance",
            trace.block_tokens,
            endpoint.vocabulary.tokens()
        );
    }
    let Some(longest) = endpoint.max_model_tokens else { return };
    let over = trace.records.iter().filter(|r| r.input_length + r.output_length > longest).count();
    if over > 0 {
        note!(
            "warning: {over} of {} requests are longer than the {longest} tokens that {} takes; it will refuse them",
            trace.records.len(),
            endpoint.model
        );
    }
}

/// Offers the load and waits for its end.
fn offer(
    args: &ReplayArgs,
    (config, speed): (&Config, f64),
    trace: &Arc<Trace>,
    (endpoint, class_keys): (Endpoint, ClassKeys),
    runtime: &Runtime,
) -> Result<PacedResult> {
    let rows = args.rows.unwrap_or(usize::MAX).min(trace.records.len());
    let workload = TraceWorkload::new(Arc::clone(trace), speed)
        .with_classes(config.scheduler.classes.iter().map(|c| c.name.clone()).collect())
        .limited(rows)
        .repeated(args.repeat);
    let plan = BodyPlan {
        trace: Arc::clone(trace),
        workload,
        rows_a_round: rows,
        vocabulary: endpoint.vocabulary,
        model: endpoint.model,
    };
    let planned = plan.start()?;
    let sender = Sender {
        target: endpoint.target,
        class_keys,
        client: endpoint.client,
        clock: RunClock::starting_in(LEAD),
        retries: args.live.obey_retry_after,
        timeout: Duration::from_secs(args.live.timeout),
        block_tokens: trace.block_tokens,
    };
    let stop = CancellationToken::new();
    runtime.spawn(interrupt(stop.clone()));
    let bar = replay::progress(replay::rows(args, trace));
    let each = bar.clone();
    let pace = Pace {
        sender: Arc::new(sender),
        concurrency_cap: args.live.concurrency_cap,
        stop,
        each: Box::new(move || each.inc(1)),
    };
    let paced = pace.run(&planned, runtime.handle());
    bar.finish_and_clear();
    Ok(paced)
}

/// The first Ctrl-C ends the run and reports; a second one ends the program.
async fn interrupt(stop: CancellationToken) {
    if tokio::signal::ctrl_c().await.is_ok() {
        stop.cancel();
        note!("stopping; what there is will be reported (once more to leave at once)");
        if tokio::signal::ctrl_c().await.is_ok() {
            std::process::exit(130);
        }
    }
}

/// The results of a run.
struct LiveReport<'a> {
    /// Measured, then predicted when asked for.
    runs: Vec<RunResult>,
    paced: &'a PacedResult,
    summary: LiveSummary,
}

fn print_report(args: &ReplayArgs, config: &Config, report: &LiveReport<'_>) -> Result<ExitCode> {
    let compared =
        report.runs.get(1).map(|predicted| compare(predicted, &report.runs[0])).unwrap_or_default();
    let document = json!({ "runs": report.runs, "live": report.summary, "compare": compared });
    let document = serde_json::to_string_pretty(&document).context("live: report")?;
    if args.live.format == Format::Json {
        out::print(&format!("{document}\n"))?;
    } else {
        out::print(&format!("{}\n{}\n", table::report(&report.runs), report.summary.text()))?;
        if !compared.is_empty() {
            out::print(&format!("{}\n", side_by_side(&compared)))?;
        }
    }
    if report.summary.late && args.live.format == Format::Json {
        note!("warning: requests went out late; see lag_ms");
    }
    write_files(args, config, report, &document)?;
    let run = &report.runs[0];
    if run.requests > 0 && run.failed == run.requests && !report.paced.interrupted {
        bail!("live: every request failed; see the errors of the report, and the server's log");
    }
    replay::judge(&args.require, &report.runs[..1])
}

fn write_files(args: &ReplayArgs, config: &Config, report: &LiveReport<'_>, document: &str) -> Result<()> {
    if let Some(path) = &args.json {
        out::save(path, document)?;
    }
    if let Some(path) = &args.requests {
        let outcomes: Vec<Outcome> = report.paced.sent.iter().map(|s| s.outcome).collect();
        out::save(path, &replay::request_lines(&[(&report.runs[0], &outcomes)])?)?;
    }
    if let Some(path) = &args.html {
        let mut facts = replay::facts(args, config);
        facts.push(("endpoint".into(), report.summary.url.clone()));
        facts.push(("client".into(), report.summary.text().replace('\n', " · ")));
        out::save(path, &baton_sim::report::html("Live replay", &facts, &report.runs))?;
    }
    for path in [&args.json, &args.requests, &args.html].into_iter().flatten() {
        note!("written: {}", path.display());
    }
    Ok(())
}

fn side_by_side(compared: &[ComparedFigure]) -> String {
    let figure = |v: Option<f64>| v.map_or_else(|| "–".into(), |v| format!("{v:.4}"));
    let error = |v: Option<f64>| v.map_or_else(|| "–".into(), |v| format!("{:+.1} %", 100.0 * v));
    let mut table = crate::cli::table::with_header(&["figure", "predicted", "measured", "error"], 1..);
    for c in compared {
        table.add_row([c.figure.clone(), figure(c.predicted), figure(c.measured), error(c.relative_error)]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::capture::{Capture, CaptureConfig, CaptureOutcome, CaptureRow};
    use crate::cli::{Cli, run};

    /// A capture of the service is a trace for every command, unchanged.
    #[test]
    fn a_capture_lints_clean_and_replays_unchanged() {
        let place = tempfile::tempdir().unwrap();
        let capture = Capture::start(CaptureConfig::new(place.path().into(), 64, 1)).unwrap();
        let mut hasher = baton_types::ChainHasher::new(1, b"m");
        let chain: Vec<_> = (0..40).map(|id| hasher.push_id(id)).collect();
        for at in (0..12usize).rev() {
            capture.record(CaptureRow {
                at_us: at as u64 * 400_000,
                prompt_tokens: 64 * (at as u64 + 10) + 5,
                output_tokens: 4,
                chain: chain[..at + 10].into(),
                class: None,
                objectives: baton_types::RequestObjectives::default(),
                session: Some(1),
                outcome: CaptureOutcome::Completed,
            });
        }
        assert_eq!(capture.close().files, 1);
        let (file, out) = (place.path().join("capture-00000001-b64.jsonl"), place.path().join("out.json"));
        let (file, json) = (file.display().to_string(), out.display().to_string());
        for words in [vec!["trace", "lint", &file], vec!["replay", &file, "--json", &json]] {
            let code = run(Cli::parse_from(std::iter::once("baton").chain(words.clone()))).unwrap();
            assert_eq!(format!("{code:?}"), format!("{:?}", std::process::ExitCode::SUCCESS), "{words:?}");
        }
        let report: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(out).unwrap()).unwrap();
        let simulated = &report["runs"][0];
        let prompt_tokens: u64 = (0..12).map(|at| 64 * (at + 10) + 5).sum();
        assert_eq!(
            (&simulated["completed"], &simulated["input_tokens"]),
            (&12.into(), &prompt_tokens.into())
        );
        // Each turn but the first finds the whole blocks of the one before.
        let found: u64 = (0..11).map(|at| at + 10).sum();
        let blocks: u64 = (0..12).map(|at| at + 11).sum();
        let ratio = simulated["block_hit_ratio"].as_f64().unwrap();
        assert!((ratio - found as f64 / blocks as f64).abs() < 1e-9, "{ratio}");
    }
}
