//! The dense product on a CUDA device: the copy that the CPU would make, there, and cuBLASLt in f32. Products
//! with quantised inputs, which are f32 values, and gradients run on a plain kernel.
use crate::prepare::{self, Dense};
use q4_core::rows::check_matrix;
use q4_core::{
    Activations, Code, DType, Error, ExecContext, ExecPath, LinearSpec, OpSet, PreparedInfo, PreparedWeight,
    Q4Weight, Result, TensorView, TensorViewMut,
};
use q4_cuda::{
    Blas, Buffer, DenseProduct, Gpu, Kernel, Kernels, Launch, Matrix, RowKernels, Source, mirror, number,
    over_rows,
};
use std::sync::Arc;

pub(crate) const SOURCE: Source =
    Source { name: "dense", text: include_str!("../cuda/dense.cu"), files: &[] };

/// The kernels on one device.
pub(crate) struct Engine {
    gpu: Arc<Gpu>,
    blas: Arc<Blas>,
    rows: RowKernels,
    copy_in: Kernel<In>,
    copy_out: Kernel<Out>,
    decode: Kernel<Decode>,
    forward: Kernel<Forward>,
    backward: Kernel<Backward>,
}

impl Engine {
    /// Opens cuBLASLt, compiles or finds the kernels.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let blas = Blas::open(gpu)?;
        let all = Kernels::load(gpu, &SOURCE, &[])?;
        Ok(Self {
            gpu: gpu.clone(),
            blas,
            rows: RowKernels::load(gpu)?,
            copy_in: all.get("dense_in")?,
            copy_out: all.get("dense_out")?,
            decode: all.get("dense_decode")?,
            forward: all.get("dense_forward")?,
            backward: all.get("dense_backward")?,
        })
    }
}

mirror! {
    /// `Dense` of `dense.cu`.
    struct Packed { values: u64, ld: u64, scales: u64, n: u32, k: u32, dtype: u32, unused: u32 }

    struct In { x: Matrix, to: Matrix }
    struct Out { sums: Matrix, scales: u64, y: Matrix }
    struct Decode { w: Packed, out: Matrix }
    struct Forward { w: Packed, x: Matrix, y: Matrix }
    struct Backward { w: Packed, dy: Matrix, dx: Matrix }
}

/// A dense copy on a device.
pub(crate) struct OnDevice {
    engine: Arc<Engine>,
    info: PreparedInfo,
    x: DType,
    y: DType,
    packed: Packed,
    product: DenseProduct,
    _memory: Buffer,
}

/// Columns the copy is padded to, with zeros: what cuBLASLt wants of its alignment.
const PAD: usize = 16;

/// Decodes as on the CPU and copies the result; waits.
pub(crate) fn prepare(
    engine: &Arc<Engine>,
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    cx: &ExecContext<'_>,
) -> Result<OnDevice> {
    let dense: Dense = prepare::decode(w, spec, path, cx.threads)?;
    let (n, k) = (dense.info.n, dense.info.k);
    let (ld, size) = (k.next_multiple_of(PAD), spec.y.size());
    let scales_at = (n * ld * size).next_multiple_of(256);
    let scales = dense.scales();
    let memory = Buffer::lasting(&engine.gpu, scales_at + 4 * scales.len())?;
    let bytes = dense.bytes();
    if ld == k {
        memory.upload(0, bytes)?;
    } else {
        let mut padded = vec![0u8; n * ld * size];
        for (to, from) in padded.chunks_mut(ld * size).zip(bytes.chunks(k * size)) {
            to[..k * size].copy_from_slice(from);
        }
        memory.upload(0, &padded)?;
    }
    memory.upload(scales_at, scales)?;
    let packed = Packed {
        values: memory.ptr(),
        ld: ld as u64,
        scales: if scales.is_empty() { 0 } else { memory.ptr() + scales_at as u64 },
        n: n as u32,
        k: k as u32,
        dtype: number(spec.y),
        unused: 0,
    };
    let info = PreparedInfo { resident_bytes: memory.len() as u64, ..dense.info };
    let product = DenseProduct::new(&engine.blas, spec.y, n, ld);
    Ok(OnDevice { engine: engine.clone(), info, x: spec.x, y: spec.y, packed, product, _memory: memory })
}

/// Pieces of the workspace of a product by cuBLASLt.
struct Pieces {
    sums: usize,
    blas: usize,
    bytes: usize,
}

impl OnDevice {
    fn pieces(&self, m: usize) -> Pieces {
        let sums = (m * self.packed.ld as usize * self.y.size()).next_multiple_of(256);
        let blas = sums + (m * self.info.n * 4).next_multiple_of(256);
        Pieces { sums, blas, bytes: blas + DenseProduct::scratch() }
    }

