//! Adapters alone, as PEFT keeps them: `adapter_model.safetensors` and `adapter_config.json`.
use super::Tch;
use super::export::Beside;
use super::weights::{Param, Params, Source, bytes};
use crate::adapters::name as key;
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
            for (module, rows, _) in halves(p, rank) {
                entries.push(Entry::new(key(module, "A"), DType::F32, &[rank, p.shape[1]]));
                entries.push(Entry::new(key(module, "B"), DType::F32, &[rows, rank]));
                targets.insert(module.rsplit('.').next().unwrap_or(module));
            }
        }
    }
    let mut writer = Writer::create(&beside.path().join("adapter_model.safetensors"), &entries)?;
    for p in &params.all {
        let Source::Frozen(_, Some(adapter)) = &p.source else { continue };
        for (module, rows, [first, column]) in halves(p, rank) {
            let (a, b) = (adapter.a.master.f_to_kind(Kind::Float), adapter.b.master.f_to_kind(Kind::Float));
            let (a, b) = (a.t()?.f_narrow(0, column, rank as i64), b.t()?.f_narrow(0, first, rows as i64));
            writer.write(&key(module, "A"), &bytes(&a.t()?)?)?;
            writer.write(&key(module, "B"), &bytes(&b.t()?.f_narrow(1, column, rank as i64).t()?)?)?;
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

/// Modules that have an adapter, their rows, and where it begins: the row of `b`, and the row of `a`.
fn halves(p: &Param, rank: usize) -> Vec<(&str, usize, [i64; 2])> {
    let Source::Frozen(_, Some(adapter)) = &p.source else { return Vec::new() };
    let (mut out, mut row, mut column) = (Vec::new(), 0, 0);
    for (i, (module, rows)) in p.parts.iter().enumerate() {
        match &adapter.own {
            None => out.push((module.as_str(), *rows, [row, 0])),
            Some((has, _)) if has[i] => {
                out.push((module.as_str(), *rows, [row, column]));
                column += rank as i64;
            }
            Some(_) => {}
        }
        row += *rows as i64;
    }
    out
}
