//! What `q4 bench --server` prints.
use super::figures::Spread;
use super::load::{Described, Level, Ready, Run};
use q4_core::Error;
use serde::Serialize;
use std::fmt::Write;

/// What the table's words mean.
const LEGEND: &str = "\
tok/s: tokens of answers, all requests together; first: ms from when a request was due to its first token;
worst/p50: the longest wait for a first token over the median; next: ms between pieces of an answer
";

/// The requests that failed alike.
#[derive(Serialize)]
pub struct Failure {
    pub times: usize,
    pub error: Error,
}

/// One level of one server.
#[derive(Serialize)]
pub struct Row {
    /// Place in [`Body::servers`].
    #[serde(skip)]
    pub which: usize,
    pub server: String,
    #[serde(flatten)]
    pub level: Level,
    pub requests: usize,
    pub ok: usize,
    pub failed: usize,
    pub failures: Vec<Failure>,
    /// Answers with fewer tokens than were asked for.
    pub short: usize,
    /// Answers without a text, whose times nobody knows.
    pub silent: usize,
    pub seconds: f64,
    pub tok_s: f64,
    pub requests_s: f64,
    /// Of answers.
    pub tokens: usize,
    /// Of a prompt, on average.
    pub prompt_tokens: f64,
    /// Of all prompts, what the server says it had computed before.
    pub cached_tokens: usize,
    pub first_token_s: Option<Spread>,
    pub next_token_s: Option<Spread>,
    /// The longest time to first token over the median.
    pub starvation: Option<f64>,
}

/// The first server over the second.
#[derive(Serialize)]
pub struct Ratio {
    #[serde(flatten)]
    pub level: Level,
    pub tok_s: Option<f64>,
    pub first_token_p50: Option<f64>,
    pub first_token_max: Option<f64>,
    pub next_token_p50: Option<f64>,
}

/// Everything that was measured.
#[derive(Serialize)]
pub struct Body {
    pub servers: Vec<Described>,
    /// Asked for.
    pub prompt_tokens: usize,
    pub answer_tokens: usize,
    pub seed: u64,
    pub results: Vec<Row>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratios: Option<Vec<Ratio>>,
}

impl Row {
    /// What a run amounts to.
    pub fn new(which: usize, ready: &Ready, level: Level, run: &Run) -> Self {
        let seen: Vec<_> = run.fates.iter().filter_map(|fate| fate.as_ref().ok()).collect();
        let tokens: usize = seen.iter().map(|s| s.usage.answer).sum();
        let prompts: usize = seen.iter().map(|s| s.usage.prompt).sum();
        let seconds = run.wall.as_secs_f64();
        let first = Spread::of(seen.iter().filter_map(|s| s.first));
        Self {
            which,
            server: ready.described().url,
            level,
            requests: run.fates.len(),
            ok: seen.len(),
            failed: run.fates.len() - seen.len(),
            failures: failures(run),
            short: seen.iter().filter(|s| s.usage.answer < ready.answer()).count(),
            silent: seen.iter().filter(|s| s.first.is_none()).count(),
            seconds,
            tok_s: tokens as f64 / seconds,
            requests_s: seen.len() as f64 / seconds,
            tokens,
            prompt_tokens: prompts as f64 / seen.len().max(1) as f64,
            cached_tokens: seen.iter().map(|s| s.usage.cached).sum(),
            first_token_s: first,
            next_token_s: Spread::of(seen.iter().flat_map(|s| s.gaps.iter().copied())),
            starvation: first.and_then(|f| over(f.max, f.p50)),
        }
    }

    /// A level of which nothing is known.
    #[cfg(test)]
    pub fn empty(level: Level) -> Self {
        Self {
            which: 0,
            server: String::new(),
            level,
            requests: 0,
            ok: 0,
            failed: 0,
            failures: Vec::new(),
            short: 0,
            silent: 0,
            seconds: 0.0,
            tok_s: 0.0,
            requests_s: 0.0,
            tokens: 0,
            prompt_tokens: 0.0,
            cached_tokens: 0,
            first_token_s: None,
            next_token_s: None,
            starvation: None,
        }
    }

    fn notes(&self, answer: usize, out: &mut String) {
        let mut note = |text: String| {
            let _ = writeln!(out, "{}, {}: {text}", self.server, self.level);
        };
        for Failure { times, error } in &self.failures {
            note(format!("{times} failed: {}", error.to_string().replace("\n ", ";")));
        }
        if self.short > 0 {
            let mean = self.tokens as f64 / self.ok as f64;
            note(format!(
                "{} of {} answers have fewer than {answer} tokens, {mean:.1} on average",
                self.short, self.ok
            ));
        }
        if self.silent > 0 {
            note(format!("{} answers had no text and are in no time", self.silent));
        }
        if self.cached_tokens > 0 {
            note(format!("{} tokens of prompts came from the server's cache", self.cached_tokens));
        }
    }
}

