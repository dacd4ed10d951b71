//! The transport inside one process: a slice is one copy, made by the thread that posts it.
//!
//! Peers find each other in a [`LoopbackNet`] that they share. A node that leaves it, or comes back in
//! another life, is gone for the paths to the old one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use baton_transports::mover::*;

const DEVICE: &str = "memory";
const SLICE_BYTES_MAX: u32 = 16 << 20;

/// A node as its peers in the process see it.
struct Member {
    epoch: u64,
    exposure: Arc<Exposure>,
    inbound: Arc<dyn NoticeReceiver>,
}

/// The members that can be reached inside the process.
#[derive(Default)]
pub struct LoopbackNet {
    members: Mutex<BTreeMap<String, Arc<Member>>>,
}

impl LoopbackNet {
    /// An empty one.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    fn members(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Member>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, peer: &PeerId) -> Result<Arc<Member>, Fault> {
        let found = self.members().get(&peer.address).cloned();
        let member = found.ok_or_else(|| Fault::Silent(format!("{} is not here", peer.address)))?;
        if member.epoch != peer.epoch {
            return Err(Fault::Stale(format!("{} lives in epoch {}", peer.address, member.epoch)));
        }
        Ok(member)
    }
}

/// One node's side of it.
pub struct Loopback {
    me: PeerId,
    net: Arc<LoopbackNet>,
    member: Arc<Member>,
    registered: Mutex<Vec<Weak<Memory>>>,
    shared: Arc<Mutex<ShutdownState>>,
    routes: Mutex<Vec<Weak<Route>>>,
}

/// Set by a shutdown: this node sends nothing from then on.
#[derive(Default)]
struct ShutdownState(bool);

impl Loopback {
    /// Joins the net as `me`; a former life at that address is over for its peers.
    pub fn join(
        net: &Arc<LoopbackNet>,
        me: PeerId,
        exposure: Arc<Exposure>,
        inbound: Arc<dyn NoticeReceiver>,
    ) -> Arc<Self> {
        let member = Arc::new(Member { epoch: me.epoch, exposure, inbound });
        net.members().insert(me.address.clone(), member.clone());
        let net = net.clone();
        Arc::new(Self {
            me,
            net,
            member,
            registered: Mutex::default(),
            shared: Arc::default(),
            routes: Mutex::default(),
        })
    }

    fn is_registered(&self, memory: &Arc<Memory>) -> bool {
        let registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        registered.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(memory)))
    }
}

impl Transport for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn capabilities(&self) -> Capabilities {
        let slice_bytes_max = SLICE_BYTES_MAX;
        Capabilities { slice_bytes_max, outstanding_max: 1_024 }
    }

    fn register(&self, memory: &Arc<Memory>) -> Result<(), Fault> {
        if !self.is_registered(memory) {
            let mut registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
            registered.retain(|known| known.strong_count() > 0);
            registered.push(Arc::downgrade(memory));
        }
        Ok(())
    }

    fn access(&self, _: WindowId, memory: &Arc<Memory>, _: u64, _: u64) -> Result<Vec<u8>, Fault> {
        if !self.is_registered(memory) {
            return Err(Fault::Invalid("the memory is not registered: register it first".into()));
        }
        Ok(Vec::new())
    }

    /// Each copy holds a permit, for which the exposure waits.
    fn revoke(&self, _: WindowId) {}

    fn devices(&self) -> Vec<String> {
        vec![DEVICE.into()]
    }

    fn open(
        &self,
        id: PathId,
        peer: &PeerId,
        device: &str,
        completions: Completions,
    ) -> Result<Box<dyn Path>, Fault> {
        if device != DEVICE {
            return Err(Fault::Invalid(format!("loopback has no device {device}: use {DEVICE}")));
        }
        if self.shared.lock().unwrap_or_else(PoisonError::into_inner).0 {
            return Err(Fault::Path("this node is shutting down".into()));
        }
        self.net.find(peer)?;
        let (me, peer, net, here) = (self.me.clone(), peer.clone(), self.net.clone(), self.shared.clone());
        let route = Route { id, me, peer, net, here, completions, closed: Mutex::default() };
        let route = Arc::new(route);
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        routes.retain(|known| known.strong_count() > 0);
        routes.push(Arc::downgrade(&route));
        Ok(Box::new(LoopbackPath(route)))
    }

    fn shutdown(&self) {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).0 = true;
        let mut members = self.net.members();
        if members.get(&self.me.address).is_some_and(|member| Arc::ptr_eq(member, &self.member)) {
            members.remove(&self.me.address);
        }
        drop(members);
        let routes = std::mem::take(&mut *self.routes.lock().unwrap_or_else(PoisonError::into_inner));
        routes.iter().filter_map(Weak::upgrade).for_each(|route| route.close());
    }
}

