//! A JSON schema before it is compiled: what it asks for that would be passed over is refused, and white space
//! has an end.
use super::words::{SCHEMA_LIMIT, within};
use llguidance::JsonCompileOptions;
use q4_core::{Code, Error, Result};
use serde_json::{Map, Value};

/// Between the parts of a document: a blank, or a new line and its indentation. A model that likes white space
/// would go on with it for ever.
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
            fields.values().try_for_each(|field| look(field, depth + 1))
        }
        Value::Array(items) => items.iter().try_for_each(|item| look(item, depth + 1)),
        _ => Ok(()),
    }
}

pub(super) fn refused(need: &str, have: &str) -> Error {
    Error::new(Code::Usage, "a JSON schema cannot be kept to").need(need).have(have)
}
