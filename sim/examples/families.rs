//! Baton's policy beside all others on workloads and clusters that it was not built on: docs/scheduling.md.
//!
//! `cargo run --release -p baton-sim --example families [WORD]` prints a row for each load whose name holds the word;
//! `families mean COUNT [WORD]` plays so many neighbouring paces of each, with `baton` alone, because one run of a row says
//! little where decode instances are short of room; `families search FROM TO` draws a load for each number: a workload, a cluster, objectives and what may be wrong with it.

#[path = "families/search.rs"]
mod search;
#[path = "families/workloads.rs"]
mod workloads;

use std::num::NonZeroU32;
use std::sync::Arc;

use baton_scheduler::{AdmissionMode, PolicyName, SchedulerConfig};
use baton_sim::engine::Mix;
use baton_sim::faults::Fault;
use baton_sim::metrics::{Outcome, Status};
use baton_sim::setup::NO_STAGE_LIMIT_US;
use baton_sim::{Pool, Setup, TraceWorkload, Workload, World, profiles};
use baton_traces::{Record, Trace};
use baton_types::simulated::FaultPlan;
use baton_types::{Role, SloClass};
use rayon::prelude::*;

/// One load: a workload, a cluster (prefill, decode and coupled instances), objectives, the pace.
#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    workload: &'static str,
    instances: [u32; 3],
    objective_ms: (u64, u64),
    speed: f64,
    /// Speed of all engines beside their profile, per mille.
    engine_permille: u64,
    /// Prompt tokens that a coupled engine puts into a step, with a fixed budget.
    chunk: u32,
    /// Requests that an engine runs at a time at most.
    max_running: Option<u32>,
    /// KV tokens in HBM of each instance, if fewer than beside the weights of its profile.
    hbm_tokens: Option<u64>,
    /// KV tokens in DRAM of each instance.
    dram_tokens: u64,
    /// Network rate each way that is stated, Gbit/s.
    net_gbps: u64,
    /// The true rate beside it, per mille.
    link_permille: u32,
    /// The GPUs of the first half of each pool, and of the second.
    gpus: [&'static str; 2],
    /// Instances that die and come back empty.
    deaths: u32,
    /// Instances of a fifth to four fifths of their speed, for the whole run.
    slow_nodes: u32,
}

const fn load(name: &'static str, workload: &'static str, instances: [u32; 3], speed: f64) -> Load {
    Load {
        name,
        workload,
        instances,
        objective_ms: (30_000, 100),
        speed,
        engine_permille: 1000,
        chunk: 512,
        max_running: None,
        hbm_tokens: None,
        dram_tokens: 0,
        net_gbps: 800,
        link_permille: 1000,
        gpus: ["8xa100"; 2],
        deaths: 0,
        slow_nodes: 0,
    }
}

