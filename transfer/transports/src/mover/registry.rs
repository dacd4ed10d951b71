//! Registry of the memories that a transport knows.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::memory::Memory;
use super::port::Fault;

/// The result of adding a memory.
pub(super) struct AddOutcome {
    /// The memory's number.
    pub(super) number: u32,
    /// It was not known before.
    pub(super) new: bool,
    /// Numbers of memories that this process has dropped.
    pub(super) gone: Vec<u32>,
}

/// A number for each memory, never used twice. Does not keep memories alive.
#[derive(Default)]
pub(super) struct Registry {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u32,
    /// By address, which no other memory has as long as this one is known.
    known: BTreeMap<usize, (u32, Weak<Memory>)>,
}

impl Registry {
    /// Adds a memory; a second call changes nothing.
    pub(super) fn add(&self, memory: &Arc<Memory>) -> AddOutcome {
        let mut state = self.state();
        let gone = state.known.extract_if(.., |_, (_, known)| known.strong_count() == 0);
        let gone = gone.map(|(_, (number, _))| number).collect();
        if let Some(number) = state.find(memory) {
            return AddOutcome { number, new: false, gone };
        }
        state.next += 1;
        let number = state.next;
        state.known.insert(Arc::as_ptr(memory) as usize, (number, Arc::downgrade(memory)));
        AddOutcome { number, new: true, gone }
    }

    /// The number of a memory that is known and holds the range.
    ///
    /// # Errors
    /// [`Fault::Invalid`] when it is not or does not.
    pub(super) fn check(&self, memory: &Arc<Memory>, at: u64, bytes: u64) -> Result<u32, Fault> {
        let Some(number) = self.state().find(memory) else {
            return Err(Fault::Invalid(
                "this memory is not registered with this transport; do that first".into(),
            ));
        };
        if !memory.holds(at, bytes) {
            return Err(Fault::Invalid(format!("{bytes} bytes at {at} of a memory of {}", memory.bytes())));
        }
        Ok(number)
    }

    /// Those alive, with their numbers, which rise.
    pub(super) fn all(&self) -> Vec<(u32, Arc<Memory>)> {
        let alive = |(number, known): &(u32, Weak<Memory>)| Some((*number, known.upgrade()?));
        let mut all: Vec<_> = self.state().known.values().filter_map(alive).collect();
        all.sort_unstable_by_key(|(number, _)| *number);
        all
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn find(&self, memory: &Arc<Memory>) -> Option<u32> {
        self.known.get(&(Arc::as_ptr(memory) as usize)).map(|(number, _)| *number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mover::Location;

    #[test]
    fn numbers_are_kept_and_never_used_twice() {
        let registry = Registry::default();
        let memory = || Memory::private(4_096, Location::Anywhere).unwrap();
        let (first, second) = (memory(), memory());
        assert!(registry.check(&first, 0, 1).is_err());
        let number = registry.add(&first).number;
        assert!(!registry.add(&first).new);
        assert_eq!(registry.check(&first, 0, 4_096), Ok(number));
        assert!(registry.check(&first, 1, 4_096).is_err());
        drop(first);
        let added = registry.add(&second);
        assert!(added.new && added.number != number);
        assert_eq!(added.gone, [number]);
        assert_eq!(registry.all().len(), 1);
    }
}
