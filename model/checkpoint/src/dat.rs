//! The `.dat` container: entries of key, type, extents and payload, one after the other, lengths in LEB128.
//!
//! It has neither a header nor a checksum nor alignment, so the whole file is walked once and every length is
//! compared with what is left before it is believed.
use super::stored::Index;
use super::table::{Kind, Tensor};
use super::unique::{NAME_LIMIT, brief};
use q4_core::{Code, DType, Error, Result, detect::TensorMeta};
use std::collections::{BTreeMap, BTreeSet};

/// Most dimensions an entry may have.
const RANK_LIMIT: u64 = 8;
/// Most entries: one takes seven bytes of the file and a hundred of memory, and a model has some hundreds.
const ENTRY_LIMIT: u64 = 1 << 17;

/// Places of all tensors of `bytes`; `file` is how errors call it. Every fault is [`Code::Container`] and
/// names the entry and the byte offset.
pub(super) fn index(file: &str, bytes: &[u8]) -> Result<Index> {
    let mut walk = Walk { file, bytes, at: 0, entry: String::new() };
    let count = walk.leb128("the number of entries")?;
    if count > ENTRY_LIMIT {
        return Err(walk
            .damaged("number of entries")
            .need(format!("at most {ENTRY_LIMIT}"))
            .have(count.to_string()));
    }
    let mut tensors = Vec::new();
    let mut seen = BTreeSet::new();
    for i in 0..count {
        walk.entry = format!("entry {i}");
        let key = walk.key()?;
        walk.entry = format!("`{}`", brief(&key));
        if !seen.insert(key.clone()) {
            return Err(walk.damaged("the key stands in the file twice"));
        }
        tensors.push(walk.tensor(key)?);
    }
    if walk.at != bytes.len() {
        walk.entry = "the end".into();
        return Err(walk
            .damaged("bytes after the last entry")
            .need(format!("{} bytes for {count} entries", walk.at))
            .have(format!("{} bytes", bytes.len())));
    }
    Ok(Index { tensors, metadata: BTreeMap::new() })
}

struct Walk<'a> {
    file: &'a str,
    bytes: &'a [u8],
    at: usize,
    entry: String,
}

