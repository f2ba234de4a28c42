//! Which 4-bit layout a layer is stored in, from names, types and shapes alone, reporting every contradiction
//! at once.
use crate::formats::{nvfp4::BLOCK, swizzle};
use crate::{Code, Convention, DType, Error, NibbleOrder, Q4Schema, Result, ScaleLayout};
use serde::Serialize;
use std::collections::BTreeMap;

/// Type and shape of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorMeta {
    /// Element type; `None` for one that no weight of ours has.
    pub dtype: Option<DType>,
    /// Extents.
    pub shape: Box<[usize]>,
}

impl TensorMeta {
    fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Stored tensors by name.
pub trait Tensors {
    /// Type and shape of the tensor `name`, if there is one.
    fn meta(&self, name: &str) -> Option<&TensorMeta>;
}

impl Tensors for BTreeMap<String, TensorMeta> {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.get(name)
    }
}

/// How a layer's tensors are named and arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Layout {
    /// `weight`, `weight_scale`, `weight_scale_2` (multiplies), `input_scale`.
    #[serde(rename = "modelopt")]
    ModelOpt,
    /// `weight_packed`, `weight_scale`, `weight_global_scale` (divides), `input_global_scale`.
    CompressedTensors,
    /// `_weight_qdata`, `_weight_scale`, `_weight_per_tensor_scale` (multiplies).
    #[serde(rename = "torchao")]
    TorchAo,
    /// `weight.qdata`, `weight.scale` (or without `weight.`): single-level scales; NF4 as `weight`, `absmax`,
    /// `quant_map`.
    Dat,
    /// `weight`, `weight.absmax`, `weight.quant_map`, `weight.quant_state.bitsandbytes__nf4`, nested ones.
    Bitsandbytes,
    /// `weight` of floats.
    Dense,
}

impl Layout {
    /// Spelling of `--layout` and of reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ModelOpt => "modelopt",
            Self::CompressedTensors => "compressed-tensors",
            Self::TorchAo => "torchao",
            Self::Dat => "dat",
            Self::Bitsandbytes => "bitsandbytes",
            Self::Dense => "dense",
        }
    }
}

/// Keys of a layer's tensors, full names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LayerKeys {
    /// Packed codes, or the dense matrix.
    pub weight: String,
    /// Block scales of NVFP4.
    pub scales: Option<String>,
    /// Per-tensor scale of NVFP4.
    pub global: Option<String>,
    /// Calibrated per-tensor scale of the activations, of the same convention as `global`.
    pub input_global: Option<String>,
    /// Absmax of NF4: f32, or u8 codes when nested.
    pub absmax: Option<String>,
    /// The 16 codebook values, to be checked.
    pub quant_map: Option<String>,
    /// The 256 values of the nested codes.
    pub nested_map: Option<String>,
    /// f32 absmax of the nested codes.
    pub nested_absmax: Option<String>,
}

/// What bitsandbytes writes as JSON beside a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantState {
    /// `nf4`.
    pub quant_type: String,
    /// Elements per absmax.
    pub block: u32,
    /// `[n, k]`.
    pub shape: Vec<usize>,
    /// Codes per nested absmax and the offset, when double-quantised.
    pub nested: Option<(u32, f32)>,
}

/// A layer whose parts fit together.
#[derive(Clone, Debug, PartialEq)]
pub struct Detected {
    /// Arrangement.
    pub layout: Layout,
    /// Encoding.
    pub schema: Q4Schema,
    /// Out features.
    pub n: usize,
    /// In features.
    pub k: usize,
    /// Tensor names.
    pub keys: LayerKeys,
    /// Offset of nested absmax.
    pub nested_offset: f32,
}

