//! The device's side of one end of a path: queue pairs, their completion queue, and the mailbox.

use std::io;
use std::sync::Arc;

use super::config::RdmaConfig;
use super::mailbox::{Mailbox, SLOTS};
use super::rail::Rail;
use super::verbs_queue::{Cq, Qp, Route, WorkCompletion};
use super::wire::End;
use crate::mover::Fault;
use crate::random::random;

/// Queue pairs, completion queue and mailbox of one end of a path. Dropping it destroys the queue pairs: after
/// that, nothing that came over them lands here.
pub(super) struct Link {
    // The first to be dropped.
    queue_pairs: Vec<Qp>,
    pub(super) mailbox: Mailbox,
    cq: Arc<Cq>,
    rail: Arc<Rail>,
    token: u64,
    first_numbers: Vec<u32>,
    works: u32,
}

impl Link {
    /// `count` queue pairs, each for `works` requests of data. The mailbox is on the first.
    pub(super) fn new(rail: &Arc<Rail>, count: u32, works: u32) -> io::Result<Self> {
        let token = rail.token();
        let works = works.min(rail.limits.queue_works.saturating_sub(SLOTS)).max(1);
        let depth = count * works + 2 * SLOTS;
        let cq = Cq::new(&rail.channel, depth, token)?;
        let make = |_| Qp::new(&rail.domain, &cq, (works + SLOTS, SLOTS), rail.port_number, token);
        let queue_pairs: Vec<Qp> = (0..count).map(make).collect::<io::Result<_>>()?;
        let mailbox = Mailbox::new(&rail.domain)?;
        mailbox.open(&queue_pairs[0])?;
        let first_numbers = (0..count).map(|_| random() as u32 & 0xff_ffff).collect();
        Ok(Self { queue_pairs, mailbox, cq, rail: rail.clone(), token, first_numbers, works })
    }

    /// Requests of data that each queue pair takes.
    pub(super) fn works(&self) -> u32 {
        self.works
    }

    /// By what the rail's thread finds the end.
    pub(super) fn token(&self) -> u64 {
        self.token
    }

    /// The description that the other end needs to connect.
    pub(super) fn end(&self, config: &RdmaConfig) -> io::Result<End> {
        let port = self.rail.port()?;
        let numbers = self.queue_pairs.iter().map(Qp::number);
        Ok(End {
            device: self.rail.name.clone(),
            device_index: self.rail.index,
            gid: self.rail.gid()?.1,
            lid: port.lid,
            infiniband: port.infiniband,
            mtu_code: port.mtu_code.min(config.mtu_code_max()),
            reads_out: self.rail.limits.reads_out,
            reads_in: self.rail.limits.reads_in,
            queue_pairs: numbers.zip(self.first_numbers.iter().copied()).collect(),
        })
    }

    /// Connects to the other end.
    pub(super) fn connect(&self, config: &RdmaConfig, ours: &End, theirs: &End) -> Result<(), Fault> {
        if ours.infiniband != theirs.infiniband {
            let kind = |end: &End| if end.infiniband { "InfiniBand" } else { "Ethernet" };
            let text = format!(
                "{} is on {} and the peer's {} on {}: choose devices of one network",
                ours.device,
                kind(ours),
                theirs.device,
                kind(theirs)
            );
            return Err(Fault::Invalid(text));
        }
        if ours.queue_pairs.len() != theirs.queue_pairs.len() {
            return Err(Fault::Invalid("the peer has another number of queue pairs".into()));
        }
        let broken =
            |error: io::Error| Fault::Path(format!("{}: {error}; see `baton rdma doctor`", ours.device));
        let route = Route {
            port: self.rail.port_number,
            gid_index: self.rail.gid().map_err(broken)?.0,
            peer_gid: theirs.gid,
            peer_lid: theirs.lid,
            infiniband: ours.infiniband,
            mtu_code: ours.mtu_code.min(theirs.mtu_code).max(1),
            service_level: config.service_level,
            traffic_class: config.traffic_class,
            reads_out: ours.reads_out.min(theirs.reads_in),
            reads_in: ours.reads_in.min(theirs.reads_out),
            ack_timeout_exponent: config.ack_timeout_exponent,
            retries: config.retries,
        };
        let pairs = self.queue_pairs.iter().zip(&ours.queue_pairs).zip(&theirs.queue_pairs);
        for ((queue_pair, (_, our_first)), (their_number, their_first)) in pairs {
            queue_pair.connect(&route, *their_number, (*their_first, *our_first)).map_err(broken)?;
        }
        Ok(())
    }

    /// The queue pair of this place.
    pub(super) fn queue_pair(&self, place: usize) -> &Qp {
        &self.queue_pairs[place]
    }

    /// The mailbox with the queue pair that it uses.
    pub(super) fn mail(&mut self) -> (&mut Mailbox, &Qp) {
        (&mut self.mailbox, &self.queue_pairs[0])
    }

    /// Takes what has finished.
    pub(super) fn poll(&self, into: &mut Vec<WorkCompletion>) -> io::Result<usize> {
        self.cq.poll(into)
    }

    /// Asks for an event when there is more.
    pub(super) fn arm(&self) -> io::Result<()> {
        self.cq.arm()
    }

    /// Stops the queue pairs without destroying them.
    pub(super) fn stop(&self) {
        for queue_pair in &self.queue_pairs {
            // One that has failed already has stopped; and all are destroyed next.
            let _ = queue_pair.stop();
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.rail.forget(self.token);
    }
}
