//! The options of `q4 eval` and `q4 compare`: what is measured over a text.
use super::{DeviceChoice, Format, ModelArgs, device};
use clap::{Args, ValueEnum, ValueHint};
use std::path::PathBuf;

/// How a text is cut.
#[derive(Args, Clone, Debug)]
pub struct CutArgs {
    /// Tokens of a window [default: 512, or what the model's context has].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub window: Option<u32>,
    /// Use the first N tokens of the text only.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub tokens: Option<u32>,
}

/// `q4 eval`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The text becomes tokens as a whole, without special ones, and is cut into windows. Every window is computed from an empty cache,
and every token of it but the first is predicted. The loss is the mean of -ln p over them, the perplexity exp(loss).

Of rows, the files of conversations, pairs and texts that `q4 train` reads (data.valid), every row is computed from an empty cache, and what
training would learn of it is predicted: answers with the tokens that end them, or with --supervise all everything. --window is data.seq there:
the end of a row of more than N + 1 tokens is cut off, and counted.

Examples:
  q4 eval ./model --data text.txt
  q4 eval ./model --rows valid.jsonl --window 1024                  the loss that q4 train reports
  q4 eval ./model --data text.txt --quantize nf4 --json
  head -c 100000 text.txt | q4 eval ./model --data - --window 2048")]
pub struct EvalArgs {
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// The text, UTF-8; `-` is standard input.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, required_unless_present = "rows")]
    pub data: Option<PathBuf>,
    /// Rows as `q4 train` reads them, .jsonl, .parquet, .tsv or .txt; may be repeated.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["data", "tokens"])]
    pub rows: Vec<PathBuf>,
    /// What of a row is predicted [default: response].
    #[arg(long, value_enum, value_name = "WHAT", requires = "rows", conflicts_with = "data")]
    pub supervise: Option<Supervise>,
    /// How it is cut.
    #[command(flatten)]
    pub cut: CutArgs,
    /// Quantise dense layers while loading.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub quantize: Option<Format>,
}

/// What of a row is predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Supervise {
    /// Answers and what ends them; all of a plain text.
    Response,
    /// Every token but a row's first.
    All,
}

/// `q4 compare`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
A is the reference: KL(A||B) in nats a position, its mean, 99th percentile and maximum; how often both find
the same token most likely; and either's perplexity. The text is cut as by `q4 eval`. Both models are in memory at once and obey
the same global options, but for the backend and device of A where --against names them; they need one
vocabulary. The exit status is 3 when a bound is exceeded.

Examples:
  q4 compare ./model ./model-nvfp4 --data text.txt
  q4 compare ./model ./model --quantize nvfp4 --data text.txt       what quantising would cost
  q4 compare ./model --against reference --data text.txt            what this machine's kernels change
  q4 compare ./model ./model-nf4 --data text.txt --max-kl-mean 0.05 --min-top1 0.9")]
pub struct CompareArgs {
    /// The reference: a model directory, a .safetensors, .gguf or .dat file, or `demo`.
    #[arg(value_name = "A", value_hint = ValueHint::AnyPath)]
    pub a: PathBuf,
    /// The model that is compared with it; may be the same, and is where --against stands alone.
    #[arg(value_name = "B", value_hint = ValueHint::AnyPath, required_unless_present = "against")]
    pub b: Option<PathBuf>,
    /// config.json of both, where it is not beside the weights.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub config: Option<PathBuf>,
    /// config.json of B, where it has another.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub config_b: Option<PathBuf>,
    /// tokenizer.json of both, where it is not beside the weights.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub tokenizer: Option<PathBuf>,
    /// tokenizer.json of B, where it has another.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub tokenizer_b: Option<PathBuf>,
    /// The backend that computes A; B is computed as the global options say.
    #[arg(long, value_name = "NAME")]
    pub against: Option<String>,
    /// Where that one computes [default: as --device].
    #[arg(long, value_name = "DEVICE", value_parser = device, requires = "against")]
    pub against_device: Option<DeviceChoice>,
    /// The text, UTF-8; `-` is standard input.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub data: PathBuf,
    /// How it is cut.
    #[command(flatten)]
    pub cut: CutArgs,
    /// Quantise dense layers of B while loading.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub quantize: Option<Format>,
    /// Largest mean divergence that is no finding.
    #[arg(long, value_name = "NATS", value_parser = divergence)]
    pub max_kl_mean: Option<f64>,
    /// Smallest share of equal top tokens that is no finding, 0 to 1.
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub min_top1: Option<f64>,
}

impl CompareArgs {
    /// A and B.
    pub fn models(&self) -> [ModelArgs; 2] {
        let (config, tokenizer) = (&self.config, &self.tokenizer);
        let a = ModelArgs { model: self.a.clone(), config: config.clone(), tokenizer: tokenizer.clone() };
        let b = ModelArgs {
            model: self.b.as_ref().unwrap_or(&self.a).clone(),
            config: self.config_b.as_ref().or(config.as_ref()).cloned(),
            tokenizer: self.tokenizer_b.as_ref().or(tokenizer.as_ref()).cloned(),
        };
        [a, b]
    }
}

fn divergence(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|x| (0.0..f64::INFINITY).contains(x))
        .ok_or_else(|| "need a number from 0".to_owned())
}

fn share(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|x| (0.0..=1.0).contains(x))
        .ok_or_else(|| "need a number from 0 to 1".to_owned())
}
