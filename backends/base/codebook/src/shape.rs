//! Loop bounds of one weight, and where its blocks lie.
use crate::encoding::{Encoding, Kept, NEST, Offset, share};
use crate::layout::{CHAIN, CODES, LANES, QUAD, scale_group};
use crate::prepare::Packed;
use half::f16;
use q4_core::formats::int8::BLOCK;
use q4_core::rows::RowsMut;
use q4_simd::Vector;
use std::marker::PhantomData;

/// Elements of k that 8 KiB of a quad's codes are.
const FETCHED: usize = (8 << 10) / (QUAD * LANES * 4) * CODES;

/// Bytes that memory hands out together.
const CACHE_LINE: usize = 64;

/// Loop bounds of one weight.
pub(crate) struct Shape {
    words: usize,
    groups: usize,
    pub chains: usize,
    pub chains_per_group: usize,
    /// 2 to 8.
    pub words_per_chain: usize,
}

/// Where a block of 16 rows has its lines.
pub(crate) struct Place<E: Encoding> {
    /// Codes and their upper bits.
    pub codes: Codes,
    scales: *const u8,
    offsets: *const u8,
    /// What scales are kept in.
    kept: Kept,
    nests: *const [[f16; LANES]; 2],
    /// Lines from one to the next of the same block.
    step: usize,
    _of: PhantomData<E>,
}

/// Where a block has its codes.
#[derive(Clone, Copy)]
pub(crate) struct Codes {
    pub low: *const u32,
    pub high: *const u32,
    /// Words of memory from one line to the next.
    pub step: usize,
}

/// What the elements of a group have in common.
pub(crate) struct Group<L: Vector> {
    /// What their values are multiplied by.
    pub scale: L::F,
    /// What is added to values, scaled or not.
    pub offset: L::F,
}

// Whatever E is, these are pointers.
impl<E: Encoding> Copy for Place<E> {}
impl<E: Encoding> Clone for Place<E> {
    fn clone(&self) -> Self {
        *self
    }
}

// Whatever L is, its vectors are copied.
impl<L: Vector> Copy for Group<L> {}
impl<L: Vector> Clone for Group<L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L: Vector> Group<L> {
    /// What sums of values are multiplied by: nothing where values are scaled one by one.
    #[inline(always)]
    pub unsafe fn outer<E: Encoding>(&self) -> L::F {
        match E::OFFSET {
            // SAFETY: the caller's.
            Offset::Minimum | Offset::Bias => unsafe { L::splat(1.0) },
            _ => self.scale,
        }
    }
}

impl Shape {
    #[inline(always)]
    pub fn of<E: Encoding>(w: &Packed<E>) -> Self {
        let (k, chain) = (w.info.k, scale_group(w.group, CHAIN as u32));
        Self {
            words: k / CODES,
            groups: k / w.group,
            chains: k / chain,
            chains_per_group: w.group / chain,
            words_per_chain: chain / CODES,
        }
    }

    /// Blocks of 16 inputs of a chain: 1, 2 or 4.
    #[inline(always)]
    pub fn sixteens_per_chain(&self) -> usize {
        self.words_per_chain * CODES / BLOCK
    }

    /// Where `block` lies.
    #[inline(always)]
    pub fn place<E: Encoding>(&self, w: &Packed<E>, block: usize) -> Place<E> {
        let (codes, step) = w.lines(block, self.words);
        let (scales, _) = w.lines(block, self.groups);
        let low = w.codes[codes..].as_ptr().cast();
        let high = match &w.high {
            Some(high) => high[w.lines(block, self.words / share::<E>()).0..].as_ptr().cast(),
            None => low,
        };
        Place {
            codes: Codes { low, high, step: step * LANES },
            scales: w.scales.from(scales).as_ptr(),
            offsets: w.offsets.as_ref().map_or(std::ptr::null(), |o| o.from(scales).as_ptr()),
            kept: w.scales.kept,
            nests: w.nests.as_ref().map_or(std::ptr::null(), |nests| {
                nests[w.lines(block, self.words * CODES / NEST).0..].as_ptr()
            }),
            step,
            _of: PhantomData,
        }
    }

