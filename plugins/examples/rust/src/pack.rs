//! The layout: panels of sixteen rows, a block per group of 16 along k. Lane r of a block's two code
//! registers holds eight codes of row r, so shifting a register by four bits brings the next element of all
//! rows into place.
use q4_plugin_sdk::q4_core::formats::{e2m1, e4m3, swizzle};
use q4_plugin_sdk::q4_core::{
    Nvfp4, Nvfp4Parts,
    Code, Convention, Error, GlobalScale, Q4Schema, Q4Weight, Result, ScaleLayout, Segment,
    TensorView,
};

/// Rows of a panel.
pub const LANES: usize = 16;
/// Elements of k per block scale.
pub const GROUP: usize = 16;

/// Sixteen rows by sixteen columns: 0.625 bytes an element.
#[repr(C, align(32))]
#[derive(Clone, Copy)]
pub struct Block {
    /// `codes[half][row]`: columns `8 half` to `8 half + 7`, the first in the low bits.
    pub codes: [[u32; LANES]; 2],
    /// Block scales as binary16, which holds every E4M3 value.
    pub scales: [u16; LANES],
}

/// A weight `[n, k]`.
pub struct Packed {
    pub n: usize,
    pub k: usize,
    /// `[panels][k / 16]`.
    blocks: Vec<Block>,
    /// What a sum of a row is multiplied with, one per row of every panel.
    factors: Vec<f32>,
    /// Per-tensor scale and end row of every segment, for the exact values.
    globals: Vec<(usize, Option<GlobalScale>)>,
}

impl Packed {
    /// Repacks a validated weight. Refuses block scales that are NaN or negative.
    pub fn new(w: &Q4Weight<'_>) -> Result<Self> {
        let (n, k, groups) = (w.n(), w.k, w.k / GROUP);
        let panels = n.div_ceil(LANES);
        let empty = Block { codes: [[0; LANES]; 2], scales: [0; LANES] };
        let mut blocks = vec![empty; panels * groups];
        each_block(w, |row, group, codes, scale| {
            let (block, lane) = (&mut blocks[row / LANES * groups + group], row % LANES);
            block.scales[lane] = half_of(e4m3::decode(scale));
            block.codes[0][lane] = u32::from_le_bytes([codes[0], codes[1], codes[2], codes[3]]);
            block.codes[1][lane] = u32::from_le_bytes([codes[4], codes[5], codes[6], codes[7]]);
        })?;
        let (globals, mut factors) = (globals(w)?, Vec::with_capacity(panels * LANES));
        for (end, global) in &globals {
            let factor = match global {
                None => 1.0,
                Some(g) if g.convention() == Convention::Divide => 1.0 / g.value(),
                Some(g) => g.value(),
            };
            factors.resize(*end, factor);
        }
        factors.resize(panels * LANES, 0.0);
        Ok(Self { n, k, blocks, factors, globals })
    }

    /// Bytes it keeps.
    pub fn bytes(&self) -> u64 {
        (size_of_val(&*self.blocks) + size_of_val(&*self.factors)) as u64
    }
    pub fn panels(&self) -> usize {
        self.factors.len() / LANES
    }
    pub fn groups(&self) -> usize {
        self.k / GROUP
    }
    /// The blocks of one panel, along k.
    pub fn panel(&self, panel: usize) -> &[Block] {
        &self.blocks[panel * self.groups()..][..self.groups()]
    }
    /// Factors of its rows.
    pub fn factors(&self, panel: usize) -> &[f32; LANES] {
        self.factors[panel * LANES..].first_chunk().unwrap_or(&[0.0; LANES])
    }

    /// The exact values of one group of one row: `fl32(code * fl32(scale ∘ global))`.
    pub fn decode(&self, row: usize, group: usize) -> [f32; GROUP] {
        let block = &self.panel(row / LANES)[group];
        let global = self.globals.iter().find(|(end, _)| row < *end).and_then(|(_, g)| *g);
        let scale = float_of(block.scales[row % LANES]);
        let scale = global.map_or(scale, |g| g.effective(scale));
        let codes = [block.codes[0][row % LANES], block.codes[1][row % LANES]];
        std::array::from_fn(|i| e2m1::decode((codes[i / 8] >> (4 * (i % 8)) & 15) as u8) * scale)
    }
}

/// Visits the stored blocks of a validated weight, segments one below the other: row, block along k, eight
/// bytes of codes, E4M3 scale. Refuses scales that are NaN or negative.
pub fn each_block(w: &Q4Weight<'_>, mut visit: impl FnMut(usize, usize, &[u8], u8)) -> Result<()> {
    let Q4Schema::Nvfp4(Nvfp4 { scale_layout, .. }) = w.schema else {
        return Err(Error::new(Code::Unsupported, "schema").need("nvfp4").have(w.schema.to_string()));
    };
    let (groups, mut first) = (w.k / GROUP, 0);
    for s in w.segments {
        let (codes, scales, _) = parts(s)?;
        let (codes, scales) = (codes.as_bytes()?, scales.as_bytes()?);
        for (r, g) in (0..s.rows).flat_map(|r| (0..groups).map(move |g| (r, g))) {
            let at = match scale_layout {
                ScaleLayout::RowMajor => r * groups + g,
                ScaleLayout::Swizzled128x4 => swizzle::offset(r, g, groups),
            };
            if scales[at] >= 0x7f {
                return Err(Error::new(Code::ScaleInvalid, format!("block scale [{r}, {g}]"))
                    .need("E4M3 without sign, not NaN")
                    .have(format!("{:#04x}", scales[at])));
            }
            visit(first + r, g, &codes[(r * groups + g) * 8..][..8], scales[at]);
        }
        first += s.rows;
    }
    Ok(())
}

/// End row and per-tensor scale of every segment.
pub fn globals(w: &Q4Weight<'_>) -> Result<Vec<(usize, Option<GlobalScale>)>> {
    let mut end = 0;
    let one = |s| {
        let (_, _, global) = parts(s)?;
        end += s.rows;
        Ok((end, global))
    };
    w.segments.iter().map(one).collect()
}

type Parts<'a> = (TensorView<'a>, TensorView<'a>, Option<GlobalScale>);

fn parts<'a>(s: &Segment<'a>) -> Result<Parts<'a>> {
    let parts = Nvfp4Parts::of(&s.data)
        .ok_or_else(|| Error::new(Code::SchemaInvalid, "segment").need("the parts of nvfp4"))?;
    Ok((parts.codes, parts.scales, parts.global))
}

/// Binary16 of an E4M3 value: both have exponents of a few bits, so shifting is exact.
fn half_of(v: f32) -> u16 {
    if v == 0.0 { 0 } else { ((v.to_bits() >> 13) - (112 << 10)) as u16 }
}

/// The value of a binary16 that is zero or normal.
pub fn float_of(h: u16) -> f32 {
    if h == 0 { 0.0 } else { f32::from_bits((u32::from(h) + (112 << 10)) << 13) }
}
