//! Products on a CUDA device: packed there from the stored bytes, codes until they are in registers.
mod coding;
mod decode;
mod fp8;
#[cfg(all(test, target_os = "linux"))]
mod on_host;
#[cfg(test)]
mod pairs;
mod prefill;
mod rounded;
mod simple;

use crate::encoding::Scale;
use crate::stored::Flat;
use coding::{Coding, Places, Scales};
use q4_core::rows::check_matrix;
use q4_core::{
    Activations, Code, DType, Error, ExecContext, ExecPath, Fp8Inputs, FuseSet, Fusion, LinearSpec,
    NibbleOrder, OpSet, PreparedInfo, PreparedWeight, Result, TensorView, TensorViewMut,
};
use q4_cuda::{Arch, Buffer, File, Gpu, Kernels as Module, Matrix, RowKernels, Source, number};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

pub use coding::{Levels, Width};

/// What kernels include.
const FILES: &[File] = q4_cuda::files!("../cuda/", "layout.cuh", "levels.cuh", "outputs.cuh", "gemv.cu");

/// Everything kernels are compiled for.
const CODINGS: [Coding; 8] = {
    const fn of(levels: Levels, scales: Scales) -> Coding {
        Coding { levels, scales }
    }
    [
        of(Levels::Nf4, Scales::Whole),
        of(Levels::Int4, Scales::Whole),
        of(Levels::Int4, Scales::HalvesF16),
        of(Levels::Int4, Scales::HalvesBf16),
        of(Levels::Int4, Scales::ZerosF16),
        of(Levels::Int4, Scales::ZerosBf16),
        of(Levels::E2m1, Scales::HalvesBf16),
        of(Levels::E4m3, Scales::Whole),
    ]
};

/// Kernels of `source` for a coding, compiled or found.
fn load(gpu: &Arc<Gpu>, source: &Source, coding: Coding, more: &[&str]) -> Result<Module> {
    let told = coding.options();
    Module::load(
        gpu,
        source,
        &told.iter().map(String::as_str).chain(more.iter().copied()).collect::<Vec<_>>(),
    )
}

/// The kernels on one device.
pub struct Engine {
    gpu: Arc<Gpu>,
    rows: RowKernels,
    /// By what they are compiled for, when a weight first needs them.
    sets: Mutex<BTreeMap<Coding, Arc<Set>>>,
}

/// Those of one coding.
struct Set {
    simple: simple::Kernels,
    decode: decode::Kernels,
    prefill: Option<prefill::Kernels>,
    rounded: Option<rounded::Kernels>,
    fp8: Option<fp8::Kernels>,
}

impl Engine {
    /// Compiles or finds what every weight needs.
    ///
    /// # Errors
    /// What the compiler or the driver says.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        Ok(Self { gpu: gpu.clone(), rows: RowKernels::load(gpu)?, sets: Mutex::default() })
    }

    fn set(&self, coding: Coding) -> Result<Arc<Set>> {
        let mut sets = self.sets.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(set) = sets.get(&coding) {
            return Ok(set.clone());
        }
        let set = Arc::new(Set {
            simple: simple::Kernels::load(&self.gpu, coding)?,
            decode: decode::Kernels::load(&self.gpu, coding)?,
            prefill: prefill::Kernels::load(&self.gpu, coding)?,
            rounded: rounded::Kernels::load(&self.gpu, coding)?,
            fp8: fp8::Kernels::load(&self.gpu, coding)?,
        });
        sets.insert(coding, set.clone());
        Ok(set)
    }
}

/// What is on disk where no compiler is needed: the source, and what it is compiled for, of weights of these
/// levels.
pub(crate) fn images(levels: Levels) -> (&'static Source, Vec<Vec<String>>) {
    let of = CODINGS.into_iter().filter(|c| c.levels == levels);
    (&simple::SOURCE, of.map(Coding::options).collect())
}

q4_cuda::mirror! {
    /// `Weight` of layout.cuh.
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
    /// x is one row of bf16, or becomes one behind a norm, and is rounded to FP8 so.
    rounding: Option<Fp8Inputs>,
    stream: usize,
    workspace: u64,
}

/// A weight on a device.
struct Weight {
    engine: Arc<Engine>,
    set: Arc<Set>,
    coding: Coding,
    info: PreparedInfo,
    x: DType,
    y: DType,
    packed: Packed,
    _memory: Buffer,
}

