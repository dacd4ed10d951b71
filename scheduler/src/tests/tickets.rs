//! A refused client that returns when it was asked to is let in, whatever came in the meantime.

use alloc::vec::Vec;
use baton_types::{ClassId, RequestId, Role, SloClass, TenantId};

use crate::testing::{conductor_of, offer, plain, rejection, request, spec, step};
use crate::{AdmissionMode, Conductor, Effect, Input, InstanceSpec, PolicyName, Request, SchedulerConfig};

/// One prefill with room for ten seconds of work; engines that never end nor begin, so that only time passes.
fn stage() -> Conductor {
    let classes = [0, 1].map(|priority| SloClass { ttft_us: 10_000_000, priority, ..SloClass::default() });
    let config =
        SchedulerConfig { classes: classes.to_vec(), ..plain(PolicyName::Baton, AdmissionMode::Slo) };
    let roomy = |id, role| InstanceSpec {
        capacity_tokens: 1 << 40,
        net_bytes_per_s: crate::testing::FAST_LINK,
        ..spec(id, role)
    };
    conductor_of(config, &[roomy(0, Role::Prefill), roomy(1, Role::Decode)])
}

/// An engine that ends each prefill after the predicted time: one second for ten thousand tokens.
fn serve(conductor: &mut Conductor, now_us: u64, ends: &mut Vec<(u64, RequestId)>, effects: &[Effect]) {
    let started = effects.iter().filter_map(|effect| match effect {
        Effect::StartPrefill { request, .. } => Some(*request),
        _ => None,
    });
    for id in started.collect::<Vec<_>>() {
        let begins_us = ends.last().map_or(now_us, |(end_us, _)| now_us.max(*end_us));
        ends.push((begins_us + 1_000_000, id));
    }
    while ends.first().is_some_and(|(end_us, _)| *end_us <= now_us) {
        let (end_us, id) = ends.remove(0);
        let finished = Input::PrefillFinished { request: id, compute_us: 1_000_000, cached_tokens: 0 };
        let more = step(conductor, end_us, finished);
        serve(conductor, end_us, ends, &more);
        step(conductor, end_us, Input::RequestCancelled { request: id });
    }
}

/// A stream of requests of a second each, `per_s` a second for `seconds`; those that are refused return when they were
/// asked to, `returns` times. Gives the number of first refusals and of those that are let in at their return.
fn stream(conductor: &mut Conductor, (per_s, seconds): (u64, u64), returns: u32) -> (usize, usize) {
    let mut coming: Vec<(u64, u64, u32)> =
        (0..per_s * seconds).map(|at| (at * 1_000_000 / per_s, at + 1, 0)).collect();
    let (mut ends, mut refused, mut admitted) = (Vec::new(), 0, 0);
    while !coming.is_empty() {
        coming.sort_unstable();
        let (now_us, id, tries) = coming.remove(0);
        serve(conductor, now_us, &mut ends, &[]);
        let effects = offer(conductor, now_us, request(id, 9_990, 0));
        serve(conductor, now_us, &mut ends, &effects);
        assert_eq!(conductor.check(), Ok(()));
        match rejection(&effects) {
            Some(refusal) => {
                refused += usize::from(tries == 0);
                assert!(refusal.retry_after_us > 0, "{refusal:?}");
                if tries < returns {
                    coming.push((now_us + refusal.retry_after_us, id, tries + 1));
                }
            }
            None => admitted += usize::from(tries == 1),
        }
    }
    (refused, admitted)
}

#[test]
fn clients_that_return_when_asked_are_let_in() {
    let (refused, admitted) = stream(&mut stage(), (2, 120), 1);
    assert!(refused > 60, "twice the load that it serves: {refused}");
    assert!(admitted * 100 >= refused * 85, "{admitted} of {refused}");
}

/// A regression: nobody had returned yet, so nothing was kept, and shorter prompts of the same burst took the places.
#[test]
fn the_first_refused_clients_find_their_places() {
    let mut conductor = stage();
    let mut ends = Vec::new();
    let mut ask = |now_us: u64, id: u64, tokens: u64| {
        serve(&mut conductor, now_us, &mut ends, &[]);
        let effects = offer(&mut conductor, now_us, request(id, tokens, 0));
        serve(&mut conductor, now_us, &mut ends, &effects);
        rejection(&effects).map(|refusal| refusal.retry_after_us)
    };
    // Nine that take a second each are let in.
    let first_us: Vec<u64> = (1..=12).filter_map(|id| ask(0, id, 9_990)).collect();
    assert_eq!(first_us.len(), 3);
    assert!(ask(1, 13, 4_990).is_some(), "it would fit, but the next place is given");
    for (id, retry_after_us) in (10..).zip(&first_us) {
        assert_eq!(
            ask(*retry_after_us, id, 9_990),
            None,
            "request {id} comes when it was asked to: {first_us:?}"
        );
    }
}

