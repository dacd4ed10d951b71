//! `baton store serve`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Error, Result, anyhow, bail};
use baton_http::Identity;
use baton_http::{Bounds, PAGE_TYPE, reply};
use baton_objects::resp::{Login, RespConfig, Server};
use baton_objects::{
    AdmissionRule, Clock, ColdBucket, ColdConfig, LowerConfig, ObjectStore, Parts, SsdConfig, StoreConfig,
};
use bytes::Bytes;
use http::StatusCode;
use http::header::{CONNECTION, HeaderValue};
use http_body_util::Full;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::cli::out;
use crate::metrics::objects;
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
    /// Memory for values. Beside it the process takes at most 210 bytes and its length a key, 128KiB a connection,
    /// 256MiB for commands and answers on their way, 64MiB for itself, and with --ssd or --cold half of this (64MiB to
    /// 1GiB, or four of the largest values) for values on their way up and 350 bytes a value on the SSD
    #[arg(long, default_value = "1GiB", value_parser = crate::config::size)]
    memory: u64,
    /// Most keys; one of a value that is evicted is free again [default: one for each KiB of memory]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    keys_max: Option<u64>,
    /// Largest value [default: half of the memory, at most 512MiB]
    #[arg(long, value_parser = crate::config::size)]
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
    #[arg(long, value_name = "SIZE", requires = "ssd", value_parser = crate::config::size)]
    ssd_size: Option<u64>,
    /// The unit in which its room is given out; many small values want a small one [default: as the file there has it, or
    /// 68KiB, which holds 64KiB and a header]
    #[arg(long, value_name = "SIZE", requires = "ssd", value_parser = crate::config::size)]
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
    /// Size of the bucket at most; objects that were not read for long are evicted
    #[arg(long, value_name = "SIZE", default_value = "1TiB", requires = "cold", value_parser = crate::config::size)]
    cold_size: u64,
    /// Objects that the bucket keeps at most; each takes some 150 bytes of memory here
    #[arg(long, value_name = "N", default_value_t = 1 << 20, requires = "cold")]
    cold_objects: u64,
    /// Keys that are parts of one object, found only when all are there and evicted together: `world` for
    /// LMCache's keys, which contain it, or the counts of tp_rank, pp_rank, pcp, dcp, group in keys of vLLM's store
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
            admit: if self.ssd_admit == Touch::First { AdmissionRule::First } else { AdmissionRule::Second },
            ..SsdConfig::new(dir, bytes)
        });
        let log: baton_objects::OperatorLog =
            std::sync::Arc::new(|words: &str| note!("baton: store: {words}"));
        let cold = self.cold.clone().map(|url| ColdConfig {
            endpoint: self.cold_endpoint.clone(),
            capacity_bytes: self.cold_size,
            objects_max: self.cold_objects,
            ..ColdConfig::new(ColdBucket::Url(url))
        });
        LowerConfig { ssd, cold, log: Some(log) }
    }
}

/// The fault of a setting, under the name of its command line option.
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
pub(super) fn run(args: &ServeArgs) -> Result<ExitCode> {
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
    let tls = files.map(|(certificate, key)| Identity::of_files(certificate, key)).transpose();
    let tls = tls.map_err(|e| anyhow!("store: tls {e}"))?;
    let scheme = if tls.is_some() { "rediss" } else { "redis" };
    let resp = RespConfig {
        logins,
        tls,
        connections_max: args.connections as usize,
        allow_flush: args.allow_flush,
        ..RespConfig::default()
    };
    raise_files(args.connections);
    let store = ObjectStore::with_lower(&config, Clock::machine(), &args.lower());
    let store = store.map_err(|why| Error::msg(in_options(why)))?;
    let settling = store.clone();
    let server = Server::new(store.clone(), resp).map_err(Error::msg)?;
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
        out::print(&format!("listening on {scheme}://{address}\n"))?;
        server.serve(listener, stop.cancelled()).await;
        anyhow::Ok(())
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

async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let failed = |e| anyhow!("store: listen on {address}: {e}; give another address");
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

/// Reads users, passwords, tenants and quotas. Empty lines and those that begin with `#` say nothing.
fn logins(path: &Path) -> Result<Vec<Login>> {
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|e| anyhow!("store: logins {}: {e}; give a file to --auth", path.display()))?;
    let lines =
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    let logins = lines.map(|(at, line)| {
        let wrong = |what: &str| anyhow!("store: logins {} line {}: {what}", path.display(), at + 1);
        let words: Vec<&str> = line.split_whitespace().collect();
        let (user, password, tenant, quota) = match words[..] {
            [user, password, tenant] => (user, password, tenant, None),
            [user, password, tenant, quota] => (user, password, tenant, Some(quota)),
            _ => return Err(wrong("give USER PASSWORD TENANT [QUOTA]")),
        };
        let quota_bytes = quota.map_or(Ok(u64::MAX), crate::config::size).map_err(|e| wrong(&e))?;
        Ok(Login { user: user.into(), password: password.into(), tenant: tenant.into(), quota_bytes })
    });
    let logins: Vec<Login> = logins.collect::<Result<_, _>>()?;
    if logins.is_empty() { bail!("store: logins {}: no line of it", path.display()) } else { Ok(logins) }
}

/// The limits for scrapers: they are few, and each asks for one page.
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
        let text = Full::<Bytes>::from(objects::page(&server, &store));
        let mut page = reply(StatusCode::OK, PAGE_TYPE, text);
        page.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        std::future::ready(page)
    };
    baton_http::serve("store: metrics", listener, SCRAPES, CancellationToken::new(), page).await;
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
        assert!(read("a b").expect_err("too short").to_string().contains("line 1"));
        assert!(read("a b c 1GB").expect_err("no such unit").to_string().contains("line 1"));
        assert!(read("# nobody").is_err());
        assert!(logins(&place.path().join("none")).expect_err("no file").to_string().contains("--auth"));
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
}
