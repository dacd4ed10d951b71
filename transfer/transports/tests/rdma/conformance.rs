//! The promises of the mover's port that are equal on every medium. The modules beside this one test the promises
//! that RDMA keeps in its own way: a refused window breaks a connection (`windows`), a frozen process still has a
//! device that serves (`killed`), and checksums are the devices' own.

use std::net::TcpListener;
use std::sync::Arc;

use baton_transports::mover::rdma::{RdmaNode, RdmaTransport};
use baton_transports::mover::{Damage, Exposure, PathEnd, PeerId};

use crate::promises;
use crate::rigs::{Inbox, Node, Rig};

/// Endpoints on the rails.
struct Rdma;

impl Rig for Rdma {
    const NAME: &'static str = "rdma";
    const KILLED: PathEnd = PathEnd::PeerUnknown;

    fn start(epoch: u64, address: Option<&str>) -> Node {
        let devices = if epoch == 22 { ["rxe_b0", "rxe_b1"] } else { ["rxe_a0", "rxe_a1"] };
        let listener = TcpListener::bind(address.unwrap_or("127.0.0.1:0")).unwrap();
        let peer = PeerId { address: listener.local_addr().unwrap().to_string(), epoch };
        let (exposure, inbox) = (Exposure::new(), Arc::new(Inbox::default()));
        let node = RdmaNode { id: peer.clone(), exposure: exposure.clone(), inbound: inbox.clone() };
        let transport = RdmaTransport::start(crate::scene::config(&devices), listener, node).unwrap();
        Node { peer, transport, exposure, inbox, damage: Arc::new(Damage::default()) }
    }
}

#[test]
fn data_lands_where_it_belongs() {
    promises::data_lands_where_it_belongs::<Rdma>();
}

#[test]
fn each_slice_ends_once() {
    promises::each_slice_ends_once::<Rdma>();
}

#[test]
fn closing_ends_everything_once() {
    promises::closing_ends_everything_once::<Rdma>();
}

#[test]
fn notices_come_after_the_data() {
    promises::notices_come_after_the_data::<Rdma>();
}

#[test]
fn shutdown_ends_what_is_open() {
    promises::shutdown_ends_what_is_open::<Rdma>();
}
