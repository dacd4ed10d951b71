//! `baton config`: check a file, or show every setting in force and where it came from.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use baton_membership::Policies;

use super::etcd::EtcdArgs;
use super::{cluster, out};
use crate::config::{self, Config};
use crate::policy;

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
    /// Print every setting in force and where it comes from: the file or its default
    Explain {
        /// The TOML file [default: none, so all defaults]
        file: Option<PathBuf>,
    },
    /// Print what would change from one file to another, and whether that takes a restart
    Diff {
        /// The TOML file in force
        old: PathBuf,
        /// The TOML file to come
        new: PathBuf,
    },
    /// Make the scheduler section of a file the policy of a cluster: every conductor of it follows, whole or not at all
    Push {
        /// The TOML file
        file: PathBuf,
        #[command(flatten)]
        etcd: EtcdArgs,
    },
    /// Make the cluster's policy the one before again; once more takes that back
    Rollback {
        #[command(flatten)]
        etcd: EtcdArgs,
    },
    /// Print the reference of every setting, as Markdown
    Reference,
    /// Print the JSON schema of the file, for editors
    Schema,
}

/// Runs `baton config`.
pub fn run(args: &ConfigArgs) -> Result<ExitCode> {
    match &args.action {
        Action::Check { file } => {
            let config = config::load(file)?;
            let setup = cluster::setup(&config, config.scheduler.seed)?;
            out::print(&format!(
                "{}: valid, {} instances in a simulation\n",
                file.display(),
                setup.instances()
            ))?;
        }
        Action::Explain { file } => {
            let config = config::load_or_default(file.as_deref())?;
            let own = file.as_ref().map_or_else(|| Ok(toml::Table::new()), |f| keys_of(f))?;
            out::print(&explain(&config, &own.into())?)?;
        }
        Action::Diff { old, new } => return diff(&config::load(old)?, &config::load(new)?),
        Action::Push { file, etcd } => out::print(&push(file, etcd)?)?,
        Action::Rollback { etcd } => out::print(&rollback(etcd)?)?,
        Action::Reference => out::print(&super::reference::page()?)?,
        Action::Schema => out::print(&super::schema::text()?)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The policies of the cluster that the arguments name, used to the end of `call`.
fn shared<T, F: Future<Output = baton_membership::Result<T>>>(
    etcd: &EtcdArgs,
    call: impl FnOnce(Policies) -> F,
) -> Result<T> {
    super::runtime(Some(1))?.block_on(async {
        let client = etcd.client()?.context("where is the cluster's etcd? Give --etcd URL, or BATON_ETCD")?;
        let policies = Policies::new(&client, &etcd.cluster)?;
        Ok(call(policies).await?)
    })
}

/// Puts a file's policy into force in a cluster; what that changes.
fn push(file: &Path, etcd: &EtcdArgs) -> Result<String> {
    let named = || format!("config {}", file.display());
    let text = std::fs::read_to_string(file).with_context(named)?;
    let text = policy::to_share(&text).with_context(named)?;
    let (before, version) = shared(etcd, async |policies| {
        let before = policies.get().await?;
        let version = policies.put(&text, before.as_ref().map_or(0, |policy| policy.version)).await?;
        Ok((before, version))
    })?;
    let mut told = format!("cluster {}: policy {version} is in force\n", etcd.cluster);
    let defaults = Config::default();
    let known = before.and_then(|policy| policy::under(&defaults, &policy.text).ok());
    if let Some(before) = known {
        for change in policy::changes(&before, &policy::under(&defaults, &text)?) {
            told.push_str(&format!("{change}\n"));
        }
    }
    Ok(told)
}

/// Takes the last change of a cluster's policy back.
fn rollback(etcd: &EtcdArgs) -> Result<String> {
    let cluster = &etcd.cluster;
    Ok(match shared(etcd, async |policies| policies.rollback(None, None).await)? {
        Some(now) => {
            format!("cluster {cluster}: policy {} is in force, as before the last\n{}", now.version, now.text)
        }
        None => format!(
            "cluster {cluster}: no policy is in force any more; each conductor follows its own file\n"
        ),
    })
}

/// The settings in a file, which is checked already.
fn keys_of(file: &Path) -> Result<toml::Table> {
    let named = || format!("config {}", file.display());
    let text = std::fs::read_to_string(file).with_context(named)?;
    let plain = config::plain(&text).with_context(named)?;
    plain.parse().map_err(|e| config::place(&e, &plain)).with_context(named)
}

/// The effective file, each setting with where it comes from.
fn explain(config: &Config, own: &toml::Value) -> Result<String> {
    let text = toml::to_string(config)?;
    let (mut lines, mut at) = (String::new(), Vec::new());
    for line in text.lines() {
        lines.push_str(line);
        if line.starts_with('[') {
            at = enter(line, &at);
        } else if let Some((key, _)) = line.split_once(" = ") {
            lines.push_str(if given(own, &at, key) { "  # file" } else { "  # default" });
        }
        lines.push('\n');
    }
    Ok(lines)
}

/// A step into a TOML file: a table's name, and which entry of a list of tables.
type Step = (String, Option<usize>);

/// The place that a section's heading opens, `before` being the one before it.
fn enter(heading: &str, before: &[Step]) -> Vec<Step> {
    let mut at: Vec<Step> =
        heading.trim_matches(['[', ']']).split('.').map(|name| (name.to_owned(), None)).collect();
    if heading.starts_with("[[") {
        let names = |steps: &[Step]| steps.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        let next = if names(before) == names(&at) {
            before.last().and_then(|(_, entry)| entry.map(|entry| entry + 1))
        } else {
            None
        };
        if let Some(last) = at.last_mut() {
            last.1 = Some(next.unwrap_or(0));
        }
    }
    at
}

/// Whether a file sets that key at that place.
fn given(own: &toml::Value, at: &[Step], key: &str) -> bool {
    let section = at.iter().try_fold(own, |value, (name, entry)| {
        let next = value.get(name.as_str())?;
        entry.map_or(Some(next), |entry| next.get(entry))
    });
    section.is_some_and(|section| section.get(key).is_some())
}

/// Prints the changes. The exit code is 1 when a running service could not apply them.
fn diff(old: &Config, new: &Config) -> Result<ExitCode> {
    let lines = policy::changes(old, new);
    let text: String = lines.iter().map(|change| format!("{change}\n")).collect();
    out::print(if text.is_empty() { "nothing changes\n" } else { &text })?;
    policy::can_reload(old, new).context("reload")?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(text: &str) -> String {
        let config = config::parse(text).expect("a valid file");
        let own = text.parse::<toml::Table>().expect("TOML");
        explain(&config, &own.into()).expect("a config is TOML")
    }

    #[test]
    fn what_a_file_sets_is_marked_even_where_it_is_the_default() {
        let text = explained("[scheduler]\nseed = 99\npolicy = \"baton\"");
        assert!(text.contains("seed = 99  # file") && text.contains("policy = \"baton\"  # file"), "{text}");
        assert_eq!(text.matches("# file").count(), 2, "{text}");
        let settings = text.lines().filter(|l| l.contains(" = ")).count();
        assert_eq!(text.matches("# default").count(), settings - 2, "{text}");
        assert_eq!(explained("").matches("# file").count(), 0);
    }

    #[test]
    fn entries_of_lists_are_told_apart() {
        let text = explained(
            "[[cluster.pools]]\nrole = \"prefill\"\n[[cluster.pools]]\nrole = \"decode\"\ncount = 3",
        );
        assert!(text.contains("role = \"prefill\"  # file\ncount = 1  # default"), "{text}");
        assert!(text.contains("role = \"decode\"  # file\ncount = 3  # file"), "{text}");
    }
}