/// Each near or beyond what the cluster serves.
const LOADS: &[Load] = &[
    load("conversation x3", "conversation", [8, 8, 0], 3.0),
    load("conversation x4", "conversation", [8, 8, 0], 4.0),
    load("conversation x6.7", "conversation", [8, 8, 0], 6.66),
    Load { objective_ms: (5_000, 100), ..load("conversation tight x3", "conversation", [8, 8, 0], 3.0) },
    Load { engine_permille: 667, ..load("conversation misfit x3", "conversation", [8, 8, 0], 3.0) },
    load("conversation 1+1", "conversation", [1, 1, 0], 0.59),
    load("conversation 2+1", "conversation", [2, 1, 0], 1.0),
    load("conversation 13+3", "conversation", [13, 3, 0], 5.0),
    load("conversation 15+1", "conversation", [15, 1, 0], 2.0),
    load("conversation coupled", "conversation", [0, 0, 16], 1.2),
    Load { objective_ms: (10_000, 50), ..load("conversation TBT 50 13+3", "conversation", [13, 3, 0], 5.0) },
    Load { objective_ms: (10_000, 50), ..load("conversation TBT 50 14+2", "conversation", [14, 2, 0], 4.0) },
    Load {
        objective_ms: (10_000, 60),
        ..load("conversation TBT 60 coupled", "conversation", [0, 0, 16], 1.2)
    },
    // As vLLM and SGLang are started without a word about it.
    Load {
        objective_ms: (2_000, 60),
        chunk: 8192,
        ..load("chat whole servers x12", "chat", [0, 0, 16], 12.0)
    },
    Load { chunk: 8192, ..load("conversation whole servers", "conversation", [0, 0, 16], 1.0) },
    // Servers of both roles beside the two pools.
    Load { objective_ms: (2_000, 40), ..load("chat 6+2+4 x16", "chat", [6, 2, 4], 16.0) },
    load("toolagent x5", "toolagent", [8, 8, 0], 5.0),
    Load { objective_ms: (2_000, 60), ..load("code x8", "code", [8, 8, 0], 8.0) },
    Load { objective_ms: (2_000, 60), ..load("chat x14", "chat", [8, 8, 0], 14.0) },
    Load { objective_ms: (2_000, 60), ..load("chat x26", "chat", [8, 8, 0], 26.0) },
    load("unique x3.2", "unique", [8, 8, 0], 3.2),
    load("shuffled x4", "shuffled", [8, 8, 0], 4.0),
    load("burst10 x3", "burst10", [8, 8, 0], 3.0),
    load("heavyout x5", "heavyout", [8, 8, 0], 5.0),
    load("long1pct x4", "long1pct", [8, 8, 0], 4.0),
    load("reasoning x7", "reasoning", [8, 8, 0], 7.0),
    Load { max_running: Some(64), ..load("reasoning 64 at a time x7", "reasoning", [8, 8, 0], 7.0) },
    Load { objective_ms: (10_000, 50), ..load("reasoning TBT 50 x7", "reasoning", [8, 8, 0], 7.0) },
    load("bimodal x8", "bimodal", [8, 8, 0], 8.0),
    load("doctree x10", "doctree", [8, 8, 0], 10.0),
    // A document alone takes up to nine seconds.
    Load { objective_ms: (2_000, 100), ..load("doctree tight x3", "doctree", [8, 8, 0], 3.0) },
    load("flash x2", "flash", [8, 8, 0], 2.0),
    load("agents x12", "agents", [8, 8, 0], 12.0),
    load("agents 13+3 x6", "agents", [13, 3, 0], 6.0),
    load("agents 13+3 x12", "agents", [13, 3, 0], 12.0),
    Load { max_running: Some(64), ..load("agents 64 at a time 13+3 x6", "agents", [13, 3, 0], 6.0) },
    load("classes2 x6", "classes2", [8, 8, 0], 6.0),
    load("classes2 13+3", "classes2", [13, 3, 0], 5.0),
    load("classes2 14+2", "classes2", [14, 2, 0], 4.0),
    load("classes2 few 13+3", "classes2few", [13, 3, 0], 5.0),
    load("classes2 few 26+6", "classes2few", [26, 6, 0], 10.0),
    load("classes3 x5", "classes3", [8, 8, 0], 5.0),
    load("classes3 x8", "classes3", [8, 8, 0], 8.0),
    load("flood x3", "flood", [8, 8, 0], 3.0),
    load("flood x5", "flood", [8, 8, 0], 5.0),
    Load { dram_tokens: 1_500_000, ..load("conversation DRAM 13+3 x8.75", "conversation", [13, 3, 0], 8.75) },
    Load { dram_tokens: 1_500_000, ..load("conversation DRAM 14+2 x6.8", "conversation", [14, 2, 0], 6.8) },
    Load { max_running: Some(64), ..load("conversation 64 at a time 13+3", "conversation", [13, 3, 0], 5.0) },
    Load { max_running: Some(32), ..load("conversation 32 at a time 13+3", "conversation", [13, 3, 0], 5.0) },
    // KV of an engine that holds a few of its prompts.
    Load { hbm_tokens: Some(32_768), ..load("chat KV 32k whole x1.8", "chat", [0, 0, 4], 1.8) },
    Load { hbm_tokens: Some(65_536), ..load("chat KV 64k whole x2.5", "chat", [0, 0, 4], 2.5) },
    Load {
        hbm_tokens: Some(65_536),
        objective_ms: (2_000, 60),
        ..load("chat KV 64k whole tight x2.5", "chat", [0, 0, 4], 2.5)
    },
    Load { hbm_tokens: Some(131_072), ..load("chat KV 128k whole x3.5", "chat", [0, 0, 4], 3.5) },
    Load { hbm_tokens: Some(32_768), ..load("chat KV 32k 2+2 x1.2", "chat", [2, 2, 0], 1.2) },
    Load { hbm_tokens: Some(65_536), ..load("chat KV 64k 2+2 x2", "chat", [2, 2, 0], 2.0) },
    Load {
        hbm_tokens: Some(131_072),
        ..load("conversation KV 128k whole x1.5", "conversation", [0, 0, 16], 1.5)
    },
    Load { hbm_tokens: Some(131_072), ..load("conversation KV 128k x2", "conversation", [8, 8, 0], 2.0) },
    Load { net_gbps: 25, ..load("conversation 25 Gbit/s x2.7", "conversation", [8, 8, 0], 2.7) },
    Load { net_gbps: 10, ..load("conversation 10 Gbit/s x1", "conversation", [8, 8, 0], 1.0) },
    Load { net_gbps: 25, ..load("agents 25 Gbit/s x6", "agents", [8, 8, 0], 6.0) },
    Load { net_gbps: 25, objective_ms: (2_000, 60), ..load("chat 25 Gbit/s x14", "chat", [8, 8, 0], 14.0) },
    Load {
        net_gbps: 100,
        link_permille: 250,
        ..load("conversation 25 for 100 Gbit/s x2.7", "conversation", [8, 8, 0], 2.7)
    },
    Load {
        net_gbps: 8,
        link_permille: 3125,
        ..load("conversation 25 for 8 Gbit/s x2.7", "conversation", [8, 8, 0], 2.7)
    },
    Load {
        net_gbps: 100,
        link_permille: 250,
        ..load("agents 25 for 100 Gbit/s x6", "agents", [8, 8, 0], 6.0)
    },
    Load {
        net_gbps: 100,
        link_permille: 250,
        objective_ms: (2_000, 60),
        ..load("chat 25 for 100 Gbit/s x14", "chat", [8, 8, 0], 14.0)
    },
    Load { gpus: ["8xa100", "8xh100"], ..load("conversation mixed GPUs x5", "conversation", [8, 8, 0], 5.0) },
    Load {
        gpus: ["8xa100", "8xh100"],
        ..load("conversation mixed coupled x2", "conversation", [0, 0, 16], 2.0)
    },
    Load { engine_permille: 1500, ..load("conversation fast misfit x5", "conversation", [8, 8, 0], 5.0) },
    Load { slow_nodes: 4, ..load("conversation slow nodes x3", "conversation", [8, 8, 0], 3.0) },
    Load { slow_nodes: 4, ..load("conversation slow coupled x1", "conversation", [0, 0, 16], 1.0) },
    Load { deaths: 8, ..load("conversation deaths x3", "conversation", [8, 8, 0], 3.0) },
];

