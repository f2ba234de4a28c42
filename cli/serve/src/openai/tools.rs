//! Tools and the choice among them, as chat and responses offer them.
use crate::ask::Ask;
use crate::constraint::{Constraint, Demand, unite};
use crate::fields::Fields;
use crate::refusal::Refusal;
use serde_json::Value;

/// Puts the tools of `f` into `ask`, each as `of` makes it: `None` is a kind of tool that nobody here has,
/// which is passed over, for clients offer all they know to every model. Returns what the template is to see.
pub fn read(
    ask: &mut Ask,
    f: &Fields,
    of: impl Fn(&Fields) -> Result<Option<Value>, Refusal>,
) -> Result<Option<Value>, Refusal> {
    let offered = f.objects("tools")?.unwrap_or_default();
    let mut tools = Vec::new();
    for tool in &offered {
        tools.extend(of(tool)?);
    }
    ask.parallel_calls = f.flag("parallel_tool_calls")?.unwrap_or(true);
    let is_shown = choose(ask, f, &tools)?;
    Ok((is_shown && !tools.is_empty()).then_some(Value::Array(tools)))
}

/// Reads `tool_choice`; whether tools are shown at all.
fn choose(ask: &mut Ask, f: &Fields, tools: &[Value]) -> Result<bool, Refusal> {
    let need = "none, auto, required, or an object that names a tool";
    let named = match f.get("tool_choice") {
        None => return Ok(true),
        Some(Value::String(word)) => match word.as_str() {
            "none" => return Ok(false),
            "auto" => return Ok(true),
            "required" => None,
            _ => return Err(f.wrong("tool_choice", need)),
        },
        Some(Value::Object(_)) => {
            let Some(choice) = f.object("tool_choice")? else { return Ok(true) };
            if choice.text("type")? != Some("function") {
                return Err(choice.wrong("type", "function"));
            }
            // Chat has the name in an object of its own.
            let inner = choice.object("function")?.unwrap_or(choice);
            Some(inner.needed_text("name")?.to_owned())
        }
        Some(_) => return Err(f.wrong("tool_choice", need)),
    };
    let is_there = |name: &str| tools.iter().any(|tool| tool["function"]["name"] == name);
    match &named {
        Some(name) if !is_there(name) => Err(f.wrong("tool_choice", "the name of one of the tools")),
        None if tools.is_empty() => Err(f.wrong("tool_choice", "tools to choose from")),
        _ => {
            let demand = Constraint::of(f, "tool_choice", Demand::Call(named));
            unite(&mut ask.constraint, Some(demand))?;
            Ok(true)
        }
    }
}
