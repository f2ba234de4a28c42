//! The dense copy: decoded by the exact decoder, each value rounded once to the type of y.
use crate::probe::is_exact;
use bytemuck::Zeroable;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use q4_core::{
    Code, DType, Error, ExecPath, LinearSpec, OpSet, PreparedInfo, Q4Weight, Result, RowDecoder, ThreadPool,
};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A dense copy as the products read it.
pub(crate) struct Dense {
    pub info: PreparedInfo,
    pub x: DType,
    pub y: DType,
    /// Products are plain loops.
    pub is_plain: bool,
    values: Values,
}

/// `[n, k]`, row-major, in the type of y.
enum Values {
    F32(Vec<f32>),
    BF16(Vec<bf16>),
    /// The range of f16 is small: a row is stored with its largest element near 2^14 and multiplied by its
    /// scale, a power of two, when it is widened.
    F16(Vec<f16>, Vec<f32>),
}

/// Decodes `w`. Fails on a value that the type of y cannot hold, so no infinity is ever made here.
pub(crate) fn decode(
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    threads: &ThreadPool,
) -> Result<Dense> {
    let decoder = RowDecoder::new(w)?;
    let (n, k) = (decoder.n(), decoder.k());
    let values = Values::of(&decoder, spec.y, threads).map_err(|row| {
        Error::new(Code::ValueInvalid, format!("row {row} of the weight"))
            .need(format!("values that {} can hold", spec.y))
            .have("infinity or NaN")
            .fix("compute in float32, or check the scales of the checkpoint")
    })?;
    let some = OpSet::FORWARD.with(OpSet::BACKWARD_INPUT);
    let info = PreparedInfo {
        backend: crate::NAME.into(),
        path,
        activations: spec.activations,
        n,
        k,
        resident_bytes: values.bytes() as u64,
        ops: if is_exact(&spec.schema, spec.y) { OpSet::ALL } else { some },
    };
    Ok(Dense { info, x: spec.x, y: spec.y, is_plain: false, values })
}

impl Dense {
    /// The same with products in plain loops, or by `gemm`.
    pub fn plain(self, is_plain: bool) -> Self {
        Self { is_plain, ..self }
    }

    /// The copy as bytes, row-major.
    pub fn bytes(&self) -> &[u8] {
        match &self.values {
            Values::F32(v) => bytemuck::cast_slice(v),
            Values::BF16(v) => bytemuck::cast_slice(v),
            Values::F16(v, _) => bytemuck::cast_slice(v),
        }
    }

    /// What rows are multiplied with, where they are.
    pub fn scales(&self) -> &[f32] {
        match &self.values {
            Values::F16(_, scales) => scales,
            _ => &[],
        }
    }

    /// The part `[rows, columns]` of the copy in f32, row-major, and its leading stride: borrowed where the
    /// copy is f32, else widened to `panel`.
    pub fn part<'a>(
        &'a self,
        rows: Range<usize>,
        columns: Range<usize>,
        panel: &'a mut [f32],
    ) -> (&'a [f32], usize) {
        let (k, width) = (self.info.k, columns.len());
        if let Values::F32(values) = &self.values {
            return (&values[rows.start * k + columns.start..(rows.end - 1) * k + columns.end], k);
        }
        let panel = &mut panel[..rows.len() * width];
        for (row, out) in rows.zip(panel.chunks_mut(width)) {
            self.widen(row, columns.clone(), out);
        }
        (panel, width)
    }

    /// Part of one row in f32, exactly.
    pub fn widen(&self, row: usize, columns: Range<usize>, out: &mut [f32]) {
        let at = row * self.info.k + columns.start..row * self.info.k + columns.end;
        match &self.values {
            Values::F32(values) => out.copy_from_slice(&values[at]),
            Values::BF16(values) => values[at].convert_to_f32_slice(out),
            Values::F16(values, scales) => {
                values[at].convert_to_f32_slice(out);
                out.iter_mut().for_each(|v| *v *= scales[row]);
            }
        }
    }
}

impl Values {
    /// Decodes every row; fails with the first that holds a value which `y` cannot.
    fn of(decoder: &RowDecoder<'_>, y: DType, threads: &ThreadPool) -> Result<Self, usize> {
        Ok(match y {
            DType::F16 => {
                let (values, scales) = decoded(decoder, threads, &|r, wide, out: &mut [f16]| {
                    decoder.row(r, wide);
                    let scale = normalise(wide);
                    out.convert_from_f32_slice(wide);
                    out.iter().all(|v| v.is_finite()).then_some(scale)
                })?;
                Self::F16(values, scales)
            }
            DType::BF16 => {
                let (values, _) = decoded(decoder, threads, &|r, wide, out: &mut [bf16]| {
                    decoder.row(r, wide);
                    out.convert_from_f32_slice(wide);
                    out.iter().all(|v| v.is_finite()).then_some(1.0)
                })?;
                Self::BF16(values)
            }
            _ => {
                let (values, _) = decoded(decoder, threads, &|r, _, out: &mut [f32]| {
                    decoder.row(r, out);
                    out.iter().all(|v| v.is_finite()).then_some(1.0)
                })?;
                Self::F32(values)
            }
        })
    }

    fn bytes(&self) -> usize {
        match self {
            Self::F32(values) => size_of_val(&**values),
            Self::BF16(values) => size_of_val(&**values),
            Self::F16(values, scales) => size_of_val(&**values) + size_of_val(&**scales),
        }
    }
}

/// Decodes one row, with room for it in f32, and returns its scale; `None` when a value does not fit.
type Round<'a, T> = &'a (dyn Fn(usize, &mut [f32], &mut [T]) -> Option<f32> + Sync);

fn decoded<T: Zeroable + Send>(
    decoder: &RowDecoder<'_>,
    threads: &ThreadPool,
    round: Round<'_, T>,
) -> Result<(Vec<T>, Vec<f32>), usize> {
    let (n, k) = (decoder.n(), decoder.k());
    // Not touched before the threads decode into them: they share the cost.
    let (mut values, mut scales) = (bytemuck::zeroed_vec::<T>(n * k), vec![1.0; n]);
    let rows: Vec<_> = values.chunks_mut(k).zip(&mut scales).map(Mutex::new).collect();
    let first_bad = AtomicUsize::new(n);
    threads.split(n, 16, &|start, end| {
        let mut wide = vec![0.0; k];
        for r in start..end {
            let mut row = rows[r].lock().unwrap_or_else(|e| e.into_inner());
            let (values, scale) = &mut *row;
            match round(r, &mut wide, values) {
                Some(s) => **scale = s,
                None => drop(first_bad.fetch_min(r, Ordering::Relaxed)),
            }
        }
    });
    drop(rows);
    let bad = first_bad.into_inner();
    if bad < n { Err(bad) } else { Ok((values, scales)) }
}

/// Multiplies a row by the power of two that brings its largest element to [2^14, 2^15) and returns the
/// inverse. A row that f16 holds well already, from 2^14 to 65504, stays: what was f16 remains exact.
fn normalise(values: &mut [f32]) -> f32 {
    let amax = values.iter().fold(0f32, |a, v| a.max(v.abs()));
    let exponent = (amax.to_bits() >> 23) as i32 - 127;
    if amax == 0.0 || !amax.is_finite() || (exponent >= 14 && amax <= f16::MAX.to_f32()) {
        return 1.0;
    }
    let shift = (14 - exponent).min(120);
    let power = |e: i32| f32::from_bits(((e + 127) as u32) << 23);
    values.iter_mut().for_each(|v| *v *= power(shift));
    power(-shift)
}
