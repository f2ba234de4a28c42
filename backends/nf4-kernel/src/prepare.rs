//! What NF4 stores, as the kernels of `q4-codebook` take it: a double-quantised absmax is decoded once, here.
use q4_codebook::{Flat, Place, Values};
use q4_core::formats::nf4::CODEBOOK;
use q4_core::{
    Absmax, Code, Error, ExecPath, LinearSpec, Nf4, Nf4Parts, PreparedWeight, Q4Schema, Q4Weight, Result,
    Segment,
};
use std::borrow::Cow;

/// Packs `w`. Fails on scales that are not finite.
pub(crate) fn prepare(
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    place: &Place<'_>,
) -> Result<Box<dyn PreparedWeight>> {
    let format = format(w)?;
    let stored = w.segments.iter().enumerate().map(|(i, s)| stored(i, &format, w.k, s));
    let stored = stored.collect::<Result<Vec<_>>>()?;
    place.pack((crate::OWN.name, path), &stored, Values::of(CODEBOOK), spec)
}

fn stored<'a>(i: usize, format: &Nf4, k: usize, s: &Segment<'a>) -> Result<Flat<'a, f32>> {
    let Nf4Parts { codes, absmax } = parts(i, format, s)?;
    Ok(Flat {
        rows: s.rows,
        k,
        codes: codes.as_bytes()?,
        order: format.nibble_order,
        block: format.block,
        scales: finite_absmax(i, &absmax)?,
        zeros: &[],
    })
}

/// The encoding of a weight that is NF4.
fn format(w: &Q4Weight<'_>) -> Result<Nf4> {
    match w.schema {
        Q4Schema::Nf4(format) => Ok(format),
        other => Err(Error::new(Code::SchemaInvalid, "weight").need("nf4").have(other.to_string())),
    }
}

/// The parts of segment `i`.
fn parts<'a>(i: usize, format: &Nf4, s: &Segment<'a>) -> Result<Nf4Parts<'a>> {
    let lacks = || Error::new(Code::SchemaInvalid, format!("segment {i}")).need("the parts of nf4");
    format.of(&s.data).ok_or_else(lacks)
}

/// Scales of segment `i`, decoded; none is NaN or infinite.
fn finite_absmax<'a>(i: usize, absmax: &Absmax<'a>) -> Result<Cow<'a, [f32]>> {
    let absmax = absmax.to_f32()?;
    match absmax.iter().position(|a| !a.is_finite()) {
        None => Ok(absmax),
        Some(at) => Err(Error::new(Code::ScaleInvalid, format!("segment {i}: absmax of block {at}"))
            .need("a finite value")
            .have(absmax[at].to_string())),
    }
}
