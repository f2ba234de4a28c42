//! Vector loops of the executor.
//!
//! Every function keeps one order of additions whatever the set, so that a result does not depend on the
//! machine's width beyond fused multiply-add.
use q4_core::exponential::{exp, silu};
use q4_simd::{LANES, Vector, Vectors, Widen, on};

/// `out[p] = scale * Σ_j q[j] * rows[p, j]` for the rows of `rows` (`[out.len(), q.len()]`): sixteen lanes
/// along the row, then a tree.
pub fn dots<T: Widen>(v: Vectors, q: &[f32], rows: &[T], scale: f32, out: &mut [f32]) {
    let d = q.len();
    assert!(rows.len() >= d * out.len(), "{} rows of {d} in {}", out.len(), rows.len());
    if d % LANES == 0 {
        // SAFETY: the line above is about the rows.
        return on!(v, V => unsafe { whole_dots::<V, T>(q, rows.as_ptr(), scale, out) });
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
        *o = scale * (tree(&acc, |a, b| a + b) + tail);
    }
}

/// As many rows at a time as the set likes.
///
/// # Safety
/// The processor has the set of `V`; `q.len()` is a multiple of 16, and there is a row for each of `out`.
#[inline(always)]
unsafe fn whole_dots<V: Vector, T: Widen>(q: &[f32], rows: *const T, scale: f32, out: &mut [f32]) {
    // SAFETY: the caller's.
    unsafe {
        if V::ROWS >= 4 {
            grouped_dots::<V, T, 4>(q, rows, scale, out);
        } else {
            grouped_dots::<V, T, 2>(q, rows, scale, out);
        }
    }
}

/// `R` rows at a time, then those that are left one by one.
#[inline(always)]
unsafe fn grouped_dots<V: Vector, T: Widen, const R: usize>(
    q: &[f32],
    mut rows: *const T,
    scale: f32,
    out: &mut [f32],
) {
    let (groups, rest) = out.as_chunks_mut::<R>();
    // SAFETY: as many rows are left as there are outputs, and then at most one past the end.
    unsafe {
        for out in groups {
            some_dots::<V, T, R>(q, rows, scale, out);
            rows = rows.add(R * q.len());
        }
        for out in rest.as_chunks_mut::<1>().0 {
            some_dots::<V, T, 1>(q, rows, scale, out);
            rows = rows.add(q.len());
        }
    }
}

/// The first `R` rows.
#[inline(always)]
unsafe fn some_dots<V: Vector, T: Widen, const R: usize>(
    q: &[f32],
    rows: *const T,
    scale: f32,
    out: &mut [f32; R],
) {
    let d = q.len();
    // SAFETY: j + 16 <= d, and R rows are there.
    unsafe {
        let mut acc = [V::splat(0.0); R];
        for j in (0..d).step_by(LANES) {
            let x = V::load(q.as_ptr().add(j));
            for r in 0..R {
                acc[r] = V::fma(x, T::load::<V>(rows.add(r * d + j)), acc[r]);
            }
        }
        for r in 0..R {
            out[r] = scale * V::sum(acc[r]);
        }
    }
}

/// Largest element, NaN if there is one; negative infinity of nothing.
pub fn max(v: Vectors, x: &[f32]) -> f32 {
    on!(v, V => {
        let larger = |m: f32, v: f32| if v > m || v.is_nan() { v } else { m };
        let mut acc = [f32::NEG_INFINITY; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for c in chunks {
            for l in 0..LANES {
                acc[l] = larger(acc[l], c[l]);
            }
        }
        for (a, v) in acc.iter_mut().zip(rest) {
            *a = larger(*a, *v);
        }
        tree(&acc, larger)
    })
}

/// `out[i] = weight[i] * (x[i] * factor)`.
pub fn scale_by(v: Vectors, x: &[f32], weight: &[f32], factor: f32, out: &mut [f32]) {
    on!(v, V => {
        for ((o, v), w) in out.iter_mut().zip(x).zip(weight) {
            *o = w * (v * factor);
        }
    })
}

/// `x[i] = weight[i] * (x[i] * factor)`.
pub fn scale_in_place(v: Vectors, x: &mut [f32], weight: &[f32], factor: f32) {
    on!(v, V => {
        for (v, w) in x.iter_mut().zip(weight) {
            *v = w * (*v * factor);
        }
    })
}

/// NeoX halves: `(a, b) -> (a cos - b sin, b cos + a sin)`.
pub fn rotate(v: Vectors, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    on!(v, V => {
        let (a, b) = head.split_at_mut(cos.len());
        for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
            let (x, y) = (*a, *b);
            *a = x * cos - y * sin;
            *b = y * cos + x * sin;
        }
    })
}

/// `out[i] += x[i]`.
pub fn add(v: Vectors, x: &[f32], out: &mut [f32]) {
    on!(v, V => {
        for (o, v) in out.iter_mut().zip(x) {
            *o += v;
        }
    })
}

