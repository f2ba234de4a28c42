//! The tensors of one or several weight files, indexed once and read in place.
//!
//! Nothing here knows what a tensor means; `inspect` and converters use it without a configuration.
use super::shards::{self, Shards};
use super::stored::{Container, Stored};
use super::table::{Table, Tensor};
use super::unique::TEXT_LIMIT;
use super::{bytes::Bytes, dat, gguf, safetensors, source::Source, values};
use crate::arch::Arch;
use q4_core::{Code, Error, Result};
use serde::Serialize;
use std::{collections::BTreeMap, ops::Range, path::Path};

/// Bytes of the list for a byte of header, at most: many tensors of one element.
const HEADER: u64 = 3;

/// Bytes of a tensor that are looked at together when it is read in passing: a multiple of any element.
pub const SCANNED: usize = 16 << 20;

/// Every tensor of a checkpoint by name.
#[derive(Clone, Debug)]
pub struct TensorStore {
    container: Container,
    files: Vec<(String, Bytes)>,
    table: Table,
    metadata: BTreeMap<String, String>,
    /// Whether the names had no `model.` before them in the file.
    base: Option<&'static Arch>,
}

/// One line of a listing.
#[derive(Clone, Debug, Serialize)]
pub struct Entry<'a> {
    /// Tensor name.
    pub name: &'a str,
    /// Element type as the file spells it.
    pub stored_type: &'a str,
    /// Extents.
    pub shape: &'a [usize],
    /// Size in bytes.
    pub bytes: usize,
    /// File that holds it.
    pub file: &'a str,
    /// First byte in that file.
    pub offset: usize,
}

