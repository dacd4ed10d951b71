//! `baton top`: a running service, in the terminal.

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};

use super::out;
use crate::operator::OperatorArgs;
use crate::top::Watch;

/// Arguments of `baton top`.
#[derive(clap::Args)]
#[command(
    after_help = "Keys: q quits, p pauses, Tab chooses a list, arrows, PageUp, PageDown and Home scroll it.\n\n\
    Examples:\n  \
    baton top\n  \
    baton top --url https://10.0.0.5:8080 --ca cert.pem --key OPERATORS_KEY\n  \
    baton top --once            # one frame as text; also when the output is no terminal\n  \
    baton top --json | jq .nodes"
)]
pub struct TopArgs {
    #[command(flatten)]
    service: OperatorArgs,
    /// Seconds between two looks, 0.1 to 3600
    #[arg(long, default_value = "1", value_parser = seconds)]
    interval: Duration,
    /// Print one frame as text; rates are those of one interval
    #[arg(long)]
    once: bool,
    /// Print what GET /admin/status answers
    #[arg(long, conflicts_with = "once")]
    json: bool,
}

fn seconds(text: &str) -> Result<Duration> {
    let seconds: f64 = text.parse().map_err(|_| anyhow!("'{text}' is no number of seconds"))?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        bail!("{text} s is outside 0.1..=3600")
    }
}

/// Runs `baton top`.
///
/// # Errors
/// With one line for the user: what did not answer, and the remedy.
pub fn run(args: &TopArgs) -> Result<ExitCode> {
    let client = args.service.client("top")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("runtime")?;
    let done = if args.json {
        let status = runtime.block_on(client.within(client.get("/admin/status")))?;
        out::print(&format!("{}\n", String::from_utf8_lossy(&status.body).trim_end()))
    } else if args.once || !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        let text = runtime.block_on(crate::top::once(&client, args.interval))?;
        out::print(&text)
    } else {
        crate::top::watch(&runtime, Watch { client, every: args.interval })
    };
    // A look that is still under way is of no use to anybody.
    runtime.shutdown_background();
    done.map(|()| ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_bounded() {
        assert_eq!(seconds("0.5").unwrap(), Duration::from_millis(500));
        assert_eq!(seconds("3600").unwrap(), Duration::from_secs(3600));
        for wrong in ["0", "0.05", "-1", "NaN", "inf", "3601", "soon"] {
            let error = seconds(wrong).expect_err(wrong).to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
