//! Operands of a product on the CPU: f32 rows in, strided rows of any io dtype out, both shared between
//! threads. Backends that compute in f32 all need this, and because nothing here allocates, they need not
//! either.
use crate::formats::{fp8::inputs, int8, nvfp4};
use crate::{
    Activations, Code, DType, Error, ExecContext, LinearSpec, Q4Weight, Reject, RejectCode, Result, Scratch,
    TensorView, TensorViewMut, ThreadPool, oracle,
};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::marker::PhantomData;
use std::sync::Mutex;

/// Rows `m` of a product, after checking that `input` is `[m, cols]` and `output` `[m, cols]`, each of the
/// columns and io dtype named with it.
///
/// # Errors
/// [`Code::ShapeMismatch`] for another shape or type, and for columns that are not adjacent.
pub fn check_product(
    input: (&TensorView<'_>, DType, usize),
    output: (&TensorView<'_>, DType, usize),
) -> Result<usize> {
    let (m, _, _) = input.0.as_matrix()?;
    check_matrix(input.0, input.1, m, input.2)?;
    check_matrix(output.0, output.1, m, output.2)?;
    Ok(m)
}

/// Checks that `view` is `dtype[rows, cols]` with adjacent columns and `dtype` an io dtype.
///
/// # Errors
/// [`Code::ShapeMismatch`] for anything else.
pub fn check_matrix(view: &TensorView<'_>, dtype: DType, rows: usize, cols: usize) -> Result<()> {
    let (r, c, _) = view.as_matrix()?;
    if (r, c, view.dtype()) == (rows, cols, dtype) && dtype.is_io() {
        return Ok(());
    }
    let kind = if dtype.is_io() { dtype.as_str() } else { "float32, float16 or bfloat16 " };
    Err(Error::new(Code::ShapeMismatch, "operand of a product")
        .need(format!("{kind}[{rows}, {cols}]"))
        .have(format!("{view:?}")))
}

/// The offsets of a call of `m` rows to `count` weights, in host memory.
///
/// # Errors
/// [`Code::ShapeMismatch`] for other than `count + 1` adjacent i32, and for offsets that fall, or do not
/// begin with 0 and end with `m`.
pub fn offsets<'a>(view: &TensorView<'a>, count: usize, m: usize) -> Result<&'a [i32]> {
    let all = view.as_slice::<i32>()?;
    let fits = all.len() == count + 1
        && all.first() == Some(&0)
        && all.last().is_some_and(|end| usize::try_from(*end) == Ok(m))
        && all.is_sorted();
    if fits {
        return Ok(all);
    }
    let shown: Vec<_> = all.iter().take(9).collect();
    Err(Error::new(Code::ShapeMismatch, "offsets of a grouped product")
        .need(format!("{} numbers from 0 to {m} that never fall", count + 1))
        .have(format!("{} of them: {shown:?}", all.len())))
}

/// Adds every reason in types, shapes and FP8 inputs why a product cannot be computed in f32, in blocks of 16
/// of k where there are any.
pub fn reject_operands(spec: &LinearSpec, reasons: &mut Vec<Reject>) {
    use RejectCode::{ActivationsUnsupported, DtypeUnsupported, ShapeUnsupported};
    let mut reject = |code, need: String, have: String| reasons.push(Reject::new(code, need, have));
    let stored = spec.schema.dense_dtype().map(|dtype| ("weight", dtype));
    for (name, dtype) in [("x", spec.x), ("y", spec.y)].into_iter().chain(stored) {
        if !dtype.is_io() {
            reject(DtypeUnsupported, "float32, float16 or bfloat16".into(), format!("{name} of {dtype}"));
        }
    }
    if spec.k == 0 || spec.segments.is_empty() || spec.segments.iter().any(|s| s.rows == 0) {
        let have = format!("[{}, {}]", spec.n(), spec.k);
        reject(ShapeUnsupported, "at least one row and one column".into(), have);
    }
    let have = || format!("k = {}", spec.k);
    let block = spec.schema.k_block();
    if spec.k % block != 0 {
        let need = format!("k % {block} == 0 for blocks of {}", spec.schema.id().name);
        reject(ShapeUnsupported, need, have());
    }
    let kinds = spec.schema.activations();
    if matches!(spec.activations, Activations::Fp8(_)) && !kinds.contains(&"fp8") {
        let need = format!("{} for {}", kinds.join(" or "), spec.schema.id().name);
        reject(ActivationsUnsupported, need, "fp8".into());
    }
    if spec.k % 16 != 0 && spec.activations != Activations::Native {
        reject(ShapeUnsupported, format!("k % 16 == 0 for {} activations", spec.activations), have());
    }
}