fn failures(run: &Run) -> Vec<Failure> {
    let mut all: Vec<Failure> = Vec::new();
    for error in run.fates.iter().filter_map(|fate| fate.as_ref().err()) {
        match all.iter_mut().find(|known| known.error == *error) {
            Some(known) => known.times += 1,
            None => all.push(Failure { times: 1, error: error.clone() }),
        }
    }
    all
}

fn over(a: f64, b: f64) -> Option<f64> {
    (b > 0.0).then(|| a / b)
}

impl Ratio {
    /// Of two rows of one level.
    pub fn new(a: &Row, b: &Row) -> Self {
        let of = |get: fn(&Row) -> Option<f64>| over(get(a)?, get(b)?);
        Self {
            level: a.level,
            tok_s: over(a.tok_s, b.tok_s),
            first_token_p50: of(|r| r.first_token_s.map(|s| s.p50)),
            first_token_max: of(|r| r.first_token_s.map(|s| s.max)),
            next_token_p50: of(|r| r.next_token_s.map(|s| s.p50)),
        }
    }
}

impl Body {
    /// Requests that failed.
    pub fn failed(&self) -> usize {
        self.results.iter().map(|row| row.failed).sum()
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for (i, server) in self.servers.iter().enumerate() {
            let letter = self.letter(i);
            let counted = self.results.iter().filter(|row| row.which == i && row.ok > 0);
            let counted: Vec<_> = counted.map(|row| row.prompt_tokens).collect();
            let counted = match counted.is_empty() {
                true => "none counted".to_owned(),
                false => format!("{:.1} counted", counted.iter().sum::<f64>() / counted.len() as f64),
            };
            let _ = writeln!(
                out,
                "{letter}{} at {}: prompts of {} tokens ({counted}), answers of {}, seed {}",
                server.model, server.url, self.prompt_tokens, self.answer_tokens, self.seed
            );
        }
        let _ = writeln!(
            out,
            "{:<12} {:>6} {:>6} {:>9} {:>7} {:>9} {:>8} {:>8} {:>8} {:>9} {:>9} {:>8} {:>8} {:>8}",
            "load",
            "ok",
            "failed",
            "tok/s",
            "req/s",
            "first p50",
            "p90",
            "p99",
            "max",
            "worst/p50",
            "next p50",
            "p90",
            "p99",
            "max"
        );
        for row in &self.results {
            let load = format!("{}{}", self.letter(row.which), row.level);
            let _ = write!(
                out,
                "{load:<12} {:>6} {:>6} {:>9.1} {:>7.2}",
                row.ok, row.failed, row.tok_s, row.requests_s
            );
            spread(row.first_token_s, &mut out);
            let _ = write!(out, " {:>9}", row.starvation.map_or("-".into(), |s| format!("{s:.1}")));
            spread(row.next_token_s, &mut out);
            out.push('\n');
        }
        for ratio in self.ratios.iter().flatten() {
            let shown = |r: Option<f64>| r.map_or("-".into(), |r| format!("{r:.2}"));
            let _ = writeln!(
                out,
                "A over B, {}: tok/s {}, first token p50 {}, max {}, next token p50 {}",
                ratio.level,
                shown(ratio.tok_s),
                shown(ratio.first_token_p50),
                shown(ratio.first_token_max),
                shown(ratio.next_token_p50)
            );
        }
        out.push_str(LEGEND);
        for server in self.servers.iter().filter(|server| !server.ignores_eos) {
            let _ = writeln!(
                out,
                "{}: refuses ignore_eos: answers end where the model ends them, and its cache may know the prompts",
                server.url
            );
        }
        for row in &self.results {
            row.notes(self.answer_tokens, &mut out);
        }
        out
    }

    /// What tells two servers apart.
    fn letter(&self, which: usize) -> &'static str {
        match (self.servers.len(), which) {
            (1, _) => "",
            (_, 0) => "A ",
            _ => "B ",
        }
    }
}

fn spread(spread: Option<Spread>, out: &mut String) {
    let shown = |s: fn(&Spread) -> f64| spread.as_ref().map_or("-".into(), |x| format!("{:.1}", s(x) * 1e3));
    let _ = write!(
        out,
        " {:>9} {:>8} {:>8} {:>8}",
        shown(|s| s.p50),
        shown(|s| s.p90),
        shown(|s| s.p99),
        shown(|s| s.max)
    );
}
