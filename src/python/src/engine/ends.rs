//! The parts of an engine: its transports, the mover over them, and the publisher in front.

use std::collections::VecDeque;
use std::fmt::Display;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::sync::{Arc, Mutex, PoisonError};

use baton_transports::mover::published::{Publisher, PublisherConfig};
use baton_transports::mover::{
    Exposure, Mover, MoverSettings, Notice, NoticeReceiver, PeerId, ShmConfig, ShmTransport, TcpConfig,
    TcpTransport, Transport,
};

/// Notices kept for a program that does not take them; the oldest go first.
const NOTICES_MAX: usize = 65_536;

pub(super) struct Ends {
    pub(super) mover: Mover,
    pub(super) publisher: Publisher,
    pub(super) inbox: Arc<Inbox>,
}

/// Notices that came.
#[derive(Default)]
pub(super) struct Inbox(Mutex<VecDeque<Vec<u8>>>);

impl Inbox {
    pub(super) fn take(&self) -> Vec<Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
    }
}

impl NoticeReceiver for Inbox {
    fn notice(&self, _: &PeerId, notice: Notice) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == NOTICES_MAX {
            kept.pop_front();
        }
        kept.push_back(notice.bytes);
    }
}

/// Starts them all at `host`, a name or address of this machine, perhaps with a port.
pub(super) fn start(host: &str) -> Result<Ends, String> {
    let (address, port) = resolve(host)?;
    // A life's number: nobody can foretell it, and no former life had it.
    let epoch = RandomState::new().build_hasher().finish();
    let (exposure, inbox) = (Exposure::new(), Arc::new(Inbox::default()));
    let tcp = listen(host, address, |listen, advertise| {
        let mut config = TcpConfig::new(listen, epoch);
        config.advertise = advertise;
        TcpTransport::start(config, exposure.clone(), inbox.clone())
    });
    let tcp = tcp.map_err(|e| format!("listen at {host}: {e}; give an address of this machine"))?;
    let peer = tcp.peer_id();
    let mut transports: Vec<Arc<dyn Transport>> = Vec::new();
    // Where there is no shared memory, sockets do.
    let shm = ShmTransport::start(ShmConfig::new(&peer.address, epoch), exposure.clone(), inbox.clone());
    if let Ok(shm) = shm {
        transports.push(shm);
    }
    transports.push(tcp);
    let mover = Mover::new(MoverSettings::default(), exposure, transports);
    let mover = mover.map_err(|fault| format!("start the transfer engine: {fault:?}"))?;
    let open = |ip: IpAddr| Publisher::start(PublisherConfig::new(SocketAddr::new(ip, port)), peer.clone());
    let publisher = open(address).or_else(|error| match error.kind() {
        io::ErrorKind::AddrNotAvailable => open(unspecified(address)),
        _ => Err(error),
    });
    let publisher = publisher.map_err(|e| format!("listen at {host}, port {port}: {e}"))?;
    Ok(Ends { mover, publisher, inbox })
}

/// The name or address, without brackets, and the port where there is one.
pub(crate) fn split(host: &str) -> (&str, Option<&str>) {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') || name.ends_with(']') => (name, Some(port)),
        _ => (host, None),
    };
    (name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name), port)
}

/// `host:port`, with an IPv6 address in brackets.
pub(crate) fn join(name: &str, port: impl Display) -> String {
    if name.contains(':') { format!("[{name}]:{port}") } else { format!("{name}:{port}") }
}

/// The address, and the port asked for or 0.
fn resolve(host: &str) -> Result<(IpAddr, u16), String> {
    let (name, port) = split(host);
    let port = port.map_or(Ok(0), str::parse).map_err(|_| format!("{host:?}: the port is no number"))?;
    let found = (name, port).to_socket_addrs().map_err(|e| format!("look up {name:?}: {e}"))?.next();
    found.map(|found| (found.ip(), port)).ok_or_else(|| format!("look up {name:?}: it has no address"))
}

fn unspecified(like: IpAddr) -> IpAddr {
    if like.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0_u16; 8]) }
}

/// Listens at the address. Where the address does not belong to this machine (after a translation on the way, for
/// example), it listens at all addresses. It then advertises the port under the host's name.
fn listen<T>(
    host: &str,
    address: IpAddr,
    start: impl Fn(SocketAddr, Option<String>) -> io::Result<T>,
) -> io::Result<T> {
    match start(SocketAddr::new(address, 0), None) {
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {}
        other => return other,
    }
    let all = unspecified(address);
    let mut last = io::Error::other("no port is free");
    for _ in 0..4 {
        let port = TcpListener::bind(SocketAddr::new(all, 0))?.local_addr()?.port();
        let name = host.split(':').next().filter(|_| address.is_ipv4()).map(|name| format!("{name}:{port}"));
        let advertise = name.unwrap_or_else(|| SocketAddr::new(address, port).to_string());
        match start(SocketAddr::new(all, port), Some(advertise)) {
            Ok(started) => return Ok(started),
            // Somebody else took the port meanwhile.
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_or_addresses_with_or_without_a_port() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(resolve("127.0.0.1"), Ok((ip("127.0.0.1"), 0)));
        assert_eq!(resolve("127.0.0.1:77"), Ok((ip("127.0.0.1"), 77)));
        assert_eq!(resolve("::1"), Ok((ip("::1"), 0)));
        assert_eq!(resolve("[::1]:77"), Ok((ip("::1"), 77)));
        assert_eq!(resolve("[::1]"), Ok((ip("::1"), 0)));
        assert_eq!((join("::1", 7), join("a", 7)), ("[::1]:7".into(), "a:7".into()));
        assert!(resolve("127.0.0.1:many").unwrap_err().contains("no number"));
        assert!(resolve("no-such-host.invalid").is_err());
    }

    #[test]
    fn an_address_that_is_not_here_is_served_at_all_of_them() {
        let told = listen("192.0.2.1", ip(), |listen, advertise| {
            if listen.ip() == ip() {
                Err(io::ErrorKind::AddrNotAvailable.into())
            } else {
                Ok((listen, advertise))
            }
        });
        let (listen, advertise) = told.unwrap();
        assert!(listen.ip().is_unspecified());
        assert_eq!(advertise, Some(format!("192.0.2.1:{}", listen.port())));
    }

    fn ip() -> IpAddr {
        IpAddr::from([192, 0, 2, 1])
    }

    #[test]
    fn notices_are_bounded() {
        let inbox = Inbox::default();
        let from = PeerId { address: "here:1".into(), epoch: 1 };
        for n in 0..NOTICES_MAX + 2 {
            inbox.notice(&from, Notice { bytes: n.to_le_bytes().to_vec() });
        }
        let taken = inbox.take();
        assert_eq!((taken.len(), taken[0].as_slice()), (NOTICES_MAX, 2_usize.to_le_bytes().as_slice()));
        assert!(inbox.take().is_empty());
    }
}
