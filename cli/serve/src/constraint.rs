//! What an answer must look like, where a request says so.
use crate::fields::Fields;
use crate::refusal::Refusal;
use serde_json::Value;

/// A form that every token of an answer must keep to.
#[derive(Clone, Debug, PartialEq)]
pub enum Constraint {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema admits.
    JsonSchema(Value),
    /// Text that a pattern matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Text of a context-free grammar.
    Grammar(String),
    /// At least one call: of the named tool, else of any.
    Tool(Option<String>),
}

impl Constraint {
    /// As a refusal names it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::JsonObject => "JSON output",
            Self::JsonSchema(_) => "output by a JSON schema",
            Self::Regex(_) => "output by a pattern",
            Self::Choice(_) => "output by a list of choices",
            Self::Grammar(_) => "output by a grammar",
            Self::Tool(_) => "a call that must happen",
        }
    }

    /// OpenAI's `response_format`, or `text.format` of responses, whose schema lies one level higher.
    pub fn of_format(format: &Fields) -> Result<Option<Self>, Refusal> {
        match format.needed_text("type")? {
            "text" => Ok(None),
            "json_object" => Ok(Some(Self::JsonObject)),
            "json_schema" => {
                let inner = format.object("json_schema")?.unwrap_or_else(|| format.clone());
                let schema = inner.get("schema").ok_or_else(|| inner.wrong("schema", "a JSON schema"))?;
                Ok(Some(Self::JsonSchema(schema.clone())))
            }
            _ => Err(format.wrong("type", "text, json_object or json_schema")),
        }
    }

    /// The object `structured_outputs`, and the older fields `guided_...` beside the others.
    pub fn of_structure(f: &Fields) -> Result<Option<Self>, Refusal> {
        let inner = f.object("structured_outputs")?;
        let read = |name: &str| {
            let guided = format!("guided_{name}");
            match &inner {
                Some(inner) if inner.get(name).is_some() => Some((inner.clone(), name.to_owned())),
                _ => f.get(&guided).map(|_| (f.clone(), guided)),
            }
        };
        if let Some((f, name)) = read("json") {
            return Ok(f.get(&name).map(|schema| Self::JsonSchema(schema.clone())));
        }
        if let Some((f, name)) = read("regex") {
            return Ok(Some(Self::Regex(f.needed_text(&name)?.to_owned())));
        }
        if let Some((f, name)) = read("choice") {
            return Ok(Some(Self::Choice(f.texts(&name, 1024)?)));
        }
        if let Some((f, name)) = read("grammar") {
            return Ok(Some(Self::Grammar(f.needed_text(&name)?.to_owned())));
        }
        Ok(None)
    }
}
