//! `baton replay`: a trace through the real scheduler, in the simulator, or against a live endpoint.

mod values;

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Error, Result, anyhow, bail, ensure};
use baton_scheduler::{AdmissionMode, Decision, PolicyName};
use baton_sim::metrics::{Collector, Outcome};
use baton_sim::{RunResult, Setup, TraceWorkload, World};
use baton_traces::scale::{self, Scale};
use baton_traces::{Dialect, ReadOptions, TimeUnit, Trace};
use baton_types::{CostProfile, SloClass};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rayon::prelude::*;

use super::nodes::RoleSplit;
use super::require::Requirement;
use super::{bound, cluster, cpu, live, out, table, verdict};
use crate::config::{self, Config};
pub(super) use values::speed;
use values::{admission, at_least_one, policy, window};

/// How far ahead the policy `baton_informed` knows arrivals, µs.
const FORESIGHT_US: u64 = 60_000_000;

/// Arguments of `baton replay`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    baton replay                                       the conversation trace on the default cluster\n  \
    baton replay trace.jsonl --policy mooncake,baton --speed 1,2,3\n  \
    baton replay trace.jsonl --config cluster.toml --html report.html --json out.json\n  \
    baton replay trace.jsonl --require 'goodput>=0.95'   exit code 1 unless every run meets it\n  \
    baton replay trace.jsonl --nodes 4p12d,8p8d,12p4d  which ratio does best, and whether by more than chance\n  \
    baton replay trace.jsonl --speed 3,4 --bound       how much a better scheduler could gain at most\n  \
    baton replay trace.jsonl --live http://127.0.0.1:8000 --compare --config cluster.toml")]
pub struct ReplayArgs {
    /// Step a conductor again through a file of a live service's journal and compare what it orders
    #[arg(long, value_name = "FILE", conflicts_with_all = ["file", "config", "policy", "admission", "nodes", "requests", "decisions", "calibration", "bound", "html", "require", "spread", "window", "rows"])]
    journal: Option<PathBuf>,
    /// Trace to replay [default: the published conversation trace where found, else a seeded look-alike]
    pub(super) file: Option<PathBuf>,
    /// Dialect of the trace, as in `baton trace` [default: detected from the first rows]
    #[arg(long)]
    dialect: Option<Dialect>,
    /// Unit of the trace's times: ns, us, ms or s [default: the dialect's]
    #[arg(long)]
    time_unit: Option<TimeUnit>,
    /// Tokens that a block id of the trace stands for [default: the dialect's; without ids the config's, where it sets one]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    block_tokens: Option<u32>,
    /// Cluster, policy and objectives, as TOML [default: 8 prefill + 8 decode instances of Llama-3-70B on 8×A100]
    #[arg(long)]
    pub(super) config: Option<PathBuf>,
    /// Placement policies to run side by side, in place of the config's
    #[arg(long, value_delimiter = ',', value_parser = policy)]
    pub(super) policy: Vec<PolicyName>,
    /// Admission modes to run side by side, in place of the config's: auto, none, at_decode, early, early_predict, slo
    #[arg(long, value_delimiter = ',', value_parser = admission)]
    admission: Vec<AdmissionMode>,
    /// Nodes by role to run side by side, in place of the config's, such as 4p12d,8p8d: a node keeps what its role has
    #[arg(long, value_delimiter = ',', value_name = "NODES", conflicts_with = "live")]
    nodes: Vec<RoleSplit>,
    /// Speed-ups of the trace to run side by side
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = speed)]
    pub(super) speed: Vec<f64>,
    /// Seed of everything random [default: the config's scheduler.seed]
    #[arg(long)]
    pub(super) seed: Option<u64>,
    /// Replay only the rows that arrive in this stretch of the trace, in seconds, for example 600..1200
    #[arg(long, value_name = "FROM..TO", value_parser = window)]
    window: Option<(f64, f64)>,
    /// Spread rows of one instant evenly to the next, for traces whose times are rounded (Mooncake's: to 3 s)
    #[arg(long)]
    spread: bool,
    /// Replay only the first rows of the trace
    #[arg(long, value_parser = at_least_one)]
    pub(super) rows: Option<usize>,
    /// Replay the trace this many times in a row; the rounds share no blocks
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(super) repeat: u64,
    /// Write every figure of every run to this file
    #[arg(long, value_name = "OUT")]
    pub(super) json: Option<PathBuf>,
    /// Write one line for every request of every run to this file, by its row in what was replayed
    #[arg(long, value_name = "OUT")]
    pub(super) requests: Option<PathBuf>,
    /// Write one line for every placement decision of every run, with predicted and actual TTFT and each candidate's
    /// terms, to this file; sets scheduler.explain_every to 1 unless the config sets it
    #[arg(long, value_name = "OUT", conflicts_with = "live")]
    pub(super) decisions: Option<PathBuf>,
    /// Print how well predictions held, for each service class and way to the first token; --json and --html always have it
    #[arg(long, conflicts_with = "live")]
    calibration: bool,
    /// Report an upper bound on the requests in SLO, which no scheduler exceeds on this cluster, and the best run of all
    /// policies with all admission modes; this runs all of them (minutes for a long trace)
    #[arg(long, conflicts_with = "live")]
    bound: bool,
    /// Write a self-contained report page to this file
    #[arg(long, value_name = "OUT")]
    pub(super) html: Option<PathBuf>,
    /// Fail unless every run meets this, for example goodput>=0.95; may be repeated
    #[arg(long, value_name = "CONDITION")]
    pub(super) require: Vec<Requirement>,
    /// Audit every core every N moments of a run (slow)
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) audit: u64,
    /// Runs at the same time [default: one a processor]
    #[arg(long, value_parser = super::threads)]
    pub(super) jobs: Option<usize>,
    #[command(flatten)]
    pub(super) live: live::LiveArgs,
}

