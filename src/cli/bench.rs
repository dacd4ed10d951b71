//! `baton bench`: what a router costs, beside a plain proxy in the same run; how fast bytes move between
//! processes, beside what the machine can do.

mod transfer;

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use baton_http::Client;
use baton_types::Secret;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use super::out;
use crate::cli::loadgen::bench::{Comparison, Figures, Rates, Side, cpu_us_per_event, loads};
use crate::cli::loadgen::target::{Target, client_options};
use crate::cli::loadgen::{proxy, upstream};

/// Arguments of `baton bench`.
#[derive(clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: BenchCommand,
}

#[derive(clap::Subcommand)]
enum BenchCommand {
    /// Move blocks between two processes over one transport, beside what the machine can do
    Transfer(transfer::TransferArgs),
    /// The other process of that
    #[command(hide = true)]
    TransferPeer(transfer::PeerArgs),
    /// Measure a running router: time added, processor time by call and by event
    Router(Box<RouterArgs>),
    /// Pass requests on and do nothing else: what a router is compared with
    Proxy(ProxyArgs),
    /// Answer completion calls at once, without a model
    Upstream(UpstreamArgs),
}

/// Arguments of `baton bench router`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    baton bench router --url http://127.0.0.1:8000 --pid 4242 --reference\n  \
    baton bench router --url http://127.0.0.1:8000 --pid 4242 --reference --callers 32\n  \
    baton bench router --url http://127.0.0.1:8000 --direct-url http://127.0.0.1:9000 --json out.json")]
struct RouterArgs {
    /// The router, in front of nodes that answer at once
    #[arg(long)]
    url: String,
    /// URL of the server behind the router, if it can be called directly
    #[arg(long)]
    direct_url: Option<String>,
    /// Measure a plain proxy in front of a server without a model too, in processes of their own
    #[arg(long)]
    reference: bool,
    /// Process of the router, for its processor time
    #[arg(long)]
    pid: Option<u32>,
    /// Processes beside the router, such as nodes: their processor time is reported separately
    #[arg(long, value_name = "PIDS", value_delimiter = ',')]
    beside: Vec<u32>,
    /// Loads to measure: small, large-new, large-part, large-seen, stream [default: all]
    #[arg(long, value_name = "LOADS", value_delimiter = ',', value_parser = LOADS.map(|(word, _)| word))]
    loads: Vec<String>,
    /// Key that requests carry
    #[arg(long, value_name = "KEY", env = "BATON_API_KEY", hide_env_values = true)]
    api_key: Option<Secret<String>>,
    /// Model to ask for [default: the first that the router lists]
    #[arg(long)]
    model: Option<String>,
    /// Callers who each send as soon as they have their answer, in place of fixed rates: what a call costs
    /// when the machine is full
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024), conflicts_with_all = ["rate", "large_rate", "stream_rate"])]
    callers: Option<u32>,
    /// Small calls a second
    #[arg(long, default_value = "500", value_parser = rate)]
    rate: f64,
    /// Large calls a second
    #[arg(long, default_value = "50", value_parser = rate)]
    large_rate: f64,
    /// Streams a second
    #[arg(long, default_value = "20", value_parser = rate)]
    stream_rate: f64,
    /// Size of a large body, KiB
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    body_kib: u32,
    /// Tokens of a stream
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    stream_tokens: u32,
    /// Seconds for each load on each side
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..=3600))]
    duration: u64,
    /// Rounds in which the sides take turns
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Write the figures to this file
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
}

/// Arguments of `baton bench proxy`.
#[derive(clap::Args)]
struct ProxyArgs {
    /// Where requests go
    #[arg(long, value_name = "URL")]
    to: String,
    /// Address to serve on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    #[command(flatten)]
    end: EndArgs,
}

/// Arguments of `baton bench upstream`.
#[derive(clap::Args)]
struct UpstreamArgs {
    /// Address to serve on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    #[command(flatten)]
    end: EndArgs,
}

#[derive(clap::Args)]
struct EndArgs {
    /// End when standard input ends, as with the process that holds it
    #[arg(long)]
    until_stdin_ends: bool,
}

/// Loads, as the command line and as tables have them.
const LOADS: [(&str, &str); 5] = [
    ("small", "small"),
    ("large-new", "large, new"),
    ("large-part", "large, three quarters seen"),
    ("large-seen", "large, prefix seen"),
    ("stream", "stream"),
];

impl RouterArgs {
    fn wants(&self, load: &str) -> bool {
        let word = LOADS.iter().find(|(_, name)| *name == load).map(|(word, _)| *word);
        self.loads.is_empty() || self.loads.iter().any(|wanted| Some(wanted.as_str()) == word)
    }
}

