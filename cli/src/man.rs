//! `q4 man`: manual pages on stdout, made from the definition that the help is made from.
use crate::args::{Cli, ManArgs};
use crate::report::{self, Outcome, Report};
use clap::CommandFactory;
use clap_mangen::Man;
use q4_core::{Code, Error, Result};
use serde_json::json;

/// Writes the page of one verb, or that of the command and then those of all verbs.
pub fn run(report: &Report, args: &ManArgs) -> Result<Outcome> {
    let mut command = Cli::command();
    command.build(); // verbs get the global options
    let verbs: Vec<_> = command.get_subcommands().filter(|v| v.get_name() != "help").collect();
    let pages = match &args.verb {
        None => [&[&command][..], &verbs].concat(),
        Some(name) => vec![*verbs.iter().find(|v| v.get_name() == name).ok_or_else(|| {
            let names: Vec<_> = verbs.iter().map(|v| v.get_name()).collect();
            Error::new(Code::Usage, format!("q4 man {name}")).need(format!("one of {}", names.join(", ")))
        })?],
    };
    let mut text = Vec::new();
    for page in pages {
        let failed = |e: std::io::Error| Error::new(Code::Internal, format!("q4 man: {e}"));
        let version = concat!("q4 ", env!("CARGO_PKG_VERSION"));
        Man::new(page.clone()).source(version).manual("q4").render(&mut text).map_err(failed)?;
    }
    let page = with_whole_examples(&String::from_utf8_lossy(&text));
    match report.is_json() {
        true => report.document("man", &json!({ "verb": args.verb, "page": page }))?,
        false => report::stdout(&page)?,
    }
    Ok(Outcome::Done)
}

/// Indented lines are commands to copy: they are neither joined nor stretched.
fn with_whole_examples(page: &str) -> String {
    let mut text = String::new();
    let mut was_example = false;
    for line in page.lines() {
        let is_example = line.starts_with(' ');
        match (was_example, is_example) {
            (false, true) => text.push_str(".nf\n"),
            (true, false) => text.push_str(".fi\n"),
            _ => {}
        }
        was_example = is_example;
        text.push_str(line);
        text.push('\n');
    }
    if was_example { text + ".fi\n" } else { text }
}
