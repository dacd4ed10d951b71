//! The threads of the front door: whatever it computes for a client, no heartbeat and no decision waits for it.

use std::future::Future;

use tokio::runtime::{Builder, Handle, Runtime};

use super::UpError;

/// A runtime of its own. It may be dropped within another one: what still runs on it ends then.
pub(super) struct FrontThreads(Option<Runtime>);

impl FrontThreads {
    /// `threads` of them, one a core unless said otherwise.
    ///
    /// # Errors
    /// The system gives no threads.
    pub(super) fn start(threads: Option<usize>) -> Result<Self, UpError> {
        let mut builder = Builder::new_multi_thread();
        if let Some(threads) = threads {
            builder.worker_threads(threads);
        }
        let runtime = builder.thread_name("baton-front").enable_all().build();
        runtime.map(|runtime| Self(Some(runtime))).map_err(UpError::Threads)
    }

    /// Where tasks of the front door are started.
    ///
    /// # Panics
    /// Never: it is there until this is dropped.
    pub(super) fn handle(&self) -> &Handle {
        self.0.as_ref().expect("taken by drop alone").handle()
    }

    /// Runs one task there, to its end.
    ///
    /// # Errors
    /// The task panicked.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, UpError> {
        self.handle().spawn(task).await.map_err(UpError::Front)
    }
}

impl Drop for FrontThreads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
