//! The command line: every verb and option, as the help shows it.
//!
//! Nothing here knows what a verb does, so help, completions and parsing never touch a model.
mod bench;
mod conformance;
#[cfg(test)]
mod documented;
mod form;
mod line;
mod measure;
mod plugin;
mod prompt;
mod serve;
mod server;
mod trace;

pub use crate::choices::*;
pub use bench::BenchArgs;
use clap::{ArgAction, Args, Parser, Subcommand, ValueHint};
pub use conformance::ConformanceArgs;
pub use form::FormArgs;
pub use line::{parse, tip, verb_first};
pub use measure::{CompareArgs, CutArgs, EvalArgs, Supervise};
pub use plugin::{Language, NewArgs, PluginArgs, PluginVerb};
pub use prompt::{PromptArgs, TokenizeArgs};
use q4_model::wishes::Wishes;
pub use serve::ServeArgs;
pub use server::{LoadArgs, ServerArgs};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
pub use trace::TraceArgs;

const EXAMPLES: &str = "\
Examples:
  q4 generate -p 'Who are you?'                       run the model inside the executable
  q4 generate ./qwen3-4b-nvfp4 -p 'Hello' -n 64       run a model directory
  q4 --compute kernel-only explain ./qwen3-4b-nvfp4   who computes which layer, and why
  q4 quantize ./qwen3-4b ./qwen3-4b-nvfp4             write a 4-bit checkpoint
  q4 verify ./qwen3-4b-nvfp4 --json                   look for damaged or implausible scales

Exit status:
  0 ok, 1 internal error, 2 usage, 3 findings, 4 bad model or data file, 5 conformance failed,
  6 backend refused, 7 memory limit, 8 input or output, 130 interrupted";

