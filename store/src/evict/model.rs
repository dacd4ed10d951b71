//! Orders by rank and age against a slow reference that sorts; and properties that hold for every order.

use super::{Eviction, Facts, RestingBlocks};
use crate::lifecycle::MAX_DEPTH_CLASS;
use alloc::vec::Vec;
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Op {
    Rest(u32, u8, u8),
    Lift(u32),
    Refresh(u32, u8, u8),
    Halve,
    Condemn,
    Evict,
}

fn op() -> impl Strategy<Value = Op> {
    let facts = || (0u32..16, prop_oneof![0u8..8, any::<u8>()], 0..=MAX_DEPTH_CLASS);
    prop_oneof![
        5 => facts().prop_map(|(block, frequency, depth)| Op::Rest(block, frequency, depth)),
        1 => (0u32..16).prop_map(Op::Lift),
        1 => facts().prop_map(|(block, frequency, depth)| Op::Refresh(block, frequency, depth)),
        1 => Just(Op::Halve),
        1 => Just(Op::Condemn),
        2 => Just(Op::Evict),
    ]
}

const fn facts(block: u32, frequency: u8, depth_class: u8) -> Facts {
    Facts { frequency, depth_class, hash: block as u64 + 1, list: frequency as usize }
}

/// Blocks by rank, then by when they joined it; condemned ones by when they were.
#[derive(Default)]
struct Naive {
    resting: Vec<(u32, usize, usize)>,
    condemned: Vec<u32>,
    joined: usize,
}

impl Naive {
    fn contains(&self, block: u32) -> bool {
        self.condemned.contains(&block) || self.resting.iter().any(|(other, ..)| *other == block)
    }

    fn rest(&mut self, block: u32, rank: usize) {
        self.joined += 1;
        self.resting.push((block, rank, self.joined));
    }

    fn lift(&mut self, block: u32) {
        self.resting.retain(|(other, ..)| *other != block);
        self.condemned.retain(|other| *other != block);
    }

    fn next(&self) -> Option<u32> {
        self.resting.iter().min_by_key(|(_, rank, joined)| (*rank, *joined)).map(|(block, ..)| *block)
    }

    /// Those of a rank that others join stay older than they, who keep their order.
    fn halve(&mut self, halved: impl Fn(usize) -> usize) {
        self.resting.sort_by_key(|(_, rank, joined)| (*rank, *joined));
        for (_, rank, joined) in &mut self.resting {
            self.joined += 1;
            (*rank, *joined) = (halved(*rank), self.joined);
        }
    }
}

/// How a policy ranks what it knows of a block; `None` where it is not by rank and age alone, as far as is known here.
fn rank(policy: Eviction, facts: Facts) -> Option<usize> {
    let (frequency, height) =
        (usize::from(facts.frequency), usize::from(MAX_DEPTH_CLASS - facts.depth_class));
    match policy {
        Eviction::Lru => Some(0),
        Eviction::Lfu => Some(frequency.min(59)),
        Eviction::LengthAware => Some(frequency.min(3) * 100 + height),
        _ => None,
    }
}

/// The rank after the counts are halved.
fn halved(policy: Eviction, rank: usize) -> usize {
    match policy {
        Eviction::Lfu => rank / 2,
        Eviction::LengthAware => rank / 200 * 100 + rank % 100,
        _ => rank,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn every_order_gives_up_who_rests_and_ranked_ones_the_lowest_and_oldest(
        at in 0..Eviction::ALL.len(), ops in proptest::collection::vec(op(), 0..120),
    ) {
        let policy = Eviction::ALL[at];
        let (mut resting, mut naive) = (RestingBlocks::new(policy, 16), Naive::default());
        for op in ops {
            match op {
                Op::Rest(block, frequency, depth) if !naive.contains(block) => {
                    let facts = facts(block, frequency, depth);
                    resting.rest(block, facts);
                    naive.rest(block, rank(policy, facts).unwrap_or(0));
                }
                Op::Rest(..) => {}
                Op::Lift(block) => {
                    resting.lift(block);
                    naive.lift(block);
                }
                Op::Refresh(block, frequency, depth) => {
                    let facts = facts(block, frequency, depth);
                    resting.refresh(block, facts);
                    let counts_as_new = rank(policy, facts).is_some() || naive.condemned.contains(&block);
                    if naive.contains(block) && counts_as_new {
                        naive.lift(block);
                        naive.rest(block, rank(policy, facts).unwrap_or(0));
                    }
                }
                Op::Halve => {
                    resting.halve();
                    naive.halve(|rank| halved(policy, rank));
                }
                Op::Condemn | Op::Evict => {
                    let condemns = matches!(op, Op::Condemn);
                    let first = naive.condemned.first().copied().filter(|_| !condemns);
                    let found = if condemns { resting.condemn(|_, _| true) } else { resting.victim(|_| true) };
                    prop_assert_eq!(found.is_some(), first.is_some() || naive.next().is_some());
                    let Some(block) = found else { continue };
                    prop_assert!(naive.contains(block), "{block} does not rest");
                    prop_assert!(first.is_none_or(|first| first == block), "{first:?} was condemned before {block}");
                    if first.is_none() && rank(policy, Facts::default()).is_some() {
                        prop_assert_eq!(Some(block), naive.next());
                    }
                    naive.lift(block);
                    if condemns {
                        naive.condemned.push(block);
                    } else {
                        resting.lift(block);
                        resting.forget(block, u64::from(block) + 1);
                    }
                }
            }
            prop_assert_eq!(resting.check(), Ok(()));
            prop_assert_eq!(resting.len(), naive.resting.len() + naive.condemned.len());
            prop_assert_eq!(resting.condemned_len(), naive.condemned.len());
        }
    }
}
