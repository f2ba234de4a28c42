//! The `q4` command: parses, dispatches to a verb, and turns what happened into an exit status.
//!
//! Verbs return values; only this file decides how a process ends.
mod args;
mod backends;
mod batch;
mod bench;
mod chat;
mod choices;
mod client;
mod compare;
mod completions;
mod conformance;
mod context;
mod conversation;
mod convert;
mod demo;
mod device;
mod device_roofline;
mod diagnose;
mod eval;
mod explain;
mod form;
mod generate;
mod hub;
mod input;
mod inspect;
mod logging;
mod logits;
mod man;
mod mistakes;
mod page;
mod plugins;
mod prompt;
mod proof;
mod quantize;
mod report;
mod roofline;
mod rows;
mod scaffold;
mod serve;
mod session;
mod signals;
mod supervise;
mod terminal;
mod text;
mod timeline;
mod tokenize;
mod trace;
mod train;
mod verify;
mod windows;
mod writing;

use args::{GlobalArgs, Verb};
use context::Context;
use q4_core::{Code, Error, Result};
use q4_plugin_host::remote;
use report::{Outcome, Report};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use timeline::Timeline;

/// First argument of the child process a plugin is loaded in before this one trusts it.
pub const PROBE: &str = "plugin-probe";

fn main() -> ExitCode {
    let line: Vec<_> = std::env::args_os().collect();
    if line.get(1).is_some_and(|a| a == PROBE) {
        return q4_plugin_host::probe_main(line.into_iter().skip(2));
    }
    if line.get(1).is_some_and(|a| a == remote::VERB) {
        return remote::serve_main();
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
    let word = line.get(1).map(|verb| verb.to_string_lossy().into_owned()).unwrap_or_default();
    let cli = match args::parse(line) {
        Ok(cli) => cli,
        Err(e) => return usage(&e, json),
    };
    let timeline = match timeline(&cli) {
        Ok(timeline) => timeline,
        Err(e) => {
            report::error(&e, json);
            return ExitCode::from(e.code().exit());
        }
    };
    logging::init(&cli.global, timeline.clone());
    if maps_plugins(&cli)
        && let Some(status) = supervise::begin(json)
    {
        return ExitCode::from(status);
    }
    let result = catch_unwind(AssertUnwindSafe(|| {
        let outcome = {
            let _span = tracing::info_span!("q4", verb = word).entered();
            run(cli.global, &cli.verb)?
        };
        timeline.map_or(Ok(()), |t| t.finish()).map(|()| outcome)
    }));
    let status = match result {
        Ok(Ok(outcome)) => outcome.exit(),
        Ok(Err(_)) if signals::interrupted() => Outcome::Interrupted.exit(),
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
        Verb::Completions(args) => return completions::run(&Report::new(&global), args),
        Verb::Man(args) => return man::run(&Report::new(&global), args),
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
        Verb::Compare(args) => cx.compared_with(args.against.as_deref()),
        _ => cx,
    };
    match verb {
        Verb::Generate(args) => match &args.batch.batch {
            Some(file) => batch::run(&cx, args, file),
            None => generate::run(&cx, args),
        },
        Verb::Chat(args) => chat::run(&cx, args),
        Verb::Serve(args) => serve::run(&cx, args),
        Verb::Explain(args) => explain::run(&cx, args),
        Verb::Inspect(args) => inspect::run(&cx, args),
        Verb::Verify(args) => verify::run(&cx, args),
        Verb::Quantize(args) => quantize::run(&cx, args),
        Verb::Convert(args) => convert::run(&cx, args),
        Verb::Eval(args) => eval::run(&cx, args),
        Verb::Compare(args) => compare::run(&cx, args),
        Verb::Logits(args) => logits::run(&cx.comparing(), args),
        Verb::Tokenize(args) => tokenize::run(&cx, args),
        Verb::Trace(args) => trace::run(&cx, args),
        Verb::Bench(args) => bench::run(&cx, args),
        Verb::Conformance(args) => conformance::run(&cx, args),
        Verb::Diagnose(args) => diagnose::run(&cx.with_every_plugin(), args),
        Verb::Plugin(args) => scaffold::run(&cx, args),
        Verb::Train(args) => train::run(args),
        Verb::Completions(args) => completions::run(cx.report(), args),
        Verb::Man(args) => man::run(cx.report(), args),
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
        let fix = args::tip(e).unwrap_or_else(|| "q4 --help".to_owned());
        report::error_document(&Error::usage(&e.to_string()).fix(fix));
    }
    ExitCode::from(Code::Usage.exit())
}

/// The timeline that was asked for. A child of the suite is told of in that of its parent.
fn timeline(cli: &args::Cli) -> Result<Option<Timeline>> {
    let is_child = matches!(&cli.verb, Verb::Conformance(args) if args.child.is_some());
    cli.global.trace_out.iter().filter(|_| !is_child).map(|path| Timeline::create(path)).next().transpose()
}
