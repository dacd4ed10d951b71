//! One fault at one moment, and what has to become of it. Each is named by what it once found.

use std::sync::Arc;

use baton_scheduler::{PolicyName, PredictionFigures, PredictionPath, SchedulerConfig};
use baton_sim::faults::Fault;
use baton_sim::metrics::{Outcome, Status};
use baton_sim::workload::Arrival;
use baton_sim::{Handoff, Pool, RunResult, Setup, World, profiles};
use baton_types::{RequestObjectives, Role};

use super::written::RecordedArrivals;

/// A prompt of `blocks` whole blocks that begins with the first `shared` of the common ones.
fn arrival(at_us: u64, blocks: u64, shared: u64, output_tokens: u32) -> Arrival {
    let own = |b: u64| if b < shared { b } else { (at_us + 7) << 20 | b };
    Arrival {
        at_us,
        prompt_tokens: blocks * 512,
        output_tokens,
        ids: (0..blocks).map(own).collect(),
        class: 0,
        objectives: RequestObjectives::default(),
        tenant: 0,
        cancel_after_us: None,
    }
}

fn setup(prefills: u32, decodes: u32, policy: PolicyName) -> Setup {
    let profile = Arc::new(profiles::named("llama3-70b-8xa100").unwrap());
    let scheduler =
        SchedulerConfig { policy, local_prefill: false, replicate: false, ..SchedulerConfig::default() };
    let mut setup = Setup::disaggregated(prefills, decodes, &profile, scheduler);
    (setup.audit_every, setup.keep_outcomes) = (1, true);
    setup
}

/// Runs under the oracle's eyes; outcomes in order of arrival.
fn play(setup: &Setup, arrivals: &[Arrival], faults: &[(u64, Fault)]) -> (Vec<Outcome>, RunResult) {
    let workload = RecordedArrivals(arrivals.iter().cloned().collect());
    let mut world = World::new(setup.clone(), Box::new(workload)).unwrap();
    faults.iter().for_each(|(at_us, fault)| world.inject(*at_us, *fault));
    world.run().unwrap();
    let run = world.into_metrics();
    let mut outcomes = run.outcomes.clone();
    outcomes.sort_by_key(|o| o.first_offer_us);
    (outcomes, run.result(("", ""), 1.0, 1))
}

#[test]
fn a_pipeline_of_nodes_only_prefills() {
    let mut setup = setup(1, 1, PolicyName::Baton);
    setup.pools[0].pipeline_nodes = 4;
    assert_eq!(setup.validate(), Ok(()));
    setup.pools[0].may_change_role = true;
    assert!(setup.validate().is_err_and(|why| why.contains("pipeline of 4 nodes")));
    setup.pools[0].may_change_role = false;
    setup.pools[1].pipeline_nodes = 2;
    assert!(setup.validate().is_err_and(|why| why.contains("pipeline of 2 nodes")));
}

#[test]
fn a_decode_that_dies_goes_on_elsewhere_where_it_stopped() {
    let (setup, arrivals) = (setup(1, 2, PolicyName::Baton), [arrival(0, 4, 0, 200)]);
    let (quiet, before) = play(&setup, &arrivals, &[]);
    let (died, after) = play(&setup, &arrivals, &[(1_500_000, Fault::Death(quiet[0].decode))]);
    let (quiet, died) = (quiet[0], died[0]);
    assert_eq!((died.status, died.gaps.count), (Status::Completed, 199));
    assert_ne!(died.decode, quiet.decode);
    assert_eq!(died.ttft_us, quiet.ttft_us, "its client had the first token long before");
    assert_eq!(died.prompt_tokens, quiet.prompt_tokens, "what was emitted is not its client's prompt");
    let lost_us = died.end_us - quiet.end_us;
    assert!((20_000..500_000).contains(&lost_us), "{lost_us} µs lost");
    assert!(died.gaps.max_us > lost_us, "the interruption is a gap");
    assert!(
        after.prefill_busy_s < before.prefill_busy_s * 1.5,
        "its prompt was still in the prefill node's cache"
    );
}

