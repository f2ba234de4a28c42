//! Stored weights as borrowed parts, and the exact decoder every reference uses.
use crate::formats::Decode;
use crate::{Code, Error, GlobalScale, Q4Schema, Result, SegmentData};

/// One or more stored matrices `[rows_i, k]` that share their input and are multiplied as one `[n, k]`
/// (q/k/v, gate/up). Every segment keeps its own scales.
///
/// ```
/// use q4_core::{DType, Nvfp4Parts, Q4Weight, RowDecoder, Segment, TensorView, formats};
///
/// // One row of 16 NVFP4 codes, two a byte, the even element in the low half: 1.0 and -2.0 in turn. Their
/// // block scale is 0.5.
/// let (codes, scales) = ([0xc2_u8; 8], [0x30_u8]);
/// let parts = Nvfp4Parts {
///     codes: TensorView::of(&codes, &[1, 8])?,
///     scales: TensorView::of_bytes(&scales, DType::F8E4M3, &[1, 1])?,
///     global: None,
/// };
/// let segments = [Segment { rows: 1, data: parts.into() }];
/// let weight = Q4Weight { schema: formats::encodings("nvfp4")[0], k: 16, segments: &segments };
///
/// let mut row = [0.0; 16];
/// RowDecoder::new(&weight)?.row(0, &mut row);
/// assert_eq!(row[..4], [0.5, -1.0, 0.5, -1.0]);
///
/// // Parts that contradict the schema are found before anything is decoded.
/// assert!(Q4Weight { k: 32, ..weight }.validate().is_err());
/// # Ok::<(), q4_core::Error>(())
/// ```
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

impl<'a> Q4Weight<'a> {
    /// Out features of all segments.
    pub fn n(&self) -> usize {
        self.segments.iter().map(|s| s.rows).sum()
    }

    /// Checks every part of every segment against the schema: its type and number of elements, the per-tensor
    /// scale, k. Values are not looked at.
    ///
    /// # Errors
    /// [`Code::SchemaInvalid`] with *all* contradictions at once.
    pub fn validate(&self) -> Result<()> {
        let mut problems = Vec::new();
        if self.segments.is_empty() || self.k == 0 || self.segments.iter().any(|s| s.rows == 0) {
            problems.push(format!("need at least one row and one column; have {} x {}", self.n(), self.k));
        }
        self.schema.check(self.k, &mut |p| problems.push(p));
        for (i, s) in self.segments.iter().enumerate() {
            s.validate(&self.schema, self.k, &mut |p| problems.push(format!("segment {i}: {p}")));
        }
        if problems.is_empty() { Ok(()) } else { Err(Error::new(Code::SchemaInvalid, problems.join("\n"))) }
    }
}

impl Segment<'_> {
    fn validate(&self, schema: &Q4Schema, k: usize, problem: &mut impl FnMut(String)) {
        let wanted = schema.parts(self.rows, k);
        let is_foreign = self.data.parts().any(|(part, _)| wanted.iter().all(|w| w.part != part));
        if is_foreign || wanted.iter().any(|w| self.data.get(w.part).is_none()) {
            return problem(schema.foreign(&self.data));
        }
        for w in &wanted {
            let Some(view) = self.data.get(w.part) else { continue };
            if !(view.dtype() == w.dtype || w.or == Some(view.dtype())) || view.len() != w.len() {
                let names: Vec<_> = [Some(w.dtype), w.or].into_iter().flatten().map(|d| d.as_str()).collect();
                problem(format!("{}: need {} of {}; have {view:?}", w.what, w.len(), names.join(" or ")));
            }
        }
        let (need, have) = (schema.global(), self.data.global);
        if have.map(GlobalScale::convention) != need {
            problem(format!("per-tensor scale: need {need:?}; have {have:?}"));
        }
    }
}

/// Exact row decoder of a host weight: the definition of its values.
pub struct RowDecoder<'a> {
    schema: Q4Schema,
    k: usize,
    parts: Vec<(usize, Box<dyn Decode + 'a>)>,
}

impl<'a> RowDecoder<'a> {
    /// Validates `w` and resolves its parts; the weight must be in host memory.
    ///
    /// # Errors
    /// As [`Q4Weight::validate`]; [`Code::ShapeMismatch`] for parts that are not contiguous in host memory.
    pub fn new(w: &Q4Weight<'a>) -> Result<Self> {
        w.validate()?;
        let decoder = |s: &Segment<'a>| Ok((s.rows, w.schema.decoder([s.rows, w.k], &s.data)?));
        let parts = w.segments.iter().map(decoder).collect::<Result<_>>()?;
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
        self.locate(row).1.global()
    }

    /// Packed codes (`k/2` bytes, low nibble first) and block scales (`k/16` E4M3 bytes) of an NVFP4 row.
    pub fn nvfp4_row(&self, row: usize) -> Option<(&[u8], &[u8])> {
        let (r, part) = self.locate(row);
        part.nvfp4_row(r)
    }

    /// Writes the `k` f32 values of `row` (`0..n`), bit for bit what the schema defines.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.k, "row buffer");
        let (r, part) = self.locate(row);
        part.row(r, out);
    }

    fn locate(&self, row: usize) -> (usize, &(dyn Decode + 'a)) {
        let mut r = row;
        for (rows, part) in &self.parts {
            if r < *rows {
                return (r, &**part);
            }
            r -= rows;
        }
        panic!("row {row} of {}", self.n());
    }
}
