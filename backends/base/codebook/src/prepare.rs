//! Interleaving sixteen output rows: what makes a lane an output row and a scale a vector.
use crate::layout::{CHAIN, CODES, LANES, QUAD, scale_group};
use crate::pages::Pages;
use bytemuck::{Pod, Zeroable};
use q4_core::rows::{RowsMut, activation_bytes};
use q4_core::{
    Activations, DType, ExecPath, Footprint, LinearSpec, NibbleOrder, OpSet, PreparedInfo, Result, Scratch,
    ThreadPool,
};
use q4_simd::{Vector, Vectors, Widen};
use std::borrow::Cow;
use std::sync::Mutex;

/// Elements of k that are packed at a time: lines of a quad that stay in the first-level cache.
const PIECE: usize = 512;

/// A type that scales are kept in.
pub trait Scale: Widen + Pod + Send {}

impl<T: Widen + Pod + Send> Scale for T {}

/// Scales as they are stored; copied where they are not aligned.
///
/// # Panics
/// If the bytes are no whole number of scales.
pub fn scales<S: Scale>(bytes: &[u8]) -> Cow<'_, [S]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(scales) => Cow::Borrowed(scales),
        Err(_) => bytes.chunks_exact(size_of::<S>()).map(bytemuck::pod_read_unaligned).collect(),
    }
}

/// One cache line: a value of each of 16 rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line<T>(pub [T; LANES]);

// SAFETY: 64 bytes without padding, of a type that any bits are a value of.
unsafe impl<T: Zeroable> Zeroable for Line<T> {}
// SAFETY: as above; only 4-byte types are used, so that the alignment adds nothing.
unsafe impl Pod for Line<u32> {}

/// A weight as the kernels read it, with zero points or without. Resident: n·k/2 bytes of codes and a scale per
/// `group` of k and row, with a byte for its zero point, n rounded up to 16.
pub struct Packed<S, const ZEROS: bool = false> {
    pub(crate) info: PreparedInfo,
    pub(crate) vectors: Vectors,
    pub(crate) x: DType,
    pub(crate) y: DType,
    /// Elements of k under one scale.
    pub(crate) group: usize,
    /// `[quads, k / 8, blocks of the quad]`: 8 codes of each of 16 rows. The last quad may have fewer
    /// blocks.
    pub(crate) codes: Pages<Line<u32>>,
    /// `[quads, k / group, blocks of the quad]`: a scale of each of 16 rows. Rows past n have zeroes.
    pub(crate) scales: Pages<[S; LANES]>,
    /// As the scales: what is taken off a value before it is scaled; empty without zero points.
    pub(crate) zeros: Option<Pages<[u8; LANES]>>,
    /// Values of the codes.
    pub(crate) table: [f32; 16],
}

impl<S, const ZEROS: bool> Packed<S, ZEROS> {
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

/// What [`pack`] will keep of a weight with `scale` bytes of scale and zero point for `block` elements, and
/// [`Packed`] want as scratch.
pub fn footprint(spec: &LinearSpec, block: u32, scale: usize) -> Footprint {
    let (n, k) = (spec.n().next_multiple_of(LANES), spec.k);
    let groups = k / scale_group(k, block).max(1);
    let workspace = workspace(spec.x, &spec.activations, spec.max_m, spec.n(), k);
    Footprint { resident: (n * k / 2 + scale * n * groups) as u64, workspace: workspace as u64 }
}

/// Scratch of a call of `m` rows: the converted activations (nothing for native f32) or the widened dy,
/// whichever is larger.
pub(crate) fn workspace(x: DType, activations: &Activations, m: usize, n: usize, k: usize) -> usize {
    activation_bytes(x, activations, m, k).max(Scratch::bytes(&[4 * m * n.next_multiple_of(LANES)]))
}

/// What codes are: their values, and how many elements of the flattened matrix have a scale together.
#[derive(Clone, Copy, Debug)]
pub struct Codes {
    /// By code.
    pub values: [f32; 16],
    /// Order in a byte.
    pub order: NibbleOrder,
    /// Elements.
    pub block: u32,
}

/// One stored matrix, flat over its rows.
pub struct Stored<'a, S: Clone> {
    /// Out features.
    pub rows: usize,
    /// Two in a byte.
    pub codes: &'a [u8],
    /// One for each block.
    pub scales: Cow<'a, [S]>,
    /// One for each block, of weights with zero points.
    pub zeros: &'a [u8],
}

