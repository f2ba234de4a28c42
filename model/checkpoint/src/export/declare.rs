//! The small files beside the weights: what the output says about itself, and what it takes over from the
//! original.
//!
//! Other programs decide by these how to read the weights, so their fields follow those programs to the
//! letter.
use super::members::with_members;
use super::work::Item;
use super::{ExportPlan, Layout};
use crate::Checkpoint;
use q4_core::formats::storage::Described;
use q4_core::{Code, DType, Error, Result};
use serde_json::{Map, Value, json};

const QUANTIZATION: &str = "quantization_config";
/// What MLX calls it, beside the usual name.
const OF_MLX: &str = "quantization";
const HF_QUANT: &str = "hf_quant_config.json";

/// Copied as they are, where the original has them.
const TAKEN_OVER: [&str; 11] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "NOTICE",
];

/// What an output says about its weights.
pub(super) struct Declared {
    pub layout: Layout,
    /// The weights, as compressed-tensors describes them.
    pub described: Option<Described>,
    /// The inputs of its layers are NVFP4, with a stored scale each.
    pub inputs: bool,
    /// NF4 with quantised absmax.
    pub double: bool,
    /// In features of some layers are in any group.
    pub act_order: bool,
    /// What programs that decode compute in.
    pub dtype: Option<DType>,
    /// Linear layers that are not quantised.
    pub dense: Vec<String>,
}

/// Names and contents of all small files of an output directory.
pub(super) fn files(
    checkpoint: &Checkpoint,
    plan: &ExportPlan,
    items: &[Item],
) -> Result<Vec<(String, Vec<u8>)>> {
    let head = checkpoint.config().arch.names.head;
    let matrices = || items.iter().filter_map(|i| i.matrix.as_ref());
    let kept = items.iter().filter(|i| i.matrix.is_none()).map(|i| i.source.as_str());
    let declared = Declared {
        layout: plan.layout,
        described: plan.target.schema().described(),
        inputs: false, // they would have to be calibrated
        double: plan.target.schema().wire().nested_block != 0,
        act_order: false,
        dtype: matrices().next().map(|m| m.dtype),
        dense: dense_layers(matrices().all(|m| m.layer != head).then_some(head), kept),
    };
    let config = config(checkpoint)?;
    let quantised = config.parsed.get(QUANTIZATION).or(config.parsed.get(OF_MLX));
    if let Some(there) = quantised {
        return Err(Error::new(Code::ConfigInvalid, "config.json")
            .need("a JSON object that is not quantised")
            .have(format!("{QUANTIZATION}: {there}"))
            .fix("remove the field"));
    }
    declared.files(checkpoint, &config, Vec::new())
}

/// `config.json` of an original.
pub(super) struct Config {
    text: String,
    parsed: Map<String, Value>,
}

/// [`Code::ModelMissing`] without one, [`Code::ConfigInvalid`] where it is no object.
pub(super) fn config(checkpoint: &Checkpoint) -> Result<Config> {
    let bytes = checkpoint.file("config.json").ok_or_else(|| {
        Error::new(Code::ModelMissing, "config.json of the original")
            .need("the file, to be completed and written")
    })?;
    let invalid =
        |have: String| Error::new(Code::ConfigInvalid, "config.json").need("a JSON object").have(have);
    let parsed = serde_json::from_slice(&bytes).map_err(|e| invalid(e.to_string()))?;
    let text = String::from_utf8(bytes.to_vec()).map_err(|e| invalid(e.to_string()))?;
    Ok(Config { text, parsed })
}

impl Declared {
    /// Names and contents of all small files: `config` with this declaration in place of its own and with
    /// `others` in place of its fields of these names, and what is taken over from `checkpoint`.
    ///
    /// [`Code::Usage`] for what readers of the layout do not take.
    pub fn files(
        &self,
        checkpoint: &Checkpoint,
        config: &Config,
        mut others: Vec<(&str, Value)>,
    ) -> Result<Vec<(String, Vec<u8>)>> {
        if self.layout == Layout::Awq && self.is_head_packed() {
            return Err(Error::new(Code::Usage, "`lm_head`: layout awq cannot hold it packed")
                .need("a dense head, for readers of awq pack layers of blocks only")
                .have("one of 4 bits")
                .fix("another layout, or a dense head"));
        }
        others.push((QUANTIZATION, self.quantization_config()));
        others.push((OF_MLX, Value::Null));
        let mut files = vec![("config.json".to_owned(), with_members(&config.text, &others).into_bytes())];
        if self.layout == Layout::ModelOpt {
            let quantization = json!({
                "quant_algo": self.algorithm(),
                "kv_cache_quant_algo": null,
                "group_size": 16,
                "exclude_modules": self.dense,
            });
            files.push((
                HF_QUANT.into(),
                text(&json!({ "producer": producer(), "quantization": quantization })),
            ));
        }
        files.extend(taken_over(checkpoint));
        Ok(files)
    }

    fn is_head_packed(&self) -> bool {
        self.dense.iter().all(|layer| layer != "lm_head")
    }

