//! What FP8 stores, as the kernels of `q4-codebook` take it.
use half::{bf16, f16};
use q4_codebook::{Bytes, Encoding, Flat, Place, Run, Scale, Stored, Values, each, scale_group};
use q4_core::formats::e4m3;
use q4_core::{
    Code, DType, Error, ExecPath, Fp8, LinearSpec, NibbleOrder, Part, PreparedWeight, Q4Schema, Q4Weight,
    Result, Segment,
};
use std::borrow::Cow;

/// Bytes under scales.
struct E4m3;

impl Encoding for E4m3 {
    const BYTES: Option<Bytes> = Some(Bytes::E4m3);
}

/// Repacks `w`. Fails on codes that are NaN and on scales that are not finite.
pub(crate) fn prepare(
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    place: &Place<'_>,
) -> Result<Box<dyn PreparedWeight>> {
    let Q4Schema::Fp8(format) = w.schema else {
        return Err(Error::new(Code::SchemaInvalid, "weight").need("fp8").have(w.schema.to_string()));
    };
    let pack = match format.scales {
        DType::F16 => packed::<f16>,
        DType::BF16 => packed::<bf16>,
        _ => packed::<f32>,
    };
    pack(format, w, spec, path, place)
}

fn packed<S: Scale>(
    format: Fp8,
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    place: &Place<'_>,
) -> Result<Box<dyn PreparedWeight>> {
    let tiles = w.segments.iter().enumerate().map(|(i, s)| Tiles::<S>::of(i, format, w.k, s));
    let tiles = tiles.collect::<Result<Vec<_>>>()?;
    let of = (crate::OWN.name, path);
    if let Place::Cuda(..) = place {
        let flat = tiles.iter().map(Tiles::flat).collect::<Vec<_>>();
        return place.pack_there(of, &flat, spec);
    }
    let worth = (Values::BYTES, S::KEPT, format.reach(w.k) as u32);
    place.pack_here::<E4m3>(of, &each(&tiles), worth, spec)
}

/// A matrix of bytes.
struct Tiles<'a, S: Clone> {
    format: Fp8,
    rows: usize,
    k: usize,
    codes: &'a [u8],
    scales: Cow<'a, [S]>,
}

impl<'a, S: Scale> Tiles<'a, S> {
    fn of(i: usize, format: Fp8, k: usize, s: &Segment<'a>) -> Result<Self> {
        let bytes = |part| s.data.need(part)?.as_bytes();
        let (codes, scales) = (bytes(Part::Codes)?, q4_codebook::scales::<S>(bytes(Part::Scales)?));
        if let Some(at) = codes.iter().position(|code| e4m3::is_nan(*code)) {
            return Err(Error::new(
                Code::ValueInvalid,
                format!("segment {i}: row {}, column {}", at / k, at % k),
            )
            .need("a number")
            .have("NaN"));
        }
        if let Some(at) = scales.iter().position(|s| !s.widen().is_finite()) {
            return Err(Error::new(Code::ScaleInvalid, format!("segment {i}: scale of tile {at}"))
                .need("a finite value")
                .have(scales[at].widen().to_string()));
        }
        Ok(Self { format, rows: s.rows, k, codes, scales })
    }
}

impl<S: Scale> Tiles<'_, S> {
    /// The same with a scale for each run of k that surely has one.
    fn flat(&self) -> Flat<'_, S> {
        let group = scale_group(self.k, self.format.reach(self.k) as u32).max(1);
        let of = |at: usize| self.scales[self.format.scale_of(at / self.k, at % self.k, self.k)];
        let scales = (0..self.rows * self.k).step_by(group).map(of).collect();
        let (order, block) = (NibbleOrder::LowFirst, group as u32);
        Flat { rows: self.rows, k: self.k, codes: self.codes, order, block, scales, zeros: &[] }
    }
}

impl<S: Scale> Stored for Tiles<'_, S> {
    fn rows(&self) -> usize {
        self.rows
    }
    fn read(&self, row: usize, from: usize, len: usize, out: &mut Run) {
        let eights = self.codes[row * self.k + from..][..len].as_chunks::<8>().0;
        let words = out.codes.iter_mut().zip(&mut out.high);
        for ((low, high), eight) in words.zip(eights) {
            let both = u64::from_le_bytes(*eight);
            (*low, *high) = (both as u32, (both >> 32) as u32);
        }
        let group = scale_group(self.k, self.format.reach(self.k) as u32);
        let groups = from.div_ceil(group)..(from + len).div_ceil(group);
        for (to, g) in out.scales.iter_mut().zip(groups) {
            *to = self.scales[self.format.scale_of(row, g * group, self.k)].widen();
        }
    }
}
