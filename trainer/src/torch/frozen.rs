//! A 4-bit weight that never changes, and the one operation of autograd over it.
//!
//! `y = x W^T` is computed by [`Q4Linear::forward`] outside of autograd, and a node of the graph
//! (`frozen.cpp`) computes `dx = dy W` by [`Q4Linear::backward_input`]. The weight itself takes no gradient
//! and is never decoded. Inputs that the backend rounds take the gradient straight through.
use super::Tch;
use q4_core::{
    Code, DType, Device, Error, ExecContext, Q4Linear, Result, TensorView, TensorViewMut, ThreadPool,
};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use tch::{Kind, Tensor};

unsafe extern "C" {
    fn q4_frozen_attach(
        x: *const c_void,
        y: *const c_void,
        k: i64,
        weight: *const c_void,
        backward: Backward,
        drop: extern "C" fn(*const c_void),
    ) -> bool;
    fn q4_text(to: *mut c_void, text: *const u8, len: usize);
}
type Backward = extern "C" fn(*const c_void, *const c_void, *mut c_void, i64, *mut c_void) -> bool;

/// Where frozen products run, and what they share there.
pub struct Place {
    device: tch::Device,
    pool: Arc<ThreadPool>,
    /// Bytes for one product at a time; grows to the largest need.
    scratch: Mutex<Tensor>,
}

/// A prepared weight `[n, k]` in the graph.
pub struct Frozen {
    linear: Q4Linear,
    place: Arc<Place>,
}

#[derive(Clone, Copy)]
enum Op {
    Forward,
    BackwardInput,
}

impl Place {
    /// On `device`, with threads of the host.
    pub fn new(device: tch::Device, pool: Arc<ThreadPool>) -> Result<Arc<Self>> {
        let scratch = Mutex::new(Tensor::f_empty([0], (Kind::Uint8, device)).t()?);
        Ok(Arc::new(Self { device, pool, scratch }))
    }
    /// Threads of the host.
    pub fn pool(&self) -> &ThreadPool {
        &self.pool
    }
    /// The device, as core names it.
    pub fn device(&self) -> Device {
        device(self.device)
    }
}

/// libtorch's device as core names it.
pub fn device(device: tch::Device) -> Device {
    match device {
        tch::Device::Cuda(n) => Device::Cuda(n as u32),
        _ => Device::Cpu,
    }
}

impl Frozen {
    /// `linear` was prepared for that place, with inputs and outputs of one type.
    pub fn new(linear: Q4Linear, place: Arc<Place>) -> Result<Arc<Self>> {
        let (x, y) = linear.types();
        if x != y {
            return Err(Error::new(Code::Internal, linear.name().to_owned())
                .need("inputs and outputs of one type")
                .have(format!("{x} and {y}")));
        }
        Ok(Arc::new(Self { linear, place }))
    }

    /// What multiplies.
    pub fn linear(&self) -> &Q4Linear {
        &self.linear
    }

    /// `y[m, n] = x[m, k] W^T`, with `dL/dx = dL/dy W` in the graph of `x`.
    pub fn product(self: &Arc<Self>, x: &Tensor) -> Result<Tensor> {
        let (info, kind) = (self.linear.info(), self.kind());
        let size = x.size();
        if x.kind() != kind || x.device() != self.place.device || size.len() != 2 || size[1] != info.k as i64
        {
            return Err(Error::new(Code::ShapeMismatch, self.linear.name().to_owned())
                .need(format!("{kind:?} [m, {}] on {:?}", info.k, self.place.device))
                .have(format!("{:?} {size:?} on {:?}", x.kind(), x.device())));
        }
        let from = x.f_detach().t()?.f_contiguous().t()?;
        let y = Tensor::f_empty([size[0], info.n as i64], (kind, x.device())).t()?;
        // SAFETY: contiguous tensors of these extents, alive; nobody else knows of y.
        unsafe { self.run(Op::Forward, from.data_ptr(), y.data_ptr(), size[0] as usize)? };
        if x.requires_grad() {
            let share = Arc::into_raw(self.clone()).cast();
            let (from, to) = (x.as_ptr().cast(), y.as_ptr().cast());
            // SAFETY: two tensors of libtorch, alive; the share goes to the node, which gives it to
            // `drop_share`.
            let done = unsafe { q4_frozen_attach(from, to, info.k as i64, share, backward, drop_share) };
            if !done {
                return Err(Error::new(Code::BackendFailed, "libtorch: a node of its graph"));
            }
        }
        Ok(y)
    }

