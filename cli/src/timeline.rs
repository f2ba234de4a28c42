//! `--trace-out`: what a run did and when, as a file that Perfetto and chrome://tracing open (Trace Event
//! Format).
//!
//! The file is one JSON document at any time: an event goes over the document's end and brings a new end, in
//! one write. So a run that fails or is interrupted leaves what it did until then, and the spans that it was
//! in are open.
use q4_core::{Code, Error, Result};
use serde_json::{Map, Value, json};
use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// How the file begins.
const HEAD: &str = r#"{"schema":"q4.timeline/1","displayTimeUnit":"ms","traceEvents":["#;
/// How it ends.
const END: &str = "\n]}\n";

/// A timeline that is being written; clones write the same one.
#[derive(Clone)]
pub struct Timeline(Arc<Shared>);

struct Shared {
    path: PathBuf,
    start: Instant,
    out: Mutex<Out>,
}

struct Out {
    file: File,
    /// Where the end begins.
    end: u64,
    is_empty: bool,
    failed: Option<io::Error>,
}

/// What is known of a span and not written yet.
struct Fields(Map<String, Value>);

impl Timeline {
    /// A new file, or a new timeline in the place of an old one.
    ///
    /// # Errors
    /// [`Code::Usage`] for a file that is none, [`Code::Io`].
    pub fn create(path: &Path) -> Result<Self> {
        let failed = |e: io::Error| unwritten(path, &e);
        let mut file = match OpenOptions::new().write(true).create_new(true).open(path) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => replaced(path)?,
            made => made.map_err(failed)?,
        };
        file.write_all(format!("{HEAD}{END}").as_bytes()).map_err(failed)?;
        let out = Out { file, end: HEAD.len() as u64, is_empty: true, failed: None };
        Ok(Self(Arc::new(Shared { path: path.to_owned(), start: Instant::now(), out: Mutex::new(out) })))
    }

    /// Fails when something could not be written.
    ///
    /// # Errors
    /// [`Code::Io`]: the file holds what came before that.
    pub fn finish(&self) -> Result<()> {
        match self.out().failed.take() {
            Some(e) => Err(unwritten(&self.0.path, &e).have("a timeline of the beginning only")),
            None => Ok(()),
        }
    }

    fn out(&self) -> MutexGuard<'_, Out> {
        self.0.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One event of this thread, now. `phase` is the format's letter for its kind.
    fn add(&self, phase: &str, name: &str, args: Map<String, Value>) {
        let (thread, is_new) = thread();
        let process = std::process::id();
        let mut out = self.out();
        if is_new {
            let current = std::thread::current();
            let called = current.name().map_or_else(|| format!("thread {thread}"), str::to_owned);
            let args = json!({ "name": called });
            out.put(
                &json!({ "ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": args }),
            );
        }
        let microseconds = self.0.start.elapsed().as_nanos() as f64 / 1e3;
        let mut event =
            json!({ "ph": phase, "name": name, "ts": microseconds, "pid": process, "tid": thread });
        if phase == "i" {
            event["s"] = "t".into(); // it concerns its thread
        }
        if !args.is_empty() {
            event["args"] = args.into();
        }
        out.put(&event);
    }
}

/// An earlier timeline, emptied.
fn replaced(path: &Path) -> Result<File> {
    let failed = |e: io::Error| unwritten(path, &e);
    let exists = || {
        Error::new(Code::Usage, format!("{}: exists", path.display()))
            .need("an output path that is free, or an earlier timeline")
            .fix("choose another path or remove it first")
    };
    // Opening a pipe would wait for who reads it.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(exists());
    }
    let mut file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
    let mut head = [0; HEAD.len()];
    if file.read_exact(&mut head).is_err() || head != *HEAD.as_bytes() {
        return Err(exists());
    }
    file.set_len(0).and_then(|()| file.rewind()).map_err(failed)?;
    Ok(file)
}

fn unwritten(path: &Path, e: &io::Error) -> Error {
    Error::new(Code::Io, format!("--trace-out {}: {e}", path.display()))
}

