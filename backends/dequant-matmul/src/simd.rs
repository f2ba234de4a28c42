//! Sixteen lanes of f32 on each instruction set: the only file that knows one.
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use q4_core::{Reject, RejectCode};

/// An instruction set the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    Avx512,
    Avx2,
    Portable,
}

impl Isa {
    /// Best first.
    pub const ALL: [Self; 3] = [Self::Avx512, Self::Avx2, Self::Portable];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }

    /// The one named, or the best one.
    pub fn choose(name: Option<&str>) -> Result<Self, Reject> {
        let Some(name) = name else {
            return Ok(Self::ALL.into_iter().find(|i| i.is_available()).unwrap_or(Self::Portable));
        };
        let plain = if name == "avx512vnni" { "avx512" } else { name };
        let unknown = || {
            Reject::new(RejectCode::DeviceArch, "isa portable, avx2, avx512 or avx512vnni", name.to_owned())
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
                std::arch::is_x86_feature_detected!("avx2")
                    && std::arch::is_x86_feature_detected!("fma")
                    && std::arch::is_x86_feature_detected!("f16c")
            }
            Self::Portable => true,
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Self::Portable
    }
}

/// Sixteen f32 lanes and the widening loads. Every method is inlined into a function that enables the features.
///
/// # Safety
/// The processor has the features of the implementation; pointers address 16 readable (writable) elements.
pub(crate) trait Lanes {
    /// 16 f32.
    type F: Copy;
    /// Accumulators that fit into the registers, in units of `F`.
    const ACCUMULATORS: usize;

    unsafe fn splat(v: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn load_f16(p: *const f16) -> Self::F;
    unsafe fn load_bf16(p: *const bf16) -> Self::F;
    unsafe fn store(v: Self::F, p: *mut f32);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Asks for the line at `p`, which may lie past the allocation.
    unsafe fn prefetch(p: *const u8);
}

/// Plain Rust; products are rounded before they are added.
pub(crate) struct Portable;

impl Lanes for Portable {
    type F = [f32; 16];
    const ACCUMULATORS: usize = 4;

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
    unsafe fn load_f16(p: *const f16) -> [f32; 16] {
        let mut out = [0.0; 16];
        // SAFETY: 16 readable elements, as the trait asks.
        unsafe { p.cast::<[f16; 16]>().read_unaligned() }.convert_to_f32_slice(&mut out);
        out
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> [f32; 16] {
        // SAFETY: 16 readable elements, as the trait asks.
        let from = unsafe { p.cast::<[u16; 16]>().read_unaligned() };
        let mut out = [0.0; 16];
        for i in 0..16 {
            out[i] = f32::from_bits(u32::from(from[i]) << 16);
        }
        out
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
    unsafe fn fma(a: [f32; 16], b: [f32; 16], mut c: [f32; 16]) -> [f32; 16] {
        for i in 0..16 {
            c[i] += a[i] * b[i];
        }
        c
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Lanes, bf16, f16};
    use std::arch::x86_64::*;

    /// One 512-bit register.
    pub(crate) struct Avx512;

    impl Lanes for Avx512 {
        type F = __m512;
        const ACCUMULATORS: usize = 16;

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
        unsafe fn load_f16(p: *const f16) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
        }
        #[inline(always)]
        unsafe fn load_bf16(p: *const bf16) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
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
        unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: the trait's contract.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn prefetch(p: *const u8) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        }
    }

    /// Two 256-bit registers.
    pub(crate) struct Avx2;

    impl Lanes for Avx2 {
        type F = [__m256; 2];
        const ACCUMULATORS: usize = 4;

        #[inline(always)]
        unsafe fn splat(v: f32) -> [__m256; 2] {
            // SAFETY: the trait's contract: AVX2, FMA and F16C are there.
            unsafe { [_mm256_set1_ps(v); 2] }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> [__m256; 2] {
            // SAFETY: the trait's contract.
            unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> [__m256; 2] {
            // SAFETY: the trait's contract.
            unsafe { [half_f16(p), half_f16(p.add(8))] }
        }
        #[inline(always)]
        unsafe fn load_bf16(p: *const bf16) -> [__m256; 2] {
            // SAFETY: the trait's contract.
            unsafe { [half_bf16(p), half_bf16(p.add(8))] }
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
        unsafe fn fma(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
            // SAFETY: the trait's contract.
            unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
        }
        #[inline(always)]
        unsafe fn prefetch(p: *const u8) {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
        }
    }

    #[inline(always)]
    unsafe fn half_f16(p: *const f16) -> __m256 {
        // SAFETY: called by `Avx2` with 8 readable elements.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn half_bf16(p: *const bf16) -> __m256 {
        // SAFETY: called by `Avx2` with 8 readable elements.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }
}