/// A path; the transport knows what it stands for, to end it at a shutdown.
struct LoopbackPath(Arc<Route>);

struct Route {
    id: PathId,
    me: PeerId,
    peer: PeerId,
    net: Arc<LoopbackNet>,
    here: Arc<Mutex<ShutdownState>>,
    completions: Arc<CompletionQueue>,
    closed: Mutex<ShutdownState>,
}

impl Route {
    fn member(&self) -> Result<Arc<Member>, Fault> {
        if self.here.lock().unwrap_or_else(PoisonError::into_inner).0 {
            return Err(Fault::Path("this node is shutting down".into()));
        }
        // A peer that is gone is a broken path; a new opening finds its next life.
        self.net.find(&self.peer).map_err(|fault| Fault::Path(format!("{fault:?}")))
    }

    fn copy(&self, slice: &Slice) -> Result<(), Fault> {
        let member = self.member()?;
        let bytes = u64::from(slice.bytes);
        if let Some(fault) = slice.fault(SLICE_BYTES_MAX) {
            return Err(fault);
        }
        let (local, at) = (&slice.local.memory, slice.local.at);
        let window = slice.remote.window;
        let permit = member.exposure.admit(window, slice.direction, slice.remote_at, bytes)?;
        let (remote, remote_at) = (permit.memory(), permit.at());
        match slice.direction {
            Direction::Read => Memory::copy(remote, remote_at, local, at, bytes),
            Direction::Write => Memory::copy(local, at, remote, remote_at, bytes),
        }
        if slice.verify && local.checksum(at, bytes) != remote.checksum(remote_at, bytes) {
            return Err(Fault::Corrupt("a copy differs: the source changed, or the memory is bad".into()));
        }
        Ok(())
    }

    /// Acts on the peer and reports the outcome. A closed path reports nothing.
    fn tell(&self, ticket: u64, say: impl FnOnce(&Member) -> Result<(), Fault>) {
        let path = self.id;
        let closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        if closed.0 {
            return;
        }
        self.completions.push([match self.member().and_then(|member| say(&member)) {
            Ok(()) => Completion::Notified { path, ticket },
            Err(fault) => Completion::Failed { path, ticket, fault },
        }]);
    }

    fn close(&self) {
        let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut closed.0, true) {
            self.completions.push([Completion::Closed { path: self.id, end: PathEnd::Fenced }]);
        }
    }
}

impl Path for LoopbackPath {
    fn post(&self, slices: &[Slice]) -> usize {
        let path = self.0.id;
        // Held over the copies, so that none is under way when the path reports `ShutdownState`.
        let closed = self.0.closed.lock().unwrap_or_else(PoisonError::into_inner);
        if closed.0 {
            return 0;
        }
        let ends = slices.iter().map(|slice| {
            let ticket = slice.ticket;
            match self.0.copy(slice) {
                Ok(()) => Completion::Done { path, ticket },
                Err(fault) => Completion::Failed { path, ticket, fault },
            }
        });
        self.0.completions.push(ends.collect::<Vec<_>>());
        slices.len()
    }

    fn notify(&self, ticket: u64, notice: Notice) {
        self.0.tell(ticket, |member| {
            let bytes = notice.bytes.len();
            if bytes > NOTICE_BYTES_MAX {
                return Err(Fault::Invalid(format!("a notice of {bytes} bytes; at most {NOTICE_BYTES_MAX}")));
            }
            member.inbound.notice(&self.0.me, notice);
            Ok(())
        });
    }

    fn probe(&self, ticket: u64) {
        self.0.tell(ticket, |_| Ok(()));
    }

    fn close(&self) {
        self.0.close();
    }
}

impl Drop for LoopbackPath {
    fn drop(&mut self) {
        self.close();
    }
}
