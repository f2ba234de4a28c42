//! Keys and values of every layer, allocated once for all positions.
use crate::executor::Shape;
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

/// Rows of a step that belong to one sequence, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which sequence.
    pub sequence: usize,
    /// How many rows, at least one.
    pub rows: usize,
}

/// Keys and values of several sequences, in pages of positions: `[page][layer][k or v][kv head]`, of values
/// `[position][head_dim]`, of keys blocks of 16 positions, `[block][head_dim][16]`. A sequence is a list of
/// pages, whose positions follow each other; positions `0..len` are valid. Who may have a page is decided
/// outside; several sequences may read one.
pub struct KvCache {
    store: Store,
    shape: KvShape,
    /// Positions of a page: whole blocks.
    page: usize,
    pages: usize,
    sequences: Vec<Sequence>,
    /// The rows of the step that was [placed](Self::place).
    places: Vec<Place>,
    parts: Vec<Part>,
}

#[derive(Default)]
struct Sequence {
    pages: Vec<u32>,
    len: usize,
    /// Positions it may have at most.
    most: usize,
}

/// Where a row of a step goes.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) sequence: usize,
    pub(super) position: usize,
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
        let mut cache = Self::paged(kind, shape, capacity.next_multiple_of(LANES), 1, 1, rows);
        cache.sequences[0] = Sequence { pages: vec![0], len: 0, most: capacity };
        cache
    }

    /// `pages` pages of `page` positions, a multiple of 16, for up to `sequences` sequences, all empty.
    pub fn paged(
        kind: KvType,
        shape: KvShape,
        page: usize,
        pages: usize,
        sequences: usize,
        rows: usize,
    ) -> Self {
        let bytes = shape.bytes(kind) * page * pages;
        let store = match kind {
            KvType::F32 => Store::F32(vec![0.0; bytes / size_of::<f32>()]),
            KvType::F16 => Store::F16(vec![f16::ZERO; bytes / size_of::<f16>()]),
        };
        let mut all = Vec::new();
        // A list of pages never grows in a step.
        all.resize_with(sequences, || Sequence {
            pages: Vec::with_capacity(pages),
            len: 0,
            most: page * pages,
        });
        let (places, parts) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
        Self { store, shape, page, pages, sequences: all, places, parts }
    }

    /// Positions of a sequence that are valid: tokens accepted.
    pub fn len(&self, sequence: usize) -> usize {
        self.sequences[sequence].len
    }
    /// Positions a sequence has room for.
    pub fn capacity(&self, sequence: usize) -> usize {
        let s = &self.sequences[sequence];
        (s.pages.len() * self.page).min(s.most)
    }
    /// Forgets everything of a sequence behind its first `len` positions; its pages stay.
    pub fn truncate(&mut self, sequence: usize, len: usize) {
        let s = &mut self.sequences[sequence];
        s.len = s.len.min(len);
    }
    /// Gives a sequence one more page.
    pub fn add_page(&mut self, sequence: usize, page: u32) {
        assert!((page as usize) < self.pages, "page {page} of {}", self.pages);
        self.sequences[sequence].pages.push(page);
    }
    /// Says that the first `len` positions of a sequence, which has the pages for them, are valid: another
    /// sequence wrote them.
    pub fn adopt(&mut self, sequence: usize, len: usize) {
        assert!(len <= self.capacity(sequence), "{len} positions of {}", self.capacity(sequence));
        self.sequences[sequence].len = len;
    }
    /// Pages of a sequence, first to last.
    pub fn pages(&self, sequence: usize) -> &[u32] {
        &self.sequences[sequence].pages
    }
    /// Takes all pages away.
    pub fn clear(&mut self, sequence: usize) {
        let s = &mut self.sequences[sequence];
        s.pages.clear();
        s.len = 0;
    }

    /// Says whose the rows of the next step are, part after part; a sequence has one part at most. The step
    /// [commits](Self::commit) them at its end.
    ///
    /// # Errors
    /// [`Code::ContextFull`] where a sequence has no room for its rows.
    pub fn place(&mut self, parts: &[Part]) -> Result<()> {
        self.places.clear();
        self.parts.clear();
        for part in parts {
            let (len, capacity) = (self.len(part.sequence), self.capacity(part.sequence));
            if len + part.rows > capacity {
                return Err(Error::new(Code::ContextFull, "the context is full")
                    .need(format!("{} positions", len + part.rows))
                    .have(format!("{capacity} positions"))
                    .fix("raise --context, or start a new conversation"));
            }
            let place = |row| Place { sequence: part.sequence, position: len + row };
            self.places.extend((0..part.rows).map(place));
            self.parts.push(*part);
        }
        Ok(())
    }
    /// Accepts the rows of the step.
    pub fn commit(&mut self) {
        for part in self.parts.drain(..) {
            self.sequences[part.sequence].len += part.rows;
        }
    }
    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }
    /// Where each of the `rows` rows of the step goes.
    ///
    /// # Errors
    /// [`Code::Internal`] where another number of rows was placed.
    pub(super) fn places(&self, rows: usize) -> Result<&[Place]> {
        match self.places.len() == rows {
            true => Ok(&self.places),
            false => Err(Error::new(Code::Internal, "rows of a step that have no place in the cache")
                .need(rows.to_string())
                .have(self.places.len().to_string())),
        }
    }
    /// Positions of a page.
    pub(super) fn page(&self) -> usize {
        self.page
    }

    /// Writes keys and values of layer `layer`.
    pub(super) fn writer(&mut self, layer: usize) -> Writer<'_> {
        let start = match &mut self.store {
            Store::F32(v) => Start::F32(v.as_mut_ptr()),
            Store::F16(v) => Start::F16(v.as_mut_ptr()),
        };
        Writer { start, cache: self, layer }
    }

    /// The first `count` positions of one head in page number `at` of a sequence; of the keys, all of the
    /// blocks they are in.
    pub(super) fn head(
        &self,
        layer: usize,
        head: usize,
        sequence: usize,
        at: usize,
        count: usize,
    ) -> Head<'_> {
        fn of<'a, T>(all: &'a [T], keys: usize, values: usize, count: usize, d: usize) -> Positions<'a, T> {
            let blocks = count.next_multiple_of(LANES);
            Positions { keys: &all[keys..][..blocks * d], values: &all[values..][..count * d] }
        }
        let page = self.sequences[sequence].pages[at];
        let (keys, values) = (self.offset(page, layer, KEYS, head), self.offset(page, layer, VALUES, head));
        match &self.store {
            Store::F32(all) => Head::F32(of(all, keys, values, count, self.shape.head_dim)),
            Store::F16(all) => Head::F16(of(all, keys, values, count, self.shape.head_dim)),
        }
    }

    fn offset(&self, page: u32, layer: usize, kv: usize, head: usize) -> usize {
        let KvShape { layers, kv_heads, head_dim } = self.shape;
        (((page as usize * layers + layer) * 2 + kv) * kv_heads + head) * self.page * head_dim
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
        self.cache.places[row].position
    }

    /// Writes all heads of a row of the step to its place; both are `[kv heads, head_dim]`.
    ///
    /// # Safety
    /// Nobody else writes this row, or reads its place.
    pub(super) unsafe fn write(&self, row: usize, keys: &[f32], values: &[f32]) {
        let c = self.cache;
        let Place { sequence, position } = c.places[row];
        let width = c.shape.kv_heads * c.shape.head_dim;
        assert!(position < c.capacity(sequence), "position {position} of sequence {sequence}");
        assert!(keys.len() == width && values.len() == width, "keys and values of all heads");
        let place = (c.sequences[sequence].pages[position / c.page], position % c.page);
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
