//! Where a person types: a line editor whose Enter knows that a message is not done yet.
use super::history::{ENTRIES, History};
use crate::report::Report;
use crate::terminal;
use q4_conformance::certificate;
use q4_core::{Code, Error, Result};
use rustyline::error::ReadlineError;
use rustyline::history::{History as _, MemHistory};
use rustyline::{
    Behavior, Cmd, ConditionalEventHandler, Config, Event, EventContext, EventHandler, KeyCode, KeyEvent,
    Modifiers, RepeatCount,
};
use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What came from the keyboard.
pub enum Typed {
    /// A message or a command.
    Text(String),
    /// Ctrl-C, and whether nothing had been typed before it.
    Interrupt {
        /// The line was empty.
        empty: bool,
    },
    /// Ctrl-D on an empty line, or the terminal is gone.
    End,
}

/// A line editor with history.
pub struct Editor {
    line: rustyline::Editor<(), MemHistory>,
    kept: Option<History>,
    was_empty: Arc<AtomicBool>,
    continued: Continued,
}

/// Lines whose last character, a backslash, was typed to begin another one. A paste may have such lines too,
/// and keeps them.
type Continued = Arc<Mutex<Vec<String>>>;

impl Editor {
    /// An editor on the terminal, with what was typed in earlier conversations if `kept`. A history that
    /// cannot be kept is told, once.
    pub fn new(kept: bool, report: &Report) -> Result<Self> {
        terminal::keep();
        // Where answers go to a file, lines are still edited on the terminal.
        let behavior = if io::stdout().is_terminal() { Behavior::Stdio } else { Behavior::PreferTerm };
        let config = Config::builder().behavior(behavior).max_history_size(ENTRIES).map_err(unusable)?;
        let config = config.auto_add_history(false).build();
        let memory = MemHistory::with_config(&config);
        let mut line = rustyline::Editor::with_history(config, memory).map_err(unusable)?;
        let (was_empty, continued) = (Arc::new(AtomicBool::new(true)), Continued::default());
        let bind = |key, modifiers| Event::from(KeyEvent(key, modifiers));
        line.bind_sequence(
            bind(KeyCode::Enter, Modifiers::NONE),
            EventHandler::Conditional(Box::new(Enter(continued.clone()))),
        );
        line.bind_sequence(bind(KeyCode::Enter, Modifiers::ALT), EventHandler::Simple(Cmd::Newline));
        line.bind_sequence(
            KeyEvent::ctrl('C'),
            EventHandler::Conditional(Box::new(Interrupt(was_empty.clone()))),
        );
        let mut editor = Self { line, kept: None, was_empty, continued };
        if kept {
            editor.remember(report)?;
        }
        Ok(editor)
    }

    fn remember(&mut self, report: &Report) -> Result<()> {
        let Some(folder) = certificate::data_dir() else {
            report.warn("no home folder: messages are not kept for the next time");
            return Ok(());
        };
        match History::open(&folder) {
            Ok((history, entries)) => {
                for entry in entries {
                    self.line.history_mut().add_owned(entry).map_err(unusable)?;
                }
                self.kept = Some(history);
            }
            Err(e) => report.warn(&format!(
                "{}: {e}: messages are not kept for the next time; --no-history asks for that",
                folder.display()
            )),
        }
        Ok(())
    }

    /// What is typed next.
    pub fn read(&mut self, report: &Report) -> Result<Typed> {
        lock(&self.continued).clear();
        let typed = {
            let _editing = terminal::editing();
            self.line.readline("> ")
        };
        match typed {
            Ok(text) => {
                let text = joined(text.trim_end_matches(['\n', '\r']), &lock(&self.continued));
                if !text.trim().is_empty() {
                    self.add(&text, report)?;
                }
                Ok(Typed::Text(unquoted(&text).to_owned()))
            }
            Err(ReadlineError::Interrupted) => {
                Ok(Typed::Interrupt { empty: self.was_empty.load(Ordering::Relaxed) })
            }
            Err(ReadlineError::Eof) => Ok(Typed::End),
            Err(e) => Err(unusable(e)),
        }
    }

