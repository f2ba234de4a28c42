//! Writes small GGUF files, right ones and wrong ones.
#![allow(dead_code, missing_docs, reason = "every test uses its part")]

/// What a file is made of.
#[derive(Clone)]
pub struct File {
    pub version: u32,
    pub alignment: u64,
    /// Instead of the real numbers of tensors and of entries.
    pub counts: [Option<u64>; 2],
    pub entries: Vec<Vec<u8>>,
    pub tensors: Vec<Info>,
    /// Bytes behind the last tensor.
    pub tail: usize,
}

/// A tensor whose bytes count up.
#[derive(Clone)]
pub struct Info {
    pub name: String,
    /// As in the file: the innermost first.
    pub extents: Vec<u64>,
    pub kind: u32,
    pub length: u64,
    /// Instead of the place behind the tensor before it.
    pub offset: Option<u64>,
}

pub fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// A key, a type and the bytes of a value.
pub fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [&text(key)[..], &kind.to_le_bytes(), value].concat()
}

/// The bytes of an array.
pub fn array(kind: u32, elements: &[Vec<u8>]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &(elements.len() as u64).to_le_bytes(), &elements.concat()].concat()
}

impl File {
    pub fn new() -> Self {
        let (entries, tensors) = (Vec::new(), Vec::new());
        Self { version: 3, alignment: 32, counts: [None; 2], entries, tensors, tail: 0 }
    }

    pub fn entry(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.entries.push(entry(key, kind, value));
        self
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.entry(key, 8, &text(value))
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.entry(key, 4, &value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.entry(key, 6, &value.to_le_bytes())
    }

    pub fn flag(self, key: &str, value: bool) -> Self {
        self.entry(key, 7, &[value.into()])
    }

    pub fn texts(self, key: &str, values: &[&str]) -> Self {
        let elements: Vec<_> = values.iter().map(|v| text(v)).collect();
        self.entry(key, 9, &array(8, &elements))
    }

    pub fn i32s(self, key: &str, values: &[i32]) -> Self {
        let elements: Vec<_> = values.iter().map(|v| v.to_le_bytes().to_vec()).collect();
        self.entry(key, 9, &array(5, &elements))
    }

    pub fn tensor(mut self, name: &str, extents: &[u64], kind: u32, length: u64) -> Self {
        let (name, extents) = (name.to_owned(), extents.to_vec());
        self.tensors.push(Info { name, extents, kind, length, offset: None });
        self
    }

    /// The same without what an earlier call wrote for that key.
    pub fn without(mut self, key: &str) -> Self {
        let head = text(key);
        self.entries.retain(|e| !e.starts_with(&head));
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        let real = [self.tensors.len(), self.entries.len()];
        for (stated, real) in self.counts.iter().zip(real) {
            bytes.extend(stated.unwrap_or(real as u64).to_le_bytes());
        }
        bytes.extend(self.entries.concat());
        let mut data = Vec::new();
        for t in &self.tensors {
            bytes.extend(text(&t.name));
            bytes.extend((t.extents.len() as u32).to_le_bytes());
            t.extents.iter().for_each(|e| bytes.extend(e.to_le_bytes()));
            bytes.extend(t.kind.to_le_bytes());
            bytes.extend(t.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend((0..t.length).map(|i| i as u8));
            self.pad(&mut data);
        }
        if !data.is_empty() || self.tail > 0 {
            self.pad(&mut bytes);
        }
        data.resize(data.len() + self.tail, 0xee);
        bytes.extend(data);
        bytes
    }

    fn pad(&self, bytes: &mut Vec<u8>) {
        bytes.resize(bytes.len().next_multiple_of(self.alignment.max(1) as usize), 0);
    }
}

/// A qwen3 of one layer with a tokenizer of six tokens and two merges.
pub fn small() -> File {
    File::new()
        .text("general.architecture", "qwen3")
        .u32("qwen3.block_count", 1)
        .u32("qwen3.context_length", 128)
        .u32("qwen3.embedding_length", 32)
        .u32("qwen3.feed_forward_length", 64)
        .u32("qwen3.attention.head_count", 4)
        .u32("qwen3.attention.head_count_kv", 2)
        .u32("qwen3.attention.key_length", 16)
        .u32("qwen3.attention.value_length", 16)
        .f32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
        .f32("qwen3.rope.freq_base", 1e6)
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "qwen2")
        .texts("tokenizer.ggml.tokens", &["a", "b", "ab", "abb", "<|endoftext|>", "<think>"])
        .i32s("tokenizer.ggml.token_type", &[1, 1, 1, 1, 3, 4])
        .texts("tokenizer.ggml.merges", &["a b", "ab b"])
        .u32("tokenizer.ggml.eos_token_id", 4)
        .tensor("token_embd.weight", &[32, 6], 1, 32 * 6 * 2)
        .tensor("output_norm.weight", &[32], 0, 32 * 4)
        .tensor("blk.0.attn_q.weight", &[32, 64], 2, 64 * 18)
        .tensor("blk.0.attn_q.scale", &[1], 0, 4)
}

/// Numbers that look random and are the same everywhere (Marsaglia's xorshift).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 11) as usize % n
    }
}
