//! Filters of Jinja that make text or lists, and those that the engine reads otherwise.
use super::{
    budget::{charge, charge_arguments, fail},
    json,
    operators::add,
    print::{Paid, text_of},
};
use minijinja::{
    Environment, Error, Value,
    value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs},
};
use std::sync::OnceLock;

/// Filters of the engine that Jinja gives the text of whatever they are called on.
const OF_TEXT: [&str; 5] = ["capitalize", "lower", "title", "trim", "upper"];

/// Filters of the engine that take by name what Jinja takes by place too.
const IN_ORDER: [(&str, &[&str]); 5] = [
    ("dictsort", &["case_sensitive", "by", "reverse"]),
    ("max", &["case_sensitive", "attribute"]),
    ("min", &["case_sensitive", "attribute"]),
    ("sort", &["reverse", "case_sensitive", "attribute"]),
    ("unique", &["case_sensitive", "attribute"]),
];

/// Adds them.
pub(super) fn add_to(env: &mut Environment<'static>) {
    for name in OF_TEXT {
        env.add_filter(name, move |value: Value, rest: Rest<ValueOrKwargs>| {
            let args = [vec![Value::from(text_of(&value)?)], rest.into_values()].concat();
            charge_arguments(&args)?;
            original().empty_state().apply_filter(name, &args)
        });
    }
    for (name, options) in IN_ORDER {
        env.add_filter(name, move |args: Rest<ValueOrKwargs>| in_order(name, options, &args.into_values()));
    }
    for name in ["abs", "round"] {
        env.add_filter(name, move |value: Value, rest: Rest<ValueOrKwargs>| {
            let value = match value.kind() {
                ValueKind::Bool => Value::from(i64::from(value.is_true())),
                _ => value,
            };
            original().empty_state().apply_filter(name, &[vec![value], rest.into_values()].concat())
        });
    }
    env.add_filter("reverse", reverse);
    env.add_filter("last", last);
    for name in ["e", "escape", "forceescape"] {
        env.add_filter(name, move |value: Value| escaped(&value, name == "forceescape"));
    }
    for name in ["length", "count"] {
        env.add_filter(name, length);
    }
    env.add_filter("join", join);
    env.add_filter("replace", replace);
    env.add_filter("string", |value: Value| text_of(&value).map(Value::from));
    env.add_filter("indent", indent);
    env.add_filter("tojson", tojson);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("first", first);
    env.add_filter("items", items);
    env.add_filter("sum", sum);
    env.add_filter("batch", batch);
    env.add_filter("slice", slice);
    env.add_filter("center", center);
    env.add_filter("wordcount", wordcount);
    env.add_filter("truncate", truncate);
    env.add_filter("format", format);
}

/// An untouched environment, to call builtins in.
pub(super) fn original() -> &'static Environment<'static> {
    static ORIGINAL: OnceLock<Environment<'static>> = OnceLock::new();
    ORIGINAL.get_or_init(Environment::new)
}

fn in_order(name: &str, options: &[&str], args: &[Value]) -> Result<Value, Error> {
    charge_arguments(args)?;
    let (given, named): (&[Value], Kwargs) = minijinja::value::from_args(args)?;
    let Some((value, given)) = given.split_first() else { return Err(fail(format!("{name}: of what?"))) };
    if given.len() > options.len() {
        return Err(fail(format!("{name}: at most {} arguments", options.len())));
    }
    let mut all: Vec<(String, Value)> =
        options.iter().zip(given).map(|(option, value)| ((*option).to_owned(), value.clone())).collect();
    for option in named.args() {
        all.push((option.to_owned(), named.get(option)?));
    }
    // Of several largest the first is meant; the engine takes the last.
    let value = match name {
        "max" => value.try_iter()?.collect::<Vec<_>>().into_iter().rev().collect(),
        _ => value.clone(),
    };
    let named: Value = Kwargs::from_iter(all).into();
    original().empty_state().apply_filter(name, &[value, named])
}

fn reverse(value: Value) -> Result<Value, Error> {
    charge_arguments(std::slice::from_ref(&value))?;
    if value.kind() == ValueKind::Map {
        return Ok(value.try_iter()?.collect::<Vec<_>>().into_iter().rev().collect());
    }
    original().empty_state().apply_filter("reverse", &[value])
}

fn last(value: Value) -> Result<Value, Error> {
    charge_arguments(std::slice::from_ref(&value))?;
    match value.kind() {
        ValueKind::Undefined => Ok(value),
        ValueKind::Map => Ok(value.try_iter()?.last().unwrap_or(Value::UNDEFINED)),
        _ => original().empty_state().apply_filter("last", &[value]),
    }
}

/// `length` of Jinja: what is undefined has none, `none` cannot be asked.
fn length(value: Value) -> Result<usize, Error> {
    charge(0)?;
    match value.len() {
        Some(n) => Ok(n),
        None if value.is_undefined() => Ok(0),
        None => Err(fail(format!("cannot calculate length of value of type {}", value.kind()))),
    }
}

