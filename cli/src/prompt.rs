//! What a model is given: a prompt in its chat template, with the variables and tools that options name.
use crate::args::PromptArgs;
use crate::input;
use crate::report::Report;
use crate::text::Text;
use q4_core::{Code, Error, Result};
use q4_model::checkpoint::Checkpoint;
use q4_model::template::{self, ChatTemplate, Message};
use serde_json::{Map, Value};
use std::path::Path;

/// Adds what `args` name to the variables of the template. What the template never looks at is warned about:
/// a name with a slip in it would change nothing and say nothing.
pub fn give(
    variables: &mut Map<String, Value>,
    args: &PromptArgs,
    template: &ChatTemplate,
    report: &Report,
) -> Result<()> {
    for (name, value) in &args.template_arg {
        if !template.reads(name) {
            report.warn(&format!("--template-arg {name}: the chat template never looks at it"));
        }
        variables.insert(name.clone(), value.clone());
    }
    if let Some(path) = &args.tools {
        let tools = tools(path)?;
        variables.insert("tools".to_owned(), tools);
    }
    if variables.contains_key("tools") && !template.reads("tools") {
        report.insist("the chat template knows no tools: the model does not see them");
    }
    Ok(())
}

/// The same for a model whose template nobody has asked for yet.
pub fn give_to(text: &mut Text, args: &PromptArgs, checkpoint: &Checkpoint, report: &Report) -> Result<()> {
    if args.template_arg.is_empty() && args.tools.is_none() {
        return Ok(());
    }
    let template = text.template(checkpoint)?;
    give(&mut text.variables, args, &template, report)
}

/// One message and perhaps a system message before it, as the template has them.
pub fn rendered(prompt: &str, system: Option<&str>, checkpoint: &Checkpoint, text: &Text) -> Result<String> {
    let system = system.map(|s| Message::new("system", s));
    let messages: Vec<_> = system.into_iter().chain([Message::new("user", prompt)]).collect();
    let tools = text.variables.get("tools");
    text.template(checkpoint)?.render(&messages, tools, true, &text.variables)
}

/// The tools of a file. [`Code::Usage`] for what is no list of them.
pub fn tools(path: &Path) -> Result<Value> {
    let wrong = |have: String| {
        Error::new(Code::Usage, format!("--tools {}", path.display()))
            .need(r#"a JSON list of objects, e.g. [{"type": "function", "function": {"name": "f", "parameters": {}}}]"#)
            .have(have)
    };
    let tools = template::json(&input::data(path)?).map_err(|e| wrong(e.to_string()))?;
    check(&tools).map_err(wrong)?;
    Ok(tools)
}

/// Whether these are tools: templates go through a list of objects; anything else they would print in some
/// odd way, or not at all.
pub fn check(tools: &Value) -> std::result::Result<(), String> {
    match tools.as_array() {
        None => Err("another kind of JSON".to_owned()),
        Some(list) => match list.iter().position(|tool| !tool.is_object()) {
            Some(i) => Err(format!("item {i}, which is no object")),
            None => Ok(()),
        },
    }
}
