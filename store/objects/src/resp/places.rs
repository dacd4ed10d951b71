//! Which connections stay when there are more than places.
//!
//! No client can lock others out by holding places. Connections without a login have at most a quarter of them, and a
//! few seconds. A connection that has never sent a command gives way to a newcomer, and so does one that has been
//! silent for long. Among peers whose connections are all active, the one with the most places gives one to a peer
//! that has fewer.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::task::{AbortHandle, Id};

/// A connection that has not said a word is left in peace for so long, µs: a client that means it says one at once.
const MUTE_US: u64 = 1_000_000;
/// And one that is silent between commands, when all places are taken.
const SILENT_US: u64 = 10_000_000;
/// Of so many places strangers may have one.
const STRANGERS_PART: usize = 4;

/// The server's view of a connection while it lives.
#[derive(Debug, Default)]
pub(super) struct ConnectionState {
    /// When it came, or began its last command; µs since the server's start.
    pub(super) active_us: AtomicU64,
    /// It has had a command served.
    pub(super) spoke: AtomicBool,
    /// It has logged in, or the server has no logins.
    pub(super) known: AtomicBool,
}

impl ConnectionState {
    fn silent_us(&self, now_us: u64) -> u64 {
        now_us.saturating_sub(self.active_us.load(Ordering::Relaxed))
    }

    fn is_known(&self) -> bool {
        self.known.load(Ordering::Relaxed)
    }

    /// How long it has not said a word at all.
    fn mute_us(&self, now_us: u64) -> u64 {
        if self.spoke.load(Ordering::Relaxed) { 0 } else { self.silent_us(now_us) }
    }
}

/// A place that is taken.
#[derive(Debug)]
struct Place {
    id: Id,
    peer: IpAddr,
    connection_state: Arc<ConnectionState>,
    abort: AbortHandle,
}

/// All places that are taken.
#[derive(Debug)]
pub(super) struct ConnectionTable {
    taken: Vec<Place>,
    most: usize,
    /// Whether one has to log in.
    guarded: bool,
}

impl ConnectionTable {
    pub(super) fn new(most: usize, guarded: bool) -> Self {
        Self { taken: Vec::new(), most, guarded }
    }

    /// Whether there is a place for a newcomer. Else the error names the place that must give way, if there is one.
    pub(super) fn find(&self, peer: IpAddr, now_us: u64) -> Result<(), Option<usize>> {
        let strangers = || self.taken.iter().filter(|place| !place.connection_state.is_known());
        let crowd = self.guarded && strangers().count() >= (self.most / STRANGERS_PART).max(1);
        if self.taken.len() < self.most && !crowd {
            return Ok(());
        }
        Err(self.victim(now_us).or_else(|| if self.guarded { None } else { self.fairer(peer, now_us) }))
    }

    /// Connections that give way to any other.
    pub(super) fn victim(&self, now_us: u64) -> Option<usize> {
        let longest = |time: &dyn Fn(&ConnectionState) -> u64, least: u64| {
            let times = self.taken.iter().enumerate().map(|(at, place)| (time(&place.connection_state), at));
            times.filter(|(time, _)| *time >= least).max().map(|(_, at)| at)
        };
        if self.guarded {
            return longest(
                &|connection_state| {
                    if connection_state.is_known() { 0 } else { connection_state.silent_us(now_us) }
                },
                MUTE_US,
            );
        }
        longest(&|connection_state| connection_state.mute_us(now_us), MUTE_US)
            .or_else(|| longest(&|connection_state| connection_state.silent_us(now_us), SILENT_US))
    }

    /// Of the peer with the most places, if it has two more than this one: what has been silent longest.
    fn fairer(&self, peer: IpAddr, now_us: u64) -> Option<usize> {
        let count = |peer: IpAddr| self.taken.iter().filter(|place| place.peer == peer).count();
        let most = self.taken.iter().map(|place| (count(place.peer), place.peer)).max()?;
        if most.0 < count(peer) + 2 {
            return None;
        }
        let of_most = self.taken.iter().enumerate().filter(|(_, place)| place.peer == most.1);
        of_most.max_by_key(|(_, place)| place.connection_state.silent_us(now_us)).map(|(at, _)| at)
    }