    /// ModelOpt's name for NVFP4 weights, and inputs or not.
    fn algorithm(&self) -> &'static str {
        if self.inputs { "NVFP4" } else { "W4A16_NVFP4" }
    }

    fn quantization_config(&self) -> Value {
        match self.layout {
            Layout::ModelOpt => {
                let format = json!({ "dynamic": false, "num_bits": 4, "type": "float", "group_size": 16 });
                let mut group = json!({ "weights": format, "targets": ["Linear"] });
                if self.inputs {
                    group["input_activations"] = format;
                }
                json!({
                    "config_groups": { "group_0": group },
                    "ignore": self.dense,
                    "quant_algo": self.algorithm(),
                    "producer": producer(),
                    "quant_method": "modelopt",
                })
            }
            Layout::Bitsandbytes => json!({
                "quant_method": "bitsandbytes",
                "load_in_4bit": true,
                "load_in_8bit": false,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": self.double,
                "bnb_4bit_compute_dtype": self.dtype.map(DType::as_str),
                "bnb_4bit_quant_storage": "uint8",
                // `null` skips lm_head and nothing else.
                "llm_int8_skip_modules": if self.dense == ["lm_head"] { Value::Null } else { json!(self.dense) },
            }),
            Layout::Gptq => self.gptq(),
            Layout::Awq => json!({
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group_size(),
                "version": "gemm",
                "zero_point": true,
                "modules_to_not_convert": self.dense,
            }),
            _ => json!({
                "config_groups": { "group_0": {
                    "format": self.described.map(|d| d.format),
                    "input_activations": self.inputs.then(|| self.compressed("local", "static_minmax")),
                    "output_activations": null,
                    "targets": ["Linear"],
                    "weights": self.compressed(false, "memoryless_minmax"),
                } },
                "format": self.described.map(|d| d.format),
                "global_compression_ratio": null,
                "ignore": self.dense,
                "kv_cache_scheme": null,
                "quant_method": "compressed-tensors",
                "quantization_status": "compressed",
            }),
        }
    }

    fn gptq(&self) -> Value {
        let is_symmetric = self.described.is_none_or(|d| d.symmetric);
        let mut quantizer = vec![concat!("q4:", env!("CARGO_PKG_VERSION"))];
        if !is_symmetric {
            // The first version that GPTQModel takes such zero points from: others wrote them one off.
            quantizer.push("gptqmodel:0.9.0");
        }
        let mut config = json!({
            "quant_method": "gptq",
            "bits": 4,
            "group_size": self.group_size(),
            "sym": is_symmetric,
            "desc_act": self.act_order,
            "checkpoint_format": "gptq",
            "lm_head": self.is_head_packed(),
            "pack_dtype": "int32",
            "meta": { "quantizer": quantizer },
        });
        // Layers of blocks are packed unless a pattern leaves them out.
        let left_out = |layer: &String| (format!("-:^{}$", layer.replace('.', "\\.")), json!({}));
        let dynamic: Map<_, _> = self.dense.iter().filter(|l| *l != "lm_head").map(left_out).collect();
        if !dynamic.is_empty() {
            config["dynamic"] = dynamic.into();
        }
        config
    }

    /// Elements per scale as GPTQ and AWQ say it.
    fn group_size(&self) -> i64 {
        self.described.map(|d| d.group_size).filter(|size| *size != 0).map_or(-1, i64::from)
    }

    /// How compressed-tensors describes the weights, or inputs of their format.
    fn compressed(&self, dynamic: impl Into<Value>, observer: &str) -> Value {
        let Some(of) = self.described else { return Value::Null };
        json!({
            "actorder": null,
            "block_structure": null,
            "dynamic": dynamic.into(),
            "group_size": (of.group_size != 0).then_some(of.group_size),
            "num_bits": of.bits,
            "observer": observer,
            "observer_kwargs": {},
            "scale_dtype": of.scale_dtype,
            "strategy": of.strategy,
            "symmetric": of.symmetric,
            "type": of.kind,
            "zp_dtype": null,
        })
    }
}

/// The files that describe the quantisation, as they are: for an output whose tensors are those of the
/// original.
pub(super) fn unchanged(checkpoint: &Checkpoint) -> Vec<(String, Vec<u8>)> {
    let own = ["config.json", HF_QUANT].into_iter();
    let mut files: Vec<_> =
        own.filter_map(|name| Some((name.to_owned(), checkpoint.file(name)?.to_vec()))).collect();
    files.extend(taken_over(checkpoint));
    files
}

fn taken_over(checkpoint: &Checkpoint) -> impl Iterator<Item = (String, Vec<u8>)> {
    TAKEN_OVER.iter().filter_map(|name| Some(((*name).to_owned(), checkpoint.file(name)?.to_vec())))
}

/// Linear layers that stay dense, of the tensors that are `kept`. The `head` is one, unless it is packed,
/// even where it is tied and has no tensor.
pub(super) fn dense_layers<'a>(head: Option<&str>, kept: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut dense: Vec<String> = head.map(str::to_owned).into_iter().collect();
    let layers = kept.filter_map(|name| name.strip_suffix(".weight"));
    dense.extend(layers.filter(|layer| layer.ends_with("_proj")).map(str::to_owned));
    dense
}

/// Readers take a file for ModelOpt's only under this name; the version says who wrote it.
fn producer() -> Value {
    json!({ "name": "modelopt", "version": concat!("q4-", env!("CARGO_PKG_VERSION")) })
}

fn text(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
