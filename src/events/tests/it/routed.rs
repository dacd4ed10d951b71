//! Measures how lost announcements affect the requests that the scheduler routes by them. Two clusters get the same
//! requests and restart at the same times. One loses one batch in twenty, and the other loses none.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use baton_scheduler::{Conductor, Effect, Input, InstanceSpec, Request, SchedulerConfig};
use baton_types::{
    CacheEvent, CostProfile, DecodeCost, Epoch, FitReport, InstanceId, PrefillCost, RequestId, Rng, Role,
    ValidRange,
};

use crate::engine::Prompt;
use crate::truth::{ENGINES, Place, ROUNDS};

const BLOCK_TOKENS: u32 = 4;
/// One more than the chain has, so that there is always something to compute.
const PROMPT_TOKENS: u64 = 6 * BLOCK_TOKENS as u64 + 1;
/// Between two requests: three engines are busy for most of the time.
const APART_US: u64 = 4_000;
const DECODE: InstanceId = InstanceId(99);

/// A millisecond for a token of a prompt.
fn profile() -> Arc<CostProfile> {
    Arc::new(CostProfile {
        name: "even".into(),
        source: "made up for tests".into(),
        kv_bytes_per_token: 64,
        kv_capacity_tokens: 1 << 20,
        layers: 2,
        shared_us: 0.0,
        fit: FitReport::default(),
        valid: ValidRange::default(),
        prefill: PrefillCost {
            knots_tokens: vec![0, 1000],
            knots_us: vec![100.0, 1_000_100.0],
            attention_ps_per_pair: 0.0,
        },
        decode: DecodeCost {
            batches: vec![1, 64],
            base_us: vec![100.0, 200.0],
            context_ps_per_token: vec![0.0, 0.0],
        },
    })
}

fn spec(id: InstanceId, role: Role) -> InstanceSpec {
    InstanceSpec {
        id,
        epoch: Epoch(1),
        role,
        profile: profile(),
        capacity_tokens: 1 << 20,
        pass_tokens: 1_024,
        pipeline_nodes: 1,
        mixed_chunk_tokens: None,
        max_running: None,
        net_bytes_per_s: 1 << 34,
        host_bytes_per_s: 1 << 34,
        ssd_bytes_per_s: 0,
        may_change_role: false,
        engine_moves_kv: false,
        kind: 0,
    }
}

fn conductor() -> Conductor {
    let mut config = SchedulerConfig {
        block_tokens: BLOCK_TOKENS,
        // These engines fetch nothing from each other.
        fetch: false,
        replicate: false,
        local_prefill: false,
        ..SchedulerConfig::default()
    };
    config.classes[0].ttft_us = 60_000_000;
    config.classes[0].tbt_us = 60_000_000;
    let mut core = Conductor::new(config).unwrap();
    let instances = (0..ENGINES).map(|at| spec(InstanceId(at as u32), Role::Prefill));
    for one in instances.chain([spec(DECODE, Role::Decode)]) {
        core.step(0, Input::InstanceJoined(one), &mut Vec::new());
    }
    core
}

/// Engines, and the scheduler that routes by what it hears of them.
struct Cluster {
    places: Vec<Place>,
    core: Conductor,
    now_us: u64,
    /// Requests that are running: when each will end, and how many tokens it found cached.
    running: BTreeSet<(u64, RequestId, u64)>,
    /// Requests that the scheduler holds back.
    waiting: BTreeMap<RequestId, Prompt>,
    /// When each engine is done with what it has.
    busy_until_us: Vec<u64>,
    hit_tokens: u64,
    sent: u64,
}

impl Cluster {
    async fn new(one_in: u64) -> Self {
        let mut places = Vec::new();
        for seed in 0..ENGINES {
            places.push(Place::new(seed, one_in).await);
        }
        let busy_until_us = vec![0; places.len()];
        let (running, waiting) = (BTreeSet::new(), BTreeMap::new());
        Self { places, core: conductor(), now_us: 0, running, waiting, busy_until_us, hit_tokens: 0, sent: 0 }
    }

    /// The scheduler hears what there is to hear.
    fn hear(&mut self) {
        for (place, at) in self.places.iter_mut().zip(0..) {
            for change in place.follower.news.drain(..) {
                let event = CacheEvent { instance: InstanceId(at), epoch: Epoch(1), change };
                self.core.step(self.now_us, Input::Cache(event), &mut Vec::new());
            }
        }
    }

    /// One request comes, and whatever has ended by then ends.
    async fn ask(&mut self, number: u64, prompt: &Prompt) {
        self.now_us += APART_US;
        self.end_until(self.now_us).await;
        self.hear();
        let request = Request {
            id: RequestId(number),
            prompt_tokens: PROMPT_TOKENS,
            chain: prompt.chain(),
            ..Request::default()
        };
        self.waiting.insert(request.id, prompt.clone());
        self.step(self.now_us, Input::RequestArrived(request)).await;
        assert_eq!(self.core.check(), Ok(()));
    }

