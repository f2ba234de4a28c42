//! `q4 completions SHELL`: a completion script on stdout.
use crate::args::{Cli, CompletionsArgs};
use crate::report::{self, Outcome, Report};
use clap::CommandFactory;
use q4_core::Result;
use serde_json::json;

/// Writes the script of one shell.
pub fn run(report: &Report, args: &CompletionsArgs) -> Result<Outcome> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "q4", &mut script);
    let script = String::from_utf8_lossy(&script);
    match report.is_json() {
        true => {
            report.document("completions", &json!({ "shell": args.shell.to_string(), "script": script }))?
        }
        false => report::stdout(&script)?,
    }
    Ok(Outcome::Done)
}
