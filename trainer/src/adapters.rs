//! Adapters that somebody else trained, in PEFT's layout: what of them is understood, and what is refused by
//! name because it would change what a layer computes.
use q4_core::{Code, DType, Error, Result, read_floats};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Modules that adapters may stand beside, by their last name.
pub const TARGETS: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Keys that change nothing here, or are read by name below.
const PLAIN: [&str; 16] = [
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "r",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "use_rslora",
    "init_lora_weights",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
];

/// An adapter's files.
pub struct Adapters {
    dir: PathBuf,
    bytes: Vec<u8>,
    /// Rank of every module.
    pub rank: usize,
    /// Adapters are scaled by `alpha / rank`.
    pub alpha: f64,
    /// Modules that have one, by their last name.
    pub targets: BTreeSet<String>,
    /// What was set aside, a line each.
    pub notes: Vec<String>,
}

impl Adapters {
    /// Reads `adapter_config.json` and `adapter_model.safetensors`.
    ///
    /// # Errors
    /// [`Code::Container`] with the key or the tensor that is not understood; [`Code::ModelMissing`] without
    /// the files.
    pub fn open(dir: &Path) -> Result<Self> {
        let file = |name: &str| {
            let path = dir.join(name);
            std::fs::read(&path).map_err(|e| {
                Error::io(&path, &e).fix("a folder with adapter_config.json and adapter_model.safetensors")
            })
        };
        let text = file("adapter_config.json")?;
        let mut it = Self {
            dir: dir.to_owned(),
            bytes: file("adapter_model.safetensors")?,
            rank: 0,
            alpha: 0.0,
            targets: BTreeSet::new(),
            notes: Vec::new(),
        };
        it.configure(&text).map_err(|e| e.within(dir.join("adapter_config.json").display()))?;
        it.look().map_err(|e| e.within(dir.join("adapter_model.safetensors").display()))?;
        Ok(it)
    }

    fn configure(&mut self, text: &[u8]) -> Result<()> {
        let config: Value = serde_json::from_slice(text).map_err(|e| bad("not JSON").have(e.to_string()))?;
        let object = config.as_object().ok_or_else(|| bad("no object"))?;
        if config["peft_type"] != "LORA" {
            return Err(bad("peft_type").need("LORA").have(config["peft_type"].to_string()));
        }
        let rank = config["r"].as_u64().filter(|r| (1..=4096).contains(r));
        self.rank = rank.ok_or_else(|| bad("r").need("1 to 4096").have(config["r"].to_string()))? as usize;
        let alpha = config["lora_alpha"].as_f64().filter(|a| a.is_finite() && *a > 0.0);
        self.alpha = alpha.ok_or_else(|| {
            bad("lora_alpha").need("a number above 0").have(config["lora_alpha"].to_string())
        })?;
        if config["use_rslora"] == true {
            // It divides by the root of the rank: the same product under our rule.
            self.alpha *= (self.rank as f64).sqrt();
        }
        if let Some(how) = config["init_lora_weights"].as_str().filter(|how| *how != "gaussian") {
            return Err(bad("init_lora_weights")
                .need("adapters beside the base as it is published: true, false or gaussian")
                .have(format!("{how:?}, which changes the base"))
                .fix("save it in PEFT with path_initial_model_for_weight_conversion"));
        }
        if config["lora_dropout"].as_f64().is_some_and(|p| p > 0.0) {
            self.notes.push("lora_dropout is not applied: training goes on without".into());
        }
        for (key, value) in
            object.iter().filter(|(k, _)| !PLAIN.contains(&k.as_str()) && *k != "lora_dropout")
        {
            let nothing = match value {
                Value::Null | Value::Bool(false) => true,
                Value::String(s) => s.is_empty() || key == "bias" && s == "none",
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => false,
            };
            if !nothing {
                return Err(bad(key)
                    .need("plain LoRA: one rank and one alpha, nothing else trained")
                    .have(value.to_string().chars().take(60).collect::<String>())
                    .fix("merge it in PEFT (merge_and_unload) and train on what that writes"));
            }
        }
        Ok(())
    }

