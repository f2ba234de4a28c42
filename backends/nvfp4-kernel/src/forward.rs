//! Calls on a prepared weight: views become matrices, the caller's threads are lent to the library, and
//! nothing is allocated unless a call fails.
use crate::abi;
use crate::table::Weight;
use q4_core::{
    Activations, Code, DType, Device, Error, ExecContext, FuseSet, Fusion, PreparedInfo, PreparedWeight,
    Result, TensorView, TensorViewMut, ThreadPool,
};
use std::ffi::c_void;
use std::mem::size_of;
use std::ptr;

/// A weight of the library with the facts the dispatch seam checks.
pub struct Prepared {
    weight: Weight,
    info: PreparedInfo,
}

impl Prepared {
    /// `weight` was prepared as `info` says.
    pub fn new(weight: Weight, info: PreparedInfo) -> Self {
        Self { weight, info }
    }

    /// The failure of a product of x, by its cause if that is known here.
    fn explain(&self, e: Error, x: &TensorView<'_>, cx: &ExecContext<'_>) -> Error {
        let e = if self.info.activations == Activations::Native { e } else { unless_not_finite(e, x) };
        let rows = x.as_matrix().map_or(0, |(m, ..)| m);
        unless_short(e, self.workspace(rows), cx)
    }
}

impl PreparedWeight for Prepared {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    fn workspace(&self, m: usize) -> usize {
        self.weight.workspace(m)
    }

    fn forward(&self, x: TensorView<'_>, mut y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        placed(&x, cx)?;
        placed(&y.as_view(), cx)?;
        let (xm, ym) = (matrix(&x)?, matrix_mut(&mut y)?);
        // SAFETY: the matrices and the workspace are views, good for their bytes; `y` and the workspace are
        // unique.
        unsafe { self.weight.forward(&xm, &ym, &exec(cx)) }.map_err(|e| self.explain(e, &x, cx))
    }

    fn fuses(&self, m: usize, set: FuseSet) -> bool {
        set == FuseSet::NONE || self.weight.fuses(m, u32::from(set.0))
    }

    fn forward_fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        mut y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        if fusion.set() == FuseSet::NONE {
            return self.forward(x, y, cx);
        }
        placed(&x, cx)?;
        placed(&y.as_view(), cx)?;
        if let Some(norm) = &fusion.norm {
            placed(&norm.weight, cx)?;
            if norm.weight.dtype() != DType::F32
                || norm.weight.len() != self.info.k
                || !norm.weight.is_contiguous()
            {
                return Err(Error::new(Code::ShapeMismatch, "weight of a norm")
                    .need(format!("float32[{}]", self.info.k))
                    .have(format!("{:?}", norm.weight)));
            }
        }
        let fusion = abi::Fusion {
            struct_size: size_of::<abi::Fusion>(),
            parts: u32::from(fusion.set().0),
            norm_eps: fusion.norm.map_or(0.0, |n| n.eps),
            norm_weight: fusion.norm.map_or(ptr::null(), |n| n.weight.as_ptr()),
        };
        let (xm, ym) = (matrix(&x)?, matrix_mut(&mut y)?);
        // SAFETY: as in `forward`; the norm's weight is a view of k floats.
        unsafe { self.weight.forward_fused(&xm, &fusion, &ym, &exec(cx)) }
            .map_err(|e| self.explain(e, &x, cx))
    }

    fn backward_input(
        &self,
        dy: TensorView<'_>,
        mut dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        placed(&dy, cx)?;
        placed(&dx.as_view(), cx)?;
        let (dym, dxm) = (matrix(&dy)?, matrix_mut(&mut dx)?);
        // SAFETY: as in `forward`.
        unsafe { self.weight.backward_input(&dym, &dxm, &exec(cx)) }
            .map_err(|e| unless_short(e, self.workspace(dym.rows as usize), cx))
    }

    fn dequantize(&self, mut out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        placed(&out.as_view(), cx)?;
        let out = matrix_mut(&mut out)?;
        // SAFETY: as in `forward`.
        unsafe { self.weight.dequantize(&out, &exec(cx)) }
    }
}

/// The library sees addresses only: that they are those of the call's device is checked here.
fn placed(view: &TensorView<'_>, cx: &ExecContext<'_>) -> Result<()> {
    if view.device() == cx.device {
        return Ok(());
    }
    Err(Error::new(Code::ShapeMismatch, "operand on another device")
        .need(cx.device.to_string())
        .have(view.device().to_string()))
}

