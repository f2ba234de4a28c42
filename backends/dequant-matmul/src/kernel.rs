//! The products. Written once over [`Lanes`], compiled once per instruction set and type of the copy, in one order of k
//! whatever the shape.
#[cfg(target_arch = "x86_64")]
use crate::simd::{Avx2, Avx512};
use crate::{
    io::{Out, Rows},
    prepare::{Dense, LANES},
    simd::{Isa, Lanes, Portable},
};
use half::{bf16, f16};
use q4_core::DType;
use std::ops::Range;

/// Columns of dx a task computes together.
pub(crate) const COLUMNS: usize = 8;
/// Most of k that is summed in one pair of chains. Bounds the rounding error.
const CHAIN: usize = 64;
/// Most rows that are multiplied straight from the stream of weights.
const FEW: usize = 4;
/// Blocks of 16 output rows that share a stretch of x while it is in the first-level cache.
const STRIP: usize = 4;
/// Input rows whose sums are kept while the weights pass by.
const ROWS: usize = 32;
/// Bytes ahead of the element in use.
const AHEAD: usize = 4096;

macro_rules! on_every_isa {
    ($(#[$doc:meta])* $name:ident, $body:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The range is inside the weight, no other task has any of it, and the rows have the columns stated.
        pub(crate) unsafe fn $name(w: &Dense, x: &Rows<'_>, y: &Out<'_>, range: Range<usize>) {
            #[inline(always)]
            unsafe fn typed<L: Lanes>(w: &Dense, x: &Rows<'_>, y: &Out<'_>, range: Range<usize>) {
                // SAFETY: forwarded; the type is the one the copy was made in.
                unsafe {
                    match w.y {
                        DType::F16 => $body::<L, f16>(w, x, y, range),
                        DType::BF16 => $body::<L, bf16>(w, x, y, range),
                        _ => $body::<L, f32>(w, x, y, range),
                    }
                }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f")]
            unsafe fn avx512(w: &Dense, x: &Rows<'_>, y: &Out<'_>, range: Range<usize>) {
                // SAFETY: this function enables the features.
                unsafe { typed::<Avx512>(w, x, y, range) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2(w: &Dense, x: &Rows<'_>, y: &Out<'_>, range: Range<usize>) {
                // SAFETY: this function enables the features.
                unsafe { typed::<Avx2>(w, x, y, range) }
            }
            // SAFETY: `Isa::choose` found the features; the rest is the caller's promise.
            unsafe {
                match w.isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => avx512(w, x, y, range),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => avx2(w, x, y, range),
                    _ => typed::<Portable>(w, x, y, range),
                }
            }
        }
    };
}

on_every_isa! {
    /// `y[:, 16·range] = x W^T` for blocks of 16 output rows. `x` has k columns, `y` n.
    forward, forward_on
}
on_every_isa! {
    /// `dx[:, range] = dy W`. `dy` has n columns rounded up to 16 and the rows' scales in it, `dx` k.
    /// Each lane sums its rows of W in order, then the lanes are added as a tree.
    backward, backward_on
}

/// A type of the copy: how 16 of it become f32.
trait Stored: bytemuck::Pod {
    /// # Safety
    /// As in [`Lanes`].
    unsafe fn load<L: Lanes>(p: *const Self) -> L::F;
}
macro_rules! stored {
    ($($t:ty = $load:ident),*) => { $(
        impl Stored for $t {
            #[inline(always)]
            unsafe fn load<L: Lanes>(p: *const Self) -> L::F {
                // SAFETY: forwarded.
                unsafe { L::$load(p) }
            }
        }
    )* };
}
stored!(f32 = load, f16 = load_f16, bf16 = load_bf16);

#[inline(always)]
unsafe fn forward_on<L: Lanes, T: Stored>(w: &Dense, x: &Rows<'_>, y: &Out<'_>, blocks: Range<usize>) {
    // SAFETY: forwarded.
    unsafe {
        match x.m {
            1 => few::<L, T, 1>(w, x, y, blocks),
            2 => few::<L, T, 2>(w, x, y, blocks),
            3 => few::<L, T, 3>(w, x, y, blocks),
            FEW => few::<L, T, FEW>(w, x, y, blocks),
            _ => many::<L, T>(w, x, y, blocks),
        }
    }
}

/// As many blocks in flight as the registers hold.
#[inline(always)]
unsafe fn few<L: Lanes, T: Stored, const M: usize>(
    w: &Dense,
    x: &Rows<'_>,
    y: &Out<'_>,
    blocks: Range<usize>,
) {
    let width = L::ACCUMULATORS / (2 * M);
    let mut b = blocks.start;
    while b < blocks.end {
        let left = blocks.end - b;
        // SAFETY: blocks b to b + width are inside the range.
        unsafe {
            if width >= 4 && left >= 4 {
                stream::<L, T, 4, M>(w, x, y, b);
                b += 4;
            } else if width >= 2 && left >= 2 {
                stream::<L, T, 2, M>(w, x, y, b);
                b += 2;
            } else {
                stream::<L, T, 1, M>(w, x, y, b);
                b += 1;
            }
        }
    }
}

/// `M` rows of x against `B` blocks.
#[inline(always)]
unsafe fn stream<L: Lanes, T: Stored, const B: usize, const M: usize>(
    w: &Dense,
    x: &Rows<'_>,
    y: &Out<'_>,
    b0: usize,
) {
    let k = w.info.k;
    // SAFETY: a block has k lines of 16 elements, x has k columns.
    unsafe {
        let rows: [*const T; B] = std::array::from_fn(|b| w.block::<T>(b0 + b).as_ptr());
        let x: [*const f32; M] = std::array::from_fn(|r| x.row(r));
        let mut total = [[L::splat(0.0); B]; M];
        for start in (0..k).step_by(CHAIN) {
            let len = CHAIN.min(k - start);
            let mut acc = [[[L::splat(0.0); 2]; B]; M];
            for i in (start..start + len / 2 * 2).step_by(2) {
                for b in 0..B {
                    let p = rows[b].add(i * LANES);
                    L::prefetch(p.cast::<u8>().wrapping_add(AHEAD));
                    L::prefetch(p.cast::<u8>().wrapping_add(AHEAD + LANES * size_of::<T>()));
                    for j in 0..2 {
                        let v = T::load::<L>(p.add(j * LANES));
                        for r in 0..M {
                            acc[r][b][j] = L::fma(v, L::splat(*x[r].add(i + j)), acc[r][b][j]);
                        }
                    }
                }
            }
            if len % 2 == 1 {
                let i = start + len - 1;
                for b in 0..B {
                    let v = T::load::<L>(rows[b].add(i * LANES));
                    for r in 0..M {
                        acc[r][b][0] = L::fma(v, L::splat(*x[r].add(i)), acc[r][b][0]);
                    }
                }
            }
            for r in 0..M {
                for b in 0..B {
                    total[r][b] = L::add(total[r][b], L::add(acc[r][b][0], acc[r][b][1]));
                }
            }
        }
        for r in 0..M {
            for b in 0..B {
                let mut lanes = [0.0; LANES];
                L::store(total[r][b], lanes.as_mut_ptr());
                put(w, y, r, b0 + b, &lanes);
            }
        }
    }
}

/// A line of sums or of widened weights.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Sums([f32; LANES]);

/// Any number of rows: 64 of k of 16 rows are widened once to a tile and used by up to 32 rows of x.
#[inline(always)]
unsafe fn many<L: Lanes, T: Stored>(w: &Dense, x: &Rows<'_>, y: &Out<'_>, blocks: Range<usize>) {
    let k = w.info.k;
    let mut tile = [Sums([0.0; LANES]); CHAIN];
    let mut totals = [[Sums([0.0; LANES]); ROWS]; STRIP];
    for b0 in blocks.clone().step_by(STRIP) {
        let width = STRIP.min(blocks.end - b0);
        for r0 in (0..x.m).step_by(ROWS) {
            let rows = ROWS.min(x.m - r0);
            totals.as_flattened_mut().fill(Sums([0.0; LANES]));
            for start in (0..k).step_by(CHAIN) {
                let len = CHAIN.min(k - start);
                for b in 0..width {
                    // SAFETY: as in `stream`; the tile holds a chain, the totals hold `rows`.
                    unsafe {
                        let from = w.block::<T>(b0 + b).as_ptr().add(start * LANES);
                        for i in 0..len {
                            L::store(T::load::<L>(from.add(i * LANES)), tile[i].0.as_mut_ptr());
                        }
                        against_rows::<L>(&tile, x, start, len, r0, rows, &mut totals[b]);
                    }
                }
            }
            for b in 0..width {
                for r in 0..rows {
                    // SAFETY: only this task has this block.
                    unsafe { put(w, y, r0 + r, b0 + b, &totals[b][r].0) };
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn against_rows<L: Lanes>(
    tile: &[Sums; CHAIN],
    x: &Rows<'_>,
    start: usize,
    len: usize,
    r0: usize,
    rows: usize,
    totals: &mut [Sums; ROWS],
) {
    let width = L::ACCUMULATORS / 2;
    let mut r = 0;
    while r < rows {
        let left = rows - r;
        // SAFETY: rows r to r + step exist.
        unsafe {
            if width >= 8 && left >= 8 {
                tile_rows::<L, 8>(tile, x, start, len, r0, r, totals);
                r += 8;
            } else if width >= 4 && left >= 4 {
                tile_rows::<L, 4>(tile, x, start, len, r0, r, totals);
                r += 4;
            } else if left >= 2 {
                tile_rows::<L, 2>(tile, x, start, len, r0, r, totals);
                r += 2;
            } else {
                tile_rows::<L, 1>(tile, x, start, len, r0, r, totals);
                r += 1;
            }
        }
    }
}

/// One chain of `R` rows of x, in the order of `stream`.
#[inline(always)]
unsafe fn tile_rows<L: Lanes, const R: usize>(
    tile: &[Sums; CHAIN],
    x: &Rows<'_>,
    start: usize,
    len: usize,
    r0: usize,
    at: usize,
    totals: &mut [Sums; ROWS],
) {
    // SAFETY: `at + R <= ROWS`, `len <= CHAIN`, and x has k columns.
    unsafe {
        let x: [*const f32; R] = std::array::from_fn(|r| x.row(r0 + at + r).add(start));
        let tile = tile.as_ptr().cast::<f32>();
        let mut acc = [[L::splat(0.0); 2]; R];
        for i in (0..len / 2 * 2).step_by(2) {
            let (even, odd) = (L::load(tile.add(i * LANES)), L::load(tile.add((i + 1) * LANES)));
            for r in 0..R {
                acc[r][0] = L::fma(even, L::splat(*x[r].add(i)), acc[r][0]);
                acc[r][1] = L::fma(odd, L::splat(*x[r].add(i + 1)), acc[r][1]);
            }
        }
        if len % 2 == 1 {
            let last = L::load(tile.add((len - 1) * LANES));
            for r in 0..R {
                acc[r][0] = L::fma(last, L::splat(*x[r].add(len - 1)), acc[r][0]);
            }
        }
        for r in 0..R {
            let total = totals[at + r].0.as_mut_ptr();
            L::store(L::add(L::load(total), L::add(acc[r][0], acc[r][1])), total);
        }
    }
}

#[inline(always)]
unsafe fn backward_on<L: Lanes, T: Stored>(w: &Dense, dy: &Rows<'_>, dx: &Out<'_>, columns: Range<usize>) {
    let mut c = columns.start;
    while c < columns.end {
        let mut r = 0;
        while r < dy.m {
            let left = dy.m - r;
            // SAFETY: rows r to r + step and the columns exist.
            unsafe {
                match (left, columns.end - c >= COLUMNS) {
                    (1, true) => columns_back::<L, T, 1, COLUMNS>(w, dy, dx, c, r),
                    (2, true) => columns_back::<L, T, 2, COLUMNS>(w, dy, dx, c, r),
                    (_, true) => columns_back::<L, T, 3, COLUMNS>(w, dy, dx, c, r),
                    (_, false) => columns_back::<L, T, 1, 1>(w, dy, dx, c, r),
                }
            }
            r += if columns.end - c >= COLUMNS { 3 } else { 1 };
        }
        c += if columns.end - c >= COLUMNS { COLUMNS } else { 1 };
    }
}

/// `C` columns of W against `M` rows of dy.
#[inline(always)]
unsafe fn columns_back<L: Lanes, T: Stored, const M: usize, const C: usize>(
    w: &Dense,
    dy: &Rows<'_>,
    dx: &Out<'_>,
    c: usize,
    r0: usize,
) {
    // SAFETY: as in `stream`; dy has 16 columns a block.
    unsafe {
        let dy: [*const f32; M] = std::array::from_fn(|r| dy.row(r0 + r));
        let mut acc = [[L::splat(0.0); C]; M];
        for b in 0..w.blocks() {
            let from = w.block::<T>(b).as_ptr().add(c * LANES);
            for j in 0..C {
                let v = T::load::<L>(from.add(j * LANES));
                for r in 0..M {
                    acc[r][j] = L::fma(v, L::load(dy[r].add(b * LANES)), acc[r][j]);
                }
            }
        }
        for r in 0..M {
            let mut out = [0.0; C];
            for j in 0..C {
                let mut lanes = [0.0; LANES];
                L::store(acc[r][j], lanes.as_mut_ptr());
                for half in [8, 4, 2, 1] {
                    for i in 0..half {
                        lanes[i] += lanes[i + half];
                    }
                }
                out[j] = lanes[0];
            }
            dx.put(r0 + r, c, &out);
        }
    }
}

/// # Safety
/// Only one task has this block.
#[inline(always)]
unsafe fn put(w: &Dense, y: &Out<'_>, r: usize, block: usize, lanes: &[f32; LANES]) {
    let first = block * LANES;
    let mut scaled = *lanes;
    scaled.iter_mut().zip(&w.scales[first..]).for_each(|(v, scale)| *v *= scale);
    // SAFETY: the caller's promise.
    unsafe { y.put(r, first, &scaled[..LANES.min(w.info.n - first)]) }
}
