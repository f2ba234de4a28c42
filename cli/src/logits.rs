//! `q4 logits`: the numbers behind the text, for comparison with another implementation.
use crate::args::LogitsArgs;
use crate::context::Context;
use crate::report::Outcome;
use crate::session::{Facts, Session, chunk};
use crate::text::context_size;
use q4_core::{Code, Error, Result};
use q4_model::cpu::KvType;
use q4_model::load::ContextOptions;
use q4_model::scan::first_maximum;
use serde::Serialize;
use serde_json::json;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use tempfile::NamedTempFile;

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    out: String,
    positions: usize,
    vocab: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    greedy_ids: Option<Vec<u32>>,
    #[serde(flatten)]
    facts: Facts,
}

/// Runs the verb.
pub fn run(cx: &Context, args: &LogitsArgs) -> Result<Outcome> {
    if std::fs::symlink_metadata(&args.out).is_ok() {
        return Err(exists(&args.out));
    }
    let dispatch = Session::dispatch(cx)?;
    let checkpoint = cx.open(&args.model)?;
    let vocab = checkpoint.config().vocab_size;
    let positions = args.ids.len();
    let context = context_size(None, positions.saturating_add(args.greedy), &checkpoint)?;
    let chunk = args.chunk.map_or(chunk(cx.device()?), |c| c as usize).min(positions);
    let sizes = ContextOptions { context, chunk, all_logits: true, kv: cx.kv(KvType::F32), many: None };
    let session = Session::load(cx, dispatch, &checkpoint, args.quantize, sizes)?;
    let mut runner = session.runner()?;

    let mut file = Tensor::create(&args.out, positions, vocab)?;
    let mut failed = None;
    runner.accept_all(&args.ids, &mut |rows| {
        if failed.is_none() {
            failed = file.write(rows).err();
        }
    })?;
    if let Some(e) = failed {
        return Err(e);
    }
    file.finish(&args.out)?;

    let mut greedy = Vec::with_capacity(args.greedy);
    while greedy.len() < args.greedy {
        let logits = runner.logits()?;
        let id = first_maximum(&logits[logits.len() - vocab..]) as u32;
        greedy.push(id);
        if greedy.len() < args.greedy {
            runner.decode(id)?;
        }
    }
    if cx.report().is_json() {
        let out = args.out.display().to_string();
        let greedy_ids = (args.greedy > 0).then_some(greedy);
        let body =
            Body { model: checkpoint.name(), out, positions, vocab, greedy_ids, facts: session.facts() };
        cx.report().document("logits", &body)?;
    } else {
        let mut text = format!("{}: logits float32 [{positions}, {vocab}]\n", args.out.display());
        if args.greedy > 0 {
            let ids: Vec<_> = greedy.iter().map(u32::to_string).collect();
            text.push_str(&format!("greedy: {}\n", ids.join(",")));
        }
        cx.report().text(&text)?;
    }
    Ok(Outcome::Done)
}

/// A safetensors file with one f32 matrix, written row by row; it has its name only when it is complete.
struct Tensor {
    file: BufWriter<NamedTempFile>,
}

impl Tensor {
    fn create(path: &Path, rows: usize, columns: usize) -> Result<Self> {
        let bytes = rows * columns * size_of::<f32>();
        let tensor = json!({ "dtype": "F32", "shape": [rows, columns], "data_offsets": [0, bytes] });
        let mut header = json!({ "logits": tensor }).to_string();
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // Asked first because the temporary file's own error would name the temporary file.
        std::fs::metadata(parent)
            .map_err(|e| unwritable(path, &e).fix(format!("mkdir -p {}", parent.display())))?;
        let mut builder = tempfile::Builder::new();
        builder.prefix(".logits.partial-");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // As any other new file: what the umask leaves. Temporary files are private otherwise.
            builder.permissions(std::fs::Permissions::from_mode(0o666));
        }
        let begin = || {
            let mut file = BufWriter::new(builder.tempfile_in(parent)?);
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(header.as_bytes())?;
            Ok(file)
        };
        begin().map(|file| Self { file }).map_err(|e: io::Error| unwritable(path, &e))
    }

    fn write(&mut self, values: &[f32]) -> Result<()> {
        for v in values {
            self.file.write_all(&v.to_le_bytes()).map_err(|e| unwritable(self.file.get_ref().path(), &e))?;
        }
        Ok(())
    }

    fn finish(self, path: &Path) -> Result<()> {
        let file = self.file.into_inner().map_err(|e| unwritable(path, e.error()))?;
        file.as_file().sync_all().map_err(|e| unwritable(path, &e))?;
        match file.persist_noclobber(path) {
            Ok(_) => Ok(()),
            Err(e) if e.error.kind() == io::ErrorKind::AlreadyExists => Err(exists(path)),
            Err(e) => Err(unwritable(path, &e.error)),
        }
    }
}

fn exists(path: &Path) -> Error {
    Error::new(Code::Usage, format!("{}: exists", path.display()))
        .need("an output path that is free; nothing is ever overwritten")
        .fix("choose another path or remove it first")
}

fn unwritable(path: &Path, e: &io::Error) -> Error {
    Error::new(Code::Io, format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_reader_finds_the_matrix() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("x.safetensors");
        let mut tensor = Tensor::create(&path, 2, 3).expect("created");
        tensor.write(&[1.0, 2.0, 3.0]).expect("written");
        tensor.write(&[4.0, 5.0, 6.0]).expect("written");
        assert!(!path.exists());
        tensor.finish(&path).expect("named");
        let bytes = std::fs::read(&path).expect("there");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("valid");
        let logits = file.tensor("logits").expect("there");
        assert_eq!(logits.shape(), [2, 3]);
        assert_eq!(logits.data()[20..], 6f32.to_le_bytes());
        let again = Tensor::create(&path, 0, 0).expect("created").finish(&path).expect_err("exists");
        assert_eq!(again.code(), Code::Usage);
        assert_eq!(std::fs::read_dir(dir.path()).expect("listing").count(), 1, "nothing is left behind");
    }
}
