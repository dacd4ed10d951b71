//! Sends each request at its time and gathers how it ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::bodies::PlannedRequest;
use super::live::{Sender, SentRequest};

/// Longest uninterrupted sleep of the pacer, so that a stop is noticed.
const NAP: Duration = Duration::from_millis(20);
/// The last stretch before a request is due is slept through in one go, for exactness.
const CLOSE: Duration = Duration::from_millis(30);

/// A live run under way.
pub struct Pace {
    /// Sends requests.
    pub sender: Arc<Sender>,
    /// Requests in flight at most.
    pub concurrency_cap: u32,
    /// Ends the run early.
    pub stop: CancellationToken,
    /// Called once for each request that ended.
    pub each: Box<dyn Fn() + Send + Sync>,
}

/// The result of a paced run.
pub struct PacedResult {
    /// Requests in order of their ends.
    pub sent: Vec<SentRequest>,
    /// Requests that had to wait because too many were in flight.
    pub waited_for_cap: u64,
    /// Most requests in flight at a time.
    pub most_in_flight: u64,
    /// The run was ended before its time; what was in flight then was cut off.
    pub interrupted: bool,
}

#[derive(Default)]
struct Shared {
    sent: Mutex<Vec<SentRequest>>,
    in_flight: AtomicU64,
    most_in_flight: AtomicU64,
}

impl Pace {
    /// Sends every planned request at its time, on `runtime`, and returns when all have ended or the
    /// run was stopped. Blocks: call it on a thread outside the runtime.
    pub fn run(self, planned: &Receiver<PlannedRequest>, runtime: &Handle) -> PacedResult {
        let cap = self.concurrency_cap.max(1);
        let (permits, shared) = (Arc::new(Semaphore::new(cap as usize)), Arc::new(Shared::default()));
        let each = Arc::new(self.each);
        let mut waited_for_cap = 0;
        while let Ok(request) = planned.recv() {
            if !wait(&self.sender, request.arrival.at_us, &self.stop) {
                break;
            }
            let permit = if let Ok(permit) = Arc::clone(&permits).try_acquire_owned() {
                permit
            } else {
                waited_for_cap += 1;
                let wanted = self.stop.run_until_cancelled(Arc::clone(&permits).acquire_owned());
                match runtime.block_on(wanted) {
                    Some(Ok(permit)) => permit,
                    _ => break,
                }
            };
            let (sender, shared) = (Arc::clone(&self.sender), Arc::clone(&shared));
            let (stop, each) = (self.stop.clone(), Arc::clone(&each));
            runtime.spawn(async move {
                shared.serve(sender, request, &stop).await;
                each();
                drop(permit);
            });
        }
        // All permits are back exactly when no request is in flight.
        runtime.block_on(async { permits.acquire_many(cap).await.map(drop) }).ok();
        PacedResult {
            sent: std::mem::take(&mut shared.sent.lock()),
            waited_for_cap,
            most_in_flight: shared.most_in_flight.load(Ordering::Relaxed),
            interrupted: self.stop.is_cancelled(),
        }
    }
}

impl Shared {
    async fn serve(&self, sender: Arc<Sender>, request: PlannedRequest, stop: &CancellationToken) {
        let now = self.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        self.most_in_flight.fetch_max(now, Ordering::Relaxed);
        let cut = sender.cut_off(&request);
        let clock = sender.clock;
        let sent = stop.run_until_cancelled(sender.send(request)).await.unwrap_or_else(|| SentRequest {
            outcome: baton_sim::metrics::Outcome { end_us: clock.now_us(), ..cut.outcome },
            ..cut
        });
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.sent.lock().push(sent);
    }
}

/// Sleeps until the clock shows `at_us`; false when the run is stopped before.
fn wait(sender: &Sender, at_us: u64, stop: &CancellationToken) -> bool {
    loop {
        if stop.is_cancelled() {
            return false;
        }
        let left = sender.clock.until(at_us);
        if left <= CLOSE {
            std::thread::sleep(left);
            return true;
        }
        std::thread::sleep(NAP.min(left));
    }
}
