//! From a stored weight to a prepared one: its parts by address, its scales checked, then the interleaving.
use crate::call::Threads;
use crate::kernels::pack::{StoredRows, spread_nibbles};
use crate::kernels::{GROUPS, LANES, SCALES_AT, TILE_BYTES};
use crate::memory::Arena;
use crate::weight::{Span, Weight};
use q4_core::formats::swizzle;
use q4_core::isa::Isa;
use q4_core::{
    Activations, Code, DType, Error, ExecPath, GlobalScale, LinearSpec, Nvfp4, Nvfp4Parts, OpSet,
    PreparedInfo, Q4Schema, Q4Weight, Result, ScaleLayout, ThreadPool,
};
use std::array;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A weight that is to be prepared.
pub struct Plan<'a> {
    /// Out features.
    pub n: usize,
    /// In features.
    pub k: usize,
    /// Row segments.
    pub parts: Vec<Part<'a>>,
    /// What happens to x.
    pub activations: Activations,
    /// Type of x.
    pub x: DType,
    /// Type of y.
    pub y: DType,
    /// Rows of the largest call.
    pub max_m: usize,
    /// How it will be computed.
    pub path: ExecPath,
}

/// One row segment, borrowed from the caller.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// Rows.
    pub rows: usize,
    /// k / 16.
    pub groups: usize,
    /// Per-tensor scale.
    pub global: Option<GlobalScale>,
    /// `[rows][k / 2]`.
    pub codes: &'a [u8],
    /// One for each group, in rows or in tiles.
    pub scales: &'a [u8],
    /// Scales in tiles of 128 rows by 4.
    pub is_tiled: bool,
}

impl<'a> Plan<'a> {
    /// Of a weight that is valid and that of `spec`.
    pub fn new(w: &Q4Weight<'a>, spec: &LinearSpec, path: ExecPath) -> Result<Self> {
        let other = || Error::new(Code::SchemaInvalid, "weight").need("nvfp4").have(w.schema.to_string());
        let Q4Schema::Nvfp4(Nvfp4 { scale_layout, .. }) = w.schema else { return Err(other()) };
        let part = |s: &q4_core::Segment<'a>| {
            let Nvfp4Parts { codes, scales, global } = Nvfp4Parts::of(&s.data).ok_or_else(other)?;
            Ok(Part {
                rows: s.rows,
                groups: w.k / 16,
                global,
                codes: codes.as_bytes()?,
                scales: scales.as_bytes()?,
                is_tiled: scale_layout == ScaleLayout::Swizzled128x4,
            })
        };
        Ok(Self {
            n: w.n(),
            k: w.k,
            parts: w.segments.iter().map(part).collect::<Result<_>>()?,
            activations: spec.activations,
            x: spec.x,
            y: spec.y,
            max_m: spec.max_m,
            path,
        })
    }

    /// Row segments with their per-tensor scales.
    pub fn spans(&self) -> Vec<Span> {
        let mut end = 0;
        let one = |p: &Part<'_>| {
            end += p.rows;
            Span { end, global: p.global }
        };
        self.parts.iter().map(one).collect()
    }

    /// Facts about the weight, which keeps so many bytes.
    pub fn info(&self, resident_bytes: u64) -> PreparedInfo {
        PreparedInfo {
            backend: crate::NAME.into(),
            path: self.path,
            activations: self.activations,
            n: self.n,
            k: self.k,
            resident_bytes,
            ops: OpSet::ALL,
        }
    }

    /// Packs it in host memory.
    ///
    /// # Errors
    /// [`Code::ScaleInvalid`] for a block scale that is NaN or has a sign, [`Code::OutOfMemory`].
    pub fn build(&self, isa: Isa, arena: &Arena, threads: &ThreadPool) -> Result<Weight> {
        let threads = Threads(threads);
        check_scales(&self.parts, &threads)?;
        let (blocks, tiles) = (self.n.div_ceil(LANES), self.k.div_ceil(GROUPS * 16));
        let bytes = blocks.checked_mul(tiles).and_then(|t| t.checked_mul(TILE_BYTES));
        let packed = arena.take(bytes.unwrap_or(usize::MAX))?;
        let spans = self.spans();
        let bytes = packed.bytes() + size_of::<Weight>() + size_of_val(&spans[..]);
        let w = Weight {
            info: self.info(bytes as u64),
            packed,
            n: self.n,
            k: self.k,
            spans,
            activations: self.activations,
            x: self.x,
            y: self.y,
            max_m: self.max_m,
            isa,
        };
        threads.each(threads.tasks(blocks), blocks, |blocks| {
            // SAFETY: tasks write disjoint row blocks.
            blocks.for_each(|b| unsafe { interleave(&self.parts, &w, b) });
        });
        Ok(w)
    }
}

