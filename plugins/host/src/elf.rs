//! Reads symbols and their bytes out of an ELF file, so that a library says who it is before any of its code
//! can run. Everything is bounds-checked: a file that lies about itself is refused, not followed.
//!
//! Symbols are found as the system's loader finds them, through the dynamic section and its hash table,
//! because section headers are free to tell another story. Layout: System V ABI, "Object Files" and "Dynamic
//! Linking"; 64-bit little-endian.
use q4_core::{Reject, RejectCode};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

const HEADER: usize = 64;
const SHARED_OBJECT: u16 = 3;
#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const SHT_NOBITS: u32 = 8;
const DT_NEEDED: u64 = 1;
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_STRSZ: u64 = 10;
const DT_SONAME: u64 = 14;
const DT_RPATH: u64 = 15;
const DT_RUNPATH: u64 = 29;
/// Libraries that stand in for this one, or watch the loader: `DT_DEPAUDIT`, `DT_AUDIT`, `DT_AUXILIARY`,
/// `DT_FILTER`.
const DT_OTHERS: [u64; 4] = [0x6fff_fefb, 0x6fff_fefc, 0x7fff_fffd, 0x7fff_ffff];
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const SYMBOL: u64 = 24;
/// Longest text in the dynamic section that is read.
const MAX_TEXT: u64 = 4096;
/// Longest chain of a hash table that is followed.
const MAX_CHAIN: u32 = 1 << 16;

/// A file whose segments are known to lie inside it.
pub struct Elf<'f> {
    file: &'f File,
    loads: Vec<Segment>,
    symbols: u64,
    names: u64,
    names_len: u64,
    gnu_hash: Option<u64>,
    hash: Option<u64>,
    /// Tags and values up to the end of the dynamic section.
    entries: Vec<(u64, u64)>,
}

/// What a library asks the system's loader for.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Asks {
    /// Its own name, by which others find it once it is loaded.
    pub soname: Option<String>,
    /// Libraries it needs.
    pub needed: Vec<String>,
    /// Folders for those, and for what those need.
    pub rpath: Vec<String>,
    /// Folders for those alone.
    pub runpath: Option<Vec<String>>,
    /// It wants more of the loader than libraries it needs.
    pub others: bool,
}

#[derive(Clone, Copy)]
struct Segment {
    offset: u64,
    address: u64,
    bytes: u64,
}

/// A defined symbol.
pub struct Symbol {
    address: u64,
    bytes: u64,
}

impl<'f> Elf<'f> {
    /// [`Elf::open`] for whoever asks on any system; there are others where the answer is `None`.
    pub fn known(file: &'f File, len: u64) -> Result<Option<Self>, Reject> {
        Self::open(file, len).map(Some)
    }

    /// Checks the headers of a file of `len` bytes.
    pub fn open(file: &'f File, len: u64) -> Result<Self, Reject> {
        let damaged =
            |have: String| Reject::new(RejectCode::LibraryMissing, "a shared library in one piece", have);
        let head = read(file, 0, len.min(1 << 16) as usize).map_err(damaged)?;
        if head.len() < HEADER || !head.starts_with(b"\x7fELF") {
            return Err(Reject::new(
                RejectCode::LibraryMissing,
                "a shared library",
                format!("no ELF header in {len} bytes"),
            ));
        }
        let (kind, machine) = (u16_at(&head, 16), u16_at(&head, 18));
        if head[4..6] != [2, 1] || kind != SHARED_OBJECT || machine != MACHINE {
            return Err(Reject::new(
                RejectCode::AbiMismatch,
                format!("a 64-bit little-endian ELF file of type {SHARED_OBJECT} for machine {MACHINE}"),
                format!("class {}, encoding {}, type {kind}, machine {machine}", head[4], head[5]),
            ));
        }
        let (at, size, count) =
            (u64_at(&head, 32), u64::from(u16_at(&head, 54)), u64::from(u16_at(&head, 56)));
        let end = size.checked_mul(count).and_then(|n| n.checked_add(at));
        let Some(end) = end.filter(|&e| size >= 56 && count > 0 && e <= head.len() as u64) else {
            return Err(damaged(format!("no program headers within {len} bytes")));
        };
        let (mut loads, mut dynamic, mut described) = (Vec::new(), None, end);
        for h in head[at as usize..end as usize].chunks_exact(size as usize) {
            let s = Segment { offset: u64_at(h, 8), address: u64_at(h, 16), bytes: u64_at(h, 32) };
            if s.offset.checked_add(s.bytes).is_none_or(|end| end > len)
                || s.address.checked_add(s.bytes).is_none()
            {
                return Err(damaged(format!(
                    "a segment of {} + {} bytes in a file of {len}",
                    s.offset, s.bytes
                )));
            }
            described = described.max(s.offset + s.bytes);
            match u32_at(h, 0) {
                PT_LOAD => loads.push(s),
                PT_DYNAMIC => dynamic = Some(s),
                _ => {}
            }
        }
        // Linkers put the section headers last: a file that was cut off lost them first.
        let (at, size, count) =
            (u64_at(&head, 40), u64::from(u16_at(&head, 58)), u64::from(u16_at(&head, 60)));
        let Some(end) = at.checked_add(size * count).filter(|end| *end <= len) else {
            return Err(damaged(format!("section headers outside of {len} bytes")));
        };
        described = described.max(end);
        if size >= 64 {
            let sections = read(file, at, (size * count) as usize).map_err(damaged)?;
            let ends = sections.chunks_exact(size as usize).filter(|h| u32_at(h, 4) != SHT_NOBITS);
            described = ends.map(|h| u64_at(h, 24).saturating_add(u64_at(h, 32))).fold(described, u64::max);
        }
        if described < len {
            return Err(damaged(format!("{} bytes behind its end", len - described)));
        }
        let Some(dynamic) = dynamic.filter(|d| d.bytes <= 1 << 20) else {
            return Err(damaged("no dynamic section".into()));
        };
        let entries = read(file, dynamic.offset, dynamic.bytes as usize).map_err(damaged)?;
        let entries = entries.chunks_exact(16).map(|e| (u64_at(e, 0), u64_at(e, 8)));
        let entries: Vec<_> = entries.take_while(|e| e.0 != 0).collect();
        let entry = |tag| entries.iter().find(|e| e.0 == tag).map(|e| e.1);
        let (Some(symbols), Some(names), Some(names_len)) =
            (entry(DT_SYMTAB), entry(DT_STRTAB), entry(DT_STRSZ))
        else {
            return Err(damaged("no table of dynamic symbols".into()));
        };
        Ok(Self {
            file,
            loads,
            symbols,
            names,
            names_len,
            gnu_hash: entry(DT_GNU_HASH),
            hash: entry(DT_HASH),
            entries,
        })
    }

