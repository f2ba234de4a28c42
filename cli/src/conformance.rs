//! `q4 conformance`: a backend through the suite, in child processes, with a report for whoever asks and a certificate.
//!
//! A child is this very command line with one hidden option more, so that parent and child enumerate the same cases.
use crate::args::ConformanceArgs;
use crate::context::Context;
use crate::plugins::Tables;
use crate::report::Outcome;
use q4_conformance::certificate::default_dir;
use q4_conformance::{
    AbiProbe, Bench, Certificate, ChildProcesses, Level, Library, Options, Profile, Report, Waivers, cases,
    claims, run_with, serve,
};
use q4_core::{BUILTINS, Candidate, Code, Device, Dispatch, Error, Q4Backend, Registry, Result, ThreadPool};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// One form of the report.
type Render = fn(&Report) -> String;

/// Runs the verb. [`Code::ConformanceFailed`] when anything is wrong or nothing ran.
pub fn run(cx: &Context, args: &ConformanceArgs) -> Result<Outcome> {
    let (registry, tables) = cx.backends()?;
    let dispatch = Dispatch::new(registry, cx.policy());
    cx.require_named(&dispatch)?;
    let registry = dispatch.registry();
    let options = Options { device: cx.device()?, ..options(args)? };
    let threads = cx.threads();
    let chosen = chosen(cx, args, registry)?;
    if let Some((name, range)) = &args.child {
        let backend =
            chosen.first().ok_or_else(|| Error::new(Code::Internal, format!("a child without {name}")))?;
        let bench = Bench {
            backend: &**backend,
            env: registry.env(),
            device: options.device,
            threads: &threads,
            abi: tables.of(name),
        };
        return child(&bench, range.clone(), &options);
    }
    if args.list {
        return list(cx, &chosen, registry, &tables, &options);
    }
    let mut whole: Option<Report> = None;
    for backend in &chosen {
        let abi = tables.of(&backend.descriptor().name);
        let report = judge(backend, abi, args, registry, &options, &threads)?;
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
    if let Some(name) = args.child.as_ref().map(|(name, _)| name).or(cx.policy().overrides.all.as_ref()) {
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
    backend: &Arc<dyn Q4Backend>,
    abi: Option<&dyn AbiProbe>,
    args: &ConformanceArgs,
    registry: &Registry,
    options: &Options,
    threads: &ThreadPool,
) -> Result<Report> {
    let name = backend.descriptor().name.to_string();
    let runner = ChildProcesses {
        command: Box::new({
            let (name, runner) = (name.clone(), args.runner.clone());
            move |range| own_command(&name, range, runner.as_deref())
        }),
        time_limit: Duration::from_secs(args.time_limit),
        memory_limit: args.case_memory,
    };
    if is_plugin(&**backend) {
        // This process asks a third party's code too, and must outlive it.
        runner.rehearse().map_err(|e| e.within(&name))?;
    }
    let report = run_with(&runner, &**backend, abi, options, registry.env(), threads);
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
    Ok(match file.filter(|f| f.is_file()) {
        Some(file) => report.loaded_from(Library::of(&file)?, is_plugin(&**backend)),
        None => report,
    })
}

/// What the system calls the processor.
fn processor() -> Option<String> {
    let facts = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = facts.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// This command line again, as a child, started by `runner` if there is one: words between spaces.
fn own_command(name: &str, range: Range<usize>, runner: Option<&str>) -> Command {
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
    command.arg("--child").arg(format!("{name}:{}..{}", range.start, range.end));
    command
}

fn child(bench: &Bench<'_>, range: Range<usize>, options: &Options) -> Result<Outcome> {
    let cases = cases(bench.backend, bench.env, bench.abi, options);
    serve(&cases, range, bench, &mut std::io::stdout())?;
    Ok(Outcome::Done)
}

fn list(
    cx: &Context,
    chosen: &[Arc<dyn Q4Backend>],
    registry: &Registry,
    tables: &Tables,
    options: &Options,
) -> Result<Outcome> {
    for backend in chosen {
        let abi = tables.of(&backend.descriptor().name);
        let all = cases(&**backend, registry.env(), abi, options);
        cx.report().text(&all.iter().map(|c| format!("{}\n", c.id)).collect::<String>())?;
    }
    Ok(Outcome::Done)
}

/// Writes certificates where the run earned them, and says where.
fn certify(cx: &Context, args: &ConformanceArgs, report: &Report) -> Result<()> {
    if args.no_certificate || !report.conformant || !report.complete || report.waived > 0 {
        return Ok(());
    }
    let Some(dir) = args.certificates.clone().or_else(default_dir) else {
        cx.report()
            .warn("no certificate: neither XDG_DATA_HOME nor HOME is set; name a place with --certificates");
        return Ok(());
    };
    for certificate in Certificate::of(report)? {
        let path = certificate.write(&dir)?;
        cx.report().detail(&format!("certificate of {}: {}", certificate.backend, path.display()));
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|e| Error::new(Code::Io, format!("{}: {e}", path.display())))
}