impl Out {
    fn put(&mut self, event: &Value) {
        if self.failed.is_some() {
            return;
        }
        let comma = if self.is_empty { "" } else { "," };
        let text = format!("{comma}\n{event}{END}");
        match self.write(&text) {
            Ok(()) => {
                self.end += (text.len() - END.len()) as u64;
                self.is_empty = false;
            }
            Err(e) => {
                // The document that was: its end takes no room that it had not.
                let length = self.end + END.len() as u64;
                let _ = self.write(END).and_then(|()| self.file.set_len(length));
                self.failed = Some(e);
            }
        }
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.end))?;
        self.file.write_all(text.as_bytes())
    }
}

/// A small number for this thread, and whether it is the first time that it is asked for.
fn thread() -> (u32, bool) {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        static OWN: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    }
    match OWN.get() {
        0 => {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            OWN.set(number);
            (number, true)
        }
        number => (number, false),
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Timeline {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, cx: Context<'_, S>) {
        let mut fields = Fields(Map::new());
        attributes.record(&mut fields);
        if let Some(span) = cx.span(id) {
            span.extensions_mut().insert(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, cx: Context<'_, S>) {
        if let Some(span) = cx.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<Fields>()
        {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields(Map::new());
        event.record(&mut fields);
        let message = fields.0.shift_remove("message");
        let name = message.as_ref().and_then(Value::as_str).unwrap_or(event.metadata().name());
        self.add("i", name, fields.0);
    }

    fn on_enter(&self, id: &Id, cx: Context<'_, S>) {
        self.bound("B", id, &cx);
    }

    fn on_exit(&self, id: &Id, cx: Context<'_, S>) {
        self.bound("E", id, &cx);
    }
}

impl Timeline {
    /// The beginning or the end of a span, with the fields that no earlier one had.
    fn bound<S: Subscriber + for<'a> LookupSpan<'a>>(&self, phase: &str, id: &Id, cx: &Context<'_, S>) {
        let Some(span) = cx.span(id) else { return };
        let fields = span.extensions_mut().get_mut::<Fields>().map(|f| std::mem::take(&mut f.0));
        self.add(phase, span.name(), fields.unwrap_or_default());
    }
}

impl Fields {
    fn set(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.set(field, format!("{value:?}"));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, value);
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, value);
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, value);
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, value);
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &Path) -> Value {
        serde_json::from_slice(&std::fs::read(path).expect("there")).expect("JSON")
    }

    #[test]
    fn the_file_is_a_document_after_every_event() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("t.json");
        let timeline = Timeline::create(&path).expect("created");
        for events in 0..4 {
            let seen = read(&path);
            let seen = seen["traceEvents"].as_array().expect("a list");
            assert_eq!(seen.iter().filter(|e| e["ph"] == "B").count(), events);
            timeline.add("B", "x", Map::new());
        }
        timeline.finish().expect("written");
        assert_eq!(read(&path)["schema"], "q4.timeline/1");
    }

    #[test]
    fn an_earlier_timeline_is_replaced_and_nothing_else() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("t.json");
        let first = Timeline::create(&path).expect("created");
        (0..50).for_each(|_| first.add("B", "first", Map::new()));
        Timeline::create(&path).expect("replaced").add("B", "second", Map::new());
        let text = std::fs::read_to_string(&path).expect("there");
        assert!(text.contains("second") && !text.contains("first"), "{text}");
        for other in ["", "{}", "not a timeline"] {
            std::fs::write(&path, other).expect("written");
            assert_eq!(Timeline::create(&path).err().expect("exists").code(), Code::Usage, "{other:?}");
            assert_eq!(std::fs::read_to_string(&path).expect("there"), other);
        }
        assert_eq!(Timeline::create(dir.path()).err().expect("a folder").code(), Code::Usage);
        assert_eq!(Timeline::create(&path.join("x")).err().expect("no folder").code(), Code::Io);
    }

    #[test]
    fn a_full_disk_keeps_the_document_whole_and_is_told() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("t.json");
        let timeline = Timeline::create(&path).expect("created");
        timeline.add("B", "kept", Map::new());
        // A file that cannot be written takes the place of a disk that is full.
        let read_only = File::open(&path).expect("there");
        let good = std::mem::replace(&mut timeline.out().file, read_only);
        timeline.add("B", "lost", Map::new());
        timeline.out().file = good;
        timeline.add("B", "after", Map::new());
        assert_eq!(timeline.finish().expect_err("told").code(), Code::Io);
        let text = read(&path).to_string();
        assert!(text.contains("kept") && !text.contains("lost") && !text.contains("after"), "{text}");
    }
}
