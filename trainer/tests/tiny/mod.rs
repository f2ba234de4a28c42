//! A tiny model's directory, its data and its configuration, and the program that trains it.
#![allow(dead_code)] // each test file uses its part
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// Steps of the configuration.
pub const STEPS: u64 = 12;

/// Writes `model`, `data.jsonl` and `run.toml` into `dir`.
pub fn prepare(dir: &Path) {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo");
    let model = dir.join("model");
    std::fs::create_dir(&model).expect("directory");
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::copy(demo.join(file), model.join(file)).expect("copied");
    }
    let config = r#"{"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","hidden_size":64,"intermediate_size":96,
        "num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":32,"vocab_size":2048,
        "max_position_embeddings":128,"rms_norm_eps":1e-6,"rope_theta":10000.0,"tie_word_embeddings":true,
        "hidden_act":"silu","attention_bias":false,"eos_token_id":2,"torch_dtype":"bfloat16"}"#;
    std::fs::write(model.join("config.json"), config).expect("written");
    std::fs::write(dir.join("data.jsonl"), sums(40)).expect("written");
    let toml = format!(
        "[model]\npath = \"model\"\ninit = \"random\"\n[data]\ntrain = [\"data.jsonl\"]\nvalid = [\"data.jsonl\"]\n\
         seq = 48\nrows = 2\n[train]\nsteps = {STEPS}\naccumulate = 2\n[optimizer]\nlr = 1e-3\n\
         [checkpoint]\ndir = \"ck\"\nevery = 2\nkeep = 20\n[eval]\nevery = 4\n"
    );
    std::fs::write(dir.join("run.toml"), toml).expect("written");
}

/// Rows of data.
pub fn sums(rows: usize) -> String {
    let row = |i| {
        format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":\"What is {i} plus 1?\"}},\
             {{\"role\":\"assistant\",\"content\":\"{i} plus 1 is {}.\"}}]}}\n",
            i + 1
        )
    };
    (0..rows).map(row).collect()
}

fn command(dir: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_q4-train"));
    command.current_dir(dir).env("GOMP_SPINCOUNT", "1000").args(words);
    #[cfg(unix)]
    hears_signals(&mut command);
    command
}

/// Shells start what is behind `&` with SIGINT ignored, and nohup with SIGHUP: a run then ignores it, too.
#[cfg(unix)]
fn hears_signals(command: &mut Command) {
    // SAFETY: what a child may do before it becomes the program.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(command, || {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            libc::signal(libc::SIGHUP, libc::SIG_DFL);
            Ok(())
        });
    }
}

/// Starts a run of `run.toml` on one thread.
pub fn start(dir: &Path, more: &[&str]) -> Child {
    start_telling(dir, more, Stdio::inherit())
}

/// Starts a run of `run.toml` on one thread that tells what happens to `log`.
pub fn start_telling(dir: &Path, more: &[&str], log: Stdio) -> Child {
    command(dir, &["run.toml", "--threads", "1", "--quiet"])
        .args(more)
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("q4-train starts")
}

/// Runs `run.toml` on one thread to its end.
pub fn run(dir: &Path, more: &[&str]) -> Output {
    command(dir, &["run.toml", "--threads", "1"]).args(more).output().expect("q4-train runs")
}

/// Runs any line to its end.
pub fn line(dir: &Path, words: &[&str]) -> Output {
    command(dir, words).output().expect("q4-train runs")
}

/// Names and contents of a directory's files, sorted.
pub fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut all: Vec<_> = std::fs::read_dir(dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|e| e.expect("an entry").path())
        .map(|p| (PathBuf::from(p.file_name().expect("a name")), std::fs::read(&p).expect("read")))
        .collect();
    all.sort();
    all
}

/// Starts `run.toml` as `n` ranks, one thread each, by torchrun's variables.
pub fn start_ranks(dir: &Path, n: usize, more: &[&str]) -> Vec<Child> {
    start_ranks_with(dir, n, more, &|_, _| {})
}

/// The same, some of them started otherwise.
pub fn start_ranks_with(
    dir: &Path,
    n: usize,
    more: &[&str],
    own: &dyn Fn(usize, &mut Command),
) -> Vec<Child> {
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = free.local_addr().expect("an address").port().to_string();
    drop(free);
    (0..n)
        .map(|rank| {
            let mut command = command(dir, &["run.toml", "--threads", "1", "--quiet"]);
            own(rank, &mut command);
            let place = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", n), ("LOCAL_WORLD_SIZE", n)];
            command.envs(place.map(|(name, value)| (name, value.to_string()))).args(more);
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("q4-train starts")
        })
        .collect()
}

/// Waits for all of them.
pub fn outputs(children: Vec<Child>) -> Vec<Output> {
    children.into_iter().map(|child| child.wait_with_output().expect("ends")).collect()
}
