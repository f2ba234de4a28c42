//! What this machine could do at best: bytes read and products made a second, on the threads the work runs
//! on.
use memmap2::MmapMut;
use q4_core::pages::advise_huge;
use q4_core::{Activations, Result, ThreadPool};
use q4_simd::{Isa, LANES, Vector, Vectors, on};
use std::hint::black_box;
use std::time::Instant;

/// Beyond what a guest gets of a large host's last-level cache, small beside a model.
const BYTES: usize = 512 << 20;

/// Measured limits.
pub struct Roofline {
    /// Sequential reads, GB/s.
    pub read_gb_s: f64,
    /// f32 fused multiply-adds, billions a second.
    fma_g_s: f64,
    /// int8 products by dot instructions, or by multiplies of pairs and additions, billions a second; `None`
    /// where plain Rust has to do.
    dot_g_s: Option<f64>,
    /// bf16 products by a matrix unit, billions a second; `None` without one.
    tile_g_s: Option<f64>,
}

/// What a unit of work costs.
pub struct Work {
    /// Bytes read.
    pub bytes: f64,
    /// Multiply-accumulates.
    pub macs: f64,
}

impl Work {
    /// Seconds at least: reading and computing overlap.
    pub fn seconds(&self, read_gb_s: f64, gmac_s: f64) -> f64 {
        (self.bytes / (read_gb_s * 1e9)).max(self.macs / (gmac_s * 1e9))
    }
}

impl Roofline {
    /// Measures in about half a second: the best of several passes, for a limit is not an average. Arithmetic
    /// is that of the instruction set that `Q4_ISA` names: kernels that were told to do without another are
    /// not held against it.
    ///
    /// # Errors
    /// As of [`Isa::named`].
    pub fn measure(threads: &ThreadPool) -> Result<Self> {
        let (named, vectors) = (Isa::named()?, Vectors::named()?);
        Ok(Self {
            read_gb_s: read(threads),
            fma_g_s: products(threads, LANES, |x| chains(vectors, x)),
            dot_g_s: dot_product(named).map(|(lanes, f)| products(threads, lanes, f)),
            tile_g_s: tile_product(named).map(|(lanes, f)| products(threads, lanes, f)),
        })
    }

    /// The better of two measurements, limit by limit.
    pub fn or_faster(&self, other: &Self) -> Self {
        let faster = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a.max(b));
        Self {
            read_gb_s: self.read_gb_s.max(other.read_gb_s),
            fma_g_s: self.fma_g_s.max(other.fma_g_s),
            dot_g_s: faster(self.dot_g_s, other.dot_g_s),
            tile_g_s: faster(self.tile_g_s, other.tile_g_s),
        }
    }

    /// Products a second for an activation format. In plain Rust an int8 product is taken to cost half of an
    /// f32's. A matrix unit takes an f32 input in three parts.
    pub fn gmac_s(&self, activations: &Activations) -> f64 {
        match activations {
            Activations::Native | Activations::Fp8(_) => self.fma_g_s.max(self.tile_g_s.unwrap_or(0.0) / 3.0),
            Activations::Nvfp4(_) if self.tile_g_s.is_some() => self.tile_g_s.unwrap_or(self.fma_g_s),
            _ => self.dot_g_s.unwrap_or(2.0 * self.fma_g_s),
        }
    }
}

fn read(threads: &ThreadPool) -> f64 {
    let Ok(mut memory) = MmapMut::map_anon(BYTES) else { return f64::NAN };
    advise_huge(memory.as_ptr().addr(), BYTES);
    memory.fill(1);
    let data: &[u64] = bytemuck::cast_slice(&memory);
    let pieces = threads.threads() * 8;
    let size = data.len() / pieces;
    let pass = || {
        let start = Instant::now();
        threads.run(pieces, &|i| {
            black_box(sum(&data[i * size..][..size]));
        });
        (pieces * size * 8) as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    (0..6).map(|_| pass()).fold(0.0, f64::max)
}

/// Four streams with independent sums, each asking for its line a page ahead: one stream alone does not fill
/// the memory's queue.
fn sum(data: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if Isa::Avx512.is_available() {
        // SAFETY: the feature was found on this processor.
        return unsafe { sum_avx512(data) };
    }
    let quarter = data.len() / 4;
    let mut acc = [[0u64; 8]; 4];
    let streams: [&[u64]; 4] = std::array::from_fn(|s| &data[s * quarter..][..quarter]);
    for i in (0..quarter / 8 * 8).step_by(8) {
        for (a, s) in acc.iter_mut().zip(&streams) {
            for l in 0..8 {
                a[l] = a[l].wrapping_add(s[i + l]);
            }
        }
    }
    acc.as_flattened().iter().fold(0, |t, v| t.wrapping_add(*v))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_avx512(data: &[u64]) -> u64 {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_prefetch, _mm512_add_epi64, _mm512_loadu_si512, _mm512_reduce_add_epi64,
        _mm512_setzero_si512,
    };
    const AHEAD: usize = 4096 / 8;
    let quarter = data.len() / 4 / 8 * 8;
    let mut acc = [_mm512_setzero_si512(); 4];
    for i in (0..quarter).step_by(8) {
        for (s, a) in acc.iter_mut().enumerate() {
            // SAFETY: s * quarter + i + 8 <= 4 * quarter <= data.len(); a prefetch may point anywhere.
            unsafe {
                let p = data.as_ptr().add(s * quarter + i);
                _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(AHEAD).cast());
                *a = _mm512_add_epi64(*a, _mm512_loadu_si512(p.cast()));
            }
        }
    }
    acc.iter().fold(0, |t: u64, a| t.wrapping_add(_mm512_reduce_add_epi64(*a) as u64))
}

