//! `baton store serve`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use baton_http::{Bounds, reply};
use baton_objects::resp::{BUFFERS_MAX_BYTES, Login, RespConfig, Server, ServerStats, Tls};
use baton_objects::{
    Admit, Clock, ColdBucket, ColdConfig, LowerConfig, LowerStats, ObjectStore, Parts, SsdConfig, StoreConfig,
};
use bytes::Bytes;
use http::StatusCode;
use http::header::{CONNECTION, HeaderValue};
use http_body_util::Full;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::cli::out;
use crate::shutdown;

/// Arguments of `baton store serve`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    baton store serve --memory 4GiB\n  \
    baton store serve --listen 0.0.0.0:6379 --memory 64GiB --auth logins.txt --metrics 127.0.0.1:9180\n  \
    baton store serve --memory 64GiB --ssd /data/objects --ssd-size 800GiB --cold s3://kv/llama-70b\n\
    A line of logins.txt: USER PASSWORD TENANT [QUOTA], such as: default secret team-a 8GiB")]
pub(super) struct ServeArgs {
    /// Address to serve on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:6379")]
    listen: SocketAddr,
    /// Memory for values. Beside it the process takes at most 250 bytes a key, 128KiB a connection, 256MiB for commands
    /// and answers on their way, 64MiB for itself, and with --ssd or --cold half of this (64MiB to 1GiB, or four of the
    /// largest values) for values on their way up and 350 bytes a value on the SSD
    #[arg(long, default_value = "1GiB", value_parser = super::size)]
    memory: u64,
    /// Most keys; one of a value that is evicted is free again [default: one for each KiB of memory]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    keys_max: Option<u64>,
    /// Largest value [default: half of the memory, at most 512MiB]
    #[arg(long, value_parser = super::size)]
    value_max: Option<u64>,
    /// File of users, passwords, tenants and quotas, a line each; without it everybody may come in
    #[arg(long, value_name = "FILE")]
    auth: Option<PathBuf>,
    /// Certificate chain, PEM; with --tls-key clients speak TLS (rediss://)
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Serve metrics over HTTP on this address
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,
    /// Let FLUSHDB remove all keys of its tenant
    #[arg(long)]
    allow_flush: bool,
    /// Compare each value with its checksum before GET answers
    #[arg(long)]
    verify: bool,
    /// Keep what is read again in a file in this folder: it outlives eviction and the process
    #[arg(long, value_name = "FOLDER", requires = "ssd_size")]
    ssd: Option<PathBuf>,
    /// Size of that file
    #[arg(long, value_name = "SIZE", requires = "ssd", value_parser = super::size)]
    ssd_size: Option<u64>,
    /// The unit in which its room is given out; many small values want a small one [default: as the file there has it, or
    /// 68KiB, which holds 64KiB and a header]
    #[arg(long, value_name = "SIZE", requires = "ssd", value_parser = super::size)]
    ssd_block: Option<u64>,
    /// When a value is copied there: at its first touch, the put, or at its second
    #[arg(long, value_enum, default_value = "second")]
    ssd_admit: Touch,
    /// Keep what is asked for again and again in a bucket: s3://BUCKET/PREFIX with the usual AWS_ variables,
    /// file:///FOLDER, or memory: to try it out. One store uses a prefix at a time
    #[arg(long, value_name = "URL")]
    cold: Option<String>,
    /// Address of the S3 service, if it is not Amazon's [default: what AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL says]
    #[arg(long, value_name = "URL", requires = "cold")]
    cold_endpoint: Option<String>,
    /// What the bucket keeps at most; what was not read for long gives way
    #[arg(long, value_name = "SIZE", default_value = "1TiB", requires = "cold", value_parser = super::size)]
    cold_size: u64,
    /// Objects that the bucket keeps at most; each takes some 150 bytes of memory here
    #[arg(long, value_name = "N", default_value_t = 1 << 20, requires = "cold")]
    cold_objects: u64,
    /// Keys that are parts of one object, found only when all are there and evicted together: `world` for
    /// LMCache's keys, which tell it, or the counts of tp_rank, pp_rank, pcp, dcp, group in keys of vLLM's store
    /// connectors, such as tp_rank=8,pp_rank=2 [default: each key is an object by itself]
    #[arg(long, value_name = "RULE")]
    parts: Option<Parts>,
    /// Connections at a time
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    connections: u32,
    /// Threads that serve [default: one for each core]
    #[arg(long, value_parser = crate::cli::threads)]
    threads: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Touch {
    /// When it is put
    First,
    /// When it is read, or put again after it was evicted
    Second,
}

impl ServeArgs {
    /// The tiers below the memory.
    fn lower(&self) -> LowerConfig {
        let sized = self.ssd.clone().zip(self.ssd_size);
        let ssd = sized.map(|(dir, bytes)| SsdConfig {
            block_bytes: self.ssd_block.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
            admit: if self.ssd_admit == Touch::First { Admit::First } else { Admit::Second },
            ..SsdConfig::new(dir, bytes)
        });
        let tell: baton_objects::Tell = std::sync::Arc::new(|words: &str| note!("baton: store: {words}"));
        let cold = self.cold.clone().map(|url| ColdConfig {
            endpoint: self.cold_endpoint.clone(),
            capacity_bytes: self.cold_size,
            objects_max: self.cold_objects,
            ..ColdConfig::new(ColdBucket::Url(url))
        });
        LowerConfig { ssd, cold, tell: Some(tell) }
    }
}

/// What is wrong with a setting, by the name that it has on the command line.
fn in_options(why: String) -> String {
    let options = [
        ("cold: capacity_bytes:", "--cold-size:"),
        ("cold: objects_max:", "--cold-objects:"),
        ("ssd: capacity_bytes:", "--ssd-size:"),
        ("ssd: block_bytes:", "--ssd-block:"),
        ("capacity_bytes:", "--memory:"),
        ("value_max_bytes:", "--value-max:"),
    ];
    let found =
        options.iter().find_map(|(name, option)| Some(format!("{option}{}", why.strip_prefix(name)?)));
    found.unwrap_or(why)
}

/// How long the end waits for what is on its way to the tiers below.
const SETTLE_WITHIN: Duration = Duration::from_secs(10);

/// Runs `baton store serve`.
pub(super) fn run(args: &ServeArgs) -> Result<ExitCode, String> {
    let logins = args.auth.as_deref().map(logins).transpose()?.unwrap_or_default();
    let open = logins.is_empty() && !args.listen.ip().is_loopback();
    let config = StoreConfig {
        capacity_bytes: args.memory,
        value_max_bytes: args.value_max.unwrap_or_else(|| (512 << 20).min(args.memory / 2)),
        keys_max: args.keys_max.unwrap_or(0),
        verify_reads: args.verify,
        parts: args.parts.clone(),
        ..StoreConfig::default()
    };
    let files = args.tls_cert.as_deref().zip(args.tls_key.as_deref());
    let tls = files.map(|(certificate, key)| Tls::of_files(certificate, key)).transpose()?;
    let scheme = if tls.is_some() { "rediss" } else { "redis" };
    let resp = RespConfig {
        logins,
        tls,
        connections_max: args.connections as usize,
        allow_flush: args.allow_flush,
        ..RespConfig::default()
    };
    raise_files(args.connections);
    let store = ObjectStore::with_lower(&config, Clock::machine(), &args.lower()).map_err(in_options)?;
    let settling = store.clone();
    let server = Server::new(store.clone(), resp)?;
    if open {
        note!("baton: store: everybody who reaches {} may read and write; give --auth", args.listen);
    }
    let served = crate::cli::runtime(args.threads)?.block_on(async {
        let stop = shutdown::on_signal()?;
        let (listener, address) = bind(args.listen).await?;
        if let Some(metrics) = args.metrics {
            let (listener, address) = bind(metrics).await?;
            tokio::spawn(serve_metrics(listener, server.clone(), store));
            note!("metrics on http://{address}/metrics");
        }
        out::say(&format!("listening on {scheme}://{address}\n"))?;
        server.serve(listener, stop.cancelled()).await;
        Ok::<_, String>(())
    });
    served?;
    if !settling.settle(SETTLE_WITHIN) {
        note!("baton: store: what was on its way to the tiers below is given up");
    }
    Ok(ExitCode::SUCCESS)
}

/// Files beside the connections that a store may have open.
const OTHER_FILES: u64 = 64;

/// Lets the process have as many files as it has connections, as far as it may; says so where it may not.
fn raise_files(connections: u32) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let (wanted, limit) = (u64::from(connections) + OTHER_FILES, getrlimit(Resource::Nofile));
    if limit.current.is_none_or(|files| files >= wanted) {
        return;
    }
    let most = limit.maximum.map_or(wanted, |most| most.min(wanted));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: limit.maximum });
    let files = if raised.is_ok() { most } else { limit.current.unwrap_or(wanted) };
    if files < wanted {
        note!(
            "baton: store: --connections {connections} wants {wanted} open files, but the system allows {files}: with \
             more clients some give way; raise the limit (ulimit -n)"
        );
    }
}