    /// # Safety
    /// Only one task has this block.
    #[inline(always)]
    pub unsafe fn put(&self, y: &RowsMut<'_>, r: usize, block: usize, lanes: &[f32; LANES]) {
        // SAFETY: the caller's promise.
        unsafe { y.put_lanes(r, block * LANES, lanes) }
    }
}

/// Asks for `bytes` from `p` on.
///
/// # Safety
/// As of [`Vector`]'s functions.
#[inline(always)]
unsafe fn lines<L: Vector>(p: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(CACHE_LINE) {
        // SAFETY: a hint, of any address.
        unsafe { L::prefetch(p.wrapping_add(line)) };
    }
}

impl<E: Encoding> Place<E> {
    /// Where the `b`th block behind this one has its lines, in the same quad.
    #[inline(always)]
    pub fn beside(&self, b: usize) -> Self {
        let kept = E::NESTED.unwrap_or(self.kept);
        let Codes { low, high, step } = self.codes;
        Self {
            codes: Codes { low: low.wrapping_add(b * LANES), high: high.wrapping_add(b * LANES), step },
            scales: self.scales.wrapping_add(b * LANES * kept.size()),
            offsets: self.offsets.wrapping_add(b * LANES * E::OFFSET.kept(kept).size()),
            nests: self.nests.wrapping_add(b),
            ..*self
        }
    }

    /// Asks for what groups of this block and of those behind it, `blocks` altogether, have where codes are
    /// fetched, a quad's 8 KiB of them behind group `g`.
    ///
    /// # Safety
    /// As of [`Vector`]'s functions.
    #[inline(always)]
    pub unsafe fn fetch<L: Vector>(&self, g: usize, group: usize, blocks: usize) {
        let at = (g + FETCHED.div_ceil(group)) * self.step * LANES;
        let kept = E::NESTED.unwrap_or(self.kept);
        // SAFETY: hints, of any address.
        unsafe {
            lines::<L>(self.scales.wrapping_add(at * kept.size()), blocks * LANES * kept.size());
            if E::OFFSET != Offset::None {
                let size = E::OFFSET.kept(kept).size();
                lines::<L>(self.offsets.wrapping_add(at * size), blocks * LANES * size);
            }
            if E::NESTED.is_some() && (g * group).is_multiple_of(NEST) {
                let nests = self.nests.wrapping_add((g * group / NEST + 1) * self.step);
                lines::<L>(nests.cast(), blocks * size_of::<[[f16; LANES]; 2]>());
            }
        }
    }

    /// What group `g`, of `group` elements, has.
    ///
    /// # Safety
    /// As of [`Vector`]'s functions; there is such a group.
    #[inline(always)]
    pub unsafe fn group<L: Vector>(&self, g: usize, group: usize) -> Group<L> {
        // SAFETY: the caller's; offsets lie as scales do, and there are nests where the encoding has them.
        unsafe {
            let at = g * self.step * LANES;
            let nest = self.nests.wrapping_add(g * group / NEST * self.step);
            let kept = E::NESTED.unwrap_or(self.kept);
            let beside = E::OFFSET.kept(kept);
            let scale = kept.load::<L>(self.scales.add(at * kept.size()));
            let offset = self.offsets.wrapping_add(at * beside.size());
            let scale = if E::NESTED.is_some() {
                L::mul(scale, L::load_f16((&raw const (*nest)[0]).cast()))
            } else {
                scale
            };
            let offset = match E::OFFSET {
                Offset::None => L::splat(0.0),
                Offset::Zero => L::mul(beside.load::<L>(offset), L::splat(-1.0)),
                // What minima are multiplied by is kept negative.
                Offset::Minimum => {
                    let nest = L::load_f16((&raw const (*nest)[1]).cast());
                    L::mul(beside.load::<L>(offset), nest)
                }
                Offset::Bias => beside.load::<L>(offset),
            };
            Group { scale, offset }
        }
    }
}
