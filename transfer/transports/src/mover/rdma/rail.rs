//! One device in use: its domain, its completion channel, and the thread that watches both its queues and its
//! troubles.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::config::RdmaConfig;
use super::threads::{Bell, ready};
use super::verbs::{Context, Domain, Event, Limits, Port};
use super::verbs_queue::Channel;
use crate::mover::topology_gids::{Gid, ranked_gids};

/// One end of a path, watched by its device's thread.
pub(super) trait WatchedEnd: Send + Sync {
    /// Its completion queue may have something: takes it. True when there is more.
    fn serve(&self) -> bool;
    /// Its queue pair, its port or its device has failed.
    fn trouble(&self, why: &str);
}

/// One RDMA device in use.
pub(super) struct Rail {
    pub(super) name: String,
    /// Its place among the node's devices.
    pub(super) index: u16,
    pub(super) port_number: u8,
    pub(super) limits: Limits,
    pub(super) domain: Arc<Domain>,
    pub(super) channel: Arc<Channel>,
    gids: std::path::PathBuf,
    gid_index: Option<u8>,
    bell: Bell,
    stopping: AtomicBool,
    next_token: AtomicU64,
    watched: Mutex<BTreeMap<u64, Weak<dyn WatchedEnd>>>,
}

impl Rail {
    pub(super) fn open(config: &RdmaConfig, name: &str, index: u16) -> io::Result<Arc<Self>> {
        let context = Context::open(name)?;
        let channel = Channel::new(&context)?;
        for file in [context.events(), channel.file()] {
            let flags = rustix::fs::fcntl_getfl(file)?;
            rustix::fs::fcntl_setfl(file, flags | rustix::fs::OFlags::NONBLOCK)?;
        }
        Ok(Arc::new(Self {
            name: name.to_owned(),
            index,
            port_number: config.port,
            limits: context.limits()?,
            domain: Domain::new(&context)?,
            channel,
            gids: config.sysfs.join(format!("class/infiniband/{name}/ports/{}", config.port)),
            gid_index: config.gid_index,
            bell: Bell::new()?,
            stopping: AtomicBool::new(false),
            next_token: AtomicU64::new(1),
            watched: Mutex::default(),
        }))
    }

    pub(super) fn port(&self) -> io::Result<Port> {
        self.domain.context().port(self.port_number)
    }

    /// The address of the port: as configured, else the best by kind.
    pub(super) fn gid(&self) -> io::Result<(u8, [u8; 16])> {
        let index = match self.gid_index {
            Some(index) => index,
            None => self.gids().first().map(|gid| gid.index).unwrap_or(0),
        };
        Ok((index, self.domain.context().gid(self.port_number, index)?))
    }

    /// The addresses of the port, best first.
    pub(super) fn gids(&self) -> Vec<Gid> {
        ranked_gids(&self.gids)
    }

    /// A number by which an end is watched.
    pub(super) fn token(&self) -> u64 {
        self.next_token.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn watch(&self, token: u64, one: Weak<dyn WatchedEnd>) {
        self.watched().insert(token, one);
    }

    pub(super) fn forget(&self, token: u64) {
        self.watched().remove(&token);
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// Reports the device's failure to every end on it.
    pub(super) fn trouble(&self, why: &str) {
        let all: Vec<_> = self.watched().values().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|one| one.trouble(why));
    }

    /// The main loop of the device's thread.
    pub(super) fn run(&self) {
        let context = self.domain.context().clone();
        let files: [BorrowedFd<'_>; 3] = [self.channel.file(), context.events(), self.bell.as_fd()];
        let mut busy: Vec<Arc<dyn WatchedEnd>> = Vec::new();
        while !self.stopping.load(Ordering::Acquire) {
            // Ends with more to do have their turn after a look at the files, without sleeping.
            let limit = (!busy.is_empty()).then_some(Duration::ZERO);
            let [queues, events, _] = ready(files, limit);
            if queues {
                self.filled(&mut busy);
            }
            if events {
                self.events(&context);
            }
            busy.retain(|one| one.serve());
        }
    }

    fn filled(&self, busy: &mut Vec<Arc<dyn WatchedEnd>>) {
        while let Ok(token) = self.channel.next() {
            let one = self.watched().get(&token).and_then(Weak::upgrade);
            busy.extend(one);
        }
    }

    fn events(&self, context: &Context) {
        while let Ok(event) = context.next_event() {
            match event {
                Event::Queue(token) => {
                    let one = self.watched().get(&token).and_then(Weak::upgrade);
                    if let Some(one) = one {
                        one.trouble(&format!("{}: the device gave up the queue pair", self.name));
                    }
                }
                Event::PortDown(port) if port == self.port_number => {
                    self.trouble(&format!("{}: port {port} is down", self.name));
                }
                Event::Device => self.trouble(&format!("{}: the device is lost", self.name)),
                Event::PortDown(_) | Event::Other => {}
            }
        }
    }

    fn watched(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Weak<dyn WatchedEnd>>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
