//! `tojson` as transformers defines it: Python's `json.dumps` without ASCII escapes.
//!
//! Models were trained on `", "` and `": "`; a compact JSON is another prompt.
use super::{budget, numbers};
use minijinja::{Error, ErrorKind, Value, value::ValueKind};
use std::fmt::Write;

/// Nesting of values that can be written.
const DEPTH: usize = 64;

/// What `json.dumps` can be told.
#[derive(Default)]
pub(super) struct Form {
    /// Blanks a level; without, all stands in one line.
    pub(super) indent: Option<usize>,
    /// Everything beyond ASCII is escaped.
    pub(super) ascii: bool,
    /// Keys in their order.
    pub(super) sorted: bool,
    /// Between items, and between a key and its value.
    pub(super) separators: Option<(String, String)>,
}

/// `value` as JSON.
pub(super) fn dumps(value: &Value, form: Form) -> Result<String, Error> {
    let item = if form.indent.is_some() { "," } else { ", " };
    let (item, key) = form.separators.unwrap_or_else(|| (item.to_owned(), ": ".to_owned()));
    let Form { indent, ascii, sorted, .. } = form;
    let mut writer = Writer { text: String::new(), indent, ascii, sorted, item, key, charged: 0 };
    writer.value(value, 0)?;
    budget::charge(writer.text.len() - writer.charged)?;
    Ok(writer.text)
}

struct Writer {
    text: String,
    indent: Option<usize>,
    ascii: bool,
    sorted: bool,
    item: String,
    key: String,
    charged: usize,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH {
            return Err(fail("a value is nested too deep for tojson"));
        }
        // Charged as the text grows: a shared value can be much longer as text than in memory.
        budget::charge(self.text.len() - self.charged)?;
        self.charged = self.text.len();
        match value.kind() {
            ValueKind::None => self.text += "null",
            ValueKind::Bool => self.text += if value.is_true() { "true" } else { "false" },
            ValueKind::Number => self.number(value)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item));
                self.container(('[', ']'), items, depth)?;
            }
            ValueKind::Map => {
                let pairs = value.try_iter()?.map(|key| {
                    let item = value.get_item(&key)?;
                    Ok((Some(key), item))
                });
                let mut pairs: Vec<(Option<Value>, Value)> = pairs.collect::<Result<_, Error>>()?;
                if self.sorted {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.container(('{', '}'), pairs.into_iter(), depth)?;
            }
            kind => match numbers::digits(value) {
                Some(digits) => self.text += digits,
                None => return Err(fail(&format!("{kind} cannot be written as JSON"))),
            },
        }
        Ok(())
    }

    fn container(
        &mut self,
        (open, close): (char, char),
        items: impl Iterator<Item = (Option<Value>, Value)>,
        depth: usize,
    ) -> Result<(), Error> {
        self.text.push(open);
        let mut empty = true;
        for (key, item) in items {
            if !empty {
                self.text.push_str(&self.item);
            }
            if self.indent.is_some() {
                self.new_line(depth + 1);
            }
            empty = false;
            if let Some(key) = key {
                self.key(&key)?;
                self.text.push_str(&self.key);
            }
            self.value(&item, depth + 1)?;
        }
        if self.indent.is_some() && !empty {
            self.new_line(depth);
        }
        self.text.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        let width = self.indent.unwrap_or(0) * depth;
        self.text.push('\n');
        self.text.extend(std::iter::repeat_n(' ', width));
    }

    fn key(&mut self, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                self.text.push('"');
                self.value(key, DEPTH)?;
                self.text.push('"');
            }
            kind => return Err(fail(&format!("{kind} cannot be a key in JSON"))),
        }
        Ok(())
    }

    fn number(&mut self, value: &Value) -> Result<(), Error> {
        if value.is_integer() {
            return write!(self.text, "{value}").map_err(Error::from);
        }
        let number = f64::try_from(value.clone())?;
        self.text += &float(number);
        Ok(())
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for c in text.chars() {
            match c {
                '"' => self.text += "\\\"",
                '\\' => self.text += "\\\\",
                '\n' => self.text += "\\n",
                '\r' => self.text += "\\r",
                '\t' => self.text += "\\t",
                '\u{8}' => self.text += "\\b",
                '\u{c}' => self.text += "\\f",
                c if c < ' ' => self.text += &format!("\\u{:04x}", c as u32),
                c if self.ascii && !c.is_ascii() => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.text += &format!("\\u{unit:04x}");
                    }
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
    }
}

/// A float as Python's `repr`: shortest digits, exponent form below 1e-4 and from 1e16 on.
pub(super) fn float(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() {
            "NaN"
        } else if x > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .to_owned();
    }
    // Both are the shortest that is read back as x. Of two as near, Python takes the even one.
    let shortest = format!("{x:e}");
    let places = shortest.bytes().take_while(|b| *b != b'e').filter(u8::is_ascii_digit).count() - 1;
    let even = format!("{x:.places$e}");
    let text = if even.parse() == Ok(x) { even } else { shortest };
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if x != 0.0 && !(1e-4..1e16).contains(&x.abs()) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.abs());
    }
    let (sign, mantissa) = mantissa.strip_prefix('-').map_or(("", mantissa), |rest| ("-", rest));
    let digits = mantissa.replace('.', "");
    let Ok(before) = usize::try_from(exponent + 1) else {
        return format!("{sign}0.{}{digits}", "0".repeat(exponent.unsigned_abs() as usize - 1));
    };
    match before {
        0 => format!("{sign}0.{digits}"),
        n if n < digits.len() => format!("{sign}{}.{}", &digits[..n], &digits[n..]),
        n => format!("{sign}{digits}{}.0", "0".repeat(n - digits.len())),
    }
}

fn fail(what: &str) -> Error {
    Error::new(ErrorKind::BadSerialization, what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(json: &str, indent: Option<usize>) -> String {
        budget::start();
        let value: serde_json::Value = serde_json::from_str(json).expect("json");
        dumps(&Value::from(minijinja::value::Serde(value)), Form { indent, ..Form::default() })
            .expect("written")
    }

    #[test]
    fn python_separators_order_and_escapes() {
        assert_eq!(
            text(r#"{"b":[1,2.0,null,true],"a":{}}"#, None),
            r#"{"b": [1, 2.0, null, true], "a": {}}"#
        );
        assert_eq!(text(r#""北京 — \"x\"\n\u0001/\\""#, None), "\"北京 — \\\"x\\\"\\n\\u0001/\\\\\"");
        assert_eq!(
            text(r#"{"a":[1,{"b":[]}]}"#, Some(2)),
            "{\n  \"a\": [\n    1,\n    {\n      \"b\": []\n    }\n  ]\n}"
        );
    }

    #[test]
    #[allow(clippy::excessive_precision)] // ties
    fn floats_are_written_as_in_python() {
        for (x, s) in [
            (1.0, "1.0"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (-2.5e300, "-2.5e+300"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (0.0, "0.0"),
            (0.5, "0.5"),
            (-0.012, "-0.012"),
            (123.0, "123.0"),
            (5e-324, "5e-324"),
            (1.797_693_134_862_315_7e308, "1.7976931348623157e+308"),
            // Exactly between two of as many digits.
            (818_239_964_236_934.25, "818239964236934.2"),
            (32_616_687_551_106.062_5, "32616687551106.062"),
        ] {
            assert_eq!(float(x), s);
        }
        assert_eq!(text("18446744073709551615", None), "18446744073709551615");
    }
}
