//! `baton profile measure`: the cost profile of a running engine, by a bounded number of requests.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use baton_http::Client;
use baton_remote::Dialect;
use baton_sim::fit::measured::Measurements;
use baton_sim::fit::{FitSpec, PrefillShape, errors_over, fit, sections};
use baton_sim::profiles;
use baton_types::{CostProfile, Secret};
use tokio::runtime::Runtime;

use super::caller::{Caller, PromptWay, median};
use super::plan::{MeasurementPlan, PlanBounds};
use super::samples::PointSamples;
use super::sections::MeasurementRun;
use super::shape::{self, KvFacts};
use super::{endpoint, errors_text, table};
use crate::cli::loadgen::target::{Target, client_options};
use crate::cli::{out, replay};

/// Arguments of `baton profile measure`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    baton profile measure --url http://127.0.0.1:8000 --model-folder ./Llama-3.1-8B --out llama3-8b-1xh100.toml\n  \
    baton profile measure --url http://127.0.0.1:8080 --layers 4 --kv-bytes-per-token 2048 --kv-capacity-tokens 32768 --max-context 4096 --out mine.toml\n\n\
    Measure an idle engine that serves nobody else. The file is read by `baton node --profile`, by `profile` under\n\
    [cluster] of a configuration, and so by `baton replay` and `baton tune`.")]
pub struct MeasureArgs {
    /// The engine: its OpenAI-compatible API, for example http://127.0.0.1:8000
    #[arg(long)]
    url: String,
    /// Key that requests carry
    #[arg(long, value_name = "KEY", env = "BATON_API_KEY", hide_env_values = true)]
    api_key: Option<Secret<String>>,
    /// Model to ask for [default: the first that the endpoint lists]
    #[arg(long)]
    model: Option<String>,
    /// Hugging Face folder of the model: its config.json says how many layers and how much KV it has
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["layers", "kv_bytes_per_token"])]
    model_folder: Option<PathBuf>,
    /// Transformer layers, in place of --model-folder
    #[arg(long, requires = "kv_bytes_per_token", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    layers: Option<u32>,
    /// KV of a token over all layers, in place of --model-folder: 2 * layers * KV heads * head size * bytes of a number
    #[arg(long, value_name = "BYTES", requires = "layers", value_parser = clap::value_parser!(u64).range(1..))]
    kv_bytes_per_token: Option<u64>,
    /// Tokens that the engine's KV pool holds [default: what vLLM and SGLang say]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    kv_capacity_tokens: Option<u64>,
    /// Longest prompt and answer together to measure, tokens; never more than the model takes
    #[arg(long, value_name = "TOKENS", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(512..=4_194_304))]
    max_context: u32,
    /// Largest batch to measure
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(2..=1024))]
    max_batch: u32,
    /// Times that each point is measured
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=20))]
    repeats: u32,
    /// Requests at most; with fewer, points are repeated less, then batches are smaller
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    requests: u32,
    /// Time after which nothing new is measured, like 90s or 10m; what is left of the plan is left out
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = humantime::parse_duration)]
    budget: Duration,
    /// Largest error that a profile may have, in per cent: of nine tenths of the points in each section, of the repeats
    /// of a point, and between the beginning and the end
    #[arg(long, value_name = "PERCENT", default_value_t = 15.0)]
    max_error: f64,
    /// Name of the profile [default: the model's name]
    #[arg(long)]
    name: Option<String>,
    /// File to write the profile to [default: standard output]
    #[arg(short, long, value_name = "FILE", alias = "output")]
    out: Option<PathBuf>,
    /// Write the measurements to this file: a table that `baton profile fit` reads
    #[arg(long, value_name = "CSV")]
    table: Option<PathBuf>,
}

/// Runs `baton profile measure`.
///
/// # Errors
/// With one line for the user: what failed, and the remedy. Nothing is written then.
pub fn run(args: &MeasureArgs) -> Result<ExitCode> {
    [&args.out, &args.table].into_iter().flatten().try_for_each(|path| out::has_folder(path))?;
    let kv = kv_facts(args).context("measure")?;
    let runtime = Runtime::new().context("measure: no threads to send from")?;
    let measured = runtime.block_on(async {
        tokio::select! {
            measured = measure(args) => measured,
            _ = tokio::signal::ctrl_c() => bail!("stopped; nothing is written"),
        }
    });
    runtime.shutdown_background();
    let measured = measured.context("measure")?;
    report(args, kv, &measured).context("measure")
}

