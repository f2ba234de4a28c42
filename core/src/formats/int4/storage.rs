//! The layouts that int4 is stored in.
use super::{Int4, Zeros};
use crate::formats::storage::{Content, Described, Detected, LayerKeys, Layout, Probe, Rule, Tensor, Words};
use crate::formats::{Lack, Q4Schema, mlx};
use crate::parts::write_floats;
use crate::{DType, OwnedParts, Part, Result, SegmentData, read_floats};

pub(super) fn described(format: &Int4) -> Described {
    Described {
        format: "pack-quantized",
        kind: "int",
        bits: 4,
        strategy: "group",
        group_size: format.group,
        scale_dtype: None,
        symmetric: format.zeros == Zeros::Middle,
    }
}

pub(super) static RULES: [Rule; 4] = [
    Rule { layout: Layout::Mlx, is_there: |p| mlx::group(p) == Some(None), read: |p, _| Ok(affine(p)) },
    Rule { layout: Layout::CompressedTensors, is_there: is_compressed_tensors, read: |p, _| Ok(read(p)) },
    Rule {
        layout: Layout::Gptq,
        is_there: |p| packer(p) == Some(Layout::Gptq),
        read: |p, _| Ok(of_words(p, Layout::Gptq)),
    },
    Rule {
        layout: Layout::Awq,
        is_there: |p| packer(p) == Some(Layout::Awq),
        read: |p, _| Ok(of_words(p, Layout::Awq)),
    },
];

/// Words of eight codes: no other format of that tool has them.
pub(crate) fn is_compressed_tensors(p: &Probe<'_>) -> bool {
    p.meta("weight_packed").is_some_and(|meta| meta.dtype == Some(DType::I32))
}

fn read(p: &mut Probe<'_>) -> Option<Detected> {
    let [n, words] = p.matrix("weight_packed", &[DType::I32])?;
    let k = words * 8;
    let [rows, groups] = p.matrix("weight_scale", &[DType::F16, DType::BF16, DType::F32])?;
    if rows != n || !k.is_multiple_of(groups) || !(k / groups).is_multiple_of(16) {
        let need =
            format!("[{n}, groups of a multiple of 16 in {k} in features] for weight_packed [{n}, {words}]");
        p.problem("weight_scale", &need, &format!("[{rows}, {groups}]"));
        return None;
    }
    let zeros = p.meta("weight_zero_point").cloned();
    if let Some(zeros) = &zeros {
        let packed = [n.div_ceil(8), groups];
        let fits = [(DType::U8, [n, groups]), (DType::I32, packed)];
        if !fits.iter().any(|(dtype, shape)| zeros.dtype == Some(*dtype) && *zeros.shape == *shape) {
            let have = zeros.dtype.map_or("another type", DType::as_str);
            p.problem(
                "weight_zero_point",
                &format!("i32 {packed:?} beside weight_scale [{n}, {groups}]"),
                &format!("{have} {:?}", zeros.shape),
            );
        }
    }
    let zeros = if zeros.is_some() { Zeros::Points } else { Zeros::Middle };
    for foreign in ["weight_global_scale", "input_global_scale"] {
        if p.has(foreign) {
            p.problem(foreign, "none beside int4 weights", "a tensor");
        }
    }
    let scales = p.meta("weight_scale").and_then(|meta| meta.dtype)?;
    let keys = LayerKeys {
        weight: p.key("weight_packed")?,
        scales: p.key("weight_scale"),
        zeros: p.key("weight_zero_point"),
        ..LayerKeys::default()
    };
    let schema = Q4Schema::Int4(Int4 { group: u32::try_from(k / groups).ok()?, scales, zeros });
    Some(Detected { layout: Layout::CompressedTensors, schema, n, k, keys, nested_offset: 0.0 })
}

/// Whose words `qweight` has: eight in features of an out feature, as many as there are scales, or the other
/// way round. A reader of files, which takes words apart, hands over those of GPTQ as u8 and of AWQ as i8.
fn packer(p: &Probe<'_>) -> Option<Layout> {
    let meta = p.meta("qweight")?;
    match (meta.dtype, &*meta.shape, p.meta("scales").map(|meta| &*meta.shape)) {
        (Some(DType::U8), ..) => Some(Layout::Gptq),
        (Some(DType::I8), ..) => Some(Layout::Awq),
        (_, [_, words], Some([_, n])) if words.checked_mul(8) == Some(*n) => Some(Layout::Awq),
        _ => Some(Layout::Gptq),
    }
}

