//! The product on a device: the fast kernels that take a call, in order, then the plain ones, which take all
//! without a fusion.
use super::Weight;
use super::simple::{Quantised, matrix};
use crate::call::{Mat, check_rows, invalid, scratch};
use crate::probe::refused;
use q4_core::{
    Activations, Code, DType, Error, ExecContext, FuseSet, Fusion, PreparedInfo, PreparedWeight, Result,
    TensorView, TensorViewMut,
};

/// What a call does besides the product; addresses of the device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fuse {
    /// Weight (f32 `[k]`) and epsilon of the norm of x, which is f32 then.
    pub norm: Option<(u64, f32)>,
    /// `y[m, n/2] = silu(gate) * up`.
    pub gate: bool,
    /// `y += product`, f32.
    pub accumulate: bool,
}

impl Fuse {
    /// The parts that are there.
    pub fn set(&self) -> FuseSet {
        let part = |there: bool, s: FuseSet| if there { s } else { FuseSet::NONE };
        part(self.norm.is_some(), FuseSet::NORM)
            .with(part(self.gate, FuseSet::GATE))
            .with(part(self.accumulate, FuseSet::ACCUMULATE))
    }
}

/// One checked call.
#[derive(Clone, Copy)]
pub struct Call {
    /// Input.
    pub x: Mat,
    /// Output.
    pub y: Mat,
    /// What else.
    pub fuse: Fuse,
    /// Queue.
    pub stream: usize,
    /// Address of as many bytes as `workspace` says, 256-byte aligned.
    pub workspace: u64,
}

/// Kernels for some of the calls.
pub trait Fast: Send + Sync {
    /// Such a weight was prepared: what its calls will want may be made ready.
    fn expect(&self, _: &Weight) {}
    /// Whether they take such a call. May not depend on addresses or strides.
    fn takes(&self, w: &Weight, m: usize, set: FuseSet) -> bool;
    /// Scratch bytes of calls they take.
    fn workspace(&self, w: &Weight, m: usize) -> usize;
    /// Enqueues the product.
    ///
    /// # Safety
    /// The matrices are device memory that fits the weight, and do not overlap.
    unsafe fn forward(&self, w: &Weight, call: &Call) -> Result<()>;
}

impl PreparedWeight for Weight {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    fn workspace(&self, m: usize) -> usize {
        let bytes = workspace(self, m as u64);
        bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX)
    }

    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        forward(self, &x, &Fusion::default(), y, cx)
    }

    fn fuses(&self, m: usize, set: FuseSet) -> bool {
        set == FuseSet::NONE || fuses(self, m, set)
    }

    fn forward_fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        forward(self, &x, fusion, y, cx)
    }

    /// `dx = dy W` with the decoded weight.
    fn backward_input(
        &self,
        dy: TensorView<'_>,
        mut dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        placed(&[&dy, &dx.as_view()], cx)?;
        let dy = Mat::input(&dy, "dy", self.n, self.y)?;
        let dx = Mat::output(&mut dx, "dx", self.k, self.x)?;
        check_rows(self.max_m, &dy, &dx)?;
        // SAFETY: views of memory of this device, dx a unique one.
        unsafe { self.engine.simple.backward(self, &dy, &dx, cx.stream) }
            .map_err(|e| self.shaped(e, "gradient", dy.rows))
    }

    fn dequantize(&self, mut out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        placed(&[&out.as_view()], cx)?;
        let dtype = out.as_view().dtype();
        let out = Mat::output(&mut out, "decoded weight", self.k, dtype)?;
        if out.rows != self.n {
            return Err(invalid("decoded weight", format!("{} rows", self.n), out.rows));
        }
        // SAFETY: a unique view of memory of this device.
        unsafe { self.engine.simple.dequantize(self, &out, cx.stream) }
            .map_err(|e| self.shaped(e, "decoding", self.n))
    }
}

