//! One chart as a `figure` with inline SVG: a grid with round numbers, a line per series, thinned out to the
//! pixels.
use maud::{Markup, html};
use std::fmt::Write;

const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 260.0;
/// Room for the numbers: left, right, top, bottom.
const LEFT: f64 = 56.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 26.0;
/// Columns a line has at most; each shows the smallest and the largest value that falls into it.
const COLUMNS: usize = 300;

/// How numbers on the axis are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// `0.25`, `1e-4`.
    Plain,
    /// `880k`, `1.2M`.
    Thousands,
    /// `1.5 GiB`.
    Bytes,
}

pub(super) struct Series<'a> {
    pub label: &'a str,
    pub colour: &'a str,
    pub points: Vec<(f64, f64)>,
}

pub(super) struct Chart<'a> {
    pub title: &'a str,
    pub unit: Unit,
    /// Logarithmic where every value is above zero.
    pub log: bool,
    pub series: Vec<Series<'a>>,
}

impl Chart<'_> {
    pub fn svg(&self) -> Markup {
        let all = || self.series.iter().flat_map(|s| &s.points).filter(|(_, y)| y.is_finite());
        let log = self.log && all().all(|(_, y)| *y > 0.0);
        let scale = |y: f64| if log { y.log10() } else { y };
        let (x0, x1) = range(all().map(|(x, _)| *x));
        let (low, high) = range(all().map(|(_, y)| scale(*y)));
        let room = 0.05 * (high - low);
        // A quantity that cannot be negative has an axis that is not, either.
        let y0 = if !log && low >= 0.0 { 0.0 } else { low - room };
        let y1 = high + room;
        let px = |x: f64| LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT);
        let py = |y: f64| TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM);
        let tenths = |v: f64| format!("{v:.1}");
        let text = |x: f64, y: f64, anchor: &str, text: String| {
            html! { text x=(tenths(x)) y=(tenths(y)) text-anchor=(anchor) { (text) } }
        };
        html! { figure {
            figcaption {
                (self.title)
                @for s in &self.series {
                    @let last = s.points.last().map_or(String::new(), |(_, y)| self.unit.show(*y));
                    span { i style={ "background:" (s.colour) } {} (s.label) " " (last) }
                }
            }
            svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label={ (self.title) " over steps" } {
                @for y in if log { log_ticks(y0, y1) } else { self.unit.ticks(y0, y1) } {
                    @let at = py(y);
                    line.grid x1=(LEFT) x2=(WIDTH - RIGHT) y1=(tenths(at)) y2=(tenths(at)) {}
                    (text(LEFT - 6.0, at + 4.0, "end", self.unit.show(if log { 10f64.powf(y) } else { y })))
                }
                @for x in ticks(x0, x1, 6) {
                    (text(px(x), HEIGHT - 8.0, "middle", Unit::Thousands.show(x)))
                }
                @for s in &self.series {
                    @let finite = s.points.iter().filter(|(_, y)| y.is_finite());
                    @let points: Vec<_> = finite.map(|(x, y)| (px(*x), py(scale(*y)))).collect();
                    @if let [(x, y)] = points[..] {
                        circle cx=(tenths(x)) cy=(tenths(y)) r="3" fill=(s.colour) {}
                    } @else {
                        polyline fill="none" stroke=(s.colour) stroke-width="1.5" stroke-linejoin="round"
                            points=(thinned(&points)) {}
                    }
                }
            }
        } }
    }
}

impl Unit {
    /// Round in what they are shown in.
    fn ticks(self, low: f64, high: f64) -> Vec<f64> {
        let one = match self {
            Self::Bytes => 1024f64.powf((high.max(1.0).log2() / 10.0).floor()),
            _ => 1.0,
        };
        ticks(low / one, high / one, 5).into_iter().map(|t| t * one).collect()
    }

    pub fn show(self, x: f64) -> String {
        match self {
            Self::Bytes => q4_core::memory::human(x.max(0.0) as u64).replace(".00", ""),
            Self::Thousands if x.abs() >= 1e6 => format!("{}M", short(x / 1e6)),
            Self::Thousands if x.abs() >= 1e4 => format!("{}k", short(x / 1e3)),
            Self::Plain if x != 0.0 && !(1e-3..1e5).contains(&x.abs()) => {
                let text = format!("{x:.2e}");
                let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
                format!("{}e{exponent}", mantissa.trim_end_matches('0').trim_end_matches('.'))
            }
            _ => short(x),
        }
    }
}

