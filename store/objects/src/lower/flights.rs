//! One read below for all who ask for the same key at the same time.

use std::collections::HashMap;
use std::sync::Arc;

use baton_types::TenantId;
use parking_lot::Mutex;

use super::BroughtValue;
use crate::key::Key;

/// Keys being read, and callers who wait for one.
const FLIGHTS_MAX: usize = 4096;
const WAITERS_MAX: usize = 4096;

/// Called once, with what was found.
pub(crate) type Waiter = Box<dyn FnOnce(Option<Arc<BroughtValue>>) + Send>;

type Place = (TenantId, Box<[u8]>);

/// Reads in progress, each with everyone who waits for it.
#[derive(Default)]
pub(crate) struct Flights {
    waiting: Mutex<HashMap<Place, Vec<Waiter>>>,
}

impl Flights {
    fn place(key: Key<'_>) -> Place {
        (key.tenant, key.bytes.into())
    }

    /// Joins the flight for a key. Gives the waiter back when there is none; a waiter beyond the limit gets a miss.
    pub(super) fn join(&self, key: Key<'_>, waiter: Waiter) -> Option<Waiter> {
        let mut flights = self.waiting.lock();
        let full = flights.len() >= FLIGHTS_MAX;
        let turned_away = match flights.get_mut(&Self::place(key)) {
            Some(waiting) if waiting.len() < WAITERS_MAX => {
                waiting.push(waiter);
                return None;
            }
            None if !full => return Some(waiter),
            _ => waiter,
        };
        drop(flights);
        turned_away(None);
        None
    }

    /// Whether a reader waits for the key already.
    pub(super) fn is_under_way(&self, key: Key<'_>) -> bool {
        self.waiting.lock().contains_key(&Self::place(key))
    }

    /// Begins a flight with its first waiter; two that begin at the same moment become one.
    pub(super) fn begin(&self, key: Key<'_>, waiter: Waiter) -> bool {
        let mut flights = self.waiting.lock();
        let waiting = flights.entry(Self::place(key)).or_default();
        waiting.push(waiter);
        waiting.len() == 1
    }

    /// Ends a flight.
    pub(super) fn land(&self, key: Key<'_>, found: Option<&Arc<BroughtValue>>) {
        let waiting = self.waiting.lock().remove(&Self::place(key)).unwrap_or_default();
        for waiter in waiting {
            waiter(found.cloned());
        }
    }
}
