//! The `q4` command: parses, dispatches to a verb, and turns what happened into an exit status.
//!
//! Verbs return values; only this file decides how a process ends.
mod args;
mod backends;
mod bench;
mod chat;
mod choices;
mod compare;
mod completions;
mod conformance;
mod context;
mod convert;
mod demo;
mod device;
mod device_roofline;
mod diagnose;
mod eval;
mod explain;
mod generate;
mod input;
mod inspect;
mod logits;
mod man;
mod plugins;
mod quantize;
mod report;
mod roofline;
mod scaffold;
mod session;
mod signals;
mod supervise;
mod text;
mod trace;
mod train;
mod verify;
mod windows;
mod writing;

use args::{GlobalArgs, Verb};
use context::Context;
use q4_core::{Code, Error, Result};
use report::Outcome;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// First argument of the child process a plugin is loaded in before this one trusts it.
pub const PROBE: &str = "plugin-probe";

fn main() -> ExitCode {
    let line: Vec<_> = std::env::args_os().collect();
    if line.get(1).is_some_and(|a| a == PROBE) {
        return q4_plugin_host::probe_main(line.into_iter().skip(2));
    }
    #[cfg(target_os = "linux")]
    if line.get(1).is_some_and(|a| a == q4_plugin_host::remote::VERB) {
        return q4_plugin_host::remote::serve_main();
    }
    signals::install();
    let json = line.iter().any(|a| a == "--json");
    let line = args::verb_first(line);
    // Its options are q4-train's own.
    if let Some(args) = train::words(&line) {
        return match train::run(&args) {
            Ok(outcome) => ExitCode::from(outcome.exit()),
            Err(e) => {
                report::error(&e, json);
                ExitCode::from(e.code().exit())
            }
        };
    }
    let cli = match args::parse(line) {
        Ok(cli) => cli,
        Err(e) => return usage(&e, json),
    };
    log(&cli.global);
    if maps_plugins(&cli)
        && let Some(status) = supervise::begin(json)
    {
        return ExitCode::from(status);
    }
    let result = catch_unwind(AssertUnwindSafe(|| run(cli.global, &cli.verb)));
    let status = match result {
        Ok(Ok(outcome)) => outcome.exit(),
        Ok(Err(_)) if signals::interrupted() => signals::INTERRUPTED,
        Ok(Err(e)) => {
            report::error(&e, json);
            e.code().exit()
        }
        Err(_) => {
            let e = Error::new(Code::Internal, "q4 stopped because of a bug; the message is above");
            report::error(&e.fix("please report it with the command line and the message"), json);
            Code::Internal.exit()
        }
    };
    supervise::tell(status);
    ExitCode::from(status)
}

/// Whether code of a third party may come into this process.
fn maps_plugins(cli: &args::Cli) -> bool {
    let global = &cli.global;
    let is_elsewhere = global.isolate || matches!(cli.verb, Verb::Conformance(_));
    let is_asked_for = !global.plugin.is_empty() || !global.plugin_dir.is_empty();
    is_asked_for && !is_elsewhere
}

fn run(global: GlobalArgs, verb: &Verb) -> Result<Outcome> {
    match verb {
        Verb::Completions(args) => return completions::run(args),
        Verb::Man(args) => return man::run(args),
        _ => {}
    }
    let cx = Context::new(global)?;
    let cx = match verb {
        Verb::Conformance(args) => {
            let limit = std::time::Duration::from_secs(args.time_limit.max(1));
            let place =
                if args.in_process { plugins::Place::Debugged } else { plugins::Place::Judged(limit) };
            cx.gated(false).placed(place).judging()
        }
        Verb::Trace(args) => cx.compared_with(Some(&args.against)),
        _ => cx,
    };
    match verb {
        Verb::Generate(args) => generate::run(&cx, args),
        Verb::Chat(args) => chat::run(&cx, args),
        Verb::Explain(args) => explain::run(&cx, args),
        Verb::Inspect(args) => inspect::run(&cx, args),
        Verb::Verify(args) => verify::run(&cx, args),
        Verb::Quantize(args) => quantize::run(&cx, args),
        Verb::Convert(args) => convert::run(&cx, args),
        Verb::Eval(args) => eval::run(&cx, args),
        Verb::Compare(args) => compare::run(&cx, args),
        Verb::Logits(args) => logits::run(&cx, args),
        Verb::Trace(args) => trace::run(&cx, args),
        Verb::Bench(args) => bench::run(&cx, args),
        Verb::Conformance(args) => conformance::run(&cx, args),
        Verb::Diagnose(args) => diagnose::run(&cx.with_every_plugin(), args),
        Verb::Plugin(args) => scaffold::run(&cx, args),
        Verb::Train(args) => train::run(args),
        Verb::Completions(args) => completions::run(args),
        Verb::Man(args) => man::run(args),
    }
}

/// Help and version are results; everything else clap says is an error of usage.
fn usage(e: &clap::Error, json: bool) -> ExitCode {
    // A closed pipe is the only way this fails, and there is nobody left to tell.
    let _ = e.print();
    if !e.use_stderr() {
        return ExitCode::SUCCESS;
    }
    if json {
        let text = e.to_string();
        let what = text.lines().next().unwrap_or_default();
        let error = Error::new(Code::Usage, what.strip_prefix("error: ").unwrap_or(what));
        report::error_document(&error.fix("q4 --help"));
    }
    ExitCode::from(Code::Usage.exit())
}

/// Log lines go to stderr; `RUST_LOG` decides where it is set, else `-v` and `-q`.
fn log(global: &GlobalArgs) {
    let default = match (global.quiet, global.verbose) {
        (true, _) => "error",
        (_, 0) => "warn",
        (_, 1) => "info",
        _ => "debug",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(report::color_stderr(global.color))
        .with_target(false)
        .without_time()
        .init();
}
