//! int4: unsigned codes with a scale, and often a zero point, for a group of in features, as
//! compressed-tensors (`pack-quantized`), GPTQ, AWQ and AutoRound store it, or with what is added to the
//! group, as MLX does.
mod facts;
mod quantize;
mod sample;
mod storage;

pub use self::quantize::ToInt4;
pub(super) use self::storage::is_compressed_tensors;
use super::facts::Facts;
use super::nvfp4::Method;
use super::sample::{Draw, Edge, bytes_of};
use super::storage::{Described, Layout, Tensor};
use super::{Decode, Format, Kind, Lack, PartSpec, Q4Schema, Quantization, Target, Test, ValueRule, Wire};
use crate::{Convention, DType, NibbleOrder, OwnedParts, Part, Result, SchemaId, SegmentData, read_floats};
use serde::Serialize;

/// The zero point of codes that have none stored.
pub const ZERO: u8 = 8;

/// Codes of 0 to 15, low nibble first, a scale for each `group` along k and what [`Zeros`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Int4 {
    /// Elements along k under one scale, a multiple of 16. That of a scale per out feature is k.
    pub group: u32,
    /// Type of the scales: f16, bf16 or f32.
    pub scales: DType,
    /// Where zero is: each is a schema of its own.
    pub zeros: Zeros,
}

/// Where the zero of a group's codes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Zeros {
    /// At [`ZERO`] in every group: `value = (code - 8) * scale`, rounded once to f32, which is exact for
    /// scales of 16 bits.
    Middle,
    /// At a code of each group, a byte: `value = (code - zero) * scale`, rounded as above.
    Points,
    /// Wherever a bias of each group puts it, of the type of the scales: `value = code * scale + bias`, in
    /// f32 after each operation, of which only the sum is rounded under scales of 16 bits.
    Biases,
}

impl Zeros {
    /// Something is stored for each group.
    pub fn are_stored(self) -> bool {
        self != Self::Middle
    }
}

const fn encoding(group: u32, scales: DType, zeros: Zeros) -> Q4Schema {
    Q4Schema::Int4(Int4 { group, scales, zeros })
}

/// int4 before its parameters are known.
pub static KIND: Kind = Kind {
    names: &[("int4", 6), ("int4-asym", 7), ("int4-affine", 13)],
    usual: &[
        encoding(128, DType::BF16, Zeros::Middle),
        encoding(32, DType::F16, Zeros::Middle),
        encoding(128, DType::F16, Zeros::Points),
        encoding(64, DType::BF16, Zeros::Biases),
    ],
    rarer: &[
        encoding(64, DType::F32, Zeros::Middle),
        encoding(32, DType::BF16, Zeros::Points),
        encoding(32, DType::F16, Zeros::Biases),
    ],
    from_wire: |name, wire| Ok(encoding(wire.block, wire.scales.ok_or("type of scales")?, zeros_of(name))),
    quantization: Some(Quantization {
        about: "Integers with a scale per group",
        layout: Layout::CompressedTensors,
        options: &["--method", "--block-size"],
        target: |layout, choices| {
            Target::Int4(ToInt4 {
                group: choices.block.unwrap_or(128),
                method: choices.method.unwrap_or(Method::Search),
                scales: storage::scales(layout).unwrap_or(DType::BF16),
            })
        },
        held: |layout| match layout {
            Layout::CompressedTensors => Some("int4 without zero points"),
            Layout::Gptq | Layout::Awq => Some("int4 without zero points in groups of 16, 32, 64 or 128"),
            _ => None,
        },
    }),
    edges: sample::edges,
    rules: &storage::RULES,
};

/// The zeros that a name stands for.
fn zeros_of(name: &str) -> Zeros {
    match name {
        "int4" => Zeros::Middle,
        "int4-asym" => Zeros::Points,
        _ => Zeros::Biases,
    }
}

