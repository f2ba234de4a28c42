//! Operators of Jinja that make values: their result is paid for before it exists.
use super::{
    budget::{WEIGHT, charge, fail, size, weigh},
    format::formatted,
    print::Paid,
};
use minijinja::{
    Error, Value,
    value::{Tuple, ValueKind},
};

/// `left + right` of Jinja: numbers, strings, lists.
pub(super) fn add(left: Value, right: Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        charge(a.len() + b.len())?;
        return Ok(Value::from([a, b].concat()));
    }
    if is_list(&left) && is_list(&right) {
        charge(size(&left).saturating_add(size(&right)))?;
        if weigh(&left)? + weigh(&right)? > WEIGHT {
            return Err(fail("a value of the template is larger than 32 MiB"));
        }
        let items = left.try_iter()?.chain(right.try_iter()?);
        return match (left.is_tuple(), right.is_tuple()) {
            (false, false) => Ok(items.collect()),
            (true, true) => Ok(Value::from(Tuple::from(items.collect::<Vec<_>>()))),
            _ => Err(fail("+ does not work between a list and a tuple")),
        };
    }
    arithmetic(&left, &right, "+", i128::checked_add, |a, b| a + b)
}

/// `left * right` of Jinja: numbers, and repetition of strings and lists.
pub(super) fn mul(left: Value, right: Value) -> Result<Value, Error> {
    let repeated = |value: &Value| value.as_str().is_some() || is_list(value);
    let (what, times) = match (repeated(&left), repeated(&right)) {
        (true, false) => (&left, &right),
        (false, true) => (&right, &left),
        _ => return arithmetic(&left, &right, "*", i128::checked_mul, |a, b| a * b),
    };
    let times = match times.kind() {
        ValueKind::Bool => Some(i64::from(times.is_true())),
        _ => times.as_i64().filter(|_| times.is_integer()),
    };
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
    let items = std::iter::repeat_n(items, times).flatten();
    Ok(if what.is_tuple() { Value::from(Tuple::from(items.collect::<Vec<_>>())) } else { items.collect() })
}

pub(super) fn is_list(value: &Value) -> bool {
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
    let float = |v: &Value| match v.kind() {
        ValueKind::Bool => Ok(f64::from(u8::from(v.is_true()))),
        _ => f64::try_from(v.clone()),
    };
    Ok(Value::from(real(float(left)?, float(right)?)))
}

/// `left ~ right` of Jinja: both as text.
pub(super) fn concat(left: Value, right: Value) -> Result<Value, Error> {
    let mut text = Paid::default();
    text.push(&left)?;
    text.push(&right)?;
    Ok(Value::from(text.text))
}

/// `value[start:stop:step]` of Python, on characters of texts and items of lists.
pub(super) fn slice(value: Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
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
    if !is_list(&value) {
        return Err(fail(format!("{} cannot be sliced", value.kind())));
    }
    charge(size(&value))?;
    let items: Vec<Value> = value.try_iter()?.collect();
    let picked = picked(items.len()).filter_map(|i| items.get(i).cloned());
    Ok(if value.is_tuple() { Value::from(Tuple::from(picked.collect::<Vec<_>>())) } else { picked.collect() })
}

/// An operand of `<`, `<=`, `>` or `>=`: truth is a number there, and what has no order is refused.
pub(super) fn ordered(value: Value) -> Result<Value, Error> {
    charge(0)?;
    match value.kind() {
        ValueKind::Bool => Ok(Value::from(i64::from(value.is_true()))),
        ValueKind::Number | ValueKind::String | ValueKind::Seq => Ok(value),
        kind => Err(fail(format!("{kind} is neither smaller nor larger than anything"))),
    }
}

/// `left % right` of Jinja: the remainder, and texts that are filled in.
pub(super) fn rem(left: Value, right: Value) -> Result<Value, Error> {
    if let Some(text) = left.as_str() {
        return formatted(text, &right);
    }
    let whole = |a: i128, b: i128| {
        let rest = a.checked_rem(b)?;
        Some(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest })
    };
    let is_zero = right.kind() == ValueKind::Number && f64::try_from(right.clone()).is_ok_and(|b| b == 0.0);
    if is_zero || right.kind() == ValueKind::Bool && !right.is_true() {
        return Err(fail("% by zero"));
    }
    arithmetic(&left, &right, "%", whole, |a, b| {
        let rest = a % b;
        if rest == 0.0 {
            0f64.copysign(b)
        } else if (rest < 0.0) != (b < 0.0) {
            rest + b
        } else {
            rest
        }
    })
}
