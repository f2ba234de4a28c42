//! Shows that every mutant is caught at its level and that no correct backend is accused.
//!
//! `liars [--json] [--seeds N] [--sample N] [--only NAME] [--record FILE]`. The exit status is 5 when a
//! mutant slipped past or a correct backend was accused. Each is asked in a child process of this executable,
//! and those that end, block or exhaust their process in more of them.
//!
//! A mutant meets the case first that told it when `caught.txt` was written, and the whole of its level where
//! there is none or that one does not tell it any more. `--record` writes that file anew.
use q4_conformance::liars::{Mutant, device_of, honest, honest_on_card, honest_units, mutants};
use q4_conformance::{
    Bench, CaseResult, ChildProcesses, InProcess, Level, Options, Outcome, Part, Profile, Runner, cases,
    memory::CountingAllocator, proofs, run, serve,
};
use q4_core::{BUILTINS, BuiltinOptions, Code, Error, HostEnv, Q4Backend, Registry, Result, ThreadPool};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
// Naming them links them in.
use {
    q4_dequant_matmul as _, q4_fp8_kernel as _, q4_ggml_kernel as _, q4_int4_kernel as _,
    q4_mxfp4_kernel as _, q4_nf4_kernel as _, q4_nvfp4_kernel as _, q4_reference as _,
};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The correct backend on a device of its own.
const ON_CARD: &str = "honest-on-card";
/// The one whose sums lose what those of FP8 tensor cores do.
const UNITS: &str = "honest-units";
/// Longest time of one case of a lethal mutant.
const TIME_LIMIT: Duration = Duration::from_secs(3);
/// Most memory of a lethal mutant.
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
    record: Option<PathBuf>,
    task: Option<Task>,
}

/// Mutants and the case that told each, by a space, in order.
const CAUGHT: &str = include_str!("../liars/caught.txt");

/// What a child process of this executable does. Nothing that one mutant does to its process reaches another.
enum Task {
    /// Says whether this mutant is caught, by one case or by its level.
    Catch(String, Option<String>),
    /// Says which cases of these seeds, a sample for each, a correct backend fails.
    Accuse(String, std::ops::Range<u64>),
    /// Says which cases of one part of the suite, nothing left out of it, a correct backend fails.
    Whole(String, usize),
    /// Runs these cases, or the one there is, of a mutant that may end its process.
    Serve(String, Part, Option<String>),
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Line> {
    let mut line = Line { json: false, seeds: 200, sample: 2, only: None, record: None, task: None };
    let mut case = None;
    let bad = |what: &str| {
        Error::new(Code::Usage, format!("liars: {what}"))
            .need("[--json] [--seeds N] [--sample N] [--only NAME] [--record FILE]")
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| bad(&format!("{word} needs a value")));
        let number = |text: String| text.parse::<usize>().map_err(|_| bad(&format!("`{text}` is no number")));
        match word.as_str() {
            "--json" => line.json = true,
            "--seeds" => line.seeds = number(value()?)? as u64,
            "--sample" => line.sample = number(value()?)?,
            "--only" => line.only = Some(value()?),
            "--record" => line.record = Some(value()?.into()),
            "--case" => case = Some(value()?),
            "--catch" => line.task = Some(Task::Catch(value()?, None)),
            "--accuse" => {
                let (name, from, to) = (value()?, number(value()?)?, number(value()?)?);
                line.task = Some(Task::Accuse(name, from as u64..to as u64));
            }
            "--whole" => line.task = Some(Task::Whole(value()?, number(value()?)?)),
            "--serve" => {
                let (name, part) = (value()?, value()?.parse().map_err(|e: String| bad(&e))?);
                line.task = Some(Task::Serve(name, part, None));
            }
            other => return Err(bad(&format!("`{other}` is unknown"))),
        }
    }
    if line.record.is_some() && line.only.is_some() {
        return Err(bad("--record writes the cases of all mutants, so it does not go with --only"));
    }
    if let Some(Task::Catch(_, of) | Task::Serve(_, _, of)) = &mut line.task {
        *of = case;
    }
    Ok(line)
}

fn start(line: &Line) -> Result<u8> {
    match &line.task {
        Some(task) => {
            // A mutant that panics is caught; its message is in the table.
            std::panic::set_hook(Box::new(|_| {}));
            run_task(task, line.sample).map(|()| 0)
        }
        None => all(line),
    }
}

