//! Background work beside reads and writes: probes of a bucket that was left alone, due removals, and the check
//! whether another store has taken over the prefix.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::bucket_worker::BucketWorker;

/// Between two looks at the owner, in multiples of its time limit.
const OWNER_EVERY: u32 = 2;

impl BucketWorker {
    /// Goes on until the bucket is left alone for good.
    pub(super) async fn watch(self: Arc<Self>) {
        let pause = (self.time_limit / 2).clamp(Duration::from_millis(5), Duration::from_secs(1));
        let mut looked = Instant::now();
        while !self.off.load(Ordering::SeqCst) {
            tokio::time::sleep(pause).await;
            let is_open = self.health.is_open();
            if self.health.is_due() || (is_open && looked.elapsed() > OWNER_EVERY * self.time_limit) {
                self.look().await;
                looked = Instant::now();
            }
            if self.is_on() {
                self.retry();
                // Less may be allowed than at the last start.
                self.make_room().await;
            }
        }
    }

    /// Asks the bucket whose it is.
    async fn look(&self) {
        let owner = self.get(&self.owner(), None).await;
        let Some(owner) = self.health.record("look", owner) else { return };
        let mine = self.life.to_string();
        match owner {
            Some(other) if other != mine.as_bytes() => {
                self.off.store(true, Ordering::SeqCst);
                (self.log)(
                    "cold: another store has begun to use this prefix: it is left to that one, \
                     and this store goes on without; give each its own prefix",
                );
            }
            Some(_) => {}
            // The bucket has been emptied. A later read finds each lost object missing.
            None => {
                let put = self.put(&self.owner(), mine.into_bytes()).await;
                self.health.record("write its owner", put);
            }
        }
    }
}
