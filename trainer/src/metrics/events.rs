//! Numbers of a run as TensorBoard reads them: records of length, checksum, event, checksum.
//!
//! An event is a protocol buffer of few fields: wall time, step, and a tag with its value; they are written
//! out here rather than with a generator for them.
use q4_core::{Code, Error, Result};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A file of events, in a folder that TensorBoard is pointed at.
#[derive(Debug)]
pub struct Events {
    path: PathBuf,
    file: File,
}

impl Events {
    /// A new file in `dir`. What files of before have beyond step `after`, where a run goes on, is no longer
    /// shown; nothing of them where another run begins.
    pub fn open(dir: &Path, after: Option<u64>) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(|e| failed(dir, &e))?;
        let now = since_epoch();
        // TensorBoard reads files of a folder in the order of their names: seconds, then what tells apart.
        let name = |i: u32| {
            dir.join(format!("events.out.tfevents.{:010}.q4-{}-{i}", now.as_secs(), std::process::id()))
        };
        let path = (0..).map(name).find(|p| !p.exists()).unwrap_or_else(|| name(0));
        let file =
            OpenOptions::new().create_new(true).append(true).open(&path).map_err(|e| failed(&path, &e))?;
        let mut events = Self { path, file };
        events.put(&event(now, 0, |e| bytes(e, 3, b"brain.Event:2")))?;
        // SessionLog { status: START }: the steps from here on are written again.
        let from = after.map_or(0, |step| step + 1);
        events.put(&event(now, from, |e| bytes(e, 7, &[1 << 3, 1])))?;
        Ok(events)
    }

    /// One number at a step.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f64) -> Result<()> {
        let mut of_tag = Vec::new();
        bytes(&mut of_tag, 1, tag.as_bytes());
        of_tag.push(2 << 3 | 5);
        of_tag.extend((value as f32).to_le_bytes());
        let mut summary = Vec::new();
        bytes(&mut summary, 1, &of_tag);
        let event = event(since_epoch(), step, |e| bytes(e, 5, &summary));
        self.put(&event)
    }

    /// All of a record or nothing.
    fn put(&mut self, event: &[u8]) -> Result<()> {
        let length = (event.len() as u64).to_le_bytes();
        let record = [&length[..], &masked(&length), event, &masked(event)].concat();
        let before = self.file.metadata().map_err(|e| failed(&self.path, &e))?.len();
        self.file.write_all(&record).map_err(|e| {
            // A full disk may have taken half of it.
            let _ = self.file.set_len(before);
            failed(&self.path, &e)
        })
    }
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn failed(path: &Path, e: &std::io::Error) -> Error {
    Error::new(Code::Io, format!("{}: {e}", path.display()))
}

/// Wall time and step, and what else an event has.
fn event(at: Duration, step: u64, more: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut event = vec![1 << 3 | 1];
    event.extend(at.as_secs_f64().to_le_bytes());
    event.push(2 << 3);
    varint(&mut event, step);
    more(&mut event);
    event
}

/// A field with a length.
fn bytes(out: &mut Vec<u8>, field: u8, value: &[u8]) {
    out.push(field << 3 | 2);
    varint(out, value.len() as u64);
    out.extend(value);
}

fn varint(out: &mut Vec<u8>, mut x: u64) {
    while x >= 0x80 {
        out.push(x as u8 | 0x80);
        x >>= 7;
    }
    out.push(x as u8);
}

/// CRC-32C, rotated and shifted as these records have it.
fn masked(data: &[u8]) -> [u8; 4] {
    let crc = !data.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0x82F6_3B78 } else { 0 })
    });
    crc.rotate_right(15).wrapping_add(0xA282_EAD8).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CRC-32C of RFC 3720's example, then masked by hand.
    #[test]
    fn checksums_are_those_of_the_format() {
        let crc = 0x8A91_36AAu32; // 32 bytes of zero
        assert_eq!(masked(&[0; 32]), (crc.rotate_right(15).wrapping_add(0xA282_EAD8)).to_le_bytes());
    }

    #[test]
    fn a_file_is_records_end_to_end() {
        let dir = tempfile::tempdir().expect("directory");
        let mut events = Events::open(dir.path(), Some(7)).expect("open");
        events.scalar("train/loss", 300, 1.5).expect("written");
        assert_ne!(Events::open(dir.path(), None).expect("another").path, events.path);
        let file = std::fs::read(&events.path).expect("read");
        let (mut at, mut found) = (0, Vec::new());
        while at < file.len() {
            let length: [u8; 8] = file[at..at + 8].try_into().expect("length");
            let end = at + 12 + u64::from_le_bytes(length) as usize;
            assert_eq!(file[at + 8..at + 12], masked(&length));
            assert_eq!(file[end..end + 4], masked(&file[at + 12..end]));
            found.push(file[at + 12..end].to_vec());
            at = end + 4;
        }
        assert_eq!(found.len(), 3);
        assert!(found[0].ends_with(b"brain.Event:2") && found[1].ends_with(&[7 << 3 | 2, 2, 8, 1]));
        let value = [&[2 << 3 | 5][..], &1.5f32.to_le_bytes()].concat();
        assert!(found[2].ends_with(&value) && found[2][9..12] == [2 << 3, 0xac, 2], "{:?}", found[2]);
    }
}
