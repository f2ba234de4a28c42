//! Vector loops of the executor, compiled for each instruction set and chosen once.
//!
//! Every function keeps one order of additions whatever the set, so that a result does not depend on the
//! machine's width beyond fused multiply-add.
use half::{bf16, f16};
pub use once_isa::{Isa, isa};
use q4_core::exponential::{exp, fma, silu};

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub use self::Widen as Lanes;
#[cfg(target_arch = "aarch64")]
use super::neon;
/// Element types dots and the sums of attention are vectorised for.
#[cfg(target_arch = "aarch64")]
pub use super::neon::Load as Lanes;
#[cfg(target_arch = "x86_64")]
use super::x86;
/// Element types dots and the sums of attention are vectorised for.
#[cfg(target_arch = "x86_64")]
pub use super::x86::Load as Lanes;

/// Lanes of the fixed summation order.
const LANES: usize = 16;

/// Types that widen to f32 exactly.
pub trait Widen: Copy + Sync {
    /// The value.
    fn widen(self) -> f32;
}
impl Widen for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}
impl Widen for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}
impl Widen for f16 {
    /// Branch-free over finite values, infinities and NaN: shift the fields into place, then rescale by
    /// 2^112.
    #[inline(always)]
    fn widen(self) -> f32 {
        let h = u32::from(self.to_bits());
        let magnitude = (h & 0x7fff) << 13;
        let value = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
        let special = if h & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
        f32::from_bits(value.to_bits() | special | (h & 0x8000) << 16)
    }
}

mod once_isa {
    use std::sync::OnceLock;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Isa {
        Portable,
        #[cfg(target_arch = "x86_64")]
        Avx2,
        #[cfg(target_arch = "x86_64")]
        Avx512,
        #[cfg(target_arch = "aarch64")]
        Neon,
    }

    pub fn isa() -> Isa {
        static ISA: OnceLock<Isa> = OnceLock::new();
        *ISA.get_or_init(|| {
            // The target itself has NEON.
            #[cfg(target_arch = "aarch64")]
            if std::env::var("Q4_ISA").unwrap_or_default() != "portable" {
                return Isa::Neon;
            }
            #[cfg(target_arch = "x86_64")]
            {
                let wanted = std::env::var("Q4_ISA").unwrap_or_default();
                if std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512dq")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512vl")
                    && matches!(wanted.as_str(), "" | "avx512" | "avx512vnni" | "amx")
                {
                    return Isa::Avx512;
                }
                let avx2 = std::arch::is_x86_feature_detected!("avx2")
                    && std::arch::is_x86_feature_detected!("fma")
                    && std::arch::is_x86_feature_detected!("f16c");
                if avx2 && wanted != "portable" {
                    return Isa::Avx2;
                }
            }
            Isa::Portable
        })
    }
}

/// Defines `$name` as `$body` compiled for every instruction set.
macro_rules! multiversion {
    ($(#[$doc:meta])* pub fn $name:ident<$t:ident: Widen>($($arg:ident: $ty:ty),*) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        pub fn $name<$t: Widen>($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn generic<const FMA: bool, $t: Widen>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2<$t: Widen>($($arg: $ty),*) $(-> $ret)? { generic::<true, $t>($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,fma")]
            fn avx512<$t: Widen>($($arg: $ty),*) $(-> $ret)? { generic::<true, $t>($($arg),*) }
            match isa() {
                Isa::Portable => generic::<false, $t>($($arg),*),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => generic::<true, $t>($($arg),*),
                // SAFETY: `isa` found these features on this processor.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => unsafe { avx2::<$t>($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => unsafe { avx512::<$t>($($arg),*) },
            }
        }
    };
}

