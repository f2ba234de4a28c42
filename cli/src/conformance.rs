//! `q4 conformance`: a backend through the suite, in child processes, with a report for whoever asks and a
//! certificate.
//!
//! A child is this very command line and, hidden, which part of the cases is its own, so that it makes those
//! that its parent has. A third party's library is mapped by neither: each has a process of its own for it
//! ([`crate::plugins::Place`]), compares what comes back, and believes nothing else.
use crate::args::ConformanceArgs;
use crate::context::Context;
use crate::plugins::{self, Tables};
use crate::report::Outcome;
use q4_conformance::certificate::DATA_VARIABLES;
use q4_conformance::{
    Bench, Case, CaseResult, Certificate, Certificates, ChildProcesses, InProcess, Level, Library, Options,
    Part, Profile, Proof, Report, Runner, SUITE_VERSION, Waivers, cases, claims, proofs, run_with, serve,
};
use q4_core::memory::Budget;
use q4_core::{
    BUILTINS, Candidate, Code, Device, Dispatch, Error, HostEnv, Q4Backend, Registry, Result, ThreadPool,
};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// One form of the report.
type Render = fn(&Report) -> String;

/// Runs the verb. [`Code::ConformanceFailed`] when anything is wrong or nothing ran.
pub fn run(cx: &Context, args: &ConformanceArgs) -> Result<Outcome> {
    if args.child.is_some() {
        q4_plugin_host::tell_crashes();
    }
    let (registry, tables) = cx.backends()?;
    let dispatch = Dispatch::new(registry, cx.policy());
    cx.require_named(&dispatch)?;
    let registry = dispatch.registry();
    let options = Options { device: cx.device()?, ..options(args)? };
    let threads = cx.threads();
    let chosen = chosen(cx, args, registry)?;
    if let Some((name, part)) = args.child.as_ref().zip(args.part.as_ref()) {
        let backend =
            chosen.first().ok_or_else(|| Error::new(Code::Internal, format!("a child without {name}")))?;
        let bench = Bench {
            backend: &**backend,
            env: registry.env(),
            device: options.device,
            threads: &threads,
            abi: tables.of(name),
            proofs: &proofs(&**backend, registry.env(), options.device),
        };
        return child(&bench, part, &options);
    }
    for backend in chosen.iter().filter(|b| is_plugin(&***b) && !args.in_process) {
        // It may not come back when it is asked what it computes, or end the process that asks it.
        let name = &backend.descriptor().name;
        drop(claims(&**backend, registry.env(), options.device));
        if let Some((_, have)) = tables.of(name).and_then(|t| t.elsewhere()?.lost()) {
            let what = format!("{name}: the backend cannot be asked what it computes");
            return Err(Error::new(Code::ConformanceFailed, what)
                .need("a library that leaves the process that loads it alone")
                .have(have));
        }
    }
    if args.list {
        return list(cx, &chosen, registry, &tables, &options);
    }
    let chosen = with_cases(args, chosen, registry, &tables, &options)?;
    if !args.in_process && q4_conformance::memory::resident().is_none() {
        let os = std::env::consts::OS;
        cx.report()
            .warn(&format!("--case-memory bounds nothing here: {os} does not tell what a process has"));
    }
    if chosen.iter().any(|b| is_plugin(&**b)) && !args.in_process && can_read_its_judge() {
        cx.report().warn(
            "this process may trace any other (CAP_SYS_PTRACE, as root has it), and so may the library that is judged; \
             judge what you do not trust as a user without privileges",
        );
    }
    let mut whole: Option<Report> = None;
    for backend in &chosen {
        let report = judge(cx, backend, &tables, args, registry, &options, &threads)?;
        whole = Some(match whole {
            Some(before) => before.merge(report),
            None => report,
        });
    }
    let report = whole.ok_or_else(|| Error::new(Code::ConformanceFailed, "no backend to judge"))?;
    let files: [(_, Render); 3] = [
        (&args.report_json, Report::json),
        (&args.report_junit, Report::junit),
        (&args.report_html, Report::html),
    ];
    for (path, render) in files {
        if let Some(path) = path {
            write(path, &render(&report))?;
        }
    }
    certify(cx, args, &report)?;
    cx.report().text(&if cx.report().is_json() { report.json() } else { report.text() })?;
    Ok(if report.conformant { Outcome::Done } else { Outcome::Found(Code::ConformanceFailed) })
}