fn rate(text: &str) -> Result<f64> {
    match text.parse::<f64>() {
        Ok(rate) if (0.1..=100_000.0).contains(&rate) => Ok(rate),
        _ => bail!("give calls a second from 0.1 to 100000"),
    }
}

/// Runs `baton bench`.
pub fn run(args: &BenchArgs) -> Result<ExitCode> {
    match &args.what {
        BenchCommand::Transfer(args) => return transfer::run(args),
        BenchCommand::TransferPeer(args) => return transfer::run_peer(args),
        BenchCommand::Router(_) | BenchCommand::Proxy(_) | BenchCommand::Upstream(_) => {}
    }
    let runtime = Runtime::new().context("bench: no threads to run on")?;
    match &args.what {
        BenchCommand::Router(args) => router(args, &runtime),
        BenchCommand::Proxy(args) => {
            let target = bench_target(&args.to, None)?;
            serve(args.listen, &args.end, &runtime, async |listener| proxy::run(listener, &target).await)
        }
        BenchCommand::Upstream(args) => serve(args.listen, &args.end, &runtime, upstream::run),
        BenchCommand::Transfer(_) | BenchCommand::TransferPeer(_) => Ok(ExitCode::SUCCESS),
    }
}

fn bench_target(url: &str, api_key: Option<&Secret<String>>) -> Result<Target> {
    Target::new(url, api_key).context("bench")
}

/// Serves until a signal, or the end of standard input when asked for.
fn serve(
    listen: SocketAddr,
    end: &EndArgs,
    runtime: &Runtime,
    server: impl AsyncFnOnce(TcpListener),
) -> Result<ExitCode> {
    let served: Result<()> = runtime.block_on(async {
        let bound = TcpListener::bind(listen).await.and_then(|l| Ok((l.local_addr()?, l)));
        let (address, listener) =
            bound.map_err(|e| anyhow!("bench: listen on {listen}: {e}; give another --listen"))?;
        out::print(&format!("listening on http://{address}\n"))?;
        let stdin_ended = async {
            if !end.until_stdin_ends {
                return std::future::pending().await;
            }
            // A read that fails has ended too.
            tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink())).await
        };
        tokio::select! {
            () = server(listener) => {}
            _ = tokio::signal::ctrl_c() => {}
            _ = stdin_ended => {}
        }
        Ok(())
    });
    served.map(|()| ExitCode::SUCCESS)
}

/// A server of this program in a process of its own; it ends with this one, however that ends.
struct ServerProcess {
    child: Child,
    url: String,
}

impl ServerProcess {
    fn new(args: &[&str]) -> Result<Self> {
        let reference = || format!("bench: reference {}", args.join(" "));
        let program = std::env::current_exe().with_context(reference)?;
        let mut child = Command::new(program)
            .arg("bench")
            .args(args)
            .arg("--until-stdin-ends")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(reference)?;
        let mut line = String::new();
        let read = child.stdout.take().map(|out| BufReader::new(out).read_line(&mut line));
        let url = line.trim().strip_prefix("listening on ").map(str::to_owned);
        let mut started = Self { child, url: String::new() };
        match (read, url) {
            (Some(Ok(_)), Some(url)) => started.url = url,
            _ => bail!("{}: it did not start", reference()),
        }
        Ok(started)
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // It may have ended already, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn router(args: &RouterArgs, runtime: &Runtime) -> Result<ExitCode> {
    let client = Client::new(client_options());
    let target = bench_target(&args.url, args.api_key.as_ref())?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => runtime
            .block_on(target.models(&client))
            .context("bench")?
            .into_iter()
            .next()
            .map(|m| m.name)
            .context("bench: the router lists no model; wait until it is ready, or give --model")?,
    };
    let mut started = Vec::new();
    if args.reference {
        let upstream = ServerProcess::new(&["upstream"])?;
        let proxy = ServerProcess::new(&["proxy", "--to", &upstream.url])?;
        started.extend([upstream, proxy]);
    }
    let comparison = Comparison {
        client,
        sides: sides(args, target, &started)?,
        duration: Duration::from_secs(args.duration),
        rounds: args.rounds,
        callers: args.callers,
    };
    let rates =
        Rates { small_per_s: args.rate, large_per_s: args.large_rate, stream_per_s: args.stream_rate };
    let mut figures = Vec::new();
    for load in loads(&model, rates, args.body_kib as usize * 1024, args.stream_tokens) {
        if !args.wants(load.name) {
            continue;
        }
        note!("measuring: {}", load.name);
        figures.extend(comparison.run(&load, runtime.handle())?);
    }
    report(args, &figures)
}

