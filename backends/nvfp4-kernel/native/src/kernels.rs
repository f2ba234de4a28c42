//! What an instruction set has to provide, and the packed layout all of them read: drivers stay free of
//! intrinsics and every path sums an output in the same order.
//!
//! **Layout.** A lane is an output row. 16 rows make a row block, 64 of k a tile of 576 bytes: four groups of
//! 16 k with 128 bytes of codes each, then 4 x 16 E4M3 scales. In the two 64-byte halves of a group, lane `r`
//! has four bytes; half `h`, byte `j` holds `k = 8h + j` in the low and `k = 8h + 4 + j` in the high nibble.
//! So a 64-byte load feeds two integer dots of 4 k, and shifting 32-bit lanes by 4 walks through 8 k. Padding
//! rows and columns have scale 0. A product may have the bytes of codes in an order of its own
//! ([`Product::reorder`]).
//!
//! **Order.** Float products: per group two chains, over `k mod 8 < 4` and over the rest, each ascending,
//! then `acc += (chain0 + chain1) * scale`, groups ascending. Integer products: the exact dot of a group,
//! then `acc += (dot * scale) * activation scale`, of which the first product is exact, also for the groups
//! of padding, which are zero. `scale` is `e4m3 * 2^-8`: E4M3 bits shifted by 7 are that f16.
#[cfg(target_arch = "x86_64")]
pub mod amx;
#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
mod lanes;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod pack;
pub mod portable;
pub mod rounding;

use q4_core::isa::Isa;
use q4_simd::Vector;
use rounding::Rounding;

/// Rows of a row block, and lanes of an accumulator.
pub const LANES: usize = 16;
/// Elements of k in a tile.
pub const TILE_K: usize = 64;
/// Groups (of one block scale) in a tile.
pub const GROUPS: usize = 4;
/// Bytes of a tile.
pub const TILE_BYTES: usize = 576;
/// Bytes of codes of a group.
pub const GROUP_BYTES: usize = 128;
/// Where the scales of a tile start.
pub const SCALES_AT: usize = GROUPS * GROUP_BYTES;
/// Row blocks that share a broadcast in products with many rows.
pub const PAIR: usize = 2;
/// What is added to a doubled code to make it unsigned.
pub const OFFSET: i32 = 12;
/// 1.5 * 2^23: an integer below 2^22 added to its bits is added to its value. A dot that starts at these bits
/// ends as a float without a conversion, and `(ANCHOR + dot) * scale - ANCHOR * scale` is one exact
/// multiply-add.
pub const ANCHOR: f32 = 12_582_912.0;
/// Most activation rows that run against one decoded tile, of any kernel.
pub const MOST_ROWS: usize = 128;
/// Those of most kernels: the cost of decoding is spread over them while they and their sums stay in the
/// first-level cache. With int8 rows and k = 1024, 64 were 5 % faster than 128 on an Intel Xeon, and 1 %
/// slower on an AMD Zen 5.
pub const PANEL_ROWS: usize = 64;
/// 2^8: what is missing in the scales of the kernels.
pub const SCALE_FACTOR: f64 = 256.0;

/// Sums of one activation row with up to two row blocks.
pub type Acc = [[f32; LANES]; PAIR];

/// One or two adjacent row blocks in packed memory.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))] // no direct kernel there
#[derive(Clone, Copy)]
pub struct Blocks {
    /// First tile of the first one; 64-byte aligned.
    pub tiles: *const u8,
    /// Bytes from one row block to the next.
    pub stride: usize,
    /// 1 or 2.
    pub count: usize,
    /// k / 16.
    pub groups: usize,
}

impl Blocks {
    /// Bytes from tile `t` of a row block to what is read [`TILES_AHEAD`] tiles later in the same place,
    /// where `streams` row blocks are read at once: behind its end the neighbour of the last of them follows.
    /// Gate and up are no neighbours, and each goes on in its own.
    #[inline(always)]
    pub fn ahead(&self, t: usize, streams: usize) -> usize {
        let tiles = self.groups.div_ceil(GROUPS);
        let are_neighbours = self.stride == tiles * TILE_BYTES;
        let hops = if are_neighbours { (t + TILES_AHEAD) / tiles } else { 0 };
        TILES_AHEAD * TILE_BYTES + hops * (streams - 1) * self.stride
    }
}

/// Activation rows in f32.
#[derive(Clone, Copy)]
pub struct FloatRows {
    /// First element.
    pub x: *const f32,
    /// Elements from one row to the next.
    pub ld: usize,
    /// How many.
    pub rows: usize,
}

/// What an activation row has for one tile: one stream for the kernels, and no 4-byte load crosses a cache
/// line. All of it is zero beyond k.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub struct ByteBlock {
    /// Codes.
    pub q: [i8; TILE_K],
    /// Scale of each group.
    pub scales: [f32; GROUPS],
    /// Bits of [`ANCHOR`] less [`OFFSET`] times the sum of each group's codes: where dots of unsigned
    /// weights start.
    pub start: [i32; GROUPS],
}

