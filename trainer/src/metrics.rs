//! Numbers of a run as NDJSON, a line as it happens, and as one HTML page with curves.
//!
//! A line is `{"kind": "train", "step": 12, "loss": 1.5, ...}`; `kind` is `train`, `eval`, `behaviour` or
//! what the caller names, and every other field is a number or a text. The page draws the fields it knows.
use q4_core::{Code, Error, Result};
use serde_json::{Map, Number, Value};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

mod events;
mod page;
mod svg;

pub use events::Events;
pub use page::page;

/// An open file of metrics.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
    aside: Option<PathBuf>,
    wall_s: f64,
}

/// Where the run stands that goes on with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct After {
    /// Optimiser steps taken.
    pub step: u64,
    /// What follows this step is done again.
    pub owed: bool,
}

impl Metrics {
    /// Opens or creates the file. A run that goes on drops the lines it is about to write again, and a last
    /// line that a crash cut off. A run that begins sets a file with lines aside, under another name.
    pub fn open(path: &Path, after: Option<After>) -> Result<Self> {
        let failed = |e: std::io::Error| failed(path, &e);
        let (mut aside, mut wall_s) = (None, 0.0f64);
        match after {
            Some(After { step, owed }) if path.exists() => {
                let stays = |r: &&Record| r.step < step || r.step == step && !(owed && r.kind != "train");
                let records = read(path).map_err(|e| e.fix("move the file away; the run begins another"))?;
                let kept: Vec<_> = records.iter().filter(stays).collect();
                wall_s = kept.iter().filter_map(|r| r.number("wall_s")).fold(0.0, f64::max);
                let partial = path.with_extension("ndjson.partial");
                fs::write(&partial, kept.iter().map(|r| format!("{}\n", r.line)).collect::<String>())
                    .map_err(failed)?;
                fs::rename(&partial, path).map_err(failed)?;
            }
            None if fs::metadata(path).is_ok_and(|m| m.len() > 0) => {
                let name = |i: u32| path.with_extension(format!("{i}.ndjson"));
                let free = (1..).map(name).find(|p| fs::symlink_metadata(p).is_err());
                if let Some(free) = &free {
                    fs::rename(path, free).map_err(failed)?;
                }
                aside = free;
            }
            _ => {}
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
        Ok(Self { path: path.to_owned(), file, aside, wall_s })
    }

    /// Where the file of an earlier run is now.
    pub fn aside(&self) -> Option<&Path> {
        self.aside.as_deref()
    }

    /// The largest `wall_s` of the lines that were kept; 0 without one.
    pub fn wall_s(&self) -> f64 {
        self.wall_s
    }

    /// Appends a line of numbers.
    pub fn log(&mut self, kind: &str, step: u64, fields: &[(&str, f64)]) -> Result<()> {
        self.log_values(kind, step, fields.iter().map(|(name, x)| ((*name).to_owned(), number(*x))).collect())
    }

    /// Appends a line with any fields; all of it or nothing.
    pub fn log_values(&mut self, kind: &str, step: u64, fields: Map<String, Value>) -> Result<()> {
        let mut object = Map::from_iter([("kind".to_owned(), kind.into()), ("step".to_owned(), step.into())]);
        object.extend(fields);
        let line = format!("{}\n", Value::Object(object));
        let before = self.file.metadata().map_err(|e| failed(&self.path, &e))?.len();
        self.file.write_all(line.as_bytes()).map_err(|e| {
            // A full disk may have taken half of it.
            let _ = self.file.set_len(before);
            failed(&self.path, &e)
        })
    }

    /// Writes the page of everything so far; the old page is replaced in one go.
    pub fn write_page(&self, path: &Path, title: &str, config: &str) -> Result<()> {
        let html = page(title, config, &read(&self.path)?);
        let partial = path.with_extension("html.partial");
        fs::write(&partial, html).map_err(|e| failed(&partial, &e))?;
        fs::rename(&partial, path).map_err(|e| failed(path, &e))
    }
}

/// A number as JSON has it: NaN and infinity become texts.
pub fn number(x: f64) -> Value {
    Number::from_f64(x).map_or_else(|| Value::String(x.to_string()), Value::Number)
}

/// One line of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Optimiser steps taken.
    pub step: u64,
    /// What the line is about.
    pub kind: String,
    /// All fields.
    pub fields: Map<String, Value>,
    line: String,
}

impl Record {
    /// A field that is a number.
    pub fn number(&self, name: &str) -> Option<f64> {
        self.fields.get(name)?.as_f64()
    }
}

