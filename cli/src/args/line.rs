//! The words of the command line, before and after clap reads them.
use super::Cli;
use crate::mistakes;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, Parser};
use std::ffi::OsString;

/// What `line`, whose verb comes first, asks for.
///
/// # Errors
/// clap's, whose tip says how q4 spells what other programs spell otherwise.
pub fn parse(line: Vec<OsString>) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(line).map_err(|mut e| {
        let said = |kind| match e.get(kind) {
            Some(ContextValue::String(word)) => Some(word.clone()),
            _ => None,
        };
        let tip = match e.kind() {
            ErrorKind::UnknownArgument => said(ContextKind::InvalidArg).and_then(|w| mistakes::option(&w)),
            ErrorKind::InvalidSubcommand => {
                said(ContextKind::InvalidSubcommand).and_then(|w| mistakes::verb(&w))
            }
            _ => None,
        };
        if let Some(tip) = tip {
            e.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        }
        e
    })
}

/// What an error of clap's proposes.
pub fn tip(e: &clap::Error) -> Option<String> {
    match e.get(ContextKind::Suggested) {
        Some(ContextValue::StyledStrs(tips)) => tips.first().map(ToString::to_string),
        _ => None,
    }
}

/// Moves the verb in front of the options before it. clap takes global options on either side, but keeps only
/// one side of an option that stands on both, and a binding request must not get lost. Where an option is
/// none of the global ones, nobody knows whether the next word is its value or the verb, and clap is to
/// refuse the line as it was typed.
pub fn verb_first(line: Vec<OsString>) -> Vec<OsString> {
    let command = Cli::command();
    let mut at = 1;
    while let Some(token) = line.get(at).map(|t| t.to_string_lossy()) {
        if token == "--" || matches!(&*token, "-h" | "--help" | "-V" | "--version") {
            return line;
        }
        if !token.starts_with('-') || token == "-" {
            let mut moved = line;
            moved[1..=at].rotate_right(1);
            return moved;
        }
        let Some(words) = words_of(&command, &token) else { return line };
        at += words;
    }
    line
}

/// How many words the global option takes that `token` is: its value may be in the same word. None where it
/// is not one.
fn words_of(command: &Command, token: &str) -> Option<usize> {
    let Some(long) = token.strip_prefix("--") else {
        let is_counter = |short: char| {
            command.get_arguments().any(|a| a.get_short() == Some(short) && !a.get_action().takes_values())
        };
        return token[1..].chars().all(is_counter).then_some(1);
    };
    let (name, value) = long.split_once('=').map_or((long, None), |(name, value)| (name, Some(value)));
    let option = command.get_arguments().find(|a| a.get_long() == Some(name))?;
    Some(if option.get_action().takes_values() && value.is_none() { 2 } else { 1 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Compute, Verb};
    use std::path::PathBuf;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    fn parse(line: &str) -> Cli {
        super::parse(verb_first(words(line))).unwrap_or_else(|e| panic!("{line}: {e}"))
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_on_both_sides_of_the_verb_add_up() {
        let cli = parse("q4 --backend a=x -v --json explain m --backend b=y --compute kernel-only");
        assert_eq!(cli.global.backend, ["a=x", "b=y"]);
        assert!(cli.global.json && cli.global.verbose == 1);
        assert_eq!(cli.global.compute, Compute::KernelOnly);
        let Verb::Explain(args) = cli.verb else { panic!("another verb") };
        assert_eq!(args.model.model, PathBuf::from("m"));
    }

    #[test]
    fn a_value_that_looks_like_a_verb_stays_a_value() {
        let cli = parse("q4 --nvfp4-lib chat --memory-limit=1GiB generate -p verify");
        assert_eq!(cli.global.nvfp4_lib, Some("chat".into()));
        assert_eq!(cli.global.memory_limit, Some(1 << 30));
        let Verb::Generate(args) = cli.verb else { panic!("another verb") };
        assert_eq!((args.prompt.as_deref(), args.model.model.to_str()), (Some("verify"), Some("demo")));
    }

    #[test]
    fn what_is_refused_is_the_option_nobody_knows() {
        let refused = |line: &str| super::parse(verb_first(words(line))).expect_err(line).to_string();
        for line in ["q4 --max-new 5 generate", "q4 -v --max-new 5 generate", "q4 generate --max-new 5"] {
            assert!(
                refused(line).starts_with("error: unexpected argument '--max-new' found"),
                "{}",
                refused(line)
            );
        }
        for line in ["q4 -m x generate", "q4 generate --model x", "q4 --model=x generate"] {
            assert!(refused(line).contains("q4 generate MODEL"), "{}", refused(line));
        }
        assert!(refused("q4 - generate").contains("'-'"));
    }
}