/// Whether `w` may be prepared for `spec`: `can_prepare` has no `reasons` against its operands, its parts fit
/// together and are those of `spec`, and the context is of its device.
///
/// # Errors
/// [`Code::Unsupported`] with all reasons, those of [`Q4Weight::validate`], [`Code::ShapeMismatch`] for
/// another weight or device.
pub fn agree(w: &Q4Weight<'_>, spec: &LinearSpec, reasons: &[Reject], cx: &ExecContext<'_>) -> Result<()> {
    let differs = |what: &str, need, have| Err(Error::new(Code::ShapeMismatch, what).need(need).have(have));
    if !reasons.is_empty() {
        let list: Vec<_> = reasons.iter().map(ToString::to_string).collect();
        return Err(Error::new(Code::Unsupported, "weight cannot be prepared").have(list.join("; ")));
    }
    w.validate()?;
    if (w.n(), w.k, w.schema) != (spec.n(), spec.k, spec.schema) {
        let told = |schema, n, k| format!("{schema} [{n}, {k}]");
        let (need, have) = (told(spec.schema, spec.n(), spec.k), told(w.schema, w.n(), w.k));
        return differs("weight and spec differ", need, have);
    }
    if spec.device != cx.device {
        return differs("context of another device", spec.device.to_string(), cx.device.to_string());
    }
    Ok(())
}

/// A matrix `[m, cols]` of f32 whose rows start `ld` elements apart.
pub struct Rows<'a> {
    start: *const f32,
    m: usize,
    cols: usize,
    ld: usize,
    _borrow: PhantomData<&'a [f32]>,
}

// SAFETY: a shared borrow of f32.
unsafe impl Sync for Rows<'_> {}

impl<'a> Rows<'a> {
    /// A view that holds f32 already.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for another type, device or alignment.
    pub fn of(x: TensorView<'a>) -> Result<Self> {
        let (m, cols, ld) = x.as_matrix()?;
        if m > 0 {
            x.row::<f32>(0)?;
        }
        // Of the view, not of its first row: every row is reached from here.
        let start = x.as_ptr().cast();
        Ok(Self { start, m, cols, ld, _borrow: PhantomData })
    }

    /// `x[m, k]` as the product sees it: widened to f32 and, but for native, quantised as the oracle does and
    /// decoded to f32. Borrows x itself where that is nothing to do, else takes [`activation_bytes`]
    /// of `scratch`.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for scratch that is too small, [`Code::NonFinite`] or [`Code::ValueInvalid`]
    /// where the format quantises and a value is NaN or infinite.
    pub fn activations(
        x: TensorView<'a>,
        format: &Activations,
        scratch: &mut Scratch<'a>,
        threads: &ThreadPool,
    ) -> Result<Self> {
        let (m, k, _) = x.as_matrix()?;
        if is_direct(x.dtype(), format) {
            return Self::of(x);
        }
        let wide = widened(x, k, scratch, threads)?;
        match format {
            Activations::Native => {}
            Activations::Int8 => {
                let (q, scales) = (scratch.take::<i8>(m * k)?, scratch.take::<f32>(m * (k / int8::BLOCK))?);
                let (q, scales) = (Disjoint::of(q, k), Disjoint::of(scales, k / int8::BLOCK));
                let wide = Disjoint::of(wide, k);
                each_row(m, threads, &|r| {
                    // SAFETY: one task per row.
                    let (wide, q, scales) = unsafe { (wide.row(r), q.row(r), scales.row(r)) };
                    int8::quantize_row(wide, q, scales)?;
                    for (i, (w, q)) in wide.iter_mut().zip(&*q).enumerate() {
                        *w = f32::from(*q) * scales[i / int8::BLOCK];
                    }
                    Ok(())
                })?;
            }
            Activations::Nvfp4(act) => {
                let global = oracle::act_global(act, wide, x.dtype())?;
                let quantizer = nvfp4::Quantizer { rule: act.rule, global, source: x.dtype() };
                let (codes, scales) =
                    (scratch.take::<u8>(m * (k / 2))?, scratch.take::<u8>(m * (k / nvfp4::BLOCK))?);
                let (codes, scales) = (Disjoint::of(codes, k / 2), Disjoint::of(scales, k / nvfp4::BLOCK));
                let wide = Disjoint::of(wide, k);
                each_row(m, threads, &|r| {
                    // SAFETY: one task per row.
                    let (wide, codes, scales) = unsafe { (wide.row(r), codes.row(r), scales.row(r)) };
                    quantizer.quantize_row(wide, codes, scales)?;
                    nvfp4::dequantize_row(codes, scales, global, wide);
                    Ok(())
                })?;
            }
            Activations::Fp8(how) => {
                let wide = Disjoint::of(wide, k);
                each_row(m, threads, &|r| {
                    // SAFETY: one task per row.
                    inputs::round_row(unsafe { wide.row(r) }, *how)
                })?;
            }
        }
        Self::of(TensorView::of(wide, &[m, k])?)
    }

