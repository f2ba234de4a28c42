//! Sixteen lanes of f32 on each instruction set; here plain Rust and those of x86.
use crate::layout::{CODES, LANES};
use q4_core::{Reject, RejectCode};

/// An instruction set the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    Avx512,
    Avx2,
    Neon,
    Portable,
}

/// Words ahead of the one in use that codes are fetched: 8 KiB.
pub(crate) const AHEAD: usize = 2048;

impl Isa {
    /// Best first.
    pub const ALL: [Self; 4] = [Self::Avx512, Self::Avx2, Self::Neon, Self::Portable];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Neon => "neon",
            Self::Portable => "portable",
        }
    }

    /// The one named, or the best one.
    pub fn choose(name: Option<&str>) -> Result<Self, Reject> {
        let Some(name) = name else {
            return Ok(Self::ALL.into_iter().find(|i| i.is_available()).unwrap_or(Self::Portable));
        };
        // Integer dots are of no use to NF4.
        let plain = match name {
            "avx512vnni" | "amx" => "avx512",
            "neondotprod" | "neoni8mm" => "neon",
            _ => name,
        };
        let unknown = || {
            let known = "isa portable, avx2, avx512, avx512vnni, amx, neon, neondotprod or neoni8mm";
            Reject::new(RejectCode::DeviceArch, known, name.to_owned())
        };
        let isa = Self::ALL.into_iter().find(|i| i.as_str() == plain).ok_or_else(unknown)?;
        if isa.is_available() {
            return Ok(isa);
        }
        Err(Reject::new(RejectCode::DeviceArch, format!("a processor with {plain}"), std::env::consts::ARCH))
    }

    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        match self {
            Self::Avx512 => std::arch::is_x86_feature_detected!("avx512f"),
            Self::Avx2 => {
                std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
            }
            Self::Neon => false,
            Self::Portable => true,
        }
    }
    #[cfg(target_arch = "aarch64")]
    pub fn is_available(self) -> bool {
        match self {
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            Self::Portable => true,
            Self::Avx512 | Self::Avx2 => false,
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn is_available(self) -> bool {
        self == Self::Portable
    }
}

/// Sixteen f32 lanes and the table look-up. Every method is inlined into a function that enables the
/// features.
///
/// # Safety
/// The processor has the features of the implementation; pointers address 16 readable (writable) elements.
pub(crate) trait Lanes {
    /// 16 f32.
    type F: Copy;
    /// 16 words of 8 codes.
    type W: Copy;
    /// The 16 values of the codes.
    type T: Copy;
    /// Accumulators that fit into the registers, in units of `F`.
    const ACCUMULATORS: usize;
    /// Input rows and blocks (1 or 2) of one [`tile`](Self::tile), which has two accumulators for each pair
    /// of them.
    const ROWS: usize;
    const BLOCKS: usize;

    unsafe fn splat(v: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(v: Self::F, p: *mut f32);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn table(values: &[f32; 16]) -> Self::T;
    unsafe fn words(p: *const u32) -> Self::W;
    /// Values of code `j` (0 to 7) of every word.
    unsafe fn decode(t: Self::T, w: Self::W, j: i32) -> Self::F;
    /// Asks for the line at `p`, which may lie past the allocation.
    unsafe fn prefetch(p: *const u32);

    /// The two sums, over even and over odd k, of a chain of `count` words from `word` on: `M` rows of `x`
    /// with `B` blocks, whose lines are `step` words of memory apart.
    #[inline(always)]
    unsafe fn chain<const B: usize, const M: usize>(
        t: Self::T,
        codes: [*const u32; B],
        step: usize,
        count: usize,
        x: [*const f32; M],
        word: usize,
    ) -> [[[Self::F; 2]; B]; M] {
        // SAFETY: the trait's contract.
        unsafe {
            let mut acc = [[[Self::splat(0.0); 2]; B]; M];
            for word in word..word + count {
                for b in 0..B {
                    let p = codes[b].add(word * step);
                    Self::prefetch(p.wrapping_add(AHEAD));
                    let packed = Self::words(p);
                    for j in 0..CODES {
                        let v = Self::decode(t, packed, j as i32);
                        for r in 0..M {
                            let xv = Self::splat(*x[r].add(word * CODES + j));
                            acc[r][b][j & 1] = Self::fma(v, xv, acc[r][b][j & 1]);
                        }
                    }
                }
            }
            acc
        }
    }

    /// Values of the 8 codes of each of 16 words at `p`, one code after the other.
    #[inline(always)]
    unsafe fn unpack(t: Self::T, p: *const u32, out: *mut f32) {
        // SAFETY: the trait's contract; `out` has 8 times 16 elements.
        unsafe {
            let packed = Self::words(p);
            for j in 0..CODES {
                Self::store(Self::decode(t, packed, j as i32), out.add(j * LANES));
            }
        }
    }

    /// The two sums of `R` rows of `x` with `C` decoded tiles of `len` k.
    #[inline(always)]
    unsafe fn tile<const R: usize, const C: usize>(
        tiles: [*const f32; C],
        len: usize,
        x: [*const f32; R],
    ) -> [[[Self::F; 2]; C]; R] {
        // SAFETY: the trait's contract; a tile has 16 elements for each k, which is a multiple of 8.
        unsafe {
            let mut acc = [[[Self::splat(0.0); 2]; C]; R];
            for i in (0..len).step_by(2) {
                for odd in 0..2 {
                    let mut w = [Self::splat(0.0); C];
                    for c in 0..C {
                        w[c] = Self::load(tiles[c].add((i + odd) * LANES));
                    }
                    for r in 0..R {
                        let x = Self::splat(*x[r].add(i + odd));
                        for c in 0..C {
                            acc[r][c][odd] = Self::fma(w[c], x, acc[r][c][odd]);
                        }
                    }
                }
            }
            acc
        }
    }
}

/// Plain Rust; products are rounded before they are added.
pub(crate) struct Portable;

impl Lanes for Portable {
    type F = [f32; 16];
    type W = [u32; 16];
    type T = [f32; 16];
    const ACCUMULATORS: usize = 4;
    const ROWS: usize = 2;
    const BLOCKS: usize = 1;

    #[inline(always)]
    unsafe fn splat(v: f32) -> [f32; 16] {
        [v; 16]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; 16] {
        // SAFETY: 16 readable elements, as the trait asks.
        unsafe { p.cast::<[f32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(v: [f32; 16], p: *mut f32) {
        // SAFETY: 16 writable elements, as the trait asks.
        unsafe { p.cast::<[f32; 16]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn add(mut a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        for i in 0..16 {
            a[i] += b[i];
        }
        a
    }
    #[inline(always)]
    unsafe fn mul(mut a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        for i in 0..16 {
            a[i] *= b[i];
        }
        a
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; 16], b: [f32; 16], mut c: [f32; 16]) -> [f32; 16] {
        for i in 0..16 {
            c[i] += a[i] * b[i];
        }
        c
    }
    #[inline(always)]
    unsafe fn table(values: &[f32; 16]) -> [f32; 16] {
        *values
    }
    #[inline(always)]
    unsafe fn words(p: *const u32) -> [u32; 16] {
        // SAFETY: 16 readable elements, as the trait asks.
        unsafe { p.cast::<[u32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn decode(t: [f32; 16], w: [u32; 16], j: i32) -> [f32; 16] {
        let mut out = [0.0; 16];
        for i in 0..16 {
            out[i] = t[(w[i] >> (4 * j) & 15) as usize];
        }
        out
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u32) {}
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes;
    use std::arch::x86_64::*;

    /// One 512-bit register; the table is one register too.
    pub(crate) struct Avx512;

    impl Lanes for Avx512 {
        type F = __m512;
        type W = __m512i;
        type T = __m512;
        const ACCUMULATORS: usize = 16;
        const ROWS: usize = 4;
        const BLOCKS: usize = 2;

        #[inline(always)]
        unsafe fn splat(v: f32) -> __m512 {
            // SAFETY: the trait's contract: AVX-512F is there.
            unsafe { _mm512_set1_ps(v) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store(v: __m512, p: *mut f32) {
            // SAFETY: the trait's contract.
            unsafe { _mm512_storeu_ps(p, v) }
        }
        #[inline(always)]
        unsafe fn add(a: __m512, b: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn mul(a: __m512, b: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn table(values: &[f32; 16]) -> __m512 {
            // SAFETY: the trait's contract; the array has 16 elements.
            unsafe { _mm512_loadu_ps(values.as_ptr()) }
        }
        #[inline(always)]
        unsafe fn words(p: *const u32) -> __m512i {
            // SAFETY: the trait's contract.
            unsafe { _mm512_loadu_si512(p.cast()) }
        }
        #[inline(always)]
        unsafe fn decode(t: __m512, w: __m512i, j: i32) -> __m512 {
            // SAFETY: the trait's contract. The permute looks at the low four bits of every index only.
            unsafe { _mm512_permutexvar_ps(_mm512_srlv_epi32(w, _mm512_set1_epi32(4 * j)), t) }
        }
        #[inline(always)]
        unsafe fn prefetch(p: *const u32) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        }
    }

    /// Two 256-bit registers; each half of the table is one.
    pub(crate) struct Avx2;

    impl Lanes for Avx2 {
        type F = [__m256; 2];
        type W = [__m256i; 2];
        type T = [__m256; 2];
        const ACCUMULATORS: usize = 4;
        const ROWS: usize = 2;
        const BLOCKS: usize = 1;

        #[inline(always)]
        unsafe fn splat(v: f32) -> [__m256; 2] {
            // SAFETY: the trait's contract: AVX2 and FMA are there.
            unsafe { [_mm256_set1_ps(v); 2] }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> [__m256; 2] {
            // SAFETY: the trait's contract.
            unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
        }
        #[inline(always)]
        unsafe fn store(v: [__m256; 2], p: *mut f32) {
            // SAFETY: the trait's contract.
            unsafe {
                _mm256_storeu_ps(p, v[0]);
                _mm256_storeu_ps(p.add(8), v[1]);
            }
        }
        #[inline(always)]
        unsafe fn add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            // SAFETY: the trait's contract.
            unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
        }
        #[inline(always)]
        unsafe fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            // SAFETY: the trait's contract.
            unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
        }
        #[inline(always)]
        unsafe fn fma(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
            // SAFETY: the trait's contract.
            unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
        }
        #[inline(always)]
        unsafe fn table(values: &[f32; 16]) -> [__m256; 2] {
            // SAFETY: the trait's contract; the array has 16 elements.
            unsafe { Self::load(values.as_ptr()) }
        }
        #[inline(always)]
        unsafe fn words(p: *const u32) -> [__m256i; 2] {
            // SAFETY: the trait's contract.
            unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast())] }
        }
        #[inline(always)]
        unsafe fn decode(t: [__m256; 2], w: [__m256i; 2], j: i32) -> [__m256; 2] {
            // SAFETY: the trait's contract.
            unsafe { [half(t, w[0], j), half(t, w[1], j)] }
        }
        #[inline(always)]
        unsafe fn prefetch(p: *const u32) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        }
    }

    /// Looks the low three bits up in both halves of the table and lets bit 3, moved to the sign, choose.
    #[inline(always)]
    unsafe fn half(t: [__m256; 2], w: __m256i, j: i32) -> __m256 {
        // SAFETY: called by `Avx2` only.
        unsafe {
            let index = _mm256_srlv_epi32(w, _mm256_set1_epi32(4 * j));
            let (low, high) = (_mm256_permutevar8x32_ps(t[0], index), _mm256_permutevar8x32_ps(t[1], index));
            let bit3 = _mm256_sllv_epi32(w, _mm256_set1_epi32(28 - 4 * j));
            _mm256_blendv_ps(low, high, _mm256_castsi256_ps(bit3))
        }
    }
}
