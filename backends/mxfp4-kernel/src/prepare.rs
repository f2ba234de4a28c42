//! What MXFP4 stores, as the kernels of `q4-codebook` take it.
use q4_codebook::{Codes, E8m0, Packed, Stored};
use q4_core::formats::{e2m1, e8m0};
use q4_core::{
    Code, Error, ExecPath, LinearSpec, NibbleOrder, Part, Q4Schema, Q4Weight, Result, Segment, ThreadPool,
};
use q4_simd::Vectors;

/// Repacks `w`. Fails on a scale that is NaN.
pub(crate) fn prepare<'a>(
    w: &Q4Weight<'a>,
    spec: &LinearSpec,
    path: ExecPath,
    vectors: Vectors,
    threads: &ThreadPool,
) -> Result<Packed<E8m0>> {
    if !matches!(w.schema, Q4Schema::Mxfp4(_)) {
        return Err(Error::new(Code::SchemaInvalid, "weight").need("mxfp4").have(w.schema.to_string()));
    }
    let one = |(i, s): (usize, &Segment<'a>)| {
        let [codes, scales] = [Part::Codes, Part::Scales].map(|part| s.data.need(part)?.as_bytes());
        let (codes, scales) = (codes?, scales?);
        if let Some(at) = scales.iter().position(|s| *s == e8m0::NAN) {
            return Err(Error::new(Code::ScaleInvalid, format!("segment {i}: scale of block {at}"))
                .need("a power of two")
                .have("NaN"));
        }
        let scales = scales.iter().map(|s| E8m0(*s)).collect::<Vec<_>>().into();
        Ok(Stored { rows: s.rows, codes, scales, zeros: &[] })
    };
    let stored = w.segments.iter().enumerate().map(one).collect::<Result<Vec<_>>>()?;
    let codes = Codes { values: e2m1::VALUES, order: NibbleOrder::LowFirst, block: crate::probe::BLOCK };
    q4_codebook::pack((crate::NAME, path), &stored, &codes, spec, vectors, threads)
}