/// Activation rows in int8 with a scale per 16, tile by tile: `[tile][row]`.
#[derive(Clone, Copy)]
pub struct ByteRows {
    /// Of the first tile, first row.
    pub blocks: *const ByteBlock,
    /// Blocks from one tile to the next.
    pub ld: usize,
    /// How many rows.
    pub rows: usize,
}

// SAFETY: addresses of rows that nobody writes while a product runs.
unsafe impl Sync for FloatRows {}
// SAFETY: as above.
unsafe impl Sync for ByteRows {}

/// Activation rows of which a part can be taken.
pub trait Rows: Copy + Sync {
    /// How many.
    fn rows(&self) -> usize;
    /// `rows` rows from `row` on, starting at tile `tile`.
    ///
    /// # Safety
    /// They are inside.
    unsafe fn window(self, row: usize, rows: usize, tile: usize) -> Self;
}

impl Rows for FloatRows {
    fn rows(&self) -> usize {
        self.rows
    }
    unsafe fn window(self, row: usize, rows: usize, tile: usize) -> Self {
        // SAFETY: inside, by contract.
        Self { x: unsafe { self.x.add(row * self.ld + tile * TILE_K) }, rows, ..self }
    }
}

impl Rows for ByteRows {
    fn rows(&self) -> usize {
        self.rows
    }
    unsafe fn window(self, row: usize, rows: usize, tile: usize) -> Self {
        // SAFETY: inside, by contract.
        Self { blocks: unsafe { self.blocks.add(tile * self.ld + row) }, rows, ..self }
    }
}

/// A tile decoded to floats (unscaled), for products with many rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct FloatTile {
    /// `[k][lane]`, values times a constant power of two that `scales` takes back.
    pub values: [[f32; LANES]; TILE_K],
    /// `[group][lane]`.
    pub scales: [[f32; LANES]; GROUPS],
}

/// A tile decoded to bytes, for integer products with many rows, by and for one instruction set.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct ByteTile {
    /// `[k / 4][lane][k % 4]`, doubled value + [`OFFSET`]; NEON has signed dots and its own order within a
    /// group, without the offset.
    pub codes: [[[u8; 4]; LANES]; TILE_K / 4],
    /// `[group][lane]`.
    pub scales: [[f32; LANES]; GROUPS],
    /// `-ANCHOR` times them.
    pub offsets: [[f32; LANES]; GROUPS],
}

/// A tile buffer whose content is overwritten before it is read.
pub trait Tile: Copy {
    /// Some content.
    const BLANK: Self;
}
impl Tile for FloatTile {
    const BLANK: Self = Self { values: [[0.0; LANES]; TILE_K], scales: [[0.0; LANES]; GROUPS] };
}
impl Tile for ByteTile {
    const BLANK: Self = Self {
        codes: [[[0; 4]; LANES]; TILE_K / 4],
        scales: [[0.0; LANES]; GROUPS],
        offsets: [[0.0; LANES]; GROUPS],
    };
}

/// Decodes `blocks` in registers and writes `rows` sums from `acc` on.
pub type DirectFn<X> = unsafe fn(blocks: Blocks, x: X, acc: *mut Acc);
/// Adds the products of `count` decoded tiles to `rows` sums from `acc` on. x has `groups` groups: floats are
/// not padded.
pub type PanelFn<X, T> = unsafe fn(tiles: *const T, count: usize, groups: usize, x: X, acc: *mut Acc);

/// Quantises `groups` groups from `x` on to int8 as `q4_core::formats::int8` does, and pads them to whole
/// blocks, which are `ld` apart. False if an element is NaN or infinite; then the blocks mean nothing.
pub type Int8Fn = unsafe fn(x: *const f32, groups: usize, out: *mut ByteBlock, ld: usize) -> bool;
/// The same to NVFP4 as a [`Rounding`] says; codes are doubled values.
pub type Nvfp4Fn =
    unsafe fn(rounding: &Rounding, x: *const f32, groups: usize, out: *mut ByteBlock, ld: usize) -> bool;
/// Bits of the largest magnitude, which order as magnitudes do, infinity and NaN last.
pub type AmaxFn = unsafe fn(x: &[f32]) -> u32;

/// Sums times factors in f64, each rounded once to f32, to rows that are `ld` apart.
pub type FinishFn = unsafe fn(sums: &[Acc], factors: &[f64; PAIR * LANES], out: *mut f32, ld: usize);

/// Gates and what they let through, a row `[gate, up]`: `silu(gate) * up` to rows of 16 that are `ld` apart.
pub type GateFn = unsafe fn(rows: &[[f32; PAIR * LANES]], out: *mut f32, ld: usize);

/// Decodes a tile to `out[lane][k]`: the value of a code times the step of its group, rounded once.
pub type DecodeFn =
    unsafe fn(tile: *const u8, steps: &[[f32; GROUPS]; LANES], out: &mut [[f32; TILE_K]; LANES]);

/// Where in a lane's 32 bits the code of `k mod 8` starts.
pub const SHIFTS: [u32; 8] = [0, 8, 16, 24, 4, 12, 20, 28];