const DAY_MS: f64 = 86_400_000.0;
/// Longest stretch of time that is replayed: time in which nothing arrives takes work, too.
const SPAN_MAX_MS: f64 = 366.0 * DAY_MS;

/// One run to do.
#[derive(Clone)]
pub(super) struct Job {
    pub(super) policy: PolicyName,
    pub(super) speed: f64,
    pub(super) setup: Setup,
}

impl Job {
    /// The same with this policy, and what that one may know beforehand.
    pub(super) fn of(mut self, policy: PolicyName) -> Self {
        (self.policy, self.setup.scheduler.policy) = (policy, policy);
        self.setup.foresight_us = if policy.foresees() { FORESIGHT_US } else { 0 };
        self
    }
}

/// What is kept of a run for the terminal and the files.
pub(super) struct FinishedRun {
    pub(super) figures: RunResult,
    /// Every request's, if `--requests` asks for them.
    outcomes: Vec<Outcome>,
    /// The lines of `--decisions`.
    decisions: String,
}

/// Runs `baton replay`.
pub fn run(args: ReplayArgs) -> Result<ExitCode> {
    for path in [&args.json, &args.requests, &args.decisions, &args.html].into_iter().flatten() {
        out::has_folder(path)?;
    }
    if args.live.live.is_some() {
        return live::run(&args);
    }
    if let Some(journal) = &args.journal {
        return super::journal::run(journal, args.json.as_deref());
    }
    let (config, blocks) = config::load_with_blocks(args.config.as_deref())?;
    let mut jobs = jobs(&args, &config)?;
    let asked = jobs.len();
    if args.bound {
        ensure!(args.nodes.len() <= 1, "--bound: it is of one cluster; give one of --nodes at a time");
        jobs.extend(bound::rivals(&jobs));
    }
    let trace = Arc::new(read(&args, blocks)?);
    warn_blocks(&trace, blocks);
    warn_outside(&trace, &jobs[0].setup);
    warn_classes(&trace, &jobs[0].setup.scheduler.classes);
    let workers = args.jobs.unwrap_or(0);
    let pool =
        rayon::ThreadPoolBuilder::new().num_threads(workers).build().map_err(|e| anyhow!("replay: {e}"))?;
    let bar = progress(jobs.len() as u64 * rows(&args, &trace));
    let done: Result<Vec<FinishedRun>> =
        pool.install(|| jobs.par_iter().map(|job| simulate(job, &args, &trace, &bar)).collect());
    bar.finish_and_clear();
    let mut done = done?;
    if args.bound {
        pool.install(|| bound::attach(&mut done, &jobs, |job| workload(job, &args, &trace)))?;
        done.truncate(asked);
    }
    let runs: Vec<RunResult> = done.iter().map(|done| done.figures.clone()).collect();
    out::print(&format!("{}\n{}", table::report(&runs), verdict::lines(&runs)))?;
    if args.calibration {
        out::print(&format!("{}\n", table::calibration(&runs)))?;
    }
    write_files(&args, &config, &done, &runs)?;
    judge(&args.require, &runs)
}

