//! A test bench for a core: takes one input at a time, audits the core after each, and returns its effects.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use crate::Priority;
use crate::*;

/// A core and its time.
pub(crate) struct Bench {
    pub(crate) core: MoverCore,
    pub(crate) now_us: u64,
}

/// One slice that was ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Post {
    pub(crate) path: PathNumber,
    pub(crate) ticket: SliceTicket,
    pub(crate) batch: BatchId,
    pub(crate) bytes: u32,
}

/// A write of so many bytes to a peer, at the usual priority and without a notice.
pub(crate) fn write(batch: u64, peer: u32, bytes: u64) -> BatchRequest {
    BatchRequest {
        batch: BatchId(batch),
        peer: PeerNumber(peer),
        priority: Priority::Fetch,
        deadline_us: None,
        notice: false,
        ops: vec![Op { direction: Direction::Write, bytes, location: 0 }],
    }
}

/// So many rails, all alike.
pub(crate) fn rails(count: usize) -> MoverConfig {
    MoverConfig { rails: vec![RailSpec::default(); count], ..MoverConfig::default() }
}

impl Bench {
    /// A core that knows so many peers, numbered from 0, each over rails of these tiers.
    pub(crate) fn new(config: MoverConfig, peers: u32, tiers: &[u8]) -> Self {
        let mut bench = Self { core: MoverCore::new(config), now_us: 1_000 };
        for peer in 0..peers {
            assert_eq!(bench.know(peer, tiers), []);
        }
        bench
    }

    /// A bench with one peer, and one write of 1,000 bytes on its way over its only path.
    pub(crate) fn moving(config: MoverConfig) -> (Self, Post) {
        let mut bench = Self::new(config, 1, &[0]);
        let post = bench.start(write(1, 0, 1_000));
        (bench, post)
    }

    /// Submits what goes as one slice, opens the path that it asks for, and gives the slice.
    pub(crate) fn start(&mut self, request: BatchRequest) -> Post {
        let path = opens(&self.submit(request))[0];
        posts(&self.opened(path))[0]
    }

    pub(crate) fn feed(&mut self, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.core.step(self.now_us, input, &mut effects);
        self.core.check().unwrap();
        effects
    }

    /// Passes an input that the core must ignore: the core counts it and changes nothing else.
    pub(crate) fn ignores(&mut self, input: Input) {
        let mut before = self.core.snapshot();
        let what = alloc::format!("{input:?}");
        assert_eq!(self.feed(input), [], "{what}");
        before.stats.ignored_inputs += 1;
        assert_eq!(self.core.snapshot(), before, "{what}");
    }

    pub(crate) fn know(&mut self, peer: u32, tiers: &[u8]) -> Vec<Effect> {
        let route = |(rail, &tier)| Route { rail: RailNumber(rail), tier };
        let routes = (0..).zip(tiers).map(route).collect();
        self.feed(Input::PeerKnown { peer: PeerNumber(peer), routes })
    }

    pub(crate) fn submit(&mut self, request: BatchRequest) -> Vec<Effect> {
        self.feed(Input::Submit(request))
    }

    pub(crate) fn cancel(&mut self, batch: u64) -> Vec<Effect> {
        self.feed(Input::Cancel { batch: BatchId(batch) })
    }

    pub(crate) fn opened(&mut self, path: PathNumber) -> Vec<Effect> {
        self.feed(Input::PathOpened { path })
    }

    pub(crate) fn open_failed(&mut self, path: PathNumber, fault: Fault) -> Vec<Effect> {
        self.feed(Input::PathOpenFailed { path, fault })
    }

    pub(crate) fn broken(&mut self, path: PathNumber, fault: Fault) -> Vec<Effect> {
        self.feed(Input::PathBroken { path, fault })
    }

    pub(crate) fn closed(&mut self, path: PathNumber, end: PathEnd) -> Vec<Effect> {
        self.feed(Input::PathClosed { path, end })
    }

    pub(crate) fn done(&mut self, post: Post) -> Vec<Effect> {
        self.feed(Input::SliceDone { path: post.path, ticket: post.ticket })
    }

    pub(crate) fn failed(&mut self, path: PathNumber, ticket: SliceTicket, fault: Fault) -> Vec<Effect> {
        self.feed(Input::Failed { path, ticket, fault })
    }

