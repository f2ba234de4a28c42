//! Products of int8 activations with codes that are integers. The products of 16 elements are summed exactly
//! and scaled by that of the activations, these sums by that of the group, as far as a chain reaches. One
//! order whatever the number of rows, the sets of instructions and the tasks.
use crate::dots::{self, Dot, Job, Words};
use crate::encoding::{Encoding, Offset, share};
use crate::integers::{Block, Inputs, Integers, MIDDLE, NARROW, SCALES, TILE, WIDE, bits};
use crate::layout::{CODES, LANES, QUAD};
use crate::prepare::{Line, Packed};
use crate::shape::{Codes, Place, Shape};
use crate::simd::Lanes;
use q4_core::formats::int8::BLOCK;
use q4_core::rows::RowsMut;
use q4_simd::Vector;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Most rows that are multiplied straight from the registers a code is decoded to.
const GEMV_ROWS: usize = 4;
/// Rows of x whose sums are kept while the weights pass by: with their inputs and two tiles, 34 KiB, and those
/// of a chain where [`held`] keeps them in memory, 8 KiB.
const ROWS: usize = 128;
/// Blocks that are decoded at a time, at most.
const PAIR: usize = 2;

/// `y[:, 16·range] = x W^T` for blocks of 16 output rows, whole quads.
///
/// # Safety
/// The range is inside the weight, no other task has any of it, and y has its n columns, x its k.
pub(crate) unsafe fn forward<E: Encoding>(
    w: &Packed<E>,
    integers: &Integers,
    x: &Inputs,
    y: &RowsMut<'_>,
    range: Range<usize>,
) {
    // SAFETY: the caller's.
    unsafe { dots::run(w.vectors, Product { w, integers, x, y, range }) }
}

struct Product<'a, E: Encoding> {
    w: &'a Packed<E>,
    integers: &'a Integers,
    x: &'a Inputs,
    y: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl<E: Encoding> Job for Product<'_, E> {
    #[inline(always)]
    unsafe fn on<D: Dot>(self) {
        // SAFETY: the caller's.
        unsafe {
            if has_table::<E>() && self.integers.table.is_some() {
                self.rows::<D, true>();
            } else {
                self.rows::<D, false>();
            }
        }
    }
}

