//! An account of every order, kept beside the driver: each leg that was opened on a node ends once.

use std::collections::BTreeMap;

use baton_router::{Event, SubmissionStream};
use baton_wire::v1;
use baton_wire::v1::order::Order;

/// A leg of a request on a node, as the orders tell.
#[derive(Clone, Debug)]
pub(super) struct Leg {
    pub node: String,
    pub request: u64,
    pub attempt: u32,
    /// The client's name of the request.
    pub name: String,
    pub work: v1::Work,
    /// Where its KV shall go; `None` for a decode leg and for a local decode.
    pub to: Option<v1::Peer>,
    pub prefills: bool,
    /// The answer so far with which the conductor ordered this leg to decode.
    pub answer: Option<Vec<u32>>,
    /// The transfer parameters of the KV that its engine may fetch.
    pub taken: Option<Vec<u8>>,
    /// How often the conductor ordered another hand-off.
    pub handoffs: u32,
    /// The leg drew its last token before the conductor ordered it to decode here. It ends by itself after its prefill.
    pub over: bool,
}

impl Leg {
    /// Answer tokens that it was started with.
    pub(super) fn given(&self) -> u32 {
        self.work.token_count - self.work.prompt_tokens
    }
}

/// Legs that are open, by node and request.
#[derive(Default)]
pub(super) struct OpenLegs {
    pub open: BTreeMap<(String, u64), Leg>,
    pub names: BTreeMap<u64, String>,
    /// Every order, in words, for a failed test.
    pub log: Vec<String>,
    pub releases: u64,
    /// KV that was to be thrown away, and where.
    pub discards: Vec<(String, Vec<u8>)>,
}

impl OpenLegs {
    fn opens(&mut self, node: &str, leg: Leg) {
        self.names.insert(leg.request, leg.name.clone());
        let before = self.open.insert((node.to_owned(), leg.request), leg);
        assert!(
            before.as_ref().is_none_or(|leg| leg.over),
            "{node} is given again what it has not let go: {before:?}\n{:#?}",
            self.log
        );
    }

    /// Takes in an order to a node.
    pub(super) fn ordered(&mut self, node: &str, order: v1::Order) {
        let (request, attempt) = (order.request, order.attempt);
        let Some(what) = order.order else { panic!("an order of nothing to {node}") };
        let leg = |work: v1::Work, to, prefills| {
            let (node, name) = (node.to_owned(), work.request_id.clone());
            Leg {
                node,
                request,
                attempt,
                name,
                work,
                to,
                prefills,
                answer: None,
                taken: None,
                handoffs: 0,
                over: false,
            }
        };
        let key = (node.to_owned(), request);
        match what {
            Order::Prefill(order) => {
                self.note(node, request, attempt, "prefill");
                let work = order.work.unwrap();
                let told = baton_wire::unpack_tokens(&work.tokens).unwrap();
                assert_eq!((told.len(), work.chain.len()), (work.token_count as usize, 0), "{request}");
                self.opens(node, leg(work, order.decode, true));
            }
            Order::Expect(order) => {
                self.note(node, request, attempt, "expect");
                let work = order.work.unwrap();
                let told = !work.tokens.is_empty();
                assert_eq!(told, node.ends_with('x'), "its tokens come with the KV, unless engines move it");
                self.opens(node, leg(work, None, false));
            }
            Order::StartDecode(start) => {
                self.note(node, request, attempt, "decode");
                let open = self.open.get_mut(&key).unwrap_or_else(|| panic!("{node} has no leg to decode"));
                assert_eq!((open.attempt, &open.answer), (attempt, &None), "{node}: a decode out of turn");
                open.answer = Some(start.answer);
                // Its KV has moved: the first leg ended by itself.
                self.open.retain(|at, _| at.1 != request || at.0 == *node);
            }
            Order::Handoff(order) => {
                self.note(node, request, attempt, "handoff");
                let open = self.open.get_mut(&key).unwrap_or_else(|| panic!("{node} has no KV to hand off"));
                assert!(open.prefills, "{node} did not prefill what it shall hand off");
                (open.attempt, open.to) = (attempt, order.to);
                open.handoffs += 1;
            }
            Order::Release(_) => {
                self.note(node, request, attempt, "release");
                self.releases += 1;
                let open = self.open.remove(&key);
                assert!(open.is_some(), "{node} is told twice to let {request} go\n{:#?}", self.log);
            }
            Order::Take(order) => {
                self.note(node, request, attempt, "take");
                let open = self.open.get_mut(&key).unwrap_or_else(|| panic!("{node} has no leg to take KV"));
                assert_eq!((open.attempt, open.prefills, &open.taken), (attempt, false, &None), "{node}");
                open.taken = Some(order.transfer.to_vec());
            }
            Order::Taken(_) => {
                self.note(node, request, attempt, "taken");
                assert!(node.ends_with('x'), "{node} offers nothing");
            }
            Order::Discard(loan) => {
                self.note(node, request, attempt, "discard");
                self.discards.push((node.to_owned(), loan.transfer.to_vec()));
            }
            Order::Replicate(_) => {}
        }
    }

