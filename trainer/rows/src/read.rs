//! Rows of files, before they are tokens: which kind of file it is, and where each row stands in it.
use super::Format;
use super::layout::{self, Row, Unused, bad, show};
use super::parquet;
use q4_core::{Error, Result};
use serde_json::value::RawValue;
use std::{fs, path::Path};

/// Bytes a data file may have.
const FILE_LIMIT: u64 = 16 << 30;
/// Bytes a line may have.
const LINE_LIMIT: usize = 16 << 20;

/// The rows of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Read {
    /// Rows, each with its place.
    pub rows: Vec<(usize, Row)>,
    /// Fields that were not used.
    pub unused: Unused,
    /// Places are rows from 1, as in files without lines; else they are lines from 1.
    pub by_row: bool,
}

impl Read {
    /// How an error names a row of a file.
    pub fn place(&self, path: &Path, at: usize) -> String {
        let path = path.display();
        if self.by_row { format!("{path}: row {at}") } else { format!("{path}:{at}") }
    }
}

/// The rows of a file with their places, and the fields that were not used. Empty lines are skipped, bad ones
/// are errors.
///
/// # Errors
/// [`q4_core::Code::Container`] with file and line, or file and row of a Parquet file; `ModelMissing` or `Io`
/// where the file cannot be read.
pub fn read_rows(path: &Path, format: Format) -> Result<Read> {
    let size = fs::metadata(path).map_err(|e| Error::io(path, &e))?.len();
    if size > FILE_LIMIT {
        return Err(bad("too large")
            .need(format!("at most {FILE_LIMIT} bytes"))
            .have(size.to_string())
            .fix("several files: data.train takes a list")
            .within(path.display()));
    }
    let format = match (format, path.extension().and_then(|e| e.to_str())) {
        (Format::Auto, Some("tsv")) => Format::Tsv,
        (Format::Auto, Some("txt")) => Format::Text,
        (Format::Auto, Some("parquet")) => Format::Parquet,
        (Format::Auto, _) => Format::Jsonl,
        (named, _) => named,
    };
    let read = match format {
        Format::Parquet => {
            let mut unused = Unused::new();
            parquet::rows(path, &mut unused).map(|rows| Read { rows, unused, by_row: true })
        }
        _ => parse(&fs::read(path).map_err(|e| Error::io(path, &e))?, format),
    };
    read.map_err(|e| e.within(path.display()))
}

fn parse(bytes: &[u8], format: Format) -> Result<Read> {
    let bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes);
    another_kind(bytes)?;
    if format == Format::Jsonl && bytes.trim_ascii_start().starts_with(b"[") {
        return list(bytes);
    }
    let mut read = Read::default();
    for (i, line) in bytes.split(|b| *b == b'\n').enumerate() {
        let number = i + 1;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let row = one(line, format, &mut read).map_err(|e| {
            let whole = format == Format::Jsonl && read.rows.is_empty() && is_object(bytes);
            let e = e.within(format!("line {number}"));
            if whole { e.fix("one object a line: jq -c . IN > OUT.jsonl") } else { e }
        })?;
        read.rows.extend(row.map(|row| (number, row)));
    }
    Ok(read)
}

/// Refuses what is plainly another kind of file, with the way to one that is read.
fn another_kind(bytes: &[u8]) -> Result<()> {
    let known: [(&[u8], &str, &str); 5] = [
        (b"PAR1", "a Parquet file", "name it OUT.parquet, or data.format = \"parquet\""),
        (b"\x1f\x8b", "a gzip archive", "gunzip IN"),
        (b"\x28\xb5\x2f\xfd", "a zstd archive", "zstd -d IN"),
        (b"PK\x03\x04", "a zip archive", "unzip IN"),
        (b"ARROW1", "an Arrow file", "in Python: datasets.Dataset.from_file('IN').to_parquet('OUT.parquet')"),
    ];
    match known.iter().find(|(magic, ..)| bytes.starts_with(magic)) {
        Some((_, what, fix)) => {
            Err(bad(what).need("lines of text, a JSON list, or a file called .parquet").fix(*fix))
        }
        None => Ok(()),
    }
}

/// One object that takes the whole file, over several lines.
fn is_object(bytes: &[u8]) -> bool {
    serde_json::from_slice::<&RawValue>(bytes).is_ok_and(|v| v.get().starts_with('{'))
}

/// A JSON list of objects; each row stands at the line it begins on.
fn list(bytes: &[u8]) -> Result<Read> {
    let failed = |line: usize, e: &dyn std::fmt::Display| {
        bad("not JSON")
            .need("one list of objects, or an object a line")
            .have(e.to_string())
            .within(format!("line {line}"))
    };
    let text = std::str::from_utf8(bytes).map_err(|e| {
        let line = bytes[..e.valid_up_to()].iter().filter(|b| **b == b'\n').count() + 1;
        failed(line, &"not UTF-8")
    })?;
    let items: Vec<&RawValue> = serde_json::from_str(text).map_err(|e| failed(e.line(), &e))?;
    let (mut read, mut line, mut at) = (Read::default(), 1, 0);
    for item in items {
        let begins = item.get().as_ptr() as usize - text.as_ptr() as usize;
        line += text.as_bytes()[at..begins].iter().filter(|b| **b == b'\n').count();
        at = begins;
        let row = layout::json(item.get(), &mut read.unused).map_err(|e| e.within(format!("line {line}")))?;
        read.rows.push((line, row));
    }
    Ok(read)
}

fn one(line: &[u8], format: Format, read: &mut Read) -> Result<Option<Row>> {
    if line.len() > LINE_LIMIT {
        return Err(bad("too long").need(format!("at most {LINE_LIMIT} bytes")).have(line.len().to_string()));
    }
    let line = std::str::from_utf8(line).map_err(|e| {
        bad("not UTF-8").need("UTF-8 text").have(e.to_string()).fix("iconv -f latin1 -t utf-8 IN > OUT")
    })?;
    if line.trim().is_empty() {
        return Ok(None);
    }
    match format {
        Format::Text => Ok(Some(Row::Text(line.to_owned()))),
        Format::Tsv => tsv(line, read.rows.is_empty()),
        Format::Jsonl | Format::Auto | Format::Parquet => layout::json(line, &mut read.unused).map(Some),
    }
}

/// Prompt, tab, answer. The first row may be the header `prompt<TAB>target`.
fn tsv(line: &str, first: bool) -> Result<Option<Row>> {
    if line.starts_with('#') {
        return Ok(None);
    }
    let pair = line.split_once('\t').map(|(p, t)| (p.trim(), t.trim()));
    match pair {
        Some(("prompt", "target" | "response" | "completion")) if first => Ok(None),
        Some((prompt, target)) if !prompt.is_empty() && !target.is_empty() => {
            Ok(Some(Row::Chat(layout::turn(prompt, target))))
        }
        _ => Err(bad("no pair").need("a prompt, a tab and an answer, neither empty").have(show(line))),
    }
}
