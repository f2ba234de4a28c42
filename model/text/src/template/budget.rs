//! What a rendering may use: text and lists made on the way are paid for before they exist, long-running
//! operations look at a clock. Both live in the thread that renders.
use minijinja::{Error, ErrorKind, Value, value::ValueKind};
use std::{
    cell::Cell,
    time::{Duration, Instant},
};

/// Bytes of text and lists a rendering may make, whether it keeps them or not.
const BUDGET: usize = 64 << 20;
/// Bytes a single value may weigh.
pub(super) const WEIGHT: usize = 32 << 20;
/// Nesting of a value.
const DEPTH: usize = 64;
/// Time of a rendering. Honest templates need milliseconds.
const TIME: Duration = Duration::from_secs(5);

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

/// Ends a rendering that takes too long.
pub(super) fn tick() -> Result<(), Error> {
    match DEADLINE.get() {
        Some(deadline) if Instant::now() > deadline => Err(fail("the template runs for more than 5 seconds")),
        _ => Ok(()),
    }
}

pub(super) fn fail(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// A builtin makes about as much as it is given.
pub(super) fn charge_arguments(args: &[Value]) -> Result<(), Error> {
    args.iter().try_for_each(|value| charge(size(value)))
}

/// Bytes of the outermost level.
pub(super) fn size(value: &Value) -> usize {
    match value.as_str() {
        Some(text) => text.len(),
        None => value.len().unwrap_or(0).saturating_mul(size_of::<Value>()),
    }
}

pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// Bytes with everything inside, shared parts counted as often as they occur. Comparing, printing and freeing
/// a value take at most about as many steps. Namespaces are refused inside of values: they could contain
/// themselves.
pub(super) fn weigh(value: &Value) -> Result<usize, Error> {
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
