//! The optimiser and the quantiser where the tensors are: core's and our own Rust on the host.
use super::trained::Trained;
use super::{Tch, floats, floats_mut, slice, slice_mut};
use crate::optim::cuda::Launcher;
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
    cuda: Option<Cuda>,
}

/// The same formulas on the device, on libtorch's stream (the legacy default one).
struct Cuda {
    launcher: Launcher,
    /// Result and scale of the quantiser, and the sum of squares.
    info: Tensor,
    /// Partial sums.
    scratch: std::cell::RefCell<Tensor>,
}

impl Kernels {
    /// For `device`; `pool` serves the host. On CUDA the kernels are compiled here.
    pub fn new(device: Device, pool: Arc<ThreadPool>, scale: ScaleChoice) -> Result<Self> {
        let cuda = match device {
            Device::Cuda(n) => {
                let bytes = |len: i64| Tensor::f_zeros([len], (Kind::Double, device)).t();
                let (info, scratch) = (bytes(2)?, std::cell::RefCell::new(bytes(1)?));
                Some(Cuda { launcher: Launcher::new(n)?, info, scratch })
            }
            _ => None,
        };
        Ok(Self { pool, device, scale, cuda })
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

    /// The NVFP4 value of a master `[n, k]`, in `kind`. Both paths give the same bits; `kind` must hold them
    /// (bf16 does where the scale is a power of two).
    pub fn quantized(&self, master: &Tensor, n: usize, k: usize, kind: Kind) -> Result<Tensor> {
        if let Some(cuda) = &self.cuda {
            let master = master.f_contiguous().t()?;
            let out = Tensor::f_empty(master.size(), (kind, self.device)).t()?;
            let (w, to) = ((address(&master), format(&master)?), (address(&out), format(&out)?));
            // SAFETY: contiguous tensors of n * k elements on this device, and two words to write to, all
            // alive; libtorch's allocator reuses memory in the order of the stream the kernels
            // run on.
            unsafe { cuda.launcher.quantize_dequantize(w, n * k, self.scale, to, address(&cuda.info))? };
            return Ok(out);
        }
        let wide = master.f_to_kind(Kind::Float).t()?.f_contiguous().t()?;
        let out = Tensor::f_empty(master.size(), (Kind::Float, Device::Cpu)).t()?;
        optim::quantize_dequantize(floats(&wide)?, n, k, self.scale, floats_mut(&out)?, &self.pool)?;
        out.f_to_kind(kind).t()
    }

    /// One AdamW step of what this rank moves of a tensor, in place, by the gradient of that; random numbers
    /// are those of `seed`, the step and the tensor.
    pub fn adamw(&self, hyper: &Hyper, t: &Trained, grad: &Tensor, seed: u64) -> Result<()> {
        let hyper = &Hyper { weight_decay: t.decay, ..*hyper };
        let grad = &grad.f_contiguous().t()?;
        let rng = Philox::new(seed, hyper.step, t.stream).from_element(t.own.start);
        if grad.numel() != t.own.len() {
            return Err(Error::new(Code::Internal, "gradient")
                .need(format!("{:?} of {:?}", t.own, t.master.size()))
                .have(format!("{:?}", grad.size())));
        }
        if t.own.is_empty() {
            return Ok(());
        }
        if let Some(cuda) = &self.cuda {
            let master = address(&t.master) + (t.own.start * t.format.size()) as u64;
            let (master, grad) = ((master, t.format), (address(grad), format(grad)?));
            // SAFETY: contiguous tensors of the layout's length on this device, alive; order as above.
            return unsafe { cuda.launcher.adamw(hyper, &t.layout, master, grad, address(&t.state), rng) };
        }
        let grad = host(grad)?;
        let master = match t.format {
            MasterFormat::Bf16 => Master::Bf16(&mut slice_mut(&t.master, Kind::BFloat16)?[t.own.clone()]),
            MasterFormat::F32 => Master::F32(&mut floats_mut(&t.master)?[t.own.clone()]),
        };
        optim::adamw(hyper, &t.layout, master, grad, slice_mut(&t.state, Kind::Uint8)?, rng, &self.pool)
    }

    /// The summands of [`sum_of_squares`](Self::sum_of_squares), f64 where the gradients are: of each as many
    /// as [`Self::summands`] says, in their order. Waits for nothing.
    pub fn squares<'a>(&self, grads: impl Iterator<Item = &'a Tensor>) -> Result<Tensor> {
        let grads: Vec<Tensor> = grads.map(|g| g.f_contiguous().t()).collect::<Result<_>>()?;
        let Some(cuda) = &self.cuda else {
            let mut all = Vec::new();
            for grad in &grads {
                all.extend(optim::squares(host(grad)?, &self.pool));
            }
            return Tensor::f_from_slice(&all).t();
        };
        let sums = Tensor::f_zeros([grads.len() as i64], (Kind::Double, self.device)).t()?;
        for (i, grad) in grads.iter().enumerate() {
            let n = grad.numel();
            let tiles = n.div_ceil(optim::TILE) as i64;
            if cuda.scratch.borrow().numel() < tiles as usize {
                *cuda.scratch.borrow_mut() = Tensor::f_zeros([tiles], (Kind::Double, self.device)).t()?;
            }
            let (scratch, out) = (address(&cuda.scratch.borrow()), address(&sums) + 8 * i as u64);
            // SAFETY: a contiguous gradient, room for its tiles and for the sum, alive; order as above.
            unsafe { cuda.launcher.sum_of_squares((address(grad), format(grad)?), n, scratch, out)? };
        }
        Ok(sums)
    }

    /// One of every tile on the host; a device adds them up itself.
    pub fn summands(&self, elements: usize) -> usize {
        if self.cuda.is_some() { 1 } else { elements.div_ceil(optim::TILE) }
    }

    /// Sum of the squares of all these gradients; NaN and infinity come through. Waits for the device once.
    pub fn sum_of_squares<'a>(&self, grads: impl Iterator<Item = &'a Tensor>) -> Result<f64> {
        if self.cuda.is_some() {
            return f64::try_from(self.squares(grads)?.f_sum(Kind::Double).t()?).t();
        }
        let mut sum = 0.0;
        for grad in grads {
            sum += optim::sum_of_squares(host(&grad.f_contiguous().t()?)?, &self.pool);
        }
        Ok(sum)
    }
}

/// A contiguous gradient of the host.
fn host(grad: &Tensor) -> Result<Gradient<'_>> {
    match grad.kind() {
        Kind::BFloat16 => slice(grad, Kind::BFloat16).map(Gradient::Bf16),
        _ => floats(grad).map(Gradient::F32),
    }
}

fn address(t: &Tensor) -> u64 {
    t.data_ptr() as u64
}

fn format(t: &Tensor) -> Result<MasterFormat> {
    match t.kind() {
        Kind::Float => Ok(MasterFormat::F32),
        Kind::BFloat16 => Ok(MasterFormat::Bf16),
        other => Err(Error::new(Code::Internal, "a tensor for a kernel")
            .need("f32 or bf16")
            .have(format!("{other:?}"))),
    }
}
