//! Throughput and time to first token against load, as an SVG that is legible on light and dark ground.
use super::report::{Body, Row};
use std::fmt::Write;

/// Extents of a panel and what is around it.
const WIDE: f64 = 320.0;
const HIGH: f64 = 200.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 48.0;
const GAP: f64 = 90.0;

/// Plain colours: not every program that shows an SVG knows variables.
const STYLE: &str = "\
svg { color-scheme: light dark; font: 12px sans-serif; }
text { fill: #222; } .axis { stroke: #bbb; fill: none; } .worst { stroke-dasharray: 5 4; }
.a { stroke: #0b62c4; fill: none; stroke-width: 2; } .a.dot { fill: #0b62c4; }
.b { stroke: #b8480a; fill: none; stroke-width: 2; } .b.dot { fill: #b8480a; }
@media (prefers-color-scheme: dark) {
text { fill: #ddd; } .axis { stroke: #555; }
.a { stroke: #6cb2ff; } .a.dot { fill: #6cb2ff; } .b { stroke: #ffa366; } .b.dot { fill: #ffa366; }
}
";

/// What a panel draws of a row: nothing where there is no figure.
struct Line {
    of: fn(&Row) -> Option<f64>,
    class: &'static str,
}

/// The drawing.
pub fn svg(body: &Body) -> String {
    let servers = body.servers.len();
    let high = TOP + HIGH + 44.0 + 16.0 * servers as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0} {high:.0}\" role=\"img\">\n\
         <style>\n{STYLE}</style>\n",
        LEFT + 2.0 * WIDE + GAP + 24.0
    );
    let throughput = [Line { of: |row| Some(row.tok_s), class: "" }];
    panel(body, LEFT, "tokens a second, all together", &throughput, &mut out);
    let first = [
        Line { of: |row| row.first_token_s.map(|s| s.p50 * 1e3), class: "" },
        Line { of: |row| row.first_token_s.map(|s| s.max * 1e3), class: " worst" },
    ];
    let title = "ms to the first token: median, longest dashed";
    panel(body, LEFT + WIDE + GAP, title, &first, &mut out);
    for (which, server) in body.servers.iter().enumerate() {
        let y = TOP + HIGH + 48.0 + 16.0 * which as f64;
        let (letter, name) = (class(which), escaped(&format!("{} at {}", server.model, server.url)));
        let _ = writeln!(
            out,
            "<path class=\"{letter}\" d=\"M{LEFT:.0} {:.0}h24\"/><text x=\"{:.0}\" y=\"{y:.0}\">{name}</text>",
            y - 4.0,
            LEFT + 32.0
        );
    }
    out.push_str("</svg>\n");
    out
}

fn panel(body: &Body, left: f64, title: &str, lines: &[Line], out: &mut String) {
    let servers = body.servers.len();
    let rows = |which: usize| body.results.iter().filter(move |row| row.which == which);
    let values = body.results.iter().flat_map(|row| lines.iter().filter_map(|line| (line.of)(row)));
    let top = nice(values.fold(0.0, f64::max));
    let levels = body.results.len() / servers;
    let x = |at: usize| left + WIDE * (at as f64 + 0.5) / levels as f64;
    let y = |value: f64| TOP + HIGH * (1.0 - value / top);
    let _ = writeln!(out, "<text x=\"{left:.0}\" y=\"{:.0}\">{title}</text>", TOP - 20.0);
    for tick in 0..=4 {
        let value = top * f64::from(tick) / 4.0;
        let at = y(value);
        let _ = writeln!(
            out,
            "<path class=\"axis\" d=\"M{left:.0} {at:.1}h{WIDE:.0}\"/><text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>",
            left - 6.0,
            at + 4.0
        );
    }
    for (at, row) in rows(0).enumerate() {
        let (x, y) = (x(at), TOP + HIGH + 18.0);
        let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.0}\" text-anchor=\"middle\">{}</text>", row.level);
    }
    for which in 0..servers {
        let letter = class(which);
        for line in lines {
            let mut path = String::new();
            for (at, row) in rows(which).enumerate() {
                let Some(value) = (line.of)(row) else { continue };
                let (x, y) = (x(at), y(value));
                let _ = write!(path, "{}{x:.1} {y:.1}", if path.is_empty() { "M" } else { "L" });
                let _ =
                    writeln!(out, "<circle class=\"{letter} dot\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\"/>");
            }
            let _ = writeln!(out, "<path class=\"{letter}{}\" d=\"{path}\"/>", line.class);
        }
    }
}

fn class(which: usize) -> &'static str {
    if which == 0 { "a" } else { "b" }
}

/// The end of an axis whose quarters are short numbers.
fn nice(most: f64) -> f64 {
    let most = most.max(1e-3);
    let scale = 10f64.powf(most.log10().floor());
    let step = [1.0, 2.0, 4.0, 8.0, 10.0].into_iter().find(|s| s * scale >= most).unwrap_or(10.0);
    step * scale
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::figures::Spread;
    use super::super::load::{Described, Level};
    use super::*;

    fn row(which: usize, users: usize, tok_s: f64, first: Option<f64>) -> Row {
        let spread = first.map(|p50| Spread { p50, p90: p50, p99: p50, max: 2.0 * p50 });
        Row { which, tok_s, first_token_s: spread, ..Row::empty(Level::Users(users)) }
    }

    #[test]
    fn every_figure_is_a_point_and_names_are_only_text() {
        let server = |url: &str| Described { url: url.into(), model: "<a&b>".into(), ignores_eos: true };
        let body = Body {
            servers: vec![server("http://a"), server("http://b")],
            prompt_tokens: 1,
            answer_tokens: 1,
            seed: 1,
            results: vec![
                row(0, 1, 10.0, Some(0.1)),
                row(1, 1, 30.0, Some(0.2)),
                row(0, 8, 40.0, None), // everything failed
                row(1, 8, 35.0, Some(0.4)),
            ],
            ratios: None,
        };
        let svg = svg(&body);
        assert_eq!(svg.matches("<circle").count(), 4 + 2 * 3);
        assert!(svg.contains("&lt;a&amp;b&gt; at http://b") && !svg.contains("<a&b>"));
        assert!(svg.contains("8 users") && svg.contains("prefers-color-scheme: dark"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        // The highest point is inside its panel: 40 of 40, 800 ms of 800.
        assert!(svg.contains(&format!("cy=\"{TOP:.1}\"")), "{svg}");
    }

    #[test]
    fn axes_end_at_short_numbers() {
        for (most, end) in
            [(0.0, 1e-3), (7.0, 8.0), (8.1, 10.0), (41.0, 80.0), (100.0, 100.0), (1234.0, 2000.0)]
        {
            assert!((nice(most) / end - 1.0).abs() < 1e-9, "{most}: {}", nice(most));
        }
    }
}
