//! Random runs: against the independent model, against true max-min fairness, and against
//! themselves.

use proptest::prelude::*;
use std::collections::BTreeMap;

use super::reference::{End, Fate, Reference};
use super::{Driver, TimedEffect};
use crate::network::{
    Effect, Failure, Input, LinkId, LinkSpec, NetworkConfig, PathLinks, Priority, ProducerPace, TransferId,
    TransferRequest,
};

/// Names are drawn from this many, so that some are used twice, at once or in turn.
const NAMES: u64 = 48;

#[derive(Clone, Debug)]
struct Run {
    config: NetworkConfig,
    links: Vec<LinkSpec>,
    inputs: Vec<(u64, Input)>,
}

fn links() -> impl Strategy<Value = Vec<LinkSpec>> {
    let one = (100_000_000u64..20_000_000_000, prop_oneof![Just(0u64), 0u64..60])
        .prop_map(|(bytes_per_s, latency_us)| LinkSpec { bytes_per_s, latency_us });
    proptest::collection::vec(one, 1..6)
}

fn a_path(count: u32) -> impl Strategy<Value = PathLinks> {
    proptest::collection::vec(0..count, 1..4).prop_map(|mut ids| {
        let mut seen = vec![];
        ids.retain(|id| {
            !seen.contains(id) && {
                seen.push(*id);
                true
            }
        });
        super::path(&ids)
    })
}

/// A `Start` whose times are relative to its own.
fn a_start(count: u32) -> impl Strategy<Value = TransferRequest> {
    let paced = proptest::option::of((0u64..8_000, 0u64..1_000_000));
    let limits = (
        proptest::option::weighted(0.2, 1u64..20_000),
        proptest::option::weighted(0.2, 50_000_000u64..5_000_000_000),
    );
    (0..NAMES, a_path(count), 1u64..30_000_000, 0usize..4, paced, limits).prop_map(
        |(name, links, bytes, class, paced, (deadline_us, rate_cap_bytes_per_s))| TransferRequest {
            transfer: TransferId(name),
            links,
            bytes,
            priority: Priority::ALL[class],
            paced: paced
                .map(|(produced_until_us, last_bytes)| ProducerPace { produced_until_us, last_bytes }),
            deadline_us,
            rate_cap_bytes_per_s,
        },
    )
}

fn an_input(count: u32) -> impl Strategy<Value = Input> {
    let name = || (0..NAMES).prop_map(TransferId);
    let link = move || (0..count).prop_map(LinkId);
    prop_oneof![
        12 => a_start(count).prop_map(Input::Start),
        2 => name().prop_map(|transfer| Input::Cancel { transfer }),
        2 => (name(), 0u64..8_000, 0u64..1_000_000).prop_map(|(transfer, produced_until_us, last_bytes)| {
            Input::Repace { transfer, paced: ProducerPace { produced_until_us, last_bytes } }
        }),
        1 => link().prop_map(|link| Input::LinkDown { link }),
        2 => link().prop_map(|link| Input::LinkUp { link }),
        1 => (link(), 50_000_000u64..20_000_000_000)
            .prop_map(|(link, bytes_per_s)| Input::SetRate { link, bytes_per_s }),
    ]
}

/// Turns the relative times of `input` into absolute ones.
fn at(now_us: u64, mut input: Input) -> Input {
    match &mut input {
        Input::Start(request) => {
            if let Some(paced) = &mut request.paced {
                paced.produced_until_us += now_us;
            }
            request.deadline_us = request.deadline_us.map(|d| d + now_us);
        }
        Input::Repace { paced, .. } => paced.produced_until_us += now_us,
        _ => {}
    }
    input
}

fn a_run(max_inputs: usize) -> impl Strategy<Value = Run> {
    (links(), prop_oneof![Just(0u32), 0u32..300]).prop_flat_map(move |(links, floor_permille)| {
        let count = u32::try_from(links.len()).unwrap();
        let gap = prop_oneof![1 => Just(0u64), 3 => 0u64..2_500];
        let inputs = proptest::collection::vec((gap, an_input(count)), 1..max_inputs);
        inputs.prop_map(move |inputs| {
            let mut now_us = 0;
            let timed = inputs.into_iter().map(|(gap_us, input)| {
                now_us += gap_us;
                (now_us, at(now_us, input))
            });
            let inputs = timed.collect();
            let config = NetworkConfig { floor_permille, ..NetworkConfig::default() };
            Run { config, links: links.clone(), inputs }
        })
    })
}

