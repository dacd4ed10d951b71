//! Questions to a running store, and single values in and out.

use std::collections::BTreeSet;
use std::io::{IsTerminal as _, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use baton_objects::client::{Cluster, ClusterConfig, ConflictRule, PutOutcome, PutWords, Trouble};

use crate::cli::out;

/// Which stores.
#[derive(clap::Args)]
pub(super) struct StoreArgs {
    /// The store, or several with commas between them: `redis://[[user]:password@]host[:port]`, `rediss://` for TLS
    #[arg(long, env = "BATON_STORE_URL", hide_env_values = true, default_value = "redis://127.0.0.1:6379")]
    pub(super) url: String,
    /// Of several stores, how many hold each key
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    replicas: u16,
    /// Of rediss:// stores, the authorities that their certificates come from, PEM [default: the system's]
    #[arg(long, env = "BATON_STORE_CA", value_name = "FILE")]
    ca: Option<PathBuf>,
}

impl StoreArgs {
    pub(super) fn cluster(&self) -> Result<Cluster> {
        let mut config = ClusterConfig::of(&self.url).context("store")?;
        if let Some(ca) = &self.ca {
            for trust in config.servers.iter_mut().filter_map(|url| url.tls.as_mut()) {
                trust.ca.clone_from(ca);
            }
        }
        let config = ClusterConfig { replicas: usize::from(self.replicas), ..config };
        Cluster::new(config).context("store")
    }
}

/// Arguments of `baton store ls`.
#[derive(clap::Args)]
pub(super) struct LsArgs {
    #[command(flatten)]
    at: StoreArgs,
    /// Only keys of this pattern: * ? [a-z]
    #[arg(long = "match", value_name = "PATTERN")]
    pattern: Option<String>,
    /// At most so many keys
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
}

/// Arguments of those commands that take one key.
#[derive(clap::Args)]
pub(super) struct KeyArgs {
    #[command(flatten)]
    at: StoreArgs,
    /// The key
    key: String,
}

/// Arguments of `baton store get`.
#[derive(clap::Args)]
pub(super) struct GetArgs {
    #[command(flatten)]
    at: StoreArgs,
    /// The key
    key: String,
    /// Write the value to this file [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Arguments of `baton store put`.
#[derive(clap::Args)]
pub(super) struct PutArgs {
    #[command(flatten)]
    at: StoreArgs,
    /// The key
    key: String,
    /// File with the value; - is standard input
    file: PathBuf,
    /// Time to live, seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    ttl: Option<u64>,
    /// Leave a value that is there as it is
    #[arg(long)]
    keep: bool,
}

/// Arguments of `baton store del`.
#[derive(clap::Args)]
pub(super) struct DelArgs {
    #[command(flatten)]
    at: StoreArgs,
    /// The keys
    #[arg(required = true)]
    keys: Vec<String>,
}

/// Runs `baton store ls`: by cursor, in bounded steps; a key that several stores hold is listed once.
pub(super) fn ls(args: &LsArgs) -> Result<ExitCode> {
    let mut cluster = args.at.cluster()?;
    let (mut listed, mut silent) = (BTreeSet::new(), 0);
    let servers: Vec<String> = cluster.servers().map(str::to_owned).collect();
    for server in servers {
        match list(&mut cluster, &server, args, &mut listed)? {
            Listing::All => {}
            Listing::Full => {
                note!("there are more; give a larger --limit or a --match");
                return Ok(ExitCode::SUCCESS);
            }
            Listing::Lost(why) => {
                silent += 1;
                ensure!(silent < args.at.replicas, "store: ls: {why}");
                note!("baton: store: ls: {why}; the others hold copies");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// How the listing of one store ended.
enum Listing {
    All,
    /// There were more keys than wanted.
    Full,
    Lost(Trouble),
}

fn list(
    cluster: &mut Cluster,
    server: &str,
    args: &LsArgs,
    listed: &mut BTreeSet<Vec<u8>>,
) -> Result<Listing> {
    let (mut cursor, pattern) = ("0".to_owned(), args.pattern.as_deref().unwrap_or("*"));
    loop {
        let (keys, next) = match cluster.scan(server, &cursor, pattern) {
            Ok(some) => some,
            Err(why @ Trouble::Gone(_)) => return Ok(Listing::Lost(why)),
            Err(why) => bail!("store: ls: {why}"),
        };
        for key in keys {
            if listed.contains(&key) {
                continue;
            }
            if listed.len() as u64 == args.limit {
                return Ok(Listing::Full);
            }
            out::print(&format!("{}\n", key.escape_ascii()))?;
            listed.insert(key);
        }
        if next == "0" {
            return Ok(Listing::All);
        }
        cursor = next;
    }
}

/// The stores' entries of a key: names and values, in their order.
fn known(cluster: &mut Cluster, key: &str) -> Result<Vec<(String, String)>> {
    let known = cluster.stat(key.as_bytes()).context("store: stat")?;
    known.with_context(|| format!("store: no such key: {key}"))
}

/// Runs `baton store stat`.
pub(super) fn stat(args: &KeyArgs) -> Result<ExitCode> {
    let known = known(&mut args.at.cluster()?, &args.key)?;
    let lines = known.iter().map(|(name, value)| format!("{name:<12} {value}\n"));
    out::print(&lines.collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}

fn read(cluster: &mut Cluster, key: &str) -> Result<Vec<u8>> {
    let value = cluster.get(key.as_bytes()).context("store: get")?;
    value.with_context(|| format!("store: no such key: {key}"))
}

/// Runs `baton store get`.
pub(super) fn get(args: &GetArgs) -> Result<ExitCode> {
    let value = read(&mut args.at.cluster()?, &args.key)?;
    let written = match &args.output {
        Some(path) => {
            std::fs::write(path, &value).with_context(|| format!("store: write {}", path.display()))
        }
        None => std::io::stdout().write_all(&value).context("store: output"),
    };
    written.map(|()| ExitCode::SUCCESS)
}

fn contents(path: &Path) -> Result<Vec<u8>> {
    let failed = |e: std::io::Error| anyhow!("store: read {}: {e}; give a file or -", path.display());
    if path != Path::new("-") {
        return std::fs::read(path).map_err(failed);
    }
    let mut value = Vec::new();
    std::io::stdin().read_to_end(&mut value).map_err(failed)?;
    Ok(value)
}

/// Runs `baton store put`.
pub(super) fn put(args: &PutArgs) -> Result<ExitCode> {
    let value = contents(&args.file)?;
    let words = PutWords { ttl_ms: args.ttl.map(|seconds| seconds.saturating_mul(1_000)), keep: args.keep };
    let put = args.at.cluster()?.put(args.key.as_bytes(), &value, &words);
    match put.context("store: put")? {
        PutOutcome::Present => bail!("store: put: {} is there already", args.key),
        PutOutcome::Stored(_, None) => Ok(ExitCode::SUCCESS),
        PutOutcome::Stored(count, Some(why)) => {
            note!("baton: store: put: on {count} instead of {} stores: {why}", args.at.replicas);
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Runs `baton store verify`.
pub(super) fn verify(args: &KeyArgs) -> Result<ExitCode> {
    let mut cluster = args.at.cluster()?;
    let before = known(&mut cluster, &args.key)?;
    let good = cluster.verify(args.key.as_bytes()).context("store: verify there")?;
    let value = read(&mut cluster, &args.key)?;
    let here = format!("{:08x}", baton_objects::checksum(&value));
    let find = |name: &str| before.iter().find(|(other, _)| other == name).map_or("-", |(_, value)| value);
    let copies = if good > 1 { format!(", {good} copies") } else { String::new() };
    match find("crc32c") {
        "-" => out::print(&format!("{} bytes, no checksum kept; here {here}{copies}\n", value.len()))?,
        there if there == here => {
            out::print(&format!("{} bytes, crc32c {here}: good{copies}\n", value.len()))?
        }
        there => {
            bail!("store: verify: crc32c {here} here, {there} there; put the value again");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `baton store del`.
pub(super) fn del(args: &DelArgs) -> Result<ExitCode> {
    let mut cluster = args.at.cluster()?;
    let mut removed = 0;
    for key in &args.keys {
        let was_there = cluster.del(key.as_bytes()).context("store: del")?;
        removed += u32::from(was_there);
    }
    out::print(&format!("{removed} removed\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Arguments of `baton store drain`.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  \
    baton store drain b:6379 --replicas 2 --url redis://a:6379,redis://b:6379,redis://c:6379\n\
    It may be stopped and started again; readers find every value all the while.")]
pub(super) struct DrainArgs {
    #[command(flatten)]
    at: StoreArgs,
    /// The store to be emptied: its host and port as in --url
    server: String,
    /// Which value counts where another store has another one under the same key: that of the store to be emptied
    /// (drained) or that of the other (other). Without it both stay, and the drain fails
    #[arg(long)]
    newer: Option<ValueSource>,
}

/// The store whose value applies.
#[derive(Clone, Copy, clap::ValueEnum)]
enum ValueSource {
    Drained,
    Other,
}

/// Runs `baton store drain`.
pub(super) fn drain(args: &DrainArgs) -> Result<ExitCode> {
    let mut cluster = args.at.cluster()?;
    let mut drain = cluster.drain(&args.server).context("store: drain")?;
    drain = drain.newer(args.newer.map(|whose| match whose {
        ValueSource::Drained => ConflictRule::Drained,
        ValueSource::Other => ConflictRule::Other,
    }));
    let shown = std::io::stderr().is_terminal();
    while drain.step().map_err(|e| anyhow!("store: drain: {e}; start it again"))? {
        if shown {
            out::redraw(&format!("moved {}  ", drain.so_far().moved));
        }
    }
    if shown {
        note!("");
    }
    let done = drain.so_far();
    out::print(&format!(
        "{} moved, {} bytes; others had {}; {} left\n",
        done.moved, done.moved_bytes, done.had, done.left
    ))?;
    match drain.trouble() {
        Some(why) => bail!("store: drain: {} is not empty yet: {why}", args.server),
        None if done.left > 0 => bail!("store: drain: {} is not empty yet", args.server),
        None => Ok(ExitCode::SUCCESS),
    }
}
