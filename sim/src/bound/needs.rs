//! What each request in SLO needs of the engines at least, and when.
//!
//! *Prefill.* A pass of `n` prompt tokens costs at least `n` times the cheapest token of any pass that the pool makes,
//! what a mixed step saves (`shared_us`) taken off, and the attention of its pairs, which adds up however a prompt is cut.
//! The last token of a prompt is always computed for the prompt itself. A block is charged to the first request of the
//! workload that has it: before that request arrives nobody can compute the block, and before its first token somebody
//! must have. Where prompts disagree about the length of a block, the shortest counts. So caches are free and without
//! limit, and no block is charged twice.
//!
//! *Decode.* A request of `n` tokens takes part in `n − 1` steps at least, since one token may come from a prefill; each
//! loss of an instance may save one more. A step over `b` requests costs `base(b) + slope × context`. The slope is charged
//! to each request by its own context. The base is divided among the requests of the batch: a part by heads (`base / b`),
//! the rest by the room in HBM that the full blocks of their prompts pin, a block that several requests have divided
//! among all of them. The parts of a batch never exceed the whole.
//!
//! *Noise.* Where the times of engines are noisy, every pass and every step may be as short as the noise allows.
//!
//! *When.* Work lies after the arrival (less 1 µs: an engine may begin a pass within the microsecond), prefill work
//! before the TTFT objective, and decode work before that and the gaps, whose mean is at most the TBT objective.

use baton_types::{BlockKey, ChainHasher, Role};
use hashbrown::HashMap;

use crate::engine::{Mix, PS_PER_US};
use crate::setup::{Pool, Setup};
use crate::workload::{Arrival, Workload};
use crate::world::chain_hasher;

/// What rounding to whole picoseconds takes off a pass at most, µs; a pass has at least one token.
const PASS_ROUNDING_US: f64 = 1e-4;
/// Batches up to this size are looked at one by one; above, in ranges of a fiftieth.
const EACH_BATCH: u32 = 64;

/// The engines of one pool at their cheapest.
#[derive(Clone, Debug)]
pub(super) struct PoolCostTable {
    pub prefills: bool,
    pub decodes: bool,
    /// Engines that work side by side: instances, or the nodes of pipelines.
    pub engines: f64,
    /// Nodes of one instance.
    pipeline_nodes: f64,
    /// One prompt token without attention, µs.
    pub token_us: f64,
    /// One pair of a query and a key, µs.
    pub pair_us: f64,
    /// One token of context in one decode step, µs.
    pub context_us: f64,
    /// Ranges of batch sizes: the least base cost of a step in the range, µs, and its largest batch.
    batches: Vec<(f64, f64)>,
    /// Blocks that fit in HBM.
    hbm_blocks: f64,
}

/// What one request in SLO needs at least.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Need {
    pub input_tokens: u64,
    /// When its work may begin, µs.
    pub release_us: u64,
    /// When its prefill work is over, µs.
    pub prefilled_us: u64,
    /// When its decode work is over, µs.
    pub decoded_us: u64,
    /// Prompt tokens to compute, and pairs of their attention.
    pub tokens: f64,
    pub pairs: f64,
    /// Decode steps, and the sum of its context over them, tokens.
    pub steps: f64,
    pub context_tokens: f64,
    /// Blocks that its prompt pins while it is decoded.
    pub room_blocks: f64,
}

/// The requests that could be in SLO on an idle cluster, and the cluster.
#[derive(Clone, Debug)]
pub(super) struct Demand {
    pub needs: Vec<Need>,
    pub pools: Vec<PoolCostTable>,
}

/// A block of the workload's prompts.
#[derive(Clone, Copy, Debug)]
struct BlockUse {
    /// The first request that has it.
    first: usize,
    /// Requests that have it.
    holders: u32,
    /// Its tokens, but not the last of a prompt, where they are fewest.
    tokens: u64,
}

