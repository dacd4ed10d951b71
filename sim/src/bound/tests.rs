//! The bound beside every schedule of small cases, and where it can be worked out by hand.

use std::collections::VecDeque;
use std::sync::Arc;

use baton_scheduler::SchedulerConfig;
use baton_types::{CostProfile, RequestObjectives, Rng, Role, SloClass};
use proptest::prelude::*;

use super::UpperBound;
use crate::engine::{Engine, EngineEvent, Job, Mix, Moment, Sequence};
use crate::workload::{Arrival, Requests};
use crate::{Clients, Pool, Setup, profiles};

const BLOCK: u64 = 512;

fn arrival(at_us: u64, prompt_tokens: u64, output_tokens: u32, ids: Vec<u64>) -> Arrival {
    Arrival {
        at_us,
        prompt_tokens,
        output_tokens,
        ids,
        class: 0,
        objectives: RequestObjectives::default(),
        tenant: 0,
        cancel_after_us: None,
    }
}

fn profile(name: &str) -> Arc<CostProfile> {
    Arc::new(profiles::named(name).unwrap())
}

fn setup(pools: Vec<Pool>, ttft_us: u64, tbt_us: u64) -> Setup {
    let class = SloClass { ttft_us, tbt_us, ..SloClass::default() };
    let config = SchedulerConfig { classes: vec![class], ..SchedulerConfig::default() };
    Setup { pools, ..Setup::disaggregated(0, 0, &profile("llama3-70b-8xa100"), config) }
}

fn bound(setup: &Setup, requests: &[Arrival]) -> UpperBound {
    UpperBound::of(setup, &mut Requests(requests.iter().cloned().collect())).unwrap()
}

/// Where a request goes: the engines of its legs and when its prefill is sent. None is a refusal.
type Way = Option<(usize, usize, u64)>;

/// Engines with free hand-offs and one cache of everything, which answer requests by a plan.
struct Bench<'a> {
    setup: &'a Setup,
    requests: &'a [Arrival],
    engines: Vec<Engine>,
    ways: Vec<Way>,
    ttft_us: Vec<Option<u64>>,
    prefilled: Vec<bool>,
    in_slo: u64,
    now_us: u64,
    ended: Vec<EngineEvent>,
}

impl<'a> Bench<'a> {
    fn new(setup: &'a Setup, requests: &'a [Arrival], ways: Vec<Way>) -> Self {
        let engine = |pool: &Pool| {
            let mix = if pool.role == Role::Prefill { Mix::PrefillFirst } else { pool.mix };
            Engine::new(pool.profile.clone(), mix, pool.pass_tokens, 1)
        };
        Self {
            setup,
            requests,
            engines: setup.pools.iter().map(engine).collect(),
            ways,
            ttft_us: vec![None; requests.len()],
            prefilled: vec![false; requests.len()],
            in_slo: 0,
            now_us: 0,
            ended: Vec::new(),
        }
    }

    /// Requests in SLO when prefills run in this order.
    fn play(mut self, order: &[usize]) -> u64 {
        let mut wakes: Vec<Option<(u64, u32)>> = vec![None; self.engines.len()];
        let sent = |way: &Way, request: &Arrival| way.map(|(_, _, delay_us)| request.at_us + delay_us);
        let mut due: Vec<(u64, usize)> = (0..self.ways.len())
            .filter_map(|at| Some((sent(&self.ways[at], &self.requests[at])?, at)))
            .collect();
        loop {
            let wake = wakes.iter().flatten().map(|(at_us, _)| *at_us).min();
            let Some(now_us) = due.iter().map(|(at_us, _)| *at_us).chain(wake).min() else { break };
            self.now_us = now_us;
            for (at, wake) in wakes.iter_mut().enumerate() {
                if let Some((_, version)) = wake.take_if(|(at_us, _)| *at_us == now_us) {
                    assert_eq!(self.engines[at].advance(version, &mut self.ended), None, "no pipelines");
                    self.take_in(at);
                }
            }
            for (_, request) in due.extract_if(.., |(at_us, _)| *at_us == now_us) {
                self.send(request, order[request] as u64);
            }
            for (wake, engine) in wakes.iter_mut().zip(&mut self.engines) {
                *wake = engine.poll(now_us).or(*wake);
            }
        }
        self.in_slo
    }

