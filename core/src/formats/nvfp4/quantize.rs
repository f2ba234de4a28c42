//! Quantising to NVFP4.
use super::{BLOCK, Nvfp4, Quantizer, RowMajor, global_from_amax, sample};
use crate::formats::quantize::{Encoder, PIECE, Rows, amax, parallel};
use crate::formats::storage::Layout;
use crate::{Code, Convention, DType, Error, GlobalScale, OwnedParts, Q4Schema, Result, Rule, ThreadPool};
use serde::Serialize;

/// How many scales an NVFP4 value has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scales {
    /// A block scale times a per-tensor scale.
    TwoLevel,
    /// A block scale only. E4M3 is coarse at the size weights have, which costs 1 to 3 dB.
    Single,
}

/// How an NVFP4 block scale is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// The amax of the block maps to 6.
    Rtn,
    /// The amax maps to 6 or to 4, whichever has the smaller squared error; a tie goes to 6 (arXiv
    /// 2512.02010).
    FourOverSix,
    /// Of the scale that maps the amax to 6 and eight E4M3 codes on either side, the one with the smallest
    /// squared error.
    Search,
}

/// E2M1 codes with E4M3 block scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ToNvfp4 {
    /// Rounding; fixes the convention of the per-tensor scale.
    pub rule: Rule,
    /// One level or two.
    pub scales: Scales,
    /// Choice of the block scale.
    pub method: Method,
}

impl ToNvfp4 {
    /// As the tool whose layout it is rounds. `scales: None` is the layout's convention: single-level in
    /// `Dat`, two-level elsewhere.
    pub fn new(layout: Layout, scales: Option<Scales>, method: Method) -> Self {
        let scales = scales.unwrap_or(if layout == Layout::Dat { Scales::Single } else { Scales::TwoLevel });
        let rule = match (layout, scales) {
            (Layout::CompressedTensors, _) => Rule::CompressedTensors,
            (Layout::Dat, Scales::Single) => Rule::Runtime,
            _ => Rule::ModelOpt,
        };
        Self { rule, scales, method }
    }

    const fn format(&self) -> Nvfp4 {
        let global = match self.scales {
            Scales::TwoLevel => Some(self.rule.convention()),
            Scales::Single => None,
        };
        Nvfp4 { scale_layout: RowMajor, global }
    }
}

impl Encoder for ToNvfp4 {
    fn in_words(&self) -> String {
        let levels = match self.scales {
            Scales::TwoLevel => "block scales and one per tensor",
            Scales::Single => "block scales alone",
        };
        format!("nvfp4 with {levels}, rounded as {} does", self.rule.as_str())
    }
    fn schema(&self) -> Q4Schema {
        Q4Schema::Nvfp4(self.format())
    }
    fn rule(&self) -> Option<Rule> {
        Some(self.rule)
    }
    fn fits(&self, layout: Layout) -> bool {
        match self.format().global {
            None => layout == Layout::Dat,
            Some(Convention::Multiply) => matches!(layout, Layout::ModelOpt | Layout::Dat),
            Some(Convention::Divide) => layout == Layout::CompressedTensors,
        }
    }
    fn fix(&self) -> &'static str {
        match self.scales {
            Scales::Single => "--layout dat has block scales alone; the others need --scales two-level",
            Scales::TwoLevel => "--layout modelopt, compressed-tensors or dat; or --format nf4",
        }
    }
    fn lacks(&self, _: Layout, _: usize, k: usize) -> Option<&'static str> {
        (k % BLOCK != 0).then_some("in features divisible by 16 for NVFP4")
    }
    fn encode(&self, rows: &Rows<'_>, global_amax: Option<f32>, threads: &ThreadPool) -> Result<OwnedParts> {
        let Self { rule, scales, method } = *self;
        let (n, k) = (rows.n, rows.k);
        if k % BLOCK != 0 {
            return Err(Error::new(Code::TensorShape, rows.name)
                .need("in features divisible by 16 for NVFP4")
                .have(format!("[{n}, {k}]"))
                .fix("exclude this layer, or use --format nf4"));
        }
        let (limit, global) = match scales {
            Scales::Single => (f32::INFINITY, None),
            Scales::TwoLevel => {
                let amax = global_amax.map_or_else(|| amax(rows, threads), Ok)?;
                (amax, Some(global_from_amax(rule, amax, rows.dtype)?))
            }
        };
        let quantizer = Quantizer { rule, global, source: rows.dtype };
        let elements = n * k;
        let (mut codes, mut block_scales) = (vec![0u8; elements / 2], vec![0u8; elements / BLOCK]);
        let pieces: Vec<_> =
            codes.chunks_mut(PIECE / 2).zip(block_scales.chunks_mut(PIECE / BLOCK)).enumerate().collect();
        parallel(threads, pieces, |(i, (codes, scales))| {
            let mut x = vec![0f32; codes.len() * 2];
            let own = rows.read(i * PIECE, &mut x)?;
            if own > limit {
                return Err(Error::new(Code::ValueInvalid, format!("{}: amax of the group", rows.name))
                    .need(format!("at least the matrix's own, {own} or more"))
                    .have(limit.to_string()));
            }
            match method {
                Method::Rtn => quantizer.quantize_row(&x, codes, scales),
                Method::FourOverSix => quantizer.quantize_row_four_over_six(&x, codes, scales),
                Method::Search => quantizer.quantize_row_search(&x, codes, scales),
            }
        })?;
        Ok(sample::parts(&self.format(), [n, k], codes, &block_scales).with_global(global))
    }
}

/// The smallest amax, at least `amax`, whose per-tensor scale under `rule` is a power of two; zero stays
/// zero. `s * code` then has six significant bits, so bf16 holds every decoded weight exactly.
pub fn power_of_two_amax(rule: Rule, amax: f32) -> f32 {
    if amax == 0.0 {
        return 0.0;
    }
    let mut scale =
        f32::from_bits((amax / GlobalScale::RANGE).to_bits() & 0x7f80_0000).max(f32::MIN_POSITIVE);
    while GlobalScale::RANGE * scale < amax {
        scale *= 2.0;
    }
    let exact = GlobalScale::RANGE * scale;
    // A rule that divides computes `RANGE * (1 / amax)`, which may miss the power of two by a rounding.
    let mut near = exact;
    for _ in 0..4 {
        let global = global_from_amax(rule, near, DType::F32).map_or(0.0, GlobalScale::value);
        if global.to_bits() & 0x007f_ffff == 0 {
            return near;
        }
        near = f32::from_bits(near.to_bits() + 1);
    }
    exact
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_reaches_a_power_of_two() {
        for rule in [Rule::ModelOpt, Rule::CompressedTensors, Rule::TorchAo, Rule::TransformerEngine] {
            for e in -60..60 {
                let wanted = 1.37 * (e as f32).exp2();
                let amax = power_of_two_amax(rule, wanted);
                assert!(amax >= wanted && amax < wanted * 2.01, "{rule:?}: {wanted} -> {amax}");
                let global = global_from_amax(rule, amax, DType::F32).expect("finite").value();
                assert_eq!(
                    global.to_bits() & 0x007f_ffff,
                    0,
                    "{rule:?}: amax {wanted} has the scale {global}"
                );
            }
        }
    }
}
