//! Shows that every saboteur is caught at its level and that no correct backend is accused.
//!
//! `liars [--json] [--seeds N] [--sample N] [--only NAME]`. The exit status is 5 when a liar slipped past or a correct
//! backend was accused. Liars that end, block or exhaust their process are asked in child processes of this executable.
use q4_conformance::liars::{Liar, honest, liars};
use q4_conformance::{
    Bench, Case, CaseResult, ChildProcesses, InProcess, Level, Options, Profile, Proof, Runner, cases,
    memory::CountingAllocator, proofs, run, serve,
};
use q4_core::{
    BUILTINS, BuiltinOptions, Code, Device, Error, HostEnv, Q4Backend, Registry, Result, ThreadPool,
};
use serde_json::json;
use std::io::Write;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;
// Naming them links them in.
use {q4_dequant_matmul as _, q4_nf4_kernel as _, q4_nvfp4_kernel as _, q4_reference as _};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Longest time of one case of a lethal liar.
const TIME_LIMIT: Duration = Duration::from_secs(3);
/// Most memory of a lethal liar.
const MEMORY_LIMIT: u64 = 512 << 20;

fn main() -> ExitCode {
    match parse(std::env::args().skip(1)).and_then(|line| start(&line)) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            let _ = writeln!(std::io::stderr(), "{e}");
            ExitCode::from(e.code().exit())
        }
    }
}

struct Line {
    json: bool,
    seeds: u64,
    sample: usize,
    only: Option<String>,
    child: Option<(String, usize, usize)>,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Line> {
    let mut line = Line { json: false, seeds: 200, sample: 2, only: None, child: None };
    let bad = |what: &str| {
        Error::new(Code::Usage, format!("liars: {what}"))
            .need("[--json] [--seeds N] [--sample N] [--only NAME]")
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| bad(&format!("{word} needs a value")));
        let number = |text: String| text.parse::<usize>().map_err(|_| bad(&format!("`{text}` is no number")));
        match word.as_str() {
            "--json" => line.json = true,
            "--seeds" => line.seeds = number(value()?)? as u64,
            "--sample" => line.sample = number(value()?)?,
            "--only" => line.only = Some(value()?),
            "--child" => line.child = Some((value()?, number(value()?)?, number(value()?)?)),
            other => return Err(bad(&format!("`{other}` is unknown"))),
        }
    }
    Ok(line)
}

fn start(line: &Line) -> Result<u8> {
    let threads = ThreadPool::new(2);
    let env = HostEnv::collect();
    if let Some((name, from, to)) = &line.child {
        return child(name, *from..*to, &env, &threads).map(|()| 0);
    }
    // A liar that panics is caught; its message is in the table.
    std::panic::set_hook(Box::new(|_| {}));
    let mut caught = Vec::new();
    let mut missed = Vec::new();
    for liar in liars().filter(|l| line.only.as_ref().is_none_or(|only| only == l.name)) {
        match catch(liar, &env, &threads) {
            Some(result) => caught.push((liar, result)),
            None => missed.push(liar),
        }
    }
    let accused = if line.only.is_some() { Vec::new() } else { accuse(line, &threads)? };
    report(line, &caught, &missed, &accused)?;
    Ok(if missed.is_empty() && accused.is_empty() { 0 } else { Code::ConformanceFailed.exit() })
}

fn options(level: Level) -> Options {
    Options { levels: vec![level], fail_fast: true, ..Options::of(Profile::Training) }
}

/// Cases of a liar, those last that take long.
fn ordered(proofs: &[Proof], level: Level) -> Vec<Case> {
    let mut all = cases(proofs, None, &options(level));
    all.sort_by_key(|c| c.id.contains("/model/"));
    all
}

/// The first case of its level that tells the liar.
fn catch(liar: &Liar, env: &HostEnv, threads: &ThreadPool) -> Option<CaseResult> {
    let backend = liar.backend();
    let proofs = proofs(&*backend, env, Device::Cpu);
    let cases = ordered(&proofs, liar.level);
    let bench = Bench { backend: &*backend, env, device: Device::Cpu, threads, abi: None, proofs: &proofs };
    let name = liar.name;
    let children = ChildProcesses {
        command: Box::new(move |range| {
            let mut command = Command::new(std::env::current_exe().unwrap_or_else(|_| "liars".into()));
            command.args(["--child", name, &range.start.to_string(), &range.end.to_string()]);
            command
        }),
        time_limit: TIME_LIMIT,
        memory_limit: MEMORY_LIMIT,
    };
    let runner: &dyn Runner = if liar.is_lethal { &children } else { &InProcess };
    let mut found = None;
    runner.run(&cases, &bench, &mut |result| {
        if result.outcome.is_bad() {
            found = Some(result);
        }
        found.is_none()
    });
    found
}