impl Int4 {
    fn groups(&self, k: usize) -> usize {
        k / self.block()
    }
    /// A part of the type of the scales, widened.
    fn floats(&self, part: Part, data: &SegmentData<'_>) -> Result<Vec<f32>> {
        let stored = data.need(part)?;
        let mut floats = vec![0.0; stored.len()];
        read_floats(stored.as_bytes()?, self.scales, &mut floats);
        Ok(floats)
    }
    /// Bytes of what is stored for a group beside its scale.
    pub fn zero_bytes(&self) -> usize {
        match self.zeros {
            Zeros::Middle => 0,
            Zeros::Points => 1,
            Zeros::Biases => self.scales.size(),
        }
    }
}

impl Format for Int4 {
    fn id(&self) -> SchemaId {
        let name = match self.zeros {
            Zeros::Middle => "int4",
            Zeros::Points => "int4-asym",
            Zeros::Biases => "int4-affine",
        };
        SchemaId { name, revision: 1 }
    }
    fn label(&self) -> String {
        let scales = match self.scales {
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            _ => "f32",
        };
        format!("{}.{}.{scales}", self.id().name, self.group)
    }

    fn k_block(&self) -> usize {
        self.block()
    }
    /// Nobody divides by a group of none, which [`check`](Self::check) refuses.
    fn block(&self) -> usize {
        (self.group as usize).max(1)
    }

    fn parts(&self, rows: usize, k: usize) -> Vec<PartSpec> {
        let groups = [rows, self.groups(k)];
        let mut parts = vec![
            PartSpec::new(Part::Codes, "codes", DType::U8, &[rows, k / 2]),
            PartSpec::new(Part::Scales, "scales", self.scales, &groups),
        ];
        match self.zeros {
            Zeros::Middle => {}
            Zeros::Points => parts.push(PartSpec::new(Part::Zeros, "zero points", DType::U8, &groups)),
            Zeros::Biases => parts.push(PartSpec::new(Part::Zeros, "biases", self.scales, &groups)),
        }
        parts
    }
    fn stored_bytes(&self, n: usize, k: usize) -> u64 {
        let groups = n * self.groups(k) * (self.scales.size() + self.zero_bytes());
        (n * k / 2 + groups) as u64
    }
    /// Zero points fit four bits.
    fn least_bytes(&self, n: usize, k: usize) -> u64 {
        let groups = n * self.groups(k);
        let zeros = if self.zeros == Zeros::Points { groups / 2 } else { groups * self.zero_bytes() };
        (n * k / 2 + groups * self.scales.size() + zeros) as u64
    }
    fn check(&self, k: usize, problem: &mut dyn FnMut(String)) {
        let group = self.group as usize;
        if group == 0 || !group.is_multiple_of(16) {
            problem(format!("need groups of a multiple of 16; have {group}"));
        } else if !k.is_multiple_of(group) {
            problem(format!("need k % {group} == 0; have k = {k}"));
        }
        if !self.scales.is_io() {
            problem(format!("need scales of float32, float16 or bfloat16; have {}", self.scales));
        }
    }

