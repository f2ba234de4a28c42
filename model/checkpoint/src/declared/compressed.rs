//! What compressed-tensors says: groups of layers, each with a format.
use super::patterns::Targets;
use super::{
    CONFIG, Declaration, Declared, Excluded, Group, Method, Reach, Rounded, groups, inputs_note, kv_note,
    list, present, refuse, text,
};
use q4_core::formats::{self, Wire, storage::Described};
use q4_core::{Q4Schema, Result};
use serde_json::{Value, json};

pub(super) fn read(c: &Value) -> Result<Declaration> {
    let mut known: Vec<(Described, Q4Schema)> =
        formats::names().flat_map(formats::encodings).filter_map(|s| Some((s.described()?, s))).collect();
    known.dedup_by_key(|k| (k.0.format, k.0.symmetric));
    let mut names: Vec<_> = known.iter().map(|k| k.0.format).collect();
    names.dedup();
    let names = names.join(" or ");
    if groups(c).is_empty() {
        return Err(refuse(CONFIG, "config_groups", "at least one group", c.get("config_groups")));
    }
    let mut declared = Vec::new();
    let mut notes: Vec<_> = present(c, "kv_cache_scheme").map(|kv| kv_note(CONFIG, kv)).into_iter().collect();
    for (place, group) in groups(c) {
        let format = present(group, "format").or(present(c, "format"));
        let called: Vec<_> =
            known.iter().filter(|k| format.and_then(Value::as_str) == Some(k.0.format)).collect();
        let Some(usual) = called.first() else {
            return Err(refuse(CONFIG, &format!("{place}.format"), &names, format));
        };
        let weights = present(group, "weights");
        let symmetric = weights.and_then(|w| present(w, "symmetric")).and_then(Value::as_bool);
        let (described, schema) = called.iter().find(|k| Some(k.0.symmetric) == symmetric).unwrap_or(usual);
        let inputs = present(group, "input_activations");
        let why = format!("for its format is {}", described.format);
        let is_tiled = schema.tile().is_some();
        if inputs.is_some() && !is_tiled && !schema.activations().contains(&"nvfp4") {
            let need = format!("null: inputs of {} weights are not quantised here", schema.id().name);
            return Err(refuse(CONFIG, &format!("{place}.input_activations"), &need, inputs));
        }
        let reach = if is_tiled {
            check_group(
                CONFIG,
                (&place, group),
                inputs.is_some(),
                Numbers {
                    bits: described.bits,
                    kind: "float",
                    symmetric: true,
                    is_block: &|_| true,
                    blocks: "nothing",
                    why: &why,
                },
            )?;
            if inputs.is_some() && notes.iter().all(|note| note.code != "inputs-float") {
                notes.push(inputs_note(CONFIG, "FP8"));
            }
            Reach::Tile(tile(&place, weights)?)
        } else {
            let need = if schema.blocks().is_empty() {
                described.group_size.to_string()
            } else {
                "a multiple of 16".to_owned()
            };
            let is_block = |size| has_block(schema, size);
            let Described { bits, kind, symmetric, .. } = *described;
            let numbers = Numbers { bits, kind, symmetric, is_block: &is_block, blocks: &need, why: &why };
            check_group(CONFIG, (&place, group), inputs.is_some(), numbers)?;
            let by_row = weights.and_then(|w| text(w, "strategy")) == Some("channel");
            let size = weights.and_then(|w| present(w, "group_size")).and_then(Value::as_u64);
            match size.and_then(|size| u32::try_from(size).ok()) {
                _ if by_row && !schema.blocks().is_empty() => Reach::Row,
                Some(size) => Reach::Block(size),
                None => Reach::Unsaid,
            }
        };
        declared.push(Group {
            place: format!("{CONFIG}: {place}"),
            targets: match present(group, "targets") {
                Some(_) => Targets::of(&list(group, "targets")),
                None => Targets::All,
            },
            format: Declared { schema: schema.id().name, reach },
            activations: inputs.is_some() && !is_tiled,
            rounded: inputs.filter(|_| is_tiled).map(rounded),
        });
    }
    let top = present(c, "format").filter(|f| f.as_str() != Some("mixed-precision"));
    if top.is_some_and(|top| !known.iter().any(|k| top.as_str() == Some(k.0.format))) {
        return Err(refuse(CONFIG, "format", &names, top));
    }
    let idle = |v: &&Value| !v.as_object().is_some_and(|o| o.is_empty());
    if let Some(t) = present(c, "transform_config").filter(idle) {
        return Err(refuse(CONFIG, "transform_config", "none: rotated weights are not supported", Some(t)));
    }
    let sparse = present(c, "sparsity_config")
        .filter(idle)
        .filter(|s| text(s, "format").is_some_and(|f| f != "dense"));
    if sparse.is_some() {
        return Err(refuse(CONFIG, "sparsity_config.format", "dense", sparse.and_then(|s| s.get("format"))));
    }
    let excluded = Excluded::of(CONFIG, c, &["ignore"]).collect();
    let activations = Some(declared.iter().any(|group| group.activations));
    let method = Method::CompressedTensors;
    Ok(Declaration { method, activations, groups: declared, excluded, notes, packing: None })
}

