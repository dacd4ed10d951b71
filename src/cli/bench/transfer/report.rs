//! The table and the file.

use std::path::Path;

use anyhow::{Context as _, Result};
use baton_transports::mover::Direction;

use super::load::{Figures, Load};
use crate::cli::out;

/// One line.
#[derive(serde::Serialize)]
pub struct Row {
    what: String,
    direction: &'static str,
    block_bytes: u32,
    batch: u32,
    verify: bool,
    gb_per_s: f64,
    blocks_per_s: f64,
    cpu_s_per_gb: f64,
    p50_us: f64,
    p99_us: f64,
    /// Of the ceiling's.
    rate_ratio: f64,
    /// Of the ceiling's.
    cpu_ratio: f64,
}

impl Row {
    /// A measurement, beside its ceiling.
    pub fn new(what: &str, figures: &Figures, load: &Load, ceiling: &Figures) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "figures for a report")]
        let blocks_per_s = figures.blocks as f64 / figures.took.as_secs_f64();
        Self {
            what: what.into(),
            direction: if load.direction == Direction::Read { "read" } else { "write" },
            block_bytes: load.block_bytes,
            batch: load.batch,
            verify: load.verify,
            gb_per_s: figures.gb_per_s(),
            blocks_per_s,
            cpu_s_per_gb: figures.cpu_s_per_gb(),
            p50_us: figures.latency_us(500),
            p99_us: figures.latency_us(990),
            rate_ratio: figures.gb_per_s() / ceiling.gb_per_s(),
            cpu_ratio: figures.cpu_s_per_gb() / ceiling.cpu_s_per_gb(),
        }
    }
}

/// Prints the table. Latency runs have no ceiling to be a ratio of.
pub fn print(rows: &[Row], latency: bool) -> Result<()> {
    let mut header = vec!["block", "direction", "what", "GB/s", "blocks/s", "CPU s/GB", "p50", "p99"];
    if !latency {
        header.extend(["rate ratio", "CPU ratio"]);
    }
    let mut table = crate::cli::table::with_header(&header, 3..);
    for row in rows {
        let mut cells = vec![
            format!("{} KiB", row.block_bytes >> 10),
            row.direction.into(),
            format!("{}{}", row.what, if row.verify { ", verified" } else { "" }),
            format!("{:.2}", row.gb_per_s),
            format!("{:.0}", row.blocks_per_s),
            format!("{:.3}", row.cpu_s_per_gb),
            format!("{:.1} µs", row.p50_us),
            format!("{:.1} µs", row.p99_us),
        ];
        if !latency {
            cells.extend([format!("{:.2}", row.rate_ratio), format!("{:.2}", row.cpu_ratio)]);
        }
        table.add_row(cells);
    }
    out::print(&format!("{table}\n"))
}

/// Writes the figures to a file.
pub fn save(path: &Path, rows: &[Row]) -> Result<()> {
    let text = serde_json::to_string_pretty(rows).context("bench: report")?;
    out::save(path, &text)?;
    note!("written: {}", path.display());
    Ok(())
}