impl<E: Encoding> Product<'_, E> {
    /// All rows, by codes that are looked up in a table (`T`) or are what they are.
    #[inline(always)]
    unsafe fn rows<D: Dot, const T: bool>(&self) {
        // SAFETY: the caller's.
        unsafe {
            match self.x.m {
                0 => {}
                1 => self.few::<D, T, 4, 1>(),
                2 => self.few::<D, T, 2, 2>(),
                3 => self.few::<D, T, 2, 3>(),
                GEMV_ROWS => self.few::<D, T, 2, GEMV_ROWS>(),
                _ => self.many::<D, T>(),
            }
        }
    }

    /// `M` rows, where there are `B` blocks of a quad these together.
    #[inline(always)]
    unsafe fn few<D: Dot, const T: bool, const B: usize, const M: usize>(&self) {
        let mut b = self.range.start;
        while b < self.range.end {
            // SAFETY: blocks b to b + B are inside the range.
            unsafe {
                if B <= D::On::ACCUMULATORS && self.range.end - b >= B {
                    self.stream::<D, T, B, M>(b);
                    b += B;
                } else {
                    self.stream::<D, T, 1, M>(b);
                    b += 1;
                }
            }
        }
    }

    /// `M` rows of x against `B` blocks of one quad, decoded in registers.
    #[inline(always)]
    unsafe fn stream<D: Dot, const T: bool, const B: usize, const M: usize>(&self, b0: usize) {
        let (w, shape) = (self.w, Shape::of(self.w));
        // SAFETY: every index is below the length the layout has for n and k; x has k columns.
        unsafe {
            let decoder = Decoder::<D>::of(self.integers);
            let first = shape.place(w, b0);
            let places: [Place<E>; B] = std::array::from_fn(|b| first.beside(b));
            let mut total = [[D::On::splat(0.0); B]; M];
            // Counted: a division takes as long as the chain that it would be for.
            let (mut at, mut group, mut within) = (0, 0, 0);
            for _ in 0..shape.chains {
                let mut sums = [[D::On::splat(0.0); B]; M];
                let mut rest = [0.0; M];
                for _ in 0..shape.sixteens_per_chain() {
                    let (word, i) = (2 * at, at % SCALES);
                    let x: [&Block; M] = std::array::from_fn(|r| &*self.x.tile(at / SCALES).add(r));
                    for b in 0..B {
                        let codes = &places[b].codes;
                        codes.fetch::<D::On, E>(word);
                        codes.fetch::<D::On, E>(word + 1);
                        let bytes = decoder.sixteen::<E, T>(codes, word);
                        for r in 0..M {
                            let dot = dot::<D, E>(bytes, x[r], i);
                            sums[r][b] = D::On::fma(dot, D::On::splat(x[r].scales[i]), sums[r][b]);
                        }
                    }
                    for r in 0..M {
                        rest[r] = x[r].sums[i];
                    }
                    at += 1;
                }
                first.fetch::<D::On>(group, w.group, B);
                for b in 0..B {
                    let [scale, offset] = self.group::<D, T>(&places[b], group);
                    for r in 0..M {
                        total[r][b] = D::On::fma(scale, sums[r][b], total[r][b]);
                        if E::OFFSET != Offset::None {
                            total[r][b] = D::On::fma(offset, D::On::splat(rest[r]), total[r][b]);
                        }
                    }
                }
                within += 1;
                if within == shape.chains_per_group {
                    (group, within) = (group + 1, 0);
                }
            }
            for r in 0..M {
                for b in 0..B {
                    let mut lanes = [0.0; LANES];
                    D::On::store(total[r][b], lanes.as_mut_ptr());
                    shape.put(self.y, r, b0 + b, &lanes);
                }
            }
        }
    }

    /// What the sums of a group's products, and of its inputs, are multiplied by.
    #[inline(always)]
    unsafe fn group<D: Dot, const T: bool>(
        &self,
        place: &Place<E>,
        group: usize,
    ) -> [<D::On as Vector>::F; 2] {
        // SAFETY: the caller's.
        unsafe {
            let group = place.group::<D::On>(group, self.w.group);
            let scale =
                if T { D::On::mul(group.scale, D::On::splat(self.integers.unit)) } else { group.scale };
            let offset = match E::OFFSET {
                Offset::Zero => D::On::mul(group.offset, group.scale),
                _ => group.offset,
            };
            [scale, offset]
        }
    }

    /// Any number of rows: a tile of 64 k is decoded once for up to [`ROWS`] of them.
    #[inline(always)]
    unsafe fn many<D: Dot, const T: bool>(&self) {
        let shape = Shape::of(self.w);
        let tiles = self.w.info.k.div_ceil(TILE);
        let (panel, chain) = (panel_of::<D, E>(), shape.sixteens_per_chain());
        let mut decoded = [Tile::BLANK; PAIR];
        let mut totals = [[Line([0.0; LANES]); PAIR]; ROWS];
        for r0 in (0..self.x.m).step_by(ROWS) {
            let rows = ROWS.min(self.x.m - r0);
            let share = rows.div_ceil(tiles);
            for b0 in self.range.clone().step_by(D::On::BLOCKS) {
                let count = D::On::BLOCKS.min(self.range.end - b0).min(QUAD - b0 % QUAD);
                totals[..rows].fill([Line([0.0; LANES]); PAIR]);
                for t in 0..tiles {
                    // SAFETY: the blocks and the tile exist; every index is inside.
                    unsafe {
                        let sixteens = SCALES.min((self.w.info.k - t * TILE) / BLOCK);
                        for c in 0..count {
                            self.decode::<D, T>(&shape, b0 + c, t, sixteens, &mut decoded[c]);
                        }
                        // Rows of y lie in as many pages: written unasked, each would wait for its line.
                        for r in t * share..((t + 1) * share).min(rows) {
                            for c in 0..count {
                                D::On::prefetch(self.y.place(r0 + r, (b0 + c) * LANES));
                            }
                        }
                        let x = self.x.tile(t).add(r0);
                        panel(&decoded[..count], [sixteens / chain, chain], x, &mut totals[..rows]);
                    }
                }
                for (r, sums) in totals[..rows].iter().enumerate() {
                    for (c, sums) in sums[..count].iter().enumerate() {
                        // SAFETY: only this task has this block.
                        unsafe { shape.put(self.y, r0 + r, b0 + c, &sums.0) };
                    }
                }
            }
        }
    }

    /// Decodes `sixteens` of tile `t` of a block.
    #[inline(always)]
    unsafe fn decode<D: Dot, const T: bool>(
        &self,
        shape: &Shape,
        block: usize,
        t: usize,
        sixteens: usize,
        to: &mut Tile,
    ) {
        // SAFETY: every index is below the length the layout has for n and k.
        unsafe {
            let decoder = Decoder::<D>::of(self.integers);
            let place = shape.place(self.w, block);
            for i in 0..sixteens {
                let word = t * TILE / CODES + 2 * i;
                place.codes.fetch::<D::On, E>(word);
                place.codes.fetch::<D::On, E>(word + 1);
                for (j, bytes) in decoder.sixteen::<E, T>(&place.codes, word).into_iter().enumerate() {
                    D::store(bytes, to.bytes[4 * i + j].0.as_mut_ptr());
                }
            }
            let chains = sixteens / shape.sixteens_per_chain();
            for chain in 0..chains {
                let at = (t * TILE / CODES / shape.words_per_chain + chain) / shape.chains_per_group;
                place.fetch::<D::On>(at, self.w.group, 1);
                let [scale, offset] = self.group::<D, T>(&place, at);
                D::On::store(scale, to.scales[chain].0.as_mut_ptr());
                D::On::store(offset, to.offsets[chain].0.as_mut_ptr());
            }
        }
    }
}

