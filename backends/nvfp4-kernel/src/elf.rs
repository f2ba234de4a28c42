//! A look at an ELF file before the loader maps it: a file that was cut off in a copy would otherwise kill
//! the process with SIGBUS inside `dlopen`, and a file for another machine gets a clearer message than the
//! loader's.
use std::{fs::File, io::Read, path::Path};

const HEADER: usize = 64;
const SHARED_OBJECT: u16 = 3;
#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

/// Whether every segment and the section headers of `path` are inside the file, and it is meant for this
/// machine. Err: what it is instead. Layout: System V ABI, "ELF header" and "Program header"; 64-bit
/// little-endian.
pub fn check(path: &Path) -> Result<(), String> {
    let mut file = File::open(path).map_err(|e| e.to_string())?;
    let len = file.metadata().map_err(|e| e.to_string())?.len();
    let mut head = vec![0u8; usize::try_from(len.min(1 << 16)).unwrap_or(1 << 16)];
    file.read_exact(&mut head).map_err(|e| e.to_string())?;
    segments(&head, len)
}

/// The check itself, on the first 64 KiB (program headers follow the header) of a file of `len` bytes.
fn segments(head: &[u8], len: u64) -> Result<(), String> {
    if head.len() < HEADER || !head.starts_with(b"\x7fELF") {
        return Err(format!("not a shared library (no ELF header in {len} bytes)"));
    }
    if head[4..6] != [2, 1] {
        return Err("an ELF file that is not 64-bit little-endian".into());
    }
    let (kind, machine) = (u16_at(head, 16), u16_at(head, 18));
    if kind != SHARED_OBJECT || machine != MACHINE {
        return Err(format!(
            "ELF type {kind} for machine {machine}, not type {SHARED_OBJECT} for machine {MACHINE}"
        ));
    }
    let (at, size, count) = (u64_at(head, 32), u64::from(u16_at(head, 54)), u64::from(u16_at(head, 56)));
    let end = size.checked_mul(count).and_then(|n| n.checked_add(at));
    let table = end.filter(|&e| size >= 56 && count > 0 && e <= head.len() as u64);
    let Some(end) = table else { return Err(format!("damaged: no program headers within {len} bytes")) };
    for header in head[at as usize..end as usize].chunks_exact(size as usize) {
        let (offset, bytes) = (u64_at(header, 8), u64_at(header, 32));
        match offset.checked_add(bytes) {
            Some(end) if end <= len => {}
            _ => {
                return Err(format!("cut off: a segment needs {offset} + {bytes} bytes, the file has {len}"));
            }
        }
    }
    // Linkers put the section headers last, so this catches a file that lost only what is never mapped.
    let sections = (u64_at(head, 40), u64::from(u16_at(head, 58)) * u64::from(u16_at(head, 60)));
    match sections.0.checked_add(sections.1) {
        Some(end) if end <= len => Ok(()),
        _ => Err(format!(
            "cut off: section headers need {} + {} bytes, the file has {len}",
            sections.0, sections.1
        )),
    }
}

fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    b[at..at + 8].iter().rev().fold(0, |v, &byte| v << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_prefix_of_a_header_is_refused_without_a_panic() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let len = own.len() as u64;
        assert_eq!(
            segments(&own[..1 << 16], len),
            Ok(()),
            "a position independent executable is a shared object"
        );
        for cut in 0..2048 {
            assert!(segments(&own[..cut], cut as u64).is_err(), "{cut}");
        }
        assert!(segments(&own[..1 << 16], 1 << 16).unwrap_err().starts_with("cut off"));
    }

    #[test]
    fn other_machines_and_hostile_headers_are_refused() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let with = |at: usize, bytes: &[u8]| {
            let mut head = own[..4096].to_vec();
            head[at..at + bytes.len()].copy_from_slice(bytes);
            segments(&head, own.len() as u64).unwrap_err()
        };
        assert!(with(18, &[8, 0]).contains("machine 8"));
        assert!(with(4, &[1]).contains("64-bit"));
        assert!(with(32, &[0xff; 8]).contains("program headers"));
        assert!(with(54, &[0, 0]).contains("program headers"));
        assert!(with(64 + 8, &[0xff; 8]).contains("cut off"));
    }
}