/// Runs 4-bit Qwen3 models and tells what computed them.
#[derive(Parser, Debug)]
#[command(name = "q4", version, max_term_width = 100, arg_required_else_help = true, after_long_help = EXAMPLES)]
pub struct Cli {
    /// Options of every verb.
    #[command(flatten)]
    pub global: GlobalArgs,
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs.
#[derive(Subcommand, Debug)]
pub enum Verb {
    /// Answer one prompt, or one message a line with --turns.
    Generate(GenerateArgs),
    /// Talk in the terminal, with a model here or on a server.
    Chat(ChatArgs),
    /// Answer over HTTP, many requests at once, as clients of OpenAI and Anthropic ask.
    Serve(ServeArgs),
    /// Show this machine, its backends, and whether each computes what it claims.
    Diagnose(DiagnoseArgs),
    /// Show who would compute each layer and why others were refused; reads no weights.
    Explain(ExplainArgs),
    /// List tensors, formats, layouts and sizes of a file or model.
    Inspect(InspectArgs),
    /// Check a model for damage: scales, shapes, ranges, tokenizer and configuration.
    Verify(VerifyArgs),
    /// Write a dense model as a 4-bit one.
    Quantize(QuantizeArgs),
    /// Write a 4-bit model in another layout without changing a value, and prove it.
    Convert(ConvertArgs),
    /// Say how well a model predicts a text: loss and perplexity.
    Eval(EvalArgs),
    /// Say how far the predictions of two models lie apart over a text.
    Compare(CompareArgs),
    /// Write the logits of every position of a token sequence; needs no tokenizer.
    Logits(LogitsArgs),
    /// Show the tokens of a text or a conversation, or the text of tokens.
    Tokenize(TokenizeArgs),
    /// Compare two backends call by call and name the first that differs.
    Trace(TraceArgs),
    /// Measure prefill, decode and kernels, or what users of a server get.
    Bench(BenchArgs),
    /// Judge a backend against exact references and write a certificate.
    Conformance(ConformanceArgs),
    /// Write a backend of your own: its C header, or a project that builds.
    Plugin(PluginArgs),
    /// Train or fine-tune a model; `q4 train --help` is the help of q4-train.
    Train(TrainArgs),
    /// Print a completion script.
    Completions(CompletionsArgs),
    /// Print the manual page of the command and of every verb, or of one.
    Man(ManArgs),
}

/// Options that every verb takes, before or after its name.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Global options")]
pub struct GlobalArgs {
    /// Use this backend for all 4-bit layers, or LAYER_GLOB=NAME for some; binding, may be repeated.
    #[arg(long, global = true, value_name = "NAME|GLOB=NAME")]
    pub backend: Vec<String>,
    /// Which ways of computing a product are acceptable.
    #[arg(long, global = true, value_enum, default_value_t)]
    pub compute: Compute,
    /// Format of the inputs of 4-bit layers; auto is what the checkpoint declares, and int8 for GGUF files on
    /// CPUs, as in llama.cpp.
    #[arg(long, global = true, value_enum, default_value_t)]
    pub activations: ActivationFormat,
    /// Where to compute: auto (a CUDA device whose kernels pass their self-check, else the CPU), cpu, cuda,
    /// cuda:N, or NAME:N, a device that the plugin of that name brings
    #[arg(long, global = true, value_parser = device, default_value = "auto")]
    pub device: DeviceChoice,
    /// Output type of products [default: float32 on the CPU, bfloat16 on CUDA].
    #[arg(long, global = true, value_enum)]
    pub dtype: Option<Dtype>,
    /// Type of cached keys and values [default: float16; float32 for logits].
    #[arg(long, global = true, value_enum)]
    pub kv_cache: Option<KvCache>,
    /// Memory that host and device share, for weights on CUDA.
    #[arg(long, global = true, value_enum, default_value_t)]
    pub unified_memory: Unified,
    /// Most memory to use, e.g. 24GiB [default: what is free, less 5 %].
    #[arg(long, global = true, value_name = "BYTES", value_parser = bytes)]
    pub memory_limit: Option<u64>,
    /// Load a third-party backend.
    #[arg(long, global = true, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub plugin: Vec<PathBuf>,
    /// Load every third-party backend in a directory; the current one is never searched.
    #[arg(long, global = true, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub plugin_dir: Vec<PathBuf>,
    /// Run the code of --plugin and --plugin-dir in a process of its own, on the CPU.
    #[arg(long, global = true)]
    pub isolate: bool,
    /// The libNVFP4 to load instead of searching for one.
    #[arg(long, global = true, value_name = "PATH", env = "Q4_NVFP4_LIB", hide_env_values = true)]
    pub nvfp4_lib: Option<PathBuf>,
    /// Threads to compute with [default: the processors this process may use].
    #[arg(long, global = true, value_name = "N", env = "Q4_THREADS", hide_env_values = true,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Trust backends without checking their first product; reports count what was skipped.
    #[arg(long, global = true)]
    pub no_self_check: bool,
    /// Write what was done when to a new file, for ui.perfetto.dev or chrome://tracing.
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub trace_out: Option<PathBuf>,
    /// Write one JSON document to stdout instead of text.
    #[arg(long, global = true)]
    pub json: bool,
    /// Log more; twice for everything.
    #[arg(short, long, global = true, action = ArgAction::Count, conflicts_with = "quiet")]
    pub verbose: u8,
    /// Log errors only.
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// How log lines are written.
    #[arg(long, global = true, value_enum, default_value_t, value_name = "FORMAT")]
    pub log_format: LogFormat,
    /// Colour on stderr.
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WHEN")]
    pub color: ColorChoice,
}

/// Which model.
#[derive(Args, Clone, Debug)]
pub struct ModelArgs {
    /// A model directory, a .safetensors, .gguf or .dat file, or `demo`, the model inside the executable.
    #[arg(default_value = "demo", value_hint = ValueHint::AnyPath)]
    pub model: PathBuf,
    /// config.json, where it is not beside the weights.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub config: Option<PathBuf>,
    /// tokenizer.json, where it is not beside the weights.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub tokenizer: Option<PathBuf>,
}

impl ModelArgs {
    /// A model whose files stand beside each other.
    pub fn of(model: &Path) -> Self {
        Self { model: model.to_owned(), config: None, tokenizer: None }
    }
}

/// How answers are sampled and when they end.
#[derive(Args, Clone, Debug)]
pub struct AnswerArgs {
    /// System message.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Longest answer in tokens [default: what the context has room for].
    #[arg(short = 'n', long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Divides the logits; 0 is greedy. Sampling defaults come from generation_config.json, else greedy.
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Keep the most probable tokens of this total probability.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Keep this many of the most probable tokens; 0 keeps all.
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Keep tokens at least this probable relative to the best one.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Make tokens that occurred less likely; 1 changes nothing.
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Seed of the sampler; reports state the one that was used.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// End the answer before this text; may be repeated.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Positions of the cache [default: the prompt and -n, or 4096 for answers; 4096 in chat; never more than
    /// the model has].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Option<u32>,
    /// Quantise dense layers while loading.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub quantize: Option<Format>,
    /// Do not end the answer at the model's end tokens.
    #[arg(long)]
    pub ignore_eos: bool,
    /// What the chat template is given.
    #[command(flatten)]
    pub prompt: PromptArgs,
}

impl AnswerArgs {
    /// The sampling that is asked for.
    pub fn wishes(&self) -> Wishes {
        Wishes {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        }
    }
}

/// `q4 generate`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  q4 generate -p 'Who are you?'
  echo 'Tell me a story about a UFO.' | q4 generate --temperature 0.7 --seed 1
  q4 generate ./model.dat --config ./original --tokenizer ./original -p 'Hello' --json
  q4 generate ./model --turns questions.txt
  q4 generate ./model --conversation talk.json
  q4 generate ./other-model --turns talk.json
  q4 generate ./model -p 'Weather in Oslo?' --tools tools.json --show-prompt
  q4 generate ./model --batch questions.jsonl -o answers.jsonl
  q4 generate ./model -p 'Is 7 prime?' --choice yes --choice no
  q4 generate ./model -p 'A city in Norway.' --json-schema schema.json
  q4 generate -p 'Who are you?' -n 1 --top-logprobs 5")]
pub struct GenerateArgs {
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// The prompt; standard input when absent.
    #[arg(short, long, value_name = "TEXT", conflicts_with = "turns")]
    pub prompt: Option<String>,
    /// A conversation as JSON, a list of messages or what /save wrote, whose last message is answered; `-` is
    /// standard input.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["prompt", "turns", "raw"])]
    pub conversation: Option<PathBuf>,
    /// A file with one user message a line, or a saved conversation whose every message is answered anew;
    /// `-` is standard input.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub turns: Option<PathBuf>,
    /// Continue the prompt as it is: no chat template, no special tokens.
    #[arg(long, conflicts_with_all = ["turns", "system", "template_arg", "tools"])]
    pub raw: bool,
    /// Print the prompt as the model would get it, and its token ids; run nothing.
    #[arg(long, conflicts_with = "turns")]
    pub show_prompt: bool,
    /// Also print the K most likely first tokens; with --json, those of every step.
    #[arg(long, value_name = "K", conflicts_with = "turns", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub top_logprobs: Option<u8>,
    /// Print the answer when it is complete.
    #[arg(long)]
    pub no_stream: bool,
    /// What the answer must be.
    #[command(flatten)]
    pub form: FormArgs,
    /// Many requests at once.
    #[command(flatten)]
    pub batch: BatchArgs,
    /// How to answer.
    #[command(flatten)]
    pub answer: AnswerArgs,
}

/// Many requests at once.
#[derive(Args, Clone, Debug)]
pub struct BatchArgs {
    /// A file with a request on each line, as JSON with `prompt` or `messages`; a line of JSON is written for
    /// each answer, in the same order. `-` is standard input.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath,
          conflicts_with_all = ["prompt", "turns", "conversation", "show_prompt", "top_logprobs", "no_stream"])]
    pub batch: Option<PathBuf>,
    /// Where the answers of --batch go [default: standard output]; those that are there already are kept, and
    /// what is missing is added.
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "batch")]
    pub output: Option<PathBuf>,
    /// Requests of --batch that are computed at once [default: 16].
    #[arg(long, value_name = "N", requires = "batch", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub parallel: Option<u16>,
}