/// `dx[r] += sum_j dy[r][j] * w[j]`, j ascending.
pub type AxpyFn = unsafe fn(dy: &[[f32; LANES]], w: &[[f32; TILE_K]; LANES], dx: &mut [[f32; TILE_K]]);

/// Puts the codes of `count` adjacent tiles into another order.
pub type ReorderFn = unsafe fn(tiles: *mut u8, count: usize);

/// An order of its own for the codes of tiles, and the way back.
#[derive(Clone, Copy)]
pub struct Reorder {
    /// From the common order.
    pub to: ReorderFn,
    /// Back to it.
    pub back: ReorderFn,
}

/// Kernels of one kind of activations.
pub struct Product<X, T> {
    /// For few rows, up to `direct_rows`.
    pub direct: DirectFn<X>,
    /// Largest number of rows `direct` takes; 0 where it is not worth having.
    pub direct_rows: usize,
    /// Most rows of a `panel`, at most [`MOST_ROWS`].
    pub panel_rows: usize,
    /// Decodes the tile at a 64-byte aligned address, and fetches the one that lies `ahead` bytes behind it.
    pub unpack: unsafe fn(tile: *const u8, ahead: usize, out: *mut T),
    /// For any number of rows.
    pub panel: PanelFn<X, T>,
    /// To the order in which these read the codes of a tile, if it is their own. [`Kernels::decode`] wants
    /// the common one.
    pub reorder: Option<Reorder>,
}

/// Everything one instruction set provides.
///
/// # Safety of its functions
/// The processor has the instruction set, pointers address what the types say, and `groups <= 4` for a tile.
pub struct Kernels {
    /// f32 activations.
    pub float: Product<FloatRows, FloatTile>,
    /// int8 activations.
    pub bytes: Product<ByteRows, ByteTile>,
    /// x to int8.
    pub int8: Int8Fn,
    /// x to NVFP4.
    pub nvfp4: Nvfp4Fn,
    /// For per-tensor scales made per call.
    pub amax: AmaxFn,
    /// Sums to outputs.
    pub finish: FinishFn,
    /// Outputs of a fused gate.
    pub gate: GateFn,
    /// Weights as numbers.
    pub decode: DecodeFn,
    /// For the gradient of the input.
    pub axpy: AxpyFn,
    /// Stored rows to tiles.
    pub pack: pack::PackFn,
}

impl Kernels {
    /// Those of `isa`. They may run only where [`Isa::is_available`] says so.
    pub fn of(isa: Isa) -> &'static Self {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::Avx512Vnni => avx512::vnni(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &avx512::PLAIN,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &avx2::KERNELS,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => &neon::I8MM,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => &neon::DOTPROD,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &neon::PLAIN,
            _ => &portable::KERNELS,
        }
    }
}

/// Tiles that packed weights are fetched ahead of the arithmetic.
const TILES_AHEAD: usize = 16;
/// The same in bytes, where one row block is read after the other.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))] // portable has no use
const AHEAD: usize = TILES_AHEAD * TILE_BYTES;

/// Asks for the tile `ahead` bytes behind `tile`.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))] // as above
#[inline(always)]
unsafe fn prefetch<V: Vector>(tile: *const u8, ahead: usize) {
    for line in 0..TILE_BYTES / 64 {
        // SAFETY: a hint that never faults.
        unsafe { V::prefetch(tile.wrapping_add(ahead + 64 * line)) };
    }
}

/// Calls `f::<M>` for `rows` rows; the last number stands for more too.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! by_rows {
    ($rows:expr, [$($m:literal)*; $most:literal], $f:ident $args:tt) => {
        match $rows {
            $($m => $f::<$m> $args,)*
            _ => $f::<$most> $args,
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use by_rows;

#[cfg(test)]
mod tests {
    use super::*;

    /// Row blocks in pairs, tile by tile of both: the order of `forward::many_rows`.
    #[test]
    fn what_is_fetched_is_what_is_read_later() {
        for (tiles, pairs) in [(1, 40), (4, 12), (15, 4), (16, 4), (17, 3), (48, 2)] {
            let bytes = tiles * TILE_BYTES;
            // Neighbours, or a gate and its up.
            for (stride, from) in [(bytes, PAIR * bytes), (pairs * bytes, bytes)] {
                for c in 0..PAIR {
                    let start = |pair: usize| pair * from + c * stride;
                    let read = |i: usize| start(i / tiles) + i % tiles * TILE_BYTES;
                    for i in 0..pairs * tiles - TILES_AHEAD.min(pairs * tiles) {
                        let blocks = Blocks {
                            tiles: std::ptr::without_provenance(start(i / tiles)),
                            stride,
                            count: PAIR,
                            groups: tiles * GROUPS,
                        };
                        let fetched = read(i) + blocks.ahead(i % tiles, PAIR);
                        assert_eq!(
                            fetched,
                            read(i + TILES_AHEAD),
                            "{tiles} tiles, {pairs} pairs, {stride}, {i}"
                        );
                    }
                }
            }
        }
    }
}