fn run_task(task: &Task, sample: usize) -> Result<()> {
    let (threads, env) = (ThreadPool::new(2), HostEnv::collect());
    let found = match task {
        Task::Serve(name, part, case) => {
            let options = part.options(&options(mutant(name)?.level, case.as_deref()));
            return child(mutant(name)?, part, &options, &env, &threads);
        }
        Task::Catch(name, case) => {
            let found = catch(mutant(name)?, case.as_deref(), &env, &threads);
            found.into_iter().map(|case| Alarm { seed: 0, case }).collect()
        }
        Task::Accuse(name, seeds) => accuse(name, seeds.clone(), sample, &threads)?,
        Task::Whole(name, part) => whole(name, *part, &threads)?,
    };
    let text =
        serde_json::to_string(&found).map_err(|e| Error::new(Code::Internal, format!("an answer: {e}")))?;
    writeln!(std::io::stdout(), "{ANSWER}{text}")
        .map_err(|e| Error::new(Code::Io, format!("standard output: {e}")))
}

/// What the answer of a child begins with: a mutant may write, too.
const ANSWER: &str = "q4-liars ";

/// A case that did not pass.
#[derive(Serialize, Deserialize)]
struct Alarm {
    seed: u64,
    case: CaseResult,
}

/// Seeds that one child process takes.
const SEEDS: u64 = 25;
/// Backends that mutants are made of. They meet the whole suite once, with seed 0; built-ins have it behind
/// them when `q4 conformance` is right.
const WHOLE: [&str; 2] = ["honest", UNITS];
/// Child processes that share the whole suite of one: it is what takes longest here.
const PARTS: usize = 8;

/// Every mutant and every correct backend, as many at a time as there are processors; says what came of it as
/// it comes.
fn all(line: &Line) -> Result<u8> {
    let is_chosen = |l: &&Mutant| line.only.as_ref().is_none_or(|only| only == l.name);
    let mutants: Vec<_> = mutants().filter(is_chosen).collect();
    let seeds = if line.only.is_some() { 0 } else { line.seeds };
    let parts = if seeds > 0 { PARTS } else { 0 };
    let wholes = WHOLE.iter().flat_map(|name| {
        (0..parts).map(move |part| ["--whole".to_owned(), (*name).to_owned(), part.to_string()].to_vec())
    });
    let sample = line.sample.to_string();
    let samples = ["honest", ON_CARD, UNITS].into_iter().chain(BUILTINS).flat_map(|name| {
        let from = u64::from(WHOLE.contains(&name));
        let sample = sample.clone();
        (from..seeds).step_by(SEEDS as usize).map(move |at| {
            let (from, to) = (at.to_string(), seeds.min(at + SEEDS).to_string());
            ["--accuse", name, &from, &to, "--sample", &sample].map(str::to_owned).to_vec()
        })
    });
    let accusations: Vec<_> = wholes.chain(samples).collect();
    let tell = |text: String| if line.json { Ok(()) } else { say(&text) };
    tell("| liar | what it does | level | outcome | case |\n|---|---|---|---|---|\n".into())?;
    let (mut missed, mut alarms, mut recorded) = (Vec::new(), Vec::new(), String::new());
    at_once(
        &mutants,
        |mutant| told(mutant),
        |mutant, found| {
            let Mutant { name, what, level, .. } = mutant;
            match found?.first() {
                Some(Alarm { case, .. }) => {
                    recorded += &format!("{name} {}\n", case.id);
                    tell(format!("| {name} | {what} | {level} | {} | {} |\n", case.outcome.as_str(), case.id))
                }
                None => {
                    missed.push(*name);
                    tell(format!("| {name} | {what} | {level} | MISSED | |\n"))
                }
            }
        },
    )?;
    if let Some(path) = &line.record {
        std::fs::write(path, &recorded)
            .map_err(|e| Error::new(Code::Io, path.display().to_string()).have(e.to_string()))?;
    }
    at_once(
        &accusations,
        |words| ask(words),
        |words, found| {
            for Alarm { seed, case } in found? {
                let message = case.message.as_deref().unwrap_or("").replace('\n', " ");
                // A task, then whose it is.
                let (name, outcome, id) = (&words[1], case.outcome.as_str(), &case.id);
                tell(format!("\nfalse alarm: {name}, seed {seed}: {outcome} {id}: {message}\n"))?;
                alarms.push(json!({ "backend": name, "seed": seed, "case": case }));
            }
            Ok(())
        },
    )?;
    let (count, caught) = (mutants.len(), mutants.len() - missed.len());
    if line.json {
        let document = json!({
            "schema": "q4.liars/1",
            "liars": count,
            "caught": caught,
            "missed": missed,
            "false_alarms": alarms.len(),
            "accused": alarms,
            "seeds": seeds,
        });
        say(&format!("{document}\n"))?;
    } else {
        say(&format!("\n{caught} of {count} caught, {} false alarms over {seeds} seeds\n", alarms.len()))?;
    }
    Ok(if missed.is_empty() && alarms.is_empty() { 0 } else { Code::ConformanceFailed.exit() })
}

