//! Matrix products and sums in one fixed order of floating-point operations.
//!
//! The rule that all of the engine's exactness rests on: a number never depends on how many rows are
//! computed beside it. [`Matrix`] keeps eight outputs side by side in the lanes of a vector, so that
//! each output is its own sum, over its terms in ascending order, in runs of [`RUN`] terms that are
//! added up in order. Tiles differ only in how many such sums advance together. Nothing is fused.

use crate::compute_threads::ComputeThreads;

/// Outputs side by side.
const LANES: usize = 8;
/// Terms that are summed before the sum is added to the total: keeps rounding errors small and the
/// part of the matrix in use within the first cache.
const RUN: usize = 256;
/// Rows that advance together.
const TILE: usize = 4;
/// Panels that advance together when there is a single row.
const WIDE: usize = 4;

/// As many numbers as a vector holds on most machines.
pub(crate) type Lanes = [f32; LANES];

/// A matrix of `outputs` × `inputs` to multiply rows by.
#[derive(Debug)]
pub(crate) struct Matrix {
    /// Panel after panel of eight outputs; in a panel, input after input.
    panels: Vec<Lanes>,
    outputs: usize,
    inputs: usize,
}

impl Matrix {
    /// From numbers by output, then input.
    pub(crate) fn new(outputs: usize, inputs: usize, numbers: &[f32]) -> Self {
        assert_eq!(numbers.len(), outputs * inputs, "a matrix of {outputs} x {inputs}");
        let mut panels = vec![[0.0; LANES]; outputs.div_ceil(LANES) * inputs];
        for (output, row) in numbers.chunks_exact(inputs).enumerate() {
            let panel = &mut panels[output / LANES * inputs..][..inputs];
            for (lanes, number) in panel.iter_mut().zip(row) {
                lanes[output % LANES] = *number;
            }
        }
        Self { panels, outputs, inputs }
    }

    /// How many outputs it has.
    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    /// All its numbers as they lie, for a digest.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.panels)
    }

    /// Copies the numbers of one output.
    pub(crate) fn copy_row(&self, output: usize, row: &mut [f32]) {
        let panel = &self.panels[output / LANES * self.inputs..][..self.inputs];
        for (number, lanes) in row.iter_mut().zip(panel) {
            *number = lanes[output % LANES];
        }
    }

    /// The products of all rows of `x` with all outputs into `y`, row by row.
    pub(crate) fn multiply(&self, compute_threads: &ComputeThreads, x: &[f32], y: &mut Vec<f32>) {
        let rows = x.len() / self.inputs;
        y.clear();
        y.resize(rows * self.outputs, 0.0);
        let panels = self.outputs.div_ceil(LANES);
        if compute_threads.threads() == 1 || panels < 2 * compute_threads.threads() {
            return self.multiply_part(0, x, self.outputs, y);
        }
        let parts = compute_threads.map_parts(panels, |part| {
            let width = (part.end * LANES).min(self.outputs) - part.start * LANES;
            let mut y = vec![0.0; rows * width];
            self.multiply_part(part.start, x, width, &mut y);
            y
        });
        for (part, numbers) in parts {
            let width = numbers.len() / rows.max(1);
            for (row, from) in numbers.chunks_exact(width).enumerate() {
                y[row * self.outputs + part.start * LANES..][..width].copy_from_slice(from);
            }
        }
    }

    /// The products with `width` outputs from panel `first` on; `y` is zero.
    fn multiply_part(&self, first: usize, x: &[f32], width: usize, y: &mut [f32]) {
        for from in (0..self.inputs).step_by(RUN) {
            let run = RUN.min(self.inputs - from);
            let panel = |n: usize| &self.panels[(first + n) * self.inputs + from..][..run];
            if x.len() == self.inputs {
                single_row(panel, &x[from..from + run], y);
                continue;
            }
            for n in 0..width.div_ceil(LANES) {
                let columns = n * LANES..((n + 1) * LANES).min(width);
                let tiles = x.chunks(TILE * self.inputs).zip(y.chunks_mut(TILE * width));
                for (x, y) in tiles {
                    let row = |r: usize| &x[r * self.inputs + from..][..run];
                    let columns = columns.clone();
                    match x.len() / self.inputs {
                        4 => add_tile(&tile([row(0), row(1), row(2), row(3)], panel(n)), y, columns),
                        3 => add_tile(&tile([row(0), row(1), row(2)], panel(n)), y, columns),
                        2 => add_tile(&tile([row(0), row(1)], panel(n)), y, columns),
                        _ => add_tile(&tile([row(0)], panel(n)), y, columns),
                    }
                }
            }
        }
    }
}

