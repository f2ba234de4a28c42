//! Inner loops over one panel: `M` rows of the input against sixteen rows of the weight, in AVX-512, AVX2 or
//! plain Rust.
//!
//! Every kernel adds the sixteen products of a group in a chain of their own before the group's scale is
//! applied, and one row of the input never sees another, so `M` changes no bit of a row.
use crate::pack::{Block, GROUP, LANES, float_of};
use q4_plugin_sdk::q4_core::formats::e2m1;

/// Sums of `M` input rows with the rows of a panel.
pub type Sums<const M: usize> = [[f32; LANES]; M];

/// An input row of integers: per group 16 codes as four words of four codes (columns 0 2 4 6, 1 3 5 7, 8 10
/// 12 14, 9 11 13 15), a scale, and the sum of the codes.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Quantized {
    pub words: [u32; 4],
    pub scale: f32,
    pub sum: i32,
}

/// What the machine can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The best there is.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx512f") && has!("avx512bw") && has!("avx512vnni") {
                return Self::Avx512;
            }
            if has!("avx2") && has!("fma") && has!("f16c") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// Rows of floats. Each of `x` has 16 elements per block.
    pub fn floats<const M: usize>(self, blocks: &[Block], x: [&[f32]; M]) -> Sums<M> {
        assert!(x.iter().all(|x| x.len() >= blocks.len() * GROUP), "a row of k elements");
        match self {
            Self::Portable => portable::floats(blocks, x),
            // SAFETY: `detect` found the features; the rows are long enough.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2::floats(blocks, x) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::floats(blocks, x) },
        }
    }

    /// Rows of integers; sums are in half units of a weight's code.
    pub fn integers<const M: usize>(self, blocks: &[Block], x: [&[Quantized]; M]) -> Sums<M> {
        assert!(x.iter().all(|x| x.len() >= blocks.len()), "a row of k / 16 groups");
        match self {
            Self::Portable => portable::integers(blocks, x),
            // SAFETY: `detect` found the features; the rows are long enough.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2::integers(blocks, x) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::integers(blocks, x) },
        }
    }
}

/// Doubled values plus 12: what an unsigned-by-signed dot product wants.
const RAISED: [u8; 16] = {
    let mut out = [0; 16];
    let mut i = 0;
    while i < 16 {
        out[i] = (e2m1::DOUBLED[i] + 12) as u8;
        i += 1;
    }
    out
};

mod portable {
    use super::*;

    pub fn floats<const M: usize>(blocks: &[Block], x: [&[f32]; M]) -> Sums<M> {
        let mut sums = [[0f32; LANES]; M];
        for (g, b) in blocks.iter().enumerate() {
            let mut part = [[0f32; LANES]; M];
            for i in 0..GROUP {
                let w: [f32; LANES] =
                    std::array::from_fn(|l| e2m1::decode((b.codes[i / 8][l] >> (4 * (i % 8)) & 15) as u8));
                for r in 0..M {
                    let x = x[r][g * GROUP + i];
                    for l in 0..LANES {
                        part[r][l] += x * w[l];
                    }
                }
            }
            for r in 0..M {
                for l in 0..LANES {
                    sums[r][l] += part[r][l] * float_of(b.scales[l]);
                }
            }
        }
        sums
    }