/// Repacks the segments of a weight with `k` in features. Rows past the last take a code of zero and a scale
/// of zero bytes, whatever these mean: what is computed with them is not kept.
///
/// # Errors
/// [`Code::OutOfMemory`](q4_core::Code::OutOfMemory).
///
/// # Panics
/// If a segment is shorter than its rows.
pub fn pack<S: Scale, const ZEROS: bool>(
    (backend, path): (&'static str, ExecPath),
    parts: &[Stored<'_, S>],
    of: &Codes,
    spec: &LinearSpec,
    vectors: Vectors,
    threads: &ThreadPool,
) -> Result<Packed<S, ZEROS>> {
    let (n, k) = (parts.iter().map(|p| p.rows).sum::<usize>(), spec.k);
    let group = scale_group(k, of.block);
    let blocks = n.div_ceil(LANES);
    let (words, groups) = (k / CODES, k / group);
    let mut codes = Pages::<Line<u32>>::zeroed(blocks * words)?;
    let mut scales = Pages::<[S; LANES]>::zeroed(blocks * groups)?;
    let mut zeros = ZEROS.then(|| Pages::<[u8; LANES]>::zeroed(blocks * groups)).transpose()?;
    let mut taken: Vec<_> = match &mut zeros {
        Some(zeros) => zeros.chunks_mut(QUAD * groups).collect(),
        None => Vec::new(),
    };
    taken.resize_with(blocks.div_ceil(QUAD), Default::default);
    let quads = codes.chunks_mut(QUAD * words).zip(scales.chunks_mut(QUAD * groups)).zip(taken);
    let quads: Vec<_> = quads.map(Mutex::new).collect();
    threads.run(quads.len(), &|quad| {
        let mut quarter = quads[quad].lock().unwrap_or_else(|e| e.into_inner());
        let ((codes, scales), zeros) = &mut *quarter;
        let first = quad * QUAD * LANES;
        let width = codes.len() / words;
        for from in (0..k).step_by(PIECE) {
            let to = (from + PIECE).min(k);
            for i in 0..(width * LANES).min(n - first) {
                let (block, lane) = (i / LANES, i % LANES);
                let (stored, row) = locate(parts, first + i);
                let lines = codes[from / CODES * width..].iter_mut().skip(block).step_by(width);
                let bytes = &stored.codes[(row * k + from) / 2..][..(to - from) / 2];
                put(bytes, of.order, lines, lane);
                for g in from.div_ceil(group)..to.div_ceil(group) {
                    let at = (row * k + g * group) / of.block as usize;
                    scales[g * width + block][lane] = stored.scales[at];
                    if ZEROS {
                        zeros[g * width + block][lane] = stored.zeros[at];
                    }
                }
            }
        }
    });
    drop(quads);
    let info = PreparedInfo {
        backend: backend.into(),
        path,
        activations: spec.activations,
        n,
        k,
        resident_bytes: (size_of_val(&codes[..])
            + size_of_val(&scales[..])
            + zeros.as_ref().map_or(0, |zeros| size_of_val(&zeros[..]))) as u64,
        ops: OpSet::ALL,
    };
    Ok(Packed { info, vectors, x: spec.x, y: spec.y, group, codes, scales, zeros, table: of.values })
}

/// Writes codes into `lane` of the lines: 8 in each, the first in the lowest nibble.
#[inline]
fn put<'l>(bytes: &[u8], order: NibbleOrder, lines: impl Iterator<Item = &'l mut Line<u32>>, lane: usize) {
    let words = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).zip(lines);
    match order {
        NibbleOrder::LowFirst => words.for_each(|(w, line)| line.0[lane] = w),
        NibbleOrder::HighFirst => {
            words.for_each(|(w, line)| line.0[lane] = (w & 0x0f0f_0f0f) << 4 | w >> 4 & 0x0f0f_0f0f)
        }
    }
}

fn locate<'s, 'a, S: Clone>(parts: &'s [Stored<'a, S>], row: usize) -> (&'s Stored<'a, S>, usize) {
    let mut row = row;
    for part in parts {
        if row < part.rows {
            return (part, row);
        }
        row -= part.rows;
    }
    unreachable!("row {row} past the last segment");
}

/// Loop bounds and offsets of one weight.
pub(crate) struct Shape {
    n: usize,
    words: usize,
    groups: usize,
    pub chains: usize,
    pub chains_per_group: usize,
    /// 2 to 8.
    pub words_per_chain: usize,
}

impl Shape {
    #[inline(always)]
    pub fn of<S, const ZEROS: bool>(w: &Packed<S, ZEROS>) -> Self {
        let (k, chain) = (w.info.k, scale_group(w.group, CHAIN as u32));
        Self {
            n: w.info.n,
            words: k / CODES,
            groups: k / w.group,
            chains: k / chain,
            chains_per_group: w.group / chain,
            words_per_chain: chain / CODES,
        }
    }
    /// The first line of a block, and the elements from one to the next; scales have the same step.
    #[inline(always)]
    pub fn codes<S, const ZEROS: bool>(&self, w: &Packed<S, ZEROS>, block: usize) -> (*const u32, usize) {
        let (at, step) = w.lines(block, self.words);
        (w.codes[at..].as_ptr().cast(), step * LANES)
    }
    #[inline(always)]
    pub fn scales<S: Scale, const ZEROS: bool>(
        &self,
        w: &Packed<S, ZEROS>,
        block: usize,
    ) -> (*const S, usize) {
        let (at, step) = w.lines(block, self.groups);
        (w.scales[at..].as_ptr().cast(), step * LANES)
    }
    /// What is added to the values of a block under scale `at`, an index into those from [`Self::scales`] on:
    /// its zero points, negative. Nothing where there are none.
    ///
    /// # Safety
    /// As of [`Vector`]'s functions; there is such a scale.
    #[inline(always)]
    pub unsafe fn offset<L: Vector, S, const ZEROS: bool>(
        &self,
        w: &Packed<S, ZEROS>,
        block: usize,
        at: usize,
    ) -> L::F {
        // SAFETY: the caller's; zero points lie as scales do.
        unsafe {
            match &w.zeros {
                Some(zeros) if ZEROS => {
                    let (first, _) = w.lines(block, self.groups);
                    let zeros: *const u8 = zeros[first..].as_ptr().cast();
                    L::mul(L::load_u8(zeros.add(at)), L::splat(-1.0))
                }
                _ => L::splat(0.0),
            }
        }
    }
    /// # Safety
    /// Only one task has this block.
    #[inline(always)]
    pub unsafe fn put(&self, y: &RowsMut<'_>, r: usize, block: usize, lanes: &[f32; LANES]) {
        let first = block * LANES;
        // SAFETY: the caller's promise.
        unsafe { y.put(r, first, &lanes[..LANES.min(self.n - first)]) }
    }
}