/// The tenant that floods.
const FLOODS: &str = "tenant-0";

/// What Baton is compared with; the last two take Baton's admission.
const OTHERS: [(PolicyName, AdmissionMode); 8] = [
    (PolicyName::Mooncake, AdmissionMode::Early),
    (PolicyName::GlobalCache, AdmissionMode::Early),
    (PolicyName::Lmetric, AdmissionMode::Early),
    (PolicyName::LeastLoaded, AdmissionMode::Early),
    (PolicyName::Mooncake, AdmissionMode::EarlyPredict),
    (PolicyName::DynamoWspt, AdmissionMode::None),
    (PolicyName::Mooncake, AdmissionMode::Slo),
    (PolicyName::LocalCache, AdmissionMode::Slo),
];

/// What a run came to.
struct RunSummary {
    in_slo: usize,
    /// Completed with a first token beyond the objective.
    late: usize,
    tokens_in_slo: u64,
    /// In SLO and all, of each class.
    classes: Vec<(usize, usize)>,
    /// In SLO and all, of the tenant that floods and of all others.
    flood: [(usize, usize); 2],
}

fn classes(load: &Load) -> Vec<SloClass> {
    let class = |name: &str, ttft_s: u64, weight: u32, priority: i32| SloClass {
        name: name.to_owned(),
        ttft_us: ttft_s * 1_000_000,
        weight,
        priority,
        ..SloClass::default()
    };
    if load.workload.starts_with("classes2") {
        // Those of docs/classes.md, with a longer TTFT: prompts of the trace take up to nine seconds.
        let of = |name, ttft_s, tbt_us, priority| SloClass { tbt_us, ..class(name, ttft_s, 1, priority) };
        return vec![of("interactive", 10, 50_000, 1), of("batch", 60, 200_000, 0)];
    }
    if load.workload == "classes3" {
        // Standard and batch are of one band.
        return vec![class("standard", 30, 2, 0), class("interactive", 5, 4, 1), class("batch", 120, 1, 0)];
    }
    let (ttft_ms, tbt_ms) = load.objective_ms;
    vec![SloClass { ttft_us: ttft_ms * 1000, tbt_us: tbt_ms * 1000, ..SloClass::default() }]
}