impl Walk<'_> {
    fn key(&mut self) -> Result<String> {
        let length = self.leb128("the length of the key")?;
        if length == 0 || length > NAME_LIMIT as u64 {
            return Err(self
                .damaged("length of the key")
                .need(format!("1 to {NAME_LIMIT} bytes"))
                .have(length.to_string()));
        }
        let range = self.take(length, "the key")?;
        match std::str::from_utf8(&self.bytes[range]) {
            Ok(key) => Ok(key.to_owned()),
            Err(e) => Err(self.damaged("key").need("UTF-8").have(e.to_string())),
        }
    }

    fn tensor(&mut self, key: String) -> Result<Tensor> {
        let code = self.leb128("the element type")?;
        let kind = match code {
            0 => const { &Kind::new("u8", 8, Some(DType::U8)) },
            1 => const { &Kind::new("i8", 8, Some(DType::I8)) },
            2 => const { &Kind::new("i16", 16, None) },
            3 => const { &Kind::new("i32", 32, Some(DType::I32)) },
            4 => const { &Kind::new("i64", 64, Some(DType::I64)) },
            5 => const { &Kind::new("float16", 16, Some(DType::F16)) },
            6 => const { &Kind::new("float32", 32, Some(DType::F32)) },
            7 => const { &Kind::new("float64", 64, Some(DType::F64)) },
            11 => const { &Kind::new("bool", 8, None) },
            15 => const { &Kind::new("bfloat16", 16, Some(DType::BF16)) },
            100 => const { &Kind::new("fp4x2", 8, Some(DType::U8)) },
            101 => const { &Kind::new("f8_e4m3", 8, Some(DType::F8E4M3)) },
            _ => {
                return Err(self
                    .damaged("unsupported element type")
                    .need("0 to 7, 11, 15, 100 or 101")
                    .have(if code == 4711 {
                        "4711, the exporter's \"unknown\"".into()
                    } else {
                        code.to_string()
                    })
                    .fix("export the tensor again in a known type"));
            }
        };
        let rank = self.leb128("the number of dimensions")?;
        if rank > RANK_LIMIT {
            return Err(self
                .damaged("number of dimensions")
                .need(format!("at most {RANK_LIMIT}"))
                .have(rank.to_string()));
        }
        let mut shape = Vec::new();
        let mut length = kind.bits as u64 / 8;
        for _ in 0..rank {
            let extent = self.leb128("an extent")?;
            length = match length.checked_mul(extent) {
                Some(0) => return Err(self.damaged("extent").need("above zero").have("0")),
                Some(length) => length,
                None => {
                    return Err(self
                        .damaged("the size of the payload overflows")
                        .have(format!("{shape:?} and {extent}")));
                }
            };
            shape.push(usize::try_from(extent).map_err(|_| self.damaged("extent").have(extent.to_string()))?);
        }
        let range = self.take(length, "the payload")?;
        let meta = TensorMeta { dtype: kind.dtype, shape: shape.into() };
        Ok(Tensor { name: key.into(), meta, kind, file: 0, range })
    }

    fn leb128(&mut self, what: &str) -> Result<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let range = self.take(1, what)?;
            let byte = self.bytes[range.start];
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.damaged(what).need("a number of at most 64 bits").have("a longer one"))
    }

    fn take(&mut self, length: u64, what: &str) -> Result<std::ops::Range<usize>> {
        let left = self.bytes.len() - self.at;
        match usize::try_from(length).ok().filter(|n| *n <= left) {
            Some(n) => {
                self.at += n;
                Ok(self.at - n..self.at)
            }
            None => Err(self
                .damaged(&format!("the file ends inside {what}"))
                .need(format!("{length} bytes"))
                .have(format!("{left} bytes"))
                .fix("copy the file again")),
        }
    }

    fn damaged(&self, what: &str) -> Error {
        let entry = if self.entry.is_empty() { String::new() } else { format!("{}: ", self.entry) };
        Error::new(Code::Container, format!("{}: {entry}at byte {}: {what}", self.file, self.at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(bytes: &[u8]) -> Result<u64> {
        Walk { file: "a.dat", bytes, at: 0, entry: String::new() }.leb128("a number")
    }

    #[test]
    fn leb128_vectors() -> Result<()> {
        for (bytes, value) in [
            (&[0x00][..], 0),
            (&[0x7f], 127),
            (&[0x80, 0x01], 128),
            (&[0x80, 0x14], 2560),
            (&[0x80, 0xa3, 0x09], 151_936),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], u64::MAX),
        ] {
            assert_eq!(number(bytes)?, value);
        }
        for bad in [
            &[0x80][..],
            &[],
            &[0xff; 10],
            &[0x80; 11],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02],
        ] {
            assert_eq!(number(bad).expect_err("must be refused").code(), Code::Container);
        }
        Ok(())
    }

    #[test]
    fn damage_names_the_key_and_the_offset() {
        let unknown = b"\x01\x01w\xe7\x24\x01\x01x";
        let text = index("a.dat", unknown).err().expect("type 4711").to_string();
        assert!(
            text.contains("a.dat: `w`: at byte 5: unsupported element type") && text.contains("4711"),
            "{text}"
        );
        let twice = b"\x02\x01w\x00\x01\x01x\x01w\x00\x01\x01x";
        assert!(index("a.dat", twice).err().expect("duplicate").to_string().contains("twice"));
        let trailing = b"\x01\x01w\x00\x01\x01xy";
        assert!(
            index("a.dat", trailing).err().expect("trailing").to_string().contains("after the last entry")
        );
        let huge = b"\x01\x01w\x06\x02\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x04x";
        assert!(index("a.dat", huge).err().expect("overflow").to_string().contains("overflows"));
        let many = b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f";
        assert!(index("a.dat", many).err().expect("count").to_string().contains("number of entries"));
        assert!(index("a.dat", b"\x80\x80\x08").err().expect("cut").to_string().contains("entry 0"));
    }
}
