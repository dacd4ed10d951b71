//! Charts of lines: one per run over shared axes, drawn as SVG that reads without a script.

use super::axis::Axis;
use super::names::stroke;
use super::text::{coordinate, escape};

const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 252.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 44.0;
/// Objectives marked in one chart; more would hide the curves.
const MAX_MARKS: usize = 4;

/// One run's curve; `None` breaks it.
#[derive(Clone, Debug)]
pub(super) struct Line {
    /// Which run.
    pub(super) run: usize,
    /// Its name.
    pub(super) label: String,
    /// Its points from left to right.
    pub(super) points: Vec<Option<(f64, f64)>>,
}

/// A chart.
#[derive(Clone, Debug)]
pub(super) struct Chart {
    /// The quantity that it shows, with its unit.
    pub(super) title: String,
    /// How to read it; may be empty.
    pub(super) note: String,
    /// Name of the horizontal axis.
    pub(super) x_name: String,
    /// Unit of the vertical axis, for the values that the script shows.
    pub(super) y_unit: &'static str,
    /// Horizontal axis.
    pub(super) x: Axis,
    /// Vertical axis.
    pub(super) y: Axis,
    /// The offered load, drawn as ground behind the lines.
    pub(super) ground: Vec<(f64, f64)>,
    /// Objectives on the horizontal axis.
    pub(super) bounds: Vec<(f64, String)>,
    /// Curves.
    pub(super) lines: Vec<Line>,
}

impl Chart {
    /// The chart as a figure.
    #[must_use]
    pub(super) fn figure(&self) -> String {
        let title = escape(&self.title);
        let mut svg = format!(
            "<figure><figcaption><h3>{title}</h3>{}</figcaption><svg class=\"chart\" viewBox=\"0 0 {WIDTH} \
             {HEIGHT}\" \
             role=\"img\" aria-label=\"{title}\" data-frame=\"{LEFT},{TOP},{},{}\" data-x=\"{}\" data-y=\"{}\" \
             data-x-name=\"{}\" data-y-unit=\"{}\">",
            paragraph(&self.note),
            WIDTH - LEFT - RIGHT,
            HEIGHT - TOP - BOTTOM,
            self.x.data(),
            self.y.data(),
            escape(self.x_name.split(" (").next().unwrap_or_default()),
            escape(self.y_unit)
        );
        self.draw_ground(&mut svg);
        self.draw_axes(&mut svg);
        self.draw_bounds(&mut svg);
        for line in &self.lines {
            let (title, d) = (escape(&line.label), self.path(line));
            put!(
                svg,
                "<path class=\"line {}\" data-name=\"{title}\" d=\"{d}\"><title>{title}</title></path>",
                stroke(line.run)
            );
        }
        if self.lines.iter().all(|l| l.points.iter().flatten().next().is_none()) {
            put!(
                svg,
                "<text class=\"none\" x=\"{}\" y=\"{}\">nothing measured</text>",
                WIDTH / 2.0,
                HEIGHT / 2.0
            );
        }
        svg + "</svg></figure>"
    }

    fn x_at(&self, value: f64) -> String {
        coordinate(LEFT + self.x.at(value) * (WIDTH - LEFT - RIGHT))
    }

    fn y_at(&self, value: f64) -> String {
        coordinate(TOP + (1.0 - self.y.at(value)) * (HEIGHT - TOP - BOTTOM))
    }

    fn draw_ground(&self, svg: &mut String) {
        let finite = |p: &&(f64, f64)| p.0.is_finite() && p.1.is_finite();
        let points: Vec<_> = self.ground.iter().filter(finite).collect();
        let (Some(first), Some(last)) = (points.first(), points.last()) else { return };
        let zero = self.y_at(0.0);
        let mut d = format!("M{},{zero}", self.x_at(first.0));
        for (x, y) in &points {
            put!(d, " {},{}", self.x_at(*x), self.y_at(*y));
        }
        put!(
            svg,
            "<path class=\"ground\" d=\"{d} {},{zero}Z\"><title>offered</title></path>",
            self.x_at(last.0)
        );
    }

    fn draw_axes(&self, svg: &mut String) {
        let (left, right) = (coordinate(LEFT), coordinate(WIDTH - RIGHT));
        let (top, bottom) = (coordinate(TOP), coordinate(HEIGHT - BOTTOM));
        let mut grid = String::new();
        let mut names = String::new();
        for (value, name) in self.y.ticks() {
            let y = self.y_at(value);
            put!(grid, "M{left},{y}H{right}");
            put!(names, "<text class=\"y\" x=\"{}\" y=\"{y}\" dy=\".35em\">{name}</text>", LEFT - 6.0);
        }
        for (value, name) in self.x.ticks() {
            let x = self.x_at(value);
            put!(grid, "M{x},{top}V{bottom}");
            put!(names, "<text class=\"x\" x=\"{x}\" y=\"{}\">{name}</text>", HEIGHT - BOTTOM + 17.0);
        }
        let middle = coordinate(LEFT + (WIDTH - LEFT - RIGHT) / 2.0);
        put!(
            svg,
            "<path class=\"grid\" d=\"{grid}\"/><path class=\"axis\" d=\"M{left},{bottom}H{right}\"/>{names}\
             <text class=\"x name\" x=\"{middle}\" y=\"{}\">{}</text>",
            HEIGHT - 6.0,
            escape(&self.x_name)
        );
    }

    fn draw_bounds(&self, svg: &mut String) {
        let (top, bottom) = (coordinate(TOP), coordinate(HEIGHT - BOTTOM));
        for (value, name) in self.bounds.iter().take(MAX_MARKS) {
            let x = self.x_at(*value);
            // A name near the right end is written to the left of its line.
            let side = if self.x.at(*value) > 0.5 { "end" } else { "start" };
            put!(
                svg,
                "<path class=\"bound\" d=\"M{x},{top}V{bottom}\"/><text class=\"bound\" \
                 text-anchor=\"{side}\" x=\"{x}\" y=\"{}\">{}</text>",
                TOP - 6.0,
                escape(name)
            );
        }
    }

    fn path(&self, line: &Line) -> String {
        let mut d = String::new();
        let mut broken = true;
        for point in &line.points {
            let Some((x, y)) = point.filter(|(x, y)| x.is_finite() && y.is_finite()) else {
                broken = true;
                continue;
            };
            let place = format!("{},{}", self.x_at(x), self.y_at(y));
            if broken {
                // Twice: a point on its own then shows as the round end of a line.
                put!(d, "M{place}");
            }
            put!(d, " {place}");
            broken = false;
        }
        d
    }
}

/// A note as a paragraph; nothing for an empty one.
#[must_use]
pub(super) fn paragraph(note: &str) -> String {
    if note.is_empty() { String::new() } else { format!("<p>{}</p>", escape(note)) }
}