/// The sums of one run for `R` rows and one panel.
#[inline]
fn tile<const R: usize>(rows: [&[f32]; R], panel: &[Lanes]) -> [Lanes; R] {
    let rows = rows.map(|row| &row[..panel.len()]);
    let mut sums = [[0.0; LANES]; R];
    for (k, weights) in panel.iter().enumerate() {
        for (sums, row) in sums.iter_mut().zip(&rows) {
            advance(sums, row[k], weights);
        }
    }
    sums
}

/// One more term for eight sums.
#[inline(always)]
fn advance(sums: &mut Lanes, x: f32, weights: &Lanes) {
    *sums = std::array::from_fn(|lane| sums[lane] + x * weights[lane]);
}

/// Adds the sums of a run to some columns of the rows of `y`.
#[inline]
fn add_tile<const R: usize>(sums: &[Lanes; R], y: &mut [f32], columns: std::ops::Range<usize>) {
    let width = y.len() / R;
    for (row, sums) in y.chunks_exact_mut(width).zip(sums) {
        for (total, sum) in row[columns.clone()].iter_mut().zip(sums) {
            *total += sum;
        }
    }
}

/// One row's sums of one run, several panels at a time.
fn single_row<'a>(panel: impl Fn(usize) -> &'a [Lanes], row: &[f32], y: &mut [f32]) {
    for (n, y) in y.chunks_mut(WIDE * LANES).enumerate() {
        let first = n * WIDE;
        if y.len() == WIDE * LANES {
            let sums = wide([panel(first), panel(first + 1), panel(first + 2), panel(first + 3)], row);
            for (total, sum) in y.iter_mut().zip(sums.as_flattened()) {
                *total += sum;
            }
        } else {
            for (n, y) in y.chunks_mut(LANES).enumerate() {
                {
                    let columns = 0..y.len();
                    add_tile(&tile([row], panel(first + n)), y, columns);
                }
            }
        }
    }
}

/// One row's sums of one run for several panels.
#[inline]
fn wide(panels: [&[Lanes]; WIDE], row: &[f32]) -> [Lanes; WIDE] {
    let panels = panels.map(|panel| &panel[..row.len()]);
    let mut sums = [[0.0; LANES]; WIDE];
    for (k, x) in row.iter().enumerate() {
        for n in 0..WIDE {
            for lane in 0..LANES {
                sums[n][lane] += x * panels[n][k][lane];
            }
        }
    }
    sums
}

/// The sums of products of `a` with vectors of its length: eight running sums each, added up as a
/// tree.
#[inline(always)]
pub(crate) fn dots<const N: usize>(a: &[f32], b: [&[f32]; N]) -> [f32; N] {
    let mut sums = [[0.0f32; LANES]; N];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (whole, rest) = (b.map(|b| &b.as_chunks::<LANES>().0[..a.len()]), b.map(|b| &b[a.len() * LANES..]));
    for (k, a) in a.iter().enumerate() {
        for (sums, b) in sums.iter_mut().zip(&whole) {
            *sums = std::array::from_fn(|lane| sums[lane] + a[lane] * b[k][lane]);
        }
    }
    for (sums, rest) in sums.iter_mut().zip(&rest) {
        for ((sum, a), b) in sums.iter_mut().zip(a_rest).zip(*rest) {
            *sum += a * b;
        }
    }
    std::array::from_fn(|n| tree(&sums[n]))
}

