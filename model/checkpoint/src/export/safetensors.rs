//! Writes safetensors files whose sizes are all known beforehand, one tensor at a time, in any order.
//!
//! The `safetensors` crate wants every tensor of a file in memory; here one packed tensor is the most that is
//! held.
use super::Sink;
use super::atomic::{create_new, failed};
use q4_core::{Code, DType, Error, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Name, type and extents of a tensor that will be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name in the file.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Vec<usize>,
}

impl Entry {
    /// `name`: `dtype` `shape`.
    pub fn new(name: impl Into<String>, dtype: DType, shape: &[usize]) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec() }
    }
    /// Bytes of its data.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.size() as u64
    }
}

/// One file under construction, at its full size from the start.
pub struct Writer {
    path: PathBuf,
    file: File,
    /// Offset and size of what is still to be written.
    missing: BTreeMap<String, (u64, u64)>,
    size: u64,
}

impl Writer {
    /// Creates the file with its header. Larger element types come first, so that every tensor is aligned for
    /// its type and the format's ban on gaps is kept; the data begins at a multiple of 8 bytes.
    ///
    /// # Errors
    /// [`Code::Io`], also when the file exists; [`Code::Internal`] for a name that comes twice or a type that
    /// the format has no name for.
    pub fn create(path: &Path, entries: &[Entry]) -> Result<Self> {
        let mut order: Vec<&Entry> = entries.iter().collect();
        order.sort_by(|a, b| b.dtype.size().cmp(&a.dtype.size()).then_with(|| a.name.cmp(&b.name)));
        let (mut at, mut spans) = (0u64, BTreeMap::new());
        for e in order {
            let dtype = type_name(e.dtype)?;
            let value = json!({ "dtype": dtype, "shape": e.shape, "data_offsets": [at, at + e.bytes()] });
            if spans.insert(e.name.clone(), (value, at, e.bytes())).is_some() {
                return Err(Error::new(Code::Internal, format!("{}: written twice", e.name)));
            }
            at += e.bytes();
        }
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({ "format": "pt" }));
        header.extend(spans.iter().map(|(name, (value, ..))| (name.clone(), value.clone())));
        let mut header = Value::Object(header).to_string();
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        let data = 8 + header.len() as u64;
        let begin = || {
            let mut file = create_new(path)?;
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(header.as_bytes())?;
            file.set_len(data + at)?;
            Ok(file)
        };
        let file = begin().map_err(|e| failed(path, &e))?;
        let missing = spans.into_iter().map(|(name, (_, start, len))| (name, (data + start, len))).collect();
        Ok(Self { path: path.to_owned(), file, missing, size: data + at })
    }

    /// Writes the data of `name`, once.
    ///
    /// # Errors
    /// [`Code::Internal`] for a name or a length that the header does not announce, [`Code::Io`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let wrong = || Error::new(Code::Internal, format!("{name}: not what the header announces"));
        let (at, len) = self.missing.remove(name).ok_or_else(wrong)?;
        if len != bytes.len() as u64 {
            return Err(wrong().need(format!("{len} bytes")).have(format!("{} bytes", bytes.len())));
        }
        self.file
            .seek(SeekFrom::Start(at))
            .and_then(|_| self.file.write_all(bytes))
            .map_err(|e| failed(&self.path, &e))
    }

    /// Syncs the file and returns its size in bytes.
    ///
    /// # Errors
    /// [`Code::Internal`] when an announced tensor was not written, [`Code::Io`].
    pub fn finish(self) -> Result<u64> {
        if let Some(name) = self.missing.keys().next() {
            return Err(Error::new(Code::Internal, format!("{name}: announced and not written")));
        }
        self.file.sync_all().map_err(|e| failed(&self.path, &e))?;
        Ok(self.size)
    }
}

/// The files of a directory, one open at a time: file `f` holds the groups `cut[f]`.
pub(super) struct Shards<'a> {
    dir: PathBuf,
    groups: &'a [Vec<Entry>],
    cut: Vec<Range<usize>>,
    open: Option<Writer>,
    finished: Vec<(String, u64)>,
}

impl<'a> Shards<'a> {
    /// Files in `dir`, named by [`file_name`].
    pub fn new(dir: &Path, groups: &'a [Vec<Entry>], cut: Vec<Range<usize>>) -> Self {
        Self { dir: dir.to_owned(), groups, cut, open: None, finished: Vec::new() }
    }

    /// Syncs the last file; names and sizes of all.
    pub fn finish(mut self) -> Result<Vec<(String, u64)>> {
        self.close()?;
        Ok(self.finished)
    }

    fn close(&mut self) -> Result<()> {
        if let Some(writer) = self.open.take() {
            let name = file_name(self.finished.len(), self.cut.len());
            self.finished.push((name, writer.finish()?));
        }
        Ok(())
    }
}

