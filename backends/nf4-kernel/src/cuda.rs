//! NF4 products on a CUDA device: packed there from the stored bytes, decoded in registers.
use crate::prepare::{check, finite_absmax};
use crate::probe::scale_group;
use q4_core::formats::nf4;
use q4_core::rows::check_matrix;
use q4_core::{
    Code, DType, Error, ExecContext, ExecPath, LinearSpec, NibbleOrder, OpSet, PreparedInfo, PreparedWeight,
    Q4Schema, Q4Weight, Result, SegmentData, TensorView, TensorViewMut,
};
use q4_cuda::{Buffer, Gpu, Kernel, Kernels, Launch, Matrix, RowKernels, Source, args, number};
use std::sync::Arc;

const SOURCE: Source = Source {
    name: "nf4",
    text: concat!(include_str!("../../cuda/cuda/rows.cu"), include_str!("../cuda/nf4.cu")),
};

/// Rows of x that one pass over the weight serves, as `ROWS` in the source.
const ROWS: usize = 8;

/// The kernels on one device.
pub(crate) struct Engine {
    gpu: Arc<Gpu>,
    rows: RowKernels,
    pack: Kernel,
    forward: Kernel,
    one: Kernel,
    /// On tensor cores, by the number of 8 rows of x in a pass.
    tiles: [(usize, Kernel); 3],
    backward: Kernel,
    dequantize: Kernel,
}

impl Engine {
    /// Whether `new` would find what it needs.
    pub fn check(gpu: &Arc<Gpu>) -> Result<()> {
        Kernels::available(gpu, &SOURCE, &[])
    }

    /// Compiles or finds them.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        debug_assert_eq!(nf4::CODEBOOK[7], 0.0);
        let all = Kernels::load(gpu, &SOURCE, &[])?;
        Ok(Self {
            gpu: gpu.clone(),
            rows: RowKernels::load(gpu)?,
            pack: all.get("nf4_pack")?,
            forward: all.get("nf4_forward")?,
            // The same sums with registers for one row only.
            one: Kernels::load(gpu, &SOURCE, &["-DROWS=1"])?.get("nf4_forward")?,
            tiles: [
                (1, all.get("nf4_mma")?),
                (2, Kernels::load(gpu, &SOURCE, &["-DNT=2"])?.get("nf4_mma")?),
                (4, Kernels::load(gpu, &SOURCE, &["-DNT=4"])?.get("nf4_mma")?),
            ],
            backward: all.get("nf4_backward")?,
            dequantize: all.get("nf4_dequantize")?,
        })
    }
}

/// `Weight` of `nf4.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Packed {
    codes: u64,
    scales: u64,
    n: u32,
    k: u32,
    group: u32,
    unused: u32,
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

