//! The rules of the crate's documentation, one by one, and then all of them under noise.

mod lives;
mod naive;

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use baton_types::{FetchPlan, InstanceId, RequestId};
use proptest::prelude::*;

use naive::Naive;

use crate::{
    Complete, Effect, Input, Leg, LegFailure, LegHoldings, Legs, LegsConfig, STRANDED_LEASE_US, Work,
};

/// Blocks of 16 tokens, a pool of 100 of them, passes of 64 tokens.
const CONFIG: LegsConfig = LegsConfig::new(16, 100, 64);

fn work(prompt_tokens: u64) -> Work {
    let named_blocks = u32::try_from(prompt_tokens / 16).expect("small");
    Work { prompt_tokens, named_blocks, room_tokens: 30 }
}

fn prefill(id: u64, prompt_tokens: u64, order: u64) -> Input {
    let work = work(prompt_tokens);
    Input::Prefill { request: RequestId(id), work, stays: false, fetch: None, order }
}

fn step(legs: &mut Legs, input: Input) -> Vec<Effect> {
    let mut effects = Vec::new();
    legs.step(input, &mut effects);
    legs.check().expect("the ledgers agree");
    effects
}

fn opened(id: u64) -> Input {
    Input::Opened { request: RequestId(id), cached_blocks: 0, waits: false }
}

const A: RequestId = RequestId(1);
const B: RequestId = RequestId(2);
const NOTHING_HELD: Effect = Effect::Close { request: A, held: LegHoldings { blocks: false, engine: false } };

#[test]
fn prefills_are_opened_in_order_some_passes_ahead_and_nothing_overtakes() {
    let mut legs = Legs::new(CONFIG);
    for (id, tokens, order) in [(1, 160, 7), (2, 10, 7), (3, 60, 3)] {
        assert_eq!(step(&mut legs, prefill(id, tokens, order)), []);
    }
    // The lowest order first, then arrival.
    let open = |id, room_blocks| [Effect::Open { request: RequestId(id), room_blocks }];
    assert_eq!(step(&mut legs, Input::OpenNext), open(3, 1));
    assert_eq!(step(&mut legs, opened(3)), [Effect::Compute { request: RequestId(3), cached_tokens: 0 }]);
    assert_eq!(step(&mut legs, Input::OpenNext), open(1, 0));
    // No room: the next one, though small, does not go first.
    assert_eq!(step(&mut legs, Input::NoRoom { request: A }), []);
    assert_eq!(step(&mut legs, Input::OpenNext), open(1, 0));
    step(&mut legs, opened(1));
    // 220 tokens are open, two passes are 128: the engine has enough.
    assert_eq!(step(&mut legs, Input::OpenNext), []);
    step(&mut legs, Input::Computed { request: A });
    assert_eq!(step(&mut legs, Input::OpenNext), open(2, 1));
}

#[test]
fn where_nobody_else_holds_anything_no_room_is_a_failure() {
    let mut legs = Legs::new(CONFIG);
    step(&mut legs, prefill(1, 160, 1));
    assert_eq!(
        step(&mut legs, Input::NoRoom { request: A }),
        [Effect::Fail { request: A, why: LegFailure::NoRoom }, NOTHING_HELD]
    );
    assert_eq!(legs.get(A), None);
    // A request that can never fit fails at once, for either purpose.
    let too_large = Effect::Fail { request: A, why: LegFailure::TooLarge { needed_blocks: 101 } };
    assert_eq!(step(&mut legs, prefill(1, 1601, 1)), [too_large, NOTHING_HELD]);
    assert_eq!(step(&mut legs, Input::Expect { request: A, work: work(1601) }), [too_large, NOTHING_HELD]);
}

#[test]
fn a_promise_larger_than_the_pool_asks_for_what_there_is() {
    let mut legs = Legs::new(CONFIG);
    let work = Work { room_tokens: 1 << 20, ..work(160) };
    assert_eq!(
        step(&mut legs, Input::Expect { request: A, work }),
        [Effect::Open { request: A, room_blocks: 90 }]
    );
}

