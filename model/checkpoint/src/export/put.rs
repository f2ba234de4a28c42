//! Where finished tensors go: one file, or a directory of safetensors with small files beside them.
use super::atomic::Output;
use super::safetensors::{self, Entry};
use super::{Sink, dat, gguf};
use q4_core::Result;
use q4_gguf::Head;
use std::path::Path;

/// What the user of a `.dat` file has to know.
pub(super) const FILE_NOTE: &str =
    "a .dat file holds tensors only: run it with --config and --tokenizer of the original";

/// Names of what was written, with bytes.
type Files = Vec<(String, u64)>;

/// What is written: where, in which parts, and what stands beside them.
pub(super) struct Put<'a> {
    pub out: &'a Path,
    /// Tensors of every item.
    pub groups: Vec<Vec<Entry>>,
    pub beside: Beside,
}

/// What else is said.
pub(super) enum Beside {
    /// Nothing: one `.dat` file.
    Nothing,
    /// Metadata in the same `.gguf` file.
    Metadata(Head),
    /// Names and bytes of other files in a directory, whose parts hold so many bytes.
    Files { small: Vec<(String, Vec<u8>)>, max_shard_bytes: u64 },
}

impl Put<'_> {
    /// Has `write` hand over the tensors. The output gets its name when it is committed; the files are told
    /// with their bytes.
    pub fn all<R>(self, write: impl FnOnce(&mut dyn Sink) -> Result<R>) -> Result<(Output, Files, R)> {
        let name = self.out.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (mut small, max_shard_bytes) = match self.beside {
            Beside::Nothing => {
                let (output, file) = Output::file(self.out)?;
                let count = self.groups.iter().map(Vec::len).sum();
                let mut sink = dat::Writer::new(file, output.path(), count)?;
                let done = write(&mut sink)?;
                return Ok((output, vec![(name, sink.finish()?)], done));
            }
            Beside::Metadata(head) => {
                let (output, file) = Output::file(self.out)?;
                let mut sink = gguf::Writer::new(file, output.path(), head, &self.groups)?;
                let done = write(&mut sink)?;
                return Ok((output, vec![(name, sink.finish()?)], done));
            }
            Beside::Files { small, max_shard_bytes } => (small, max_shard_bytes),
        };
        let shards = safetensors::shards(&self.groups, max_shard_bytes);
        if shards.len() > 1 {
            let index = safetensors::index(&self.groups, &shards);
            small.push(("model.safetensors.index.json".into(), index.into_bytes()));
        }
        let output = Output::directory(self.out)?;
        let mut sink = safetensors::Shards::new(output.path(), &self.groups, shards);
        let done = write(&mut sink)?;
        let mut files = sink.finish()?;
        for (name, bytes) in small {
            let size = output.write(&name, &bytes)?;
            files.push((name, size));
        }
        Ok((output, files, done))
    }
}
