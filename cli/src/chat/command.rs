//! What a line of a conversation means: a message, or a command that begins with a slash.
use std::fmt::Write;

/// Name, arguments and meaning of every command, for a terminal of forty columns.
const COMMANDS: [(&str, &str, &str); 12] = [
    ("help", "", "this list"),
    ("undo", "", "drop the last exchange"),
    ("retry", "", "answer the last one anew"),
    ("reset", "", "forget the conversation"),
    ("system", "TEXT", "reset, new system message"),
    ("think", "on|off", "think before answering"),
    ("params", "...", "show or set sampling"),
    ("stats", "", "speed, and room left"),
    ("save", "FILE", "write the conversation"),
    ("save!", "FILE", "the same, overwriting"),
    ("load", "FILE", "go on with a saved one"),
    ("exit", "", "leave, as Ctrl-D does"),
];

/// What a line means.
#[derive(Debug, PartialEq, Eq)]
pub enum Command<'a> {
    /// A message to the model.
    Say(&'a str),
    /// An empty line.
    Nothing,
    /// The list.
    Help,
    /// Forget everything but the system message.
    Reset,
    /// Forget everything and begin with this system message.
    System(&'a str),
    /// Drop the last exchange.
    Undo,
    /// Answer the last message anew.
    Retry,
    /// Whether to think; shown where it is not said.
    Think(Option<bool>),
    /// Settings to change; shown where there are none.
    Params(&'a str),
    /// Speed and room.
    Stats,
    /// Write to a file, over one that exists where `over` is set.
    Save {
        /// The file.
        path: &'a str,
        /// Replace it.
        over: bool,
    },
    /// Go on with a file.
    Load(&'a str),
    /// Leave.
    Exit,
    /// Not a command.
    Unknown(&'a str),
}

impl<'a> Command<'a> {
    /// Reads a line. Two slashes at its beginning are one that is part of a message.
    pub fn of(line: &'a str) -> Self {
        if line.trim().is_empty() {
            return Self::Nothing;
        }
        let Some(rest) = line.strip_prefix('/') else { return Self::Say(line) };
        if rest.starts_with('/') {
            return Self::Say(rest);
        }
        let (name, argument) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        match (name, argument.trim()) {
            ("help" | "?", "") => Self::Help,
            ("reset" | "clear", "") => Self::Reset,
            ("exit" | "quit" | "bye", "") => Self::Exit,
            ("undo", "") => Self::Undo,
            ("retry", "") => Self::Retry,
            ("stats", "") => Self::Stats,
            ("think", "") => Self::Think(None),
            ("think", "on") => Self::Think(Some(true)),
            ("think", "off") => Self::Think(Some(false)),
            ("params", settings) => Self::Params(settings),
            ("system", text) if !text.is_empty() => Self::System(text),
            ("save", path) if !path.is_empty() => Self::Save { path, over: false },
            ("save!", path) if !path.is_empty() => Self::Save { path, over: true },
            ("load", path) if !path.is_empty() => Self::Load(path),
            _ => Self::Unknown(line),
        }
    }
}

/// Every command in a few words, for one line.
pub fn names() -> String {
    let mut text = String::new();
    for (name, arguments, _) in COMMANDS {
        let comma = if text.is_empty() { "" } else { ", " };
        let space = if arguments.is_empty() { "" } else { " " };
        // Writing to a string cannot fail.
        let _ = write!(text, "{comma}/{name}{space}{arguments}");
    }
    text
}

/// The answer to `/help`.
pub fn help() -> String {
    let mut text = String::new();
    for (name, arguments, meaning) in COMMANDS {
        let _ = writeln!(text, "{:<15}{meaning}", format!("/{name} {arguments}"));
    }
    text + "\
//TEXT         send /TEXT

/params temperature 0.7 top-p 0.9 sets
what is named. Several lines: end one
with \\, press Alt-Enter, or put \"\"\"
before and after; a paste is one, too.
Ctrl-C stops an answer. Up and Ctrl-R
find what was typed.
"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_from_messages() {
        assert_eq!(Command::of("Who are you?"), Command::Say("Who are you?"));
        assert_eq!(Command::of(" /not a command"), Command::Say(" /not a command"));
        assert_eq!(Command::of("//etc/passwd"), Command::Say("/etc/passwd"));
        assert_eq!(Command::of("  "), Command::Nothing);
        assert_eq!(Command::of("/system  be brief "), Command::System("be brief"));
        assert_eq!(Command::of("/reset"), Command::Reset);
        assert_eq!(Command::of("/save! a b.json"), Command::Save { path: "a b.json", over: true });
        assert_eq!(Command::of("/params"), Command::Params(""));
        for bad in ["/system", "/reset now", "/", "/etc/passwd", "/save", "/think maybe", "/undo\nx"] {
            assert_eq!(Command::of(bad), Command::Unknown(bad));
        }
    }

    #[test]
    fn every_command_of_the_list_is_one() {
        for (name, arguments, _) in COMMANDS {
            let line = match arguments {
                "" | "..." => format!("/{name}"),
                "on|off" => format!("/{name} on"),
                other => format!("/{name} {other}"),
            };
            assert!(!matches!(Command::of(&line), Command::Unknown(_) | Command::Say(_)), "{line}");
            assert!(help().contains(&format!("/{name} ")));
        }
        assert!(help().lines().all(|line| line.len() <= 40), "{}", help());
    }
}
