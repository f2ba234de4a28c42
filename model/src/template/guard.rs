//! The engine's environment for templates from strangers: what they may call, and what they pay for it.
//!
//! Text and lists made on the way are charged to a budget before they exist; long-running operations look at
//! a clock. Both live in the thread that renders.
use super::{clock, json};
use minijinja::{
    Environment, Error, ErrorKind, Output, State, UndefinedBehavior, Value,
    value::{Kwargs, Rest, ValueKind, ValueOrKwargs},
};
use minijinja_contrib::pycompat::unknown_method_callback;
use std::{
    cell::Cell,
    fmt::{self, Write},
    sync::OnceLock,
    time::{Duration, Instant},
};

/// Filters that the rewriter puts into a template. One that names them itself gains nothing.
pub(super) const ADD: &str = "q4_add";
pub(super) const MUL: &str = "q4_mul";
pub(super) const CONCAT: &str = "q4_concat";
pub(super) const MADE: &str = "q4_made";
pub(super) const KEPT: &str = "q4_kept";
pub(super) const TICK: &str = "q4_tick";
pub(super) const SLICE: &str = "q4_slice";

/// Instructions of a rendering.
const FUEL: u64 = 1_000_000;
/// Bytes of text and lists a rendering may make, whether it keeps them or not.
const BUDGET: usize = 64 << 20;
/// Bytes a single value may weigh.
const WEIGHT: usize = 32 << 20;
/// Nesting of a value.
const DEPTH: usize = 64;
/// Time of a rendering. Honest templates need milliseconds.
const TIME: Duration = Duration::from_secs(5);

/// Builtin filters that need nothing from the environment.
const FILTERS: [&str; 28] = [
    "abs",
    "attr",
    "bool",
    "capitalize",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "int",
    "items",
    "last",
    "lines",
    "list",
    "lower",
    "max",
    "min",
    "reverse",
    "round",
    "safe",
    "sort",
    "split",
    "title",
    "trim",
    "unique",
    "upper",
];
/// Builtin filters that chat templates do not need and that make large values from small ones.
const REMOVED: [&str; 9] =
    ["batch", "chain", "format", "groupby", "pprint", "slice", "sum", "urlencode", "zip"];
/// Builtin tests that look at whole values.
const TESTS: [&str; 19] = [
    "eq",
    "equalto",
    "==",
    "ne",
    "!=",
    "lt",
    "lessthan",
    "<",
    "le",
    "<=",
    "gt",
    "greaterthan",
    ">",
    "ge",
    ">=",
    "in",
    "startingwith",
    "endingwith",
    "sameas",
];

thread_local! {
    static LEFT: Cell<usize> = const { Cell::new(0) };
    static DEADLINE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Opens the budget of one rendering on this thread.
pub(super) fn start() {
    LEFT.set(BUDGET);
    DEADLINE.set(Instant::now().checked_add(TIME));
}

/// Pays for `bytes` that are about to exist.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    tick()?;
    match LEFT.get().checked_sub(bytes) {
        Some(left) => {
            LEFT.set(left);
            Ok(())
        }
        None => Err(fail("the template makes more than 64 MiB of text and lists")),
    }
}

fn tick() -> Result<(), Error> {
    match DEADLINE.get() {
        Some(deadline) if Instant::now() > deadline => Err(fail("the template runs for more than 5 seconds")),
        _ => Ok(()),
    }
}

