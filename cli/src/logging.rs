//! Who listens to what the program says of itself: log lines and the texts of `-v` on stderr, the timeline of
//! `--trace-out`. With none of them a span costs one comparison.
use crate::args::{GlobalArgs, LogFormat};
use crate::report::{self, DETAIL};
use crate::timeline::Timeline;
use std::fmt::{Debug, Write};
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::filter::{EnvFilter, FilterExt, FilterFn, LevelFilter, filter_fn};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

/// From now on. `RUST_LOG` decides which log lines there are where it is set, else `-v` and `-q` do.
pub fn init(global: &GlobalArgs, timeline: Option<Timeline>) {
    let default = match (global.quiet, global.verbose) {
        (true, _) => "error",
        (_, 0) => "warn",
        (_, 1) => "info",
        _ => "debug",
    };
    let chosen = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let lines = fmt::layer().with_writer(std::io::stderr).with_target(false);
    let lines = match global.log_format {
        LogFormat::Text => lines.with_ansi(report::color_stderr(global.color)).without_time().boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_span_list(false).boxed(),
    };
    let lines =
        lines.with_filter(chosen.and(only(LevelFilter::TRACE, |m| m.is_event() && m.target() != DETAIL)));
    let wanted = if global.verbose > 0 { LevelFilter::INFO } else { LevelFilter::OFF };
    let details = Details.with_filter(only(wanted, |m| m.target() == DETAIL));
    // What other people's crates say is not about what q4 did.
    let timeline =
        timeline.map(|t| t.with_filter(only(LevelFilter::DEBUG, |m| m.target().starts_with("q4"))));
    tracing_subscriber::registry().with(lines).with(details).with(timeline).init();
}

/// What `is_wanted` up to `most`: the level that nobody wants more of is what makes the rest cost nothing.
fn only(most: LevelFilter, is_wanted: fn(&Metadata<'_>) -> bool) -> FilterFn<impl Fn(&Metadata<'_>) -> bool> {
    filter_fn(move |m| *m.level() <= most && is_wanted(m)).with_max_level_hint(most)
}

/// Writes the message of an event and nothing else.
struct Details;

impl<S: Subscriber> Layer<S> for Details {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        report::stderr(&format!("{}\n", text.0));
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            // A String takes everything.
            let _ = write!(self.0, "{value:?}");
        }
    }
}
