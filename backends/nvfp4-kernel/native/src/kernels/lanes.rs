//! Kernels that every instruction set compiles from one text: plain loops over lanes.
use super::{Acc, LANES, PAIR, TILE_K};
use q4_core::exponential::silu;
use q4_simd::{Vector, run};

/// [`super::AmaxFn`].
pub unsafe fn amax<V: Vector>(x: &[f32]) -> u32 {
    // SAFETY: the processor has the set, by the contract of `Kernels`.
    unsafe { run!(V, x.iter().fold(0, |a, v| a.max(v.to_bits() & 0x7fff_ffff))) }
}

/// [`super::FinishFn`].
pub unsafe fn finish<V: Vector>(sums: &[Acc], factors: &[f64; PAIR * LANES], out: *mut f32, ld: usize) {
    // SAFETY: as above, and `out` has as many rows of 32 as there are sums.
    unsafe {
        run!(V, {
            for (r, sums) in sums.iter().enumerate() {
                // A row of its own first: the compiler does not see that what a closure holds overlaps
                // nothing.
                let mut row = [0f32; PAIR * LANES];
                for ((o, &s), f) in row.iter_mut().zip(sums.as_flattened()).zip(factors) {
                    *o = (f64::from(s) * f) as f32;
                }
                out.add(r * ld).cast::<[f32; PAIR * LANES]>().write(row);
            }
        });
    }
}

/// [`super::GateFn`].
pub unsafe fn gate<V: Vector>(rows: &[[f32; PAIR * LANES]], out: *mut f32, ld: usize) {
    // SAFETY: as above, and `out` has as many rows of 16.
    unsafe {
        run!(V, {
            for (r, row) in rows.iter().enumerate() {
                let mut gated = [0f32; LANES];
                for (i, o) in gated.iter_mut().enumerate() {
                    let gate = if V::FUSED { silu::<true>(row[i]) } else { silu::<false>(row[i]) };
                    *o = gate * row[LANES + i];
                }
                out.add(r * ld).cast::<[f32; LANES]>().write(gated);
            }
        });
    }
}

/// [`super::AxpyFn`].
pub unsafe fn axpy<V: Vector>(dy: &[[f32; LANES]], w: &[[f32; TILE_K]; LANES], dx: &mut [[f32; TILE_K]]) {
    // SAFETY: as above.
    unsafe {
        run!(V, {
            for (dy, dx) in dy.iter().zip(dx) {
                let mut sum = *dx;
                for (&d, w) in dy.iter().zip(w) {
                    for (s, &w) in sum.iter_mut().zip(w) {
                        *s = if V::FUSED { d.mul_add(w, *s) } else { d * w + *s };
                    }
                }
                *dx = sum;
            }
        });
    }
}