/// An option by place or by name.
fn option(given: Option<Value>, named: &Kwargs, name: &str) -> Result<Option<Value>, Error> {
    let named: Option<Value> = named.get(name)?;
    Ok(given.or(named).filter(|v| !v.is_undefined()))
}

/// What `path` leads to: names and places of items, with points between.
fn attribute(item: &Value, path: &Value) -> Result<Value, Error> {
    let Some(path) = path.as_str() else { return item.get_item(path) };
    path.split('.').try_fold(item.clone(), |value, part| match part.parse::<usize>() {
        Ok(place) => value.get_item(&Value::from(place)),
        Err(_) => value.get_attr(part),
    })
}

fn join(items: Value, separator: Option<Value>, path: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let separator = option(separator, &named, "d")?.unwrap_or_else(|| Value::from(""));
    let path = option(path, &named, "attribute")?.filter(|p| !p.is_none());
    named.assert_all_used()?;
    joined(items, &separator, path.as_ref())
}

/// The items as text, `separator` between.
pub(super) fn joined(items: Value, separator: &Value, path: Option<&Value>) -> Result<Value, Error> {
    let mut text = Paid::default();
    for (i, item) in items.try_iter()?.enumerate() {
        if i > 0 {
            text.push(separator)?;
        }
        match path {
            Some(path) => text.push(&attribute(&item, path)?)?,
            None => text.push(&item)?,
        }
    }
    Ok(Value::from(text.text))
}

fn replace(value: Value, old: Value, new: Value, count: Option<i64>) -> Result<Value, Error> {
    let [value, old, new] = [text_of(&value)?, text_of(&old)?, text_of(&new)?];
    replaced(&value, &old, &new, count)
}

/// The first `count` places of `old` in `text`, or all, as `new`.
pub(super) fn replaced(text: &str, old: &str, new: &str, count: Option<i64>) -> Result<Value, Error> {
    let most = count.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let places = text.matches(old).take(most).count();
    charge(text.len().saturating_add(places.saturating_mul(new.len())))?;
    Ok(Value::from(text.replacen(old, new, places)))
}

fn indent(args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let named = |v: &Value| v.get_attr("width").ok().and_then(|w| w.as_i64());
    let width = args.iter().skip(1).filter_map(|v| v.as_i64().or_else(|| named(v))).max().unwrap_or(4);
    if !(0..=1024).contains(&width) {
        return Err(fail("indent: the width must be from 0 to 1024"));
    }
    let text = args.first().and_then(Value::as_str).unwrap_or_default();
    charge(text.len() + (text.matches('\n').count() + 1) * width as usize)?;
    original().empty_state().apply_filter("indent", &args)
}

/// As transformers defines it: the first place is `ensure_ascii`, not Jinja's `indent`.
fn tojson(value: Value, ascii: Option<Value>, indent: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let indent =
        option(indent, &named, "indent")?.filter(|n| !n.is_none()).map(usize::try_from).transpose()?;
    if indent.is_some_and(|n| n > 16) {
        return Err(fail("tojson: the indent must be from 0 to 16"));
    }
    let separators = named.get::<Option<Value>>("separators")?.filter(|s| !s.is_none());
    let separators = separators.map(|pair| {
        let parts: Vec<Value> = pair.try_iter()?.collect();
        match parts.iter().map(Value::as_str).collect::<Vec<_>>()[..] {
            [Some(item), Some(key)] => Ok((item.to_owned(), key.to_owned())),
            _ => Err(fail("tojson: separators must be a pair of texts")),
        }
    });
    let form = json::Form {
        indent,
        ascii: option(ascii, &named, "ensure_ascii")?.is_some_and(|v| v.is_true()),
        sorted: option(None, &named, "sort_keys")?.is_some_and(|v| v.is_true()),
        separators: separators.transpose()?,
    };
    named.assert_all_used()?;
    json::dumps(&value, form).map(Value::from)
}

/// A whole number, or `default` where there is none.
fn int(value: Value, default: Option<Value>, base: Option<u32>, named: Kwargs) -> Result<Value, Error> {
    let default = option(default, &named, "default")?.unwrap_or_else(|| Value::from(0));
    let base = match base {
        Some(base) => base,
        None => named.get::<Option<u32>>("base")?.unwrap_or(10),
    };
    named.assert_all_used()?;
    charge_arguments(std::slice::from_ref(&value))?;
    if value.is_undefined() || value.is_none() {
        return Ok(default);
    }
    if value.kind() == ValueKind::Number && !value.is_integer() && !f64::try_from(value.clone())?.is_finite()
    {
        return Ok(default);
    }
    let trimmed = value.as_str().map_or_else(|| value.clone(), |text| Value::from(text.trim()));
    let args = [trimmed, Value::UNDEFINED, Value::from(base)];
    let args = if base == 10 { &args[..1] } else { &args[..] };
    Ok(original().empty_state().apply_filter("int", args).unwrap_or(default))
}

/// A float, or `default` where there is none.
fn float(value: Value, default: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let default = option(default, &named, "default")?.unwrap_or_else(|| Value::from(0.0));
    named.assert_all_used()?;
    charge_arguments(std::slice::from_ref(&value))?;
    if value.is_undefined() || value.is_none() {
        return Ok(default);
    }
    let trimmed = value.as_str().map_or_else(|| value.clone(), |text| Value::from(text.trim()));
    Ok(original().empty_state().apply_filter("float", &[trimmed]).unwrap_or(default))
}

