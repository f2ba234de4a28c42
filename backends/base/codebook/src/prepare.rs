//! Interleaving sixteen output rows: what makes a lane an output row and a scale a vector.
use crate::encoding::{Encoding, Kept, NEST, Offset, Values, is_wide, share};
use crate::integers::{self, Integers};
use crate::layout::{CODES, LANES, QUAD, scale_group};
use crate::pages::Pages;
use crate::stored::{PIECE, Run, Stored};
use bytemuck::{Pod, Zeroable};
use half::f16;
use q4_core::rows::activation_bytes;
use q4_core::{
    Activations, DType, ExecPath, Footprint, LinearSpec, OpSet, PreparedInfo, Result, Scratch, ThreadPool,
};
use q4_simd::Vectors;
use std::marker::PhantomData;
use std::sync::Mutex;

/// One cache line: a value of each of 16 rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line<T>(pub [T; LANES]);

// SAFETY: 64 bytes without padding, of a type that any bits are a value of.
unsafe impl<T: Zeroable> Zeroable for Line<T> {}
// SAFETY: as above; only 4-byte types are used, so that the alignment adds nothing.
unsafe impl Pod for Line<u32> {}

/// Lines of one number of each of 16 rows, as wide as they are kept.
pub(crate) struct Lines {
    pub kept: Kept,
    bytes: Pages<u8>,
}

impl Lines {
    /// `count` lines of zero bytes.
    fn zeroed(kept: Kept, count: usize) -> Result<Self> {
        Ok(Self { kept, bytes: Pages::zeroed(count * LANES * kept.size())? })
    }

    /// The lines from `at` on: kernels walk through all of them from there.
    #[inline(always)]
    pub fn from(&self, at: usize) -> &[u8] {
        &self.bytes[at * LANES * self.kept.size()..]
    }

    /// The number of `lane` in line `at`.
    pub fn get(&self, at: usize, lane: usize) -> f32 {
        let size = self.kept.size();
        self.kept.get(&self.from(at)[lane * size..][..size])
    }
}

/// Some of [`Lines`], to be written.
#[derive(Default)]
struct LinesMut<'a> {
    kept: Option<Kept>,
    bytes: &'a mut [u8],
}

impl LinesMut<'_> {
    fn put(&mut self, at: usize, lane: usize, value: f32) {
        if let Some(kept) = self.kept {
            let size = kept.size();
            kept.put(value, &mut self.bytes[(at * LANES + lane) * size..][..size]);
        }
    }
}

/// A weight as the kernels read it. Resident: n·k/2 bytes of codes, n·k/8 for each bit above four, and for
/// each group and row a scale and the byte of its offset, n rounded up to 16.
pub struct Packed<E: Encoding> {
    pub(crate) info: PreparedInfo,
    pub(crate) vectors: Vectors,
    pub(crate) x: DType,
    pub(crate) y: DType,
    /// Elements of k under one scale.
    pub(crate) group: usize,
    /// `[quads, k / 8, blocks of the quad]`: 8 codes of each of 16 rows. The last quad may have fewer
    /// blocks.
    pub(crate) codes: Pages<Line<u32>>,
    /// `[quads, k / 8 / share, blocks of the quad]`: what codes have above four bits. Nibble `j` has those of
    /// code `j` of each word that shares it, the first in its lowest bits. Of bytes, `codes` has the first
    /// and this the second four of eight.
    pub(crate) high: Option<Pages<Line<u32>>>,
    /// `[quads, k / group, blocks of the quad]`: a scale of each of 16 rows. Rows past n have zeroes.
    pub(crate) scales: Lines,
    /// As the scales: zero points, minima or biases.
    pub(crate) offsets: Option<Lines>,
    /// `[quads, k / NEST, blocks of the quad]`: what scales, and the negative of what minima are multiplied
    /// by.
    pub(crate) nests: Option<Pages<[[f16; LANES]; 2]>>,
    pub(crate) values: Values,
    /// Where they are such.
    pub(crate) integers: Option<Integers>,
    pub(crate) _of: PhantomData<E>,
}

impl<E: Encoding> Packed<E> {
    /// Blocks of 16 output rows.
    pub(crate) fn blocks(&self) -> usize {
        self.info.n.div_ceil(LANES)
    }

