//! NF4 products on a CUDA device: packed there from the stored bytes, 4-bit until they are in registers.
mod decode;
mod prefill;
mod rounded;
mod simple;

use crate::prepare::{finite_absmax, format, parts};
use q4_codebook::scale_group;
use q4_core::formats::nf4;
use q4_core::rows::check_matrix;
use q4_core::{
    Activations, Code, DType, Error, ExecContext, ExecPath, FuseSet, Fusion, LinearSpec, Nf4, Nf4Parts,
    NibbleOrder, OpSet, PreparedInfo, PreparedWeight, Q4Weight, Result, TensorView, TensorViewMut,
};
use q4_cuda::{Arch, Buffer, File, Gpu, Matrix, RowKernels, UNIT, number};
use std::sync::Arc;

pub(crate) use simple::SOURCE;

/// What kernels include.
const FILES: &[File] = q4_cuda::files!("../cuda/", "layout.cuh", "table.cuh");

/// Elements of k under one scale in a unit.
const TILE: usize = 64;

/// The kernels on one device.
pub(crate) struct Engine {
    gpu: Arc<Gpu>,
    rows: RowKernels,
    simple: simple::Kernels,
    decode: decode::Kernels,
    prefill: Option<prefill::Kernels>,
    rounded: Option<rounded::Kernels>,
}

impl Engine {
    /// Compiles or finds them.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        debug_assert_eq!(nf4::CODEBOOK[7], 0.0);
        Ok(Self {
            gpu: gpu.clone(),
            rows: RowKernels::load(gpu)?,
            simple: simple::Kernels::load(gpu)?,
            decode: decode::Kernels::load(gpu)?,
            prefill: prefill::Kernels::load(gpu)?,
            rounded: rounded::Kernels::load(gpu)?,
        })
    }
}

q4_cuda::mirror! {
    /// `Weight` of layout.cuh; no units of 16 rows where scales do not cover whole tiles.
    struct Packed { codes: u64, scales: u64, n: u32, k: u32, group: u32, units: u32 }
}

/// A product to enqueue; addresses of the device.
struct Call {
    x: Matrix,
    y: Matrix,
    /// The number of the type x has, or is rounded to behind a norm.
    source: u32,
    /// Weight (f32 `[k]`) and epsilon of the norm of x, which is f32 then; 0: none.
    norm: (u64, f32),
    /// `y[m, n/2] = silu(gate) * up`.
    gate: bool,
    /// `y += product`, f32.
    accumulate: bool,
    stream: usize,
    workspace: u64,
}

/// A weight on a device.
pub(crate) struct OnDevice {
    engine: Arc<Engine>,
    info: PreparedInfo,
    x: DType,
    y: DType,
    packed: Packed,
    _memory: Buffer,
}

/// Bytes on the device, and how they are divided.
struct Sizes {
    group: usize,
    units: usize,
    codes: usize,
    scales: usize,
}

impl Sizes {
    fn of(n: usize, k: usize, block: u32) -> Self {
        let group = scale_group(k, block);
        let units = if group % TILE == 0 { k.div_ceil(2 * TILE) } else { 0 };
        let (codes, scales) = match units {
            0 => ((n * k / 2).next_multiple_of(256), n * (k / group) * 4),
            _ => (n.div_ceil(16) * units * UNIT, 0),
        };
        Self { group, units, codes, scales }
    }
}

/// Bytes that [`prepare`] will keep there.
pub(crate) fn resident(n: usize, k: usize, block: u32) -> u64 {
    let sizes = Sizes::of(n, k.max(1), block);
    (sizes.codes + sizes.scales) as u64
}

/// Copies and packs `w`; waits. Fails as the preparation for the CPU does.
pub(crate) fn prepare(
    engine: &Arc<Engine>,
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
) -> Result<OnDevice> {
    if path == ExecPath::FusedRounded && engine.rounded.is_none() {
        return Err(Error::new(Code::Unsupported, "rounded weights")
            .need(Arch::names(|a| a.wgmma))
            .have(engine.gpu.arch.target()));
    }
    let format = format(w)?;
    let (n, k) = (w.n(), w.k);
    let Nf4 { nibble_order, block, .. } = format;
    let Sizes { group, units, codes, scales } = Sizes::of(n, k, block);
    let memory = Buffer::lasting(&engine.gpu, codes + scales)?;
    memory.fill(0)?;
    let packed = Packed {
        codes: memory.ptr(),
        scales: memory.ptr() + codes as u64,
        n: n as u32,
        k: k as u32,
        group: group as u32,
        units: units as u32,
    };
    let mut first = 0;
    for (i, s) in w.segments.iter().enumerate() {
        let Nf4Parts { codes, absmax } = parts(i, &format, s)?;
        let codes = Buffer::of(&engine.gpu, codes.as_bytes()?)?;
        let absmax = Buffer::of(&engine.gpu, &finite_absmax(i, &absmax)?)?;
        let raw = simple::Raw {
            codes: codes.ptr(),
            absmax: absmax.ptr(),
            is_high_first: nibble_order == NibbleOrder::HighFirst,
            block,
            rows: s.rows,
        };
        // SAFETY: the buffers have the sizes the shapes say and live until the wait.
        unsafe { engine.simple.pack(&raw, first, &packed)? };
        engine.gpu.synchronize()?;
        first += s.rows;
    }
    let info = PreparedInfo {
        backend: crate::NAME.into(),
        path,
        activations: spec.activations,
        n,
        k,
        resident_bytes: memory.len() as u64,
        ops: OpSet::ALL,
    };
    Ok(OnDevice { engine: engine.clone(), info, x: spec.x, y: spec.y, packed, _memory: memory })
}