/// Copies and packs `w`; waits. Fails as the preparation for the CPU does.
pub(crate) fn prepare(
    engine: &Arc<Engine>,
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
) -> Result<OnDevice> {
    check(w, spec)?;
    let Q4Schema::Nf4 { nibble_order, block, .. } = w.schema else {
        return Err(Error::new(Code::SchemaInvalid, "weight").need("nf4").have(w.schema.to_string()));
    };
    let (n, k) = (w.n(), w.k);
    let group = scale_group(k, block);
    let (codes, scales) = ((n * k / 2).next_multiple_of(256), n * (k / group) * 4);
    let memory = Buffer::new(&engine.gpu, codes + scales)?;
    let packed = Packed {
        codes: memory.ptr(),
        scales: memory.ptr() + codes as u64,
        n: n as u32,
        k: k as u32,
        group: group as u32,
        unused: 0,
    };
    let mut first = 0;
    for (i, s) in w.segments.iter().enumerate() {
        let SegmentData::Nf4 { codes, absmax } = &s.data else {
            return Err(Error::new(Code::SchemaInvalid, format!("segment {i}")).need("the parts of nf4"));
        };
        let raw = Buffer::of(&engine.gpu, codes.as_bytes()?)?;
        let absmax = Buffer::of(&engine.gpu, &finite_absmax(i, absmax)?)?;
        let (high, rows) = (u32::from(nibble_order == NibbleOrder::HighFirst), s.rows as u32);
        let (codes_at, scales_at) =
            (packed.codes + (first * k / 2) as u64, packed.scales + (first * (k / group) * 4) as u64);
        let how = Launch {
            grid: [(k / 8).div_ceil(128) as u32, s.rows.min(32768) as u32, s.rows.div_ceil(32768) as u32],
            block: [128, 1, 1],
            shared: 0,
            stream: 0,
            overlap: false,
        };
        // SAFETY: the buffers have the sizes the shapes say and live until the wait below; the arguments are those of
        // `nf4_pack`.
        unsafe {
            engine.pack.launch(
                how,
                args![
                    raw.ptr(),
                    absmax.ptr(),
                    high,
                    block,
                    rows,
                    packed.k,
                    packed.group,
                    codes_at,
                    scales_at
                ],
            )?;
        }
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
    fn scratch(&self, cx: &mut ExecContext<'_>, need: usize) -> Result<u64> {
        q4_cuda::scratch(cx, need)
    }
    fn shaped(&self, e: Error, what: &str, m: usize) -> Error {
        e.within(format!("{what} of [{m}, {}] by [{}, {}]", self.info.k, self.info.n, self.info.k))
    }
}

impl PreparedWeight for OnDevice {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }
    fn workspace(&self, m: usize) -> usize {
        RowKernels::rounded_bytes(&self.info.activations, m, self.info.k)
    }
    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let m = q4_cuda::check_call((&x, self.x, self.info.k), (&y.as_view(), self.y, self.info.n), cx)?;
        let scratch = self.scratch(cx, self.workspace(m))?;
        let (e, stream) = (&*self.engine, cx.stream);
        // SAFETY: the views are of this device and have the shapes of the weight; the scratch has the size asked for.
        let run = || unsafe {
            let x = e.rows.rounded(Matrix::of(&x)?, &self.info.activations, self.x, scratch, stream)?;
            let y = Matrix::of(&y.as_view())?;
            for (first, y) in y.parts() {
                let x = x.rows_from(first, y.rows as usize);
                // Values of 16 bits are exact in TF32; f32 ones, quantised rows among them, are not.
                if x.dtype != number(DType::F32) {
                    let (tiles, kernel) = e.tiles.iter().find(|t| m <= 8 * t.0).unwrap_or(&e.tiles[2]);
                    let grid =
                        [self.info.n.div_ceil(16) as u32, (y.rows as usize).div_ceil(8 * tiles) as u32, 1];
                    let how = Launch { grid, block: [32, 8, 1], shared: 0, stream, overlap: false };
                    kernel.launch(how, args![self.packed, x, y])?;
                    continue;
                }
                let rows = if m == 1 { 1 } else { ROWS };
                let how = Launch {
                    grid: [self.info.n.div_ceil(8) as u32, (y.rows as usize).div_ceil(rows) as u32, 1],
                    block: [32, 8, 1],
                    shared: 0,
                    stream,
                    overlap: false,
                };
                let kernel = if m == 1 { &e.one } else { &e.forward };
                kernel.launch(how, args![self.packed, x, y])?;
            }
            Ok(())
        };
        run().map_err(|e| self.shaped(e, "NF4 product", m))
    }
    fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let m = q4_cuda::check_call((&dy, self.y, self.info.n), (&dx.as_view(), self.x, self.info.k), cx)?;
        let (dy, dx) = (Matrix::of(&dy)?, Matrix::of(&dx.as_view())?);
        for (first, dx) in dx.parts() {
            let dy = dy.rows_from(first, dx.rows as usize);
            let how = Launch {
                grid: [self.info.k.div_ceil(32) as u32, dx.rows, 1],
                block: [32, 16, 1],
                shared: 0,
                stream: cx.stream,
                overlap: false,
            };
            // SAFETY: as in `forward`.
            unsafe { self.engine.backward.launch(how, args![self.packed, dy, dx]) }
                .map_err(|e| self.shaped(e, "NF4 gradient", m))?;
        }
        Ok(())
    }
    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let (n, k) = (self.info.n, self.info.k);
        check_matrix(&out.as_view(), out.as_view().dtype(), n, k)?;
        q4_cuda::check_place(&out.as_view(), cx)?;
        let how = Launch {
            grid: [k.div_ceil(256) as u32, n.min(32768) as u32, n.div_ceil(32768) as u32],
            block: [256, 1, 1],
            shared: 0,
            stream: cx.stream,
            overlap: false,
        };
        // SAFETY: as in `forward`.
        unsafe { self.engine.dequantize.launch(how, args![self.packed, Matrix::of(&out.as_view())?]) }
            .map_err(|e| self.shaped(e, "NF4 decoding", n))
    }
}
