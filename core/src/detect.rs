//! Which layout a layer is stored in, from names, types and shapes alone, reporting every contradiction at
//! once. Each format knows its own layouts.
use crate::formats::KINDS;
pub use crate::formats::storage::{
    Detected, LayerKeys, Layout, QuantState, StateReader, TensorMeta, Tensors,
};
use crate::formats::storage::{Probe, Rule};
use crate::{Code, Error, Result};

/// Finds the tensors of `layer` (e.g. `model.layers.0.mlp.up_proj`) in `table`. `quant_state` reads the JSON
/// beside a bitsandbytes weight. `Ok(None)` when nothing of that name is stored.
///
/// # Errors
/// [`Code::SchemaInvalid`] with *all* problems when the parts contradict each other, and errors of
/// `quant_state`.
pub fn detect(layer: &str, table: &dyn Tensors, quant_state: StateReader<'_>) -> Result<Option<Detected>> {
    let mut probe = Probe { layer, table, problems: Vec::new() };
    let mut found: Vec<&Rule> =
        KINDS.iter().flat_map(|kind| kind.rules).filter(|rule| (rule.is_there)(&probe)).collect();
    // `weight` alone says little, so that who is known by it comes last.
    found.sort_by_key(|rule| (rule.layout == Layout::Dense, rule.layout == Layout::ModelOpt));
    let detected = match found.as_slice() {
        [] if !probe.has("weight") => return Ok(None),
        [] => {
            let have = format!("{:?}", probe.meta("weight"));
            probe.problem("weight", "a float matrix, or packed codes with their scales", &have);
            None
        }
        [one] => (one.read)(&mut probe, quant_state)?,
        several => {
            let names: Vec<_> = several.iter().map(|rule| rule.layout.as_str()).collect();
            let codes = CODES.iter().filter_map(|suffix| probe.key(suffix)).map(|key| format!("`{key}`"));
            let have = format!("{}: {}", names.join(" and "), codes.collect::<Vec<_>>().join(", "));
            probe.problem("tensors", "one layout", &have);
            None
        }
    };
    match detected {
        Some(d) if probe.problems.is_empty() => Ok(Some(d)),
        _ => Err(Error::new(Code::SchemaInvalid, format!("{layer}:\n{}", probe.problems.join("\n")))),
    }
}

/// Tensors by which layouts are told, and which a layer has one of.
const CODES: [&str; 13] = [
    "weight",
    "weight_packed",
    "_weight_qdata",
    "weight.qdata",
    "qdata",
    "qweight",
    "weight.q4_k",
    "weight.q5_k",
    "weight.q6_k",
    "weight.q8_0",
    "weight_scale_2",
    "weight.absmax",
    "absmax",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::nvfp4::Nvfp4;
    use crate::{Convention, DType, Q4Schema, ScaleLayout};
    use std::collections::BTreeMap;

    fn table(rows: &[(&str, DType, &[usize])]) -> BTreeMap<String, TensorMeta> {
        rows.iter()
            .map(|(k, d, s)| ((*k).to_owned(), TensorMeta { dtype: Some(*d), shape: (*s).into() }))
            .collect()
    }
    fn no_state(_: &str) -> Result<QuantState> {
        Err(Error::new(Code::Internal, "not asked"))
    }

    #[test]
    fn each_layout_is_told_by_its_names() -> Result<()> {
        let modelopt = table(&[
            ("l.weight", DType::U8, &[4, 16]),
            ("l.weight_scale", DType::F8E4M3, &[4, 2]),
            ("l.weight_scale_2", DType::F32, &[]),
        ]);
        let d = detect("l", &modelopt, &no_state)?.expect("found");
        assert_eq!((d.layout, d.n, d.k), (Layout::ModelOpt, 4, 32));
        assert!(matches!(d.schema, Q4Schema::Nvfp4(Nvfp4 { global: Some(Convention::Multiply), .. })));
        let ct = table(&[
            ("l.weight_packed", DType::U8, &[4, 16]),
            ("l.weight_scale", DType::F8E4M3, &[4, 2]),
            ("l.weight_global_scale", DType::F32, &[1]),
        ]);
        let d = detect("l", &ct, &no_state)?.expect("found");
        assert!(matches!(d.schema, Q4Schema::Nvfp4(Nvfp4 { global: Some(Convention::Divide), .. })));
        let dat =
            table(&[("l.weight.qdata", DType::U8, &[4, 16]), ("l.weight.scale", DType::F8E4M3, &[4, 2])]);
        let d = detect("l", &dat, &no_state)?.expect("found");
        assert!(matches!((d.layout, d.schema), (Layout::Dat, Q4Schema::Nvfp4(Nvfp4 { global: None, .. }))));
        assert_eq!(detect("other", &dat, &no_state)?, None);
        Ok(())
    }

    #[test]
    fn swizzled_scales_are_told_by_their_shape() -> Result<()> {
        let t = table(&[
            ("l._weight_qdata", DType::U8, &[130, 32]),
            ("l._weight_scale", DType::F8E4M3, &[64, 16]),
        ]);
        let d = detect("l", &t, &no_state)?.expect("found");
        assert!(matches!(
            d.schema,
            Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::Swizzled128x4, global: None })
        ));
        Ok(())
    }

    #[test]
    fn every_problem_is_reported() {
        let t = table(&[("l.weight", DType::U8, &[4, 7]), ("l.weight_scale", DType::F16, &[4, 2])]);
        let e = detect("l", &t, &no_state).expect_err("three problems").to_string();
        for part in [
            "divisible by 16",
            "l.weight_scale: need f8_e4m3 or u8; have float16",
            "weight_scale_2: need float32",
        ] {
            assert!(e.contains(part), "{part} in {e}");
        }
        let both = table(&[("l.weight_packed", DType::U8, &[4, 8]), ("l._weight_qdata", DType::U8, &[4, 8])]);
        assert!(
            detect("l", &both, &no_state)
                .expect_err("two layouts")
                .to_string()
                .contains("compressed-tensors and torchao")
        );
    }
}
