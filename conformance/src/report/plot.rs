//! Inline SVG of the report: how far from their bounds the errors of a claim are.
use super::{ClaimReport, Errors, HISTOGRAM};
use std::fmt::Write;

const WIDTH: f64 = 360.0;
const HEIGHT: f64 = 112.0;

/// How much of its bound the largest error of a claim takes.
pub(super) fn bar(ratio: f64) -> String {
    let width = 64.0 * ratio.clamp(0.0, 1.0);
    format!(
        "<svg class=\"bar\" viewBox=\"0 0 64 8\" aria-hidden=\"true\"><rect class=\"track\" width=\"64\" height=\"8\" rx=\"4\"/><rect class=\"f32\" width=\"{width:.1}\" height=\"8\" rx=\"4\"/></svg>"
    )
}

/// Cases by error over bound, from 0 to 1: bars on a square-root scale, f32 above the axis and 16-bit results
/// below it, the bound at the end.
pub(super) fn histogram(c: &ClaimReport) -> String {
    let both = c.float32.cases() > 0 && c.half.cases() > 0;
    let above = if both { HEIGHT * 0.58 } else { HEIGHT * f64::from(c.half.cases() == 0) };
    let below = HEIGHT - above;
    let mut out = format!(
        "<svg viewBox=\"0 -4 {:.0} {:.0}\" role=\"img\" aria-label=\"error over bound: f32 at most {:.3}, 16-bit at most {:.3}\">",
        WIDTH + 2.0,
        HEIGHT + 26.0,
        c.float32.max,
        c.half.max
    );
    for quarter in 1..4 {
        let x = WIDTH * f64::from(quarter) / 4.0;
        let _ =
            write!(out, "<line class=\"grid\" x1=\"{x}\" x2=\"{x}\" y1=\"0\" y2=\"{:.0}\"/>", above + below);
    }
    bars(&mut out, &c.float32, "f32", above, -above);
    bars(&mut out, &c.half, "half", above, below);
    let _ = write!(out, "<line class=\"axis\" x1=\"0\" x2=\"{WIDTH}\" y1=\"{above:.1}\" y2=\"{above:.1}\"/>");
    let end = above + below;
    let _ = write!(out, "<line class=\"limit\" x1=\"{WIDTH}\" x2=\"{WIDTH}\" y1=\"-2\" y2=\"{end:.1}\"/>");
    for (at, label, anchor, class) in [
        (0.0, "0", "start", ""),
        (0.25, "¼", "middle", ""),
        (0.5, "½", "middle", ""),
        (0.75, "¾", "middle", ""),
        (1.0, "bound", "end", " class=\"end\""),
    ] {
        let (x, y) = (at * WIDTH, end + 17.0);
        let _ = write!(out, "<text{class} x=\"{x}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{label}</text>");
    }
    out.push_str("</svg>");
    out
}

/// Bars from the axis at `y`, upwards where `reach` is negative.
fn bars(out: &mut String, e: &Errors, class: &str, y: f64, reach: f64) {
    let cell = WIDTH / HISTOGRAM as f64;
    let most = e.histogram.iter().max().copied().unwrap_or(0).max(1);
    for (i, count) in e.histogram.iter().enumerate().filter(|(_, n)| **n > 0) {
        // One case among thousands must stay visible.
        let height = 3.0 + (reach.abs() - 4.0) * (f64::from(*count) / f64::from(most)).sqrt();
        let top = if reach < 0.0 { y - height } else { y };
        let (from, to) = (i as f64 / HISTOGRAM as f64, (i + 1) as f64 / HISTOGRAM as f64);
        let _ = write!(
            out,
            "<rect class=\"{class}\" x=\"{:.2}\" y=\"{top:.2}\" width=\"{:.2}\" height=\"{height:.2}\" rx=\"1.5\"><title>{count} cases at {from:.3} to {to:.3}</title></rect>",
            i as f64 * cell + 0.75,
            cell - 1.5
        );
    }
}
