//! JSON whose numbers are what Python's `json` reads: whole ones of any length, and floats beyond the
//! largest.
//!
//! `serde_json` holds integers of 64 bits and finite floats. Every other number becomes an object with one
//! key of ours, which holds its digits until the engine gets a value of its own for it.
use minijinja::{
    Value,
    value::{Object, ObjectRepr},
};
use serde_json::{Map, Value as Json};
use std::{fmt, sync::Arc};

/// The key of a number that `serde_json` does not have.
const KEY: &str = "$q4::number";

/// Reads JSON text; a number that is not one of `serde_json`'s is kept for [`super::ChatTemplate::render`].
///
/// # Errors
/// What is wrong and where.
pub fn json(text: &str) -> Result<Json, serde_json::Error> {
    serde_json::from_str(&kept(text))
}

/// The text with every number that would change in an object of its own.
fn kept(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit()) {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let end = if from.starts_with('"') { string_end(from) } else { number_end(from) };
        let (token, after) = from.split_at(end);
        match replacement(token) {
            Some(other) => out.push_str(&other),
            None => out.push_str(token),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Bytes of the string that `text` begins with; all of it where the string does not end.
fn string_end(text: &str) -> usize {
    let mut escaped = false;
    for (i, b) in text.bytes().enumerate().skip(1) {
        match b {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return i + 1,
            _ => {}
        }
    }
    text.len()
}

fn number_end(text: &str) -> usize {
    text.find(|c: char| !c.is_ascii_digit() && !matches!(c, '+' | '-' | '.' | 'e' | 'E'))
        .unwrap_or(text.len())
}

/// What is written in the place of a number that `serde_json` would change. Whatever is no number stays, to
/// be refused.
fn replacement(token: &str) -> Option<String> {
    let digits = token.strip_prefix('-').unwrap_or(token);
    if digits == "0" && token != digits {
        return Some("0".to_owned());
    }
    let whole = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    let beyond = if whole {
        !digits.starts_with('0') && token.parse::<i64>().is_err() && token.parse::<u64>().is_err()
    } else {
        digits.starts_with(|c: char| c.is_ascii_digit())
            && digits.ends_with(|c: char| c.is_ascii_digit())
            && token.parse::<f64>().is_ok_and(f64::is_infinite)
    };
    beyond.then(|| format!("{{\"{KEY}\":\"{token}\"}}"))
}

/// A JSON value as the engine sees it.
pub(super) fn engine_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
            (Some(n), ..) => Value::from(n),
            (_, Some(n), _) => Value::from(n),
            (.., n) => Value::from(n.unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(engine_value).collect(),
        Json::Object(map) => number(map)
            .unwrap_or_else(|| Value::from_pairs(map.iter().map(|(k, v)| (k.as_str(), engine_value(v))))),
    }
}

fn number(map: &Map<String, Json>) -> Option<Value> {
    let digits = map.get(KEY).filter(|_| map.len() == 1)?.as_str()?;
    if let Ok(n) = digits.parse::<i128>() {
        return Some(Value::from(n));
    }
    let whole = digits.strip_prefix('-').unwrap_or(digits).bytes().all(|b| b.is_ascii_digit());
    match digits.parse::<f64>() {
        Ok(_) if whole => Some(Value::from_object(Long(digits.to_owned()))),
        Ok(x) => Some(Value::from(x)),
        Err(_) => None,
    }
}

/// A whole number beyond 128 bits: it can be printed, and is no number to operators.
#[derive(Debug)]
struct Long(String);

impl Object for Long {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The digits of a number beyond 128 bits.
pub(super) fn digits(value: &Value) -> Option<&str> {
    value.downcast_object_ref::<Long>().map(|long| long.0.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_change_are_kept_and_no_others() {
        for same in [
            r#"{"a": [1, -1, 0, 18446744073709551615, -9223372036854775808, 1.5e300, "12345678901234567890123", "\"-0"]}"#,
            "[01]",
            "[1e]",
            "[-]",
            "\"open -0",
        ] {
            assert_eq!(kept(same), same);
        }
        assert_eq!(kept("[-0, -0.0]"), "[0, -0.0]");
        let big = "[18446744073709551616,-9223372036854775809,1e999,-1e999]";
        let value = json(big).expect("JSON");
        let printed: Vec<_> =
            value.as_array().expect("a list").iter().map(|v| engine_value(v).to_string()).collect();
        assert_eq!(printed, ["18446744073709551616", "-9223372036854775809", "inf", "-inf"]);
        let long = "9".repeat(60);
        let value = engine_value(&json(&long).expect("JSON"));
        assert_eq!((digits(&value), value.to_string()), (Some(long.as_str()), long.clone()));
    }
}
