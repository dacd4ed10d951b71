//! Keys, and whatever becomes of them: list, watch, and list anew when history is missing.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::client::Etcd;
use super::keys::{Keys, Listing};
use super::watch::Batch;
use crate::backoff::Backoff;
use crate::error::{Kind, MembershipError};

/// A watch that lived so long has worked.
const LASTED: Duration = Duration::from_secs(3);

/// Hears what becomes of keys.
pub(crate) trait Follower: Send {
    /// This is all there is.
    fn listed(&mut self, listing: Listing);
    /// And then this happened.
    fn happened(&mut self, batch: Batch);
    /// The reported state is up to date again.
    fn current(&mut self) {}
    /// No events arrive for now, so the reported state may be out of date.
    fn broke(&mut self, error: &MembershipError);
}

/// Reports changes of `keys`, at most `most` of them, to `follower` until `stop` is cancelled. It retries with growing
/// pauses when etcd cannot be read.
pub(crate) async fn follow(
    etcd: Etcd,
    keys: Keys,
    most: usize,
    mut follower: impl Follower,
    stop: CancellationToken,
) {
    let mut backoff = Backoff::new("follow");
    // The revision after the last one reported. With none, everything has to be listed.
    let mut from = None;
    loop {
        let ended = tokio::select! {
            error = once(&etcd, (&keys, most), &mut from, &mut follower, &mut backoff) => error,
            () = stop.cancelled() => return,
        };
        if ended.kind == Kind::Compacted {
            from = None;
        } else {
            follower.broke(&ended);
        }
        tokio::select! {
            () = tokio::time::sleep(backoff.pause()) => {}
            () = stop.cancelled() => return,
        }
    }
}

async fn once(
    etcd: &Etcd,
    (keys, most): (&Keys, usize),
    from: &mut Option<u64>,
    follower: &mut impl Follower,
    backoff: &mut Backoff,
) -> MembershipError {
    let start = match *from {
        Some(revision) => revision,
        None => match etcd.list(keys, most).await {
            Ok(listing) => {
                let next = listing.revision + 1;
                follower.listed(listing);
                *from = Some(next);
                next
            }
            Err(error) => return error,
        },
    };
    let mut watching = match etcd.watch(keys, start).await {
        Ok(watching) => watching,
        Err(error) => return error,
    };
    follower.current();
    let began = Instant::now();
    loop {
        match watching.next().await {
            Ok(batch) => {
                *from = Some(batch.revision + 1);
                follower.happened(batch);
            }
            Err(error) => {
                // One that broke at once has not shown that the next will last.
                if began.elapsed() > LASTED {
                    backoff.worked();
                }
                return error;
            }
        }
    }
}
