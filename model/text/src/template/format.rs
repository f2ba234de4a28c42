//! `'%s' % x` of Python. What a number looks like is left to the engine, one conversion at a time, so that
//! widths are paid for before they are filled.
use super::{
    budget::{charge, fail},
    print::{repr_of, text_of},
};
use minijinja::{
    Error, Value,
    formatting::{FormatStyle, format},
    value::ValueKind,
};

/// `text % given`: a tuple has the arguments one by one, a mapping has them by name, anything else is the
/// only one.
pub(super) fn formatted(text: &str, given: &Value) -> Result<Value, Error> {
    let is_tuple = given.is_tuple();
    let mut arguments: std::vec::IntoIter<Value> =
        if is_tuple { given.try_iter()?.collect::<Vec<_>>() } else { vec![given.clone()] }.into_iter();
    let mut named = false;
    let mut out = String::new();
    let mut rest = text;
    while let Some((literal, after)) = rest.split_once('%') {
        charge(literal.len())?;
        out.push_str(literal);
        let (conversion, after) = Conversion::parse(after)?;
        rest = after;
        if conversion.kind == '%' {
            out.push('%');
            continue;
        }
        let argument = match conversion.name {
            Some(name) if given.kind() == ValueKind::Map => {
                named = true;
                let value = given.get_attr(name)?;
                if value.is_undefined() {
                    return Err(fail(format!("%({name}): there is no such key")));
                }
                value
            }
            Some(_) => return Err(fail("%(...) needs a mapping")),
            None => arguments.next().ok_or_else(|| fail("more conversions than arguments"))?,
        };
        out.push_str(&conversion.apply(&argument)?);
    }
    charge(rest.len())?;
    out.push_str(rest);
    let by_key = matches!(given.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::Undefined) && !is_tuple;
    if !named && !by_key && arguments.next().is_some() {
        return Err(fail("not all arguments are converted"));
    }
    Ok(Value::from(out))
}

/// What stands between `%` and its letter.
struct Conversion<'a> {
    name: Option<&'a str>,
    flags: &'a str,
    width: usize,
    precision: Option<usize>,
    kind: char,
}

impl<'a> Conversion<'a> {
    fn parse(text: &'a str) -> Result<(Self, &'a str), Error> {
        let (name, text) = match text.strip_prefix('(') {
            Some(inside) => {
                let (name, after) = inside.split_once(')').ok_or_else(|| fail("%( without )"))?;
                (Some(name), after)
            }
            None => (None, text),
        };
        let after = text.trim_start_matches(['#', '0', '-', ' ', '+']);
        let flags = &text[..text.len() - after.len()];
        let (width, after) = number(after)?;
        let (precision, after) = match after.strip_prefix('.') {
            Some(after) => number(after).map(|(n, after)| (Some(n.unwrap_or(0)), after))?,
            None => (None, after),
        };
        let after = after.trim_start_matches(['h', 'l', 'L']);
        let kind = after.chars().next().ok_or_else(|| fail("a format ends inside of a conversion"))?;
        let conversion = Self { name, flags, width: width.unwrap_or(0), precision, kind };
        Ok((conversion, &after[kind.len_utf8()..]))
    }

    fn apply(&self, value: &Value) -> Result<String, Error> {
        charge(self.width.saturating_add(self.precision.unwrap_or(0)))?;
        match self.kind {
            's' => Ok(self.padded(text_of(value)?)),
            'r' | 'a' => Ok(self.padded(repr_of(value)?)),
            'c' => self.by_engine('c', value.clone()),
            'd' | 'i' | 'u' => {
                let whole = match value.kind() {
                    ValueKind::Bool => Value::from(i64::from(value.is_true())),
                    ValueKind::Number if !value.is_integer() => {
                        let number = f64::try_from(value.clone())?;
                        if !number.is_finite() {
                            return Err(fail(format!("%{}: the number is not finite", self.kind)));
                        }
                        Value::from(number as i128)
                    }
                    ValueKind::Number => value.clone(),
                    kind => return Err(fail(format!("%{}: need a number; have {kind}", self.kind))),
                };
                self.by_engine('d', whole)
            }
            'x' | 'X' | 'o' if value.is_integer() => self.by_engine(self.kind, value.clone()),
            'x' | 'X' | 'o' => {
                Err(fail(format!("%{}: need a whole number; have {}", self.kind, value.kind())))
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => match value.kind() {
                ValueKind::Number | ValueKind::Bool => {
                    self.by_engine(self.kind, Value::from(f64::try_from(value.clone())?))
                }
                kind => Err(fail(format!("%{}: need a number; have {kind}", self.kind))),
            },
            other => Err(fail(format!("%{other}: no such conversion"))),
        }
    }

    fn padded(&self, text: String) -> String {
        let text: String = match self.precision {
            Some(n) => text.chars().take(n).collect(),
            None => text,
        };
        let missing = self.width.saturating_sub(text.chars().count());
        let blanks = " ".repeat(missing);
        if self.flags.contains('-') { text + &blanks } else { blanks + &text }
    }

    fn by_engine(&self, kind: char, value: Value) -> Result<String, Error> {
        let width = if self.width > 0 { self.width.to_string() } else { String::new() };
        let precision = self.precision.map_or_else(String::new, |n| format!(".{n}"));
        format(FormatStyle::Printf, &format!("%{}{width}{precision}{kind}", self.flags), &[value])
    }
}

/// The digits that `text` begins with. A width that is itself an argument is refused.
fn number(text: &str) -> Result<(Option<usize>, &str), Error> {
    if text.starts_with('*') {
        return Err(fail("%*: a width must stand in the format"));
    }
    let after = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let digits = &text[..text.len() - after.len()];
    let number = match digits {
        "" => None,
        digits => Some(digits.parse().map_err(|_| fail("a width is too large"))?),
    };
    Ok((number, after))
}

/// Bytes that the numbers of a `str.format` text could fill, if all were widths.
pub(super) fn widths(text: &str) -> Result<usize, Error> {
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let mut sum = text.len();
    for digits in numbers {
        let width: usize = digits.parse().map_err(|_| fail("a width is too large"))?;
        sum = sum.saturating_add(width.saturating_mul(4));
    }
    Ok(sum)
}
