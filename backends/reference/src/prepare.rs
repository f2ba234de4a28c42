//! An owned copy of the stored bytes: the caller's file may be unmapped after `prepare`.
use crate::probe::can_prepare;
use q4_core::{
    Absmax, Code, DType, Error, ExecPath, GlobalScale, LinearSpec, OpSet, PreparedInfo, Q4Schema, Q4Weight,
    Result, Segment, SegmentData, TensorView, f32s,
};

/// A weight as it was stored.
pub(crate) struct Stored {
    pub info: PreparedInfo,
    pub x: DType,
    pub y: DType,
    schema: Q4Schema,
    parts: Vec<Part>,
}

struct Part {
    rows: usize,
    data: Data,
}

enum Data {
    Nvfp4 {
        codes: Vec<u8>,
        scales: Vec<u8>,
        global: Option<GlobalScale>,
    },
    Nf4 {
        codes: Vec<u8>,
        absmax: Vec<f32>,
    },
    Nf4Nested {
        codes: Vec<u8>,
        absmax_codes: Vec<u8>,
        map: Vec<f32>,
        absmax: Vec<f32>,
        offset: f32,
        block: usize,
    },
    Dense {
        bytes: Vec<u8>,
        dtype: DType,
    },
}

/// Copies `w`. Fails on parts that contradict the schema and on a spec that `can_prepare` refuses.
pub(crate) fn prepare(w: &Q4Weight<'_>, spec: &LinearSpec, path: ExecPath) -> Result<Stored> {
    can_prepare(spec, path).map_err(|reasons| {
        let list: Vec<_> = reasons.iter().map(ToString::to_string).collect();
        Error::new(Code::Unsupported, "weight cannot be prepared").have(list.join("; "))
    })?;
    w.validate()?;
    let (n, k) = (w.n(), w.k);
    if (n, k) != (spec.n(), spec.k) || w.schema != spec.schema {
        return Err(Error::new(Code::ShapeMismatch, "weight and spec differ")
            .need(format!("{} [{}, {}]", spec.schema, spec.n(), spec.k))
            .have(format!("{} [{n}, {k}]", w.schema)));
    }
    let parts: Vec<_> = w.segments.iter().map(Part::copy).collect::<Result<_>>()?;
    let info = PreparedInfo {
        backend: crate::NAME.into(),
        path,
        activations: spec.activations,
        n,
        k,
        resident_bytes: parts.iter().map(|p| p.data.bytes() as u64).sum(),
        ops: OpSet::ALL,
    };
    Ok(Stored { info, x: spec.x, y: spec.y, schema: w.schema, parts })
}

impl Stored {
    /// Lends the weight to `body` in the form it came in.
    pub fn with<R>(&self, body: impl FnOnce(&Q4Weight<'_>) -> Result<R>) -> Result<R> {
        let segments: Vec<_> = self.parts.iter().map(|p| p.segment(self.info.k)).collect::<Result<_>>()?;
        body(&Q4Weight { schema: self.schema, k: self.info.k, segments: &segments })
    }
}

impl Part {
    fn copy(s: &Segment<'_>) -> Result<Self> {
        let bytes = |v: &TensorView<'_>| v.as_bytes().map(<[u8]>::to_vec);
        let floats = |v: &TensorView<'_>| f32s(v).map(|v| v.into_owned());
        let data = match &s.data {
            SegmentData::Nvfp4 { codes, scales, global } => {
                Data::Nvfp4 { codes: bytes(codes)?, scales: bytes(scales)?, global: *global }
            }
            SegmentData::Nf4 { codes, absmax: Absmax::Plain(absmax) } => {
                Data::Nf4 { codes: bytes(codes)?, absmax: floats(absmax)? }
            }
            SegmentData::Nf4 {
                codes,
                absmax: Absmax::Nested { codes: second, map, absmax, offset, block },
            } => Data::Nf4Nested {
                codes: bytes(codes)?,
                absmax_codes: bytes(second)?,
                map: floats(map)?,
                absmax: floats(absmax)?,
                offset: *offset,
                block: *block,
            },
            SegmentData::Dense { weight } => Data::Dense { bytes: bytes(weight)?, dtype: weight.dtype() },
            _ => return Err(Error::new(Code::SchemaInvalid, "segment").need("nvfp4, nf4 or dense parts")),
        };
        Ok(Self { rows: s.rows, data })
    }

    fn segment(&self, k: usize) -> Result<Segment<'_>> {
        let data = match &self.data {
            Data::Nvfp4 { codes, scales, global } => SegmentData::Nvfp4 {
                codes: TensorView::of(codes, &[codes.len()])?,
                scales: TensorView::of_bytes(scales, DType::F8E4M3, &[scales.len()])?,
                global: *global,
            },
            Data::Nf4 { codes, absmax } => SegmentData::Nf4 {
                codes: TensorView::of(codes, &[codes.len()])?,
                absmax: Absmax::Plain(TensorView::of(absmax, &[absmax.len()])?),
            },
            Data::Nf4Nested { codes, absmax_codes, map, absmax, offset, block } => SegmentData::Nf4 {
                codes: TensorView::of(codes, &[codes.len()])?,
                absmax: Absmax::Nested {
                    codes: TensorView::of(absmax_codes, &[absmax_codes.len()])?,
                    map: TensorView::of(map, &[map.len()])?,
                    absmax: TensorView::of(absmax, &[absmax.len()])?,
                    offset: *offset,
                    block: *block,
                },
            },
            Data::Dense { bytes, dtype } => {
                SegmentData::Dense { weight: TensorView::of_bytes(bytes, *dtype, &[self.rows, k])? }
            }
        };
        Ok(Segment { rows: self.rows, data })
    }
}

impl Data {
    fn bytes(&self) -> usize {
        match self {
            Self::Nvfp4 { codes, scales, .. } => codes.len() + scales.len(),
            Self::Nf4 { codes, absmax } => codes.len() + 4 * absmax.len(),
            Self::Nf4Nested { codes, absmax_codes, map, absmax, .. } => {
                codes.len() + absmax_codes.len() + 4 * (map.len() + absmax.len())
            }
            Self::Dense { bytes, .. } => bytes.len(),
        }
    }
}