    /// What it asks the system's loader for; `None` when a text of it is not in the file or does not end.
    pub fn asks(&self) -> Option<Asks> {
        let mut asks = Asks::default();
        let folders = |text: String| text.split(':').map(str::to_owned).collect();
        for &(tag, value) in &self.entries {
            match tag {
                DT_NEEDED => asks.needed.push(self.text(value)?),
                DT_SONAME => asks.soname = Some(self.text(value)?),
                DT_RPATH => asks.rpath = folders(self.text(value)?),
                DT_RUNPATH => asks.runpath = Some(folders(self.text(value)?)),
                tag => asks.others |= DT_OTHERS.contains(&tag),
            }
        }
        Some(asks)
    }

    fn text(&self, at: u64) -> Option<String> {
        let most = self.names_len.checked_sub(at)?.min(MAX_TEXT);
        let bytes = self.at(self.names.checked_add(at)?, most as usize)?;
        let end = bytes.iter().position(|b| *b == 0)?;
        String::from_utf8(bytes[..end].to_vec()).ok()
    }

    /// The defined symbol of that name.
    pub fn symbol(&self, name: &str) -> Option<Symbol> {
        match (self.gnu_hash, self.hash) {
            (Some(table), _) => self.by_gnu_hash(table, name),
            (None, Some(table)) => self.by_hash(table, name),
            (None, None) => None,
        }
    }

    /// The first `bytes` of a symbol, as they lie in the file; `None` when it has fewer, or has none in the
    /// file.
    pub fn bytes(&self, symbol: &Symbol, bytes: usize) -> Option<Vec<u8>> {
        if symbol.bytes < bytes as u64 { None } else { self.at(symbol.address, bytes) }
    }

    fn by_gnu_hash(&self, table: u64, name: &str) -> Option<Symbol> {
        let hash = name.bytes().fold(5381u32, |h, b| h.wrapping_mul(33).wrapping_add(u32::from(b)));
        let head = self.at(table, 16)?;
        let [buckets, first, bloom] = [0, 4, 8].map(|at| u32_at(&head, at));
        let at = table.checked_add(16 + 8 * u64::from(bloom))?;
        let bucket = self.word(at, hash.checked_rem(buckets)?)?;
        let chain = at.checked_add(4 * u64::from(buckets))?;
        for i in (bucket..bucket.saturating_add(MAX_CHAIN)).skip_while(|_| bucket < first) {
            let here = self.word(chain, i - first)?;
            if here | 1 == hash | 1
                && let Some(found) = self.named(i, name)
            {
                return Some(found);
            }
            if here & 1 == 1 {
                return None;
            }
        }
        None
    }

