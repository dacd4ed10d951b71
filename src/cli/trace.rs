//! `baton trace`: check, describe, convert, change and make traces.

mod args;
mod show;

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use baton_traces::lint::lint;
use baton_traces::scale::Scaler;
use baton_traces::summary::{Summariser, SummaryOptions};
use baton_traces::synth;
use baton_traces::write::{FileWriter, Writer, create};
use baton_traces::{Progress, Reader, Record, load, open};
use indicatif::{ProgressBar, ProgressStyle};

pub use args::TraceArgs;
use args::{Action, ConvertArgs, Input, LintArgs, ScaleArgs, StatsArgs, SynthArgs, Target};

/// Rows between two looks at the progress.
const ROWS_PER_TICK: u64 = 4096;
/// Files below this are read too soon for a progress bar.
const SMALL_FILE_BYTES: u64 = 16 << 20;

/// Runs `baton trace`. The code is 1 where lint found something.
pub fn run(args: TraceArgs) -> Result<ExitCode> {
    match args.action {
        Action::Lint(args) => run_lint(&args),
        Action::Stats(args) => run_stats(&args).map(|()| ExitCode::SUCCESS),
        Action::Convert(args) => run_convert(&args).map(|()| ExitCode::SUCCESS),
        Action::Scale(args) => run_scale(&args).map(|()| ExitCode::SUCCESS),
        Action::Synth(args) => run_synth(&args).map(|()| ExitCode::SUCCESS),
    }
}

impl Input {
    /// Streams every record to `each`, with a progress bar; returns the reader for what it assumed.
    fn stream(
        &self,
        max_rows: Option<u64>,
        each: &mut dyn FnMut(&Reader, Record) -> Result<()>,
    ) -> Result<Reader> {
        let mut reader = open(&self.file, &self.options(max_rows))?;
        let bar = Bar::new(&reader.progress());
        while let Some(record) = reader.next() {
            each(&reader, record?)?;
            bar.tick();
        }
        bar.finish();
        Ok(reader)
    }
}

/// A progress bar over the bytes of a file; silent where standard error is no terminal.
struct Bar {
    bar: ProgressBar,
    progress: Progress,
    rows: std::cell::Cell<u64>,
}