/// Prompt tokens and the pairs of their attention.
#[derive(Clone, Copy, Debug, Default)]
struct PrefillWork {
    tokens: f64,
    pairs: f64,
}

impl PrefillWork {
    /// Adds `tokens` tokens that begin at the position `from`.
    #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
    fn add(&mut self, tokens: u64, from: u64) {
        let n = tokens as f64;
        self.tokens += n;
        self.pairs += n * (from as f64 + f64::midpoint(n, 1.0));
    }
}

impl PoolCostTable {
    /// The costs of a pool where no batch exceeds `most_requests`; none of a pool that has no engines.
    #[expect(clippy::cast_precision_loss, reason = "counts and times are far below 2^53")]
    fn of(pool: &Pool, setup: &Setup, most_requests: u32) -> Option<Self> {
        if pool.role == Role::Store || pool.count == 0 {
            return None;
        }
        let nodes = u64::from(pool.pipeline_nodes);
        let takes_permille = 1000u64.saturating_sub(setup.faults.engine_noise_permille.into()).max(1);
        let permille = (u64::from(setup.faults.engine_speed_permille) * 1000 / takes_permille).max(1);
        let speed = permille as f64 / 1000.0;
        let tokens = pool.hbm_tokens.unwrap_or(pool.profile.kv_capacity_tokens) * nodes;
        let slowed_us = |ps: u64| (ps * 1000 / permille) as f64 / PS_PER_US as f64;
        let step = |batch: u32| pool.profile.step_cost(batch);
        let knots = &pool.profile.decode.batches;
        let slope_ps = knots.iter().map(|batch| step(*batch).slope_ps).min().unwrap_or(0);
        let bounds = batch_bounds(knots, most_requests);
        let base = |batch: u32| slowed_us(step(batch).base_ps);
        let ranges = std::iter::once(1).chain(bounds.iter().copied()).zip(bounds.iter().copied());
        let (prefills, decodes) = parts(pool);
        Some(Self {
            prefills: prefills || decodes && setup.scheduler.local_prefill,
            decodes,
            engines: (u64::from(pool.count) * nodes) as f64,
            pipeline_nodes: nodes as f64,
            token_us: (cheapest_token_us(pool) / speed - PASS_ROUNDING_US).max(0.0),
            pair_us: pool.profile.attention_us(1, 0) / speed,
            context_us: slowed_us(slope_ps),
            batches: ranges.map(|(low, high)| (base(low).min(base(high)), f64::from(high))).collect(),
            hbm_blocks: (tokens / u64::from(setup.scheduler.block_tokens)) as f64,
        })
    }

    /// The part of a step's base cost that a request bears at least, µs.
    pub(super) fn share_us(&self, need: &Need, room_share: f64) -> f64 {
        let by_room = room_share * need.room_blocks / self.hbm_blocks;
        let share = |(base_us, batch): &(f64, f64)| base_us * (by_room + (1.0 - room_share) / batch);
        self.batches.iter().map(share).fold(f64::INFINITY, f64::min)
    }

    /// The shortest decode step with a request of so many tokens in it, µs.
    #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
    fn step_us(&self, context_tokens: u64) -> f64 {
        let base_us = self.batches.iter().map(|(base_us, _)| *base_us).fold(f64::INFINITY, f64::min);
        base_us + self.context_us * context_tokens as f64
    }

    /// The shortest time from the begin to the end of a prefill of one instance, µs.
    fn prefill_us(&self, work: PrefillWork) -> f64 {
        (work.tokens * self.token_us + work.pairs * self.pair_us) / self.pipeline_nodes
    }
}

/// Whether a pool's instances may prefill, and whether they may decode.
fn parts(pool: &Pool) -> (bool, bool) {
    (pool.role.prefills() || pool.may_change_role, pool.role.decodes() || pool.may_change_role)
}