    fn decoder<'a>(&self, [_, k]: [usize; 2], data: &SegmentData<'a>) -> Result<Box<dyn Decode + 'a>> {
        let codes = data.need(Part::Codes)?.as_bytes()?;
        let scales = self.floats(Part::Scales, data)?;
        let zeros = match self.zeros {
            Zeros::Middle => Counted::From(None),
            Zeros::Points => Counted::From(Some(data.need(Part::Zeros)?.as_bytes()?)),
            Zeros::Biases => Counted::Biased(self.floats(Part::Zeros, data)?),
        };
        Ok(Box::new(Rows { codes, scales, zeros, k, group: self.group as usize }))
    }

    fn values(&self) -> Vec<ValueRule> {
        let mut rules = vec![ValueRule { part: Part::Scales, need: "finite scales", test: Test::Finite }];
        let (need, test) = match self.zeros {
            Zeros::Middle => return rules,
            Zeros::Points => (
                "zero points of 0 to 15",
                Test::Byte { is_bad: |zero| zero > 15, in_words: |zero| zero.to_string() },
            ),
            Zeros::Biases => ("finite biases", Test::Finite),
        };
        rules.push(ValueRule { part: Part::Zeros, need, test });
        rules
    }
    fn facts(&self, [n, k]: [usize; 2], data: &SegmentData<'_>, _: &[u8]) -> Result<Option<Facts>> {
        facts::facts(self, [n, k], data).map(Some)
    }

    fn tensors(&self, layout: Layout, shape: [usize; 2]) -> Option<Vec<Tensor>> {
        storage::tensors(self, layout, shape)
    }
    fn described(&self) -> Option<Described> {
        (self.zeros != Zeros::Biases).then(|| storage::described(self))
    }
    fn plain(&self, layout: Layout, _: Option<Convention>) -> Q4Schema {
        Q4Schema::Int4(Self { scales: storage::scales(layout).unwrap_or(self.scales), ..*self })
    }
    fn simpler(&self, data: &SegmentData<'_>) -> Result<Option<Q4Schema>> {
        if self.zeros != Zeros::Points {
            return Ok(None);
        }
        let Some(zeros) = data.get(Part::Zeros) else { return Ok(None) };
        let is_middle = zeros.as_bytes()?.iter().all(|zero| *zero == ZERO);
        Ok(is_middle.then_some(Q4Schema::Int4(Self { zeros: Zeros::Middle, ..*self })))
    }
    fn recast(&self, parts: OwnedParts, to: &Q4Schema) -> OwnedParts {
        let Q4Schema::Int4(to) = to else { return parts };
        storage::recast(self, to, parts)
    }
    fn lacks(&self, layout: Layout, shape: [usize; 2], data: &SegmentData<'_>) -> Result<Option<Lack>> {
        storage::lacks(self, layout, shape, data)
    }

    fn wire(&self) -> Wire {
        Wire {
            nibble_order: Some(NibbleOrder::LowFirst),
            block: self.group,
            scales: Some(self.scales),
            ..Wire::default()
        }
    }

    fn sample(&self, shape: [usize; 2], draw: &Draw) -> OwnedParts {
        sample::random(self, shape, draw)
    }
    fn plausible(&self, shape: [usize; 2], fill: &mut dyn FnMut(&mut [u8])) -> Result<OwnedParts> {
        Ok(sample::plausible(self, shape, fill))
    }
    fn every_code(&self, factors: [usize; 2]) -> Option<Edge> {
        Some(sample::every_code(self, factors))
    }
    fn blocks(&self) -> Vec<Q4Schema> {
        sample::GROUPS.map(|group| Q4Schema::Int4(Self { group, ..*self })).into()
    }
    fn impossible(&self) -> Option<(&'static str, Q4Schema)> {
        Some(("group-of-24", Q4Schema::Int4(Self { group: 24, ..*self })))
    }
    fn loudest(&self, parts: &mut OwnedParts) {
        let nibble = |code: u8| if code >= ZERO { 15 } else { 0 };
        let loudest = |byte: &mut u8| *byte = nibble(*byte & 15) | nibble(*byte >> 4) << 4;
        parts.bytes_mut(Part::Codes).iter_mut().for_each(loudest);
    }
    fn silence(&self, parts: &mut OwnedParts, row: usize, k: usize) {
        let groups = self.groups(k);
        let codes = match self.zeros {
            Zeros::Biases => 0,
            _ => ZERO | ZERO << 4,
        };
        parts.bytes_mut(Part::Codes)[row * k / 2..][..k / 2].fill(codes);
        if self.zeros.are_stored() {
            let zero = if self.zeros == Zeros::Points { ZERO } else { 0 };
            let bytes = groups * self.zero_bytes();
            parts.bytes_mut(Part::Zeros)[row * bytes..][..bytes].fill(zero);
        }
    }
    fn spoil(&self, parts: &mut OwnedParts, row: usize, k: usize) {
        let nan = bytes_of(f32::NAN, self.scales);
        parts.bytes_mut(Part::Scales)[row * self.groups(k) * nan.len()..][..nan.len()].copy_from_slice(&nan);
    }
}