/// The scale of FP8 inputs.
fn rounded(inputs: &Value) -> Rounded {
    let is_dynamic = present(inputs, "dynamic").and_then(Value::as_bool).unwrap_or(false);
    let size = present(inputs, "group_size").and_then(Value::as_u64);
    match (text(inputs, "strategy").unwrap_or("tensor"), is_dynamic, size) {
        ("token", true, _) => Rounded::Row,
        ("group", true, Some(128)) => Rounded::Block,
        ("tensor", false, _) => Rounded::Stored,
        (strategy, ..) => {
            let how = if is_dynamic { "dynamic" } else { "static" };
            let of = size.map_or_else(String::new, |size| format!(" of {size}"));
            Rounded::Other(format!("{how} strategy {strategy}{of}"))
        }
    }
}

/// The tiles of FP8 weights.
fn tile(place: &str, weights: Option<&Value>) -> Result<[u32; 2]> {
    let strategy = weights.and_then(|w| text(w, "strategy"));
    match strategy {
        None | Some("tensor") => Ok([0, 0]),
        Some("channel") => Ok([1, 0]),
        Some("block") => match weights.and_then(|w| present(w, "block_structure")) {
            Some(size) if *size == json!([128, 128]) => Ok([128, 128]),
            other => {
                let field = format!("{place}.weights.block_structure");
                Err(refuse(CONFIG, &field, "[128, 128]", other))
            }
        },
        Some(other) => {
            let need = "tensor, channel or block";
            Err(refuse(CONFIG, &format!("{place}.weights.strategy"), need, Some(&other.into())))
        }
    }
}

/// Whether an encoding of this kind has blocks of `size`.
fn has_block(schema: &Q4Schema, size: u64) -> bool {
    let (Ok(block), Some(kind)) = (u32::try_from(size), formats::kind(schema.id().name)) else {
        return false;
    };
    let Ok(other) = (kind.from_wire)(schema.id().name, &Wire { block, ..schema.wire() }) else {
        return false;
    };
    let mut is_fine = other.block() as u64 == size;
    other.check(other.block(), &mut |_| is_fine = false);
    is_fine
}

/// What numbers a group has.
pub(super) struct Numbers<'a> {
    /// Of each.
    pub bits: u64,
    /// `type`.
    pub kind: &'a str,
    /// Whether zero is in their middle.
    pub symmetric: bool,
    /// Blocks that there are.
    pub is_block: &'a dyn Fn(u64) -> bool,
    /// These in words.
    pub blocks: &'a str,
    /// What else in the configuration wants them so.
    pub why: &'a str,
}

/// Weights (and inputs) of a group must be such `numbers`.
pub(super) fn check_group(
    file: &str,
    (place, group): (&str, &Value),
    activations: bool,
    numbers: Numbers<'_>,
) -> Result<()> {
    let Numbers { bits, kind, symmetric, is_block, blocks, why } = numbers;
    let need_bits = bits.to_string();
    for side in ["weights", "input_activations"] {
        let Some(format) = present(group, side) else {
            if side == "weights" {
                return Err(refuse(
                    file,
                    &format!("{place}.weights"),
                    &format!("num_bits {bits}, type {kind}"),
                    None,
                ));
            }
            continue;
        };
        if side == "input_activations" && !activations {
            return Err(refuse(
                file,
                &format!("{place}.input_activations"),
                "null for weight-only quantisation",
                Some(format),
            ));
        }
        let is = |field: &str, ok: &dyn Fn(&Value) -> bool| present(format, field).is_none_or(ok);
        let checks: [(&str, &str, bool); 4] = [
            ("num_bits", &need_bits, format.get("num_bits").is_some_and(|v| v.as_u64() == Some(bits))),
            ("type", kind, is("type", &|v| v.as_str() == Some(kind))),
            ("group_size", blocks, is("group_size", &|v| v.as_u64().is_some_and(is_block))),
            (
                "symmetric",
                if symmetric { "true" } else { "false" },
                is("symmetric", &|v| v.as_bool() == Some(symmetric)),
            ),
        ];
        if let Some((field, need, _)) = checks.into_iter().find(|c| !c.2) {
            let need = format!("{need}, {why}");
            return Err(refuse(file, &format!("{place}.{side}.{field}"), &need, format.get(field)));
        }
    }
    Ok(())
}