/// The exact dot of 16 elements.
#[inline(always)]
unsafe fn dot<D: Dot, E: Encoding>(bytes: [Words<D>; 4], x: &Block, i: usize) -> <D::On as Vector>::F {
    // SAFETY: the caller's.
    unsafe {
        match (bits::<E>(), E::OFFSET != Offset::None) {
            (NARROW, false) => sixteen::<D, NARROW, false>(bytes, x, i),
            (NARROW, true) => sixteen::<D, NARROW, true>(bytes, x, i),
            (MIDDLE, false) => sixteen::<D, MIDDLE, false>(bytes, x, i),
            (MIDDLE, true) => sixteen::<D, MIDDLE, true>(bytes, x, i),
            _ => sixteen::<D, WIDE, false>(bytes, x, i),
        }
    }
}

#[inline(always)]
unsafe fn sixteen<D: Dot, const BITS: u32, const OFFSET: bool>(
    bytes: [Words<D>; 4],
    x: &Block,
    i: usize,
) -> <D::On as Vector>::F {
    // SAFETY: the caller's; a block has 16 bytes and a start for each scale.
    unsafe {
        let four = x.q.as_ptr().add(BLOCK * i).cast::<i32>();
        // Codes with an offset count from zero, and nothing is too much.
        let mut sums = D::start::<BITS>(if OFFSET { 0 } else { *x.start.get_unchecked(i) });
        for j in 0..4 {
            sums = D::dot::<BITS>(sums, bytes[j], four.add(j).read());
        }
        D::numbers::<BITS>(sums)
    }
}

/// Whether codes may be looked up in a table: others are what they are.
const fn has_table<E: Encoding>() -> bool {
    matches!((E::HIGH, E::BYTES, E::OFFSET), (0, None, Offset::None))
}

/// Takes words of codes apart.
struct Decoder<D: Dot> {
    table: D::Table,
}

impl<D: Dot> Decoder<D> {
    #[inline(always)]
    unsafe fn of(integers: &Integers) -> Self {
        // SAFETY: the caller's.
        Self { table: unsafe { D::table(integers.table.as_ref().unwrap_or(&[0; 16])) } }
    }

    /// Words `word` and the one behind it as bytes, in the order of a [`Block`], by the table where `T`.
    #[inline(always)]
    unsafe fn sixteen<E: Encoding, const T: bool>(&self, codes: &Codes, word: usize) -> [Words<D>; 4] {
        // SAFETY: the caller's; there are such words.
        unsafe {
            let [a, b] = self.eight::<E, T>(codes, word);
            let [c, d] = self.eight::<E, T>(codes, word + 1);
            [a, b, c, d]
        }
    }

    #[inline(always)]
    unsafe fn eight<E: Encoding, const T: bool>(&self, codes: &Codes, word: usize) -> [Words<D>; 2] {
        const NIBBLES: u32 = 0x0f0f_0f0f;
        // SAFETY: as above.
        unsafe {
            let [low, high] = codes.words::<D::On, E>(word);
            if E::BYTES.is_some() {
                return [D::bytes(low), D::bytes(high)];
            }
            let [even, odd] = [D::pick(low, 0, NIBBLES), D::pick(low, 4, NIBBLES)];
            if E::HIGH > 0 {
                let mask = ((1u32 << E::HIGH) - 1) * 0x1010_1010;
                let at = (word % share::<E>() * E::HIGH) as i32;
                return [D::or(even, D::pick(high, at - 4, mask)), D::or(odd, D::pick(high, at, mask))];
            }
            if T {
                return [D::look_up(self.table, even), D::look_up(self.table, odd)];
            }
            [even, odd]
        }
    }
}

