//! Figures 13 and 15: how much network, and how many nodes of which kind.

use baton_scheduler::PolicyName;

use super::schedulers::{mooncake_cluster, simulate};
use super::{Section, Traces, check, row};

/// Figure 13: mean TTFT by network rate.
pub(crate) fn figure_13(traces: &Traces) -> Result<Vec<Section>, String> {
    let mut rows = Vec::new();
    for (gbps, paper) in [(24u64, Some(5.2)), (50, None), (100, None), (200, None), (400, Some(1.2))] {
        let mut setup = mooncake_cluster((8, 8), PolicyName::Mooncake, 100_000)?;
        for pool in &mut setup.pools {
            pool.net_bytes_per_s = gbps * 125_000_000;
        }
        let run = simulate(setup, &traces.synthetic, 1.0)?;
        rows.push(row(format!("{gbps} Gbps"), paper, run.ttft_s.mean.unwrap_or(f64::NAN), "s"));
    }
    let mut none = mooncake_cluster((8, 8), PolicyName::LeastLoaded, 100_000)?;
    for pool in &mut none.pools {
        pool.prefix_cache = false;
    }
    let recompute = simulate(none, &traces.synthetic, 1.0)?.ttft_s.mean.unwrap_or(f64::NAN);
    let falling = rows.windows(2).all(|w| w[1].ours <= w[0].ours * 1.02);
    let quick = rows[3..].iter().all(|r| r.ours < 2.0);
    rows.push(row("no cache at all (recomputation)", Some(2.6), recompute, "s"));
    Ok(vec![Section {
        figure: "Figure 13",
        title: "mean TTFT by network rate, synthetic trace",
        setup: "8 + 8 nodes, Mooncake's policy, one rate each way for every node; hand-offs and fetches share it.".into(),
        rows,
        checks: vec![
            check("more network never makes it slower", falling),
            check("mean TTFT is under 2 s above 100 Gbps", quick),
        ],
        note: "At 24 Gbps the hand-offs alone, 320 KB a token, fill four fifths of each node's link: with fetches on top it saturates. Eight such prefill nodes cannot carry the trace without a cache, so the last line is a queue, not a latency.".into(),
    }])
}

/// Figure 15: prefill to decode ratio.
pub(crate) fn figure_15(traces: &Traces) -> Result<Vec<Section>, String> {
    let mut rows = Vec::new();
    let mut best = (0, 0.0);
    // The trace's own pace loads none of these but 5P; at twice the pace the ratio matters.
    let speed = 2.0;
    for prefills in 5..=11u32 {
        let mut setup = mooncake_cluster((prefills, 16 - prefills), PolicyName::Mooncake, 100_000)?;
        setup.scheduler.classes[0].ttft_us = 10_000_000;
        let run = simulate(setup, &traces.synthetic, speed)?;
        if run.goodput > best.1 {
            best = (prefills, run.goodput);
        }
        let paper = (prefills == 8).then_some(97.0);
        rows.push(row(format!("{prefills}P + {}D", 16 - prefills), paper, 100.0 * run.goodput, "%"));
    }
    Ok(vec![Section {
        figure: "Figure 15",
        title: "effective capacity by prefill to decode ratio, synthetic trace",
        setup: format!("16 nodes, Mooncake's policy, TTFT ≤ 10 s, TBT ≤ 100 ms, trace at {speed}× its pace."),
        rows,
        checks: vec![check(format!("the best ratio is within one step of 1:1 (it is {}:{})", best.0, 16 - best.0), (7..=9).contains(&best.0))],
        note: "More prefill nodes are better here all the way: a decode step of this profile takes 20 ms where the objective is 100, so five decode nodes carry the trace and the prefill side is the only bottleneck. The paper's decode nodes were nearer their limit.".into(),
    }])
}
