//! AdamW with decoupled decay on masters in f32 or bf16 and moments in 32, 8 or 4 bits, one tensor at a time,
//! in place.
//!
//! ```text
//! g  = gradient * grad_scale
//! m' = fma(b1, m, (1 - b1) g)                  v' = fma(b2, v, ((1 - b2) g) g)
//! u  = (m' / (1 - b1^t)) / fma(sqrt(v'), 1 / sqrt(1 - b2^t), eps), cut to +-limit
//! w' = fma(-lr, u, w (1 - lr decay))
//! ```
//! Every operation is one f32 rounding, in this order, so that the CUDA kernel gives the same bits. The
//! update uses m' and v' before they are packed again. Packed moments are read and written a tile of 4096
//! elements at a time: the working set is two f32 tiles a thread, whatever the size of the tensor.
//!
//! | state | bytes an element, m and v | m | v |
//! |---|---|---|---|
//! | `f32` | 8 | | |
//! | `8bit` | 2.031 | dynamic map, f32 absmax per 256 | the same, unsigned, 0 read as 1/4 of the first step |
//! | `4bit` | 1.0625 | dynamic map, f32 absmax per 128 | of `sqrt(v)`, 16 values from 1/64 to 1 in equal ratios |
//! | `nvfp4` | 1.127 | E2M1, E4M3 per 16, f32 per 4096 | the same of `sqrt(v)`, code 0 read as 0.25 |
//!
//! Eight bits are rounded to the nearest value, four to one of the two neighbours at random, right in the
//! mean. No exact step is larger than `sqrt((1-b1)^2 / (1-b2) * (1-r^t) / (1-r) * (1-b2^t)) / (1-b1^t)` with
//! `r = b1^2 / b2` (Cauchy-Schwarz on the two sums); the limit is twice that, so only the noise of packing is
//! ever cut. No packed v is zero unless every gradient of its block was: a zero under the root would let `m /
//! eps` through.
use crate::rng::Philox;
use q4_core::{Code, Error, Result, ThreadPool};

#[cfg(feature = "cuda")]
pub mod cuda;
mod kernel;
mod layout;
mod maps;
mod moments;
mod share;
pub mod weight;

pub use layout::{MasterFormat, StateFormat, StateLayout};
pub use share::Share;
pub use weight::{ScaleChoice, quantize_dequantize};

/// Elements a thread works on at a time; blocks of every format divide it.
pub const TILE: usize = 4096;
/// Tiles a task has.
const TILES: usize = 16;

/// What one step does to every tensor of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the mean, in `[0, 1)`.
    pub beta1: f32,
    /// Decay of the mean square, in `[0, 1)`.
    pub beta2: f32,
    /// Added to the root.
    pub eps: f32,
    /// Decoupled decay, per unit of `lr`.
    pub weight_decay: f32,
    /// Number of this step, from 1; corrects the bias of the moments.
    pub step: u64,
    /// Factor on the gradient: clipping and the mean over tokens in one.
    pub grad_scale: f32,
}

/// A master weight, updated in place.
#[derive(Debug)]
pub enum Master<'a> {
    /// Plain f32.
    F32(&'a mut [f32]),
    /// bf16 bits, rounded stochastically.
    Bf16(&'a mut [u16]),
}

/// A gradient of the same length.
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// Plain f32.
    F32(&'a [f32]),
    /// bf16 bits.
    Bf16(&'a [u16]),
}

impl Master<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(w) => w.len(),
            Self::Bf16(w) => w.len(),
        }
    }
}

impl Gradient<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(g) => g.len(),
            Self::Bf16(g) => g.len(),
        }
    }
}

/// The scalars of a step, rounded to f32 once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalars {
    pub grad_scale: f32,
    pub beta1: f32,
    pub rest1: f32,
    pub beta2: f32,
    pub rest2: f32,
    /// `1 / (1 - beta1^t)`.
    pub unbias1: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    pub unbias2: f32,
    pub eps: f32,
    pub minus_lr: f32,
    /// `1 - lr * weight_decay`.
    pub keep: f32,
    /// Largest update, in units of lr.
    pub limit: f32,
}

