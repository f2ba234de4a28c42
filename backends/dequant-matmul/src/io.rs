//! Operands as kernels want them: f32 rows in, strided rows of any io dtype out, both shared between threads.
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use q4_core::formats::{int8, nvfp4};
use q4_core::{
    Activations, Code, DType, Error, Result, Scratch, TensorView, TensorViewMut, ThreadPool, oracle,
};
use std::marker::PhantomData;
use std::sync::Mutex;

/// `m` f32 rows, `ld` elements apart.
pub(crate) struct Rows<'a> {
    pub m: usize,
    start: *const f32,
    ld: usize,
    _borrow: PhantomData<&'a [f32]>,
}

// SAFETY: a shared borrow of f32.
unsafe impl Sync for Rows<'_> {}

impl<'a> Rows<'a> {
    /// A view that holds f32 already.
    pub fn of(x: TensorView<'a>) -> Result<Self> {
        let (m, _, ld) = x.as_matrix()?;
        let start = if m == 0 { std::ptr::null() } else { x.row::<f32>(0)?.as_ptr() };
        Ok(Self { m, start, ld, _borrow: PhantomData })
    }
    /// First element of row `r < m`.
    pub fn row(&self, r: usize) -> *const f32 {
        debug_assert!(r < self.m);
        self.start.wrapping_add(r * self.ld)
    }
}

/// A strided output whose elements are written once, each by one task.
pub(crate) struct Out<'a> {
    start: *mut u8,
    ld: usize,
    rows: usize,
    cols: usize,
    dtype: DType,
    _borrow: PhantomData<&'a mut [u8]>,
}

// SAFETY: a unique borrow of bytes; `put` makes the caller keep tasks apart.
unsafe impl Sync for Out<'_> {}

impl<'a> Out<'a> {
    /// Checks type and alignment once.
    pub fn of(mut y: TensorViewMut<'a>) -> Result<Self> {
        let (rows, cols, ld) = y.as_view().as_matrix()?;
        let dtype = y.as_view().dtype();
        if rows > 0 {
            match dtype {
                DType::F32 => y.as_view().row::<f32>(0).map(drop)?,
                DType::F16 => y.as_view().row::<f16>(0).map(drop)?,
                DType::BF16 => y.as_view().row::<bf16>(0).map(drop)?,
                other => {
                    return Err(Error::new(Code::TensorType, "output")
                        .need("float32, float16 or bfloat16")
                        .have(other.to_string()));
                }
            }
        }
        Ok(Self { start: y.as_mut_ptr().cast(), ld, rows, cols, dtype, _borrow: PhantomData })
    }

    /// Rounds `values` once into row `r` from column `c` on.
    ///
    /// # Safety
    /// No other task writes these elements.
    pub unsafe fn put(&self, r: usize, c: usize, values: &[f32]) {
        assert!(r < self.rows && c + values.len() <= self.cols, "output element");
        let at = r * self.ld + c;
        // SAFETY: inside the view, which `of` found to be of this type, and not shared by the caller's promise.
        unsafe {
            match self.dtype {
                DType::F32 => slice(self.start.cast::<f32>().add(at), values.len()).copy_from_slice(values),
                DType::F16 => {
                    slice(self.start.cast::<f16>().add(at), values.len()).convert_from_f32_slice(values)
                }
                _ => slice(self.start.cast::<bf16>().add(at), values.len()).convert_from_f32_slice(values),
            }
        }
    }
}

/// Rows of a scratch buffer, each written by one task.
struct Disjoint<'a, T> {
    start: *mut T,
    rows: usize,
    width: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: a unique borrow; `row` makes the caller keep tasks apart.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    fn of(buffer: &'a mut [T], width: usize) -> Self {
        Self { start: buffer.as_mut_ptr(), rows: buffer.len() / width, width, _borrow: PhantomData }
    }
    /// # Safety
    /// One task per row.
    #[allow(clippy::mut_from_ref)]
    unsafe fn row(&self, r: usize) -> &mut [T] {
        assert!(r < self.rows, "scratch row");
        // SAFETY: inside the buffer, and unique by the caller's promise.
        unsafe { slice(self.start.add(r * self.width), self.width) }
    }
}

