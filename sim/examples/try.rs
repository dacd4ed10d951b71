//! Scratch.
use std::sync::Arc;
use baton_scheduler::{AdmissionMode, PolicyName, SchedulerConfig};
use baton_sim::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let file = &a[1];
    let speed: f64 = a[2].parse().unwrap();
    let trace = baton_traces::load(std::path::Path::new(file), &Default::default()).unwrap();
    let trace = Arc::new(trace);
    for name in a[3].split(',') {
        let policy = PolicyName::ALL.into_iter().find(|p| p.name() == name).unwrap();
        let profile = Arc::new(profiles::named(a.get(4).map_or("llama3-70b-8xa100", |s| s)).unwrap());
        let adm: AdmissionMode = serde_json::from_str(&format!("\"{}\"", a.get(5).map_or("auto", |s| s))).unwrap();
        let mut sc = SchedulerConfig { policy, admission: adm, ..Default::default() };
        if let Ok(t) = std::env::var("THR") { sc.balancing_threshold_permille = t.parse().unwrap(); }
        if std::env::var("NOLOCAL").is_ok() { sc.local_prefill = false; }
        if std::env::var("NOREP").is_ok() { sc.replicate = false; }
        let (p, d) = std::env::var("PD").map(|s| { let v: Vec<u32> = s.split(':').map(|x| x.parse().unwrap()).collect(); (v[0], v[1]) }).unwrap_or((8, 8));
        if let Ok(t) = std::env::var("TBT") { sc.classes[0].tbt_us = t.parse().unwrap(); }
        let mut setup = Setup::disaggregated(p, d, &profile, sc);
        if let Ok(n) = std::env::var("RETRIES") { setup.clients.retries = n.parse().unwrap(); }
        if policy == PolicyName::Foresight { setup.foresight_us = 60_000_000; }
        if std::env::var("AFTER").is_ok() { setup.handoff = Handoff::AfterPrefill; setup.shared_links = false; }
        if let Ok(n) = std::env::var("AUDIT") { setup.audit_every = n.parse().unwrap(); }
        setup.sample_us = std::env::var("SAMPLE").map_or(1_000_000, |s| s.parse().unwrap());
        let t = std::time::Instant::now();
        let mut w = World::new(setup, Box::new(TraceWorkload::new(trace.clone(), speed))).unwrap();
        let r = w.run();
        let el = t.elapsed();
        let m = w.into_metrics();
        let r2 = m.result((name, "?"), speed, 1);
        if std::env::var("INST").is_ok() { for i in &r2.instances { print!("{}:{:.0}/{:.0} ", i.instance, i.prefill_busy_s, i.decode_busy_s); } println!(); for o in 0..10 { print!("{} ", r2.series.bins.get(o*12).map_or(0, |b| b.backlog_us / b.samples.max(1) / 1000)); } println!(); }
        println!("{name:12} x{speed} done {} rej {} fail {} inslo {} tok {:.3} ttft {:.2}/{:.2}/{:.2}/{:.1} tbt {:.1}/{:.1}/{:.1} itl {:.1} hit {:.3} busy {:.0} osc {:.3} late {:.1} waste {} over {} repl {} perr {:.3} retry {:.1?}/{:.1?} reasons {:?} wall {:?} {:?}",
          r2.completed, r2.rejected, r2.failed, r2.in_slo, r2.input_tokens_in_slo as f64 / r2.input_tokens as f64,
          r2.ttft_s.mean.unwrap_or(0.), r2.ttft_s.p50.unwrap_or(0.), r2.ttft_s.p99.unwrap_or(0.), r2.ttft_s.max.unwrap_or(0.),
          r2.tbt_ms.mean.unwrap_or(0.), r2.tbt_ms.p99.unwrap_or(0.), r2.tbt_ms.max.unwrap_or(0.), r2.itl_ms_mean, r2.block_hit_ratio, r2.prefill_busy_s, r2.oscillation_index, r2.worst_lateness_s, r2.wasted_prefill_tokens, r2.overcommitted_blocks, r2.replications, r2.prefill_prediction_error, r2.retry_after_s.mean, r2.readmitted, r2.refusals_by_reason, el, r);
    }
}
