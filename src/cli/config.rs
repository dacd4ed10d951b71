//! `baton config`: check a file, or show every setting in force and where it came from.

use std::path::PathBuf;
use std::process::ExitCode;

use super::{cluster, out};
use crate::config::{self, Config};

/// Arguments of `baton config`.
#[derive(clap::Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Say whether a file is valid, and if not, what to change
    Check {
        /// The TOML file
        file: PathBuf,
    },
    /// Print every setting in force, marking those that the file sets
    Explain {
        /// The TOML file [default: none, so all defaults]
        file: Option<PathBuf>,
    },
    /// Print the reference of every setting, as Markdown
    Reference,
}

/// Runs `baton config`.
pub fn run(args: &ConfigArgs) -> Result<ExitCode, String> {
    match &args.action {
        Action::Check { file } => {
            let config = config::load(file)?;
            let setup = cluster::setup(&config, config.scheduler.seed)?;
            out::say(&format!("{}: valid, {} instances\n", file.display(), setup.instances()))?;
        }
        Action::Explain { file } => {
            let config = file.as_ref().map_or_else(|| Ok(Config::default()), |f| config::load(f))?;
            out::say(&explain(&config)?)?;
        }
        Action::Reference => out::say(&super::reference::page()?)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The effective file, each setting that differs from its default marked.
fn explain(config: &Config) -> Result<String, String> {
    let text = |c: &Config| toml::to_string(c).map_err(|e| e.to_string());
    let (own, default) = (text(config)?, text(&Config::default())?);
    let defaults: std::collections::HashSet<(String, &str)> = settings(&default).collect();
    let mut lines = String::new();
    for (section, line) in settings(&own) {
        let set = line.contains('=') && !defaults.contains(&(section, line));
        lines.push_str(line);
        lines.push_str(if set { "  # set here\n" } else { "\n" });
    }
    Ok(lines)
}

/// Lines of a TOML text with the section that each stands in.
fn settings(text: &str) -> impl Iterator<Item = (String, &str)> {
    let mut section = String::new();
    text.lines().map(move |line| {
        if line.starts_with('[') {
            line.clone_into(&mut section);
        }
        (section.clone(), line)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_marked() {
        let mut config = Config::default();
        config.scheduler.seed = 99;
        let text = explain(&config).expect("a config is TOML");
        assert!(text.contains("seed = 99  # set here"), "{text}");
        assert_eq!(text.matches("# set here").count(), 1, "{text}");
    }
}