    fn note(&mut self, node: &str, request: u64, attempt: u32, what: &str) {
        self.log.push(format!("{node}: {what} {request}.{attempt}"));
    }

    /// Records that a life of a node ended: it holds no legs any longer.
    pub(super) fn lost(&mut self, node: &str) {
        self.log.push(format!("{node} is lost"));
        self.open.retain(|at, _| at.0 != node);
    }

    /// Records that a client has its whole answer. A leg that decoded it ends by itself, and other legs get a release.
    pub(super) fn finished(&mut self, name: &str) {
        self.open.retain(|_, leg| leg.name != name || leg.answer.is_none());
        let local = |leg: &&mut Leg| leg.name == name && leg.prefills && leg.to.is_none();
        self.open.values_mut().filter(local).for_each(|leg| leg.over = true);
    }
}

/// The token that a client must receive: token `index` of the answer of request `name`.
pub(super) fn token_of(name: &str, index: u32) -> u32 {
    let salt: u32 = name.bytes().map(u32::from).sum();
    1000 + salt % 50 * 100 + index
}

/// A client and the events it received. Every event is checked as it arrives.
pub(super) struct Client {
    pub name: String,
    pub ticket: Option<SubmissionStream>,
    pub max_tokens: u32,
    pub tokens: Vec<u32>,
    pub admitted: bool,
    pub logprobs: u32,
    pub last: Option<Event>,
}

impl Client {
    pub(super) fn new(name: &str, ticket: SubmissionStream, max_tokens: u32) -> Self {
        let (tokens, ticket) = (Vec::new(), Some(ticket));
        Self { name: name.into(), ticket, max_tokens, tokens, admitted: false, logprobs: 0, last: None }
    }

    /// Reads what has come. True: its answer is complete now.
    pub(super) fn read(&mut self) -> bool {
        let had = self.last.is_some();
        let Some(mut ticket) = self.ticket.take() else { return false };
        while let Ok(event) = ticket.events.try_recv() {
            self.apply(event);
        }
        self.ticket = Some(ticket);
        !had && matches!(self.last, Some(Event::Finished { .. }))
    }

    fn apply(&mut self, event: Event) {
        let name = &self.name;
        assert!(self.last.is_none(), "{name} is told {event:?} after its end");
        match &event {
            Event::Admitted { .. } => {
                assert!(!self.admitted, "{name} is let in twice");
                self.admitted = true;
            }
            Event::PromptLogprobs(_) => {
                assert!(self.admitted && self.tokens.is_empty());
                self.logprobs += 1;
                assert_eq!(self.logprobs, 1, "{name} has its prompt's logprobs twice");
            }
            Event::Token { token, .. } => {
                let index = u32::try_from(self.tokens.len()).unwrap();
                assert!(self.admitted && index < self.max_tokens, "{name} is told too much");
                assert_eq!(*token, token_of(name, index), "{name}: token {index}");
                self.tokens.push(*token);
            }
            Event::Finished { .. } => assert!(self.admitted && !self.tokens.is_empty()),
            Event::Refused(_) | Event::Failed(_) => {}
        }
        if matches!(event, Event::Finished { .. } | Event::Refused(_) | Event::Failed(_)) {
            self.last = Some(event);
        }
    }

    /// Status and stage, or reason, of a last event that is not an answer.
    pub(super) fn trouble(&self) -> (u16, String, String) {
        match &self.last {
            Some(Event::Refused(r)) => (r.status, r.reason.to_string(), r.message.to_string()),
            Some(Event::Failed(f)) => (f.status, f.stage.to_string(), f.message.to_string()),
            other => panic!("{} came to {other:?} after {} tokens", self.name, self.tokens.len()),
        }
    }
}
