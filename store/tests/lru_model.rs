//! Exact equality with a naive store: ordered vectors and plain recursion, under `Lru` with every
//! offload mode. It follows the documented order and nothing of the real structures.

mod history;

use baton_store::{Effect, Eviction, Input, Offload, Store, StoreConfig};
use baton_types::{BlockKey, RequestId};
use history::{Op, chain, config, ops};
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Slot {
    Empty,
    Filling,
    Ready,
}
use Slot::{Empty, Filling, Ready};

type Key = BlockKey;

struct Node {
    parent: Option<Key>,
    slots: [Slot; 3],
    pins: u32,
    touches: u32,
    /// Which copy down is under way; a new one has a new number.
    copying: u64,
    born: u64,
}

#[derive(Default)]
struct Holder {
    chain: Vec<Key>,
    room: u64,
    loads: Vec<Vec<Key>>,
    reads: bool,
}

/// The naive store. Per tier, `order` is oldest first; `condemned` stands before it in line.
struct Model {
    config: StoreConfig,
    caps: [u64; 3],
    nodes: BTreeMap<Key, Node>,
    order: [Vec<Key>; 3],
    condemned: [Vec<Key>; 3],
    holders: BTreeMap<u64, Holder>,
    tickets: BTreeMap<u64, (usize, Vec<(Key, u64)>)>,
    outgoing: [Vec<(Key, u64)>; 3],
    counter: u64,
    next_ticket: u64,
}

impl Model {
    fn new(config: &StoreConfig) -> Self {
        Self {
            caps: [config.hbm_blocks, config.dram_blocks, config.ssd_blocks],
            config: config.clone(),
            nodes: BTreeMap::new(),
            order: Default::default(),
            condemned: Default::default(),
            holders: BTreeMap::new(),
            tickets: BTreeMap::new(),
            outgoing: Default::default(),
            counter: 0,
            next_ticket: 0,
        }
    }

    fn next(&self, tier: usize) -> Option<usize> {
        let next = (tier + 1..3).find(|&slower| self.caps[slower] > 0);
        next.filter(|_| self.config.offload != Offload::Off)
    }

    fn free(&self, tier: usize) -> u64 {
        let used = self.nodes.values().filter(|n| n.slots[tier] == Ready).count() as u64;
        let reserved = if tier == 0 {
            let filling = self.nodes.values().filter(|n| n.slots[0] == Filling).count() as u64;
            filling + self.holders.values().map(|h| h.room).sum::<u64>()
        } else {
            let under_way: usize = self.tickets.values().filter(|t| t.0 == tier).map(|t| t.1.len()).sum();
            let chosen: usize =
                (0..3).filter(|&f| self.next(f) == Some(tier)).map(|f| self.outgoing[f].len()).sum();
            (under_way + chosen) as u64
        };
        self.caps[tier] - used - reserved
    }

    fn node(&mut self, key: Key) -> &mut Node {
        self.nodes.get_mut(&key).expect("asked for by key")
    }

    fn fastest(&self, key: Key) -> usize {
        let slots = self.nodes[&key].slots;
        if slots[0] != Empty { 0 } else { (1..3).find(|&t| slots[t] == Ready).unwrap_or(3) }
    }

    fn lift(&mut self, key: Key) {
        for tier in 0..3 {
            self.order[tier].retain(|&k| k != key);
            self.condemned[tier].retain(|&k| k != key);
        }
    }

    fn children(&self, key: Key) -> Vec<Key> {
        let mut children: Vec<_> = self.nodes.iter().filter(|(_, n)| n.parent == Some(key)).collect();
        children.sort_by_key(|(_, n)| std::cmp::Reverse(n.born));
        children.into_iter().map(|(&k, _)| k).collect()
    }

    /// `key` keeps only copies in `floor` and slower.
    fn sink(&mut self, key: Key, floor: usize) {
        let stays = (floor..3).find(|&t| t > 0 && self.nodes[&key].slots[t] == Ready).unwrap_or(3);
        for child in self.children(key) {
            if stays == 3 || self.fastest(child) < stays {
                self.sink(child, stays);
            }
        }
        for tier in 0..floor.min(3) {
            self.empty(tier, key);
        }
        if stays == 3 {
            self.lift(key);
            self.nodes.remove(&key);
        }
    }