#[test]
fn engines_slower_than_their_profile_take_longer_than_predicted_from_the_first_request() {
    let (mut setup, arrivals) = (setup(1, 1, PolicyName::Baton), [arrival(0, 40, 0, 20)]);
    setup.scheduler.explain_every = 1;
    let run = |permille| {
        let mut setup = setup.clone();
        setup.faults.engine_speed_permille = permille;
        let workload = RecordedArrivals(arrivals.iter().cloned().collect());
        let mut world = World::new(setup, Box::new(workload)).unwrap();
        world.run().unwrap();
        let metrics = world.into_metrics();
        let predicted_us = metrics.decisions[0].candidates[0].compute_us.unwrap();
        let result = metrics.result(("", ""), 1.0, 1);
        (predicted_us, result.prefill_busy_s * 1e6 / predicted_us as f64, result.prefill_prediction_error)
    };
    let (as_told, slow) = (run(1000), run(667));
    assert_eq!(slow.0, as_told.0, "the conductor predicts by the profile");
    assert!((as_told.1 - 1.0).abs() < 0.01 && as_told.2 < 0.01, "{as_told:?}");
    assert!((slow.1 - 1000.0 / 667.0).abs() < 0.01, "measured over predicted: {slow:?}");
    assert!((slow.2 - 0.333).abs() < 0.01, "{slow:?}");
}

#[test]
fn predictions_are_compared_for_each_path_and_not_for_what_was_placed_again() {
    let setup = setup(1, 2, PolicyName::Baton);
    let arrivals: Vec<Arrival> =
        (0..20).map(|n| arrival(n * 4_000_000, 8, 0, 1 + 99 * (n as u32 % 2))).collect();
    let figures = |setup: &Setup, faults: &[(u64, Fault)]| {
        let (outcomes, run) = play(setup, &arrivals, faults);
        assert!(outcomes.iter().all(|o| o.status == Status::Completed), "{outcomes:?}");
        run.classes[0].predictions.clone()
    };
    let [alone] = figures(&setup, &[])[..] else { panic!("one path") };
    assert_eq!(alone.path, PredictionPath::Prefill);
    assert_eq!((alone.ttft.requests, alone.ttft.covered, alone.ttft.target), (20, Some(1.0), 0.9));
    assert!(
        alone.ttft.median_error.is_some_and(|error| error < 0.1),
        "an idle cluster is predicted well: {alone:?}"
    );
    assert_eq!(
        (alone.tbt.requests, alone.decode_start.requests),
        (10, 10),
        "one token has no gap and no decode"
    );
    assert!(alone.tbt.bias.is_some_and(|bias| bias.abs() < 0.05), "{:?}", alone.tbt);
    assert_eq!((alone.output_tokens.requests, alone.output_tokens.target), (20, 0.8));

    // The fourth one's decode dies with its instance.
    let deaths = [1, 2].map(|instance| (14_000_000, Fault::Death(instance)));
    let faults = [deaths[0], deaths[1], (14_100_000, Fault::Rebirth(1))];
    let [lost] = figures(&setup, &faults)[..] else { panic!("one path") };
    assert_eq!(lost.ttft.requests, 19, "one was placed again");

    let mut slow = setup.clone();
    slow.faults.engine_speed_permille = 500;
    let [slow] = figures(&slow, &[])[..] else { panic!("one path") };
    let bias = |figures: PredictionFigures| figures.bias.unwrap();
    assert!((0.9..1.1).contains(&bias(slow.tbt)), "steps take twice as long: {:?}", slow.tbt);
    assert!(bias(slow.ttft).abs() < 0.1, "first tokens are learnt: {:?}", slow.ttft);

    let profile = Arc::new(profiles::named("llama3-70b-8xa100").unwrap());
    let mut coupled = setup.clone();
    coupled.pools = vec![Pool::new(Role::Both, 2, profile)];
    let [coupled] = figures(&coupled, &[])[..] else { panic!("one path") };
    assert_eq!((coupled.path, coupled.ttft.requests), (PredictionPath::Coupled, 20));
}

#[test]
fn noise_changes_times_both_ways_and_follows_its_seed() {
    let mut setup = setup(1, 1, PolicyName::Baton);
    let arrivals: Vec<Arrival> = (0..200).map(|n| arrival(n * 4_000_000, 8, 0, 2)).collect();
    let ttft_us = |setup: &Setup| play(setup, &arrivals, &[]).0.iter().map(|o| o.ttft_us).collect::<Vec<_>>();
    let quiet = ttft_us(&setup)[0];
    (setup.faults.engine_noise_permille, setup.faults.seed) = (200, 5);
    let noisy = ttft_us(&setup);
    assert_eq!(noisy, ttft_us(&setup), "a seed names a run");
    let (least, most) = (noisy.iter().min().unwrap(), noisy.iter().max().unwrap());
    assert!(
        *least >= quiet * 80 / 100 - 2_000 && *most <= quiet * 120 / 100 + 2_000,
        "{least}..{most} of {quiet}"
    );
    assert!(*least < quiet * 85 / 100 && *most > quiet * 115 / 100, "{least}..{most} of {quiet}");
    let mean = noisy.iter().sum::<u64>() / noisy.len() as u64;
    assert!(mean.abs_diff(quiet) < quiet / 40, "noise favours no side: {mean} beside {quiet}");
    setup.faults.seed = 6;
    assert_ne!(noisy, ttft_us(&setup));
}

