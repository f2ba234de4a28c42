//! Calls of tools as grammars, in the two forms that [`reply`](crate::reply) reads.
use super::words::{SCHEMA_LIMIT, quoted, within};
use super::{CallForm, Calls, schema};
use crate::reply::types;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use q4_core::{Code, Error, Result};
use serde_json::{Map, Value};
use std::fmt::Write;

/// Characters that a name cannot have where tags are made of it.
const NOT_IN_TAGS: [char; 4] = ['<', '>', '\n', '\r'];
/// References that are followed from a parameter.
const REFERENCES: usize = 16;

/// A grammar of Lark, and those of arguments that it names.
struct Source {
    lark: String,
    schemas: Vec<GrammarWithLexer>,
}

impl Source {
    /// The name of a grammar of its own for what a schema admits.
    fn schema(&mut self, of: &Value) -> Result<String> {
        let name = format!("json_{}", self.schemas.len());
        let schema = GrammarWithLexer::from_json_schema(schema::checked(of)?);
        self.schemas.push(GrammarWithLexer { name: Some(name.clone()), ..schema });
        Ok(format!("@{name}"))
    }
}

/// The grammar of calls.
pub fn source(calls: &Calls) -> Result<TopLevelGrammar> {
    within(calls.tools.to_string().len(), SCHEMA_LIMIT, "tools")?;
    let functions: Vec<&Value> = calls
        .tools
        .as_array()
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .filter_map(|tool| tool.get("function"))
        .filter(|f| calls.named.as_deref().is_none_or(|named| f["name"] == named))
        .collect();
    if functions.is_empty() {
        let have =
            calls.named.as_ref().map_or("no tools".to_owned(), |named| format!("none named {named:?}"));
        return Err(Error::new(Code::Usage, "calls").need("a tool to call").have(have));
    }
    let mut source = Source { lark: String::new(), schemas: Vec::new() };
    let more = if calls.several { " (\"\\n\" call)*" } else { "" };
    let tools: Vec<_> = (0..functions.len()).map(|i| format!("tool_{i}")).collect();
    let _ = write!(
        source.lark,
        "start: call{more}\ncall: \"<tool_call>\\n\" ({}) \"\\n</tool_call>\"\n",
        tools.join(" | ")
    );
    for (rule, function) in tools.iter().zip(functions) {
        let name = function["name"].as_str().filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| Error::new(Code::Usage, "a tool").need("a name").have("none"))?;
        let parameters = parameters(function).map_err(|e| e.within(name))?;
        let body = match calls.form {
            CallForm::Json => as_json(&mut source, name, &parameters),
            CallForm::Tags => as_tags(&mut source, rule, name, &parameters),
        };
        let body = body.map_err(|e| e.within(name))?;
        let _ = writeln!(source.lark, "{rule}: {body}");
    }
    let first = GrammarWithLexer::from_lark(source.lark);
    let grammars = [first].into_iter().chain(source.schemas).collect();
    Ok(TopLevelGrammar { grammars, max_tokens: None })
}

/// The schema of a function's arguments, which are an object.
fn parameters(function: &Value) -> Result<Map<String, Value>> {
    let mut parameters = match function.get("parameters") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(parameters)) => parameters.clone(),
        Some(_) => return Err(schema::refused("an object", "parameters of another kind")),
    };
    match parameters.get("type") {
        Some(Value::String(kind)) if kind == "object" => {}
        None => drop(parameters.insert("type".to_owned(), "object".into())),
        Some(_) => return Err(schema::refused("parameters of type object", "another type")),
    }
    Ok(parameters)
}

/// `{"name": "f", "arguments": {...}}`.
fn as_json(source: &mut Source, name: &str, parameters: &Map<String, Value>) -> Result<String> {
    let head = quoted(&format!("{{\"name\": {}, \"arguments\": ", quoted(name)));
    let arguments = source.schema(&Value::Object(parameters.clone()))?;
    Ok(format!("{head} {arguments} \"}}\""))
}