    fn by_hash(&self, table: u64, name: &str) -> Option<Symbol> {
        let hash = name.bytes().fold(0u32, |h, b| {
            let h = (h << 4).wrapping_add(u32::from(b));
            (h ^ (h >> 24 & 0xf0)) & 0x0fff_ffff
        });
        let head = self.at(table, 8)?;
        let buckets = u32_at(&head, 0);
        let mut i = self.word(table.checked_add(8)?, hash.checked_rem(buckets)?)?;
        for _ in 0..MAX_CHAIN {
            if i == 0 {
                return None;
            }
            if let Some(found) = self.named(i, name) {
                return Some(found);
            }
            i = self.word(table.checked_add(8 + 4 * u64::from(buckets))?, i)?;
        }
        None
    }

    /// Symbol `i` when it is defined here and has that name.
    fn named(&self, i: u32, name: &str) -> Option<Symbol> {
        let entry = self.at(self.symbols.checked_add(SYMBOL * u64::from(i))?, SYMBOL as usize)?;
        let at = u64::from(u32_at(&entry, 0));
        let end = at.checked_add(name.len() as u64 + 1)?;
        if u16_at(&entry, 6) == 0 || end > self.names_len {
            return None;
        }
        let text = self.at(self.names.checked_add(at)?, name.len() + 1)?;
        let here = text.strip_suffix(&[0]) == Some(name.as_bytes());
        here.then(|| Symbol { address: u64_at(&entry, 8), bytes: u64_at(&entry, 16) })
    }

    fn word(&self, table: u64, i: u32) -> Option<u32> {
        self.at(table.checked_add(4 * u64::from(i))?, 4).map(|b| u32_at(&b, 0))
    }

    /// Bytes at an address, when a segment has them in the file.
    fn at(&self, address: u64, bytes: usize) -> Option<Vec<u8>> {
        let end = address.checked_add(bytes as u64)?;
        let s = self.loads.iter().find(|s| address >= s.address && end <= s.address + s.bytes)?;
        read(self.file, s.offset + (address - s.address), bytes).ok()
    }
}

fn read(mut file: &File, at: u64, bytes: usize) -> Result<Vec<u8>, String> {
    let mut out = vec![0; bytes];
    file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut out)).map_err(|e| e.to_string())?;
    Ok(out)
}

fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from(u16_at(b, at)) | u32::from(u16_at(b, at + 2)) << 16
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from(u32_at(b, at)) | u64::from(u32_at(b, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::io::Write;

    fn damaged(bytes: &[u8]) -> (tempfile::NamedTempFile, u64) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        (file, bytes.len() as u64)
    }

    fn libc() -> Vec<u8> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|l| l.contains("libc.so") || l.contains("libc-")).unwrap();
        std::fs::read(line.split_whitespace().last().unwrap()).unwrap()
    }

    #[test]
    fn finds_what_the_loader_finds() {
        let (file, len) = damaged(&libc());
        let elf = Elf::open(file.as_file(), len).unwrap();
        assert!(elf.symbol("malloc").is_some_and(|s| elf.bytes(&s, 4).is_some()));
        assert!(elf.symbol("q4_plugin_query").is_none());
        let both = Elf { hash: None, ..Elf::open(file.as_file(), len).unwrap() };
        assert!(both.symbol("malloc").is_some());
        assert!(Elf { gnu_hash: None, ..both }.symbol("malloc").is_none(), "no hash table is no symbol");
    }

    #[test]
    fn a_library_says_what_it_asks_for() {
        let (file, len) = damaged(&libc());
        let asks = Elf::open(file.as_file(), len).unwrap().asks().unwrap();
        assert!(asks.soname.is_some_and(|name| name.starts_with("libc.so")), "itself");
        assert!(asks.needed.iter().all(|name| name.starts_with("ld-linux")), "{:?}", asks.needed);
        assert!(!asks.others && asks.runpath.is_none() && asks.rpath.is_empty());
    }

    #[test]
    fn every_flipped_byte_of_the_headers_is_survived() {
        let mut bytes = libc();
        for i in (0..1024).chain((0..bytes.len()).step_by(bytes.len() / 512)) {
            bytes[i] ^= 0xff;
            let (file, len) = damaged(&bytes);
            if let Ok(elf) = Elf::open(file.as_file(), len) {
                elf.symbol("malloc").and_then(|s| elf.bytes(&s, 16));
                elf.asks();
            }
            bytes[i] ^= 0xff;
        }
    }

    #[test]
    fn every_cut_and_every_tail_is_refused() {
        let mut bytes = libc();
        for cut in (0..1024).chain((0..8).map(|i| bytes.len() / 8 * i)) {
            let (file, len) = damaged(&bytes[..cut]);
            assert!(Elf::open(file.as_file(), len).is_err(), "{cut}");
        }
        bytes.push(0);
        let (file, len) = damaged(&bytes);
        let refused = Elf::open(file.as_file(), len).err().unwrap();
        assert!(refused.have.contains("1 bytes behind its end"), "{refused}");
    }
}