/// `q4 chat`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
One message at a time: from the terminal, where lines are edited and may be several, or a line each
from a pipe. With --json every turn is one JSON object on one line. /help lists the commands; Ctrl-C
stops an answer, Ctrl-D ends the conversation.

Examples:
  q4 chat
  q4 chat ./model --load talk.json
  q4 chat ./model --turns opening.txt
  q4 chat --server http://127.0.0.1:8080
  printf 'Who are you?\\nWho am I?\\n' | q4 chat --json")]
pub struct ChatArgs {
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Or which server.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Go on with a conversation that /save wrote.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub load: Option<PathBuf>,
    /// Begin with one user message a line, or those of a saved conversation, then go on by hand.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub turns: Option<PathBuf>,
    /// Keep nothing that is typed for the next time, and offer nothing of before.
    #[arg(long)]
    pub no_history: bool,
    /// Say after each answer how fast it was.
    #[arg(long)]
    pub show_speed: bool,
    /// How to answer.
    #[command(flatten)]
    pub answer: AnswerArgs,
}

/// `q4 diagnose`.
#[derive(Args, Debug)]
pub struct DiagnoseArgs {
    /// Only the table of what each backend computes here, as Markdown.
    #[arg(long)]
    pub matrix: bool,
    /// Write the same as a page to attach to an issue, over an older page.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "matrix")]
    pub html: Option<PathBuf>,
}