impl OnDevice {
    fn shaped(&self, e: Error, what: &str, m: usize) -> Error {
        e.within(format!("{what} of [{m}, {}] by [{}, {}]", self.info.k, self.info.n, self.info.k))
    }

    /// The type whose exact values are multiplied: that of x, f32 where x is quantised.
    fn source(&self) -> DType {
        if self.info.activations == Activations::Native { self.x } else { DType::F32 }
    }

    /// Kernels for many rows, if there are any for this path and such calls: with weights rounded, or exact.
    fn rounded(&self, m: usize, set: FuseSet) -> Option<&rounded::Kernels> {
        let has_path = self.info.path == ExecPath::FusedRounded;
        self.engine.rounded.as_ref().filter(|k| has_path && k.takes(&self.packed, m, set))
    }
    fn exact(&self, m: usize, set: FuseSet) -> Option<&prefill::Kernels> {
        let has_path = self.info.path == ExecPath::FusedDequant;
        self.engine.prefill.as_ref().filter(|k| has_path && k.takes(&self.packed, m, set))
    }

    /// Whether fast kernels take such a call.
    fn takes(&self, m: usize, set: FuseSet) -> bool {
        self.rounded(m, set).is_some()
            || self.exact(m, set).is_some()
            || self.engine.decode.takes(&self.packed, number(self.source()), m, set)
    }

    fn run(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let (n, k) = (self.info.n, self.info.k);
        let x_type = if fusion.norm.is_some() { DType::F32 } else { self.x };
        let y_type = if fusion.accumulate { DType::F32 } else { self.y };
        let columns = if fusion.gate { n / 2 } else { n };
        let m = q4_cuda::check_call((&x, x_type, k), (&y.as_view(), y_type, columns), cx)?;
        let norm = match &fusion.norm {
            None => (0, 0.0),
            Some(norm) => (q4_cuda::check_norm(&norm.weight, k, cx)?, norm.eps),
        };
        let scratch = q4_cuda::scratch(cx, self.workspace(m))?;
        let (e, w, stream) = (&*self.engine, &self.packed, cx.stream);
        let rounded = RowKernels::rounded_bytes(&self.info.activations, m, k);
        // SAFETY: the views are of this device and have the shapes of the weight; the scratch has the size
        // asked for.
        let run = || unsafe {
            let x = e.rows.rounded(Matrix::of(&x)?, &self.info.activations, self.x, scratch, stream)?;
            let call = Call {
                x,
                y: Matrix::of(&y.as_view())?,
                source: number(self.source()),
                norm,
                gate: fusion.gate,
                accumulate: fusion.accumulate,
                stream,
                workspace: scratch + rounded as u64,
            };
            if let Some(kernels) = self.rounded(m, fusion.set()) {
                kernels.forward(w, &call)
            } else if let Some(kernels) = self.exact(m, fusion.set()) {
                kernels.forward(w, &call)
            } else if e.decode.takes(w, call.source, m, fusion.set()) {
                e.decode.forward(w, &call)
            } else {
                e.simple.forward(w, call.x, call.y, stream)
            }
        };
        run().map_err(|e| self.shaped(e, "NF4 product", m))
    }
}

impl PreparedWeight for OnDevice {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }
    fn workspace(&self, m: usize) -> usize {
        let (e, w) = (&*self.engine, &self.packed);
        let exact = self.exact(m, FuseSet::NONE).map_or(0, |k| k.workspace(w, number(self.source()), m));
        let rounded = self.rounded(m, FuseSet::NONE).map_or(0, |k| k.workspace(w, m));
        let fast = e.decode.workspace(w, m).max(exact).max(rounded);
        RowKernels::rounded_bytes(&self.info.activations, m, self.info.k) + fast
    }
    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.run(x, &Fusion::default(), y, cx)
    }
    fn fuses(&self, m: usize, set: FuseSet) -> bool {
        let quantised = self.info.activations != Activations::Native;
        set == FuseSet::NONE
            || (m > 0
                // What is quantised is the normed row.
                && !(quantised && set.contains(FuseSet::NORM))
                && self.takes(m, set))
    }
    fn forward_fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let m = x.as_matrix()?.0;
        if !self.fuses(m, fusion.set()) {
            return Err(Error::new(Code::Unsupported, "a fused product")
                .need("a combination that this weight says it fuses")
                .have(format!("{:?} of {m} rows", fusion.set())));
        }
        self.run(x, fusion, y, cx)
    }
    fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let m = q4_cuda::check_call((&dy, self.y, self.info.n), (&dx.as_view(), self.x, self.info.k), cx)?;
        let (dy, dx) = (Matrix::of(&dy)?, Matrix::of(&dx.as_view())?);
        // SAFETY: as in `run`.
        unsafe { self.engine.simple.backward(&self.packed, dy, dx, cx.stream) }
            .map_err(|e| self.shaped(e, "NF4 gradient", m))
    }
    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let (n, k) = (self.info.n, self.info.k);
        check_matrix(&out.as_view(), out.as_view().dtype(), n, k)?;
        q4_cuda::check_place(&out.as_view(), cx)?;
        // SAFETY: as in `run`.
        unsafe { self.engine.simple.dequantize(&self.packed, Matrix::of(&out.as_view())?, cx.stream) }
            .map_err(|e| self.shaped(e, "NF4 decoding", n))
    }
}