    /// Leading blocks that an earlier prefill computed are cached.
    fn send(&mut self, request: usize, order: u64) {
        let ids = &self.requests[request].ids;
        let same = |other: &Arrival| other.ids.iter().zip(ids).take_while(|(a, b)| a == b).count() as u64;
        let done = self.requests.iter().zip(&self.prefilled).filter(|(_, done)| **done);
        let cached_blocks = done.map(|(other, _)| same(other)).max().unwrap_or(0);
        let prompt_tokens = self.requests[request].prompt_tokens;
        let prefix_tokens = (cached_blocks * BLOCK).min(prompt_tokens - 1);
        let job =
            Job { slot: request as u32, order, left_tokens: prompt_tokens - prefix_tokens, prefix_tokens };
        let (at, ..) = self.ways[request].unwrap();
        let moment = Moment { now_us: self.now_us, planned: false };
        self.engines[at].add_job(moment, job, &mut self.ended);
        self.take_in(at);
    }

    fn take_in(&mut self, at: usize) {
        for event in std::mem::take(&mut self.ended) {
            match event {
                EngineEvent::Prefilled { slot, .. } => self.prefilled(slot as usize),
                EngineEvent::FirstToken { slot, at_us } => self.first_token(slot as usize, at_us),
                EngineEvent::Decoded { slot, mark, .. } => {
                    let tbt_us = self.engines[at].gaps.summary(&mark, &mut Vec::new()).worst_tenth_us;
                    self.finished(slot as usize, tbt_us);
                }
            }
        }
    }

    fn prefilled(&mut self, request: usize) {
        self.prefilled[request] = true;
        let (prefill, decode, _) = self.ways[request].unwrap();
        let local = prefill == decode;
        let Arrival { prompt_tokens, output_tokens, .. } = self.requests[request];
        if local {
            self.first_token(request, self.now_us);
        }
        let left_tokens = output_tokens - u32::from(local);
        if left_tokens == 0 {
            return self.finished(request, 0);
        }
        let context_tokens = prompt_tokens + u64::from(local);
        let sequence = Sequence {
            slot: request as u32,
            left_tokens,
            room_tokens: left_tokens,
            context_tokens,
            first_token_due: !local,
        };
        let moment = Moment { now_us: self.now_us, planned: false };
        self.engines[decode].add_sequence(moment, sequence, &mut self.ended);
        self.take_in(decode);
    }

    fn first_token(&mut self, request: usize, at_us: u64) {
        self.ttft_us[request] = Some(at_us - self.requests[request].at_us);
    }

    fn finished(&mut self, request: usize, tbt_us: u64) {
        let class = &self.setup.scheduler.classes[0];
        let first_in_time = self.ttft_us[request].is_some_and(|ttft_us| ttft_us <= class.ttft_us);
        self.in_slo += u64::from(first_in_time && tbt_us <= class.tbt_us);
    }
}

/// Every order of the numbers below `n`.
fn orders(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![Vec::new()];
    }
    let insert = |order: &Vec<usize>| {
        (0..n).map(|at| [&order[..at], &[n - 1], &order[at..]].concat()).collect::<Vec<_>>()
    };
    orders(n - 1).iter().flat_map(insert).collect()
}

