//! The parts of this node's memory that peers may reach: windows, each revocable.
//!
//! A window opens a range of a segment to peers. Its number is its right: the node draws each at random, so a peer
//! that has one cannot guess another. A write for a closed window, or for one of a former life of this process, finds
//! nothing. [`Exposure::revoke`] returns only when no byte can land through the window, even from a misbehaving peer.
//! The memory may be reused from then on. This is the fence of the receiving side; it needs nobody's cooperation.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::memory::Memory;
use super::port::{Direction, Fault, Transport};
use crate::random::random;

/// A window's number: 64 random bits, so never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WindowId(pub u64);

/// The access that a window grants to peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// Peers may read.
    Read,
    /// Peers may write.
    Write,
    /// Peers may read and write.
    ReadWrite,
}

impl Grant {
    pub(crate) fn allows(self, direction: Direction) -> bool {
        match direction {
            Direction::Read => self != Self::Write,
            Direction::Write => self != Self::Read,
        }
    }
}

struct Window {
    memory: Arc<Memory>,
    at: u64,
    bytes: u64,
    grant: Grant,
    /// Permits in use.
    users: u32,
    closing: bool,
}

/// The windows of a node.
#[derive(Default)]
pub struct Exposure {
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Default)]
struct State {
    windows: HashMap<u64, Window>,
}

/// The right to touch one range for the moment, held by an I/O thread while it copies. Held for one bounded
/// copy at a time, for [`Exposure::revoke`] waits for it.
pub struct Permit {
    exposure: Arc<Exposure>,
    window: WindowId,
    memory: Arc<Memory>,
    at: u64,
}

impl Exposure {
    /// Without windows.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Opens `bytes` of `memory` from `at` on.
    ///
    /// # Errors
    /// [`Fault::Invalid`] when they are not inside the memory.
    pub fn open(&self, memory: Arc<Memory>, at: u64, bytes: u64, grant: Grant) -> Result<WindowId, Fault> {
        if !memory.holds(at, bytes) {
            return Err(Fault::Invalid(format!("{bytes} bytes at {at} of a memory of {}", memory.bytes())));
        }
        let mut state = self.state();
        // By chance none is drawn twice; one that is open must not be.
        let mut drawn = std::iter::repeat_with(random).filter(|id| *id != 0);
        let id = drawn.find(|id| !state.windows.contains_key(id)).expect("it draws for ever");
        state.windows.insert(id, Window { memory, at, bytes, grant, users: 0, closing: false });
        Ok(WindowId(id))
    }

    /// The right to touch `bytes` at `at` of a window (counted from its start).
    ///
    /// # Errors
    /// [`Fault::Stale`] for a window that is closed or was never here, [`Fault::Invalid`] for a range or a
    /// direction that it does not grant.
    pub fn admit(
        self: &Arc<Self>,
        window: WindowId,
        direction: Direction,
        at: u64,
        bytes: u64,
    ) -> Result<Permit, Fault> {
        let mut state = self.state();
        let Some(open) = state.windows.get_mut(&window.0).filter(|open| !open.closing) else {
            return Err(Fault::Stale(format!("window {} is closed", window.0)));
        };
        if !open.grant.allows(direction) {
            return Err(Fault::Invalid(format!("window {} does not grant a {direction:?}", window.0)));
        }
        if at.checked_add(bytes).is_none_or(|end| end > open.bytes) {
            let text = format!("{bytes} bytes at {at} of window {}, which has {}", window.0, open.bytes);
            return Err(Fault::Invalid(text));
        }
        open.users += 1;
        let (memory, at) = (open.memory.clone(), open.at + at);
        Ok(Permit { exposure: self.clone(), window, memory, at })
    }

    /// The access that a window grants; none for one that is closed, being closed, or was never here. Transports
    /// whose devices check the right themselves ask for it when they register the window with the device.
    pub fn grant(&self, window: WindowId) -> Option<Grant> {
        self.state().windows.get(&window.0).filter(|open| !open.closing).map(|open| open.grant)
    }

    /// Closes a window. When it returns, nothing can land through the window: copies under way have ended, and each
    /// of `transports` has cut those that it cannot stop otherwise. Closing twice has no further effect.
    pub fn revoke(&self, window: WindowId, transports: &[Arc<dyn Transport>]) {
        let mut state = self.state();
        match state.windows.get_mut(&window.0) {
            Some(open) => open.closing = true,
            None => return,
        }
        drop(state);
        for transport in transports {
            transport.revoke(window);
        }
        state = self.state();
        while state.windows.get(&window.0).is_some_and(|open| open.users > 0) {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.windows.remove(&window.0);
    }

    /// How many windows are open.
    pub fn windows(&self) -> usize {
        self.state().windows.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit {
    /// The memory that it is for.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Where in the memory the range starts.
    pub fn at(&self) -> u64 {
        self.at
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.exposure.state();
        if let Some(open) = state.windows.get_mut(&self.window.0) {
            open.users -= 1;
            if open.users == 0 && open.closing {
                self.exposure.left.notify_all();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mover::Location;
    use std::time::Duration;

    fn memory() -> Arc<Memory> {
        Memory::private(4_096, Location::Anywhere).unwrap()
    }

    #[test]
    fn a_window_grants_its_range_and_its_direction() {
        let exposure = Exposure::new();
        let window = exposure.open(memory(), 1_000, 96, Grant::Write).unwrap();
        let permit = exposure.admit(window, Direction::Write, 32, 64).unwrap();
        assert_eq!(permit.at(), 1_032);
        assert_eq!(exposure.grant(window), Some(Grant::Write));
        assert_eq!(exposure.grant(WindowId(window.0 ^ 1)), None);
        let refused = |direction, at, bytes| exposure.admit(window, direction, at, bytes).err();
        assert!(matches!(refused(Direction::Read, 0, 1), Some(Fault::Invalid(_))));
        assert!(matches!(refused(Direction::Write, 33, 64), Some(Fault::Invalid(_))));
        assert!(matches!(refused(Direction::Write, u64::MAX, 2), Some(Fault::Invalid(_))));
        assert!(exposure.open(memory(), 4_000, 97, Grant::Read).is_err());
    }

    #[test]
    fn a_window_tells_nothing_of_its_neighbours() {
        let exposure = Exposure::new();
        let open = |_| exposure.open(memory(), 0, 1, Grant::Read).unwrap().0;
        let numbers: Vec<u64> = (0..64).map(open).collect();
        let apart = numbers.windows(2).all(|pair| pair[0].abs_diff(pair[1]) > 1 << 20);
        assert!(apart, "{numbers:x?}");
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        assert_ne!(numbers, sorted, "in no order");
    }

    #[test]
    fn revoking_waits_for_the_copy_under_way_and_lets_no_other_begin() {
        let exposure = Exposure::new();
        let window = exposure.open(memory(), 0, 4_096, Grant::ReadWrite).unwrap();
        let permit = exposure.admit(window, Direction::Write, 0, 1).unwrap();
        let closing = std::thread::spawn({
            let exposure = exposure.clone();
            move || exposure.revoke(window, &[])
        });
        while exposure.admit(window, Direction::Write, 0, 1).is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!closing.is_finished());
        drop(permit);
        closing.join().unwrap();
        assert_eq!(exposure.windows(), 0);
        assert!(matches!(exposure.admit(window, Direction::Write, 0, 1), Err(Fault::Stale(_))));
        exposure.revoke(window, &[]);
    }
}