fn fail(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// The environment all templates share.
pub(super) fn environment() -> &'static Environment<'static> {
    static SHARED: OnceLock<Environment<'static>> = OnceLock::new();
    SHARED.get_or_init(guarded_environment)
}

/// An untouched environment, to call builtins in.
fn original() -> &'static Environment<'static> {
    static ORIGINAL: OnceLock<Environment<'static>> = OnceLock::new();
    ORIGINAL.get_or_init(Environment::new)
}

fn guarded_environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(200);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_formatter(emit);
    env.set_unknown_method_callback(method);
    for name in REMOVED {
        env.remove_filter(name);
    }
    env.remove_global("debug");
    for name in FILTERS {
        env.add_filter(name, move |args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            charge_arguments(&args)?;
            original().empty_state().apply_filter(name, &args)
        });
    }
    for name in TESTS {
        env.add_test(name, move |args: Rest<ValueOrKwargs>| {
            tick()?;
            original().empty_state().perform_test(name, &args.into_values())
        });
    }
    env.add_filter(ADD, add);
    env.add_filter(MUL, mul);
    env.add_filter(CONCAT, concat);
    env.add_filter(MADE, made);
    env.add_filter(KEPT, kept);
    env.add_filter(TICK, |value: Value| tick().map(|()| value));
    env.add_filter(SLICE, slice);
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_test("iterable", |v: Value| !v.is_none() && v.try_iter().is_ok());
    env.add_test("sequence", |v: Value| v.is_undefined() || (!v.is_none() && v.len().is_some()));
    env.add_test("callable", |v: Value| v.kind() == ValueKind::Plain && v.as_object().is_some());
    env.add_filter("join", join);
    env.add_filter("replace", replace);
    env.add_filter("string", |value: Value| text_of(&value).map(Value::from));
    env.add_filter("indent", indent);
    env.add_filter("tojson", tojson);
    env.add_function("raise_exception", |message: String| Err::<Value, _>(fail(message)));
    env.add_function("strftime_now", |format: &str| {
        clock::now(format).map_err(|c| fail(format!("strftime_now does not know %{c}")))
    });
    env
}

/// Everything a template puts out comes through here.
fn emit(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => {
            charge(text.len())?;
            out.write_str(text)?;
        }
        None => out.write_str(&text_of(value)?)?,
    }
    Ok(())
}

fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match (name, args) {
            ("format", _) => return Err(fail("str.format is not available in chat templates")),
            ("join", [items]) => return join(items.clone(), Some(value.clone()), None),
            ("replace", [old, new]) => return replace(value.clone(), old.clone(), new.clone(), None),
            ("replace", [old, new, n]) => {
                return replace(value.clone(), old.clone(), new.clone(), n.as_i64());
            }
            ("removeprefix", [part]) => {
                let part = part.as_str().unwrap_or_default();
                return paid(text.strip_prefix(part).unwrap_or(text));
            }
            ("removesuffix", [part]) => {
                let part = part.as_str().unwrap_or_default();
                return paid(text.strip_suffix(part).unwrap_or(text));
            }
            ("split", [separator, ..]) => {
                let pieces =
                    separator.as_str().filter(|s| !s.is_empty()).map_or(0, |s| text.matches(s).count());
                charge(pieces * size_of::<Value>())?;
            }
            _ => {}
        }
    }
    charge_arguments(std::slice::from_ref(value))?;
    charge_arguments(args)?;
    unknown_method_callback(state, value, name, args)
}

fn paid(text: &str) -> Result<Value, Error> {
    charge(text.len())?;
    Ok(Value::from(text))
}

/// `length` of Jinja: what is undefined has none, `none` cannot be asked.
fn length(value: Value) -> Result<usize, Error> {
    tick()?;
    match value.len() {
        Some(n) => Ok(n),
        None if value.is_undefined() => Ok(0),
        None => Err(fail(format!("cannot calculate length of value of type {}", value.kind()))),
    }
}

/// `value[start:stop:step]` of Python, on characters of texts and items of lists.
fn slice(value: Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
    let number = |v: &Value| match v.is_none() || v.is_undefined() {
        true => Ok(None),
        false => v.as_i64().map(Some).ok_or_else(|| fail("a slice needs whole numbers")),
    };
    let (start, stop, step) = (number(&start)?, number(&stop)?, number(&step)?.unwrap_or(1));
    if step == 0 {
        return Err(fail("a slice cannot step by 0"));
    }
    let picked = |n: usize| {
        let n = n as i64;
        let (low, high) = if step > 0 { (0, n) } else { (-1, n - 1) };
        let place = |i: i64| (if i < 0 { i.saturating_add(n) } else { i }).clamp(low, high);
        let first = start.map_or(if step > 0 { low } else { high }, place);
        let end = stop.map_or(if step > 0 { high } else { low }, place);
        std::iter::successors(Some(first), move |i| i.checked_add(step))
            .take_while(move |i| if step > 0 { *i < end } else { *i > end })
            .map(|i| i as usize)
    };
    if let Some(text) = value.as_str() {
        charge(text.len().saturating_mul(4))?;
        let chars: Vec<char> = text.chars().collect();
        return Ok(Value::from(picked(chars.len()).filter_map(|i| chars.get(i)).collect::<String>()));
    }
    if !is_list(&value) && !value.is_none() && !value.is_undefined() {
        return Err(fail(format!("{} cannot be sliced", value.kind())));
    }
    charge(size(&value))?;
    let items: Vec<Value> = value.try_iter()?.collect();
    Ok(picked(items.len()).filter_map(|i| items.get(i).cloned()).collect())
}

