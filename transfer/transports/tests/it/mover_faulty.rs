//! A transport around the loopback that a test can hold, break, mute, fill and unplug.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use baton_transports::mover::*;

use crate::loopback::Loopback;

/// The faults that a transport has at the moment.
#[derive(Clone, Debug, Default)]
pub struct Trouble {
    /// Slices are taken and not moved.
    pub hold: bool,
    /// Probes are not answered.
    pub mute: bool,
    /// No path opens.
    pub unplugged: bool,
    /// Paths close without a word from the peer.
    pub unknown_end: bool,
    /// Every path breaks after so many more slices.
    pub break_after: Option<usize>,
    /// Slices held at once before a path is full; needs `hold`.
    pub room: Option<usize>,
    /// The next slices come damaged.
    pub damage: usize,
}

#[derive(Default)]
struct Plan {
    trouble: Trouble,
    moved: usize,
}

pub struct FaultyTransport {
    name: &'static str,
    devices: Vec<String>,
    inner: Arc<Loopback>,
    plan: Arc<Mutex<Plan>>,
    paths: Mutex<Vec<Arc<Shared>>>,
}

impl FaultyTransport {
    pub fn around(inner: Arc<Loopback>, name: &'static str, devices: &[&str]) -> Arc<Self> {
        let devices = devices.iter().map(ToString::to_string).collect();
        Arc::new(Self { name, devices, inner, plan: Arc::default(), paths: Mutex::default() })
    }

    pub fn set(&self, change: impl FnOnce(&mut Trouble)) {
        change(&mut self.plan.lock().unwrap().trouble);
    }

    pub fn moved(&self) -> usize {
        self.plan.lock().unwrap().moved
    }

    pub fn held(&self) -> usize {
        self.paths.lock().unwrap().iter().map(|path| path.held.lock().unwrap().len()).sum()
    }

    /// Moves what is held, and says that there is room.
    pub fn release(&self) {
        self.set(|trouble| trouble.hold = false);
        for path in self.paths.lock().unwrap().iter() {
            let held: Vec<Slice> = path.held.lock().unwrap().drain(..).collect();
            path.inner.post(&held);
            path.completions.push([Completion::PathCapacity { path: path.id }]);
        }
    }

    /// Breaks the paths that stand.
    pub fn cut(&self) {
        for path in self.paths.lock().unwrap().iter() {
            path.fail_held();
            let fault = Fault::Path("cut by the test".into());
            path.completions.push([Completion::Broken { path: path.id, fault }]);
        }
    }
}

impl Transport for FaultyTransport {
    fn name(&self) -> &'static str {
        self.name
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn register(&self, memory: &Arc<Memory>) -> Result<(), Fault> {
        self.inner.register(memory)
    }

    fn access(&self, window: WindowId, memory: &Arc<Memory>, at: u64, bytes: u64) -> Result<Vec<u8>, Fault> {
        self.inner.access(window, memory, at, bytes)
    }

    fn revoke(&self, window: WindowId) {
        self.inner.revoke(window);
    }

    fn devices(&self) -> Vec<String> {
        self.devices.clone()
    }

    fn open(
        &self,
        id: PathId,
        peer: &PeerId,
        _: &str,
        completions: Completions,
    ) -> Result<Box<dyn Path>, Fault> {
        if self.plan.lock().unwrap().trouble.unplugged {
            return Err(Fault::Silent(format!("{} is unplugged", self.name)));
        }
        let quiet = Completions::default();
        let inner = self.inner.open(id, peer, &self.inner.devices()[0], quiet.clone())?;
        let plan = self.plan.clone();
        let held = Mutex::default();
        let shared =
            Arc::new(Shared { id, inner, quiet, completions, plan, held, closed: Mutex::new(false) });
        self.paths.lock().unwrap().push(shared.clone());
        Ok(Box::new(FaultyPath(shared)))
    }

    fn shutdown(&self) {
        self.inner.shutdown();
    }
}

struct Shared {
    id: PathId,
    inner: Box<dyn Path>,
    /// Where the inner path's completions go, to be passed on.
    quiet: Completions,
    completions: Completions,
    plan: Arc<Mutex<Plan>>,
    held: Mutex<VecDeque<Slice>>,
    closed: Mutex<bool>,
}

impl Shared {
    fn pass_on(&self) {
        let mut ended = Vec::new();
        self.quiet.drain(&mut ended);
        let closed = |end: &Completion| matches!(end, Completion::Closed { .. });
        self.completions.push(ended.into_iter().filter(|end| !closed(end)));
    }

    fn fail_held(&self) {
        let held: Vec<Slice> = self.held.lock().unwrap().drain(..).collect();
        let fail = |slice: Slice| Completion::Failed {
            path: self.id,
            ticket: slice.ticket,
            fault: Fault::Path("its path ended".into()),
        };
        self.completions.push(held.into_iter().map(fail));
    }

    fn close(&self) {
        if std::mem::replace(&mut *self.closed.lock().unwrap(), true) {
            return;
        }
        self.fail_held();
        self.inner.close();
        let unknown = self.plan.lock().unwrap().trouble.unknown_end;
        let end = if unknown { PathEnd::PeerUnknown } else { PathEnd::Fenced };
        self.completions.push([Completion::Closed { path: self.id, end }]);
    }
}

struct FaultyPath(Arc<Shared>);

impl Path for FaultyPath {
    fn post(&self, slices: &[Slice]) -> usize {
        let path = &self.0;
        for (at, slice) in slices.iter().enumerate() {
            let mut plan = path.plan.lock().unwrap();
            if *path.closed.lock().unwrap() || plan.trouble.break_after == Some(0) {
                let fault = Fault::Path("broken by the test".into());
                path.completions.push([Completion::Failed { path: path.id, ticket: slice.ticket, fault }]);
                continue;
            }
            if plan.trouble.damage > 0 {
                plan.trouble.damage -= 1;
                let fault = Fault::Corrupt("damaged by the test".into());
                path.completions.push([Completion::Failed { path: path.id, ticket: slice.ticket, fault }]);
                continue;
            }
            if plan.trouble.hold {
                let mut held = path.held.lock().unwrap();
                if plan.trouble.room.is_some_and(|room| held.len() >= room) {
                    return at;
                }
                held.push_back(slice.clone());
                continue;
            }
            plan.moved += 1;
            if let Some(left) = &mut plan.trouble.break_after {
                *left -= 1;
            }
            drop(plan);
            path.inner.post(std::slice::from_ref(slice));
            path.pass_on();
        }
        slices.len()
    }

    fn notify(&self, ticket: u64, notice: Notice) {
        self.0.inner.notify(ticket, notice);
        self.0.pass_on();
    }

    fn probe(&self, ticket: u64) {
        if !self.0.plan.lock().unwrap().trouble.mute {
            self.0.inner.probe(ticket);
            self.0.pass_on();
        }
    }

    fn close(&self) {
        self.0.close();
    }
}

impl Drop for FaultyPath {
    fn drop(&mut self) {
        self.0.close();
    }
}