impl Part<'_> {
    /// Codes of 8 bytes and the scale of group `g` of `row`.
    fn group(&self, row: usize, g: usize) -> ([u8; 8], u8) {
        let at = (row * self.groups + g) * 8;
        let codes = self.codes[at..at + 8].try_into().unwrap_or_default();
        (codes, self.scales[self.scale_at(row, g)])
    }

    /// Where the scale of group `g` of `row` is.
    pub fn scale_at(&self, row: usize, g: usize) -> usize {
        if self.is_tiled { swizzle::offset(row, g, self.groups) } else { row * self.groups + g }
    }

    /// Bytes from four scales of a row to the next four.
    fn scale_step(&self) -> usize {
        if self.is_tiled { swizzle::TILE_ROWS * swizzle::TILE_COLS } else { GROUPS }
    }

    /// The first group of `rows` whose scale is none: NaN, or with a sign.
    fn bad_scale(&self, rows: Range<usize>) -> Option<usize> {
        if !self.is_tiled {
            let all = &self.scales[rows.start * self.groups..rows.end * self.groups];
            if all.iter().fold(0, |m, &s| m.max(s)) < 0x7f {
                return None;
            }
        }
        let groups = |row| (0..self.groups).map(move |g| (row, g));
        rows.flat_map(groups)
            .find(|&(row, g)| self.scales[self.scale_at(row, g)] >= 0x7f)
            .map(|(row, g)| row * self.groups + g)
    }
}

/// Refuses scales that are NaN or have a sign.
fn check_scales(parts: &[Part<'_>], threads: &Threads<'_>) -> Result<()> {
    for (i, p) in parts.iter().enumerate() {
        let first = AtomicUsize::new(usize::MAX);
        threads.each(threads.tasks(p.rows), p.rows, |rows| {
            if let Some(at) = p.bad_scale(rows) {
                first.fetch_min(at, Ordering::Relaxed);
            }
        });
        match first.into_inner() {
            usize::MAX => {}
            at => return Err(bad_scale(i, p, at)),
        }
    }
    Ok(())
}

/// Group `at` of a segment, counted through its rows, has a scale that is none.
pub fn bad_scale(segment: usize, p: &Part<'_>, at: usize) -> Error {
    let (row, g) = (at / p.groups, at % p.groups);
    let place = p.scale_at(row, g);
    let what = format!("segment {segment}: block scale {place} (row {row}, block {g})");
    let byte = p.scales[place];
    Error::new(Code::ScaleInvalid, what).need("E4M3 without sign, not NaN").have(format!("{byte:#04x}"))
}

/// Writes row block `block`, every byte of it.
unsafe fn interleave(parts: &[Part<'_>], w: &Weight, block: usize) {
    let rows: [Option<(&Part<'_>, usize)>; LANES] = array::from_fn(|lane| {
        let mut row = block * LANES + lane;
        parts.iter().find_map(|p| {
            let inside = (row < p.rows).then_some((p, row));
            row = row.wrapping_sub(p.rows);
            inside
        })
    });
    let b = w.blocks(block, 1);
    let mut whole = 0;
    if let Some(stored) = stored_rows(&rows) {
        whole = b.groups / GROUPS;
        // SAFETY: the rows have that many whole tiles; the row block is this task's alone.
        unsafe { (w.kernels().pack)(&stored, whole, b.tiles.cast_mut()) };
    }
    for t in whole..w.tiles() {
        let groups = t * GROUPS..((t + 1) * GROUPS).min(b.groups);
        // Zero is a code of value 0 and a scale of 0.
        let (mut codes, mut scales) = ([[0u32; LANES]; 2 * GROUPS], [[0u8; LANES]; GROUPS]);
        for (lane, row) in rows.iter().enumerate() {
            let Some((p, row)) = *row else { continue };
            for (i, g) in groups.clone().enumerate() {
                let (bytes, scale) = p.group(row, g);
                let word = u64::from_le_bytes(bytes);
                (codes[2 * i][lane], codes[2 * i + 1][lane]) = (word as u32, (word >> 32) as u32);
                scales[i][lane] = scale;
            }
        }
        let codes = codes.map(|half| half.map(|word| spread_nibbles(word).to_le_bytes()));
        // SAFETY: tile `t` is inside the row block, which is this task's alone.
        unsafe {
            let tile = b.tiles.cast_mut().add(t * TILE_BYTES);
            tile.cast::<[u8; SCALES_AT]>().write_unaligned(*codes.as_ptr().cast());
            tile.add(SCALES_AT).cast::<[[u8; LANES]; GROUPS]>().write(scales);
        }
    }
    if let Some(reorder) = w.reorder() {
        // SAFETY: all of its tiles are written.
        unsafe { (reorder.to)(b.tiles.cast_mut(), w.tiles()) };
    }
}

/// Where sixteen rows start, if all of them exist and keep their scales in one arrangement.
fn stored_rows(rows: &[Option<(&Part<'_>, usize)>; LANES]) -> Option<StoredRows> {
    let (first, _) = rows[0]?;
    let mut stored = StoredRows {
        codes: [first.codes.as_ptr(); LANES],
        scales: [first.scales.as_ptr(); LANES],
        scale_step: first.scale_step(),
    };
    for (lane, row) in rows.iter().enumerate() {
        let (p, row) = row.filter(|(p, _)| p.is_tiled == first.is_tiled)?;
        stored.codes[lane] = p.codes.as_ptr().wrapping_add(row * p.groups * 8);
        stored.scales[lane] = p.scales.as_ptr().wrapping_add(p.scale_at(row, 0));
    }
    Some(stored)
}
