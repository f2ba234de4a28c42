//! A prepared weight: packed bytes in one aligned allocation and what its calls need to know. Immutable, so that any number
//! of threads may use it.
use crate::call::{Fail, Mat, Outcome};
use crate::kernels::{Blocks, GROUP_BYTES, GROUPS, Kernels, LANES, SCALES_AT, TILE_BYTES, TILE_K};
use crate::{abi, isa::Isa};
use q4_core::formats::nvfp4;
use q4_core::{Activations, DType, GlobalScale};
use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

/// What `nvfp4_weight` points to.
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
        (self.packed.layout.size() + size_of::<Self>() + size_of_val(&self.spans[..])) as u64
    }

    /// Decodes a tile, exactly: `out[row][k]`, what is beyond n or k is left alone. Returns the columns inside k.
    pub fn decode(&self, block: usize, tile: usize, out: &mut [[f32; TILE_K]; LANES]) -> usize {
        let groups = (self.k / 16 - tile * GROUPS).min(GROUPS);
        // SAFETY: the tile is inside the allocation and initialised.
        let bytes =
            unsafe { &*self.blocks(block, 1).tiles.add(tile * TILE_BYTES).cast::<[u8; TILE_BYTES]>() };
        for (lane, out) in out.iter_mut().enumerate().take(self.n - block * LANES) {
            let (mut codes, mut scales) = ([0u8; TILE_K / 2], [0u8; GROUPS]);
            for g in 0..groups {
                for half in 0..2 {
                    let at = g * GROUP_BYTES + half * 64 + lane * 4;
                    let word = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
                    codes[8 * g + 4 * half..][..4].copy_from_slice(&gather_nibbles(word).to_le_bytes());
                }
                scales[g] = bytes[SCALES_AT + g * LANES + lane];
            }
            let global = self.global(block * LANES + lane);
            nvfp4::dequantize_row(&codes[..8 * groups], &scales[..groups], global, &mut out[..16 * groups]);
        }
        16 * groups
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

/// The inverse of [`spread_nibbles`].
pub fn gather_nibbles(word: u32) -> u32 {
    let part = |nibbles: u32| {
        let bytes = (nibbles | nibbles >> 4) & 0x00ff_00ff;
        (bytes | bytes >> 8) & 0xffff
    };
    part(word & 0x0f0f_0f0f) | part(word >> 4 & 0x0f0f_0f0f) << 16
}

/// `dtype`-independent check of an operand's row count.
pub fn check_rows(w: &Weight, x: &Mat, y: &Mat, names: [&str; 2]) -> Outcome {
    if x.rows != y.rows || x.rows > w.max_m {
        let need = format!("the same number of rows, at most max_m = {}", w.max_m);
        return Err(Fail::invalid(names.join(" and "), need, format!("{} and {}", x.rows, y.rows)));
    }
    Ok(())
}

/// The weight behind a handle.
///
/// # Safety
/// `w` is NULL or came from `prepare` and was not released.
pub unsafe fn of<'a>(w: *const abi::Weight) -> Outcome<&'a Weight> {
    // SAFETY: by contract.
    unsafe { w.cast::<Weight>().as_ref() }.ok_or_else(|| Fail::invalid("weight", "a pointer", "NULL"))
}

/// Bytes that are written once, while the weight is built, and then only read.
pub struct Packed {
    at: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain bytes behind a unique pointer; shared references only read.
unsafe impl Send for Packed {}
// SAFETY: as above.
unsafe impl Sync for Packed {}

/// A page of the size that makes a difference to a stream of weights.
const HUGE_PAGE: usize = 2 << 20;

impl Packed {
    /// Uninitialised bytes, cache-line aligned, on huge pages where they fill one.
    pub fn new(bytes: usize) -> Outcome<Self> {
        let align = if bytes >= HUGE_PAGE { HUGE_PAGE } else { 64 };
        let layout = Layout::from_size_align(bytes, align).ok().filter(|l| l.size() > 0);
        let layout = layout.ok_or_else(|| Fail::no_memory(bytes))?;
        // SAFETY: the size is not zero.
        let at = NonNull::new(unsafe { alloc(layout) }).ok_or_else(|| Fail::no_memory(bytes))?;
        if align == HUGE_PAGE {
            advise_huge_pages(at.as_ptr(), bytes - bytes % HUGE_PAGE);
        }
        Ok(Self { at, layout })
    }
    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }
}

impl Drop for Packed {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.at.as_ptr(), self.layout) };
    }
}

#[cfg(target_os = "linux")]
fn advise_huge_pages(at: *mut u8, bytes: usize) {
    use std::ffi::{c_int, c_void};
    const MADV_HUGEPAGE: c_int = 14;
    unsafe extern "C" {
        fn madvise(addr: *mut c_void, length: usize, advice: c_int) -> c_int;
    }
    // SAFETY: whole pages of our own allocation. A refusal costs speed only, so it is not an error.
    unsafe { madvise(at.cast(), bytes, MADV_HUGEPAGE) };
}
#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_: *mut u8, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibbles_are_interleaved_as_the_layout_says() {
        assert_eq!(spread_nibbles(0x7654_3210), 0x7362_5140);
        for seed in 0..1000u32 {
            let word = seed.wrapping_mul(2_654_435_761) ^ seed << 7;
            assert_eq!(gather_nibbles(spread_nibbles(word)), word);
        }
    }
}
