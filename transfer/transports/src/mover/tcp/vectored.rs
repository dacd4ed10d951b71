//! System calls that move bytes between a socket and registered memory, several pieces at a time.
#![allow(unsafe_code, reason = "hands ranges of registered memory to the kernel; each block is argued")]

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsFd;

use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags};

use crate::mover::Memory;

/// Pieces to be sent by one call, in order.
#[derive(Default)]
pub(super) struct GatheredPieces<'a> {
    pieces: Vec<IoSlice<'a>>,
}

impl<'a> GatheredPieces<'a> {
    /// Adds plain bytes.
    pub(super) fn plain(&mut self, bytes: &'a [u8]) {
        self.pieces.push(IoSlice::new(bytes));
    }

    /// Adds a range of memory. The caller owns the range, or holds a permit for it, until the bytes are sent.
    pub(super) fn memory(&mut self, memory: &'a Memory, at: u64, bytes: usize) {
        let from = memory.address(at, bytes as u64);
        // SAFETY: inside the mapping (`address` checks), which lives as long as `memory` is borrowed. Only the kernel
        // and the checksum read through this slice. If another thread breaks the ownership and writes meanwhile, the
        // bytes sent are torn, and the checksum finds that where a slice asks for one.
        self.pieces.push(IoSlice::new(unsafe { std::slice::from_raw_parts(from, bytes) }));
    }

    pub(super) fn pieces(&self) -> &[IoSlice<'a>] {
        &self.pieces
    }
}

/// Sends what the socket takes now and says how much that was.
pub(super) fn send(socket: impl AsFd, gathered: &GatheredPieces<'_>) -> io::Result<usize> {
    let mut nothing = SendAncillaryBuffer::default();
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(socket, gathered.pieces(), &mut nothing, flags)?)
}

/// A range of memory that bytes go to.
pub(super) struct Target<'a> {
    pub(super) memory: &'a Memory,
    pub(super) at: u64,
    pub(super) bytes: usize,
}

/// Receives what is there, first into the target, then into `stage`; says how much. 0 is the end.
pub(super) fn receive(socket: impl AsFd, target: Option<&Target<'_>>, stage: &mut [u8]) -> io::Result<usize> {
    let mut nothing = RecvAncillaryBuffer::default();
    let flags = RecvFlags::DONTWAIT;
    let Some(target) = target else {
        let mut pieces = [IoSliceMut::new(stage)];
        return Ok(rustix::net::recvmsg(socket, &mut pieces, &mut nothing, flags)?.bytes);
    };
    let into = target.memory.address(target.at, target.bytes as u64);
    // SAFETY: inside the mapping (`address` checks), which `target` keeps alive. Only the kernel writes through this
    // slice, and only during the call. The caller owns the range or holds a permit for it.
    let direct = unsafe { std::slice::from_raw_parts_mut(into, target.bytes) };
    let mut pieces = [IoSliceMut::new(direct), IoSliceMut::new(stage)];
    Ok(rustix::net::recvmsg(socket, &mut pieces, &mut nothing, flags)?.bytes)
}
