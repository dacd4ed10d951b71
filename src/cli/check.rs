//! `baton check`: a configuration against the live places that it names, before anybody is served.
//!
//! Everything that can be tried is tried, in order: what was wrong with one place does not hide what is wrong with the
//! next. Nothing is changed anywhere, but that each engine draws a token or two.

mod engine;
mod pairs;
mod place;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use super::out;
use crate::config::{self, Config};
use anyhow::Result;
use engine::Target;
use report::Report;

/// Engines tried at most.
const ENGINES_MOST: usize = 256;

/// Arguments of `baton check`.
#[derive(clap::Args)]
#[command(after_help = "Exit status: 0 when nothing is wrong, 1 otherwise; warnings do not count.\n\n\
    Examples:\n  \
    baton check -c baton.toml\n  \
    baton check -c baton.toml --model /models/llama --engine vllm=http://10.0.0.7:8000,events=tcp://10.0.0.7:5557\n  \
    baton check -c baton.toml --model /models/llama --engine vllm=http://p0:8200,role=prefill --engine vllm=http://d0:8300,role=decode\n  \
    baton check -c baton.toml --engine sglang=http://p0:30000,role=prefill,bootstrap-port=8998,model=/models/llama --json")]
pub struct CheckArgs {
    /// The configuration of `baton serve`
    #[arg(short, long)]
    config: PathBuf,
    /// A server to try; after its URL the options that its `baton node` will have, without dashes: role=prefill,
    /// handoff=nixl, events=tcp://HOST:PORT, ...
    #[arg(long, value_name = "KIND=URL[,OPTION=VALUE]...")]
    engine: Vec<String>,
    /// Hugging Face folder of the model that the servers serve, where a server's own options name none
    #[arg(long, value_name = "FOLDER")]
    model: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `baton check`.
///
/// # Errors
/// When standard output is closed. A fault that a check finds is no error: it is printed, and sets the exit status.
pub fn run(args: &CheckArgs) -> Result<ExitCode> {
    let report = super::runtime(Some(1))?.block_on(examine(args));
    out::print(&if args.json { report.json() } else { report.table() })?;
    Ok(if report.good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn examine(args: &CheckArgs) -> Report {
    let mut report = Report::default();
    let subject = format!("config {}", args.config.display());
    let config = match config::load(&args.config) {
        Ok(config) => config,
        Err(why) => {
            report.wrong(
                &subject,
                why.to_string(),
                "fix the file; `baton config reference` has every setting",
            );
            report.untried("all else", "the configuration cannot be read");
            return report;
        }
    };
    report.good_at(&subject, "valid");
    place::ports(&config, &mut report).await;
    place::tls(&config.service, &mut report);
    place::control_guard(&config.service, &mut report);
    place::folders(&config, &mut report);
    engines(args, &config, &mut report).await;
    report
}

async fn engines(args: &CheckArgs, config: &Config, report: &mut Report) {
    let words = &args.engine;
    if words.len() > ENGINES_MOST {
        let found = format!("{} of them", words.len());
        report.wrong("engines", found, format!("try at most {ENGINES_MOST} at a time"));
        return;
    }
    if !words.is_empty() && config.scheduler.fetch {
        let found = "true: prefixes are planned to be fetched, which no server does between requests";
        report.doubtful("scheduler.fetch", found, "set it to false, or predictions are off");
    }
    let mut found = Vec::new();
    for word in words {
        match Target::parse(word, config, args.model.as_deref()) {
            Ok(target) => found.extend(target.examine(config, report).await),
            Err(why) => {
                report.wrong(&format!("--engine {word}"), format!("{why:#}"), "see `baton node --help`")
            }
        }
    }
    pairs::examine(&found, words.len(), report);
}

#[cfg(test)]
mod tests;
