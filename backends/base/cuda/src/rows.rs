//! Launchers of `cuda/rows.cu`: activations of every float type, quantised by every rule, on the device.
use crate::{Gpu, Kernel, Kernels, Launch, Source, check, driver, mirror};
use q4_core::formats::fp8::inputs;
use q4_core::{
    ActGlobal, ActQuant, Activations, Convention, DType, Fp8Inputs, GlobalScale, Result, Rule, TensorView,
};
use std::sync::Arc;

/// The text, for kernels that use its functions.
pub const ROWS: Source = Source { name: "rows", text: include_str!("../cuda/rows.cu"), files: &[] };

mirror! {
    /// `Matrix` of `rows.cu`: row-major, `ld` elements from row to row.
    pub struct Matrix {
        /// Device address.
        pub data: u64,
        /// Leading stride.
        pub ld: u64,
        /// Rows.
        pub rows: u32,
        /// Columns.
        pub cols: u32,
        /// 1 (f32), 2 (f16) or 3 (bf16).
        pub dtype: u32,
        unused: u32,
    }

    struct Amax { x: Matrix, out: u64 }
    struct Global { amax: u64, rule: u32, source: u32 }
    struct Int8 { x: Matrix, q: u64, steps: u64 }
    struct Nvfp4 {
        x: Matrix, rule: u32, source: u32, global: u64, q: u64, steps: u64, codes: u64, bytes: u64, bad: u64,
    }
    struct Fp8 { x: Matrix, reach: u32, fixed: f32, out: u64 }
    struct Values {
        q: u64, steps: u64, global: u64, convention: u32, factor: f64, rows: u32, cols: u32, out: u64,
    }
}

impl Matrix {
    /// `rows` by `cols` at `data`.
    pub fn new(data: u64, dtype: DType, rows: usize, cols: usize, ld: usize) -> Self {
        let dtype = number(dtype);
        Self { data, ld: ld as u64, rows: rows as u32, cols: cols as u32, dtype, unused: 0 }
    }
    /// A view of device memory.
    pub fn of(view: &TensorView<'_>) -> Result<Self> {
        let (rows, cols, ld) = view.as_matrix()?;
        Ok(Self::new(view.as_ptr().addr() as u64, view.dtype(), rows, cols, ld))
    }
    /// Bytes of an element.
    pub fn size(&self) -> u64 {
        if self.dtype == number(DType::F32) { 4 } else { 2 }
    }
    /// Whether its rows can be read 16 bytes at a time.
    pub fn is_aligned(&self) -> bool {
        self.data % 16 == 0 && (self.rows == 1 || self.ld * self.size() % 16 == 0)
    }
    /// `count` of its rows from `first` on.
    pub fn rows_from(&self, first: usize, count: usize) -> Self {
        Self { data: self.data + first as u64 * self.ld * self.size(), rows: count as u32, ..*self }
    }
    /// Parts that fit the second dimension of a grid, with their first rows.
    pub fn parts(self) -> impl Iterator<Item = (usize, Self)> {
        let rows = self.rows as usize;
        (0..rows)
            .step_by(MAX_ROWS)
            .map(move |first| (first, self.rows_from(first, MAX_ROWS.min(rows - first))))
    }
}

/// Rows of one launch: what the second dimension of a grid holds, rounded down.
const MAX_ROWS: usize = 32768;

/// A grid with a block for each row, over its second and third dimension.
pub fn over_rows(x: usize, rows: usize) -> [usize; 3] {
    [x, rows.min(MAX_ROWS), rows.div_ceil(MAX_ROWS)]
}

/// A type's number in kernels.
pub fn number(d: DType) -> u32 {
    match d {
        DType::F16 => 2,
        DType::BF16 => 3,
        _ => 1,
    }
}

/// The number that products of many rows have for what they do to y, of the type with number `y`.
pub fn output(accumulate: bool, y: u32) -> i32 {
    match (accumulate, y) {
        (true, _) => 1,
        (_, 1) => 0,
        (_, 2) => 3,
        _ => 2,
    }
}

/// A rule's number in kernels.
pub fn rule(r: Rule) -> u32 {
    match r {
        Rule::TorchAo => 1,
        Rule::ModelOpt => 2,
        Rule::CompressedTensors => 3,
        Rule::TransformerEngine => 4,
        _ => 5,
    }
}

/// A convention's number in kernels.
pub fn convention(r: Rule) -> u32 {
    if r.convention() == Convention::Multiply { 1 } else { 2 }
}

/// Where [`RowKernels::nvfp4`] writes; 0: nowhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stored {
    /// Doubled values, int8 `[m, k]`.
    pub q: u64,
    /// Block scales, f32 `[m, k / 16]`.
    pub steps: u64,
    /// Packed codes.
    pub codes: u64,
    /// E4M3 block scales.
    pub scales: u64,
    /// A u32 that gets the first row that cannot be quantised.
    pub bad: u64,
}

