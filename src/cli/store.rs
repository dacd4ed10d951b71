//! `baton store`: objects by key in this machine's memory, served over Redis' protocol; and what is in such a store.

mod ask;
mod bench;
mod load;
mod serve;

use std::process::ExitCode;

/// Arguments of `baton store`.
#[derive(clap::Args)]
pub struct StoreArgs {
    #[command(subcommand)]
    what: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Keep objects in memory and serve them over Redis' protocol
    Serve(Box<serve::ServeArgs>),
    /// List keys
    Ls(ask::LsArgs),
    /// Show what is known of a key
    Stat(ask::KeyArgs),
    /// Read a value
    Get(ask::GetArgs),
    /// Write a value
    Put(ask::PutArgs),
    /// Read a value and compare it with its checksum, there and here
    Verify(ask::KeyArgs),
    /// Remove keys
    Del(ask::DelArgs),
    /// Move what one of several stores holds to the others
    Drain(ask::DrainArgs),
    /// Measure a store in this process and over a socket, beside what the machine can do
    Bench(bench::BenchArgs),
}

/// Runs `baton store`.
pub fn run(args: &StoreArgs) -> Result<ExitCode, String> {
    match &args.what {
        Command::Serve(args) => serve::run(args),
        Command::Ls(args) => ask::ls(args),
        Command::Stat(args) => ask::stat(args),
        Command::Get(args) => ask::get(args),
        Command::Put(args) => ask::put(args),
        Command::Verify(args) => ask::verify(args),
        Command::Del(args) => ask::del(args),
        Command::Drain(args) => ask::drain(args),
        Command::Bench(args) => bench::run(args),
    }
}

/// A size as people write it: `64MiB`, `4GiB`, `1000000`.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let factor = match text[digits.len()..].trim() {
        "" | "B" => Some(1),
        "KiB" => Some(1u64 << 10),
        "MiB" => Some(1 << 20),
        "GiB" => Some(1 << 30),
        "TiB" => Some(1 << 40),
        _ => None,
    };
    let bytes = digits.parse::<u64>().ok().zip(factor).and_then(|(n, factor)| n.checked_mul(factor));
    bytes.ok_or_else(|| "give a size such as 64MiB, 4GiB or 1000000".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(size("4GiB"), Ok(4 << 30));
        assert_eq!((size("10"), size("3 MiB"), size("7B")), (Ok(10), Ok(3 << 20), Ok(7)));
        for bad in ["", "GiB", "4GB", "-1", "99999999TiB", "1.5GiB"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
