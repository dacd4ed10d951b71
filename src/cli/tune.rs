//! `baton tune`: the ratio, admission and other settings that serve a trace best, found on its first part and judged on the
//! rest.

mod answer;
mod classes;
mod file;
mod ledger;
mod runs;
mod scenarios;
mod space;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use baton_sim::interval::FigureInterval;
use baton_sim::tune::{self, Candidate, RunTally};
use baton_traces::scale;
use baton_traces::{Dialect, ReadOptions, TimeUnit, Trace};

use super::{out, replay};
use crate::config::{self, Config};
use crate::policy;
use answer::{ScenarioAnswer, TuneAnswer};
use classes::ClassObjective;
use runs::{CountedRun, RunDriver};
use scenarios::WhatIfScenario;
use space::{NodeRoom, TuningOptions, split_of};

/// Requests that each part of a trace needs at least: shares of fewer say nothing.
const LEAST_ROWS: usize = 100;
/// By how much the load is raised over the head-room to see what gives out first.
const BEYOND: f64 = 1.1;

/// Arguments of `baton tune`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    baton tune trace.jsonl --nodes 16 --speed 4                    tuned on the first half, judged on the second\n  \
    baton tune capture.jsonl --gpus 128 --class interactive=2s/50ms@99% --class batch=60s/200ms@95%\n  \
    baton tune trace.jsonl --goal nodes --speed 2                  the fewest nodes that keep the targets\n  \
    baton tune trace.jsonl --what-if traffic=2,nodes=+2 --out policy.toml --html tune.html --state tune.state")]
pub struct TuneArgs {
    /// Trace, or capture of a live service [default: the published conversation trace where found, else a look-alike]
    file: Option<PathBuf>,
    /// Dialect of the trace, as in `baton trace` [default: detected from the first rows]
    #[arg(long)]
    dialect: Option<Dialect>,
    /// Unit of the trace's times: ns, us, ms or s [default: the dialect's]
    #[arg(long)]
    time_unit: Option<TimeUnit>,
    /// Spread rows of one instant evenly to the next, for traces whose times are rounded
    #[arg(long)]
    spread: bool,
    /// The configuration at hand, as TOML: what is not tuned stays as it is there [default: all defaults]
    #[arg(long)]
    config: Option<PathBuf>,
    /// Nodes to divide among prefill and decode [default: as many as the configuration has]
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=60_000), conflicts_with = "gpus")]
    nodes: Option<u32>,
    /// The same in GPUs
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=480_000))]
    gpus: Option<u32>,
    /// GPUs of a node [default: what the profile's name says: 8 of llama3-70b-8xa100]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    gpus_per_node: Option<u32>,
    /// A service class as NAME=TTFT/TBT@SHARE, in place of the configuration's; may be repeated; the first is the default
    #[arg(long, value_name = "CLASS")]
    class: Vec<ClassObjective>,
    /// What to look for: as many requests in SLO as possible, or as few nodes as keep the targets
    #[arg(long, value_enum, default_value_t = TuneGoal::Goodput)]
    goal: TuneGoal,
    /// Speed-up of the trace
    #[arg(long, default_value = "1", value_parser = replay::speed)]
    speed: f64,
    /// Share of the trace's time, at its end, that nothing is tuned on, 0.1 to 0.9
    #[arg(long, value_name = "SHARE", default_value = "0.5", value_parser = part)]
    hold_out: f64,
    /// Seeds with which the last candidates, and the answer, are judged
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=20))]
    seeds: u64,
    /// KV tokens that a node may hold in DRAM at most; without it the setting stays
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    dram_tokens: u64,
    /// KV tokens that a node may hold on SSD at most; without it the setting stays
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    ssd_tokens: u64,
    /// What the tuned configuration does with traffic=2, dram=0.5, ssd=0.5 or nodes=+2, each by itself
    #[arg(long, value_delimiter = ',', value_name = "CHANGE", allow_hyphen_values = true)]
    what_if: Vec<WhatIfScenario>,
    /// Keep every finished run in this file: another start with it does none of them again
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Write the tuned settings to this file, as far as they differ from the defaults: `baton serve --config` reads it
    #[arg(long, value_name = "OUT")]
    out: Option<PathBuf>,
    /// Write the answer to this file as JSON
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
    /// Write a self-contained page to this file: the present and the tuned configuration side by side
    #[arg(long, value_name = "OUT")]
    html: Option<PathBuf>,
    /// Runs at the same time [default: one a processor]
    #[arg(long, value_parser = super::threads)]
    jobs: Option<usize>,
}

