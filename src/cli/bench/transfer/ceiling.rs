//! The machine's limits: one copy between two memories, and a plain socket that only sends blocks and acknowledges
//! them.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use baton_transports::mover::{Location, Memory, Pages};

use super::ends::{LocalEndpoint, Peer};
use super::load::{Clock, Figures, Load, nanos};

/// One acknowledgement.
const ACK_BYTES: usize = 8;

/// Copies blocks between two mappings, in one thread.
pub fn memcpy(near: &LocalEndpoint, load: &Load) -> Figures {
    let bytes = near.memory.bytes();
    let target =
        Memory::shared(bytes, Pages::Ordinary, Location::Anywhere).expect("as much as there is already");
    let block = u64::from(load.block_bytes);
    let slots = bytes as u64 / block;
    for slot in 0..slots {
        Memory::copy(&near.memory, slot * block, &target, slot * block, block);
    }
    let clock = Clock::start(None);
    let until = Instant::now() + load.duration;
    let mut blocks = 0;
    let mut latency_ns = Vec::new();
    let mut began = Instant::now();
    while began < until {
        let slot = blocks % slots;
        Memory::copy(&near.memory, slot * block, &target, slot * block, block);
        blocks += 1;
        let now = Instant::now();
        latency_ns.push(nanos(now - began));
        began = now;
    }
    clock.stop(blocks, block, latency_ns)
}

/// Sends blocks over plain sockets, as many outstanding as the load has.
pub fn socket(peer: &Peer, load: &Load, threads: u32) -> Result<Figures> {
    let clock = Clock::start(Some(peer.pid()));
    let tallies = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(|| send(peer.port, load))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect::<Vec<_>>()
    });
    let (mut blocks, mut latency_ns) = (0, Vec::new());
    for tally in tallies {
        let (more, latencies) = tally.context("bench: plain socket")?;
        blocks += more;
        latency_ns.extend(latencies);
    }
    Ok(clock.stop(blocks, load.block_bytes.into(), latency_ns))
}

fn send(port: u16, load: &Load) -> io::Result<(u64, Vec<u32>)> {
    let mut socket = TcpStream::connect(("127.0.0.1", port))?;
    socket.set_nodelay(true)?;
    socket.write_all(&load.block_bytes.to_le_bytes())?;
    let block = usize::try_from(load.block_bytes).expect("a usize has 32 bits");
    let batch = usize::try_from(load.batch).expect("a usize has 32 bits");
    let source = vec![7_u8; SOURCE_BYTES];
    let slots = SOURCE_BYTES / block;
    let mut posted = std::collections::VecDeque::with_capacity(batch);
    let (mut blocks, mut latency_ns, mut acks) = (0_usize, Vec::new(), vec![0; ACK_BYTES * batch]);
    let until = Instant::now() + load.duration;
    let mut partial = 0;
    loop {
        let goes_on = Instant::now() < until;
        while goes_on && posted.len() < batch {
            let at = blocks % slots * block;
            posted.push_back(Instant::now());
            socket.write_all(&source[at..at + block])?;
            blocks += 1;
        }
        if posted.is_empty() {
            return Ok((blocks as u64, latency_ns));
        }
        partial += socket.read(&mut acks)?;
        for _ in 0..partial / ACK_BYTES {
            let began = posted.pop_front().ok_or(io::ErrorKind::InvalidData)?;
            latency_ns.push(nanos(began.elapsed()));
        }
        partial %= ACK_BYTES;
    }
}

/// As much as a cache does not hold.
const SOURCE_BYTES: usize = 256 << 20;

/// Serves such sockets, on threads of their own, and says on which port.
pub fn serve(memory_bytes: u64) -> io::Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    let bytes = usize::try_from(memory_bytes).map_err(io::Error::other)?;
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            // If one fails, its other end reports it.
            std::thread::spawn(move || receive(socket, bytes));
        }
    });
    Ok(port)
}

fn receive(mut socket: TcpStream, bytes: usize) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let mut size = [0; 4];
    socket.read_exact(&mut size)?;
    let block = usize::try_from(u32::from_le_bytes(size)).expect("a usize has 32 bits");
    let mut target = vec![7_u8; bytes.max(block)];
    let slots = target.len() / block;
    socket.set_read_timeout(Some(Duration::from_secs(60)))?;
    for number in 0.. {
        let at = number % slots * block;
        socket.read_exact(&mut target[at..at + block])?;
        socket.write_all(&[1; ACK_BYTES])?;
    }
    Ok(())
}
