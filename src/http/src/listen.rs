//! Accepts connections: the one way of every port over TCP and tokio.

use std::fs::File;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long to wait when the kernel has no connection to give, such as for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections that are closed at a time when none can be accepted: as many as wait at most.
const WAITING_MAX: usize = 1_024;
/// Failures to accept are logged at most this often.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Accepts the connections of a port that have a place. It closes the others at once, and recovers when the system has
/// no connection to give.
#[derive(Debug)]
pub struct Acceptor {
    port: &'static str,
    listener: TcpListener,
    logged: Option<Instant>,
    unlogged: u64,
    /// A descriptor that is given up for a moment when there are no others, so that clients that wait are closed and not
    /// left to wait.
    spare: Option<File>,
}

/// Connections that were not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptFailure {
    /// Whether the system had no connection to give. Otherwise one had no place.
    pub of_system: bool,
    /// Connections that were closed.
    pub closed: usize,
}

impl Acceptor {
    /// Accepts at `listener`, under the name `port` in logs.
    #[must_use]
    pub fn new(port: &'static str, listener: TcpListener) -> Self {
        Self { port, listener, logged: None, unlogged: 0, spare: spare() }
    }

    /// The next connection, with the place that `take` has for its peer. Nothing is lost when the caller stops waiting.
    ///
    /// # Errors
    /// There was no place, or the system failed. The next call may succeed; after a failure of the system it has waited.
    pub async fn accept<P>(
        &mut self,
        take: impl FnOnce(IpAddr) -> Option<P>,
    ) -> Result<(TcpStream, SocketAddr, P), AcceptFailure> {
        let (stream, peer) = match self.listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => return Err(AcceptFailure { of_system: true, closed: self.recover(&error).await }),
        };
        let place = take(peer.ip()).ok_or(AcceptFailure { of_system: false, closed: 1 })?;
        // Messages are small, and the other side waits for each.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!("{}: nodelay: {error}", self.port);
        }
        Ok((stream, peer, place))
    }

    /// Pauses, for an error that stays would be met again at once. Where it is want of descriptors, the connections that
    /// wait are closed before: so many.
    async fn recover(&mut self, error: &io::Error) -> usize {
        self.unlogged += 1;
        if self.logged.is_none_or(|logged| logged.elapsed() >= LOG_EVERY) {
            let times = std::mem::take(&mut self.unlogged);
            self.logged = Some(Instant::now());
            tracing::warn!(
                times,
                "{}: connections cannot be accepted: {error}; raise the limit of open files if it says too many",
                self.port
            );
        }
        let mut closed = 0;
        if lacks_descriptors(error) {
            drop(self.spare.take());
            closed = self.close_waiting().await;
            self.spare = spare();
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
        closed
    }

    /// Accepts and closes the connections that wait now.
    async fn close_waiting(&self) -> usize {
        let mut closed = 0;
        let next = || poll_fn(|cx| Poll::Ready(matches!(self.listener.poll_accept(cx), Poll::Ready(Ok(_)))));
        while closed < WAITING_MAX && next().await {
            closed += 1;
        }
        closed
    }
}

fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

fn lacks_descriptors(error: &io::Error) -> bool {
    let codes = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE];
    codes.iter().any(|code| error.raw_os_error() == Some(code.raw_os_error()))
}

/// Spawns `serve` for each connection of `listener`, at most `most` at once, until `stop`. Further connections wait in
/// the kernel's queue: for protocols whose clients open many connections and count a closed one as a failure. Those that
/// are open when it returns go on.
pub async fn accept_each<F, W>(
    port: &'static str,
    listener: TcpListener,
    most: usize,
    stop: &CancellationToken,
    mut serve: F,
) where
    F: FnMut(TcpStream, SocketAddr) -> W,
    W: Future<Output = ()> + Send + 'static,
{
    let mut acceptor = Acceptor::new(port, listener);
    let places = Arc::new(Semaphore::new(most.clamp(1, Semaphore::MAX_PERMITS)));
    let next = async |acceptor: &mut Acceptor| {
        let place = Arc::clone(&places).acquire_owned().await.expect("it is never closed");
        acceptor.accept(|_| Some(place)).await
    };
    while let Some(accepted) = stop.run_until_cancelled(next(&mut acceptor)).await {
        // A failure is logged there.
        let Ok((stream, peer, place)) = accepted else { continue };
        let work = serve(stream, peer);
        tokio::spawn(async move {
            work.await;
            drop(place);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_cannot_be_accepted_is_closed_and_not_left_to_wait() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut acceptor = Acceptor::new("a port", listener);
        let other = io::Error::from_raw_os_error(rustix::io::Errno::CONNABORTED.raw_os_error());
        assert_eq!(acceptor.recover(&other).await, 0);
        let mut waiting = Vec::new();
        for _ in 0..3 {
            waiting.push(TcpStream::connect(address).await.unwrap());
        }
        let none = io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
        assert_eq!(acceptor.recover(&other).await, 0, "another error closes nobody");
        assert_eq!(acceptor.recover(&none).await, 3);
        for mut stream in waiting {
            let read = tokio::io::AsyncReadExt::read(&mut stream, &mut [0]).await;
            assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
        }
        assert!(acceptor.spare.is_some(), "there is one for the next time");
        assert_eq!(acceptor.recover(&none).await, 0, "nobody waits");
    }

    #[tokio::test]
    async fn a_connection_without_a_place_is_closed_and_the_next_one_is_accepted() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut acceptor = Acceptor::new("a port", listener);
        let mut first = TcpStream::connect(address).await.unwrap();
        let refused = acceptor.accept(|_| None::<()>).await.unwrap_err();
        assert_eq!(refused, AcceptFailure { of_system: false, closed: 1 });
        let read = tokio::io::AsyncReadExt::read(&mut first, &mut [0]).await;
        assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
        let _second = TcpStream::connect(address).await.unwrap();
        let (stream, _, place) = acceptor.accept(Some).await.unwrap();
        assert!(stream.nodelay().unwrap() && place.is_loopback());
    }
}
