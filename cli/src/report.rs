//! How results, warnings and errors are written.
//!
//! Results go to stdout and nothing else does, so that a script can rely on every byte there.
use crate::args::{ColorChoice, GlobalArgs};
use indicatif::{ProgressBar, ProgressStyle};
use q4_core::{Code, Error, Result};
use serde::Serialize;
use std::borrow::Cow;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Target of the texts of `-v`, which are for people and stand alone on their lines.
pub const DETAIL: &str = "q4::detail";

/// How a verb ended when its result was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing to complain about.
    Done,
    /// The result itself says that something is wrong; the process ends with the status of this code.
    Found(Code),
    /// Somebody ended it with Ctrl-C.
    Interrupted,
}

impl Outcome {
    /// Exit status: 130 after Ctrl-C, as shells have it.
    pub fn exit(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Found(code) => code.exit(),
            Self::Interrupted => 130,
        }
    }
}

/// Writes in the form the user asked for.
pub struct Report {
    json: bool,
    quiet: bool,
    color: bool,
}

impl Report {
    /// The form `--json`, `-q` and `--color` ask for.
    pub fn new(global: &GlobalArgs) -> Self {
        Self { json: global.json, quiet: global.quiet, color: color_stderr(global.color) }
    }

    /// Results are JSON documents.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// Bars and prompts make sense: a person looks at stderr and did not ask for silence.
    pub fn is_interactive(&self) -> bool {
        !self.quiet && io::stderr().is_terminal()
    }

    /// One JSON document on one line of stdout, `"schema": "q4.<verb>/1"` first. `body` must be a struct or a
    /// map.
    pub fn document(&self, verb: &str, body: &impl Serialize) -> Result<()> {
        stdout(&document(verb, body)?)
    }

    /// [`document`](Self::document) for who asked for JSON, [`text`](Self::text) for others.
    pub fn result(&self, verb: &str, body: &impl Serialize, text: impl FnOnce() -> String) -> Result<()> {
        if self.json { self.document(verb, body) } else { self.text(&text()) }
    }

    /// A document, written as it is made: for a document that is as large as what it tells of.
    pub fn long_document(&self, verb: &str, body: &impl Serialize) -> Result<()> {
        check_stdout()?;
        let mut out = BufWriter::new(io::stdout().lock());
        let written = serde_json::to_writer(&mut out, &enveloped(verb, body)).map_err(io::Error::from);
        written.and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()).map_err(unwritten)
    }

    /// Text on stdout, [plain].
    pub fn text(&self, text: &str) -> Result<()> {
        stdout(&plain(text))
    }

    /// One line on stderr that the user should act on; `-q` hides it.
    pub fn warn(&self, text: &str) {
        if !self.quiet {
            self.insist(text);
        }
    }

    /// One line on stderr that nothing hides: what is computed is not what a user would expect.
    pub fn insist(&self, text: &str) {
        let (on, off) = if self.color { ("\x1b[33m", "\x1b[0m") } else { ("", "") };
        stderr(&format!("{on}warning:{off} {}\n", plain(text)));
    }

    /// A progress bar on stderr, hidden unless a person looks. The caller sets length and position and clears
    /// it.
    pub fn bar(&self, what: &'static str) -> ProgressBar {
        if !self.is_interactive() {
            return ProgressBar::hidden();
        }
        let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}");
        let bar = ProgressBar::new(0).with_message(what);
        style.map_or(bar.clone(), |style| bar.with_style(style))
    }

    /// One line on stderr for those who asked with `-v`.
    pub fn detail(&self, text: &str) {
        tracing::info!(target: DETAIL, "{}", plain(text));
    }
}

/// Text that tells a terminal nothing: names of tensors and files are untrusted. Control characters but
/// newline and tab, and those that turn the direction of what is read, are written as `\u{..}`. What a model
/// answers is not text of ours.
pub fn plain(text: &str) -> Cow<'_, str> {
    let steers = |c: char| {
        c.is_control() && !matches!(c, '\n' | '\t')
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(steers) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if steers(c) { shown.extend(c.escape_unicode()) } else { shown.push(c) }
    }
    Cow::Owned(shown)
}

