//! Numbers of a run as NDJSON, a line as it happens, and as one HTML page with curves.
//!
//! A line is `{"kind": "train", "step": 12, "loss": 1.5, ...}`; `kind` is `train`, `eval`, `behaviour` or
//! what the caller names, and every other field is a number or a text. The page draws the fields it knows.
use q4_core::{Code, Error, Result};
use serde_json::{Map, Number, Value};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

mod page;
mod svg;

pub use page::page;

/// An open file of metrics.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
}

impl Metrics {
    /// Opens or creates the file. A run that goes on after step `resumed` drops the lines of later steps,
    /// which it is about to write again, and a last line that a crash cut off.
    pub fn open(path: &Path, resumed: Option<u64>) -> Result<Self> {
        let failed = |e: std::io::Error| failed(path, &e);
        match resumed {
            Some(step) if path.exists() => {
                let kept: String =
                    read(path)?.iter().filter(|r| r.step <= step).map(|r| format!("{}\n", r.line)).collect();
                let partial = path.with_extension("ndjson.partial");
                fs::write(&partial, kept).map_err(failed)?;
                fs::rename(&partial, path).map_err(failed)?;
            }
            Some(_) => {}
            None => fs::write(path, "").map_err(failed)?,
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Appends a line. Numbers that JSON cannot hold (NaN, infinity) become texts.
    pub fn log(&mut self, kind: &str, step: u64, fields: &[(&str, f64)]) -> Result<()> {
        let number = |x: f64| Number::from_f64(x).map_or_else(|| Value::String(x.to_string()), Value::Number);
        self.log_values(kind, step, fields.iter().map(|(name, x)| ((*name).to_owned(), number(*x))).collect())
    }

    /// Appends a line with any fields.
    pub fn log_values(&mut self, kind: &str, step: u64, fields: Map<String, Value>) -> Result<()> {
        let mut object = Map::from_iter([("kind".to_owned(), kind.into()), ("step".to_owned(), step.into())]);
        object.extend(fields);
        let line = format!("{}\n", Value::Object(object));
        self.file.write_all(line.as_bytes()).map_err(|e| failed(&self.path, &e))
    }

    /// Writes the page of everything so far; the old page is replaced in one go.
    pub fn write_page(&self, path: &Path, title: &str, config: &str) -> Result<()> {
        let html = page(title, config, &read(&self.path)?);
        let partial = path.with_extension("html.partial");
        fs::write(&partial, html).map_err(|e| failed(&partial, &e))?;
        fs::rename(&partial, path).map_err(|e| failed(path, &e))
    }
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
        write(&mut Metrics::open(&broken, Some(5)).expect("open"), 6..=9);
        assert_eq!(fs::read_to_string(&whole).expect("read"), fs::read_to_string(&broken).expect("read"));
        let records = read(&whole).expect("records");
        assert_eq!(
            (records.len(), records[3].number("loss"), records[3].number("grad_norm")),
            (9, Some(0.25), None)
        );
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
