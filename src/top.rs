//! A running service in the terminal: what `/admin/status` and `/metrics` tell, polled and laid out.
//!
//! [`Sample`] holds one look, [`History`] turns looks into rates and percentiles, and
//! `frame` draws the same page for a terminal and for plain text.

mod frame;
mod history;
mod lists;
mod look;
mod scrape;
mod screen;
#[cfg(test)]
mod tests;
mod words;

use std::time::{Duration, Instant};

use anyhow::Result;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

pub use screen::{Watch, watch};

use crate::conductor::Status;
use crate::operator::OperatorClient;
use history::History;
use scrape::Scrape;

/// Columns of a frame as text.
const TEXT_COLUMNS: u16 = 200;

/// One look at a service.
#[derive(Clone, Debug)]
struct Sample {
    at: Instant,
    status: Status,
    scrape: Scrape,
    objectives: Option<Objectives>,
}

/// The objectives for first tokens and gaps, where all classes share them.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Objectives {
    ttft_s: f64,
    tbt_s: f64,
}

/// Looks twice, `every` apart, and gives one frame as text.
///
/// # Errors
/// In words: nothing answers, or not as a service of this version does.
pub async fn once(client: &OperatorClient, every: Duration) -> Result<String> {
    let mut history = History::default();
    history.push(Sample::of(client).await?);
    tokio::time::sleep(every).await;
    history.push(Sample::of(client).await?);
    Ok(text(&frame::Page::new(client.base(), &history)))
}

/// A page as text, as high as it has rows.
fn text(page: &frame::Page<'_>) -> String {
    let area = Rect::new(0, 0, TEXT_COLUMNS, page.rows());
    let mut buffer = Buffer::empty(area);
    page.draw(area, &mut buffer);
    let mut text = String::new();
    for y in 0..area.height {
        let line: String = (0..area.width).map(|x| buffer[(x, y)].symbol()).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
