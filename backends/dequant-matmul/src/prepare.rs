//! The dense copy: decoded by the exact decoder, rounded once, sixteen output rows interleaved so that a lane is a row.
use crate::probe::{can_prepare, is_exact};
use crate::simd::Isa;
use half::{bf16, f16};
use q4_core::{
    Code, DType, Error, ExecPath, LinearSpec, OpSet, PreparedInfo, Q4Weight, Result, RowDecoder, ThreadPool,
};
use std::sync::Mutex;

/// Output rows that are interleaved.
pub(crate) const LANES: usize = 16;

/// One cache line.
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
pub(crate) struct Line([u8; 64]);

/// A dense copy as the kernels read it.
pub(crate) struct Dense {
    pub info: PreparedInfo,
    pub isa: Isa,
    pub x: DType,
    pub y: DType,
    /// `[blocks, k, 16]` elements of y's type, every block starting on a line. Rows past n are zero.
    lines: Vec<Line>,
    /// `[blocks * 16]`: what a row of the copy is multiplied by, a power of two. 1 unless the copy is f16, whose range is
    /// small: its rows are stored with their largest element near 2^14.
    pub scales: Vec<f32>,
}

impl Dense {
    /// Blocks of 16 output rows.
    pub fn blocks(&self) -> usize {
        self.info.n.div_ceil(LANES)
    }
    /// The elements `[k, 16]` of one block; `T` is the type of y.
    #[inline(always)]
    pub fn block<T: bytemuck::Pod>(&self, b: usize) -> &[T] {
        let lines = lines_per_block(self.info.k, self.y);
        bytemuck::cast_slice(&self.lines[b * lines..][..lines])
    }
}

fn lines_per_block(k: usize, y: DType) -> usize {
    (k * LANES * y.size()).div_ceil(size_of::<Line>())
}

/// Decodes `w`. Fails on parts that contradict the schema, on a spec that `can_prepare` refuses and on a value that the
/// type of y cannot hold, so no infinity is ever made here.
pub(crate) fn prepare(
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    isa: Isa,
    threads: &ThreadPool,
) -> Result<Dense> {
    can_prepare(spec, path).map_err(|reasons| {
        let list: Vec<_> = reasons.iter().map(ToString::to_string).collect();
        Error::new(Code::Unsupported, "weight cannot be prepared").have(list.join("; "))
    })?;
    let decoder = RowDecoder::new(w)?;
    let (n, k) = (decoder.n(), decoder.k());
    if (n, k) != (spec.n(), spec.k) || w.schema != spec.schema {
        return Err(Error::new(Code::ShapeMismatch, "weight and spec differ")
            .need(format!("{} [{}, {}]", spec.schema, spec.n(), spec.k))
            .have(format!("{} [{n}, {k}]", w.schema)));
    }
    let blocks = n.div_ceil(LANES);
    let mut lines = vec![Line([0; 64]); blocks * lines_per_block(k, spec.y)];
    let mut scales = vec![1.0; blocks * LANES];
    let parts: Vec<_> =
        lines.chunks_mut(lines_per_block(k, spec.y)).zip(scales.chunks_mut(LANES)).map(Mutex::new).collect();
    let first_bad = Mutex::new(None::<usize>);
    threads.run(blocks, &|b| {
        let mut part = parts[b].lock().unwrap_or_else(|e| e.into_inner());
        let (lines, scales) = &mut *part;
        let mut values = vec![0.0; k];
        for row in b * LANES..n.min((b + 1) * LANES) {
            decoder.row(row, &mut values);
            if spec.y == DType::F16 {
                scales[row % LANES] = normalise(&mut values);
            }
            if !interleave(&values, row % LANES, spec.y, lines) {
                let mut bad = first_bad.lock().unwrap_or_else(|e| e.into_inner());
                *bad = Some(bad.map_or(row, |b| b.min(row)));
            }
        }
    });
    drop(parts);
    if let Some(row) = first_bad.into_inner().unwrap_or_else(|e| e.into_inner()) {
        return Err(Error::new(Code::ValueInvalid, format!("row {row} of the weight"))
            .need(format!("values that {} can hold", spec.y))
            .have("infinity or NaN")
            .fix("compute in float32, or check the scales of the checkpoint"));
    }
    let some = OpSet::FORWARD.with(OpSet::BACKWARD_INPUT);
    let info = PreparedInfo {
        backend: crate::NAME.into(),
        path,
        activations: spec.activations,
        n,
        k,
        resident_bytes: (size_of_val(&*lines) + size_of_val(&*scales)) as u64,
        ops: if is_exact(&spec.schema, spec.y) { OpSet::ALL } else { some },
    };
    Ok(Dense { info, isa, x: spec.x, y: spec.y, lines, scales })
}

/// Multiplies a row by the power of two that brings its largest element to [2^14, 2^15) and returns the inverse. A row
/// that f16 holds well already, from 2^14 to 65504, stays: what was f16 remains exact.
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

/// Writes one row into its lane; false when a value is not finite.
fn interleave(values: &[f32], lane: usize, dtype: DType, lines: &mut [Line]) -> bool {
    fn fill<T: bytemuck::Pod>(
        values: &[f32],
        lane: usize,
        lines: &mut [Line],
        round: impl Fn(f32) -> (T, bool),
    ) -> bool {
        let elements: &mut [T] = bytemuck::cast_slice_mut(lines);
        let mut is_finite = true;
        for (to, &v) in elements[lane..].iter_mut().step_by(LANES).zip(values) {
            let (rounded, fits) = round(v);
            *to = rounded;
            is_finite &= fits;
        }
        is_finite
    }
    match dtype {
        DType::F16 => fill(values, lane, lines, |v| (f16::from_f32(v), f16::from_f32(v).is_finite())),
        DType::BF16 => fill(values, lane, lines, |v| (bf16::from_f32(v), bf16::from_f32(v).is_finite())),
        _ => fill(values, lane, lines, |v| (v, v.is_finite())),
    }
}
