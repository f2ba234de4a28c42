//! A prepared weight: packed bytes in one aligned allocation and what its calls need to know. Immutable, so
//! that any number of threads may use it.
use crate::kernels::{Blocks, GROUPS, Kernels, LANES, Reorder, SCALES_AT, TILE_BYTES, TILE_K};
use crate::memory::Packed;
use q4_core::formats::e4m3;
use q4_core::isa::Isa;
use q4_core::{Activations, DType, GlobalScale, PreparedInfo};

/// A weight in host memory.
pub struct Weight {
    /// What was built.
    pub info: PreparedInfo,
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

/// A tile beside the others, aligned as they are.
#[repr(C, align(64))]
struct Tile([u8; TILE_BYTES]);

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
        Kernels::of(self.isa)
    }
    /// The order that its kernels want of its tiles, where that is not the common one.
    pub fn reorder(&self) -> Option<Reorder> {
        match self.activations {
            Activations::Native => self.kernels().float.reorder,
            _ => self.kernels().bytes.reorder,
        }
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
        // SAFETY: the kernels run on this processor, on the tile or on a copy of it.
        unsafe {
            let mut copy;
            let at = match self.reorder() {
                None => at,
                Some(reorder) => {
                    copy = at.cast::<Tile>().read();
                    (reorder.back)(copy.0.as_mut_ptr(), 1);
                    copy.0.as_ptr()
                }
            };
            (self.kernels().decode)(at, &steps, out);
        }
        (self.k - tile * TILE_K).min(TILE_K)
    }
}
