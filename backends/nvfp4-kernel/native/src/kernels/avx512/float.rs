//! Products with f32 activations in AVX-512.
use super::{by_shape, get, load, prefetch, put, scales};
use crate::kernels::{
    Acc, Blocks, FloatRows, FloatTile, GROUP_BYTES, GROUPS, MOST_ROWS, PANEL_ROWS, Product, TILE_BYTES,
    TILE_K,
};
use q4_core::formats::e2m1;
use std::arch::x86_64::*;

pub const FLOAT: Product<FloatRows, FloatTile> =
    Product { direct, direct_rows: 8, panel_rows: PANEL_ROWS, unpack, panel };
/// That with more rows a tile: a prompt of a small model is 1 % faster so on an AMD Zen 5. An Intel Xeon, busy
/// with other work too, looked slower.
pub const TALL: Product<FloatRows, FloatTile> = Product { panel_rows: MOST_ROWS, ..FLOAT };

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
    for r in (0..x.rows).step_by(4) {
        // SAFETY: same contract; rows r to r + 3 or the last one exist.
        unsafe {
            by_shape!(x.rows - r, count, panel_shape(tiles, groups, x.x.add(r * x.ld), x.ld, acc.add(r)))
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn panel_shape<const M: usize, const C: usize>(
    tiles: *const FloatTile,
    groups: usize,
    x: *const f32,
    ld: usize,
    out: *mut Acc,
) {
    // SAFETY: by the contract of `Kernels`, M rows and sums and C tiles with `groups` groups exist.
    unsafe {
        let mut acc = get::<M, C>(out);
        for g in 0..groups {
            let (mut low, mut high) = ([[_mm512_setzero_ps(); C]; M], [[_mm512_setzero_ps(); C]; M]);
            // One chain at a time, so that all sums stay in registers.
            chain(&mut low, tiles, 16 * g, x, ld);
            chain(&mut high, tiles, 16 * g + 4, x, ld);
            for c in 0..C {
                let scale = _mm512_load_ps((*tiles.add(c)).scales[g].as_ptr());
                for r in 0..M {
                    acc[r][c] = _mm512_fmadd_ps(_mm512_add_ps(low[r][c], high[r][c]), scale, acc[r][c]);
                }
            }
        }
        put(&acc, 0, out);
    }
}

/// Adds the products over `k` to `k + 3` and `k + 8` to `k + 11`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
unsafe fn chain<const M: usize, const C: usize>(
    sums: &mut [[__m512; C]; M],
    tiles: *const FloatTile,
    k: usize,
    x: *const f32,
    ld: usize,
) {
    for j in 0..8 {
        let k = k + j + (j & 4);
        let mut value = [_mm512_setzero_ps(); C];
        for c in 0..C {
            // SAFETY: C tiles exist.
            value[c] = unsafe { _mm512_load_ps((*tiles.add(c)).values[k].as_ptr()) };
        }
        for r in 0..M {
            // SAFETY: M rows reach to the end of the group.
            let x = _mm512_set1_ps(unsafe { *x.add(r * ld + k) });
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