    fn tensors(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.bytes).map_err(|e| bad("not safetensors").have(e.to_string()))
    }

    fn look(&mut self) -> Result<()> {
        let mut targets = BTreeSet::new();
        for name in self.tensors()?.names() {
            let module = ["A", "B"].iter().find_map(|half| {
                name.strip_prefix("base_model.model.")?.strip_suffix(&format!(".lora_{half}.weight"))
            });
            let last = module.and_then(|m| TARGETS.iter().find(|t| m.ends_with(&format!(".{t}"))));
            let Some(last) = last else {
                return Err(bad(name)
                    .need(format!("lora_A and lora_B of {}", TARGETS.join(", ")))
                    .fix("merge it in PEFT (merge_and_unload) and train on what that writes"));
            };
            targets.insert((*last).to_owned());
        }
        if targets.is_empty() {
            return Err(bad("no tensors").need("lora_A and lora_B of modules"));
        }
        self.targets = targets;
        Ok(())
    }

    /// `lora_A` `[rank, in]` or `lora_B` `[out, rank]` of a module, as f32.
    ///
    /// # Errors
    /// [`Code::TensorShape`] or [`Code::Container`] with the name of the tensor.
    pub fn half(&self, module: &str, half: &str, shape: [usize; 2]) -> Result<Vec<f32>> {
        let name = name(module, half);
        let within = |e: Error| e.within(self.dir.join("adapter_model.safetensors").display());
        let tensors = self.tensors()?;
        let t = tensors.tensor(&name).map_err(|_| {
            within(bad(&name).need("this tensor: a target has adapters in every layer").have("none"))
        })?;
        if t.shape() != shape {
            let e = Error::new(Code::TensorShape, &name).need(format!("{shape:?}"));
            return Err(within(e.have(format!("{:?}", t.shape())).fix("the base that it was trained on")));
        }
        let dtype = match t.dtype() {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => return Err(within(bad(&name).need("F32, F16 or BF16").have(format!("{other:?}")))),
        };
        let mut out = vec![0f32; shape[0] * shape[1]];
        read_floats(t.data(), dtype, &mut out);
        if out.iter().any(|x| !x.is_finite()) {
            return Err(within(Error::new(Code::NonFinite, &name).need("finite numbers").have("others")));
        }
        Ok(out)
    }

    /// How many tensors there are.
    pub fn count(&self) -> Result<usize> {
        Ok(self.tensors()?.len())
    }
}

/// The name PEFT gives half of a module's adapter.
pub fn name(module: &str, half: &str) -> String {
    format!("base_model.model.{module}.lora_{half}.weight")
}

fn bad(what: &str) -> Error {
    Error::new(Code::Container, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    const CONFIG: &str = r#""peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "none", "use_dora": false,
        "rank_pattern": {}, "modules_to_save": null, "megatron_core": "megatron.core", "qalora_group_size": 16,
        "lora_dropout": 0.0, "loftq_config": {}, "target_modules": ["q_proj"], "init_lora_weights": true"#;

    fn written(config: &str, tensor: &str, shape: &[usize]) -> (tempfile::TempDir, Result<Adapters>) {
        let dir = tempfile::tempdir().expect("directory");
        std::fs::write(dir.path().join("adapter_config.json"), format!("{{{config}}}")).expect("written");
        let data: Vec<u8> =
            (0..shape.iter().product::<usize>()).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let view = TensorView::new(Dtype::F32, shape.to_vec(), &data).expect("a view");
        let bytes = safetensors::serialize([(tensor, view)], None).expect("bytes");
        std::fs::write(dir.path().join("adapter_model.safetensors"), bytes).expect("written");
        let read = Adapters::open(dir.path());
        (dir, read)
    }

    #[test]
    fn what_would_change_a_layer_is_refused_by_name() {
        let key = name("model.layers.0.self_attn.q_proj", "A");
        let (_dir, read) = written(CONFIG, &key, &[2, 3]);
        let it = read.expect("plain LoRA");
        assert_eq!((it.rank, it.alpha, it.targets.len()), (2, 8.0, 1));
        assert_eq!(it.half("model.layers.0.self_attn.q_proj", "A", [2, 3]).expect("read")[5], 5.0);
        let e = it.half("model.layers.0.self_attn.q_proj", "A", [2, 4]).expect_err("shape");
        assert_eq!(e.code(), Code::TensorShape);
        assert!(it.half("model.layers.0.self_attn.q_proj", "B", [2, 3]).is_err(), "half of it");
        let (_dir, scaled) = written(&format!("{CONFIG}, \"use_rslora\": true"), &key, &[2, 3]);
        assert!((scaled.expect("rsLoRA").alpha - 8.0 * 2f64.sqrt()).abs() < 1e-12);
        for (more, named) in [
            ("\"use_dora\": true", "use_dora"),
            ("\"bias\": \"all\"", "bias"),
            ("\"modules_to_save\": [\"lm_head\"]", "modules_to_save"),
            ("\"rank_pattern\": {\"q_proj\": 4}", "rank_pattern"),
            ("\"alpha_pattern\": {\"q_proj\": 4}", "alpha_pattern"),
            ("\"layers_to_transform\": [0]", "layers_to_transform"),
            ("\"fan_in_fan_out\": true", "fan_in_fan_out"),
            ("\"lora_bias\": true", "lora_bias"),
            ("\"init_lora_weights\": \"pissa\"", "init_lora_weights"),
            ("\"something_new\": 1", "something_new"),
            ("\"peft_type\": \"IA3\"", "peft_type"),
            ("\"r\": 0", "r:"),
            ("\"lora_alpha\": \"x\"", "lora_alpha"),
        ] {
            // The last of two keys counts.
            let e = written(&format!("{CONFIG}, {more}"), &key, &[2, 3]).1.err().expect(more).to_string();
            assert!(
                e.contains("adapter_config.json") && e.contains(named.trim_end_matches(':')),
                "{more}: {e}"
            );
        }
        for tensor in ["base_model.model.model.embed_tokens.lora_embedding_A", "lm_head.weight"] {
            let e = written(CONFIG, tensor, &[2, 3]).1.err().expect(tensor).to_string();
            assert!(e.contains(tensor), "{e}");
        }
        let none = tempfile::tempdir().expect("directory");
        assert!(Adapters::open(none.path()).is_err());
    }
}