fn say(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let told = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    told.map_err(|e| Error::new(Code::Io, format!("standard output: {e}")))
}

/// Calls `work` for every item, on as many threads as there are processors, and `each` with what came of it,
/// in order.
fn at_once<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(&T) -> R + Sync,
    mut each: impl FnMut(&T, R) -> Result<()>,
) -> Result<()> {
    let turn = AtomicUsize::new(0);
    let (senders, receivers): (Vec<_>, Vec<_>) = items.iter().map(|_| channel()).unzip();
    let senders: Vec<_> = senders.into_iter().map(Mutex::new).collect();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((item, sender)) = {
                    let i = turn.fetch_add(1, Ordering::Relaxed);
                    items.get(i).zip(senders.get(i))
                } {
                    let result = work(item);
                    // Whoever waited for it may have met an error.
                    let _ = sender.lock().unwrap_or_else(PoisonError::into_inner).send(result);
                }
            });
        }
        items.iter().zip(&receivers).try_for_each(|(item, receiver)| {
            let lost = |_| Error::new(Code::Internal, "a thread that waits for a child is gone");
            each(item, receiver.recv().map_err(lost)?)
        })
    })
}

/// The case that tells the mutant: the recorded one if it does, else the first of its level.
fn told(mutant: &Mutant) -> Result<Vec<Alarm>> {
    let recorded = CAUGHT.lines().filter_map(|line| line.split_once(' ')).find(|l| l.0 == mutant.name);
    let is_of_level = |case: &str| case.split('/').next() == Some(mutant.level.as_str());
    if let Some((name, case)) = recorded.filter(|(_, case)| is_of_level(case)) {
        let found = ask(&["--catch", name, "--case", case])?;
        if !found.is_empty() {
            return Ok(found);
        }
    }
    ask(&["--catch", mutant.name])
}

/// The answer of this executable to other words.
fn ask(words: &[impl AsRef<str>]) -> Result<Vec<Alarm>> {
    let words: Vec<_> = words.iter().map(AsRef::as_ref).collect();
    let what = || format!("liars {}", words.join(" "));
    let output = own_command()
        .args(&words)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Error::new(Code::Io, what()).have(e.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let answer = text.lines().find_map(|line| line.strip_prefix(ANSWER));
    answer.and_then(|text| serde_json::from_str(text).ok()).ok_or_else(|| {
        let said = String::from_utf8_lossy(&output.stderr);
        Error::new(Code::Internal, what()).need("an answer").have(format!(
            "{}; {}",
            output.status,
            said.trim()
        ))
    })
}

fn own_command() -> Command {
    Command::new(std::env::current_exe().unwrap_or_else(|_| "liars".into()))
}

fn mutant(name: &str) -> Result<&'static Mutant> {
    mutants().find(|l| l.name == name).ok_or_else(|| Error::new(Code::Usage, format!("no liar `{name}`")))
}

/// A level, or one case of it.
fn options(level: Level, case: Option<&str>) -> Options {
    let all = Options { levels: vec![level], fail_fast: true, ..Options::of(Profile::Training) };
    case.into_iter().fold(all, Options::replaying)
}

/// The first case of its level that tells the mutant, or the one that is asked.
fn catch(mutant: &Mutant, case: Option<&str>, env: &HostEnv, threads: &ThreadPool) -> Option<CaseResult> {
    let backend = mutant.backend();
    let device = device_of(&*backend);
    let proofs = proofs(&*backend, env, device);
    let mut cases = cases(&proofs, None, &options(mutant.level, case));
    if !mutant.is_lethal {
        // Last those that take long.
        cases.sort_by_key(|c| c.id.contains("/model/"));
    }
    let bench = Bench { backend: &*backend, env, device, threads, abi: None, proofs: &proofs };
    let (name, only) = (mutant.name, case.map(str::to_owned));
    let children = ChildProcesses {
        command: Box::new(move |part| {
            let mut command = own_command();
            command.args(["--serve", name, &part.to_string()]);
            command.args(only.iter().flat_map(|case| ["--case", case]));
            command
        }),
        at_once: 1,
        time_limit: TIME_LIMIT,
        memory_limit: MEMORY_LIMIT,
    };
    let runner: &dyn Runner = if mutant.is_lethal { &children } else { &InProcess };
    let mut found = None;
    runner.run(&cases, &bench, &mut |result| {
        if result.outcome.is_bad() {
            found = Some(result);
        }
        found.is_none()
    });
    found
}