    /// Where the `lines` lines of `block` start in `codes` or `scales`, and how far apart they are.
    #[inline(always)]
    pub(crate) fn lines(&self, block: usize, lines: usize) -> (usize, usize) {
        let first = block / QUAD * QUAD;
        (first * lines + block - first, QUAD.min(self.blocks() - first))
    }
}

/// What [`pack`] will keep of a weight with `bytes` beside four bits of each code for `block` elements, and
/// [`Packed`] want as scratch.
pub fn footprint(spec: &LinearSpec, block: u32, bytes: usize) -> Footprint {
    let (n, k) = (spec.n().next_multiple_of(LANES), spec.k);
    let groups = k / scale_group(k, block).max(1);
    let workspace = workspace(spec.x, &spec.activations, spec.max_m, spec.n(), k);
    Footprint { resident: (n * k / 2 + bytes * n * groups) as u64, workspace: workspace as u64 }
}

/// Scratch of a call of `m` rows: the converted activations (nothing for native f32) or the widened dy,
/// whichever is larger.
pub(crate) fn workspace(x: DType, activations: &Activations, m: usize, n: usize, k: usize) -> usize {
    inputs_bytes(x, activations, m, k).max(Scratch::bytes(&[4 * m * n.next_multiple_of(LANES)]))
}

/// That of the activations, as numbers or as the integers they are.
pub(crate) fn inputs_bytes(x: DType, activations: &Activations, m: usize, k: usize) -> usize {
    let numbers = activation_bytes(x, activations, m, k);
    if *activations == Activations::Int8 { numbers.max(integers::bytes(x, m, k)) } else { numbers }
}

/// Lines of one kind of a whole weight, quad by quad; as many times nothing where there are none.
fn quads<T: Pod>(pages: &mut Option<Pages<T>>, lines: usize, count: usize) -> Vec<&mut [T]> {
    let mut all: Vec<_> = match pages {
        Some(pages) => pages.chunks_mut(QUAD * lines).collect(),
        None => Vec::new(),
    };
    all.resize_with(count, Default::default);
    all
}

/// The same of lines of numbers.
fn quads_of(lines: Option<&mut Lines>, each: usize, count: usize) -> Vec<LinesMut<'_>> {
    let mut all: Vec<_> = match lines {
        Some(Lines { kept, bytes }) => {
            let quad = QUAD * each * LANES * kept.size();
            bytes.chunks_mut(quad).map(|bytes| LinesMut { kept: Some(*kept), bytes }).collect()
        }
        None => Vec::new(),
    };
    all.resize_with(count, Default::default);
    all
}

/// The lines of a quad.
struct Quad<'a> {
    codes: &'a mut [Line<u32>],
    high: &'a mut [Line<u32>],
    scales: LinesMut<'a>,
    offsets: LinesMut<'a>,
    nests: &'a mut [[[f16; LANES]; 2]],
}

