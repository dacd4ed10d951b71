//! Whole lives of legs, and what is left of them wherever they are cut short.

use alloc::vec;
use alloc::vec::Vec;

use super::{A, B, CONFIG, opened, prefill, step, work};
use crate::{Complete, Effect, Input, Leg, LegFailure, LegHoldings, Legs};

/// The inputs that bring a prefill leg from one state to the next.
fn prefill_life(stays: bool) -> Vec<Input> {
    let order = Input::Prefill { request: A, work: work(160), stays, fetch: None, order: 1 };
    let waiting = Input::Opened { request: A, cached_blocks: 2, waits: true };
    let ready = Input::Cached { request: A, cached_blocks: 2, waits: false };
    vec![order, waiting, ready, Input::Computed { request: A }]
}

/// The inputs that bring a decode leg from one state to the next.
fn decode_life() -> Vec<Input> {
    let order = Input::Expect { request: A, work: work(160) };
    vec![order, opened(1), Input::Landed { request: A }, Input::StartDecode { request: A }]
}

#[test]
fn wherever_a_leg_is_cut_short_it_gives_back_what_it_held_and_no_more() {
    let nothing = LegHoldings { blocks: false, engine: false };
    let blocks = LegHoldings { blocks: true, engine: false };
    let all = LegHoldings { blocks: true, engine: true };
    let lives = [
        (prefill_life(false), vec![nothing, blocks, all, all]),
        (prefill_life(true), vec![nothing, blocks, all, all]),
        (decode_life(), vec![nothing, blocks, blocks, all]),
    ];
    for (life, helds) in lives {
        assert_eq!(life.len(), helds.len());
        for (until, held) in (1..=life.len()).zip(helds) {
            for end in [Input::Release { request: A }, Input::Ended { request: A }] {
                let mut legs = Legs::new(CONFIG);
                life[..until].iter().for_each(|input| _ = step(&mut legs, *input));
                assert_eq!(step(&mut legs, end), [Effect::Close { request: A, held }], "after {until}");
                assert_eq!((legs.iter().count(), legs.queued(), legs.waiting_for_room()), (0, 0, 0));
                // Once: a second word changes nothing.
                assert_eq!(step(&mut legs, end), []);
            }
        }
    }
}

#[test]
fn a_prefill_that_stays_is_decoded_where_it_was_computed_without_a_word() {
    let mut legs = Legs::new(CONFIG);
    let mut effects: Vec<Effect> = Vec::new();
    for input in prefill_life(true) {
        effects.extend(step(&mut legs, input));
    }
    assert_eq!(effects, [Effect::Compute { request: A, cached_tokens: 32 }, Effect::Seal { request: A }]);
    assert_eq!(legs.get(A), Some(&Leg::Decoding { local: true }));
    // The conductor's order comes after the fact, and there is no KV to send any more.
    assert_eq!(step(&mut legs, Input::StartDecode { request: A }), []);
    let nothing = Effect::Fail { request: A, why: LegFailure::NothingToSend };
    assert_eq!(step(&mut legs, Input::HandOff { request: A }), [nothing]);
    assert_eq!(legs.get(A), Some(&Leg::Decoding { local: true }));
}

#[test]
fn one_that_leaves_cannot_decode_here() {
    let mut legs = Legs::new(CONFIG);
    prefill_life(false).iter().for_each(|input| _ = step(&mut legs, *input));
    assert_eq!(legs.get(A), Some(&Leg::Held(Complete::Leaves)));
    let effects = step(&mut legs, Input::StartDecode { request: A });
    assert_eq!(effects[0], Effect::Fail { request: A, why: LegFailure::NotReady });
    assert_eq!(legs.get(A), None);
}

#[test]
fn what_is_said_of_nobody_or_too_late_changes_nothing() {
    let mut legs = Legs::new(CONFIG);
    step(&mut legs, prefill(1, 160, 1));
    let request = B;
    for input in [
        opened(2),
        Input::NoRoom { request },
        Input::FetchEnded { request, cached_blocks: 3 },
        Input::Cached { request, cached_blocks: 3, waits: false },
        Input::Computed { request },
        Input::HandedOff { request, ok: true, now_us: 1 },
        Input::Offered { request },
        Input::Landed { request },
        Input::StartDecode { request },
        Input::Starved { request },
        Input::Release { request },
    ] {
        assert_eq!(step(&mut legs, input), [], "{input:?}");
    }
    // Nor is what fits another state.
    for input in [Input::Computed { request: A }, Input::Landed { request: A }, Input::Starved { request: A }]
    {
        assert_eq!(step(&mut legs, input), [], "{input:?}");
    }
    assert_eq!((legs.iter().count(), legs.queued()), (1, 1));
}

#[test]
fn a_node_that_died_has_no_legs_and_begins_anew() {
    let mut legs = Legs::new(CONFIG);
    step(&mut legs, prefill(1, 160, 1));
    step(&mut legs, Input::Expect { request: B, work: work(20) });
    legs.clear();
    assert_eq!((legs.iter().count(), legs.queued(), legs.waiting_for_room()), (0, 0, 0));
    assert_eq!(legs.check(), Ok(()));
    assert_eq!(step(&mut legs, Input::RoomFreed), []);
    assert_eq!(step(&mut legs, Input::OpenNext), []);
    step(&mut legs, prefill(1, 160, 1));
    assert_eq!(step(&mut legs, Input::OpenNext).len(), 1);
}