/// Fails unless all are in memory of the device of the call.
pub(super) fn placed(views: &[&TensorView<'_>], cx: &ExecContext<'_>) -> Result<()> {
    views.iter().try_for_each(|view| q4_cuda::check_place(view, cx))
}

fn fast(w: &Weight, m: usize, set: FuseSet) -> Option<&dyn Fast> {
    w.engine.fast.iter().map(|f| &**f).find(|f| f.takes(w, m, set))
}

/// Whether a call of `m` rows may fuse exactly `set`.
fn fuses(w: &Weight, m: usize, set: FuseSet) -> bool {
    m > 0 && m <= w.max_m && (set == FuseSet::NONE || fast(w, m, set).is_some())
}

/// Scratch bytes of any call of `m` rows; `None` when that overflows.
fn workspace(w: &Weight, m: u64) -> Option<u64> {
    let rows = usize::try_from(m).ok()?;
    let own = match w.activations {
        Activations::Native => 0,
        _ => Scratch::of(rows, w.k)?.bytes,
    };
    let fast = w.engine.fast.iter().map(|f| f.workspace(w, rows) as u64).max().unwrap_or(0);
    Some(own.max(fast))
}

/// Where quantised rows lie in the workspace.
struct Scratch {
    q: u64,
    steps: u64,
    bytes: u64,
}

impl Scratch {
    fn of(m: usize, k: usize) -> Option<Self> {
        let q = 256u64;
        let steps = (q.checked_add((m as u64).checked_mul(k as u64)?)?).checked_next_multiple_of(256)?;
        let bytes =
            steps.checked_add((m as u64).checked_mul(k as u64 / 16 * 4)?)?.checked_next_multiple_of(256)?;
        Some(Self { q, steps, bytes })
    }
}

/// `y = x W^T`, with what `fusion` adds.
fn forward(
    w: &Weight,
    x: &TensorView<'_>,
    fusion: &Fusion<'_>,
    mut y: TensorViewMut<'_>,
    cx: &mut ExecContext<'_>,
) -> Result<()> {
    placed(&[x, &y.as_view()], cx)?;
    let fuse = fused(w, fusion, cx)?;
    let (x_type, columns, y_type) = types(w, &fuse);
    let x = Mat::input(x, "x", w.k, x_type)?;
    let y = Mat::output(&mut y, "y", columns, y_type)?;
    check_rows(w.max_m, &x, &y)?;
    let (m, set) = (x.rows, fuse.set());
    let workspace = scratch(cx, workspace(w, m as u64), 256)?.addr() as u64;
    let call = Call { x, y, fuse, stream: cx.stream, workspace };
    let outcome = match fast(w, m, set) {
        // SAFETY: views of memory of this device, y and the scratch unique ones.
        Some(f) => unsafe { f.forward(w, &call) },
        // SAFETY: as above.
        None if set == FuseSet::NONE => unsafe { plain(w, &call) },
        None => Err(Error::new(Code::Unsupported, "a fused product")
            .need("a combination that this weight says it fuses")
            .have(format!("parts {:#05b}", set.0))),
    };
    outcome.map_err(|e| w.shaped(e, "product", m))
}

/// The parts of a fusion by address.
fn fused(w: &Weight, fusion: &Fusion<'_>, cx: &ExecContext<'_>) -> Result<Fuse> {
    let norm = fusion.norm.as_ref();
    let norm = norm.map(|norm| q4_cuda::check_norm(&norm.weight, w.k, cx).map(|at| (at, norm.eps)));
    let norm = norm.transpose()?;
    Ok(Fuse { norm, gate: fusion.gate, accumulate: fusion.accumulate })
}

/// The plain kernels.
unsafe fn plain(w: &Weight, c: &Call) -> Result<()> {
    let k = &w.engine.simple;
    let too_large =
        || Error::new(Code::ShapeMismatch, "workspace").need("a size that fits the address space");
    let factor = match w.activations {
        // SAFETY: forwarded.
        Activations::Native => return unsafe { k.forward_float(w, &c.x, &c.y, c.stream) },
        Activations::Int8 => 0.5,
        Activations::Nvfp4(_) => 0.25,
        Activations::Fp8(_) => return Err(refused(&w.activations)),
    };
    let s = Scratch::of(c.x.rows, w.k).ok_or_else(too_large)?;
    let (q, steps) = (c.workspace + s.q, c.workspace + s.steps);
    // SAFETY: forwarded; the workspace has the size that was asked for.
    unsafe {
        let to = [c.workspace, q, steps];
        let (global, convention) = k.rows.quantised(matrix(&c.x), &w.activations, w.x, to, c.stream)?;
        k.forward_int(w, Quantised { q, steps, global, convention, factor }, &c.y, c.stream)
    }
}

/// What x and y of a fused call are.
fn types(w: &Weight, fuse: &Fuse) -> (DType, usize, DType) {
    let x = if fuse.norm.is_some() { DType::F32 } else { w.x };
    let y = if fuse.accumulate { DType::F32 } else { w.y };
    (x, if fuse.gate { w.n / 2 } else { w.n }, y)
}