    /// `x[m, cols]` widened to rows of `width >= cols`, the rest zero. Takes `4 m width` bytes of `scratch`.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for scratch that is too small.
    pub fn padded(
        x: TensorView<'_>,
        width: usize,
        scratch: &mut Scratch<'a>,
        threads: &ThreadPool,
    ) -> Result<Self> {
        let (m, _, _) = x.as_matrix()?;
        Self::of(TensorView::of(widened(x, width, scratch, threads)?, &[m, width])?)
    }

    /// Number of rows.
    pub fn m(&self) -> usize {
        self.m
    }
    /// Elements from one row to the next.
    pub fn ld(&self) -> usize {
        self.ld
    }
    /// Row `r`; panics from `m` on.
    #[inline(always)]
    pub fn row(&self, r: usize) -> &[f32] {
        assert!(r < self.m, "input row");
        // SAFETY: the view this was made of holds row r, and is borrowed for 'a.
        unsafe { std::slice::from_raw_parts(self.start.add(r * self.ld), self.cols) }
    }
}

/// Scratch of [`Rows::activations`] for `m` rows of `k` of type `x`.
pub fn activation_bytes(x: DType, format: &Activations, m: usize, k: usize) -> usize {
    match format {
        f if is_direct(x, f) => 0,
        Activations::Int8 => Scratch::bytes(&[4 * m * k, m * k, 4 * m * (k / int8::BLOCK)]),
        Activations::Nvfp4(_) => Scratch::bytes(&[4 * m * k, m * (k / 2), m * (k / nvfp4::BLOCK)]),
        Activations::Native | Activations::Fp8(_) => Scratch::bytes(&[4 * m * k]),
    }
}

/// A strided output whose elements are written once, each by one task.
pub struct RowsMut<'a> {
    start: *mut u8,
    ld: usize,
    rows: usize,
    cols: usize,
    dtype: DType,
    _borrow: PhantomData<&'a mut [u8]>,
}

// SAFETY: a unique borrow of bytes; `put` makes the caller keep tasks apart.
unsafe impl Sync for RowsMut<'_> {}

impl<'a> RowsMut<'a> {
    /// A host view of f32, f16 or bf16.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for another type, device or alignment.
    pub fn of(mut y: TensorViewMut<'a>) -> Result<Self> {
        let (rows, cols, ld) = y.as_view().as_matrix()?;
        let dtype = y.as_view().dtype();
        if rows > 0 {
            match dtype {
                DType::F16 => y.row_mut::<f16>(0).map(drop)?,
                DType::BF16 => y.row_mut::<bf16>(0).map(drop)?,
                _ => y.row_mut::<f32>(0).map(drop)?,
            }
        }
        Ok(Self { start: y.as_mut_ptr().cast(), ld, rows, cols, dtype, _borrow: PhantomData })
    }

