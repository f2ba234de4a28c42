//! What GPTQ, AutoAWQ and AutoRound say of their int4.
use super::{CONFIG, Declaration, Declared, Excluded, Group, Method, Reach, Targets, present, refuse, text};
use crate::words::{Packing, Words};
use q4_core::Result;
use serde_json::Value;

/// GPTQ's own fields.
pub(super) fn gptq(c: &Value) -> Result<Declaration> {
    let form = present(c, "checkpoint_format");
    let words = match form.map(|f| f.as_str().unwrap_or_default()) {
        None | Some("gptq") => Words::Gptq,
        Some("gptq_v2") => Words::GptqV2,
        Some(_) => return Err(refuse(CONFIG, "checkpoint_format", "gptq or gptq_v2", form)),
    };
    let mut patterns = Vec::new();
    if let Some(dynamic) = present(c, "dynamic") {
        for pattern in dynamic.as_object().map(|o| o.keys()).into_iter().flatten() {
            patterns.extend(pattern.strip_prefix("-:").map(|pattern| format!("re:{pattern}")));
        }
        if dynamic.as_object().is_none_or(|all| all.len() != patterns.len()) {
            let need = "patterns behind `-:`: bits and groups of single modules are not read yet";
            return Err(refuse(CONFIG, "dynamic", need, Some(dynamic)));
        }
    }
    let symmetric = present(c, "sym").and_then(Value::as_bool).unwrap_or(true);
    int4(
        c,
        (Method::Gptq, Packing { words, symmetric, act_order: act_order(c) }),
        ["bits", "group_size"],
        of("dynamic", patterns),
    )
}

/// Whether in features may be in any group, if it is said.
fn act_order(c: &Value) -> Option<bool> {
    present(c, "desc_act").and_then(Value::as_bool)
}

/// Modules that a field excludes.
fn of(field: &str, patterns: Vec<String>) -> Vec<Excluded> {
    let list = Excluded { file: CONFIG, field: field.to_owned(), patterns };
    Some(list).filter(|list| !list.patterns.is_empty()).into_iter().collect()
}

/// AWQ's own fields, by the names of transformers or of AutoAWQ.
pub(super) fn awq(c: &Value) -> Result<Declaration> {
    let is = |field: &str, words: &str| text(c, field).is_none_or(|v| v.eq_ignore_ascii_case(words));
    if !is("version", "gemm") {
        return Err(refuse(CONFIG, "version", "gemm", c.get("version")));
    }
    if let Some(zeros) = present(c, "zero_point").filter(|z| z.as_bool() != Some(true)) {
        return Err(refuse(CONFIG, "zero_point", "true", Some(zeros)));
    }
    let named = |ours, theirs| if present(c, ours).is_some() { ours } else { theirs };
    let fields = [named("bits", "w_bit"), named("group_size", "q_group_size")];
    let packing = Packing { words: Words::Awq, symmetric: false, act_order: Some(false) };
    int4(c, (Method::Awq, packing), fields, Excluded::of(CONFIG, c, &["modules_to_not_convert"]).collect())
}

/// AutoRound's fields, whose words are those of GPTQ or of AWQ.
pub(super) fn auto_round(c: &Value) -> Result<Declaration> {
    let packing = present(c, "packing_format");
    let (method, words) = match packing.and_then(Value::as_str) {
        Some("auto_round:auto_gptq" | "auto_gptq") => (Method::Gptq, Words::Gptq),
        Some("auto_round:auto_awq" | "auto_awq") => (Method::Awq, Words::Awq),
        _ => {
            let need = "auto_round:auto_gptq or auto_round:auto_awq";
            return Err(refuse(CONFIG, "packing_format", need, packing));
        }
    };
    if let Some(kind) = present(c, "data_type").filter(|kind| kind.as_str() != Some("int")) {
        return Err(refuse(CONFIG, "data_type", "int", Some(kind)));
    }
    // Layers with fields of their own: those that stay as they were are no layers of int4.
    let mut layers = Vec::new();
    for (layer, own) in present(c, "extra_config").and_then(Value::as_object).into_iter().flatten() {
        if present(own, "bits").and_then(Value::as_u64).is_none_or(|bits| bits < 16) {
            let field = format!("extra_config.{layer}");
            return Err(refuse(CONFIG, &field, "bits of 16, a layer that is not quantised", Some(own)));
        }
        layers.push(layer.clone());
    }
    let sym = present(c, "sym").and_then(Value::as_bool).unwrap_or(true);
    let (symmetric, act_order) = match words {
        Words::Awq => (false, Some(false)),
        _ => (sym, act_order(c)),
    };
    let packing = Packing { words, symmetric, act_order };
    int4(c, (method, packing), ["bits", "group_size"], of("extra_config", layers))
}

fn int4(
    c: &Value,
    (method, packing): (Method, Packing),
    [bits, size]: [&str; 2],
    excluded: Vec<Excluded>,
) -> Result<Declaration> {
    if present(c, bits).and_then(Value::as_u64) != Some(4) {
        return Err(refuse(CONFIG, bits, "4", c.get(bits)));
    }
    let reach = match present(c, size).and_then(Value::as_i64) {
        Some(-1) => Reach::Row,
        Some(size) if size > 0 && size % 16 == 0 && u32::try_from(size).is_ok() => Reach::Block(size as u32),
        _ => {
            return Err(refuse(
                CONFIG,
                size,
                "a multiple of 16, or -1 for a scale per out feature",
                c.get(size),
            ));
        }
    };
    let format = Declared { schema: if packing.symmetric { "int4" } else { "int4-asym" }, reach };
    let said = if packing.words == Words::Awq { size.to_owned() } else { format!("{size} and sym") };
    let groups = vec![Group {
        place: format!("{CONFIG}: {said}"),
        targets: Targets::All,
        format,
        activations: false,
        rounded: None,
    }];
    let (activations, packing) = (Some(false), Some(packing));
    Ok(Declaration { method, activations, groups, packing, excluded, notes: Vec::new() })
}