const CHAINS: usize = 12;
const STEPS: usize = 200_000;

/// Billions of products a second of `work`, which makes `CHAINS * lanes * STEPS` of them.
fn products(threads: &ThreadPool, lanes: usize, work: impl Fn(f32) -> f32 + Sync) -> f64 {
    let pass = || {
        let start = Instant::now();
        threads.run(threads.threads(), &|i| {
            black_box(work(black_box(1.0 + i as f32 * 1e-7)));
        });
        (threads.threads() * CHAINS * lanes * STEPS) as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    (0..8).map(|_| pass()).fold(0.0, f64::max)
}

/// Products an instruction makes, and chains of them.
type Dots = (usize, fn(f32) -> f32);

/// The widest integer dot instruction there is, or of the set that is named. AVX2 and AVX-512 by themselves
/// have none: they multiply pairs of bytes and add pairs of 16 bits.
fn dot_product(named: Option<Isa>) -> Option<Dots> {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        #[target_feature(enable = "avx512f,avx512vnni")]
        fn wide(x: f32) -> f32 {
            let (a, b) = (_mm512_set1_epi32(x.to_bits() as i32), _mm512_set1_epi8(1));
            let mut acc = [b; CHAINS];
            for _ in 0..STEPS {
                for v in &mut acc {
                    *v = _mm512_dpbusd_epi32(*v, a, b);
                }
            }
            acc.iter().map(|v| _mm512_reduce_add_epi32(*v)).fold(0, i32::wrapping_add) as f32
        }
        #[target_feature(enable = "avx2,avxvnni")]
        fn narrow(x: f32) -> f32 {
            let (a, b) = (_mm256_set1_epi32(x.to_bits() as i32), _mm256_set1_epi8(1));
            let mut acc = [b; CHAINS];
            for _ in 0..STEPS {
                for v in &mut acc {
                    *v = _mm256_dpbusd_avx_epi32(*v, a, b);
                }
            }
            acc.iter().map(|v| _mm256_extract_epi32::<0>(*v)).fold(0, i32::wrapping_add) as f32
        }
        #[target_feature(enable = "avx512f,avx512bw")]
        fn wide_pairs(x: f32) -> f32 {
            let (a, b) = (_mm512_set1_epi32(x.to_bits() as i32), _mm512_set1_epi8(1));
            let mut acc = [b; CHAINS];
            for _ in 0..STEPS {
                for v in &mut acc {
                    // Of the sum, or the loop would not have to repeat it.
                    *v = _mm512_add_epi16(*v, _mm512_maddubs_epi16(a, *v));
                }
            }
            acc.iter().map(|v| _mm512_reduce_add_epi32(*v)).fold(0, i32::wrapping_add) as f32
        }
        #[target_feature(enable = "avx2")]
        fn narrow_pairs(x: f32) -> f32 {
            let (a, b) = (_mm256_set1_epi32(x.to_bits() as i32), _mm256_set1_epi8(1));
            let mut acc = [b; CHAINS];
            for _ in 0..STEPS {
                for v in &mut acc {
                    // As above.
                    *v = _mm256_add_epi16(*v, _mm256_maddubs_epi16(a, *v));
                }
            }
            acc.iter().map(|v| _mm256_extract_epi32::<0>(*v)).fold(0, i32::wrapping_add) as f32
        }
        let may = |isa: Isa| isa.is_available() && named.is_none_or(|named| named == isa);
        if may(Isa::Avx512Vnni) || may(Isa::Amx) {
            // SAFETY: AVX-512 VNNI was found on this processor.
            return Some((64, |x| unsafe { wide(x) }));
        }
        if named.is_none() && std::arch::is_x86_feature_detected!("avxvnni") {
            // SAFETY: AVX-VNNI was found on this processor.
            return Some((32, |x| unsafe { narrow(x) }));
        }
        if may(Isa::Avx512) {
            // SAFETY: AVX-512 was found on this processor.
            return Some((64, |x| unsafe { wide_pairs(x) }));
        }
        if may(Isa::Avx2) {
            // SAFETY: AVX2 was found on this processor.
            return Some((32, |x| unsafe { narrow_pairs(x) }));
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        use std::arch::aarch64::*;
        use std::arch::asm;
        /// Chains of one instruction on a register of sums and one of bytes; Rust has no stable names for
        /// them.
        macro_rules! chains {
            ($name:ident, $feature:literal, $instruction:literal) => {
                #[target_feature(enable = $feature)]
                fn $name(x: f32) -> f32 {
                    let bytes = vreinterpretq_s8_f32(vdupq_n_f32(x));
                    let mut acc = [vdupq_n_s32(0); CHAINS];
                    for _ in 0..STEPS {
                        for v in &mut acc {
                            // SAFETY: arithmetic on two registers; the feature is enabled.
                            unsafe {
                                asm!($instruction, inout(vreg) *v, in(vreg) bytes, options(pure, nomem, nostack))
                            }
                        }
                    }
                    acc.iter().map(|v| vaddvq_s32(*v)).fold(0, i32::wrapping_add) as f32
                }
            };
        }
        chains!(matrix, "neon,i8mm", "smmla {0:v}.4s, {1:v}.16b, {1:v}.16b");
        chains!(dots, "neon,dotprod", "sdot {0:v}.4s, {1:v}.16b, {1:v}.16b");
        let may = |isa: Isa| isa.is_available() && named.is_none_or(|named| named == isa);
        if may(Isa::NeonI8mm) {
            // SAFETY: the feature was found on this processor.
            return Some((32, |x| unsafe { matrix(x) }));
        }
        if may(Isa::NeonDotprod) {
            // SAFETY: as above.
            return Some((16, |x| unsafe { dots(x) }));
        }
    }
    None
}

/// The matrix unit there is: 16 x 16 x 32 products an instruction.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "only x86 has one"))]
fn tile_product(named: Option<Isa>) -> Option<Dots> {
    #[cfg(target_arch = "x86_64")]
    {
        fn tiles(x: f32) -> f32 {
            let mut config = [0u8; 64];
            config[0] = 1;
            for tile in 0..8 {
                (config[16 + 2 * tile], config[48 + tile]) = (64, 16);
            }
            // SAFETY: the unit was found; it reads 64 bytes of configuration, and four chains hide its
            // latency.
            unsafe {
                std::arch::asm!(
                    "ldtilecfg [{config}]",
                    "2:",
                    "tdpbf16ps tmm0, tmm4, tmm5", "tdpbf16ps tmm1, tmm4, tmm5",
                    "tdpbf16ps tmm2, tmm4, tmm5", "tdpbf16ps tmm3, tmm4, tmm5",
                    "sub {n}, 4", "jnz 2b",
                    "tilerelease",
                    config = in(reg) config.as_ptr(), n = inout(reg) CHAINS * STEPS => _, options(nostack, readonly),
                );
            }
            x
        }
        // Kernels that were told to do without it are not held against it.
        if matches!(named, None | Some(Isa::Amx)) && Isa::Amx.is_available() {
            return Some((16 * 16 * 32, tiles));
        }
    }
    None
}

/// Independent chains of multiply-adds, as many as the registers hold, which hides the latency of one.
fn chains(vectors: Vectors, x: f32) -> f32 {
    /// # Safety
    /// The processor has the set of `V`.
    #[inline(always)]
    unsafe fn some<V: Vector, const C: usize>(x: f32) -> f32 {
        // SAFETY: the caller's.
        unsafe {
            let (factor, addend) = (V::splat(0.999_999), V::splat(x));
            let mut acc = [addend; C];
            for _ in 0..CHAINS / C * STEPS {
                for a in &mut acc {
                    *a = V::fma(*a, factor, addend);
                }
            }
            acc.into_iter().map(|a| V::sum(a)).sum()
        }
    }
    // SAFETY: `on` runs sets of this processor.
    on!(vectors, V => unsafe {
        match V::ISA {
            _ if V::SUMS >= CHAINS => some::<V, CHAINS>(x),
            // Nothing but sums and two factors: eight registers of sums just hide the latency, twelve do.
            Isa::Avx2 => some::<V, { CHAINS / 2 }>(x),
            _ => some::<V, { CHAINS / 3 }>(x),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_that_is_named_has_its_own_instructions_and_no_others() {
        for isa in Isa::available() {
            let products = |dots: Option<Dots>| dots.map(|(products, _)| products);
            let want = match isa {
                Isa::Amx | Isa::Avx512Vnni | Isa::Avx512 => Some(64),
                Isa::Avx2 | Isa::NeonI8mm => Some(32),
                Isa::NeonDotprod => Some(16),
                Isa::Neon | Isa::Portable => None,
            };
            assert_eq!(products(dot_product(Some(isa))), want, "{isa:?}");
            assert_eq!(tile_product(Some(isa)).is_some(), isa == Isa::Amx, "{isa:?}");
        }
    }
}