/// Upper bounds of ranges of batch sizes, ascending, from 1 to `most`. The base cost is linear within a range.
fn batch_bounds(knots: &[u32], most: u32) -> Vec<u32> {
    let next = |batch: &u32| Some(batch + 1 + batch.saturating_sub(EACH_BATCH) / 50);
    let ranges = std::iter::successors(Some(1), next).take_while(|batch| *batch < most);
    let mut bounds: Vec<u32> = ranges.chain(knots.iter().copied()).chain([1, most]).collect();
    bounds.retain(|batch| (1..=most).contains(batch));
    bounds.sort_unstable();
    bounds.dedup();
    bounds
}

/// The least cost of a prompt token without attention in any pass of a pool, µs. Between two knots the mean cost of a
/// pass's tokens rises or falls, so that the cheapest pass is at a knot or at an end.
fn cheapest_token_us(pool: &Pool) -> f64 {
    let profile = &pool.profile;
    let mixes = parts(pool).1 && pool.mix != Mix::PrefillFirst;
    let saved_us = if mixes { profile.shared_us } else { 0.0 };
    let most = match pool.mix {
        Mix::Fixed(tokens) => pool.pass_tokens.max(tokens),
        Mix::PrefillFirst | Mix::Target(_) => pool.pass_tokens,
    };
    let knots = profile.prefill.knots_tokens.iter().copied().filter(|knot| (1..most).contains(knot));
    let token_us = |tokens: u32| {
        let tokens = f64::from(tokens);
        (profile.dense_us(tokens) - saved_us).max(0.0) / tokens
    };
    knots.chain([1, most.max(1)]).map(token_us).fold(f64::INFINITY, f64::min)
}

impl Demand {
    /// The demand of a workload on a cluster.
    pub(super) fn of(setup: &Setup, workload: &mut dyn Workload) -> Self {
        let arrivals: Vec<Arrival> = std::iter::from_fn(|| workload.next()).collect();
        let most_requests = u32::try_from(arrivals.len()).unwrap_or(u32::MAX).max(1);
        let pools: Vec<PoolCostTable> =
            setup.pools.iter().filter_map(|pool| PoolCostTable::of(pool, setup, most_requests)).collect();
        let chains: Vec<Vec<BlockKey>> =
            (0..).zip(&arrivals).map(|(at, arrival)| chain(setup, at, arrival)).collect();
        let block_tokens = u64::from(setup.scheduler.block_tokens);
        let mut blocks: HashMap<BlockKey, BlockUse> = HashMap::new();
        for (at, (arrival, chain)) in arrivals.iter().zip(&chains).enumerate() {
            for (key, from) in chain.iter().zip(positions(block_tokens)) {
                let tokens = tokens_of(arrival, from, block_tokens);
                let new = BlockUse { first: at, holders: 0, tokens };
                let block = blocks.entry(*key).or_insert(new);
                (block.holders, block.tokens) = (block.holders + 1, block.tokens.min(tokens));
            }
        }
        let mut offered_us = 0;
        let mut needs = Vec::with_capacity(arrivals.len());
        for (at, (arrival, chain)) in arrivals.iter().zip(&chains).enumerate() {
            offered_us = arrival.at_us.max(offered_us);
            let request = OfferedRequest { at, offered_us, arrival, chain };
            needs.extend(request.need(setup, &pools, &blocks));
        }
        Self { needs, pools }
    }
}

/// The names of a request's blocks, its own where a pool keeps no cache.
fn chain(setup: &Setup, at: u64, arrival: &Arrival) -> Vec<BlockKey> {
    let shares = setup.pools.iter().all(|pool| pool.prefix_cache);
    let mut hasher = if shares { chain_hasher() } else { ChainHasher::new(0, &at.to_le_bytes()) };
    arrival.ids.iter().map(|id| hasher.push_id(*id)).collect()
}

/// Where the blocks of a prompt begin, tokens.
fn positions(block_tokens: u64) -> impl Iterator<Item = u64> {
    (0..).map(move |block| block * block_tokens)
}

