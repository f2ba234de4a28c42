//! The small files beside the weights: what the output says about itself, and what it takes over from the original.
//!
//! Other programs decide by these how to read the weights, so their fields follow those programs to the letter.
use super::work::Item;
use super::{ExportPlan, Layout};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::names::HEAD;
use crate::quantize::Target;
use q4_core::{Code, Error, Result};
use serde_json::{Map, Value, json};

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

/// Names and contents of all small files of an output directory.
pub(super) fn files(
    checkpoint: &Checkpoint,
    plan: &ExportPlan,
    items: &[Item],
) -> Result<Vec<(String, Vec<u8>)>> {
    let bytes = checkpoint.file("config.json").ok_or_else(|| {
        Error::new(Code::ModelMissing, "config.json of the original")
            .need("the file, to be completed and written")
    })?;
    let dense = dense_layers(items);
    let config = completed(&bytes, &quantization_config(plan, items, &dense))?;
    let mut files = vec![("config.json".to_owned(), config)];
    if plan.layout == Layout::ModelOpt {
        let quantization = json!({
            "quant_algo": ALGORITHM,
            "kv_cache_quant_algo": null,
            "group_size": 16,
            "exclude_modules": dense,
        });
        files.push((
            "hf_quant_config.json".into(),
            text(&json!({ "producer": producer(), "quantization": quantization })),
        ));
    }
    for name in TAKEN_OVER {
        files.extend(checkpoint.file(name).map(|bytes| (name.to_owned(), bytes.to_vec())));
    }
    Ok(files)
}

/// The original's text with one more field at its end; every other character stays, numbers above all.
fn completed(original: &[u8], quantization: &Value) -> Result<Vec<u8>> {
    let invalid =
        || Error::new(Code::ConfigInvalid, "config.json").need("a JSON object that is not quantised");
    let config: Map<String, Value> =
        serde_json::from_slice(original).map_err(|e| invalid().have(e.to_string()))?;
    if let Some(there) = config.get("quantization_config") {
        return Err(invalid().have(format!("quantization_config: {there}")).fix("remove the field"));
    }
    let text = String::from_utf8_lossy(original);
    let fields = text.trim_end().strip_suffix('}').ok_or_else(invalid)?.trim_end();
    let comma = if config.is_empty() { "" } else { "," };
    let value = format!("{quantization:#}").replace('\n', "\n  ");
    Ok(format!("{fields}{comma}\n  \"quantization_config\": {value}\n}}\n").into_bytes())
}

/// ModelOpt's name for NVFP4 weights with activations as they are: without calibration there is no `input_scale`.
const ALGORITHM: &str = "W4A16_NVFP4";

fn quantization_config(plan: &ExportPlan, items: &[Item], dense: &[String]) -> Value {
    match (plan.layout, plan.target) {
        (Layout::ModelOpt, _) => json!({
            "config_groups": { "group_0": {
                "weights": { "dynamic": false, "num_bits": 4, "type": "float", "group_size": 16 },
                "targets": ["Linear"],
            } },
            "ignore": dense,
            "quant_algo": ALGORITHM,
            "producer": producer(),
            "quant_method": "modelopt",
        }),
        (_, Target::Nf4 { double, .. }) => json!({
            "quant_method": "bitsandbytes",
            "load_in_4bit": true,
            "load_in_8bit": false,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": double,
            "bnb_4bit_compute_dtype": items.iter().find_map(|i| i.matrix.as_ref()).map(|m| m.dtype.as_str()),
            "bnb_4bit_quant_storage": "uint8",
            // `null` skips lm_head and nothing else.
            "llm_int8_skip_modules": if dense == [HEAD] { Value::Null } else { json!(dense) },
        }),
        _ => json!({
            "config_groups": { "group_0": {
                "format": "nvfp4-pack-quantized",
                "input_activations": null,
                "output_activations": null,
                "targets": ["Linear"],
                "weights": {
                    "actorder": null,
                    "block_structure": null,
                    "dynamic": false,
                    "group_size": 16,
                    "num_bits": 4,
                    "observer": "memoryless_minmax",
                    "observer_kwargs": {},
                    "scale_dtype": "torch.float8_e4m3fn",
                    "strategy": "tensor_group",
                    "symmetric": true,
                    "type": "float",
                    "zp_dtype": null,
                },
            } },
            "format": "nvfp4-pack-quantized",
            "global_compression_ratio": null,
            "ignore": dense,
            "kv_cache_scheme": null,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }),
    }
}

/// Linear layers that stay dense. `lm_head` is one even where it is tied and has no tensor.
fn dense_layers(items: &[Item]) -> Vec<String> {
    let head_packed = items.iter().filter_map(|i| i.matrix.as_ref()).any(|m| m.layer == HEAD);
    let mut dense: Vec<String> = (!head_packed).then(|| HEAD.to_owned()).into_iter().collect();
    let kept = items.iter().filter(|i| i.matrix.is_none()).filter_map(|i| i.source.strip_suffix(".weight"));
    dense.extend(kept.filter(|layer| layer.ends_with("_proj")).map(str::to_owned));
    dense
}

/// Readers take a file for ModelOpt's only under this name; the version says who wrote it.
fn producer() -> Value {
    json!({ "name": "modelopt", "version": concat!("q4-", env!("CARGO_PKG_VERSION")) })
}

fn text(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