    pub fn integers<const M: usize>(blocks: &[Block], x: [&[Quantized]; M]) -> Sums<M> {
        let mut sums = [[0f32; LANES]; M];
        for (g, b) in blocks.iter().enumerate() {
            for r in 0..M {
                let q = &x[r][g];
                for l in 0..LANES {
                    let mut dot = 0;
                    for (word, four) in q.words.iter().enumerate() {
                        let codes = (b.codes[word / 2][l] >> (4 * (word % 2))).to_le_bytes();
                        for (c, x) in codes.iter().zip(four.to_le_bytes()) {
                            dot += i32::from(e2m1::DOUBLED[usize::from(c & 15)]) * i32::from(x as i8);
                        }
                    }
                    sums[r][l] += dot as f32 * (float_of(b.scales[l]) * q.scale);
                }
            }
        }
        sums
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::*;
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub unsafe fn floats<const M: usize>(blocks: &[Block], x: [&[f32]; M]) -> Sums<M> {
        let values: [f32; 16] = std::array::from_fn(|c| e2m1::decode(c as u8));
        // SAFETY: sixteen floats.
        let table = unsafe { _mm512_loadu_ps(values.as_ptr()) };
        let mut sums = [_mm512_setzero_ps(); M];
        for (g, b) in blocks.iter().enumerate() {
            // Two chains a row hide the latency of one.
            let mut part = [[_mm512_setzero_ps(); 2]; M];
            for half in 0..2 {
                // SAFETY: sixteen words of the block.
                let mut codes = unsafe { _mm512_loadu_si512(b.codes[half].as_ptr().cast()) };
                for i in 0..8 {
                    let w = _mm512_permutexvar_ps(codes, table);
                    for r in 0..M {
                        // SAFETY: the caller checked that rows have 16 elements per block.
                        let x = unsafe { *x[r].get_unchecked(g * GROUP + 8 * half + i) };
                        part[r][half] = _mm512_fmadd_ps(_mm512_set1_ps(x), w, part[r][half]);
                    }
                    codes = _mm512_srli_epi32::<4>(codes);
                }
            }
            // SAFETY: sixteen halves of the block.
            let scale = _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(b.scales.as_ptr().cast()) });
            for r in 0..M {
                sums[r] = _mm512_fmadd_ps(_mm512_add_ps(part[r][0], part[r][1]), scale, sums[r]);
            }
        }
        store(sums)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub unsafe fn integers<const M: usize>(blocks: &[Block], x: [&[Quantized]; M]) -> Sums<M> {
        // SAFETY: sixteen bytes.
        let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(RAISED.as_ptr().cast()) });
        let low = _mm512_set1_epi8(15);
        let mut sums = [_mm512_setzero_ps(); M];
        for (g, b) in blocks.iter().enumerate() {
            // SAFETY: sixteen words of the block.
            let codes = [0, 1].map(|half| unsafe { _mm512_loadu_si512(b.codes[half].as_ptr().cast()) });
            let words =
                [codes[0], _mm512_srli_epi32::<4>(codes[0]), codes[1], _mm512_srli_epi32::<4>(codes[1])]
                    .map(|c| _mm512_shuffle_epi8(table, _mm512_and_si512(c, low)));
            // SAFETY: sixteen halves of the block.
            let scale = _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(b.scales.as_ptr().cast()) });
            for r in 0..M {
                // SAFETY: the caller checked that rows have an entry per block.
                let q = unsafe { x[r].get_unchecked(g) };
                let mut dot = _mm512_set1_epi32(-12 * q.sum);
                for (word, w) in words.into_iter().enumerate() {
                    dot = _mm512_dpbusd_epi32(dot, w, _mm512_set1_epi32(q.words[word] as i32));
                }
                let both = _mm512_mul_ps(scale, _mm512_set1_ps(q.scale));
                sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), both, sums[r]);
            }
        }
        store(sums)
    }

    #[target_feature(enable = "avx512f")]
    fn store<const M: usize>(sums: [__m512; M]) -> Sums<M> {
        let mut out = [[0f32; LANES]; M];
        for (out, sum) in out.iter_mut().zip(sums) {
            // SAFETY: sixteen floats.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) };
        }
        out
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use std::arch::x86_64::*;

    const SIDES: usize = 2;
    const SIDE: usize = LANES / SIDES;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub unsafe fn floats<const M: usize>(blocks: &[Block], x: [&[f32]; M]) -> Sums<M> {
        // SAFETY: eight floats: the magnitudes; bit 3 of a code is the sign.
        let table = unsafe { _mm256_loadu_ps([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0].as_ptr()) };
        let sign = _mm256_set1_epi32(i32::MIN);
        let mut sums = [[_mm256_setzero_ps(); SIDES]; M];
        for (g, b) in blocks.iter().enumerate() {
            for side in 0..SIDES {
                let mut part = [[_mm256_setzero_ps(); 2]; M];
                for half in 0..2 {
                    // SAFETY: eight words of the block.
                    let mut codes =
                        unsafe { _mm256_loadu_si256(b.codes[half].as_ptr().add(SIDE * side).cast()) };
                    for i in 0..8 {
                        let signs = _mm256_and_si256(_mm256_slli_epi32::<28>(codes), sign);
                        let w =
                            _mm256_xor_ps(_mm256_permutevar8x32_ps(table, codes), _mm256_castsi256_ps(signs));
                        for r in 0..M {
                            // SAFETY: the caller checked that rows have 16 elements per block.
                            let x = unsafe { *x[r].get_unchecked(g * GROUP + 8 * half + i) };
                            part[r][half] = _mm256_fmadd_ps(_mm256_set1_ps(x), w, part[r][half]);
                        }
                        codes = _mm256_srli_epi32::<4>(codes);
                    }
                }
                let scale = scales(b, side);
                for r in 0..M {
                    let part = _mm256_add_ps(part[r][0], part[r][1]);
                    sums[r][side] = _mm256_fmadd_ps(part, scale, sums[r][side]);
                }
            }
        }
        store(sums)
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub unsafe fn integers<const M: usize>(blocks: &[Block], x: [&[Quantized]; M]) -> Sums<M> {
        // SAFETY: sixteen bytes.
        let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(RAISED.as_ptr().cast()) });
        let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
        let mut sums = [[_mm256_setzero_ps(); SIDES]; M];
        for (g, b) in blocks.iter().enumerate() {
            for side in 0..SIDES {
                // SAFETY: eight words of the block.
                let codes = [0, 1].map(|half| unsafe {
                    _mm256_loadu_si256(b.codes[half].as_ptr().add(SIDE * side).cast())
                });
                let words =
                    [codes[0], _mm256_srli_epi32::<4>(codes[0]), codes[1], _mm256_srli_epi32::<4>(codes[1])]
                        .map(|c| _mm256_shuffle_epi8(table, _mm256_and_si256(c, low)));
                let scale = scales(b, side);
                for r in 0..M {
                    // SAFETY: the caller checked that rows have an entry per block.
                    let q = unsafe { x[r].get_unchecked(g) };
                    let mut dot = _mm256_set1_epi32(-12 * q.sum);
                    for (word, w) in words.into_iter().enumerate() {
                        // A pair is at most 2 * 24 * 127, far from where it would saturate.
                        let pairs = _mm256_maddubs_epi16(w, _mm256_set1_epi32(q.words[word] as i32));
                        dot = _mm256_add_epi32(dot, _mm256_madd_epi16(pairs, ones));
                    }
                    let both = _mm256_mul_ps(scale, _mm256_set1_ps(q.scale));
                    sums[r][side] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), both, sums[r][side]);
                }
            }
        }
        store(sums)
    }

    #[target_feature(enable = "avx2,f16c")]
    fn scales(b: &Block, side: usize) -> __m256 {
        // SAFETY: eight halves of the block.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(b.scales.as_ptr().add(SIDE * side).cast()) })
    }

    #[target_feature(enable = "avx2")]
    fn store<const M: usize>(sums: [[__m256; SIDES]; M]) -> Sums<M> {
        let mut out = [[0f32; LANES]; M];
        for (out, sides) in out.iter_mut().zip(sums) {
            for (side, sum) in sides.into_iter().enumerate() {
                // SAFETY: eight floats of sixteen.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(SIDE * side), sum) };
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_agrees() {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let mut block = || Block {
            codes: [(); 2].map(|()| [(); LANES].map(|()| next() << 12 ^ next())),
            // Scales from 1 to 2.
            scales: [(); LANES].map(|()| 0x3c00 | (next() as u16 & 0x380)),
        };
        let blocks: Vec<Block> = (0..9).map(|_| block()).collect();
        let floats: Vec<f32> = (0..9 * GROUP).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
        let codes: Vec<i8> = (0..9 * GROUP).map(|i| (i * 73 % 255) as i8).collect();
        let quantized: Vec<Quantized> = codes
            .chunks(GROUP)
            .map(|q| Quantized {
                words: [0, 1, 8, 9].map(|at| u32::from_le_bytes([0, 2, 4, 6].map(|i| q[at + i] as u8))),
                scale: 0.25,
                sum: q.iter().map(|v| i32::from(*v)).sum(),
            })
            .collect();
        let isa = Isa::detect();
        let near = |a: &[f32; LANES], b: &[f32; LANES]| {
            a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-4 * (1.0 + b.abs()))
        };
        for isa in [
            isa,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2,
        ] {
            if isa as u8 > Isa::detect() as u8 {
                continue;
            }
            assert!(
                near(&isa.floats(&blocks, [&floats])[0], &portable::floats(&blocks, [&floats[..]])[0]),
                "{isa:?}"
            );
            assert!(
                near(
                    &isa.integers(&blocks, [&quantized])[0],
                    &portable::integers(&blocks, [&quantized[..]])[0]
                ),
                "{isa:?}"
            );
        }
    }
}
