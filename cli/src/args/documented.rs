//! `docs/cli.md` has every option of every command, in the words of its help, with an example that the tests
//! run.
use super::Cli;
use clap::{Arg, Command, CommandFactory};
use std::collections::BTreeMap;

#[path = "../../tests/command/cli_md.rs"]
mod cli_md;

/// Options that no example can have where the tests run, and why.
const EXCEPTIONS: [(&str, &str, &str); 1] =
    [("q4 train", "line", "needs q4-train, which links libtorch and has tests of its own")];

/// The commands below `command` that do something, with their names.
fn commands(command: &Command, name: &str, all: &mut BTreeMap<String, Command>) {
    for below in command.get_subcommands().filter(|c| c.get_name() != "help") {
        let name = format!("{name} {}", below.get_name());
        commands(below, &name, all);
        if !below.has_subcommands() {
            all.insert(name, below.clone());
        }
    }
}

/// The first two cells of its row.
fn cells(option: &Arg) -> (String, String) {
    let mut typed = Vec::new();
    typed.extend(option.get_short().map(|short| format!("-{short}")));
    typed.extend(option.get_long().map(|long| format!("--{long}")));
    if option.get_action().takes_values() {
        let names = option.get_value_names().unwrap_or_default();
        let names = names.iter().map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
        match typed.last_mut() {
            Some(last) => *last += &format!(" {names}"),
            None => typed.push(names),
        }
    }
    let does = option.get_help().map(ToString::to_string).unwrap_or_default();
    (format!("`{}`", typed.join("`, `")), does)
}

/// Whether `example` is a use of `option` of the command `name`.
fn uses(example: &str, name: &str, option: &Arg) -> bool {
    let verb = name.strip_prefix("q4").unwrap_or(name);
    if !example.contains("q4 ") || !example.contains(verb) {
        return false;
    }
    let Some(long) = option.get_long().map(|long| format!("--{long}")) else { return true };
    let short = option.get_short().map(|short| format!("-{short}"));
    let is_it = |word: &str| {
        word == long
            || word.strip_prefix(&long).is_some_and(|w| w.starts_with('='))
            || Some(word) == short.as_deref()
    };
    example.split_whitespace().any(is_it)
}

#[test]
fn every_option_has_a_row_with_an_example() {
    let mut root = Cli::command();
    root.build();
    let mut all = BTreeMap::from([("q4".to_owned(), root.clone())]);
    commands(&root, "q4", &mut all);
    assert!(cli_md::setup().contains("q4 convert"), "what the examples begin with");
    let sections = cli_md::sections();
    let mut wrong = Vec::new();
    for (name, command) in &all {
        let section = sections.iter().find(|s| s.command == *name);
        let Some(section) = section else {
            wrong.push(format!("no section of `{name}`"));
            continue;
        };
        let own = |a: &&Arg| !a.is_hide_set() && a.is_global_set() == (name == "q4");
        let is_help = |a: &Arg| matches!(a.get_id().as_str(), "help" | "version");
        let mut left: Vec<_> = section.rows.iter().collect();
        for option in command.get_arguments().filter(own).filter(|a| !is_help(a)) {
            let (typed, does) = cells(option);
            let found = left.iter().position(|row| (&row.option, &row.does) == (&typed, &does));
            let Some(row) = found.map(|at| left.remove(at)) else {
                wrong.push(format!("{name}: | {typed} | {} | `...` |", does.replace('|', "\\|")));
                continue;
            };
            let excuse = EXCEPTIONS.iter().find(|(of, id, _)| of == name && *id == option.get_id().as_str());
            let is_right = match excuse {
                Some((_, _, why)) => row.example == *why,
                None => row.examples().any(|e| uses(e, name, option)),
            };
            if !is_right {
                wrong.push(format!("{name}: no example with {typed}"));
            }
        }
        wrong
            .extend(left.iter().map(|row| format!("{name} has no option | {} | {} |", row.option, row.does)));
    }
    wrong.extend(
        sections
            .iter()
            .filter(|s| !all.contains_key(&s.command))
            .map(|s| format!("no command `{}`", s.command)),
    );
    assert!(wrong.is_empty(), "docs/cli.md:\n{}", wrong.join("\n"));
}
