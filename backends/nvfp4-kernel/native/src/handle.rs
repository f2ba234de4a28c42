//! What the opaque handles point to: the same calls on one device or another.
use crate::call::{Exec, Fail, Finding, Mat, Outcome, Sink, read};
use crate::{abi, backward, ctx, cuda, forward, output, prepare, weight};
use q4_core::FuseSet;
use std::sync::Arc;

/// Behind `nvfp4_ctx`.
pub enum Context {
    /// The CPU.
    Cpu(ctx::Context),
    /// A CUDA device.
    Cuda(Arc<cuda::Engine>),
}

/// Behind `nvfp4_weight`.
pub enum Weight {
    /// In host memory.
    Cpu(weight::Weight),
    /// In device memory.
    Cuda(cuda::Weight),
    /// The same, for FP4 tensor cores. A type of its own: it can run nothing else.
    Native(cuda::fp4::Weight),
}

impl Context {
    /// Opens the device of `desc`; every reason why not goes to `sink`.
    ///
    /// # Safety
    /// `desc` is NULL or a size-prefixed struct whose `isa` is NULL or NUL-terminated.
    pub unsafe fn open(desc: *const abi::CtxDesc, sink: &Sink) -> Outcome<Self> {
        // SAFETY: forwarded.
        let d = unsafe { read(desc, "ctx_desc")? };
        if d.device_type != abi::DEVICE_CUDA {
            // SAFETY: forwarded.
            return unsafe { ctx::create(desc, sink) }.map(Self::Cpu);
        }
        let mut all = Vec::new();
        if d.flags & !abi::CTX_MANAGED != 0 || d.reserved != 0 {
            let have = format!("{} and {}", d.flags, d.reserved);
            all.push(Finding::mistake("flags 0 or NVFP4_CTX_MANAGED, reserved = 0", have));
        }
        if !d.isa.is_null() {
            all.push(Finding::mistake("isa = NULL on CUDA, which has one", "a name"));
        }
        if !all.is_empty() {
            return Err(sink.report(all));
        }
        cuda::Engine::open(d.device, d.flags & abi::CTX_MANAGED != 0)
            .map(Self::Cuda)
            .map_err(|all| sink.report(all))
    }

    /// The context behind a handle.
    ///
    /// # Safety
    /// `ctx` is NULL or came from `ctx_create` and was not destroyed.
    pub unsafe fn of<'a>(ctx: *mut abi::Ctx) -> Outcome<&'a Self> {
        // SAFETY: by contract.
        unsafe { ctx.cast::<Self>().as_ref() }.ok_or_else(|| Fail::invalid("ctx", "a pointer", "NULL"))
    }

    /// Why there is no native path, if so: for a weight of `[n, k]` and calls of up to `max_m` rows where
    /// they are given.
    pub fn refuse_native(&self, shape: Option<[usize; 3]>) -> Option<Finding> {
        match self {
            Self::Cpu(_) => Some(cuda::fp4::no_tensor_cores("cpu")),
            Self::Cuda(e) => match &e.native {
                Ok(native) => native.refuse(shape?),
                Err(why) => Some(why.clone()),
            },
        }
    }

    /// Builds a weight.
    ///
    /// # Safety
    /// The segments' bytes are readable.
    pub unsafe fn prepare(&self, plan: prepare::Plan, exec: &Exec) -> Outcome<Weight> {
        // SAFETY: forwarded.
        unsafe {
            match self {
                Self::Cpu(c) => plan.build(c, exec).map(Weight::Cpu),
                Self::Cuda(e) if plan.is_native => cuda::fp4::prepare(e, &plan, exec).map(Weight::Native),
                Self::Cuda(e) => cuda::prepare(e, &plan, exec).map(Weight::Cuda),
            }
        }
    }
}

impl Weight {
    /// The weight behind a handle.
    ///
    /// # Safety
    /// `w` is NULL or came from `prepare` and was not released.
    pub unsafe fn of<'a>(w: *const abi::Weight) -> Outcome<&'a Self> {
        // SAFETY: by contract.
        unsafe { w.cast::<Self>().as_ref() }.ok_or_else(|| Fail::invalid("weight", "a pointer", "NULL"))
    }

    /// `(n, k, type of x, type of y)`.
    pub fn shape(&self) -> (usize, usize, q4_core::DType, q4_core::DType) {
        match self {
            Self::Cpu(w) => (w.n, w.k, w.x, w.y),
            Self::Cuda(w) => (w.n, w.k, w.x, w.y),
            Self::Native(w) => (w.n, w.k, w.x, w.y),
        }
    }

