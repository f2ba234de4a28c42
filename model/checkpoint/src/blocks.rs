//! Blocks of GGML: taken apart into the codes and scales of a format, or decoded, in the order of operations
//! that GGML has.
use half::f16;
use q4_core::formats::ggml::Blocks;
use q4_gguf::GgmlType;

/// Codes, low nibble first, and scales of blocks of `BLOCK` bytes: `SCALES` bytes of those first, then as
/// many runs of `CODES` bytes as fit, byte j of which holds elements j and `CODES` + j.
pub(super) fn apart<const BLOCK: usize, const SCALES: usize, const CODES: usize>(
    blocks: &[u8],
) -> (Vec<u8>, Vec<u8>) {
    let count = blocks.len() / BLOCK;
    let mut codes = Vec::with_capacity(count * (BLOCK - SCALES));
    let mut scales = Vec::with_capacity(count * SCALES);
    for block in blocks.as_chunks::<BLOCK>().0 {
        let (of, runs) = block.split_at(SCALES);
        scales.extend_from_slice(of);
        for run in runs.as_chunks::<CODES>().0 {
            let pairs = run.as_chunks::<2>().0;
            codes.extend(pairs.iter().map(|[a, b]| a & 15 | (b & 15) << 4));
            codes.extend(pairs.iter().map(|[a, b]| a >> 4 | b & 0xf0));
        }
    }
    (codes, scales)
}

/// The way back of [`apart`]: blocks of so many bytes of `scales`, then so many of `codes` in runs of so
/// many.
pub(super) fn together(codes: &[u8], scales: &[u8], [of, bytes, run]: [usize; 3]) -> Vec<u8> {
    let mut blocks = Vec::with_capacity(codes.len() + scales.len());
    for (codes, scales) in codes.chunks_exact(bytes).zip(scales.chunks_exact(of)) {
        blocks.extend_from_slice(scales);
        for codes in codes.chunks_exact(run) {
            let (low, high) = codes.split_at(run / 2);
            let pairs = low.iter().zip(high);
            blocks.extend(pairs.flat_map(|(low, high)| [low & 15 | high << 4, low >> 4 | high & 0xf0]));
        }
    }
    blocks
}

/// The format that blocks of a type are.
pub(super) fn own(kind: GgmlType) -> Option<Blocks> {
    match kind {
        GgmlType::Q4_K => Some(Blocks::Q4K),
        GgmlType::Q5_K => Some(Blocks::Q5K),
        GgmlType::Q6_K => Some(Blocks::Q6K),
        GgmlType::Q8_0 => Some(Blocks::Q80),
        _ => None,
    }
}

/// Appends what blocks of Q4_0 stand for, in f32.
pub(super) fn decode(blocks: &[u8], to: &mut Vec<u8>) {
    blocks.as_chunks().0.iter().for_each(|block| to.extend_from_slice(bytemuck::cast_slice(&q4_0(block))));
}

/// A scale, then a byte for elements j and 16 + j: `(code - 8) · scale`.
fn q4_0(block: &[u8; 18]) -> [f32; 32] {
    let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
    std::array::from_fn(|i| {
        let code = block[2 + i % 16] >> (i / 16 * 4) & 15;
        f32::from(i16::from(code) - 8) * scale
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use q4_core::formats::{mxfp4, nvfp4};
    use safetensors::SafeTensors;

    const BLOCKS: &[u8] = include_bytes!("../../../conformance/golden/gguf.safetensors");
    const INTEGERS: &[u8] = include_bytes!("../../../conformance/golden/gguf_integers.safetensors");

    /// Blocks, and what the gguf package decodes them to.
    fn recorded(file: &[u8], name: &str) -> (Vec<u8>, Vec<f32>) {
        let file = SafeTensors::deserialize(file).expect("the record");
        let get = |part: &str| file.tensor(&format!("{name}.{part}")).expect(part).data().to_vec();
        let floats = get("dequant").as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        (get("blocks"), floats)
    }

    #[test]
    fn blocks_decode_as_the_gguf_package_decodes_them() {
        let (blocks, want) = recorded(BLOCKS, "mxfp4");
        let ((codes, scales), mut got) = (apart::<17, 1, 16>(&blocks), vec![0.0; want.len()]);
        mxfp4::dequantize_row(&codes, &scales, &mut got);
        assert_eq!(got, want);
        for name in ["nvfp4", "nvfp4_raw"] {
            let (blocks, want) = recorded(BLOCKS, name);
            let ((codes, scales), mut got) = (apart::<36, 4, 8>(&blocks), vec![0.0; want.len()]);
            // GGML takes the byte of NaN for zero, which q4 refuses.
            let scales: Vec<u8> = scales.into_iter().map(|s| if s == 0x7f { 0 } else { s }).collect();
            nvfp4::dequantize_row(&codes, &scales, None, &mut got);
            assert_eq!(got, want, "{name}");
        }
    }

    #[test]
    fn blocks_are_put_together_as_they_were() {
        let (blocks, _) = recorded(BLOCKS, "mxfp4");
        let (codes, scales) = apart::<17, 1, 16>(&blocks);
        assert_eq!(together(&codes, &scales, [1, 16, 16]), blocks);
        let (blocks, _) = recorded(BLOCKS, "nvfp4");
        let (codes, scales) = apart::<36, 4, 8>(&blocks);
        assert_eq!(together(&codes, &scales, [4, 32, 8]), blocks);
        let (blocks, _) = recorded(INTEGERS, "q4_0");
        let (codes, scales) = apart::<18, 2, 16>(&blocks);
        assert_eq!(together(&codes, &scales, [2, 16, 16]), blocks);
    }

    #[test]
    fn blocks_of_integers_decode_to_the_same_bits() {
        for kind in [GgmlType::Q4_K, GgmlType::Q5_K, GgmlType::Q6_K, GgmlType::Q8_0] {
            let (blocks, want) = recorded(INTEGERS, &kind.name().to_lowercase());
            let mut got = vec![0.0; want.len()];
            own(kind).expect("a format").decode(&blocks, &mut got);
            let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(!want.is_empty() && bits(&got) == bits(&want), "{kind}");
        }
        let (blocks, want) = recorded(INTEGERS, "q4_0");
        let mut got = Vec::new();
        decode(&blocks, &mut got);
        assert!(got == bytemuck::cast_slice::<f32, u8>(&want));
        // Taken apart, Q4_0 is int4 in groups of 32 with scales of f16.
        let (codes, scales) = apart::<18, 2, 16>(&blocks);
        let scales: Vec<f32> =
            scales.as_chunks::<2>().0.iter().map(|s| f16::from_le_bytes(*s).to_f32()).collect();
        let value = |i: usize| f32::from(i16::from(codes[i / 2] >> (i % 2 * 4) & 15) - 8) * scales[i / 32];
        assert!((0..want.len()).all(|i| value(i).to_bits() == want[i].to_bits()));
    }
}
