//! Stored weights as borrowed parts, and the exact decoder every reference uses.
use crate::formats::{nf4, nvfp4, swizzle};
use crate::{
    Code, DType, Device, Error, GlobalScale, NibbleOrder, Q4Schema, Result, ScaleLayout, TensorView,
};
use std::borrow::Cow;

/// One or more stored matrices `[rows_i, k]` that share their input and are multiplied as one `[n, k]`
/// (q/k/v, gate/up). Every segment keeps its own scales.
#[derive(Clone, Copy, Debug)]
pub struct Q4Weight<'a> {
    /// Encoding of every segment.
    pub schema: Q4Schema,
    /// In features.
    pub k: usize,
    /// Row segments, top to bottom; never empty.
    pub segments: &'a [Segment<'a>],
}

/// One stored matrix `[rows, k]`.
#[derive(Clone, Debug)]
pub struct Segment<'a> {
    /// Out features of this segment.
    pub rows: usize,
    /// Its bytes.
    pub data: SegmentData<'a>,
}

/// The bytes of a segment, by encoding.
#[derive(Clone, Debug)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant)] // a handful exist, while a layer is prepared
pub enum SegmentData<'a> {
    /// NVFP4.
    Nvfp4 {
        /// u8 `[rows, k/2]`.
        codes: TensorView<'a>,
        /// E4M3 `[rows, k/16]`, or the swizzled buffer of `swizzle::blocked_len(rows, k/16)` bytes.
        scales: TensorView<'a>,
        /// Present iff the schema has a convention for it.
        global: Option<GlobalScale>,
    },
    /// NF4.
    Nf4 {
        /// u8, `ceil(rows*k/2)` bytes.
        codes: TensorView<'a>,
        /// One absmax per block.
        absmax: Absmax<'a>,
    },
    /// Not quantised.
    Dense {
        /// `[rows, k]` of an io dtype.
        weight: TensorView<'a>,
    },
}

/// Scales of NF4.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // as above
pub enum Absmax<'a> {
    /// f32, one per block.
    Plain(TensorView<'a>),
    /// `map[codes[i]] * absmax[i / block] + offset`.
    Nested {
        /// u8, one per block.
        codes: TensorView<'a>,
        /// f32 `[256]`.
        map: TensorView<'a>,
        /// f32, one per `block` codes.
        absmax: TensorView<'a>,
        /// Mean that was subtracted before the second quantisation.
        offset: f32,
        /// Codes per nested absmax.
        block: usize,
    },
}

impl<'a> Q4Weight<'a> {
    /// Out features of all segments.
    pub fn n(&self) -> usize {
        self.segments.iter().map(|s| s.rows).sum()
    }

    /// Checks every part of every segment against the schema and reports *all* contradictions at once.
    pub fn validate(&self) -> Result<()> {
        let mut problems = Vec::new();
        if self.segments.is_empty() || self.k == 0 || self.segments.iter().any(|s| s.rows == 0) {
            problems.push(format!("need at least one row and one column; have {} x {}", self.n(), self.k));
        }
        if matches!(self.schema, Q4Schema::Nvfp4 { .. }) && self.k % nvfp4::BLOCK != 0 {
            problems.push(format!("need k % 16 == 0; have k = {}", self.k));
        }
        if let Q4Schema::Nf4 { block, nested, .. } = self.schema {
            if !(32..=4096).contains(&block) || !block.is_power_of_two() {
                problems.push(format!("need a block size of 32 to 4096, a power of two; have {block}"));
            }
            if nested == Some(0) {
                problems.push("need a nested block size above zero".into());
            }
        }
        for (i, s) in self.segments.iter().enumerate() {
            s.validate(&self.schema, self.k, &mut |p| problems.push(format!("segment {i}: {p}")));
        }
        if problems.is_empty() { Ok(()) } else { Err(Error::new(Code::SchemaInvalid, problems.join("\n"))) }
    }
}