/// Up to four significant digits without trailing zeros.
fn short(x: f64) -> String {
    let digits = (3 - x.abs().max(1e-4).log10().floor() as i32).clamp(0, 6) as usize;
    let text = format!("{x:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Smallest and largest; never equal.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| (a.min(x), b.max(x)));
    match (low, high) {
        (a, b) if a > b => (0.0, 1.0),
        (a, b) if a == b && a == 0.0 => (-0.5, 0.5),
        (a, b) if a == b => (a - a.abs() / 2.0, b + b.abs() / 2.0),
        both => both,
    }
}

/// Multiples of 1, 2 or 5 times a power of ten, about `n` of them.
fn ticks(low: f64, high: f64, n: usize) -> Vec<f64> {
    let raw = (high - low) / n as f64;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= raw).unwrap_or(raw);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last.min(first + 20)).map(|i| i as f64 * step).collect()
}

/// Logarithms of round numbers between `10^low` and `10^high`.
fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    let (first, last) = (low.floor() as i32, high.ceil() as i32);
    let within = |steps: &[f64]| -> Vec<f64> {
        let all = (first..=last).flat_map(|e| steps.iter().map(move |m| f64::from(e) + m.log10()));
        all.filter(|t| (low..=high).contains(t)).collect()
    };
    let decades = within(&[1.0]);
    let fine = within(&[1.0, 2.0, 5.0]);
    match (decades.len(), fine.len()) {
        (5.., _) => decades,
        (_, 3..) => fine,
        // Less than a decade: evenly spaced numbers instead.
        _ => ticks(10f64.powf(low), 10f64.powf(high), 5)
            .into_iter()
            .filter(|x| *x > 0.0)
            .map(f64::log10)
            .collect(),
    }
}

fn thinned(points: &[(f64, f64)]) -> String {
    let mut text = String::new();
    let mut put = |(x, y): (f64, f64)| {
        let _ = write!(text, "{x:.1},{y:.1} ");
    };
    if points.len() <= 2 * COLUMNS {
        points.iter().for_each(|p| put(*p));
        return text;
    }
    for column in points.chunks(points.len().div_ceil(COLUMNS)) {
        let by = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let mut both: Vec<_> =
            [column.iter().min_by(by), column.iter().max_by(by)].into_iter().flatten().copied().collect();
        both.sort_by(|a, b| a.0.total_cmp(&b.0));
        both.into_iter().for_each(&mut put);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_numbers() {
        assert_eq!(ticks(0.0, 10.0, 5), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(3.0, 99.0, 5), [20.0, 40.0, 60.0, 80.0]);
        let shown: Vec<_> =
            log_ticks(-0.9, 1.1).into_iter().map(|t| Unit::Plain.show(10f64.powf(t))).collect();
        assert_eq!(shown, ["0.2", "0.5", "1", "2", "5", "10"]);
        assert!(log_ticks(0.01, 0.05).len() >= 3);
        let plain = [0.0, 1e-4, 2.5e-5, 0.25, 12345.6, 3e6].map(|x| Unit::Plain.show(x));
        assert_eq!(plain, ["0", "1e-4", "2.5e-5", "0.25", "12346", "3e6"]);
        assert_eq!(Unit::Thousands.show(881_530.0), "881.5k");
        let shown: Vec<_> = Unit::Bytes.ticks(0.0, 1.05e9).into_iter().map(|t| Unit::Bytes.show(t)).collect();
        assert_eq!(shown, ["0 B", "500 MiB", "1000 MiB"]);
    }

    #[test]
    fn a_constant_is_in_the_middle() {
        let (low, high) = range([1e-3, 1e-3].into_iter());
        assert!(low > 0.0 && high < 2e-3 && low < 1e-3 && high > 1e-3);
        assert_eq!(range([0.0].into_iter()), (-0.5, 0.5));
    }

    #[test]
    fn odd_data_gives_finite_charts() {
        for points in [
            vec![(1.0, 1.0)],
            vec![(0.0, 0.0), (1.0, 0.0)],
            vec![(5.0, f64::NAN)],
            vec![(0.0, -1.0), (1.0, 1e300)],
        ] {
            let chart = Chart {
                title: "x",
                unit: Unit::Plain,
                log: true,
                series: vec![Series { label: "a", colour: "red", points }],
            };
            let svg = chart.svg().into_string();
            assert!(!svg.contains("NaN\"") && !svg.contains("inf\""), "{svg}");
        }
    }
}