fn play(run: &Run) -> Driver {
    let mut driver = Driver::new(run.config, &run.links);
    for (now_us, input) in &run.inputs {
        driver.at(*now_us, input.clone());
    }
    driver.run(u64::MAX);
    driver
}

fn fate_of(effect: &Effect) -> (u64, Fate, u64) {
    match *effect {
        Effect::Finished { transfer, bytes, .. } => (transfer.0, Fate::Finished, bytes),
        Effect::Failed { transfer, reason, delivered_bytes } => {
            let fate = match reason {
                Failure::LinkDown(link) => Fate::Lost(link.0),
                Failure::Deadline => Fate::Late,
                Failure::Cancelled => Fate::Cancelled,
                Failure::Refused(_) => Fate::Refused,
            };
            (transfer.0, fate, delivered_bytes)
        }
    }
}

/// The ends of each name, in order of time.
fn by_name<T>(ends: impl Iterator<Item = (u64, T)>) -> BTreeMap<u64, Vec<T>> {
    let mut named: BTreeMap<u64, Vec<T>> = BTreeMap::new();
    for (name, end) in ends {
        named.entry(name).or_default().push(end);
    }
    named
}

/// Whether an engine's end is the reference's: times within the rounding up to a microsecond and
/// half a microsecond of drift, bytes within what half a microsecond carries.
fn agrees(reported: (u64, Fate, u64), end: &End) -> bool {
    let (at_us, fate, delivered) = reported;
    let late = at_us as f64 - end.at;
    let bytes = (delivered as f64 - end.delivered).abs();
    fate == end.fate && (-0.5..1.5).contains(&late) && bytes <= 0.5 * 20_000.0 + 2.0
}

/// The engine's ends against the reference's. Where a cancellation, a deadline or a lost link
/// falls within 2 µs of an end either is right.
fn compare(reported: &[TimedEffect], reference: &[(u64, End)]) -> Result<(), TestCaseError> {
    let ours = by_name(reported.iter().map(|(at, effect)| {
        let (name, fate, delivered) = fate_of(effect);
        (name, (*at, fate, delivered))
    }));
    let theirs = by_name(reference.iter().map(|(name, end)| (*name, *end)));
    prop_assert_eq!(ours.len(), theirs.len());
    for ((name, ours), theirs) in ours.iter().zip(theirs.values()) {
        prop_assert_eq!(ours.len(), theirs.len(), "transfer {}: {:?} {:?}", name, ours, theirs);
        for (reported, end) in ours.iter().zip(theirs) {
            let tie = reported.1 != end.fate && (reported.0 as f64 - end.at).abs() <= 2.0;
            prop_assert!(tie || agrees(*reported, end), "transfer {}: {:?}, not {:?}", name, reported, end);
        }
    }
    Ok(())
}

/// The rates of true weighted max-min fairness, by progressive filling: bytes a second.
fn max_min(run: &Run, flights: &[TransferRequest]) -> Vec<f64> {
    let weights = run.config.weights();
    let weight = |f: &TransferRequest| f64::from(weights[f.priority.index()]);
    let cap = |f: &TransferRequest| f.rate_cap_bytes_per_s.map_or(f64::INFINITY, |c| c as f64);
    let mut rates: Vec<Option<f64>> = vec![None; flights.len()];
    while rates.iter().any(Option::is_none) {
        let level_of = |link: usize| {
            let on = |f: &TransferRequest| f.links.as_slice().iter().any(|l| l.index() == link);
            let here = || flights.iter().zip(&rates).filter(|(f, _)| on(f));
            let left = run.links[link].bytes_per_s as f64 - here().filter_map(|(_, r)| *r).sum::<f64>();
            left / here().filter(|(_, r)| r.is_none()).map(|(f, _)| weight(f)).sum::<f64>()
        };
        let levels: Vec<f64> = (0..run.links.len()).map(level_of).collect();
        let reach = |f: &TransferRequest| {
            let links = f.links.as_slice().iter().map(|l| levels[l.index()]);
            links.fold(cap(f) / weight(f), f64::min)
        };
        let open = || (0..flights.len()).filter(|&i| rates[i].is_none());
        let least = open().map(|i| reach(&flights[i])).fold(f64::INFINITY, f64::min);
        let tight: Vec<usize> = open().filter(|&i| reach(&flights[i]) <= least * (1.0 + 1e-12)).collect();
        for i in tight {
            rates[i] = Some(least * weight(&flights[i]));
        }
    }
    rates.into_iter().flatten().collect()
}

