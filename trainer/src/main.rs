//! `q4-train`: trains what a configuration describes. `q4 train` hands its line to it.
use clap::{ArgAction, Parser, Subcommand};
use q4_core::memory::human;
use q4_core::{Code, Error, Result};
use q4_model::checkpoint::{Bytes, Checkpoint};
use q4_trainer::behaviour::Answer;
use q4_trainer::config::{self, Config};
use q4_trainer::corpus::{self, Sizes};
use q4_trainer::data::Shown;
use q4_trainer::progress::clock;
use q4_trainer::ranks::Place;
use q4_trainer::stop;
use q4_trainer::torch::ranks::launch::launch;
use q4_trainer::torch::run::{Invocation, run};
use serde::Serialize;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  q4 train init run.toml
  q4 train run.toml
  q4 train run.toml --preview 3
  q4 train run.toml --resume
  q4 train run.toml --set optimizer.lr=1e-4 --set train.steps=200
  q4 train run.toml --preset full-24g --device cuda --dry-run
  q4 train --print-config
  q4 train --write-corpus corpus

Exit status:
  0 ok, 2 usage, 3 a behaviour gate was missed, 4 bad model or data file, 6 no such device,
  7 memory limit, 8 input or output or a lost rank, 130 and 143 ended by Ctrl-C and SIGTERM, with a checkpoint";

/// Trains or fine-tunes a model as a configuration says.
#[derive(Parser)]
#[command(name = "q4-train", version, max_term_width = 100, after_long_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    verb: Option<Verb>,
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
    /// Who multiplies by a packed base (lora.base): NAME or LAYER_GLOB=NAME; may be repeated.
    #[arg(long, value_name = "NAME|GLOB=NAME")]
    backend: Vec<String>,
    /// Which paths may multiply by it: auto, kernel-only, kernel-or-fallback or dequant-matmul-only.
    #[arg(long, value_name = "PATH")]
    compute: Option<String>,
    /// Start N ranks on this machine, which share every step: one a GPU with --device cuda, else one a share
    /// of the processors. Several machines: torchrun, mpirun or srun.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    gpus: Option<u16>,
    /// Most memory to use where the model lives, e.g. 24GiB.
    #[arg(long, value_name = "BYTES")]
    memory_limit: Option<String>,
    /// Go on after the newest intact checkpoint in checkpoint.dir.
    #[arg(long)]
    resume: bool,
    /// With --resume: go on although configuration, model or data are not those of the checkpoint.
    #[arg(long, requires = "resume")]
    allow_changes: bool,
    /// Print every key with its value and meaning, as a configuration; train nothing.
    #[arg(long)]
    print_config: bool,
    /// Show plan and data; train nothing.
    #[arg(long)]
    dry_run: bool,
    /// Show the first N rows as the model would see them, with what is learnt of each; train nothing.
    #[arg(long, value_name = "N", conflicts_with_all = ["dry_run", "eval_only", "resume"])]
    preview: Option<u32>,
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
    #[arg(long, global = true)]
    json: bool,
    /// Log more.
    #[arg(short, long, action = ArgAction::Count, conflicts_with = "quiet", global = true)]
    verbose: u8,
    /// No progress; warnings stay.
    #[arg(short, long, global = true)]
    quiet: bool,
}

#[derive(Subcommand)]
enum Verb {
    /// Write a configuration to begin with.
    Init {
        /// A new file.
        #[arg(value_name = "FILE", default_value = "train.toml")]
        file: PathBuf,
    },
}

fn main() -> ExitCode {
    stop::writes_fail_plainly();
    let json = std::env::args_os().any(|a| a == "--json");
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return usage(&e, json),
    };
    let exit = match catch_unwind(AssertUnwindSafe(|| start(&cli))) {
        Ok(Ok(report)) => show(&cli, &report),
        Ok(Err(e)) => failed(&e, json),
        Err(_) => failed(
            &Error::new(Code::Internal, "q4-train stopped because of a bug; the message is above"),
            json,
        ),
    };
    q4_trainer::torch::ranks::leave(exit)
}

/// A line on stderr. A log that is full or closed is no reason to end a run.
fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", text.trim_end());
}

/// The error as text and, with `json`, as the document of docs/errors.md.
fn failed(e: &Error, json: bool) -> u8 {
    tell(&e.to_string());
    if json {
        document(e);
    }
    e.code().exit()
}

fn document(e: &Error) {
    #[derive(Serialize)]
    struct Document<'a> {
        schema: &'static str,
        #[serde(flatten)]
        error: &'a Error,
    }
    let text = serde_json::to_string(&Document { schema: "q4.error/1", error: e }).unwrap_or_default();
    // Nobody reads it: there is nobody left to tell.
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// A line that is not understood, or one that asks for help.
fn usage(e: &clap::Error, json: bool) -> ExitCode {
    // A closed pipe is the only way this fails, and there is nobody left to tell.
    let _ = e.print();
    if !e.use_stderr() {
        return ExitCode::SUCCESS;
    }
    if json {
        document(&Error::usage(&e.to_string()).fix("q4 train --help"));
    }
    ExitCode::from(Code::Usage.exit())
}

/// The command as it was given, so that advice can be pasted.
fn line() -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+%@".contains(c);
    let quoted = |word: String| match word.chars().all(plain) && !word.is_empty() {
        true => word,
        false => format!("'{}'", word.replace('\'', "'\\''")),
    };
    let words = std::env::args_os().skip(1).map(|w| quoted(w.to_string_lossy().into_owned()));
    std::iter::once("q4 train".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

/// Writes the configuration to begin with; never over another.
fn begin(file: &Path) -> Result<Value> {
    let created = std::fs::File::options().write(true).create_new(true).open(file);
    match created.and_then(|mut f| f.write_all(config::START.as_bytes())) {
        Ok(()) => Ok(json!({ "schema": "q4.train/1", "wrote": file })),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
            Err(Error::new(Code::Usage, format!("{}: exists", file.display()))
                .need("a name that is free")
                .fix("q4 train init ANOTHER.toml"))
        }
        Err(e) => Err(Error::new(Code::Io, format!("{}: {e}", file.display()))),
    }
}

