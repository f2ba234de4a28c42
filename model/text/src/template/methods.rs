//! Methods of texts, lists and mappings, with the meaning Python gives them.
//!
//! What the engine's own collection has is taken from there; here is what it lacks, or reads otherwise.
use super::{
    budget::{charge, charge_arguments, fail},
    filters,
    format::{formatted, widths},
    print::text_of,
};
use minijinja::{
    Error, ErrorKind, State, Value,
    formatting::{FormatStyle, format},
    value::{Kwargs, Tuple, ValueKind, from_args},
};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Methods that change what they are called on. The sandbox that transformers renders in refuses them too.
const CHANGING: [&str; 13] = [
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
];

/// `value.name(args)`.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    charge_arguments(std::slice::from_ref(value))?;
    charge_arguments(args)?;
    let (given, named): (&[Value], Kwargs) = from_args(args)?;
    let args_of = Args { given, named };
    let own = match value.as_str() {
        Some(text) => of_text(text, name, &args_of, args)?,
        None => of_container(value, name, &args_of)?,
    };
    match own {
        Some(result) => Ok(result),
        None => unknown_method_callback(state, value, name, args),
    }
}

/// Arguments by place or by name.
struct Args<'a> {
    given: &'a [Value],
    named: Kwargs,
}

impl Args<'_> {
    /// The `i`th, called `name`; none is as good as nothing.
    fn value(&self, i: usize, name: &str) -> Option<Value> {
        let value =
            self.given.get(i).cloned().or_else(|| self.named.get::<Option<Value>>(name).ok().flatten());
        value.filter(|v| !v.is_none() && !v.is_undefined())
    }

    fn text(&self, i: usize, name: &str) -> Result<Option<String>, Error> {
        let text = |v: Value| match v.as_str() {
            Some(text) => Ok(text.to_owned()),
            None => Err(fail(format!("{name}: need a text; have {}", v.kind()))),
        };
        self.value(i, name).map(text).transpose()
    }

    fn needed(&self, i: usize, name: &str) -> Result<String, Error> {
        self.text(i, name)?.ok_or_else(|| fail(format!("{name}: need a text; have nothing")))
    }

    fn number(&self, i: usize, name: &str) -> Result<Option<i64>, Error> {
        let number = |v: Value| match v.as_i64() {
            Some(n) => Ok(n),
            None => Err(fail(format!("{name}: need a whole number; have {}", v.kind()))),
        };
        self.value(i, name).map(number).transpose()
    }

    fn at_most(&self, n: usize) -> Result<(), Error> {
        if self.given.len() > n {
            return Err(fail(format!("at most {n} arguments; have {}", self.given.len())));
        }
        Ok(())
    }
}

