//! The layouts that NF4 is stored in.
use super::{HighFirst, LowFirst, NESTED_BLOCK, Nf4, encoding, has_block};
use crate::formats::Lack;
use crate::formats::storage::{Content, Detected, LayerKeys, Layout, Probe, Rule, StateReader, Tensor};
use crate::{DType, Part, Result};

pub(super) static RULES: [Rule; 2] = [
    Rule {
        layout: Layout::Bitsandbytes,
        is_there: |p| p.has("weight.absmax") || p.has("weight.quant_map"),
        read: bitsandbytes,
    },
    Rule {
        layout: Layout::Dat,
        is_there: |p| {
            let is_whole = p.has("quant_map") && p.has("weight");
            p.has("absmax") && (is_whole || p.has("weight.qdata") || p.has("qdata"))
        },
        read: |p, _| Ok(dat(p)),
    },
];

fn bitsandbytes(p: &mut Probe<'_>, quant_state: StateReader<'_>) -> Result<Option<Detected>> {
    let Some(key) = p.key("weight.quant_state.bitsandbytes__nf4") else {
        let fp4 = p.key("weight.quant_state.bitsandbytes__fp4").map_or("none", |_| "bitsandbytes FP4");
        p.problem("weight.quant_state.bitsandbytes__nf4", "the JSON of an NF4 weight", fp4);
        return Ok(None);
    };
    let state = quant_state(&key)?;
    let (n, k) = match state.shape.as_slice() {
        &[n, k] if n > 0 && k > 0 && n.checked_mul(k).is_some() => (n, k),
        other => {
            p.problem("weight.quant_state", "a shape [out, in]", &format!("{other:?}"));
            return Ok(None);
        }
    };
    if state.quant_type != "nf4" {
        p.problem("weight.quant_state", "quant_type nf4", &state.quant_type);
    }
    check_block(p, state.block);
    let blocks = (n * k).div_ceil(state.block.max(1) as usize);
    let by_shape = "as the shape of weight.quant_state says";
    let by_block = "as blocksize of weight.quant_state says";
    p.count("weight", &[DType::U8], (n * k).div_ceil(2), by_shape);
    p.count("weight.quant_map", &[DType::F32], 16, "one a code");
    match state.nested {
        None => p.count("weight.absmax", &[DType::F32], blocks, by_block),
        Some((nested, offset)) => {
            if nested == 0 || !offset.is_finite() {
                p.problem(
                    "weight.quant_state",
                    "nested_blocksize > 0, a finite offset",
                    &format!("{nested}, {offset}"),
                );
            }
            p.count("weight.absmax", &[DType::U8], blocks, by_block);
            p.count("weight.nested_quant_map", &[DType::F32], 256, "one a code");
            let second = blocks.div_ceil(nested.max(1) as usize);
            p.count("weight.nested_absmax", &[DType::F32], second, "as nested_blocksize says");
        }
    }
    let keys = LayerKeys {
        weight: p.key("weight").unwrap_or_default(),
        absmax: p.key("weight.absmax"),
        quant_map: p.key("weight.quant_map"),
        nested_map: state.nested.and_then(|_| p.key("weight.nested_quant_map")),
        nested_absmax: state.nested.and_then(|_| p.key("weight.nested_absmax")),
        ..LayerKeys::default()
    };
    let schema = encoding(HighFirst, state.block, state.nested.map(|s| s.0));
    let nested_offset = state.nested.map_or(0.0, |s| s.1);
    Ok(Some(Detected { layout: Layout::Bitsandbytes, schema, n, k, keys, nested_offset }))
}

fn dat(p: &mut Probe<'_>) -> Option<Detected> {
    let [n, half] = p.matrix("weight", &[DType::U8])?;
    let k = half * 2;
    let absmax = p.tensor("absmax", &[DType::F32])?.len();
    p.count("quant_map", &[DType::F32], 16, "one a code");
    if absmax == 0 || (n * k) % absmax != 0 {
        p.problem("absmax", &format!("a divisor of {} elements", n * k), &absmax.to_string());
        return None;
    }
    let block = u32::try_from(n * k / absmax).unwrap_or(u32::MAX);
    check_block(p, block);
    let keys = LayerKeys {
        weight: p.key("weight")?,
        absmax: p.key("absmax"),
        quant_map: p.key("quant_map"),
        ..LayerKeys::default()
    };
    let schema = encoding(LowFirst, block, None);
    Some(Detected { layout: Layout::Dat, schema, n, k, keys, nested_offset: 0.0 })
}

fn check_block(p: &mut Probe<'_>, block: u32) {
    if !has_block(block) {
        p.problem("absmax", "a block size of 32 to 4096, a power of two", &block.to_string());
    }
}

/// The tensors that writers of a layout store.
pub(super) fn tensors(format: &Nf4, layout: Layout, [n, k]: [usize; 2]) -> Option<Vec<Tensor>> {
    let blocks = (n * k).div_ceil(format.block as usize);
    let (part, one) = (Content::Part, Tensor::new);
    let codes = Content::Codes;
    Some(match (layout, format.nested) {
        (Layout::Dat, _) => vec![
            one("weight", codes(LowFirst), DType::U8, &[n, k / 2]),
            one("absmax", part(Part::Scales), DType::F32, &[blocks]),
            one("quant_map", Content::Codebook, DType::F32, &[16]),
        ],
        (Layout::Bitsandbytes, nested) => {
            let scales = if nested.is_some() { DType::U8 } else { DType::F32 };
            let mut all = vec![
                one("weight", codes(HighFirst), DType::U8, &[(n * k).div_ceil(2), 1]),
                one("weight.absmax", part(Part::Scales), scales, &[blocks]),
                one("weight.quant_map", Content::Codebook, DType::F32, &[16]),
                one("weight.quant_state.bitsandbytes__nf4", Content::State, DType::U8, &[]),
            ];
            if nested.is_some() {
                let second = blocks.div_ceil(NESTED_BLOCK);
                all.push(one("weight.nested_absmax", part(Part::SecondScales), DType::F32, &[second]));
                all.push(one("weight.nested_quant_map", part(Part::Map), DType::F32, &[256]));
            }
            all
        }
        _ => return None,
    })
}

/// A `.dat` file has f32 absmax, one for each of several whole blocks, and two codes of a row in every byte.
pub(super) fn lacks(format: &Nf4, layout: Layout, [n, k]: [usize; 2]) -> Option<Lack> {
    let Nf4 { block, nested, .. } = format;
    let lack = |part, need, have| Some(Lack { part, need, have });
    if layout != Layout::Dat {
        None
    } else if nested.is_some() {
        lack(Part::Scales, "absmax in float32", "8-bit codes of a double quantisation".to_owned())
    } else if k % 2 != 0 {
        lack(Part::Codes, "an even number of in features", format!("[{n}, {k}]"))
    } else if n * k % *block as usize != 0 {
        lack(Part::Scales, "whole blocks", format!("{} elements in blocks of {block}", n * k))
    } else {
        None
    }
}