/// 64 of k of a block, decoded.
#[derive(Clone, Copy)]
struct Tile {
    /// `[k / 4][lane]`, four bytes each.
    bytes: [Line<u32>; TILE / 4],
    /// Of each chain.
    scales: [Line<f32>; SCALES],
    /// As the scales.
    offsets: [Line<f32>; SCALES],
}

impl Tile {
    const BLANK: Self = Self {
        bytes: [Line([0; LANES]); TILE / 4],
        scales: [Line([0.0; LANES]); SCALES],
        offsets: [Line([0.0; LANES]); SCALES],
    };
}

/// Adds the products of all rows with one or two tiles of so many chains, each of so many sixteens.
type Panel = unsafe fn(&[Tile], [usize; 2], *const Block, &mut [[Line<f32>; PAIR]]);

fn panel_of<D: Dot, E: Encoding>() -> Panel {
    match (bits::<E>(), E::OFFSET != Offset::None) {
        (NARROW, false) => panel::<D, NARROW, false>,
        (NARROW, true) => panel::<D, NARROW, true>,
        (MIDDLE, false) => panel::<D, MIDDLE, false>,
        (MIDDLE, true) => panel::<D, MIDDLE, true>,
        _ => panel::<D, WIDE, false>,
    }
}

/// A [`Panel`] in the order of `stream`, compiled once for all encodings.
unsafe fn panel<D: Dot, const BITS: u32, const OFFSET: bool>(
    tiles: &[Tile],
    chains: [usize; 2],
    x: *const Block,
    totals: &mut [[Line<f32>; PAIR]],
) {
    // SAFETY: the caller's; rows r to r + count exist.
    unsafe {
        D::run(
            #[inline(always)]
            || {
                let Some(most) = D::ROWS else { return held::<D, BITS, OFFSET>(tiles, chains, x, totals) };
                let mut r = 0;
                while r < totals.len() {
                    // What a set never has is not compiled.
                    let (rows, blocks) = ((totals.len() - r).min(most), tiles.len().min(D::On::BLOCKS));
                    let (x, totals) = (x.add(r), &mut totals[r..]);
                    match (rows, blocks) {
                        (4, PAIR) => shape::<D, BITS, OFFSET, 4, PAIR>(tiles, chains, x, totals),
                        (3, PAIR) => shape::<D, BITS, OFFSET, 3, PAIR>(tiles, chains, x, totals),
                        (2, PAIR) => shape::<D, BITS, OFFSET, 2, PAIR>(tiles, chains, x, totals),
                        (_, PAIR) => shape::<D, BITS, OFFSET, 1, PAIR>(tiles, chains, x, totals),
                        (4, _) => shape::<D, BITS, OFFSET, 4, 1>(tiles, chains, x, totals),
                        (3, _) => shape::<D, BITS, OFFSET, 3, 1>(tiles, chains, x, totals),
                        (2, _) => shape::<D, BITS, OFFSET, 2, 1>(tiles, chains, x, totals),
                        _ => shape::<D, BITS, OFFSET, 1, 1>(tiles, chains, x, totals),
                    }
                    r += rows;
                }
            },
        );
    }
}