/// Finds the tensors of `layer` (e.g. `model.layers.0.mlp.up_proj`) in `table`. `quant_state` reads the JSON
/// beside a bitsandbytes weight. `Ok(None)` when nothing of that name is stored; one error with *all*
/// problems when the parts contradict each other.
pub fn detect(
    layer: &str,
    table: &dyn Tensors,
    quant_state: &dyn Fn(&str) -> Result<QuantState>,
) -> Result<Option<Detected>> {
    let mut probe = Probe { layer, table, problems: Vec::new() };
    let mut found: Vec<Layout> = Vec::new();
    let weight = probe.key("weight").and_then(|k| table.meta(&k));
    let float = weight.is_some_and(|m| m.dtype.is_some_and(DType::is_io));
    let has = |suffix: &str| table.meta(&format!("{layer}.{suffix}")).is_some();
    let rules = [
        (has("weight_packed"), Layout::CompressedTensors),
        (has("_weight_qdata"), Layout::TorchAo),
        (has("weight.qdata") || has("qdata"), Layout::Dat),
        (has("weight.absmax") || has("weight.quant_map"), Layout::Bitsandbytes),
        (has("absmax") && has("quant_map") && weight.is_some(), Layout::Dat),
        ((has("weight_scale") || has("weight_scale_2")) && weight.is_some(), Layout::ModelOpt),
        (float && !has("weight_scale") && !has("absmax") && !has("weight.absmax"), Layout::Dense),
    ];
    found.extend(rules.iter().filter(|r| r.0).map(|r| r.1));
    let detected = match found.as_slice() {
        [] if weight.is_none() => return Ok(None),
        [] => {
            probe.problem(
                "weight",
                "a float matrix, or packed codes with their scales",
                &format!("{weight:?}"),
            );
            None
        }
        [one] => probe.read(*one, quant_state)?,
        several => {
            let names: Vec<_> = several.iter().map(|l| l.as_str()).collect();
            probe.problem("tensors", "one layout", &names.join(" and "));
            None
        }
    };
    match detected {
        Some(d) if probe.problems.is_empty() => Ok(Some(d)),
        _ => Err(Error::new(Code::SchemaInvalid, format!("{layer}:\n{}", probe.problems.join("\n")))),
    }
}

struct Probe<'a> {
    layer: &'a str,
    table: &'a dyn Tensors,
    problems: Vec<String>,
}

