//! The products. Written once over [`Lanes`], compiled once per instruction set, in one order of k whatever
//! the shape.
use crate::{
    encoding::{Encoding, share},
    layout::{CODES, LANES},
    many::gemm,
    prepare::Packed,
    shape::{Group, Shape},
    simd::{Lanes, Span, Tables},
};
use q4_core::rows::{Rows, RowsMut};
use q4_simd::on;
use std::ops::Range;

/// Most rows that are multiplied straight from the registers a code is decoded to.
const GEMV_ROWS: usize = 4;

/// `y[:, 16·range] = x W^T` for blocks of 16 output rows, whole quads. `x` has k columns, `y` n.
///
/// # Safety
/// The range is inside the weight, no other task has any of it, and the rows have the columns stated.
pub(crate) unsafe fn forward<E: Encoding>(w: &Packed<E>, x: &Rows<'_>, y: &RowsMut<'_>, range: Range<usize>) {
    // SAFETY: the caller's.
    on!(w.vectors, V => unsafe { forward_on::<V, E>(w, x, y, range) })
}

/// `dx[:, 8·range] = dy W` for words of 8 input features. `dy` has n columns rounded up to 16, `dx` k.
/// Each lane sums its rows of W in order, then the lanes are added as a tree.
///
/// # Safety
/// As of [`forward`].
pub(crate) unsafe fn backward<E: Encoding>(
    w: &Packed<E>,
    dy: &Rows<'_>,
    dx: &RowsMut<'_>,
    range: Range<usize>,
) {
    // SAFETY: the caller's.
    on!(w.vectors, V => unsafe { backward_on::<V, E>(w, dy, dx, range) })
}

#[inline(always)]
unsafe fn forward_on<L: Lanes, E: Encoding>(
    w: &Packed<E>,
    x: &Rows<'_>,
    y: &RowsMut<'_>,
    blocks: Range<usize>,
) {
    // SAFETY: forwarded.
    unsafe {
        match x.m() {
            0 => {}
            1 => gemv::<L, E, 1>(w, x, y, blocks),
            2 => gemv::<L, E, 2>(w, x, y, blocks),
            3 => gemv::<L, E, 3>(w, x, y, blocks),
            GEMV_ROWS => gemv::<L, E, GEMV_ROWS>(w, x, y, blocks),
            _ => gemm::<L, E>(w, x, y, blocks),
        }
    }
}

/// As many blocks in flight as the registers hold.
#[inline(always)]
unsafe fn gemv<L: Lanes, E: Encoding, const M: usize>(
    w: &Packed<E>,
    x: &Rows<'_>,
    y: &RowsMut<'_>,
    blocks: Range<usize>,
) {
    let width = L::ACCUMULATORS / (2 * M);
    // SAFETY: the features are there.
    let tables = &unsafe { Tables::of(&w.values) };
    let mut b = blocks.start;
    while b < blocks.end {
        let left = blocks.end - b;
        // SAFETY: blocks b to b + width are inside the range.
        unsafe {
            if width >= 4 && left >= 4 {
                stream::<L, E, 4, M>(tables, w, x, y, b);
                b += 4;
            } else if width >= 2 && left >= 2 {
                stream::<L, E, 2, M>(tables, w, x, y, b);
                b += 2;
            } else {
                stream::<L, E, 1, M>(tables, w, x, y, b);
                b += 1;
            }
        }
    }
}

/// `M` rows of x against `B` blocks of one quad, decoded in registers.
#[inline(always)]
unsafe fn stream<L: Lanes, E: Encoding, const B: usize, const M: usize>(
    tables: &Tables<L>,
    w: &Packed<E>,
    x: &Rows<'_>,
    y: &RowsMut<'_>,
    b0: usize,
) {
    let shape = Shape::of(w);
    // SAFETY: every index is below the length the layout has for n and k; x has k columns.
    unsafe {
        let place = shape.place(w, b0);
        let x: [*const f32; M] = std::array::from_fn(|r| x.row(r).as_ptr());
        let mut totals = [[L::splat(0.0); B]; M];
        // Counted: a division takes as long as the chain that it would be for.
        let (mut group, mut within) = (0, 0);
        for chain in 0..shape.chains {
            place.fetch::<L>(group, w.group, B);
            let words = chain * shape.words_per_chain..(chain + 1) * shape.words_per_chain;
            L::chain::<E, B, M>(tables, &Span { place, group, len: w.group, words }, x, &mut totals);
            within += 1;
            if within == shape.chains_per_group {
                (group, within) = (group + 1, 0);
            }
        }
        for r in 0..M {
            for b in 0..B {
                let mut lanes = [0.0; LANES];
                L::store(totals[r][b], lanes.as_mut_ptr());
                shape.put(y, r, b0 + b, &lanes);
            }
        }
    }
}

#[inline(always)]
unsafe fn backward_on<L: Lanes, E: Encoding>(
    w: &Packed<E>,
    dy: &Rows<'_>,
    dx: &RowsMut<'_>,
    words: Range<usize>,
) {
    for word in words {
        let mut r = 0;
        while r < dy.m() {
            // SAFETY: rows r to r + step exist.
            unsafe {
                match dy.m() - r {
                    1 => word_back::<L, E, 1>(w, dy, dx, word, r),
                    2 => word_back::<L, E, 2>(w, dy, dx, word, r),
                    _ => word_back::<L, E, 3>(w, dy, dx, word, r),
                }
            }
            r += 3;
        }
    }
}

/// Eight columns of W against `M` rows of dy.
#[inline(always)]
unsafe fn word_back<L: Lanes, E: Encoding, const M: usize>(
    w: &Packed<E>,
    dy: &Rows<'_>,
    dx: &RowsMut<'_>,
    word: usize,
    r0: usize,
) {
    let shape = Shape::of(w);
    // SAFETY: as in `stream`; dy has 16 columns a block.
    unsafe {
        let tables = Tables::<L>::of(&w.values);
        let dy: [*const f32; M] = std::array::from_fn(|r| dy.row(r0 + r).as_ptr());
        let mut acc = [[L::splat(0.0); CODES]; M];
        for b in 0..w.blocks() {
            let place = shape.place(w, b);
            let packed = place.codes.words::<L, E>(word);
            let group: Group<L> = place.group(word * CODES / w.group, w.group);
            let mut scaled = [group.scale; M];
            for r in 0..M {
                scaled[r] = L::mul(L::load(dy[r].add(b * LANES)), group.outer::<E>());
            }
            for j in 0..CODES {
                let v = tables.decode::<E>(&group, packed, word % share::<E>(), j as i32);
                for r in 0..M {
                    acc[r][j] = L::fma(v, scaled[r], acc[r][j]);
                }
            }
        }
        for r in 0..M {
            let mut out = [0.0; CODES];
            for j in 0..CODES {
                out[j] = L::sum(acc[r][j]);
            }
            dx.put(r0 + r, word * CODES, &out);
        }
    }
}