    /// Memory it keeps.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Cpu(w) => w.bytes(),
            Self::Cuda(w) => w.bytes(),
            Self::Native(w) => w.bytes(),
        }
    }

    /// Scratch bytes for `m` rows.
    pub fn workspace(&self, m: u64) -> u64 {
        match self {
            Self::Cpu(w) => forward::workspace(w, m),
            Self::Cuda(w) => cuda::workspace(w, m),
            Self::Native(w) => cuda::fp4::workspace(w, m),
        }
        .unwrap_or(u64::MAX)
    }

    /// Whether a call of `m` rows may fuse exactly these parts.
    pub fn fuses(&self, m: u64, parts: u32) -> bool {
        match (self, u8::try_from(parts), usize::try_from(m)) {
            (_, Ok(0), _) => true,
            (Self::Cpu(w), Ok(parts @ 1..=7), Ok(m)) => output::fuses(w, m, FuseSet(parts)),
            (Self::Cuda(w), Ok(parts @ 1..=7), Ok(m)) => cuda::fuses(w, m, FuseSet(parts)),
            _ => false,
        }
    }

    /// `y = x W^T`.
    ///
    /// # Safety
    /// The matrices are readable and writable where the weight is, and do not overlap.
    pub unsafe fn forward(&self, x: Mat, y: Mat, exec: &Exec) -> Outcome {
        // SAFETY: forwarded.
        unsafe {
            match self {
                Self::Cpu(w) => forward::forward(w, x, FuseSet::NONE, y, exec),
                Self::Cuda(w) => cuda::forward(w, x, cuda::Fuse::default(), y, exec),
                Self::Native(w) => cuda::fp4::forward(w, x, y, exec),
            }
        }
    }

    /// The same with a fusion.
    ///
    /// # Safety
    /// As there; pointers are NULL or size-prefixed structs.
    pub unsafe fn forward_fused(
        &self,
        x: *const abi::Matrix,
        fusion: *const abi::Fusion,
        y: *const abi::Matrix,
        exec: &Exec,
    ) -> Outcome {
        // SAFETY: forwarded.
        let f = unsafe { read(fusion, "fusion")? };
        if f.parts > 7 || (f.parts & abi::FUSE_NORM != 0) == f.norm_weight.is_null() {
            let have = format!("parts {:#b}, norm_weight {:p}", f.parts, f.norm_weight);
            return Err(Fail::invalid(
                "fusion",
                "parts 0 to 7, norm_weight exactly with NVFP4_FUSE_NORM",
                have,
            ));
        }
        let fuse = cuda::Fuse {
            norm: (f.parts & abi::FUSE_NORM != 0).then_some((f.norm_weight.addr() as u64, f.norm_eps)),
            gate: f.parts & abi::FUSE_GATE != 0,
            accumulate: f.parts & abi::FUSE_ACCUMULATE != 0,
        };
        let (n, k, x_type, y_type) = self.shape();
        // SAFETY: forwarded.
        unsafe {
            match self {
                Self::Cuda(w) if f.parts != 0 => {
                    let (x_type, columns, y_type) = cuda::types(w, &fuse);
                    let x = Mat::read(x, "x", Some(k), Some(x_type))?;
                    cuda::forward(w, x, fuse, Mat::read(y, "y", Some(columns), Some(y_type))?, exec)
                }
                Self::Cpu(w) if f.parts != 0 && f.parts & abi::FUSE_NORM == 0 => {
                    let set = FuseSet(f.parts as u8); // 7 at most
                    let (columns, y_type) = output::shape(w, set);
                    let x = Mat::read(x, "x", Some(k), Some(x_type))?;
                    forward::forward(w, x, set, Mat::read(y, "y", Some(columns), Some(y_type))?, exec)
                }
                _ if f.parts == 0 => {
                    let x = Mat::read(x, "x", Some(k), Some(x_type))?;
                    self.forward(x, Mat::read(y, "y", Some(n), Some(y_type))?, exec)
                }
                _ => {
                    let limit = Finding::limit(
                        "path-unsupported",
                        "no norm on the CPU, no fusion at all on the native path",
                        format!("parts {}", f.parts),
                    );
                    Err(vec![limit].into())
                }
            }
        }
    }

    /// `dx = dy W`.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn backward_input(&self, dy: Mat, dx: Mat, exec: &Exec) -> Outcome {
        // SAFETY: forwarded.
        unsafe {
            match self {
                Self::Cpu(w) => backward::backward_input(w, dy, dx, exec),
                Self::Cuda(w) => cuda::backward_input(w, dy, dx, exec),
                Self::Native(w) => cuda::fp4::backward_input(w, dy, dx, exec),
            }
        }
    }

    /// The decoded matrix.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn dequantize(&self, out: Mat, exec: &Exec) -> Outcome {
        // SAFETY: forwarded.
        unsafe {
            match self {
                Self::Cpu(w) => backward::dequantize(w, out, exec),
                Self::Cuda(w) => cuda::dequantize(w, out, exec),
                Self::Native(w) => cuda::fp4::dequantize(w, out, exec),
            }
        }
    }
}