/// `R` rows with `C` tiles. How many sixteens a chain has is not known where this is compiled: a compiler that
/// lays the loop out mixes sixteens, and the registers do not hold what they then need.
#[inline(always)]
unsafe fn shape<D: Dot, const BITS: u32, const OFFSET: bool, const R: usize, const C: usize>(
    tiles: &[Tile],
    [chains, sixteens]: [usize; 2],
    x: *const Block,
    totals: &mut [[Line<f32>; PAIR]],
) {
    // SAFETY: R rows and sums and C tiles exist, with so many chains.
    unsafe {
        let mut total = [[D::On::splat(0.0); C]; R];
        for r in 0..R {
            for c in 0..C {
                total[r][c] = D::On::load(totals.get_unchecked(r)[c].0.as_ptr());
            }
        }
        let mut i = 0;
        for chain in 0..chains {
            let mut sums = [[D::On::splat(0.0); C]; R];
            let end = i + sixteens;
            while i < end {
                let mut dot = [[D::start::<BITS>(0); C]; R];
                if !OFFSET {
                    for r in 0..R {
                        dot[r] = [D::start::<BITS>(*(*x.add(r)).start.get_unchecked(i)); C];
                    }
                }
                for j in 4 * i..4 * i + 4 {
                    let mut bytes = [D::On::words(tiles.get_unchecked(0).bytes.as_ptr().add(j).cast()); C];
                    for c in 1..C {
                        bytes[c] = D::On::words(tiles.get_unchecked(c).bytes.as_ptr().add(j).cast());
                    }
                    for r in 0..R {
                        let x = (*x.add(r)).q.as_ptr().cast::<i32>().add(j).read();
                        for c in 0..C {
                            dot[r][c] = D::dot::<BITS>(dot[r][c], bytes[c], x);
                        }
                    }
                }
                for r in 0..R {
                    let scale = D::On::splat(*(*x.add(r)).scales.get_unchecked(i));
                    for c in 0..C {
                        sums[r][c] = D::On::fma(D::numbers::<BITS>(dot[r][c]), scale, sums[r][c]);
                    }
                }
                i += 1;
            }
            for c in 0..C {
                let tile = tiles.get_unchecked(c);
                let scale = D::On::load(tile.scales.as_ptr().add(chain).cast());
                let offset = D::On::load(tile.offsets.as_ptr().add(chain).cast());
                for r in 0..R {
                    total[r][c] = D::On::fma(scale, sums[r][c], total[r][c]);
                    if OFFSET {
                        let rest = D::On::splat(*(*x.add(r)).sums.get_unchecked(end - 1));
                        total[r][c] = D::On::fma(offset, rest, total[r][c]);
                    }
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                D::On::store(total[r][c], totals.get_unchecked_mut(r)[c].0.as_mut_ptr());
            }
        }
    }
}

/// All rows with one tile after the other, of which sixteens stay in registers while rows pass by.
#[inline(always)]
unsafe fn held<D: Dot, const BITS: u32, const OFFSET: bool>(
    tiles: &[Tile],
    [chains, sixteens]: [usize; 2],
    x: *const Block,
    totals: &mut [[Line<f32>; PAIR]],
) {
    // Not cleared: the first sixteen of a chain writes what the others read.
    let mut sums = [MaybeUninit::<Line<f32>>::uninit(); ROWS];
    let sums: *mut f32 = sums.as_mut_ptr().cast();
    for (c, tile) in tiles.iter().enumerate() {
        for chain in 0..chains {
            for within in 0..sixteens {
                let pass = Pass { tile, c, chain, i: chain * sixteens + within, x, sums };
                // SAFETY: the caller's; there are at most ROWS rows.
                unsafe {
                    match (within == 0, within + 1 == sixteens) {
                        (true, true) => pass.rows::<D, BITS, OFFSET, true, true>(totals),
                        (true, false) => pass.rows::<D, BITS, OFFSET, true, false>(totals),
                        (false, true) => pass.rows::<D, BITS, OFFSET, false, true>(totals),
                        (false, false) => pass.rows::<D, BITS, OFFSET, false, false>(totals),
                    }
                }
            }
        }
    }
}

/// Sixteen `i` of a tile, which is block `c`, with all rows.
struct Pass<'a> {
    tile: &'a Tile,
    c: usize,
    chain: usize,
    i: usize,
    x: *const Block,
    /// Of the chain so far, a line a row.
    sums: *mut f32,
}

impl Pass<'_> {
    /// Adds their products: to nothing where the sixteen is the `FIRST` of its chain, and the chain to the
    /// totals where it is the `LAST`.
    #[inline(always)]
    unsafe fn rows<D: Dot, const BITS: u32, const OFFSET: bool, const FIRST: bool, const LAST: bool>(
        &self,
        totals: &mut [[Line<f32>; PAIR]],
    ) {
        let Self { tile, c, chain, i, x, sums } = *self;
        // SAFETY: a tile has four times sixteen bytes, and there are as many rows as totals.
        unsafe {
            let bytes = tile.bytes.as_ptr().add(4 * i).cast::<u32>();
            let mut words = [D::On::words(bytes); 4];
            for j in 1..4 {
                words[j] = D::On::words(bytes.add(j * LANES));
            }
            let scale = D::On::load(tile.scales.as_ptr().add(chain).cast());
            let offset = D::On::load(tile.offsets.as_ptr().add(chain).cast());
            for (r, totals) in totals.iter_mut().enumerate() {
                let (x, sums) = (&*x.add(r), sums.add(r * LANES));
                let before = if FIRST { D::On::splat(0.0) } else { D::On::load(sums) };
                let dot = sixteen::<D, BITS, OFFSET>(words, x, i);
                let sum = D::On::fma(dot, D::On::splat(*x.scales.get_unchecked(i)), before);
                if !LAST {
                    D::On::store(sum, sums);
                    continue;
                }
                let total = totals.get_unchecked_mut(c).0.as_mut_ptr();
                let mut all = D::On::fma(scale, sum, D::On::load(total));
                if OFFSET {
                    all = D::On::fma(offset, D::On::splat(*x.sums.get_unchecked(i)), all);
                }
                D::On::store(all, total);
            }
        }
    }
}
