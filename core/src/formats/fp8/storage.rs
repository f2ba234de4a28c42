//! The layouts that FP8 is stored in: one name for the codes, two for the scales, and three grids of these.
use super::{Fp8, TILES};
use crate::formats::Q4Schema;
use crate::formats::storage::{Content, Described, Detected, LayerKeys, Layout, Probe, Rule, Tensor};
use crate::{DType, Part};

/// Inputs of tiles that reach over all of k have a scale each or one together; other tiles are written as
/// squares.
pub(super) fn described(format: &Fp8) -> Option<Described> {
    let strategy = match format.tile {
        [0, 0] => "tensor",
        [1, 0] => "channel",
        [128, 128] => "block",
        _ => return None,
    };
    Some(Described {
        format: "float-quantized",
        kind: "float",
        bits: 8,
        strategy,
        group_size: 0,
        scale_dtype: None,
        symmetric: true,
    })
}

pub(super) static RULES: [Rule; 1] = [Rule { layout: Layout::Fp8, is_there, read: |p, _| Ok(read(p)) }];

/// Bytes of E4M3 under the name of a matrix: no other format has them there.
pub(crate) fn is_there(p: &Probe<'_>) -> bool {
    p.meta("weight").is_some_and(|meta| meta.dtype == Some(DType::F8E4M3))
}

fn read(p: &mut Probe<'_>) -> Option<Detected> {
    let [n, k] = p.matrix("weight", &[DType::F8E4M3])?;
    let names = ["weight_scale", "weight_scale_inv"];
    let name = match names.map(|name| p.has(name)) {
        [true, false] => names[0],
        [false, true] => names[1],
        [_, both] => {
            let have = if both { "both" } else { "neither" };
            p.problem("weight_scale", "it or weight_scale_inv beside FP8 weights", have);
            return None;
        }
    };
    let meta = p.tensor(name, &[DType::F32, DType::BF16, DType::F16])?;
    let scales = meta.dtype?;
    let fits = |tile: &[u32; 2]| {
        let [rows, columns] = Fp8 { tile: *tile, scales }.grid(n, k);
        match &*meta.shape {
            [] => rows * columns == 1,
            [have] => *have == rows && columns == 1,
            [have @ .., last] => *have == [rows] && *last == columns,
        }
    };
    let Some(tile) = TILES.into_iter().find(fits) else {
        let [rows, columns] = Fp8 { tile: TILES[2], scales }.grid(n, k);
        let need =
            format!("one, [{n}, 1] or, of tiles of 128 by 128, [{rows}, {columns}] for weight [{n}, {k}]");
        p.problem(name, &need, &format!("{:?}", meta.shape));
        return None;
    };
    for (foreign, need) in [
        ("weight_scale_2", "none beside FP8 weights"),
        ("weight_zero_point", "none beside FP8 weights"),
        ("pre_quant_scale", "a checkpoint without it"),
    ] {
        if p.has(foreign) {
            p.problem(foreign, need, "a tensor");
        }
    }
    let keys = LayerKeys { weight: p.key("weight")?, scales: p.key(name), ..LayerKeys::default() };
    let schema = Q4Schema::Fp8(Fp8 { tile, scales });
    Some(Detected { layout: Layout::Fp8, schema, n, k, keys, nested_offset: 0.0 })
}

/// The tensors of a layer, scales by the name that most writers have.
pub(super) fn tensors(format: &Fp8, layout: Layout, [n, k]: [usize; 2]) -> Option<Vec<Tensor>> {
    (layout == Layout::Fp8).then(|| {
        vec![
            Tensor::new("weight", Content::Part(Part::Codes), DType::F8E4M3, &[n, k]),
            Tensor::new("weight_scale", Content::Part(Part::Scales), format.scales, &format.grid(n, k)),
        ]
    })
}
