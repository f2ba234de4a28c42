//! Writes `.dat` files: a count, then entries of name, type, extents and data, all sizes in LEB128.
//!
//! The format has no table and no padding, so it is written front to back in one pass.
use super::Sink;
use super::front::Front;
use super::safetensors::Entry;
use q4_core::{Code, DType, Error, Result};
use std::fs::File;
use std::path::Path;

/// A `.dat` file under construction.
pub(super) struct Writer(Front);

impl Writer {
    /// Starts a file of `entries` entries.
    pub fn new(file: File, path: &Path, entries: usize) -> Result<Self> {
        let mut head = Vec::new();
        leb128(&mut head, entries as u64);
        Front::new(file, path, entries, &head).map(Self)
    }

    /// Syncs the file and returns its size in bytes.
    pub fn finish(self) -> Result<u64> {
        self.0.finish()
    }
}

impl Sink for Writer {
    fn begin(&mut self, _item: usize) -> Result<()> {
        Ok(())
    }

    fn write(&mut self, entry: &Entry, bytes: &[u8]) -> Result<()> {
        self.0.take(entry, bytes)?;
        let mut head = Vec::with_capacity(entry.name.len() + 32);
        leb128(&mut head, entry.name.len() as u64);
        head.extend_from_slice(entry.name.as_bytes());
        leb128(&mut head, type_code(entry.dtype)?);
        leb128(&mut head, entry.shape.len() as u64);
        entry.shape.iter().for_each(|&d| leb128(&mut head, d as u64));
        self.0.put(&head)?;
        self.0.put(bytes)
    }
}

/// Seven bits a byte, least significant first; the top bit says that more follow.
fn leb128(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Element type codes of the format.
fn type_code(dtype: DType) -> Result<u64> {
    Ok(match dtype {
        DType::U8 => 0,
        DType::I8 => 1,
        DType::I32 => 3,
        DType::I64 => 4,
        DType::F16 => 5,
        DType::F32 => 6,
        DType::F64 => 7,
        DType::BF16 => 15,
        DType::F8E4M3 => 101,
        other => return Err(Error::new(Code::TensorType, format!("{other} has no code in .dat files"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_the_documented_bytes() -> Result<()> {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("x.dat");
        let file = super::super::atomic::create_new(&path).expect("created");
        let mut writer = Writer::new(file, &path, 1)?;
        writer.write(&Entry::new("w.scale", DType::F8E4M3, &[1, 300]), &[7; 300])?;
        assert!(writer.write(&Entry::new("more", DType::U8, &[1]), &[0]).is_err());
        let size = writer.finish()?;
        let mut expected = b"\x01\x07w.scale\x65\x02\x01\xac\x02".to_vec();
        expected.extend([7; 300]);
        let written = std::fs::read(&path).expect("written");
        assert_eq!(written, expected);
        assert_eq!(size, written.len() as u64);
        Ok(())
    }

    #[test]
    fn a_missing_entry_is_an_error() -> Result<()> {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("x.dat");
        let file = super::super::atomic::create_new(&path).expect("created");
        assert_eq!(Writer::new(file, &path, 2)?.finish().expect_err("two missing").code(), Code::Internal);
        Ok(())
    }
}