/// The functions of `rows.cu` on one device.
pub struct RowKernels {
    gpu: Arc<Gpu>,
    amax: Kernel<Amax>,
    global: Kernel<Global>,
    int8: Kernel<Int8>,
    nvfp4: Kernel<Nvfp4>,
    fp8: Kernel<Fp8>,
    values: Kernel<Values>,
}

fn grid(x: usize, y: usize, threads: u32, stream: usize) -> Launch {
    Launch::new([x, y, 1], [threads, 1, 1], stream)
}

impl RowKernels {
    /// Compiles or finds them.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let all = Kernels::load(gpu, &ROWS, &[])?;
        Ok(Self {
            gpu: gpu.clone(),
            amax: all.get("q4_amax")?,
            global: all.get("q4_global")?,
            int8: all.get("q4_int8")?,
            nvfp4: all.get("q4_nvfp4")?,
            fp8: all.get("q4_fp8")?,
            values: all.get("q4_values")?,
        })
    }

    /// The per-tensor scale of all rows of x, to the f32 at `out`; NaN where a row has none.
    ///
    /// # Safety
    /// x and `out` are device memory.
    pub unsafe fn global_of(&self, x: Matrix, r: Rule, source: DType, out: u64, stream: usize) -> Result<()> {
        self.gpu.bind()?;
        let (rule, source) = (rule(r), number(source));
        // SAFETY: by contract.
        unsafe {
            check(driver::cuMemsetD32Async(out, 0, 1, stream as driver::CUstream), "cuMemsetD32Async")?;
            self.amax.launch(grid(x.rows as usize, 1, 256, stream), Amax { x, out })?;
            self.global.launch(grid(1, 1, 1, stream), Global { amax: out, rule, source })
        }
    }

    /// A per-tensor scale to the f32 at `out`.
    ///
    /// # Safety
    /// `out` is device memory.
    pub unsafe fn set_global(&self, g: GlobalScale, out: u64, stream: usize) -> Result<()> {
        self.gpu.bind()?;
        let bits = g.value().to_bits();
        // SAFETY: by contract.
        check(
            unsafe { driver::cuMemsetD32Async(out, bits, 1, stream as driver::CUstream) },
            "cuMemsetD32Async",
        )
    }

    /// Rows to int8 with a step per 16.
    ///
    /// # Safety
    /// x is device memory, `q` and `steps` have room for its rows.
    pub unsafe fn int8(&self, x: Matrix, q: u64, steps: u64, stream: usize) -> Result<()> {
        let groups = x.cols as usize / 16;
        for (first, part) in x.parts() {
            let how = grid(groups.div_ceil(128), part.rows as usize, 128, stream);
            let (q, steps) = (q + (first * x.cols as usize) as u64, steps + (first * groups * 4) as u64);
            // SAFETY: by contract.
            unsafe { self.int8.launch(how, Int8 { x: part, q, steps })? };
        }
        Ok(())
    }

    /// Rows to NVFP4.
    ///
    /// # Safety
    /// x is device memory, the outputs have room for its rows.
    pub unsafe fn nvfp4(
        &self,
        x: Matrix,
        r: Rule,
        source: DType,
        global: u64,
        to: &Stored,
        stream: usize,
    ) -> Result<()> {
        let (rule, source, k) = (rule(r), number(source), x.cols as usize);
        for (first, x) in x.parts() {
            let how = grid((k / 16).div_ceil(128), x.rows as usize, 128, stream);
            let at = |base: u64, bytes: usize| if base == 0 { 0 } else { base + (first * bytes) as u64 };
            let (q, steps) = (at(to.q, k), at(to.steps, k / 16 * 4));
            let (codes, bytes) = (at(to.codes, k / 2), at(to.scales, k / 16));
            let args = Nvfp4 { x, rule, source, global, q, steps, codes, bytes, bad: to.bad };
            // SAFETY: by contract.
            unsafe { self.nvfp4.launch(how, args)? };
        }
        Ok(())
    }

    /// Rows to what FP8 keeps of them, as f32 `[m, k]` at `out`.
    ///
    /// # Safety
    /// x is device memory, `out` has room for its rows.
    unsafe fn fp8(&self, x: Matrix, how: Fp8Inputs, out: u64, stream: usize) -> Result<()> {
        let k = x.cols as usize;
        let (reach, fixed) = match how {
            // Every run may have a block of its own.
            Fp8Inputs::Static(scale) => (inputs::BLOCK, scale.effective(1.0)),
            _ => (inputs::reach(how, k), 0.0),
        };
        for (first, x) in x.parts() {
            let launch = grid(k.div_ceil(reach), x.rows as usize, 128, stream);
            let args = Fp8 { x, reach: reach as u32, fixed, out: out + (first * k * 4) as u64 };
            // SAFETY: by contract.
            unsafe { self.fp8.launch(launch, args)? };
        }
        Ok(())
    }

    /// The address of the per-tensor scale that `act` asks for, 0 where it asks for none: `at`, where it is
    /// put.
    ///
    /// # Safety
    /// x and `at` are device memory.
    pub unsafe fn scale(
        &self,
        x: Matrix,
        act: &ActQuant,
        source: DType,
        at: u64,
        stream: usize,
    ) -> Result<u64> {
        // SAFETY: forwarded.
        unsafe {
            match act.global {
                ActGlobal::None => return Ok(0),
                ActGlobal::Static(g) => self.set_global(g, at, stream)?,
                ActGlobal::PerCall => self.global_of(x, act.rule, source, at, stream)?,
            }
        }
        Ok(at)
    }

    /// Rows to int8, as int8 or NVFP4 `activations` say; the address and the convention of their per-tensor
    /// scale, or 0.
    ///
    /// # Safety
    /// x is device memory; so are a float, room for its rows and for their steps.
    pub unsafe fn quantised(
        &self,
        x: Matrix,
        activations: &Activations,
        source: DType,
        [global, q, steps]: [u64; 3],
        stream: usize,
    ) -> Result<(u64, u32)> {
        let Activations::Nvfp4(act) = activations else {
            // SAFETY: forwarded.
            return unsafe { self.int8(x, q, steps, stream) }.map(|()| (0, 0));
        };
        let to = Stored { q, steps, ..Stored::default() };
        // SAFETY: forwarded.
        unsafe {
            let global = self.scale(x, act, source, global, stream)?;
            self.nvfp4(x, act.rule, source, global, &to, stream)?;
            Ok((global, convention(act.rule)))
        }
    }

    /// Scratch bytes of [`rounded`](Self::rounded).
    pub fn rounded_bytes(activations: &Activations, m: usize, k: usize) -> usize {
        match activations {
            Activations::Native => 0,
            Activations::Fp8(_) => (m * k * 4).next_multiple_of(256),
            Activations::Int8 | Activations::Nvfp4(_) => values_at(m, k) + (m * k * 4).next_multiple_of(256),
        }
    }

    /// x as a product uses it: itself with native activations, else its quantised values in f32, in
    /// `scratch`.
    ///
    /// # Safety
    /// x is device memory, `scratch` has [`rounded_bytes`](Self::rounded_bytes), aligned to 256.
    pub unsafe fn rounded(
        &self,
        x: Matrix,
        activations: &Activations,
        source: DType,
        scratch: u64,
        stream: usize,
    ) -> Result<Matrix> {
        let (m, k) = (x.rows as usize, x.cols as usize);
        let (q, steps) = (scratch + 256, scratch + steps_at(m, k) as u64);
        let out = scratch + values_at(m, k) as u64;
        let factor = match activations {
            Activations::Native => return Ok(x),
            Activations::Fp8(how) => {
                // SAFETY: by contract.
                unsafe { self.fp8(x, *how, scratch, stream)? };
                return Ok(Matrix::new(scratch, DType::F32, m, k, k));
            }
            Activations::Int8 => 1.0,
            Activations::Nvfp4(_) => 0.5,
        };
        // SAFETY: by contract; the parts of the scratch do not overlap.
        let (global, convention) =
            unsafe { self.quantised(x, activations, source, [scratch, q, steps], stream)? };
        let values = Matrix::new(out, DType::F32, m, k, k);
        for (first, part) in values.parts() {
            let how = grid(k.div_ceil(256), part.rows as usize, 256, stream);
            let (q, steps) = (q + (first * k) as u64, steps + (first * (k / 16) * 4) as u64);
            let Matrix { rows, cols, data: out, .. } = part;
            // SAFETY: as above.
            unsafe {
                self.values.launch(how, Values { q, steps, global, convention, factor, rows, cols, out })?;
            }
        }
        Ok(values)
    }
}

fn steps_at(m: usize, k: usize) -> usize {
    256 + (m * k).next_multiple_of(256)
}

fn values_at(m: usize, k: usize) -> usize {
    steps_at(m, k) + (m * (k / 16) * 4).next_multiple_of(256)
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    ROWS.takes::<Amax>("q4_amax")?;
    ROWS.takes::<Global>("q4_global")?;
    ROWS.takes::<Int8>("q4_int8")?;
    ROWS.takes::<Nvfp4>("q4_nvfp4")?;
    ROWS.takes::<Fp8>("q4_fp8")?;
    ROWS.takes::<Values>("q4_values")
}
