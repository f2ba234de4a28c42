//! The kernels in plain Rust, for any processor: lanes are arrays, which compilers turn into whatever vectors there are.
//! A multiply-add is two roundings here, so bits differ from the fused kernels.
use super::{
    Acc, Blocks, ByteRows, ByteTile, FloatRows, FloatTile, GROUP_BYTES, GROUPS, Kernels, LANES, OFFSET,
    Product, SCALES_AT, TILE_BYTES, TILE_K,
};
use q4_core::formats::{e2m1, e4m3};

/// The table of this file.
pub static KERNELS: Kernels = Kernels {
    float: Product { direct: never, direct_rows: 0, unpack: unpack_float, panel: panel_float },
    bytes: Product { direct: never, direct_rows: 0, unpack: unpack_bytes, panel: panel_bytes },
    axpy,
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

unsafe fn panel_bytes(tiles: *const ByteTile, count: usize, groups: usize, x: ByteRows, acc: *mut Acc) {
    for c in 0..count {
        for r in 0..x.rows {
            let s = r * (x.ld / 16);
            // SAFETY: by the contract of `Kernels`.
            let (tile, q, scales, bias, acc) = unsafe {
                (
                    &*tiles.add(c),
                    std::slice::from_raw_parts(x.q.add(r * x.ld), groups * 16),
                    std::slice::from_raw_parts(x.scales.add(s), groups),
                    std::slice::from_raw_parts(x.bias.add(s), groups),
                    &mut (*acc.add(r))[c],
                )
            };
            for g in 0..groups {
                let mut dot = [bias[g]; LANES];
                for (j, q) in q[g * 16..][..16].as_chunks::<4>().0.iter().enumerate() {
                    for (d, w) in dot.iter_mut().zip(&tile.codes[g * 4 + j]) {
                        *d += (0..4).map(|i| i32::from(w[i]) * i32::from(q[i])).sum::<i32>();
                    }
                }
                for l in 0..LANES {
                    acc[l] += dot[l] as f32 * (tile.scales[g][l] * scales[g]);
                }
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