/// Whether a library in a child of this process could read and write the memory of the one that judges it.
fn can_read_its_judge() -> bool {
    const CAP_SYS_PTRACE: u64 = 19;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    bits >> CAP_SYS_PTRACE & 1 == 1
}

/// Those of `chosen` that have cases which were asked for. A name with a slip in it selects nothing, which
/// says nothing about the backend; a claim of some says nothing about the other built-ins.
fn with_cases(
    args: &ConformanceArgs,
    chosen: Vec<Arc<dyn Q4Backend>>,
    registry: &Registry,
    tables: &Tables,
    options: &Options,
) -> Result<Vec<Arc<dyn Q4Backend>>> {
    let (what, asked) = match (&args.replay, args.claim.is_empty()) {
        (Some(id), _) => ("--replay", id.clone()),
        (None, false) => ("--claim", args.claim.join(" ")),
        (None, true) => return Ok(chosen),
    };
    let all: Vec<_> = chosen.iter().map(|b| (b, proofs(&**b, registry.env(), options.device))).collect();
    let has_cases = |(b, proofs): &(&Arc<dyn Q4Backend>, Vec<Proof>)| {
        !cases(proofs, tables.of(&b.descriptor().name), options).is_empty()
    };
    // What is hidden from this process is no slip: the report names it.
    if args.in_process && !hidden_features(registry.env()).is_empty() {
        return Ok(chosen);
    }
    let asked_for: Vec<bool> = all.iter().map(has_cases).collect();
    if asked_for.contains(&true) {
        let all = chosen.iter().zip(asked_for);
        return Ok(all.filter(|(b, asked)| *asked || is_plugin(&***b)).map(|(b, _)| b.clone()).collect());
    }
    let claims: Vec<_> = all.iter().flat_map(|(_, proofs)| proofs).map(|p| p.claim.to_string()).collect();
    let error = Error::new(Code::Usage, format!("{what} {asked}: there is no such case"));
    Err(match (what, claims.is_empty()) {
        ("--claim", false) => error.need(format!("one of {}", claims.join(", "))),
        ("--claim", true) => error.need("a claim of the backend, which makes none here"),
        _ => error
            .need("a case of this backend, as it is on this machine")
            .fix("q4 conformance --list has them all"),
    })
}

/// Runs cases with a bar for whoever looks: one that hangs stops it long before the time limit ends it.
struct Watched<'a> {
    inner: &'a dyn Runner,
    bar: indicatif::ProgressBar,
}

impl Runner for Watched<'_> {
    fn run(&self, cases: &[Case], bench: &Bench<'_>, each: &mut dyn FnMut(CaseResult) -> bool) {
        self.bar.set_length(cases.len() as u64);
        self.inner.run(cases, bench, &mut |result| {
            self.bar.inc(1);
            each(result)
        });
        self.bar.finish_and_clear();
    }
}

fn options(args: &ConformanceArgs) -> Result<Options> {
    let usage =
        |what: &str, text: &str, need: &str| Error::new(Code::Usage, format!("--{what} {text}")).need(need);
    let level = |text: &String| {
        Level::parse(text).ok_or_else(|| {
            usage("level", text, "L0 to L5, or abi, decode, forward, backward, negative, honesty")
        })
    };
    let profile = Profile::parse(&args.profile)
        .ok_or_else(|| usage("profile", &args.profile, "inference or training"))?;
    let waivers = match &args.waivers {
        None => Waivers::default(),
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, &e))?;
            Waivers::parse(&text).map_err(|e| e.within(path.display()))?
        }
    };
    let options = Options {
        levels: args.level.iter().map(level).collect::<Result<_>>()?,
        claims: args.claim.clone(),
        seed: args.seed,
        sample: args.sample.map(|n| usize::try_from(n).unwrap_or(usize::MAX)),
        waivers,
        ..Options::of(profile)
    };
    Ok(match &args.replay {
        Some(id) => options.replaying(id),
        None => options,
    })
}

