//! `baton indexer`: who holds how much of a prompt, for routers that ask over Mooncake's calls.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use baton_indexer::{Indexer, IndexerSettings, Kind, ServerSettings};

/// Arguments of `baton indexer`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    baton indexer --config conductor_config.json --snapshot /var/lib/baton/index\n  \
    baton indexer --listen 0.0.0.0:13333 --join http://10.0.0.5:13333\n  \
    curl -s 127.0.0.1:13333/query -d '{\"model\":\"m\",\"block_size\":16,\"token_ids\":[1,2,3]}'")]
pub struct IndexerArgs {
    /// Where routers ask [default: 127.0.0.1 and the configuration's http_server_port, else 13333]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
    /// Publishers to follow from the start, as Mooncake's conductor_config.json names them
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Where the index is written down, every so often and at the end, and read at the start
    #[arg(long, value_name = "FILE")]
    snapshot: Option<PathBuf>,
    /// Seconds between two snapshots
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    snapshot_every_s: u64,
    /// A peer whose index is taken over first, with all that it follows
    #[arg(long, value_name = "URL")]
    join: Option<String>,
    /// Seed of the standard block hashes; peers, and callers of /query_by_hash, use the same
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    hash_seed: u64,
    /// Log filter, like info or baton=debug
    #[arg(long, env = "BATON_LOG", default_value = "info")]
    log: String,
}

/// Runs `baton indexer` until Ctrl-C or SIGTERM.
///
/// # Errors
/// With one line for the user: what failed, and the remedy.
pub fn run(args: &IndexerArgs) -> Result<ExitCode> {
    crate::log::start(&args.log)?;
    let runtime = super::runtime(None)?;
    runtime.block_on(serve(args))?;
    runtime.shutdown_timeout(Duration::from_secs(2));
    Ok(ExitCode::SUCCESS)
}

async fn serve(args: &IndexerArgs) -> Result<()> {
    let stop = crate::shutdown::on_signal()?;
    let fixed = args.config.as_deref().map(read_config).transpose()?;
    let port = fixed.as_ref().and_then(|fixed| fixed.port).filter(|port| *port > 0).unwrap_or(13333);
    let listen = args.listen.clone().unwrap_or_else(|| format!("127.0.0.1:{port}"));
    let listener = tokio::net::TcpListener::bind(&listen)
        .await
        .map_err(|e| anyhow!("indexer: listen on {listen}: {e}; name another --listen"))?;
    let address = listener.local_addr().context("indexer")?;
    let mut settings = IndexerSettings::default();
    settings.limits.seed = args.hash_seed;
    let indexer = Indexer::new(settings);
    if let Some(path) = args.snapshot.as_deref() {
        warm_up(&indexer, path)?;
    }
    if let Some(url) = &args.join {
        let began = Instant::now();
        let (streams, blocks) = baton_indexer::join(&indexer, url).await?;
        announce!(
            "joined {url}: {streams} publishers, {blocks} blocks in {:.1} s",
            began.elapsed().as_secs_f64()
        );
    }
    for registration in fixed.into_iter().flat_map(|fixed| fixed.registrations) {
        follow(&indexer, registration)?;
    }
    announce!("baton: indexer on http://{address}; Ctrl-C drains and stops");
    let saving = args.snapshot.clone().map(|path| {
        tokio::spawn(save_often(Arc::clone(&indexer), path, Duration::from_secs(args.snapshot_every_s)))
    });
    baton_indexer::serve(Arc::clone(&indexer), listener, ServerSettings::default(), stop).await;
    if let Some(saving) = saving {
        // One that is under way writes the same file: it ends first.
        saving.abort();
        let _ = saving.await;
    }
    if let Some(path) = &args.snapshot {
        indexer.save(path)?;
    }
    Ok(())
}

fn read_config(path: &Path) -> Result<baton_indexer::FixedConfig> {
    let named = || path.display().to_string();
    let text = std::fs::read(path).with_context(named)?;
    let fixed = baton_indexer::read_config(&text).with_context(named)?;
    if !fixed.unknown.is_empty() {
        tracing::info!("{}: fields that are not known here: {}", path.display(), fixed.unknown.join(", "));
    }
    Ok(fixed)
}

/// Reads the snapshot of an earlier life; there need not be one.
fn warm_up(indexer: &Arc<Indexer>, path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let began = Instant::now();
    let (streams, blocks) = indexer.load(path).map_err(|e| anyhow!("{e}; or move the file away"))?;
    announce!("warm: {streams} publishers, {blocks} blocks in {:.1} s", began.elapsed().as_secs_f64());
    Ok(())
}

/// The configuration is right where a snapshot says otherwise.
fn follow(indexer: &Arc<Indexer>, registration: baton_indexer::Registration) -> Result<()> {
    let key = registration.key();
    match indexer.register(registration.clone()) {
        Err(e) if e.kind == Kind::Conflict => {
            tracing::info!("indexer: {key}: the configuration differs from the snapshot, which is dropped");
            indexer.unregister(&key);
            indexer.register(registration)
        }
        other => other,
    }
    .map(|_| ())
    .with_context(|| format!("configuration: {key}"))
}

async fn save_often(indexer: Arc<Indexer>, path: PathBuf, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        let (indexer, path) = (Arc::clone(&indexer), path.clone());
        if let Ok(Err(e)) = tokio::task::spawn_blocking(move || indexer.save(&path)).await {
            tracing::warn!("indexer: {e}");
        }
    }
}
