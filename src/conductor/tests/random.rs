//! Thousands of random steps: nodes that work, lie, fail, crash and come back, clients that come and go.
//! Whatever happens, each request ends once, its tokens are a prefix of the right answer, and each leg
//! that was opened is ended.

use std::collections::{BTreeMap, VecDeque};

use baton_router::Event;
use baton_types::{BlockKey, Rng, Role, Sampling};
use baton_wire::v1;
use baton_wire::v1::fact::Fact;
use tokio::sync::oneshot;

use super::bench::{Bench, fact_token, failure, prefilled, token};
use super::open_legs::Leg;
use crate::conductor::Question;
use crate::conductor::inbox::Message;

const NODES: [&str; 5] = ["p0", "p1", "d0", "d1", "b0"];
const STEPS: u32 = 2000;
/// Requests under way at most.
const MOST: usize = 12;

/// The progress of a node on a leg.
#[derive(Clone, Copy, Default)]
struct Progress {
    prefilled: bool,
    landed: bool,
    broken: bool,
}

struct Play {
    bench: Bench,
    rng: Rng,
    progress: BTreeMap<(String, u64, u32), Progress>,
    /// Legs as they once were: what they say later is out of date.
    former: VecDeque<Leg>,
    submitted: u32,
}

impl Play {
    async fn new(seed: u64) -> Self {
        let bench = Bench::tuned(&NODES, |config| {
            config.scheduler.local_prefill = seed.is_multiple_of(2);
            config.scheduler.seed = seed;
        })
        .await;
        let (progress, former) = (BTreeMap::new(), VecDeque::new());
        Self { bench, rng: Rng::new(seed), progress, former, submitted: 0 }
    }

    fn pick(&mut self, count: usize) -> Option<usize> {
        (count > 0).then(|| usize::try_from(self.rng.below(count as u64)).unwrap())
    }

    fn any_leg(&mut self) -> Option<Leg> {
        let at = self.pick(self.bench.open_legs.open.len())?;
        let leg = self.bench.open_legs.open.values().nth(at).cloned();
        if let Some(leg) = &leg {
            self.former.push_back(leg.clone());
            self.former.truncate(40);
        }
        leg
    }

    fn any_node(&mut self) -> Option<String> {
        let at = self.pick(self.bench.lines.len())?;
        self.bench.lines.keys().nth(at).cloned()
    }

    async fn step(&mut self) {
        match self.rng.below(100) {
            0..14 => self.submit().await,
            14..17 => self.leave().await,
            17..68 => self.work().await,
            68..78 => self.lie().await,
            78..82 => self.fail().await,
            82..84 => self.crash().await,
            84..89 => self.join().await,
            89..92 => self.news().await,
            92..97 => {
                let us = 1000 + self.rng.below(300_000);
                self.bench.wait_alive_us(us, &[]).await;
            }
            97 => self.time().await,
            _ => self.operate().await,
        }
    }

    async fn submit(&mut self) {
        if self.bench.clients.values().filter(|c| c.last.is_none() && c.ticket.is_some()).count() >= MOST {
            return;
        }
        self.submitted += 1;
        let name = format!("r{}", self.submitted);
        let max_tokens = 1 + u32::try_from(self.rng.below(6)).unwrap();
        let mut submission = Bench::submission(&name, Sampling { max_tokens, ..Sampling::default() });
        match self.rng.below(20) {
            0 => submission.class = Some("none".into()),
            1..4 => submission.timeout_us = Some(200_000 + self.rng.below(2_000_000)),
            4..6 => submission.tokens = (0..20_000).collect(),
            // A prompt that begins like others, whose blocks nodes may say that they have.
            6..14 => {
                let (family, blocks) = (self.rng.below(3), 1 + self.rng.below(100));
                submission.tokens = (0..u32::try_from(blocks * 16 + 5).unwrap()).collect();
                submission.chain = (0..blocks).map(|at| key_of(family, at)).collect();
            }
            _ => {}
        }
        self.bench.send(submission).await;
    }

    async fn leave(&mut self) {
        let here = self.bench.clients.values().filter(|c| c.ticket.is_some() && c.last.is_none());
        let names: Vec<String> = here.map(|c| c.name.clone()).collect();
        if let Some(at) = self.pick(names.len()) {
            self.bench.leave(&names[at]).await;
        }
    }

    /// A leg goes on as it should.
    async fn work(&mut self) {
        let Some(leg) = self.any_leg() else { return };
        self.work_on(&leg).await;
    }

