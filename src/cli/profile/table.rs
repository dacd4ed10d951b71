//! Measurements as the table that `baton profile fit` reads.

use std::fmt::Write as _;

use baton_sim::fit::measured::Measurements;

/// The table, with `system` in every row.
pub fn text(measured: &Measurements, system: &str) -> String {
    let mut text = String::from(
        "system,backend,backend_version,phase,batch,input_or_context_tokens,prefix_tokens,new_tokens_per_request,latency_ms,\
         attention_ms,kv_bytes_per_token,kv_capacity_tokens\n",
    );
    let kv = format!("{},{}", measured.kv_bytes_per_token, measured.kv_capacity_tokens);
    let mut row = |phase: &str, cells: [u64; 4], latency_us: f64, attention_us: Option<f64>| {
        let [batch, context, prefix, new] = cells;
        let attention = attention_us.map(|us| format!("{:.4}", us / 1e3)).unwrap_or_default();
        let _ = writeln!(
            text,
            "{system},measured,{},{phase},{batch},{context},{prefix},{new},{:.4},{attention},{kv}",
            measured.backend_version,
            latency_us / 1e3
        );
    };
    for p in &measured.prefill {
        let new = u64::from(p.new_tokens);
        row("prefill", [1, new + p.prefix_tokens, p.prefix_tokens, new], p.latency_us, p.attention_us);
    }
    for p in &measured.decode {
        row("decode", [u64::from(p.batch), p.context_tokens, 0, 1], p.latency_us, None);
    }
    for p in &measured.mixed {
        let cells = [u64::from(p.batch), p.context_tokens, p.prefix_tokens, u64::from(p.new_tokens)];
        row("mixed", cells, p.latency_us, None);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_sim::fit::measured::{DecodePoint, MixedPoint, PrefillPoint, read_csv};

    #[test]
    fn the_table_reads_back() {
        let measured = Measurements {
            backend_version: "measured".into(),
            kv_bytes_per_token: 2_048,
            kv_capacity_tokens: 65_536,
            prefill: vec![PrefillPoint {
                new_tokens: 64,
                prefix_tokens: 512,
                latency_us: 1_500.0,
                attention_us: None,
            }],
            decode: vec![DecodePoint { batch: 4, context_tokens: 100, latency_us: 2_000.0 }],
            mixed: vec![MixedPoint {
                batch: 4,
                context_tokens: 90,
                new_tokens: 32,
                prefix_tokens: 0,
                latency_us: 3_000.0,
            }],
        };
        assert_eq!(read_csv(text(&measured, "box").as_bytes(), "box", "measured").unwrap(), measured);
    }
}
