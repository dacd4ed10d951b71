//! Questions to a running store, and single values in and out.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use baton_objects::resp::client::{Client, Reply, Url};

use crate::cli::out;

const PATIENCE: Duration = Duration::from_secs(30);

/// Which store.
#[derive(clap::Args)]
struct At {
    /// The store: `redis://[[user]:password@]host[:port]`
    #[arg(long, env = "BATON_STORE_URL", hide_env_values = true, default_value = "redis://127.0.0.1:6379")]
    url: String,
}

impl At {
    fn connect(&self) -> Result<Client, String> {
        Client::connect(&self.url.parse::<Url>()?, PATIENCE).map_err(|e| format!("store: {e}"))
    }
}

/// Arguments of `baton store ls`.
#[derive(clap::Args)]
pub(super) struct LsArgs {
    #[command(flatten)]
    at: At,
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
    at: At,
    /// The key
    key: String,
}

/// Arguments of `baton store get`.
#[derive(clap::Args)]
pub(super) struct GetArgs {
    #[command(flatten)]
    at: At,
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
    at: At,
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
    at: At,
    /// The keys
    #[arg(required = true)]
    keys: Vec<String>,
}

fn odd(what: &str) -> String {
    format!("store: {what} was answered by something else; is this a store?")
}

/// Runs `baton store ls`: by cursor, in bounded steps.
pub(super) fn ls(args: &LsArgs) -> Result<ExitCode, String> {
    let mut client = args.at.connect()?;
    let (mut cursor, mut left) = (b"0".to_vec(), args.limit);
    loop {
        let pattern = args.pattern.as_deref().unwrap_or("*");
        let reply = client.call(&[b"SCAN", &cursor, b"MATCH", pattern.as_bytes(), b"COUNT", b"1000"])?;
        let Reply::List(parts) = reply else { return Err(odd("SCAN")) };
        let Ok([Reply::Bulk(next), Reply::List(keys)]) = <[Reply; 2]>::try_from(parts) else {
            return Err(odd("SCAN"));
        };
        for key in keys {
            let Reply::Bulk(key) = key else { return Err(odd("SCAN")) };
            if left == 0 {
                eprintln!("there are more; give a larger --limit or a --match");
                return Ok(ExitCode::SUCCESS);
            }
            left -= 1;
            out::say(&format!("{}\n", key.escape_ascii()))?;
        }
        if next == b"0" {
            return Ok(ExitCode::SUCCESS);
        }
        cursor = next;
    }
}

/// What the store knows of a key: names and values, in its order.
fn known(client: &mut Client, key: &str) -> Result<Vec<(String, String)>, String> {
    let reply = client.call(&[b"BATON.STAT", key.as_bytes()]).map_err(|e| format!("store: stat: {e}"))?;
    let Reply::List(parts) = reply else { return Err(format!("store: no such key: {key}")) };
    let text = |reply: &Reply| match reply {
        Reply::Bulk(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Reply::Integer(number) => number.to_string(),
        _ => "-".into(),
    };
    Ok(parts.chunks_exact(2).map(|pair| (text(&pair[0]), text(&pair[1]))).collect())
}

/// Runs `baton store stat`.
pub(super) fn stat(args: &KeyArgs) -> Result<ExitCode, String> {
    let known = known(&mut args.at.connect()?, &args.key)?;
    let lines = known.iter().map(|(name, value)| format!("{name:<12} {value}\n"));
    out::say(&lines.collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}

fn read(client: &mut Client, key: &str) -> Result<Vec<u8>, String> {
    match client.call(&[b"GET", key.as_bytes()]).map_err(|e| format!("store: get: {e}"))? {
        Reply::Bulk(value) => Ok(value),
        Reply::Nothing => Err(format!("store: no such key: {key}")),
        _ => Err(odd("GET")),
    }
}

/// Runs `baton store get`.
pub(super) fn get(args: &GetArgs) -> Result<ExitCode, String> {
    let value = read(&mut args.at.connect()?, &args.key)?;
    let written = match &args.output {
        Some(path) => {
            std::fs::write(path, &value).map_err(|e| format!("store: write {}: {e}", path.display()))
        }
        None => std::io::stdout().write_all(&value).map_err(|e| format!("store: output: {e}")),
    };
    written.map(|()| ExitCode::SUCCESS)
}

fn contents(path: &Path) -> Result<Vec<u8>, String> {
    let failed = |e: std::io::Error| format!("store: read {}: {e}; give a file or -", path.display());
    if path != Path::new("-") {
        return std::fs::read(path).map_err(failed);
    }
    let mut value = Vec::new();
    std::io::stdin().read_to_end(&mut value).map_err(failed)?;
    Ok(value)
}

/// Runs `baton store put`.
pub(super) fn put(args: &PutArgs) -> Result<ExitCode, String> {
    let value = contents(&args.file)?;
    let ttl = args.ttl.map(|seconds| seconds.to_string());
    let mut command: Vec<&[u8]> = vec![b"SET", args.key.as_bytes(), &value];
    if let Some(seconds) = &ttl {
        command.extend([&b"EX"[..], seconds.as_bytes()]);
    }
    if args.keep {
        command.push(b"NX");
    }
    match args.at.connect()?.call(&command).map_err(|e| format!("store: put: {e}"))? {
        Reply::Nothing => Err(format!("store: put: {} is there already", args.key)),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Runs `baton store verify`.
pub(super) fn verify(args: &KeyArgs) -> Result<ExitCode, String> {
    let mut client = args.at.connect()?;
    let before = known(&mut client, &args.key)?;
    client.call(&[b"BATON.VERIFY", args.key.as_bytes()]).map_err(|e| format!("store: verify there: {e}"))?;
    let value = read(&mut client, &args.key)?;
    let here = format!("{:08x}", baton_objects::checksum(&value));
    let find = |name: &str| before.iter().find(|(other, _)| other == name).map_or("-", |(_, value)| value);
    match find("crc32c") {
        "-" => out::say(&format!("{} bytes, no checksum kept; here {here}\n", value.len()))?,
        there if there == here => out::say(&format!("{} bytes, crc32c {here}: good\n", value.len()))?,
        there => {
            return Err(format!("store: verify: crc32c {here} here, {there} there; put the value again"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `baton store del`.
pub(super) fn del(args: &DelArgs) -> Result<ExitCode, String> {
    let mut command: Vec<&[u8]> = vec![b"DEL"];
    command.extend(args.keys.iter().map(|key| key.as_bytes()));
    let Reply::Integer(removed) =
        args.at.connect()?.call(&command).map_err(|e| format!("store: del: {e}"))?
    else {
        return Err(odd("DEL"));
    };
    out::say(&format!("{removed} removed\n"))?;
    Ok(ExitCode::SUCCESS)
}