/// GPTQ and AWQ, in words or, once a reader of files took these apart, by rows of out features.
fn of_words(p: &mut Probe<'_>, layout: Layout) -> Option<Detected> {
    let [rows, columns] = p.matrix("qweight", &[DType::I32, DType::U8, DType::I8])?;
    let is_packed = p.meta("qweight").is_some_and(|meta| meta.dtype == Some(DType::I32));
    let [n, k] = match (is_packed, layout) {
        (false, _) => [rows, 2 * columns],
        (true, Layout::Gptq) => [columns, 8 * rows],
        (true, _) => [8 * columns, rows],
    };
    let [of_n, of_k] = if is_packed { [1, 0] } else { [0, 1] };
    let scales = p.matrix("scales", &[DType::F16, DType::BF16])?;
    let dtype = p.meta("scales").and_then(|meta| meta.dtype)?;
    let (have, groups) = (scales[of_n], scales[of_k]);
    if have != n || !k.is_multiple_of(groups) || !(k / groups).is_multiple_of(16) {
        let need = format!(
            "a scale for each of {n} out features and group of a multiple of 16 of {k} in features of qweight"
        );
        p.problem("scales", &need, &format!("{scales:?}"));
        return None;
    }
    let zeros = p.has("qzeros").then(|| p.matrix("qzeros", &[DType::I32, DType::U8])).flatten();
    let need = if is_packed { [groups, n / 8] } else { [n, groups] };
    if let Some(zeros) = zeros.filter(|zeros| *zeros != need) {
        p.problem("qzeros", &format!("{need:?} beside scales {scales:?}"), &format!("{zeros:?}"));
    }
    let keys = LayerKeys {
        weight: p.key("qweight")?,
        scales: p.key("scales"),
        zeros: p.key("qzeros"),
        ..LayerKeys::default()
    };
    let zeros = if keys.zeros.is_some() { Zeros::Points } else { Zeros::Middle };
    let group = u32::try_from(k / groups).ok()?;
    let schema = Q4Schema::Int4(Int4 { group, scales: dtype, zeros });
    Some(Detected { layout, schema, n, k, keys, nested_offset: 0.0 })
}

/// MLX's affine mode: a bias beside every scale.
fn affine(p: &mut Probe<'_>) -> Option<Detected> {
    let [n, half] = p.matrix("weight", &[DType::U8])?;
    let k = 2 * half;
    let grid = p.matrix("scales", &[DType::F16, DType::BF16, DType::F32])?;
    let scales = p.meta("scales").and_then(|meta| meta.dtype)?;
    let [rows, groups] = grid;
    if rows != n || !k.is_multiple_of(groups) || !(k / groups).is_multiple_of(16) {
        let need =
            format!("[{n}, groups of a multiple of 16 in {k} in features] for weight [{n}, {}]", k / 8);
        p.problem("scales", &need, &format!("{grid:?}"));
        return None;
    }
    let biases = p.matrix("biases", &[scales])?;
    if biases != grid {
        p.problem("biases", &format!("{grid:?}, as scales have"), &format!("{biases:?}"));
    }
    let keys = LayerKeys {
        weight: p.key("weight")?,
        scales: p.key("scales"),
        zeros: p.key("biases"),
        ..LayerKeys::default()
    };
    let group = u32::try_from(k / groups).ok()?;
    let schema = Q4Schema::Int4(Int4 { group, scales, zeros: Zeros::Biases });
    Some(Detected { layout: Layout::Mlx, schema, n, k, keys, nested_offset: 0.0 })
}

/// The tensors that writers of a layout store.
pub(super) fn tensors(format: &Int4, layout: Layout, [n, k]: [usize; 2]) -> Option<Vec<Tensor>> {
    let (one, part, groups) = (Tensor::new, Content::Part, format.groups(k));
    if format.zeros == Zeros::Biases {
        return None;
    }
    Some(match layout {
        Layout::CompressedTensors => {
            let mut all = vec![
                one("weight_packed", part(Part::Codes), DType::I32, &[n, k / 8]),
                one("weight_scale", part(Part::Scales), format.scales, &[n, groups]),
                one("weight_shape", Content::Shape([n, k]), DType::I64, &[2]),
            ];
            if format.zeros == Zeros::Points {
                let shape = [n.div_ceil(8), groups];
                all.push(one("weight_zero_point", Content::ZeroWords, DType::I32, &shape));
            }
            all
        }
        // Both have zero points always.
        Layout::Gptq | Layout::Awq => {
            let (words, shape) = match layout {
                Layout::Gptq => (Words::Gptq, [k / 8, n]),
                _ => (Words::Awq, [k, n / 8]),
            };
            let mut all = vec![
                one("qweight", Content::Words(Part::Codes, words), DType::I32, &shape),
                one("qzeros", Content::Words(Part::Zeros, words), DType::I32, &[groups, n / 8]),
                one("scales", Content::Transposed(Part::Scales), DType::F16, &[groups, n]),
            ];
            if layout == Layout::Gptq {
                all.push(one("g_idx", Content::Groups(format.group), DType::I32, &[k]));
            }
            all
        }
        // Without zero points, and in groups of 32: what Q4_0 is.
        Layout::Gguf => {
            let shape = [n, groups * 18];
            vec![one("weight.q4_0", Content::Blocks([2, 16, 16]), DType::U8, &shape)]
        }
        _ => return None,
    })
}

