//! What conductors shall hear, in order, once the event at hand is over.
//!
//! Orders of one step are all carried out before the next input is read. A report about an attempt
//! that was given up in the meantime is dropped, as a real driver drops what a connection that it
//! has closed still had to say.

use baton_scheduler::{Effect as Order, Input};

use super::World;

/// One input on its way to one conductor.
#[derive(Debug)]
pub(crate) struct Letter {
    pub router: u32,
    /// The attempt that it reports on: slot, and the request's turn at that time.
    pub about: Option<(u32, u64)>,
    /// Whether the other routers hear of it, too.
    pub shared: bool,
    pub input: Input,
}

impl World {
    /// One conductor will hear this.
    pub(crate) fn tell(&mut self, router: u32, input: Input) {
        self.inbox.push_back(Letter { router, about: None, shared: false, input });
    }

    /// One conductor will hear this, and its peers later.
    pub(crate) fn tell_of(&mut self, router: u32, input: Input) {
        self.inbox.push_back(Letter { router, about: None, shared: true, input });
    }

    /// Every conductor will hear this.
    pub(crate) fn tell_all(&mut self, input: &Input) {
        for router in 0..self.setup.routers {
            self.tell(router, input.clone());
        }
    }

    /// The conductor in charge of a request will hear this, and its peers later, unless the
    /// attempt is over by then.
    pub(crate) fn report(&mut self, slot: u32, input: Input) {
        let live = &self.live[slot as usize];
        let (router, about) = (live.router, Some((slot, live.turn)));
        let shared = !matches!(input, Input::FetchFinished { .. });
        self.inbox.push_back(Letter { router, about, shared, input });
    }

    /// Somebody may be let in at a node.
    pub(crate) fn unlatch(&mut self, at: u32) {
        let node = &mut self.nodes[at as usize];
        if !node.ajar {
            node.ajar = true;
            self.ajar.push_back(at);
        }
    }

    /// Opens doors and delivers letters until nothing is left to do at this moment.
    pub(crate) fn deliver(&mut self) {
        loop {
            if let Some(at) = self.ajar.pop_front() {
                self.nodes[at as usize].ajar = false;
                self.look_at_shared(at);
                self.door(at);
            } else if let Some(letter) = self.inbox.pop_front() {
                self.read(letter);
            } else {
                return;
            }
        }
    }

    /// Steps one conductor and carries its orders out.
    fn read(&mut self, letter: Letter) {
        let Letter { router, about, shared, input } = letter;
        let current =
            |(slot, turn): (u32, u64)| self.live.get(slot as usize).is_some_and(|l| l.used && l.turn == turn);
        if !about.is_none_or(current) {
            return;
        }
        if shared && self.setup.routers > 1 {
            self.tell_peers(router, &input);
        }
        let mut orders: Vec<Order> = std::mem::take(&mut self.orders);
        self.conductors[router as usize].step(self.now_us, input, &mut orders);
        for order in orders.drain(..) {
            self.oracle.ordered(&order);
            self.carry_out(router, order);
        }
        self.orders = orders;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_legs::Leg;
    use baton_scheduler::SchedulerConfig;

    use super::*;
    use crate::setup::Setup;
    use crate::workload::{Arrival, Workload};

    struct One(Option<Arrival>);

    impl Workload for One {
        fn next(&mut self) -> Option<Arrival> {
            self.0.take()
        }
        fn span_us(&self) -> u64 {
            1_000_000
        }
        fn len(&self) -> u64 {
            1
        }
    }

    #[test]
    fn a_report_about_an_attempt_that_was_given_up_is_dropped() {
        let profile = Arc::new(crate::profiles::named("llama3-70b-8xa100").unwrap());
        let setup = Setup::disaggregated(2, 2, &profile, SchedulerConfig::default());
        let arrival = Arrival {
            at_us: 0,
            prompt_tokens: 8000,
            output_tokens: 5,
            ids: (0..16).collect(),
            class: 0,
            tenant: 0,
            cancel_after_us: None,
        };
        let mut world = World::new(setup, Box::new(One(Some(arrival)))).unwrap();
        let computes = |world: &World| matches!(world.prefill_leg(0), Some(Leg::Computing(_)));
        while world.live.is_empty() || !computes(&world) {
            assert!(world.advance().unwrap());
        }
        let (request, turn) = (world.live[0].id, world.live[0].turn);
        world.report(0, Input::HandoffFailed { request });
        world.live[0].turn += 1;
        world.deliver();
        assert!(computes(&world), "nobody was told to start over");
        world.live[0].turn = turn;
        world.report(0, Input::HandoffFailed { request });
        world.deliver();
        assert_ne!(world.live[0].turn, turn, "this attempt was given up");
        world.run().unwrap();
    }
}
