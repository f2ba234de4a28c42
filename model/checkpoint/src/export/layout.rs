//! How each layout names, types and arranges the parts of a quantised matrix.
//!
//! [`entries`] and [`parts`] list the same tensors in the same order: sizes are promised before a value is
//! known.
use super::safetensors::Entry;
use crate::quantize::{NESTED_BLOCK, Quantized};
use q4_core::detect::Layout;
use q4_core::formats::{nf4, nvfp4};
use q4_core::{Code, DType, Error, NibbleOrder, Q4Schema, Result};

/// Tensors that hold a matrix `[n, k]` of `layer` as `schema`; `dtype` is its type before or after that.
pub(super) fn entries(
    layout: Layout,
    schema: Q4Schema,
    layer: &str,
    dtype: DType,
    n: usize,
    k: usize,
) -> Vec<Entry> {
    let entry = |suffix: &str, dtype, shape: &[usize]| Entry::new(format!("{layer}.{suffix}"), dtype, shape);
    let (half, blocks) = (k / 2, k / nvfp4::BLOCK);
    match (layout, schema) {
        (Layout::ModelOpt, _) => vec![
            entry("weight", DType::U8, &[n, half]),
            entry("weight_scale", DType::F8E4M3, &[n, blocks]),
            entry("weight_scale_2", DType::F32, &[]),
        ],
        (Layout::CompressedTensors, _) => vec![
            entry("weight_packed", DType::U8, &[n, half]),
            entry("weight_scale", DType::F8E4M3, &[n, blocks]),
            entry("weight_global_scale", DType::F32, &[1]),
        ],
        (Layout::Dat, Q4Schema::Nvfp4 { global, .. }) => {
            let mut parts = vec![
                entry("weight.qdata", DType::U8, &[n, half]),
                entry("weight.scale", DType::F8E4M3, &[n, blocks]),
            ];
            if global.is_some() {
                parts.push(entry("weight.global_scale", DType::F32, &[1]));
            }
            parts
        }
        (Layout::Dat, Q4Schema::Nf4 { block, .. }) => vec![
            entry("weight", DType::U8, &[n, half]),
            entry("absmax", DType::F32, &[(n * k).div_ceil(block as usize)]),
            entry("quant_map", DType::F32, &[16]),
        ],
        (_, Q4Schema::Nf4 { block, nested, .. }) => {
            let double = nested.is_some();
            let absmax = (n * k).div_ceil(block as usize);
            let state = quant_state(dtype, n, k, block, double.then_some(0.0)).len();
            let mut parts = vec![
                entry("weight", DType::U8, &[(n * k).div_ceil(2), 1]),
                entry("weight.absmax", if double { DType::U8 } else { DType::F32 }, &[absmax]),
                entry("weight.quant_map", DType::F32, &[16]),
                entry("weight.quant_state.bitsandbytes__nf4", DType::U8, &[state]),
            ];
            if double {
                parts.push(entry("weight.nested_absmax", DType::F32, &[absmax.div_ceil(NESTED_BLOCK)]));
                parts.push(entry("weight.nested_quant_map", DType::F32, &[256]));
            }
            parts
        }
        _ => Vec::new(),
    }
}

/// Data of the tensors that [`entries`] lists.
pub(super) fn parts(layout: Layout, dtype: DType, q: Quantized) -> Result<Vec<Vec<u8>>> {
    let mut parts = Vec::with_capacity(6);
    match (q.schema, layout) {
        (Q4Schema::Nvfp4 { .. }, _) => {
            parts.extend([q.codes, q.scales]);
            parts.extend(q.global.map(|g| g.value().to_le_bytes().to_vec()));
        }
        (Q4Schema::Nf4 { nibble_order, .. }, Layout::Dat) => {
            let mut codes = q.codes;
            if nibble_order == NibbleOrder::HighFirst {
                codes.iter_mut().for_each(|b| *b = b.rotate_left(4));
            }
            parts.extend([codes, bytes(&q.absmax), bytes(&nf4::CODEBOOK)]);
        }
        (Q4Schema::Nf4 { block, .. }, _) => {
            let state = quant_state(dtype, q.n, q.k, block, q.nested.as_ref().map(|n| n.2));
            let (codes, map) = (q.codes, bytes(&nf4::CODEBOOK));
            match q.nested {
                None => parts.extend([codes, bytes(&q.absmax), map, state]),
                Some((absmax, nested, _)) => {
                    parts.extend([codes, absmax, map, state, bytes(&nested), bytes(nf4::dynamic_map())]);
                }
            }
        }
        (schema, _) => {
            return Err(Error::new(Code::Internal, format!("{schema} is not written to any layout")));
        }
    }
    Ok(parts)
}

/// The JSON bitsandbytes keeps beside a weight. Its size must not depend on the offset, hence the spaces at
/// the end.
fn quant_state(dtype: DType, n: usize, k: usize, block: u32, offset: Option<f32>) -> Vec<u8> {
    const WIDEST_NUMBER: usize = 24;
    let mut text =
        format!(r#"{{"quant_type": "nf4", "blocksize": {block}, "dtype": "{dtype}", "shape": [{n}, {k}]"#);
    match offset {
        None => text.push('}'),
        Some(offset) => {
            text.push_str(&format!(r#", "nested_blocksize": {NESTED_BLOCK}, "nested_dtype": "float32""#));
            let number = serde_json::Value::from(f64::from(offset)).to_string();
            text.push_str(&format!(
                r#", "nested_offset": {number}}}{:1$}"#,
                "",
                WIDEST_NUMBER - number.len().min(WIDEST_NUMBER)
            ));
        }
    }
    text.into_bytes()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quant_state_has_one_size_and_parses() {
        let plain = quant_state(DType::BF16, 256, 96, 64, None);
        assert_eq!(
            plain,
            br#"{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [256, 96]}"#
        );
        let promised = quant_state(DType::F32, 8, 64, 64, Some(0.0)).len();
        for offset in [0.401_159_67f32, -0.0, f32::MIN, f32::MAX, f32::MIN_POSITIVE, -1e-45, 3.0] {
            let text = quant_state(DType::F32, 8, 64, 64, Some(offset));
            assert_eq!(text.len(), promised, "{offset}");
            let value: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
            assert_eq!(value["nested_offset"].as_f64().map(|v| v as f32), Some(offset));
        }
    }
}