fn of_text(text: &str, name: &str, args: &Args<'_>, all: &[Value]) -> Result<Option<Value>, Error> {
    let most = match name {
        "format" | "join" => usize::MAX,
        "find" | "rfind" | "index" | "rindex" | "count" | "startswith" | "endswith" | "replace" => 3,
        "split" | "rsplit" | "center" | "ljust" | "rjust" => 2,
        _ => 1,
    };
    args.at_most(most)?;
    let is_space = |c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c);
    let result = match name {
        "strip" | "lstrip" | "rstrip" => {
            let chars = args.text(0, "chars")?;
            let strips = |c: char| chars.as_ref().map_or_else(|| is_space(c), |set| set.contains(c));
            let text = if name == "rstrip" { text } else { text.trim_start_matches(strips) };
            Value::from(if name == "lstrip" { text } else { text.trim_end_matches(strips) })
        }
        "removeprefix" => {
            let part = args.needed(0, "prefix")?;
            Value::from(text.strip_prefix(part.as_str()).unwrap_or(text))
        }
        "removesuffix" => {
            let part = args.needed(0, "suffix")?;
            Value::from(text.strip_suffix(part.as_str()).unwrap_or(text))
        }
        "split" | "rsplit" => {
            let separator = args.text(0, "sep")?;
            let most = args.number(1, "maxsplit")?.and_then(|n| usize::try_from(n).ok());
            if separator.as_deref() == Some("") {
                return Err(fail(format!("{name}: the separator is empty")));
            }
            pieces(text, separator.as_deref(), most, name == "rsplit", is_space)?
        }
        "splitlines" => lines(text, args.value(0, "keepends").is_some_and(|keep| keep.is_true()))?,
        "partition" | "rpartition" => {
            let separator = args.needed(0, "sep")?;
            if separator.is_empty() {
                return Err(fail(format!("{name}: the separator is empty")));
            }
            let back = name == "rpartition";
            let cut = if back { text.rsplit_once(&separator) } else { text.split_once(&separator) };
            let parts = match cut {
                Some((before, after)) => [before, separator.as_str(), after],
                None if back => ["", "", text],
                None => [text, "", ""],
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "find" | "rfind" | "index" | "rindex" => {
            let what = args.needed(0, "sub")?;
            let found = window(text, args)?.and_then(|(part, before)| {
                let at = if name.starts_with('r') { part.rfind(&what) } else { part.find(&what) };
                at.map(|at| before + part[..at].chars().count() as i64)
            });
            match found {
                Some(at) => Value::from(at),
                None if name.ends_with("find") => Value::from(-1),
                None => return Err(fail(format!("{name}: the text is not there"))),
            }
        }
        "count" => {
            let what = args.needed(0, "sub")?;
            Value::from(window(text, args)?.map_or(0, |(part, _)| part.matches(&what).count()))
        }
        "startswith" | "endswith" => {
            let wanted = args.value(0, "prefix");
            let wanted = wanted.ok_or_else(|| fail(format!("{name}: need a text or a tuple of texts")))?;
            let list: Vec<Value> =
                if wanted.as_str().is_some() { vec![wanted] } else { wanted.try_iter()?.collect() };
            let part = window(text, args)?.map(|(part, _)| part);
            let mut found = false;
            for affix in &list {
                let affix = affix
                    .as_str()
                    .ok_or_else(|| fail(format!("{name}: need texts; have {}", affix.kind())))?;
                found |= part.is_some_and(|part| match name {
                    "startswith" => part.starts_with(affix),
                    _ => part.ends_with(affix),
                });
            }
            Value::from(found)
        }
        "replace" => {
            let most = args.number(2, "count")?;
            let [old, new] = [args.needed(0, "old")?, args.needed(1, "new")?];
            filters::replaced(text, &old, &new, most)?
        }
        "join" => {
            let items = args.given.first().cloned().ok_or_else(|| fail("join: need a list"))?;
            filters::joined(items, &Value::from(text), None)?
        }
        "center" | "ljust" | "rjust" | "zfill" => {
            let width = args.number(0, "width")?.ok_or_else(|| fail(format!("{name}: need a width")))?;
            let fill = args.text(1, "fillchar")?.unwrap_or_else(|| " ".to_owned());
            let mut chars = fill.chars();
            let (Some(fill), None) = (chars.next(), chars.next()) else {
                return Err(fail(format!("{name}: need one character to fill with")));
            };
            Value::from(padded(text, name, usize::try_from(width).unwrap_or(0), fill)?)
        }
        "title" => Value::from(by_word(text)),
        "swapcase" => {
            let swap = |c: char| -> String {
                if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
            };
            Value::from(text.chars().map(swap).collect::<String>())
        }
        "casefold" => Value::from(text.to_lowercase().replace('ß', "ss")),
        "expandtabs" => {
            let size = args.number(0, "tabsize")?.map_or(8, |n| n.clamp(0, 256) as usize);
            charge(text.matches('\t').count().saturating_mul(size))?;
            Value::from(without_tabs(text, size))
        }
        "isspace" => Value::from(!text.is_empty() && text.chars().all(is_space)),
        "istitle" => Value::from(text.chars().any(char::is_alphabetic) && by_word(text) == text),
        "isidentifier" => {
            let starts = text.starts_with(|c: char| c.is_alphabetic() || c == '_');
            Value::from(starts && text.chars().all(|c| c.is_alphanumeric() || c == '_'))
        }
        "format" => {
            charge(widths(text)?)?;
            Value::from(format(FormatStyle::StrFormat, text, all)?)
        }
        "format_map" => {
            let map = args.given.first().filter(|v| v.kind() == ValueKind::Map);
            let map = map.ok_or_else(|| fail("format_map: need a mapping"))?;
            let mut pairs = Vec::new();
            for key in map.try_iter()? {
                pairs.push((text_of(&key)?, map.get_item(&key)?));
            }
            charge(widths(text)?)?;
            let named: Value = Kwargs::from_iter(pairs).into();
            Value::from(format(FormatStyle::StrFormat, text, &[named])?)
        }
        "__mod__" => formatted(text, args.given.first().unwrap_or(&Value::UNDEFINED))?,
        _ => return Ok(None),
    };
    charge_arguments(std::slice::from_ref(&result))?;
    Ok(Some(result))
}

fn of_container(value: &Value, name: &str, args: &Args<'_>) -> Result<Option<Value>, Error> {
    let kind = value.kind();
    match (kind, name) {
        (ValueKind::Seq, "index") => {
            let wanted = args.given.first().ok_or_else(|| fail("index: need a value"))?;
            let mut items = value.try_iter()?;
            match items.position(|item| item == *wanted) {
                Some(at) => Ok(Some(Value::from(at))),
                None => Err(fail("index: the value is not in the list")),
            }
        }
        (ValueKind::Seq | ValueKind::Map, "copy") => {
            args.at_most(0)?;
            Ok(Some(value.clone()))
        }
        // A key of that name is what the template means, if there is one.
        (ValueKind::Seq | ValueKind::Map, _)
            if CHANGING.contains(&name) && value.get_attr(name)?.is_undefined() =>
        {
            Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("{name}: lists and mappings cannot be changed in a chat template"),
            ))
        }
        _ => Ok(None),
    }
}