#[test]
fn kv_is_fetched_only_where_it_is_missing_and_computing_waits_for_it() {
    let elsewhere = FetchPlan { from: InstanceId(9), blocks: 4 };
    let order = |legs: &mut Legs, id| {
        let request = RequestId(id);
        let fetch = Some(elsewhere);
        step(legs, Input::Prefill { request, work: work(160), stays: false, fetch, order: 1 });
        step(legs, Input::OpenNext);
    };
    let mut legs = Legs::new(CONFIG);
    order(&mut legs, 1);
    // All of it came here meanwhile.
    assert_eq!(
        step(&mut legs, Input::Opened { request: A, cached_blocks: 4, waits: false }),
        [Effect::Fetched { request: A, ok: true }, Effect::Compute { request: A, cached_tokens: 64 }]
    );
    order(&mut legs, 2);
    assert_eq!(
        step(&mut legs, Input::Opened { request: B, cached_blocks: 3, waits: true }),
        [],
        "what is missing is known once the cache is ready"
    );
    assert_eq!(step(&mut legs, Input::FetchEnded { request: B, cached_blocks: 4 }), [], "none is under way");
    assert_eq!(
        step(&mut legs, Input::Cached { request: B, cached_blocks: 2, waits: false }),
        [Effect::Fetch { request: B, have_blocks: 2, plan: elsewhere }]
    );
    assert_eq!(step(&mut legs, Input::Cached { request: B, cached_blocks: 4, waits: false }), [], "too late");
    for (cached_blocks, ok) in [(2, false), (3, true)] {
        let mut legs = legs.clone();
        assert_eq!(
            step(&mut legs, Input::FetchEnded { request: B, cached_blocks }),
            [
                Effect::Fetched { request: B, ok },
                Effect::Compute { request: B, cached_tokens: u64::from(cached_blocks) * 16 }
            ]
        );
    }
}

#[test]
fn the_last_token_of_a_prompt_is_always_computed() {
    let mut legs = Legs::new(CONFIG);
    step(&mut legs, prefill(1, 32, 1));
    assert_eq!(
        step(&mut legs, Input::Opened { request: A, cached_blocks: 2, waits: false }),
        [Effect::Compute { request: A, cached_tokens: 31 }]
    );
}

#[test]
fn who_finds_no_room_to_decode_is_tried_again_in_order() {
    let mut legs = Legs::new(CONFIG);
    for request in [B, A] {
        step(&mut legs, Input::Expect { request, work: work(160) });
        step(&mut legs, Input::NoRoom { request });
    }
    let open = |request| Effect::Open { request, room_blocks: 2 };
    assert_eq!(step(&mut legs, Input::RoomFreed), [open(B), open(A)]);
    assert_eq!(step(&mut legs, opened(1)), [Effect::Admit { request: A }]);
    assert_eq!(step(&mut legs, Input::RoomFreed), [open(B)]);
    assert_eq!(step(&mut legs, Input::Landed { request: A }), [Effect::Seal { request: A }]);
    assert_eq!(step(&mut legs, Input::StartDecode { request: A }), [Effect::Decode { request: A }]);
    // The order came twice.
    assert_eq!(step(&mut legs, Input::StartDecode { request: A }), []);
}

#[test]
fn nobody_decodes_before_all_kv_is_here() {
    let mut legs = Legs::new(CONFIG);
    step(&mut legs, Input::Expect { request: A, work: work(160) });
    step(&mut legs, opened(1));
    let held = LegHoldings { blocks: true, engine: false };
    assert_eq!(
        step(&mut legs, Input::StartDecode { request: A }),
        [Effect::Fail { request: A, why: LegFailure::NotReady }, Effect::Close { request: A, held }]
    );
    assert_eq!(step(&mut legs, Input::StartDecode { request: A }), []);
}

