//! Products of many rows on the tile unit (AMX), which multiplies bf16 and adds f32. A decoded weight, E2M1
//! times E4M3, has six significant bits and NVFP4 inputs have eight, so both are exact in bf16; an f32 input
//! is three bf16 numbers, exactly.
//!
//! Compilers have no stable intrinsics for the unit, so its instructions are written out.
use super::{Acc, ByteBlock, GROUP_BYTES, GROUPS, LANES, PAIR, TILE_BYTES, TILE_K, avx512::scales};
use q4_core::formats::e2m1;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Activation rows of a tile register.
pub const ROWS: usize = 16;
/// Elements of k in a tile register.
pub const STEP: usize = 32;
/// Bytes of a tile register.
const REGISTER: usize = 1024;
/// bf16 numbers that an f32 number is cut into.
pub const FLOAT_PARTS: usize = 3;

/// One register's bytes: 16 rows of 32 bf16 inputs, or 16 pairs of k times 16 lanes of weights.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Register([u8; REGISTER]);

/// The unit, configured for whole registers on this thread until it is dropped.
pub struct Unit(());

impl Unit {
    /// Configures it.
    ///
    /// # Safety
    /// [`q4_core::has_tiles`].
    pub unsafe fn new() -> Self {
        #[repr(C, align(64))]
        struct Config {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        row_bytes[..8].fill(64);
        rows[..8].fill(16);
        let config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows };
        // SAFETY: the unit is there, by contract, and reads 64 bytes.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags, readonly));
        }
        Self(())
    }

    /// 16 rows of f32 inputs times two row blocks over `steps` steps of k: `out[i][c]` for row i. `a` has the
    /// three parts of each step side by side, `b` the registers of either row block.
    ///
    /// The first part has sums of its own: the other two are 2^-8 of it, and so is what rounding their sums
    /// costs.
    ///
    /// # Safety
    /// `a` has `3 * steps` registers and each of `b` has `steps`, at least one.
    pub unsafe fn floats(
        &self,
        a: *const Register,
        b: [*const Register; PAIR],
        steps: usize,
        out: &mut Sums,
    ) {
        // SAFETY: reads the registers the contract names, writes the four of `out`.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{b0} + {line}*1]", "tileloadd tmm6, [{a} + {line}*1]",
                "tdpbf16ps tmm0, tmm6, tmm4",
                "tileloadd tmm5, [{b1} + {line}*1]",
                "tdpbf16ps tmm1, tmm6, tmm5",
                "tileloadd tmm7, [{a} + {line}*1 + 1024]",
                "tdpbf16ps tmm2, tmm7, tmm4", "tdpbf16ps tmm3, tmm7, tmm5",
                "tileloadd tmm6, [{a} + {line}*1 + 2048]",
                "tdpbf16ps tmm2, tmm6, tmm4", "tdpbf16ps tmm3, tmm6, tmm5",
                "add {a}, 3072", "add {b0}, 1024", "add {b1}, 1024",
                "dec {n}", "jnz 2b",
                "tilestored [{out} + {line}*1], tmm0", "tilestored [{out} + {line}*1 + 1024], tmm1",
                "tilestored [{out} + {line}*1 + 2048], tmm2", "tilestored [{out} + {line}*1 + 3072], tmm3",
                a = inout(reg) a => _, b0 = inout(reg) b[0] => _, b1 = inout(reg) b[1] => _,
                n = inout(reg) steps => _, line = in(reg) 64usize, out = in(reg) out, options(nostack),
            );
        }
    }

    /// 32 rows of bf16 inputs times two row blocks: the sums of the first 16 rows, then those of the others.
    ///
    /// # Safety
    /// Each of `a` and of `b` has `steps` registers, at least one.
    pub unsafe fn bytes(
        &self,
        a: [*const Register; 2],
        b: [*const Register; PAIR],
        steps: usize,
        out: &mut Sums,
    ) {
        // SAFETY: as above.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{b0} + {line}*1]", "tileloadd tmm6, [{a0} + {line}*1]",
                "tdpbf16ps tmm0, tmm6, tmm4",
                "tileloadd tmm5, [{b1} + {line}*1]",
                "tdpbf16ps tmm1, tmm6, tmm5",
                "tileloadd tmm7, [{a1} + {line}*1]",
                "tdpbf16ps tmm2, tmm7, tmm4", "tdpbf16ps tmm3, tmm7, tmm5",
                "add {a0}, 1024", "add {a1}, 1024", "add {b0}, 1024", "add {b1}, 1024",
                "dec {n}", "jnz 2b",
                "tilestored [{out} + {line}*1], tmm0", "tilestored [{out} + {line}*1 + 1024], tmm1",
                "tilestored [{out} + {line}*1 + 2048], tmm2", "tilestored [{out} + {line}*1 + 3072], tmm3",
                a0 = inout(reg) a[0] => _, a1 = inout(reg) a[1] => _,
                b0 = inout(reg) b[0] => _, b1 = inout(reg) b[1] => _,
                n = inout(reg) steps => _, line = in(reg) 64usize, out = in(reg) out, options(nostack),
            );
        }
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        // SAFETY: it was configured, so it is there.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }
}

/// Four registers of sums.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Sums(pub [[[f32; LANES]; ROWS]; 4]);

impl Sums {
    /// Zeros.
    pub const BLANK: Self = Self([[[0.0; LANES]; ROWS]; 4]);
}