struct Rows<'a> {
    codes: &'a [u8],
    scales: Vec<f32>,
    zeros: Counted<'a>,
    k: usize,
    group: usize,
}

/// Where the codes of each group are counted from.
enum Counted<'a> {
    /// These zero points, or [`ZERO`].
    From(Option<&'a [u8]>),
    /// Zero, and then these are added.
    Biased(Vec<f32>),
}

impl Decode for Rows<'_> {
    fn row(&self, r: usize, out: &mut [f32]) {
        let codes = self.codes[r * self.k / 2..].chunks_exact(self.group / 2);
        let first = r * (self.k / self.group);
        for (g, (out, codes)) in out.chunks_exact_mut(self.group).zip(codes).enumerate() {
            let scale = self.scales[first + g];
            match &self.zeros {
                Counted::From(zeros) => {
                    let zero = zeros.map_or(ZERO, |zeros| zeros[first + g]);
                    each(codes, out, |code| f32::from(i16::from(code) - i16::from(zero)) * scale);
                }
                Counted::Biased(biases) => {
                    each(codes, out, |code| f32::from(code) * scale + biases[first + g])
                }
            }
        }
    }
}

fn each(codes: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    for (byte, pair) in codes.iter().zip(out.as_chunks_mut::<2>().0) {
        *pair = [value(byte & 15), value(byte >> 4)];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// One row under each scale there is, with each zero point.
    fn decoded(format: &Int4, scales: Vec<u8>) -> Result<Vec<f32>> {
        let rows = scales.len() / format.scales.size();
        let codes = [0x10u8, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe].repeat(rows);
        let mut parts = OwnedParts::default().with(Part::Codes, DType::U8, &[rows, 8], codes).with(
            Part::Scales,
            format.scales,
            &[rows, 1],
            scales,
        );
        if format.zeros == Zeros::Points {
            parts = parts.with(Part::Zeros, DType::U8, &[rows, 1], (0..rows).map(|r| r as u8 % 16).collect());
        }
        let data = parts.lend()?;
        let rows_of = format.decoder([rows, 16], &data)?;
        let mut out = vec![0.0; 16 * rows];
        out.chunks_mut(16).enumerate().for_each(|(r, out)| rows_of.row(r, out));
        Ok(out)
    }

    #[test]
    fn every_code_under_every_scale_of_16_bits_is_exact() -> Result<()> {
        for scales in [DType::F16, DType::BF16] {
            for zeros in [Zeros::Middle, Zeros::Points] {
                let bits = 0..=u16::MAX;
                let out = decoded(
                    &Int4 { group: 16, scales, zeros },
                    bits.clone().flat_map(u16::to_le_bytes).collect(),
                )?;
                for (r, bits) in bits.enumerate() {
                    let scale = match scales {
                        DType::F16 => f16::from_bits(bits).to_f64(),
                        _ => bf16::from_bits(bits).to_f64(),
                    };
                    let zero = if zeros == Zeros::Middle { 8 } else { r as i32 % 16 };
                    for code in 0..16 {
                        let (have, want) = (out[16 * r + code], f64::from(code as i32 - zero) * scale);
                        // Largest codes under the largest scales of bf16 are beyond f32, as infinity is.
                        let exact = f64::from(have) == want || f64::from(have) == f64::from(want as f32);
                        assert!(exact || (have.is_nan() && want.is_nan()), "{scales} {bits:04x} {code}");
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn groups_and_scales_that_do_not_exist_are_named() {
        let problems = |group, scales, k| {
            let mut all = Vec::new();
            Int4 { group, scales, zeros: Zeros::Middle }.check(k, &mut |p| all.push(p));
            all.join("; ")
        };
        assert_eq!(problems(128, DType::BF16, 256), "");
        assert_eq!(problems(128, DType::BF16, 192), "need k % 128 == 0; have k = 192");
        assert_eq!(problems(24, DType::F16, 48), "need groups of a multiple of 16; have 24");
        assert_eq!(problems(0, DType::F16, 48), "need groups of a multiple of 16; have 0");
        assert!(problems(16, DType::U8, 48).contains("have u8"));
    }
}
