//! What MXFP4 stores, as the kernels of `q4-codebook` take it.
use crate::OWN;
use q4_codebook::{E8m0, Flat, Place, Values};
use q4_core::formats::{e2m1, e8m0, mxfp4};
use q4_core::{
    Code, Error, ExecPath, LinearSpec, NibbleOrder, Part, PreparedWeight, Q4Schema, Q4Weight, Result, Segment,
};

/// Packs `w`. Fails on a scale that is NaN.
pub(crate) fn prepare(
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    place: &Place<'_>,
) -> Result<Box<dyn PreparedWeight>> {
    if !matches!(w.schema, Q4Schema::Mxfp4(_)) {
        return Err(Error::new(Code::SchemaInvalid, "weight").need("mxfp4").have(w.schema.to_string()));
    }
    let stored = w.segments.iter().enumerate().map(|(i, s)| stored(i, w.k, s)).collect::<Result<Vec<_>>>()?;
    place.pack((OWN.name, path), &stored, Values::of(e2m1::VALUES), spec)
}

fn stored<'a>(i: usize, k: usize, s: &Segment<'a>) -> Result<Flat<'a, E8m0>> {
    let [codes, scales] = [Part::Codes, Part::Scales].map(|part| s.data.need(part)?.as_bytes());
    let (codes, scales) = (codes?, scales?);
    if let Some(at) = scales.iter().position(|s| *s == e8m0::NAN) {
        return Err(Error::new(Code::ScaleInvalid, format!("segment {i}: scale of block {at}"))
            .need("a power of two")
            .have("NaN"));
    }
    let scales = scales.iter().map(|s| E8m0(*s)).collect::<Vec<_>>().into();
    let (order, block) = (NibbleOrder::LowFirst, mxfp4::BLOCK as u32);
    Ok(Flat { rows: s.rows, k, codes, order, block, scales, zeros: &[] })
}