/// `<function=f>` and a tag for each argument, in the order of the schema.
fn as_tags(source: &mut Source, rule: &str, name: &str, parameters: &Map<String, Value>) -> Result<String> {
    for (field, value) in parameters {
        let is_known = match field.as_str() {
            "type" | "properties" | "required" | "$defs" | "definitions" | "$schema" | "title"
            | "description" => true,
            // More than the schema names is never written.
            "additionalProperties" => true,
            _ => value.is_null(),
        };
        if !is_known {
            return Err(unsayable(&format!("{field} of the parameters")));
        }
    }
    let none = Map::new();
    let properties = parameters.get("properties").and_then(Value::as_object).unwrap_or(&none);
    let required: Vec<&str> = match parameters.get("required") {
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    if let Some(missing) = required.iter().find(|name| !properties.contains_key(**name)) {
        return Err(unsayable(&format!("required: {missing}, which is no property")));
    }
    let mut body = quoted(&format!("<function={}>\n", tag(name)?));
    for (i, (parameter, property)) in properties.iter().enumerate() {
        let value = format!("{rule}_{i}");
        let rest = value_rule(source, &value, property, parameters).map_err(|e| e.within(parameter))?;
        source.lark.push_str(&rest);
        let open = quoted(&format!("<parameter={}>\n", tag(parameter)?));
        let optional = if required.contains(&parameter.as_str()) { "" } else { "?" };
        let _ = write!(body, " ({open} {value} \"\\n\"){optional}");
    }
    body.push_str(" \"</function>\"");
    Ok(body)
}

fn tag(name: &str) -> Result<&str> {
    match name.chars().any(|c| NOT_IN_TAGS.contains(&c)) {
        true => Err(unsayable(&format!("the name {name:?}"))),
        false => Ok(name),
    }
}

/// The rules of a parameter's value and of the tag that ends it. Texts stand there as they are, all else as
/// JSON.
fn value_rule(
    source: &mut Source,
    rule: &str,
    property: &Value,
    parameters: &Map<String, Value>,
) -> Result<String> {
    let resolved = resolve(property, parameters)?;
    let types = types(resolved);
    let of = types.iter().filter(|t| **t != "null");
    match (of.clone().any(|t| *t == "string"), of.clone().any(|t| *t != "string")) {
        (true, false) => text_rule(rule, resolved, std::ptr::eq(resolved, property)),
        (false, true) => {
            let schema = source.schema(&with_definitions(resolved, parameters))?;
            Ok(format!("{rule}: {schema} \"\\n</parameter>\"\n"))
        }
        (true, true) => Err(unsayable("a value that is a text or something else")),
        (false, false) => match resolved.get("enum") {
            Some(_) => text_rule(rule, resolved, false),
            None => Err(unsayable("a value without a type")),
        },
    }
}

/// A text, as it is. `is_known`: whoever reads the call sees that it is one, whatever it looks like.
fn text_rule(rule: &str, property: &Value, is_known: bool) -> Result<String> {
    for keyword in ["pattern", "format", "anyOf", "oneOf", "allOf", "not", "const"] {
        let means_types = matches!(keyword, "anyOf" | "oneOf") && only_types(property);
        if property.get(keyword).is_some() && !means_types {
            return Err(unsayable(&format!("{keyword} of a text")));
        }
    }
    if let Some(choices) = property.get("enum").and_then(Value::as_array) {
        let sayable = |text: &&str| {
            let is_plain = is_known || serde_json::from_str::<Value>(text).is_err();
            is_plain && !text.contains("</parameter>") && !text.is_empty()
        };
        let texts: Option<Vec<_>> = choices.iter().map(|c| c.as_str().filter(sayable).map(quoted)).collect();
        let texts = texts.filter(|texts| !texts.is_empty());
        let texts = texts.ok_or_else(|| unsayable("enum with other values than plain texts"))?;
        return Ok(format!("{rule}: ({}) \"\\n</parameter>\"\n", texts.join(" | ")));
    }
    if !is_known {
        return Err(unsayable("a text behind a reference"));
    }
    let bound = |name: &str| property.get(name).and_then(Value::as_u64);
    let least = bound("minLength").unwrap_or(0);
    let most = bound("maxLength").map_or(String::new(), |most| most.to_string());
    Ok(format!(
        "{rule}[suffix=\"</parameter>\"]: {upper}\n\
         {upper}: /(?s:.){{{least},{most}}}\\n/ & ~/(?s:.*)<\\/parameter>(?s:.*)/\n",
        upper = rule.to_uppercase()
    ))
}

/// Whether alternatives do nothing but name types.
fn only_types(property: &Value) -> bool {
    let alternatives = ["anyOf", "oneOf"].iter().filter_map(|key| property.get(key)?.as_array()).flatten();
    let is_type = |key: &String| matches!(key.as_str(), "type" | "title" | "description");
    alternatives.clone().count() > 0
        && alternatives.clone().all(|a| a.as_object().is_some_and(|a| a.keys().all(is_type)))
}

/// The schema that a reference means, through those it means.
fn resolve<'a>(mut property: &'a Value, parameters: &'a Map<String, Value>) -> Result<&'a Value> {
    for _ in 0..REFERENCES {
        let Some(reference) = property.get("$ref").and_then(Value::as_str) else { return Ok(property) };
        let mut path = reference.split('/');
        let found = match (path.next(), path.next(), path.next(), path.next()) {
            (Some("#"), Some(group), Some(name), None) => parameters.get(group).and_then(|g| g.get(name)),
            _ => None,
        };
        property = found.ok_or_else(|| unsayable(&format!("$ref {reference}")))?;
    }
    Err(unsayable("$ref that goes on and on"))
}

/// A schema of its own for a part, with what its references name.
fn with_definitions(property: &Value, parameters: &Map<String, Value>) -> Value {
    let mut schema = property.as_object().cloned().unwrap_or_default();
    for group in ["$defs", "definitions"] {
        if let Some(definitions) = parameters.get(group) {
            schema.entry(group).or_insert_with(|| definitions.clone());
        }
    }
    Value::Object(schema)
}

fn unsayable(what: &str) -> Error {
    Error::new(Code::Usage, "calls as tags, the form of this model, cannot be held to it")
        .need("parameters that are plain texts, or JSON of another type")
        .have(what)
}
