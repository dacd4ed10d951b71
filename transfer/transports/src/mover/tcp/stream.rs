//! A connected socket that never waits, in the clear or under TLS.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use rustls::Connection;

use super::vectored::{self, GatheredPieces, Target};
use super::wire::{CHUNK_BYTES, STRIDE_BYTES};
use crate::mover::Fault;
use crate::mover::sockets::never_waiting;

/// Bytes that TLS may buffer before the socket takes them.
const TLS_BYTES_MAX: usize = 512 << 10;
/// One record of TLS.
const RECORD_BYTES: usize = 16 << 10;

/// A non-blocking socket, with or without TLS.
pub(super) struct Stream {
    socket: TcpStream,
    tls: Option<Box<Connection>>,
}

impl Stream {
    /// Takes a connected socket over, and what speaks TLS on it.
    ///
    /// # Errors
    /// As the system.
    pub(super) fn new(socket: TcpStream, tls: Option<Connection>) -> io::Result<Self> {
        never_waiting(&socket)?;
        let mut tls = tls.map(Box::new);
        if let Some(tls) = &mut tls {
            tls.set_buffer_limit(Some(TLS_BYTES_MAX));
        }
        Ok(Self { socket, tls })
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends what goes now. Under TLS that is what could be put where it waits for the socket; with nothing
    /// gathered it sends what waits.
    pub(super) fn send(&mut self, gathered: &GatheredPieces<'_>) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return vectored::send(&self.socket, gathered) };
        flush(tls, &mut self.socket)?;
        if gathered.pieces().is_empty() {
            return Ok(0);
        }
        let taken = tls.writer().write_vectored(gathered.pieces())?;
        match flush(tls, &mut self.socket) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ if taken == 0 => Err(io::ErrorKind::WouldBlock.into()),
            _ => Ok(taken),
        }
    }

    /// Bytes offered to one [`Stream::send`], at most about. TLS takes all of them at once. With more, its buffer
    /// could be full while the socket is not, and no event would signal that.
    pub(super) fn stride_bytes(&self) -> u32 {
        if self.tls.is_some() { CHUNK_BYTES } else { STRIDE_BYTES }
    }

    /// Whether something waits for the socket to take it.
    pub(super) fn unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Receives what is there, first into the target, then into `stage`.
    pub(super) fn receive(&mut self, target: Option<&Target<'_>>, stage: &mut [u8]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return vectored::receive(&self.socket, target, stage) };
        let mut came = 0;
        if let Some(target) = target {
            let mut record = [0; RECORD_BYTES];
            while came < target.bytes {
                let room = record.len().min(target.bytes - came);
                let some = match decrypted(tls, &mut self.socket, &mut record[..room]) {
                    Err(error) if came > 0 && error.kind() == io::ErrorKind::WouldBlock => return Ok(came),
                    other => other?,
                };
                if some == 0 {
                    return Ok(came);
                }
                target.memory.write(target.at + came as u64, &record[..some]);
                came += some;
            }
        }
        if stage.is_empty() {
            return Ok(came);
        }
        match decrypted(tls, &mut self.socket, stage) {
            Err(error) if came > 0 && error.kind() == io::ErrorKind::WouldBlock => Ok(came),
            other => Ok(came + other?),
        }
    }

    /// Whether a call that brought less than it asked for has emptied the socket.
    pub(super) fn short_is_empty(&self) -> bool {
        self.tls.is_none()
    }
}

/// Hands what TLS holds to the socket.
fn flush(tls: &mut Connection, socket: &mut TcpStream) -> io::Result<()> {
    while tls.wants_write() {
        tls.write_tls(socket)?;
    }
    Ok(())
}

/// Some plain bytes; 0 at the end.
fn decrypted(tls: &mut Connection, socket: &mut TcpStream, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match tls.reader().read(into) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
        let came = tls.read_tls(socket)?;
        let processed = tls.process_new_packets();
        // Sends handshake answers, or the alert with the error. The next sending call flushes the rest.
        match flush(tls, socket) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            _ => {}
        }
        processed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        if came == 0 {
            return Ok(0);
        }
    }
}

/// The fault of the path after a failed call on the connection.
pub(super) fn broken(error: io::Error) -> Fault {
    Fault::Path(format!("the connection broke: {error}"))
}