    async fn work_on(&mut self, leg: &Leg) {
        let key = (leg.node.clone(), leg.request, leg.attempt);
        let done = self.progress.entry(key).or_default();
        if done.broken {
            return;
        }
        let most = self.bench.clients.get(&leg.name).map_or(2, |c| c.max_tokens);
        let last = |index: u32| if index + 1 == most { 2 } else { 0 };
        if let Some(answer) = &leg.answer {
            // The leg continues from the answer it got, and a connected client has at least as much.
            let told = self.bench.drawn(&leg.name);
            let index = u32::try_from(told.max(answer.len())).unwrap();
            self.bench.send_facts(leg, vec![token(&leg.name, index, last(index))]).await;
            if leg.name.starts_with("canary") && last(index) != 0 {
                self.bench.open_legs.finished(&leg.name);
            }
        } else if leg.prefills && leg.handoffs == 0 {
            let again = std::mem::replace(&mut done.prefilled, true);
            let index = leg.given();
            let first = token(&leg.name, index, last(index));
            if !again && self.rng.below(3) > 0 {
                let ok = self.rng.below(2) == 0;
                self.bench.send_facts(leg, vec![Fact::Fetch(ok), Fact::Fetch(!ok)]).await;
            }
            if !again {
                self.bench.send_facts(leg, vec![first, prefilled()]).await;
            }
            // It was placed again after its first token.
            if leg.name.starts_with("canary") && last(index) != 0 {
                self.bench.open_legs.finished(&leg.name);
            }
        } else if !leg.prefills && !std::mem::replace(&mut done.landed, true) {
            self.bench.send_facts(leg, vec![Fact::Handoff(true)]).await;
        }
    }

    /// Something that is wrong, late, or not the teller's to tell.
    async fn lie(&mut self) {
        let stale = self.rng.below(2) == 0;
        let leg = if stale { self.former.pop_front() } else { self.any_leg() };
        let Some(leg) = leg.filter(|leg| !leg.name.starts_with("canary")) else { return };
        let told = self.bench.drawn(&leg.name) as u32;
        let wrong = |index: u32| vec![fact_token(index, 7, (index % 3).cast_signed())];
        let about = (leg.request, leg.attempt);
        let open = self.bench.open_legs.open.get(&(leg.node.clone(), leg.request));
        let present = open.is_some_and(|open| open.attempt == leg.attempt);
        let (about, facts) = match self.rng.below(7) {
            // Another attempt.
            0 => ((about.0, about.1 + 1), vec![fact_token(told, 7, 2), prefilled(), Fact::Handoff(true)]),
            1 => ((about.0, about.1.wrapping_sub(1)), vec![fact_token(told, 7, 0), failure(true)]),
            // Another request.
            2 => ((u64::MAX - about.0, 1), vec![fact_token(0, 7, 2), failure(true)]),
            // A token that the client has, or that would leave a gap.
            3 => (about, wrong(told + 1)),
            4 if told > 0 => (about, wrong(told - 1)),
            // Whatever, from a leg that has been let go.
            _ if !present => (about, vec![fact_token(told, 7, 2), Fact::Handoff(false), failure(true)]),
            // A fact that only the other leg may report.
            _ if !leg.prefills && leg.answer.is_none() => (about, vec![fact_token(told, 7, 2), prefilled()]),
            _ if leg.prefills && leg.to.is_some() => (about, vec![Fact::Handoff(true)]),
            _ => return,
        };
        if self.bench.lines.contains_key(&leg.node) {
            self.bench.send_facts_as(&leg.node, about, facts).await;
        }
    }

    /// Reports the content of a node's cache, or a made-up one.
    async fn news(&mut self) {
        let Some(node) = self.any_node() else { return };
        let (family, from, blocks) = (self.rng.below(3), self.rng.below(4), self.rng.below(100));
        let name = |at| key_of(family, at).short().0;
        let parent = [None, Some(name(from.saturating_sub(1))), Some(family)];
        let change = v1::CacheChange {
            kind: [1, 1, 1, 1, 2, 3, 9][usize::try_from(self.rng.below(7)).unwrap()],
            parent: if from == 0 { None } else { parent[usize::try_from(self.rng.below(3)).unwrap()] },
            hashes: (from..from + blocks).map(name).collect(),
            tier: [1, 1, 2, 3, 0, 9][usize::try_from(self.rng.below(6)).unwrap()],
        };
        self.bench.send_facts_as(&node, (0, 0), vec![Fact::Cache(change), Fact::Replicated(true)]).await;
    }

