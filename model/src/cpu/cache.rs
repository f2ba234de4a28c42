//! Keys and values of every layer, allocated once for the whole context.
use half::f16;
use half::slice::HalfFloatSliceExt;
use q4_core::{Code, Error, Result};
use std::slice;

/// How cached keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// Exactly as computed.
    F32,
    /// Rounded to f16, to nearest even: half the memory and bandwidth. Sums over them stay f32.
    F16,
}

impl KvType {
    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }
}

/// `[layer][k or v][kv head][position][head_dim]`; positions `0..len` are valid.
pub struct KvCache {
    store: Store,
    kv_heads: usize,
    head_dim: usize,
    capacity: usize,
    len: usize,
}

enum Store {
    F32(Vec<f32>),
    F16(Vec<f16>),
}

impl KvCache {
    /// Bytes a cache of this size takes.
    pub fn bytes(kind: KvType, layers: usize, kv_heads: usize, head_dim: usize, capacity: usize) -> u64 {
        (kind.size() * layers * 2 * kv_heads * head_dim) as u64 * capacity as u64
    }
    /// Room for `capacity` positions; pages are touched only when they are used.
    pub fn new(kind: KvType, layers: usize, kv_heads: usize, head_dim: usize, capacity: usize) -> Self {
        let elements = layers * 2 * kv_heads * head_dim * capacity;
        let store = match kind {
            KvType::F32 => Store::F32(vec![0.0; elements]),
            KvType::F16 => Store::F16(vec![f16::ZERO; elements]),
        };
        Self { store, kv_heads, head_dim, capacity, len: 0 }
    }
    /// Positions that are valid: tokens accepted.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Nothing accepted yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Positions there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }
    /// Forgets everything behind the first `len` positions.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
    /// Accepts `rows` positions that were written.
    pub fn advance(&mut self, rows: usize) -> Result<()> {
        self.room_for(rows)?;
        self.len += rows;
        Ok(())
    }
    /// Fails unless `rows` more positions fit.
    pub fn room_for(&self, rows: usize) -> Result<()> {
        if self.len + rows > self.capacity {
            return Err(Error::new(Code::ContextFull, "the context is full")
                .need(format!("{} positions", self.len + rows))
                .have(format!("{} positions", self.capacity))
                .fix("raise --context, or start a new conversation"));
        }
        Ok(())
    }

    /// Writes keys and values of layer `layer`.
    pub(super) fn writer(&mut self, layer: usize) -> Writer<'_> {
        let start = match &mut self.store {
            Store::F32(v) => Start::F32(v.as_mut_ptr()),
            Store::F16(v) => Start::F16(v.as_mut_ptr()),
        };
        Writer { start, cache: self, layer }
    }

    /// Positions `0..count` of one head, `[count, head_dim]`.
    pub(super) fn rows(&self, layer: usize, kv: usize, head: usize, count: usize) -> Rows<'_> {
        let at = self.offset(layer, kv, head);
        let n = count * self.head_dim;
        match &self.store {
            Store::F32(v) => Rows::F32(&v[at..][..n]),
            Store::F16(v) => Rows::F16(&v[at..][..n]),
        }
    }

    fn offset(&self, layer: usize, kv: usize, head: usize) -> usize {
        ((layer * 2 + kv) * self.kv_heads + head) * self.capacity * self.head_dim
    }
}

/// Where tasks write the positions of one layer.
pub(super) struct Writer<'a> {
    start: Start,
    cache: &'a KvCache,
    layer: usize,
}

enum Start {
    F32(*mut f32),
    F16(*mut f16),
}

// SAFETY: a unique borrow of the cache; `write` makes the caller keep tasks apart.
unsafe impl Sync for Writer<'_> {}

impl Writer<'_> {
    /// Writes one position of all heads of `kv`; `values` is `[kv heads, head_dim]`.
    ///
    /// # Safety
    /// Nobody else writes or reads this position.
    pub(super) unsafe fn write(&self, kv: usize, position: usize, values: &[f32]) {
        let (c, d) = (self.cache, self.cache.head_dim);
        assert!(position < c.capacity && values.len() == c.kv_heads * d, "position {position}");
        for (head, values) in values.chunks_exact(d).enumerate() {
            let at = c.offset(self.layer, kv, head) + position * d;
            // SAFETY: inside the store by the assertion, and nobody else's by contract.
            unsafe {
                match self.start {
                    Start::F32(p) => slice::from_raw_parts_mut(p.add(at), d).copy_from_slice(values),
                    Start::F16(p) => slice::from_raw_parts_mut(p.add(at), d).convert_from_f32_slice(values),
                }
            }
        }
    }
}

/// Cached rows of one head.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
}
