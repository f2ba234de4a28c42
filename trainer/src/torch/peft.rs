//! Adapters alone, as PEFT keeps them: `adapter_model.safetensors` and `adapter_config.json`.
use super::Tch;
use super::export::Beside;
use super::weights::{Params, Source, bytes};
use q4_core::{Code, DType, Error, Result};
use q4_model::export::{Entry, Writer};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::Path;
use tch::Kind;

/// Writes the adapters beside a frozen base to `out`, which must not exist; `base` is where that model came
/// from. Modules that share their input share `lora_A`, which is written for each of them.
pub fn write(params: &Params, base: &Path, out: &Path) -> Result<()> {
    if std::fs::symlink_metadata(out).is_ok() {
        return Err(
            Error::new(Code::Usage, format!("{}: exists", out.display())).fix("name another, or remove it")
        );
    }
    let (Some((rank, alpha)), beside) = (params.keep.lora, Beside::new(out)?) else {
        return Err(Error::new(Code::Usage, "an export of adapters").need("[lora]").have("none"));
    };
    let mut entries = Vec::new();
    let mut targets = BTreeSet::new();
    for p in &params.all {
        if let Source::Frozen(_, Some(_)) = p.source {
            for (module, rows) in &p.parts {
                entries.push(Entry::new(key(module, "A"), DType::F32, &[rank, p.shape[1]]));
                entries.push(Entry::new(key(module, "B"), DType::F32, &[*rows, rank]));
                targets.insert(module.rsplit('.').next().unwrap_or(module));
            }
        }
    }
    let mut writer = Writer::create(&beside.path().join("adapter_model.safetensors"), &entries)?;
    for p in &params.all {
        let Source::Frozen(_, Some(adapter)) = &p.source else { continue };
        let mut first = 0;
        for (module, rows) in &p.parts {
            let (a, b) = (adapter.a.master.f_to_kind(Kind::Float), adapter.b.master.f_to_kind(Kind::Float));
            writer.write(&key(module, "A"), &bytes(&a.t()?)?)?;
            writer.write(&key(module, "B"), &bytes(&b.t()?.f_narrow(0, first, *rows as i64).t()?)?)?;
            first += *rows as i64;
        }
    }
    writer.finish()?;
    let config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": false,
        "target_modules": targets, "modules_to_save": null, "rank_pattern": {}, "alpha_pattern": {},
        "use_rslora": false, "use_dora": false, "init_lora_weights": true, "inference_mode": true,
    });
    let path = beside.path().join("adapter_config.json");
    std::fs::write(&path, format!("{config:#}\n")).map_err(|e| Error::io(&path, &e))?;
    std::fs::rename(beside.path(), out).map_err(|e| Error::io(out, &e))
}

fn key(module: &str, half: &str) -> String {
    format!("base_model.model.{module}.lora_{half}.weight")
}
