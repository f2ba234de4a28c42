//! `q4 chat`: a conversation with a model, for people at a terminal and for pipes.
mod command;
mod editor;
mod history;
mod local;
mod params;
mod remote;
mod talk;

use crate::args::ChatArgs;
use crate::client::Server;
use crate::context::Context;
use crate::conversation::{Saved, Turns};
use crate::report::{Outcome, Report};
use q4_core::{Code, Error, Result};
use std::path::Path;

/// What Qwen3's template calls it.
const THINKING: &str = "enable_thinking";

/// Runs the verb: a model here, or a server's.
pub fn run(cx: &Context, args: &ChatArgs) -> Result<Outcome> {
    match Server::of(&args.server, "chat")? {
        Some(server) => remote::run(cx, args, server),
        None => local::run(cx, args),
    }
}

/// The files that were named; read before the model, which takes longer.
fn files(args: &ChatArgs, report: &Report) -> Result<(Option<Saved>, Option<Turns>)> {
    for (option, path) in [("--load", &args.load), ("--turns", &args.turns)] {
        if path.as_deref() == Some(Path::new("-")) {
            return Err(Error::new(Code::Usage, format!("{option} -"))
                .need("a file; the conversation goes on from standard input"));
        }
    }
    let saved = args.load.as_deref().map(|path| Saved::read(path, report)).transpose()?;
    let played = args.turns.as_deref().map(|path| Turns::read(path, report)).transpose()?;
    Ok((saved, played))
}