/// A policy with its admission, and whether steps keep the target or have a fixed budget.
type Way = (PolicyName, AdmissionMode, bool);

fn setup(load: &Load, (policy, admission, keeps_target): Way) -> Result<Setup, String> {
    let gpus =
        |name: &str| profiles::named(&format!("llama3-70b-{name}")).map(Arc::new).map_err(|e| e.to_string());
    let [profile, second] = [gpus(load.gpus[0])?, gpus(load.gpus[1])?];
    let config = SchedulerConfig { policy, admission, classes: classes(load), ..SchedulerConfig::default() };
    let [prefills, decodes, both] = load.instances;
    let chunk = if both > 0 { load.chunk } else { 8192 };
    let mix = if keeps_target { Mix::Target(config.step_target_us()) } else { Mix::Fixed(chunk) };
    let mut setup = Setup::disaggregated(prefills, decodes, &profile, config);
    setup.pools.push(Pool::new(Role::Both, both, profile));
    if load.gpus[0] != load.gpus[1] {
        let halves = setup.pools.iter_mut().map(|pool| {
            pool.count /= 2;
            Pool { profile: Arc::clone(&second), ..pool.clone() }
        });
        let halves: Vec<Pool> = halves.collect();
        setup.pools.extend(halves);
    }
    setup.pools.retain(|pool| pool.count > 0);
    for pool in &mut setup.pools {
        (pool.mix, pool.dram_tokens, pool.max_running) = (mix, load.dram_tokens, load.max_running);
        (pool.hbm_tokens, pool.net_bytes_per_s) = (load.hbm_tokens, load.net_gbps * 125_000_000);
    }
    let (deaths, slow_nodes, link_speed_permille) = (load.deaths, load.slow_nodes, load.link_permille);
    setup.faults =
        FaultPlan { deaths, slow_nodes, slow_nodes_last: true, link_speed_permille, ..FaultPlan::default() };
    (setup.keep_outcomes, setup.sample_us) = (true, 0);
    if policy != PolicyName::Baton {
        // They serve every request, however late.
        setup.stage_floor_us = NO_STAGE_LIMIT_US;
    }
    Ok(setup)
}

fn run(load: &Load, trace: &Arc<Trace>, way: Way) -> Result<RunSummary, String> {
    let classes = classes(load);
    let names = classes.iter().map(|class| class.name.clone()).collect();
    let workload = TraceWorkload::new(Arc::clone(trace), load.speed).with_classes(names);
    let floods = workload.tenants().iter().position(|name| name == FLOODS);
    let mut world = World::new(setup(load, way)?, Box::new(workload))?;
    let slowed = (load.engine_permille != 1000).then_some(0..load.instances.iter().sum());
    slowed.into_iter().flatten().for_each(|at| world.inject(0, Fault::Slow(at, load.engine_permille)));
    world.run()?;
    let class = |outcome: &Outcome| &classes[usize::from(outcome.class)];
    let first = |o: &&Outcome| o.status == Status::Completed && o.ttft_us <= class(o).ttft_us;
    let good = |o: &&Outcome| first(o) && (o.gaps.count == 0 || o.gaps.worst_tenth_us <= class(o).tbt_us);
    let all = world.outcomes();
    let of = |at: usize| all.iter().filter(move |o| usize::from(o.class) == at);
    let flood = |o: &&Outcome| floods.is_some_and(|at| o.tenant as usize == at + 1);
    let by = |floods: bool| all.iter().filter(move |o| flood(o) == floods);
    Ok(RunSummary {
        in_slo: all.iter().filter(good).count(),
        late: all.iter().filter(|o| o.status == Status::Completed && !first(o)).count(),
        tokens_in_slo: all.iter().filter(good).map(|o| o.prompt_tokens).sum(),
        classes: (0..classes.len()).map(|at| (of(at).filter(good).count(), of(at).count())).collect(),
        flood: [true, false].map(|floods| (by(floods).filter(good).count(), by(floods).count())),
    })
}

/// A run of Baton's policy on the engines of its cluster.
fn baton(load: &Load, trace: &Arc<Trace>, keeps_target: bool) -> Result<RunSummary, String> {
    // Whole servers get prompts in parts, so their steps keep the target as those of Baton's own engine do.
    let parts = load.instances[0] == 0;
    run(load, trace, (PolicyName::Baton, AdmissionMode::Auto, keeps_target || parts))
}

