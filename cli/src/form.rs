//! What an answer must be, as options and lines of `--batch` say it.
use crate::args::FormArgs;
use crate::input;
use crate::prompt;
use crate::text::Text;
use q4_core::{Code, Error, Result};
use q4_model::checkpoint::Checkpoint;
use q4_model::constraint::{Constraint, Grammar, Thoughts};
use serde_json::Value;
use std::path::Path;

/// What the options ask for; the files that they name are read.
pub fn asked(args: &FormArgs) -> Result<Option<Constraint>> {
    let FormArgs { json_schema, regex, choice, grammar } = args;
    Ok(match (json_schema, regex, grammar) {
        (Some(schema), _, _) => Some(Constraint::JsonSchema(json_schema_of(schema)?)),
        (_, Some(pattern), _) => Some(Constraint::Regex(pattern.clone())),
        (_, _, Some(path)) => Some(Constraint::Grammar(input::file(path)?.1)),
        (None, None, None) if choice.is_empty() => None,
        (None, None, None) => Some(Constraint::Choice(choice.clone())),
    })
}

/// Compiled for what the model is asked: the form begins behind its thoughts, if it has any.
pub fn compiled(
    constraint: &Constraint,
    raw: bool,
    system: Option<&str>,
    checkpoint: &Checkpoint,
    text: &Text,
) -> Result<Grammar> {
    let thoughts = match raw {
        true => Thoughts::None,
        false => {
            let prompt = prompt::rendered("?", system, checkpoint, text)?;
            let template = text.template(checkpoint)?;
            Thoughts::of(&prompt, &template)
        }
    };
    text.grammars.compile(&text.tokenizer, constraint, thoughts)
}

/// JSON where it looks like JSON, else the name of a file that has it.
fn json_schema_of(given: &str) -> Result<Value> {
    let is_json = given.trim_start().starts_with('{') || given.trim() == "true";
    let (name, text) = match is_json {
        true => ("--json-schema".to_owned(), given.to_owned()),
        false => input::file(Path::new(given))?,
    };
    serde_json::from_str(&text).map_err(|e| {
        Error::new(Code::Usage, name)
            .need(r#"a JSON schema, e.g. {"properties": {"name": {"type": "string"}}}, or a file with one"#)
            .have(e.to_string())
    })
}