/// Repacks the segments of a weight with `k` in features and scales, `kept` so, for `block` elements of them.
/// Rows past the last take a code of zero and a scale of zero bytes, whatever these mean: what is computed
/// with them is not kept.
///
/// # Errors
/// [`Code::OutOfMemory`](q4_core::Code::OutOfMemory).
///
/// # Panics
/// If a segment is shorter than its rows, or nested scales are kept in something else than `E` says.
pub(crate) fn pack<E: Encoding>(
    (backend, path): (&'static str, ExecPath),
    segments: &[&dyn Stored],
    (values, kept, block): (Values, Kept, u32),
    spec: &LinearSpec,
    vectors: Vectors,
    threads: &ThreadPool,
) -> Result<Packed<E>> {
    assert!(E::NESTED.is_none_or(|of| of == kept), "kernels take nested scales as {:?}", E::NESTED);
    let (n, k) = (segments.iter().map(|s| s.rows()).sum::<usize>(), spec.k);
    let group = scale_group(k, block);
    let blocks = n.div_ceil(LANES);
    let (words, groups, nests) = (k / CODES, k / group, k / NEST);
    let shared = words / share::<E>();
    let mut codes = Some(Pages::<Line<u32>>::zeroed(blocks * words)?);
    let mut high = is_wide::<E>().then(|| Pages::<Line<u32>>::zeroed(blocks * shared)).transpose()?;
    let mut scales = Lines::zeroed(kept, blocks * groups)?;
    let has_offsets = E::OFFSET != Offset::None;
    let mut offsets =
        has_offsets.then(|| Lines::zeroed(E::OFFSET.kept(kept), blocks * groups)).transpose()?;
    let mut nested = E::NESTED.map(|_| Pages::<[[f16; LANES]; 2]>::zeroed(blocks * nests)).transpose()?;
    let count = blocks.div_ceil(QUAD);
    let mut parts = (
        quads(&mut codes, words, count).into_iter(),
        quads(&mut high, shared, count).into_iter(),
        quads_of(Some(&mut scales), groups, count).into_iter(),
        quads_of(offsets.as_mut(), groups, count).into_iter(),
        quads(&mut nested, nests, count).into_iter(),
    );
    let mut all = Vec::with_capacity(count);
    while let (Some(codes), Some(high), Some(scales), Some(offsets), Some(nests)) =
        (parts.0.next(), parts.1.next(), parts.2.next(), parts.3.next(), parts.4.next())
    {
        all.push(Mutex::new(Quad { codes, high, scales, offsets, nests }));
    }
    threads.run(count, &|quad| {
        let mut to = all[quad].lock().unwrap_or_else(|e| e.into_inner());
        let first = quad * QUAD * LANES;
        let width = to.codes.len() / words;
        let mut run = Run::empty();
        for from in (0..k).step_by(PIECE) {
            let len = PIECE.min(k - from);
            for i in 0..(width * LANES).min(n - first) {
                let (segment, row) = locate(segments, first + i);
                segment.read(row, from, len, &mut run);
                to.put::<E>(&run, (from, len, group), (i / LANES, width), i % LANES);
            }
        }
    });
    drop(all);
    let Some(codes) = codes else { unreachable!("made above") };
    let bytes = |pages: Option<usize>| pages.unwrap_or(0);
    let info = PreparedInfo {
        backend: backend.into(),
        path,
        activations: spec.activations,
        n,
        k,
        resident_bytes: (size_of_val(&codes[..])
            + bytes(high.as_ref().map(|p| size_of_val(&p[..])))
            + scales.bytes.len()
            + bytes(offsets.as_ref().map(|lines| lines.bytes.len()))
            + bytes(nested.as_ref().map(|p| size_of_val(&p[..])))) as u64,
        ops: OpSet::ALL,
    };
    Ok(Packed {
        info,
        vectors,
        x: spec.x,
        y: spec.y,
        group,
        codes,
        high,
        scales,
        offsets,
        nests: nested,
        integers: Integers::of::<E>(&values, vectors),
        values,
        _of: PhantomData,
    })
}

impl Quad<'_> {
    /// Puts `len` elements of a row from `from` on into `lane` of block `block` of `width`.
    #[inline]
    fn put<E: Encoding>(
        &mut self,
        run: &Run,
        (from, len, group): (usize, usize, usize),
        (block, width): (usize, usize),
        lane: usize,
    ) {
        let words = from / CODES..(from + len) / CODES;
        let lines = self.codes[words.start * width..].iter_mut().skip(block).step_by(width);
        lines.zip(&run.codes[..words.len()]).for_each(|(line, word)| line.0[lane] = *word);
        if is_wide::<E>() {
            let share = share::<E>();
            for (at, of) in run.high[..words.len()].chunks_exact(share).enumerate() {
                let line = &mut self.high[(words.start / share + at) * width + block].0[lane];
                *line = of.iter().enumerate().fold(0, |all, (i, bits)| all | bits << (i * E::HIGH));
            }
        }
        for (at, g) in (from.div_ceil(group)..(from + len).div_ceil(group)).enumerate() {
            self.scales.put(g * width + block, lane, run.scales[at]);
            self.offsets.put(g * width + block, lane, run.offsets[at]);
        }
        if E::NESTED.is_some() {
            for (at, [scale, min]) in run.nests[..len / NEST].iter().enumerate() {
                let to = &mut self.nests[(from / NEST + at) * width + block];
                (to[0][lane], to[1][lane]) = (*scale, -*min);
            }
        }
    }
}

fn locate<'a>(segments: &[&'a dyn Stored], row: usize) -> (&'a dyn Stored, usize) {
    let mut row = row;
    for segment in segments {
        if row < segment.rows() {
            return (*segment, row);
        }
        row -= segment.rows();
    }
    unreachable!("row {row} past the last segment");
}
