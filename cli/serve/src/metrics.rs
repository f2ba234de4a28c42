//! Figures for Prometheus: what was answered and how long it took. Everything that dashboards and gateways of
//! vLLM look for has that name beside its own.
use q4_model::batch::Gauges;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds of the buckets for whole requests, in seconds.
const LONG: &[f64] = &[0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0];
/// For the first token.
const FIRST: &[f64] = &[0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 80.0];
/// For one token.
const TOKEN: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5];

/// Durations, counted by bounds.
#[derive(Debug)]
struct Histogram {
    bounds: &'static [f64],
    counts: Vec<AtomicU64>,
    micros: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, micros: AtomicU64::new(0) }
    }
    fn note(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let at = self.bounds.partition_point(|bound| *bound < seconds);
        self.counts[at].fetch_add(1, Relaxed);
        self.micros.fetch_add(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }
    fn write(&self, out: &mut String, name: &str, help: &str) {
        head(out, name, "histogram", help);
        let mut sum = 0;
        for (count, bound) in self.counts.iter().zip(self.bounds.iter().map(Some).chain([None])) {
            sum += count.load(Relaxed);
            let bound = bound.map_or_else(|| "+Inf".to_owned(), f64::to_string);
            line(out, format_args!("{name}_bucket{{le=\"{bound}\"}} {sum}"));
        }
        line(out, format_args!("{name}_sum {}", self.micros.load(Relaxed) as f64 / 1e6));
        line(out, format_args!("{name}_count {sum}"));
    }
}

/// Why an answer is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// By itself or by a stop string.
    Stop,
    /// It was cut.
    Length,
    /// Nobody listened any longer.
    Abort,
    /// The engine failed.
    Error,
}

const OUTCOMES: [(Outcome, &str); 4] = [
    (Outcome::Stop, "stop"),
    (Outcome::Length, "length"),
    (Outcome::Abort, "abort"),
    (Outcome::Error, "error"),
];

impl Outcome {
    /// As figures and logs name it.
    pub fn name(self) -> &'static str {
        OUTCOMES[self as usize].1
    }
}

/// All figures since the start.
#[derive(Debug)]
pub struct Metrics {
    prompt_tokens: AtomicU64,
    generation_tokens: AtomicU64,
    outcomes: [AtomicU64; OUTCOMES.len()],
    first: Histogram,
    between: Histogram,
    per_token: Histogram,
    whole: Histogram,
    queue: Histogram,
    responses: [AtomicU64; 4],
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            prompt_tokens: AtomicU64::new(0),
            generation_tokens: AtomicU64::new(0),
            outcomes: Default::default(),
            first: Histogram::new(FIRST),
            between: Histogram::new(TOKEN),
            per_token: Histogram::new(TOKEN),
            whole: Histogram::new(LONG),
            queue: Histogram::new(LONG),
            responses: Default::default(),
        }
    }
}

impl Metrics {
    /// The prompt of a request is in the cache.
    pub fn started(&self, tokens: usize) {
        self.prompt_tokens.fetch_add(tokens as u64, Relaxed);
    }
    /// The first token came so long after the request.
    pub fn first_token(&self, after: Duration) {
        self.generation_tokens.fetch_add(1, Relaxed);
        self.first.note(after);
    }
    /// Another token came so long after the one before.
    pub fn next_token(&self, after: Duration) {
        self.generation_tokens.fetch_add(1, Relaxed);
        self.between.note(after);
    }
    /// A request waited so long.
    pub fn queued(&self, time: Duration) {
        self.queue.note(time);
    }
    /// An answer is over; it took `whole`, and `decode` from its first token to its last of `tokens`.
    pub fn over(&self, outcome: Outcome, whole: Duration, decode: Duration, tokens: usize) {
        self.outcomes[outcome as usize].fetch_add(1, Relaxed);
        self.whole.note(whole);
        if let Some(steps) = u32::try_from(tokens).ok().and_then(|n| n.checked_sub(1)).filter(|n| *n > 0) {
            self.per_token.note(decode / steps);
        }
    }
    /// A response went out with this status.
    pub fn responded(&self, status: u16) {
        let class = usize::from(status / 100).clamp(2, 5) - 2;
        self.responses[class].fetch_add(1, Relaxed);
    }