async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), String> {
    let failed = |e| format!("store: listen on {address}: {e}; give another address");
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

/// Reads users, passwords, tenants and quotas. Empty lines and those that begin with `#` say nothing.
fn logins(path: &Path) -> Result<Vec<Login>, String> {
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|e| format!("store: logins {}: {e}; give a file to --auth", path.display()))?;
    let lines =
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    let logins = lines.map(|(at, line)| {
        let wrong = |what: &str| format!("store: logins {} line {}: {what}", path.display(), at + 1);
        let words: Vec<&str> = line.split_whitespace().collect();
        let (user, password, tenant, quota) = match words[..] {
            [user, password, tenant] => (user, password, tenant, None),
            [user, password, tenant, quota] => (user, password, tenant, Some(quota)),
            _ => return Err(wrong("give USER PASSWORD TENANT [QUOTA]")),
        };
        let quota_bytes = quota.map_or(Ok(u64::MAX), super::size).map_err(|e| wrong(&e))?;
        Ok(Login { user: user.into(), password: password.into(), tenant: tenant.into(), quota_bytes })
    });
    let logins: Vec<Login> = logins.collect::<Result<_, _>>()?;
    if logins.is_empty() {
        Err(format!("store: logins {}: no line of it", path.display()))
    } else {
        Ok(logins)
    }
}