    /// Rounds `values` once into row `r` from column `c` on; panics outside the view.
    ///
    /// # Safety
    /// No other task writes these elements.
    pub unsafe fn put(&self, r: usize, c: usize, values: &[f32]) {
        assert!(r < self.rows && c + values.len() <= self.cols, "output element");
        let (at, len) = (r * self.ld + c, values.len());
        // SAFETY: inside the view, which `of` found to be of this type, and not shared by the caller's
        // promise.
        unsafe {
            match self.dtype {
                DType::F16 => slice(self.start.cast::<f16>().add(at), len).convert_from_f32_slice(values),
                DType::BF16 => slice(self.start.cast::<bf16>().add(at), len).convert_from_f32_slice(values),
                _ => slice(self.start.cast::<f32>().add(at), len).copy_from_slice(values),
            }
        }
    }
}

impl RowsMut<'_> {
    /// As [`put`](Self::put) of `N` values, of which those past the last column are left out; panics outside
    /// the view.
    ///
    /// # Safety
    /// No other task writes these elements.
    #[inline]
    pub unsafe fn put_lanes<const N: usize>(&self, r: usize, c: usize, values: &[f32; N]) {
        if self.dtype == DType::F32 && r < self.rows && c + N <= self.cols {
            // One store, where a slice of any length would be a call.
            // SAFETY: inside the view, which is of this type, and not shared by the caller's promise.
            return unsafe {
                self.start.cast::<f32>().add(r * self.ld + c).cast::<[f32; N]>().write_unaligned(*values)
            };
        }
        let fits = N.min(self.cols.saturating_sub(c));
        // SAFETY: the caller's.
        unsafe { self.put(r, c, &values[..fits]) }
    }

    /// Where column `c` of row `r` is, for hints: it may lie outside the view.
    #[inline]
    pub fn place(&self, r: usize, c: usize) -> *const u8 {
        self.start.wrapping_add((r * self.ld + c) * self.dtype.size())
    }

    /// Adds `values` to row `r` of f32 from column `c` on; panics outside the view and for another type.
    ///
    /// # Safety
    /// No other task touches these elements.
    pub unsafe fn add(&self, r: usize, c: usize, values: &[f32]) {
        assert!(r < self.rows && c + values.len() <= self.cols && self.dtype == DType::F32, "output element");
        // SAFETY: inside the view, which is of this type, and not shared by the caller's promise.
        let to = unsafe { slice(self.start.cast::<f32>().add(r * self.ld + c), values.len()) };
        to.iter_mut().zip(values).for_each(|(to, v)| *to += v);
    }
}

/// Widens row `r` of a host matrix of f32, f16 or bf16. Exact.
///
/// # Errors
/// [`Code::ShapeMismatch`] for another type or device.
pub fn widen_row(x: &TensorView<'_>, r: usize, out: &mut [f32]) -> Result<()> {
    match x.dtype() {
        DType::F16 => x.row::<f16>(r)?.convert_to_f32_slice(out),
        DType::BF16 => x.row::<bf16>(r)?.convert_to_f32_slice(out),
        _ => out.copy_from_slice(x.row::<f32>(r)?),
    }
    Ok(())
}

fn is_direct(x: DType, format: &Activations) -> bool {
    x == DType::F32 && *format == Activations::Native
}

fn widened<'s>(
    x: TensorView<'_>,
    width: usize,
    scratch: &mut Scratch<'s>,
    threads: &ThreadPool,
) -> Result<&'s mut [f32]> {
    let (m, cols, _) = x.as_matrix()?;
    let wide = scratch.take::<f32>(m * width)?;
    let rows = Disjoint::of(wide, width);
    each_row(m, threads, &|r| {
        // SAFETY: one task per row.
        let (head, pad) = unsafe { rows.row(r) }.split_at_mut(cols);
        pad.fill(0.0);
        widen_row(&x, r, head)
    })?;
    Ok(wide)
}

/// Rows of a buffer, each written by one task.
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