/// The most requests in SLO that any plan reaches: every subset, every pair of engines, every order, sent at once or late.
fn best_schedule(setup: &Setup, requests: &[Arrival], delays_us: &[u64]) -> u64 {
    let pools = &setup.pools;
    let mut choices: Vec<Way> = vec![None];
    for (prefill, from) in pools.iter().enumerate() {
        for (decode, to) in pools.iter().enumerate().filter(|(_, to)| to.role.decodes()) {
            let may = from.role.prefills() || prefill == decode && setup.scheduler.local_prefill;
            let delays = delays_us.iter().filter(|_| may && to.role.decodes());
            choices.extend(delays.map(|delay_us| Some((prefill, decode, *delay_us))));
        }
    }
    let orders = orders(requests.len());
    let plans = choices.len().pow(requests.len() as u32);
    let ways = |plan: usize| {
        let digit = |at: usize| choices[plan / choices.len().pow(at as u32) % choices.len()];
        (0..requests.len()).map(digit).collect::<Vec<Way>>()
    };
    let all = (0..plans).flat_map(|plan| orders.iter().map(move |order| (plan, order)));
    all.map(|(plan, order)| Bench::new(setup, requests, ways(plan)).play(order)).max().unwrap()
}

/// A cluster of one or two engines and two or three requests that it can hardly serve.
fn small_case(seed: u64) -> (Setup, Vec<Arrival>, Vec<u64>) {
    let mut rng = Rng::fork(seed, 31);
    let one_of = |rng: &mut Rng, of: &[u64]| of[rng.below(of.len() as u64) as usize];
    let names = ["llama3-70b-8xa100", "llama3-70b-8xh100", "llama3-70b-8xh200"];
    let mut pool = |role| {
        let mut pool = Pool::new(role, 1, profile(names[rng.below(3) as usize]));
        pool.pass_tokens = one_of(&mut rng, &[256, 2048, 8192]) as u32;
        pool.mix = [Mix::PrefillFirst, Mix::Fixed(512), Mix::Fixed(8192), Mix::Target(40_000)]
            [rng.below(4) as usize];
        pool
    };
    let pools = match seed % 3 {
        0 => vec![pool(Role::Both)],
        1 => vec![pool(Role::Prefill), pool(Role::Decode)],
        _ => vec![pool(Role::Both), pool(Role::Both)],
    };
    let (ttft_us, tbt_us) =
        (one_of(&mut rng, &[300_000, 1_000_000, 3_000_000]), one_of(&mut rng, &[20_000, 40_000, 200_000]));
    let mut setup = setup(pools, ttft_us, tbt_us);
    setup.scheduler.local_prefill = rng.chance_permille(700);
    // Of about a third to three times as much work as there is time.
    let longest = ttft_us / one_of(&mut rng, &[50, 100, 200]);
    let mut at_us = 0;
    let mut requests = Vec::new();
    let most = if setup.pools.len() == 1 { 4 } else { 3 };
    for number in 0..most - rng.below(2) {
        let prompt_tokens = 1 + longest / 4 + rng.below(longest);
        let shared = if rng.chance_permille(500) { 1 + rng.below(8) } else { 0 };
        let blocks = prompt_tokens.div_ceil(BLOCK);
        let ids = (0..blocks).map(|at| if at < shared { at } else { 1000 * (number + 1) + at }).collect();
        let longest_output = one_of(&mut rng, &[1, 4, 60]);
        let output_tokens = 1 + rng.below(longest_output) as u32;
        requests.push(arrival(at_us, prompt_tokens, output_tokens, ids));
        at_us += rng.below(ttft_us / 2) * rng.below(2);
    }
    let delays_us =
        if requests.len() == 3 && setup.pools.len() == 1 { vec![0, ttft_us / 5] } else { vec![0] };
    (setup, requests, delays_us)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn no_schedule_of_few_requests_exceeds_the_bound(seed in any::<u64>()) {
        let (setup, requests, delays_us) = small_case(seed);
        let most = bound(&setup, &requests).in_slo;
        let best = best_schedule(&setup, &requests, &delays_us);
        prop_assert!(best <= most, "{} in SLO, bound {}: {:?}", best, most, requests);
    }
}