    /// Text in the format of Prometheus 0.0.4; requests in flight keep `kept` bytes.
    pub fn text(&self, model: &str, gauges: &Gauges, kept: u64) -> String {
        let mut out = String::new();
        head(&mut out, "q4_info", "gauge", "What is served.");
        let model = model.replace('\\', r"\\").replace('"', "\\\"").replace('\n', "\\n");
        let version = env!("CARGO_PKG_VERSION");
        line(&mut out, format_args!("q4_info{{model_name=\"{model}\",version=\"{version}\"}} 1"));
        head(&mut out, "q4_http_responses_total", "counter", "Responses by class of status.");
        for (count, class) in self.responses.iter().zip(2..) {
            let count = count.load(Relaxed);
            line(&mut out, format_args!("q4_http_responses_total{{class=\"{class}xx\"}} {count}"));
        }
        head(&mut out, "q4_steps_total", "counter", "Steps over all sequences.");
        line(&mut out, format_args!("q4_steps_total {}", gauges.steps));
        head(&mut out, "q4_request_memory_bytes", "gauge", "What requests in flight keep.");
        line(&mut out, format_args!("q4_request_memory_bytes {kept}"));
        for prefix in ["q4_", "vllm:"] {
            self.write(&mut out, prefix, gauges);
        }
        out
    }

    fn write(&self, out: &mut String, prefix: &str, gauges: &Gauges) {
        let mut single = |name: &str, kind: &str, help: &str, value: f64| {
            let name = format!("{prefix}{name}");
            head(out, &name, kind, help);
            line(out, format_args!("{name} {value}"));
        };
        single("num_requests_running", "gauge", "Sequences being continued.", gauges.running as f64);
        single("num_requests_waiting", "gauge", "Sequences that wait for a place.", gauges.waiting as f64);
        let used = gauges.pages_used as f64 / gauges.pages.max(1) as f64;
        single("kv_cache_usage_perc", "gauge", "Share of the cache that is taken, 0 to 1.", used);
        let asked = gauges.prompt_tokens as f64;
        single("prefix_cache_queries_total", "counter", "Tokens looked for in the cache.", asked);
        let found = gauges.cached_tokens as f64;
        single("prefix_cache_hits_total", "counter", "Tokens found there.", found);
        let preempted = gauges.preempted as f64;
        single("num_preemptions_total", "counter", "Times a sequence gave its place away.", preempted);
        let counted = |counter: &AtomicU64| counter.load(Relaxed) as f64;
        single("prompt_tokens_total", "counter", "Tokens of prompts.", counted(&self.prompt_tokens));
        let generated = counted(&self.generation_tokens);
        single("generation_tokens_total", "counter", "Tokens of answers.", generated);
        let name = format!("{prefix}request_success_total");
        head(out, &name, "counter", "Answers by the reason of their end.");
        for (outcome, reason) in OUTCOMES {
            let count = self.outcomes[outcome as usize].load(Relaxed);
            line(out, format_args!("{name}{{finished_reason=\"{reason}\"}} {count}"));
        }
        for (histogram, name, help) in [
            (&self.first, "time_to_first_token_seconds", "From the request to its first token."),
            (&self.between, "inter_token_latency_seconds", "From one token to the next."),
            (&self.per_token, "time_per_output_token_seconds", "The same, as the mean of an answer."),
            (&self.whole, "e2e_request_latency_seconds", "From the request to the end of its answer."),
            (&self.queue, "request_queue_time_seconds", "From the request to the work on its prompt."),
        ] {
            histogram.write(out, &format!("{prefix}{name}"), help);
        }
    }
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    line(out, format_args!("# HELP {name} {help}\n# TYPE {name} {kind}"));
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_count_upwards_and_keep_their_sum() {
        let metrics = Metrics::default();
        metrics.started(7);
        metrics.first_token(Duration::from_millis(3));
        metrics.next_token(Duration::from_millis(10));
        metrics.over(Outcome::Length, Duration::from_secs(1000), Duration::from_millis(10), 2);
        let gauges = Gauges { running: 2, pages_used: 1, pages: 4, steps: 9, ..Gauges::default() };
        let text = metrics.text("a\"b", &gauges, 17);
        for line in [
            "q4_info{model_name=\"a\\\"b\",version=\"0.1.0\"} 1",
            "vllm:num_requests_running 2",
            "q4_kv_cache_usage_perc 0.25",
            "q4_steps_total 9",
            "q4_request_memory_bytes 17",
            "vllm:prompt_tokens_total 7",
            "q4_generation_tokens_total 2",
            "vllm:request_success_total{finished_reason=\"length\"} 1",
            "vllm:time_to_first_token_seconds_bucket{le=\"0.001\"} 0",
            "vllm:time_to_first_token_seconds_bucket{le=\"0.005\"} 1",
            "vllm:time_to_first_token_seconds_bucket{le=\"+Inf\"} 1",
            "vllm:inter_token_latency_seconds_bucket{le=\"0.01\"} 1",
            "vllm:e2e_request_latency_seconds_bucket{le=\"640\"} 0",
            "vllm:e2e_request_latency_seconds_sum 1000",
            "q4_time_per_output_token_seconds_sum 0.01",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
        }
    }
}
