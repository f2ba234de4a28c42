//! What holds a conversation, whoever answers: lines are read, commands obeyed, messages said.
use super::command::{self, Command};
use super::editor::{Editor, Typed};
use crate::conversation::{Saved, typed_path};
use crate::input;
use crate::report::{Outcome, Report, error, stderr};
use crate::signals;
use q4_core::{Code, Error, Result};
use q4_model::template::Message;
use std::io::{self, IsTerminal};

/// What came of a message.
#[derive(PartialEq, Eq)]
pub enum Said {
    /// The answer is in the conversation.
    Answered,
    /// Ctrl-C; what there was of an answer is kept.
    Interrupted,
    /// Ctrl-C before there was anything.
    Dropped,
}

/// Who answers, and what was said so far. On an error the conversation is as it was, unless the error says
/// what was kept.
pub trait Talk {
    /// Where results go.
    fn report(&self) -> &Report;
    /// Somebody looks and types.
    fn is_person(&self) -> bool;
    /// Everything said.
    fn messages(&self) -> &[Message];
    /// Puts `messages` in the place of those so far.
    fn set_messages(&mut self, messages: Vec<Message>) -> Result<()>;
    /// Whether the same question gets the same answer.
    fn is_greedy(&self) -> bool;
    /// What is used of the room that is known, to be put behind a clause.
    fn room(&self) -> String;
    /// The speed of the last answer, if there was one.
    fn stats(&self) -> Option<String>;
    /// The conversation as a file has it.
    fn saved(&self) -> Saved;
    /// Says `message` and writes the answer. Without a person, Ctrl-C ends the program.
    fn say(&mut self, message: &str) -> Result<Said>;
    /// Whether to think; shown where it is not said.
    fn think(&mut self, wish: Option<bool>) -> Result<()>;
    /// Sets how answers are drawn, and shows it.
    fn set(&mut self, settings: &str) -> Result<()>;
    /// Goes on with a conversation from a file. On an error, this one goes on.
    fn take_up(&mut self, saved: &Saved) -> Result<()>;
}

/// Whether somebody looks and types.
pub fn is_person() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Says `messages`, then what is typed or comes from a pipe, until somebody leaves.
pub fn hold(talk: &mut dyn Talk, messages: &[String], history: bool) -> Result<Outcome> {
    if talk.is_person() { with_person(talk, messages, history) } else { with_pipe(talk, messages) }
}

fn with_person(talk: &mut dyn Talk, messages: &[String], history: bool) -> Result<Outcome> {
    let mut editor = Editor::new(history, talk.report())?;
    let _talking = signals::talking();
    for message in messages {
        stderr(&format!("> {message}\n"));
        match talk.say(message) {
            Ok(Said::Answered) => {}
            Ok(_) => break,
            Err(e) => {
                error(&e, false);
                break;
            }
        }
    }
    let mut was_warned = false;
    loop {
        let line = match editor.read(talk.report())? {
            Typed::Text(line) => line,
            Typed::End => return Ok(Outcome::Done),
            Typed::Interrupt { empty } if empty && was_warned => return Ok(Outcome::Interrupted),
            Typed::Interrupt { empty } => {
                if empty {
                    stderr("Ctrl-D or /exit leaves, and so does Ctrl-C once more.\n");
                }
                was_warned = empty;
                continue;
            }
        };
        was_warned = false;
        match obey(talk, Command::of(&line)) {
            Ok(true) => {}
            Ok(false) => return Ok(Outcome::Done),
            // There is still a conversation, so a person can go on.
            Err(e) => error(&e, false),
        }
    }
}

/// One message a line. The first error ends it.
fn with_pipe(talk: &mut dyn Talk, messages: &[String]) -> Result<Outcome> {
    for message in messages {
        talk.say(message)?;
    }
    while let Some(line) = input::line()? {
        if !obey(talk, Command::of(&line))? {
            break;
        }
    }
    Ok(Outcome::Done)
}

/// Does what a line means; false where it ends the conversation.
fn obey(talk: &mut dyn Talk, command: Command<'_>) -> Result<bool> {
    match command {
        Command::Say(said) => {
            talk.say(said)?;
        }
        Command::Nothing => {}
        Command::Help => stderr(&command::help()),
        Command::Reset => {
            let system = talk.messages().first().filter(|m| m.role == "system").cloned();
            talk.set_messages(system.into_iter().collect())?;
        }
        Command::System(text) => talk.set_messages(vec![Message::new("system", text)])?,
        Command::Undo => undo(talk)?,
        Command::Retry => retry(talk)?,
        Command::Think(wish) => talk.think(wish)?,
        Command::Params(settings) => talk.set(settings)?,
        Command::Stats => match talk.stats() {
            Some(stats) => stderr(&format!("{stats}\n")),
            None => stderr("no answer yet\n"),
        },
        Command::Save { path, over } => {
            let path = typed_path(path);
            talk.saved().write(&path, over)?;
            stderr(&format!("{}: {} messages\n", path.display(), talk.messages().len()));
        }
        Command::Load(path) => {
            let saved = Saved::read(&typed_path(path), talk.report())?;
            talk.take_up(&saved)?;
        }
        Command::Exit => return Ok(false),
        Command::Unknown(line) => {
            return Err(Error::new(Code::Usage, format!("{line}: no such command"))
                .need(command::names())
                .fix(format!("/{line} sends it as a message")));
        }
    }
    Ok(true)
}

fn undo(talk: &mut dyn Talk) -> Result<()> {
    let at = last_message(talk)?;
    let kept = talk.messages()[..at].to_vec();
    talk.set_messages(kept)?;
    let left = talk.messages().iter().filter(|m| m.role == "user").count();
    stderr(&format!("dropped; {left} before it{}\n", talk.room()));
    Ok(())
}

fn retry(talk: &mut dyn Talk) -> Result<()> {
    let at = last_message(talk)?;
    let before = talk.messages().to_vec();
    let message = before[at].content.clone();
    if talk.is_person() && talk.is_greedy() && at + 1 < before.len() {
        stderr("at temperature 0 the answer is the same; /params temperature 0.7 draws others\n");
    }
    talk.set_messages(before[..at].to_vec())?;
    let said = talk.say(&message);
    if !matches!(said, Ok(Said::Answered | Said::Interrupted)) {
        talk.set_messages(before)?;
    }
    said.map(drop)
}

/// Where the last exchange begins.
fn last_message(talk: &dyn Talk) -> Result<usize> {
    talk.messages().iter().rposition(|m| m.role == "user").ok_or_else(|| {
        Error::new(Code::Usage, "nothing has been said yet").need("a message in this conversation")
    })
}
