//! Names, types and bytes of the tensors that a layout keeps a quantised matrix in, as its format says
//! ([`q4_core::formats::Format::tensors`]).
//!
//! [`entries`] and [`parts`] list the same tensors in the same order: sizes are promised before a value is
//! known.
use super::safetensors::Entry;
use super::words;
use crate::blocks::together;
use crate::quantize::Quantized;
use q4_core::detect::Layout;
use q4_core::formats::nf4::NESTED_BLOCK;
use q4_core::formats::storage::Content;
use q4_core::{Code, DType, Error, GlobalScale, Part, Q4Schema, Result};

/// Tensors that hold a matrix `[n, k]` of `layer` as `schema`; `dtype` is its type before or after that.
pub(super) fn entries(
    layout: Layout,
    schema: Q4Schema,
    layer: &str,
    dtype: DType,
    n: usize,
    k: usize,
) -> Vec<Entry> {
    let tensors = schema.tensors(layout, [n, k]).unwrap_or_default();
    let entry = |t: &q4_core::formats::storage::Tensor| {
        let state = [state(schema, dtype, [n, k], 0.0).len()];
        let shape = if t.content == Content::State { &state[..] } else { &t.shape };
        Entry::new(format!("{layer}.{}", t.suffix), t.dtype, shape)
    };
    tensors.iter().map(entry).collect()
}

/// Data of the tensors that [`entries`] lists.
pub(super) fn parts(layout: Layout, dtype: DType, q: &Quantized) -> Result<Vec<Vec<u8>>> {
    let tensors = q
        .schema
        .tensors(layout, [q.n, q.k])
        .ok_or_else(|| Error::new(Code::Internal, format!("{} is not written to any layout", q.schema)))?;
    let data = |content| match content {
        Content::Part(part) => q.parts.bytes(part).to_vec(),
        Content::Codes(order) => {
            let mut codes = q.parts.bytes(Part::Codes).to_vec();
            if q.schema.wire().nibble_order != Some(order) {
                codes.iter_mut().for_each(|b| *b = b.rotate_left(4));
            }
            codes
        }
        Content::Global => q.parts.global.map_or(1.0, GlobalScale::value).to_le_bytes().to_vec(),
        Content::Codebook => bytes(q.schema.codebook().map_or(&[], |book| &book.values[..])),
        Content::ZeroWords => words::zeros_by_row(q.parts.bytes(Part::Zeros), q.n),
        Content::Words(Part::Codes, of) => words::codes(q.parts.bytes(Part::Codes), [q.n, q.k], of),
        Content::Words(part, of) => words::zeros(q.parts.bytes(part), [q.n, q.k / q.schema.block()], of),
        Content::Transposed(part) => {
            let size = q.parts.dtype(part).map_or(1, DType::size);
            words::columns(q.parts.bytes(part), size, q.n)
        }
        Content::Groups(size) => words::groups(q.k, size),
        Content::Blocks(of) => together(q.parts.bytes(Part::Codes), q.parts.bytes(Part::Scales), of),
        Content::Shape(extents) => extents.iter().flat_map(|v| (*v as i64).to_le_bytes()).collect(),
        Content::State => state(q.schema, dtype, [q.n, q.k], q.parts.offset),
    };
    Ok(tensors.iter().map(|t| data(t.content)).collect())
}

fn state(schema: Q4Schema, dtype: DType, [n, k]: [usize; 2], offset: f32) -> Vec<u8> {
    let wire = schema.wire();
    quant_state(dtype, n, k, wire.block, (wire.nested_block != 0).then_some(offset))
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