/// `x[i] = exp(x[i] - max)`; returns the sum.
pub fn exp_sum(v: Vectors, x: &mut [f32], max: f32) -> f32 {
    on!(v, V => {
        let mut acc = [0f32; LANES];
        let (chunks, rest) = x.as_chunks_mut::<LANES>();
        let mut add = |c: &mut [f32; LANES]| {
            for l in 0..LANES {
                c[l] = exp::<{ V::FUSED }>(c[l] - max);
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
        tree(&acc, |a, b| a + b)
    })
}

/// `out[i] = silu(gate[i]) * up[i]`.
pub fn silu_mul(v: Vectors, gate: &[f32], up: &[f32], out: &mut [f32]) {
    on!(v, V => {
        for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
            *o = silu::<{ V::FUSED }>(*g) * u;
        }
    })
}

/// `Σ x²`.
pub fn square_sum(v: Vectors, x: &[f32]) -> f32 {
    on!(v, V => {
        let (chunks, rest) = x.as_chunks::<LANES>();
        let tail: f32 = rest.iter().map(|v| v * v).sum();
        // SAFETY: `on` enables the set; a chunk has sixteen elements.
        unsafe {
            let mut acc = V::splat(0.0);
            for c in chunks {
                let c = V::load(c.as_ptr());
                acc = V::fma(c, c, acc);
            }
            V::sum(acc) + tail
        }
    })
}

/// Halves combined lane by lane until one lane is left.
#[inline(always)]
fn tree(acc: &[f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut a = *acc;
    for n in [8, 4, 2, 1] {
        for l in 0..n {
            a[l] = combine(a[l], a[l + n]);
        }
    }
    a[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use q4_simd::Isa;

    fn wave(n: usize, f: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * f).sin()).collect()
    }

    #[test]
    fn exponentials_of_any_count_are_written_and_added() {
        for (v, n) in Vectors::all().flat_map(|v| [0, 1, 15, 16, 17, 40].map(|n| (v, n))) {
            let x: Vec<f32> = wave(n, 0.9).into_iter().map(|v| v * 9.0).collect();
            let (largest, mut got) = (max(v, &x), x.clone());
            let total = exp_sum(v, &mut got, largest);
            let want: Vec<f64> = x.iter().map(|v| f64::from(v - largest).exp()).collect();
            assert!((f64::from(total) - want.iter().sum::<f64>()).abs() < 1e-5, "{v:?}, {n}: {total}");
            assert!(got.iter().zip(&want).all(|(g, w)| (f64::from(*g) - w).abs() < 1e-6), "{v:?}, {n}");
        }
    }

    #[test]
    fn the_largest_is_found_and_nan_is_kept() {
        for (v, n) in Vectors::all().flat_map(|v| [0, 1, 15, 16, 17, 40].map(|n| (v, n))) {
            let mut x: Vec<f32> = wave(n, 0.9).into_iter().map(|v| v - 3.0).collect();
            let want = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(v, &x), want, "{v:?}, {n}");
            for i in 0..n {
                let kept = std::mem::replace(&mut x[i], f32::NAN);
                assert!(max(v, &x).is_nan(), "{v:?}, {n}, {i}");
                x[i] = kept;
            }
        }
    }

    /// The order that the module promises, in scalar code.
    fn check<T: Widen>(v: Vectors, round: impl Fn(f32) -> T) {
        let fused = v.isa() != Isa::Portable;
        for d in [16, 37, 64, 80, 128] {
            for count in 1..10 {
                let q = wave(d, 0.7);
                let rows: Vec<T> = wave(count * d, 0.3).into_iter().map(&round).collect();
                let mut got = vec![0.0; count];
                dots(v, &q, &rows, 0.5, &mut got);
                for p in 0..count {
                    let (mut lanes, whole) = ([0f32; 16], d / 16 * 16);
                    for j in 0..whole {
                        let (a, b, sum) = (q[j], rows[p * d + j].widen(), &mut lanes[j % 16]);
                        *sum = if fused && whole == d { a.mul_add(b, *sum) } else { a * b + *sum };
                    }
                    let tail: f32 = (whole..d).map(|j| q[j] * rows[p * d + j].widen()).sum();
                    let want = 0.5 * (tree(&lanes, |a, b| a + b) + tail);
                    assert_eq!(got[p], want, "{v:?}: d = {d}, row {p} of {count}");
                    let value = |j: usize| f64::from(rows[p * d + j].widen());
                    let exact: f64 = (0..d).map(|j| f64::from(q[j]) * value(j)).sum::<f64>() * 0.5;
                    assert!((f64::from(got[p]) - exact).abs() < 1e-5, "{v:?}: d = {d}, row {p} of {count}");
                }
            }
        }
    }

    #[test]
    fn dots_have_their_order_for_every_type() {
        for v in Vectors::all() {
            check(v, |v| v);
            check(v, f16::from_f32);
            check(v, bf16::from_f32);
        }
    }
}
