//! The layouts that NVFP4 is stored in.
use super::{BLOCK, RowMajor, Swizzled128x4, encoding};
use crate::formats::storage::{Content, Described, Detected, LayerKeys, Layout, Probe, Rule, Tensor};
use crate::formats::{fp8, int4, mlx, mxfp4, swizzle};
use crate::{Convention, DType, Part};

pub(super) const DESCRIBED: Described = Described {
    format: "nvfp4-pack-quantized",
    kind: "float",
    bits: 4,
    strategy: "tensor_group",
    group_size: 16,
    scale_dtype: Some("torch.float8_e4m3fn"),
    symmetric: true,
};

pub(super) static RULES: [Rule; 5] = [
    Rule {
        layout: Layout::Mlx,
        // Scales of bytes in blocks that nobody has are told as these.
        is_there: |p| mlx::group(p).flatten().is_some_and(|group| group != mxfp4::BLOCK),
        read: |p, _| {
            let Some(([n, k], keys)) = mlx::read(p, BLOCK) else { return Ok(None) };
            let schema = encoding(RowMajor, None);
            Ok(Some(Detected { layout: Layout::Mlx, schema, n, k, keys, nested_offset: 0.0 }))
        },
    },
    Rule {
        layout: Layout::CompressedTensors,
        is_there: |p| {
            let is_other = mxfp4::is_compressed_tensors(p) || int4::is_compressed_tensors(p);
            p.has("weight_packed") && !is_other
        },
        read: |p, _| {
            Ok(read(
                p,
                Names {
                    layout: Layout::CompressedTensors,
                    codes: "weight_packed",
                    scales: "weight_scale",
                    global: Some("weight_global_scale"),
                    input_global: Some("input_global_scale"),
                    convention: Convention::Divide,
                },
            ))
        },
    },
    Rule {
        layout: Layout::TorchAo,
        is_there: |p| p.has("_weight_qdata"),
        read: |p, _| {
            let names = Names {
                layout: Layout::TorchAo,
                codes: "_weight_qdata",
                scales: "_weight_scale",
                global: Some("_weight_per_tensor_scale").filter(|name| p.has(name)),
                input_global: Some("_weight_act_per_tensor_scale"),
                convention: Convention::Multiply,
            };
            Ok(read(p, names))
        },
    },
    Rule {
        layout: Layout::Dat,
        // Absmax beside them is NF4's, or nobody's.
        is_there: |p| {
            let is_nf4 = p.has("absmax") && !(p.has("quant_map") && p.has("weight"));
            (p.has("weight.qdata") || p.has("qdata")) && !is_nf4
        },
        read: |p, _| {
            let (codes, scales, global) = match p.has("weight.qdata") {
                true => ("weight.qdata", "weight.scale", "weight.global_scale"),
                false => ("qdata", "scale", "global_scale"),
            };
            let names = Names {
                layout: Layout::Dat,
                codes,
                scales,
                global: Some(global).filter(|name| p.has(name)),
                input_global: None,
                convention: Convention::Multiply,
            };
            Ok(read(p, names))
        },
    },
    Rule {
        layout: Layout::ModelOpt,
        is_there: |p| {
            (p.has("weight_scale") || p.has("weight_scale_2")) && p.has("weight") && !fp8::is_stored(p)
        },
        read: |p, _| {
            if p.has("pre_quant_scale") {
                p.problem("pre_quant_scale", "a checkpoint without it", "an AWQ or SVD export");
            }
            let names = Names {
                layout: Layout::ModelOpt,
                codes: "weight",
                scales: "weight_scale",
                global: Some("weight_scale_2"),
                input_global: Some("input_scale"),
                convention: Convention::Multiply,
            };
            Ok(read(p, names))
        },
    },
];

/// Tensors of one layout.
#[derive(Clone, Copy)]
struct Names {
    layout: Layout,
    codes: &'static str,
    scales: &'static str,
    global: Option<&'static str>,
    input_global: Option<&'static str>,
    convention: Convention,
}

fn read(p: &mut Probe<'_>, named: Names) -> Option<Detected> {
    let Names { layout, codes, scales, global, input_global, .. } = named;
    let [n, half] = p.matrix(codes, &[DType::U8, DType::I8])?;
    let k = half * 2;
    if k % BLOCK != 0 {
        p.problem(codes, "in features divisible by 16", &k.to_string());
    }
    let mut scale_layout = RowMajor;
    if let Some(meta) = p.tensor(scales, &[DType::F8E4M3, DType::U8]) {
        let blocks = k / BLOCK;
        let swizzled = swizzle::blocked_len(n, blocks);
        if *meta.shape == [n, blocks] {
        } else if meta.len() == swizzled && layout == Layout::TorchAo {
            scale_layout = Swizzled128x4;
        } else {
            p.problem(
                scales,
                &format!("[{n}, {blocks}], one per 16 in features of {codes} [{n}, {half}]"),
                &format!("{:?}", meta.shape),
            );
        }
    }
    for scalar in [global, input_global.filter(|s| p.key(s).is_some())].into_iter().flatten() {
        if let Some(meta) = p.tensor(scalar, &[DType::F32])
            && meta.len() != 1
        {
            p.problem(scalar, "one value", &format!("{:?}", meta.shape));
        }
    }
    let keys = LayerKeys {
        weight: p.key(codes)?,
        scales: p.key(scales),
        global: global.and_then(|g| p.key(g)),
        input_global: input_global.and_then(|g| p.key(g)),
        ..LayerKeys::default()
    };
    let schema = encoding(scale_layout, global.map(|_| named.convention));
    Some(Detected { layout, schema, n, k, keys, nested_offset: 0.0 })
}

/// The tensors that writers of a layout store; scales are row-major.
pub(super) fn tensors(layout: Layout, [n, k]: [usize; 2], has_global: bool) -> Option<Vec<Tensor>> {
    let (codes, scales, global, has_extent) = match layout {
        Layout::Gguf => {
            return Some(vec![
                Tensor::new("weight.nvfp4", Content::Blocks([4, 32, 8]), DType::U8, &[n, k / 64 * 36]),
                Tensor::new("weight_scale_2", Content::Global, DType::F32, &[1]),
            ]);
        }
        Layout::ModelOpt => ("weight", "weight_scale", "weight_scale_2", false),
        Layout::CompressedTensors => ("weight_packed", "weight_scale", "weight_global_scale", true),
        Layout::Dat => ("weight.qdata", "weight.scale", "weight.global_scale", true),
        _ => return None,
    };
    let mut all = vec![
        Tensor::new(codes, Content::Part(Part::Codes), DType::U8, &[n, k / 2]),
        Tensor::new(scales, Content::Part(Part::Scales), DType::F8E4M3, &[n, k / BLOCK]),
    ];
    if has_global || layout != Layout::Dat {
        all.push(Tensor::new(global, Content::Global, DType::F32, if has_extent { &[1] } else { &[] }));
    }
    Some(all)
}
