//! The two sums of attention, for a few queries of one head at once: every key and value is loaded and
//! widened once for all of them. In scores a lane is a position, in weighted values it is a column, so
//! nothing is ever added across lanes.
//!
//! Pages of a cache lie anywhere, and no processor fetches ahead from one to the next by itself, nor far enough
//! within one: a call asks for the lines that are read after its own as it reads them.
//!
//! A score adds its products by ascending `j`, a weighted value by ascending position, fused where the
//! instruction set has that: bits depend neither on who shares a call nor on the width of a register.
use q4_simd::{Isa, LANES, Vector, Vectors, Widen, on};

/// Bytes of a line of the cache.
const LINE: usize = 64;

/// Most queries of a call.
pub const QUERIES: usize = 8;

/// How many queries are worth a call here.
pub fn queries(v: Vectors) -> usize {
    if v.isa() == Isa::Avx512 { QUERIES } else { 4 }
}

/// `out[i][p] = scale * Σ_j q[i][j] * keys[p / 16][j][p % 16]` for whole blocks of keys, `[blocks, d, 16]`.
/// `next` is what is read after them, in another page or further on in the same.
pub fn scores<T: Widen, const N: usize>(
    v: Vectors,
    q: [&[f32]; N],
    keys: &[T],
    next: Option<&[T]>,
    scale: f32,
    out: &mut [&mut [f32]; N],
) {
    let d = q[0].len();
    assert!(q.iter().all(|q| q.len() == d), "queries of {d}");
    assert!(out.iter().all(|o| o.len() % LANES == 0 && o.len() * d == keys.len()), "keys of {d} in blocks");
    let ahead = ahead(keys, next);
    // SAFETY: the lines above are about the lengths.
    on!(v, V => unsafe { all_scores::<V, T, N>(q, keys, ahead, scale, out) })
}

/// `out[i][j] = scales[i] * (s + Σ_p weights[i][p] * values[p][j])`, each over the positions it has weights
/// for; s is `out[i][j]` of a sum that goes on (`sums.0`), else 0, and scales are `sums.1`. A sum over positions
/// that lie in several places goes on with scales of 1 until the last, and has the bits it would have had in
/// one. `next` is as in [`scores`].
pub fn weighted<T: Widen, const N: usize>(
    v: Vectors,
    weights: [&[f32]; N],
    values: &[T],
    next: Option<&[T]>,
    sums: (bool, [f32; N]),
    out: &mut [&mut [f32]; N],
) {
    let d = out[0].len();
    assert!(out.iter().all(|o| o.len() == d), "sums of {d}");
    assert!(weights.iter().all(|w| values.len() >= d * w.len()), "values of {d} in {}", values.len());
    let ahead = ahead(values, next);
    // SAFETY: as above.
    on!(v, V => unsafe { all_columns::<V, T, N>(weights, values, ahead, sums, out) })
}

/// Bytes from what is read to what is asked for meanwhile; none to ask for nothing.
fn ahead<T>(read: &[T], next: Option<&[T]>) -> Option<isize> {
    next.map(|next| next.as_ptr().addr().wrapping_sub(read.as_ptr().addr()).cast_signed())
}

/// Asks for the line `ahead` of element number `at` from `p` on, where a line begins there.
///
/// # Safety
/// The processor has the set of `V`.
#[inline(always)]
unsafe fn fetch<V: Vector, T>(p: *const T, ahead: Option<isize>, at: usize) {
    if let Some(ahead) = ahead
        && at.is_multiple_of(LINE / size_of::<T>())
    {
        // SAFETY: a hint, of any address.
        unsafe { V::prefetch_far(p.wrapping_byte_offset(ahead)) };
    }
}

/// # Safety
/// The processor has the set of `V`; every line of `out` has sixteen lanes for each block of keys.
#[inline(always)]
unsafe fn all_scores<V: Vector, T: Widen, const N: usize>(
    q: [&[f32]; N],
    keys: &[T],
    ahead: Option<isize>,
    scale: f32,
    out: &mut [&mut [f32]; N],
) {
    let d = q[0].len();
    let (q, blocks) = (q.map(<[f32]>::as_ptr), out[0].len() / LANES);
    let mut b = 0;
    while b < blocks {
        // SAFETY: block b exists, and as many as a call takes.
        b += unsafe {
            let keys = keys.as_ptr().add(b * d * LANES);
            let out = out.each_mut().map(|o| o.as_mut_ptr().add(b * LANES));
            match (V::SUMS / N, blocks - b) {
                (8.., 8..) => some_scores::<V, T, N, 8>((q, d), keys, ahead, scale, out),
                (4.., 4..) => some_scores::<V, T, N, 4>((q, d), keys, ahead, scale, out),
                (2.., 2..) => some_scores::<V, T, N, 2>((q, d), keys, ahead, scale, out),
                _ => some_scores::<V, T, N, 1>((q, d), keys, ahead, scale, out),
            }
        };
    }
}