/// Bytes that [`prepare`] will keep there of a weight with such scales for `block` elements each.
pub(crate) fn resident(of: (Levels, Width), has_zeros: bool, shape: [usize; 2], block: u32) -> u64 {
    let places = Places::of(of, has_zeros, shape, block);
    (places.codes + places.scales) as u64
}

/// Copies and packs the segments; waits. Their scales are finite.
pub(crate) fn prepare<S: Scale>(
    engine: &Arc<Engine>,
    levels: Levels,
    (backend, path): (&'static str, ExecPath),
    stored: &[Flat<'_, S>],
    spec: &LinearSpec,
) -> Result<Box<dyn PreparedWeight>> {
    let (n, k) = (spec.n(), spec.k);
    let has_zeros = stored.iter().any(|s| !s.zeros.is_empty());
    let block = stored.first().map_or(1, |s| s.block);
    let places = Places::of((levels, Width::of(S::KEPT)), has_zeros, [n, k], block);
    let set = engine.set(places.coding)?;
    if path == ExecPath::FusedRounded && set.rounded.is_none() {
        return Err(Error::new(Code::Unsupported, "rounded weights")
            .need(Arch::names(|a| a.wgmma))
            .have(engine.gpu.arch.target()));
    }
    let memory = Buffer::lasting(&engine.gpu, places.codes + places.scales)?;
    memory.fill(0)?;
    let packed = Packed {
        codes: memory.ptr(),
        scales: memory.ptr() + places.codes as u64,
        n: n as u32,
        k: k as u32,
        group: places.group as u32,
        units: places.units as u32,
    };
    let mut first = 0;
    for s in stored {
        let codes = Buffer::of(&engine.gpu, s.codes)?;
        let words = Words::of(&places, s);
        let scales = Buffer::of(&engine.gpu, &words.scales)?;
        let zeros = if words.zeros.is_empty() { None } else { Some(Buffer::of(&engine.gpu, &words.zeros)?) };
        let raw = simple::Raw {
            codes: codes.ptr(),
            scales: scales.ptr(),
            zeros: zeros.as_ref().map_or(0, Buffer::ptr),
            is_high_first: s.order == NibbleOrder::HighFirst,
            rows: s.rows,
        };
        // SAFETY: the buffers have the sizes the shapes say and live until the wait.
        unsafe { set.simple.pack(&raw, first, &packed)? };
        engine.gpu.synchronize()?;
        first += s.rows;
    }
    let info = PreparedInfo {
        backend: backend.into(),
        path,
        activations: spec.activations,
        n,
        k,
        resident_bytes: memory.len() as u64,
        ops: OpSet::ALL,
    };
    let (engine, coding) = (engine.clone(), places.coding);
    Ok(Box::new(Weight { engine, set, coding, info, x: spec.x, y: spec.y, packed, _memory: memory }))
}

/// Words of scales of a segment in the order of its rows; zero points apart where they do not fit in them.
#[derive(Debug, Default)]
struct Words {
    scales: Vec<u32>,
    zeros: Vec<u32>,
}

impl Words {
    fn of<S: Scale>(places: &Places, s: &Flat<'_, S>) -> Self {
        let (each, coding, in_units) = (places.each(), places.coding, places.units > 0);
        let block = |element: usize| element / s.block as usize;
        let scale = |element: usize| s.scales[block(element)].widen();
        let negative = |element: usize| -f32::from(s.zeros[block(element)]);
        let (width, mut words) = (Width::of(S::KEPT), Self::default());
        for element in (0..s.rows * s.k).step_by(each) {
            let own = scale(element);
            words.scales.push(match coding.scales {
                Scales::HalvesF16 | Scales::HalvesBf16 => {
                    width.bits(own) | width.bits(scale(element + each / 2)) << 16
                }
                // Numbers up to 15 are the upper halves of their f32.
                Scales::ZerosF16 | Scales::ZerosBf16 if in_units => {
                    width.bits(own) | negative(element).to_bits() & 0xffff_0000
                }
                _ => own.to_bits(),
            });
            if coding.has_zeros() && !in_units {
                words.zeros.push(negative(element).to_bits());
            }
        }
        words
    }
}

impl Weight {
    fn shaped(&self, e: Error, what: &str, m: usize) -> Error {
        e.within(format!("{what} of [{m}, {}] by [{}, {}]", self.info.k, self.info.n, self.info.k))
    }

    /// The type whose exact values are multiplied: that of x, f32 where x is quantised.
    fn source(&self) -> DType {
        if self.quantises() { DType::F32 } else { self.x }
    }
    /// Whether what is multiplied is not x but what a format keeps of it.
    fn quantises(&self) -> bool {
        self.info.activations != Activations::Native
    }

    /// Kernels for many rows, if there are any for this path and such calls: with weights rounded, which take
    /// bf16 as it comes, or exact.
    fn rounded(&self, m: usize, set: FuseSet) -> Option<&rounded::Kernels> {
        // What bf16 holds is not rounded; the kernels multiply it by bf16.
        let is_exact = self.coding.is_bf16() && self.x == DType::BF16;
        let has_path = self.info.path == ExecPath::FusedRounded || is_exact;
        let takes = |k: &&rounded::Kernels| k.takes(&self.packed, m, set);
        self.set.rounded.as_ref().filter(|_| has_path && !self.quantises()).filter(takes)
    }
    fn exact(&self, m: usize, set: FuseSet) -> Option<&prefill::Kernels> {
        let has_path = self.info.path == ExecPath::FusedDequant || self.quantises();
        self.set.prefill.as_ref().filter(|k| has_path && k.takes(&self.packed, m, set))
    }

    /// Those that multiply what FP8 keeps of x as it is stored, with how that is.
    fn fp8(&self, m: usize, set: FuseSet) -> Option<(&fp8::Kernels, Fp8Inputs)> {
        let Activations::Fp8(inputs) = self.info.activations else { return None };
        let has_path = self.info.path == ExecPath::FusedRounded;
        self.set.fp8.as_ref().filter(|k| has_path && k.takes(&self.packed, m, set)).map(|k| (k, inputs))
    }

    /// How one row is rounded to FP8 by the kernel that multiplies it.
    fn row_rounding(&self, m: usize, set: FuseSet) -> Option<Fp8Inputs> {
        let Activations::Fp8(inputs) = self.info.activations else { return None };
        let is_row = m == 1 && self.x == DType::BF16;
        (is_row && self.set.decode.rounds(&self.packed, set)).then_some(inputs)
    }

    /// Whether fast kernels take such a call.
    fn takes(&self, m: usize, set: FuseSet) -> bool {
        self.rounded(m, set).is_some()
            || self.fp8(m, set).is_some()
            || self.exact(m, set).is_some()
            || self.set.decode.takes(&self.packed, number(self.source()), m, set)
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
        let (e, set, w, stream) = (&*self.engine, &*self.set, &self.packed, cx.stream);
        let rounded = RowKernels::rounded_bytes(&self.info.activations, m, k);
        // SAFETY: the views are of this device and have the shapes of the weight; the scratch has the size
        // asked for.
        let run = || unsafe {
            if let Some((kernels, inputs)) = self.fp8(m, fusion.set()) {
                let (x, y, workspace) = (Matrix::of(&x)?, Matrix::of(&y.as_view())?, scratch);
                let Fusion { gate, accumulate, .. } = *fusion;
                return kernels
                    .forward(w, &fp8::Product { x, y, inputs, gate, accumulate, stream, workspace });
            }
            let mut call = Call {
                x: Matrix::of(&x)?,
                y: Matrix::of(&y.as_view())?,
                source: number(self.x),
                norm,
                gate: fusion.gate,
                accumulate: fusion.accumulate,
                rounding: self.row_rounding(m, fusion.set()),
                stream,
                workspace: scratch,
            };
            if call.rounding.is_some() {
                return set.decode.forward(w, &call);
            }
            call.x = e.rows.rounded(call.x, &self.info.activations, self.x, scratch, stream)?;
            (call.source, call.workspace) = (number(self.source()), scratch + rounded as u64);
            if let Some(kernels) = self.rounded(m, fusion.set()) {
                kernels.forward(w, &call)
            } else if let Some(kernels) = self.exact(m, fusion.set()) {
                kernels.forward(w, &call)
            } else if set.decode.takes(w, call.source, m, fusion.set()) {
                set.decode.forward(w, &call)
            } else {
                set.simple.forward(w, call.x, call.y, stream)
            }
        };
        run().map_err(|e| self.shaped(e, "product", m))
    }
}

impl PreparedWeight for Weight {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }
    fn workspace(&self, m: usize) -> usize {
        let (set, w) = (&*self.set, &self.packed);
        let exact = self.exact(m, FuseSet::NONE).map_or(0, |k| k.workspace(w, number(self.source()), m));
        let rounded = self.rounded(m, FuseSet::NONE).map_or(0, |k| k.workspace(w, m));
        let fast = set.decode.workspace(w, m).max(exact).max(rounded);
        // Where FP8 tensor cores take more rows than one, only one becomes floats.
        let fp8 = self.fp8(m, FuseSet::NONE).map(|(k, _)| k.workspace(w, m));
        let floats = if fp8.is_some() { 1 } else { m };
        let rounded = RowKernels::rounded_bytes(&self.info.activations, floats, self.info.k);
        fp8.unwrap_or(0).max(rounded + fast)
    }
    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.run(x, &Fusion::default(), y, cx)
    }
    fn fuses(&self, m: usize, set: FuseSet) -> bool {
        set == FuseSet::NONE
            || self.row_rounding(m, set).is_some()
            || (m > 0
                // What is quantised is the normed row.
                && !(self.quantises() && set.contains(FuseSet::NORM))
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
        unsafe { self.set.simple.backward(&self.packed, dy, dx, cx.stream) }
            .map_err(|e| self.shaped(e, "gradient", m))
    }
    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let (n, k) = (self.info.n, self.info.k);
        check_matrix(&out.as_view(), out.as_view().dtype(), n, k)?;
        q4_cuda::check_place(&out.as_view(), cx)?;
        // SAFETY: as in `run`.
        unsafe { self.set.simple.dequantize(&self.packed, Matrix::of(&out.as_view())?, cx.stream) }
            .map_err(|e| self.shaped(e, "decoding", n))
    }
}

