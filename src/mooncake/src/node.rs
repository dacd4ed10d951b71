//! A storage node of a real master: lends it memory, serves that memory to its clients, and takes it back at the end.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::data::{DataSettings, serve_data};
use crate::error::{Kind, MooncakeError, Result};
use crate::handshake::serve_handshakes;
use crate::master::{Master, MountedSegment, Standing, Uuid};
use crate::region::Region;
use crate::rpc::CallTimes;
use crate::segment::{Buffer, SegmentMeta};

/// How a node behaves.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// Address of the master, HOST:PORT.
    pub master: String,
    /// The host at which clients reach this node; it listens there.
    pub host: String,
    /// The port of handshakes; 0 takes any. Host and port are the segment's name.
    pub port: u16,
    /// Bytes that are lent.
    pub segment_bytes: u64,
    /// Time between two signs of life; a master forgets who is silent for 10 s.
    pub ping_every_us: u64,
    /// Times of calls of the master.
    pub calls: CallTimes,
    /// Bounds of the data listener.
    pub data: DataSettings,
}

impl NodeSettings {
    /// Those of a node at `host` that lends `segment_bytes` to `master`.
    #[must_use]
    pub fn new(master: &str, host: &str, segment_bytes: u64) -> Self {
        Self {
            master: master.to_owned(),
            host: host.to_owned(),
            port: 0,
            segment_bytes,
            ping_every_us: 2_000_000,
            calls: CallTimes { connect_us: 2_000_000, call_us: 3_000_000 },
            data: DataSettings::default(),
        }
    }
}

/// A node whose segment is mounted.
pub struct StorageNode {
    settings: NodeSettings,
    master: Master,
    segment: MountedSegment,
    serving: JoinSet<()>,
    ending: CancellationToken,
}

impl StorageNode {
    /// Listens, makes sure that the master is of the pinned release, and mounts the segment.
    ///
    /// # Errors
    /// When it cannot listen, or the master does not answer, is of another release, or refuses the segment.
    pub async fn start(settings: NodeSettings) -> Result<Self> {
        let region = Arc::new(Region::new(settings.segment_bytes)?);
        let master = Master::new(&settings.master, settings.calls);
        master.ready().await?;
        master.storage_config().await?;
        let (handshakes, port) = bind(&settings.host, settings.port).await?;
        let (data, data_port) = bind(&settings.host, 0).await?;
        let name = format!("{}:{port}", settings.host);
        let ending = CancellationToken::new();
        let mut serving = JoinSet::new();
        let meta = meta(&name, &settings.host, data_port, &region);
        serving.spawn(serve_handshakes(meta, handshakes, ending.clone()));
        serving.spawn(serve_data(Arc::clone(&region), data, settings.data, ending.clone()));
        let segment = MountedSegment {
            id: Uuid::new(),
            name: name.clone(),
            base: region.base(),
            bytes: region.bytes(),
            endpoint: name,
        };
        // Served before it is lent: the first client may come at once.
        master.mount(&segment).await?;
        Ok(Self { settings, master, segment, serving, ending })
    }

    /// The segment as the master knows it.
    #[must_use]
    pub const fn segment(&self) -> &MountedSegment {
        &self.segment
    }

    /// Pings the master at intervals until `stop`, and mounts the segment again where the master forgot it. In the end
    /// it unmounts the segment.
    ///
    /// # Errors
    /// When the master is replaced by one of another release.
    pub async fn run(mut self, stop: CancellationToken) -> Result<()> {
        let mut ticks = tokio::time::interval(Duration::from_micros(self.settings.ping_every_us.max(1)));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut reached = true;
        let outcome = loop {
            tokio::select! {
                () = stop.cancelled() => break Ok(()),
                _ = ticks.tick() => {}
            }
            let told = self.sign_of_life().await;
            match &told {
                Ok(()) if reached => {}
                Ok(()) => tracing::info!("mooncake: the master at {} answers again", self.master.address()),
                Err(e) if e.kind == Kind::Release => break Err(e.clone()),
                Err(e) if reached => tracing::warn!("{e}; the node goes on trying"),
                Err(e) => tracing::debug!("{e}"),
            }
            reached = told.is_ok();
        };
        self.end().await;
        outcome
    }

    async fn sign_of_life(&self) -> Result<()> {
        match self.master.ping().await? {
            Standing::Known => Ok(()),
            Standing::Forgotten => {
                // The master may be a new one.
                self.master.ready().await?;
                self.master.mount_again(&self.segment).await?;
                tracing::info!(
                    "mooncake: segment {} is mounted again, as the master asks",
                    self.segment.name
                );
                Ok(())
            }
            Standing::Other(status) => {
                let message = format!("the master thinks {status} of this node, which has no meaning");
                Err(MooncakeError::new(Kind::Corrupt, "Ping", self.master.address(), message))
            }
        }
    }

    async fn end(&mut self) {
        if let Err(e) = self.master.unmount(self.segment.id).await {
            tracing::warn!("{e}; the master forgets the segment by itself");
        }
        self.ending.cancel();
        while self.serving.join_next().await.is_some() {}
    }
}

/// Binds a data port of any number next to the host's name.
async fn bind(host: &str, port: u16) -> Result<(TcpListener, u16)> {
    let wrong = |e: std::io::Error| {
        let message = format!("listen on {host}:{port}: {e}; name a host of this machine with --listen");
        MooncakeError::invalid("node", message)
    };
    let listener = TcpListener::bind((host, port)).await.map_err(wrong)?;
    let port = listener.local_addr().map_err(wrong)?.port();
    Ok((listener, port))
}

fn meta(name: &str, host: &str, data_port: u16, region: &Region) -> SegmentMeta {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    SegmentMeta {
        name: name.to_owned(),
        data_host: Some(host.to_owned()),
        data_port,
        timestamp: now.as_secs().to_string(),
        buffers: vec![Buffer { name: "cpu:0".to_owned(), address: region.base(), bytes: region.bytes() }],
    }
}