/// A builtin makes about as much as it is given.
fn charge_arguments(args: &[Value]) -> Result<(), Error> {
    args.iter().try_for_each(|value| charge(size(value)))
}

/// Bytes of the outermost level.
fn size(value: &Value) -> usize {
    match value.as_str() {
        Some(text) => text.len(),
        None => value.len().unwrap_or(0).saturating_mul(size_of::<Value>()),
    }
}

/// Pays for a value the engine has just made, and bounds its nesting and total weight.
fn made(value: Value) -> Result<Value, Error> {
    charge(size(&value))?;
    weigh(&value)?;
    Ok(value)
}

/// A value about to become an attribute of a namespace, where it outlives loops.
fn kept(value: Value) -> Result<Value, Error> {
    if is_namespace(&value) {
        return Err(fail("a namespace cannot be stored in another value"));
    }
    made(value)
}

fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// Bytes with everything inside, shared parts counted as often as they occur. Comparing, printing and freeing
/// a value take at most about as many steps. Namespaces are refused inside of values: they could contain
/// themselves.
fn weigh(value: &Value) -> Result<usize, Error> {
    fn add(value: &Value, depth: usize, total: &mut usize) -> Result<(), Error> {
        *total = total.saturating_add(size(value)).saturating_add(8);
        if *total > WEIGHT {
            return Err(fail("a value of the template is larger than 32 MiB"));
        }
        let container = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map);
        if !container {
            return Ok(());
        }
        if depth > DEPTH {
            return Err(fail("a value of the template is nested more than 64 levels"));
        }
        if depth > 0 && is_namespace(value) {
            return Err(fail("a namespace cannot be stored in another value"));
        }
        tick()?;
        let is_map = value.kind() == ValueKind::Map;
        for item in value.try_iter()? {
            if is_map {
                add(&value.get_item(&item)?, depth + 1, total)?;
            }
            add(&item, depth + 1, total)?;
        }
        Ok(())
    }
    let mut total = 0;
    add(value, 0, &mut total)?;
    Ok(total)
}

/// `left + right` of Jinja: numbers, strings, lists.
fn add(left: Value, right: Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        charge(a.len() + b.len())?;
        return Ok(Value::from([a, b].concat()));
    }
    if is_list(&left) && is_list(&right) {
        charge(size(&left).saturating_add(size(&right)))?;
        if weigh(&left)? + weigh(&right)? > WEIGHT {
            return Err(fail("a value of the template is larger than 32 MiB"));
        }
        return Ok(left.try_iter()?.chain(right.try_iter()?).collect());
    }
    arithmetic(&left, &right, "+", i128::checked_add, |a, b| a + b)
}