/// `out[p] = scale * Σ_j q[j] * rows[p, j]` for the rows of `rows` (`[out.len(), q.len()]`).
pub fn dots<T: Lanes>(q: &[f32], rows: &[T], scale: f32, out: &mut [f32]) {
    let d = q.len();
    assert!(rows.len() >= d * out.len(), "{} rows of {d} in {}", out.len(), rows.len());
    #[cfg(target_arch = "x86_64")]
    if d % LANES == 0 {
        match isa() {
            // SAFETY: `isa` found the features, the line above the rows.
            Isa::Avx512 => return unsafe { x86::dots_avx512(q, rows, scale, out) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { x86::dots_avx2(q, rows, scale, out) },
            Isa::Portable => {}
        }
    }
    #[cfg(target_arch = "aarch64")]
    if d % LANES == 0 && isa() == Isa::Neon {
        // SAFETY: `isa` found NEON, the line above the rows.
        return unsafe { neon::dots(q, rows, scale, out) };
    }
    for (o, row) in out.iter_mut().zip(rows.chunks_exact(d)) {
        let mut acc = [0f32; LANES];
        let ((q, q_rest), (r, r_rest)) = (q.as_chunks::<LANES>(), row.as_chunks::<LANES>());
        for (a, b) in q.iter().zip(r) {
            for l in 0..LANES {
                acc[l] += a[l] * b[l].widen();
            }
        }
        let tail: f32 = q_rest.iter().zip(r_rest).map(|(a, b)| a * b.widen()).sum();
        *o = scale * (sum(&acc) + tail);
    }
}

multiversion! {
    /// Largest element, NaN if there is one; negative infinity of nothing.
    pub fn max<T: Widen>(x: &[T]) -> f32 {
        let larger = |m: f32, v: f32| if v > m || v.is_nan() { v } else { m };
        let mut acc = [f32::NEG_INFINITY; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for c in chunks {
            for l in 0..LANES {
                acc[l] = larger(acc[l], c[l].widen());
            }
        }
        for (a, v) in acc.iter_mut().zip(rest) {
            *a = larger(*a, v.widen());
        }
        tree(&acc, larger)
    }
}

multiversion! {
    /// `out[i] = weight[i] * (x[i] * factor)`.
    pub fn scale_by<T: Widen>(x: &[T], weight: &[f32], factor: f32, out: &mut [f32]) {
        for ((o, v), w) in out.iter_mut().zip(x).zip(weight) {
            *o = w * (v.widen() * factor);
        }
    }
}

multiversion! {
    /// `x[i] = weight[i] * (x[i] * factor)`.
    pub fn scale_in_place<T: Widen>(x: &mut [f32], weight: &[T], factor: f32) {
        for (v, w) in x.iter_mut().zip(weight) {
            *v = w.widen() * (*v * factor);
        }
    }
}

multiversion! {
    /// NeoX halves: `(a, b) -> (a cos - b sin, b cos + a sin)`.
    pub fn rotate<T: Widen>(head: &mut [f32], cos: &[T], sin: &[T]) {
        let (a, b) = head.split_at_mut(cos.len());
        for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
            let (x, y, cos, sin) = (*a, *b, cos.widen(), sin.widen());
            *a = x * cos - y * sin;
            *b = y * cos + x * sin;
        }
    }
}

multiversion! {
    /// `out[i] += x[i]`.
    pub fn add<T: Widen>(x: &[T], out: &mut [f32]) {
        for (o, v) in out.iter_mut().zip(x) {
            *o += v.widen();
        }
    }
}

multiversion! {
    /// `x[i] = exp(x[i] - max)`; returns the sum. The generic parameter only names the instruction set's copy.
    pub fn exp_sum<T: Widen>(x: &mut [f32], max: T) -> f32 {
        let max = max.widen();
        let mut acc = [0f32; LANES];
        let (chunks, rest) = x.as_chunks_mut::<LANES>();
        let mut add = |c: &mut [f32; LANES]| {
            for l in 0..LANES {
                c[l] = exp::<FMA>(c[l] - max);
                acc[l] += c[l];
            }
        };
        chunks.iter_mut().for_each(&mut add);
        if !rest.is_empty() {
            // A whole vector of what is left and of what adds nothing.
            let mut last = [f32::NEG_INFINITY; LANES];
            last[..rest.len()].copy_from_slice(rest);
            add(&mut last);
            rest.copy_from_slice(&last[..rest.len()]);
        }
        sum(&acc)
    }
}

multiversion! {
    /// `out[i] = silu(gate[i]) * up[i]`.
    pub fn silu_mul<T: Widen>(gate: &[T], up: &[f32], out: &mut [f32]) {
        for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
            *o = silu::<FMA>(g.widen()) * u;
        }
    }
}

multiversion! {
    /// `Σ x²`.
    pub fn square_sum<T: Widen>(x: &[T]) -> f32 {
        let mut acc = [0f32; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        let tail: f32 = rest.iter().map(|v| v.widen() * v.widen()).sum();
        for c in chunks {
            for l in 0..LANES {
                acc[l] = fma::<FMA>(c[l].widen(), c[l].widen(), acc[l]);
            }
        }
        sum(&acc) + tail
    }
}

#[inline(always)]
fn sum(acc: &[f32; LANES]) -> f32 {
    tree(acc, |a, b| a + b)
}

/// Halves combined lane by lane until one lane is left.
#[inline(always)]
fn tree(acc: &[f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut a = *acc;
    let mut n = LANES / 2;
    while n > 0 {
        for l in 0..n {
            a[l] = combine(a[l], a[l + n]);
        }
        n /= 2;
    }
    a[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_of_any_count_are_written_and_added() {
        for n in [0, 1, 15, 16, 17, 40] {
            let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.9).sin() * 9.0).collect();
            let (largest, mut got) = (max(&x), x.clone());
            let total = exp_sum(&mut got, largest);
            let want: Vec<f64> = x.iter().map(|v| f64::from(v - largest).exp()).collect();
            assert!((f64::from(total) - want.iter().sum::<f64>()).abs() < 1e-5, "{n}: {total}");
            assert!(got.iter().zip(&want).all(|(g, w)| (f64::from(*g) - w).abs() < 1e-6), "{n}");
        }
    }

    #[test]
    fn the_largest_is_found_and_nan_is_kept() {
        for n in [0, 1, 15, 16, 17, 40] {
            let mut x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.9).sin() - 3.0).collect();
            let want = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&x), want, "{n}");
            for i in 0..n {
                let kept = std::mem::replace(&mut x[i], f32::NAN);
                assert!(max(&x).is_nan(), "{n}, {i}");
                x[i] = kept;
            }
        }
    }

    #[test]
    fn every_f16_widens_exactly() {
        for bits in 0..=u16::MAX {
            let h = f16::from_bits(bits);
            let (got, want) = (h.widen(), h.to_f32());
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{bits:04x}");
        }
        for bits in 0..=u16::MAX {
            let b = bf16::from_bits(bits);
            assert!(b.widen().to_bits() == b.to_f32().to_bits() || b.is_nan());
        }
    }

    #[test]
    fn dots_match_f64() {
        let q: Vec<f32> = (0..37).map(|i| (i as f32 * 0.7).sin()).collect();
        let rows: Vec<f32> = (0..37 * 7).map(|i| (i as f32 * 0.3).cos()).collect();
        let mut out = [0.0; 7];
        dots(&q, &rows, 0.5, &mut out);
        for p in 0..7 {
            let exact: f64 =
                (0..37).map(|j| f64::from(q[j]) * f64::from(rows[p * 37 + j])).sum::<f64>() * 0.5;
            assert!((f64::from(out[p]) - exact).abs() < 1e-5);
        }
    }
}
