//! The page: figures on top, then the lists, one below the other.

use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Row, Table, Widget as _};

use super::history::History;
use super::scrape::Scrape;
use super::{lists, words};

/// Lists on the page.
pub(super) const LISTS: usize = 3;
/// Rows of figures above the lists, without those of the classes.
const FIGURES: u16 = 5;

/// How the page is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Show {
    pub(super) paused: bool,
    /// The list that keys scroll.
    pub(super) chosen: usize,
    /// First row shown of each list.
    pub(super) from: [usize; LISTS],
    /// Why the latest look failed.
    pub(super) trouble: Option<String>,
}

/// One page.
pub(super) struct Page<'a> {
    base: &'a str,
    history: &'a History,
    show: Option<&'a Show>,
    /// The lines of the classes.
    classes: Vec<String>,
    lists: [List; LISTS],
}

struct List {
    title: String,
    columns: &'static [(&'static str, u16)],
    rows: Vec<Vec<String>>,
}

impl<'a> Page<'a> {
    /// The page as it stands, nothing scrolled.
    pub(super) fn new(base: &'a str, history: &'a History) -> Self {
        let status = history.latest().map(|sample| &sample.status);
        let rows = |of: fn(&crate::conductor::Status) -> Vec<Vec<String>>| status.map(of).unwrap_or_default();
        let live = status.map_or(0, |status| status.live_requests);
        let (nodes, requests, decisions) =
            (rows(lists::nodes), rows(lists::requests), rows(lists::decisions));
        let shown = requests.len();
        let lists = [
            List { title: format!("Nodes ({})", nodes.len()), columns: lists::NODES, rows: nodes },
            List {
                title: format!("Requests under way ({live}, the oldest {shown} shown)"),
                columns: lists::REQUESTS,
                rows: requests,
            },
            List { title: "Latest decisions, newest first".into(), columns: &[], rows: decisions },
        ];
        let classes = status.map(lists::classes).unwrap_or_default();
        Self { base, history, show: None, classes, lists }
    }

    /// The frame as shown to a person at a terminal.
    pub(super) fn shown(mut self, show: &'a Show) -> Self {
        self.show = Some(show);
        self
    }

    /// Rows that show all of it.
    pub(super) fn rows(&self) -> u16 {
        let lists: usize = self.lists.iter().map(List::height).sum();
        self.figure_rows().saturating_add(u16::try_from(lists).unwrap_or(u16::MAX))
    }

    fn figure_rows(&self) -> u16 {
        FIGURES.saturating_add(u16::try_from(self.classes.len()).unwrap_or(u16::MAX))
    }

    /// Rows of a list.
    pub(super) fn length(&self, list: usize) -> usize {
        self.lists.get(list).map_or(0, |list| list.rows.len())
    }

    /// Draws it; what does not fit is scrolled to.
    pub(super) fn draw(&self, area: Rect, buffer: &mut Buffer) {
        let figures = Rect { height: self.figure_rows().min(area.height), ..area };
        Paragraph::new(self.figures()).render(figures, buffer);
        let below = Rect { y: area.y + figures.height, height: area.height - figures.height, ..area };
        let mut constraints = self.heights(below.height).map(Constraint::Length).to_vec();
        constraints.push(Constraint::Min(0));
        for (at, (list, area)) in
            self.lists.iter().zip(&*Layout::vertical(constraints).split(below)).enumerate()
        {
            let from = self.show.map_or(0, |show| show.from[at]);
            let chosen = self.show.is_some_and(|show| show.chosen == at);
            list.draw(from, chosen, *area, buffer);
        }
    }

    /// The rows that each list gets of `height`: as many as it needs if they fit, else a fair share.
    fn heights(&self, height: u16) -> [u16; LISTS] {
        let mut given = [0; LISTS];
        let mut left = height;
        let mut order: Vec<usize> = (0..LISTS).collect();
        order.sort_by_key(|at| self.lists[*at].height());
        for (served, at) in order.into_iter().enumerate() {
            let fair = left / u16::try_from(LISTS - served).unwrap_or(1);
            given[at] = fair.min(u16::try_from(self.lists[at].height()).unwrap_or(u16::MAX));
            left -= given[at];
        }
        given
    }