    fn empty(&mut self, tier: usize, key: Key) {
        let next = self.next(tier);
        let node = self.node(key);
        if node.slots[tier] == Empty || (tier > 0 && node.slots[tier] == Filling) {
            return;
        }
        if let Some(next) = next
            && node.slots[next] == Filling
        {
            node.slots[next] = Empty;
            node.copying = 0;
        }
        node.slots[tier] = Empty;
        self.order[tier].retain(|&k| k != key);
        self.condemned[tier].retain(|&k| k != key);
        let fastest = self.fastest(key);
        if fastest > tier
            && fastest < 3
            && (self.order[fastest].contains(&key) || self.condemned[fastest].contains(&key))
        {
            self.condemned[fastest].retain(|&k| k != key);
            self.order[fastest].retain(|&k| k != key);
            self.order[fastest].push(key);
        }
    }

    fn make_room(&mut self, tier: usize, slots: u64) -> bool {
        while self.free(tier) < slots {
            let Some(&victim) = self.condemned[tier].first().or(self.order[tier].first()) else {
                return false;
            };
            if self.fastest(victim) == tier {
                self.sink(victim, tier + 1);
            } else {
                self.empty(tier, victim);
            }
        }
        true
    }

    fn wants_copy(&self, from: usize, to: usize, key: Key) -> bool {
        self.nodes.get(&key).is_some_and(|n| {
            n.slots[from] == Ready
                && n.slots[to] == Empty
                && (to != 2 || n.touches >= 2 || !self.config.ssd_second_touch)
        })
    }

    fn start_copy(&mut self, from: usize, key: Key) {
        let Some(to) = self.next(from) else { return };
        if self.wants_copy(from, to, key) && self.make_room(to, 1) {
            self.counter += 1;
            let copy = self.counter;
            let node = self.node(key);
            node.slots[to] = Filling;
            node.copying = copy;
            self.outgoing[from].push((key, copy));
        }
    }

    fn copy_down(&mut self, from: usize, keys: &[Key]) {
        let Some(to) = self.next(from).filter(|_| self.config.offload == Offload::WriteThrough) else {
            return;
        };
        let wanted = keys.iter().filter(|&&k| self.wants_copy(from, to, k)).count() as u64;
        if wanted == 0 {
            return;
        }
        let mut granted = if self.make_room(to, wanted) { wanted } else { self.free(to) };
        let first = self.outgoing[from].len();
        for &key in keys {
            if granted > 0 && self.wants_copy(from, to, key) {
                granted -= 1;
                self.start_copy(from, key);
            }
        }
        self.outgoing[from][first..].reverse();
    }

    fn end_step(&mut self) {
        for tier in 0..2 {
            let Some(to) = self.next(tier) else { continue };
            let ahead = self.caps[tier].div_ceil(8);
            while self.config.offload == Offload::OnEvict
                && self.free(tier) + (self.condemned[tier].len() as u64) < ahead
                && !self.order[tier].is_empty()
            {
                let key = self.order[tier].remove(0);
                self.condemned[tier].push(key);
                if self.fastest(key) == tier && self.wants_copy(tier, to, key) {
                    self.start_copy(tier, key);
                }
            }
        }
        for tier in 0..2 {
            let Some(to) = self.next(tier) else { continue };
            let mut chosen = std::mem::take(&mut self.outgoing[tier]);
            chosen.retain(|(key, copy)| self.nodes.get(key).is_some_and(|n| n.copying == *copy));
            if !chosen.is_empty() {
                self.tickets.insert(self.next_ticket, (to, chosen));
                self.next_ticket += 1;
            }
        }
    }

