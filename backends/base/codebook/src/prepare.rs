//! Interleaving sixteen output rows: what makes a lane an output row and a scale a vector.
use crate::layout::{CHAIN, CODES, LANES, QUAD, scale_group};
use crate::pages::Pages;
use bytemuck::{Pod, Zeroable};
use q4_core::formats::nf4;
use q4_core::rows::{RowsMut, activation_bytes};
use q4_core::{
    Absmax, Activations, Code, DType, Error, ExecPath, Footprint, LinearSpec, Nf4, Nf4Parts, NibbleOrder,
    OpSet, PreparedInfo, Q4Schema, Q4Weight, Result, Scratch, ThreadPool,
};
use q4_simd::Vectors;
use std::borrow::Cow;
use std::sync::Mutex;

/// Elements of k that are packed at a time: lines of a quad that stay in the first-level cache.
const PIECE: usize = 512;

/// One cache line: a value of each of 16 rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line<T>(pub [T; LANES]);

// SAFETY: 64 bytes without padding, of a type that any bits are a value of.
unsafe impl<T: Zeroable> Zeroable for Line<T> {}
// SAFETY: as above; only 4-byte types are used, so that the alignment adds nothing.
unsafe impl Pod for Line<u32> {}
// SAFETY: as above.
unsafe impl Pod for Line<f32> {}

/// An NF4 weight as the kernels read it. Resident: n·k/2 bytes of codes and 4 bytes per `group` of k and row,
/// n rounded up to 16; a double-quantised absmax is decoded once, here.
pub(crate) struct Packed {
    pub info: PreparedInfo,
    pub vectors: Vectors,
    pub x: DType,
    pub y: DType,
    /// Elements of k under one scale.
    pub group: usize,
    /// `[quads, k / 8, blocks of the quad]`: 8 codes of each of 16 rows. The last quad may have fewer
    /// blocks.
    pub codes: Pages<Line<u32>>,
    /// `[quads, k / group, blocks of the quad]`: a scale of each of 16 rows. Rows past n have scale 0.
    pub scales: Pages<Line<f32>>,
    /// Values of the codes.
    pub table: [f32; 16],
}

impl Packed {
    /// Blocks of 16 output rows.
    pub fn blocks(&self) -> usize {
        self.info.n.div_ceil(LANES)
    }

    /// Where the `lines` lines of `block` start in `codes` or `scales`, and how far apart they are.
    #[inline(always)]
    pub fn lines(&self, block: usize, lines: usize) -> (usize, usize) {
        let first = block / QUAD * QUAD;
        (first * lines + block - first, QUAD.min(self.blocks() - first))
    }
}

/// What [`prepare`] will keep and [`Packed`] will want as scratch.
pub(crate) fn footprint(spec: &LinearSpec, block: u32) -> Footprint {
    let (n, k) = (spec.n().next_multiple_of(LANES), spec.k);
    let groups = k / scale_group(k, block).max(1);
    let workspace = workspace(spec.x, &spec.activations, spec.max_m, spec.n(), k);
    Footprint { resident: (n * k / 2 + 4 * n * groups) as u64, workspace: workspace as u64 }
}

/// Scratch of a call of `m` rows: the converted activations (nothing for native f32) or the widened dy,
/// whichever is larger.
pub(crate) fn workspace(x: DType, activations: &Activations, m: usize, n: usize, k: usize) -> usize {
    activation_bytes(x, activations, m, k).max(Scratch::bytes(&[4 * m * n.next_multiple_of(LANES)]))
}

