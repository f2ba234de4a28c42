//! Reads typed fields of a JSON object and collects every problem instead of stopping at the first.
//!
//! A user who repairs a configuration wants the whole list at once.
use crate::files;
use q4_core::{Code, Error, Result};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// Bytes a configuration file may have.
const FILE_LIMIT: usize = 1 << 20;

/// A JSON object under inspection. `null` counts as absent.
pub struct Fields {
    file: &'static str,
    map: Map<String, Value>,
    problems: Vec<String>,
}

impl Fields {
    /// Parses `bytes` as one JSON object; `file` is how errors call it.
    ///
    /// # Errors
    /// [`Code::ConfigInvalid`] for more than 1 MiB and for anything but an object.
    pub fn parse(file: &'static str, bytes: &[u8]) -> Result<Self> {
        files::within(bytes, FILE_LIMIT, file, Code::ConfigInvalid)?;
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(map)) => Ok(Self { file, map, problems: Vec::new() }),
            Ok(other) => Err(Error::new(Code::ConfigInvalid, format!("{file}: not an object"))
                .need("a JSON object")
                .have(show(&other))),
            Err(e) => Err(Error::new(Code::ConfigInvalid, format!("{file}: not valid JSON"))
                .need("a JSON object")
                .have(e.to_string())),
        }
    }

    /// The field, unless it is absent or null.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// Notes a problem: one line with field, need and have.
    pub fn problem(&mut self, name: &str, need: impl std::fmt::Display, have: impl std::fmt::Display) {
        self.problems.push(format!("{name}: need {need}, have {have}"));
    }

    /// A whole number in `range`; absent is a problem. After a problem: the start of the range.
    pub fn size(&mut self, name: &str, range: RangeInclusive<usize>) -> usize {
        let start = *range.start();
        match self.get(name) {
            None => self.problem(name, bounds(&range), "nothing"),
            Some(_) => return self.optional_size(name, range).unwrap_or(start),
        }
        start
    }

    /// A whole number in `range`, if there is one.
    pub fn optional_size(&mut self, name: &str, range: RangeInclusive<usize>) -> Option<usize> {
        let value = self.get(name)?;
        let size = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| range.contains(n));
        if size.is_none() {
            let have = show(value);
            self.problem(name, bounds(&range), have);
        }
        size
    }

    /// A finite number for which `accept` holds, if there is one; `need` says in words what `accept` wants.
    pub fn number(&mut self, name: &str, need: &str, accept: impl Fn(f64) -> bool) -> Option<f64> {
        let value = self.get(name)?;
        let number = value.as_f64().filter(|x| x.is_finite() && accept(*x));
        if number.is_none() {
            let have = show(value);
            self.problem(name, need, have);
        }
        number
    }

    /// A boolean, if there is one.
    pub fn flag(&mut self, name: &str) -> Option<bool> {
        let value = self.get(name)?;
        let flag = value.as_bool();
        if flag.is_none() {
            let have = show(value);
            self.problem(name, "true or false", have);
        }
        flag
    }

    /// Token ids given as one number or as a list (at most 64), each below `vocab`; empty if absent.
    pub fn token_ids(&mut self, name: &str, vocab: usize) -> Vec<u32> {
        let Some(value) = self.get(name) else { return Vec::new() };
        let list = value.as_array().map_or(std::slice::from_ref(value), |l| l);
        let id = |v: &Value| {
            v.as_u64().filter(|id| (*id as u128) < vocab as u128).and_then(|id| u32::try_from(id).ok())
        };
        let ids: Option<Vec<u32>> = list.iter().map(id).collect();
        match ids.filter(|ids| ids.len() <= 64) {
            Some(ids) => ids,
            None => {
                let have = show(value);
                self.problem(name, format_args!("token ids below {vocab}"), have);
                Vec::new()
            }
        }
    }

    /// Adds problems found while reading a nested object, as `parent.field`.
    pub fn adopt(&mut self, parent: &str, inner: Fields) {
        self.problems.extend(inner.problems.into_iter().map(|line| format!("{parent}.{line}")));
    }

    /// A nested object under inspection, if the field is there; another type is a problem.
    pub fn object(&mut self, name: &str) -> Option<Fields> {
        match self.get(name)? {
            Value::Object(map) => Some(Fields { file: self.file, map: map.clone(), problems: Vec::new() }),
            other => {
                let have = show(other);
                self.problem(name, "an object", have);
                None
            }
        }
    }

    /// Names of the fields that are present.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.map.keys().map(|k| k.as_str())
    }

    /// Whether there were problems.
    ///
    /// # Errors
    /// [`Code::ConfigInvalid`] with all of them.
    pub fn finish(self) -> Result<()> {
        let n = self.problems.len();
        if n == 0 {
            return Ok(());
        }
        let plural = if n == 1 { "" } else { "s" };
        Err(Error::new(Code::ConfigInvalid, format!("{}: {n} problem{plural}", self.file))
            .have(self.problems.join("\n")))
    }
}

/// A value as short text.
pub fn show(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(map) => format!("an object of {}", map.len()),
        other => {
            let text = other.to_string();
            if text.chars().count() > 60 {
                text.chars().take(57).chain("...".chars()).collect()
            } else {
                text
            }
        }
    }
}

fn bounds(range: &RangeInclusive<usize>) -> String {
    format!("a whole number from {} to {}", range.start(), range.end())
}