    pub(super) fn take(&mut self, peer: IpAddr, connection_state: Arc<ConnectionState>, abort: AbortHandle) {
        self.taken.push(Place { id: abort.id(), peer, connection_state, abort });
    }

    /// Ends the connection at this place.
    pub(super) fn clear(&mut self, at: usize) {
        self.taken.swap_remove(at).abort.abort();
    }

    /// A connection has ended.
    pub(super) fn leave(&mut self, id: Id) {
        if let Some(at) = self.taken.iter().position(|place| place.id == id) {
            self.taken.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000;

    fn peer(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// A connection that came, or last spoke, at `active_us`.
    fn come(places: &mut ConnectionTable, last: u8, active_us: u64, spoke: bool, known: bool) {
        let connection_state =
            ConnectionState { active_us: active_us.into(), spoke: spoke.into(), known: known.into() };
        let task = tokio::spawn(std::future::pending::<()>());
        places.take(peer(last), Arc::new(connection_state), task.abort_handle());
    }

    #[tokio::test]
    async fn who_says_nothing_gives_way_and_who_speaks_stays() {
        let mut places = ConnectionTable::new(3, false);
        come(&mut places, 1, 0, true, true);
        come(&mut places, 1, 0, false, true);
        assert_eq!(places.find(peer(1), S / 2), Ok(()));
        come(&mut places, 1, S / 4, false, true);
        assert_eq!(places.find(peer(1), S / 2), Err(None), "all of one peer, and none silent for long");
        assert_eq!(places.find(peer(1), 2 * S), Err(Some(1)), "the one that was mute longest");
        places.taken[1].connection_state.spoke.store(true, Ordering::Relaxed);
        places.taken[2].connection_state.spoke.store(true, Ordering::Relaxed);
        assert_eq!(places.find(peer(1), 9 * S), Err(None));
        places.taken[0].connection_state.active_us.store(9 * S, Ordering::Relaxed);
        assert_eq!(places.find(peer(1), 10 * S), Err(Some(1)), "silent for ten seconds");
        places.clear(1);
        assert_eq!(places.find(peer(1), 10 * S), Ok(()));
    }

    #[tokio::test]
    async fn a_peer_with_many_places_gives_one_to_a_peer_with_few() {
        let mut places = ConnectionTable::new(4, false);
        (0..3).for_each(|n| come(&mut places, 1, 5 * S - n, true, true));
        come(&mut places, 2, 4 * S, true, true);
        assert_eq!(places.find(peer(2), 5 * S), Err(Some(2)), "three against one");
        assert_eq!(places.find(peer(3), 5 * S), Err(Some(2)));
        assert_eq!(places.find(peer(1), 5 * S), Err(None));
        places.clear(2);
        come(&mut places, 2, 5 * S, true, true);
        assert_eq!(places.find(peer(2), 5 * S), Err(None), "two and two");
    }

    #[tokio::test]
    async fn strangers_have_a_quarter_and_never_the_place_of_who_has_logged_in() {
        let mut places = ConnectionTable::new(8, true);
        come(&mut places, 1, 0, true, false);
        assert_eq!(places.find(peer(2), 0), Ok(()));
        come(&mut places, 2, S / 2, false, false);
        assert_eq!(places.find(peer(3), S / 2), Err(None), "two of eight, and both have just come");
        assert_eq!(places.find(peer(3), S), Err(Some(0)), "talking is not logging in");
        places.taken[0].connection_state.known.store(true, Ordering::Relaxed);
        places.taken[1].connection_state.known.store(true, Ordering::Relaxed);
        assert_eq!(places.find(peer(3), S), Ok(()));
        (0..6).for_each(|_| come(&mut places, 1, 0, true, true));
        assert_eq!(places.find(peer(3), 3_600 * S), Err(None), "who has logged in stays");
        let id = places.taken[3].id;
        places.leave(id);
        assert_eq!(places.find(peer(3), S), Ok(()));
    }
}