impl Probe<'_> {
    fn read(
        &mut self,
        layout: Layout,
        quant_state: &dyn Fn(&str) -> Result<QuantState>,
    ) -> Result<Option<Detected>> {
        let multiply = Some(Convention::Multiply);
        Ok(match layout {
            Layout::ModelOpt => {
                if self.key("pre_quant_scale").is_some() {
                    self.problem("pre_quant_scale", "a checkpoint without it", "an AWQ or SVD export");
                }
                self.nvfp4(
                    layout,
                    "weight",
                    "weight_scale",
                    Some("weight_scale_2"),
                    Some("input_scale"),
                    multiply,
                )
            }
            Layout::CompressedTensors => self.nvfp4(
                layout,
                "weight_packed",
                "weight_scale",
                Some("weight_global_scale"),
                Some("input_global_scale"),
                Some(Convention::Divide),
            ),
            Layout::TorchAo => self.nvfp4(
                layout,
                "_weight_qdata",
                "_weight_scale",
                self.key("_weight_per_tensor_scale").map(|_| "_weight_per_tensor_scale"),
                Some("_weight_act_per_tensor_scale"),
                multiply,
            ),
            Layout::Dat if self.key("absmax").is_some() => self.nf4_dat(),
            Layout::Dat => {
                let long = self.key("weight.qdata").is_some();
                let (codes, scale) = if long { ("weight.qdata", "weight.scale") } else { ("qdata", "scale") };
                let global = if long { "weight.global_scale" } else { "global_scale" };
                self.nvfp4(layout, codes, scale, self.key(global).map(|_| global), None, multiply)
            }
            Layout::Bitsandbytes => self.nf4_bnb(quant_state)?,
            Layout::Dense => self.dense(),
        })
    }

    fn nvfp4(
        &mut self,
        layout: Layout,
        codes: &str,
        scales: &str,
        global: Option<&str>,
        input_global: Option<&str>,
        convention: Option<Convention>,
    ) -> Option<Detected> {
        let [n, half] = self.matrix(codes, &[DType::U8, DType::I8])?;
        let k = half * 2;
        if k % BLOCK != 0 {
            self.problem(codes, "in features divisible by 16", &k.to_string());
        }
        let mut scale_layout = ScaleLayout::RowMajor;
        if let Some(meta) = self.tensor(scales, &[DType::F8E4M3, DType::U8]) {
            let blocks = k / BLOCK;
            let swizzled = swizzle::blocked_len(n, blocks);
            if *meta.shape == [n, blocks] {
            } else if meta.len() == swizzled && layout == Layout::TorchAo {
                scale_layout = ScaleLayout::Swizzled128x4;
            } else {
                self.problem(
                    scales,
                    &format!("[{n}, {blocks}], one per 16 in features"),
                    &format!("{:?}", meta.shape),
                );
            }
        }
        for scalar in [global, input_global.filter(|s| self.key(s).is_some())].into_iter().flatten() {
            if let Some(meta) = self.tensor(scalar, &[DType::F32])
                && meta.len() != 1
            {
                self.problem(scalar, "one value", &format!("{:?}", meta.shape));
            }
        }
        let keys = LayerKeys {
            weight: self.key(codes)?,
            scales: self.key(scales),
            global: global.and_then(|g| self.key(g)),
            input_global: input_global.and_then(|g| self.key(g)),
            ..LayerKeys::default()
        };
        let schema = Q4Schema::Nvfp4 { scale_layout, global: global.and(convention) };
        Some(Detected { layout, schema, n, k, keys, nested_offset: 0.0 })
    }

    fn nf4_bnb(&mut self, quant_state: &dyn Fn(&str) -> Result<QuantState>) -> Result<Option<Detected>> {
        let Some(key) = self.key("weight.quant_state.bitsandbytes__nf4") else {
            let fp4 = self.key("weight.quant_state.bitsandbytes__fp4").map_or("none", |_| "bitsandbytes FP4");
            self.problem("weight.quant_state.bitsandbytes__nf4", "the JSON of an NF4 weight", fp4);
            return Ok(None);
        };
        let state = quant_state(&key)?;
        let (n, k) = match state.shape.as_slice() {
            &[n, k] if n > 0 && k > 0 && n.checked_mul(k).is_some() => (n, k),
            other => {
                self.problem("weight.quant_state", "a shape [out, in]", &format!("{other:?}"));
                return Ok(None);
            }
        };
        if state.quant_type != "nf4" {
            self.problem("weight.quant_state", "quant_type nf4", &state.quant_type);
        }
        self.block(state.block);
        let blocks = (n * k).div_ceil(state.block.max(1) as usize);
        self.count("weight", &[DType::U8], (n * k).div_ceil(2));
        self.count("weight.quant_map", &[DType::F32], 16);
        match state.nested {
            None => self.count("weight.absmax", &[DType::F32], blocks),
            Some((nested, offset)) => {
                if nested == 0 || !offset.is_finite() {
                    self.problem(
                        "weight.quant_state",
                        "nested_blocksize > 0, a finite offset",
                        &format!("{nested}, {offset}"),
                    );
                }
                self.count("weight.absmax", &[DType::U8], blocks);
                self.count("weight.nested_quant_map", &[DType::F32], 256);
                self.count("weight.nested_absmax", &[DType::F32], blocks.div_ceil(nested.max(1) as usize));
            }
        }
        let keys = LayerKeys {
            weight: self.key("weight").unwrap_or_default(),
            absmax: self.key("weight.absmax"),
            quant_map: self.key("weight.quant_map"),
            nested_map: state.nested.and_then(|_| self.key("weight.nested_quant_map")),
            nested_absmax: state.nested.and_then(|_| self.key("weight.nested_absmax")),
            ..LayerKeys::default()
        };
        let schema = Q4Schema::Nf4 {
            nibble_order: NibbleOrder::HighFirst,
            block: state.block,
            nested: state.nested.map(|s| s.0),
        };
        let nested_offset = state.nested.map_or(0.0, |s| s.1);
        Ok(Some(Detected { layout: Layout::Bitsandbytes, schema, n, k, keys, nested_offset }))
    }

    fn nf4_dat(&mut self) -> Option<Detected> {
        let [n, half] = self.matrix("weight", &[DType::U8])?;
        let k = half * 2;
        let absmax = self.tensor("absmax", &[DType::F32])?.len();
        self.count("quant_map", &[DType::F32], 16);
        if absmax == 0 || (n * k) % absmax != 0 {
            self.problem("absmax", &format!("a divisor of {} elements", n * k), &absmax.to_string());
            return None;
        }
        let block = u32::try_from(n * k / absmax).unwrap_or(u32::MAX);
        self.block(block);
        let keys = LayerKeys {
            weight: self.key("weight")?,
            absmax: self.key("absmax"),
            quant_map: self.key("quant_map"),
            ..LayerKeys::default()
        };
        let schema = Q4Schema::Nf4 { nibble_order: NibbleOrder::LowFirst, block, nested: None };
        Some(Detected { layout: Layout::Dat, schema, n, k, keys, nested_offset: 0.0 })
    }

    fn dense(&mut self) -> Option<Detected> {
        let [n, k] = self.matrix("weight", &[DType::F32, DType::F16, DType::BF16])?;
        let dtype = self.tensor("weight", &[DType::F32, DType::F16, DType::BF16])?.dtype?;
        let keys = LayerKeys { weight: self.key("weight")?, ..LayerKeys::default() };
        Some(Detected {
            layout: Layout::Dense,
            schema: Q4Schema::Dense { dtype },
            n,
            k,
            keys,
            nested_offset: 0.0,
        })
    }

    fn block(&mut self, block: u32) {
        if !(32..=4096).contains(&block) || !block.is_power_of_two() {
            self.problem("absmax", "a block size of 32 to 4096, a power of two", &block.to_string());
        }
    }

    fn key(&self, suffix: &str) -> Option<String> {
        Some(format!("{}.{suffix}", self.layer)).filter(|k| self.table.meta(k).is_some())
    }

    fn tensor(&mut self, suffix: &str, dtypes: &[DType]) -> Option<TensorMeta> {
        let names: Vec<_> = dtypes.iter().map(|d| d.as_str()).collect();
        let Some(meta) = self.table.meta(&format!("{}.{suffix}", self.layer)).cloned() else {
            self.problem(suffix, &names.join(" or "), "no such tensor");
            return None;
        };
        if !meta.dtype.is_some_and(|d| dtypes.contains(&d)) {
            let have = meta.dtype.map_or("another type", DType::as_str).to_owned();
            self.problem(suffix, &names.join(" or "), &have);
            return None;
        }
        Some(meta)
    }

    fn matrix(&mut self, suffix: &str, dtypes: &[DType]) -> Option<[usize; 2]> {
        let meta = self.tensor(suffix, dtypes)?;
        match &*meta.shape {
            &[n, k] if n > 0 && k > 0 => Some([n, k]),
            other => {
                self.problem(suffix, "a matrix with at least one element", &format!("{other:?}"));
                None
            }
        }
    }

    fn count(&mut self, suffix: &str, dtypes: &[DType], need: usize) {
        if let Some(meta) = self.tensor(suffix, dtypes)
            && meta.len() != need
        {
            self.problem(suffix, &format!("{need} elements"), &format!("{:?}", meta.shape));
        }
    }

    fn problem(&mut self, tensor: &str, need: &str, have: &str) {
        self.problems.push(format!("  {}.{tensor}: need {need}; have {have}", self.layer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(matches!(d.schema, Q4Schema::Nvfp4 { global: Some(Convention::Multiply), .. }));
        let ct = table(&[
            ("l.weight_packed", DType::U8, &[4, 16]),
            ("l.weight_scale", DType::F8E4M3, &[4, 2]),
            ("l.weight_global_scale", DType::F32, &[1]),
        ]);
        let d = detect("l", &ct, &no_state)?.expect("found");
        assert!(matches!(d.schema, Q4Schema::Nvfp4 { global: Some(Convention::Divide), .. }));
        let dat =
            table(&[("l.weight.qdata", DType::U8, &[4, 16]), ("l.weight.scale", DType::F8E4M3, &[4, 2])]);
        let d = detect("l", &dat, &no_state)?.expect("found");
        assert!(matches!((d.layout, d.schema), (Layout::Dat, Q4Schema::Nvfp4 { global: None, .. })));
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
            Q4Schema::Nvfp4 { scale_layout: ScaleLayout::Swizzled128x4, global: None }
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
