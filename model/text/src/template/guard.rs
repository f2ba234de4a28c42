//! The engine's environment for untrusted templates: what they may call, and what they pay for it.
//!
//! Text and lists made on the way are charged to a budget before they exist; long-running operations look at
//! a clock. Both live in the thread that renders.
use super::{clock, filters, methods, operators, print::text_of};
use minijinja::{
    Environment, Error, ErrorKind, Output, State, UndefinedBehavior, Value,
    value::{Rest, ValueKind, ValueOrKwargs},
};
use std::{
    cell::Cell,
    sync::OnceLock,
    time::{Duration, Instant},
};

/// Filters that the rewriter puts into a template. One that names them itself gains nothing.
pub(super) const ADD: &str = "q4_add";
pub(super) const MUL: &str = "q4_mul";
pub(super) const REM: &str = "q4_rem";
pub(super) const ORDERED: &str = "q4_ordered";
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
pub(super) const WEIGHT: usize = 32 << 20;
/// Nesting of a value.
const DEPTH: usize = 64;
/// Time of a rendering. Honest templates need milliseconds.
const TIME: Duration = Duration::from_secs(5);

/// Builtin filters that need nothing from the environment.
const FILTERS: [&str; 8] = ["attr", "d", "default", "groupby", "lines", "list", "safe", "split"];
/// Builtin filters that chat templates do not need and that make large values from small ones.
const REMOVED: [&str; 5] = ["bool", "chain", "pprint", "urlencode", "zip"];
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

pub(super) fn fail(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// The environment all templates share.
pub(super) fn environment() -> &'static Environment<'static> {
    static SHARED: OnceLock<Environment<'static>> = OnceLock::new();
    SHARED.get_or_init(guarded_environment)
}

/// An untouched environment, to call builtins in.
pub(super) fn original() -> &'static Environment<'static> {
    static ORIGINAL: OnceLock<Environment<'static>> = OnceLock::new();
    ORIGINAL.get_or_init(Environment::new)
}

fn guarded_environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(200);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_formatter(emit);
    env.set_unknown_method_callback(methods::method);
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
    filters::add_to(&mut env);
    env.add_filter(ADD, operators::add);
    env.add_filter(MUL, operators::mul);
    env.add_filter(REM, operators::rem);
    env.add_filter(ORDERED, operators::ordered);
    env.add_filter(CONCAT, operators::concat);
    env.add_filter(MADE, made);
    env.add_filter(KEPT, kept);
    env.add_filter(TICK, |value: Value| tick().map(|()| value));
    env.add_filter(SLICE, operators::slice);
    env.add_test("iterable", |v: Value| !v.is_none() && v.try_iter().is_ok());
    env.add_test("sequence", |v: Value| {
        matches!(v.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map)
    });
    env.add_test("callable", |v: Value| {
        v.is_undefined() || v.kind() == ValueKind::Plain && v.as_object().is_some()
    });
    for name in ["lower", "upper"] {
        env.add_test(name, move |v: Value| {
            original().empty_state().perform_test(name, &[Value::from(text_of(&v)?)])
        });
    }
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