fn kv_facts(args: &MeasureArgs) -> Result<KvFacts> {
    match (&args.model_folder, args.layers, args.kv_bytes_per_token) {
        (Some(folder), ..) => shape::read(folder),
        (None, Some(layers), Some(kv_bytes_per_token)) => Ok(KvFacts { layers, kv_bytes_per_token }),
        _ => bail!(
            "no request shows the model's layers and the size of its KV; give --model-folder (with its config.json), or \
             --layers and --kv-bytes-per-token"
        ),
    }
}

/// All that was found out about an engine.
struct MeasuredEngine {
    points: PointSamples,
    model: String,
    capacity_tokens: u64,
    requests: u32,
    way: PromptWay,
}

async fn measure(args: &MeasureArgs) -> Result<MeasuredEngine> {
    let key = args.api_key.as_ref();
    let (target, client) = (Target::new(&args.url, key)?, Client::new(client_options()));
    let card = endpoint::model(&target, &client, args.model.as_deref()).await?;
    let mut caller = Caller::new(target.clone(), client, card.name.clone(), (args.requests, args.budget));
    let per_event = endpoint::find_way(&mut caller).await?;
    let stated = match args.kv_capacity_tokens {
        Some(tokens) => Some(tokens),
        None => endpoint::capacity_tokens(&target, key).await,
    };
    let capacity_tokens = stated.context("the endpoint does not say how many tokens its KV pool holds; give --kv-capacity-tokens (vLLM logs it at its start: \
         GPU KV cache size)",
    )?;
    let engine = endpoint::engine(&target, key, Dialect::Plain);
    endpoint::check_idle(&caller, engine.as_ref()).await?;
    let longest = card.max_model_tokens.map_or(u32::MAX, |tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
    let plan = MeasurementPlan::new(PlanBounds {
        max_context: args.max_context.min(longest),
        max_batch: args.max_batch,
        repeats: args.repeats,
        requests: args.requests,
        capacity_tokens: Some(capacity_tokens),
    })?;
    let words = match caller.way {
        PromptWay::Ids => "prompts of token ids",
        PromptWay::Chat { .. } => "chats",
    };
    note!("measuring {} at {} with {words}", card.name, target.base());
    note!("{}  nothing new begins after {}", plan.text(), humantime::format_duration(args.budget));
    caller.reserve = plan.reserve();
    caller.bar = replay::progress(u64::from(plan.requests()));
    let points = MeasurementRun::new(&caller, &plan, per_event).run().await;
    caller.bar.finish_and_clear();
    let points = points?;
    // Work that began meanwhile is in the figures.
    endpoint::check_idle(&caller, engine.as_ref()).await?;
    Ok(MeasuredEngine { points, model: card.name, capacity_tokens, requests: caller.sent(), way: caller.way })
}

/// Fits, judges and writes.
fn report(args: &MeasureArgs, kv: KvFacts, engine: &MeasuredEngine) -> Result<ExitCode> {
    let name = args.name.clone().unwrap_or_else(|| profile_name(&engine.model));
    let (mut profile, measured, notes) = fitted(args, kv, engine, &name)?;
    for note in engine.points.notes.iter().chain(&notes) {
        note!("note: {note}");
    }
    let (noise, drift) = (engine.points.noise_pct(), 100.0 * engine.points.drift);
    let errors = errors_text(&profile, &measured);
    note!(
        "{errors}repeats of a point differ by ± {noise:.1} %, the end from the beginning by {drift:.1} %\n\
         outside of passes, each first token takes {:.1} ms (network, tokenizer, queue); the profile leaves that out",
        median(&engine.points.outside_us) / 1e3
    );
    if let Some(path) = &args.table {
        out::save(path, &table::text(&measured, &name))?;
        note!("wrote {}", path.display());
    }
    judge(args, &profile, &measured, (noise, drift))?;
    profile.source = source(args, engine, &profile, &measured);
    let text = profiles::to_toml(&profile)?;
    let Some(path) = &args.out else { return out::print(&text).map(|()| ExitCode::SUCCESS) };
    out::save(path, &text)?;
    note!("wrote {}: baton node --profile {0}, or profile = \"{0}\" under [cluster]", path.display());
    Ok(ExitCode::SUCCESS)
}

fn fitted(
    args: &MeasureArgs,
    kv: KvFacts,
    engine: &MeasuredEngine,
    name: &str,
) -> Result<(CostProfile, Measurements, Vec<String>)> {
    let points = &engine.points;
    let (decode, ascending) = points.decode_points();
    let mut measured = Measurements {
        backend_version: String::from("measured"),
        kv_bytes_per_token: kv.kv_bytes_per_token,
        kv_capacity_tokens: engine.capacity_tokens,
        prefill: points.prefill_points(),
        decode,
        mixed: Vec::new(),
    };
    ensure!(
        !measured.decode.is_empty(),
        "no batch was timed at two contexts; give more --requests or a longer --budget"
    );
    let spec = || FitSpec {
        name: name.to_owned(),
        source: args.url.clone(),
        layers: kv.layers,
        shape: PrefillShape::NewAndPrefix,
    };
    let mut smooth = Measurements { decode: ascending, ..measured.clone() };
    let too_few = |e| {
        anyhow!(
            "too little was measured ({e}); give a longer --budget, more --requests or a longer --max-context"
        )
    };
    let mut profile = fit(&smooth, spec()).map_err(too_few)?;
    let mut notes = Vec::new();
    match points.mixed_points(|chunk| profile.prefill_us(u64::from(chunk), 0)) {
        Some(mixed) => measured.mixed = mixed,
        None => notes.push(String::from(
            "prefills do not slow a running batch: they are computed elsewhere, and shared_us is assumed as `baton profile fit` does",
        )),
    }
    smooth.mixed.clone_from(&measured.mixed);
    profile = fit(&smooth, spec())?;
    profile.fit = errors_over(&profile, &measured);
    Ok((profile, measured, notes))
}

/// Refuses a profile that predicts worse than was asked for.
fn judge(
    args: &MeasureArgs,
    profile: &CostProfile,
    measured: &Measurements,
    (noise, drift): (f64, f64),
) -> Result<()> {
    let most = args.max_error;
    let mut wrong = Vec::new();
    for (section, errors) in sections(profile, measured) {
        let p90 = errors.quantile_pct(0.9);
        if p90 > most {
            wrong.push(format!("nine tenths of the {section} points are off by up to {p90:.0} %"));
        }
    }
    if noise > most {
        wrong.push(format!("repeats of a point differ by ± {noise:.0} %"));
    }
    if drift > most {
        wrong.push(format!("the end differs from the beginning by {drift:.0} %"));
    }
    if wrong.is_empty() {
        return Ok(());
    }
    bail!(
        "no profile is written: {}; more than the {most} % of --max-error. See that the engine serves nobody else and its \
         machine is quiet, raise --repeats, or lower --max-batch and --max-context; --max-error accepts it as it is",
        wrong.join(", ")
    )
}

/// Where the profile comes from, and what its errors leave out.
fn source(
    args: &MeasureArgs,
    engine: &MeasuredEngine,
    profile: &CostProfile,
    measured: &Measurements,
) -> String {
    let date = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let mut text = format!(
        "{} at {}, measured from outside by baton profile measure on {} with {} requests{}; medians of repeats that differ by ± {:.1} %.",
        engine.model,
        args.url,
        date.split('T').next().unwrap_or_default(),
        engine.requests,
        if engine.way == PromptWay::Ids { "" } else { " (chats; prompt lengths by the engine's counts)" },
        engine.points.noise_pct(),
    );
    for (section, errors) in sections(profile, measured) {
        let (median, p90) = (errors.quantile_pct(0.5), errors.quantile_pct(0.9));
        let _ = write!(text, " {section}: median error {median:.1} %, p90 {p90:.1} %.");
    }
    if measured.mixed.is_empty() {
        text.push_str(" Mixed steps were not measured; shared_us is assumed.");
    }
    if measured.prefill.iter().all(|p| p.prefix_tokens == 0) {
        text.push_str(" Attention follows from prompt lengths alone.");
    }
    text
}

/// A model's name without what no file name has.
fn profile_name(model: &str) -> String {
    let last = model.rsplit('/').next().unwrap_or(model).to_lowercase();
    let plain: String = last
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "-._".contains(c) { c } else { '-' })
        .take(80)
        .collect();
    if plain.is_empty() { String::from("measured") } else { plain }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_what_a_configuration_can_write() {
        assert_eq!(profile_name("meta-llama/Llama-3.1-8B"), "llama-3.1-8b");
        assert_eq!(profile_name("a model:7b"), "a-model-7b");
        assert_eq!(profile_name(""), "measured");
    }
}
