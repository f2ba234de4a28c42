//! The kernels in plain Rust, for any processor: lanes are arrays, which compilers turn into whatever vectors
//! there are. A multiply-add is two roundings here, so bits differ from the fused kernels.
use super::rounding::{Rounding, pad, start};
use super::{
    ANCHOR, Acc, Blocks, ByteBlock, ByteRows, ByteTile, FloatRows, FloatTile, GROUP_BYTES, GROUPS, Kernels,
    LANES, OFFSET, PAIR, Product, SCALES_AT, SHIFTS, TILE_BYTES, TILE_K,
};
use q4_core::exponential::silu;
use q4_core::formats::{e2m1, e4m3, int8, nvfp4};

/// The table of this file.
pub static KERNELS: Kernels = Kernels {
    float: Product { direct: never, direct_rows: 0, unpack: unpack_float, panel: panel_float },
    bytes: Product { direct: never, direct_rows: 0, unpack: unpack_bytes, panel: panel_bytes },
    int8: quantise_int8,
    nvfp4: quantise_nvfp4,
    amax,
    finish,
    gate,
    decode,
    axpy,
    pack: super::pack::portable,
};

/// Never called: `direct_rows` is 0.
unsafe fn never<X>(_: Blocks, _: X, _: *mut Acc) {
    unreachable!("direct_rows is 0")
}

unsafe fn unpack_float(tile: *const u8, out: *mut FloatTile) {
    // SAFETY: by the contract of `Kernels`.
    let (tile, out) = unsafe { (&*tile.cast::<[u8; TILE_BYTES]>(), &mut *out) };
    each_code(tile, |k, lane, code| out.values[k][lane] = e2m1::VALUES[code]);
    scales(tile, &mut out.scales);
}

unsafe fn unpack_bytes(tile: *const u8, out: *mut ByteTile) {
    // SAFETY: by the contract of `Kernels`.
    let (tile, out) = unsafe { (&*tile.cast::<[u8; TILE_BYTES]>(), &mut *out) };
    each_code(tile, |k, lane, code| {
        out.codes[k / 4][lane][k % 4] = (i32::from(e2m1::DOUBLED[code]) + OFFSET) as u8;
    });
    scales(tile, &mut out.scales);
}

#[inline(always)]
fn each_code(tile: &[u8; TILE_BYTES], mut put: impl FnMut(usize, usize, usize)) {
    for (group, bytes) in tile[..SCALES_AT].chunks_exact(GROUP_BYTES).enumerate() {
        for (i, &byte) in bytes.iter().enumerate() {
            let (half, lane, j) = (i / 64, i % 64 / 4, i % 4);
            let k = group * 16 + half * 8 + j;
            put(k, lane, usize::from(byte & 15));
            put(k + 4, lane, usize::from(byte >> 4));
        }
    }
}

fn scales(tile: &[u8; TILE_BYTES], out: &mut [[f32; LANES]; GROUPS]) {
    for (s, &byte) in out.as_flattened_mut().iter_mut().zip(&tile[SCALES_AT..]) {
        *s = e4m3::decode(byte) * (1.0 / 256.0);
    }
}

unsafe fn panel_float(tiles: *const FloatTile, count: usize, groups: usize, x: FloatRows, acc: *mut Acc) {
    for c in 0..count {
        for r in 0..x.rows {
            // SAFETY: by the contract of `Kernels`.
            let (tile, row, acc) = unsafe {
                (
                    &*tiles.add(c),
                    std::slice::from_raw_parts(x.x.add(r * x.ld), groups * 16),
                    &mut (*acc.add(r))[c],
                )
            };
            for (g, x) in row.as_chunks::<16>().0.iter().enumerate() {
                let (mut low, mut high) = ([0f32; LANES], [0f32; LANES]);
                for (j, &x) in x.iter().enumerate() {
                    let chain = if j % 8 < 4 { &mut low } else { &mut high };
                    for (s, w) in chain.iter_mut().zip(&tile.values[g * 16 + j]) {
                        *s += x * w;
                    }
                }
                for l in 0..LANES {
                    acc[l] += (low[l] + high[l]) * tile.scales[g][l];
                }
            }
        }
    }
}

unsafe fn panel_bytes(tiles: *const ByteTile, count: usize, _: usize, x: ByteRows, acc: *mut Acc) {
    for c in 0..count {
        for r in 0..x.rows {
            // SAFETY: by the contract of `Kernels`.
            let (tile, x, acc) = unsafe { (&*tiles.add(c), &*x.blocks.add(r), &mut (*acc.add(r))[c]) };
            for g in 0..GROUPS {
                let mut dot = [x.start[g]; LANES];
                for (j, q) in x.q[g * 16..][..16].as_chunks::<4>().0.iter().enumerate() {
                    for (d, w) in dot.iter_mut().zip(&tile.codes[g * 4 + j]) {
                        *d += (0..4).map(|i| i32::from(w[i]) * i32::from(q[i])).sum::<i32>();
                    }
                }
                for l in 0..LANES {
                    let dot = f32::from_bits(dot[l] as u32) - ANCHOR;
                    acc[l] += dot * tile.scales[g][l] * x.scales[g];
                }
            }
        }
    }
}

unsafe fn quantise_int8(x: *const f32, groups: usize, out: *mut ByteBlock, ld: usize) -> bool {
    // SAFETY: by the contract of `Int8Fn`.
    unsafe {
        each_group(x, groups, out, ld, |x, q, scale| {
            int8::quantize_row(x, q, std::slice::from_mut(scale)).is_ok()
        })
    }
}