    fn add(&mut self, text: &str, report: &Report) -> Result<()> {
        let is_new = self.line.add_history_entry(text).map_err(unusable)?;
        let Some(history) = self.kept.as_mut().filter(|_| is_new) else { return Ok(()) };
        if let Err(e) = history.add(text) {
            let path = history.path().display();
            report.warn(&format!("{path}: {e}: messages are not kept for the next time"));
            self.kept = None;
        }
        Ok(())
    }
}

/// A message without the quotes that kept its lines together.
fn unquoted(text: &str) -> &str {
    let inner = text.strip_prefix(QUOTES).and_then(|t| t.trim_end().strip_suffix(QUOTES));
    inner.filter(|t| !t.contains(QUOTES)).map_or(text, |t| t.trim_matches('\n'))
}

const QUOTES: &str = "\"\"\"";

/// Whether Enter behind `text` begins another line: inside quotes that are not closed.
fn is_open(text: &str) -> bool {
    text.strip_prefix(QUOTES).is_some_and(|rest| !rest.contains(QUOTES))
}

/// Whether the line before the cursor ends with one backslash; two are meant as they are.
fn is_continued(before: &str) -> bool {
    before.ends_with('\\') && !before.ends_with("\\\\")
}

/// `text` without the backslashes that began another line.
fn joined(text: &str, continued: &[String]) -> String {
    let mut continued = continued.iter().peekable();
    let line = |line: &str| match continued.next_if(|c| *c == line) {
        Some(_) => line[..line.len() - 1].to_owned(),
        None => line.to_owned(),
    };
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

fn lock(continued: &Continued) -> MutexGuard<'_, Vec<String>> {
    continued.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Enter(Continued);

impl ConditionalEventHandler for Enter {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, ctx: &EventContext<'_>) -> Option<Cmd> {
        let (text, at) = (ctx.line(), ctx.pos());
        Some(if is_open(text) {
            Cmd::Newline
        } else if at == text.len() && is_continued(text) {
            lock(&self.0).push(text.rsplit('\n').next().unwrap_or_default().to_owned());
            Cmd::Newline
        } else {
            Cmd::AcceptLine
        })
    }
}

struct Interrupt(Arc<AtomicBool>);

impl ConditionalEventHandler for Interrupt {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, ctx: &EventContext<'_>) -> Option<Cmd> {
        self.0.store(ctx.line().is_empty(), Ordering::Relaxed);
        Some(Cmd::Interrupt)
    }
}

fn unusable(e: ReadlineError) -> Error {
    Error::new(Code::Io, format!("the terminal: {e}")).fix("q4 chat < FILE, one message a line")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_hold_lines_together_and_a_backslash_begins_one() {
        assert!(
            is_open("\"\"\"") && is_open("\"\"\"a\nb") && !is_open("\"\"\"a\"\"\"") && !is_open("a\"\"\"")
        );
        assert!(is_continued("a\\") && !is_continued("a\\\\") && !is_continued("a"));
        let continued = ["a\\".to_owned(), "b\\".to_owned()];
        assert_eq!(joined("a\\\npasted\\\nb\\\nb\\\nc", &continued), "a\npasted\\\nb\nb\\\nc");
        for (typed, meant) in [
            ("\"\"\"\na\n\nb\n\"\"\"", "a\n\nb"),
            ("\"\"\"a\"\"\" ", "a"),
            ("\"\"\"Doc.\"\"\"\nimport os", "\"\"\"Doc.\"\"\"\nimport os"),
            ("\"\"\"a\"\"\"\nb = \"\"\"c\"\"\"", "\"\"\"a\"\"\"\nb = \"\"\"c\"\"\""),
            ("\"\"\"", "\"\"\""),
            ("say \"\"\"", "say \"\"\""),
        ] {
            assert_eq!(unquoted(typed), meant);
        }
    }
}
