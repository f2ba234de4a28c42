//! The words of the command line, before and after clap reads them.
use super::Cli;
use crate::mistakes;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Command, CommandFactory, Parser};
use std::collections::BTreeMap;
use std::ffi::OsString;

/// What `line`, whose verb comes first, asks for.
///
/// # Errors
/// clap's, whose tip says how q4 spells what other programs spell otherwise; and one of ours for an option
/// that is given two values.
pub fn parse(line: Vec<OsString>) -> Result<Cli, clap::Error> {
    let words: Vec<_> = line.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    Cli::try_parse_from(each_once(line)?).map_err(|mut e| {
        if let Some(tip) = meant(&e, &words) {
            // One tip: an option that is spelt nearly so may mean something else.
            e.remove(ContextKind::SuggestedArg);
            e.remove(ContextKind::SuggestedSubcommand);
            e.remove(ContextKind::SuggestedValue);
            e.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        }
        e
    })
}

/// What the user of `words` probably meant where clap gave up.
fn meant(e: &clap::Error, words: &[String]) -> Option<String> {
    let said = |kind| match e.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    };
    let verb = words.get(1).map_or("", String::as_str);
    let one_dash = || mistakes::long_with_one_dash(verb, words.iter().map(String::as_str));
    match e.kind() {
        ErrorKind::UnknownArgument => {
            one_dash().or_else(|| said(ContextKind::InvalidArg).and_then(|word| mistakes::option(verb, word)))
        }
        ErrorKind::InvalidSubcommand => {
            said(ContextKind::InvalidSubcommand).and_then(|word| mistakes::verb(verb, word))
        }
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => one_dash().or_else(|| {
            // clap names it as its help does: `--format <FORMAT>`.
            let option = said(ContextKind::InvalidArg)?.split(' ').next()?;
            mistakes::value(option, said(ContextKind::InvalidValue)?)
        }),
        _ => None,
    }
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

/// A global option that is said twice, before the verb and behind it for instance, is said once; where its
/// values differ, nobody knows which is meant. Of options that add up every one counts.
fn each_once(line: Vec<OsString>) -> Result<Vec<OsString>, clap::Error> {
    let mut root = Cli::command();
    root.build(); // verbs get the global options
    let mut command = &root;
    let mut said: BTreeMap<String, OsString> = BTreeMap::new();
    let (mut kept, mut words) = (Vec::with_capacity(line.len()), line.iter());
    kept.extend(words.next().cloned());
    while let Some(word) = words.next() {
        kept.push(word.clone());
        let bytes = word.as_encoded_bytes();
        if bytes == b"--" {
            break;
        }
        let text = word.to_string_lossy();
        if !text.starts_with('-') || text == "-" {
            command = command.find_subcommand(&*text).unwrap_or(command);
            continue;
        }
        let (name, given) = match text.split_once('=') {
            Some((name, _)) if text.starts_with("--") => (name, Some(&bytes[name.len() + 1..])),
            _ => (&*text, None),
        };
        // What nobody knows is for clap to refuse, as the line was typed.
        let Some(option) = option(command, name) else { return Ok(line) };
        let (takes_value, is_whole) =
            (option.get_action().takes_values(), name.starts_with("--") || name.len() == 2);
        let is_apart = takes_value && given.is_none() && is_whole;
        let next = if is_apart { words.next() } else { None };
        kept.extend(next.cloned());
        let is_one = matches!(option.get_action(), ArgAction::Set | ArgAction::SetTrue);
        if !option.is_global_set() || !is_one || !is_whole {
            continue;
        }
        let value = next
            .cloned()
            .unwrap_or_else(|| String::from_utf8_lossy(given.unwrap_or_default()).into_owned().into());
        match said.insert(option.get_id().to_string(), value.clone()) {
            None => {}
            Some(before) if before == value => kept.truncate(kept.len() - 1 - usize::from(next.is_some())),
            Some(before) => {
                let (long, before) = (option.get_long().unwrap_or_default(), before.display());
                let what = format!("'--{long}' is given twice, as '{before}' and as '{}'", value.display());
                return Err(Cli::command().error(ErrorKind::ArgumentConflict, what));
            }
        }
    }
    kept.extend(words.cloned());
    Ok(kept)
}

/// The option that a word names: a long one, or a short one, whose value may stand in the same word.
fn option<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    let short = |word: &str| word.chars().next();
    command.get_arguments().find(|a| match name.strip_prefix("--") {
        Some(long) => a.get_long() == Some(long),
        None => a.get_short().is_some() && a.get_short() == short(&name[1..]),
    })
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
    fn what_is_said_twice_is_said_once_or_refused() {
        let cli = parse(
            "q4 --json --threads 2 --compute=auto generate -p x --compute auto --json --threads=2 -q -q",
        );
        assert!(cli.global.json && cli.global.quiet && cli.global.threads == Some(2));
        let Verb::Generate(args) = cli.verb else { panic!("another verb") };
        assert_eq!(args.prompt.as_deref(), Some("x"));
        // Every one of these counts, and values are no options.
        assert_eq!(parse("q4 -v explain -v").global.verbose, 2);
        assert_eq!(parse("q4 --plugin a explain --plugin b --plugin a").global.plugin.len(), 3);
        assert_eq!(parse("q4 --trace-out x inspect -- x").global.trace_out, Some("x".into()));
        let refused = |line: &str| super::parse(verb_first(words(line))).expect_err(line).to_string();
        for (line, says) in [
            (
                "q4 --compute auto explain --compute kernel-only",
                "'--compute' is given twice, as 'auto' and as 'kernel-only'",
            ),
            ("q4 explain --threads=1 --threads 2", "'--threads' is given twice, as '1' and as '2'"),
            ("q4 --nvfp4-lib a plugin new --nvfp4-lib b", "'--nvfp4-lib' is given twice, as 'a' and as 'b'"),
            // An option of one verb is clap's business.
            ("q4 generate --seed 1 --seed 1", "'--seed <N>' cannot be used multiple times"),
            ("q4 -q explain -v", "cannot be used with"),
        ] {
            assert!(refused(line).contains(says), "{line}: {}", refused(line));
        }
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
        for line in ["q4 generate demo -ngl 99", "q4 explain -ngl 99", "q4 generate --ngl 99"] {
            assert!(
                refused(line).contains("tip: all layers on the first card: --device cuda"),
                "{}",
                refused(line)
            );
        }
        for (line, tip) in [
            ("q4 quantize a b --format gptq", "q4 writes and runs nvfp4, nf4, mxfp4 and int4"),
            ("q4 generate --format json", "--json"),
            ("q4 plugin list", "q4 diagnose"),
            ("q4 generate --tensor-parallel-size 2", "--device cuda:N"),
        ] {
            assert!(refused(line).contains(tip) && refused(line).contains("tip: "), "{}", refused(line));
        }
    }
}