/// Eight numbers added up as a tree.
#[inline(always)]
pub(crate) fn tree(s: &Lanes) -> f32 {
    let four: [f32; 4] = std::array::from_fn(|lane| s[lane] + s[lane + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Scales each row to a mean square of 1, then by `weights`.
pub(crate) fn normalize(x: &[f32], weights: &[f32], epsilon: f32, out: &mut Vec<f32>) {
    out.clear();
    for row in x.chunks_exact(weights.len()) {
        #[expect(clippy::cast_precision_loss, reason = "model widths are far below 2^24")]
        let mean = dots(row, [row])[0] / weights.len() as f32;
        let scale = 1.0 / (mean + epsilon).sqrt();
        out.extend(row.iter().zip(weights).map(|(x, weight)| x * scale * weight));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::Rng;

    fn random(n: usize, seed: u64) -> Vec<f32> {
        let mut rng = Rng::new(seed);
        (0..n).map(|_| (rng.unit() - 0.5) as f32).collect()
    }

    #[test]
    fn products_are_those_of_the_textbook() {
        let compute_threads = ComputeThreads::new(None).unwrap();
        for (rows, inputs, outputs) in [(1, 3, 1), (5, 300, 17), (9, 513, 40), (1, 700, 33), (2, 8, 8)] {
            let (x, w) = (random(rows * inputs, 1), random(outputs * inputs, 2));
            let mut y = Vec::new();
            Matrix::new(outputs, inputs, &w).multiply(&compute_threads, &x, &mut y);
            for (r, o) in (0..rows).flat_map(|r| (0..outputs).map(move |o| (r, o))) {
                let want: f64 =
                    (0..inputs).map(|k| f64::from(x[r * inputs + k]) * f64::from(w[o * inputs + k])).sum();
                let got = f64::from(y[r * outputs + o]);
                assert!((got - want).abs() < 1e-5, "{rows}x{inputs}x{outputs} at {r},{o}: {got}, not {want}");
            }
        }
    }

    #[test]
    fn a_row_is_equal_to_the_bit_beside_any_others_and_on_any_number_of_threads() {
        let (inputs, outputs) = (601, 83);
        let (x, w) = (random(13 * inputs, 3), random(outputs * inputs, 4));
        let matrix = Matrix::new(outputs, inputs, &w);
        let one = ComputeThreads::new(None).unwrap();
        let mut alone = Vec::new();
        for row in x.chunks_exact(inputs) {
            let mut y = Vec::new();
            matrix.multiply(&one, row, &mut y);
            alone.extend(y);
        }
        for threads in [None, Some(2), Some(3)] {
            let compute_threads = ComputeThreads::new(threads).unwrap();
            for rows in 1..=13 {
                let mut y = Vec::new();
                matrix.multiply(&compute_threads, &x[(13 - rows) * inputs..], &mut y);
                let want = &alone[(13 - rows) * outputs..];
                assert!(y.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()), "{rows} rows");
            }
        }
    }

    #[test]
    fn a_row_of_the_matrix_comes_back() {
        let w = random(11 * 5, 5);
        let mut row = vec![0.0; 5];
        Matrix::new(11, 5, &w).copy_row(9, &mut row);
        assert_eq!(row, w[45..50]);
    }

    #[test]
    fn rows_are_normalized_one_by_one() {
        let mut out = Vec::new();
        normalize(&[3.0, 4.0, 0.0, 0.0], &[1.0, 2.0], 0.0, &mut out);
        let rms = 12.5f32.sqrt();
        assert!((out[0] - 3.0 / rms).abs() < 1e-6 && (out[1] - 8.0 / rms).abs() < 1e-6);
        assert!(out[2].is_nan(), "nothing to scale: that is what epsilon is for");
    }
}
