//! FP8: a byte of E4M3 for a weight, and scales for a whole matrix, for an out feature or for tiles of 128 by
//! 128, as compressed-tensors (`float-quantized`), ModelOpt and transformers (`fp8`) store it beside 4-bit
//! layers.
mod facts;
pub mod inputs;
mod sample;
mod storage;

pub(super) use self::storage::is_there as is_stored;
use super::facts::Facts;
use super::sample::{Draw, Edge};
use super::storage::{Described, Layout, Tensor};
use super::{Decode, Format, Kind, PartSpec, Q4Schema, Test, ValueRule, Wire, e4m3};
use crate::{Convention, DType, OwnedParts, Part, Result, SchemaId, SegmentData, read_floats};
use serde::Serialize;

/// Codes of E4M3FN, none of them NaN, under a scale for each tile of the matrix:
/// `value = e4m3(code) * scale`, rounded once to f32, which is exact for scales of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Fp8 {
    /// Out and in features under one scale, from the first of a segment on; 0 for all there are. The last
    /// tiles may be cut.
    pub tile: [u32; 2],
    /// Type of the scales: f16, bf16 or f32.
    pub scales: DType,
}

/// In features are a multiple of this: what processors multiply at a time.
pub const BLOCK: usize = 16;
/// Tiles that checkpoints have: the matrix, an out feature, and a square.
pub const TILES: [[u32; 2]; 3] = [[0, 0], [1, 0], [128, 128]];

const fn encoding(tile: [u32; 2], scales: DType) -> Q4Schema {
    Q4Schema::Fp8(Fp8 { tile, scales })
}

/// FP8 before its parameters are known.
pub static KIND: Kind = Kind {
    names: &[("fp8", 12)],
    usual: &[encoding([128, 128], DType::BF16), encoding([1, 0], DType::BF16), encoding([0, 0], DType::F32)],
    rarer: &[encoding([128, 128], DType::F32), encoding([1, 0], DType::F16)],
    from_wire: |_, wire| Ok(encoding([wire.nested_block, wire.block], wire.scales.ok_or("type of scales")?)),
    quantization: None,
    edges: sample::edges,
    rules: &storage::RULES,
};

/// Tiles of a matrix `[rows, k]`, along out and along in features.
pub fn grid(tile: [u32; 2], [rows, k]: [usize; 2]) -> [usize; 2] {
    let along = |size: u32, extent: usize| if size == 0 { 1 } else { extent.div_ceil(size as usize) };
    [along(tile[0], rows), along(tile[1], k)]
}

impl Fp8 {
    /// Scales of a matrix `[rows, k]`, along out and along in features.
    pub fn grid(&self, rows: usize, k: usize) -> [usize; 2] {
        grid(self.tile, [rows, k])
    }
    /// In features under one scale, of `k`.
    pub fn reach(&self, k: usize) -> usize {
        if self.tile[1] == 0 { k } else { self.tile[1] as usize }
    }
    /// Which scale of a matrix with `k` in features an element has.
    pub fn scale_of(&self, row: usize, column: usize, k: usize) -> usize {
        let at = |size: u32, i: usize| i.checked_div(size as usize).unwrap_or(0);
        at(self.tile[0], row) * self.grid(1, k)[1] + at(self.tile[1], column)
    }
}

impl Format for Fp8 {
    fn id(&self) -> SchemaId {
        SchemaId { name: "fp8", revision: 1 }
    }
    fn label(&self) -> String {
        let tile = match self.tile {
            [0, 0] => "tensor".to_owned(),
            [1, 0] => "channel".to_owned(),
            [rows, columns] => format!("{rows}x{columns}"),
        };
        let scales = match self.scales {
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            _ => "f32",
        };
        format!("fp8.{tile}.{scales}")
    }
    fn code_bits(&self) -> u32 {
        8
    }

