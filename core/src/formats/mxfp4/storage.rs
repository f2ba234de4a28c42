//! The layouts that MXFP4 is stored in.
use super::{BLOCK, ENCODING};
use crate::formats::mlx;
use crate::formats::storage::{Content, Described, Detected, LayerKeys, Layout, Probe, Rule, Tensor};
use crate::{DType, Part};

pub(super) const DESCRIBED: Described = Described {
    format: "mxfp4-pack-quantized",
    kind: "float",
    bits: 4,
    strategy: "group",
    group_size: 32,
    scale_dtype: Some("torch.uint8"),
    symmetric: true,
};

pub(super) static RULES: [Rule; 2] = [
    Rule { layout: Layout::CompressedTensors, is_there: is_compressed_tensors, read: |p, _| Ok(read(p)) },
    Rule {
        layout: Layout::Mlx,
        is_there: |p| mlx::group(p) == Some(Some(BLOCK)),
        read: |p, _| {
            let Some(([n, k], keys)) = mlx::read(p, BLOCK) else { return Ok(None) };
            Ok(Some(Detected { layout: Layout::Mlx, schema: ENCODING, n, k, keys, nested_offset: 0.0 }))
        },
    },
];

/// The names of compressed-tensors with scales for 32: NVFP4 has as many again, of another type, and one for
/// the tensor.
pub(crate) fn is_compressed_tensors(p: &Probe<'_>) -> bool {
    let shape = |suffix| p.meta(suffix).map(|meta| &*meta.shape);
    let (Some(&[n, half]), Some(&[rows, blocks])) = (shape("weight_packed"), shape("weight_scale")) else {
        return false;
    };
    let is_byte = p.meta("weight_scale").is_some_and(|meta| meta.dtype == Some(DType::U8));
    is_byte && !p.has("weight_global_scale") && rows == n && blocks == half.div_ceil(BLOCK / 2)
}

fn read(p: &mut Probe<'_>) -> Option<Detected> {
    let [n, half] = p.matrix("weight_packed", &[DType::U8, DType::I8])?;
    let k = half * 2;
    if k % BLOCK != 0 {
        p.problem("weight_packed", "in features divisible by 32", &k.to_string());
    }
    for scale in ["input_global_scale", "weight_zero_point"] {
        if p.has(scale) {
            p.problem(scale, "none beside MXFP4 weights", "a tensor");
        }
    }
    let keys =
        LayerKeys { weight: p.key("weight_packed")?, scales: p.key("weight_scale"), ..LayerKeys::default() };
    Some(Detected { layout: Layout::CompressedTensors, schema: ENCODING, n, k, keys, nested_offset: 0.0 })
}

/// The tensors that writers of a layout store.
pub(super) fn tensors(layout: Layout, [n, k]: [usize; 2]) -> Option<Vec<Tensor>> {
    let one = Tensor::new;
    Some(match layout {
        Layout::CompressedTensors => vec![
            one("weight_packed", Content::Part(Part::Codes), DType::U8, &[n, k / 2]),
            one("weight_scale", Content::Part(Part::Scales), DType::U8, &[n, k / BLOCK]),
        ],
        Layout::Gguf => {
            vec![one("weight.mxfp4", Content::Blocks([1, 16, 16]), DType::U8, &[n, k / BLOCK * 17])]
        }
        _ => return None,
    })
}
