//! Faults: processes die, nodes slow down, links go away, and all of it heals.

use baton_scheduler::Input;
use baton_store::Input as StoreInput;
use baton_transfer::Input as TransferInput;
use baton_types::Epoch;

use super::World;
use super::flights::Purpose;
use super::node::{EGRESS, INGRESS};
use crate::faults::Fault;

impl World {
    pub(crate) fn strike(&mut self, at: u32) {
        let (_, fault) = self.faults[at as usize];
        match fault {
            Fault::Death(node) => self.die(node),
            Fault::Rebirth(node) => self.revive(node),
            Fault::Slow(node, permille) => self.nodes[node as usize].engine.set_speed_permille(permille),
            Fault::LinkDown(node) => self.links(node, |link| TransferInput::LinkDown { link }),
            Fault::LinkUp(node) => self.links(node, |link| TransferInput::LinkUp { link }),
        }
    }

    fn links(&mut self, at: u32, input: fn(baton_transfer::LinkId) -> TransferInput) {
        for which in [EGRESS, INGRESS] {
            let link = self.nodes[at as usize].link(which);
            self.step_transfers(input(link));
        }
    }

    /// A process dies with everything that it held.
    fn die(&mut self, at: u32) {
        if !self.nodes[at as usize].alive {
            return;
        }
        let node = &mut self.nodes[at as usize];
        node.alive = false;
        let epoch = node.spec.epoch;
        for (slot, left_tokens) in node.engine.clear() {
            let live = &mut self.live[slot as usize];
            if live.used && left_tokens > 0 {
                live.emitted_tokens = live.output_tokens.saturating_sub(left_tokens);
            }
        }
        let node = &mut self.nodes[at as usize];
        (node.incoming, node.sharing, node.crowded) = (Vec::new(), Vec::new(), Vec::new());
        node.opened_tokens = 0;
        self.forget_holds(at);
        self.step_store(at, StoreInput::Clear);
        self.cancel_where(|p| match p {
            Purpose::Offload { at: node, .. } | Purpose::Onboard { at: node, .. } => *node == at,
            Purpose::Replicate { from, to, .. } => *from == at || *to == at,
            Purpose::Fetch { .. } | Purpose::Handoff { .. } => false,
        });
        self.tell_all(&Input::InstanceLost { instance: self.nodes[at as usize].spec.id, epoch });
        self.fail_flights_of(at);
    }

    /// Holds on a dead node are gone with its store; nothing may try to close them again.
    fn forget_holds(&mut self, at: u32) {
        for live in self.live.iter_mut().filter(|l| l.used) {
            if live.prefill == at {
                live.prefill_open = false;
            }
            if live.decode == at {
                live.decode_open = false;
            }
        }
    }

    /// Fetches from a dead node and hand-offs to it fail; those of its own requests were released.
    fn fail_flights_of(&mut self, at: u32) {
        let slots: Vec<u32> = self
            .live
            .iter()
            .enumerate()
            .filter(|(_, l)| l.used && l.reading_from == Some(at))
            .map(|(slot, _)| u32::try_from(slot).expect("slots are u32"))
            .collect();
        for slot in slots {
            self.live[slot as usize].reading_from = None;
            self.fail_fetch(slot);
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
        self.tell_all(&Input::InstanceJoined(spec));
    }

    fn fail_fetch(&mut self, slot: u32) {
        let id = self.live[slot as usize].id;
        self.cancel_where(|p| matches!(p, Purpose::Fetch { id: i, .. } if *i == id));
    }
}