impl Sink for Shards<'_> {
    fn begin(&mut self, item: usize) -> Result<()> {
        if let Some(f) = self.cut.iter().position(|range| range.start == item) {
            self.close()?;
            let entries: Vec<Entry> = self.groups[self.cut[f].clone()].concat();
            self.open = Some(Writer::create(&self.dir.join(file_name(f, self.cut.len())), &entries)?);
        }
        Ok(())
    }

    fn write(&mut self, entry: &Entry, bytes: &[u8]) -> Result<()> {
        let closed = || Error::new(Code::Internal, format!("{}: no file is open", entry.name));
        self.open.as_mut().ok_or_else(closed)?.write(&entry.name, bytes)
    }
}

/// Cuts `groups`, which stay whole and in order, into files of at most `limit` data bytes each; a group that
/// is larger has a file of its own.
pub(crate) fn shards(groups: &[Vec<Entry>], limit: u64) -> Vec<Range<usize>> {
    let mut cut = Vec::new();
    let (mut start, mut used) = (0, 0u64);
    for (i, group) in groups.iter().enumerate() {
        let bytes = group.iter().map(Entry::bytes).sum::<u64>();
        if i > start && used.saturating_add(bytes) > limit {
            cut.push(start..i);
            (start, used) = (i, 0);
        }
        used = used.saturating_add(bytes);
    }
    cut.push(start..groups.len());
    cut
}

/// Name of file `i` of `of`, as Hugging Face has it.
pub fn file_name(i: usize, of: usize) -> String {
    match of {
        1 => "model.safetensors".into(),
        _ => format!("model-{:05}-of-{of:05}.safetensors", i + 1),
    }
}

/// The text of `model.safetensors.index.json`.
pub(crate) fn index(groups: &[Vec<Entry>], files: &[Range<usize>]) -> String {
    let mut map = BTreeMap::new();
    let mut total = 0;
    for (i, range) in files.iter().enumerate() {
        for entry in groups[range.clone()].iter().flatten() {
            total += entry.bytes();
            map.insert(&entry.name, file_name(i, files.len()));
        }
    }
    format!("{:#}\n", json!({ "metadata": { "total_size": total }, "weight_map": map }))
}

fn type_name(dtype: DType) -> Result<&'static str> {
    Ok(match dtype {
        DType::U8 => "U8",
        DType::I8 => "I8",
        DType::F8E4M3 => "F8_E4M3",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        DType::F32 => "F32",
        DType::F64 => "F64",
        DType::I32 => "I32",
        DType::I64 => "I64",
        other => return Err(Error::new(Code::Internal, format!("{other} has no name in safetensors"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::safetensors::SafeTensors;

    fn entries() -> Vec<Entry> {
        vec![
            Entry::new("a.json", DType::U8, &[7]),
            Entry::new("b", DType::F32, &[]),
            Entry::new("c", DType::BF16, &[2, 3]),
            Entry::new("d", DType::F8E4M3, &[5]),
            Entry::new("e", DType::I64, &[1]),
        ]
    }

    #[test]
    fn another_reader_finds_every_tensor_aligned() -> Result<()> {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("x.safetensors");
        let mut writer = Writer::create(&path, &entries())?;
        for (i, e) in entries().iter().enumerate().rev() {
            writer.write(&e.name, &vec![i as u8 + 1; e.bytes() as usize])?;
        }
        let size = writer.finish()?;
        let bytes = std::fs::read(&path).expect("written");
        assert_eq!(bytes.len() as u64, size);
        let file = SafeTensors::deserialize(&bytes).expect("a valid file");
        assert_eq!(file.len(), 5);
        for (i, e) in entries().iter().enumerate() {
            let t = file.tensor(&e.name).expect("present");
            assert_eq!(t.shape(), e.shape);
            assert!(t.data().iter().all(|&b| b == i as u8 + 1), "{}", e.name);
            assert_eq!(
                (t.data().as_ptr() as usize - bytes.as_ptr() as usize) % e.dtype.size(),
                0,
                "{}",
                e.name
            );
        }
        Ok(())
    }

    #[test]
    fn a_forgotten_tensor_and_a_wrong_size_are_errors() -> Result<()> {
        let dir = tempfile::tempdir().expect("temporary directory");
        let mut writer = Writer::create(&dir.path().join("x"), &entries())?;
        assert!(writer.write("c", &[0; 11]).is_err());
        assert!(writer.write("unknown", &[]).is_err());
        assert!(writer.finish().is_err());
        Ok(())
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_output_error() {
        let path = Path::new("/dev/full");
        let mut file = File::options().write(true).open(path).expect("the device");
        let e = failed(path, &file.write_all(&[0; 16]).expect_err("always full"));
        assert_eq!(e.code(), Code::Io);
        assert!(e.to_string().contains("/dev/full") && e.to_string().contains("free some space"), "{e}");
    }

    #[test]
    fn groups_are_kept_whole() {
        let group = |bytes: usize| vec![Entry::new("x", DType::U8, &[bytes])];
        let groups: Vec<_> = [4, 4, 9, 1, 1].map(group).into();
        assert_eq!(shards(&groups, 8), [0..2, 2..3, 3..5]);
        assert_eq!(shards(&groups, u64::MAX), vec![0..groups.len()]);
        assert_eq!(file_name(0, 1), "model.safetensors");
        assert_eq!(file_name(1, 3), "model-00002-of-00003.safetensors");
    }
}