    fn open(&mut self, owner: u64, chain: &[Key], room: u64) {
        if self.holders.contains_key(&owner) {
            return;
        }
        let known: Vec<Key> = chain.iter().copied().take_while(|k| self.nodes.contains_key(k)).collect();
        let loads: Vec<Key> = known.iter().copied().filter(|k| self.nodes[k].slots[0] == Empty).collect();
        let resting = |m: &Self| (m.order[0].len() + m.condemned[0].len()) as u64;
        let pinned_now =
            known.iter().filter(|k| self.nodes[k].slots[0] == Ready && self.nodes[k].pins == 0).count();
        let needed = (loads.len() + chain.len() - known.len()) as u64 + room;
        if needed > self.free(0) + resting(self) - pinned_now as u64 {
            return;
        }
        self.pin(&known);
        assert!(self.make_room(0, needed));
        for key in &loads {
            self.node(*key).slots[0] = Filling;
        }
        let mut parent = known.last().copied();
        for &key in &chain[known.len()..] {
            self.counter += 1;
            let slots = [Filling, Empty, Empty];
            self.nodes
                .insert(key, Node { parent, slots, pins: 1, touches: 1, copying: 0, born: self.counter });
            parent = Some(key);
        }
        let loads = if loads.is_empty() { vec![] } else { vec![loads] };
        self.holders.insert(owner, Holder { chain: chain.to_vec(), room, loads, reads: false });
    }

    fn read(&mut self, owner: u64, chain: &[Key]) {
        if self.holders.contains_key(&owner) {
            return;
        }
        let readable = |k: &Key| self.nodes.get(k).is_some_and(|n| n.slots.contains(&Ready));
        let known: Vec<Key> = chain.iter().copied().take_while(readable).collect();
        self.pin(&known);
        self.holders.insert(owner, Holder { chain: known, reads: true, ..Holder::default() });
    }

    fn pin(&mut self, keys: &[Key]) {
        for &key in keys {
            self.lift(key);
            let node = self.node(key);
            node.pins += 1;
            node.touches += 1;
        }
    }

    fn settle(&mut self, keys: &[Key]) {
        let filling: Vec<Key> = keys.iter().copied().filter(|k| self.nodes[k].slots[0] == Filling).collect();
        for key in &filling {
            self.node(*key).slots[0] = Ready;
        }
        self.copy_down(0, &filling);
    }

    fn close(&mut self, owner: u64) {
        let Some(holder) = self.holders.remove(&owner) else { return };
        let mut rested = Vec::new();
        for &key in holder.chain.iter().rev() {
            let node = self.node(key);
            node.pins -= 1;
            if node.pins > 0 {
                continue;
            }
            if node.slots[0] == Filling {
                self.sink(key, 1);
            }
            if let Some(node) = self.nodes.get(&key) {
                let slots = node.slots;
                for (tier, slot) in slots.into_iter().enumerate() {
                    if slot == Ready {
                        self.order[tier].push(key);
                    }
                }
                rested.push(key);
            }
        }
        rested.reverse();
        self.copy_down(0, &rested);
        self.copy_down(1, &rested);
    }

    fn offload_done(&mut self, ticket: u64, ok: bool) {
        let Some((to, blocks)) = self.tickets.remove(&ticket) else { return };
        let mut arrived = Vec::new();
        for (key, copy) in blocks {
            let Some(node) = self.nodes.get_mut(&key).filter(|n| n.copying == copy) else { continue };
            node.copying = 0;
            node.slots[to] = if ok { Ready } else { Empty };
            if ok {
                arrived.push(key);
            }
        }
        for &key in &arrived {
            if self.nodes[&key].pins == 0 {
                self.order[to].push(key);
            }
        }
        arrived.reverse();
        self.copy_down(to, &arrived);
    }

    fn onboard_done(&mut self, owner: u64) {
        let Some(holder) = self.holders.get_mut(&owner) else { return };
        if !holder.loads.is_empty() {
            let run = holder.loads.remove(0);
            self.settle(&run);
        }
    }

    fn seal(&mut self, owner: u64, upto: usize) {
        let Some(holder) = self.holders.get(&owner).filter(|h| !h.reads) else { return };
        let run = holder.chain[..upto.min(holder.chain.len())].to_vec();
        self.settle(&run);
    }

    fn grow(&mut self, owner: u64, room: u64) {
        let resting = (self.order[0].len() + self.condemned[0].len()) as u64;
        let open = self.holders.get(&owner).is_some_and(|h| !h.reads);
        if open && room <= self.free(0) + resting {
            assert!(self.make_room(0, room));
            self.holders.get_mut(&owner).expect("asked before").room += room;
        }
    }
}

