//! The queue of inputs for the conductors. The world delivers them in order, after the current event.
//!
//! The world carries out all orders of one step before it delivers the next input. Pairs drop a
//! report about an attempt that was given up in the meantime, as they do in a live router.

use baton_legs::pairs::{Arrival, Core, Effect, EmittedTokens, Fact, Pairs};
use baton_scheduler::{Conductor, Effect as Order, Input, Request};
use baton_types::{Epoch, InstanceId, RequestId};

use super::World;
use super::node::Node;
use super::requests::LiveRequest;
use crate::oracle::Oracle;
use crate::setup::Setup;

/// An input on its way to one conductor.
#[derive(Debug)]
pub(crate) struct RoutedInput {
    pub router: u32,
    pub input: ConductorInput,
}

/// An input of a conductor.
#[derive(Clone, Debug)]
pub enum ConductorInput {
    /// A fact that is not about one of its own requests.
    Fact(Input),
    /// A request arrived.
    Arrived(Box<Request>),
    /// The client of a request left.
    Left(RequestId),
    /// A node reports a fact about a leg: request, attempt, instance.
    Leg((RequestId, u32, InstanceId), Fact),
    /// This many tokens of a request's answer have left by now.
    Emitted(EmittedTokens),
    /// All have, with this TBT, µs.
    Answered(EmittedTokens, u64),
    /// A node died.
    Lost(InstanceId, Epoch),
    /// The next deadline of its pairs has come.
    Woken,
}

/// One input of a conductor, with the effects that its pairs returned.
#[derive(Clone, Debug)]
pub struct Step {
    /// When, µs.
    pub now_us: u64,
    /// The input.
    pub input: ConductorInput,
    /// The effects, in order.
    pub effects: Vec<Effect>,
}

/// The pairs' interface to the conductor and to the world.
struct ModelledCore<'a> {
    now_us: u64,
    conductor: &'a mut Conductor,
    oracle: &'a mut Oracle,
    live: &'a [LiveRequest],
    nodes: &'a [Node],
    setup: &'a Setup,
    /// The request that has just arrived.
    arrived: Option<Box<Request>>,
}

impl ModelledCore<'_> {
    fn live(&self, request: RequestId) -> Option<&LiveRequest> {
        #[expect(clippy::cast_possible_truncation, reason = "the low half is the slot")]
        let slot = request.0 as u32;
        self.live.get(slot as usize).filter(|live| live.used && live.id == request)
    }
}

impl Core for ModelledCore<'_> {
    fn step(&mut self, now_us: u64, input: Input, orders: &mut Vec<Order>) {
        self.conductor.step(now_us, input, orders);
        orders.iter().for_each(|order| self.oracle.ordered(order));
    }

    fn request(&mut self, request: RequestId, emitted_tokens: u32) -> Option<Request> {
        if let Some(arrived) = self.arrived.take() {
            return Some(*arrived);
        }
        let live = self.live(request)?;
        let foresees = self.setup.scheduler.policy.foresees();
        let known_output_tokens = foresees.then_some(live.output_tokens);
        Some(Request { emitted_tokens, known_output_tokens, ..live.request() })
    }

    fn decodes_at_us(&self, request: RequestId) -> Option<u64> {
        self.conductor.decodes_at_us(request)
    }

    fn handoff_us(&self, request: RequestId) -> u64 {
        self.conductor.handoff_us(request).unwrap_or(0)
    }

    /// The models of engines never stall: one that decodes has just drawn a token.
    fn last_token_us(&self, request: RequestId) -> u64 {
        self.live(request).map_or(0, |live| {
            let node = &self.nodes[live.decode as usize];
            #[expect(clippy::cast_possible_truncation, reason = "the low half is the slot")]
            let decodes = node.alive && node.engine.holds(request.0 as u32).1;
            if decodes { self.now_us } else { live.last_token_us }
        })
    }

    fn moves_kv(&self, _: InstanceId) -> bool {
        false
    }

    fn can_serve(&self) -> bool {
        self.conductor.can_serve()
    }

    fn prefills(&self) -> usize {
        self.conductor.prefills()
    }
}

impl World {
    /// Queues an input for one conductor.
    pub(crate) fn send(&mut self, router: u32, input: ConductorInput) {
        self.inbox.push_back(RoutedInput { router, input });
    }

    /// Queues an input for every conductor.
    pub(crate) fn send_to_all(&mut self, input: &Input) {
        for router in 0..self.setup.routers {
            self.send(router, ConductorInput::Fact(input.clone()));
        }
    }

