//! Calls as tags: `<function=f>` around `<parameter=a>` with a value, as Qwen3-Coder writes them.
//!
//! A value is text without the newline that its tags add on either side. It is told when it is complete: a
//! number, a truth value, null, an array or an object as itself, all else as a string, and as a string also
//! what only looks otherwise where the tool's schema says string.
use super::{
    Step,
    telling::{Tag, Telling},
};
use serde_json::Value;

#[derive(Clone, Debug, Default)]
pub(super) struct Xml {
    place: Place,
    function: String,
    parameter: String,
    /// A parameter was told.
    argued: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Function,
    Body,
    Parameter,
    /// Begins there in the held text.
    Value(usize),
}

impl Xml {
    /// Behind `<function=`.
    pub fn step(&mut self, c: char, telling: &mut Telling, schemas: Option<&Value>) -> Step {
        match self.place {
            Place::Function | Place::Parameter => self.name(c, telling),
            Place::Body => match telling.tag(&["<parameter=", "</function>"]) {
                Tag::Whole { which: 0, .. } => {
                    self.place = Place::Parameter;
                    self.parameter.clear();
                    Step::More
                }
                Tag::Whole { .. } => {
                    telling.arguments(if self.argued { "}" } else { "{}" });
                    Step::Complete
                }
                Tag::Begun => Step::More,
                Tag::None if c.is_whitespace() => Step::More,
                Tag::None | Tag::Broken => Step::Damage,
            },
            Place::Value(from) => {
                match telling.tag(&["</parameter>"]) {
                    Tag::Whole { at, .. } => {
                        let value = unframed(&telling.held()[from..at]);
                        let schema = schemas.and_then(|s| schema(s, &self.function, &self.parameter));
                        let argument = format!(
                            "{}{}: {}",
                            if self.argued { ", " } else { "{" },
                            Value::from(self.parameter.as_str()),
                            json(value, schema)
                        );
                        telling.arguments(&argument);
                        self.argued = true;
                        self.place = Place::Body;
                    }
                    Tag::Broken => telling.no_tag(&["</parameter>"]),
                    Tag::Begun | Tag::None => {}
                }
                Step::More
            }
        }
    }

    /// A value has begun that was not told.
    pub fn in_value(&self) -> bool {
        matches!(self.place, Place::Value(_))
    }

    /// Takes a character of a function's or parameter's name.
    fn name(&mut self, c: char, telling: &mut Telling) -> Step {
        let function = self.place == Place::Function;
        let name = if function { &mut self.function } else { &mut self.parameter };
        match c {
            '>' if name.is_empty() => return Step::Damage,
            '>' if function => {
                telling.start(name.clone());
                self.place = Place::Body;
            }
            '>' => self.place = Place::Value(telling.held().len()),
            '<' | '\n' | '\r' => return Step::Damage,
            _ => name.push(c),
        }
        Step::More
    }
}

/// The value between tags on lines of their own.
fn unframed(value: &str) -> &str {
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}

/// The schema of a parameter in OpenAI's list of tools.
fn schema<'a>(tools: &'a Value, function: &str, parameter: &str) -> Option<&'a Value> {
    let mut functions = tools.as_array()?.iter().filter_map(|tool| tool.get("function"));
    let function = functions.find(|f| f.get("name").and_then(Value::as_str) == Some(function))?;
    function.get("parameters")?.get("properties")?.get(parameter)
}

/// A value as JSON. Numbers and the like are as the model wrote them.
fn json(value: &str, schema: Option<&Value>) -> String {
    let types = schema.map(types).unwrap_or_default();
    let only_string = types.contains(&"string") && types.iter().all(|t| matches!(*t, "string" | "null"));
    match serde_json::from_str::<Value>(value) {
        Ok(Value::String(_)) | Err(_) => Value::from(value).to_string(),
        Ok(Value::Null) if only_string && types.contains(&"null") => "null".into(),
        Ok(_) if only_string => Value::from(value).to_string(),
        Ok(_) => value.trim().into(),
    }
}

/// The types that a schema allows: its own, or those of its alternatives.
pub(crate) fn types(schema: &Value) -> Vec<&str> {
    let alternatives = ["anyOf", "oneOf"].iter().filter_map(|key| schema.get(key)?.as_array()).flatten();
    alternatives
        .chain([schema])
        .filter_map(|schema| schema.get("type"))
        .flat_map(|t| t.as_array().map_or(std::slice::from_ref(t), Vec::as_slice))
        .filter_map(Value::as_str)
        .collect()
}
