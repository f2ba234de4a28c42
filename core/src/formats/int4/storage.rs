//! The layouts that int4 is stored in.
use super::Int4;
use crate::formats::Q4Schema;
use crate::formats::storage::{Content, Described, Detected, LayerKeys, Layout, Probe, Rule, Tensor};
use crate::{DType, Part};

pub(super) fn described(format: &Int4) -> Described {
    Described {
        format: "pack-quantized",
        kind: "int",
        bits: 4,
        strategy: "group",
        group_size: format.group,
        scale_dtype: None,
        symmetric: format.symmetric,
    }
}

pub(super) static RULES: [Rule; 3] = [
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
        let need = format!("[{n}, groups of a multiple of 16 in {k} in features]");
        p.problem("weight_scale", &need, &format!("[{rows}, {groups}]"));
        return None;
    }
    let zeros = p.meta("weight_zero_point").cloned();
    if let Some(zeros) = &zeros {
        let packed = [n.div_ceil(8), groups];
        let fits = [(DType::U8, [n, groups]), (DType::I32, packed)];
        if !fits.iter().any(|(dtype, shape)| zeros.dtype == Some(*dtype) && *zeros.shape == *shape) {
            let have = zeros.dtype.map_or("another type", DType::as_str);
            p.problem("weight_zero_point", &format!("i32 {packed:?}"), &format!("{have} {:?}", zeros.shape));
        }
    }
    let symmetric = zeros.is_none();
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
    let schema = Q4Schema::Int4(Int4 { group: u32::try_from(k / groups).ok()?, scales, symmetric });
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
    let scales = p.matrix("scales", &[DType::F16])?;
    let (have, groups) = (scales[of_n], scales[of_k]);
    if have != n || !k.is_multiple_of(groups) || !(k / groups).is_multiple_of(16) {
        let need =
            format!("a scale for each of {n} out features and group of a multiple of 16 of {k} in features");
        p.problem("scales", &need, &format!("{scales:?}"));
        return None;
    }
    let zeros = p.has("qzeros").then(|| p.matrix("qzeros", &[DType::I32, DType::U8])).flatten();
    let need = if is_packed { [groups, n / 8] } else { [n, groups] };
    if let Some(zeros) = zeros.filter(|zeros| *zeros != need) {
        p.problem("qzeros", &format!("{need:?}"), &format!("{zeros:?}"));
    }
    let keys = LayerKeys {
        weight: p.key("qweight")?,
        scales: p.key("scales"),
        zeros: p.key("qzeros"),
        ..LayerKeys::default()
    };
    let (group, symmetric) = (u32::try_from(k / groups).ok()?, keys.zeros.is_none());
    let schema = Q4Schema::Int4(Int4 { group, scales: DType::F16, symmetric });
    Some(Detected { layout, schema, n, k, keys, nested_offset: 0.0 })
}

/// The tensors that writers of a layout store.
pub(super) fn tensors(format: &Int4, layout: Layout, [n, k]: [usize; 2]) -> Option<Vec<Tensor>> {
    if layout != Layout::CompressedTensors {
        return None;
    }
    let groups = format.groups(k);
    let mut all = vec![
        Tensor::new("weight_packed", Content::Part(Part::Codes), DType::I32, &[n, k / 8]),
        Tensor::new("weight_scale", Content::Part(Part::Scales), format.scales, &[n, groups]),
        Tensor::new("weight_shape", Content::Shape([n, k]), DType::I64, &[2]),
    ];
    if !format.symmetric {
        let shape = [n.div_ceil(8), groups];
        all.push(Tensor::new("weight_zero_point", Content::ZeroWords, DType::I32, &shape));
    }
    Some(all)
}