impl TensorStore {
    /// Indexes a directory, a `.safetensors` file (of which a shard is read alone), its `.index.json`, a
    /// `.gguf` or a `.dat` file.
    ///
    /// # Errors
    /// [`Code::ModelMissing`] for a file that is not there, [`Code::Container`] for one that is damaged or no
    /// weight file, [`Code::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_within(path, None)
    }

    /// As [`open`](Self::open) where the list of tensors may take `memory` bytes.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`Code::OutOfMemory`] for a longer list.
    pub fn open_within(path: &Path, memory: Option<u64>) -> Result<Self> {
        Self::read(&Source::of_path(path)?, memory)
    }

    pub(super) fn read(source: &Source, memory: Option<u64>) -> Result<Self> {
        let weights = source.weights()?;
        let map = weights.index.as_deref().map(|name| shards::weight_map(source, name)).transpose()?;
        if let (Some(beside), Some(map)) = (weights.beside, &map)
            && map.files != [beside]
        {
            // MLX writes an index of one file too.
            return Err(Error::new(Code::Container, format!("{}: two sets of weights", source.label("")))
                .need(format!("{beside} or an index of other files"))
                .have("both")
                .fix("name one of them, or delete what is left of an older export"));
        }
        let names = map.as_ref().map_or(weights.files, |map| map.files.clone());
        let mut store = Self {
            container: weights.container,
            files: Vec::new(),
            table: Table::default(),
            metadata: BTreeMap::new(),
            base: None,
        };
        let (mut indexed, mut parts) = (0u64, Vec::new());
        for name in names {
            let bytes = source.get(&name)?.ok_or_else(|| {
                Error::new(Code::ModelMissing, format!("{}: no such file", source.label(&name)))
                    .fix("copy or download the missing file")
            })?;
            let header = store.headers(&bytes);
            indexed = indexed.saturating_add(header.saturating_mul(HEADER));
            if let Some(memory) = memory.filter(|m| indexed > *m) {
                return Err(Error::new(
                    Code::OutOfMemory,
                    format!("{}: its list of tensors", source.label(&name)),
                )
                .need(format!("{indexed} bytes for a header of {header}"))
                .have(format!("{memory} bytes"))
                .fix("raise --memory-limit"));
            }
            store.add(name, source, bytes, memory, &mut parts)?;
        }
        let names: Vec<_> = store.files().map(|(name, _)| name).collect();
        store.table = Table::of(parts, &names)?;
        if let Some(map) = map {
            store.check(&map)?;
        }
        Ok(store)
    }

    /// Bytes of a file that say what the others are, as it claims.
    fn headers(&self, bytes: &[u8]) -> u64 {
        match (self.container, bytes.first_chunk()) {
            (Container::Safetensors, Some(length)) => u64::from_le_bytes(*length).min(bytes.len() as u64),
            _ => 0,
        }
    }

    /// The tensors of one more file, `parts` of which are lists of one file each.
    fn add(
        &mut self,
        name: String,
        source: &Source,
        bytes: Bytes,
        memory: Option<u64>,
        parts: &mut Vec<Vec<Tensor>>,
    ) -> Result<()> {
        let mut index = match self.container {
            Container::Safetensors => safetensors::index(&source.label(&name), &bytes)?,
            Container::Dat => dat::index(&source.label(&name), &bytes)?,
            Container::Gguf => {
                let opened = gguf::open(&source.label(&name), &bytes, memory)?;
                parts.push(opened.tensors);
                self.files.push((name.clone(), bytes));
                if !opened.parts.0.is_empty() {
                    parts.push(opened.parts.0);
                    self.files.push((format!("{name}, blocks apart"), opened.parts.1));
                }
                return Ok(());
            }
        };
        // What was read of a mapped file need not stay in memory: the index says it all.
        bytes.release(0..self.headers(&bytes) as usize);
        self.files.push((name, bytes));
        self.metadata.append(&mut index.metadata);
        if self.metadata.len() > TEXT_LIMIT {
            return Err(Error::new(
                Code::Container,
                format!("{}: __metadata__ of all files", source.label("")),
            )
            .need(format!("at most {TEXT_LIMIT} texts"))
            .have(self.metadata.len().to_string()));
        }
        parts.push(index.tensors);
        Ok(())
    }

    /// A base model, saved without the prefix that it has as a part of the whole, under the names it has
    /// there.
    pub(super) fn of_whole_model(self, arch: &'static Arch) -> Self {
        let n = &arch.names;
        let Some((prefix, embedding)) = n.embedding.split_once('.') else { return self };
        let prefix = format!("{prefix}.");
        let is_base =
            self.table.find(&format!("{embedding}.weight")).is_some() && !self.table.has_prefix(&prefix);
        if !is_base {
            return self;
        }
        let head = format!("{}.", n.head);
        let name = |n: &str| if n.starts_with(&head) { n.to_owned() } else { [&prefix, n].concat() };
        Self { table: self.table.renamed(name), base: Some(arch), ..self }
    }

    /// With `tensors` of `bytes`, which no file has, in place of those of their names, and without what is
    /// `gone`.
    pub(super) fn with(mut self, label: &str, tensors: Vec<Tensor>, bytes: Bytes, gone: &[String]) -> Self {
        if !tensors.is_empty() {
            let file = self.files.len() as u32;
            self.files.push((label.to_owned(), bytes));
            self.table.replace(tensors.into_iter().map(|t| Tensor { file, ..t }));
        }
        gone.iter().for_each(|name| self.table.remove(name));
        self
    }

    /// With other types and shapes of tensors that it has, where they are.
    pub(super) fn reread(mut self, tensors: Vec<Tensor>) -> Self {
        self.table.replace(tensors.into_iter());
        self
    }

    /// With tensors that lie where others do, under names that none has.
    pub(super) fn besides(mut self, tensors: Vec<Tensor>) -> Self {
        self.table.add(tensors);
        self
    }

    /// The same bytes where every name with `a` in it has `b` there, and the other way round.
    pub(super) fn exchanged(&self, a: &str, b: &str) -> Self {
        let name = |n: &str| if n.contains(a) { n.replace(a, b) } else { n.replace(b, a) };
        Self {
            container: self.container,
            files: self.files.clone(),
            table: self.table.renamed(name),
            metadata: self.metadata.iter().map(|(n, text)| (name(n), text.clone())).collect(),
            base: self.base,
        }
    }

    /// Every tensor that the index lists is in the shard that it names.
    fn check(&self, map: &Shards) -> Result<()> {
        for (tensor, shard) in map.tensors() {
            let have = self.table.find(tensor).map(|t| self.file(t).0.as_str());
            if have != Some(shard) {
                return Err(Error::new(Code::Container, format!("weight_map: tensor `{tensor}`"))
                    .need(format!("in {shard}"))
                    .have(have.map_or("in none of the shards".to_owned(), |s| format!("in {s}"))));
            }
        }
        Ok(())
    }

    /// The first tensor of a type that no weight of ours has.
    pub(super) fn foreign(&self) -> Option<(&str, &'static str)> {
        let t = self.table.tensors().iter().find(|t| t.kind.dtype.is_none())?;
        Some((&t.name, t.kind.spelled))
    }

    /// The weight file where it is one.
    pub(super) fn file_alone(&self) -> Option<&Bytes> {
        self.files.first().map(|f| &f.1)
    }

    /// How the files are written.
    pub fn container(&self) -> Container {
        self.container
    }

    /// Type and shape of every tensor.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// `__metadata__` of safetensors files, of all shards together; empty for `.dat`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Names and sizes in bytes of the weight files.
    pub fn files(&self) -> impl Iterator<Item = (&str, usize)> {
        self.files.iter().map(|(name, bytes)| (name.as_str(), bytes.len()))
    }

    /// All tensors by name.
    pub fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        self.table.tensors().iter().map(|t| self.entry_of(t))
    }

    /// One of them.
    pub fn entry(&self, name: &str) -> Option<Entry<'_>> {
        self.table.find(name).map(|t| self.entry_of(t))
    }

    fn entry_of<'a>(&'a self, t: &'a Tensor) -> Entry<'a> {
        Entry {
            name: &t.name,
            stored_type: t.kind.spelled,
            shape: &t.meta.shape,
            bytes: t.range.len(),
            file: &self.file(t).0,
            offset: t.range.start,
        }
    }

    fn file(&self, t: &Tensor) -> &(String, Bytes) {
        &self.files[t.file as usize]
    }

    /// A tensor's bytes.
    ///
    /// # Errors
    /// [`Code::TensorMissing`] without it, [`Code::TensorType`] where no weight has its type.
    pub fn tensor(&self, name: &str) -> Result<Stored<'_>> {
        let Some(t) = self.table.find(name) else {
            let files: Vec<_> = self.files.iter().take(3).map(|f| f.0.as_str()).collect();
            let error = Error::new(Code::TensorMissing, format!("`{name}`"))
                .need("a tensor of that name")
                .have(format!("{} others in {}", self.table.len(), files.join(", ")));
            return Err(self.hint(name, error));
        };
        let dtype = t.meta.dtype.ok_or_else(|| {
            Error::new(Code::TensorType, format!("`{name}`")).need("a type of weights").have(t.kind.spelled)
        })?;
        Ok(Stored { bytes: &self.file(t).1[t.range.clone()], dtype, shape: &t.meta.shape })
    }

    /// What to do about a tensor that is not there.
    pub(super) fn hint(&self, name: &str, error: Error) -> Error {
        match self.base.filter(|arch| name.starts_with(arch.names.head)) {
            Some(arch) => error.fix(format!(
                "this is a base model without its head: save it as {}, or set tie_word_embeddings if its embedding \
                 is the head",
                arch.class
            )),
            None => error,
        }
    }

    /// The file that holds a tensor and where it lies in it, for owners that outlive the checkpoint.
    pub fn place(&self, name: &str) -> Option<(Bytes, Range<usize>)> {
        self.table.find(name).map(|t| (self.file(t).1.clone(), t.range.clone()))
    }

    /// Tells the system that the bytes of a tensor were read for the last time for now; see
    /// [`Bytes::release`].
    pub(super) fn release_tensor(&self, name: &str) {
        if let Some((bytes, range)) = self.place(name) {
            bytes.release(range);
        }
    }

    /// Lets go of all pages of mapped files; see [`Bytes::release`].
    pub fn release(&self) {
        self.files.iter().for_each(|(_, bytes)| bytes.release(0..bytes.len()));
    }

    /// Bytes of what no file is mapped for: part of the executable, whose pages stay once they are read, or
    /// blocks that were taken apart.
    pub fn unmapped(&self) -> u64 {
        self.files.iter().filter(|(_, bytes)| !bytes.is_mapped()).map(|(_, bytes)| bytes.len() as u64).sum()
    }

    /// As [`floats`](Self::floats) for a tensor of which a few rows are read later: at no time are more than
    /// a few of its pages in memory.
    pub(super) fn floats_in_passing(
        &self,
        name: &str,
        shape: &[usize],
        helpers: values::Helpers<'_>,
    ) -> Result<Stored<'_>> {
        let stored = self.float_type(name, shape)?;
        let Some((bytes, range)) = self.place(name) else { return Ok(stored) };
        for start in (0..range.len()).step_by(SCANNED) {
            let end = range.len().min(start + SCANNED);
            let piece = Stored { bytes: &stored.bytes[start..end], ..stored };
            if values::non_finite(name, &piece, helpers).is_some() {
                return self.floats(name, shape, helpers);
            }
            bytes.release(range.start + start..range.start + end);
        }
        Ok(stored)
    }

    /// A tensor of exactly `shape` in an io dtype with finite values only.
    pub(super) fn floats(
        &self,
        name: &str,
        shape: &[usize],
        helpers: values::Helpers<'_>,
    ) -> Result<Stored<'_>> {
        let stored = self.float_type(name, shape)?;
        match values::non_finite(name, &stored, helpers) {
            Some(problem) => Err(problem.into()),
            None => Ok(stored),
        }
    }

    fn float_type(&self, name: &str, shape: &[usize]) -> Result<Stored<'_>> {
        let stored = self.tensor(name)?;
        if !stored.dtype.is_io() {
            return Err(Error::new(Code::TensorType, format!("`{name}`"))
                .need("float16, bfloat16 or float32")
                .have(stored.dtype.as_str()));
        }
        if stored.shape != shape {
            return Err(Error::new(Code::TensorShape, format!("`{name}`"))
                .need(format!("{shape:?}, as config.json says"))
                .have(format!("{:?}", stored.shape)));
        }
        Ok(stored)
    }
}
