//! `baton mooncake`: a metadata server for Mooncake's engines, a storage node of its master, a client of its objects.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use baton_mooncake::{
    Directory, DirectorySettings, NodeSettings, OBJECT_BYTES_MAX, Objects, ObjectsSettings, PlacementOptions,
    RELEASE, StorageNode, Way,
};

/// Arguments of `baton mooncake`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    baton mooncake metadata --listen 0.0.0.0:8080\n  \
    baton mooncake node --master 10.0.0.1:50051 --listen 10.0.0.2 --segment-bytes 17179869184\n  \
    baton mooncake put --master 10.0.0.1:50051 KEY FILE\n  \
    baton mooncake get --master 10.0.0.1:50051 KEY > FILE")]
pub struct MooncakeArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Serve metadata to Mooncake's engines over HTTP (metadata_server=http://HOST:PORT/metadata)
    Metadata(MetadataArgs),
    /// Lend memory to a Mooncake master and serve it to the master's clients
    Node(NodeArgs),
    /// Put the bytes of a file, or of standard input, under a key
    Put(PutArgs),
    /// Print the bytes under a key, or write them into a file
    Get(GetArgs),
    /// Check whether a key has an object; exit status: 0 yes, 1 no, 2 unknown
    Exists(KeyArgs),
    /// Remove the object under a key
    Remove(RemoveArgs),
}

#[derive(clap::Args)]
struct MetadataArgs {
    /// Where engines ask
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    listen: String,
    /// Log filter, like info or baton=debug
    #[arg(long, env = "BATON_LOG", default_value = "info")]
    log: String,
}

#[derive(clap::Args)]
struct NodeArgs {
    /// Where the master's RPC is
    #[arg(long, value_name = "HOST:PORT")]
    master: String,
    /// The host, and perhaps the port of handshakes, at which clients reach this node; it listens there
    #[arg(long, value_name = "HOST[:PORT]", default_value = "127.0.0.1")]
    listen: String,
    /// How many bytes to lend
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    segment_bytes: u64,
    /// Log filter, like info or baton=debug
    #[arg(long, env = "BATON_LOG", default_value = "info")]
    log: String,
}

#[derive(clap::Args)]
struct KeyArgs {
    /// Where the master's RPC is
    #[arg(long, value_name = "HOST:PORT")]
    master: String,
    /// The metadata server where segments are named [default: a segment's name is where its engine answers]
    #[arg(long, value_name = "URL")]
    metadata: Option<String>,
    /// The key
    key: String,
}

#[derive(clap::Args)]
struct PutArgs {
    #[command(flatten)]
    at: KeyArgs,
    /// The file [default: standard input]
    file: Option<PathBuf>,
    /// Copies, each in another segment
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    replicas: u64,
    /// The segment to use where it has room
    #[arg(long, value_name = "NAME")]
    segment: Option<String>,
}

#[derive(clap::Args)]
struct GetArgs {
    #[command(flatten)]
    at: KeyArgs,
    /// The file [default: standard output]
    file: Option<PathBuf>,
}

#[derive(clap::Args)]
struct RemoveArgs {
    #[command(flatten)]
    at: KeyArgs,
    /// Also while it is being read
    #[arg(long)]
    force: bool,
}

/// Runs `baton mooncake`.
///
/// # Errors
/// With one line for the user: the failure, the peer, and the remedy.
pub fn run(args: MooncakeArgs) -> Result<ExitCode> {
    let runtime = super::runtime(None)?;
    let ended = runtime.block_on(async {
        match args.command {
            Command::Metadata(args) => metadata(args).await,
            Command::Node(args) => node(args).await,
            Command::Put(args) => put(args).await,
            Command::Get(args) => get(args).await,
            Command::Exists(args) => Ok(exists(&args).await),
            Command::Remove(args) => {
                let objects = objects(&args.at).await?;
                objects.remove(&args.at.key, args.force).await?;
                Ok(ExitCode::SUCCESS)
            }
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(2));
    ended
}

async fn metadata(args: MetadataArgs) -> Result<ExitCode> {
    crate::log::start(&args.log)?;
    let stop = crate::shutdown::on_signal()?;
    let listener = tokio::net::TcpListener::bind(&args.listen)
        .await
        .map_err(|e| anyhow!("mooncake metadata: listen on {}: {e}; name another --listen", args.listen))?;
    let address = listener.local_addr().context("mooncake metadata")?;
    announce!("baton: metadata for Mooncake's engines on http://{address}/metadata; Ctrl-C stops");
    let directory = Arc::new(Directory::new(DirectorySettings::default()));
    baton_mooncake::serve_directory(directory, listener, stop).await;
    Ok(ExitCode::SUCCESS)
}

async fn node(args: NodeArgs) -> Result<ExitCode> {
    crate::log::start(&args.log)?;
    let stop = crate::shutdown::on_signal()?;
    let (host, port) = listen(&args.listen)?;
    let settings = NodeSettings { port, ..NodeSettings::new(&args.master, host, args.segment_bytes) };
    let node = StorageNode::start(settings).await?;
    announce!(
        "baton: segment {} of {} bytes is mounted in the Mooncake {RELEASE} master at {}; Ctrl-C takes it back",
        node.segment().name,
        node.segment().bytes,
        args.master
    );
    node.run(stop).await?;
    Ok(ExitCode::SUCCESS)
}

async fn put(args: PutArgs) -> Result<ExitCode> {
    let bytes = match &args.file {
        Some(file) => std::fs::File::open(file).and_then(whole).with_context(|| named(file))?,
        None => whole(std::io::stdin().lock()).context("standard input")?,
    };
    let placing = PlacementOptions {
        replicas: args.replicas,
        preferred_segment: args.segment.clone().unwrap_or_default(),
    };
    objects(&args.at).await?.put(&args.at.key, &bytes, &placing).await?;
    Ok(ExitCode::SUCCESS)
}

/// All bytes, and one more than an object may have where there are more: the client refuses it.
fn whole(from: impl std::io::Read) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(OBJECT_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

async fn get(args: GetArgs) -> Result<ExitCode> {
    let bytes = objects(&args.at).await?.get(&args.at.key).await?;
    match &args.file {
        Some(file) => std::fs::write(file, bytes).with_context(|| named(file))?,
        None => {
            let mut to = std::io::stdout().lock();
            to.write_all(&bytes).and_then(|()| to.flush()).context("standard output")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn exists(args: &KeyArgs) -> ExitCode {
    let asked = async { anyhow::Ok(objects(args).await?.exists(&args.key).await?) };
    match asked.await {
        Ok(there) => ExitCode::from(u8::from(!there)),
        Err(error) => {
            note!("baton: {error:#}");
            ExitCode::from(2)
        }
    }
}

async fn objects(at: &KeyArgs) -> Result<Objects> {
    let way = at
        .metadata
        .as_ref()
        .map_or(Way::Handshake, |url| Way::Metadata { url: url.clone(), cluster: String::new() });
    Ok(Objects::connect(ObjectsSettings { way, ..ObjectsSettings::new(&at.master) }).await?)
}

/// HOST or HOST:PORT.
fn listen(said: &str) -> Result<(&str, u16)> {
    let Some((host, port)) = said.rsplit_once(':') else { return Ok((said, 0)) };
    let port = port.parse().map_err(|_| anyhow!("mooncake node: --listen {said}: say HOST or HOST:PORT"))?;
    Ok((host, port))
}

fn named(file: &Path) -> String {
    file.display().to_string()
}
