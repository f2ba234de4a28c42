//! The options of `q4 serve`.
use crate::args::{Format, ModelArgs};
use crate::choices::bytes;
use clap::{Args, ValueHint};
use std::path::PathBuf;

/// `q4 serve`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = "\
Answers /v1/chat/completions, /v1/completions, /v1/responses (OpenAI) and /v1/messages (Anthropic), many
requests at once; a page to talk with the model is at /. On the CPU an answer does not depend on who else
is served: it is what `q4 generate` says with the same prompt and seed. Listens on this machine alone
unless --host says otherwise, and speaks no TLS: put a proxy before it. Ctrl-C or SIGTERM: no new
requests, answers in flight end.

Examples:
  q4 serve
  q4 serve ./qwen3-8b-nvfp4 --port 8000 --parallel 32
  q4 serve ./model --host 0.0.0.0 --api-key-file keys.txt
  curl http://127.0.0.1:8080/v1/completions -d '{\"prompt\": \"I am\", \"max_tokens\": 8}'")]
pub struct ServeArgs {
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Address to listen on.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one, which is said.
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub port: u16,
    /// What the model is called [default: its own name].
    #[arg(long, value_name = "NAME", value_parser = alias)]
    pub alias: Option<String>,
    /// Positions of a sequence, prompt and answer [default: 8192, or what the model has].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Option<u32>,
    /// Requests that are computed at once.
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub parallel: u16,
    /// Requests that may wait; who comes then is told to come back (429).
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub queue: usize,
    /// Most memory that requests in flight may take, whose bodies are read and become prompts, e.g. 1GiB.
    #[arg(long, value_name = "BYTES", default_value = "384MiB", value_parser = bytes)]
    pub request_memory: u64,
    /// A key that requests must have; may be repeated. Others see it in the list of processes.
    #[arg(long, value_name = "KEY", env = "Q4_API_KEY", hide_env_values = true)]
    pub api_key: Vec<String>,
    /// A file with a key on each line, which SIGHUP makes the server read again.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub api_key_file: Option<PathBuf>,
    /// A site whose pages may ask, with its scheme; may be repeated.
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,
    /// A name that this server is asked by, beside localhost and addresses; may be repeated, * is every name.
    /// Not looked at where keys are needed.
    #[arg(long, value_name = "NAME")]
    pub allowed_host: Vec<String>,
    /// Refuse to serve where an answer depends on who else is served, and name the layer.
    #[arg(long)]
    pub reproducible: bool,
    /// Seconds that answers in flight have when the server is to stop.
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u64).range(..=86_400))]
    pub drain_timeout: u64,
    /// Quantise dense layers while loading.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub quantize: Option<Format>,
}

fn alias(text: &str) -> Result<String, String> {
    match text.trim().is_empty() || text.chars().any(char::is_control) {
        true => Err("need a name that can be read".to_owned()),
        false => Ok(text.to_owned()),
    }
}