/// `q4 explain`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The exit status is 6 when some layer has no backend; the plan is printed all the same.

Examples:
  q4 explain ./model
  q4 explain ./model --backend '*.mlp.*=dequant-matmul' --json")]
pub struct ExplainArgs {
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Plan as if dense layers were quantised while loading.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub quantize: Option<Format>,
    /// Write the same as a page to attach to an issue, over an older page.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
}

/// `q4 inspect`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  q4 inspect ./model
  q4 inspect ./model-00001-of-00002.safetensors --json")]
pub struct InspectArgs {
    /// A model directory, a .safetensors, .gguf or .dat file, or `demo`. A configuration is not needed.
    #[arg(default_value = "demo", value_name = "FILE|MODEL", value_hint = ValueHint::AnyPath)]
    pub model: PathBuf,
}

/// `q4 verify`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The exit status is 3 when a finding is an error or a warning, 4 when the model cannot be opened at all;
notes alone are 0.

Examples:
  q4 verify ./model
  q4 verify --run ./model
  q4 verify ./model-nvfp4 --original ./model --html verify.html
  q4 verify ./model.dat --config ./original")]
pub struct VerifyArgs {
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Also run a built-in text and compare the layers with each other: tells matrices that stand in another
    /// order.
    #[arg(long)]
    pub run: bool,
    /// The model it was made from: tells how far each matrix is from that one's, in dB.
    #[arg(long, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    pub original: Option<PathBuf>,
    /// Write findings, formats and distances as a page, over an older page.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
}

/// `q4 quantize`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The output appears complete or not at all, and nothing is ever overwritten.

Examples:
  q4 quantize ./model ./model-nvfp4
  q4 quantize ./model ./model.dat --layout dat
  q4 quantize ./model ./model-nf4 --format nf4 --double-quant
  q4 quantize ./model ./model-gptq --format int4 --layout gptq
  q4 quantize ./model ./out --method four-over-six --exclude 'model.layers.0.*'")]
pub struct QuantizeArgs {
    /// A dense model directory or file.
    #[arg(value_name = "IN", value_hint = ValueHint::AnyPath)]
    pub input: PathBuf,
    /// What to write: a directory, or a file for --layout dat. Must not exist.
    #[arg(value_name = "OUT", value_hint = ValueHint::AnyPath)]
    pub output: PathBuf,
    /// config.json, where it is not beside the weights.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub config: Option<PathBuf>,
    /// 4-bit format.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
    /// Arrangement of the tensors [default: modelopt for nvfp4, bitsandbytes for nf4,
    /// compressed-tensors for mxfp4 and int4].
    #[arg(long, value_enum)]
    pub layout: Option<OutputLayout>,
    /// Scales of nvfp4 [default: single for dat, else two-level].
    #[arg(long, value_enum)]
    pub scales: Option<ScaleLevels>,
    /// Choice of the block scales of nvfp4, mxfp4 and int4 [default: search].
    #[arg(long, value_enum)]
    pub method: Option<ScaleMethod>,
    /// Quantise these layers too; a glob, may be repeated.
    #[arg(long, value_name = "GLOB")]
    pub include: Vec<String>,
    /// Keep these layers dense; a glob, may be repeated, wins over --include.
    #[arg(long, value_name = "GLOB")]
    pub exclude: Vec<String>,
    /// Elements per scale of nf4 [default: 64] and int4 [default: 128].
    #[arg(long, value_name = "N")]
    pub block_size: Option<u32>,
    /// Quantise the scales of nf4 too.
    #[arg(long)]
    pub double_quant: bool,
}

