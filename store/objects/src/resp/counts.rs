//! Counters of refused and ended connections, by cause.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why a connection was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// It did not read its answers.
    Unread,
    /// It sent half of a command.
    HalfSent,
    /// There was no room for the rest of its command.
    NoRoom,
    /// It did not log in.
    Stranger,
    /// It said nothing at all.
    Mute,
}

/// Counters of refused and ended connections.
#[derive(Debug, Default)]
pub(super) struct Counts {
    cut: [AtomicU64; 5],
    /// Connections for which there was no place.
    pub(super) refused: AtomicU64,
    /// Connections that gave way to a newcomer.
    pub(super) displaced: AtomicU64,
    /// Connections that the system did not hand over.
    pub(super) accept_errors: AtomicU64,
    /// Connections that did not come to speak TLS.
    pub(super) handshakes_failed: AtomicU64,
}

/// Gauges and counters of a [`super::Server`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerStats {
    /// Connections open now.
    pub connections: u64,
    /// Commands served.
    pub commands: u64,
    /// Bytes that connections have for commands that come in and answers that wait, beyond what each may have anyway.
    pub buffered_bytes: u64,
    /// Connections for which there was no place.
    pub refused: u64,
    /// Connections that gave way to a newcomer.
    pub displaced: u64,
    /// Connections ended because they did not log in, or said nothing at all.
    pub cut_silent: u64,
    /// Connections ended in the middle of a command that did not go on, or that there was no room for.
    pub cut_half_sent: u64,
    /// Connections ended because they did not read their answers.
    pub cut_unread: u64,
    /// Connections that the system did not hand over: mostly too many open files.
    pub accept_errors: u64,
    /// Connections that did not come to speak TLS.
    pub handshakes_failed: u64,
}

impl Counts {
    pub(super) fn cut(&self, why: Cut) {
        add(&self.cut[why as usize]);
    }

    /// The counters kept here; the other fields are zero.
    pub(super) fn stats(&self) -> ServerStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let cut = |why: Cut| read(&self.cut[why as usize]);
        ServerStats {
            refused: read(&self.refused),
            displaced: read(&self.displaced),
            cut_silent: cut(Cut::Stranger) + cut(Cut::Mute),
            cut_half_sent: cut(Cut::HalfSent) + cut(Cut::NoRoom),
            cut_unread: cut(Cut::Unread),
            accept_errors: read(&self.accept_errors),
            handshakes_failed: read(&self.handshakes_failed),
            ..ServerStats::default()
        }
    }
}

/// One more.
pub(super) fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
