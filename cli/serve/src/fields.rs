//! Reads the fields of a JSON body. A field of the wrong type is named by its path; null is as good as
//! absent, and fields that nobody asks for are nobody's business.
use crate::refusal::{Kind, Refusal, shown};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// An object of a body.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    at: String,
    map: &'a Map<String, Value>,
}

/// Parses a body, which must be an object.
///
/// # Errors
/// 400 with the place of what is no JSON. Nesting beyond 128 is none.
pub fn parse(body: &[u8]) -> Result<Value, Refusal> {
    let value: Value = serde_json::from_slice(body)
        .map_err(|e| Refusal::new(Kind::Invalid, format!("the body is no JSON: {e}")))?;
    if !value.is_object() {
        let have = shown(&value);
        return Err(Refusal::new(Kind::Invalid, format!("the body: need a JSON object, have {have}")));
    }
    Ok(value)
}

impl<'a> Fields<'a> {
    /// The fields of `value`, which is what `at` names; the empty path is the body.
    ///
    /// # Errors
    /// 400 for anything but an object, as everywhere here.
    pub fn of(at: impl Into<String>, value: &'a Value) -> Result<Self, Refusal> {
        let at = at.into();
        match value {
            Value::Object(map) => Ok(Self { at, map }),
            other => Err(Refusal::field(&at, "an object", shown(other))),
        }
    }
    /// Path of a field.
    pub fn path(&self, name: &str) -> String {
        if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) }
    }
    /// Path of the object.
    pub fn at(&self) -> &str {
        &self.at
    }
    /// All of it.
    pub fn map(&self) -> &'a Map<String, Value> {
        self.map
    }
    /// The value, unless it is null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }
    /// The refusal of what a field holds.
    pub fn wrong(&self, name: &str, need: &str) -> Refusal {
        let have = self.map.get(name).map_or_else(|| "nothing".to_owned(), shown);
        Refusal::field(&self.path(name), need, have)
    }
    fn read<T>(
        &self,
        name: &str,
        need: &str,
        of: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Refusal> {
        self.get(name).map(|v| of(v).ok_or_else(|| self.wrong(name, need))).transpose()
    }
    /// A text.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, Refusal> {
        self.read(name, "a text", Value::as_str)
    }
    /// A text that must be there.
    pub fn needed_text(&self, name: &str) -> Result<&'a str, Refusal> {
        self.text(name)?.ok_or_else(|| self.wrong(name, "a text"))
    }
    /// True or false.
    pub fn flag(&self, name: &str) -> Result<Option<bool>, Refusal> {
        self.read(name, "true or false", Value::as_bool)
    }
    /// A number; the sampler says what it may be.
    pub fn number(&self, name: &str) -> Result<Option<f32>, Refusal> {
        self.read(name, "a number", |v| v.as_f64().map(|x| x as f32).filter(|x| x.is_finite()))
    }
    /// A whole number within bounds. Some clients write 5.0.
    pub fn whole(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, Refusal> {
        let need = match (*range.start(), *range.end()) {
            (i64::MIN, i64::MAX) => "a whole number".to_owned(),
            (least, i64::MAX) => format!("a whole number, at least {least}"),
            (least, most) => format!("a whole number from {least} to {most}"),
        };
        self.read(name, &need, |v| {
            let exact = v.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 9e15).map(|x| x as i64);
            v.as_i64().or(exact).filter(|x| range.contains(x))
        })
    }
    /// A whole number of 64 bits, whether it counts from 0 or from -2^63: one below 0 is its complement.
    pub fn seed(&self, name: &str) -> Result<Option<u64>, Refusal> {
        match self.get(name).and_then(Value::as_u64) {
            Some(seed) => Ok(Some(seed)),
            None => {
                let seed = self.whole(name, i64::MIN..=i64::MAX);
                let wide = |_| self.wrong(name, "a whole number from -2^63 to 2^64 - 1");
                Ok(seed.map_err(wide)?.map(|seed| seed as u64))
            }
        }
    }
    /// A whole number that counts something.
    pub fn count(&self, name: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, Refusal> {
        let bound = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let range = bound(*range.start())..=bound(*range.end());
        Ok(self.whole(name, range)?.and_then(|n| usize::try_from(n).ok()))
    }
    /// An object.
    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>, Refusal> {
        self.get(name).map(|v| Fields::of(self.path(name), v)).transpose()
    }
    /// A list, each item with its path.
    pub fn list(&self, name: &str) -> Result<Option<Vec<(String, &'a Value)>>, Refusal> {
        let list = self.read(name, "a list", Value::as_array)?;
        let path = self.path(name);
        Ok(list.map(|l| l.iter().enumerate().map(|(i, v)| (format!("{path}[{i}]"), v)).collect()))
    }
    /// A list of objects.
    pub fn objects(&self, name: &str) -> Result<Option<Vec<Fields<'a>>>, Refusal> {
        let list = self.list(name)?;
        list.map(|l| l.into_iter().map(|(path, v)| Fields::of(path, v)).collect()).transpose()
    }
    /// A text, or a list of at most `most` texts.
    pub fn texts(&self, name: &str, most: usize) -> Result<Vec<String>, Refusal> {
        let need = format!("a text, or a list of at most {most} texts");
        let texts = self.read(name, &need, |v| match v {
            Value::String(one) => Some(vec![one.clone()]),
            Value::Array(list) if list.len() <= most => {
                list.iter().map(|t| t.as_str().map(str::to_owned)).collect()
            }
            _ => None,
        })?;
        Ok(texts.unwrap_or_default())
    }
    /// A field that is accepted where it changes nothing.
    ///
    /// # Errors
    /// 400 that says that nobody here does `what`.
    pub fn neutral(&self, name: &str, is_neutral: impl Fn(&Value) -> bool) -> Result<(), Refusal> {
        match self.get(name) {
            Some(value) if !is_neutral(value) => {
                let path = self.path(name);
                let what = format!("{path}: not supported by this engine, have {}", shown(value));
                Err(Refusal::unsupported(&path, what))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_path_of_a_wrong_type_is_named() {
        let body = json!({"a": [{"b": "x"}], "n": 5.0, "deep": {"t": 7}});
        let fields = Fields::of("", &body).expect("an object");
        let inner = fields.objects("a").expect("objects").expect("there");
        assert_eq!(
            inner[0].flag("b").expect_err("no flag").message,
            "a[0].b: need true or false, have the text \"x\""
        );
        assert_eq!(fields.whole("n", 0..=9).expect("whole"), Some(5));
        let deep = fields.object("deep").expect("object").expect("there");
        assert_eq!(deep.text("t").expect_err("no text").param.as_deref(), Some("deep.t"));
        assert_eq!(fields.text("absent").expect("fine"), None);
    }

    #[test]
    fn what_nests_too_deeply_is_no_json() {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(parse(deep.as_bytes()).expect_err("refused").kind, Kind::Invalid);
        assert!(parse(b"[]").expect_err("refused").message.contains("need a JSON object"));
    }
}