/// `q4 convert`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Codes and block scales stay as they are; a per-tensor scale that means another thing there is
expressed anew, where an f32 gives every value bit for bit, and refused elsewhere: between layouts
that multiply (modelopt, dat) and compressed-tensors, which divides, that is certain for powers of
two only, as q4 train writes them. With --allow-last-bit the nearest f32 is taken: values of such a
layer may differ in their last bits, engines that compute in 16 bits see none of it. int4 goes between
gptq, awq and compressed-tensors; scales that float16 does not hold, zero points of 0 in gptq and
groups that its readers do not take are refused by name. A .gguf file has nvfp4, mxfp4, and int4 in
symmetric groups of 32, which is Q4_0. The output is read back, decoded and compared before it gets
its name; nothing is ever overwritten. Another format is q4 quantize, from the dense original.

Examples:
  q4 convert demo ./demo --layout modelopt
  q4 convert ./model-nvfp4 ./model.dat --layout dat
  q4 convert ./model-awq ./model-gptq --layout gptq
  q4 convert ./model-nvfp4 ./model.gguf --layout gguf
  q4 convert ./model.dat ./model-nvfp4 --layout modelopt --config ./original --tokenizer ./original --json")]
pub struct ConvertArgs {
    /// A 4-bit model directory or file, or `demo`.
    #[arg(value_name = "IN", value_hint = ValueHint::AnyPath)]
    pub input: PathBuf,
    /// What to write: a directory, or a file for --layout gguf and dat. Must not exist.
    #[arg(value_name = "OUT", value_hint = ValueHint::AnyPath)]
    pub output: PathBuf,
    /// Arrangement of the tensors.
    #[arg(long, value_enum)]
    pub layout: OutputLayout,
    /// Take the nearest f32 where a per-tensor scale has no exact counterpart, and name every such layer.
    #[arg(long)]
    pub allow_last_bit: bool,
    /// config.json, where it is not beside the weights.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub config: Option<PathBuf>,
    /// tokenizer.json, where it is not beside the weights.
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub tokenizer: Option<PathBuf>,
}

/// `q4 logits`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The file has one tensor `logits`, float32 [positions, vocab].

Examples:
  q4 logits ./model --ids 1,2,3 --out logits.safetensors
  q4 logits ./model --ids 1,2,3 --out logits.safetensors --greedy 16 --json")]
pub struct LogitsArgs {
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token ids, separated by commas.
    #[arg(long, value_delimiter = ',', required = true, value_name = "ID,ID,...")]
    pub ids: Vec<u32>,
    /// File to write; must not exist.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub out: PathBuf,
    /// Continue greedily by N tokens, one at a time, and report their ids.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub greedy: usize,
    /// Rows of a step at most; more ids are computed in several steps [default: 512].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunk: Option<u32>,
    /// Quantise dense layers while loading.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub quantize: Option<Format>,
}

/// `q4 train`.
#[derive(Args, Debug)]
pub struct TrainArgs {
    /// The configuration and options of q4-train, handed on as they are.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "CONFIG.toml")]
    pub line: Vec<OsString>,
}

/// `q4 completions`.
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// `q4 man`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  q4 man | man -l -
  q4 man generate > q4-generate.1")]
pub struct ManArgs {
    /// One verb; all of them when absent.
    #[arg(value_name = "VERB")]
    pub verb: Option<String>,
}