impl Bar {
    fn new(progress: &Progress) -> Self {
        let hidden = !io::stderr().is_terminal() || progress.bytes_total() < SMALL_FILE_BYTES;
        let bar = if hidden { ProgressBar::hidden() } else { ProgressBar::new(progress.bytes_total()) };
        let template = "{bar:32} {percent:>3} %  {bytes}/{total_bytes}  {bytes_per_sec}  {eta}  {msg}";
        bar.set_style(
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        Self { bar, progress: progress.clone(), rows: std::cell::Cell::new(0) }
    }

    fn tick(&self) {
        let rows = self.rows.get() + 1;
        self.rows.set(rows);
        if rows.is_multiple_of(ROWS_PER_TICK) {
            self.bar.set_position(self.progress.bytes_read());
            self.bar.set_message(format!("{rows} rows"));
        }
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Says on standard error what was assumed.
fn print(assumptions: &[String]) {
    for assumption in assumptions {
        note!("assumed: {assumption}");
    }
}

/// Writes a line to standard output; a reader that went away is no error.
fn put(text: &str) -> Result<()> {
    match writeln!(io::stdout().lock(), "{text}") {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            bail!("trace write: {error}; remedy: check standard output")
        }
        _ => Ok(()),
    }
}

fn put_json(value: &impl serde::Serialize) -> Result<()> {
    let text =
        serde_json::to_string_pretty(value).map_err(|e| anyhow!("trace write: {e}; remedy: report this"))?;
    put(&text)
}

fn run_lint(args: &LintArgs) -> Result<ExitCode> {
    let mut bar: Option<Bar> = None;
    let report = lint(&args.input.file, &args.input.options(None), |reader| {
        bar.get_or_insert_with(|| Bar::new(&reader.progress())).tick();
    })?;
    if let Some(bar) = bar {
        bar.finish();
    }
    if args.json {
        put_json(&report)?;
    } else {
        print(&report.assumptions);
        put(&show::lint_text(&report))?;
    }
    Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn run_stats(args: &StatsArgs) -> Result<()> {
    let options = SummaryOptions { capacities_tokens: args.capacity.clone(), top: args.top };
    let mut summariser: Option<Summariser> = None;
    let reader = args.input.stream(args.max_rows, &mut |reader, record| {
        summariser.get_or_insert_with(|| Summariser::new(reader.block_tokens(), &options)).add(&record);
        Ok(())
    })?;
    let summary = summariser.unwrap_or_else(|| Summariser::new(reader.block_tokens(), &options)).finish();
    if !args.json {
        print(&reader.assumptions());
        return put(&show::summary_text(&summary));
    }
    let mut json =
        serde_json::to_value(&summary).map_err(|e| anyhow!("trace write: {e}; remedy: report this"))?;
    json["dialect"] = reader.dialect().name().into();
    json["assumptions"] = reader.assumptions().into();
    put_json(&json)
}

/// A file that appears once it is whole, or standard output.
enum Sink {
    File(Box<FileWriter>),
    Stdout(Box<Writer<io::BufWriter<io::Stdout>>>),
}

impl Sink {
    fn new(target: &Target) -> Result<Self> {
        if target.output == Path::new("-") {
            let stdout = io::BufWriter::with_capacity(1 << 16, io::stdout());
            return Ok(Self::Stdout(Box::new(Writer::new(stdout, target.to, target.renumber))));
        }
        let file = create(&target.output, target.to, target.renumber)?;
        Ok(Self::File(Box::new(file)))
    }

    fn write(&mut self, record: &Record) -> Result<()> {
        match self {
            Self::File(file) => Ok(file.write(record)?),
            Self::Stdout(writer) => writer.write(record).map_err(stdout_fault),
        }
    }

    fn finish(self) -> Result<()> {
        match self {
            Self::File(file) => Ok(file.finish()?),
            Self::Stdout(writer) => writer.finish().map(|_| ()).map_err(stdout_fault),
        }
    }
}

fn stdout_fault(error: io::Error) -> anyhow::Error {
    anyhow!("trace write: standard output: {error}; remedy: write to a file with -o")
}

/// Says what was written, and what could not be.
fn report(target: &Target, rows: u64, block_tokens: u32) {
    note!("{} written to {}", show::rows(rows), target.output.display());
    if let Some(loss) = target.to.loses() {
        note!("note: {loss}");
    } else if block_tokens != 512 {
        note!(
            "note: blocks of {block_tokens} tokens, not the usual 512: read it with --block-tokens {block_tokens}"
        );
    }
}

fn run_convert(args: &ConvertArgs) -> Result<()> {
    let mut sink = Sink::new(&args.target)?;
    let mut rows = 0;
    let (assumptions, block_tokens) = if args.whole {
        let trace = load(&args.input.file, &args.input.options(args.max_rows))?;
        rows = trace.records.len() as u64;
        trace.records.iter().try_for_each(|record| sink.write(record))?;
        (trace.assumptions, trace.block_tokens)
    } else {
        let reader = args.input.stream(args.max_rows, &mut |_, record| {
            rows += 1;
            sink.write(&record)
        })?;
        (reader.assumptions(), reader.block_tokens())
    };
    print(&assumptions);
    if rows == 0 {
        bail!(
            "trace convert: no row of {} can be used, and nothing was written; remedy: see baton trace lint",
            args.input.file.display()
        );
    }
    sink.finish()?;
    report(&args.target, rows, block_tokens);
    Ok(())
}

fn run_scale(args: &ScaleArgs) -> Result<()> {
    let scale = args.scale();
    let block_tokens = open(&args.input.file, &args.input.options(None))?.block_tokens();
    let mut scaler = Scaler::new(&scale, block_tokens)?;
    let mut sink = Sink::new(&args.target)?;
    let (mut rows, mut changed) = (0, Vec::new());
    loop {
        let reader = args.input.stream(None, &mut |_, record| {
            scaler.push(record, &mut changed);
            rows += changed.len() as u64;
            changed.drain(..).try_for_each(|row| sink.write(&row))
        })?;
        if !scaler.end_round() {
            print(&reader.assumptions());
            break;
        }
    }
    sink.finish()?;
    report(&args.target, rows, block_tokens);
    Ok(())
}

fn run_synth(args: &SynthArgs) -> Result<()> {
    let trace = match (args.like, args.kind) {
        (Some(like), _) => synth::like(like, args.seed),
        (None, Some(kind)) => synth::workload(&args.workload(kind))?,
        (None, None) => bail!("trace synth: nothing to make; remedy: pass --like or --kind"),
    };
    let mut sink = Sink::new(&args.target)?;
    trace.records.iter().try_for_each(|record| sink.write(record))?;
    sink.finish()?;
    report(&args.target, trace.records.len() as u64, trace.block_tokens);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::args::tokens;
    use super::*;
    use baton_traces::DIALECTS;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: TraceArgs,
    }

    fn parse(words: &[&str]) -> Result<TraceArgs, clap::Error> {
        Cli::try_parse_from([&["trace"], words].concat()).map(|cli| cli.args)
    }

    #[test]
    fn the_help_names_every_dialect() {
        let help = <Cli as clap::CommandFactory>::command()
            .find_subcommand_mut("stats")
            .unwrap()
            .render_long_help()
            .to_string();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for (_, name) in DIALECTS {
            assert!(help.contains(name), "{name} is not in the help");
        }
    }

    #[test]
    fn sizes_are_read_as_numbers() {
        assert_eq!(tokens("3e6").unwrap(), 3_000_000);
        assert_eq!(tokens("512").unwrap(), 512);
        for wrong in ["0", "-1", "1.5", "much", "inf", "NaN"] {
            assert!(tokens(wrong).is_err(), "{wrong}");
        }
        assert!(parse(&["stats", "t", "--capacity", "1e6,x"]).is_err());
        assert!(parse(&["synth", "-o", "x"]).is_err(), "neither --like nor --kind");
        assert!(parse(&["synth", "--like", "conversation", "--rate", "3", "-o", "x"]).is_err());
    }

    #[test]
    fn a_made_trace_goes_through_every_command() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).display().to_string();
        let (made, scaled, csv) = (path("made.jsonl.gz"), path("scaled.jsonl"), path("back.csv"));
        for words in [
            vec!["synth", "--like", "synthetic", "--seed", "3", "-o", &made],
            vec!["lint", &made],
            vec!["stats", &made, "--capacity", "1e6", "--json"],
            vec!["scale", &made, "--speed", "2", "--copies", "2", "-o", &scaled],
            vec!["lint", &scaled, "--json"],
            vec!["convert", &scaled, "--to", "vidur-csv", "-o", &csv],
            vec!["stats", &csv],
        ] {
            let code = run(parse(&words).unwrap()).unwrap();
            assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::SUCCESS), "{words:?}");
        }
        std::fs::write(&scaled, "{\"timestamp\":0,\"input_length\":0,\"output_length\":1}\n").unwrap();
        let code = run(parse(&["lint", &scaled]).unwrap()).unwrap();
        assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::from(1)));
        let error = run(parse(&["convert", &scaled, "-o", &csv]).unwrap()).unwrap_err().to_string();
        assert!(error.contains("row 1") && error.contains("remedy") && !error.contains('\n'), "{error}");
        let lenient = ["convert", "--lenient", &scaled, "-o", &csv];
        for words in [&lenient[..], &[&lenient[..], &["--whole"]].concat()] {
            let error = run(parse(words).unwrap()).unwrap_err().to_string();
            assert!(error.contains("no row of"), "{error}");
        }
        assert!(std::fs::read_to_string(&csv).unwrap().lines().count() > 1000, "the old file is untouched");
    }
}