/// Every combination of speed, nodes, policy and admission, checked before any work.
pub(super) fn jobs(args: &ReplayArgs, config: &Config) -> Result<Vec<Job>> {
    let seed = args.seed.unwrap_or(config.scheduler.seed);
    let policies = some_or(&args.policy, config.scheduler.policy);
    let modes = some_or(&args.admission, config.scheduler.admission);
    let mut clusters = Vec::new();
    for split in &args.nodes {
        let mut config = config.clone();
        split.apply(&mut config)?;
        clusters.push(cluster::setup(&config, seed)?);
    }
    if clusters.is_empty() {
        clusters.push(cluster::setup(config, seed)?);
    }
    let mut jobs = Vec::new();
    for &speed in &args.speed {
        for cluster in &clusters {
            for (&policy, &mode) in policies.iter().flat_map(|p| modes.iter().map(move |m| (p, m))) {
                let mut setup = cluster.clone();
                setup.scheduler.admission = mode;
                setup.audit_every = args.audit;
                setup.keep_outcomes = args.requests.is_some();
                if args.decisions.is_some() {
                    setup.scheduler.explain_every = setup.scheduler.explain_every.max(1);
                }
                jobs.push(Job { policy, speed, setup }.of(policy));
            }
        }
    }
    Ok(jobs)
}

/// What was asked for, or what is there.
fn some_or<T: Copy>(asked: &[T], there: T) -> Vec<T> {
    if asked.is_empty() { vec![there] } else { asked.to_vec() }
}

/// The trace asked for, or the published one, or its look-alike; says which and what was assumed. Rows without ids get
/// blocks of the configuration's size, where that names one.
pub(super) fn read(args: &ReplayArgs, blocks: Option<u32>) -> Result<Trace> {
    let trace = match &args.file {
        Some(path) => {
            let options = ReadOptions {
                dialect: args.dialect,
                time_unit: args.time_unit,
                block_tokens: args.block_tokens,
                block_tokens_without_ids: blocks,
                ..ReadOptions::default()
            };
            baton_traces::load(path, &options)?
        }
        None => default_trace()?,
    };
    for assumption in &trace.assumptions {
        note!("assumed: {assumption}");
    }
    let mut trace = match args.window {
        Some(_) => scale::apply(&trace, &Scale { window_ms: args.window, ..Scale::default() })?,
        None => trace,
    };
    if args.spread {
        scale::spread(&mut trace);
    }
    ensure!(!trace.records.is_empty(), "trace: there are no rows to replay; check the file and the window");
    in_a_life(&trace, args.rows.unwrap_or(usize::MAX))?;
    Ok(trace)
}

/// Refuses a trace that no replay would come to the end of: one damaged time is enough for that.
pub(super) fn in_a_life(trace: &Trace, rows: usize) -> Result<()> {
    let last = trace.records.len().min(rows).saturating_sub(1);
    let span_ms = trace.records[last].timestamp_ms - trace.records[0].timestamp_ms;
    if span_ms <= SPAN_MAX_MS {
        return Ok(());
    }
    bail!(
        "trace: its rows span {:.0} days, a replay takes 366; look for a wrong time or --time-unit, or give --window FROM..TO",
        span_ms / DAY_MS
    )
}

/// The published conversation trace where it is, else a seeded look-alike, which says so.
pub fn default_trace() -> Result<Trace> {
    if let Some(path) = baton_traces::locate("conversation_trace.jsonl") {
        note!("trace: {}", path.display());
        return Ok(baton_traces::load(&path, &ReadOptions::default())?);
    }
    note!(
        "trace: the published conversation trace is not here; a seeded look-alike takes its place (see README)"
    );
    Ok(baton_traces::synth::like(baton_traces::synth::PublishedTrace::Conversation, 1))
}

pub(super) fn rows(args: &ReplayArgs, trace: &Trace) -> u64 {
    args.rows.unwrap_or(usize::MAX).min(trace.records.len()) as u64 * args.repeat.max(1)
}

