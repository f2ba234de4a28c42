//! Not quantised: `[n, k]` of f32, f16 or bf16.
use super::sample::{Draw, uniform};
use super::storage::{Detected, LayerKeys, Layout, Probe, Rule, StateReader};
use super::{Decode, Format, Kind, PartSpec, Q4Schema, Test, ValueRule, Wire};
use crate::Convention;
use crate::{DType, OwnedParts, Part, Result, SchemaId, SegmentData, read_floats};
use half::{bf16, f16};
use serde::Serialize;

/// Not quantised: `[n, k]` of f32, f16 or bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Dense {
    /// Stored type.
    pub dtype: DType,
}

const fn encoding(dtype: DType) -> Q4Schema {
    Q4Schema::Dense(Dense { dtype })
}

/// Dense matrices before their type is known.
pub static KIND: Kind = Kind {
    names: &[("dense", 4)],
    usual: &[encoding(DType::BF16), encoding(DType::F32)],
    rarer: &[encoding(DType::F16)],
    from_wire: |_, wire| Ok(encoding(wire.dense.ok_or("dense type")?)),
    quantization: None,
    edges: |_, _| Vec::new(),
    rules: &[Rule {
        layout: Layout::Dense,
        is_there: |p| {
            p.is_float("weight") && !p.has("weight_scale") && !p.has("absmax") && !p.has("weight.absmax")
        },
        read: detect,
    }],
};

fn detect(p: &mut Probe<'_>, _: StateReader<'_>) -> Result<Option<Detected>> {
    const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
    let Some([n, k]) = p.matrix("weight", &TYPES) else { return Ok(None) };
    let Some(dtype) = p.tensor("weight", &TYPES).and_then(|t| t.dtype) else { return Ok(None) };
    let keys = LayerKeys { weight: p.key("weight").unwrap_or_default(), ..LayerKeys::default() };
    Ok(Some(Detected { layout: Layout::Dense, schema: encoding(dtype), n, k, keys, nested_offset: 0.0 }))
}

impl Format for Dense {
    fn id(&self) -> SchemaId {
        SchemaId { name: "dense", revision: 1 }
    }
    fn label(&self) -> String {
        format!("dense.{}", self.dtype)
    }
    fn in_words(&self) -> String {
        format!("dense ({})", self.dtype)
    }
    fn dense_dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }
    fn code_bits(&self) -> u32 {
        8 * self.dtype.size() as u32
    }
    fn block(&self) -> usize {
        1
    }
    fn activations(&self) -> &'static [&'static str] {
        &["native"]
    }
    fn parts(&self, rows: usize, k: usize) -> Vec<PartSpec> {
        vec![PartSpec::new(Part::Codes, "weight", self.dtype, &[rows, k])]
    }
    fn stored_bytes(&self, n: usize, k: usize) -> u64 {
        n as u64 * k as u64 * self.dtype.size() as u64
    }
    /// A half of each element.
    fn least_bytes(&self, n: usize, k: usize) -> u64 {
        2 * n as u64 * k as u64
    }
    fn check(&self, _: usize, _: &mut dyn FnMut(String)) {}
    fn decoder<'a>(&self, [_, k]: [usize; 2], data: &SegmentData<'a>) -> Result<Box<dyn Decode + 'a>> {
        let weight = data.need(Part::Codes)?;
        Ok(Box::new(Rows { bytes: weight.as_bytes()?, dtype: weight.dtype(), k }))
    }
    fn values(&self) -> Vec<ValueRule> {
        vec![ValueRule { part: Part::Codes, need: "finite values", test: Test::Finite }]
    }
    fn plain(&self, _: Layout, _: Option<Convention>) -> Q4Schema {
        Q4Schema::Dense(*self)
    }
    fn wire(&self) -> Wire {
        Wire { dense: Some(self.dtype), ..Wire::default() }
    }
    fn sample(&self, [rows, k]: [usize; 2], draw: &Draw) -> OwnedParts {
        // Row by row: a whole model's product in f32 is more memory than its bytes.
        let (mut row, mut bytes) = (vec![0.0; k], Vec::new());
        bytes.reserve_exact(rows * k * self.dtype.size());
        for r in 0..rows {
            row.iter_mut().enumerate().for_each(|(i, v)| *v = uniform(draw.word(r * k + i)) - 0.5);
            self.round(&row, &mut bytes);
        }
        OwnedParts::default().with(Part::Codes, self.dtype, &[rows, k], bytes)
    }
    fn plausible(&self, [rows, k]: [usize; 2], fill: &mut dyn FnMut(&mut [u8])) -> Result<OwnedParts> {
        // Signed steps of 1/128 below 1, over the root of k.
        let mut steps = vec![0u8; rows * k];
        fill(&mut steps);
        let unit = 1.0 / (128.0 * (k as f32).sqrt());
        let values: Vec<f32> = steps.iter().map(|s| f32::from(s.cast_signed()) * unit).collect();
        let mut bytes = Vec::with_capacity(rows * k * self.dtype.size());
        self.round(&values, &mut bytes);
        Ok(OwnedParts::default().with(Part::Codes, self.dtype, &[rows, k], bytes))
    }
    fn loudest(&self, _: &mut OwnedParts) {}
    fn spoil(&self, parts: &mut OwnedParts, row: usize, k: usize) {
        let size = self.dtype.size();
        parts.bytes_mut(Part::Codes)[row * k * size..][..size].fill(0xff);
    }
}

impl Dense {
    /// Appends `values` in the stored type.
    fn round(&self, values: &[f32], to: &mut Vec<u8>) {
        let start = to.len();
        to.resize(start + values.len() * self.dtype.size(), 0);
        let to = &mut to[start..];
        match self.dtype {
            DType::F16 => each(values, to, |v| f16::from_f32(v).to_ne_bytes()),
            DType::BF16 => each(values, to, |v| bf16::from_f32(v).to_ne_bytes()),
            _ => each(values, to, f32::to_ne_bytes),
        }
    }
}

fn each<const N: usize>(values: &[f32], to: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
    to.as_chunks_mut().0.iter_mut().zip(values).for_each(|(to, v)| *to = bytes(*v));
}

struct Rows<'a> {
    bytes: &'a [u8],
    dtype: DType,
    k: usize,
}

impl Decode for Rows<'_> {
    fn row(&self, r: usize, out: &mut [f32]) {
        read_floats(&self.bytes[r * self.k * self.dtype.size()..], self.dtype, out);
    }
}
