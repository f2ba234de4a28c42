//! What int4 stores, as the kernels of `q4-codebook` take it.
use half::{bf16, f16};
use q4_codebook::{Flat, FlatWithBiases, Place, Scale, Values};
use q4_core::formats::int4::{ZERO, Zeros};
use q4_core::{
    Code, DType, Error, ExecPath, Int4, LinearSpec, NibbleOrder, Part, PreparedWeight, Q4Schema, Q4Weight,
    Result, Segment,
};

/// Packs `w`. Fails on scales and biases that are not finite and on zero points that are no codes.
pub(crate) fn prepare(
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    place: &Place<'_>,
) -> Result<Box<dyn PreparedWeight>> {
    let Q4Schema::Int4(format) = w.schema else {
        return Err(Error::new(Code::SchemaInvalid, "weight").need("int4").have(w.schema.to_string()));
    };
    let pack = match format.scales {
        DType::F16 => packed::<f16>,
        DType::BF16 => packed::<bf16>,
        _ => packed::<f32>,
    };
    pack(&format, w, spec, path, place)
}

fn packed<S: Scale>(
    format: &Int4,
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    place: &Place<'_>,
) -> Result<Box<dyn PreparedWeight>> {
    let stored = w.segments.iter().enumerate().map(|(i, s)| stored::<S>(i, format, w.k, s));
    let stored = stored.collect::<Result<Vec<_>>>()?;
    // A zero point is subtracted from what a code is worth; without one it is part of that.
    let values = Values::numbers(0, if format.zeros == Zeros::Middle { ZERO } else { 0 });
    let of = (crate::OWN.name, path);
    if format.zeros != Zeros::Biases {
        return place.pack(of, &stored, values, spec);
    }
    let with_biases = stored.into_iter().zip(w.segments).enumerate().map(|(i, (flat, s))| {
        let biases = q4_codebook::scales::<S>(s.data.need(Part::Zeros)?.as_bytes()?);
        match biases.iter().position(|bias| !bias.widen().is_finite()) {
            Some(at) => Err(invalid(i, "bias", at, "a finite value", biases[at].widen().to_string())),
            None => Ok(FlatWithBiases { flat, biases }),
        }
    });
    let stored = with_biases.collect::<Result<Vec<_>>>()?;
    place.pack_with_biases(of, &stored, values, spec)
}

fn stored<'a, S: Scale>(i: usize, format: &Int4, k: usize, s: &Segment<'a>) -> Result<Flat<'a, S>> {
    let bytes = |part| s.data.need(part)?.as_bytes();
    let (codes, scales) = (bytes(Part::Codes)?, q4_codebook::scales::<S>(bytes(Part::Scales)?));
    let zeros = if format.zeros == Zeros::Points { bytes(Part::Zeros)? } else { &[] };
    if let Some(at) = scales.iter().position(|s| !s.widen().is_finite()) {
        return Err(invalid(i, "scale", at, "a finite value", scales[at].widen().to_string()));
    }
    if let Some(at) = zeros.iter().position(|zero| *zero > 15) {
        return Err(invalid(i, "zero point", at, "0 to 15", zeros[at].to_string()));
    }
    Ok(Flat { rows: s.rows, k, codes, order: NibbleOrder::LowFirst, block: format.group, scales, zeros })
}

fn invalid(segment: usize, what: &str, at: usize, need: &str, have: String) -> Error {
    Error::new(Code::ScaleInvalid, format!("segment {segment}: {what} of group {at}")).need(need).have(have)
}
