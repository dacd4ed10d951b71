//! The local socket of a path: greetings, and the files of segments. Each message is one packet. When either end
//! closes it, or dies, the other sees the end. A process whose sockets are closed has stopped running.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::mover::Memory;
use crate::mover::greeting::{GREETING_BYTES, field};

/// Files in one packet, at most.
const FILES_MAX: usize = 4;
const SEGMENT_BYTES: usize = 16;

/// A packet after the greetings.
#[derive(Debug)]
pub(super) enum Packet {
    /// A memory of the sender, which the file maps.
    Segment { number: u32, bytes: u64, file: OwnedFd },
    /// The sender has dropped a memory.
    Forget { number: u32 },
}

/// News of a memory for the other end.
#[derive(Debug)]
pub(super) enum MemoryNotice {
    Shared(u32, Arc<Memory>),
    Forgotten(u32),
}

/// News that wait for room, at most; a peer that reads none of them is given up.
const NOTICES_MAX: usize = 1 << 14;

/// The local socket of one path.
#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
    /// News that the socket had no room for, in order.
    waiting: Mutex<VecDeque<MemoryNotice>>,
}

/// The name that an address has among the local sockets of those who give the machine that name. It lives in no
/// folder, so that nothing is left of it.
pub(super) fn name_of(machine: &str, address: &str) -> io::Result<SocketAddrUnix> {
    let sum = crate::checksum(format!("{machine}\0{address}").as_bytes());
    let shown: String = address.chars().filter(char::is_ascii_graphic).take(64).collect();
    Ok(SocketAddrUnix::new_abstract_name(format!("baton-mover/{shown}/{sum:016x}").as_bytes())?)
}

fn socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | flags;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Whether the process at the other end runs as our user.
fn is_ours(socket: &OwnedFd) -> io::Result<bool> {
    Ok(sockopt::socket_peercred(socket)?.uid == rustix::process::geteuid())
}

/// Listens under the name of an address.
pub(super) fn listen(machine: &str, address: &str) -> io::Result<OwnedFd> {
    let socket = socket(SocketFlags::NONBLOCK)?;
    rustix::net::bind(&socket, &name_of(machine, address)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

impl Channel {
    /// Connects to the listener at `address`, within `limit`.
    pub(super) fn connect(machine: &str, address: &str, limit: Duration) -> io::Result<Self> {
        let socket = socket(SocketFlags::empty())?;
        sockopt::set_socket_timeout(&socket, Timeout::Send, Some(limit))?;
        sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(limit))?;
        rustix::net::connect(&socket, &name_of(machine, address)?)?;
        // Any process may take a name. The listener gets our memory, so it must run as our own user.
        if !is_ours(&socket)? {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "another user listens under that name",
            ));
        }
        Ok(Self { socket, waiting: Mutex::default() })
    }

    /// Takes the next connection, when one waits. One of another user is refused.
    pub(super) fn accept(listener: &OwnedFd) -> io::Result<Option<Self>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::accept_with(listener, flags)?;
        Ok(is_ours(&socket)?.then(|| Self { socket, waiting: Mutex::default() }))
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends one packet.
    pub(super) fn send(&self, bytes: &[u8], files: &[BorrowedFd<'_>], wait: bool) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(io::Error::other("too many files for one packet"));
        }
        let flags = SendFlags::NOSIGNAL | if wait { SendFlags::empty() } else { SendFlags::DONTWAIT };
        rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags)?;
        Ok(())
    }

    /// Receives one packet: its size, 0 at the end, and its files.
    pub(super) fn receive(&self, bytes: &mut [u8], wait: bool) -> io::Result<(usize, Vec<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        let came = rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
        let mut files = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                files.extend(more);
            }
        }
        Ok((came.bytes, files))
    }

    /// Receives a greeting and the files with it. `None` when it has not come yet.
    pub(super) fn receive_greeting(
        &self,
        wait: bool,
    ) -> io::Result<Option<([u8; GREETING_BYTES], Vec<OwnedFd>)>> {
        let mut record = [0; GREETING_BYTES];
        match self.receive(&mut record, wait) {
            Ok((GREETING_BYTES, files)) => Ok(Some((record, files))),
            Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
            // Too short to be one: the zeros at its end make it a foreign one.
            Ok((_, files)) => Ok(Some((record, files))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !wait => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends news to the other end. News that the socket has no room for wait for a later [`Channel::flush`].
    pub(super) fn announce(&self, notice: MemoryNotice) -> io::Result<()> {
        let mut waiting = self.waiting();
        if waiting.len() >= NOTICES_MAX {
            return Err(io::Error::other("the peer does not read what it is told"));
        }
        waiting.push_back(notice);
        self.send_waiting(&mut waiting)
    }

    /// Sends waiting news, as far as there is room. The system signals when there is room again.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.send_waiting(&mut self.waiting())
    }

    /// Whether no news of this memory waits.
    pub(super) fn has_announced(&self, number: u32) -> bool {
        !self
            .waiting()
            .iter()
            .any(|notice| matches!(notice, MemoryNotice::Shared(waits, _) if *waits == number))
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<MemoryNotice>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send_waiting(&self, waiting: &mut VecDeque<MemoryNotice>) -> io::Result<()> {
        while let Some(notice) = waiting.front() {
            let mut record = [0; SEGMENT_BYTES];
            let sent = match notice {
                MemoryNotice::Shared(number, memory) => {
                    record[..4].copy_from_slice(&number.to_le_bytes());
                    record[8..].copy_from_slice(&(memory.bytes() as u64).to_le_bytes());
                    let file = memory.file().expect("only such memories are registered");
                    self.send(&record, &[file], false)
                }
                MemoryNotice::Forgotten(number) => {
                    record[..4].copy_from_slice(&number.to_le_bytes());
                    self.send(&record, &[], false)
                }
            };
            match sent {
                Ok(()) => drop(waiting.pop_front()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The next packet, when one is there.
    pub(super) fn next(&self) -> io::Result<Option<Packet>> {
        let mut record = [0; SEGMENT_BYTES];
        match self.receive(&mut record, false) {
            Ok((SEGMENT_BYTES, mut files)) => {
                let number = u32::from_le_bytes(field(&record, 0));
                let bytes = u64::from_le_bytes(field(&record, 8));
                Ok(Some(match files.pop() {
                    Some(file) => Packet::Segment { number, bytes, file },
                    None => Packet::Forget { number },
                }))
            }
            Ok((0, _)) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer has closed or died")),
            Ok(_) => Err(io::Error::other("the peer sends what is no packet of this protocol")),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Shuts down our half of the socket: no further packet comes from here.
    pub(super) fn end(&self) {
        // It fails when the other end has gone, which is as good.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
    }

    /// Gives the channel up for both ends.
    pub(super) fn give_up(&self) {
        // As above.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }
}
