//! Which server to ask, for verbs that can ask one instead of running a model, and how `q4 bench` measures it.
use clap::{Args, ValueHint};
use std::path::PathBuf;

/// Which server, and which of its models.
#[derive(Args, Clone, Debug)]
pub struct ServerArgs {
    /// Ask the server there, which speaks OpenAI's API, instead of running a model here.
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url, conflicts_with_all = ["model", "config", "tokenizer"])]
    pub server: Option<String>,
    /// Which of the server's models [default: its first].
    #[arg(id = "served", long = "model", value_name = "NAME")]
    pub served: Option<String>,
    /// A file whose first line is the server's key [default: the variable Q4_API_KEY].
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub api_key_file: Option<PathBuf>,
}

/// What `q4 bench --server` asks for.
#[derive(Args, Clone, Debug)]
pub struct LoadArgs {
    /// Users who ask a server at once, each again when he has his answer; one level for each number
    /// [default: 1,8,32, where there is no --rate].
    #[arg(long, value_delimiter = ',', value_name = "N,...", requires = "server", value_parser = users)]
    pub users: Vec<usize>,
    /// Requests a second that come to a server by chance, whether it is done with others or not; one level for
    /// each number.
    #[arg(long, value_delimiter = ',', value_name = "R,...", requires = "server", value_parser = rate)]
    pub rate: Vec<f64>,
    /// Requests of a level [default: 4 for each user, at least 16].
    #[arg(long, value_name = "N", requires = "server", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests: Option<u32>,
    /// Tokens of a prompt for a server, about; what it counts is in the report.
    #[arg(long, value_name = "N", requires = "server", default_value_t = 128,
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub prompt_tokens: u32,
    /// Tokens of a server's answer.
    #[arg(long, value_name = "N", requires = "server", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub answer_tokens: u32,
    /// Seed of the words and arrivals.
    #[arg(long, value_name = "N", requires = "server", default_value_t = 1)]
    pub seed: u64,
    /// Seconds after which a request to a server has failed.
    #[arg(long, value_name = "SECONDS", requires = "server", default_value_t = 600,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
    /// Another server, measured in turns with --server on the same prompts; ratios are printed.
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url, requires = "server")]
    pub compare: Option<String>,
    /// Which of that one's models [default: its first].
    #[arg(long, value_name = "NAME", requires = "compare")]
    pub compare_model: Option<String>,
    /// A file whose first line is that one's key [default: none].
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "compare")]
    pub compare_api_key_file: Option<PathBuf>,
    /// Draw throughput and time to first token into a new file.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "server")]
    pub plot: Option<PathBuf>,
}

fn users(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|n| (1..=4096).contains(n))
        .ok_or_else(|| "need a number from 1 to 4096".to_owned())
}

fn rate(text: &str) -> Result<f64, String> {
    let need = || "need requests a second, from 0.001 to 10000".to_owned();
    text.parse().ok().filter(|r| (0.001..=10_000.0).contains(r)).ok_or_else(need)
}
