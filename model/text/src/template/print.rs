//! Values as Python prints them: `True`, `1e-07`, `['a', 2.0]`.
use super::{
    budget::{charge, fail, is_namespace},
    json, numbers,
};
use minijinja::{Error, Value, value::ValueKind};
use std::fmt::{self, Write};

/// Nesting of a value that can be printed.
const DEPTH: usize = 64;

/// A value as text, paid for.
pub(super) fn text_of(value: &Value) -> Result<String, Error> {
    let mut text = Paid::default();
    text.push(value)?;
    Ok(text.text)
}

/// A value as it stands inside of a list: `'a'` where [`text_of`] has `a`.
pub(super) fn repr_of(value: &Value) -> Result<String, Error> {
    let mut text = Paid::default();
    text.repr(value, 0)?;
    Ok(text.text)
}

/// Text that is paid for as it grows.
#[derive(Default)]
pub(super) struct Paid {
    /// So far.
    pub(super) text: String,
    refused: Option<Error>,
}

impl Paid {
    /// Python's `str`, and nothing for what is undefined.
    pub(super) fn push(&mut self, value: &Value) -> Result<(), Error> {
        match value.as_str() {
            Some(text) => self.add(text),
            None if value.is_undefined() => Ok(()),
            None => self.repr(value, 0),
        }
    }

    fn add(&mut self, text: &str) -> Result<(), Error> {
        charge(text.len())?;
        self.text.push_str(text);
        Ok(())
    }

    fn repr(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH {
            return Err(fail("a value is nested too deep to be printed"));
        }
        match value.kind() {
            ValueKind::Undefined => self.add("Undefined"),
            ValueKind::String => self.add(&quoted(value.as_str().unwrap_or_default())),
            ValueKind::Number if !value.is_integer() => self.add(&float(f64::try_from(value.clone())?)),
            ValueKind::Seq | ValueKind::Iterable => {
                let is_tuple = is_tuple(value);
                self.add(if is_tuple { "(" } else { "[" })?;
                let mut items = 0;
                for item in value.try_iter()? {
                    if items > 0 {
                        self.add(", ")?;
                    }
                    self.repr(&item, depth + 1)?;
                    items += 1;
                }
                self.add(match (is_tuple, items) {
                    (true, 1) => ",)",
                    (true, _) => ")",
                    (false, _) => "]",
                })
            }
            ValueKind::Map if !is_namespace(value) => {
                self.add("{")?;
                for (i, key) in value.try_iter()?.enumerate() {
                    if i > 0 {
                        self.add(", ")?;
                    }
                    self.repr(&key, depth + 1)?;
                    self.add(": ")?;
                    self.repr(&value.get_item(&key)?, depth + 1)?;
                }
                self.add("}")
            }
            _ => match numbers::digits(value) {
                Some(digits) => self.add(digits),
                None => match write!(self, "{value}") {
                    Ok(()) => Ok(()),
                    Err(e) => Err(self.refused.take().unwrap_or_else(|| e.into())),
                },
            },
        }
    }
}

impl Write for Paid {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.add(text).map_err(|e| {
            self.refused = Some(e);
            fmt::Error
        })
    }
}

/// Tuples, and what `groupby` makes.
fn is_tuple(value: &Value) -> bool {
    value.is_tuple() || value.as_object().is_some_and(|o| o.type_name().ends_with("::GroupTuple"))
}

/// A float as Python's `str`.
pub(super) fn float(x: f64) -> String {
    match x {
        x if x.is_nan() => "nan".to_owned(),
        x if x.is_infinite() => if x > 0.0 { "inf" } else { "-inf" }.to_owned(),
        x => json::float(x),
    }
}

/// A text as Python's `repr`.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut shown = String::with_capacity(text.len() + 2);
    shown.push(quote);
    for c in text.chars() {
        match c {
            '\n' => shown.push_str("\\n"),
            '\r' => shown.push_str("\\r"),
            '\t' => shown.push_str("\\t"),
            c if c == quote || c == '\\' => shown.extend(['\\', c]),
            c if is_printable(c) => shown.push(c),
            c => {
                let code = u32::from(c);
                let text = match code {
                    0..=0xff => format!("\\x{code:02x}"),
                    0x100..=0xffff => format!("\\u{code:04x}"),
                    _ => format!("\\U{code:08x}"),
                };
                shown.push_str(&text);
            }
        }
    }
    shown.push(quote);
    shown
}

/// Whether Python prints a character as it is: separators but the blank, controls, marks of format and
/// private ones are escaped.
fn is_printable(c: char) -> bool {
    !(c.is_control()
        || c != ' ' && c.is_whitespace()
        || matches!(c,
            '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{8e2}' | '\u{180e}'
            | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{e000}'..='\u{f8ff}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{10ffff}'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::budget;

    #[test]
    fn values_are_printed_as_by_python() {
        budget::start();
        let value = Value::from(vec![
            Value::from("it's"),
            Value::from("a\"'\n\u{200b}\u{7f}談"),
            Value::from(1e-7),
            Value::from(f64::NAN),
            Value::from(()),
            Value::from(true),
            Value::UNDEFINED,
            Value::from((1, 2.0)),
            Value::from_pairs([("k", Value::from(vec![1e16]))]),
        ]);
        let want =
            r#"["it's", 'a"\'\n\u200b\x7f談', 1e-07, nan, None, True, Undefined, (1, 2.0), {'k': [1e+16]}]"#;
        assert_eq!(text_of(&value).expect("printed"), want);
        assert_eq!(text_of(&Value::from((1,))).expect("printed"), "(1,)");
        assert_eq!(text_of(&Value::UNDEFINED).expect("printed"), "");
        assert_eq!(text_of(&Value::from("a")).expect("printed"), "a");
        assert_eq!(repr_of(&Value::from("a")).expect("printed"), "'a'");
    }
}