    async fn fail(&mut self) {
        let Some(leg) = self.any_leg() else { return };
        let key = (leg.node.clone(), leg.request, leg.attempt);
        let (of_request, what) = (self.rng.below(12) == 0, self.rng.below(3));
        // A hand-off fails for the pair, not for the leg.
        self.progress.entry(key).or_default().broken = what > 0;
        let fact = if what == 0 { Fact::Handoff(false) } else { failure(of_request) };
        self.bench.send_facts(&leg, vec![fact]).await;
    }

    async fn crash(&mut self) {
        if let Some(node) = self.any_node() {
            self.bench.kill(&node).await;
        }
    }

    async fn join(&mut self) {
        let at = self.pick(NODES.len()).unwrap();
        let away = !self.bench.lines.contains_key(NODES[at]);
        // Now and then a node attaches again before its former life was seen to end.
        if away || self.rng.below(10) == 0 {
            self.bench.join(NODES[at]).await;
        }
    }

    /// A long time, in which one node may fall silent.
    async fn time(&mut self) {
        let us = 1_000_000 + self.rng.below(4_000_000);
        let silent = self.any_node().filter(|_| self.rng.below(2) == 0);
        let silent: Vec<&str> = silent.iter().map(String::as_str).collect();
        self.bench.wait_alive_us(us, &silent).await;
    }

    async fn operate(&mut self) {
        let Some(node) = self.any_node() else { return };
        let (reply, _answer) = oneshot::channel();
        let question = match self.rng.below(4) {
            0 => Question::Drain { node, drain: true, reply },
            1 => Question::Drain { node, drain: false, reply },
            2 => Question::Role { node, role: Role::Both, reply },
            _ => Question::Role { node: node.clone(), role: role_of(&node), reply },
        };
        self.bench.inbox.send(Message::Ask(question)).await;
        self.bench.pump().await;
    }

    /// Everybody works from now on, until nothing is left to do.
    async fn end(mut self) -> BTreeMap<&'static str, u32> {
        for node in NODES {
            self.bench.join(node).await;
        }
        for _ in 0..400 {
            let legs: Vec<Leg> = self.bench.open_legs.open.values().cloned().collect();
            for leg in &legs {
                if self.bench.open_legs.open.contains_key(&(leg.node.clone(), leg.request)) {
                    self.work_on(leg).await;
                }
            }
            self.bench.wait_alive_us(100_000, &[]).await;
            if self.bench.open_legs.open.is_empty() && self.bench.driver.sessions.is_empty() {
                break;
            }
        }
        self.bench.quiet();
        let mut ends = BTreeMap::new();
        for client in self.bench.clients.values() {
            let end = match &client.last {
                None => {
                    assert!(client.ticket.is_none(), "{} never came to an end", client.name);
                    "left"
                }
                Some(Event::Finished { .. }) => {
                    self.bench.ended_well(&client.name);
                    "finished"
                }
                Some(Event::Refused(refusal)) => {
                    assert!(client.tokens.is_empty() && !refusal.message.is_empty());
                    "refused"
                }
                Some(Event::Failed(fault)) => {
                    assert!(client.admitted && !fault.stage.is_empty(), "{fault:?}");
                    "failed"
                }
                Some(other) => panic!("{other:?} is no end"),
            };
            *ends.entry(end).or_default() += 1;
        }
        ends
    }
}

/// The key of a block of one of a few chains.
fn key_of(family: u64, at: u64) -> BlockKey {
    BlockKey(u128::from((family + 1) << 32 | at))
}

fn role_of(name: &str) -> Role {
    match name.as_bytes()[0] {
        b'p' => Role::Prefill,
        b'd' => Role::Decode,
        _ => Role::Both,
    }
}

#[tokio::test]
async fn whatever_nodes_and_clients_do_each_request_ends_once_and_nothing_is_held() {
    let mut all: BTreeMap<&str, u32> = BTreeMap::new();
    let mut fetches = 0;
    for seed in 1..=8 {
        let mut play = Play::new(seed).await;
        for _ in 0..STEPS {
            play.step().await;
        }
        fetches += play.bench.driver.core.stats().fetches;
        for (end, count) in play.end().await {
            *all.entry(end).or_default() += count;
        }
    }
    // The script is only worth something if it reaches every end.
    for end in ["finished", "refused", "failed", "left"] {
        assert!(all.get(end).is_some_and(|count| *count >= 10), "{all:?}");
    }
    assert!(fetches > 10, "{fetches} fetches");
}