/// Runs `body` on every row; of several failures, that of the first row is returned.
///
/// # Errors
/// Those of `body`.
pub fn each_row(m: usize, threads: &ThreadPool, body: &(dyn Fn(usize) -> Result<()> + Sync)) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ExecContext;
    use crate::selfcheck::IoBuffer;
    use crate::{ActGlobal, ActQuant, Fp8Inputs, Rule};

    #[test]
    fn activations_take_the_scratch_they_state() -> Result<()> {
        let (m, k, pool) = (3, 48, ThreadPool::new(2));
        let values: Vec<f32> = (0..m * k).map(|i| (i % 29) as f32 / 8.0 - 1.5).collect();
        for x in [DType::F32, DType::F16, DType::BF16] {
            let quantised = ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None };
            let fp8 = Activations::Fp8(Fp8Inputs::PerRow);
            for format in [Activations::Native, Activations::Int8, Activations::Nvfp4(quantised), fp8] {
                let mut bytes = vec![0xffu8; activation_bytes(x, &format, m, k)];
                let len = bytes.len();
                let workspace = Some(TensorViewMut::of(&mut bytes, &[len])?);
                let mut cx = ExecContext { workspace, ..ExecContext::cpu(&pool) };
                let buffer = IoBuffer::new(x, &values);
                let mut scratch = Scratch::of(&mut cx, len)?;
                let rows = Rows::activations(buffer.view(m, k)?, &format, &mut scratch, &pool)?;
                for (r, row) in values.chunks(k).enumerate() {
                    // A quantised value is off by at most half the widest step: a sixth of the block's amax,
                    // 2.
                    let limit = if format == Activations::Native { 0.0 } else { 2.0 / 6.0 };
                    assert!(rows.row(r).iter().zip(row).all(|(a, b)| (a - b).abs() <= limit), "{x} {format}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn padding_is_zero_and_gaps_stay() -> Result<()> {
        let pool = ThreadPool::new(2);
        let mut bytes = [0xffu8; 256];
        let mut cx = ExecContext::cpu(&pool);
        cx.workspace = Some(TensorViewMut::of(&mut bytes, &[256])?);
        let x = [1.0f32, 2.0, f32::NAN, 3.0, 4.0];
        let mut scratch = Scratch::of(&mut cx, 0)?;
        assert!(
            Rows::padded(TensorView::matrix(&x, 2, 2, 3)?, 16, &mut scratch, &pool).is_err(),
            "no scratch"
        );
        let mut scratch = Scratch::of(&mut cx, Scratch::bytes(&[2 * 16 * 4]))?;
        let rows = Rows::padded(TensorView::matrix(&x, 2, 2, 3)?, 16, &mut scratch, &pool)?;
        assert_eq!(
            (rows.row(0)[..3].to_vec(), rows.row(1)[..3].to_vec()),
            (vec![1.0, 2.0, 0.0], vec![3.0, 4.0, 0.0])
        );
        let mut y = [bf16::NEG_ONE; 5];
        let out = RowsMut::of(TensorViewMut::matrix(&mut y, 2, 2, 3)?)?;
        // SAFETY: one task.
        unsafe { out.put(1, 1, &[2.0f32.powi(9) + 1.0]) };
        assert_eq!(
            y.map(bf16::to_f32),
            [-1.0, -1.0, -1.0, -1.0, 512.0],
            "rounded to even, nothing else touched"
        );
        let mut y = [0f32; 9];
        let out = RowsMut::of(TensorViewMut::matrix(&mut y, 2, 3, 5)?)?;
        // SAFETY: one task.
        unsafe {
            out.put_lanes(0, 1, &[1.0, 2.0]);
            out.put_lanes(1, 1, &[3.0, 4.0, 5.0]);
        }
        assert_eq!(y, [0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 3.0, 4.0, 0.0], "a gap, and what has no column");
        Ok(())
    }

    #[test]
    fn operands_are_checked() -> Result<()> {
        let x = [0f32; 12];
        let (a, b) = (TensorView::of(&x, &[3, 4])?, TensorView::of(&x[..6], &[3, 2])?);
        assert_eq!(check_product((&a, DType::F32, 4), (&b, DType::F32, 2))?, 3);
        for wrong in [(&a, DType::F32, 2), (&b, DType::F16, 2), (&a, DType::F32, 3)] {
            assert!(check_product((&a, DType::F32, 4), wrong).is_err());
        }
        let codes = [0u8; 4];
        assert!(check_matrix(&TensorView::of(&codes, &[2, 2])?, DType::U8, 2, 2).is_err(), "no io dtype");
        Ok(())
    }
}
