//! Chat templates: from messages to the prompt a model was trained on.
//!
//! A template is an untrusted program. It runs with the meaning transformers gives it, under hard bounds
//! on work and memory; they are built into its syntax tree before it runs.
use crate::quiet::deeply;
use minijinja::{
    AutoEscape, Error as JinjaError, Value as JinjaValue,
    machinery::{CodeGenerator, Instructions, Span, ast::Stmt, eval, make_string_output, parse},
    syntax::SyntaxConfig,
};
use q4_core::{Code, Error, Result};
use q4_files::files;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

mod budget;
mod clock;
mod filters;
mod format;
mod guard;
mod json;
mod methods;
mod numbers;
mod operators;
mod print;
mod rewrite;

use numbers::engine_value;
pub use numbers::json;

/// Bytes a template may have.
const SOURCE_LIMIT: usize = 256 << 10;
/// Bytes a prompt may have.
const OUTPUT_LIMIT: usize = 4 << 20;
const NAME: &str = "chat template";

/// One turn of a conversation. Fields a template may know and we do not are kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`, or what the template accepts.
    pub role: String,
    /// The text. Absent or null is empty, as in an assistant turn that only calls tools.
    #[serde(default, deserialize_with = "text_or_null")]
    pub content: String,
    /// Calls an assistant made: a list of `{"function": {"name", "arguments"}}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Value>,
    /// Thoughts an assistant had, apart from its answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Everything else.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Message {
    /// A turn with nothing but a text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), ..Self::default() }
    }
}

/// A template that compiles.
///
/// ```
/// use q4_text::template::{ChatTemplate, Message};
///
/// let template = ChatTemplate::compile("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")?;
/// let turns = [Message::new("system", "Be brief."), Message::new("user", "Who are you?")];
/// let prompt = template.render(&turns, None, true, &serde_json::Map::new())?;
/// assert_eq!(prompt, "<system>Be brief.<user>Who are you?");
///
/// // Damage is found before any conversation.
/// assert!(ChatTemplate::compile("{% for m in messages %}").is_err());
/// # Ok::<(), q4_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: String,
}

impl ChatTemplate {
    /// Checks a template of at most 256 KiB.
    ///
    /// # Errors
    /// [`Code::TemplateInvalid`] with the line.
    pub fn compile(source: &str) -> Result<Self> {
        files::within(source.as_bytes(), SOURCE_LIMIT, NAME, Code::TemplateInvalid)?;
        // transformers passes the source on with a trailing newline removed, which the parser does too.
        let template = Self { source: source.to_owned() };
        bounded(|| compiled(&template.source).map(|_| ()))?;
        Ok(template)
    }

