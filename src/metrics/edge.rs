//! Figures of the ports, before and beside the conductor, read where they are kept.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{OnceLock, Weak};

use baton_http::{Page, label};
use baton_router::{CloseReason, Router};

use super::{Metrics, figure};

/// Why a connection of the control port was closed from this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ControlCloseReason {
    /// All places were taken, or as many as one peer may have.
    NoPlace,
    /// No node was attached in time.
    NotAttached,
}

impl ControlCloseReason {
    /// All of them, in order.
    pub(crate) const ALL: [Self; 2] = [Self::NoPlace, Self::NotAttached];

    /// As it is exported.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::NoPlace => "no_place",
            Self::NotAttached => "not_attached",
        }
    }
}

/// Reads the figures of the ports.
#[derive(Default)]
pub(super) struct Edge {
    /// Weak: the front door shows these figures.
    door: OnceLock<Weak<Router>>,
    leads: OnceLock<LeadQuestion>,
    closed: [AtomicU64; ControlCloseReason::ALL.len()],
    accept_failures: AtomicU64,
}

/// Whether the conductor leads at this moment.
type LeadQuestion = Box<dyn Fn() -> bool + Send + Sync>;

/// Labels in the words of the page, and a figure.
type Series = (String, u64);

impl Metrics {
    /// Shows what this front door counts, too, as long as it is there, and whether its conductor leads.
    pub(crate) fn reads(&self, door: Weak<Router>, leads: impl Fn() -> bool + Send + Sync + 'static) {
        let _ = self.shared.edge.door.set(door);
        let _ = self.shared.edge.leads.set(Box::new(leads));
    }

    pub(crate) fn control_closed(&self, why: ControlCloseReason) {
        self.shared.edge.closed(why);
    }

    pub(crate) fn control_not_accepted(&self) {
        self.shared.edge.not_accepted();
    }
}

impl Edge {
    fn closed(&self, why: ControlCloseReason) {
        self.closed[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn not_accepted(&self) {
        self.accept_failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds all of it to a page that Prometheus reads.
    pub(super) fn write(&self, page: &mut Page) {
        let mut closed: Vec<Series> = Vec::new();
        let mut failures: Vec<Series> = Vec::new();
        if let Some(door) = self.door.get().and_then(Weak::upgrade) {
            let stats = door.stats();
            let errors = door.errors().into_iter().map(|error| {
                let labels = format!("status=\"{}\",{}", error.status, label("reason", &error.reason));
                (labels, error.count)
            });
            let broken = [
                ("failed", stats.failed_in_stream),
                ("client_left", stats.disconnected),
                ("unread", stats.cut_off),
            ];
            page.value(figure("baton_ready"), u8::from(door.is_ready()));
            page.value(figure("baton_http_requests_total"), stats.requests);
            page.family(figure("baton_http_errors_total"), errors);
            let broken = broken.map(|(why, count)| (format!("why=\"{why}\""), count));
            page.family(
                figure("baton_streams_broken_total"),
                broken.into_iter().filter(|(_, count)| *count > 0),
            );
            page.value(figure("baton_connections"), stats.connections);
            page.value(figure("baton_body_bytes"), stats.body_bytes);
            let labels = |why: CloseReason| format!("port=\"clients\",why=\"{}\"", why.name());
            closed.extend(CloseReason::ALL.into_iter().map(|why| (labels(why), stats.closed[why as usize])));
            failures.push(("port=\"clients\"".to_owned(), stats.accept_failures));
        }
        if let Some(leads) = self.leads.get() {
            page.value(figure("baton_leads"), u8::from(leads()));
        }
        let labels = |why: ControlCloseReason| format!("port=\"control\",why=\"{}\"", why.name());
        let count = |why: ControlCloseReason| self.closed[why as usize].load(Ordering::Relaxed);
        closed.extend(ControlCloseReason::ALL.into_iter().map(|why| (labels(why), count(why))));
        failures.push(("port=\"control\"".to_owned(), self.accept_failures.load(Ordering::Relaxed)));
        let counted = |series: &Series| series.1 > 0;
        page.family(figure("baton_connections_closed_total"), closed.into_iter().filter(counted));
        page.family(figure("baton_accept_failures_total"), failures.into_iter().filter(counted));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_is_on_the_page_and_nothing_else() {
        let edge = Edge::default();
        let written = || {
            let mut page = Page::default();
            edge.write(&mut page);
            page.into_text()
        };
        assert_eq!(written(), "");
        for (at, why) in ControlCloseReason::ALL.into_iter().enumerate() {
            assert_eq!(why as usize, at, "{}", why.name());
        }
        edge.closed(ControlCloseReason::NotAttached);
        edge.closed(ControlCloseReason::NotAttached);
        edge.not_accepted();
        let page = written();
        assert!(
            page.contains("\nbaton_connections_closed_total{port=\"control\",why=\"not_attached\"} 2\n"),
            "{page}"
        );
        assert!(page.contains("\nbaton_accept_failures_total{port=\"control\"} 1\n"), "{page}");
        assert!(!page.contains("no_place"), "{page}");
    }
}
