//! Attention out of prompt lengths alone, for engines that reuse no prefix.

use super::measured::PrefillPoint;

/// Shorter prompts say nothing about attention: fixed costs and idle units bend their curve the other way.
const SHORTEST_TOKENS: u32 = 256;

/// Sets the attention time of every point: what lies above the straight line of least squared relative error through the
/// latencies of the longer prompts. Leaves the points alone where fewer than four lengths are long enough.
///
/// A prefix in the cache shows attention by itself and is the better measurement. This one takes any other cost that
/// grows faster than the prompt for attention.
pub fn set_attention(points: &mut [PrefillPoint]) {
    let long: Vec<&PrefillPoint> = points.iter().filter(|p| p.new_tokens >= SHORTEST_TOKENS).collect();
    if long.len() < 4 {
        return;
    }
    let mut rows = [[0.0; 4]; 3];
    for p in &long {
        let weight = 1.0 / p.latency_us;
        let terms = [weight, weight * f64::from(p.new_tokens), weight * p.pairs()];
        for (row, term) in rows.iter_mut().zip(terms) {
            (0..3).for_each(|at| row[at] += term * terms[at]);
            row[3] += term;
        }
    }
    let Some(pair_us) = last_unknown(rows) else { return };
    for p in points {
        p.attention_us = Some(pair_us.max(0.0) * p.pairs());
    }
}

/// The last of three unknowns of a symmetric positive definite system, by elimination.
fn last_unknown(mut rows: [[f64; 4]; 3]) -> Option<f64> {
    for at in 0..2 {
        let pivot = rows[at];
        if pivot[at] <= 0.0 {
            return None;
        }
        for row in &mut rows[at + 1..] {
            let factor = row[at] / pivot[at];
            row.iter_mut().zip(pivot).for_each(|(number, of_pivot)| *number -= factor * of_pivot);
        }
    }
    (rows[2][2] > 0.0).then(|| rows[2][3] / rows[2][2])
}
