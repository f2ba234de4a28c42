//! Pages to look at and to attach to an issue: one file each, without scripts, fonts or anything that is
//! fetched, readable in the dark, on a phone and on paper.
//!
//! Names of files, tensors and devices are untrusted: all that is shown is escaped, and what would turn the
//! direction of a line is spelled out.
mod chart;
mod grid;

pub use chart::{Chart, Point, Series};
pub use grid::{Grid, Module};

use crate::report::plain;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use q4_core::{Code, Error, Result};
use q4_model::checkpoint::Checkpoint;
use std::io::{Read, Write};
use std::path::Path;

/// What the page says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// Nothing to complain about.
    Good,
    /// Something to look at.
    Odd,
    /// Something is wrong.
    Bad,
}

impl Mood {
    fn class(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Odd => "odd",
            Self::Bad => "bad",
        }
    }
}

/// A page before it is written.
pub struct Page<'a> {
    /// `verify`.
    pub verb: &'static str,
    /// What it is about: a model, a machine.
    pub subject: &'a str,
    /// What came out, in a few words.
    pub verdict: (Mood, String),
    /// Names and values.
    pub facts: Vec<(&'static str, String)>,
    /// Title, a sentence on how to read it, and what there is to see.
    pub sections: Vec<(&'static str, String, Markup)>,
}

impl Page<'_> {
    /// Writes the page to `path`, whole or not at all: over a page of that name, or the one that a link leads
    /// to. What is no file, as `/dev/stdout`, is written to.
    ///
    /// # Errors
    /// [`Code::Usage`] for a file that is no page, [`Code::Io`].
    pub fn write(&self, path: &Path) -> Result<()> {
        let failed = |e: std::io::Error| Error::new(Code::Io, format!("{}: {e}", path.display()));
        let text = self.render();
        let path = &std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
            return std::fs::write(path, text).map_err(failed);
        }
        if !may_be_replaced(path) {
            return Err(Error::new(Code::Usage, format!("--html {}: exists", path.display()))
                .need("a path that is free, or a page to replace")
                .have("a file of something else"));
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let mut new = tempfile::Builder::new();
        // Others may read it, as they may what editors and `>` make.
        #[cfg(unix)]
        new.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let mut file =
            new.prefix(".q4-page").tempfile_in(folder.unwrap_or(Path::new("."))).map_err(failed)?;
        file.write_all(text.as_bytes()).map_err(failed)?;
        file.persist(path).map(drop).map_err(|e| failed(e.error))
    }

    fn render(&self) -> String {
        let (mood, verdict) = &self.verdict;
        let page = html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="color-scheme" content="light dark";
                    title { "q4 " (self.verb) ": " (said(self.subject)) }
                    style { (PreEscaped(include_str!("page.css"))) }
                }
                body { main {
                    header.(mood.class()) {
                        p { "q4 " (self.verb) }
                        h1 { (said(self.subject)) }
                        strong { (said(verdict)) }
                    }
                    dl { @for (name, value) in &self.facts { div { dt { (name) } dd { (said(value)) } } } }
                    @for (title, lead, body) in &self.sections {
                        section { h2 { (title) } @if !lead.is_empty() { p { (said(lead)) } } (body) }
                    }
                    footer { "q4 " (env!("CARGO_PKG_VERSION")) }
                } }
            }
        };
        page.into_string() + "\n"
    }
}

/// What every page begins with.
const BEGINS: &[u8] = b"<!DOCTYPE html>";

/// Whether nothing is lost with `path`: the model that was looked at has its name on the same line.
fn may_be_replaced(path: &Path) -> bool {
    let mut first = [0; BEGINS.len()];
    match std::fs::File::open(path).and_then(|mut file| file.read(&mut first)) {
        Ok(len) => len == 0 || first[..len] == *BEGINS,
        Err(e) => e.kind() == std::io::ErrorKind::NotFound,
    }
}

/// The layer that a module is in, and its name there.
pub fn place(checkpoint: &Checkpoint, name: &str) -> (Option<usize>, String) {
    let names = &checkpoint.config().arch.names;
    let layer = names.layer_of(name);
    let short = layer.and_then(|i| name.strip_prefix(&names.of(i, ""))).unwrap_or(name);
    // `self_attn.q_proj` says no more.
    (layer, short.rsplit('.').next().unwrap_or(short).to_owned())
}

/// Text that is escaped as it is shown, and steers nothing.
pub fn said(text: &str) -> Markup {
    html! { (plain(text)) }
}

/// A cell of more bytes is wrapped.
const LONG: usize = 60;

