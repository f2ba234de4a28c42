//! The kernels in AVX-512: one register is one row block. Integer products, in a file of their own, exist
//! twice, with and without VNNI; both are exact, so they differ in speed only.
mod activations;
mod bytes;

use super::{
    Acc, Blocks, ByteRows, ByteTile, FloatRows, FloatTile, GROUP_BYTES, GROUPS, Kernels, LANES, MOST_ROWS,
    PAIR, PANEL_ROWS, Product, SCALES_AT, SHIFTS, TILE_BYTES, TILE_K, lanes,
};
use q4_core::formats::e2m1;
use q4_simd::Avx512;
use std::arch::x86_64::*;
use std::hint;
use std::sync::OnceLock;

/// Activation rows that advance together where there are many: with two row blocks twelve sums of a chain, more
/// than hide the latency of a multiply-add.
const PANEL: usize = 6;

/// AVX-512 F, BW, DQ and VL with FMA and F16C.
pub static PLAIN: Kernels = table(FLOAT, bytes::PLAIN);
/// The same with VNNI.
static VNNI: Kernels = table(FLOAT, bytes::VNNI);
/// That, where bytes are permuted across a register (VBMI): decoding takes a sixth fewer operations.
static NEAR: Kernels = table(TALL, bytes::NEAR);
/// That, with weights for few rows of int8 fetched ahead into the second cache only, and f32 in shorter
/// panels.
static FAR: Kernels = table(FLOAT, bytes::FAR);

/// The fastest of those with VNNI here. Intel's processors have more requests of the second cache under way
/// than of the first: a Xeon of 2023 decodes 3 to 8 % faster with [`FAR`], an AMD Zen 5 4 % slower. Products
/// of f32 are a tenth slower so on the Xeon.
pub fn vnni() -> &'static Kernels {
    static CHOSEN: OnceLock<&Kernels> = OnceLock::new();
    CHOSEN.get_or_init(|| match (is_x86_feature_detected!("avx512vbmi"), is_intel()) {
        (false, _) => &VNNI,
        (true, false) => &NEAR,
        (true, true) => &FAR,
    })
}

fn is_intel() -> bool {
    let vendor = __cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
}

const fn table(float: Product<FloatRows, FloatTile>, bytes: Product<ByteRows, ByteTile>) -> Kernels {
    Kernels {
        float,
        bytes,
        int8: activations::int8,
        nvfp4: activations::nvfp4,
        amax: lanes::amax::<Avx512>,
        finish: lanes::finish::<Avx512>,
        gate: lanes::gate::<Avx512>,
        decode,
        axpy: lanes::axpy::<Avx512>,
        pack: super::pack::avx2,
    }
}

/// With f32 activations.
const FLOAT: Product<FloatRows, FloatTile> =
    Product { direct, direct_rows: 8, panel_rows: PANEL_ROWS, unpack, panel, reorder: None };
/// That with more rows a tile: a prompt of a small model is 1 % faster so on an AMD Zen 5. An Intel Xeon,
/// busy with other work too, looked slower.
const TALL: Product<FloatRows, FloatTile> = Product { panel_rows: MOST_ROWS, ..FLOAT };

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn direct(w: Blocks, x: FloatRows, acc: *mut Acc) {
    // SAFETY: same contract.
    unsafe {
        match x.rows {
            1 => one_by_one::<1>(w, x, acc),
            2 => one_by_one::<2>(w, x, acc),
            5 => one_by_one::<5>(w, x, acc),
            6 => one_by_one::<6>(w, x, acc),
            7 => one_by_one::<7>(w, x, acc),
            8 => one_by_one::<8>(w, x, acc),
            _ => by_shape!(x.rows, w.count, direct_shape(w, x, 0, acc)),
        }
    }
}

/// One or two rows wait for memory, which is fastest as one ascending stream; more than four leave registers
/// for one row block only. Three and four have arithmetic enough to read two at once.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn one_by_one<const M: usize>(w: Blocks, x: FloatRows, out: *mut Acc) {
    for c in 0..w.count {
        // SAFETY: same contract, for one of its row blocks.
        unsafe { direct_shape::<M, 1>(Blocks { tiles: w.tiles.add(c * w.stride), ..w }, x, c, out) };
    }
}