    /// Queues a node's report about a request's leg for the conductor in charge. The pairs drop it if the
    /// attempt is over by then.
    pub(crate) fn report(&mut self, slot: u32, at: u32, fact: Fact) {
        let live = &self.live[slot as usize];
        let (router, about) = (live.router, (live.id, live.attempt, InstanceId(at)));
        self.send(router, ConductorInput::Leg(about, fact));
    }

    /// Marks a node that may be able to admit a waiting request.
    pub(crate) fn mark_admittable(&mut self, at: u32) {
        let node = &mut self.nodes[at as usize];
        if !node.admittable {
            node.admittable = true;
            self.admittable.push_back(at);
        }
    }

    /// Admits waiting requests and delivers queued inputs until nothing is left to do at this moment.
    pub(crate) fn deliver(&mut self) {
        loop {
            if let Some(at) = self.admittable.pop_front() {
                self.nodes[at as usize].admittable = false;
                self.look_at_shared(at);
                self.admit_waiting(at);
            } else if let Some(routed) = self.inbox.pop_front() {
                self.read(routed);
            } else {
                return;
            }
        }
    }

    /// Steps one conductor and carries its orders out.
    fn read(&mut self, RoutedInput { router, input }: RoutedInput) {
        let (at, now_us) = (router as usize, self.now_us);
        let mut effects: Vec<Effect> = std::mem::take(&mut self.pair_effects);
        let recorded = self.schedule.is_some().then(|| input.clone());
        let mut core = ModelledCore {
            now_us,
            conductor: &mut self.conductors[at],
            oracle: &mut self.oracle,
            live: &self.live,
            nodes: &self.nodes,
            setup: &self.setup,
            arrived: None,
        };
        let pairs: &mut Pairs = &mut self.pairs[at];
        match input {
            ConductorInput::Fact(input) => pairs.step(now_us, input, &mut core, &mut effects),
            ConductorInput::Arrived(asked) => {
                let arrival = Arrival {
                    request: asked.id,
                    class: asked.class,
                    objectives: asked.objectives,
                    time_limit_us: u64::MAX,
                    asked_tokens: asked.max_output_tokens.unwrap_or(u32::MAX),
                };
                core.arrived = Some(asked);
                pairs.arrive(now_us, arrival, &mut core, &mut effects);
            }
            ConductorInput::Left(request) => pairs.cancel(now_us, request, &mut core, &mut effects),
            ConductorInput::Leg(about, fact) => {
                _ = pairs.on_fact(now_us, (about, fact), &mut core, &mut effects)
            }
            ConductorInput::Emitted(emitted) => {
                pairs.emitted(now_us, emitted, &mut core, &mut effects);
            }
            ConductorInput::Answered(emitted, tbt_us) => {
                pairs.emitted(now_us, emitted, &mut core, &mut effects);
                pairs.complete(now_us, (emitted.request, tbt_us), &mut core, &mut effects);
            }
            ConductorInput::Lost(instance, epoch) => {
                pairs.lost(now_us, (instance, epoch, true), &mut core, &mut effects);
            }
            ConductorInput::Woken => {
                pairs.expire(now_us, &mut core, &mut effects);
                pairs.try_parked(now_us, &mut core, &mut effects);
            }
        }
        if let Some((schedule, recorded)) = self.schedule.as_mut().zip(recorded) {
            schedule.push(Step { now_us, input: recorded, effects: effects.clone() });
        }
        for effect in effects.drain(..) {
            self.carry_out(router, effect);
        }
        self.pair_effects = effects;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_legs::Leg;
    use baton_scheduler::SchedulerConfig;
    use baton_types::RequestObjectives;

    use super::*;
    use crate::setup::Setup;
    use crate::workload::{Arrival, Workload};

    struct SingleArrival(Option<Arrival>);

    impl Workload for SingleArrival {
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
            objectives: RequestObjectives::default(),
            tenant: 0,
            cancel_after_us: None,
        };
        let mut world = World::new(setup, Box::new(SingleArrival(Some(arrival)))).unwrap();
        let computes = |world: &World| matches!(world.prefill_leg(0), Some(Leg::Computing(_)));
        while world.live.is_empty() || !computes(&world) {
            assert!(world.advance().unwrap());
        }
        let (attempt, decode) = (world.live[0].attempt, world.live[0].decode);
        world.report(0, decode, Fact::HandedOff { ok: false });
        world.live[0].attempt += 1;
        world.report(0, decode, Fact::HandedOff { ok: false });
        world.inbox.pop_front();
        world.deliver();
        assert!(computes(&world), "nobody was told to start over");
        world.live[0].attempt = attempt;
        world.report(0, decode, Fact::HandedOff { ok: false });
        world.deliver();
        assert_ne!(world.live[0].attempt, attempt, "this attempt was given up");
        world.run().unwrap();
    }
}
