//! `baton profile`: the cost profiles there are, measuring an engine, and fitting a profile to measurements.

mod caller;
mod endpoint;
mod measure;
mod plan;
mod samples;
mod sections;
mod shape;
mod table;

use anyhow::{Context as _, Result, bail};
use baton_sim::fit::measured::{Measurements, read_csv};
use baton_sim::fit::{FitSpec, PrefillShape, fit, sections as errors_of};
use baton_sim::profiles;
use baton_types::CostProfile;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `baton profile`.
#[derive(clap::Args)]
pub struct ProfileArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// List the shipped profiles
    List,
    /// Print a profile
    Show {
        /// A shipped profile's name, or the path of a .toml file
        name: String,
    },
    /// Measure a running engine over its OpenAI-compatible API, and fit a profile to it
    Measure(Box<measure::MeasureArgs>),
    /// Fit a profile to a table of measured latencies
    Fit(FitArgs),
}

#[derive(clap::Args)]
struct FitArgs {
    /// CSV file with the columns system, backend, backend_version, phase (prefill, decode or mixed),
    /// batch, input_or_context_tokens (of each request), prefix_tokens,
    /// new_tokens_per_request, latency_ms, kv_bytes_per_token, kv_capacity_tokens and, if
    /// there is one, attention_ms
    table: PathBuf,
    /// Rows to use: their system column
    #[arg(long)]
    system: String,
    /// Rows to use: their backend column
    #[arg(long)]
    backend: String,
    /// Name of the profile [default: SYSTEM-BACKEND]
    #[arg(long)]
    name: Option<String>,
    /// Where the measurements come from [default: the table's name and the rows used]
    #[arg(long)]
    source: Option<String>,
    /// Transformer layers of the measured model
    #[arg(long, default_value_t = 80)]
    layers: u32,
    /// Let prefill cost depend on new tokens alone, as if a cached prefix cost nothing to attend to
    #[arg(long)]
    new_only: bool,
    /// File to write [default: standard output]
    #[arg(short, long, alias = "out")]
    output: Option<PathBuf>,
}

/// Runs `baton profile`.
///
/// # Errors
/// With one line for the user: what failed, and the remedy.
pub fn run(args: ProfileArgs) -> Result<ExitCode> {
    let text = match args.action {
        Action::List => list()?,
        Action::Show { name } => {
            let profile = profiles::find(&name)?;
            profiles::to_toml(&profile)?
        }
        Action::Measure(args) => return measure::run(&args),
        Action::Fit(args) => return run_fit(args),
    };
    print(&text)
}

fn list() -> Result<String> {
    let mut text = format!(
        "{:<28} {:>11} {:>10} {:>11} {:>10} {:>10}\n",
        "name", "KV tokens", "prefill", "decode", "max", "max"
    );
    let _ = writeln!(
        text,
        "{:<28} {:>11} {:>10} {:>11} {:>10} {:>10}",
        "", "per node", "error", "error", "prompt", "batch"
    );
    for name in profiles::names() {
        let p = profiles::named(name)?;
        let _ = writeln!(
            text,
            "{name:<28} {:>11} {:>9.2}% {:>10.2}% {:>10} {:>10}",
            p.kv_capacity_tokens,
            p.fit.prefill_mape_pct,
            p.fit.decode_mape_pct,
            p.valid.max_prompt_tokens,
            p.valid.max_batch,
        );
    }
    Ok(text)
}

fn run_fit(args: FitArgs) -> Result<ExitCode> {
    let (profile, measured) = fit_table(&args)?;
    let text = profiles::to_toml(&profile)?;
    let Some(path) = &args.output else {
        return print(&text);
    };
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    print(&format!("wrote {}\n{}", path.display(), errors_text(&profile, &measured)))
}

fn fit_table(args: &FitArgs) -> Result<(CostProfile, Measurements)> {
    let name = args.table.display();
    let file = std::fs::File::open(&args.table).with_context(|| format!("opening {name}"))?;
    let measured = read_csv(std::io::BufReader::new(file), &args.system, &args.backend)
        .with_context(|| name.to_string())?;
    let source = args.source.clone().unwrap_or_else(|| {
        let file = args.table.file_name().unwrap_or_default().to_string_lossy();
        let version = &measured.backend_version;
        format!("{file}, rows of {} with {} {version}", args.system, args.backend)
    });
    let spec = FitSpec {
        name: args.name.clone().unwrap_or_else(|| format!("{}-{}", args.system, args.backend)),
        source,
        layers: args.layers,
        shape: if args.new_only { PrefillShape::NewOnly } else { PrefillShape::NewAndPrefix },
    };
    let profile = fit(&measured, spec).with_context(|| name.to_string())?;
    Ok((profile, measured))
}

/// The errors of a profile over what it was fitted to, a line a section.
fn errors_text(profile: &CostProfile, measured: &Measurements) -> String {
    errors_of(profile, measured).iter().fold(String::new(), |mut text, (section, errors)| {
        let _ = writeln!(
            text,
            "{section}: {} points, error: median {:.2} %, mean {:.2} %, p90 {:.2} %, worst {:.2} %",
            errors.points(),
            errors.quantile_pct(0.5),
            errors.mean_pct(),
            errors.quantile_pct(0.9),
            errors.quantile_pct(1.0)
        );
        text
    })
}

/// Writes to standard output. A reader that has gone away (`| head`) is not an error.
fn print(text: &str) -> Result<ExitCode> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            bail!("writing to standard output: {e}")
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}
