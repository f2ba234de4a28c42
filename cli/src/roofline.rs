//! What this machine could do at best: bytes read and products made a second, on the threads the work runs on.
use q4_core::{Activations, ThreadPool};
use std::hint::black_box;
use std::time::Instant;

/// Larger than the last-level cache of any machine this is likely to run on, small beside a model.
const BYTES: usize = 256 << 20;

/// Measured limits.
pub struct Roofline {
    /// Sequential reads, GB/s.
    pub read_gb_s: f64,
    /// f32 fused multiply-adds, billions a second.
    fma_g_s: f64,
}

impl Roofline {
    /// Measures both in about half a second: the best of several passes, for a limit is not an average.
    pub fn measure(threads: &ThreadPool) -> Self {
        Self { read_gb_s: read(threads), fma_g_s: fma(threads) }
    }

    /// Products a second for an activation format. An instruction of the integer dot kind makes 64 products where a
    /// fused multiply-add of the same width makes 16.
    pub fn gmac_s(&self, activations: &Activations) -> f64 {
        match activations {
            Activations::Native => self.fma_g_s,
            Activations::Int8 | Activations::Nvfp4(_) if has_integer_dots() => 4.0 * self.fma_g_s,
            _ => 2.0 * self.fma_g_s,
        }
    }

    /// Tokens a second of a prompt of `n`: the weights are read once, the products are made for every token.
    pub fn tokens(&self, activations: &Activations, bytes: u64, macs: u64, n: usize) -> f64 {
        let reading = bytes as f64 / (self.read_gb_s * 1e9);
        let computing = macs as f64 * n as f64 / (self.gmac_s(activations) * 1e9);
        n as f64 / reading.max(computing)
    }
}

fn has_integer_dots() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512vnni")
        || std::arch::is_x86_feature_detected!("avxvnni");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

fn read(threads: &ThreadPool) -> f64 {
    let data = vec![1u64; BYTES / 8];
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

/// Four streams with independent sums, each asking for its line a page ahead: one stream alone does not fill the
/// memory's queue.
fn sum(data: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was found on this processor.
            return unsafe { sum_avx512(data) };
        }
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
const LANES: usize = 16;
const STEPS: usize = 200_000;

fn fma(threads: &ThreadPool) -> f64 {
    let pass = || {
        let start = Instant::now();
        threads.run(threads.threads(), &|i| {
            black_box(chains(black_box(1.0 + i as f32 * 1e-7)));
        });
        (threads.threads() * CHAINS * LANES * STEPS) as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    (0..8).map(|_| pass()).fold(0.0, f64::max)
}

/// Independent chains of multiply-adds, enough of them to hide the latency of one.
fn chains(x: f32) -> f32 {
    #[inline(always)]
    fn body(x: f32, step: impl Fn(f32, f32, f32) -> f32) -> f32 {
        let mut acc = [[x; LANES]; CHAINS];
        for _ in 0..STEPS {
            for a in &mut acc {
                for v in a {
                    *v = step(*v, 0.999_999, x);
                }
            }
        }
        acc.as_flattened().iter().sum()
    }
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f")]
        fn avx512(x: f32) -> f32 {
            use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_ps};
            let (m, b) = (_mm512_set1_ps(0.999_999), _mm512_set1_ps(x));
            let mut acc = [b; CHAINS];
            for _ in 0..STEPS {
                for a in &mut acc {
                    *a = _mm512_fmadd_ps(*a, m, b);
                }
            }
            acc.iter().map(|a| _mm512_reduce_add_ps(*a)).sum()
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2(x: f32) -> f32 {
            body(x, f32::mul_add)
        }
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was found on this processor.
            return unsafe { avx512(x) };
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            // SAFETY: as above.
            return unsafe { avx2(x) };
        }
    }
    body(x, |a, m, b| a * m + b)
}
