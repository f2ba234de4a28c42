//! `q4 completions SHELL`: a completion script on stdout.
use crate::args::{Cli, CompletionsArgs};
use crate::report::{self, Outcome};
use clap::CommandFactory;
use q4_core::Result;

/// Writes the script of one shell.
pub fn run(args: &CompletionsArgs) -> Result<Outcome> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "q4", &mut script);
    report::stdout(&String::from_utf8_lossy(&script))?;
    Ok(Outcome::Done)
}
