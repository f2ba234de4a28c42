//! Keys and values of every layer, allocated once for all positions.
use crate::executor::{Shape, Sizes};
use crate::places::Places;
use half::f16;
use half::slice::HalfFloatSliceExt;
use q4_core::pages::advise_huge;
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

/// Sizes of what is cached of one position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers.
    pub layers: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl KvShape {
    /// Of a model.
    pub fn of(s: &Shape) -> Self {
        Self { layers: s.layers, kv_heads: s.kv_heads, head_dim: s.head_dim }
    }
    /// Bytes of one position.
    pub fn bytes(&self, kind: KvType) -> usize {
        kind.size() * self.layers * 2 * self.kv_heads * self.head_dim
    }
}

/// Keys and values of several sequences, in [pages](Places) of positions: `[page][layer][k or v][kv head]`,
/// of values `[position][head_dim]`, of keys blocks of 16 positions, `[block][head_dim][16]`.
pub struct KvCache {
    store: Store,
    shape: KvShape,
    /// Whose the pages are, and where rows of a step go.
    pub places: Places,
}

enum Store {
    F32(Vec<f32>),
    F16(Vec<f16>),
}

impl KvCache {
    /// Bytes a cache of one sequence of `capacity` positions takes.
    pub fn bytes(kind: KvType, shape: KvShape, capacity: usize) -> u64 {
        (shape.bytes(kind) * capacity.next_multiple_of(LANES)) as u64
    }

    /// One sequence of up to `capacity` positions, which is there from the start; memory is touched only
    /// where it is used. Steps have at most `rows` rows.
    pub fn new(kind: KvType, shape: KvShape, capacity: usize, rows: usize) -> Self {
        let page = capacity.next_multiple_of(LANES);
        Self::of(kind, shape, page, Places::one(capacity, page, rows))
    }

    /// `pages` pages of `page` positions, a multiple of 16, for the sequences of `sizes`, all empty.
    pub fn paged(kind: KvType, shape: KvShape, (page, pages): (usize, usize), sizes: &Sizes) -> Self {
        let Sizes { sequences, context, rows, .. } = *sizes;
        let places = Places::many((page, pages), (sequences, context), rows);
        let cache = Self::of(kind, shape, page * pages, places);
        // A page has all layers of its positions, megabytes that are used together.
        let (start, bytes) = match &cache.store {
            Store::F32(all) => (all.as_ptr().addr(), size_of_val(&all[..])),
            Store::F16(all) => (all.as_ptr().addr(), size_of_val(&all[..])),
        };
        advise_huge(start, bytes);
        cache
    }

    fn of(kind: KvType, shape: KvShape, positions: usize, places: Places) -> Self {
        let bytes = shape.bytes(kind) * positions;
        let store = match kind {
            KvType::F32 => Store::F32(vec![0.0; bytes / size_of::<f32>()]),
            KvType::F16 => Store::F16(vec![f16::ZERO; bytes / size_of::<f16>()]),
        };
        Self { store, shape, places }
    }

    /// Writes keys and values of layer `layer`.
    pub(super) fn writer(&mut self, layer: usize) -> Writer<'_> {
        let start = match &mut self.store {
            Store::F32(v) => Start::F32(v.as_mut_ptr()),
            Store::F16(v) => Start::F16(v.as_mut_ptr()),
        };
        Writer { start, cache: self, layer }
    }

    /// All elements, by their type.
    pub(super) fn elements(&self) -> Elements<'_> {
        match &self.store {
            Store::F32(all) => Elements::F32(all),
            Store::F16(all) => Elements::F16(all),
        }
    }

    /// The first `count` positions of one head in page number `at` of a sequence, of `all` elements; of the
    /// keys, all of the blocks they are in.
    pub(super) fn head<'a, T>(
        &self,
        all: &'a [T],
        (layer, head): (usize, usize),
        sequence: usize,
        (at, count): (usize, usize),
    ) -> Positions<'a, T> {
        let (page, d) = (self.places.pages(sequence)[at], self.shape.head_dim);
        let (keys, values) = (self.offset(page, layer, KEYS, head), self.offset(page, layer, VALUES, head));
        let blocks = count.next_multiple_of(LANES);
        Positions { keys: &all[keys..][..blocks * d], values: &all[values..][..count * d] }
    }

    fn offset(&self, page: u32, layer: usize, kv: usize, head: usize) -> usize {
        let KvShape { layers, kv_heads, head_dim } = self.shape;
        (((page as usize * layers + layer) * 2 + kv) * kv_heads + head) * self.places.page() * head_dim
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
    /// Position of a row of the step in its sequence.
    pub(super) fn position(&self, row: usize) -> usize {
        self.cache.places.position(row)
    }

    /// Writes all heads of a row of the step to its place; both are `[kv heads, head_dim]`.
    ///
    /// # Safety
    /// Nobody else writes this row, or reads its place.
    pub(super) unsafe fn write(&self, row: usize, keys: &[f32], values: &[f32]) {
        let c = self.cache;
        let width = c.shape.kv_heads * c.shape.head_dim;
        assert!(keys.len() == width && values.len() == width, "keys and values of all heads");
        let place = c.places.page_of(row);
        // SAFETY: inside the store by the assertion, and nobody else's by contract.
        unsafe {
            match self.start {
                Start::F32(p) => self.each_head(p, place, keys, values, |v, to| to.copy_from_slice(v)),
                Start::F16(p) => self.each_head(p, place, keys, values, |v, to| to.convert_from_f32_slice(v)),
            }
        }
    }

    /// # Safety
    /// As [`write`](Self::write), which checked what is inside.
    unsafe fn each_head<T: Copy + Default>(
        &self,
        start: *mut T,
        (page, position): (u32, usize),
        keys: &[f32],
        values: &[f32],
        convert: impl Fn(&[f32], &mut [T]),
    ) {
        let (c, d) = (self.cache, self.cache.shape.head_dim);
        let in_block = position / LANES * LANES * d + position % LANES;
        for (head, (keys, values)) in keys.chunks_exact(d).zip(values.chunks_exact(d)).enumerate() {
            // SAFETY: the elements of this position alone, by contract.
            unsafe {
                let to = start.add(c.offset(page, self.layer, VALUES, head) + position * d);
                convert(values, slice::from_raw_parts_mut(to, d));
                let mut to = start.add(c.offset(page, self.layer, KEYS, head) + in_block);
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

/// What a cache holds, by element type.
#[derive(Clone, Copy)]
pub(super) enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
}

/// Cached positions of one head.
#[derive(Clone, Copy)]
pub(super) struct Positions<'a, T> {
    /// `[block][head_dim][16]`; what lies behind the last position is anything.
    pub(super) keys: &'a [T],
    /// `[position][head_dim]`.
    pub(super) values: &'a [T],
}