#[test]
fn kv_whose_hand_off_failed_is_kept_for_another_one_and_not_for_ever() {
    let computed = || {
        let mut legs = Legs::new(CONFIG);
        step(&mut legs, prefill(1, 160, 1));
        step(&mut legs, opened(1));
        assert_eq!(step(&mut legs, Input::Computed { request: A }), [Effect::Seal { request: A }]);
        legs
    };
    let closed = [Effect::Close { request: A, held: LegHoldings { blocks: true, engine: true } }];
    let ended = |ok, now_us| Input::HandedOff { request: A, ok, now_us };
    let mut legs = computed();
    assert_eq!(step(&mut legs, ended(true, 1)), closed);
    let mut legs = computed();
    assert_eq!(step(&mut legs, ended(false, 5)), []);
    assert_eq!(step(&mut legs, Input::HandOff { request: A }), [Effect::Send { request: A }]);
    assert_eq!(legs.get(A), Some(&Leg::Held(Complete::Leaves)));
    // Under way again: the lease of the first try does not count.
    assert_eq!(step(&mut legs, Input::Tick { now_us: 6 + STRANDED_LEASE_US }), []);
    assert_eq!(step(&mut legs, ended(false, 7)), []);
    assert_eq!(step(&mut legs, Input::Tick { now_us: 7 + STRANDED_LEASE_US }), []);
    assert_eq!(step(&mut legs, Input::Tick { now_us: 8 + STRANDED_LEASE_US }), closed);
    assert_eq!(
        step(&mut legs, Input::HandOff { request: A }),
        [Effect::Fail { request: A, why: LegFailure::NothingToSend }]
    );
    // One that failed while its prefill computed.
    let mut legs = Legs::new(CONFIG);
    step(&mut legs, prefill(1, 160, 1));
    step(&mut legs, opened(1));
    assert_eq!(step(&mut legs, ended(false, 9)), []);
    step(&mut legs, Input::Computed { request: A });
    assert_eq!(legs.get(A), Some(&Leg::Held(Complete::Stranded(9))));
}

#[test]
fn where_kv_runs_short_the_youngest_gives_its_own_up_and_the_oldest_goes_on() {
    let mut legs = Legs::new(CONFIG);
    for id in [1, 2, 3] {
        let request = RequestId(id);
        step(&mut legs, Input::Expect { request, work: work(160) });
        step(&mut legs, opened(id));
        step(&mut legs, Input::Landed { request });
        step(&mut legs, Input::StartDecode { request });
    }
    let grow = |blocks| Effect::Grow { request: A, blocks };
    assert_eq!(step(&mut legs, Input::Starved { request: A }), [grow(4)]);
    let held = LegHoldings { blocks: true, engine: true };
    let gone = |id, why| {
        let request = RequestId(id);
        [Effect::Fail { request, why }, Effect::Close { request, held }]
    };
    let short = |legs: &mut Legs| {
        assert_eq!(step(legs, Input::NotGrown { request: A, blocks: 4 }), [grow(1)], "a block may be free");
        step(legs, Input::NotGrown { request: A, blocks: 1 })
    };
    assert_eq!(short(&mut legs), [gone(3, LegFailure::GaveWay).as_slice(), &[grow(4)]].concat());
    assert_eq!(short(&mut legs), [gone(2, LegFailure::GaveWay).as_slice(), &[grow(4)]].concat());
    // Alone, and there is still too little: the pool is too small for it.
    assert_eq!(short(&mut legs), gone(1, LegFailure::NoRoom));
}

