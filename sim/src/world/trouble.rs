//! Faults: processes die, nodes slow down, links go away, and all of it heals.

use crate::network::{Input as NetworkInput, LinkId};
use baton_scheduler::Input;
use baton_store::Input as StoreInput;
use baton_types::Epoch;

use super::World;
use super::flights::Purpose;
use super::inbox::ConductorInput;
use super::node::{EGRESS, INGRESS};
use crate::faults::Fault;

impl World {
    pub(crate) fn strike(&mut self, at: u32) {
        let (_, fault) = self.faults[at as usize];
        match fault {
            Fault::Death(node) => self.die(node),
            Fault::Rebirth(node) => self.revive(node),
            Fault::Slow(node, permille) => {
                self.engine(node, |engine, moment, ended| engine.set_speed_permille(moment, permille, ended));
            }
            Fault::LinkDown(node) => self.links(node, |link| NetworkInput::LinkDown { link }),
            Fault::LinkUp(node) => self.links(node, |link| NetworkInput::LinkUp { link }),
        }
    }

    fn links(&mut self, at: u32, input: fn(LinkId) -> NetworkInput) {
        for which in [EGRESS, INGRESS] {
            let link = self.nodes[at as usize].link(which);
            self.step_network(input(link));
        }
    }

    /// A process dies with everything that it held.
    fn die(&mut self, at: u32) {
        if !self.nodes[at as usize].alive {
            return;
        }
        let mut lost = Vec::new();
        self.engine(at, |engine, moment, ended| lost = engine.clear(moment, ended));
        for decode in lost {
            self.interrupted(decode);
        }
        let node = &mut self.nodes[at as usize];
        node.alive = false;
        let (instance, epoch) = (node.spec.id, node.spec.epoch);
        node.legs.clear();
        node.sharing.clear();
        self.forget_holds(at);
        self.fail_flights_of(at);
        self.step_store(at, StoreInput::Clear);
        for router in 0..self.setup.routers {
            self.send(router, ConductorInput::Lost(instance, epoch));
        }
    }

    /// Reads of a dead node's blocks are gone with its store; nothing may try to close them again.
    fn forget_holds(&mut self, at: u32) {
        for live in self.live.iter_mut().filter(|l| l.used) {
            if live.reading_from == Some(at) {
                live.reading_from = None;
            }
        }
    }

    /// Copies inside a dead node are gone with it, copies from it and to it fail. Its own requests
    /// and the hand-offs to it and from it are the conductor's to take back.
    fn fail_flights_of(&mut self, at: u32) {
        let inside = |p: &Purpose| matches!(p, Purpose::Offload { at: a, .. } if *a == at);
        for number in self.flights_where(inside) {
            self.drop_flight(number);
        }
        let across = |p: &Purpose| match p {
            Purpose::Fetch { from, .. } => *from == at,
            Purpose::Replicate { from, to, .. } => *from == at || *to == at,
            _ => false,
        };
        for number in self.flights_where(across) {
            self.cancel_flight(number);
        }
    }

    fn revive(&mut self, at: u32) {
        let node = &mut self.nodes[at as usize];
        if node.alive {
            return;
        }
        node.alive = true;
        node.spec.epoch = Epoch(node.spec.epoch.0 + 1);
        let spec = node.spec.clone();
        self.send_to_all(&Input::InstanceJoined(spec));
    }
}
