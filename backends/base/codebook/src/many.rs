//! GEMM: the product with many rows. A chain of k is decoded once to tiles and used by up to [`Lanes::MANY`]
//! rows of x.
//!
//! What these rows have for the chain is copied together first, while the chain before it is multiplied: rows
//! of x lie in as many pages, where nothing fetches ahead by itself, and often a multiple of a cache's ways
//! apart, where they would push each other out before the second block of outputs comes.
use crate::encoding::Encoding;
use crate::layout::{CHAIN, CODES, LANES, QUAD};
use crate::prepare::{Line, Packed};
use crate::shape::Shape;
use crate::simd::{Lanes, MOST_ROWS, Tables};
use q4_core::rows::{Rows, RowsMut};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Blocks that are decoded at a time, at most.
const PAIR: usize = 2;
/// Blocks for which rows of x are copied once. Their sums of [`MOST_ROWS`] are 120 KiB, on the stack of a task:
/// half of a small second level.
const WIDTH: usize = 4 * QUAD;

/// What rows of x have for a chain, `[rows, len]`.
type Part = [Line<f32>; MOST_ROWS * CHAIN / LANES];
/// Sums of the rows with a block.
type Totals = [Line<f32>; MOST_ROWS];

/// What a task works in. Few rows use little of it, so it is not cleared: all is written before it is read.
struct Room {
    tiles: [[Line<f32>; CHAIN]; PAIR],
    parts: [Part; 2],
    totals: [Totals; WIDTH],
}

/// One chain of k: up to [`PAIR`] blocks of it, and some rows of x.
struct Chain<L: Lanes> {
    tiles: [*mut f32; PAIR],
    scales: [L::F; PAIR],
    part: *const f32,
    len: usize,
    rows: usize,
}

/// The blocks of `blocks`, whole quads, for any number of rows.
///
/// # Safety
/// The range is inside the weight, no other task has any of it, and the rows have the columns of the weight.
#[inline(always)]
pub(crate) unsafe fn gemm<L: Lanes, E: Encoding>(
    w: &Packed<E>,
    x: &Rows<'_>,
    y: &RowsMut<'_>,
    blocks: Range<usize>,
) {
    const { assert!(L::MANY <= MOST_ROWS && L::MANY.is_multiple_of(L::TILE_ROWS)) }
    let shape = Shape::of(w);
    let len = shape.words_per_chain * CODES;
    // Groups of about one size: a tile costs the same however few rows use it.
    let most = x.m().div_ceil(x.m().div_ceil(L::MANY)).next_multiple_of(L::TILE_ROWS);
    let mut room = MaybeUninit::<Room>::uninit();
    let room = room.as_mut_ptr();
    // SAFETY: places in the room; the features are there.
    let (tiles, parts, totals, scales, tables) = unsafe {
        let tiles: [*mut f32; PAIR] =
            [(&raw mut (*room).tiles[0]).cast(), (&raw mut (*room).tiles[1]).cast()];
        let parts: [*mut f32; 2] = [(&raw mut (*room).parts[0]).cast(), (&raw mut (*room).parts[1]).cast()];
        let totals: *mut Totals = (&raw mut (*room).totals).cast();
        (tiles, parts, totals, [L::splat(0.0); PAIR], Tables::<L>::of(&w.values))
    };
    let mut step = Chain::<L> { tiles, scales, part: parts[0], len, rows: 0 };
    for b0 in blocks.clone().step_by(WIDTH) {
        let width = WIDTH.min(blocks.end - b0);
        for r0 in (0..x.m()).step_by(most) {
            step.rows = most.min(x.m() - r0);
            for b in 0..width {
                for r in 0..step.rows {
                    // SAFETY: a room has as many totals.
                    unsafe { total(totals, b, r).write(Line([0.0; LANES])) };
                }
            }
            // Copies what row r has for a chain, and asks for what it has for the one behind.
            let fetch = |chain: usize, r: usize, part: *mut f32| {
                let row = x.row(r0 + r).as_ptr().wrapping_add(chain * len);
                for i in (0..len).step_by(LANES) {
                    // SAFETY: x has k columns, a part has room for MOST_ROWS chains; a prefetch of any
                    // address is harmless.
                    unsafe {
                        L::prefetch(row.wrapping_add(len + i));
                        L::store(L::load(row.add(i)), part.add(r * len + i));
                    }
                }
            };
            (0..step.rows).for_each(|r| fetch(0, r, parts[0]));
            for chain in 0..shape.chains {
                let next = parts[(chain + 1) % 2];
                step.part = parts[chain % 2];
                for b in (0..width).step_by(L::BLOCKS) {
                    let count = L::BLOCKS.min(width - b);
                    let ahead = |r| {
                        if b == 0 && chain + 1 < shape.chains {
                            fetch(chain + 1, r, next);
                        }
                    };
                    // SAFETY: the blocks exist, the part was fetched.
                    unsafe {
                        for c in 0..count {
                            step.decode(&tables, w, &shape, b0 + b + c, chain, c);
                        }
                        match count {
                            PAIR => step.multiply::<PAIR>(totals.add(b), ahead),
                            _ => step.multiply::<1>(totals.add(b), ahead),
                        }
                    }
                }
            }
            for r in 0..step.rows {
                for b in 0..width {
                    // SAFETY: only this task has this block, and its totals were written.
                    unsafe { shape.put(y, r0 + r, b0 + b, &(*total(totals, b, r)).0) };
                }
            }
        }
    }
}