    /// The template inside a `tokenizer_config.json`, if it has one.
    ///
    /// # Errors
    /// [`Code::TemplateInvalid`] for a file that is no such object, and as [`compile`](Self::compile).
    pub fn from_tokenizer_config(bytes: &[u8]) -> Result<Option<Self>> {
        let wrong = |have: String| {
            Error::new(Code::TemplateInvalid, "tokenizer_config.json: no readable chat_template")
                .need("a JSON object whose chat_template is a text or a list with one named default")
                .have(have)
        };
        let config: Value = serde_json::from_slice(bytes).map_err(|e| wrong(e.to_string()))?;
        let Value::Object(config) = config else { return Err(wrong("no object".into())) };
        let source = match config.get("chat_template") {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(source)) => source,
            Some(Value::Array(named)) => {
                let default = named.iter().find(|t| t.get("name").is_some_and(|n| n == "default"));
                match default.and_then(|t| t.get("template")) {
                    Some(Value::String(source)) => source,
                    _ => return Err(wrong(format!("a list of {} without default", named.len()))),
                }
            }
            Some(other) => return Err(wrong(q4_files::fields::show(other))),
        };
        Self::compile(source).map(Some).map_err(|e| e.within("tokenizer_config.json"))
    }

    /// A template of ours, as it is.
    pub fn of(source: &'static str) -> Self {
        Self { source: source.to_owned() }
    }

    /// The template as it is written.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template's source has this text.
    pub fn says(&self, text: &str) -> bool {
        self.source.contains(text)
    }

    /// Whether the template looks at a variable `name` of its caller anywhere.
    pub fn reads(&self, name: &str) -> bool {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        self.source.split(|c| !is_word(c)).any(|word| word == name)
    }

    /// The prompt for `messages`. `extra` are further variables, such as `bos_token`, `eos_token` or
    /// `enable_thinking`. Numbers come out as Python prints them; [`json`] keeps those that `serde_json`
    /// would change.
    ///
    /// # Errors
    /// [`Code::TemplateInvalid`] where the template fails, with the line, or exceeds its bounds: one million
    /// instructions, 64 MiB of text made on the way, 5 seconds, 4 MiB of prompt.
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String> {
        let turns = serde_json::to_value(messages)
            .map_err(|e| invalid("the conversation is no JSON").have(e.to_string()))?;
        let variables = || {
            let own = [
                ("messages", engine_value(&turns)),
                ("tools", tools.map_or_else(|| JinjaValue::from(()), engine_value)),
                ("add_generation_prompt", JinjaValue::from(add_generation_prompt)),
            ];
            let documents = [("documents", JinjaValue::from(()))];
            let extra = extra.iter().map(|(k, v)| (k.as_str(), engine_value(v)));
            JinjaValue::from_pairs(documents.into_iter().chain(extra).chain(own))
        };
        bounded(|| {
            let (root, blocks) = compiled(&self.source)?;
            let environment = guard::environment();
            let mut prompt = String::new();
            budget::start();
            let mut output = make_string_output(&mut prompt);
            eval(environment, &root, variables(), &blocks, &mut output, AutoEscape::None)
                .map_err(|e| failed(&e))?;
            if prompt.len() > OUTPUT_LIMIT {
                return Err(invalid("the prompt is too long")
                    .need(format!("at most {OUTPUT_LIMIT} bytes"))
                    .have(format!("{} bytes", prompt.len())));
            }
            Ok(prompt)
        })
    }
}

type Program<'a> = (Instructions<'a>, BTreeMap<&'a str, Instructions<'a>>);

/// Parses, puts the guards in, generates code.
fn compiled(source: &str) -> Result<Program<'_>> {
    let tree: Stmt<'_> = parse(source, NAME, syntax()?).map_err(|e| failed(&e))?;
    let guarded = rewrite::guarded(&tree).map_err(|refusal| {
        invalid(&format!("line {}: {}", refusal.span.start_line, refusal.have))
            .need("a self-contained template")
            .have(refusal.have)
    })?;
    let mut generator = CodeGenerator::new(NAME, source);
    generator.compile_stmt(&guarded);
    Ok(generator.finish())
}

/// As in transformers: a block tag takes its line with it.
fn syntax() -> Result<SyntaxConfig> {
    let mut builder = SyntaxConfig::builder();
    builder.trim_blocks(true).lstrip_blocks(true);
    builder.build().map_err(|e| failed(&e))
}

/// Runs `work` on a stack that no accepted template can exhaust, for deep syntax trees are freed recursively;
/// a panic becomes an error.
fn bounded<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    deeply(NAME, |panic| invalid("the engine failed").have(panic), work)
}

/// What the engine says, with the line where it says so.
fn failed(error: &JinjaError) -> Error {
    let line = error.line().map_or(String::new(), |line| format!("line {line}: "));
    let mut have = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        have = format!("{have}; {inner}");
        cause = inner.source();
    }
    invalid(&format!("{line}{}", error.kind())).have(have.chars().take(300).collect::<String>())
}

fn invalid(what: &str) -> Error {
    Error::new(Code::TemplateInvalid, format!("{NAME}: {what}"))
}

fn text_or_null<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.unwrap_or_default())
}

/// Why a construct is not accepted, and where it stands.
struct Refusal {
    span: Span,
    have: &'static str,
}
