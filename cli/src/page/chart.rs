//! Values of layers or calls, in their order, as a picture: each series has a mark of its own colour and
//! shape.
use super::said;
use crate::report::plain;
use maud::{Markup, html};

/// Room for a value, and for numbers and words around: left, right, top, bottom.
const STEP: f64 = 14.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 42.0;
const HEIGHT: f64 = 300.0;
/// Colours that there are.
const COLOURS: usize = 8;

/// A picture before it is drawn.
pub struct Chart {
    pub title: String,
    /// What is in order from left to right.
    pub across: String,
    /// What the values are.
    pub up: String,
    /// Names of the places; of those that are not empty, as many are written as there is room for.
    pub ticks: Vec<String>,
    /// Values are above zero, and a tenth is as far down as ten is up; zero lies at the bottom.
    pub log: bool,
    /// A line that values are held against, and its name.
    pub limit: Option<(f64, String)>,
    pub series: Vec<Series>,
}

/// Values of one kind.
pub struct Series {
    pub name: String,
    pub points: Vec<Point>,
}

/// One value.
pub struct Point {
    /// Its place.
    pub at: usize,
    /// Not finite: drawn at the edge.
    pub value: f64,
    /// What is shown when somebody points at it.
    pub says: String,
}

impl Chart {
    /// As a figure.
    pub fn svg(&self) -> Markup {
        let places = self.ticks.len().max(1);
        let width = (LEFT + RIGHT + STEP * places as f64).max(620.0);
        let (low, high, lines) = self.axis();
        let px = |at: usize| LEFT + (width - LEFT - RIGHT) * (at as f64 + 0.5) / places as f64;
        let py = |value: f64| {
            let (bottom, top) = (HEIGHT - BOTTOM, TOP);
            let share = (self.scaled(value) - low) / (high - low);
            // What is no number is as bad as the largest.
            bottom - (bottom - top) * if share.is_nan() { 1.0 } else { share.clamp(0.0, 1.0) }
        };
        let size = format!("0 0 {width:.0} {HEIGHT}");
        html! { figure {
            figcaption { (said(&self.title)) }
            svg viewBox=(size) width=(format!("{width:.0}")) height=(HEIGHT) role="img"
                aria-label=(plain(&self.title)) {
                @for line in lines {
                    @let y = tenths(py(line));
                    line.grid x1=(LEFT) x2=(width - RIGHT) y1=(y) y2=(y) {}
                    text x=(LEFT - 8.0) y=(tenths(py(line) + 4.0)) text-anchor="end" { (number(line)) }
                }
                @for (x, tick) in self.marks(&px) {
                    text x=(tenths(x)) y=(HEIGHT - BOTTOM + 17.0) text-anchor="middle" { (said(tick)) }
                }
                text x=(width - RIGHT) y=(HEIGHT - 6.0) text-anchor="end" { (said(&self.across)) }
                text x="4" y=(HEIGHT - 6.0) { (said(&self.up)) }
                @if let Some((value, name)) = &self.limit {
                    @let y = tenths(py(*value));
                    line.limit x1=(LEFT) x2=(width - RIGHT) y1=(y) y2=(y) {}
                    text.limit-text x=(width - RIGHT) y=(tenths(py(*value) - 5.0)) text-anchor="end" {
                        (said(name))
                    }
                }
                @for (i, series) in self.series.iter().enumerate() {
                    @for point in &series.points {
                        path class=(class(i)) d=(mark(i, px(point.at), py(point.value))) {
                            title { (said(&point.says)) }
                        }
                    }
                }
            }
            ul.legend { @for (i, series) in self.series.iter().enumerate() {
                li {
                    svg viewBox="0 0 14 14" width="14" height="14" aria-hidden="true" {
                        path class=(class(i)) d=(mark(i, 7.0, 7.0)) {}
                    }
                    (said(&series.name))
                }
            } }
        } }
    }

    /// Names of places that have one, as many as there is room for.
    fn marks(&self, px: &dyn Fn(usize) -> f64) -> Vec<(f64, &str)> {
        let mut drawn: Vec<(f64, &str)> = Vec::new();
        for (at, tick) in self.ticks.iter().enumerate().filter(|(_, tick)| !tick.is_empty()) {
            let room = 10.0 + 7.0 * tick.chars().count() as f64;
            if drawn.last().is_none_or(|(last, _)| px(at) - last >= room) {
                drawn.push((px(at), tick));
            }
        }
        drawn
    }