/// `left * right` of Jinja: numbers, and repetition of strings and lists.
fn mul(left: Value, right: Value) -> Result<Value, Error> {
    let repeated = |value: &Value| value.as_str().is_some() || is_list(value);
    let (what, times) = match (repeated(&left), repeated(&right)) {
        (true, false) => (&left, &right),
        (false, true) => (&right, &left),
        _ => return arithmetic(&left, &right, "*", i128::checked_mul, |a, b| a * b),
    };
    let times = times.as_i64().filter(|_| times.is_integer());
    let times = times.ok_or_else(|| fail("a text or list can only be multiplied by a whole number"))?;
    let times = usize::try_from(times).unwrap_or(0);
    charge(size(what).saturating_mul(times))?;
    if let Some(text) = what.as_str() {
        return Ok(Value::from(text.repeat(times)));
    }
    if weigh(what)?.saturating_mul(times) > WEIGHT {
        return Err(fail("a value of the template is larger than 32 MiB"));
    }
    let items: Vec<Value> = what.try_iter()?.collect();
    Ok(std::iter::repeat_n(items, times).flatten().collect())
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn arithmetic(
    left: &Value,
    right: &Value,
    sign: &str,
    whole: impl Fn(i128, i128) -> Option<i128>,
    real: impl Fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let number = |v: &Value| matches!(v.kind(), ValueKind::Number | ValueKind::Bool);
    if !number(left) || !number(right) {
        return Err(fail(format!("{sign} does not work between {} and {}", left.kind(), right.kind())));
    }
    let integer = |v: &Value| v.is_integer() || v.kind() == ValueKind::Bool;
    if integer(left) && integer(right) {
        let result = whole(i128::try_from(left.clone())?, i128::try_from(right.clone())?);
        let result = result.ok_or_else(|| fail("a number of the template is too large"))?;
        return Ok(i64::try_from(result).map_or_else(|_| Value::from(result), Value::from));
    }
    Ok(Value::from(real(f64::try_from(left.clone())?, f64::try_from(right.clone())?)))
}

/// `left ~ right` of Jinja: both as text.
fn concat(left: Value, right: Value) -> Result<Value, Error> {
    let mut text = Paid::default();
    text.push(&left)?;
    text.push(&right)?;
    Ok(Value::from(text.text))
}

fn join(items: Value, separator: Option<Value>, attribute: Option<&str>) -> Result<Value, Error> {
    let separator = separator.unwrap_or_else(|| Value::from(""));
    let mut text = Paid::default();
    for (i, item) in items.try_iter()?.enumerate() {
        if i > 0 {
            text.push(&separator)?;
        }
        match attribute {
            Some(name) => text.push(&item.get_attr(name)?)?,
            None => text.push(&item)?,
        }
    }
    Ok(Value::from(text.text))
}

fn replace(value: Value, old: Value, new: Value, count: Option<i64>) -> Result<Value, Error> {
    let [value, old, new] = [text_of(&value)?, text_of(&old)?, text_of(&new)?];
    let most = count.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let places = value.matches(&*old).take(most).count();
    charge(value.len().saturating_add(places.saturating_mul(new.len())))?;
    Ok(Value::from(value.replacen(&*old, &new, places)))
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

fn tojson(value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    if indent.is_some_and(|n| n > 16) {
        return Err(fail("tojson: the indent must be from 0 to 16"));
    }
    if kwargs.get::<Option<bool>>("ensure_ascii")? == Some(true) {
        return Err(fail("tojson: ensure_ascii is not available"));
    }
    kwargs.assert_all_used()?;
    json::dumps(&value, indent).map(Value::from)
}

/// A value as text, paid for.
fn text_of(value: &Value) -> Result<String, Error> {
    let mut text = Paid::default();
    text.push(value)?;
    Ok(text.text)
}

/// Text that is paid for as it grows.
#[derive(Default)]
struct Paid {
    text: String,
    refused: Option<Error>,
}

impl Paid {
    fn push(&mut self, value: &Value) -> Result<(), Error> {
        if value.kind() == ValueKind::Number && !value.is_integer() {
            let number = f64::try_from(value.clone())?;
            let text = if number.is_finite() { json::float(number) } else { value.to_string() };
            charge(text.len())?;
            self.text.push_str(&text);
            return Ok(());
        }
        match write!(self, "{value}") {
            Ok(()) => Ok(()),
            Err(e) => Err(self.refused.take().unwrap_or_else(|| e.into())),
        }
    }
}

impl fmt::Write for Paid {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        charge(text.len()).map_err(|e| self.refused = Some(e)).map_err(|()| fmt::Error)?;
        self.text.push_str(text);
        Ok(())
    }
}