    /// One fact for the scheduler, and whatever it sends to an engine then.
    async fn step(&mut self, now_us: u64, input: Input) {
        let mut effects = Vec::new();
        self.core.step(now_us, input, &mut effects);
        for effect in effects {
            match effect {
                Effect::StartPrefill { request, instance, .. } => {
                    self.start(now_us, request, instance.index()).await;
                }
                Effect::Reject(why) => panic!("{why:?}"),
                _ => {}
            }
        }
    }

    async fn start(&mut self, now_us: u64, request: RequestId, at: usize) {
        let prompt = self.waiting.remove(&request).expect("it is sent once");
        let hit = self.places[at].engine.holds(&prompt) as u64 * u64::from(BLOCK_TOKENS);
        self.hit_tokens += hit;
        self.sent += 1;
        self.places[at].serve(&prompt).await;
        self.busy_until_us[at] = self.busy_until_us[at].max(now_us) + 100 + (PROMPT_TOKENS - hit) * 1_000;
        self.running.insert((self.busy_until_us[at], request, hit));
    }

    /// Ends the requests that are due by then, and wakes the scheduler at its deadlines.
    async fn end_until(&mut self, now_us: u64) {
        loop {
            let wake_us = self.core.next_deadline().unwrap_or(u64::MAX);
            let (at_us, request, hit) = match self.running.first() {
                Some(first) if first.0 <= wake_us.min(now_us) => *first,
                _ if wake_us <= now_us.min(u64::MAX - 1) => {
                    self.step(wake_us, Input::TimerFired).await;
                    continue;
                }
                _ => return,
            };
            self.running.pop_first();
            let compute_us = 100 + (PROMPT_TOKENS - hit) * 1_000;
            for input in [
                Input::PrefillFinished { request, compute_us, cached_tokens: hit },
                Input::HandoffFinished { request },
                Input::DecodeFinished { request, output_tokens: 2, first_us: 0, tbt_us: 0 },
            ] {
                self.step(at_us, input).await;
            }
        }
    }

    /// The router starts anew, and learns from what the engines still repeat.
    async fn known_anew(&mut self) {
        self.end_until(u64::MAX).await;
        assert!(self.waiting.is_empty());
        self.now_us = self.busy_until_us.iter().copied().fold(self.now_us, u64::max);
        self.core = conductor();
        for place in &mut self.places {
            place.known_anew().await;
        }
    }

    fn lost(&self) -> u64 {
        self.places.iter().map(|place| place.proxy.lost.load(Ordering::SeqCst)).sum()
    }
}

#[tokio::test]
async fn the_scheduler_routes_by_what_it_hears_nearly_as_well_as_if_nothing_were_lost() {
    let mut rng = Rng::new(77);
    let mut clusters = [Cluster::new(20).await, Cluster::new(0).await];
    let (mut restarts, mut anew, mut number) = (0, 0, 0);
    for round in 0..ROUNDS {
        for at in 0..ENGINES as usize {
            if rng.below(15) == 0 {
                restarts += 1;
                for cluster in &mut clusters {
                    cluster.places[at].restart(1000 + (round * 10 + at) as u64).await;
                }
            }
        }
        if rng.below(15) == 0 {
            anew += 1;
            for cluster in &mut clusters {
                cluster.known_anew().await;
            }
        }
        for _ in 0..30 {
            let prompt = Prompt::often(&mut rng);
            number += 1;
            for cluster in &mut clusters {
                cluster.ask(number, &prompt).await;
            }
        }
    }
    for cluster in &mut clusters {
        for place in &mut cluster.places {
            place.follower.reach(place.next).await;
        }
        cluster.hear();
        // The scheduler's index must match the engines' caches.
        for (place, at) in cluster.places.iter().zip(0..) {
            let (held, truth) = (cluster.core.index().held_blocks(InstanceId(at)), place.engine.truth());
            assert_eq!(held, truth.len(), "engine {at}");
        }
    }
    let [lossy, whole] = &clusters;
    let (hit, best) = (lossy.hit_tokens, whole.hit_tokens);
    println!(
        "{} batches lost, {restarts} engine restarts, {anew} router restarts, {} requests: {hit} of {best} hit tokens ({:.1} %)",
        lossy.lost(),
        lossy.sent,
        hit as f64 * 100.0 / best as f64
    );
    assert_eq!(whole.lost(), 0);
    assert!(lossy.lost() > 40 && restarts > 5 && anew > 2, "{} {restarts} {anew}", lossy.lost());
    let asked = whole.sent * PROMPT_TOKENS;
    assert!(best * 3 > asked, "{best} of {asked} tokens: a cache that is not used proves nothing");
    assert!(hit * 100 >= best * 95, "{hit} of {best} hit tokens");
}