/// The one type of scales that a layout has.
pub(super) fn scales(layout: Layout) -> Option<DType> {
    matches!(layout, Layout::Gptq | Layout::Awq | Layout::Gguf).then_some(DType::F16)
}

/// Groups that readers of GPTQ and AWQ have kernels for, beside those of a whole out feature.
pub(super) const GROUPS: [u32; 4] = [16, 32, 64, 128];

/// What keeps any matrix `[n, k]` out of a layout.
pub(super) fn lacks_shape(format: &Int4, layout: Layout, [n, k]: [usize; 2]) -> Option<(Part, &'static str)> {
    if layout == Layout::Gguf {
        let is_q4_0 = format.zeros == Zeros::Middle && format.group == 32;
        (!is_q4_0).then_some((Part::Scales, "groups of 32 without zero points, which Q4_0 is"))
    } else if !matches!(layout, Layout::Gptq | Layout::Awq) {
        None
    } else if !n.is_multiple_of(8) {
        Some((Part::Codes, "out features divisible by 8"))
    } else if !GROUPS.contains(&format.group) && format.group as usize != k {
        Some((Part::Scales, "groups of 16, 32, 64 or 128, or of all in features"))
    } else {
        None
    }
}

/// And what of its values does: scales are float16, and GPTQ stores zero points less one, as 0 to 15.
pub(super) fn lacks(
    format: &Int4,
    layout: Layout,
    shape @ [n, k]: [usize; 2],
    data: &SegmentData<'_>,
) -> Result<Option<Lack>> {
    if let Some((part, need)) = lacks_shape(format, layout, shape) {
        let zeros = if format.zeros == Zeros::Middle { "" } else { ", with zero points" };
        let have = format!("[{n}, {k}] in groups of {}{zeros}", format.group);
        return Ok(Some(Lack { part, need, have }));
    }
    let groups = format.groups(k);
    let told = |part, need, all: Vec<(usize, String)>| {
        let (at, value) = all.first()?;
        let more = if all.len() > 1 { format!(", the first of {}", all.len()) } else { String::new() };
        let have = format!("{value} at row {}, group {}{more}", at / groups, at % groups);
        Some(Lack { part, need, have })
    };
    if let Some(to) = scales(layout) {
        let stored = data.need(Part::Scales)?;
        let mut values = vec![0.0; stored.len()];
        read_floats(stored.as_bytes()?, format.scales, &mut values);
        let mut back = vec![0.0; values.len()];
        read_floats(&write_floats(&values, to), to, &mut back);
        let pairs = values.iter().zip(back).enumerate();
        let rounded = pairs.filter(|(_, (v, back))| v.to_bits() != back.to_bits());
        let rounded = rounded.map(|(i, (v, back))| (i, format!("{v:e}, which would be {back:e},")));
        if let Some(lack) = told(Part::Scales, "scales that float16 holds", rounded.collect()) {
            return Ok(Some(lack));
        }
    }
    if let (Layout::Gptq, Some(zeros)) = (layout, data.get(Part::Zeros)) {
        let none = zeros.as_bytes()?.iter().enumerate().filter(|(_, zero)| **zero == 0);
        let none = none.map(|(i, _)| (i, "0".to_owned())).collect();
        return Ok(told(Part::Zeros, "zero points of 1 to 15: one less is stored", none));
    }
    Ok(None)
}

/// Parts with the type of scales that `to` has, and without zero points where it has none.
pub(super) fn recast(format: &Int4, to: &Int4, parts: OwnedParts) -> OwnedParts {
    let parts = if to.zeros == Zeros::Middle { parts.without(Part::Zeros) } else { parts };
    if to.scales == format.scales {
        return parts;
    }
    let stored = parts.bytes(Part::Scales);
    let mut values = vec![0.0; stored.len() / format.scales.size()];
    read_floats(stored, format.scales, &mut values);
    parts.with(Part::Scales, to.scales, &[values.len()], write_floats(&values, to.scales))
}