/// The best of the others: requests and prompt tokens in SLO, and its name.
fn best_other(load: &Load, trace: &Arc<Trace>) -> Result<(usize, u64, String), String> {
    let others: Result<Vec<_>, String> = OTHERS
        .par_iter()
        .map(|(policy, admission)| {
            let score = run(load, trace, (*policy, *admission, false))?;
            Ok((score.in_slo, score.tokens_in_slo, format!("{}, {}", policy.name(), admission.name())))
        })
        .collect();
    Ok(others?.into_iter().max().expect("there are others"))
}

#[expect(clippy::cast_precision_loss, reason = "figures of a table")]
fn row(load: &Load, trace: &Arc<Trace>) -> Result<String, String> {
    let all = trace.records.len();
    let tokens: u64 = trace.records.iter().map(|row| row.input_length).sum();
    let share = |part: u64| 100.0 * part as f64 / tokens as f64;
    let (fixed, own) = (baton(load, trace, false)?, baton(load, trace, true)?);
    let (best, best_tokens, name) = best_other(load, trace)?;
    let attained = |(good, all): &(usize, usize)| format!("{:.1} %", 100.0 * *good as f64 / *all as f64);
    let mut classes: Vec<String> = Vec::new();
    if fixed.classes.len() > 1 {
        classes.extend(fixed.classes.iter().map(attained));
    }
    if load.workload == "flood" {
        let is_flood = |row: &&Record| row.hash_ids.iter().any(|id| id >> workloads::FLOOD_BIT > 0);
        let rows = trace.records.iter().filter(|row| !is_flood(row));
        let calm = Arc::new(Trace { records: rows.cloned().collect(), ..(**trace).clone() });
        let calm = baton(load, &calm, false)?;
        let [flood, others] = &fixed.flood;
        classes.push(format!("others {}, without the flood {}", attained(others), attained(&calm.flood[1])));
        classes.push(format!("the flood {}", attained(flood)));
    }
    Ok(format!(
        "| {} | {all} | {} / {:.1} % | {} | {best} / {:.1} % | {name} | {:+.1} % | {} | {} / {:.1} % |",
        load.name,
        fixed.in_slo,
        share(fixed.tokens_in_slo),
        fixed.late,
        share(best_tokens),
        100.0 * (fixed.in_slo as f64 - best as f64) / all as f64,
        classes.join(", "),
        own.in_slo,
        share(own.tokens_in_slo)
    ))
}

/// Neighbouring paces are so far apart, as a share of the pace.
const APART: f64 = 0.006;

/// The mean of a load at so many paces about its own, and each of them.
fn mean_row(load: &Load, trace: &Arc<Trace>, count: u32) -> Result<String, String> {
    let at = |nth: u32| {
        let speed = load.speed * (1.0 + APART * (f64::from(nth) - f64::from(count - 1) / 2.0));
        baton(&Load { speed, ..*load }, trace, false)
    };
    let runs = (0..count).into_par_iter().map(at).collect::<Result<Vec<RunSummary>, String>>()?;
    let mean = |of: fn(&RunSummary) -> usize| runs.iter().map(of).sum::<usize>() as f64 / f64::from(count);
    let each: Vec<String> = runs.iter().map(|run| run.in_slo.to_string()).collect();
    let (in_slo, late) = (mean(|run| run.in_slo), mean(|run| run.late));
    Ok(format!("| {} | {in_slo:.0} | {late:.0} | {} |", load.name, each.join(" ")))
}

fn main() -> Result<(), String> {
    let mut args = std::env::args().skip(1);
    let mut word = args.next().unwrap_or_default();
    if word == "search" {
        return search::run_all();
    }
    let mut count = None;
    if word == "mean" {
        let given = args.next().unwrap_or_default();
        let paces: NonZeroU32 =
            given.parse().map_err(|e| format!("families mean {given:?}: a count of paces: {e}"))?;
        count = Some(paces.get());
        word = args.next().unwrap_or_default();
        println!("| load | mean of {paces} paces | late | each |");
        println!("|---|---|---|---|");
    } else {
        println!(
            "| load | requests | baton | late | best other | which | difference | classes | baton, its own engine |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
    }
    for name in workloads::NAMES {
        let mut loads = LOADS.iter().filter(|l| l.workload == name && l.name.contains(&word)).peekable();
        if loads.peek().is_none() {
            continue;
        }
        let trace = Arc::new(workloads::trace(workloads::rows(name).map_err(|e| e.to_string())?));
        for load in loads {
            let row = match count {
                Some(count) => mean_row(load, &trace, count)?,
                None => row(load, &trace)?,
            };
            println!("{row}");
        }
    }
    Ok(())
}
