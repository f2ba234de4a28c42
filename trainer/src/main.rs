//! `q4-train`: trains what a configuration describes. `q4 train` hands its line to it.
use clap::{ArgAction, Parser};
use q4_core::{Code, Error, Result};
use q4_model::checkpoint::{Bytes, Checkpoint};
use q4_trainer::behaviour::Answer;
use q4_trainer::config::Config;
use q4_trainer::corpus::{self, Sizes};
use q4_trainer::torch::run::{Invocation, run};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const EXAMPLES: &str = "\
Examples:
  q4 train run.toml
  q4 train run.toml --resume
  q4 train run.toml --set optimizer.lr=1e-4 --set train.steps=200
  q4 train run.toml --preset full-24g --device cuda --dry-run
  q4 train --write-corpus corpus

Exit status:
  0 ok, 2 usage, 3 a behaviour gate was missed, 4 bad model or data file, 6 no such device,
  7 memory limit, 8 input or output";

/// Trains or fine-tunes a model as a configuration says.
#[derive(Parser)]
#[command(name = "q4-train", version, max_term_width = 100, after_long_help = EXAMPLES)]
struct Cli {
    /// The configuration.
    #[arg(value_name = "CONFIG.toml")]
    config: Option<PathBuf>,
    /// Override a field, e.g. optimizer.lr=1e-4; may be repeated.
    #[arg(long, value_name = "SECTION.FIELD=VALUE")]
    set: Vec<String>,
    /// Defaults for an amount of memory: full-128g, full-24g or lora-8g.
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// cpu, cuda or cuda:N.
    #[arg(long)]
    device: Option<String>,
    /// Most memory to use where the model lives, e.g. 24GiB.
    #[arg(long, value_name = "BYTES")]
    memory_limit: Option<String>,
    /// Go on after the newest intact checkpoint.
    #[arg(long)]
    resume: bool,
    /// Show plan and data; train nothing.
    #[arg(long)]
    dry_run: bool,
    /// Loss and behaviour of the model as it is; train nothing.
    #[arg(long, conflicts_with_all = ["dry_run", "resume"])]
    eval_only: bool,
    /// Write the corpus a demo model learns from (train.jsonl, valid.jsonl) into a new directory; train
    /// nothing.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["config", "dry_run", "resume", "eval_only"])]
    write_corpus: Option<PathBuf>,
    /// Seed of the corpus.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "write_corpus")]
    corpus_seed: u64,
    /// Ask the exported model's behaviour through q4 (backend nvfp4-kernel, kernel-only) instead of the
    /// trainer.
    #[arg(long)]
    through_q4: bool,
    /// Threads [default: the processors this process may use].
    #[arg(long, value_name = "N", env = "Q4_THREADS", hide_env_values = true,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Write the report as one JSON document to stdout.
    #[arg(long)]
    json: bool,
    /// Log more.
    #[arg(short, long, action = ArgAction::Count, conflicts_with = "quiet")]
    verbose: u8,
    /// No progress.
    #[arg(short, long)]
    quiet: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = catch_unwind(AssertUnwindSafe(|| start(&cli)));
    let e = match result {
        Ok(Ok(report)) => return show(&cli, &report),
        Ok(Err(e)) => e,
        Err(_) => Error::new(Code::Internal, "q4-train stopped because of a bug; the message is above"),
    };
    eprintln!("{e}");
    if cli.json {
        let parts: Map<String, Value> = e.parts().map(|(k, v)| (k.to_owned(), v.into())).collect();
        let document =
            json!({ "schema": "q4.error/1", "code": e.code().id(), "exit": e.code().exit(), "error": parts });
        // Nobody reads it: there is nobody left to tell.
        let _ = writeln!(std::io::stdout(), "{document}");
    }
    ExitCode::from(e.code().exit())
}