/// What to look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum TuneGoal {
    /// As many requests in SLO as possible: first what the classes lack to their targets, then all requests.
    Goodput,
    /// As few nodes, and so GPUs, as keep the targets of all classes.
    #[value(alias = "cost")]
    Nodes,
}

fn part(text: &str) -> Result<f64> {
    let (digits, unit) = text.strip_suffix('%').map_or((text, 1.0), |digits| (digits, 0.01));
    let share = digits.trim().parse::<f64>().map(|share| share * unit);
    share.ok().filter(|share| (0.1..=0.9).contains(share)).context("give a share from 0.1 to 0.9")
}

/// Runs `baton tune`.
pub fn run(args: TuneArgs) -> Result<ExitCode> {
    for path in [&args.state, &args.out, &args.json, &args.html].into_iter().flatten() {
        out::has_folder(path)?;
    }
    let (mut config, blocks) = config::load_with_blocks(args.config.as_deref())?;
    classes::apply(&args.class, &mut config);
    config.validate()?;
    let gpus_per_node = args.gpus_per_node.or_else(|| gpus_of(&config.cluster.profile));
    let nodes = nodes(&args, gpus_per_node)?;
    let trace = read(&args, blocks)?;
    replay::warn_blocks(&trace, blocks);
    classes::check(&trace, &config.scheduler.classes)?;
    let parts = Parts::of(&trace, args.hold_out)?;
    let tenants =
        |record: &baton_traces::Record| record.extra.as_ref().and_then(|extra| extra.tenant.clone());
    let several = trace.records.windows(2).any(|pair| tenants(&pair[0]) != tenants(&pair[1]));
    let room = NodeRoom { dram_tokens: args.dram_tokens, ssd_tokens: args.ssd_tokens, tenants: several };
    let runner = RunDriver::new(trace, args.speed, args.state.as_deref(), args.jobs)?;
    let mut tuner = TuneDriver { runner, parts, room, seeds: args.seeds, trials: 0 };
    let base = TuningOptions::new(&config, nodes, room)?.base().clone();
    scenarios::check(&args.what_if, &base, room)?;
    let (mut left_out, mut too_few_nodes) = (Vec::new(), false);
    let found = match args.goal {
        TuneGoal::Goodput => {
            let found = tuner.best(&config, nodes)?;
            let borne_out = tuner.is_borne_out(&base, &found)?;
            if !borne_out {
                left_out = changes(&base, &found);
            }
            if borne_out { found } else { base.clone() }
        }
        TuneGoal::Nodes => {
            let fewest = tuner.fewest(&config, nodes)?;
            too_few_nodes = fewest.is_none();
            fewest.map_or_else(|| tuner.best(&config, nodes), Ok)?
        }
    };
    let answer = tuner.answer(&base, &found, &args.what_if)?;
    let mut answer = TuneAnswer { left_out, too_few_nodes, ..answer };
    answer.gpus = gpus_per_node.map(|gpus| gpus * nodes_of(&found).unwrap_or(0));
    if let Some(gpus) = gpus_per_node {
        answer.goodput_per_minute = answer.goodput_per_minute.map(|goodput| goodput / f64::from(gpus));
    }
    answer.sentence = answer::sentence(&answer);
    out::print(&format!("{}\n{}", answer.sentence, answer::tables(&answer)))?;
    write_files(&args, &tuner, (&base, &found), &answer)?;
    Ok(if answer.too_few_nodes { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn write_files(
    args: &TuneArgs,
    tuner: &TuneDriver,
    (base, found): (&Config, &Config),
    answer: &TuneAnswer,
) -> Result<()> {
    if let Some(path) = &args.out {
        let head = format!("Made by baton tune: what differs from the defaults.\n{}", answer.sentence);
        let elsewhere = match (&args.config, base.service != Config::default().service) {
            (Some(file), true) => {
                format!("\n[service] and [router] of {} are not repeated here.", file.display())
            }
            _ => String::new(),
        };
        out::save(path, &file::text(found, &(head + &elsewhere))?)?;
    }
    if let Some(path) = &args.json {
        out::save(path, &serde_json::to_string_pretty(answer)?)?;
    }
    if let Some(path) = &args.html {
        let whole =
            |config: &Config| tuner.runner.result(&tuner.run_of(config, 0, 1.0, (0.0, tuner.parts.end_ms)));
        let runs = [whole(base)?, whole(found)?];
        let mut facts = vec![
            ("answer".to_owned(), answer.sentence.clone()),
            ("changed".to_owned(), answer.changes.join("; ")),
            (
                "figures below".to_owned(),
                "of the whole trace, the part that was tuned on among it: first the present \
                                          configuration, then the tuned one"
                    .to_owned(),
            ),
        ];
        facts.extend(answer::tables(answer).lines().filter_map(|line| {
            line.split_once(": ")
                .filter(|(name, _)| name.starts_with("what if"))
                .map(|(a, b)| (a.into(), b.into()))
        }));
        out::save(path, &baton_sim::report::html("Tune", &facts, &runs))?;
    }
    for path in [&args.out, &args.json, &args.html].into_iter().flatten() {
        note!("written: {}", path.display());
    }
    Ok(())
}

/// GPUs of a node by its profile's name: the number before the `x` of its last part.
fn gpus_of(profile: &str) -> Option<u32> {
    let name = profile.rsplit('/').next()?.trim_end_matches(".toml");
    name.split('-').rev().find_map(|part| part.split_once('x')?.0.parse().ok().filter(|gpus| *gpus > 0))
}

/// Nodes asked for.
fn nodes(args: &TuneArgs, gpus_per_node: Option<u32>) -> Result<Option<u32>> {
    let Some(gpus) = args.gpus else { return Ok(args.nodes) };
    let each = gpus_per_node.context(
        "--gpus: the profile's name does not say how many GPUs a node has; give --gpus-per-node or --nodes",
    )?;
    if gpus % each != 0 || gpus / each < 2 {
        let near = (gpus / each).max(2) * each;
        bail!(
            "--gpus: {gpus} GPUs are not two or more whole nodes of {each}; give {near} or {}, or --gpus-per-node",
            near + each
        );
    }
    Ok(Some(gpus / each))
}

/// Settings of one that are different in another, in words.
fn changes(base: &Config, found: &Config) -> Vec<String> {
    policy::changes(base, found).iter().map(ToString::to_string).collect()
}

fn nodes_of(config: &Config) -> Result<u32> {
    split_of(config, None).map(|split| split.prefills + split.decodes)
}

fn read(args: &TuneArgs, blocks: Option<u32>) -> Result<Trace> {
    let mut trace = match &args.file {
        Some(path) => {
            let options = ReadOptions {
                dialect: args.dialect,
                time_unit: args.time_unit,
                block_tokens_without_ids: blocks,
                ..ReadOptions::default()
            };
            baton_traces::load(path, &options)?
        }
        None => replay::default_trace()?,
    };
    trace.assumptions.iter().for_each(|assumption| note!("assumed: {assumption}"));
    if args.spread {
        scale::spread(&mut trace);
    }
    if !trace.records.is_empty() {
        replay::in_a_life(&trace, usize::MAX)?;
    }
    Ok(trace)
}

/// The two parts of a trace, ms from its first row.
#[derive(Clone, Copy, Debug)]
struct Parts {
    /// Where the part to tune on ends.
    split_ms: f64,
    /// Just after the last row.
    end_ms: f64,
    /// Rows of each.
    rows: [usize; 2],
}

impl Parts {
    fn of(trace: &Trace, hold_out: f64) -> Result<Self> {
        let first_ms = trace.records.first().map_or(0.0, |record| record.timestamp_ms);
        let span_ms = trace.span_ms();
        let split_ms = span_ms * (1.0 - hold_out);
        let tuned = trace.records.iter().filter(|record| record.timestamp_ms - first_ms < split_ms).count();
        let rows = [tuned, trace.records.len() - tuned];
        if rows.iter().any(|rows| *rows < LEAST_ROWS) {
            bail!(
                "tune: the trace has {} rows to tune on and {} to hold out, and needs {LEAST_ROWS} of each; give a \
                 longer trace, or another --hold-out",
                rows[0],
                rows[1]
            );
        }
        Ok(Self { split_ms, end_ms: span_ms + 1.0, rows })
    }
}

/// The search, with all that it needs.
struct TuneDriver {
    runner: RunDriver,
    parts: Parts,
    room: NodeRoom,
    seeds: u64,
    trials: usize,
}

impl TuneDriver {
    fn run_of(&self, config: &Config, seed: u64, load: f64, part_ms: (f64, f64)) -> CountedRun {
        CountedRun { config: config.clone(), seed, load, part_ms }
    }

    /// Runs that count the held-out part, one for each seed.
    fn held_out(&mut self, round: &str, config: &Config, load: f64, seeds: u64) -> Result<Vec<RunTally>> {
        let part = (self.parts.split_ms, self.parts.end_ms);
        let runs: Vec<CountedRun> = (0..seeds).map(|seed| self.run_of(config, seed, load, part)).collect();
        self.runner.tallies(round, &runs)
    }

    /// The best configuration with this many nodes, by the part to tune on.
    fn best(&mut self, config: &Config, nodes: Option<u32>) -> Result<Config> {
        let space = TuningOptions::new(config, nodes, self.room)?;
        let targets: Vec<f64> = config.scheduler.classes.iter().map(answer::target).collect();
        let split_ms = self.parts.split_ms;
        let knobs = space.knobs().to_vec();
        let runner = &mut self.runner;
        let mut tallies = |round: &'static str, trials: &[tune::SearchTrial]| {
            let run = |trial: &tune::SearchTrial| {
                #[expect(clippy::cast_precision_loss, reason = "thousandths")]
                let part_ms = (0.0, split_ms * trial.window_permille as f64 / 1000.0);
                Ok(CountedRun {
                    config: space.config(&trial.candidate)?,
                    seed: trial.seed,
                    load: 1.0,
                    part_ms,
                })
            };
            let runs: Result<Vec<CountedRun>> = trials.iter().map(run).collect();
            runner.tallies(round, &runs?)
        };
        let found = tune::search(&knobs, &targets, self.seeds, &mut tallies)?;
        self.trials += found.trials;
        // A search that found nothing better leaves everything alone.
        let base = Candidate(knobs.iter().map(|knob| knob.base).collect());
        space.config(if found.best_merit > found.base_merit { &found.best } else { &base })
    }

    /// Whether a configuration is better than the present one in the held-out part, too, by more than chance.
    fn is_borne_out(&mut self, base: &Config, found: &Config) -> Result<bool> {
        let targets: Vec<f64> = base.scheduler.classes.iter().map(answer::target).collect();
        let now = self.held_out("held out", base, 1.0, self.seeds)?;
        let tuned = self.held_out("held out", found, 1.0, self.seeds)?;
        Ok(tune::is_better(&tuned, &now, &targets, base.scheduler.seed))
    }

    /// The best configuration with the fewest nodes that meet all targets in both parts. None where not even all do.
    fn fewest(&mut self, config: &Config, nodes: Option<u32>) -> Result<Option<Config>> {
        let most = nodes.map_or_else(|| nodes_of(config), Ok)?;
        let fewest = tune::fewest(most, |nodes| {
            if nodes < 2 {
                return anyhow::Ok(false);
            }
            note!("tune: do {nodes} nodes keep the targets?");
            let found = self.best(config, Some(nodes))?;
            let part = (0.0, self.parts.split_ms);
            let runs: Vec<CountedRun> =
                (0..self.seeds).map(|seed| self.run_of(&found, seed, 1.0, part)).collect();
            let tuned = self.runner.tallies("targets", &runs)?;
            let held_out = self.held_out("targets", &found, 1.0, self.seeds)?;
            Ok([tuned, held_out].iter().all(|runs| answer::meets(runs, &config.scheduler.classes)))
        })?;
        fewest.map(|nodes| self.best(config, Some(nodes))).transpose()
    }

    /// The factor of the load up to which a configuration keeps its targets, and what gives out then.
    fn headroom(&mut self, config: &Config) -> Result<(Option<f64>, Option<String>)> {
        let part = (self.parts.split_ms, self.parts.end_ms);
        let load = tune::largest_load(|loads| {
            let runs: Vec<CountedRun> =
                loads.iter().map(|load| self.run_of(config, 0, *load, part)).collect();
            let tallies = self.runner.tallies("head-room", &runs)?;
            let meets =
                |tally: &RunTally| answer::meets(std::slice::from_ref(tally), &config.scheduler.classes);
            anyhow::Ok(tallies.iter().map(meets).collect())
        })?;
        let beyond = load.unwrap_or(tune::LOADS.0) * BEYOND;
        let run = self.held_out("bottleneck", config, beyond, 1)?;
        Ok((load, run.first().and_then(answer::bottleneck).map(str::to_owned)))
    }

    fn answer(&mut self, base: &Config, found: &Config, what_if: &[WhatIfScenario]) -> Result<TuneAnswer> {
        let seed = base.scheduler.seed;
        let now = self.held_out("held out", base, 1.0, self.seeds)?;
        let tuned = self.held_out("held out", found, 1.0, self.seeds)?;
        let (headroom, next_bottleneck) = self.headroom(found)?;
        let mut scenarios = Vec::new();
        for scenario in what_if {
            let mut answer =
                ScenarioAnswer { scenario: scenario.to_string(), classes: Vec::new(), nothing: None };
            match scenario.apply(found) {
                Ok((config, load)) => {
                    let runs = self.held_out("what if", &config, load, self.seeds)?;
                    let classes = found.scheduler.classes.iter().enumerate();
                    let share = |(at, class): (usize, &baton_types::SloClass)| {
                        (class.name.clone(), tune::share(&runs, Some(at), seed))
                    };
                    answer.classes = classes.map(share).collect();
                }
                Err(error) => answer.nothing = Some(error.to_string()),
            }
            scenarios.push(answer);
        }
        let (nodes_now, nodes) = (nodes_of(base)?, nodes_of(found)?);
        let fewer = f64::from(nodes_now) / f64::from(nodes);
        let FigureInterval { figure, low, high } = tune::gain(&tuned, &now, seed);
        let per_node = |gain: f64| (1.0 + gain) * fewer - 1.0;
        let gain = FigureInterval { figure: per_node(figure), low: per_node(low), high: per_node(high) };
        Ok(TuneAnswer {
            sentence: String::new(),
            too_few_nodes: false,
            nodes: split_of(found, None)?.to_string(),
            nodes_now: split_of(base, None)?.to_string(),
            gpus: None,
            changes: changes(base, found),
            left_out: Vec::new(),
            classes: answer::classes(&found.scheduler.classes, &now, &tuned, seed),
            gain,
            more_than_chance: gain.excludes_zero(),
            goodput_per_minute: [self.per_minute(&now, nodes_now), self.per_minute(&tuned, nodes)],
            meets_targets: answer::meets(&tuned, &found.scheduler.classes),
            headroom,
            next_bottleneck,
            what_if: scenarios,
            requests: self.parts.rows.map(|rows| rows as u64),
            trials: self.trials,
        })
    }

    /// Requests in SLO a minute for each node, in the held-out part.
    #[expect(clippy::cast_precision_loss, reason = "counts for a figure")]
    fn per_minute(&self, runs: &[RunTally], nodes: u32) -> f64 {
        let minutes = (self.parts.end_ms - self.parts.split_ms) / self.runner.speed() / 60_000.0;
        let [_, in_slo] = tune::total(runs, None);
        in_slo as f64 / runs.len().max(1) as f64 / minutes / f64::from(nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profiles_name_says_how_many_gpus_a_node_has() {
        let of = ["llama3-70b-8xa100", "llama3-70b-8xa100-newtokens", "my/4xh100.toml", "mixtral", "tiny"];
        assert_eq!(of.map(gpus_of), [Some(8), Some(8), Some(4), None, None]);
    }

    #[test]
    fn a_share_is_written_either_way() {
        assert_eq!([part("0.25").unwrap(), part("25%").unwrap()], [0.25, 0.25]);
        assert!(["0", "1", "95%", "half"].iter().all(|text| part(text).is_err()));
    }
}