/// Replaces a failure by a missing workspace, if that is the cause.
fn unless_short(e: Error, need: usize, cx: &ExecContext<'_>) -> Error {
    let have = cx.workspace.as_ref().map_or(0, |w| w.as_view().nbytes());
    if have >= need {
        return e;
    }
    Error::new(Code::ShapeMismatch, "workspace of a product")
        .need(format!("{need} bytes"))
        .have(format!("{have} bytes"))
}

/// Replaces a failure of a product that quantises its input by the NaN or infinity that it cannot quantise,
/// if any.
fn unless_not_finite(e: Error, x: &TensorView<'_>) -> Error {
    let Ok((m, k, _)) = x.as_matrix() else { return e };
    let mut row = vec![0f32; k];
    for r in (0..m).take_while(|_| x.device() == Device::Cpu) {
        if !read_row(x, r, &mut row) {
            return e;
        }
        if let Some(c) = row.iter().position(|v| !v.is_finite()) {
            return Error::new(Code::NonFinite, "activations of a product")
                .need("finite values")
                .have(format!("x[{r}, {c}] = {}", row[c]));
        }
    }
    e
}

fn read_row(x: &TensorView<'_>, r: usize, out: &mut [f32]) -> bool {
    match x.dtype() {
        DType::F32 => x.row::<f32>(r).map(|v| out.copy_from_slice(v)),
        DType::F16 => x.row::<half::f16>(r).map(|v| out.iter_mut().zip(v).for_each(|(o, v)| *o = v.to_f32())),
        DType::BF16 => {
            x.row::<half::bf16>(r).map(|v| out.iter_mut().zip(v).for_each(|(o, v)| *o = v.to_f32()))
        }
        _ => return false,
    }
    .is_ok()
}

/// What the library may use during a call: the workspace and the threads of `cx`.
pub fn exec(cx: &mut ExecContext<'_>) -> abi::Exec {
    let (workspace, workspace_bytes) = match &mut cx.workspace {
        Some(w) => (w.as_mut_ptr(), w.as_view().nbytes() as u64),
        None => (ptr::null_mut(), 0),
    };
    abi::Exec {
        struct_size: size_of::<abi::Exec>(),
        stream: cx.stream as *mut c_void,
        workspace,
        workspace_bytes,
        parallel: Some(lend),
        parallel_user: ptr::from_ref(cx.threads).cast_mut().cast(),
        threads: u32::try_from(cx.threads.threads()).unwrap_or(u32::MAX),
        reserved: 0,
    }
}

/// Runs the library's tasks on a [`ThreadPool`]; `user` is one.
unsafe extern "C" fn lend(user: *mut c_void, tasks: usize, body: abi::TaskFn, arg: *mut c_void) {
    struct Argument(*mut c_void);
    // SAFETY: the header says that tasks run on any threads, so the library shares what `arg` points to.
    unsafe impl Sync for Argument {}
    impl Argument {
        fn get(&self) -> *mut c_void {
            self.0
        }
    }
    // SAFETY: `exec` put a pool there that is borrowed for the whole call.
    let pool = unsafe { &*user.cast::<ThreadPool>() };
    let arg = Argument(arg);
    // SAFETY: the library's own function with the library's own argument.
    pool.run(tasks, &|task| unsafe { body(arg.get(), task) });
}

/// The library's number for an element type.
pub fn dtype(d: DType) -> Result<u32> {
    match d {
        DType::F32 => Ok(abi::F32),
        DType::F16 => Ok(abi::F16),
        DType::BF16 => Ok(abi::BF16),
        other => Err(Error::new(Code::TensorType, "operand of libNVFP4")
            .need("float32, float16 or bfloat16")
            .have(other.as_str())),
    }
}

fn matrix(view: &TensorView<'_>) -> Result<abi::Matrix> {
    let (rows, cols, ld) = view.as_matrix()?;
    Ok(abi::Matrix {
        struct_size: size_of::<abi::Matrix>(),
        data: view.as_ptr().cast_mut(),
        bytes: view.nbytes() as u64,
        rows: rows as u64,
        cols: cols as u64,
        // The stride of a single row means nothing and may be anything.
        ld: if rows > 1 { ld } else { cols } as u64,
        dtype: dtype(view.dtype())?,
        reserved: 0,
    })
}

fn matrix_mut(view: &mut TensorViewMut<'_>) -> Result<abi::Matrix> {
    Ok(abi::Matrix { data: view.as_mut_ptr(), ..matrix(&view.as_view())? })
}