/// Machine code of `source` for `arch` and a coding.
#[cfg(test)]
fn compile(source: &Source, arch: &Arch, coding: Coding, more: &[&str]) -> Result<()> {
    let told = coding.options();
    let told: Vec<_> = told.iter().map(String::as_str).chain(more.iter().copied()).collect();
    source.compile(arch, &told).map(drop)
}

#[test]
fn words_have_the_scales_of_their_elements() {
    use half::{bf16, f16};
    let stored = |k, block, scales: &[f32], zeros: &'static [u8]| {
        let scales = scales.iter().map(|s| f16::from_f32(*s)).collect::<Vec<_>>().into();
        Flat { rows: 2, k, codes: &[], order: NibbleOrder::LowFirst, block, scales, zeros }
    };
    let half = |v: f32| u32::from(f16::from_f32(v).to_bits());
    let of = |s: &Flat<'_, f16>| {
        let kind = (Levels::Int4, Width::Half);
        let w = Words::of(&Places::of(kind, !s.zeros.is_empty(), [2, s.k], s.block), s);
        (w.scales, w.zeros)
    };
    // One scale of 128: in both tiles.
    let whole = [1.5f32, 1.5, 2.5, 2.5].map(f32::to_bits).to_vec();
    assert_eq!(of(&stored(128, 128, &[1.5, 2.5], &[])), (whole, vec![]));
    let halves = vec![half(1.0) | half(2.0) << 16, half(3.0) | half(4.0) << 16];
    assert_eq!(of(&stored(64, 32, &[1.0, 2.0, 3.0, 4.0], &[])), (halves, vec![]));
    let negative = |z: f32| u32::from(bf16::from_f32(-z).to_bits()) << 16;
    let zeros = vec![half(1.0) | negative(3.0), half(2.0) | negative(15.0)];
    assert_eq!(of(&stored(64, 64, &[1.0, 2.0], &[3, 15])), (zeros, vec![]));
    let (scales, zeros) = of(&stored(64, 32, &[1.0, 2.0, 3.0, 4.0], &[0, 1, 2, 3]));
    assert_eq!(scales, [1.0f32, 2.0, 3.0, 4.0].map(f32::to_bits));
    assert_eq!(zeros, [-0.0f32, -1.0, -2.0, -3.0].map(f32::to_bits));
}