    fn figures(&self) -> Vec<Line<'static>> {
        let Some(sample) = self.history.latest() else {
            return vec![Line::from(format!("baton  {}  asking ...", self.base))];
        };
        let status = &sample.status;
        let state = match (self.show.is_some_and(|show| show.trouble.is_some()), status.ready) {
            (true, _) => "NO ANSWER, last seen",
            (false, true) => "READY",
            (false, false) => "NOT READY",
        };
        let detail = if status.detail.is_empty() { "no node has attached yet" } else { &status.detail };
        let paused = if self.show.is_some_and(|show| show.paused) { "  [paused: p goes on]" } else { "" };
        let head =
            format!("baton  {}  {state}: {detail}  up {}{paused}", self.base, words::clock(status.uptime_us));
        let head = Line::styled(head, Style::new().add_modifier(Modifier::BOLD));
        let last = match self.show.and_then(|show| show.trouble.as_ref()) {
            Some(trouble) => {
                Line::styled(format!("NO ANSWER: {trouble}"), Style::new().add_modifier(Modifier::REVERSED))
            }
            None => Line::from(ends(&sample.scrape)),
        };
        let mut lines =
            vec![head, Line::from(self.flow()), Line::from(self.times()), Line::from(self.promises())];
        lines.extend(self.classes.iter().cloned().map(Line::from));
        lines.push(last);
        lines
    }

    fn flow(&self) -> String {
        let live = self.history.latest().map_or(0, |sample| sample.status.live_requests);
        let Some(rates) = self.history.rates() else { return format!("live {live}") };
        format!(
            "live {live}  requests {}  tokens {}  refused {}  failed {}",
            words::rate(rates.requests),
            words::rate(rates.tokens),
            words::rate(rates.refused),
            words::rate(rates.failed)
        )
    }

    fn times(&self) -> String {
        let spreads = self.history.spreads();
        let (ttft, tbt) = (&spreads.ttft, &spreads.tbt);
        format!(
            "TTFT p50 {} p99 {}  TBT p50 {} p99 {}  measured/predicted TTFT p50 {} p90 {}  ({}, {:.0} first tokens)",
            words::seconds(ttft.quantile(0.5)),
            words::seconds(ttft.quantile(0.99)),
            words::seconds(tbt.quantile(0.5)),
            words::seconds(tbt.quantile(0.99)),
            words::ratio(spreads.error_ratio.quantile(0.5)),
            words::ratio(spreads.error_ratio.quantile(0.9)),
            words::window(spreads.over),
            ttft.count()
        )
    }

    fn promises(&self) -> String {
        let spreads = self.history.spreads();
        let Some(objectives) = self.history.latest().and_then(|sample| sample.objectives) else {
            return "objectives: classes differ; see the lines of the classes".into();
        };
        format!(
            "first tokens within {}: {}  gaps within {}: {}",
            words::seconds(Some(objectives.ttft_s)),
            words::share(spreads.ttft.share_within(objectives.ttft_s)),
            words::seconds(Some(objectives.tbt_s)),
            words::share(spreads.tbt.share_within(objectives.tbt_s))
        )
    }
}

/// How requests ended since the start, by reason and stage.
fn ends(scrape: &Scrape) -> String {
    let by = |name: &str| {
        let parts = scrape.by_label(name).into_iter().map(|(label, count)| format!("{label} {count}"));
        let parts: Vec<String> = parts.collect();
        if parts.is_empty() { "none".into() } else { parts.join(", ") }
    };
    format!(
        "since the start: finished {}; refused: {}; failed: {}; cancelled: {}",
        scrape.total("baton_requests_finished_total"),
        by("baton_requests_refused_total"),
        by("baton_requests_failed_total"),
        by("baton_requests_cancelled_total")
    )
}

impl List {
    /// Title, headings if any, rows, and a free row below.
    fn height(&self) -> usize {
        2 + usize::from(!self.columns.is_empty()) + self.rows.len()
    }

    fn draw(&self, from: usize, chosen: bool, area: Rect, buffer: &mut Buffer) {
        if area.is_empty() {
            return;
        }
        // Lists grow shorter by themselves.
        let from = from.min(self.rows.len().saturating_sub(1));
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let style = if chosen { bold.add_modifier(Modifier::REVERSED) } else { bold };
        let above = if from > 0 { format!("  ({from} above)") } else { String::new() };
        Line::styled(format!("{}{above}", self.title), style).render(Rect { height: 1, ..area }, buffer);
        let below = Rect { y: area.y + 1, height: area.height - 1, ..area };
        let rows = self.rows.iter().skip(from).map(|row| Row::new(row.clone()));
        let width = |width: u16| if width == 0 { Constraint::Fill(1) } else { Constraint::Length(width) };
        if self.columns.is_empty() {
            ratatui::widgets::Widget::render(Table::new(rows, [Constraint::Fill(1)]), below, buffer);
            return;
        }
        let widths = self.columns.iter().map(|(_, columns)| width(*columns));
        let heads = Row::new(self.columns.iter().map(|(head, _)| *head));
        let dim = Style::new().add_modifier(Modifier::UNDERLINED);
        ratatui::widgets::Widget::render(Table::new(rows, widths).header(heads.style(dim)), below, buffer);
    }
}