fn child(name: &str, range: std::ops::Range<usize>, env: &HostEnv, threads: &ThreadPool) -> Result<()> {
    let liar = liars()
        .find(|l| l.name == name)
        .ok_or_else(|| Error::new(Code::Usage, format!("no liar `{name}`")))?;
    let backend = liar.backend();
    let proofs = proofs(&*backend, env, Device::Cpu);
    let cases = ordered(&proofs, liar.level);
    let bench = Bench { backend: &*backend, env, device: Device::Cpu, threads, abi: None, proofs: &proofs };
    serve(&cases, range, &bench, &mut std::io::stdout())
}

/// Bad outcomes of correct backends: a sample of the suite for every seed, and once the whole of it for the backend that all liars
/// are made of. Built-ins have it behind them when `q4 conformance` is right.
fn accuse(line: &Line, threads: &ThreadPool) -> Result<Vec<(String, u64, CaseResult)>> {
    let registry = Registry::builtin(&BuiltinOptions::default())?;
    let mut correct: Vec<Arc<dyn Q4Backend>> = vec![honest()];
    for name in BUILTINS {
        let live = registry.live(name).cloned();
        correct
            .push(live.ok_or_else(|| Error::new(Code::LibraryRefused, format!("{name} is not live here")))?);
    }
    let mut accused = Vec::new();
    for backend in correct {
        let name = backend.descriptor().name.to_string();
        for seed in 0..line.seeds {
            let sample = (seed > 0 || name != "honest").then_some(line.sample);
            let options = Options { seed, sample, ..Options::of(Profile::Training) };
            let report = run(&*backend, &options, registry.env(), threads);
            accused.extend(report.failures.into_iter().map(|f| (name.clone(), seed, f.case)));
            if !report.conformant && accused.is_empty() {
                return Err(Error::new(Code::ConformanceFailed, format!("{name}, seed {seed}"))
                    .have(report.notes.join("; ")));
            }
        }
    }
    Ok(accused)
}

fn report(
    line: &Line,
    caught: &[(&Liar, CaseResult)],
    missed: &[&Liar],
    accused: &[(String, u64, CaseResult)],
) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let seeds = if line.only.is_some() { 0 } else { line.seeds };
    let text = if line.json {
        let missed: Vec<_> = missed.iter().map(|l| l.name).collect();
        let document = json!({
            "schema": "q4.liars/1",
            "liars": caught.len() + missed.len(),
            "caught": caught.len(),
            "missed": missed,
            "false_alarms": accused.len(),
            "seeds": seeds,
        });
        format!("{document}\n")
    } else {
        table(caught, missed, accused, seeds)
    };
    out.write_all(text.as_bytes()).map_err(|e| Error::new(Code::Io, format!("standard output: {e}")))
}

fn table(
    caught: &[(&Liar, CaseResult)],
    missed: &[&Liar],
    accused: &[(String, u64, CaseResult)],
    seeds: u64,
) -> String {
    let mut text = String::from("| liar | what it does | level | outcome | case |\n|---|---|---|---|---|\n");
    for (l, r) in caught {
        text += &format!("| {} | {} | {} | {} | {} |\n", l.name, l.lie, l.level, r.outcome.as_str(), r.id);
    }
    for l in missed {
        text += &format!("| {} | {} | {} | MISSED | |\n", l.name, l.lie, l.level);
    }
    for (name, seed, r) in accused {
        let message = r.message.as_deref().unwrap_or("").replace('\n', " ");
        text += &format!("\nfalse alarm: {name}, seed {seed}: {} {}: {message}\n", r.outcome.as_str(), r.id);
    }
    let all = caught.len() + missed.len();
    text + &format!("\n{} of {all} caught, {} false alarms over {seeds} seeds\n", caught.len(), accused.len())
}
