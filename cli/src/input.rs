//! Where text comes from: an option, a file, or standard input.
use crate::mistakes;
use q4_core::{Code, Error, Result};
use std::io::{self, BufRead, IsTerminal, Read};
use std::path::Path;

/// Bytes that a prompt, a file of turns or a data file may have.
const LIMIT: u64 = 16 << 20;

/// The text of `-p`, else all of standard input without the newline that ends it. A terminal is refused,
/// because waiting for a person who does not know it looks like a program that hangs. Errors name a command
/// of `verb` that works.
pub fn prompt(given: Option<&str>, verb: &str) -> Result<String> {
    text(given, "-p TEXT", &format!("q4 {verb} -p 'Who are you?'"))
}

/// The same for a text that is given as `option`; `fix` is a command that works.
pub fn text(given: Option<&str>, option: &str, fix: &str) -> Result<String> {
    if let Some(text) = given {
        return Ok(text.to_owned());
    }
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Err(Error::new(Code::Usage, "there is no prompt")
            .need(format!("{option}, or text on standard input"))
            .fix(fix));
    }
    let mut text = read("standard input", stdin.lock())?;
    if text.ends_with('\n') {
        text.truncate(text.len() - if text.ends_with("\r\n") { 2 } else { 1 });
    }
    if text.is_empty() {
        return Err(Error::new(Code::Usage, "standard input: an empty prompt").need("text").fix(fix));
    }
    Ok(text)
}

/// The name and text of a file of messages; `-` is standard input.
pub fn file(path: &Path) -> Result<(String, String)> {
    if path == Path::new("-") {
        let name = "standard input";
        return read(name, io::stdin().lock()).map(|text| (name.to_owned(), text));
    }
    let name = path.display().to_string();
    let text = read(&name, std::fs::File::open(path).map_err(|e| unreadable(path, &e))?)?;
    Ok((name, text))
}

/// The lines of `text`, empty ones left out. Errors name where it is from.
pub fn turns(name: &str, text: &str) -> Result<Vec<String>> {
    let lines: Vec<_> = text.lines().filter(|l| !l.trim().is_empty()).map(str::to_owned).collect();
    if lines.is_empty() {
        return Err(Error::new(Code::Usage, format!("{name}: no turns")).need("one user message a line"));
    }
    Ok(lines)
}

/// The text of a data file; `-` is standard input. [`Code::Container`] for what is no text or too long,
/// [`Code::Io`] for what cannot be read.
pub fn data(path: &Path) -> Result<String> {
    let (name, bytes) = if path == Path::new("-") {
        ("standard input".to_owned(), bytes("standard input", io::stdin().lock())?)
    } else {
        let name = path.display().to_string();
        let file = std::fs::File::open(path).map_err(|e| unreadable(path, &e))?;
        let bytes = bytes(&name, file)?;
        (name, bytes)
    };
    let bytes = bytes.ok_or_else(|| too_long(Code::Container, &name))?;
    String::from_utf8(bytes).map_err(|e| {
        Error::new(Code::Container, format!("{name}: not UTF-8"))
            .need("text")
            .have(format!("another byte at {}", e.utf8_error().valid_up_to()))
    })
}

/// The next line without its end; `None` at the end of standard input.
pub fn line() -> Result<Option<String>> {
    let mut bytes = Vec::new();
    let mut stdin = io::stdin().lock().take(LIMIT);
    let read = stdin.read_until(b'\n', &mut bytes).map_err(|e| failed("standard input", &e))?;
    if read == 0 {
        return Ok(None);
    }
    let text = String::from_utf8(bytes).map_err(|_| not_text("standard input"))?;
    Ok(Some(text.trim_end_matches(['\n', '\r']).to_owned()))
}

fn read(name: &str, source: impl Read) -> Result<String> {
    let bytes = bytes(name, source)?.ok_or_else(|| too_long(Code::Usage, name))?;
    String::from_utf8(bytes).map_err(|_| not_text(name))
}

/// All of `source`; `None` when it is too long.
fn bytes(name: &str, source: impl Read) -> Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    source.take(LIMIT + 1).read_to_end(&mut bytes).map_err(|e| failed(name, &e))?;
    Ok((bytes.len() as u64 <= LIMIT).then_some(bytes))
}

fn too_long(code: Code, name: &str) -> Error {
    Error::new(code, format!("{name}: too long")).need(format!("at most {LIMIT} bytes"))
}

fn not_text(name: &str) -> Error {
    Error::new(Code::Usage, format!("{name}: not UTF-8")).need("text")
}

fn failed(name: &str, e: &io::Error) -> Error {
    Error::new(Code::Io, format!("{name}: {e}"))
}

fn unreadable(path: &Path, e: &io::Error) -> Error {
    let error = failed(&path.display().to_string(), e);
    match e.kind() {
        io::ErrorKind::NotFound => error.fix(mistakes::file(path)),
        io::ErrorKind::IsADirectory => error.need("a file").have("a folder"),
        _ => error,
    }
}