/// C row blocks, whose sums are those from `first` on.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn direct_shape<const M: usize, const C: usize>(w: Blocks, x: FloatRows, first: usize, out: *mut Acc) {
    // SAFETY: by the contract of `Kernels`, M rows of 16 * groups floats and C row blocks of that many groups
    // exist.
    unsafe {
        let table = values();
        let zero = _mm512_setzero_ps();
        let mut acc = [[zero; C]; M];
        for g in 0..w.groups {
            let tile = w.tiles.add(g / GROUPS * TILE_BYTES);
            if g % GROUPS == 0 {
                let ahead = w.ahead(g / GROUPS, C);
                for c in 0..C {
                    prefetch::<_MM_HINT_T0>(tile.add(c * w.stride), ahead);
                }
            }
            let mut chains = [[[zero; 2]; C]; M];
            for half in 0..2 {
                let mut codes = [_mm512_setzero_si512(); C];
                for c in 0..C {
                    codes[c] = load(tile.add(c * w.stride + g % GROUPS * GROUP_BYTES + half * 64));
                }
                for nibble in 0..8 {
                    let k = 16 * g + 8 * half + nibble / 2 + 4 * (nibble % 2);
                    for c in 0..C {
                        // The permutation looks at four bits of a lane, so the rest need not be cleared.
                        let value = _mm512_permutexvar_ps(codes[c], table);
                        codes[c] = _mm512_srli_epi32::<4>(codes[c]);
                        for r in 0..M {
                            let s = &mut chains[r][c][nibble % 2];
                            *s = _mm512_fmadd_ps(_mm512_set1_ps(*x.x.add(r * x.ld + k)), value, *s);
                        }
                    }
                }
            }
            for c in 0..C {
                let scale = scales(tile.add(c * w.stride), g % GROUPS);
                for r in 0..M {
                    let [a, b] = chains[r][c];
                    acc[r][c] = _mm512_fmadd_ps(_mm512_add_ps(a, b), scale, acc[r][c]);
                }
            }
        }
        put(&acc, first, out);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn unpack(tile: *const u8, ahead: usize, out: *mut FloatTile) {
    // SAFETY: a tile and its buffer, by the contract of `Kernels`.
    unsafe {
        prefetch::<_MM_HINT_T0>(tile, ahead);
        let table = values();
        for half in 0..TILE_K / 8 {
            let mut codes = load(tile.add(half * 64));
            for nibble in 0..8 {
                let k = 8 * half + nibble / 2 + 4 * (nibble % 2);
                _mm512_store_ps((*out).values[k].as_mut_ptr(), _mm512_permutexvar_ps(codes, table));
                codes = _mm512_srli_epi32::<4>(codes);
            }
        }
        for g in 0..GROUPS {
            _mm512_store_ps((*out).scales[g].as_mut_ptr(), scales(tile, g));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn panel(tiles: *const FloatTile, count: usize, groups: usize, x: FloatRows, acc: *mut Acc) {
    // SAFETY: same contract.
    unsafe {
        match count {
            1 => panel_rows::<1>(tiles, groups, x, acc),
            _ => panel_rows::<2>(tiles, groups, x, acc),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn panel_rows<const C: usize>(tiles: *const FloatTile, groups: usize, x: FloatRows, acc: *mut Acc) {
    // Two of them; a compiler that knows lays a chain out, loads all its weights first and then lacks registers
    // for sums.
    let loops = [groups, hint::black_box(2)];
    let mut r = 0;
    while r < x.rows {
        let some = together(x.rows - r);
        // SAFETY: same contract; so many rows from r on exist.
        unsafe {
            let (rows, acc) = (FloatRows { x: x.x.add(r * x.ld), ..x }, acc.add(r));
            match some {
                1 => panel_shape::<1, C>(tiles, loops, rows, acc),
                2 => panel_shape::<2, C>(tiles, loops, rows, acc),
                3 => panel_shape::<3, C>(tiles, loops, rows, acc),
                4 => panel_shape::<4, C>(tiles, loops, rows, acc),
                5 => panel_shape::<5, C>(tiles, loops, rows, acc),
                _ => panel_shape::<PANEL, C>(tiles, loops, rows, acc),
            }
        }
        r += some;
    }
}

/// Rows of the next call of a panel that has so many left: few alone wait for their own sums, or load much for
/// what they multiply, so that the last two calls share the rest.
fn together(left: usize) -> usize {
    if left > PANEL && left < 2 * PANEL { left.div_ceil(2) } else { left.min(PANEL) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn panel_shape<const M: usize, const C: usize>(
    tiles: *const FloatTile,
    [groups, halves]: [usize; 2],
    x: FloatRows,
    out: *mut Acc,
) {
    // SAFETY: by the contract of `Kernels`, M rows and sums and C tiles with `groups` groups of two halves
    // exist.
    unsafe {
        let mut acc = get::<M, C>(out);
        for g in 0..groups {
            let (mut low, mut high) = ([[_mm512_setzero_ps(); C]; M], [[_mm512_setzero_ps(); C]; M]);
            // One chain at a time, so that all sums stay in registers.
            for half in 0..halves {
                four_k(&mut low, tiles, 16 * g + 8 * half, x);
            }
            for half in 0..halves {
                four_k(&mut high, tiles, 16 * g + 8 * half + 4, x);
            }
            for c in 0..C {
                let scale = _mm512_load_ps((*tiles.add(c)).scales.as_ptr().add(g).cast());
                for r in 0..M {
                    acc[r][c] = _mm512_fmadd_ps(_mm512_add_ps(low[r][c], high[r][c]), scale, acc[r][c]);
                }
            }
        }
        put(&acc, 0, out);
    }
}

/// Adds the products over `k` to `k + 3`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn four_k<const M: usize, const C: usize>(
    sums: &mut [[__m512; C]; M],
    tiles: *const FloatTile,
    k: usize,
    x: FloatRows,
) {
    for k in k..k + 4 {
        let mut value = [_mm512_setzero_ps(); C];
        for c in 0..C {
            // SAFETY: C tiles exist.
            value[c] = unsafe { _mm512_load_ps((*tiles.add(c)).values.as_ptr().add(k).cast()) };
        }
        for r in 0..M {
            // SAFETY: M rows reach to the end of the group.
            let x = _mm512_set1_ps(unsafe { *x.x.add(r * x.ld + k) });
            for c in 0..C {
                sums[r][c] = _mm512_fmadd_ps(x, value[c], sums[r][c]);
            }
        }
    }
}

/// Values by code.
#[inline]
#[target_feature(enable = "avx512f")]
fn values() -> __m512 {
    // SAFETY: the table has 16 floats.
    unsafe { _mm512_loadu_ps(e2m1::VALUES.as_ptr()) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn decode(tile: *const u8, steps: &[[f32; GROUPS]; LANES], out: &mut [[f32; TILE_K]; LANES]) {
    // SAFETY: a tile has eight halves of 16 words, by the contract of `Kernels`; tables and rows have what is
    // read.
    unsafe {
        let shifts = _mm512_broadcast_i64x4(_mm256_loadu_si256(SHIFTS.as_ptr().cast()));
        let table = values();
        for (lane, out) in out.iter_mut().enumerate() {
            for g in 0..GROUPS {
                let words = tile.cast::<i32>().add(2 * g * LANES + lane);
                let (low, high) = (_mm256_set1_epi32(*words), _mm256_set1_epi32(*words.add(LANES)));
                let codes = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                // The permutation looks at four bits of a lane, so the rest need not be cleared.
                let values = _mm512_permutexvar_ps(_mm512_srlv_epi32(codes, shifts), table);
                let step = _mm512_set1_ps(steps[lane][g]);
                _mm512_storeu_ps(out.as_mut_ptr().add(16 * g), _mm512_mul_ps(values, step));
            }
        }
    }
}

/// Calls `f::<M, C>` for `rows` rows (4 stands for more) and `count` row blocks.
macro_rules! by_shape {
    ($rows:expr, $count:expr, $f:ident($($a:expr),*)) => {
        match ($rows, $count) {
            (1, 1) => $f::<1, 1>($($a),*),
            (2, 1) => $f::<2, 1>($($a),*),
            (3, 1) => $f::<3, 1>($($a),*),
            (_, 1) => $f::<4, 1>($($a),*),
            (1, _) => $f::<1, 2>($($a),*),
            (2, _) => $f::<2, 2>($($a),*),
            (3, _) => $f::<3, 2>($($a),*),
            _ => $f::<4, 2>($($a),*),
        }
    };
}
use by_shape;

/// Scales of group `g` of a tile, times 2^-8.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn scales(tile: *const u8, g: usize) -> __m512 {
    // SAFETY: a tile has 64 bytes of scales.
    let bytes = unsafe { _mm_load_si128(tile.add(SCALES_AT + LANES * g).cast()) };
    _mm512_cvtph_ps(_mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(bytes)))
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(p: *const u8) -> __m512i {
    // SAFETY: 64 aligned bytes, by the layout.
    unsafe { _mm512_load_si512(p.cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn prefetch<const HINT: i32>(tile: *const u8, ahead: usize) {
    for line in 0..TILE_BYTES / 64 {
        _mm_prefetch::<HINT>(tile.wrapping_add(ahead + 64 * line).cast());
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn get<const M: usize, const C: usize>(acc: *const Acc) -> [[__m512; C]; M] {
    let mut out = [[_mm512_setzero_ps(); C]; M];
    for r in 0..M {
        for c in 0..C.min(PAIR) {
            // SAFETY: M sums of two row blocks exist.
            out[r][c] = unsafe { _mm512_loadu_ps((*acc.add(r))[c].as_ptr()) };
        }
    }
    out
}

/// Writes the sums of `C` row blocks from `first` on.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn put<const M: usize, const C: usize>(acc: &[[__m512; C]; M], first: usize, out: *mut Acc) {
    for r in 0..M {
        for c in 0..C.min(PAIR) {
            // SAFETY: M sums of two row blocks exist.
            unsafe { _mm512_storeu_ps((*out.add(r))[first + c].as_mut_ptr(), acc[r][c]) };
        }
    }
}

#[cfg(test)]
mod tests {
    //! Tables that this processor can run and would not choose.
    use super::*;
    use crate::kernels::{AHEAD, Blocks, ByteBlock, Tile, rounding};

    /// Sums of `rows` rows with two tiles of two row blocks, by both products.
    fn sums(kernels: &Kernels, tiles: &[Aligned; 4], rows: &[ByteBlock]) -> Vec<Acc> {
        let bytes = &kernels.bytes;
        let m = rows.len() / 2;
        let x = |tile: usize| ByteRows { blocks: rows[tile * m..].as_ptr(), ld: m, rows: m };
        let mut out = vec![[[0.0; LANES]; PAIR]; m];
        // SAFETY: the processor has the instructions; tiles, rows and sums are as many as said.
        unsafe {
            for tile in 0..2 {
                let mut decoded = [ByteTile::BLANK; PAIR];
                for (c, decoded) in decoded.iter_mut().enumerate() {
                    (bytes.unpack)(tiles[2 * c + tile].0.as_ptr(), AHEAD, decoded);
                }
                (bytes.panel)(decoded.as_ptr(), PAIR, GROUPS, x(tile), out.as_mut_ptr());
            }
            if m <= bytes.direct_rows {
                let blocks =
                    Blocks { tiles: tiles[0].0.as_ptr(), stride: 2 * TILE_BYTES, count: 2, groups: 8 };
                let mut few = vec![[[0.0; LANES]; PAIR]; m];
                (bytes.direct)(blocks, x(0), few.as_mut_ptr());
                assert_eq!(few, out, "{m} rows: the two products differ");
            }
        }
        out
    }

    #[repr(C, align(64))]
    struct Aligned([u8; TILE_BYTES]);

    #[test]
    fn every_table_with_integer_dots_gives_the_same_bits() {
        if !q4_core::isa::Isa::Avx512Vnni.is_available() {
            println!("skipped: no AVX-512 VNNI here");
            return;
        }
        let vbmi = is_x86_feature_detected!("avx512vbmi");
        let tables = [("vnni", true, &VNNI), ("near", vbmi, &NEAR), ("far", vbmi, &FAR)];
        let mut seed = 5u32;
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 24) as u8
        };
        // Any codes, scales that are numbers.
        let tiles = std::array::from_fn(|_| {
            Aligned(std::array::from_fn(|i| if i < SCALES_AT { next() } else { next() % 0x7f }))
        });
        for m in 1..=14 {
            let row = |_| {
                let q: [i8; TILE_K] = std::array::from_fn(|_| (next() as i8).max(-127));
                let sum = |g: usize| q[16 * g..][..16].iter().map(|&q| i32::from(q)).sum();
                ByteBlock {
                    q,
                    scales: std::array::from_fn(|_| f32::from(next()) / 255.0),
                    start: std::array::from_fn(|g| rounding::start(sum(g))),
                }
            };
            let rows: Vec<_> = (0..2 * m).map(row).collect();
            let want = sums(&PLAIN, &tiles, &rows);
            for (name, there, table) in tables {
                assert!(!there || sums(table, &tiles, &rows) == want, "{name}, {m} rows");
            }
        }
    }
}