impl Hyper {
    pub(crate) fn scalars(&self) -> Result<Scalars> {
        let unit = |x: f32| (0.0..1.0).contains(&x);
        let sane = unit(self.beta1)
            && unit(self.beta2)
            && self.step > 0
            && [self.lr, self.eps, self.weight_decay].iter().all(|x| x.is_finite() && *x >= 0.0)
            && self.grad_scale.is_finite();
        if !sane {
            return Err(Error::new(Code::Internal, "AdamW")
                .need("betas in [0, 1), a step from 1, finite and non-negative rates")
                .have(format!("{self:?}")));
        }
        let (b1, b2, t) = (f64::from(self.beta1), f64::from(self.beta2), self.step as f64);
        let power = |beta: f32| f64::from(beta).powf(t);
        // b1^2 / b2 = 1 has the limit of the sum; a mean square without memory allows anything of a mean that
        // has one.
        let r = if b2 > 0.0 { b1 * b1 / b2 } else { f64::INFINITY };
        let sum = if (r - 1.0).abs() < 1e-9 { t } else { (1.0 - r.powf(t)) / (1.0 - r) };
        let exact = ((1.0 - b1).powi(2) / (1.0 - b2) * sum * (1.0 - b2.powf(t))).sqrt() / (1.0 - b1.powf(t));
        Ok(Scalars {
            grad_scale: self.grad_scale,
            beta1: self.beta1,
            rest1: (1.0 - f64::from(self.beta1)) as f32,
            beta2: self.beta2,
            rest2: (1.0 - f64::from(self.beta2)) as f32,
            unbias1: (1.0 / (1.0 - power(self.beta1))) as f32,
            unbias2: (1.0 / (1.0 - power(self.beta2)).sqrt()) as f32,
            eps: self.eps,
            minus_lr: -self.lr,
            keep: (1.0 - f64::from(self.lr) * f64::from(self.weight_decay)) as f32,
            limit: if exact.is_finite() { (2.0 * exact).min(f64::from(f32::MAX)) as f32 } else { f32::MAX },
        })
    }
}

/// One AdamW step. `state` has [`StateLayout::bytes`] bytes, all zero before the first step; `rng` rounds a
/// bf16 master and 4-bit moments. The gradient must be finite (see [`sum_of_squares`]).
///
/// # Errors
/// [`Code::ShapeMismatch`] when lengths differ; [`Code::Internal`] for hyper-parameters out of range.
pub fn adamw(
    hyper: &Hyper,
    layout: &StateLayout,
    master: Master<'_>,
    grad: Gradient<'_>,
    state: &mut [u8],
    rng: Philox,
    threads: &ThreadPool,
) -> Result<()> {
    let scalars = hyper.scalars()?;
    let n = layout.len();
    if (master.len(), grad.len(), state.len()) != (n, n, layout.bytes()) {
        return Err(Error::new(Code::ShapeMismatch, "optimiser step")
            .need(format!("{n} weights and gradients and {} bytes of state", layout.bytes()))
            .have(format!("{}, {} and {}", master.len(), grad.len(), state.len())));
    }
    kernel::step(&scalars, layout, master, grad, state, rng, threads);
    Ok(())
}

/// Sum of the squares of a gradient, in f64, summed tile by tile in order. NaN or infinite iff an element is.
pub fn sum_of_squares(grad: Gradient<'_>, threads: &ThreadPool) -> f64 {
    squares(grad, threads).iter().sum()
}

/// The summands: one of every tile.
pub fn squares(grad: Gradient<'_>, threads: &ThreadPool) -> Vec<f64> {
    let n = grad.len();
    let tiles = n.div_ceil(TILE);
    let sums: Vec<std::sync::atomic::AtomicU64> = (0..tiles).map(|_| 0.into()).collect();
    threads.run(tiles, &|t| {
        let range = t * TILE..((t + 1) * TILE).min(n);
        // Eight accumulators, so that the additions do not wait for each other.
        let mut lanes = [0f64; 8];
        let mut add = |i: usize, g: f32| lanes[i % 8] += f64::from(g) * f64::from(g);
        match grad {
            Gradient::F32(g) => g[range].iter().enumerate().for_each(|(i, g)| add(i, *g)),
            Gradient::Bf16(g) => {
                g[range].iter().enumerate().for_each(|(i, g)| add(i, f32::from_bits(u32::from(*g) << 16)))
            }
        }
        let sum: f64 = lanes.iter().sum();
        sums[t].store(sum.to_bits(), std::sync::atomic::Ordering::Relaxed);
    });
    sums.into_iter().map(|s| f64::from_bits(s.into_inner())).collect()
}

#[cfg(test)]
mod tests;
