//! What happens at the ports, before and beside the conductor: figures that are read where they are kept.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{OnceLock, Weak};

use baton_router::{Closed, Router};

use super::by_node::escaped;
use super::{Kind, NAMES};

/// Why a connection of the control port was closed from this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ControlClosed {
    /// All places were taken, or as many as one peer may have.
    NoPlace,
    /// No node was attached in time.
    NotAttached,
}

impl ControlClosed {
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

/// See the module.
#[derive(Default)]
pub(super) struct Edge {
    /// Weak: the front door shows these figures.
    door: OnceLock<Weak<Router>>,
    closed: [AtomicU64; ControlClosed::ALL.len()],
    accept_failures: AtomicU64,
}

/// Labels in the words of the page, and a figure.
type Series = (String, u64);

impl Edge {
    pub(super) fn reads(&self, door: Weak<Router>) {
        let _ = self.door.set(door);
    }

    pub(super) fn closed(&self, why: ControlClosed) {
        self.closed[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn not_accepted(&self) {
        self.accept_failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds all of it to a page that Prometheus reads.
    pub(super) fn write(&self, page: &mut String) {
        let mut closed: Vec<Series> = Vec::new();
        let mut failures: Vec<Series> = Vec::new();
        if let Some(door) = self.door.get().and_then(Weak::upgrade) {
            let stats = door.stats();
            let errors = door.errors().into_iter().map(|error| {
                let labels = format!("status=\"{}\",reason=\"{}\"", error.status, escaped(&error.reason));
                (labels, error.count)
            });
            let broken = [
                ("failed", stats.failed_in_stream),
                ("client_left", stats.disconnected),
                ("unread", stats.cut_off),
            ];
            family(page, "baton_http_requests_total", [(String::new(), stats.requests)]);
            family(page, "baton_http_errors_total", errors);
            let broken = broken.map(|(why, count)| (format!("why=\"{why}\""), count));
            family(page, "baton_streams_broken_total", broken.into_iter().filter(|(_, count)| *count > 0));
            family(page, "baton_connections", [(String::new(), stats.connections)]);
            family(page, "baton_body_bytes", [(String::new(), stats.body_bytes)]);
            let label = |why: Closed| format!("port=\"clients\",why=\"{}\"", why.name());
            closed.extend(Closed::ALL.into_iter().map(|why| (label(why), stats.closed[why as usize])));
            failures.push(("port=\"clients\"".to_owned(), stats.accept_failures));
        }
        let label = |why: ControlClosed| format!("port=\"control\",why=\"{}\"", why.name());
        let count = |why: ControlClosed| self.closed[why as usize].load(Ordering::Relaxed);
        closed.extend(ControlClosed::ALL.into_iter().map(|why| (label(why), count(why))));
        failures.push(("port=\"control\"".to_owned(), self.accept_failures.load(Ordering::Relaxed)));
        let counted = |series: &Series| series.1 > 0;
        family(page, "baton_connections_closed_total", closed.into_iter().filter(counted));
        family(page, "baton_accept_failures_total", failures.into_iter().filter(counted));
    }
}

/// One number with its series; nothing where there are none.
fn family(page: &mut String, name: &'static str, series: impl IntoIterator<Item = Series>) {
    let mut series = series.into_iter().peekable();
    if series.peek().is_none() {
        return;
    }
    let known = NAMES.iter().find(|known| known.name == name);
    let kind = if known.is_some_and(|known| known.kind == Kind::Gauge) { "gauge" } else { "counter" };
    let _ = writeln!(page, "# HELP {name} {}", known.map_or("", |known| known.help));
    let _ = writeln!(page, "# TYPE {name} {kind}");
    for (labels, figure) in series {
        let _ = match labels.as_str() {
            "" => writeln!(page, "{name} {figure}"),
            labels => writeln!(page, "{name}{{{labels}}} {figure}"),
        };
    }
    page.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_is_on_the_page_and_nothing_else() {
        let (edge, mut page) = (Edge::default(), String::new());
        edge.write(&mut page);
        assert_eq!(page, "");
        for (at, why) in ControlClosed::ALL.into_iter().enumerate() {
            assert_eq!(why as usize, at, "{}", why.name());
        }
        edge.closed(ControlClosed::NotAttached);
        edge.closed(ControlClosed::NotAttached);
        edge.not_accepted();
        edge.write(&mut page);
        assert!(
            page.contains("\nbaton_connections_closed_total{port=\"control\",why=\"not_attached\"} 2\n"),
            "{page}"
        );
        assert!(page.contains("\nbaton_accept_failures_total{port=\"control\"} 1\n"), "{page}");
        assert!(!page.contains("no_place"), "{page}");
    }
}
