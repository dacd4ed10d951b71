//! The text that Prometheus reads: one description of an exported figure and one writer for every process.

use std::fmt::{Display, Write as _};

/// The content type of a [`Page`].
pub const PAGE_TYPE: &str = "text/plain; version=0.0.4";

/// The type of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only rises.
    Counter,
    /// Rises and falls.
    Gauge,
    /// A distribution.
    Histogram,
}

impl Kind {
    /// The type's name in the text format.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// One exported figure; docs/metrics.md has a row for each.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    /// The name in Prometheus.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// The meaning, which names the labels.
    pub help: &'static str,
}

impl Figure {
    /// A figure that only rises.
    #[must_use]
    pub const fn counter(name: &'static str, help: &'static str) -> Self {
        Self { name, kind: Kind::Counter, help }
    }

    /// A figure that rises and falls.
    #[must_use]
    pub const fn gauge(name: &'static str, help: &'static str) -> Self {
        Self { name, kind: Kind::Gauge, help }
    }

    /// A distribution.
    #[must_use]
    pub const fn histogram(name: &'static str, help: &'static str) -> Self {
        Self { name, kind: Kind::Histogram, help }
    }
}

/// A page in the text format.
#[derive(Debug, Default)]
pub struct Page(String);

impl Page {
    /// A page that continues `text`, which ends with a line feed or is empty.
    #[must_use]
    pub fn after(text: String) -> Self {
        Self(text)
    }

    /// Adds a figure without labels.
    pub fn value(&mut self, figure: Figure, value: impl Display) {
        self.family(figure, [(String::new(), value)]);
    }

    /// Adds a figure with its series, each with the labels that [`label`] wrote; nothing where there are none.
    pub fn family<V: Display>(&mut self, figure: Figure, series: impl IntoIterator<Item = (String, V)>) {
        let mut series = series.into_iter().peekable();
        if series.peek().is_none() {
            return;
        }
        self.head(figure);
        for (labels, value) in series {
            let _ = match labels.as_str() {
                "" => writeln!(self.0, "{} {value}", figure.name),
                labels => writeln!(self.0, "{}{{{labels}}} {value}", figure.name),
            };
        }
        self.0.push('\n');
    }

    /// Adds a distribution: each bucket's upper end and count, the last bucket without an end, and the sum of all values.
    pub fn distribution(
        &mut self,
        figure: Figure,
        buckets: impl IntoIterator<Item = (Option<f64>, u64)>,
        sum: f64,
    ) {
        self.head(figure);
        let (name, mut count) = (figure.name, 0);
        for (end, in_bucket) in buckets {
            count += in_bucket;
            let end = end.map_or_else(|| "+Inf".to_owned(), |end| end.to_string());
            let _ = writeln!(self.0, "{name}_bucket{{le=\"{end}\"}} {count}");
        }
        let _ = write!(self.0, "{name}_sum {sum}\n{name}_count {count}\n\n");
    }

    /// The text.
    #[must_use]
    pub fn into_text(self) -> String {
        self.0
    }

    fn head(&mut self, Figure { name, kind, help }: Figure) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {}\n", kind.name());
    }
}

/// A label in the text format.
#[must_use]
pub fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_a_head_and_the_series_of_each_figure() {
        let mut page = Page::after("up 1\n".to_owned());
        page.value(Figure::gauge("g", "A gauge"), 0.5);
        page.family(Figure::counter("none_total", "Without series"), None::<(String, u64)>);
        let series = [(label("of", "a"), 1), (label("of", "\\ \" \n"), 2)];
        page.family(Figure::counter("c_total", "A counter"), series);
        let buckets = [(Some(0.001), 2), (Some(5.0), 0), (None, 3)];
        page.distribution(Figure::histogram("h_seconds", "Times"), buckets, 1.25);
        let expected = "up 1\n\
            # HELP g A gauge\n# TYPE g gauge\ng 0.5\n\n\
            # HELP c_total A counter\n# TYPE c_total counter\n\
            c_total{of=\"a\"} 1\nc_total{of=\"\\\\ \\\" \\n\"} 2\n\n\
            # HELP h_seconds Times\n# TYPE h_seconds histogram\n\
            h_seconds_bucket{le=\"0.001\"} 2\nh_seconds_bucket{le=\"5\"} 2\nh_seconds_bucket{le=\"+Inf\"} 5\n\
            h_seconds_sum 1.25\nh_seconds_count 5\n\n";
        assert_eq!(page.into_text(), expected);
    }
}