/// The total of row `r` with block `b`.
///
/// # Safety
/// There is room for it.
#[inline(always)]
unsafe fn total(totals: *mut Totals, b: usize, r: usize) -> *mut Line<f32> {
    // SAFETY: the caller's.
    unsafe { totals.add(b).cast::<Line<f32>>().add(r) }
}

impl<L: Lanes> Chain<L> {
    /// Decodes chain `chain` of `block` to tile `c`.
    #[inline(always)]
    unsafe fn decode<E: Encoding>(
        &mut self,
        tables: &Tables<L>,
        w: &Packed<E>,
        shape: &Shape,
        block: usize,
        chain: usize,
        c: usize,
    ) {
        // SAFETY: every index is below the length the layout has for n and k; a tile holds a chain.
        unsafe {
            let place = shape.place(w, block);
            let at = chain / shape.chains_per_group;
            place.fetch::<L>(at, w.group, 1);
            let group = place.group(at, w.group);
            let first = chain * shape.words_per_chain;
            for i in 0..shape.words_per_chain {
                place.codes.fetch::<L, E>(first + i);
                let tile = self.tiles[c].add(i * CODES * LANES);
                L::unpack::<E>(tables, &group, &place.codes, first + i, tile);
            }
            self.scales[c] = group.outer::<E>();
        }
    }

    /// Adds the products of all rows with `C` tiles; `ahead` is called for each row, spread over the work.
    #[inline(always)]
    unsafe fn multiply<const C: usize>(&self, totals: *mut Totals, ahead: impl Fn(usize)) {
        let mut r = 0;
        while r < self.rows {
            let left = self.rows - r;
            // SAFETY: rows r to r + count exist.
            let count = unsafe {
                if L::TILE_ROWS >= 6 && left >= 6 {
                    self.few::<6, C>(r, totals)
                } else if L::TILE_ROWS >= 4 && left >= 4 {
                    self.few::<4, C>(r, totals)
                } else if L::TILE_ROWS == 3 && left >= 3 {
                    self.few::<3, C>(r, totals)
                } else if left >= 2 {
                    self.few::<2, C>(r, totals)
                } else {
                    self.few::<1, C>(r, totals)
                }
            };
            (r..r + count).for_each(&ahead);
            r += count;
        }
    }

    /// `R` rows from `at` on, in the order of `stream`; returns how many they are.
    #[inline(always)]
    unsafe fn few<const R: usize, const C: usize>(&self, at: usize, totals: *mut Totals) -> usize {
        // SAFETY: `at + R <= MOST_ROWS`, and there are C tiles.
        unsafe {
            let x: [*const f32; R] = std::array::from_fn(|r| self.part.add((at + r) * self.len));
            let tiles: [*const f32; C] = std::array::from_fn(|c| self.tiles[c].cast_const());
            let acc = L::tile(tiles, self.len, x);
            for r in 0..R {
                for c in 0..C {
                    let total: *mut f32 = total(totals, c, at + r).cast();
                    let sum = L::add(acc[r][c][0], acc[r][c][1]);
                    L::store(L::fma(self.scales[c], sum, L::load(total)), total);
                }
            }
        }
        R
    }
}