#[test]
fn a_request_in_which_two_engines_died_is_tried_on_no_third() {
    let (setup, arrivals) = (setup(1, 2, PolicyName::Baton), [arrival(0, 4, 0, 400)]);
    let (quiet, _) = play(&setup, &arrivals, &[]);
    let (first, second) = if quiet[0].decode == 1 { (1, 2) } else { (2, 1) };
    let faults = [
        (1_500_000, Fault::Death(first)),
        (2_000_000, Fault::Rebirth(first)),
        (4_000_000, Fault::Death(second)),
    ];
    let (died, _) = play(&setup, &arrivals, &faults);
    assert_eq!((died[0].status, died[0].decode), (Status::Failed, second));
}

#[test]
fn a_prefill_that_dies_starts_over_on_another() {
    let (setup, arrivals) = (setup(2, 1, PolicyName::Baton), [arrival(0, 40, 0, 20)]);
    let (quiet, _) = play(&setup, &arrivals, &[]);
    let (died, _) = play(&setup, &arrivals, &[(1_000_000, Fault::Death(quiet[0].prefill))]);
    assert_eq!((died[0].status, died[0].attempts), (Status::Completed, 1));
    assert_ne!(died[0].prefill, quiet[0].prefill);
    assert_eq!(died[0].ttft_us, quiet[0].ttft_us + 1_000_000, "everything was to be done again");
}

#[test]
fn a_handoff_that_failed_lands_on_another_decode_without_a_second_prefill() {
    let mut setup = setup(1, 2, PolicyName::Baton);
    setup.handoff = Handoff::AfterPrefill;
    setup.pools.iter_mut().for_each(|p| p.net_bytes_per_s = 500_000_000);
    let arrivals = [arrival(0, 4, 0, 50)];
    let (quiet, before) = play(&setup, &arrivals, &[]);
    let (cut, after) = play(&setup, &arrivals, &[(800_000, Fault::LinkDown(quiet[0].decode))]);
    assert_eq!(cut[0].status, Status::Completed);
    assert_ne!(cut[0].decode, quiet[0].decode);
    assert_eq!(after.prefill_busy_s, before.prefill_busy_s);
    assert!(after.handoff_bytes == 2 * before.handoff_bytes);
}

#[test]
fn an_answer_of_one_token_is_the_prefills_and_moves_no_kv() {
    let setup = setup(1, 1, PolicyName::Baton);
    let (one, without) = play(&setup, &[arrival(0, 40, 0, 1)], &[]);
    let (two, with) = play(&setup, &[arrival(0, 40, 0, 2)], &[]);
    let (one, two) = (one[0], two[0]);
    assert_eq!((one.status, two.status), (Status::Completed, Status::Completed));
    assert_eq!((one.gaps.count, one.decode), (0, one.prefill));
    assert_ne!(two.decode, two.prefill);
    assert!(without.handoff_bytes == 0 && with.handoff_bytes > 0);
    assert_eq!(one.end_us, one.first_offer_us + one.ttft_us);
    assert!(one.ttft_us <= two.ttft_us, "its KV needs no time on the way");
}

#[test]
fn a_layerwise_handoff_that_fails_during_the_prefill_starts_over() {
    let (setup, arrivals) = (setup(1, 2, PolicyName::Baton), [arrival(0, 40, 0, 20)]);
    let (quiet, _) = play(&setup, &arrivals, &[]);
    let faults = [(900_000, Fault::LinkDown(quiet[0].decode)), (5_000_000, Fault::LinkUp(quiet[0].decode))];
    let (cut, _) = play(&setup, &arrivals, &faults);
    assert_eq!(cut[0].status, Status::Completed);
    assert_ne!(cut[0].decode, quiet[0].decode, "retried where it had failed");
}