fn child(mutant: &Mutant, part: &Part, options: &Options, env: &HostEnv, threads: &ThreadPool) -> Result<()> {
    let backend = mutant.backend();
    let device = device_of(&*backend);
    let proofs = proofs(&*backend, env, device);
    let cases = cases(&proofs, None, options);
    let bench = Bench { backend: &*backend, env, device, threads, abi: None, proofs: &proofs };
    serve(&cases, part.range.clone(), &bench, &mut std::io::stdout())
}

/// A correct backend, and the host it runs on.
fn correct(name: &str) -> Result<(Arc<dyn Q4Backend>, HostEnv)> {
    let registry = Registry::builtin(&BuiltinOptions::default())?;
    let backend = match name {
        "honest" => honest(),
        ON_CARD => honest_on_card(),
        UNITS => honest_units(),
        _ => registry
            .live(name)
            .cloned()
            .ok_or_else(|| Error::new(Code::LibraryRefused, format!("{name} is not live here")))?,
    };
    let env = HostEnv { vendor: backend.devices(), ..registry.env().clone() };
    Ok((backend, env))
}

/// Bad outcomes of a correct backend among a sample of the suite for every seed.
fn accuse(
    name: &str,
    seeds: std::ops::Range<u64>,
    sample: usize,
    threads: &ThreadPool,
) -> Result<Vec<Alarm>> {
    let (backend, env) = correct(name)?;
    let mut alarms = Vec::new();
    for seed in seeds {
        let device = device_of(&*backend);
        let options = Options { seed, sample: Some(sample), device, ..Options::of(Profile::Training) };
        let report = run(&*backend, &options, &env, threads);
        alarms.extend(report.failures.into_iter().map(|f| Alarm { seed, case: f.case }));
        if !report.conformant && alarms.is_empty() {
            return Err(Error::new(Code::ConformanceFailed, format!("{name}, seed {seed}"))
                .have(report.notes.join("; ")));
        }
    }
    Ok(alarms)
}

/// Bad outcomes of a correct backend in one part of the whole suite: every [`PARTS`]th case.
fn whole(name: &str, part: usize, threads: &ThreadPool) -> Result<Vec<Alarm>> {
    let (backend, env) = correct(name)?;
    let device = device_of(&*backend);
    let proofs = proofs(&*backend, &env, device);
    let all = cases(&proofs, None, &Options { device, ..Options::of(Profile::Training) });
    let own: Vec<_> = all.into_iter().skip(part).step_by(PARTS).collect();
    let bench = Bench { backend: &*backend, env: &env, device, threads, abi: None, proofs: &proofs };
    let (mut alarms, mut passed) = (Vec::new(), 0);
    InProcess.run(&own, &bench, &mut |case| {
        passed += usize::from(case.outcome == Outcome::Pass);
        if case.outcome.is_bad() {
            alarms.push(Alarm { seed: 0, case });
        }
        true
    });
    // Of a claim that is not made there is no case, which would be nothing found as well.
    if passed == 0 && alarms.is_empty() {
        return Err(Error::new(Code::ConformanceFailed, format!("{name}, part {part}"))
            .need("cases that pass")
            .have(format!("{} cases", own.len())));
    }
    Ok(alarms)
}

/// Without one a mutant is still caught, by a walk over its level that takes many times as long.
#[test]
fn every_mutant_has_a_recorded_case_of_its_level() {
    let recorded: Vec<_> = CAUGHT.lines().filter_map(|line| line.split_once(' ')).collect();
    let names: Vec<_> = recorded.iter().map(|l| l.0).collect();
    assert_eq!(names, mutants().map(|l| l.name).collect::<Vec<_>>());
    for (mutant, (_, case)) in mutants().zip(recorded) {
        assert_eq!(case.split('/').next(), Some(mutant.level.as_str()), "{}", mutant.name);
    }
}