/// The lines of a file; one without its end, as a crash leaves it, is left out.
///
/// # Errors
/// [`Code::Container`] with the line for anything else that is no record.
pub fn read(path: &Path) -> Result<Vec<Record>> {
    let mut reader = BufReader::new(File::open(path).map_err(|e| Error::io(path, &e))?);
    let mut records = Vec::new();
    for number in 1.. {
        let mut line = Vec::new();
        reader.read_until(b'\n', &mut line).map_err(|e| failed(path, &e))?;
        let Some(line) = line.strip_suffix(b"\n") else { break };
        let record = parse(line).ok_or_else(|| {
            Error::new(Code::Container, format!("{}: line {number}", path.display()))
                .need("a record with kind and step")
        })?;
        records.push(record);
    }
    Ok(records)
}

fn parse(line: &[u8]) -> Option<Record> {
    let line = std::str::from_utf8(line).ok()?;
    let Value::Object(fields) = serde_json::from_str(line).ok()? else { return None };
    let kind = fields.get("kind")?.as_str()?.to_owned();
    Some(Record { step: fields.get("step")?.as_u64()?, kind, fields, line: line.to_owned() })
}

fn failed(path: &Path, e: &std::io::Error) -> Error {
    Error::new(Code::Io, format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_run_writes_the_file_of_an_unbroken_one() {
        let dir = tempfile::tempdir().expect("directory");
        let (whole, broken) = (dir.path().join("a.ndjson"), dir.path().join("b.ndjson"));
        let write = |m: &mut Metrics, steps: std::ops::RangeInclusive<u64>| {
            for step in steps {
                m.log("train", step, &[("loss", 1.0 / step as f64), ("grad_norm", f64::NAN)])
                    .expect("logged");
            }
        };
        write(&mut Metrics::open(&whole, None).expect("open"), 1..=9);
        write(&mut Metrics::open(&broken, None).expect("open"), 1..=7);
        OpenOptions::new()
            .append(true)
            .open(&broken)
            .and_then(|mut f| f.write_all(b"{\"kind\": \"tr"))
            .expect("cut off");
        write(&mut Metrics::open(&broken, Some(After { step: 5, owed: false })).expect("open"), 6..=9);
        assert_eq!(fs::read_to_string(&whole).expect("read"), fs::read_to_string(&broken).expect("read"));
        let records = read(&whole).expect("records");
        assert_eq!(
            (records.len(), records[3].number("loss"), records[3].number("grad_norm")),
            (9, Some(0.25), None)
        );
    }

    #[test]
    fn what_was_owed_is_written_again_and_an_older_run_is_set_aside() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("metrics.ndjson");
        let mut m = Metrics::open(&path, None).expect("open");
        for (kind, step) in [("train", 1), ("eval", 1), ("train", 2), ("sample", 2)] {
            m.log(kind, step, &[("wall_s", step as f64)]).expect("logged");
        }
        let m = Metrics::open(&path, Some(After { step: 2, owed: true })).expect("open");
        assert_eq!((m.wall_s(), m.aside()), (2.0, None));
        let kinds: Vec<_> = read(&path).expect("records").into_iter().map(|r| (r.kind, r.step)).collect();
        assert_eq!(kinds, [("train".into(), 1), ("eval".into(), 1), ("train".into(), 2)]);
        let whole = fs::read(&path).expect("read");
        for i in 1..=2 {
            let mut m = Metrics::open(&path, None).expect("open");
            let aside = dir.path().join(format!("metrics.{i}.ndjson"));
            assert_eq!(m.aside(), Some(aside.as_path()));
            m.log("train", 1, &[]).expect("logged");
        }
        assert_eq!(fs::read(dir.path().join("metrics.1.ndjson")).expect("read"), whole);
    }

    #[test]
    fn damage_is_named() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("m.ndjson");
        fs::write(&path, "{\"kind\": \"train\", \"step\": 1}\nnonsense\n").expect("written");
        assert!(read(&path).expect_err("nonsense").to_string().contains("line 2"));
    }

    #[test]
    fn the_page_needs_nothing_else() {
        let dir = tempfile::tempdir().expect("directory");
        let mut m = Metrics::open(&dir.path().join("m.ndjson"), None).expect("open");
        for step in 0..5000u64 {
            let loss = 5.0 / (1.0 + step as f64 / 100.0);
            m.log("train", step, &[("loss", loss), ("lr", 1e-3), ("grad_norm", loss), ("tokens_per_s", 9e5)])
                .expect("logged");
        }
        m.log("eval", 4999, &[("loss", 0.1)]).expect("logged");
        let path = dir.path().join("m.html");
        m.write_page(&path, "<run> & co", "lr = \"<1>\"").expect("page");
        let html = fs::read_to_string(&path).expect("page");
        assert!(html.contains("&lt;run&gt; &amp; co") && !html.contains("<1>"), "text is escaped");
        for foreign in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!html.replace("http://www.w3.org/2000/svg", "").contains(foreign), "{foreign}");
        }
        assert_eq!(html.matches("<svg").count(), 4, "loss, lr, norm and speed; no memory was logged");
        assert!(html.len() < 400_000, "{} bytes: thinned out", html.len());
    }
}