impl Segment<'_> {
    fn validate(&self, schema: &Q4Schema, k: usize, problem: &mut impl FnMut(String)) {
        let elements = self.rows * k;
        let mut bytes = |what: &str, view: &TensorView<'_>, need: usize, dtypes: &[DType]| {
            if !dtypes.contains(&view.dtype()) || view.len() != need {
                let names: Vec<_> = dtypes.iter().map(|d| d.as_str()).collect();
                problem(format!("{what}: need {need} of {}; have {view:?}", names.join(" or ")));
            }
        };
        match (&self.data, schema) {
            (
                SegmentData::Nvfp4 { codes, scales, global },
                Q4Schema::Nvfp4 { scale_layout, global: convention },
            ) => {
                bytes("codes", codes, elements / 2, &[DType::U8]);
                let need = match scale_layout {
                    ScaleLayout::RowMajor => elements / nvfp4::BLOCK,
                    ScaleLayout::Swizzled128x4 => swizzle::blocked_len(self.rows, k / nvfp4::BLOCK),
                };
                bytes("block scales", scales, need, &[DType::F8E4M3, DType::U8]);
                if global.map(GlobalScale::convention) != *convention {
                    problem(format!("per-tensor scale: need {convention:?}; have {global:?}"));
                }
            }
            (SegmentData::Nf4 { codes, absmax }, Q4Schema::Nf4 { block, nested, .. }) => {
                bytes("codes", codes, elements.div_ceil(2), &[DType::U8]);
                let blocks = elements.div_ceil((*block).max(1) as usize);
                match absmax {
                    Absmax::Plain(a) => bytes("absmax", a, blocks, &[DType::F32]),
                    Absmax::Nested { codes, map, absmax, block, .. } => {
                        bytes("absmax codes", codes, blocks, &[DType::U8]);
                        bytes("nested map", map, 256, &[DType::F32]);
                        bytes("nested absmax", absmax, blocks.div_ceil((*block).max(1)), &[DType::F32]);
                    }
                }
                if nested.is_some() != matches!(absmax, Absmax::Nested { .. }) {
                    problem(format!("absmax: need nested = {}; have the other", nested.is_some()));
                }
            }
            (SegmentData::Dense { weight }, Q4Schema::Dense { dtype }) => {
                bytes("weight", weight, elements, &[*dtype])
            }
            (_, schema) => problem(format!("need the parts of {schema}; have those of another format")),
        }
    }
}

/// Exact row decoder of a host weight: the definition of its values.
pub struct RowDecoder<'a> {
    schema: Q4Schema,
    k: usize,
    parts: Vec<(usize, Part<'a>)>,
}

enum Part<'a> {
    Nvfp4 { codes: &'a [u8], scales: Cow<'a, [u8]>, global: Option<GlobalScale> },
    Nf4 { codes: &'a [u8], absmax: Cow<'a, [f32]>, order: NibbleOrder, block: usize },
    Dense { bytes: &'a [u8], dtype: DType },
}

impl<'a> RowDecoder<'a> {
    /// Validates `w` and resolves its parts; the weight must be in host memory.
    pub fn new(w: &Q4Weight<'a>) -> Result<Self> {
        w.validate()?;
        let mut parts = Vec::with_capacity(w.segments.len());
        for s in w.segments {
            let part = match (&s.data, w.schema) {
                (SegmentData::Nvfp4 { codes, scales, global }, Q4Schema::Nvfp4 { scale_layout, .. }) => {
                    Part::Nvfp4 {
                        codes: codes.as_bytes()?,
                        scales: match scale_layout {
                            ScaleLayout::RowMajor => Cow::Borrowed(scales.as_bytes()?),
                            ScaleLayout::Swizzled128x4 => Cow::Owned(swizzle::from_blocked(
                                scales.as_bytes()?,
                                s.rows,
                                w.k / nvfp4::BLOCK,
                            )?),
                        },
                        global: *global,
                    }
                }
                (SegmentData::Nf4 { codes, absmax }, Q4Schema::Nf4 { nibble_order, block, .. }) => {
                    Part::Nf4 {
                        codes: codes.as_bytes()?,
                        absmax: absmax.to_f32()?,
                        order: nibble_order,
                        block: block as usize,
                    }
                }
                (SegmentData::Dense { weight }, _) => {
                    Part::Dense { bytes: weight.as_bytes()?, dtype: weight.dtype() }
                }
                _ => unreachable_parts()?,
            };
            parts.push((s.rows, part));
        }
        Ok(Self { schema: w.schema, k: w.k, parts })
    }

    /// The encoding.
    pub fn schema(&self) -> Q4Schema {
        self.schema
    }
    /// Out features.
    pub fn n(&self) -> usize {
        self.parts.iter().map(|p| p.0).sum()
    }
    /// In features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Per-tensor scale of the segment that holds `row`.
    pub fn global(&self, row: usize) -> Option<GlobalScale> {
        match self.locate(row).1 {
            Part::Nvfp4 { global, .. } => *global,
            _ => None,
        }
    }