    /// cuBLASLt takes operands of one type.
    fn by_blas(&self) -> bool {
        self.info.activations == Activations::Native && self.x == self.y
    }

    /// x and y pass through the workspace, so that addresses and strides decide nothing.
    unsafe fn dense(&self, x: Matrix, y: Matrix, scratch: u64, stream: usize) -> Result<()> {
        let (e, ld) = (&*self.engine, self.packed.ld as usize);
        let (m, n) = (x.rows as usize, self.info.n);
        let at = self.pieces(m);
        let to = Matrix::new(scratch, self.y, m, ld, ld);
        let sums = Matrix::new(scratch + at.sums as u64, DType::F32, m, n, n);
        // SAFETY: by contract; the pieces of the workspace do not overlap.
        unsafe {
            for (first, to) in to.parts() {
                let x = x.rows_from(first, to.rows as usize);
                e.copy_in.launch(plane(ld, to.rows, stream), In { x, to })?;
            }
            self.product.run(self.packed.values, to.data, sums.data, m, scratch + at.blas as u64, stream)?;
            for (first, y) in y.parts() {
                let sums = sums.rows_from(first, y.rows as usize);
                let args = Out { sums, scales: self.packed.scales, y };
                e.copy_out.launch(plane(n, y.rows, stream), args)?;
            }
        }
        Ok(())
    }

    fn shaped(&self, e: Error, what: &str, m: usize) -> Error {
        e.within(format!("{what} of [{m}, {}] by [{}, {}]", self.info.k, self.info.n, self.info.k))
    }
}

fn plane(columns: usize, rows: u32, stream: usize) -> Launch {
    Launch::new([columns.div_ceil(256), rows as usize, 1], [256, 1, 1], stream)
}

impl PreparedWeight for OnDevice {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }
    fn workspace(&self, m: usize) -> usize {
        if self.by_blas() {
            self.pieces(m).bytes
        } else {
            RowKernels::rounded_bytes(&self.info.activations, m, self.info.k)
        }
    }
    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let m = q4_cuda::check_call((&x, self.x, self.info.k), (&y.as_view(), self.y, self.info.n), cx)?;
        let scratch = q4_cuda::scratch(cx, self.workspace(m))?;
        let (e, stream) = (&*self.engine, cx.stream);
        // SAFETY: the views are of this device and have the shapes of the copy; the scratch has the size
        // asked for.
        let run = || unsafe {
            let (x, y) = (Matrix::of(&x)?, Matrix::of(&y.as_view())?);
            if self.by_blas() {
                return self.dense(x, y, scratch, stream);
            }
            let x = e.rows.rounded(x, &self.info.activations, self.x, scratch, stream)?;
            for (first, y) in y.parts() {
                let x = x.rows_from(first, y.rows as usize);
                let grid = [self.info.n.div_ceil(8), (y.rows as usize).div_ceil(4), 1];
                let how = Launch::new(grid, [32, 8, 1], stream);
                e.forward.launch(how, Forward { w: self.packed, x, y })?;
            }
            Ok(())
        };
        run().map_err(|e| self.shaped(e, "dense product", m))
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
            let grid = [self.info.k.div_ceil(32), dx.rows as usize, 1];
            let how = Launch::new(grid, [32, 16, 1], cx.stream);
            // SAFETY: as in `forward`.
            unsafe { self.engine.backward.launch(how, Backward { w: self.packed, dy, dx }) }
                .map_err(|e| self.shaped(e, "dense gradient", m))?;
        }
        Ok(())
    }
    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        if !self.info.ops.contains(OpSet::DEQUANTIZE) {
            return Err(Error::new(Code::Unsupported, "dequantize")
                .need("a copy that holds the decoded values exactly: y of float32")
                .have(format!("a copy in {}", self.y))
                .fix("prepare the weight with y of float32"));
        }
        let (n, k) = (self.info.n, self.info.k);
        check_matrix(&out.as_view(), out.as_view().dtype(), n, k)?;
        q4_cuda::check_place(&out.as_view(), cx)?;
        let how = Launch::new(over_rows(k.div_ceil(256), n), [256, 1, 1], cx.stream);
        let args = Decode { w: self.packed, out: Matrix::of(&out.as_view())? };
        // SAFETY: as in `forward`.
        unsafe { self.engine.decode.launch(how, args) }.map_err(|e| self.shaped(e, "decoding", n))
    }
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    SOURCE.takes::<In>("dense_in")?;
    SOURCE.takes::<Out>("dense_out")?;
    SOURCE.takes::<Decode>("dense_decode")?;
    SOURCE.takes::<Forward>("dense_forward")?;
    SOURCE.takes::<Backward>("dense_backward")
}
