//! The optimiser and the quantiser where the tensors are: core's and our own Rust on the host.
use super::weights::Trained;
use super::{Tch, floats, floats_mut, slice, slice_mut};
use crate::optim::{self, Gradient, Hyper, Master, MasterFormat, ScaleChoice};
use crate::rng::Philox;
use q4_core::{Code, Error, Result, ThreadPool};
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

/// Kernels of one device.
pub struct Kernels {
    pool: Arc<ThreadPool>,
    device: Device,
    scale: ScaleChoice,
}

impl Kernels {
    /// For `device`; `pool` serves the host.
    pub fn new(device: Device, pool: Arc<ThreadPool>, scale: ScaleChoice) -> Result<Self> {
        Ok(Self { pool, device, scale })
    }

    /// Where tensors live.
    pub fn device(&self) -> Device {
        self.device
    }
    /// Type of products' operands.
    pub fn compute(&self) -> Kind {
        if self.device.is_cuda() { Kind::BFloat16 } else { Kind::Float }
    }
    /// How per-tensor scales are chosen.
    pub fn scale(&self) -> ScaleChoice {
        self.scale
    }
    /// Threads of the host.
    pub fn pool(&self) -> &Arc<ThreadPool> {
        &self.pool
    }

    /// `out[i] = value(i)` on all threads.
    pub fn fill(&self, out: &mut [f32], value: &(dyn Fn(u64) -> f32 + Sync)) {
        let pieces: Vec<_> = out.chunks_mut(1 << 16).map(std::sync::Mutex::new).collect();
        self.pool.run(pieces.len(), &|p| {
            let mut piece = pieces[p].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            for (i, v) in piece.iter_mut().enumerate() {
                *v = value(((p << 16) + i) as u64);
            }
        });
    }

    /// The NVFP4 value of a master `[n, k]`, in `kind`.
    pub fn quantized(
        &self,
        master: &Tensor,
        _format: MasterFormat,
        n: usize,
        k: usize,
        kind: Kind,
    ) -> Result<Tensor> {
        let wide = master.f_to_kind(Kind::Float).t()?;
        let out = Tensor::f_empty(master.size(), (Kind::Float, Device::Cpu)).t()?;
        optim::quantize_dequantize(floats(&wide)?, n, k, self.scale, floats_mut(&out)?, &self.pool)?;
        out.f_to_kind(kind).t()
    }

    /// One AdamW step of one tensor, in place.
    pub fn adamw(&self, hyper: &Hyper, t: &Trained, grad: &Tensor, rng: Philox) -> Result<()> {
        if grad.size() != t.master.size() {
            return Err(Error::new(Code::Internal, "gradient")
                .need(format!("{:?}", t.master.size()))
                .have(format!("{:?}", grad.size())));
        }
        let grad = match grad.kind() {
            Kind::BFloat16 => Gradient::Bf16(slice(grad, Kind::BFloat16)?),
            _ => Gradient::F32(floats(grad)?),
        };
        let master = match t.format {
            MasterFormat::Bf16 => Master::Bf16(slice_mut(&t.master, Kind::BFloat16)?),
            MasterFormat::F32 => Master::F32(floats_mut(&t.master)?),
        };
        optim::adamw(hyper, &t.layout, master, grad, slice_mut(&t.state, Kind::Uint8)?, rng, &self.pool)
    }

    /// Sum of the squares of a gradient; NaN and infinity come through.
    pub fn sum_of_squares(&self, grad: &Tensor) -> Result<f64> {
        let grad = grad.f_contiguous().t()?;
        Ok(match grad.kind() {
            Kind::BFloat16 => {
                optim::sum_of_squares(Gradient::Bf16(slice(&grad, Kind::BFloat16)?), &self.pool)
            }
            _ => optim::sum_of_squares(Gradient::F32(floats(&grad)?), &self.pool),
        })
    }
}