    fn k_block(&self) -> usize {
        BLOCK
    }
    /// In features of a tile; of those that have no end, one.
    fn block(&self) -> usize {
        (self.tile[1] as usize).max(1)
    }
    fn activations(&self) -> &'static [&'static str] {
        &["native", "int8", "fp8"]
    }
    fn tile(&self) -> Option<[u32; 2]> {
        Some(self.tile)
    }

    fn parts(&self, rows: usize, k: usize) -> Vec<PartSpec> {
        let codes = PartSpec::new(Part::Codes, "codes", DType::U8, &[rows, k]);
        vec![
            PartSpec { or: Some(DType::F8E4M3), ..codes },
            PartSpec::new(Part::Scales, "scales", self.scales, &self.grid(rows, k)),
        ]
    }
    fn stored_bytes(&self, n: usize, k: usize) -> u64 {
        let [rows, columns] = self.grid(n, k);
        (n * k + rows * columns * self.scales.size()) as u64
    }
    fn check(&self, k: usize, problem: &mut dyn FnMut(String)) {
        let [rows, columns] = self.tile;
        if !k.is_multiple_of(BLOCK) {
            problem(format!("need k % {BLOCK} == 0; have k = {k}"));
        }
        if !columns.is_multiple_of(BLOCK as u32) || rows == 0 && columns != 0 {
            problem(format!(
                "need tiles of all in features or of a multiple of 16 of some out features; have {rows} x \
                 {columns}"
            ));
        }
        if !self.scales.is_io() {
            problem(format!("need scales of float32, float16 or bfloat16; have {}", self.scales));
        }
    }

    fn decoder<'a>(&self, [_, k]: [usize; 2], data: &SegmentData<'a>) -> Result<Box<dyn Decode + 'a>> {
        let stored = data.need(Part::Scales)?;
        let mut scales = vec![0.0; stored.len()];
        read_floats(stored.as_bytes()?, self.scales, &mut scales);
        Ok(Box::new(Rows { format: *self, codes: data.need(Part::Codes)?.as_bytes()?, scales, k }))
    }

    fn values(&self) -> Vec<ValueRule> {
        let test = Test::Code { is_bad: e4m3::is_nan };
        vec![
            ValueRule { part: Part::Codes, need: "codes that are numbers", test },
            ValueRule { part: Part::Scales, need: "finite scales", test: Test::Finite },
        ]
    }
    fn facts(&self, shape: [usize; 2], data: &SegmentData<'_>, _: &[u8]) -> Result<Option<Facts>> {
        facts::facts(self, shape, data).map(Some)
    }

    fn tensors(&self, layout: Layout, shape: [usize; 2]) -> Option<Vec<Tensor>> {
        storage::tensors(self, layout, shape)
    }
    fn described(&self) -> Option<Described> {
        storage::described(self)
    }
    fn plain(&self, _: Layout, _: Option<Convention>) -> Q4Schema {
        Q4Schema::Fp8(*self)
    }

    fn wire(&self) -> Wire {
        let [nested_block, block] = self.tile;
        Wire { block, nested_block, scales: Some(self.scales), ..Wire::default() }
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
        TILES.map(|tile| Q4Schema::Fp8(Self { tile, ..*self })).into()
    }
    fn impossible(&self) -> Option<(&'static str, Q4Schema)> {
        Some(("tiles-of-24", Q4Schema::Fp8(Self { tile: [128, 24], ..*self })))
    }
    fn loudest(&self, parts: &mut OwnedParts) {
        parts.bytes_mut(Part::Codes).iter_mut().for_each(|code| *code = *code & 0x80 | sample::LARGEST);
    }
    fn silence(&self, parts: &mut OwnedParts, row: usize, k: usize) {
        parts.bytes_mut(Part::Codes)[row * k..][..k].fill(0);
    }
    /// A scale may be that of all rows, and a code can be NaN as well.
    fn spoil(&self, parts: &mut OwnedParts, row: usize, k: usize) {
        parts.bytes_mut(Part::Codes)[row * k] = 0x7f;
    }
}

struct Rows<'a> {
    format: Fp8,
    codes: &'a [u8],
    scales: Vec<f32>,
    k: usize,
}

impl Decode for Rows<'_> {
    fn row(&self, r: usize, out: &mut [f32]) {
        let reach = self.format.reach(self.k).max(1);
        let codes = self.codes[r * self.k..][..self.k].chunks(reach);
        for (tile, (out, codes)) in out.chunks_mut(reach).zip(codes).enumerate() {
            let scale = self.scales[self.format.scale_of(r, tile * reach, self.k)];
            out.iter_mut().zip(codes).for_each(|(v, code)| *v = e4m3::decode(*code) * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_code_under_every_scale_of_16_bits_is_exact() -> Result<()> {
        let codes: Vec<u8> = (0..=255).filter(|code| !e4m3::is_nan(*code)).collect();
        for scales in [DType::F16, DType::BF16] {
            let format = Fp8 { tile: [1, 0], scales };
            for bits in 0..=u16::MAX {
                let parts = OwnedParts::default()
                    .with(Part::Codes, DType::U8, &[1, 254], codes.clone())
                    .with(Part::Scales, scales, &[1, 1], bits.to_le_bytes().to_vec());
                let mut out = [0.0; 254];
                format.decoder([1, 254], &parts.lend()?)?.row(0, &mut out);
                let scale = match scales {
                    DType::F16 => f16::from_bits(bits).to_f64(),
                    _ => bf16::from_bits(bits).to_f64(),
                };
                for (code, have) in codes.iter().zip(out) {
                    let want = f64::from(e4m3::decode(*code)) * scale;
                    // Beside the ends of f32, where bf16 ends too.
                    let exact = f64::from(have) == want || have.to_bits() == (want as f32).to_bits();
                    assert!(exact || (have.is_nan() && want.is_nan()), "{scales} {bits:04x} {code:02x}");
                }
            }
        }
        Ok(())
    }

    #[test]
    fn tiles_are_counted_from_the_first_row_and_may_be_cut() -> Result<()> {
        let format = Fp8 { tile: [2, 16], scales: DType::F32 };
        assert_eq!((format.grid(5, 40), format.grid(1, 16)), ([3, 3], [1, 1]));
        let scales: Vec<u8> = (1..=9).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let parts = OwnedParts::default().with(Part::Codes, DType::U8, &[5, 40], vec![0x38; 200]).with(
            Part::Scales,
            DType::F32,
            &[3, 3],
            scales,
        );
        let data = parts.lend()?;
        let rows = format.decoder([5, 40], &data)?;
        let mut out = [0.0; 40];
        for (r, first) in [(0, 1.0), (1, 1.0), (3, 4.0), (4, 7.0)] {
            rows.row(r, &mut out);
            assert_eq!([out[0], out[15], out[16], out[39]], [first, first, first + 1.0, first + 2.0], "{r}");
        }
        Ok(())
    }

    #[test]
    fn tiles_and_scales_that_do_not_exist_are_named() {
        let problems = |tile, scales| {
            let mut all = Vec::new();
            Fp8 { tile, scales }.check(48, &mut |p| all.push(p));
            all.join("; ")
        };
        for tile in TILES {
            assert_eq!(problems(tile, DType::BF16), "");
        }
        assert!(problems([128, 24], DType::F32).contains("have 128 x 24"));
        assert!(problems([0, 128], DType::F32).contains("have 0 x 128"));
        assert!(problems([1, 0], DType::U8).contains("have u8"));
    }
}