#[test]
fn the_bound_is_reached_in_most_small_cases_and_refuses_some_requests() {
    let (mut reached, mut below, mut cases) = (0, 0, 0);
    for seed in 0..90 {
        let (setup, requests, delays_us) = small_case(seed);
        let most = bound(&setup, &requests).in_slo;
        reached += u32::from(best_schedule(&setup, &requests, &delays_us) == most);
        below += u32::from(most < requests.len() as u64);
        cases += 1;
    }
    assert!(reached * 2 > cases, "reached in {reached} of {cases}");
    assert!(below * 5 > cases, "below the requests in {below} of {cases}");
}

/// One coupled engine and prompts of 4,096 tokens without names that want one token each.
fn crowd(at_us: &[u64]) -> (Setup, Vec<Arrival>) {
    let setup = setup(vec![Pool::new(Role::Both, 1, profile("llama3-70b-8xa100"))], 1_500_000, 100_000);
    (setup, at_us.iter().map(|at_us| arrival(*at_us, 4096, 1, Vec::new())).collect())
}

/// The least engine time of such a prompt, by looking at every length of a pass.
fn least_work_us() -> f64 {
    let profile = profile("llama3-70b-8xa100");
    let token = |n: u32| (profile.dense_us(f64::from(n)) - profile.shared_us) / f64::from(n);
    4096.0 * (1..=8192).map(token).fold(f64::INFINITY, f64::min) + profile.attention_us(4096, 0)
}

#[test]
fn a_crowd_is_as_many_as_fit_in_the_time_to_the_deadline() {
    let (setup, requests) = crowd(&[0; 9]);
    let fit = (1_500_000.0 / least_work_us()) as u64;
    assert!((2..9).contains(&fit), "{fit}");
    let most = bound(&setup, &requests);
    assert_eq!(most, UpperBound { in_slo: fit, input_tokens_in_slo: most.input_tokens_in_slo });
    assert_eq!(most.input_tokens_in_slo / 4096, fit, "{most:?}");
}

#[test]
fn idle_time_between_two_crowds_serves_neither() {
    let (setup, requests) = crowd(&[[0; 9], [900_000_000; 9]].concat());
    let alone = bound(&setup, &requests[..9]).in_slo;
    assert!(bound(&setup, &requests).in_slo <= 2 * alone + 1, "{:?}", bound(&setup, &requests));
}

#[test]
fn a_second_engine_doubles_the_bound_and_one_of_half_the_speed_halves_it() {
    let (mut setup, requests) = crowd(&[0; 20]);
    let one = bound(&setup, &requests).in_slo;
    setup.pools[0].count = 2;
    assert!((2 * one..=2 * one + 1).contains(&bound(&setup, &requests).in_slo));
    setup.faults.engine_speed_permille = 500;
    assert_eq!(bound(&setup, &requests).in_slo, one);
}

/// Every pass may take half its time then.
#[test]
fn noise_counts_at_its_best() {
    let (mut setup, requests) = crowd(&[0; 20]);
    let one = bound(&setup, &requests).in_slo;
    setup.faults.engine_noise_permille = 500;
    assert!((2 * one..=2 * one + 1).contains(&bound(&setup, &requests).in_slo));
}

#[test]
fn a_shared_block_is_computed_once_unless_a_pool_keeps_no_cache() {
    let (mut setup, mut requests) = crowd(&[0; 9]);
    let fit = bound(&setup, &requests).in_slo;
    requests.iter_mut().for_each(|request| request.ids = (0..8).collect());
    assert_eq!(bound(&setup, &requests).in_slo, 9, "one prompt is computed, the others find it");
    setup.pools[0].prefix_cache = false;
    assert_eq!(bound(&setup, &requests).in_slo, fit);
}

