//! A prepared weight: packed bytes in one aligned allocation and what its calls need to know. Immutable, so
//! that any number of threads may use it.
use crate::call::{Fail, Mat, Outcome};
use crate::isa::Isa;
use crate::kernels::{Blocks, GROUPS, Kernels, LANES, SCALES_AT, TILE_BYTES, TILE_K};
use crate::memory::Packed;
use q4_core::formats::e4m3;
use q4_core::{Activations, DType, GlobalScale};

/// What `nvfp4_weight` points to on the CPU.
pub struct Weight {
    /// Tiles, row block by row block.
    pub packed: Packed,
    /// Out features.
    pub n: usize,
    /// In features.
    pub k: usize,
    /// Row segments, top to bottom.
    pub spans: Vec<Span>,
    /// What happens to x.
    pub activations: Activations,
    /// Type of x.
    pub x: DType,
    /// Type of y.
    pub y: DType,
    /// Rows of the largest call.
    pub max_m: usize,
    /// What runs.
    pub isa: Isa,
}

/// Rows with one per-tensor scale.
#[derive(Clone, Copy)]
pub struct Span {
    /// First row behind it.
    pub end: usize,
    /// Its scale.
    pub global: Option<GlobalScale>,
}

impl Weight {
    /// Row blocks, the last one padded.
    pub fn row_blocks(&self) -> usize {
        self.n.div_ceil(LANES)
    }
    /// Tiles of a row block, the last one padded.
    pub fn tiles(&self) -> usize {
        self.k.div_ceil(TILE_K)
    }
    /// Its kernels.
    pub fn kernels(&self) -> &'static Kernels {
        self.isa.kernels()
    }
    /// `count` row blocks from `first` on.
    pub fn blocks(&self, first: usize, count: usize) -> Blocks {
        let stride = self.tiles() * TILE_BYTES;
        debug_assert!(first + count <= self.row_blocks());
        // SAFETY: every row block below `row_blocks` is inside the allocation.
        let tiles = unsafe { self.packed.as_ptr().add(first * stride) };
        Blocks { tiles, stride, count, groups: self.k / 16 }
    }
    /// The per-tensor scale of a row.
    pub fn global(&self, row: usize) -> Option<GlobalScale> {
        self.spans.iter().find(|s| row < s.end).and_then(|s| s.global)
    }
    /// Memory it keeps.
    pub fn bytes(&self) -> u64 {
        (self.packed.bytes() + size_of::<Self>() + size_of_val(&self.spans[..])) as u64
    }

    /// Decodes a tile, exactly: `out[row][k]`, zero beyond n and k. Returns the columns inside k.
    pub fn decode(&self, block: usize, tile: usize, out: &mut [[f32; TILE_K]; LANES]) -> usize {
        // SAFETY: the tile is inside the allocation and initialised.
        let at = unsafe { self.blocks(block, 1).tiles.add(tile * TILE_BYTES) };
        // SAFETY: its scales are its end.
        let scales = unsafe { &*at.add(SCALES_AT).cast::<[[u8; LANES]; GROUPS]>() };
        let mut steps = [[0.0; GROUPS]; LANES];
        for (lane, steps) in steps.iter_mut().enumerate().take(self.n - block * LANES) {
            let global = self.global(block * LANES + lane);
            for (step, scales) in steps.iter_mut().zip(scales) {
                let scale = e4m3::decode(scales[lane]);
                *step = global.map_or(scale, |g| g.effective(scale));
            }
        }
        // SAFETY: the kernels run on this processor.
        unsafe { (self.kernels().decode)(at, &steps, out) };
        (self.k - tile * TILE_K).min(TILE_K)
    }
}

/// Eight codes in the order of k to the order of a lane: 0 4 1 5 2 6 3 7.
pub fn spread_nibbles(word: u32) -> u32 {
    let part = |half: u32| {
        let bytes = (half | half << 8) & 0x00ff_00ff;
        (bytes | bytes << 4) & 0x0f0f_0f0f
    };
    part(word & 0xffff) | part(word >> 16) << 4
}

/// `dtype`-independent check of an operand's row count.
pub fn check_rows(w: &Weight, x: &Mat, y: &Mat, names: [&str; 2]) -> Outcome {
    check_shape([w.max_m, x.rows, y.rows], names)
}

/// The same from `[max_m, rows of x, rows of y]`.
pub fn check_shape([max_m, x, y]: [usize; 3], names: [&str; 2]) -> Outcome {
    if x != y || x > max_m {
        let need = format!("the same number of rows, at most max_m = {max_m}");
        return Err(Fail::invalid(names.join(" and "), need, format!("{x} and {y}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::SHIFTS;

    #[test]
    fn nibbles_are_interleaved_as_the_layout_says() {
        assert_eq!(spread_nibbles(0x7654_3210), 0x7362_5140);
        for seed in 0..1000u32 {
            let word = seed.wrapping_mul(2_654_435_761) ^ seed << 7;
            for (k, shift) in SHIFTS.into_iter().enumerate() {
                assert_eq!(spread_nibbles(word) >> shift & 15, word >> (4 * k) & 15);
            }
        }
    }
}