fn start(cli: &Cli) -> Result<Value> {
    if let Some(Verb::Init { file }) = &cli.verb {
        return begin(file);
    }
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
    let flags = [
        ("memory.preset", &cli.preset),
        ("model.device", &cli.device),
        ("memory.limit", &cli.memory_limit),
        ("quant.compute", &cli.compute),
    ];
    overrides.extend(flags.into_iter().filter_map(|(k, v)| Some((k.to_owned(), v.clone()?))));
    if !cli.backend.is_empty() {
        let names: Vec<_> = cli.backend.iter().map(|name| format!("{name:?}")).collect();
        overrides.push(("quant.backend".into(), format!("[{}]", names.join(", "))));
    }
    if cli.resume {
        overrides.push(("checkpoint.resume".into(), "true".into()));
    }
    // All keys can be shown without anything to learn from.
    let learning = overrides.iter().any(|(k, _)| k == "data.train");
    let config = match &cli.config {
        Some(path) => Config::from_file(path, &overrides)?,
        None if cli.print_config && !learning => {
            overrides.push(("data.train".into(), "train.jsonl".into()));
            Config::parse("", &overrides)?
        }
        None => Config::parse("", &overrides)?,
    };
    if cli.print_config {
        return Ok(json!({ "schema": "q4.train/1", "config": config.commented()? }));
    }
    let place = Place::of_environment()?;
    if let Some(n) = cli.gpus.filter(|n| *n > 1) {
        if let Some(place) = &place {
            return Err(Error::new(Code::Usage, "--gpus")
                .need("a process that is no rank already")
                .have(place.to_string()));
        }
        return launch(n.into(), &without_gpus()).map(|exit| json!({ "launched": n, "exit": exit }));
    }
    let quiet = cli.quiet;
    let say = move |text: &str| {
        if !quiet {
            tell(text);
        }
    };
    let line = line();
    let tokens = config.behaviour.tokens;
    let q4 = cli.through_q4.then(q4_beside).transpose()?;
    let serve = q4.as_ref().map(|q4| move |model: &Path| Served::boxed(q4, model, tokens));
    let own = || (q4_core::processors() / place.as_ref().map_or(1, |p| p.local_size)).max(1);
    let threads = cli.threads.map_or_else(own, usize::from);
    run(
        &config,
        &Invocation {
            threads,
            place,
            progress: !quiet,
            demo: &demo,
            dry_run: cli.dry_run,
            preview: cli.preview.map(|n| n as usize),
            eval_only: cli.eval_only,
            allow_changes: cli.allow_changes,
            line: &line,
            serve: serve.as_ref().map(|s| s as &dyn Fn(&Path) -> Box<dyn Answer>),
            say: &say,
            warn: &tell,
        },
    )
}

/// The line that every rank is given.
fn without_gpus() -> Vec<OsString> {
    let mut words = std::env::args_os().skip(1);
    let mut rest = Vec::new();
    while let Some(word) = words.next() {
        if word == "--gpus" {
            words.next();
        } else if !word.to_string_lossy().starts_with("--gpus=") {
            rest.push(word);
        }
    }
    rest
}

fn show(cli: &Cli, report: &Value) -> u8 {
    let exit = report["exit"].as_u64().map_or(0, |exit| exit as u8);
    // What a run of several ranks has to show, the first one shows.
    if report.get("rank").is_some() || report.get("launched").is_some() {
        return exit;
    }
    let text = match report.get("config").and_then(Value::as_str).filter(|_| cli.print_config) {
        _ if cli.json => report.to_string(),
        Some(config) => config.to_owned(),
        None if report.get("preview").is_some() => rows(report),
        None => {
            let fields = report.as_object().into_iter().flatten();
            fields.filter_map(|(k, v)| Some(format!("{k}: {}\n", brief(k, v)?))).collect::<String>()
        }
    };
    match writeln!(std::io::stdout(), "{}", text.trim_end()) {
        Ok(()) => exit,
        Err(_) => Code::Io.exit(),
    }
}

/// Rows of a preview, for people.
fn rows(report: &Value) -> String {
    let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let shown: Vec<Shown> = serde_json::from_value(report["preview"].clone()).unwrap_or_default();
    shown.iter().map(|row| row.render(colour) + "\n\n").collect()
}

/// A figure of the report in its unit, as far as a line can show it.
fn brief(name: &str, value: &Value) -> Option<String> {
    if matches!(name, "schema" | "config" | "exit") {
        return None;
    }
    Some(match value {
        Value::Number(n) => match (n.as_u64(), n.as_f64()) {
            (Some(bytes), _) if name.ends_with("_bytes") => human(bytes),
            (_, Some(s)) if name.ends_with("seconds") => clock(Duration::try_from_secs_f64(s).ok()?),
            (Some(whole), _) => whole.to_string(),
            (_, Some(x)) if x.abs() >= 100.0 => format!("{x:.0}"),
            (_, Some(x)) => format!("{x:.5}"),
            _ => n.to_string(),
        },
        Value::String(s) => s.clone(),
        Value::Array(list) if name == "exports" && !list.is_empty() => {
            list.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", ")
        }
        Value::Bool(b) => b.to_string(),
        _ => return None,
    })
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