    /// Lets time pass, stepping when the core asks for it, and gives all that it ordered.
    pub(crate) fn pass(&mut self, us: u64) -> Vec<Effect> {
        let (until_us, mut effects) = (self.now_us + us, Vec::new());
        while let Some(at_us) = self.core.next_deadline().filter(|&at_us| at_us <= until_us) {
            self.now_us = self.now_us.max(at_us);
            effects.extend(self.feed(Input::TimerFired));
        }
        self.now_us = until_us;
        effects
    }

    /// A sound world: does all that is asked for at once, and gives all that was.
    pub(crate) fn obey(&mut self, orders: Vec<Effect>) -> Vec<Effect> {
        let (mut orders, mut seen) = (VecDeque::from(orders), Vec::new());
        while let Some(order) = orders.pop_front() {
            if let Some(answer) = answer(&order) {
                orders.extend(self.feed(answer));
            }
            seen.push(order);
        }
        seen
    }

    /// How often a route of a peer has failed, and when it may be tried again.
    pub(crate) fn route(&self, peer: u32, rail: usize) -> (u32, u64) {
        let state = self.core.peers[self.core.peer_slots[&PeerNumber(peer)]].routes[rail];
        (state.fails, state.retry_at_us)
    }
}

fn answer(order: &Effect) -> Option<Input> {
    match *order {
        Effect::OpenPath { path, .. } => Some(Input::PathOpened { path }),
        Effect::ClosePath { path } => Some(Input::PathClosed { path, end: PathEnd::Fenced }),
        Effect::Post { path, ticket, .. } => Some(Input::SliceDone { path, ticket }),
        Effect::Probe { path, ticket } | Effect::Notify { path, ticket, .. } => {
            Some(Input::Notified { path, ticket })
        }
        _ => None,
    }
}

pub(crate) fn posts(effects: &[Effect]) -> Vec<Post> {
    let post = |effect: &Effect| match *effect {
        Effect::Post { path, ticket, batch, bytes, .. } => Some(Post { path, ticket, batch, bytes }),
        _ => None,
    };
    effects.iter().filter_map(post).collect()
}

pub(crate) fn opens(effects: &[Effect]) -> Vec<PathNumber> {
    let open = |effect: &Effect| match *effect {
        Effect::OpenPath { path, .. } => Some(path),
        _ => None,
    };
    effects.iter().filter_map(open).collect()
}

/// The peer and the rail of each path that is to be opened.
pub(crate) fn opens_to(effects: &[Effect]) -> Vec<(u32, u8)> {
    let open = |effect: &Effect| match *effect {
        Effect::OpenPath { peer, rail, .. } => Some((peer.0, rail.0)),
        _ => None,
    };
    effects.iter().filter_map(open).collect()
}

pub(crate) fn closes(effects: &[Effect]) -> Vec<PathNumber> {
    let close = |effect: &Effect| match *effect {
        Effect::ClosePath { path } => Some(path),
        _ => None,
    };
    effects.iter().filter_map(close).collect()
}

pub(crate) fn probes(effects: &[Effect]) -> Vec<SliceTicket> {
    let probe = |effect: &Effect| match *effect {
        Effect::Probe { ticket, .. } => Some(ticket),
        _ => None,
    };
    effects.iter().filter_map(probe).collect()
}

pub(crate) fn notices(effects: &[Effect]) -> Vec<(PathNumber, SliceTicket)> {
    let notice = |effect: &Effect| match *effect {
        Effect::Notify { path, ticket, .. } => Some((path, ticket)),
        _ => None,
    };
    effects.iter().filter_map(notice).collect()
}

/// How batches ended: the name, what failed if one did, and whether the peer's side is fenced.
pub(crate) fn ends(effects: &[Effect]) -> Vec<(u64, &'static str, Option<Failure>, bool)> {
    let end = |effect: &Effect| match *effect {
        Effect::Done { batch, .. } => Some((batch.0, "done", None, true)),
        Effect::Failed { batch, failure, remote_fenced } => {
            Some((batch.0, "failed", Some(failure), remote_fenced))
        }
        Effect::Cancelled { batch, remote_fenced } => Some((batch.0, "cancelled", None, remote_fenced)),
        _ => None,
    };
    effects.iter().filter_map(end).collect()
}