#[test]
fn a_link_that_is_down_when_the_prefill_ends_is_told_after_that_end() {
    let mut setup = setup(1, 1, PolicyName::Baton);
    setup.handoff = Handoff::AfterPrefill;
    let arrivals = [arrival(0, 4, 0, 20), arrival(3_000_000, 4, 0, 20)];
    let faults = [(100_000, Fault::LinkDown(0)), (2_000_000, Fault::LinkUp(0))];
    let (cut, run) = play(&setup, &arrivals, &faults);
    assert_eq!([cut[0].status, cut[1].status], [Status::Failed, Status::Completed]);
    let (_, quiet) = play(&setup, &arrivals, &[]);
    assert_eq!(run.prefill_busy_s, quiet.prefill_busy_s, "tries of the hand-off repeat no prefill");
}

#[test]
fn a_fetch_whose_source_dies_is_recomputed() {
    let mut setup = setup(2, 1, PolicyName::GlobalCache);
    setup.pools.iter_mut().for_each(|p| p.net_bytes_per_s = 10_000_000_000);
    // The first fills one node, the second keeps it busy, the third fetches to the other.
    let arrivals = [arrival(0, 20, 20, 5), arrival(20_000_000, 60, 20, 5), arrival(20_000_001, 21, 20, 5)];
    let (quiet, before) = play(&setup, &arrivals, &[]);
    assert!(before.fetched_bytes > 0, "nothing was fetched");
    let (died, after) = play(&setup, &arrivals, &[(20_100_000, Fault::Death(quiet[0].prefill))]);
    assert!(died.iter().all(|o| o.status == Status::Completed));
    assert!(after.prefill_busy_s > before.prefill_busy_s);
}

#[test]
fn clients_may_leave_at_any_phase() {
    let mut setup = setup(2, 1, PolicyName::GlobalCache);
    setup.pools.iter_mut().for_each(|p| {
        (p.net_bytes_per_s, p.host_bytes_per_s) = (1_000_000_000, 500_000_000);
        (p.hbm_tokens, p.dram_tokens) = (Some(40 * 512), 200 * 512);
    });
    let mut ends = [0; 4];
    for step in 0..90 {
        let mut arrivals = vec![arrival(0, 20, 20, 5), arrival(20_000_000, 30, 0, 5)];
        // Their prefix has left HBM by now: one brings it up, one fetches it, both hand it off.
        for at_us in [40_000_000, 40_000_001] {
            let leaves = Some(step * 131_071);
            arrivals.push(Arrival { cancel_after_us: leaves, ..arrival(at_us, 24, 20, 60) });
        }
        let (outcomes, _) = play(&setup, &arrivals, &[]);
        outcomes.iter().for_each(|o| ends[o.status as usize] += 1);
    }
    let [completed, rejected, failed, cancelled] = ends;
    assert_eq!((rejected, failed), (0, 0));
    assert!(completed > 190 && cancelled > 60, "{ends:?}");
}

#[test]
fn who_shares_blocks_inherits_them_when_the_first_one_leaves() {
    let mut setup = setup(1, 1, PolicyName::Baton);
    setup.pools[0].pass_tokens = 2048;
    let leaves = Arrival { cancel_after_us: Some(700_000), ..arrival(0, 20, 20, 5) };
    let (outcomes, _) = play(&setup, &[leaves, arrival(100_000, 22, 20, 5)], &[]);
    assert_eq!([outcomes[0].status, outcomes[1].status], [Status::Cancelled, Status::Completed]);
}

#[test]
fn who_waits_for_blocks_that_another_brings_up_gets_them_when_that_one_leaves() {
    for leaves_us in [50_000, 400_000, 2_000_000] {
        let mut setup = setup(1, 1, PolicyName::Baton);
        let pool = &mut setup.pools[0];
        (pool.hbm_tokens, pool.dram_tokens, pool.host_bytes_per_s) =
            (Some(48 * 512), 200 * 512, 2_000_000_000);
        let leaves = Arrival { cancel_after_us: Some(leaves_us), ..arrival(40_000_000, 20, 20, 5) };
        let arrivals =
            [arrival(0, 20, 20, 5), arrival(20_000_000, 44, 0, 5), leaves, arrival(40_010_000, 21, 20, 5)];
        let (outcomes, _) = play(&setup, &arrivals, &[]);
        assert_eq!(outcomes[3].status, Status::Completed);
        assert!(outcomes[3].hit_blocks >= 20, "the copies below were lost: {:?}", outcomes[3]);
    }
}

