//! Structured logs on standard error; JSON when it is not a terminal. No prompt text, ever.

use std::io::IsTerminal as _;
use tracing_subscriber::EnvFilter;

/// Starts logging with a filter such as `info` or `baton=debug,h2=warn`.
///
/// # Errors
/// Names what is wrong with the filter.
pub fn start(filter: &str) -> Result<(), String> {
    let filter = EnvFilter::try_new(filter).map_err(|e| format!("log filter '{filter}': {e}; try info"))?;
    let plain = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = if std::io::stderr().is_terminal() {
        plain.with_target(false).try_init()
    } else {
        plain.json().try_init()
    };
    started.map_err(|e| format!("log: {e}"))
}
