//! Calls as JSON: `{"name": "f", "arguments": {...}}`.
//!
//! The arguments' own characters are told as they come. Before the name they wait for it; given as a string
//! that holds JSON they wait for its end. Absent, null or an empty string they are `{}`. Other fields and
//! repeated ones are passed over.
use super::{
    Step,
    json::{Json, Place},
    telling::Telling,
};
use serde_json::{Map, Value};

#[derive(Clone, Debug, Default)]
pub(super) struct Hermes {
    json: Json,
    field: Field,
    /// A key of the call, or a string that is a field's value, as written.
    string: String,
    named: bool,
    /// Arguments have come.
    argued: bool,
    /// Arguments that came before the name.
    waiting: String,
}

/// The field of the call whose value is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    #[default]
    Other,
}

impl Hermes {
    pub fn step(&mut self, c: char, telling: &mut Telling) -> Step {
        let (depth, place) = (self.json.depth(), self.json.place());
        if !self.json.step(c) {
            return Step::Damage;
        }
        let closed = matches!(self.json.place(), Place::Colon | Place::After);
        match (depth, place) {
            (0, _) => Step::More,
            (1, Place::String) if closed => self.string_ends(telling),
            (1, Place::String | Place::Escape | Place::Hex(_)) => {
                self.string.push(c);
                Step::More
            }
            (1, Place::Value) if self.json.place() != Place::Value => self.value_begins(c, telling),
            (1, _) if self.json.depth() == 0 => self.ends(telling),
            (1, _) => Step::More,
            _ => {
                if self.field == Field::Arguments {
                    self.argue(c.encode_utf8(&mut [0; 4]), telling);
                }
                Step::More
            }
        }
    }

    /// Arguments have begun as a string that was not told.
    pub fn in_value(&self) -> bool {
        let in_string = matches!(self.json.place(), Place::String | Place::Escape | Place::Hex(_));
        in_string && self.json.depth() == 1 && !self.json.in_key() && self.field == Field::Arguments
    }

    fn value_begins(&mut self, c: char, telling: &mut Telling) -> Step {
        match (self.field, c) {
            (Field::Arguments, '{') => self.argue("{", telling),
            (Field::Arguments, 'n') => self.field = Field::Other,
            (Field::Name | Field::Arguments, '"') | (Field::Other, _) => {}
            _ => return Step::Damage,
        }
        Step::More
    }

    fn string_ends(&mut self, telling: &mut Telling) -> Step {
        let written = format!("\"{}\"", std::mem::take(&mut self.string));
        let string = serde_json::from_str::<String>(&written);
        if self.json.in_key() {
            self.field = match string.as_deref() {
                Ok("name") if !self.named => Field::Name,
                Ok("arguments") if !self.argued => Field::Arguments,
                _ => Field::Other,
            };
            return Step::More;
        }
        match (self.field, string) {
            (Field::Other, _) => {}
            (Field::Name, Ok(name)) if !name.is_empty() => {
                self.named = true;
                telling.start(name);
                if self.argued {
                    telling.arguments(&std::mem::take(&mut self.waiting));
                }
            }
            (Field::Arguments, Ok(arguments)) if arguments.trim().is_empty() => {}
            (Field::Arguments, Ok(arguments))
                if serde_json::from_str::<Map<String, Value>>(&arguments).is_ok() =>
            {
                self.argue(&arguments, telling);
            }
            _ => return Step::Damage,
        }
        Step::More
    }

    fn argue(&mut self, more: &str, telling: &mut Telling) {
        self.argued = true;
        if self.named {
            telling.arguments(more);
        } else {
            self.waiting.push_str(more);
        }
    }

    fn ends(&mut self, telling: &mut Telling) -> Step {
        if !self.named {
            return Step::Damage;
        }
        if !self.argued {
            telling.arguments("{}");
        }
        Step::Complete
    }
}
