//! The file as a whole: header, metadata, descriptions of tensors, data.
use crate::cursor::{Cursor, brief};
use crate::tensors::{Tensor, place};
use crate::value::Value;
use q4_core::{Code, Error, Result};

/// Longest key, as the format states it, in bytes.
const KEY_LIMIT: usize = 65535;
/// The least that an entry of the metadata takes: a key and a value of one byte each.
const LEAST: usize = 8 + 1 + 4 + 1;
/// Bytes that tensors are aligned to where the file does not say.
pub(crate) const ALIGNMENT: u32 = 32;

/// An entry of the metadata.
type Entry<'a> = (&'a str, Value<'a>);

/// Metadata and tensors of a file, whose bytes it borrows.
#[derive(Clone, Debug)]
pub struct Gguf<'a> {
    version: u32,
    alignment: usize,
    metadata: Vec<Entry<'a>>,
    tensors: Vec<Tensor<'a>>,
}

impl<'a> Gguf<'a> {
    /// Reads everything but the data, of which it says that they are there; `file` is how errors call the
    /// file.
    ///
    /// # Errors
    /// [`Code::Container`] for damage, another version, big-endian files, names that stand there twice and
    /// element types without a known block.
    pub fn parse(file: &str, bytes: &'a [u8]) -> Result<Self> {
        parse(bytes).map_err(|e| e.within(file))
    }

    /// 2 or 3, which differ in what they allow and in no byte.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Bytes that every tensor's offset is a multiple of, a power of two.
    pub fn alignment(&self) -> usize {
        self.alignment
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        let at = self.metadata.binary_search_by(|(k, _)| (*k).cmp(key));
        at.ok().map(|at| &self.metadata[at].1)
    }

    /// All metadata, in the order of their keys.
    pub fn metadata(&self) -> &[(&'a str, Value<'a>)] {
        &self.metadata
    }

    /// A tensor.
    pub fn tensor(&self, name: &str) -> Option<&Tensor<'a>> {
        let at = self.tensors.binary_search_by(|t| t.name.cmp(name));
        at.ok().map(|at| &self.tensors[at])
    }

    /// All tensors, in the order of their names.
    pub fn tensors(&self) -> &[Tensor<'a>] {
        &self.tensors
    }

    /// Bytes of memory that this takes beside the file's: at most eight times the bytes before the data.
    pub fn index_bytes(&self) -> usize {
        self.metadata.capacity() * size_of::<Entry<'_>>() + self.tensors.capacity() * size_of::<Tensor<'_>>()
    }
}

fn parse(bytes: &[u8]) -> Result<Gguf<'_>> {
    let mut file = Cursor::new(bytes);
    let version = version(&mut file)?;
    let tensor_count = file.count(Tensor::LEAST, "the number of tensors")?;
    let entries = file.count(LEAST, "the number of metadata entries")?;

    let mut metadata = Vec::with_capacity(entries);
    for i in 0..entries {
        let key = file.name(KEY_LIMIT, "a key").map_err(|e| e.within(format!("metadata entry {i}")))?;
        let value = Value::read(&mut file).map_err(|e| e.within(format!("metadata `{}`", brief(key))))?;
        metadata.push((key, value));
    }
    metadata.sort_unstable_by_key(|(key, _)| *key);
    once("metadata", metadata.iter().map(|(key, _)| *key))?;
    let mut gguf = Gguf { version, alignment: 0, metadata, tensors: Vec::new() };
    gguf.alignment = alignment(gguf.get("general.alignment"))?;

    // Again, for the metadata are behind the cursor now.
    if tensor_count > file.left() / Tensor::LEAST {
        return Err(file
            .damaged("the number of tensors")
            .need(format!("at most {}", file.left() / Tensor::LEAST))
            .have(tensor_count.to_string()));
    }
    let mut tensors = Vec::with_capacity(tensor_count);
    for _ in 0..tensor_count {
        tensors.push(Tensor::read(&mut file)?);
    }
    tensors.sort_unstable_by_key(|t| t.name);
    once("tensor", tensors.iter().map(|t| t.name))?;
    let start = file.at().checked_next_multiple_of(gguf.alignment).unwrap_or(usize::MAX);
    place(&mut tensors, bytes.len(), start, gguf.alignment)?;
    gguf.tensors = tensors;
    Ok(gguf)
}

fn version(file: &mut Cursor<'_>) -> Result<u32> {
    let magic: [u8; 4] = file.array("the first four bytes")?;
    if &magic != b"GGUF" {
        return Err(Error::new(Code::Container, "not a GGUF file")
            .need("`GGUF`, its first four bytes")
            .have(format!("`{}`", magic.escape_ascii())));
    }
    let version = file.u32("the version")?;
    let (have, fix) = match version {
        2 | 3 => return Ok(version),
        1 => ("version 1, whose lengths have 32 bits".to_owned(), "convert the model again"),
        other if matches!(other.swap_bytes(), 1..=3) => (
            format!("version {}, big-endian", other.swap_bytes()),
            "convert the model for little-endian machines",
        ),
        other => (format!("version {other}"), "convert the model again"),
    };
    Err(Error::new(Code::Container, "the version of GGUF").need("2 or 3, little-endian").have(have).fix(fix))
}

fn alignment(stated: Option<&Value<'_>>) -> Result<usize> {
    match stated {
        None => Ok(ALIGNMENT as usize),
        Some(&Value::U32(n)) if n.is_power_of_two() => Ok(n as usize),
        Some(other) => Err(Error::new(Code::Container, "metadata `general.alignment`")
            .need("a power of two, as u32")
            .have(other.to_string())),
    }
}

/// Names are in order.
fn once<'a>(what: &str, mut names: impl Iterator<Item = &'a str>) -> Result<()> {
    let mut last = names.next();
    for name in names {
        if last == Some(name) {
            return Err(Error::new(
                Code::Container,
                format!("{what} `{}` stands in the file twice", brief(name)),
            )
            .need("one of each name")
            .have("two"));
        }
        last = Some(name);
    }
    Ok(())
}
