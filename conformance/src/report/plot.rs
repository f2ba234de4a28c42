//! Inline SVG of the report: how far from their bounds the errors of a claim are.
use super::{ClaimReport, Errors, HISTOGRAM};
use maud::{Markup, html};

const WIDTH: f64 = 360.0;
const HEIGHT: f64 = 112.0;

/// How much of its bound the largest error of a claim takes.
pub(super) fn bar(ratio: f64) -> Markup {
    let width = 64.0 * ratio.clamp(0.0, 1.0);
    html! {
        svg.bar viewBox="0 0 64 8" aria-hidden="true" {
            rect.track width="64" height="8" rx="4" {}
            rect.f32 width=(format_args!("{width:.1}")) height="8" rx="4" {}
        }
    }
}

/// Cases by error over bound, from 0 to 1: bars on a square-root scale, f32 above the axis and 16-bit results
/// below it, the bound at the end.
pub(super) fn histogram(c: &ClaimReport) -> Markup {
    let both = c.float32.cases() > 0 && c.half.cases() > 0;
    let above = if both { HEIGHT * 0.58 } else { HEIGHT * f64::from(c.half.cases() == 0) };
    let (f32, half) = (c.float32.max, c.half.max);
    let label = format!("error over bound: f32 at most {f32:.3}, 16-bit at most {half:.3}");
    let vertical = |class, x: f64, y: f64| html! { line class=(class) x1=(x) x2=(x) y1=(y) y2=(HEIGHT) {} };
    let y = format!("{above:.1}");
    html! {
        svg viewBox=(format_args!("0 -4 {} {}", WIDTH + 2.0, HEIGHT + 26.0)) role="img" aria-label=(label) {
            @for quarter in 1..4 { (vertical("grid", WIDTH * f64::from(quarter) / 4.0, 0.0)) }
            (bars(&c.float32, "f32", above, -above))
            (bars(&c.half, "half", above, HEIGHT - above))
            line.axis x1="0" x2=(WIDTH) y1=(y) y2=(y) {}
            (vertical("limit", WIDTH, -2.0))
            @for (at, label, anchor) in [
                (0.0, "0", "start"),
                (0.25, "¼", "middle"),
                (0.5, "½", "middle"),
                (0.75, "¾", "middle"),
                (1.0, "bound", "end"),
            ] {
                @let class = (anchor == "end").then_some("end");
                text class=[class] x=(at * WIDTH) y=(HEIGHT + 17.0) text-anchor=(anchor) { (label) }
            }
        }
    }
}

/// Bars from the axis at `y`, upwards where `reach` is negative.
fn bars(e: &Errors, class: &str, y: f64, reach: f64) -> Markup {
    let cell = WIDTH / HISTOGRAM as f64;
    let most = e.histogram.iter().max().copied().unwrap_or(0).max(1);
    let bar = |(i, count): (usize, &u32)| {
        // One case among thousands must stay visible.
        let height = 3.0 + (reach.abs() - 4.0) * (f64::from(*count) / f64::from(most)).sqrt();
        let top = if reach < 0.0 { y - height } else { y };
        let (from, to) = (i as f64 / HISTOGRAM as f64, (i + 1) as f64 / HISTOGRAM as f64);
        let hundredths = |v: f64| format!("{v:.2}");
        html! {
            rect class=(class) x=(hundredths(i as f64 * cell + 0.75)) y=(hundredths(top))
                width=(hundredths(cell - 1.5)) height=(hundredths(height)) rx="1.5" {
                title { (count) " cases at " (format_args!("{from:.3} to {to:.3}")) }
            }
        }
    };
    html! { @for one in e.histogram.iter().enumerate().filter(|(_, n)| **n > 0) { (bar(one)) } }
}