fn start(cli: &Cli) -> Result<Value> {
    if let Some(dir) = &cli.write_corpus {
        let report = corpus::generate(cli.corpus_seed, Sizes::default()).write(dir)?;
        return serde_json::to_value(report).map_err(|e| Error::new(Code::Internal, e.to_string()));
    }
    let mut overrides = Vec::new();
    for text in &cli.set {
        let (key, value) = text
            .split_once('=')
            .ok_or_else(|| Error::new(Code::Usage, format!("--set {text}")).need("SECTION.FIELD=VALUE"))?;
        overrides.push((key.to_owned(), value.to_owned()));
    }
    let flags =
        [("memory.preset", &cli.preset), ("model.device", &cli.device), ("memory.limit", &cli.memory_limit)];
    overrides.extend(flags.into_iter().filter_map(|(k, v)| Some((k.to_owned(), v.clone()?))));
    if cli.resume {
        overrides.push(("checkpoint.resume".into(), "true".into()));
    }
    let config = match &cli.config {
        Some(path) => Config::from_file(path, &overrides)?,
        None => Config::parse("", &overrides)?,
    };
    let quiet = cli.quiet;
    let say = move |text: &str| {
        if !quiet {
            eprintln!("{}", text.trim_end());
        }
    };
    let tokens = config.behaviour.tokens;
    let q4 = cli.through_q4.then(q4_beside).transpose()?;
    let serve = q4.as_ref().map(|q4| move |model: &Path| Served::boxed(q4, model, tokens));
    let threads = cli.threads.map_or_else(q4_core::processors, usize::from);
    run(
        &config,
        &Invocation {
            threads,
            progress: !quiet,
            demo: &demo,
            dry_run: cli.dry_run,
            eval_only: cli.eval_only,
            serve: serve.as_ref().map(|s| s as &dyn Fn(&Path) -> Box<dyn Answer>),
            say: &say,
        },
    )
}

fn show(cli: &Cli, report: &Value) -> ExitCode {
    let text = if cli.json {
        report.to_string()
    } else {
        let brief = |v: &Value| !v.is_null() && !v.is_array() && !v.is_object();
        let fields = report
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(k, v)| *k != "schema" && *k != "config" && brief(v));
        fields.map(|(k, v)| format!("{k}: {v}\n")).collect::<String>()
    };
    match writeln!(std::io::stdout(), "{}", text.trim_end()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::from(Code::Io.exit()),
    }
}

/// The exported model, asked through the program that serves it.
struct Served {
    q4: PathBuf,
    model: PathBuf,
    tokens: usize,
}

impl Served {
    fn boxed(q4: &Path, model: &Path, tokens: usize) -> Box<dyn Answer> {
        Box::new(Self { q4: q4.to_owned(), model: model.to_owned(), tokens })
    }
}

impl Answer for Served {
    fn answer(&mut self, prompt: &str) -> Result<String> {
        let out = Command::new(&self.q4)
            .args([
                "--backend",
                "nvfp4-kernel",
                "--compute",
                "kernel-only",
                "--activations",
                "native",
                "generate",
            ])
            .arg(&self.model)
            .args([
                "--temperature",
                "0",
                "--json",
                "--quiet",
                "--max-tokens",
                &self.tokens.to_string(),
                "-p",
                prompt,
            ])
            .output()
            .map_err(|e| Error::io(&self.q4, &e))?;
        let failed = |have: String| {
            Error::new(Code::BackendFailed, format!("{}: no answer", self.q4.display())).have(have)
        };
        if !out.status.success() {
            return Err(failed(String::from_utf8_lossy(&out.stderr).into_owned()));
        }
        let document: Value = serde_json::from_slice(&out.stdout).map_err(|e| failed(e.to_string()))?;
        document["text"].as_str().map(str::to_owned).ok_or_else(|| failed(document.to_string()))
    }
}

fn q4_beside() -> Result<PathBuf> {
    let path =
        std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("q4"))).filter(|p| p.is_file());
    path.ok_or_else(|| Error::new(Code::Usage, "--through-q4").need("q4 beside q4-train").have("none"))
}

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_bytes!(concat!("../../cli/demo/", $name)).as_slice())),*]
    };
}

/// The demo model, as it is in q4.
static DEMO: [(&str, &[u8]); 7] = embedded![
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
];

fn demo() -> Result<Checkpoint> {
    let files = DEMO.iter().map(|(name, bytes)| ((*name).to_owned(), Bytes::from(*bytes))).collect();
    Checkpoint::from_files("demo", files)
}