/// `x[m, k]` as the product sees it: widened to f32 and, for int8 and nvfp4, quantised as the oracle does and decoded to
/// f32. Borrows x itself where that is nothing to do, else writes to scratch.
pub(crate) fn activations<'s>(
    x: TensorView<'s>,
    format: &Activations,
    scratch: &mut Scratch<'s>,
    threads: &ThreadPool,
) -> Result<Rows<'s>> {
    let (m, k, _) = x.as_matrix()?;
    if is_direct(x.dtype(), format) {
        return Rows::of(x);
    }
    let wide = scratch.take::<f32>(m * k)?;
    {
        let wide = Disjoint::of(wide, k);
        // SAFETY: one task per row.
        each_row(m, threads, &|r| widen(x, r, unsafe { wide.row(r) }))?;
    }
    match format {
        Activations::Native => {}
        Activations::Int8 => {
            let (q, scales) = (scratch.take::<i8>(m * k)?, scratch.take::<f32>(m * (k / 16))?);
            let (wide, q, scales) = (Disjoint::of(wide, k), Disjoint::of(q, k), Disjoint::of(scales, k / 16));
            each_row(m, threads, &|r| {
                // SAFETY: one task per row.
                let (wide, q, scales) = unsafe { (wide.row(r), q.row(r), scales.row(r)) };
                int8::quantize_row(wide, q, scales)?;
                for (i, (w, q)) in wide.iter_mut().zip(&*q).enumerate() {
                    *w = f32::from(*q) * scales[i / 16];
                }
                Ok(())
            })?;
        }
        Activations::Nvfp4(act) => {
            let global = oracle::act_global(act, wide, x.dtype())?;
            let quantizer = nvfp4::Quantizer { rule: act.rule, global, source: x.dtype() };
            let (codes, scales) = (scratch.take::<u8>(m * (k / 2))?, scratch.take::<u8>(m * (k / 16))?);
            let (wide, codes, scales) =
                (Disjoint::of(wide, k), Disjoint::of(codes, k / 2), Disjoint::of(scales, k / 16));
            each_row(m, threads, &|r| {
                // SAFETY: one task per row.
                let (wide, codes, scales) = unsafe { (wide.row(r), codes.row(r), scales.row(r)) };
                quantizer.quantize_row(wide, codes, scales)?;
                nvfp4::dequantize_row(codes, scales, global, wide);
                Ok(())
            })?;
        }
    }
    Ok(Rows { m, start: wide.as_ptr(), ld: k, _borrow: PhantomData })
}

/// `dy[m, n]` widened and multiplied by `scales`, which may be longer: the rest is zero.
pub(crate) fn padded<'s>(
    dy: TensorView<'_>,
    scales: &[f32],
    scratch: &mut Scratch<'s>,
    threads: &ThreadPool,
) -> Result<Rows<'s>> {
    let (m, n, _) = dy.as_matrix()?;
    let width = scales.len();
    let wide = scratch.take::<f32>(m * width)?;
    let rows = Disjoint::of(wide, width);
    each_row(m, threads, &|r| {
        // SAFETY: one task per row.
        let (head, pad) = unsafe { rows.row(r) }.split_at_mut(n);
        pad.fill(0.0);
        widen(dy, r, head)?;
        head.iter_mut().zip(scales).for_each(|(v, scale)| *v *= scale);
        Ok(())
    })?;
    Ok(Rows { m, start: rows.start, ld: width, _borrow: PhantomData })
}

/// Scratch of [`activations`] for `m` rows of `k`.
pub(crate) fn activation_bytes(x: DType, format: &Activations, m: usize, k: usize) -> usize {
    match format {
        f if is_direct(x, f) => 0,
        Activations::Int8 => Scratch::bytes(&[4 * m * k, m * k, 4 * m * (k / 16)]),
        Activations::Nvfp4(_) => Scratch::bytes(&[4 * m * k, m * (k / 2), m * (k / 16)]),
        Activations::Native => Scratch::bytes(&[4 * m * k]),
    }
}

fn is_direct(x: DType, format: &Activations) -> bool {
    x == DType::F32 && *format == Activations::Native
}

fn widen(x: TensorView<'_>, r: usize, out: &mut [f32]) -> Result<()> {
    match x.dtype() {
        DType::F16 => x.row::<f16>(r)?.convert_to_f32_slice(out),
        DType::BF16 => x.row::<bf16>(r)?.convert_to_f32_slice(out),
        _ => out.copy_from_slice(x.row::<f32>(r)?),
    }
    Ok(())
}

/// Runs `body` on every row; of several failures, that of the first row is returned.
fn each_row(m: usize, threads: &ThreadPool, body: &(dyn Fn(usize) -> Result<()> + Sync)) -> Result<()> {
    let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    threads.split(m, 1, &|start, end| {
        for r in start..end {
            if let Err(e) = body(r) {
                let mut first = failed.lock().unwrap_or_else(|e| e.into_inner());
                if first.as_ref().is_none_or(|(row, _)| r < *row) {
                    *first = Some((r, e));
                }
                return;
            }
        }
    });
    failed.into_inner().unwrap_or_else(|e| e.into_inner()).map_or(Ok(()), |(_, e)| Err(e))
}

/// # Safety
/// `len` elements at `p` are valid and unique for `'a`.
unsafe fn slice<'a, T>(p: *mut T, len: usize) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(p, len) }
}
