//! A person at a terminal.
use super::terminal::Terminal;
use crate::q4;
use rustix::process::Signal;
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use tempfile::TempDir;

/// Short answers, and nothing of other tests.
const QUICK: [&str; 4] = ["chat", "-n", "3", "--no-history"];

fn open(columns: u16, data: &Path, args: &[&str]) -> Terminal {
    let mut command = q4();
    command.args(args).env("XDG_DATA_HOME", data).current_dir(data);
    let mut terminal = Terminal::start(command, columns);
    terminal.prompt();
    terminal
}

/// Saves the conversation and returns its messages.
fn messages(terminal: &mut Terminal, dir: &TempDir) -> Vec<Value> {
    terminal.say("/save! said.json");
    let text = std::fs::read_to_string(dir.path().join("said.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["messages"].as_array().unwrap().clone()
}

/// What the user said.
fn said(terminal: &mut Terminal, dir: &TempDir) -> Vec<String> {
    let said = messages(terminal, dir).into_iter().filter(|m| m["role"] == "user");
    said.map(|m| m["content"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn lines_are_edited_and_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut t = open(80, dir.path(), &QUICK);
    let (home, end, left, delete, up) = ("\x1b[H", "\x1b[F", "\x1b[D", "\x1b[3~", "\x1b[A");
    t.say(&format!("ho are yo{home}W{end}x\x7fu?"));
    t.say(&format!("garbage words\x15one two\x17three{left}{left}{delete}\x01>\x05."));
    t.say(&format!("{up}{up} Now."));
    t.press("not this\x03");
    t.prompt();
    t.say(""); // nothing is left of it
    t.say("\x12>one");
    t.say("/save said.json"); // new, so it needs no exclamation mark
    assert_eq!(
        said(&mut t, &dir),
        ["Who are you?", ">one thre.", "Who are you? Now.", ">one thre."],
        "{}",
        t.text()
    );
    t.press("\x04");
    assert_eq!(t.end().code(), Some(0));
}

#[test]
fn several_lines_are_one_message_pasted_or_by_hand() {
    let dir = tempfile::tempdir().unwrap();
    let mut t = open(80, dir.path(), &QUICK);
    t.say("\x1b[200~//one\r\ntwo \\\nthree\n\x1b[201~");
    t.say("a\\\rb");
    t.say("x\x1b\ry");
    t.say("\"\"\"\rp\r\rq\r\"\"\"");
    t.say("//bin \\\\");
    assert_eq!(said(&mut t, &dir), ["/one\ntwo \\\nthree", "a\nb", "x\ny", "p\n\nq", "/bin \\\\"]);
    t.say("/nonsense");
    assert!(t.text().contains("//nonsense sends it as a message"), "{}", t.text());
    t.press("/exit\r");
    assert_eq!(t.end().code(), Some(0));
}

#[test]
fn wide_characters_take_two_columns_and_go_with_one_backspace() {
    let dir = tempfile::tempdir().unwrap();
    let mut t = open(40, dir.path(), &QUICK);
    let (row, _) = t.cursor();
    t.press("談談你\x7fUFO");
    t.until("the cursor behind seven columns", |t| t.cursor() == (row, 9));
    assert!(t.text().ends_with("> 談談UFO"), "{}", t.text());
    // Twenty-two more do not fit on the line: the second half of it begins another.
    t.press(&"我".repeat(22));
    t.until("the cursor on the next line", |t| t.cursor().0 == row + 1);
    t.press(&"\x7f".repeat(22));
    t.until("the cursor back", |t| t.cursor() == (row, 9));
    t.say("");
    assert_eq!(said(&mut t, &dir), ["談談UFO"]);
    t.press("\x04");
    assert_eq!(t.end().code(), Some(0));
}

#[test]
fn ctrl_c_stops_the_answer_and_then_the_conversation() {
    let dir = tempfile::tempdir().unwrap();
    // The slowest backend, so that there is an answer to interrupt.
    let args = ["chat", "--backend", "reference", "--ignore-eos", "--no-history"];
    let mut t = open(40, dir.path(), &args);
    t.press("Who are you?\r");
    t.until("an answer that begins", |t| {
        t.text().lines().last().is_some_and(|l| l.len() > 4 && !l.contains('>'))
    });
    t.press("\x03");
    t.see("[interrupted;");
    t.prompt();
    let kept = messages(&mut t, &dir);
    assert_eq!((kept.len(), &kept[1]["finish_reason"]), (2, &"interrupted".into()), "{kept:?}");
    let text = kept[1]["content"].as_str().unwrap();
    assert!(!text.is_empty() && t.text().replace('\n', "").contains(text.split(' ').next().unwrap()));
    t.say("/undo");
    assert_eq!(messages(&mut t, &dir).len(), 0);
    t.press("\x03");
    t.see("Ctrl-D or /exit leaves");
    t.prompt();
    t.press("\x03");
    assert_eq!(t.end().code(), Some(130));
}

#[test]
fn whatever_ends_it_leaves_the_terminal_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let mut t = open(80, dir.path(), &QUICK);
    t.press("half a line");
    t.see("half a line");
    assert!(!t.is_as_found(), "a line is being edited");
    t.kill(Signal::TERM);
    assert_eq!(t.end().signal(), Some(Signal::TERM.as_raw()));
}

#[test]
fn a_full_context_is_told_with_ways_out_and_survived() {
    let dir = tempfile::tempdir().unwrap();
    let mut t = open(40, dir.path(), &["chat", "--context", "48", "--ignore-eos", "--no-history"]);
    t.say("Who are you?");
    assert!(t.text().contains("[cut: all 48 positions are used;"), "{}", t.text());
    t.say("Who am I?");
    assert!(
        t.text().contains("Q4-E0212") && t.text().contains("/undo drops the last exchange"),
        "{}",
        t.text()
    );
    assert_eq!(said(&mut t, &dir), ["Who are you?"], "nothing is lost, and nothing half said");
    t.say("/params max-tokens 2");
    t.say("/undo");
    t.say("Who am I?");
    t.say("/stats");
    assert!(t.text().contains("of 48 positions"), "{}", t.text());
    assert_eq!(said(&mut t, &dir), ["Who am I?"]);
    assert!(t.text().contains("[cut after 2 tokens;"), "{}", t.text());
    t.press("\x04");
    assert_eq!(t.end().code(), Some(0));
}

#[test]
fn what_was_typed_is_offered_at_the_next_start_and_to_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["chat", "-n", "1"];
    let mut t = open(80, dir.path(), &args);
    t.say("談談UFO\\\rand more");
    t.press("\x04");
    assert_eq!(t.end().code(), Some(0));
    let file = dir.path().join("q4/chat-history");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let mut t = open(80, dir.path(), &args);
    t.press("\x1b[A");
    t.see("and more");
    t.press("\x03");
    t.prompt();
    t.press("\x04");
    t.end();
    let mut t = open(80, dir.path(), &[&args[..], &["--no-history"]].concat());
    t.say("\x1b[Anot kept");
    assert_eq!(said(&mut t, &dir), ["not kept"]);
    t.press("\x04");
    t.end();
    assert_eq!(std::fs::read_to_string(&file).unwrap().lines().count(), 1);
    // A folder that cannot be: told once, and no reason to stop.
    let mut command = q4();
    command.args(args).env("XDG_DATA_HOME", &file);
    let mut t = Terminal::start(command, 80);
    t.prompt();
    t.say("Who are you?");
    assert_eq!(t.text().matches("messages are not kept for the next time").count(), 1, "{}", t.text());
    t.press("\x04");
    assert_eq!(t.end().code(), Some(0));
}