/// Repacks `w`. Fails on scales that are not finite.
pub(crate) fn prepare(
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    vectors: Vectors,
    threads: &ThreadPool,
) -> Result<Packed> {
    let Q4Schema::Nf4(format) = w.schema else {
        return Err(Error::new(Code::SchemaInvalid, "weight").need("nf4").have(w.schema.to_string()));
    };
    let (n, k) = (w.n(), w.k);
    let rows = Stored::rows(w, format)?;
    let group = scale_group(k, format.block);
    let blocks = n.div_ceil(LANES);
    let (words, groups) = (k / CODES, k / group);
    let mut codes = Pages::<Line<u32>>::zeroed(blocks * words)?;
    let mut scales = Pages::<Line<f32>>::zeroed(blocks * groups)?;
    let parts = codes.chunks_mut(QUAD * words).zip(scales.chunks_mut(QUAD * groups));
    let parts: Vec<_> = parts.map(Mutex::new).collect();
    threads.run(parts.len(), &|quad| {
        let mut part = parts[quad].lock().unwrap_or_else(|e| e.into_inner());
        let (codes, scales) = &mut *part;
        let first = quad * QUAD * LANES;
        let width = codes.len() / words;
        for from in (0..k).step_by(PIECE) {
            let to = (from + PIECE).min(k);
            for i in 0..(width * LANES).min(n - first) {
                let (block, lane) = (i / LANES, i % LANES);
                let (stored, row) = locate(&rows, first + i);
                let lines = codes[from / CODES * width..].iter_mut().skip(block).step_by(width);
                stored.words(row * k + from, to - from, lines, lane);
                for g in from.div_ceil(group)..to.div_ceil(group) {
                    scales[g * width + block].0[lane] = stored.scale(row * k + g * group);
                }
            }
        }
    });
    drop(parts);
    let info = PreparedInfo {
        backend: crate::NAME.into(),
        path,
        activations: spec.activations,
        n,
        k,
        resident_bytes: (size_of_val(&codes[..]) + size_of_val(&scales[..])) as u64,
        ops: OpSet::ALL,
    };
    Ok(Packed { info, vectors, x: spec.x, y: spec.y, group, codes, scales, table: nf4::CODEBOOK })
}

/// Scales of segment `i`, decoded; none is NaN or infinite.
pub(crate) fn finite_absmax<'a>(i: usize, absmax: &Absmax<'a>) -> Result<Cow<'a, [f32]>> {
    let absmax = absmax.to_f32()?;
    match absmax.iter().position(|a| !a.is_finite()) {
        None => Ok(absmax),
        Some(at) => Err(Error::new(Code::ScaleInvalid, format!("segment {i}: absmax of block {at}"))
            .need("a finite value")
            .have(absmax[at].to_string())),
    }
}

/// One stored matrix, flat.
struct Stored<'a> {
    rows: usize,
    codes: &'a [u8],
    absmax: Cow<'a, [f32]>,
    order: NibbleOrder,
    block: usize,
}

impl<'a> Stored<'a> {
    fn rows(w: &Q4Weight<'a>, format: Nf4) -> Result<Vec<Self>> {
        let (order, block) = (format.nibble_order, format.block as usize);
        let one = |(i, s): (usize, &q4_core::Segment<'a>)| {
            let Some(Nf4Parts { codes, absmax }) = format.of(&s.data) else {
                return Err(Error::new(Code::SchemaInvalid, format!("segment {i}")).need("the parts of nf4"));
            };
            let absmax = finite_absmax(i, &absmax)?;
            Ok(Self { rows: s.rows, codes: codes.as_bytes()?, absmax, order, block })
        };
        w.segments.iter().enumerate().map(one).collect()
    }

    /// Writes `count` codes from element `start` on, which is even, into `lane` of the lines: 8 in each, the
    /// first in the lowest nibble.
    #[inline]
    fn words<'l>(
        &self,
        start: usize,
        count: usize,
        lines: impl Iterator<Item = &'l mut Line<u32>>,
        lane: usize,
    ) {
        let bytes = &self.codes[start / 2..][..count / 2];
        let words = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).zip(lines);
        match self.order {
            NibbleOrder::LowFirst => words.for_each(|(w, line)| line.0[lane] = w),
            NibbleOrder::HighFirst => {
                words.for_each(|(w, line)| line.0[lane] = (w & 0x0f0f_0f0f) << 4 | w >> 4 & 0x0f0f_0f0f)
            }
        }
    }

    fn scale(&self, i: usize) -> f32 {
        self.absmax[i / self.block]
    }
}

fn locate<'s, 'a>(parts: &'s [Stored<'a>], row: usize) -> (&'s Stored<'a>, usize) {
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
    pub fn of(w: &Packed) -> Self {
        let (k, chain) = (w.info.k, w.group.min(CHAIN));
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
    pub fn codes(&self, w: &Packed, block: usize) -> (*const u32, usize) {
        let (at, step) = w.lines(block, self.words);
        (w.codes[at..].as_ptr().cast(), step * LANES)
    }
    #[inline(always)]
    pub fn scales(&self, w: &Packed, block: usize) -> (*const f32, usize) {
        let (at, step) = w.lines(block, self.groups);
        (w.scales[at..].as_ptr().cast(), step * LANES)
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