/// Cuts up to 32 floats of row `row` into the three registers from `out` on and fills the rest of the line
/// with zeros. The first part is the number's first eight significant bits, and so on. False if a number is
/// not 0 and its magnitude is not in 2^-100 to 2^100, where parts could be too small for the unit, which has
/// no subnormals, or sums too large: then the line means nothing.
///
/// # Safety
/// AVX-512; `out` has three registers, `row` is below 16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
pub unsafe fn split(x: &[f32], row: usize, out: *mut Register) -> bool {
    const SMALLEST: i32 = (127 - 100) << 23;
    const BEYOND: i32 = (127 + 100) << 23;
    let top = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let mut fits = true;
    for half in 0..2 {
        let left = x.len().saturating_sub(16 * half).min(16);
        let mask = ((1u32 << left) - 1) as u16;
        // SAFETY: a masked load reads `left` floats, which exist; the line is inside each register.
        unsafe {
            let v = _mm512_maskz_loadu_ps(mask, x.as_ptr().wrapping_add(16 * half));
            let magnitude = _mm512_castps_si512(_mm512_abs_ps(v));
            let small = _mm512_mask_cmplt_epi32_mask(
                _mm512_test_epi32_mask(magnitude, magnitude),
                magnitude,
                _mm512_set1_epi32(SMALLEST),
            );
            fits &= small | _mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32(BEYOND)) == 0;
            let mut rest = v;
            for part in 0..FLOAT_PARTS {
                let head = _mm512_and_si512(_mm512_castps_si512(rest), top);
                let line = out.add(part).cast::<u8>().add(64 * row + 32 * half);
                let bits = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(head));
                _mm256_store_si256(line.cast(), bits);
                rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(head));
            }
        }
    }
    fits
}

/// The quantised inputs of a tile of k as bf16, `code * scale`, to row `row` of the two registers from `out`
/// on.
///
/// # Safety
/// AVX-512; `out` has two registers, `row` is below 16; codes and scales have at most four significant bits
/// each.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
pub unsafe fn widen(x: &ByteBlock, row: usize, out: *mut Register) {
    for g in 0..GROUPS {
        // SAFETY: a block has 64 codes; the line is inside the register.
        unsafe {
            let q = _mm_loadu_si128(x.q.as_ptr().add(16 * g).cast());
            let v = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q)), _mm512_set1_ps(x.scales[g]));
            let line = out.add(g / 2).cast::<u8>().add(64 * row + 32 * (g % 2));
            let bits = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(v)));
            _mm256_store_si256(line.cast(), bits);
        }
    }
}

/// Decodes a packed tile to two registers: lane n of line p has the weights of k = 2p and 2p + 1, times the
/// 2^-8 of [`super::SCALE_FACTOR`].
///
/// # Safety
/// AVX-512; a tile, and two registers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
pub unsafe fn decode(tile: *const u8, out: *mut Register) {
    debug_assert_eq!(TILE_K, 2 * STEP);
    // SAFETY: by contract; the table has 16 floats.
    unsafe {
        for line in 0..TILE_BYTES / 64 {
            _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(4 * TILE_BYTES + 64 * line).cast());
        }
        let table = _mm512_loadu_ps(e2m1::VALUES.as_ptr());
        let mut line = out.cast::<u8>();
        for g in 0..GROUPS {
            let scale = scales(tile, g);
            // The permutation looks at four bits of a lane, so the rest need not be cleared.
            let value =
                |codes| _mm512_castps_si512(_mm512_mul_ps(_mm512_permutexvar_ps(codes, table), scale));
            for half in 0..2 {
                let codes = _mm512_load_si512(tile.add(g * GROUP_BYTES + 64 * half).cast());
                // Bytes 0 and 1, then 2 and 3, of their low and then of their high nibbles.
                let pairs = [
                    (value(codes), value(_mm512_srli_epi32::<8>(codes))),
                    (value(_mm512_srli_epi32::<16>(codes)), value(_mm512_srli_epi32::<24>(codes))),
                    (value(_mm512_srli_epi32::<4>(codes)), value(_mm512_srli_epi32::<12>(codes))),
                    (value(_mm512_srli_epi32::<20>(codes)), value(_mm512_srli_epi32::<28>(codes))),
                ];
                for (even, odd) in pairs {
                    let both = _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(even), odd);
                    _mm512_store_si512(line.cast(), both);
                    line = line.add(64);
                }
            }
        }
    }
}

/// Adds what the unit summed to `sums`, or writes it there: of 32 rows (`stacked`), or of 16 rows in two
/// registers each.
///
/// # Safety
/// AVX-512; as many sums as there are rows, initialised unless they are written.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
pub unsafe fn add(from: &Sums, stacked: bool, write: bool, sums: &mut [MaybeUninit<Acc>]) {
    for (r, sum) in sums.iter_mut().enumerate() {
        for c in 0..PAIR {
            // SAFETY: registers have 16 lines of 16 floats, a sum two lines.
            unsafe {
                let at = sum.as_mut_ptr().cast::<f32>().add(LANES * c);
                let register = |i: usize| _mm512_load_ps(from.0[i][r % ROWS].as_ptr());
                let mut v = if stacked {
                    register(2 * (r / ROWS) + c)
                } else {
                    _mm512_add_ps(register(c), register(2 + c))
                };
                if !write {
                    v = _mm512_add_ps(_mm512_loadu_ps(at), v);
                }
                _mm512_storeu_ps(at, v);
            }
        }
    }
}
