//! `baton bench transfer`: bytes between two processes over one transport, beside what the machine can do.

mod ceiling;
mod ends;
mod engine;
mod load;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, anyhow};
use baton_transports::mover::Direction;

use self::ends::{Kind, LocalEndpoint, Peer};
use self::engine::Engine;
use self::load::{Figures, Load, Ways};
use self::report::Row;

/// Arguments of `baton bench transfer`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    baton bench transfer --transport tcp --block 64KiB,1MiB --batch 16\n  \
    baton bench transfer --transport shm --block 1MiB --direction read --verify --json out.json\n  \
    baton bench transfer --transport shm --latency")]
pub struct TransferArgs {
    /// Transport to measure
    #[arg(long, value_enum, default_value = "tcp")]
    transport: Kind,
    /// Sizes of a block, with KiB or MiB
    #[arg(long, value_delimiter = ',', default_value = "64KiB,1MiB", value_parser = block_bytes)]
    block: Vec<u32>,
    /// Blocks outstanding by thread
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Threads, each with a path of its own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
    /// Connections of a path, for TCP
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    lanes: u32,
    /// Which way
    #[arg(long, value_enum, default_value = "write")]
    direction: Way,
    /// Compare checksums of both ends
    #[arg(long)]
    verify: bool,
    /// Round trips of single 4 KiB blocks instead, asleep and, where the transport can, spinning
    #[arg(long)]
    latency: bool,
    /// Seconds of each measurement, over all rounds
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Rounds in which what is compared takes turns; the middle one counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Memory of each side, MiB
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(16..=65_536))]
    memory_mib: u32,
    /// Write the figures to this file
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
}

/// Which way blocks go, as the process sees it that starts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Way {
    /// From the peer
    Read,
    /// To the peer
    Write,
}

/// Arguments of the peer's process.
#[derive(clap::Args)]
pub struct PeerArgs {
    #[arg(long, value_enum)]
    transport: Kind,
    #[arg(long)]
    memory_mib: u32,
    #[arg(long)]
    poll: bool,
}

/// Block sizes that make sense: a slice has at most 16 MiB.
fn block_bytes(text: &str) -> Result<u32> {
    let wrong = || anyhow!("{text:?}: give a size from 1KiB to 16MiB, as in 64KiB");
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let shift = match unit {
        "KiB" => 10,
        "MiB" => 20,
        _ => return Err(wrong()),
    };
    let bytes = number.parse::<u32>().ok().and_then(|number| number.checked_mul(1 << shift));
    bytes.filter(|bytes| (1 << 10..=16 << 20).contains(bytes)).ok_or_else(wrong)
}

/// Runs `baton bench transfer`.
///
/// # Errors
/// With one line: what failed, and the remedy.
pub fn run(args: &TransferArgs) -> Result<ExitCode> {
    let rows = if args.latency { latency(args)? } else { throughput(args)? };
    report::print(&rows, args.latency)?;
    if let Some(path) = &args.json {
        report::save(path, &rows)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the peer's process until its standard input ends.
///
/// # Errors
/// As above.
pub fn run_peer(args: &PeerArgs) -> Result<ExitCode> {
    ends::serve(args.transport, u64::from(args.memory_mib) << 20, args.poll).map(|()| ExitCode::SUCCESS)
}

fn throughput(args: &TransferArgs) -> Result<Vec<Row>> {
    let memory_bytes = u64::from(args.memory_mib) << 20;
    let near = LocalEndpoint::start(args.transport, memory_bytes, args.lanes, false)?;
    let peer = Peer::start(args.transport, args.memory_mib, false)?;
    let mut ways = Ways::open(&near, &peer, args.threads)?;
    let mut engine = Engine::start(LocalEndpoint::start(args.transport, memory_bytes, args.lanes, false)?)?;
    let mut rows = Vec::new();
    for block_bytes in &args.block {
        let load = Load {
            direction: if args.direction == Way::Read { Direction::Read } else { Direction::Write },
            block_bytes: *block_bytes,
            batch: args.batch,
            verify: args.verify,
            poll: false,
            duration: Duration::from_secs(args.seconds.into()) / args.rounds,
        };
        load.check(memory_bytes / u64::from(args.threads))?;
        note!("measuring: blocks of {} KiB", block_bytes >> 10);
        rows.extend(block(args, &load, (&near, &peer), (&mut ways, &mut engine))?);
    }
    ways.close()?;
    Ok(rows)
}

/// All that is compared for one size, in turns.
fn block(
    args: &TransferArgs,
    load: &Load,
    (near, peer): (&LocalEndpoint, &Peer),
    (ways, engine): (&mut Ways, &mut Engine),
) -> Result<Vec<Row>> {
    // Every page is touched on both sides before it counts.
    ways.warm_up(load)?;
    engine.warm_up(load, peer)?;
    let mut by_kind: [Vec<Figures>; 3] = Default::default();
    for _ in 0..args.rounds {
        let ceiling = match args.transport {
            Kind::Tcp => ceiling::socket(peer, load, args.threads)?,
            Kind::Shm => ceiling::memcpy(near, load),
        };
        by_kind[0].push(ceiling);
        by_kind[1].push(ways.run(load, peer)?);
        by_kind[2].push(engine.run(load, peer)?);
    }
    let ceiling = if args.transport == Kind::Tcp { "plain acknowledged socket" } else { "memcpy" };
    let names = [ceiling, "path", "mover (batches)"];
    let middles: Vec<Figures> = by_kind.into_iter().map(load::middle).collect();
    let row = |(name, figures): (&str, &Figures)| Row::new(name, figures, load, &middles[0]);
    Ok(names.into_iter().zip(&middles).map(row).collect())
}

fn latency(args: &TransferArgs) -> Result<Vec<Row>> {
    let memory_mib = 16;
    let mut rows = Vec::new();
    let polls: &[bool] = if args.transport == Kind::Shm { &[false, true] } else { &[false] };
    for poll in polls {
        let near = LocalEndpoint::start(args.transport, u64::from(memory_mib) << 20, 1, *poll)?;
        let peer = Peer::start(args.transport, memory_mib, *poll)?;
        let mut ways = Ways::open(&near, &peer, 1)?;
        for direction in [Direction::Write, Direction::Read] {
            let duration = Duration::from_secs(args.seconds.into());
            let load =
                Load { direction, block_bytes: 4_096, batch: 1, verify: args.verify, poll: *poll, duration };
            ways.warm_up(&load)?;
            let figures = ways.run(&load, &peer)?;
            let name = if *poll { "path, spinning" } else { "path, asleep" };
            rows.push(Row::new(name, &figures, &load, &figures));
        }
        if !*poll {
            // A sleeping thread is woken on either side: this row shows the cost of that.
            let duration = Duration::from_secs(args.seconds.into());
            let direction = Direction::Write;
            let load = Load { direction, block_bytes: 4_096, batch: 1, verify: false, poll: false, duration };
            let figures = ceiling::socket(&peer, &load, 1)?;
            rows.push(Row::new("plain acknowledged socket", &figures, &load, &figures));
        }
        ways.close()?;
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::block_bytes;

    #[test]
    fn sizes_of_blocks_have_a_unit_and_bounds() {
        assert_eq!(block_bytes("64KiB").unwrap(), 65_536);
        assert_eq!(block_bytes("16MiB").unwrap(), 16 << 20);
        for wrong in ["64", "KiB", "17MiB", "64kb", "-1KiB", "0KiB", "99999999999KiB"] {
            assert!(block_bytes(wrong).is_err_and(|error| error.to_string().contains("64KiB")), "{wrong}");
        }
    }
}
