//! The threads that compute a pass. Work is split by output, never by term of a sum, so that their
//! number changes no result.

use std::ops::Range;

use rayon::prelude::*;

use crate::BuildError;

/// The caller's thread alone, or a pool of its own.
#[derive(Debug)]
pub(crate) struct ComputeThreads {
    pool: Option<rayon::ThreadPool>,
}

impl ComputeThreads {
    /// A crew of so many threads; `None` or 1 is the caller's own.
    ///
    /// # Errors
    /// When the system gives no threads.
    pub(crate) fn new(threads: Option<u32>) -> Result<Self, BuildError> {
        let threads = threads.unwrap_or(1) as usize;
        if threads <= 1 {
            return Ok(Self { pool: None });
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|n| format!("engine-{n}"))
            .build()
            .map_err(|e| BuildError(format!("engine threads: {e}; ask for fewer than {threads}")))?;
        Ok(Self { pool: Some(pool) })
    }

    /// How many threads there are.
    pub(crate) fn threads(&self) -> usize {
        self.pool.as_ref().map_or(1, rayon::ThreadPool::current_num_threads)
    }

    /// `work` over even parts of `0..items`, in order.
    pub(crate) fn map_parts<T: Send>(
        &self,
        items: usize,
        work: impl Fn(Range<usize>) -> T + Sync,
    ) -> Vec<(Range<usize>, T)> {
        let Some(pool) = &self.pool else { return vec![(0..items, work(0..items))] };
        let size = items.div_ceil(self.threads()).max(1);
        let parts: Vec<Range<usize>> =
            (0..items).step_by(size).map(|from| from..(from + size).min(items)).collect();
        pool.install(|| parts.into_par_iter().map(|part| (part.clone(), work(part))).collect())
    }

    /// `work(row, out)` for every row of `width` numbers of `out`.
    pub(crate) fn for_rows(&self, out: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
        match &self.pool {
            None => out.chunks_exact_mut(width).enumerate().for_each(|(row, out)| work(row, out)),
            Some(pool) => pool.install(|| {
                out.par_chunks_exact_mut(width).enumerate().for_each(|(row, out)| work(row, out))
            }),
        }
    }
}
