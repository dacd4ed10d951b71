//! A KV pool whose blocks hold the tokens that they stand for, and are lent with a term.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// A pool of blocks. The lowest free block is taken first, so that a block that is freed is soon another prompt's.
#[derive(Debug)]
pub(super) struct Pool {
    block_tokens: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    blocks: Vec<Vec<u32>>,
    used: Vec<bool>,
    leases: BTreeMap<String, Lease>,
    expired: u64,
}

#[derive(Clone, Debug)]
struct Lease {
    blocks: Vec<u32>,
    until: Instant,
}

/// How a reader stands to the lease of what it read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// The blocks were lent to it, and are free now.
    Lent,
    /// Nobody lent them: they were read before, or the lease had run out, or never was.
    NotLent,
}

impl Pool {
    pub(super) fn new(blocks: u32, block_tokens: u32) -> Self {
        let count = blocks as usize;
        let state = State {
            blocks: vec![Vec::new(); count],
            used: vec![false; count],
            leases: BTreeMap::new(),
            expired: 0,
        };
        Self { block_tokens: block_tokens as usize, state: Mutex::new(state) }
    }

    /// Blocks for `tokens`, filled with them; `None` when there are too few.
    pub(super) fn fill(&self, tokens: &[u32]) -> Option<Vec<u32>> {
        let mut state = self.swept();
        let wanted = tokens.len().div_ceil(self.block_tokens);
        let free: Vec<usize> = (0..state.used.len()).filter(|at| !state.used[*at]).take(wanted).collect();
        if free.len() < wanted {
            return None;
        }
        for (at, part) in free.iter().zip(tokens.chunks(self.block_tokens)) {
            state.used[*at] = true;
            state.blocks[*at] = part.to_vec();
        }
        Some(free.into_iter().filter_map(|at| u32::try_from(at).ok()).collect())
    }

    /// Frees blocks; what they hold stays until they are filled anew.
    pub(super) fn free(&self, blocks: &[u32]) {
        let mut state = self.state.lock();
        state.free(blocks);
    }

    /// Lends used blocks under the name `request`.
    pub(super) fn lend(&self, request: &str, blocks: Vec<u32>, term: Duration) {
        let lease = Lease { blocks, until: Instant::now() + term };
        self.swept().leases.insert(request.to_owned(), lease);
    }

    /// The tokens of the blocks, and the end of their lease; `None` when there is no such block.
    pub(super) fn read(&self, request: &str, blocks: &[u64]) -> Option<(Vec<u32>, Standing)> {
        let mut state = self.swept();
        let mut tokens = Vec::new();
        for block in blocks {
            tokens.extend_from_slice(state.blocks.get(usize::try_from(*block).ok()?)?);
        }
        let lent = state.leases.get(request).cloned();
        let Some(lease) = lent else { return Some((tokens, Standing::NotLent)) };
        state.leases.remove(request);
        state.free(&lease.blocks);
        Some((tokens, Standing::Lent))
    }

    /// Blocks in use, lent ones included.
    pub(super) fn held(&self) -> usize {
        self.swept().used.iter().filter(|used| **used).count()
    }

    /// Share of the blocks in use.
    pub(super) fn share(&self) -> f64 {
        let state = self.swept();
        state.used.iter().filter(|used| **used).count() as f64 / state.used.len().max(1) as f64
    }

    /// Leases that ran out.
    pub(super) fn expired(&self) -> u64 {
        self.swept().expired
    }

    fn swept(&self) -> parking_lot::MutexGuard<'_, State> {
        let mut state = self.state.lock();
        let now = Instant::now();
        let over: Vec<String> = state
            .leases
            .iter()
            .filter(|(_, lease)| lease.until <= now)
            .map(|(name, _)| name.clone())
            .collect();
        for name in over {
            if let Some(lease) = state.leases.remove(&name) {
                state.free(&lease.blocks);
                state.expired += 1;
            }
        }
        state
    }
}

impl State {
    fn free(&mut self, blocks: &[u32]) {
        for block in blocks {
            if let Some(used) = self.used.get_mut(*block as usize) {
                *used = false;
            }
        }
    }
}

/// Blocks of a running request, freed when it goes.
#[derive(Debug)]
pub(super) struct HeldBlocks {
    pub(super) pool: std::sync::Arc<Pool>,
    pub(super) blocks: Vec<u32>,
}

impl HeldBlocks {
    /// The blocks, which are no longer this request's.
    pub(super) fn keep(mut self) -> Vec<u32> {
        std::mem::take(&mut self.blocks)
    }
}

impl Drop for HeldBlocks {
    fn drop(&mut self) {
        self.pool.free(&self.blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lent_blocks_are_read_once_and_stale_ones_hold_what_came_after() {
        let pool = Pool::new(4, 2);
        let blocks = pool.fill(&[1, 2, 3]).unwrap();
        assert_eq!(blocks, [0, 1]);
        pool.lend("a", blocks, Duration::from_secs(60));
        assert_eq!((pool.held(), pool.read("b", &[0, 1])), (2, Some((vec![1, 2, 3], Standing::NotLent))));
        assert_eq!(pool.read("a", &[0, 1]), Some((vec![1, 2, 3], Standing::Lent)));
        assert_eq!(pool.held(), 0);
        pool.fill(&[9, 9, 9, 9]).unwrap();
        assert_eq!(pool.read("a", &[0, 1]), Some((vec![9, 9, 9, 9], Standing::NotLent)));
        assert_eq!(pool.read("a", &[7]), None);
        assert_eq!(pool.fill(&[0; 5]), None);
    }

    #[test]
    fn a_lease_of_no_length_is_over() {
        let pool = Pool::new(2, 2);
        let blocks = pool.fill(&[1]).unwrap();
        pool.lend("a", blocks, Duration::ZERO);
        assert_eq!((pool.held(), pool.expired()), (0, 1));
    }
}