    /// The decoded matrix, f32 `[n, k]` on the host: for a merge, never for a step.
    pub fn decoded(&self) -> Result<Tensor> {
        let info = self.linear.info();
        let out = Tensor::f_empty([info.n as i64, info.k as i64], (Kind::Float, self.place.device)).t()?;
        let bytes = 4 * info.n * info.k;
        let to = pointer(out.data_ptr())?;
        let shape = [info.n as i64, info.k as i64];
        // SAFETY: a contiguous tensor of these extents that nobody else knows of.
        let view = unsafe {
            TensorViewMut::from_raw(to, bytes, self.place.device(), DType::F32, &shape, &[shape[1], 1])?
        };
        self.linear.dequantize(view, &mut ExecContext::on(self.place.device(), 0, &self.place.pool))?;
        super::device::synchronize(self.place.device)?;
        out.f_to_device(tch::Device::Cpu).t()
    }

    fn kind(&self) -> Kind {
        match self.linear.types().0 {
            DType::BF16 => Kind::BFloat16,
            DType::F16 => Kind::Half,
            _ => Kind::Float,
        }
    }

    /// Calls the backend, with no more rows at a time than it was prepared for, on libtorch's queue (the
    /// legacy default one, whose handle is 0).
    ///
    /// # Safety
    /// `from` and `to` are contiguous matrices of `rows` rows on the place's device, in the weight's type and
    /// with its in and out features (the other way round for the gradient); nobody else uses `to`.
    unsafe fn run(&self, op: Op, from: *mut c_void, to: *mut c_void, rows: usize) -> Result<()> {
        let (info, dtype) = (self.linear.info(), self.linear.types().0);
        let (wide, narrow) = match op {
            Op::Forward => (info.k, info.n),
            Op::BackwardInput => (info.n, info.k),
        };
        let device = self.place.device();
        let mut scratch = self.place.scratch.lock().unwrap_or_else(|e| e.into_inner());
        for first in (0..rows).step_by(self.linear.max_m()) {
            let m = self.linear.max_m().min(rows - first);
            let need = self.linear.workspace(m);
            if scratch.numel() < need {
                *scratch = Tensor::f_empty([need as i64], (Kind::Uint8, self.place.device)).t()?;
            }
            let at =
                |base: *mut c_void, cols: usize| pointer(base.wrapping_byte_add(first * cols * dtype.size()));
            let shape = |cols: usize| ([m as i64, cols as i64], [cols as i64, 1]);
            let (x, y) = (shape(wide), shape(narrow));
            let (from, to) = (at(from, wide)?, at(to, narrow)?);
            let bytes = |cols: usize| m * cols * dtype.size();
            // SAFETY: rows `first..first + m` of what the caller vouches for.
            let input = unsafe { TensorView::from_raw(from, bytes(wide), device, dtype, &x.0, &x.1)? };
            // SAFETY: as above.
            let output = unsafe { TensorViewMut::from_raw(to, bytes(narrow), device, dtype, &y.0, &y.1)? };
            let mut cx = ExecContext::on(device, 0, &self.place.pool);
            if need > 0 {
                let room = pointer(scratch.data_ptr())?;
                // SAFETY: at least `need` bytes that the lock keeps from everybody else.
                let room =
                    unsafe { TensorViewMut::from_raw(room, need, device, DType::U8, &[need as i64], &[1])? };
                cx.workspace = Some(room);
            }
            match op {
                Op::Forward => self.linear.forward(input, output, &mut cx)?,
                Op::BackwardInput => self.linear.backward_input(input, output, &mut cx)?,
            }
        }
        Ok(())
    }
}

fn pointer(p: *mut c_void) -> Result<NonNull<c_void>> {
    NonNull::new(p).ok_or_else(|| Error::new(Code::Internal, "a tensor without elements in a product"))
}

/// Called by libtorch, on a thread of its own for a device.
extern "C" fn backward(
    weight: *const c_void,
    dy: *const c_void,
    dx: *mut c_void,
    rows: i64,
    why: *mut c_void,
) -> bool {
    // SAFETY: the node that calls holds a share of the weight.
    let weight = unsafe { &*weight.cast::<Frozen>() };
    // SAFETY: the node made both, contiguous, of the weight's extents and the type of its output.
    match unsafe { weight.run(Op::BackwardInput, dy.cast_mut(), dx, rows as usize) } {
        Ok(()) => true,
        Err(e) => {
            let text = e.to_string().replace('\n', "; ");
            // SAFETY: `why` is the node's string; the text is copied.
            unsafe { q4_text(why, text.as_ptr(), text.len()) };
            false
        }
    }
}

extern "C" fn drop_share(weight: *const c_void) {
    // SAFETY: the share that `product` gave away, once.
    drop(unsafe { Arc::from_raw(weight.cast::<Frozen>()) });
}