/// The part of a text between the arguments `start` and `end`, and the characters before it; none when it
/// begins behind the end.
fn window<'a>(text: &'a str, args: &Args<'_>) -> Result<Option<(&'a str, i64)>, Error> {
    let (start, end) = (args.number(1, "start")?, args.number(2, "end")?);
    if start.is_none() && end.is_none() {
        return Ok(Some((text, 0)));
    }
    let n = text.chars().count() as i64;
    let place = |i: i64| if i < 0 { i.saturating_add(n).max(0) } else { i };
    let (start, end) = (start.map_or(0, place), end.map_or(n, place).min(n));
    if start > end {
        return Ok(None);
    }
    let byte = |i: i64| text.char_indices().nth(i as usize).map_or(text.len(), |(at, _)| at);
    Ok(Some((&text[byte(start)..byte(end)], start)))
}

/// `split` and, from the right, `rsplit`: at most `most` cuts, at white space where there is no separator.
fn pieces(
    text: &str,
    separator: Option<&str>,
    most: Option<usize>,
    from_right: bool,
    is_space: impl Fn(char) -> bool + Copy,
) -> Result<Value, Error> {
    let mut out = Vec::new();
    let mut push = |piece: &str| -> Result<usize, Error> {
        charge(size_of::<Value>() + piece.len())?;
        out.push(Value::from(piece));
        Ok(out.len())
    };
    let limit = most.map_or(usize::MAX, |n| n.saturating_add(1));
    match (separator, from_right) {
        (Some(s), false) => text.splitn(limit, s).try_for_each(|piece| push(piece).map(drop))?,
        (Some(s), true) => text.rsplitn(limit, s).try_for_each(|piece| push(piece).map(drop))?,
        (None, false) => {
            let mut rest = text.trim_start_matches(is_space);
            let mut done = 0;
            while !rest.is_empty() {
                let end =
                    if done + 1 >= limit { rest.len() } else { rest.find(is_space).unwrap_or(rest.len()) };
                done = push(&rest[..end])?;
                rest = rest[end..].trim_start_matches(is_space);
            }
        }
        (None, true) => {
            let mut rest = text.trim_end_matches(is_space);
            let mut done = 0;
            while !rest.is_empty() {
                let last =
                    if done + 1 >= limit { None } else { rest.char_indices().rfind(|(_, c)| is_space(*c)) };
                let start = last.map_or(0, |(at, c)| at + c.len_utf8());
                done = push(&rest[start..])?;
                rest = rest[..start].trim_end_matches(is_space);
            }
        }
    }
    if from_right {
        out.reverse();
    }
    Ok(Value::from(out))
}

/// Lines as Python cuts them.
fn lines(text: &str, keep_ends: bool) -> Result<Value, Error> {
    let ends = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut out = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let at = rest.find(ends).unwrap_or(rest.len());
        let end = match rest[at..].chars().next() {
            Some('\r') if rest[at..].starts_with("\r\n") => at + 2,
            Some(c) => at + c.len_utf8(),
            None => at,
        };
        let line = &rest[..if keep_ends { end } else { at }];
        charge(size_of::<Value>() + line.len())?;
        out.push(Value::from(line));
        rest = &rest[end..];
    }
    Ok(Value::from(out))
}

fn padded(text: &str, name: &str, width: usize, fill: char) -> Result<String, Error> {
    let missing = width.saturating_sub(text.chars().count());
    charge(missing.saturating_mul(fill.len_utf8()).saturating_add(text.len()))?;
    let fill = |n: usize| std::iter::repeat_n(fill, n);
    if name == "zfill" {
        let signed = text.starts_with(['+', '-']);
        let (sign, digits) = text.split_at(usize::from(signed));
        return Ok([sign, &"0".repeat(missing), digits].concat());
    }
    let before = match name {
        "ljust" => 0,
        "rjust" => missing,
        _ => missing / 2 + (missing & width & 1),
    };
    Ok(fill(before).chain(text.chars()).chain(fill(missing - before)).collect())
}

/// The first letter of every run of letters large, the others small.
fn by_word(text: &str) -> String {
    let mut inside = false;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let cased = c.is_lowercase() || c.is_uppercase();
        match (cased, inside) {
            (true, false) => out.extend(c.to_uppercase()),
            (true, true) => out.extend(c.to_lowercase()),
            (false, _) => out.push(c),
        }
        inside = cased;
    }
    out
}

fn without_tabs(text: &str, size: usize) -> String {
    let mut column = 0;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\t' if size > 0 => {
                let blanks = size - column % size;
                out.extend(std::iter::repeat_n(' ', blanks));
                column += blanks;
            }
            '\t' => {}
            c => {
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
                out.push(c);
            }
        }
    }
    out
}