/// Writes to stdout at once. A closed pipe ends the process; any other failure is [`Code::Io`], and so is a
/// stdout that was closed before the program began: the standard library puts the null device in its place.
pub fn stdout(text: &str) -> Result<()> {
    check_stdout()?;
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(unwritten)
}

/// Whether nothing was open as stdout when the program began.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Runs before `main`: the standard library opens the null device for a missing stdout before `main` could
/// look.
#[cfg(any(target_os = "linux", target_os = "macos"))]
#[used]
// SAFETY: the loader calls what stands here once with no other thread running; the function makes one system
// call.
#[cfg_attr(target_os = "linux", unsafe(link_section = ".init_array"))]
#[cfg_attr(target_os = "macos", unsafe(link_section = "__DATA,__mod_init_func"))]
static LOOK: extern "C" fn() = look;

#[cfg(any(target_os = "linux", target_os = "macos"))]
extern "C" fn look() {
    // SAFETY: asks about a descriptor and changes nothing.
    let open = unsafe { libc::fcntl(1, libc::F_GETFD) } != -1;
    CLOSED.store(!open, Ordering::Relaxed);
}

fn check_stdout() -> Result<()> {
    if CLOSED.load(Ordering::Relaxed) {
        return Err(Error::new(Code::Io, "standard output: closed").fix("q4 ... > FILE"));
    }
    Ok(())
}

fn unwritten(e: io::Error) -> Error {
    let error = Error::new(Code::Io, format!("standard output: {e}"));
    if e.kind() == io::ErrorKind::StorageFull { error.fix("free some space") } else { error }
}

/// Writes to stderr; when even that fails there is nobody to tell.
pub fn stderr(text: &str) {
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// An error as text on stderr and, with `json`, as a document on stdout.
pub fn error(e: &Error, json: bool) {
    stderr(&format!("{}\n", plain(&e.to_string())));
    if json {
        error_document(e);
    }
}

/// The document alone.
pub fn error_document(e: &Error) {
    if let Ok(text) = document("error", e) {
        // The exit status still tells when stdout cannot.
        let _ = stdout(&text);
    }
}

/// Whether stderr takes colours: as asked, else on a terminal unless `NO_COLOR` is set.
pub fn color_stderr(choice: ColorChoice) -> bool {
    match choice {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => {
            let refused = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
            io::stderr().is_terminal() && !refused
        }
    }
}

fn document(verb: &str, body: &impl Serialize) -> Result<String> {
    let text = serde_json::to_string(&enveloped(verb, body))
        .map_err(|e| Error::new(Code::Internal, format!("the report of q4 {verb}: {e}")))?;
    Ok(text + "\n")
}

fn enveloped<T: Serialize>(verb: &str, body: &T) -> impl Serialize {
    #[derive(Serialize)]
    struct Document<'a, T: Serialize> {
        schema: String,
        #[serde(flatten)]
        body: &'a T,
    }
    Document { schema: format!("q4.{verb}/1"), body }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_steers_a_terminal_is_written() {
        assert_eq!(plain("a\tb\n談"), "a\tb\n談");
        assert_eq!(plain("\u{1b}[2Jx\r\u{7f}\u{9b}\u{202e}"), r"\u{1b}[2Jx\u{d}\u{7f}\u{9b}\u{202e}");
    }

    #[test]
    fn the_schema_comes_first_and_every_part_of_an_error_is_there() {
        let e = Error::new(Code::TensorShape, "w").need("[4]").fix("export again");
        let text = document("error", &&e).expect("serialises");
        assert_eq!(
            text,
            "{\"schema\":\"q4.error/1\",\"code\":\"Q4-E0204\",\"exit\":4,\"what\":\"w\",\"need\":\"[4]\",\
             \"have\":null,\"fix\":\"export again\"}\n"
        );
    }
}