/// `B` blocks of keys; returns `B`.
#[inline(always)]
unsafe fn some_scores<V: Vector, T: Widen, const N: usize, const B: usize>(
    (q, d): ([*const f32; N], usize),
    keys: *const T,
    ahead: Option<isize>,
    scale: f32,
    out: [*mut f32; N],
) -> usize {
    // SAFETY: queries have d elements, blocks 16 * d, lines 16 * B.
    unsafe {
        let mut acc = [[V::splat(0.0); B]; N];
        for j in 0..d {
            let mut key = [V::splat(0.0); B];
            for (b, key) in key.iter_mut().enumerate() {
                let at = (b * d + j) * LANES;
                fetch::<V, T>(keys.add(at), ahead, at);
                *key = T::load::<V>(keys.add(at));
            }
            for i in 0..N {
                let x = V::splat(*q[i].add(j));
                for b in 0..B {
                    acc[i][b] = V::fma(x, key[b], acc[i][b]);
                }
            }
        }
        for i in 0..N {
            for b in 0..B {
                V::store(V::mul(acc[i][b], V::splat(scale)), out[i].add(b * LANES));
            }
        }
    }
    B
}

/// # Safety
/// The processor has the set of `V`; all of `out` have one length d, and `values` has d for every weight.
#[inline(always)]
unsafe fn all_columns<V: Vector, T: Widen, const N: usize>(
    weights: [&[f32]; N],
    values: &[T],
    ahead: Option<isize>,
    sums: (bool, [f32; N]),
    out: &mut [&mut [f32]; N],
) {
    let d = out[0].len();
    let mut column = 0;
    while column + LANES <= d {
        // SAFETY: the columns are inside, as many as a call takes.
        column += LANES
            * unsafe {
                match (V::SUMS / N, (d - column) / LANES) {
                    (8.., 8..) => some_columns::<V, T, N, 8>(weights, (values, d, column), ahead, sums, out),
                    (4.., 4..) => some_columns::<V, T, N, 4>(weights, (values, d, column), ahead, sums, out),
                    (2.., 2..) => some_columns::<V, T, N, 2>(weights, (values, d, column), ahead, sums, out),
                    _ => some_columns::<V, T, N, 1>(weights, (values, d, column), ahead, sums, out),
                }
            };
    }
    let (goes_on, scales) = sums;
    for ((weights, scale), out) in weights.into_iter().zip(scales).zip(out) {
        for j in column..d {
            let start = if goes_on { out[j] } else { 0.0 };
            let sum =
                weights.iter().zip(values.chunks_exact(d)).fold(start, |s, (w, v)| s + w * v[j].widen());
            out[j] = scale * sum;
        }
    }
}

