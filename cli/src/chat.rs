//! `q4 chat`: a conversation line by line on one cache, for people and for pipes.
use crate::args::ChatArgs;
use crate::context::Context;
use crate::generate::{Emitter, Turn, stats, tell_if_cut};
use crate::input;
use crate::prompt;
use crate::report::{Outcome, error, stderr};
use crate::session::{Facts, Session, Timing, chunk};
use crate::text::{Text, context_size};
use q4_core::{Code, Error, Result};
use q4_model::cpu::KvType;
use q4_model::generate::Conversation;
use q4_model::load::ContextOptions;
use q4_model::sampling::Sampler;
use serde::Serialize;
use std::io::{self, IsTerminal};
use std::time::Instant;

/// Positions of a conversation, where the model has as many.
const CONTEXT: usize = 4096;

const HELP: &str = "\
/help          this list
/reset         forget the conversation
/system TEXT   forget the conversation and give the model this system message
/exit          leave; Ctrl-D does too
";

/// One line of `--json`.
#[derive(Serialize)]
struct Line<'a> {
    turn: usize,
    #[serde(flatten)]
    said: Turn<'a>,
    context_used: usize,
    context: usize,
    #[serde(flatten)]
    facts: Facts,
}

/// What a line of input means.
#[derive(Debug, PartialEq, Eq)]
enum Command<'a> {
    Say(&'a str),
    Nothing,
    Help,
    Reset,
    System(&'a str),
    Exit,
    Unknown(&'a str),
}

/// Runs the verb.
pub fn run(cx: &Context, args: &ChatArgs) -> Result<Outcome> {
    let start = Instant::now();
    let report = cx.report();
    let dispatch = Session::dispatch(cx)?;
    let checkpoint = cx.open(&args.model)?;
    let mut text = Text::of(&checkpoint)?;
    let template = Text::template(&checkpoint)?;
    prompt::give(&mut text.variables, &args.answer.prompt, &template, report)?;
    let params = text.sampling(&args.answer, report)?;
    let limits = text.limits(&args.answer);
    let context = context_size(args.answer.context, CONTEXT, &checkpoint)?;
    let chunk = chunk(cx.device()?).min(context);
    let sizes = ContextOptions { context, chunk, all_logits: false, kv: cx.kv(KvType::F16) };
    let session = Session::load(cx, dispatch, &checkpoint, args.answer.quantize, sizes)?;
    let mut runner = session.runner()?;
    let mut sampler = Sampler::new(params.clone(), checkpoint.config().vocab_size)?;
    let load_s = start.elapsed().as_secs_f64();
    let person = report.is_interactive() && io::stdin().is_terminal();
    if person {
        stderr(&format!("{}, {context} positions. /help lists the commands.\n", checkpoint.name()));
    }
    let mut system = args.answer.system.clone();
    let mut turns = 0;
    loop {
        let mut talk =
            Conversation::new(&mut runner, &text.tokenizer, &template, &text.variables, system.as_deref());
        system = loop {
            if person {
                stderr("> ");
            }
            let Some(line) = input::line()? else {
                if person {
                    stderr("\n");
                }
                return Ok(Outcome::Done);
            };
            let said = match command(&line) {
                Command::Say(said) => said,
                Command::Nothing => continue,
                Command::Exit => return Ok(Outcome::Done),
                Command::Reset => break system.clone(),
                Command::System(text) => break Some(text.to_owned()),
                Command::Help => {
                    stderr(HELP);
                    continue;
                }
                Command::Unknown(name) => {
                    let e = Error::new(Code::Usage, format!("{name}: no such command"))
                        .need("/help, /reset, /system TEXT or /exit")
                        .fix("begin a message with a space if it has to begin with a slash");
                    if person {
                        error(&e, false);
                        continue;
                    }
                    return Err(e);
                }
            };
            let mut out = Emitter::new(!report.is_json(), true);
            let answer = match talk.turn(said, &params, &mut sampler, &limits, &mut |piece| out.piece(piece))
            {
                // The conversation is as it was before the turn, so a person can go on.
                Err(e) if person => {
                    error(&e, false);
                    continue;
                }
                other => other?,
            };
            out.end(&answer)?;
            tell_if_cut(report, &answer, context, checkpoint.config().max_position_embeddings);
            turns += 1;
            let used = talk.runner().tokens().len();
            if report.is_json() {
                let said = Turn::new(said, &answer);
                let line = Line { turn: turns, said, context_used: used, context, facts: session.facts() };
                report.document("chat", &line)?;
            }
            let timing = Timing::of(load_s, [&answer]);
            report.detail(&format!("{}; {used} of {context} positions", stats(&timing, &[answer])));
        };
    }
}

fn command(line: &str) -> Command<'_> {
    let Some(rest) = line.strip_prefix('/') else {
        return if line.trim().is_empty() { Command::Nothing } else { Command::Say(line) };
    };
    let (name, argument) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    match (name, argument.trim()) {
        ("help", "") => Command::Help,
        ("reset", "") => Command::Reset,
        ("exit" | "quit", "") => Command::Exit,
        ("system", text) if !text.is_empty() => Command::System(text),
        _ => Command::Unknown(line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_from_messages() {
        assert_eq!(command("Who are you?"), Command::Say("Who are you?"));
        assert_eq!(command("  "), Command::Nothing);
        assert_eq!(command("/system  be brief "), Command::System("be brief"));
        assert_eq!(command("/reset"), Command::Reset);
        for bad in ["/system", "/reset now", "/", "/etc/passwd"] {
            assert_eq!(command(bad), Command::Unknown(bad));
        }
    }
}
