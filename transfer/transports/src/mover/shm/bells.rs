//! Bells that an opener of a path sends: eventfds by which it is woken.
//!
//! The I/O thread that rings them serves all paths, so a file on which a write waits would stop them all. Only an
//! eventfd is taken, and a write to it never waits. (The opener shares the file's flags and could take that back; it is
//! a process of the same user, which can stop this one in simpler ways.)

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::OFlags;

/// Takes a bell that came with a greeting.
///
/// # Errors
/// When the file is no eventfd.
pub(super) fn adopt(file: OwnedFd) -> io::Result<OwnedFd> {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let kind = rustix::fs::readlink(link, Vec::new())?;
    if kind.as_bytes() != b"anon_inode:[eventfd]" {
        let text = format!("the greeting's bell is {}, not an eventfd", kind.to_string_lossy());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let flags = rustix::fs::fcntl_getfl(file.as_fd())?;
    rustix::fs::fcntl_setfl(file.as_fd(), flags | OFlags::NONBLOCK)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::mover::reactor::ring;

    #[test]
    fn a_full_bell_that_would_block_does_not() {
        let file = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&file, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let bell = adopt(file).unwrap();
        let (done, is_done) = mpsc::channel();
        std::thread::spawn(move || {
            ring(&bell);
            done.send(()).unwrap();
        });
        is_done.recv_timeout(Duration::from_secs(20)).expect("the write does not wait");
    }

    #[test]
    fn other_files_are_refused_by_name() {
        let (read, write) = std::io::pipe().unwrap();
        let null = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
        for (file, named) in
            [(read.into(), "pipe:"), (write.into(), "pipe:"), (OwnedFd::from(null), "/dev/null")]
        {
            let text = adopt(file).unwrap_err().to_string();
            assert!(text.contains(named) && text.contains("not an eventfd"), "{text}");
        }
    }
}