/// Both stores side by side.
struct Pair {
    store: Store,
    model: Model,
    tickets: Vec<u64>,
}

impl Pair {
    fn both(&mut self, input: Input<'_>, naive: impl FnOnce(&mut Model)) {
        let mut effects = Vec::new();
        self.store.step(0, input, &mut effects);
        for effect in effects {
            if let Effect::Offload { ticket, .. } = effect {
                self.tickets.push(ticket);
            }
        }
        naive(&mut self.model);
        self.model.end_step();
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Serve { owner, path, patient } => {
                self.run(&Op::Close { owner: *owner });
                self.run(&Op::Open { owner: *owner, path: path.clone(), room: 1 });
                if *patient {
                    self.answer_loads(*owner);
                }
                self.run(&Op::Seal { owner: *owner, upto: 9 });
                self.run(&Op::Close { owner: *owner });
            }
            Op::Open { owner, path, room } => {
                let (id, chain) = (RequestId(*owner), chain(path));
                let input = Input::Open { owner: id, chain: &chain, room_blocks: *room };
                self.both(input, |m| m.open(*owner, &chain, u64::from(*room)));
            }
            Op::Read { owner, path } => {
                let chain = chain(path);
                self.both(Input::Read { owner: RequestId(*owner), chain: &chain }, |m| {
                    m.read(*owner, &chain)
                });
            }
            Op::Seal { owner, upto } => {
                let input = Input::Seal { owner: RequestId(*owner), upto_blocks: *upto };
                self.both(input, |m| m.seal(*owner, *upto as usize));
            }
            Op::Grow { owner, room } => {
                let input = Input::GrowRoom { owner: RequestId(*owner), room_blocks: *room };
                self.both(input, |m| m.grow(*owner, u64::from(*room)));
            }
            Op::Close { owner } => self.close(*owner),
            Op::Onboarded { pick, ok: true } => {
                let owner = *pick as u64;
                self.both(Input::OnboardDone { owner: RequestId(owner), ok: true }, |m| {
                    m.onboard_done(owner)
                });
            }
            Op::Offloaded { pick, ok } if !self.tickets.is_empty() => {
                let ticket = self.tickets.remove(pick % self.tickets.len());
                self.both(Input::OffloadDone { ticket, ok: *ok }, |m| m.offload_done(ticket, *ok));
            }
            Op::Onboarded { .. } | Op::Offloaded { .. } | Op::Clear => {}
        }
    }

    fn answer_loads(&mut self, owner: u64) {
        while self.model.holders.get(&owner).is_some_and(|h| !h.loads.is_empty()) {
            self.both(Input::OnboardDone { owner: RequestId(owner), ok: true }, |m| m.onboard_done(owner));
        }
    }

    /// Loads are answered before the close: who inherits them is another file's concern.
    fn close(&mut self, owner: u64) {
        self.answer_loads(owner);
        self.both(Input::Close { owner: RequestId(owner) }, |m| m.close(owner));
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        let snapshot = self.store.snapshot();
        let real: BTreeMap<Key, ([Slot; 3], u32)> = snapshot
            .blocks
            .iter()
            .map(|block| {
                let mut slots = [Empty; 3];
                block.readable_in.iter().for_each(|t| slots[t.index()] = Ready);
                block.filling_in.iter().for_each(|t| slots[t.index()] = Filling);
                (block.key, (slots, block.pins))
            })
            .collect();
        let naive = self.model.nodes.iter().map(|(&key, n)| (key, (n.slots, n.pins))).collect();
        prop_assert_eq!(real, naive);
        let under_way: Vec<u64> = self.model.tickets.keys().copied().collect();
        prop_assert_eq!(snapshot.offloads_under_way, under_way);
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn the_store_holds_exactly_what_the_naive_one_holds(config in config(), ops in ops(120)) {
        let config = StoreConfig { eviction: Eviction::Lru, ..config };
        let mut pair = Pair { store: Store::new(config.clone()).expect("valid"), model: Model::new(&config), tickets: vec![] };
        for op in &ops {
            pair.run(op);
            pair.compare()?;
        }
    }
}
