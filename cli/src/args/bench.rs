//! The options of `q4 bench`.
use crate::args::{Encoding, Format, LoadArgs, ModelArgs, ServerArgs};
use clap::{Args, ValueHint};
use std::path::PathBuf;

/// `q4 bench`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Every figure stands beside the machine's limit, measured before and after on the same threads. With
--server it is users of a server that are measured: what they get together, and how long each waits
for his first token and for the next. The exit status is 3 when a request failed.

Examples:
  q4 bench --shape qwen3-4b --activations int8
  q4 bench --shape qwen3-0.6b --format nf4 --prefill 512 --decode 64
  q4 bench --shape qwen3-4b --kernels --decode 0
  q4 bench --shape qwen3-4b --write ./random-4b && q4 bench ./random-4b --first-token
  q4 bench --server http://127.0.0.1:8080 --users 1,8,32 --plot users.svg
  q4 bench --server http://127.0.0.1:8080 --compare http://127.0.0.1:8000 --rate 2,4")]
pub struct BenchArgs {
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Or which server.
    #[command(flatten)]
    pub server: ServerArgs,
    /// What a server is asked.
    #[command(flatten)]
    pub load: LoadArgs,
    /// Prompt lengths to measure.
    #[arg(long, value_delimiter = ',', value_name = "N,...", default_values_t = [128, 512], conflicts_with = "server")]
    pub prefill: Vec<usize>,
    /// Tokens to decode.
    #[arg(long, value_name = "N", default_value_t = 32, conflicts_with = "server")]
    pub decode: usize,
    /// Measure decoding behind this many tokens too.
    #[arg(long, value_delimiter = ',', value_name = "N,...", conflicts_with = "server")]
    pub depth: Vec<usize>,
    /// Sequences that decode together, to measure too.
    #[arg(long, value_delimiter = ',', value_name = "N,...", conflicts_with = "server")]
    pub batch: Vec<usize>,
    /// A model of this size with random weights instead of MODEL, e.g. qwen3-0.6b.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["model", "config", "tokenizer", "server"])]
    pub shape: Option<String>,
    /// Encoding of --shape's weights [default: nvfp4].
    #[arg(long, value_enum, value_name = "FORMAT", requires = "shape")]
    pub format: Option<Encoding>,
    /// Write --shape's model as a checkpoint and measure nothing; DIR must not exist.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::AnyPath, requires = "shape")]
    pub write: Option<PathBuf>,
    /// Measure the way to the first token of a short prompt instead of rates.
    #[arg(long, conflicts_with_all = ["write", "kernels", "server", "depth", "batch"])]
    pub first_token: bool,
    /// Measure single products too.
    #[arg(long, conflicts_with = "server")]
    pub kernels: bool,
    /// Measured repetitions after the warm-up.
    #[arg(short, long, value_name = "N", default_value_t = 5, conflicts_with = "server")]
    pub repetitions: usize,
    /// Count the first run of everything too.
    #[arg(long)]
    pub no_warm_up: bool,
    /// Quantise dense layers while loading.
    #[arg(long, value_enum, value_name = "FORMAT", conflicts_with_all = ["shape", "server"])]
    pub quantize: Option<Format>,
}
