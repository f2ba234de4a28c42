//! Keys and values of every layer, allocated once for the whole context.
use half::f16;
use half::slice::HalfFloatSliceExt;
use q4_core::{Code, Error, Result};
use q4_simd::LANES;
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

/// `[layer][k or v][kv head]`, of values `[position][head_dim]`, of keys blocks of 16 positions,
/// `[block][head_dim][16]`; positions `0..len` are valid.
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
        (kind.size() * layers * 2 * kv_heads * head_dim) as u64 * capacity.next_multiple_of(LANES) as u64
    }
    /// Room for `capacity` positions; pages are touched only when they are used.
    pub fn new(kind: KvType, layers: usize, kv_heads: usize, head_dim: usize, capacity: usize) -> Self {
        let elements = layers * 2 * kv_heads * head_dim * capacity.next_multiple_of(LANES);
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
    ///
    /// # Errors
    /// As [`room_for`](Self::room_for).
    pub fn advance(&mut self, rows: usize) -> Result<()> {
        self.room_for(rows)?;
        self.len += rows;
        Ok(())
    }
    /// Whether `rows` more positions fit.
    ///
    /// # Errors
    /// [`Code::ContextFull`] when they do not.
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

    /// Positions `0..count` of one head; of the keys, all of the blocks they are in.
    pub(super) fn head(&self, layer: usize, head: usize, count: usize) -> Head<'_> {
        fn of<'a, T>(all: &'a [T], keys: usize, values: usize, count: usize, d: usize) -> Positions<'a, T> {
            let blocks = count.next_multiple_of(LANES);
            Positions { keys: &all[keys..][..blocks * d], values: &all[values..][..count * d] }
        }
        let (keys, values) = (self.offset(layer, KEYS, head), self.offset(layer, VALUES, head));
        match &self.store {
            Store::F32(all) => Head::F32(of(all, keys, values, count, self.head_dim)),
            Store::F16(all) => Head::F16(of(all, keys, values, count, self.head_dim)),
        }
    }

    fn offset(&self, layer: usize, kv: usize, head: usize) -> usize {
        let positions = self.capacity.next_multiple_of(LANES);
        ((layer * 2 + kv) * self.kv_heads + head) * positions * self.head_dim
    }
}

/// Elements of a key that are converted at once.
const LINE: usize = 128;

const KEYS: usize = 0;
const VALUES: usize = 1;

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
    /// Writes one position of all heads; both are `[kv heads, head_dim]`.
    ///
    /// # Safety
    /// Nobody else writes or reads this position.
    pub(super) unsafe fn write(&self, position: usize, keys: &[f32], values: &[f32]) {
        let c = self.cache;
        let row = c.kv_heads * c.head_dim;
        assert!(position < c.capacity && keys.len() == row && values.len() == row, "position {position}");
        // SAFETY: inside the store by the assertion, and nobody else's by contract.
        unsafe {
            match self.start {
                Start::F32(p) => self.each_head(p, position, keys, values, |v, to| to.copy_from_slice(v)),
                Start::F16(p) => {
                    self.each_head(p, position, keys, values, |v, to| to.convert_from_f32_slice(v))
                }
            }
        }
    }

    /// # Safety
    /// As [`write`](Self::write), which checked what is inside.
    unsafe fn each_head<T: Copy + Default>(
        &self,
        start: *mut T,
        position: usize,
        keys: &[f32],
        values: &[f32],
        convert: impl Fn(&[f32], &mut [T]),
    ) {
        let (c, d) = (self.cache, self.cache.head_dim);
        let in_block = position / LANES * LANES * d + position % LANES;
        for (head, (keys, values)) in keys.chunks_exact(d).zip(values.chunks_exact(d)).enumerate() {
            // SAFETY: the elements of this position alone, by contract.
            unsafe {
                let to = start.add(c.offset(self.layer, VALUES, head) + position * d);
                convert(values, slice::from_raw_parts_mut(to, d));
                let mut to = start.add(c.offset(self.layer, KEYS, head) + in_block);
                for keys in keys.chunks(LINE) {
                    let mut line = [T::default(); LINE];
                    convert(keys, &mut line[..keys.len()]);
                    for (j, key) in line[..keys.len()].iter().enumerate() {
                        to.wrapping_add(j * LANES).write(*key);
                    }
                    to = to.wrapping_add(LINE * LANES);
                }
            }
        }
    }
}

/// Cached positions of one head, by element type.
#[derive(Clone, Copy)]
pub(super) enum Head<'a> {
    F32(Positions<'a, f32>),
    F16(Positions<'a, f16>),
}

/// Cached positions of one head.
#[derive(Clone, Copy)]
pub(super) struct Positions<'a, T> {
    /// `[block][head_dim][16]`; what lies behind the last position is anything.
    pub(super) keys: &'a [T],
    /// `[position][head_dim]`.
    pub(super) values: &'a [T],
}