/// The router, what is behind it when known, and the reference's two.
fn sides(args: &RouterArgs, router: Target, started: &[ServerProcess]) -> Result<Vec<Side>> {
    let mut sides = Vec::new();
    if let Some(url) = &args.direct_url {
        sides.push(Side {
            name: "direct",
            target: bench_target(url, args.api_key.as_ref())?,
            pid: None,
            beside: Vec::new(),
        });
    }
    sides.push(Side { name: "router", target: router, pid: args.pid, beside: args.beside.clone() });
    for (name, one) in ["bare server", "plain proxy"].into_iter().zip(started) {
        let (target, pid) = (bench_target(&one.url, None)?, Some(one.child.id()));
        sides.push(Side { name, target, pid, beside: Vec::new() });
    }
    Ok(sides)
}

/// The latency that a side adds to the server behind it, µs.
#[derive(serde::Serialize)]
struct AddedLatency {
    load: &'static str,
    side: &'static str,
    over: &'static str,
    first_byte_p50_us: Option<f64>,
    first_byte_p99_us: Option<f64>,
}

/// Differences of percentiles, which are not percentiles of differences: no call goes both ways.
fn added(figures: &[Figures]) -> Vec<AddedLatency> {
    let find = |load: &str, side: &str| figures.iter().find(|f| f.load == load && f.side == side);
    let less = |a: Option<f64>, b: Option<f64>| Some(a? - b?);
    let pairs = [("router", "direct"), ("plain proxy", "bare server")];
    let of = |f: &Figures| {
        let (_, over) = pairs.into_iter().find(|(side, _)| *side == f.side)?;
        let base = find(f.load, over)?;
        Some(AddedLatency {
            load: f.load,
            side: f.side,
            over,
            first_byte_p50_us: less(f.first_byte_p50_us, base.first_byte_p50_us),
            first_byte_p99_us: less(f.first_byte_p99_us, base.first_byte_p99_us),
        })
    };
    figures.iter().filter_map(of).collect()
}

fn report(args: &RouterArgs, figures: &[Figures]) -> Result<ExitCode> {
    let added = added(figures);
    let find = |load: &str, side: &str| figures.iter().find(|f| f.load == load && f.side == side);
    let by_event: Vec<(&'static str, Option<f64>)> = figures
        .iter()
        .filter(|f| f.load == "stream" && f.cpu_us_per_call.is_some())
        .map(|stream| {
            (stream.side, find("small", stream.side).and_then(|plain| cpu_us_per_event(plain, stream)))
        })
        .collect();
    let mut text = format!("{}\n", table(figures, &added));
    for (side, us) in &by_event {
        let us = us.map_or_else(|| "–".into(), |us| format!("{us:.2} µs"));
        text.push_str(&format!("processor time by event of a stream, {side}: {us}\n"));
    }
    out::print(&text)?;
    if let Some(path) = &args.json {
        let by_event: Vec<_> =
            by_event.iter().map(|(side, us)| json!({ "side": side, "cpu_us_per_event": us })).collect();
        let document = json!({ "figures": figures, "added": added, "events": by_event });
        let document = serde_json::to_string_pretty(&document).context("bench: report")?;
        out::save(path, &document)?;
        note!("written: {}", path.display());
    }
    let failed = figures.iter().any(|f| f.answered == 0);
    if failed {
        note!("baton: bench: a side answered nothing; see the errors");
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn table(figures: &[Figures], added: &[AddedLatency]) -> String {
    let mut table = crate::cli::table::with_header(
        &[
            "load",
            "side",
            "answered",
            "errors",
            "a second",
            "waited",
            "first byte p50",
            "p99",
            "whole p50",
            "p99",
            "added p50",
            "added p99",
            "CPU a call",
            "beside it",
        ],
        2..,
    );
    let us = |v: Option<f64>| v.map_or_else(|| "–".into(), |v| format!("{v:.0} µs"));
    for f in figures {
        let added = added.iter().find(|a| a.load == f.load && a.side == f.side);
        table.add_row([
            f.load.into(),
            f.side.into(),
            f.answered.to_string(),
            f.errors.to_string(),
            format!("{:.0}", f.answered_per_s),
            f.waited.to_string(),
            us(f.first_byte_p50_us),
            us(f.first_byte_p99_us),
            us(f.whole_p50_us),
            us(f.whole_p99_us),
            us(added.and_then(|a| a.first_byte_p50_us)),
            us(added.and_then(|a| a.first_byte_p99_us)),
            us(f.cpu_us_per_call),
            us(f.beside_cpu_us_per_call),
        ]);
    }
    table.to_string()
}