/// Warns when prompts are longer than what the profile was measured on.
fn warn_outside(trace: &Trace, setup: &Setup) {
    let profile: &CostProfile = &setup.pools[0].profile;
    let longest = profile.valid.max_prompt_tokens;
    let outside = trace.records.iter().filter(|r| longest > 0 && r.input_length > longest).count();
    if outside > 0 {
        #[expect(clippy::cast_precision_loss, reason = "a share for a message")]
        let share = 100.0 * outside as f64 / trace.records.len() as f64;
        note!(
            "warning: {outside} requests ({share:.2} %) have prompts beyond {longest} tokens, the longest that profile {} was measured on; their times are extrapolated",
            profile.name
        );
    }
}

/// Warns of a block size in the configuration that is not the trace's.
pub(in crate::cli) fn warn_blocks(trace: &Trace, blocks: Option<u32>) {
    if let Some(own) = blocks.filter(|own| *own != trace.block_tokens) {
        note!(
            "warning: scheduler.block_tokens = {own} does not count: the ids of the trace are of blocks of {} tokens",
            trace.block_tokens
        );
    }
}

/// Warns of rows whose class the configuration does not have.
fn warn_classes(trace: &Trace, classes: &[SloClass]) {
    let named = trace.records.iter().filter_map(|record| record.extra.as_ref()?.class.as_ref());
    let mut unknown: BTreeMap<&str, usize> = BTreeMap::new();
    named
        .filter(|name| classes.iter().all(|class| class.name != **name))
        .for_each(|name| *unknown.entry(name).or_default() += 1);
    // A trace may name as many as it has rows.
    for (name, rows) in unknown.iter().take(4) {
        note!(
            "warning: {rows} rows are of class {name}, which the configuration does not have; they count as class {}",
            classes[0].name
        );
    }
    if unknown.len() > 4 {
        note!("warning: so do those of {} more classes", unknown.len() - 4);
    }
}

pub(in crate::cli) fn progress(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    if !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let style =
        ProgressStyle::with_template("{bar:40} {human_pos}/{human_len} requests  {per_sec}  {eta} left");
    if let Ok(style) = style {
        bar.set_style(style);
    }
    bar
}

/// The load of a run, and its set-up as far as the trace decides it.
fn workload(job: &Job, args: &ReplayArgs, trace: &Arc<Trace>) -> (Setup, TraceWorkload) {
    let names = job.setup.scheduler.classes.iter().map(|c| c.name.clone()).collect();
    let mut setup = job.setup.clone();
    setup.scheduler.block_tokens = trace.block_tokens;
    let workload = TraceWorkload::new(Arc::clone(trace), job.speed)
        .with_classes(names)
        .limited(args.rows.unwrap_or(usize::MAX))
        .repeated(args.repeat);
    (setup, workload)
}

pub(super) fn simulate(
    job: &Job,
    args: &ReplayArgs,
    trace: &Arc<Trace>,
    bar: &ProgressBar,
) -> Result<FinishedRun> {
    let (setup, workload) = workload(job, args, trace);
    let (mode, seed) = (setup.scheduler.effective_admission(), setup.seed);
    let longest = setup.pools[0].profile.valid.max_prompt_tokens;
    let started = cpu::thread_cpu_s();
    let mut world = World::new(setup, Box::new(workload)).map_err(Error::msg)?;
    let mut seen = 0;
    while world.advance().map_err(Error::msg)? {
        let arrived = world.arrived();
        if arrived >= seen + 512 {
            bar.inc(arrived - seen);
            seen = arrived;
        }
    }
    bar.inc(world.arrived() - seen);
    world.rest().map_err(Error::msg)?;
    let mut metrics = world.into_metrics();
    let mut run = metrics.result((job.policy.name(), mode.name()), job.speed, seed);
    run.cpu_s = cpu::thread_cpu_s() - started;
    run.prompts_outside_profile =
        trace.records.iter().filter(|r| longest > 0 && r.input_length > longest).count() as u64;
    let decisions = match &args.decisions {
        Some(_) => decision_lines(&run, &metrics),
        None => String::new(),
    };
    Ok(FinishedRun { figures: run, outcomes: std::mem::take(&mut metrics.outcomes), decisions })
}

