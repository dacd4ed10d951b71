//! Which transports a node has: shared memory for peers of its host, RDMA where that is built in and there are
//! devices, TCP.

use std::net::SocketAddr;
use std::sync::Arc;

use super::{DataPlaneConfig, NoNotices, RdmaDevices};
use crate::error::Kind;
use crate::mover::{
    Exposure, Fault, Memory, NoticeReceiver, PeerId, ShmConfig, ShmTransport, TcpConfig, TcpTls,
    TcpTransport, Transport,
};

/// The transports of one node.
pub(super) struct Transports {
    /// The preferred first.
    pub(super) transports: Vec<Arc<dyn Transport>>,
    /// This node's identity to its peers, the same on every transport.
    pub(super) me: PeerId,
    /// Log lines: the transports found, and those not used with the reason.
    pub(super) words: Vec<String>,
}

impl Transports {
    /// Starts what there is.
    pub(super) fn find(
        config: &DataPlaneConfig,
        (machine, epoch): (&str, u64),
        tls: Option<TcpTls>,
        exposure: &Arc<Exposure>,
    ) -> Result<Self, (Kind, String)> {
        let unavailable = |why: String| (Kind::Unavailable, why);
        let inbound: Arc<dyn NoticeReceiver> = Arc::new(NoNotices);
        let node = Node { epoch, tls, exposure, inbound: &inbound };
        let (tcp, rdma) = tcp_and_rdma(config, &node).map_err(unavailable)?;
        let mut found = Self { transports: Vec::new(), me: tcp.peer_id(), words: Vec::new() };
        if config.shared_memory {
            let machine = machine.to_owned();
            let shm = ShmConfig { machine, ..ShmConfig::new(&found.me.address, epoch) };
            let shm = ShmTransport::start(shm, exposure.clone(), inbound.clone());
            found.add(shm.map_err(|error| unavailable(format!("shared memory: {error}")))?);
        }
        match rdma {
            Ok(rdma) => found.add(rdma),
            Err(why) if matches!(config.rdma, RdmaDevices::Named(_)) => {
                return Err((Kind::Invalid, format!("its RDMA devices: {why}")));
            }
            Err(why) => found.words.push(format!("not rdma ({why})")),
        }
        found.add(tcp);
        Ok(found)
    }

    fn add(&mut self, transport: Arc<dyn Transport>) {
        self.words.push(format!("{} ({})", transport.name(), transport.devices().join(", ")));
        self.transports.push(transport);
    }

    /// Keeps the transports that reach these memories: a device may not be allowed to pin so much.
    pub(super) fn keep_reaching(&mut self, memories: &[Arc<Memory>]) {
        let words = &mut self.words;
        self.transports.retain(|transport| {
            let reached = memories.iter().try_for_each(|memory| transport.register(memory));
            if let Err(fault) = &reached {
                words.retain(|word| !word.starts_with(transport.name()));
                words.push(format!("not {} ({})", transport.name(), text_of(fault)));
                transport.shutdown();
            }
            reached.is_ok()
        });
    }
}

fn text_of(fault: &Fault) -> &str {
    match fault {
        Fault::Path(text)
        | Fault::Silent(text)
        | Fault::Stale(text)
        | Fault::Invalid(text)
        | Fault::Corrupt(text) => text,
    }
}

/// The facts about a node that every transport needs.
struct Node<'a> {
    /// Its life.
    epoch: u64,
    /// How it proves itself, and has others prove themselves, over TCP.
    tls: Option<TcpTls>,
    /// Its windows.
    exposure: &'a Arc<Exposure>,
    /// The receiver of notices.
    inbound: &'a Arc<dyn NoticeReceiver>,
}

/// RDMA, or why not.
type Rdma = Result<Arc<dyn Transport>, String>;

fn tcp_at(listen: SocketAddr, node: &Node<'_>) -> Result<Arc<TcpTransport>, String> {
    let config = TcpConfig { io_threads: 1, tls: node.tls.clone(), ..TcpConfig::new(listen, node.epoch) };
    TcpTransport::start(config, node.exposure.clone(), node.inbound.clone())
        .map_err(|error| format!("listening: {error}"))
}

#[cfg(not(any(feature = "rdma", feature = "rdma-dlopen")))]
fn tcp_and_rdma(config: &DataPlaneConfig, node: &Node<'_>) -> Result<(Arc<TcpTransport>, Rdma), String> {
    let why = "it is not built in; build with --features rdma-dlopen";
    Ok((tcp_at(SocketAddr::new(config.listen, 0), node)?, Err(why.to_owned())))
}