/// What scrapers may take: they are few, and each asks for one page.
const SCRAPES: Bounds = Bounds {
    connections: 16,
    head_bytes: 16 << 10,
    head_timeout: Duration::from_secs(10),
    stall_timeout: Duration::from_secs(10),
    drain: Duration::ZERO,
};

/// Answers every HTTP request with the metrics.
async fn serve_metrics(listener: TcpListener, server: Server, store: ObjectStore) {
    let page = move |_| {
        let text = Full::<Bytes>::from(metrics(&server, &store));
        let mut page = reply(StatusCode::OK, "text/plain; version=0.0.4", text);
        page.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        std::future::ready(page)
    };
    baton_http::serve("store: metrics", listener, SCRAPES, CancellationToken::new(), page).await;
}

fn metrics(server: &Server, store: &ObjectStore) -> String {
    let stats = store.stats();
    let served = server.stats();
    let rows = [
        ("baton_objects_keys", "gauge", "Keys that can be read", stats.keys),
        ("baton_objects_capacity_bytes", "gauge", "Memory for values", stats.capacity_bytes),
        ("baton_objects_used_bytes", "gauge", "Memory of values in use", stats.used_bytes),
        ("baton_objects_connections", "gauge", "Open connections", served.connections),
        ("baton_objects_commands_total", "counter", "Commands served", served.commands),
        ("baton_objects_hits_total", "counter", "Reads that found a value", stats.hits),
        ("baton_objects_misses_total", "counter", "Reads that found none", stats.misses),
        (
            "baton_objects_incomplete_total",
            "counter",
            "Of these, a part of the object missing",
            stats.incomplete,
        ),
        ("baton_objects_puts_total", "counter", "Values sealed", stats.puts),
        ("baton_objects_unchanged_total", "counter", "Puts of what was there already", stats.unchanged),
        ("baton_objects_removed_total", "counter", "Values removed by request", stats.removed),
        ("baton_objects_evicted_total", "counter", "Values evicted for room", stats.evicted),
        ("baton_objects_expired_total", "counter", "Values at the end of their time", stats.expired),
        ("baton_objects_abandoned_total", "counter", "Writers that did not come back", stats.abandoned),
        ("baton_objects_taken_over_total", "counter", "Writers replaced by another", stats.taken_over),
    ];
    let lower = store.lower_stats();
    rows.map(metric).concat() + &server_metrics(&served) + &ssd_metrics(&lower) + &cold_metrics(&lower)
}

