//! What MLX says: a format for all modules, and others for some by name.
use super::{Declaration, Declared, Excluded, Group, Method, Reach, Targets, present, refuse};
use q4_core::Result;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// MLX writes it twice; the other is called as everybody calls it.
const PLACE: &str = "config.json: quantization";

/// Fields that are about all modules.
const FIELDS: [&str; 3] = ["group_size", "bits", "mode"];

pub(super) fn read(c: &Value) -> Result<Declaration> {
    let all = format(c, "")?;
    let (mut named, mut dense) = (BTreeMap::<_, (Declared, BTreeSet<String>)>::new(), Vec::new());
    let modules = c.as_object().into_iter().flatten().filter(|(name, _)| !FIELDS.contains(&name.as_str()));
    for (name, own) in modules {
        match own {
            Value::Bool(false) => dense.push(name.clone()),
            Value::Bool(true) => {}
            Value::Object(_) => {
                let own = format(own, &format!("{name}."))?;
                let Reach::Block(size) = own.reach else { continue };
                named.entry((own.schema, size)).or_insert((own, BTreeSet::new())).1.insert(name.clone());
            }
            other => {
                let need = "a module with its group_size, bits and mode, or false; nothing else is known";
                return Err(refuse(PLACE, name, need, Some(other)));
            }
        }
    }
    let group = |targets, format| Group {
        place: PLACE.to_owned(),
        targets,
        format,
        activations: false,
        rounded: None,
    };
    let mut groups: Vec<_> =
        named.into_values().map(|(format, names)| group(Targets::Named(names), format)).collect();
    groups.push(group(Targets::All, all));
    let list = Excluded { file: PLACE, field: "modules that are false".to_owned(), patterns: dense };
    let excluded = Some(list).filter(|list| !list.patterns.is_empty()).into_iter().collect();
    let (method, activations) = (Method::Mlx, Some(false));
    Ok(Declaration { method, activations, groups, excluded, ..Declaration::none() })
}

/// The format that an object says; fields are called with `under` before them.
fn format(said: &Value, under: &str) -> Result<Declared> {
    let field = |name: &str| format!("{under}{name}");
    let is_more = |(name, value): &(&String, &Value)| {
        !FIELDS.contains(&name.as_str()) && !matches!(value, Value::Null | Value::Bool(false))
    };
    let more = said.as_object().into_iter().flatten().find(is_more).filter(|_| !under.is_empty());
    if let Some((name, value)) = more {
        return Err(refuse(PLACE, &field(name), "group_size, bits and mode alone", Some(value)));
    }
    let bits = present(said, "bits");
    if bits.and_then(Value::as_u64) != Some(4) {
        return Err(refuse(PLACE, &field("bits"), "4: codes of other widths are not read", bits));
    }
    let mode = present(said, "mode");
    let (schema, sizes) = match mode.map_or(Some("affine"), Value::as_str) {
        Some("affine") => ("int4-affine", &[32, 64, 128][..]),
        Some("mxfp4") => ("mxfp4", &[32][..]),
        Some("nvfp4") => ("nvfp4", &[16][..]),
        _ => return Err(refuse(PLACE, &field("mode"), "affine, mxfp4 or nvfp4", mode)),
    };
    let size = present(said, "group_size");
    match size.and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok()) {
        Some(block) if sizes.contains(&block) => Ok(Declared { schema, reach: Reach::Block(block) }),
        _ => {
            let names: Vec<_> = sizes.iter().map(u32::to_string).collect();
            let mode = mode.and_then(Value::as_str).unwrap_or("affine");
            let need = format!("{}, for mode is {mode}", names.join(" or "));
            Err(refuse(PLACE, &field("group_size"), &need, size))
        }
    }
}
