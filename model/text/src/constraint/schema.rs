//! A JSON schema before it is compiled: what it asks for that would be passed over is refused, and white
//! space has an end.
use super::words::{SCHEMA_LIMIT, within};
use llguidance::JsonCompileOptions;
use q4_core::{Code, Error, Result};
use serde_json::{Map, Value};

/// Between the parts of a document: a blank, or a new line and its indentation. A model that likes white
/// space would go on with it for ever.
const WHITE: &str = r"[ ]|\n[ ]{0,32}|\n\t{0,16}";
/// How deep a schema may nest.
const DEPTH: usize = 64;
/// Options of the library that a schema could carry, under which it passes over what it does not know.
const OPTIONS: &str = "x-guidance";

/// The schema, as it is compiled.
pub fn checked(schema: &Value) -> Result<Value> {
    within(schema.to_string().len(), SCHEMA_LIMIT, "a JSON schema")?;
    let mut schema = match schema {
        Value::Object(_) => schema.clone(),
        Value::Bool(true) => Value::Object(Map::new()),
        _ => {
            return Err(refused(
                "an object, or true",
                "a schema of another kind, or one that admits nothing",
            ));
        }
    };
    look(&schema, 0)?;
    if !is_composed(&schema) {
        close(&mut schema);
    }
    let white = Some(WHITE.to_owned());
    JsonCompileOptions { whitespace_pattern: white, ..JsonCompileOptions::default() }.apply_to(&mut schema);
    Ok(schema)
}

fn look(schema: &Value, depth: usize) -> Result<()> {
    if depth > DEPTH {
        return Err(refused(&format!("at most {DEPTH} levels"), "more"));
    }
    match schema {
        Value::Object(fields) => {
            if fields.contains_key(OPTIONS) {
                return Err(refused("a schema without options of a library", OPTIONS));
            }
            // References inside of it would be looked for in the whole.
            if depth > 0 && fields.get("$id").is_some_and(Value::is_string) {
                return Err(refused("one schema, not several in one document", "$id below the root"));
            }
            narrow(fields)?;
            fields.values().try_for_each(|field| look(field, depth + 1))
        }
        Value::Array(items) => items.iter().try_for_each(|item| look(item, depth + 1)),
        _ => Ok(()),
    }
}

/// Refuses a range that leaves out its whole-numbered end and is narrower than one: the library lets that end
/// in.
fn narrow(fields: &Map<String, Value>) -> Result<()> {
    let bound = |name: &str| fields.get(name).and_then(Value::as_f64);
    let most = [bound("maximum"), bound("exclusiveMaximum")];
    let least = [bound("minimum"), bound("exclusiveMinimum")];
    for (name, others) in [("exclusiveMinimum", most), ("exclusiveMaximum", least)] {
        let Some(end) = bound(name).filter(|end| end.fract() == 0.0) else { continue };
        let is_near = |other: &f64| (other - end).abs() < 1.0;
        if fields.get("type").is_none_or(|kind| kind != "integer") && others.iter().flatten().any(is_near) {
            let have = format!("{name} {end} and a bound less than 1 from it");
            return Err(refused("ranges of numbers as wide as 1 where a whole number is left out", &have));
        }
    }
    Ok(())
}

/// Whether an object's properties may be named in several places: there no place knows all of them.
fn is_composed(schema: &Value) -> bool {
    let has = |fields: &Map<String, Value>, names: &[&str]| names.iter().any(|n| fields.contains_key(*n));
    match schema {
        Value::Object(fields) => {
            has(fields, &["allOf", "dependentSchemas", "unevaluatedProperties"])
                || (has(fields, &["properties"]) && has(fields, &["$ref", "anyOf", "oneOf"]))
                || fields.values().any(is_composed)
        }
        Value::Array(items) => items.iter().any(is_composed),
        _ => false,
    }
}

/// An object whose properties are named has no others, unless its schema speaks of them: what is left out
/// would admit everything, and a model that may go on with properties of its own does.
fn close(schema: &mut Value) {
    let Value::Object(fields) = schema else { return };
    if names_all(fields) {
        fields.insert("additionalProperties".to_owned(), false.into());
    }
    for (name, field) in fields.iter_mut() {
        match (name.as_str(), field) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
                schemas.values_mut().for_each(close);
            }
            ("anyOf" | "oneOf" | "prefixItems", Value::Array(schemas)) => {
                schemas.iter_mut().for_each(close);
            }
            ("items" | "additionalProperties", schema) => close(schema),
            _ => {}
        }
    }
}

/// Whether the properties that are named are all that an object needs, and nothing is said of others.
fn names_all(fields: &Map<String, Value>) -> bool {
    let Some(Value::Object(properties)) = fields.get("properties") else { return false };
    let is_known = |name: &Value| name.as_str().is_some_and(|name| properties.contains_key(name));
    let required = fields.get("required").and_then(Value::as_array);
    let others = ["additionalProperties", "patternProperties", "minProperties"];
    required.is_none_or(|required| required.iter().all(is_known))
        && !others.iter().any(|name| fields.contains_key(*name))
}

pub(super) fn refused(need: &str, have: &str) -> Error {
    Error::new(Code::Usage, "a JSON schema cannot be kept to").need(need).have(have)
}
