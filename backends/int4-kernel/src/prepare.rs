//! What int4 stores, as the kernels of `q4-codebook` take it.
use half::{bf16, f16};
use q4_codebook::{Codes, Scale, Stored};
use q4_core::formats::int4::ZERO;
use q4_core::{
    Code, DType, Error, ExecPath, Int4, LinearSpec, NibbleOrder, Part, PreparedWeight, Q4Schema, Q4Weight,
    Result, Segment, ThreadPool,
};
use q4_simd::Vectors;

/// Repacks `w`. Fails on scales that are not finite and on zero points that are no codes.
pub(crate) fn prepare(
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    vectors: Vectors,
    threads: &ThreadPool,
) -> Result<Box<dyn PreparedWeight>> {
    let Q4Schema::Int4(format) = w.schema else {
        return Err(Error::new(Code::SchemaInvalid, "weight").need("int4").have(w.schema.to_string()));
    };
    let pack = match (format.scales, format.symmetric) {
        (DType::F16, true) => packed::<f16, false>,
        (DType::F16, false) => packed::<f16, true>,
        (DType::BF16, true) => packed::<bf16, false>,
        (DType::BF16, false) => packed::<bf16, true>,
        (_, true) => packed::<f32, false>,
        (_, false) => packed::<f32, true>,
    };
    pack(&format, w, spec, path, vectors, threads)
}

fn packed<S: Scale + 'static, const ZEROS: bool>(
    format: &Int4,
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    vectors: Vectors,
    threads: &ThreadPool,
) -> Result<Box<dyn PreparedWeight>> {
    let stored = w.segments.iter().enumerate().map(|(i, s)| stored::<S, ZEROS>(i, s));
    let stored = stored.collect::<Result<Vec<_>>>()?;
    // A zero point is subtracted from what a code is worth; without one it is part of that.
    let zero = if ZEROS { 0 } else { i16::from(ZERO) };
    let values = std::array::from_fn(|code| f32::from(code as i16 - zero));
    let codes = Codes { values, order: NibbleOrder::LowFirst, block: format.group };
    let of = (crate::OWN.name, path);
    Ok(Box::new(q4_codebook::pack::<S, ZEROS>(of, &stored, &codes, spec, vectors, threads)?))
}

fn stored<'a, S: Scale, const ZEROS: bool>(i: usize, s: &Segment<'a>) -> Result<Stored<'a, S>> {
    let bytes = |part| s.data.need(part)?.as_bytes();
    let (codes, scales) = (bytes(Part::Codes)?, q4_codebook::scales::<S>(bytes(Part::Scales)?));
    let zeros = if ZEROS { bytes(Part::Zeros)? } else { &[] };
    let invalid = |what: &str, at: usize, need: &str, have: String| {
        Error::new(Code::ScaleInvalid, format!("segment {i}: {what} of group {at}")).need(need).have(have)
    };
    if let Some(at) = scales.iter().position(|s| !s.widen().is_finite()) {
        return Err(invalid("scale", at, "a finite value", scales[at].widen().to_string()));
    }
    if let Some(at) = zeros.iter().position(|zero| *zero > 15) {
        return Err(invalid("zero point", at, "0 to 15", zeros[at].to_string()));
    }
    Ok(Stored { rows: s.rows, codes, scales, zeros })
}