/// Requests only: all at once, unpaced, each with a name of its own.
fn a_crowd() -> impl Strategy<Value = (Run, Vec<TransferRequest>)> {
    links().prop_flat_map(|links| {
        let count = u32::try_from(links.len()).unwrap();
        proptest::collection::vec(a_start(count), 1..30).prop_map(move |mut flights| {
            for (name, flight) in (0..).zip(&mut flights) {
                flight.transfer = TransferId(name);
                (flight.paced, flight.deadline_us) = (None, None);
            }
            let config = NetworkConfig { floor_permille: 0, ..NetworkConfig::default() };
            (Run { config, links: links.clone(), inputs: vec![] }, flights)
        })
    })
}

proptest! {
    #[test]
    fn ends_are_those_of_the_independent_model(run in a_run(70)) {
        let mut reference = Reference::new(&run.config, &run.links);
        for (now_us, input) in &run.inputs {
            reference.step(*now_us, input);
        }
        reference.run(f64::INFINITY);
        compare(&play(&run).effects, &reference.ends)?;
    }

    #[test]
    fn every_byte_is_carried_once_and_every_start_answered_once(run in a_run(70)) {
        let driver = play(&run);
        let mut started: BTreeMap<u64, TransferRequest> = BTreeMap::new();
        let mut carried = vec![0u64; run.links.len()];
        let starts = run.inputs.iter().filter_map(|(_, input)| match input {
            Input::Start(request) => Some(request),
            _ => None,
        });
        prop_assert_eq!(starts.clone().count(), driver.effects.len());
        // Ends and starts interleave: replay both in order of time, starts of a name first.
        let mut starts = by_name(starts.map(|r| (r.transfer.0, r.clone())));
        for (_, effect) in &driver.effects {
            let (name, fate, delivered) = fate_of(effect);
            let queue = starts.get_mut(&name).expect("only what was started ends");
            if fate == Fate::Refused {
                // The one in progress is first; the refused one is behind it.
                started.entry(name).or_insert_with(|| queue.remove(0));
                queue.remove(0);
                continue;
            }
            let request = started.remove(&name).unwrap_or_else(|| queue.remove(0));
            prop_assert!(fate != Fate::Finished || delivered == request.bytes);
            prop_assert!(delivered <= request.bytes);
            for link in request.links.as_slice() {
                carried[link.index()] += delivered;
            }
        }
        let slack = driver.effects.len() as u64;
        for (link, carried) in driver.engine.snapshot().links.iter().zip(carried) {
            prop_assert!((carried..=carried + slack).contains(&link.carried_bytes));
        }
        prop_assert_eq!(driver.engine.stats().live, 0);
        prop_assert_eq!(driver.engine.next_deadline(), None);
    }

    #[test]
    fn the_same_inputs_give_the_same_effects(run in a_run(40)) {
        let (one, two) = (play(&run), play(&run));
        prop_assert_eq!(&one.effects, &two.effects);
        prop_assert_eq!(one.engine.snapshot(), two.engine.snapshot());
    }

    #[test]
    fn a_sleepy_driver_is_told_the_same(run in a_run(40)) {
        let mut sleepy = Driver::new(run.config, &run.links);
        for (now_us, input) in &run.inputs {
            sleepy.step(*now_us, input.clone());
        }
        sleepy.step(u64::MAX / 2_000, Input::TimerFired);
        let effects = |effects: &[TimedEffect]| effects.iter().map(|t| t.1.clone()).collect::<Vec<_>>();
        prop_assert_eq!(effects(&sleepy.effects), effects(&play(&run).effects));
    }

    #[test]
    fn rates_are_a_lower_bound_of_max_min_fairness((run, flights) in a_crowd()) {
        let mut driver = Driver::new(run.config, &run.links);
        for flight in &flights {
            driver.step(0, Input::Start(flight.clone()));
        }
        let fair = max_min(&run, &flights);
        for (flight, fair) in driver.engine.snapshot().flights.iter().zip(&fair) {
            let rate = flight.bytes_per_s as f64;
            prop_assert!(rate <= fair * (1.0 + 1e-9) + 1.0, "{:?}: {} of {}", flight, rate, fair);
            let exact = run.links.len() == 1;
            prop_assert!(!exact || rate + 2.0 >= fair * (1.0 - 1e-9), "{} of {}", rate, fair);
        }
    }
}