/// What the server has refused and ended.
fn server_metrics(served: &ServerStats) -> String {
    let rows = [
        (
            "baton_objects_buffers_max_bytes",
            "gauge",
            "Bytes for commands and answers on their way",
            BUFFERS_MAX_BYTES,
        ),
        ("baton_objects_buffered_bytes", "gauge", "Of these, in use", served.buffered_bytes),
        (
            "baton_objects_refused_total",
            "counter",
            "Connections for which there was no place",
            served.refused,
        ),
        (
            "baton_objects_displaced_total",
            "counter",
            "Connections that gave way to a newcomer",
            served.displaced,
        ),
        (
            "baton_objects_cut_silent_total",
            "counter",
            "Connections ended without a login or a word",
            served.cut_silent,
        ),
        (
            "baton_objects_cut_half_sent_total",
            "counter",
            "Connections ended in the middle of a command that did not go on",
            served.cut_half_sent,
        ),
        (
            "baton_objects_cut_unread_total",
            "counter",
            "Connections ended for answers left unread",
            served.cut_unread,
        ),
        (
            "baton_objects_accept_errors_total",
            "counter",
            "Connections that the system did not hand over, mostly for too many open files",
            served.accept_errors,
        ),
        (
            "baton_objects_handshakes_failed_total",
            "counter",
            "Connections that did not come to speak TLS",
            served.handshakes_failed,
        ),
    ];
    rows.map(metric).concat()
}

/// One metric as Prometheus reads it: name, kind, what it is, value.
fn metric((name, kind, what, value): (&str, &str, &str, impl std::fmt::Display)) -> String {
    format!("# HELP {name} {what}\n# TYPE {name} {kind}\n{name} {value}\n")
}

/// What the SSD has done.
fn ssd_metrics(lower: &LowerStats) -> String {
    let ssd = lower.ssd;
    let rows = [
        ("baton_objects_ssd_on", "gauge", "Whether values are copied to the SSD", u64::from(lower.ssd_on)),
        ("baton_objects_ssd_keys", "gauge", "Values on the SSD", ssd.values),
        ("baton_objects_ssd_used_bytes", "gauge", "Blocks of the file in use", ssd.used_bytes),
        ("baton_objects_ssd_written_bytes_total", "counter", "Blocks written to the SSD", ssd.written_bytes),
        ("baton_objects_ssd_hits_total", "counter", "Reads that the SSD answered", lower.ssd_hits),
        ("baton_objects_ssd_hit_bytes_total", "counter", "Bytes of those reads", lower.ssd_hit_bytes),
        ("baton_objects_ssd_evicted_total", "counter", "Values that left the SSD for room", ssd.evicted),
        ("baton_objects_ssd_corrupt_total", "counter", "Values that were not as stored", ssd.corrupt),
        ("baton_objects_ssd_errors_total", "counter", "Reads and writes that the SSD refused", ssd.io_errors),
        (
            "baton_objects_ssd_passed_over_total",
            "counter",
            "Values not copied, too many waited",
            lower.passed_over,
        ),
        (
            "baton_objects_ssd_unasked_total",
            "counter",
            "Reads not made as the SSD did not answer",
            lower.unasked,
        ),
        (
            "baton_objects_beside_bytes",
            "gauge",
            "Values from below that memory has no room for and readers wait for",
            lower.beside_bytes,
        ),
        (
            "baton_objects_let_go_total",
            "counter",
            "Values from below answered as misses, no room for them",
            lower.let_go,
        ),
        (
            "baton_objects_ssd_unconfirmed_total",
            "counter",
            "Removals not confirmed by the SSD",
            lower.unconfirmed,
        ),
    ];
    let wear = metric((
        "baton_objects_ssd_written_per_hit_byte",
        "gauge",
        "Bytes written to the SSD for each byte that it gave back",
        format_args!("{:.6}", lower.written_per_hit_byte()),
    ));
    rows.map(metric).concat() + &wear
}