fn first(value: Value) -> Result<Value, Error> {
    charge_arguments(std::slice::from_ref(&value))?;
    Ok(value.try_iter()?.next().unwrap_or(Value::UNDEFINED))
}

fn items(value: Value) -> Result<Value, Error> {
    charge_arguments(std::slice::from_ref(&value))?;
    if value.is_undefined() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    original().empty_state().apply_filter("items", &[value])
}

fn sum(items: Value, path: Option<Value>, start: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let path = option(path, &named, "attribute")?.filter(|p| !p.is_none());
    let start = option(start, &named, "start")?.unwrap_or_else(|| Value::from(0));
    named.assert_all_used()?;
    if start.as_str().is_some() {
        return Err(fail("sum: texts are put together by join"));
    }
    items.try_iter()?.try_fold(start, |sum, item| match &path {
        Some(path) => add(sum, attribute(&item, path)?),
        None => add(sum, item),
    })
}

fn batch(items: Value, count: usize, fill: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let fill = option(fill, &named, "fill_with")?.filter(|f| !f.is_none());
    named.assert_all_used()?;
    if count == 0 {
        return Err(fail("batch: the count must be 1 or more"));
    }
    charge_arguments(std::slice::from_ref(&items))?;
    let items: Vec<Value> = items.try_iter()?.collect();
    let mut rows: Vec<Vec<Value>> = items.chunks(count).map(<[Value]>::to_vec).collect();
    if let (Some(fill), Some(last)) = (fill, rows.last_mut()) {
        charge((count - last.len()).saturating_mul(size_of::<Value>()))?;
        last.resize(count, fill);
    }
    Ok(rows.into_iter().map(Value::from).collect())
}

fn slice(args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    charge_arguments(&args)?;
    charge(args.get(1).and_then(Value::as_usize).unwrap_or(0).saturating_mul(size_of::<Value>()))?;
    original().empty_state().apply_filter("slice", &args)
}

fn center(value: Value, width: Option<usize>) -> Result<Value, Error> {
    let (text, width) = (text_of(&value)?, width.unwrap_or(80));
    let missing = width.saturating_sub(text.chars().count());
    charge(missing.saturating_add(text.len()))?;
    let before = missing / 2 + (missing & width & 1);
    Ok(Value::from([" ".repeat(before), text, " ".repeat(missing - before)].concat()))
}

fn wordcount(value: Value) -> Result<usize, Error> {
    let text = text_of(&value)?;
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    Ok(text.split(|c| !is_word(c)).filter(|word| !word.is_empty()).count())
}

fn truncate(value: Value, length: Option<usize>, kill: Option<bool>, named: Kwargs) -> Result<Value, Error> {
    let length = match length {
        Some(n) => n,
        None => named.get::<Option<usize>>("length")?.unwrap_or(255),
    };
    let kill = match kill {
        Some(kill) => kill,
        None => named.get::<Option<bool>>("killwords")?.unwrap_or(false),
    };
    let end = named.get::<Option<String>>("end")?.unwrap_or_else(|| "...".to_owned());
    let leeway = named.get::<Option<usize>>("leeway")?.unwrap_or(5);
    named.assert_all_used()?;
    // What is no text is left alone while it is short, and cannot be cut.
    let Some(text) = value.as_str() else {
        return match value.len() {
            Some(n) if n <= length.saturating_add(leeway) => Ok(value),
            None if value.is_undefined() => Ok(value),
            _ => Err(fail(format!("truncate: need a text; have {}", value.kind()))),
        };
    };
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(value);
    }
    let room = length.checked_sub(end.chars().count());
    let room = room.ok_or_else(|| fail("truncate: the length must have room for the end"))?;
    let cut: String = text.chars().take(room).collect();
    let kept = if kill { cut.as_str() } else { cut.rsplit_once(' ').map_or(cut.as_str(), |(kept, _)| kept) };
    Ok(Value::from([kept, &end].concat()))
}

/// `'%s' | format(x)`.
fn format(text: Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let text = text_of(&text)?;
    let args = args.into_values();
    let (given, named): (&[Value], Kwargs) = minijinja::value::from_args(&args)?;
    let names: Vec<String> = named.args().map(str::to_owned).collect();
    if names.is_empty() {
        return super::format::formatted(&text, &Value::from(Tuple::from(given.to_vec())));
    }
    if !given.is_empty() {
        return Err(fail("format: arguments are given by place or by name, not both"));
    }
    let pairs = names.iter().map(|name| Ok((name.as_str(), named.get::<Value>(name)?)));
    super::format::formatted(&text, &Value::from_pairs(pairs.collect::<Result<Vec<_>, Error>>()?))
}

fn escaped(value: &Value, again: bool) -> Result<Value, Error> {
    if value.is_safe() && !again {
        return Ok(value.clone());
    }
    let mut out = String::new();
    for c in text_of(value)?.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    charge(out.len())?;
    Ok(Value::from_safe_string(out))
}