    /// Packed codes (`k/2` bytes, low nibble first) and block scales (`k/16` E4M3 bytes) of an NVFP4 row.
    pub fn nvfp4_row(&self, row: usize) -> Option<(&[u8], &[u8])> {
        let (r, part) = self.locate(row);
        match part {
            Part::Nvfp4 { codes, scales, .. } => {
                let (kc, ks) = (self.k / 2, self.k / nvfp4::BLOCK);
                Some((&codes[r * kc..][..kc], &scales[r * ks..][..ks]))
            }
            _ => None,
        }
    }

    /// Writes the `k` f32 values of `row` (`0..n`), bit for bit what the schema defines.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.k, "row buffer");
        let (r, part) = self.locate(row);
        let k = self.k;
        match part {
            Part::Nvfp4 { codes, scales, global } => {
                let ks = k / nvfp4::BLOCK;
                nvfp4::dequantize_row(&codes[r * k / 2..][..k / 2], &scales[r * ks..][..ks], *global, out);
            }
            Part::Nf4 { codes, absmax, order, block } => {
                let (mut done, high_first) = (0, *order == NibbleOrder::HighFirst);
                // Blocks ignore rows: the first and the last may be cut.
                while done < k {
                    let from = r * k + done;
                    let len = (block - from % block).min(k - done);
                    let scale = absmax[from / block];
                    let (run, shift) = (&mut out[done..done + len], 4 * u8::from(high_first));
                    if from % 2 == 0 && len % 2 == 0 {
                        for (pair, code) in run.chunks_exact_mut(2).zip(&codes[from / 2..]) {
                            pair[0] = nf4::decode(code >> shift) * scale;
                            pair[1] = nf4::decode(code >> (4 - shift)) * scale;
                        }
                    } else {
                        for (i, o) in (from..).zip(run) {
                            let is_high = (i % 2 == 0) == high_first;
                            *o = nf4::decode(codes[i / 2] >> (4 * u8::from(is_high))) * scale;
                        }
                    }
                    done += len;
                }
            }
            Part::Dense { bytes, dtype } => read_floats(&bytes[r * k * dtype.size()..], *dtype, out),
        }
    }

    fn locate(&self, row: usize) -> (usize, &Part<'a>) {
        let mut r = row;
        for (rows, part) in &self.parts {
            if r < *rows {
                return (r, part);
            }
            r -= rows;
        }
        panic!("row {row} of {}", self.n());
    }
}

impl<'a> Absmax<'a> {
    /// One f32 per block, borrowed where the file already holds it so.
    pub fn to_f32(&self) -> Result<Cow<'a, [f32]>> {
        match self {
            Self::Plain(a) => f32s(a),
            Self::Nested { codes, map, absmax, offset, block } => {
                let (map, absmax) = (f32s(map)?, f32s(absmax)?);
                let nested = nf4::Nested {
                    codes: codes.as_bytes()?,
                    map: &map,
                    absmax: &absmax,
                    offset: *offset,
                    block: *block,
                };
                Ok(Cow::Owned((0..codes.len()).map(|i| nested.absmax_at(i)).collect()))
            }
        }
    }
}

/// The f32 elements of a host view; copied only when the bytes are not aligned.
pub fn f32s<'a>(view: &TensorView<'a>) -> Result<Cow<'a, [f32]>> {
    if view.dtype() != DType::F32 || view.device() != Device::Cpu {
        return Err(Error::new(Code::TensorType, "operand").need("float32 on cpu").have(format!("{view:?}")));
    }
    if view.as_ptr().cast::<f32>().is_aligned() {
        return view.as_slice::<f32>().map(Cow::Borrowed);
    }
    let mut out = vec![0.0; view.len()];
    read_floats(view.as_bytes()?, DType::F32, &mut out);
    Ok(Cow::Owned(out))
}

/// Widens `out.len()` little-endian elements of an io dtype to f32. Exact.
pub fn read_floats(bytes: &[u8], dtype: DType, out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        DType::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = half::bf16::from_le_bytes(*b).to_f32();
            }
        }
        DType::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = half::f16::from_le_bytes(*b).to_f32();
            }
        }
        other => panic!("{other} is not a float type of activations or weights"),
    }
}

fn unreachable_parts<T>() -> Result<T> {
    Err(Error::new(Code::Internal, "validated weight has the parts of another schema"))
}
