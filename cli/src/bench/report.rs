//! What `q4 bench` prints.
use super::Figure;
use q4_core::Executed;
use q4_core::memory::human;
use serde::Serialize;
use std::fmt::Write;

/// What the table's words mean.
const LEGEND: &str = "\
ppN: a prompt of N tokens; tgN: N tokens one after another; roofline: what reads and arithmetic would allow at
best; of it: the median as a share of the roofline
";

/// One figure.
#[derive(Serialize)]
pub(super) struct Row {
    pub what: String,
    pub shape: String,
    pub median: f64,
    pub min: f64,
    pub max: f64,
    pub unit: &'static str,
    pub roofline: f64,
    pub fraction: f64,
}

/// Where the memory went.
#[derive(Serialize)]
pub(super) struct Memory {
    pub packed_bytes: u64,
    pub embedding_bytes: u64,
    pub kv_bytes: u64,
    pub peak_bytes: Option<u64>,
    /// Peak over the sum of the other three.
    pub ratio: Option<f64>,
}

/// Rates.
#[derive(Serialize)]
pub(super) struct Body {
    pub model: String,
    pub threads: usize,
    /// The best instruction set that kernels may use.
    pub isa: Option<&'static str>,
    pub activations: &'static str,
    pub read_gb_s: f64,
    pub gmac_s: f64,
    pub results: Vec<Row>,
    pub memory: Memory,
    pub executed: Vec<Executed>,
    pub downgraded: usize,
}

/// The way to the first token, in seconds.
#[derive(Serialize)]
pub(super) struct FirstToken {
    pub model: String,
    pub threads: usize,
    pub activations: &'static str,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// From the start of the verb to a model that is ready.
    pub load_s: f64,
    /// The prompt.
    pub first_s: f64,
    /// The same prompt again, at best.
    pub warm_s: f64,
    /// All repetitions.
    pub again_s: Vec<f64>,
    /// Everything before the first token but the prompt's own time.
    pub work_s: f64,
    pub memory: Memory,
    pub executed: Vec<Executed>,
    pub downgraded: usize,
}

impl Row {
    /// Median and spread beside the roofline of a machine with these limits.
    pub fn new(figure: Figure, read_gb_s: f64, gmac_s: f64) -> Self {
        let Figure { what, shape, unit, mut rates, work } = figure;
        rates.sort_by(f64::total_cmp);
        let median = rates[rates.len() / 2];
        let roofline = 1.0 / work.seconds(read_gb_s, gmac_s);
        let (min, max) = (rates[0], rates[rates.len() - 1]);
        Self { what, shape, median, min, max, unit, roofline, fraction: median / roofline }
    }
}

impl Memory {
    /// Adds the ratio.
    pub fn new(packed_bytes: u64, embedding_bytes: u64, kv_bytes: u64, peak_bytes: Option<u64>) -> Self {
        let parts = packed_bytes + embedding_bytes + kv_bytes;
        let ratio = peak_bytes.map(|peak| peak as f64 / parts as f64);
        Self { packed_bytes, embedding_bytes, kv_bytes, peak_bytes, ratio }
    }

    fn text(&self, out: &mut String) {
        let peak = self.peak_bytes.map_or("unknown".into(), human);
        let ratio = self.ratio.map_or(String::new(), |r| format!(", {r:.2} times their sum"));
        let _ = writeln!(
            out,
            "memory: packed {}, embeddings {}, KV {}; peak resident {peak}{ratio}",
            human(self.packed_bytes),
            human(self.embedding_bytes),
            human(self.kv_bytes)
        );
    }
}

impl Body {
    /// For people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{}, {} activations, {} threads, {}; measured here: reads {:.1} GB/s, arithmetic {:.0} GMAC/s",
            self.model,
            self.activations,
            self.threads,
            self.isa.unwrap_or_default(),
            self.read_gb_s,
            self.gmac_s
        );
        table(&self.results, &mut out);
        self.memory.text(&mut out);
        executed(&self.executed, &mut out);
        out
    }
}

/// The figures, one a line, and what their names mean.
pub(super) fn table(rows: &[Row], out: &mut String) {
    let _ = writeln!(
        out,
        "{:<22} {:>10} {:>10} {:>10} {:>10} {:>7}  unit",
        "what", "median", "min", "max", "roofline", "of it"
    );
    for r in rows {
        let fraction = r.fraction * 100.0;
        let _ = writeln!(
            out,
            "{:<22} {:>10.2} {:>10.2} {:>10.2} {:>10.1} {fraction:>6.0}%  {}",
            r.what, r.median, r.min, r.max, r.roofline, r.unit
        );
    }
    out.push_str(LEGEND);
}

impl FirstToken {
    /// For people.
    pub fn text(&self) -> String {
        let mut out = format!(
            "{}, {} activations, {} threads\nfirst token of a prompt of {}: load {:.2} s, prompt {:.2} s, the same prompt \
             again {:.2} s; {:.2} s beyond the prompt\n",
            self.model,
            self.activations,
            self.threads,
            self.prompt,
            self.load_s,
            self.first_s,
            self.warm_s,
            self.work_s
        );
        self.memory.text(&mut out);
        executed(&self.executed, &mut out);
        out
    }
}

fn executed(counts: &[Executed], out: &mut String) {
    for e in counts {
        let _ = writeln!(
            out,
            "executed: {} via {}, {} activations, {} calls",
            e.backend, e.path, e.activations, e.calls
        );
    }
}