/// What the bucket has done.
fn cold_metrics(lower: &LowerStats) -> String {
    let cold = lower.cold;
    let rows = [
        ("baton_objects_cold_on", "gauge", "Whether the bucket is asked at the moment", u64::from(cold.on)),
        ("baton_objects_cold_keys", "gauge", "Values in the bucket", cold.objects),
        ("baton_objects_cold_used_bytes", "gauge", "Bytes of objects in the bucket", cold.bytes),
        ("baton_objects_cold_written_total", "counter", "Values written to the bucket", cold.written),
        ("baton_objects_cold_written_bytes_total", "counter", "Bytes of those objects", cold.written_bytes),
        ("baton_objects_cold_hits_total", "counter", "Reads that the bucket answered", cold.hits),
        ("baton_objects_cold_hit_bytes_total", "counter", "Bytes of those reads", cold.hit_bytes),
        ("baton_objects_cold_evicted_total", "counter", "Values that left the bucket for room", cold.evicted),
        ("baton_objects_cold_refused_total", "counter", "Objects that were not as written", cold.refused),
        (
            "baton_objects_cold_errors_total",
            "counter",
            "Requests that failed or took too long",
            cold.failures,
        ),
        ("baton_objects_cold_passed_over_total", "counter", "Values not written", cold.passed_over),
        ("baton_objects_cold_removing", "gauge", "Removals under way or to be tried again", cold.going),
        (
            "baton_objects_cold_unconfirmed_total",
            "counter",
            "Removals not confirmed in time by the bucket",
            lower.cold_unconfirmed,
        ),
    ];
    rows.map(metric).concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logins_are_read_and_a_wrong_line_is_named() {
        let place = tempfile::tempdir().expect("a temporary folder");
        let path = place.path().join("logins");
        let read = |text: &str| {
            std::fs::write(&path, text).expect("written");
            logins(&path)
        };
        let good = read("# who\n\ndefault secret team-a 8GiB\nother word team-b\n").expect("two lines");
        assert_eq!(good.len(), 2);
        assert_eq!((good[0].quota_bytes, good[1].quota_bytes), (8 << 30, u64::MAX));
        assert!(read("a b").expect_err("too short").contains("line 1"));
        assert!(read("a b c 1GB").expect_err("no such unit").contains("line 1"));
        assert!(read("# nobody").is_err());
        assert!(logins(&place.path().join("none")).expect_err("no file").contains("--auth"));
    }

    #[test]
    fn a_setting_that_cannot_be_is_named_as_it_was_given() {
        let bucket = |change: fn(&mut ColdConfig)| {
            let mut cold = ColdConfig::new(ColdBucket::Url("memory:".into()));
            change(&mut cold);
            LowerConfig { cold: Some(cold), ..LowerConfig::default() }
        };
        let file = |change: fn(&mut SsdConfig)| {
            let mut ssd = SsdConfig::new("nowhere".into(), 1 << 30);
            change(&mut ssd);
            LowerConfig { ssd: Some(ssd), ..LowerConfig::default() }
        };
        let good = StoreConfig::default();
        for (config, lower, option) in [
            (StoreConfig { capacity_bytes: 1, ..good.clone() }, LowerConfig::default(), "--memory: give"),
            (
                StoreConfig { value_max_bytes: 1 << 40, ..good.clone() },
                LowerConfig::default(),
                "--value-max: give",
            ),
            (good.clone(), bucket(|cold| cold.capacity_bytes = 0), "--cold-size: give"),
            (good.clone(), bucket(|cold| cold.objects_max = 0), "--cold-objects: give"),
            (good.clone(), file(|ssd| ssd.capacity_bytes = 0), "--ssd-size: give"),
            (good.clone(), file(|ssd| ssd.block_bytes = Some(5)), "--ssd-block: give"),
        ] {
            let why = ObjectStore::with_lower(&config, Clock::machine(), &lower).expect_err("it cannot be");
            let why = in_options(why);
            assert!(why.starts_with(option), "{why}");
        }
        assert_eq!(in_options("something else".into()), "something else");
    }

    fn small() -> (Server, ObjectStore) {
        let config =
            StoreConfig { capacity_bytes: 4 << 20, value_max_bytes: 1 << 20, ..StoreConfig::default() };
        let store = ObjectStore::new(&config, Clock::machine()).expect("small");
        let server = Server::new(store.clone(), RespConfig::default()).expect("good settings");
        (server, store)
    }

    #[test]
    fn the_documentation_has_every_metric_and_no_other() {
        let (server, store) = small();
        let text = metrics(&server, &store);
        let after = |mark: &'static str| {
            text.lines().filter_map(move |line| line.strip_prefix(mark)?.split_once(' '))
        };
        let exported = after("# HELP ").zip(after("# TYPE "));
        let exported: Vec<_> =
            exported.map(|((name, what), (_, kind))| format!("| `{name}` | {kind} | {what} |")).collect();
        let page = include_str!("../../../docs/metrics.md");
        let told: Vec<_> = page.lines().filter(|line| line.starts_with("| `baton_objects_")).collect();
        assert_eq!(told, exported, "docs/metrics.md has a row for each, in that order");
    }

    #[test]
    fn metrics_say_what_is_there() {
        let (server, store) = small();
        store.put(baton_objects::Key::anonymous(b"a"), b"x", Default::default()).expect("room");
        let text = metrics(&server, &store);
        assert!(text.contains("\nbaton_objects_keys 1\n") && text.contains("\nbaton_objects_puts_total 1\n"));
        assert!(text.contains("# TYPE baton_objects_hits_total counter"));
        assert!(text.contains("\nbaton_objects_ssd_on 0\n") && text.contains("\nbaton_objects_cold_on 0\n"));
        assert!(text.contains("\nbaton_objects_ssd_written_per_hit_byte 0.000000\n"));
    }
}