/// The backend that --backend names, else those that plugins brought, else every live one.
fn chosen(cx: &Context, args: &ConformanceArgs, registry: &Registry) -> Result<Vec<Arc<dyn Q4Backend>>> {
    let live = registry.candidates().iter().filter_map(|c| match c {
        Candidate::Live(b) => Some(b.clone()),
        Candidate::Dead { .. } => None,
    });
    let live: Vec<_> = live.collect();
    let named = |b: &Arc<dyn Q4Backend>, name: &str| b.descriptor().name == name;
    // A child is asked for by name, so that a name needs no quoting on the way.
    let asked = match &args.child {
        Some(name) => Some(name.clone()),
        None => cx.policy().overrides.all,
    };
    if let Some(name) = &asked {
        return Ok(live.into_iter().filter(|b| named(b, name)).collect());
    }
    let plugins: Vec<_> = live.iter().filter(|b| is_plugin(&***b)).cloned().collect();
    for candidate in registry.candidates() {
        // Judging the built-ins instead of a plugin that could not be loaded would be a pass for nobody.
        if let Candidate::Dead { name, reasons } = candidate
            && !BUILTINS.contains(&&**name)
        {
            let reasons: Vec<_> = reasons.iter().map(ToString::to_string).collect();
            return Err(Error::new(Code::LibraryRefused, format!("{name} cannot be judged"))
                .need("a backend that can be loaded")
                .have(reasons.join("\n")));
        }
    }
    let device = cx.device()?;
    // On a device, those that offer something there.
    let serves =
        |b: &Arc<dyn Q4Backend>| device == Device::Cpu || !claims(&**b, registry.env(), device).is_empty();
    Ok(if plugins.is_empty() { live.into_iter().filter(serves).collect() } else { plugins })
}

fn is_plugin(backend: &dyn Q4Backend) -> bool {
    !BUILTINS.contains(&&*backend.descriptor().name)
}

fn judge(
    cx: &Context,
    backend: &Arc<dyn Q4Backend>,
    tables: &Tables,
    args: &ConformanceArgs,
    registry: &Registry,
    options: &Options,
    threads: &ThreadPool,
) -> Result<Report> {
    let name = backend.descriptor().name.to_string();
    let apart = children(args, &name, options.device, &cx.budget());
    let runner: &dyn Runner = if args.in_process { &InProcess } else { &apart };
    let runner = Watched { inner: runner, bar: cx.report().bar("judging") };
    let mut report = run_with(&runner, &**backend, tables.of(&name), options, registry.env(), threads);
    if args.in_process {
        // A crash would have been the end of the report too.
        report.complete = false;
        let hidden = hidden_features(registry.env());
        if !hidden.is_empty() && report.cases.is_empty() {
            report.notes.push(format!(
                "the processor has {}, which this process does not see: valgrind and emulators hide what they cannot \
                 execute, and {name} claims other products, or none, without it; give it a kernel that needs less, or use a \
                 sanitizer",
                hidden.join(" ")
            ));
        }
    }
    let report = match processor() {
        Some(name) => report.on_processor(&name),
        None => report,
    };
    let file = registry.env().libraries.get(&name).map(|facts| PathBuf::from(&facts.path));
    let file = match file {
        Some(file) => Some(file),
        // A built-in without a library is this executable.
        None if !is_plugin(&**backend) => std::env::current_exe().ok(),
        None => None,
    };
    let Some(file) = file.filter(|f| f.is_file()) else { return Ok(report) };
    let library = if is_plugin(&**backend) { plugins::library(&file)? } else { Library::of(&file)? };
    match tables.sha256(&name) {
        // Every case loaded it anew.
        Some(before) if before != library.sha256 => {
            Err(Error::new(Code::ConformanceFailed, format!("{} changed while it was judged", library.path))
                .need(format!("one file from the first case to the last, sha256 {before}"))
                .have(format!("sha256 {}", library.sha256)))
        }
        _ => Ok(report.loaded_from(library, is_plugin(&**backend))),
    }
}

/// Child processes that run at the same time, at most; fewer on fewer processors.
const CHILDREN: usize = 8;

/// The processes that cases of a backend run in.
fn children(args: &ConformanceArgs, name: &str, device: Device, budget: &Budget) -> ChildProcesses {
    let (name, runner) = (name.to_owned(), args.runner.clone());
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    // Together they may take what there is, each its part.
    let in_memory = budget.limit().checked_div(args.case_memory).unwrap_or(1);
    let in_memory = usize::try_from(in_memory).unwrap_or(usize::MAX);
    ChildProcesses {
        command: Box::new(move |part| own_command(&name, part, runner.as_deref())),
        at_once: match device {
            Device::Cpu => processors.min(CHILDREN).min(in_memory).max(1),
            // A card is one, and its memory is for one.
            _ => 1,
        },
        time_limit: Duration::from_secs(args.time_limit),
        memory_limit: args.case_memory,
    }
}

