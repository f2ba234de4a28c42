//! The kernels in plain Rust, for any processor: lanes are arrays, which compilers turn into whatever vectors
//! there are. A multiply-add is two roundings here, so bits differ from the fused kernels.
use super::rounding::{Rounding, pad, start};
use super::{
    ANCHOR, Acc, Blocks, ByteBlock, ByteRows, ByteTile, FloatRows, FloatTile, GROUP_BYTES, GROUPS, Kernels,
    LANES, OFFSET, PANEL_ROWS, Product, SCALES_AT, SHIFTS, TILE_BYTES, TILE_K, lanes,
};
use q4_core::formats::{e2m1, e4m3, int8, nvfp4};
use q4_simd::Portable;

/// The table of this file.
pub static KERNELS: Kernels = Kernels {
    float: Product {
        direct: never,
        direct_rows: 0,
        panel_rows: PANEL_ROWS,
        unpack: unpack_float,
        panel: panel_float,
        reorder: None,
    },
    bytes: Product {
        direct: never,
        direct_rows: 0,
        panel_rows: PANEL_ROWS,
        unpack: unpack_bytes,
        panel: panel_bytes,
        reorder: None,
    },
    int8: quantise_int8,
    nvfp4: quantise_nvfp4,
    amax: lanes::amax::<Portable>,
    finish: lanes::finish::<Portable>,
    gate: lanes::gate::<Portable>,
    decode,
    axpy: lanes::axpy::<Portable>,
    pack: super::pack::portable,
};

/// Never called: `direct_rows` is 0.
unsafe fn never<X>(_: Blocks, _: X, _: *mut Acc) {
    unreachable!("direct_rows is 0")
}

unsafe fn unpack_float(tile: *const u8, _: usize, out: *mut FloatTile) {
    // SAFETY: by the contract of `Kernels`.
    let (tile, out) = unsafe { (&*tile.cast::<[u8; TILE_BYTES]>(), &mut *out) };
    each_code(tile, |k, lane, code| out.values[k][lane] = e2m1::VALUES[code]);
    scales(tile, &mut out.scales);
}

unsafe fn unpack_bytes(tile: *const u8, _: usize, out: *mut ByteTile) {
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
