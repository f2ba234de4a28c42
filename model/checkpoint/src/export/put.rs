//! Where finished tensors go: one `.dat` file, or a directory of safetensors with small files beside them.
use super::atomic::Output;
use super::safetensors::{self, Entry};
use super::{Sink, dat};
use q4_core::Result;
use std::path::Path;

/// What the user of a `.dat` file has to know.
pub(super) const FILE_NOTE: &str =
    "a .dat file holds tensors only: run it with --config and --tokenizer of the original";

/// Names of what was written, with bytes.
type Files = Vec<(String, u64)>;

/// What is written: where, in which parts, and what stands beside them.
pub(super) struct Put<'a> {
    pub out: &'a Path,
    /// One `.dat` file.
    pub is_file: bool,
    /// Tensors of every item.
    pub groups: Vec<Vec<Entry>>,
    pub max_shard_bytes: u64,
    /// Names and bytes of other files; none beside one file.
    pub small: Vec<(String, Vec<u8>)>,
}

impl Put<'_> {
    /// Has `write` hand over the tensors. The output gets its name when it is committed; the files are told
    /// with their bytes.
    pub fn all<R>(mut self, write: impl FnOnce(&mut dyn Sink) -> Result<R>) -> Result<(Output, Files, R)> {
        if self.is_file {
            let (output, file) = Output::file(self.out)?;
            let count = self.groups.iter().map(Vec::len).sum();
            let mut sink = dat::Writer::new(file, output.path(), count)?;
            let done = write(&mut sink)?;
            let name = self.out.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let files = vec![(name, sink.finish()?)];
            return Ok((output, files, done));
        }
        let shards = safetensors::shards(&self.groups, self.max_shard_bytes);
        if shards.len() > 1 {
            let index = safetensors::index(&self.groups, &shards);
            self.small.push(("model.safetensors.index.json".into(), index.into_bytes()));
        }
        let output = Output::directory(self.out)?;
        let mut sink = safetensors::Shards::new(output.path(), &self.groups, shards);
        let done = write(&mut sink)?;
        let mut files = sink.finish()?;
        for (name, bytes) in self.small {
            let size = output.write(&name, &bytes)?;
            files.push((name, size));
        }
        Ok((output, files, done))
    }
}
