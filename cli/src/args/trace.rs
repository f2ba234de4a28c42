//! The options of `q4 trace`.
use crate::args::{DeviceChoice, Format, ModelArgs, device};
use clap::{Args, ValueHint};
use std::path::PathBuf;

/// `q4 trace`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Runs a prompt twice and compares every value between the operations: first with the backend of --against, then as the global
options say. Each call of the second run starts from the values of the first, so that a difference is the doing of the call that
shows it; with --drift it goes on with its own, and differences add up. The exit status is 3 when some call differs by more than
the tolerance, as a share of the largest value.

Examples:
  q4 trace -p 'Who are you?' --against reference
  q4 --backend nvfp4-kernel --activations int8 trace ./model -p 'Hello' --against dequant-matmul
  q4 --device cuda --dtype float32 trace ./model -p 'Hello' --against nvfp4-kernel --against-device cpu
  q4 --plugin ./libmine.so --backend mine trace ./model --ids 1,2,3 --against reference --json")]
pub struct TraceArgs {
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// The prompt; standard input when absent.
    #[arg(short, long, value_name = "TEXT", conflicts_with = "ids")]
    pub prompt: Option<String>,
    /// Take the prompt as it is: no chat template, no special tokens.
    #[arg(long, conflicts_with = "ids")]
    pub raw: bool,
    /// Token ids instead of a prompt, separated by commas; needs no tokenizer.
    #[arg(long, value_delimiter = ',', value_name = "ID,ID,...")]
    pub ids: Vec<u32>,
    /// The backend to compare with.
    #[arg(long, value_name = "NAME")]
    pub against: String,
    /// Where that one computes [default: as --device].
    #[arg(long, value_name = "DEVICE", value_parser = device)]
    pub against_device: Option<DeviceChoice>,
    /// Largest difference over the largest value [default: 0.001, for outputs of 16 bits 0.02].
    #[arg(long, value_name = "X", value_parser = tolerance, allow_negative_numbers = true)]
    pub tolerance: Option<f64>,
    /// Let each run go on with its own values.
    #[arg(long)]
    pub drift: bool,
    /// Quantise dense layers while loading.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub quantize: Option<Format>,
    /// Write the same as a page to look at, over an older page.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
}

fn tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x >= 0.0 && x.is_finite() => Ok(x),
        _ => Err("need a number from 0 up".into()),
    }
}
