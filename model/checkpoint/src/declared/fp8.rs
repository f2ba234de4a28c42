//! What transformers says of its FP8.
use super::{
    CONFIG, Declaration, Declared, Excluded, Group, Method, Reach, Rounded, Targets, inputs_note, present,
    refuse, text,
};
use q4_core::Result;
use serde_json::{Value, json};

pub(super) fn read(c: &Value) -> Result<Declaration> {
    for (field, only) in [("fmt", "e4m3"), ("scale_fmt", "float")] {
        if let Some(other) = present(c, field).filter(|v| v.as_str() != Some(only)) {
            return Err(refuse(CONFIG, field, only, Some(other)));
        }
    }
    // A field that is not there is the usual square, one that is null no tile at all.
    let tile = match c.get("weight_block_size") {
        None => [128, 128],
        Some(Value::Null) => [0, 0],
        Some(size) if *size == json!([128, 128]) => [128, 128],
        other => return Err(refuse(CONFIG, "weight_block_size", "[128, 128] or null", other)),
    };
    if let Some(more) = present(c, "modules_to_convert") {
        return Err(refuse(CONFIG, "modules_to_convert", "none: linear layers alone are FP8", Some(more)));
    }
    let scheme = text(c, "activation_scheme").unwrap_or("dynamic");
    let rounded = match scheme {
        "static" => Rounded::Stored,
        // As the weights: in blocks of theirs, or with one scale a token.
        "dynamic" if tile == [128, 128] => Rounded::Block,
        "dynamic" => Rounded::Row,
        other => Rounded::Other(format!("activation_scheme {other}")),
    };
    // transformers' name, and vLLM's.
    let excluded = Excluded::of(CONFIG, c, &["modules_to_not_convert", "ignored_layers"]).collect();
    let format = Declared { schema: "fp8", reach: Reach::Tile(tile) };
    Ok(Declaration {
        method: Method::Fp8,
        activations: Some(false),
        groups: vec![Group {
            place: format!("{CONFIG}: weight_block_size"),
            targets: Targets::All,
            format,
            activations: false,
            rounded: Some(rounded),
        }],
        excluded,
        notes: vec![inputs_note(CONFIG, &format!("FP8 ({scheme})"))],
        ..Declaration::none()
    })
}