#[test]
fn kv_that_is_there_goes_before_room_for_kv_that_is_not() {
    let mut legs = Legs::new(CONFIG);
    for id in [1, 2] {
        let request = RequestId(id);
        assert_eq!(step(&mut legs, Input::Expect { request, work: work(160) }).len(), 1);
        step(&mut legs, opened(id));
    }
    let (c, d) = (RequestId(3), RequestId(4));
    let open = |request| Effect::Open { request, room_blocks: 2 };
    assert_eq!(step(&mut legs, Input::Expect { request: c, work: work(160) }), [open(c)]);
    assert_eq!(step(&mut legs, Input::NoRoom { request: c }), [], "nobody sends its KV yet");
    // The first has its KV on the way and keeps its room; the youngest without an offer gives its own.
    assert_eq!(step(&mut legs, Input::Offered { request: A }), []);
    assert_eq!(step(&mut legs, Input::Offered { request: c }), [open(c)]);
    let withdraw = Effect::Withdraw { request: B, to: c };
    assert_eq!(step(&mut legs, Input::NoRoom { request: c }), [withdraw]);
    assert_eq!(step(&mut legs, Input::Withdrawn { request: B, to: c }), [open(c)]);
    assert_eq!(step(&mut legs, Input::NoRoom { request: c }), [], "no room is lent any longer");
    // Room that comes free is for the KV that is there, and another order does not ask for any.
    assert_eq!(step(&mut legs, Input::Expect { request: d, work: work(160) }), []);
    assert_eq!(step(&mut legs, Input::RoomFreed), [open(c)]);
    assert_eq!(step(&mut legs, opened(3)), [Effect::Admit { request: c }]);
    assert_eq!(step(&mut legs, Input::RoomFreed), [open(B), open(d)]);
    assert_eq!(legs.check(), Ok(()));
}

#[test]
fn room_of_kv_that_is_offered_at_that_moment_is_kept() {
    let mut legs = Legs::new(CONFIG);
    step(&mut legs, Input::Expect { request: A, work: work(160) });
    step(&mut legs, opened(1));
    step(&mut legs, Input::Expect { request: B, work: work(160) });
    step(&mut legs, Input::Offered { request: B });
    let withdraw = Effect::Withdraw { request: A, to: B };
    assert_eq!(step(&mut legs, Input::NoRoom { request: B }), [withdraw]);
    assert_eq!(step(&mut legs, Input::Offered { request: A }), []);
    assert_eq!(step(&mut legs, Input::Landed { request: A }), [Effect::Seal { request: A }]);
    assert_eq!(legs.waiting_for_room(), 1);
}

/// A driver that obeys or fails at random, and keeps its own account of what each leg holds.
#[derive(Default)]
struct Account {
    /// Requests with pinned blocks, and whether an engine has been given them.
    holds: BTreeMap<RequestId, bool>,
    /// Effects that wait for their answer.
    asked: Vec<Effect>,
}

impl Account {
    fn take_in(&mut self, effects: &[Effect]) -> Result<(), TestCaseError> {
        for effect in effects {
            match *effect {
                Effect::Open { request, room_blocks } => {
                    prop_assert!(room_blocks <= 100);
                    prop_assert!(!self.holds.contains_key(&request), "opened twice");
                    self.asked.push(*effect);
                }
                Effect::Fetch { .. } => self.asked.push(*effect),
                Effect::Compute { request, .. } | Effect::Decode { request } => {
                    prop_assert_eq!(self.holds.insert(request, true), Some(false), "no blocks, or twice");
                }
                Effect::Withdraw { request, .. } => {
                    prop_assert_eq!(self.holds.get(&request), Some(&false), "it has no room to give");
                    self.asked.push(*effect);
                }
                Effect::Seal { request } | Effect::Admit { request } | Effect::Send { request } => {
                    prop_assert!(self.holds.contains_key(&request), "nothing is pinned for it");
                }
                Effect::Close { request, held } => {
                    let mine = self.holds.remove(&request);
                    prop_assert_eq!(held.blocks, mine.is_some());
                    prop_assert_eq!(held.engine, mine == Some(true));
                }
                Effect::Grow { request, .. } => {
                    prop_assert_eq!(self.holds.get(&request), Some(&true), "it does not decode");
                    self.asked.push(*effect);
                }
                Effect::Fetched { .. } | Effect::Fail { .. } => {}
            }
        }
        Ok(())
    }
}