#[cfg(any(feature = "rdma", feature = "rdma-dlopen"))]
fn tcp_and_rdma(config: &DataPlaneConfig, node: &Node<'_>) -> Result<(Arc<TcpTransport>, Rdma), String> {
    use crate::mover::rdma::{RdmaConfig, RdmaNode, RdmaTransport};

    /// Pairs of ports tried before RDMA is done without.
    const TRIES: usize = 8;
    let listen = config.listen;
    let without = |why: &str| Ok((tcp_at(SocketAddr::new(listen, 0), node)?, Err(why.to_owned())));
    if node.tls.is_some() {
        return without("the cluster speaks TLS, which RDMA does not");
    }
    let devices = match &config.rdma {
        RdmaDevices::All => Vec::new(),
        RdmaDevices::None => return without("none was to be used"),
        RdmaDevices::Named(names) => names.clone(),
    };
    // Peers look for the handshake one port above TCP's, so it takes its port first.
    let config = RdmaConfig { devices, handshake_port_offset: 1, ..RdmaConfig::default() };
    for _ in 0..TRIES {
        let Ok(above) = std::net::TcpListener::bind((listen, 0)) else { break };
        let port = above.local_addr().map_or(0, |address| address.port().saturating_sub(1));
        let Ok(tcp) = tcp_at(SocketAddr::new(listen, port), node) else { continue };
        let (exposure, inbound) = (node.exposure.clone(), node.inbound.clone());
        let node = RdmaNode { id: tcp.peer_id(), exposure, inbound };
        let started = RdmaTransport::start(config, above, node);
        let rdma = started.map(|rdma| rdma as Arc<dyn Transport>);
        return Ok((tcp, rdma.map_err(|fault| text_of(&fault).to_owned())));
    }
    without("no two ports side by side are free")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mover::{Location, Pages};

    fn names(found: &Transports) -> Vec<&'static str> {
        found.transports.iter().map(|transport| transport.name()).filter(|name| *name != "rdma").collect()
    }

    fn config(rdma: RdmaDevices) -> DataPlaneConfig {
        DataPlaneConfig { arena_bytes: 1 << 20, rdma, ..DataPlaneConfig::new([127, 0, 0, 1].into()) }
    }

    #[test]
    fn what_cannot_reach_the_memory_is_left_out_and_named() {
        let config = config(RdmaDevices::All);
        let mut found = Transports::find(&config, ("here", 1), None, &Exposure::new()).unwrap();
        assert_eq!(names(&found), ["shm", "tcp"]);
        assert!(found.words.iter().any(|word| word.contains("rdma")), "{:?}", found.words);
        let shared = Memory::shared(4_096, Pages::Ordinary, Location::Anywhere).unwrap();
        found.keep_reaching(std::slice::from_ref(&shared));
        assert_eq!(names(&found), ["shm", "tcp"]);
        // Peers cannot map it.
        found.keep_reaching(&[Memory::private(4_096, Location::Anywhere).unwrap()]);
        assert_eq!(names(&found), ["tcp"]);
        assert!(found.words.iter().any(|word| word.starts_with("not shm (")), "{:?}", found.words);
        found.transports.iter().for_each(|transport| transport.shutdown());
    }

    #[test]
    fn devices_that_were_named_must_be_there() {
        let named = RdmaDevices::Named(vec!["no_such_device".to_owned()]);
        let Err((kind, why)) = Transports::find(&config(named), ("here", 1), None, &Exposure::new()) else {
            panic!("taken")
        };
        assert!(kind == Kind::Invalid && why.starts_with("its RDMA devices: "), "{why}");
        let found =
            Transports::find(&config(RdmaDevices::None), ("here", 1), None, &Exposure::new()).unwrap();
        assert!(found.words.iter().any(|word| word.starts_with("not rdma (")), "{:?}", found.words);
        found.transports.iter().for_each(|transport| transport.shutdown());
    }

    #[test]
    fn devices_in_words() {
        let named =
            |names: &[&str]| RdmaDevices::Named(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!("all".parse(), Ok(RdmaDevices::All));
        assert_eq!("none".parse(), Ok(RdmaDevices::None));
        assert_eq!("mlx5_1, mlx5_0".parse(), Ok(named(&["mlx5_1", "mlx5_0"])));
        for wrong in ["", "mlx5_0,", "all,mlx5_0", "mlx5_0,none", "mlx5_0,mlx5_1,mlx5_0"] {
            assert!(wrong.parse::<RdmaDevices>().is_err(), "{wrong}");
        }
    }
}
