//! Scratch.
use std::sync::Arc;
fn main() {
    let l = |n: &str| Arc::new(baton_traces::load(&baton_traces::locate(n).unwrap(), &Default::default()).unwrap());
    let t = baton_sim::paper::Traces { conversation: l("conversation_trace.jsonl"), synthetic: l("synthetic_trace.jsonl") };
    println!("{}", baton_sim::paper::markdown(&baton_sim::paper::run(&t, &|| eprint!(".")).unwrap(), "x"));
}