#[test]
fn nothing_is_kept_for_clients_that_never_return() {
    let mut conductor = stage();
    let (refused, _) = stream(&mut conductor, (2, 120), 0);
    let served = 240 - refused;
    assert!(served >= 125, "as many as there is time for: {served}");
    let stats = conductor.stats();
    assert!(stats.tickets_given > 0 && stats.tickets_used == 0, "{stats:?}");
    assert!(stats.tickets_expired > 0, "{stats:?}");
}

/// Fills the queue so that the next one is refused, as clients that all return.
fn full() -> (Conductor, u64) {
    let mut conductor = stage();
    let mut now_us = 0;
    // Each fill ends at once; the share of clients that return is learnt to be nearly all.
    for id in 100..260 {
        let refused =
            (0..2).all(|_| rejection(&offer(&mut conductor, now_us, request(id, 99_000, 0))).is_some());
        if !refused {
            step(&mut conductor, now_us, Input::RequestCancelled { request: RequestId(id) });
        }
        now_us += 1;
    }
    for id in 1..=9 {
        assert_eq!(rejection(&offer(&mut conductor, now_us, request(id, 9_990, 0))), None, "{id}");
    }
    (conductor, now_us)
}

#[test]
fn a_ticket_that_is_over_is_of_no_use() {
    let (mut conductor, now_us) = full();
    let refused = rejection(&offer(&mut conductor, now_us, request(50, 9_990, 0))).expect("it is full");
    // The grace is at most the objective, or a quarter of the wait, or a second.
    let late_us = now_us + refused.retry_after_us + 10_000_001;
    let broken = conductor.stats().tickets_broken;
    offer(&mut conductor, late_us, request(50, 9_990, 0));
    assert_eq!(conductor.stats().tickets_broken, broken, "it came too late");
    assert_eq!(conductor.check(), Ok(()));
}

#[test]
fn a_client_that_is_early_keeps_its_ticket() {
    let (mut conductor, now_us) = full();
    let asked = || request(50, 9_990, 0);
    let first = rejection(&offer(&mut conductor, now_us, asked())).expect("it is full");
    let again = rejection(&offer(&mut conductor, now_us + 1_000, asked())).expect("it is full");
    let wait_us = first.retry_after_us.max(101_000) - 1_000;
    assert_eq!(again.retry_after_us, wait_us, "the same moment");
    let given = conductor.stats().tickets_given;
    assert!(rejection(&offer(&mut conductor, now_us + 2_000, asked())).is_some());
    assert_eq!(conductor.stats().tickets_given, given, "one ticket, however often it asks");
}

#[test]
fn a_ticket_bars_neither_a_higher_band_nor_other_tenants_from_their_shares() {
    let (mut conductor, now_us) = full();
    for id in 50..60 {
        assert!(rejection(&offer(&mut conductor, now_us, request(id, 9_990, 0))).is_some());
    }
    let urgent = Request { class: ClassId(1), ..request(70, 9_990, 0) };
    offer(&mut conductor, now_us + 1, urgent);
    assert!(conductor.knows(RequestId(70)), "a higher band");
    let other = Request { tenant: TenantId(1), ..request(71, 5_000, 0) };
    let refusal = rejection(&offer(&mut conductor, now_us + 2, other));
    assert!(refusal.is_none_or(|refused| refused.retry_after_us < 5_000_000), "not behind all ten");
}

#[test]
fn tickets_outlive_a_restart_and_not_the_classes() {
    let (mut conductor, now_us) = full();
    let refused = rejection(&offer(&mut conductor, now_us, request(50, 9_990, 0))).expect("it is full");
    let mut restored = Conductor::restore(conductor.save()).expect("it was just saved");
    let again = rejection(&offer(&mut restored, now_us + 10, request(50, 9_990, 0))).expect("it is full");
    assert_eq!(again.retry_after_us, refused.retry_after_us.max(100_010) - 10);
    let mut classes = conductor.config().classes.clone();
    classes[1].name = "other".into();
    let config = SchedulerConfig { classes, ..conductor.config().clone() };
    step(&mut restored, now_us + 20, Input::PolicyChanged(config.into()));
    assert_eq!(restored.check(), Ok(()));
}
