//! GGUF files as plain bytes, beside the reader under test: metadata as they lie there, tensors with their
//! data.
#![allow(dead_code, clippy::unwrap_used)]

/// A tensor as the file has it.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    /// The innermost first.
    pub extents: Vec<u64>,
    pub kind: u32,
    /// Instead of the place behind the tensor before it.
    pub offset: Option<u64>,
    pub data: Vec<u8>,
}

/// A file in pieces.
#[derive(Clone)]
pub struct File {
    /// Instead of the numbers of tensors and of entries.
    pub counts: [Option<u64>; 2],
    /// Keys, with type and bytes of their values.
    pub entries: Vec<(String, Vec<u8>)>,
    pub tensors: Vec<Tensor>,
}

const ALIGNMENT: usize = 32;

impl File {
    /// What a whole file has.
    pub fn parse(bytes: &[u8]) -> Self {
        let mut at = 8;
        let [count, entries] = [0; 2].map(|_: u8| u64_at(bytes, &mut at));
        let mut file = Self { counts: [None; 2], entries: Vec::new(), tensors: Vec::new() };
        for _ in 0..entries {
            let (key, start) = (text_at(bytes, &mut at), at);
            let kind = u32_at(bytes, &mut at);
            skip(bytes, &mut at, kind);
            file.entries.push((key, bytes[start..at].to_vec()));
        }
        let mut places = Vec::new();
        for _ in 0..count {
            let name = text_at(bytes, &mut at);
            let extents = (0..u32_at(bytes, &mut at)).map(|_| u64_at(bytes, &mut at)).collect();
            let kind = u32_at(bytes, &mut at);
            places.push(u64_at(bytes, &mut at) as usize);
            file.tensors.push(Tensor { name, extents, kind, offset: None, data: Vec::new() });
        }
        let data = &bytes[at.next_multiple_of(ALIGNMENT)..];
        let mut ends = places.clone();
        ends.push(data.len());
        ends.sort_unstable();
        for (tensor, start) in file.tensors.iter_mut().zip(places) {
            let end = ends.iter().find(|end| **end > start).unwrap();
            tensor.data = data[start..*end].to_vec();
        }
        file
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        for (stated, real) in self.counts.iter().zip([self.tensors.len(), self.entries.len()]) {
            bytes.extend(stated.unwrap_or(real as u64).to_le_bytes());
        }
        for (key, value) in &self.entries {
            bytes.extend(text(key));
            bytes.extend(value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            bytes.extend(text(&tensor.name));
            bytes.extend((tensor.extents.len() as u32).to_le_bytes());
            tensor.extents.iter().for_each(|e| bytes.extend(e.to_le_bytes()));
            bytes.extend(tensor.kind.to_le_bytes());
            bytes.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
            data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
        }
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        bytes.extend(data);
        bytes
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    /// A value of four bytes in place of what a key had.
    pub fn set(&mut self, key: &str, kind: u32, value: [u8; 4]) {
        let value = [kind.to_le_bytes(), value].concat();
        self.entries.retain(|entry| entry.0 != key);
        self.entries.push((key.into(), value));
    }
    /// A text in place of what a key had.
    pub fn text(&mut self, key: &str, value: &str) {
        let value = [&8u32.to_le_bytes()[..], &text(value)].concat();
        self.entries.retain(|entry| entry.0 != key);
        self.entries.push((key.into(), value));
    }
    pub fn u32(&mut self, key: &str, value: u32) {
        self.set(key, 4, value.to_le_bytes());
    }
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn u32_at(bytes: &[u8], at: &mut usize) -> u32 {
    *at += 4;
    u32::from_le_bytes(bytes[*at - 4..*at].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: &mut usize) -> u64 {
    *at += 8;
    u64::from_le_bytes(bytes[*at - 8..*at].try_into().unwrap())
}

fn text_at(bytes: &[u8], at: &mut usize) -> String {
    let length = u64_at(bytes, at) as usize;
    *at += length;
    String::from_utf8(bytes[*at - length..*at].to_vec()).unwrap()
}

fn skip(bytes: &[u8], at: &mut usize, kind: u32) {
    match kind {
        0 | 1 | 7 => *at += 1,
        2 | 3 => *at += 2,
        4..=6 => *at += 4,
        10..=12 => *at += 8,
        8 => drop(text_at(bytes, at)),
        9 => {
            let kind = u32_at(bytes, at);
            (0..u64_at(bytes, at)).for_each(|_| skip(bytes, at, kind));
        }
        other => panic!("type {other}"),
    }
}