/// Steps the core and the naive one, which have to want the same.
fn both(legs: &mut Legs, naive: &mut Naive, input: Input) -> Result<Vec<Effect>, TestCaseError> {
    let (mut effects, mut wanted) = (Vec::new(), Vec::new());
    legs.step(input, &mut effects);
    naive.step(input, &mut wanted);
    prop_assert_eq!(&effects, &wanted, "{:?}", input);
    Ok(effects)
}

/// Any input about one of a few requests. Orders come only where the request has no leg.
fn noise(legs: &Legs, kind: u8, request: RequestId, number: u32) -> Option<Input> {
    let (cached_blocks, ok, waits) = (number % 12, number.is_multiple_of(2), number.is_multiple_of(3));
    let now_us = u64::from(number) * 1_000_000;
    let fresh = legs.get(request).is_none();
    let prompt = work(1 + u64::from(number) * 7 % 1700);
    let fetch = number.is_multiple_of(4).then_some(FetchPlan { from: InstanceId(1), blocks: number % 20 });
    Some(match kind {
        0 if fresh => {
            Input::Prefill { request, work: prompt, stays: ok, fetch, order: u64::from(number % 5) }
        }
        1 if fresh => Input::Expect { request, work: prompt },
        0 | 1 => return None,
        2 => Input::RoomFreed,
        3 | 4 => Input::OpenNext,
        5 => Input::Cached { request, cached_blocks, waits },
        6 => Input::FetchEnded { request, cached_blocks },
        7 | 8 => Input::Computed { request },
        9 => Input::HandedOff { request, ok, now_us },
        10 => Input::HandOff { request },
        11 => Input::Landed { request },
        12 | 13 => Input::StartDecode { request },
        14 => Input::Ended { request },
        15 => Input::Release { request },
        16 => Input::Starved { request },
        17 | 18 => Input::Offered { request },
        _ => Input::Tick { now_us },
    })
}

proptest! {
    #[test]
    fn whatever_is_said_in_whatever_order_each_leg_holds_what_it_is_given_and_gives_it_back(
        script in proptest::collection::vec((0u8..20, 0u64..6, 0u32..60), 0..200),
    ) {
        let mut legs = Legs::new(CONFIG);
        let mut naive = Naive::default();
        let mut account = Account::default();
        for (kind, id, number) in script {
            let Some(input) = noise(&legs, kind, RequestId(id), number) else { continue };
            account.take_in(&both(&mut legs, &mut naive, input)?)?;
            while let Some(asked) = account.asked.pop() {
                let (cached_blocks, waits) = (number % 5, number.is_multiple_of(2));
                let answer = match asked {
                    Effect::Open { request, .. } if number % 5 > 0 => {
                        account.holds.insert(request, false);
                        Input::Opened { request, cached_blocks, waits }
                    }
                    Effect::Open { request, .. } => Input::NoRoom { request },
                    Effect::Fetch { .. } if number % 3 > 0 => continue,
                    Effect::Fetch { request, .. } => Input::FetchEnded { request, cached_blocks },
                    Effect::Withdraw { request, .. } if number.is_multiple_of(7) => Input::Offered { request },
                    Effect::Withdraw { request, to } => {
                        account.holds.remove(&request);
                        Input::Withdrawn { request, to }
                    }
                    Effect::Grow { request, blocks } if number.is_multiple_of(4) => {
                        Input::NotGrown { request, blocks }
                    }
                    Effect::Grow { .. } => continue,
                    other => panic!("{other:?} needs no answer"),
                };
                account.take_in(&both(&mut legs, &mut naive, answer)?)?;
            }
            prop_assert_eq!(legs.check(), Ok(()));
        }
        let ids: Vec<RequestId> = legs.iter().map(|(request, _)| request).collect();
        for request in ids {
            account.take_in(&both(&mut legs, &mut naive, Input::Release { request })?)?;
        }
        prop_assert!(account.holds.is_empty(), "{:?}", account.holds);
        prop_assert_eq!((legs.queued(), legs.waiting_for_room()), (0, 0));
        prop_assert_eq!(legs.check(), Ok(()));
    }
}