/// `16 * C` columns from `column` on; returns `C`.
#[inline(always)]
unsafe fn some_columns<V: Vector, T: Widen, const N: usize, const C: usize>(
    weights: [&[f32]; N],
    (values, d, column): (&[T], usize, usize),
    ahead: Option<isize>,
    (goes_on, scales): (bool, [f32; N]),
    out: &mut [&mut [f32]; N],
) -> usize {
    let shared = weights.iter().map(|w| w.len()).min().unwrap_or(0);
    // SAFETY: every position that is read has a weight, and the columns are inside.
    unsafe {
        let values = values.as_ptr().add(column);
        let mut acc = [[V::splat(0.0); C]; N];
        if goes_on {
            for i in 0..N {
                for c in 0..C {
                    acc[i][c] = V::load(out[i].as_ptr().add(column + c * LANES));
                }
            }
        }
        for p in 0..shared {
            let mut value = [V::splat(0.0); C];
            for (c, value) in value.iter_mut().enumerate() {
                let at = p * d + c * LANES;
                fetch::<V, T>(values.add(at), ahead, c * LANES);
                *value = T::load::<V>(values.add(at));
            }
            for i in 0..N {
                let w = V::splat(*weights[i].get_unchecked(p));
                for c in 0..C {
                    acc[i][c] = V::fma(w, value[c], acc[i][c]);
                }
            }
        }
        for i in 0..N {
            for (p, w) in weights[i].iter().enumerate().skip(shared) {
                for c in 0..C {
                    let value = T::load::<V>(values.add(p * d + c * LANES));
                    acc[i][c] = V::fma(V::splat(*w), value, acc[i][c]);
                }
            }
            for c in 0..C {
                let to = out[i].as_mut_ptr().add(column + c * LANES);
                V::store(V::mul(acc[i][c], V::splat(scales[i])), to);
            }
        }
    }
    C
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn wave(n: usize, f: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * f).sin()).collect()
    }

    /// Both sums of N queries over `counts` positions against the promised order, written down plainly.
    fn check<T: Widen, const N: usize>(d: usize, counts: [usize; N], round: impl Fn(f32) -> T + Copy) {
        Vectors::all().for_each(|v| check_on(v, d, counts, round));
    }

    fn check_on<T: Widen, const N: usize>(
        v: Vectors,
        d: usize,
        counts: [usize; N],
        round: impl Fn(f32) -> T,
    ) {
        let blocks = counts[N - 1].div_ceil(LANES);
        let rows: Vec<T> = wave(blocks * LANES * d, 0.3).into_iter().map(round).collect();
        let q: [Vec<f32>; N] = std::array::from_fn(|i| wave(d, 0.7 + i as f32));
        let weights: [Vec<f32>; N] = std::array::from_fn(|i| wave(counts[i], 1.3 + i as f32));
        let factors: [f32; N] = std::array::from_fn(|i| 0.5 + i as f32);
        let mut lines: [Vec<f32>; N] = std::array::from_fn(|_| vec![0.0; blocks * LANES]);
        let mut sums: [Vec<f32>; N] = std::array::from_fn(|_| vec![0.0; d]);
        scores(
            v,
            q.each_ref().map(|q| &q[..]),
            &rows,
            Some(&rows),
            0.5,
            &mut lines.each_mut().map(|l| &mut l[..]),
        );
        let outs = &mut sums.each_mut().map(|s| &mut s[..]);
        weighted(v, weights.each_ref().map(|w| &w[..]), &rows, None, (false, factors), outs);
        // In two places, the first of which ends anywhere.
        let cut = counts[N - 1] / 3;
        let mut parts: [Vec<f32>; N] = std::array::from_fn(|_| vec![f32::NAN; d]);
        let halves = weights.each_ref().map(|w| w.split_at(cut.min(w.len())));
        let outs = &mut parts.each_mut().map(|s| &mut s[..]);
        weighted(v, halves.map(|h| h.0), &rows, Some(&rows[cut * d..]), (false, [1.0; N]), outs);
        weighted(v, halves.map(|h| h.1), &rows[cut * d..], None, (true, factors), outs);
        assert_eq!(parts, sums, "{:?}: {counts:?} in two places, d = {d}", v.isa());
        let (isa, fused) = (v.isa(), v.isa() != Isa::Portable);
        let add = |fused: bool, a: f32, b: f32, c: f32| if fused { a.mul_add(b, c) } else { a * b + c };
        for i in 0..N {
            for (p, got) in lines[i].iter().enumerate() {
                let key = |j: usize| rows[(p / LANES * d + j) * LANES + p % LANES].widen();
                let want = 0.5 * (0..d).fold(0.0, |s, j| add(fused, q[i][j], key(j), s));
                assert_eq!(*got, want, "{isa:?}: score {p} of query {i} of {N}, d = {d}");
            }
            for (j, got) in sums[i].iter().enumerate() {
                let fused = fused && j < d / LANES * LANES;
                let sum =
                    (0..counts[i]).fold(0.0, |s, p| add(fused, weights[i][p], rows[p * d + j].widen(), s));
                assert_eq!(
                    *got,
                    factors[i] * sum,
                    "{isa:?}: column {j} of query {i} of {N}, {counts:?}, d = {d}"
                );
            }
        }
    }

    fn all_shapes<T: Widen>(round: impl Fn(f32) -> T + Copy) {
        for d in [8, 16, 64, 80, 128, 144] {
            for n in [1, 7, 16, 33, 130] {
                check(d, [n], round);
                check(d, [n, n + 1], round);
                check(d, [n, n, n + 1, n + 1], round);
                check(d, [n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7], round);
            }
        }
    }

    #[test]
    fn sums_have_their_order_whoever_shares_a_call() {
        all_shapes(|v| v);
        all_shapes(f16::from_f32);
        all_shapes(bf16::from_f32);
    }
}
