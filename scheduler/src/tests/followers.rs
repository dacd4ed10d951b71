//! Requests that count on what others before them in the queue will compute.

use alloc::vec::Vec;
use baton_types::{ClassId, InstanceId, RequestId, RequestObjectives, SloClass};

use crate::testing::{PASS_US, conductor, finished, naive_prefill_us, offer, plain, request, step};
use crate::{AdmissionMode, Conductor, Effect, Input, PolicyName, Request, SchedulerConfig};

/// Blocks that all prompts of these tests share.
const SHARED: u64 = 50;

fn config() -> SchedulerConfig {
    plain(PolicyName::Baton, AdmissionMode::Slo)
}

/// One prefill instance, two seconds busy with a prompt of its own.
fn busy(config: SchedulerConfig) -> Conductor {
    let mut conductor = conductor(config, 1, 1);
    assert_eq!(sent(&offer(&mut conductor, 0, request(1, 20_000, 0))), [1]);
    conductor
}

fn sent(effects: &[Effect]) -> Vec<u64> {
    let started = |effect: &Effect| match effect {
        Effect::StartPrefill { request, .. } => Some(request.0),
        _ => None,
    };
    effects.iter().filter_map(started).collect()
}

/// Those that wait, in turn: the request, what it follows and its work, ms.
fn waiting(conductor: &Conductor) -> Vec<(u64, Option<u64>, u64)> {
    let all = conductor.fleet.known(InstanceId(0)).prefill.waiting().iter();
    all.map(|w| (w.request.0, w.after.map(|leader| leader.0), w.work_us / 1_000)).collect()
}

/// Finishes what was sent, and so on, until nothing is left; the order in which all was sent.
fn all_sent(conductor: &mut Conductor, mut now_us: u64, mut done: Vec<u64>) -> Vec<u64> {
    let mut order = Vec::new();
    while let Some(id) = done.pop() {
        now_us += 1_000_000;
        let next = sent(&step(conductor, now_us, finished(id)));
        order.extend(&next);
        done.extend(next);
    }
    order
}

#[test]
fn a_follower_computes_its_own_end_alone_and_goes_right_behind_its_leader() {
    let mut conductor = busy(config());
    offer(&mut conductor, 1_000, request(2, 30_000, SHARED));
    offer(&mut conductor, 2_000, request(3, 10_000, 0));
    offer(&mut conductor, 3_000, request(4, 26_000, SHARED));
    // What a pass takes whatever is in it is shared with those that wait there.
    let own_ms = (naive_prefill_us(26_000 - SHARED * 512) - PASS_US) / 1_000;
    assert_eq!(waiting(&conductor), [(3, None, 1_002), (2, None, 3_004), (4, Some(2), own_ms)]);
    assert_eq!(
        all_sent(&mut conductor, 1_000_000, [1].into()),
        [3, 2, 4],
        "the least work, but what follows"
    );
}

#[test]
fn without_its_leader_one_of_the_followers_leads() {
    let mut conductor = busy(config());
    offer(&mut conductor, 1_000, request(2, 30_000, SHARED));
    offer(&mut conductor, 2_000, request(3, 10_000, 0));
    offer(&mut conductor, 3_000, request(4, 26_000, SHARED));
    offer(&mut conductor, 4_000, request(5, 26_000, SHARED));
    assert!(sent(&step(&mut conductor, 5_000, Input::RequestCancelled { request: RequestId(2) })).is_empty());
    let follow: Vec<_> = waiting(&conductor).into_iter().map(|(id, after, _)| (id, after)).collect();
    assert_eq!(follow, [(3, None), (4, None), (5, Some(4))]);
    assert_eq!(
        sent(&step(&mut conductor, 1_990_000, finished(1))),
        [3],
        "the fourth has more work than was known"
    );
    let whole_ms = naive_prefill_us(26_000) / 1_000;
    let own_ms = (naive_prefill_us(26_000 - SHARED * 512) - PASS_US) / 1_000;
    assert_eq!(waiting(&conductor), [(4, None, whole_ms), (5, Some(4), own_ms)]);
    assert_eq!(all_sent(&mut conductor, 2_000_000, [3].into()), [4, 5]);
}

/// Its client left before it was served, and nobody else counts on the blocks: it is one among the others.
#[test]
fn what_has_lost_its_leader_takes_its_own_turn() {
    let mut conductor = busy(config());
    offer(&mut conductor, 1_000, request(2, 30_000, SHARED));
    offer(&mut conductor, 2_000, request(3, 27_000, 0));
    offer(&mut conductor, 3_000, request(4, 26_000, SHARED));
    step(&mut conductor, 5_000, Input::RequestCancelled { request: RequestId(2) });
    assert_eq!(
        sent(&step(&mut conductor, 1_990_000, finished(1))),
        [4],
        "it is the least work, as it is now"
    );
    assert_eq!(all_sent(&mut conductor, 2_000_000, [4].into()), [3]);
}

#[test]
fn what_is_of_another_band_is_not_followed() {
    let classes = [0, 1].map(|priority| SloClass { priority, ..SloClass::default() });
    let of = |class: u16, request: Request| Request { class: ClassId(class), ..request };
    for (leader, follower, follows) in [(0, 1, false), (1, 0, false), (1, 1, true)] {
        let mut conductor = busy(SchedulerConfig { classes: classes.to_vec(), ..config() });
        offer(&mut conductor, 1_000, of(leader, request(2, 30_000, SHARED)));
        offer(&mut conductor, 3_000, of(follower, request(4, 26_000, SHARED)));
        let after = waiting(&conductor).iter().find(|(id, ..)| *id == 4).map(|(_, after, _)| *after);
        assert_eq!(after, Some(follows.then_some(2)), "class {follower} behind {leader}");
    }
}

/// It would wait longer behind it than its objective allows.
#[test]
fn what_is_due_before_its_leader_is_does_not_follow() {
    let mut conductor = busy(config());
    offer(&mut conductor, 1_000, request(2, 30_000, SHARED));
    let objectives = RequestObjectives { ttft_us: Some(5_000_000), tbt_us: None };
    offer(&mut conductor, 3_000, Request { objectives, ..request(4, 26_000, SHARED) });
    let follow: Vec<_> = waiting(&conductor).into_iter().map(|(id, after, _)| (id, after)).collect();
    assert_eq!(follow, [(4, None), (2, None)]);
}

#[test]
fn other_routers_know_who_follows_whom() {
    let mut ours = busy(config());
    ours.share_as(1);
    let mut theirs = busy(config());
    theirs.share_as(2);
    let mut say = |now_us, input: Input| {
        let said = step(&mut ours, now_us, input);
        for effect in said {
            if let Effect::Share(input) = effect {
                assert!(sent(&step(&mut theirs, now_us, *input)).is_empty());
            }
        }
        assert_eq!(waiting(&theirs), waiting(&ours));
        waiting(&ours)
    };
    say(1_000, Input::RequestArrived(request(2, 30_000, SHARED)));
    say(2_000, Input::RequestArrived(request(3, 10_000, 0)));
    say(3_000, Input::RequestArrived(request(4, 26_000, SHARED)));
    let all = say(4_000, Input::RequestArrived(request(5, 26_000, SHARED)));
    assert_eq!(all.iter().filter(|(_, after, _)| after.is_some()).count(), 2);
    let all = say(5_000, Input::RequestCancelled { request: RequestId(2) });
    assert_eq!(all.iter().filter(|(_, after, _)| after.is_some()).count(), 1);
}