#[test]
fn a_block_is_charged_by_the_shortest_prompt_that_has_it() {
    let (setup, mut requests) = crowd(&[0; 60]);
    for (request, number) in requests.iter_mut().zip(0..) {
        (request.ids, request.prompt_tokens) = (vec![number], 512);
    }
    let fit = bound(&setup, &requests).in_slo;
    assert!(fit < 40, "{fit} of 60 fit");
    // The simulator's caches go by names: who finds the block of the twin of two tokens finds all of it.
    let twins: Vec<Arrival> = requests.iter().map(|r| arrival(0, 2, 1, r.ids.clone())).collect();
    assert_eq!(bound(&setup, &[requests, twins].concat()).in_slo, 120);
}

#[test]
fn requests_that_are_late_on_an_idle_cluster_count_for_nothing() {
    let (mut setup, mut requests) = crowd(&[0, 0, 0]);
    requests[0].prompt_tokens = 40_000;
    requests[1].output_tokens = 5;
    assert_eq!(
        bound(&setup, &requests).in_slo,
        3 - 1,
        "the first prompt alone takes longer than its objective"
    );
    setup.scheduler.classes[0].tbt_us = 10_000;
    assert_eq!(bound(&setup, &requests).in_slo, 3 - 2, "no step is as short as 10 ms");
    setup.cut_outputs = 1;
    assert_eq!(bound(&setup, &requests).in_slo, 3 - 1, "one token has no gap");
}

#[test]
fn objectives_that_a_request_names_bound_it_in_place_of_its_classs() {
    let own = |arrival: &Arrival| Arrival {
        objectives: RequestObjectives { ttft_us: Some(2_000_000), tbt_us: Some(60_000) },
        ..arrival.clone()
    };
    let (setup_by_class, mut requests) = crowd(&[0, 0, 0, 900_000, 1_000_000, 2_000_000]);
    requests[0].output_tokens = 5;
    let with = |ttft_us, tbt_us| setup(setup_by_class.pools.clone(), ttft_us, tbt_us);
    let named: Vec<Arrival> = requests.iter().map(own).collect();
    let by_class = bound(&with(2_000_000, 60_000), &requests);
    assert_eq!(bound(&with(1_000, 100), &named), by_class);
    assert_eq!(bound(&with(60_000_000, 900_000), &named), by_class);
    assert_ne!(bound(&with(1_000, 100), &requests), by_class);
}

#[test]
fn clients_that_retry_have_no_deadline() {
    let (mut setup, requests) = crowd(&[0; 9]);
    setup.clients = Clients { retries: 1, ..setup.clients };
    assert_eq!(bound(&setup, &requests).in_slo, 9);
}

#[test]
fn answers_beyond_what_decode_nodes_can_hold_and_step_bound_the_requests() {
    let pool = |role| Pool::new(role, 1, profile("llama3-70b-8xa100"));
    let mut setup = setup(vec![pool(Role::Prefill), pool(Role::Decode)], 10_000_000, 100_000);
    setup.scheduler.local_prefill = false;
    // A prefill node has time for all of them. Their answers take more than the decode node's time.
    let prompts = (0..600)
        .map(|n| arrival(0, 20_000, 300, (0..40).map(|b| if b < 39 { b } else { 1000 + n }).collect()));
    let shared: Vec<Arrival> = prompts.collect();
    let most = bound(&setup, &shared).in_slo;
    assert!((100..600).contains(&most), "{most}");
    setup.pools[1].count = 8;
    assert!(bound(&setup, &shared).in_slo > most, "more decode nodes carry more");
}

#[test]
fn no_request_and_an_impossible_cluster() {
    let (mut setup, _) = crowd(&[]);
    assert_eq!(bound(&setup, &[]), UpperBound { in_slo: 0, input_tokens_in_slo: 0 });
    setup.pools[0].pass_tokens = 0;
    assert!(UpperBound::of(&setup, &mut Requests(VecDeque::new())).is_err_and(|e| e.contains("pass_tokens")));
}