fn write_files(args: &ReplayArgs, config: &Config, done: &[FinishedRun], runs: &[RunResult]) -> Result<()> {
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&serde_json::json!({ "runs": runs }))?;
        out::save(path, &text)?;
    }
    if let Some(path) = &args.requests {
        let outcomes: Vec<_> = done.iter().map(|run| (&run.figures, run.outcomes.as_slice())).collect();
        out::save(path, &request_lines(&outcomes)?)?;
    }
    if let Some(path) = &args.decisions {
        let lines: String = done.iter().map(|run| run.decisions.as_str()).collect();
        out::save(path, &lines)?;
    }
    if let Some(path) = &args.html {
        let facts = facts(args, config);
        out::save(path, &baton_sim::report::html("Replay", &facts, runs))?;
    }
    let written = [&args.json, &args.requests, &args.decisions, &args.html];
    for path in written.into_iter().flatten() {
        note!("written: {}", path.display());
    }
    Ok(())
}

/// The settings of the run, for the head of a report.
pub(super) fn facts(args: &ReplayArgs, config: &Config) -> Vec<(String, String)> {
    let file =
        args.file.as_ref().map_or_else(|| "conversation (default)".into(), |f| f.display().to_string());
    let class = &config.scheduler.classes[0];
    let joint = if args.nodes.is_empty() { " + " } else { ", " };
    let pools: Vec<String> = if args.nodes.is_empty() {
        config.cluster.pools.iter().map(|p| format!("{}× {:?}", p.count, p.role)).collect()
    } else {
        args.nodes.iter().map(RoleSplit::to_string).collect()
    };
    #[expect(clippy::cast_precision_loss, reason = "figures for a page")]
    let objective =
        format!("TTFT ≤ {} s, TBT ≤ {} ms", class.ttft_us as f64 / 1e6, class.tbt_us as f64 / 1e3);
    vec![
        ("trace".into(), file),
        ("cluster".into(), format!("{} of {}", pools.join(joint).to_lowercase(), config.cluster.profile)),
        ("objective".into(), objective),
        ("seed".into(), args.seed.unwrap_or(config.scheduler.seed).to_string()),
    ]
}

/// An instance's number, unless none is known: of a refused request, or behind a live endpoint.
fn known(instance: u32) -> Option<u32> {
    (instance != u32::MAX).then_some(instance)
}

/// One JSON line a request, by run and row.
pub(super) fn request_lines(done: &[(&RunResult, &[Outcome])]) -> Result<String> {
    let mut text = Vec::new();
    for (run, outcomes) in done {
        let mut outcomes: Vec<&Outcome> = outcomes.iter().collect();
        outcomes.sort_unstable_by_key(|o| o.row);
        for o in outcomes {
            let line = serde_json::json!({
                "policy": run.policy, "speed": run.speed, "row": o.row, "status": o.status.name(), "class": o.class,
                "first_offer_us": o.first_offer_us, "offer_us": o.offer_us, "end_us": o.end_us,
                "input_tokens": o.prompt_tokens, "output_tokens": o.output_tokens, "cached_tokens": o.cached_tokens,
                "own_ttft_us": o.objectives.ttft_us, "own_tbt_us": o.objectives.tbt_us,
                "ttft_us": o.ttft_us, "tbt_us": o.gaps.worst_tenth_us, "itl_mean_us": o.gaps.mean_us,
                "attempts": o.attempts, "retry_after_us": o.retry_after_us,
                "prefill_instance": known(o.prefill), "decode_instance": known(o.decode),
                "prediction": o.prediction,
            });
            writeln!(text, "{line}")?;
        }
    }
    Ok(String::from_utf8(text)?)
}

/// One JSON line a recorded decision.
fn decision_lines(run: &RunResult, metrics: &Collector) -> String {
    let line = |decision: &Decision| {
        let chosen = decision.candidates.iter().find(|c| Some(c.instance) == decision.chosen);
        let line = serde_json::json!({
            "policy": run.policy, "speed": run.speed, "request": decision.request, "at_us": decision.at_us,
            "chosen": decision.chosen, "predicted_ttft_us": chosen.and_then(|c| c.ttft_us),
            "actual_ttft_us": metrics.ttft_after_us(decision), "candidates": decision.candidates,
        });
        format!("{line}\n")
    };
    metrics.decisions.iter().map(line).collect()
}

/// Exit code by the conditions asked for.
pub(super) fn judge(requirements: &[Requirement], runs: &[RunResult]) -> Result<ExitCode> {
    let mut met = true;
    for requirement in requirements {
        for run in runs {
            if let Err(why) = requirement.check(run) {
                note!("baton: {why:#}");
                met = false;
            }
        }
    }
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