    fn scaled(&self, value: f64) -> f64 {
        match self.log {
            true if value > 0.0 => value.log10(),
            true if value == 0.0 => f64::NEG_INFINITY,
            _ => value,
        }
    }

    /// Both ends, scaled, and the values that have a line.
    fn axis(&self) -> (f64, f64, Vec<f64>) {
        let limit = self.limit.iter().map(|limit| limit.0);
        let all = self.series.iter().flat_map(|s| &s.points).map(|p| p.value).chain(limit);
        let finite = all.map(|value| self.scaled(value)).filter(|value| value.is_finite());
        let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| (a.min(v), b.max(v)));
        let (low, high) = if low > high { (0.0, 1.0) } else { (low, high) };
        if self.log {
            let (low, high) = (low.floor() - 1.0, high.ceil().max(low.floor() + 1.0));
            let every = (((high - low) / 8.0).ceil() as i32).max(1);
            let lines = (low as i32..=high as i32).step_by(every as usize).map(|power| 10f64.powi(power));
            return (low, high, lines.collect());
        }
        let rough = ((high - low) / 5.0).max(1e-9);
        let power = 10f64.powf(rough.log10().floor());
        let step =
            [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= rough).unwrap_or(rough);
        let (first, last) = ((low / step).floor() as i64, (high / step).ceil() as i64);
        let last = last.max(first + 1);
        let lines = (first..=last).map(|i| i as f64 * step).collect();
        (first as f64 * step, last as f64 * step, lines)
    }
}

/// The class of a colour.
pub(super) fn class(i: usize) -> String {
    format!("c{}", i % COLOURS)
}

/// A disc, a square, a triangle, a diamond, a cross: who does not see the colour sees the shape.
fn mark(i: usize, x: f64, y: f64) -> String {
    let to = |points: &[(f64, f64)]| {
        let word = |(i, (a, b)): (usize, &(f64, f64))| {
            format!("{}{:.1} {:.1}", if i == 0 { 'M' } else { 'L' }, x + a, y + b)
        };
        points.iter().enumerate().map(word).collect::<String>() + "Z"
    };
    match i % 7 {
        0 => format!("M{:.1} {y:.1}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", x - 4.0),
        1 => to(&[(-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)]),
        2 => to(&[(0.0, -4.6), (4.6, 3.6), (-4.6, 3.6)]),
        3 => to(&[(0.0, -5.0), (5.0, 0.0), (0.0, 5.0), (-5.0, 0.0)]),
        4 => to(&[(0.0, 4.6), (4.6, -3.6), (-4.6, -3.6)]),
        5 => to(&[(-5.0, -1.6), (5.0, -1.6), (5.0, 1.6), (-5.0, 1.6)]),
        _ => to(&[(-1.6, -5.0), (1.6, -5.0), (1.6, 5.0), (-1.6, 5.0)]),
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if (0.01..1e5).contains(&size) => format!("{}", (value * 1e4).round() / 1e4),
        _ => format!("{value:.0e}"),
    }
}

fn tenths(value: f64) -> String {
    format!("{value:.1}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(values: &[f64], log: bool) -> Chart {
        let point = |(at, value): (usize, &f64)| Point { at, value: *value, says: String::new() };
        Chart {
            title: "t".into(),
            across: "layer".into(),
            up: "dB".into(),
            ticks: (0..values.len()).map(|i| i.to_string()).collect(),
            log,
            limit: None,
            series: vec![Series { name: "q".into(), points: values.iter().enumerate().map(point).collect() }],
        }
    }

    #[test]
    fn axes_hold_what_is_finite() {
        let (low, high, lines) = chart(&[18.3, 21.9], false).axis();
        assert_eq!((low, high), (18.0, 22.0));
        assert_eq!(lines, [18.0, 19.0, 20.0, 21.0, 22.0]);
        let (low, high, _) = chart(&[1e-6, 3e-3, 0.0], true).axis();
        assert_eq!((low, high), (-7.0, -2.0));
        for values in [&[][..], &[f64::NAN], &[f64::INFINITY], &[0.0], &[5.0, 5.0]] {
            for log in [true, false] {
                let (low, high, lines) = chart(values, log).axis();
                assert!(low.is_finite() && high > low && (2..20).contains(&lines.len()), "{values:?}");
                assert!(!chart(values, log).svg().into_string().contains("NaN"), "{values:?}");
            }
        }
    }
}
