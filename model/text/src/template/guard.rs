//! The engine's environment for untrusted templates: what they may call, each made to pay for it.
use super::{
    budget::{charge, charge_arguments, fail, is_namespace, size, tick, weigh},
    clock,
    filters::{self, original},
    methods, operators,
    print::text_of,
};
use minijinja::{
    Environment, Error, Output, State, UndefinedBehavior, Value,
    value::{Rest, ValueKind, ValueOrKwargs},
};
use std::sync::OnceLock;

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

/// The environment all templates share.
pub(super) fn environment() -> &'static Environment<'static> {
    static SHARED: OnceLock<Environment<'static>> = OnceLock::new();
    SHARED.get_or_init(guarded_environment)
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