/// A table, some of whose columns are `numbers`; the first ones are those that are looked for.
pub fn table(head: &[&str], numbers: &[usize], rows: impl IntoIterator<Item = Vec<String>>) -> Markup {
    let class = |i: usize| numbers.contains(&i).then_some("number");
    // Sentences are wrapped, names are not.
    let of = |i: usize, cell: &str| if cell.len() > LONG { Some("text") } else { class(i) };
    html! {
        div.scroll tabindex="0" { table {
            thead { tr {
                @for (i, name) in head.iter().enumerate() { th scope="col" class=[class(i)] { (name) } }
            } }
            tbody { @for row in rows {
                tr { @for (i, cell) in row.iter().enumerate() { td class=[of(i, cell)] { (said(cell)) } } }
            } }
        } }
    }
}

/// A picture with its numbers beside it, or below where there is no room.
pub fn beside(picture: &Markup, numbers: &Markup) -> Markup {
    html! { div.pair { (picture) (numbers) } }
}

#[cfg(test)]
mod tests {
    use super::grid::Cell;
    use super::*;

    const HOSTILE: &str = "</style><script>alert(1)</script><img src=x onerror=\"a()\">'\u{202e}\u{1b}[2J";

    #[test]
    fn what_is_shown_is_escaped_and_nothing_is_fetched() {
        let chart = Chart {
            title: HOSTILE.into(),
            across: HOSTILE.into(),
            up: "dB".into(),
            ticks: vec![HOSTILE.into(), "1".into()],
            log: false,
            limit: Some((2.0, HOSTILE.into())),
            series: vec![Series {
                name: HOSTILE.into(),
                points: vec![Point { at: 0, value: 1.0, says: HOSTILE.into() }],
            }],
        };
        let cell = Cell { kind: 0, says: HOSTILE.into() };
        let grid = Grid {
            title: HOSTILE.into(),
            rows: vec![HOSTILE.into()],
            columns: vec![HOSTILE.into()],
            kinds: vec![HOSTILE.into()],
            cells: vec![vec![Some(cell)]],
        };
        let page = Page {
            verb: "verify",
            subject: HOSTILE,
            verdict: (Mood::Bad, HOSTILE.into()),
            facts: vec![("model", HOSTILE.into())],
            sections: vec![(
                "Layers",
                HOSTILE.into(),
                beside(
                    &html! { (chart.svg()) (grid.svg()) },
                    &table(&["name"], &[], [vec![HOSTILE.to_owned()]]),
                ),
            )],
        };
        let text = page.render();
        for bad in ["<script", "<img", "onerror=\"", "\u{202e}", "\u{1b}", "http", "url(", "@import"] {
            assert!(!text.contains(bad), "{bad} in {text}");
        }
        assert_eq!(text.matches("<style").count() + text.matches("</style>").count(), 2);
        assert!(text.contains("&lt;script&gt;") && text.contains(r"\u{202e}"));
    }

    #[test]
    fn a_page_is_written_whole_over_an_older_one() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("page.html");
        let page = |subject| Page {
            verb: "verify",
            subject,
            verdict: (Mood::Good, "fine".into()),
            facts: Vec::new(),
            sections: Vec::new(),
        };
        page("first").write(&path).expect("written");
        page("second").write(&path).expect("written");
        let text = std::fs::read_to_string(&path).expect("there");
        assert!(text.starts_with("<!DOCTYPE html>") && text.ends_with("</html>\n"));
        assert!(text.contains("second") && !text.contains("first"));
        let model = dir.path().join("model.safetensors");
        std::fs::write(&model, "not a page").expect("written");
        let e = page("third").write(&model).expect_err("a model is no page");
        assert_eq!((e.code(), std::fs::read(&model).expect("there")), (Code::Usage, b"not a page".into()));
        std::fs::remove_file(&model).expect("removed");
        assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 1);
        #[cfg(unix)]
        {
            let link = dir.path().join("link.html");
            std::os::unix::fs::symlink(&path, &link).expect("a link");
            page("linked").write(&link).expect("written");
            assert!(link.is_symlink() && std::fs::read_to_string(&path).expect("there").contains("linked"));
            page("nowhere").write(Path::new("/dev/null")).expect("written");
            assert!(!Path::new("/dev/null").is_file());
        }
        assert_eq!(page("fourth").write(dir.path()).expect_err("a folder").code(), Code::Io);
        let e = page("third").write(&dir.path().join("none/page.html")).expect_err("no folder");
        assert_eq!(e.code(), Code::Io);
    }
}