unsafe fn quantise_nvfp4(r: &Rounding, x: *const f32, groups: usize, out: *mut ByteBlock, ld: usize) -> bool {
    // SAFETY: by the contract of `Nvfp4Fn`.
    unsafe {
        each_group(x, groups, out, ld, |x, q, scale| {
            let (mut codes, mut byte) = ([0; nvfp4::BLOCK / 2], 0);
            let ok = r.quantizer.quantize_row(x, &mut codes, std::slice::from_mut(&mut byte)).is_ok();
            for (q, byte) in q.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                *q = [e2m1::DOUBLED[usize::from(byte & 15)], e2m1::DOUBLED[usize::from(byte >> 4)]];
            }
            *scale = e4m3::decode(byte);
            ok
        })
    }
}

unsafe fn each_group(
    x: *const f32,
    groups: usize,
    out: *mut ByteBlock,
    ld: usize,
    quantise: impl Fn(&[f32; 16], &mut [i8; 16], &mut f32) -> bool,
) -> bool {
    let mut ok = true;
    for g in 0..groups {
        // SAFETY: the groups and their blocks exist, by the contract of the callers.
        let (x, block) = unsafe { (&*x.add(16 * g).cast(), &mut *out.add(g / GROUPS * ld)) };
        let q = &mut block.q.as_chunks_mut::<16>().0[g % GROUPS];
        ok &= quantise(x, q, &mut block.scales[g % GROUPS]);
        block.start[g % GROUPS] = start(q.iter().map(|&q| i32::from(q)).sum());
    }
    // SAFETY: same contract.
    unsafe { pad(groups, out, ld) };
    ok
}

/// Largest magnitude as bits.
pub unsafe fn amax(x: &[f32]) -> u32 {
    amax_body(x)
}

/// The loop of `amax`, compiled again by each instruction set.
#[inline(always)]
pub fn amax_body(x: &[f32]) -> u32 {
    x.iter().fold(0, |a, v| a.max(v.to_bits() & 0x7fff_ffff))
}

/// Sums to outputs.
pub unsafe fn finish(sums: &[Acc], factors: &[f64; PAIR * LANES], out: *mut f32, ld: usize) {
    // SAFETY: same contract.
    unsafe { finish_body(sums, factors, out, ld) };
}

/// The loop of `finish`, compiled again by each instruction set.
///
/// # Safety
/// `out` has as many rows of 32 as there are sums.
#[inline(always)]
pub unsafe fn finish_body(sums: &[Acc], factors: &[f64; PAIR * LANES], out: *mut f32, ld: usize) {
    for (r, sums) in sums.iter().enumerate() {
        // SAFETY: by contract.
        let out = unsafe { &mut *out.add(r * ld).cast::<[f32; PAIR * LANES]>() };
        for ((o, &s), f) in out.iter_mut().zip(sums.as_flattened()).zip(factors) {
            *o = (f64::from(s) * f) as f32;
        }
    }
}

unsafe fn gate(rows: &[[f32; PAIR * LANES]], out: *mut f32, ld: usize) {
    // SAFETY: same contract.
    unsafe { gate_body::<false>(rows, out, ld) };
}

/// The loop of `gate`, compiled again by each instruction set.
///
/// # Safety
/// `out` has as many rows of 16.
#[inline(always)]
pub unsafe fn gate_body<const FMA: bool>(rows: &[[f32; PAIR * LANES]], out: *mut f32, ld: usize) {
    for (r, row) in rows.iter().enumerate() {
        // SAFETY: by contract.
        let out = unsafe { &mut *out.add(r * ld).cast::<[f32; LANES]>() };
        for (i, o) in out.iter_mut().enumerate() {
            *o = silu::<FMA>(row[i]) * row[LANES + i];
        }
    }
}

unsafe fn decode(tile: *const u8, steps: &[[f32; GROUPS]; LANES], out: &mut [[f32; TILE_K]; LANES]) {
    for (lane, out) in out.iter_mut().enumerate() {
        for (half, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // SAFETY: a tile has eight halves of 16 words.
            let word = u32::from_le(unsafe { *tile.cast::<u32>().add(half * LANES + lane) });
            for (o, shift) in out.iter_mut().zip(SHIFTS) {
                *o = e2m1::VALUES[(word >> shift & 15) as usize] * steps[lane][half / 2];
            }
        }
    }
}

unsafe fn axpy(dy: &[[f32; LANES]], w: &[[f32; TILE_K]; LANES], dx: &mut [[f32; TILE_K]]) {
    axpy_body(dy, w, dx, |a, b, c| a * b + c);
}

/// The loop of `axpy`, compiled again by each instruction set with its own multiply-add.
#[inline(always)]
pub fn axpy_body(
    dy: &[[f32; LANES]],
    w: &[[f32; TILE_K]; LANES],
    dx: &mut [[f32; TILE_K]],
    multiply_add: impl Fn(f32, f32, f32) -> f32,
) {
    for (dy, dx) in dy.iter().zip(dx) {
        let mut sum = *dx;
        for (&d, w) in dy.iter().zip(w) {
            for (s, &w) in sum.iter_mut().zip(w) {
                *s = multiply_add(d, w, *s);
            }
        }
        *dx = sum;
    }
}