/// Features of the processor, as the kernel lists them, that this process does not see.
fn hidden_features(env: &HostEnv) -> Vec<String> {
    let facts = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = facts.lines().find_map(|l| l.strip_prefix("flags")).unwrap_or_default();
    // The words that backends are told, as the kernel spells them.
    let words = ["avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512vbmi"];
    let more = ["avx512_vnni", "avx512_bf16", "avx512_fp16"];
    let told = |word: &&str| word.replace('_', "");
    let is_hidden = |word: &&str| {
        flags.split_whitespace().any(|f| f == *word) && !env.cpu_features.iter().any(|f| *f == told(word))
    };
    words.iter().chain(&more).copied().filter(is_hidden).map(|word| told(&word)).collect()
}

/// What the system calls the processor.
fn processor() -> Option<String> {
    let facts = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = facts.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// This command line again, as a child, started by `runner` if there is one: words between spaces.
fn own_command(name: &str, part: &Part, runner: Option<&str>) -> Command {
    let own = std::env::current_exe().unwrap_or_else(|_| "q4".into());
    let mut words = runner.unwrap_or_default().split_whitespace();
    let mut command = match words.next() {
        Some(program) => {
            let mut command = Command::new(program);
            command.args(words).arg(own);
            command
        }
        None => Command::new(own),
    };
    command.args(std::env::args_os().skip(1));
    command.arg("--child").arg(name).arg("--part").arg(part.to_string());
    command
}

fn child(bench: &Bench<'_>, part: &Part, options: &Options) -> Result<Outcome> {
    q4_conformance::memory::keep();
    let cases = cases(bench.proofs, bench.abi, &part.options(options));
    serve(&cases, part.range.clone(), bench, &mut std::io::stdout())?;
    Ok(Outcome::Done)
}

/// The names of all cases, for programs.
#[derive(Serialize)]
struct List {
    suite: &'static str,
    backends: Vec<Listed>,
}

#[derive(Serialize)]
struct Listed {
    name: String,
    cases: Vec<String>,
}

fn list(
    cx: &Context,
    chosen: &[Arc<dyn Q4Backend>],
    registry: &Registry,
    tables: &Tables,
    options: &Options,
) -> Result<Outcome> {
    let cases_of = |backend: &Arc<dyn Q4Backend>| {
        let abi = tables.of(&backend.descriptor().name);
        cases(&proofs(&**backend, registry.env(), options.device), abi, options)
            .into_iter()
            .map(|c| c.id)
            .collect::<Vec<_>>()
    };
    if cx.report().is_json() {
        let listed =
            |b: &Arc<dyn Q4Backend>| Listed { name: b.descriptor().name.to_string(), cases: cases_of(b) };
        let backends = chosen.iter().map(listed).collect();
        cx.report().document("conformance-list", &List { suite: SUITE_VERSION, backends })?;
        return Ok(Outcome::Done);
    }
    for backend in chosen {
        cx.report().text(&cases_of(backend).iter().map(|id| format!("{id}\n")).collect::<String>())?;
    }
    Ok(Outcome::Done)
}

/// Writes certificates where the run earned them, and says where.
fn certify(cx: &Context, args: &ConformanceArgs, report: &Report) -> Result<()> {
    if args.no_certificate || args.in_process || !report.conformant || !report.complete || report.waived > 0 {
        return Ok(());
    }
    let Some(all) = Certificates::of_user() else {
        cx.report().warn(&format!("no certificate: {DATA_VARIABLES} has to be set, and neither is"));
        return Ok(());
    };
    let all = match &args.certificates {
        Some(folder) => all.kept_in(folder),
        None => all,
    };
    for certificate in Certificate::of(report)? {
        let path = all.write(&certificate)?;
        cx.report().detail(&format!("certificate of {}: {}", certificate.backend, path.display()));
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|e| Error::new(Code::Io, format!("{}: {e}", path.display())))
}