/// Tokens of the block at the position `from`, the last token of the prompt left out.
fn tokens_of(arrival: &Arrival, from: u64, block_tokens: u64) -> u64 {
    (arrival.prompt_tokens - 1).saturating_sub(from).min(block_tokens)
}

/// A request as it is offered.
struct OfferedRequest<'a> {
    at: usize,
    offered_us: u64,
    arrival: &'a Arrival,
    chain: &'a [BlockKey],
}

impl OfferedRequest<'_> {
    /// Its need; none if it cannot be in SLO on an idle cluster.
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    fn need(
        &self,
        setup: &Setup,
        pools: &[PoolCostTable],
        blocks: &HashMap<BlockKey, BlockUse>,
    ) -> Option<Need> {
        let classes = &setup.scheduler.classes;
        let class = &classes[usize::from(self.arrival.class).min(classes.len() - 1)];
        let block_tokens = u64::from(setup.scheduler.block_tokens);
        let prompt_tokens = self.arrival.prompt_tokens;
        // Nobody else computes these: its last token, tokens without a name, and blocks that it alone has.
        let mut own = PrefillWork::default();
        own.add(1, prompt_tokens - 1);
        let named_tokens = self.chain.len() as u64 * block_tokens;
        own.add((prompt_tokens - 1).saturating_sub(named_tokens), named_tokens);
        let (mut shared, mut room_blocks) = (PrefillWork::default(), 0.0);
        for (key, from) in self.chain.iter().zip(positions(block_tokens)) {
            let block = blocks.get(key)?;
            if block.first == self.at {
                let work = if block.holders == 1 { &mut own } else { &mut shared };
                work.add(block.tokens, from);
            }
            // A partial last block is renamed when an answer goes on after a loss.
            let full = from + block_tokens <= prompt_tokens;
            room_blocks += if full { 1.0 / f64::from(block.holders) } else { 0.0 };
        }
        let gaps = u64::from(self.output_tokens(setup)) - 1;
        let steps = gaps.saturating_sub(spared_steps(setup));
        let least =
            |cost: &dyn Fn(&PoolCostTable) -> f64| pools.iter().map(cost).fold(f64::INFINITY, f64::min);
        let alone_us = least(&|pool| if pool.prefills { pool.prefill_us(own) } else { f64::INFINITY });
        let step_us = least(&|pool| if pool.decodes { pool.step_us(prompt_tokens) } else { f64::INFINITY });
        // With so many of its gaps being steps, the longest tenth of them is no shorter than a step.
        let steps_decide = gaps > 0 && steps * 10 >= gaps;
        let (ttft_us, tbt_us) = self.arrival.objectives.in_force(class);
        if alone_us > (ttft_us + 1) as f64 || steps_decide && step_us > (tbt_us + 2) as f64 {
            return None;
        }
        let prefilled_us = self.offered_us.saturating_add(ttft_us.max(1));
        Some(Need {
            input_tokens: prompt_tokens,
            release_us: self.offered_us.saturating_sub(1),
            prefilled_us,
            decoded_us: prefilled_us.saturating_add(gaps.saturating_mul(tbt_us.saturating_add(2))),
            tokens: own.tokens + shared.tokens,
            pairs: own.pairs + shared.pairs,
            steps: steps as f64,
            context_tokens: (steps * prompt_tokens) as f64 + (steps * steps.saturating_sub(1) / 2) as f64,
            room_blocks,
        })
    }

    fn output_tokens(&self, setup: &Setup) -> u32 {
        let cut = if setup.cut_outputs == 0 { u32::MAX } else { setup.cut_outputs };
        self.arrival.output_tokens.min(cut).max(1)
    }
}

/// Tokens beside the first that may come from prefills instead of steps: one of each repeated prefill.
fn spared_steps(setup: &Setup) -> u64 {
    if setup.faults.deaths > 0 { u64::from(setup.scheduler.max_retries) + 1 } else { 0 }
}