#[test]
fn a_prompt_that_fits_no_store_in_whole_blocks_is_refused_at_once() {
    let mut setup = setup(1, 1, PolicyName::RoundRobin);
    setup.pools.iter_mut().for_each(|p| p.hbm_tokens = Some(4 * 512 + 500));
    let odd = Arrival { prompt_tokens: 4 * 512 + 1, ..arrival(0, 5, 0, 9) };
    let (outcomes, run) = play(&setup, &[odd, arrival(10, 3, 0, 9), arrival(20, 4, 0, 9)], &[]);
    // The prompt of the third fits, and no answer beside it: with its first tokens it is too long.
    let statuses: Vec<Status> = outcomes.iter().map(|outcome| outcome.status).collect();
    assert_eq!(statuses, [Status::Rejected, Status::Completed, Status::Rejected]);
    assert_eq!(run.refusals_by_reason, [("too_long", 2)]);
}

#[test]
fn what_was_computed_is_found_again_to_the_last_block() {
    let (setup, arrivals) =
        (setup(1, 1, PolicyName::Baton), [arrival(0, 12, 12, 9), arrival(9_000_000, 12, 12, 9)]);
    let (outcomes, _) = play(&setup, &arrivals, &[]);
    assert_eq!((outcomes[0].hit_blocks, outcomes[1].hit_blocks), (0, 12));
    assert_eq!(outcomes[1].cached_tokens, 12 * 512 - 1, "the last token is always computed");
    assert!(outcomes[1].ttft_us * 4 < outcomes[0].ttft_us);
}

#[test]
fn a_slow_node_is_slow_at_once_and_only_while_it_lasts() {
    let (setup, arrivals) = (setup(1, 1, PolicyName::Baton), [arrival(0, 4, 0, 300)]);
    let (quiet, _) = play(&setup, &arrivals, &[]);
    let faults = [(2_000_000, Fault::Slow(1, 500)), (3_000_000, Fault::Slow(1, 1000))];
    let (slow, _) = play(&setup, &arrivals, &faults);
    let later_us = slow[0].end_us - quiet[0].end_us;
    assert!((470_000..530_000).contains(&later_us), "half of a second was lost, not {later_us} µs");
}

/// Four sessions take turns; two fit in the cluster's memory.
fn sessions() -> Vec<Arrival> {
    let turn = |at: u64| {
        let ids = (0..60).map(|block| (at % 4) << 20 | block).collect();
        Arrival { ids, ..arrival(at * 8_000_000, 60, 0, 5) }
    };
    (0..24).map(turn).collect()
}

fn lent(stores: u32) -> Setup {
    let mut setup = setup(1, 1, PolicyName::Baton);
    setup.scheduler.replicate = true;
    setup.pools.iter_mut().for_each(|pool| pool.hbm_tokens = Some(70 * 512));
    if stores > 0 {
        let profile = setup.pools[0].profile.clone();
        let lender = baton_sim::Pool::new(baton_types::Role::Store, stores, profile);
        setup.pools.push(baton_sim::Pool { dram_tokens: 1000 * 512, ..lender });
    }
    setup
}

#[test]
fn what_small_caches_lose_comes_back_from_who_lends() {
    let (alone, before) = play(&lent(0), &sessions(), &[]);
    let (helped, after) = play(&lent(1), &sessions(), &[]);
    assert_eq!((before.saves, before.lent_bytes), (0, 0));
    assert!(after.saves >= 4 && after.lent_bytes > 0, "{} saves, {} bytes", after.saves, after.lent_bytes);
    assert!(
        after.token_hit_ratio > before.token_hit_ratio + 0.3,
        "{:?}",
        (before.token_hit_ratio, after.token_hit_ratio)
    );
    let busy = |outcomes: &[Outcome]| outcomes.iter().map(|o| o.ttft_us).sum::<u64>();
    assert!(busy(&helped) < busy(&alone), "{} µs, {} µs", busy(&helped), busy(&alone));
}

#[test]
fn who_lends_may_die_at_any_time() {
    for seed in 0..12u64 {
        let dies_us = 70_000_000 + seed * 1_313_131;
        let faults = [(dies_us, Fault::Death(2)), (dies_us + 20_000_000, Fault::Rebirth(2))];
        let (outcomes, run) = play(&lent(1), &sessions(), &faults);
        assert!(outcomes.iter().all(|o| o.status == Status::Completed), "{outcomes:?}");
        assert_eq!(run.failed, 0);
        assert!(run.saves > 4, "its next life is saved to, too: {}", run.saves);
    }
}
