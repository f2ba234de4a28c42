//! Conversations as files: what `q4 chat` saves and loads, and what `q4 generate` answers or replays.
//!
//! `docs/chat.md` describes the format.
use crate::args::AnswerArgs;
use crate::input;
use crate::prompt;
use crate::report::Report;
use q4_core::{Code, Error, Result};
use q4_model::sampling::SamplingParams;
use q4_model::template::{self, Message};
use q4_model::wishes::Wishes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// First field of a file.
const SCHEMA: &str = "q4.conversation/1";

/// A conversation and how it was held.
#[derive(Debug, Serialize, Deserialize)]
pub struct Saved {
    /// Absent in what others wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    schema: Option<String>,
    /// What the model was called.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Everything said, in order.
    pub messages: Vec<Message>,
    /// How answers were drawn.
    #[serde(default)]
    pub sampling: Sampling,
    /// Tools the model may call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tools: Option<Value>,
    /// Variables of the chat template.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    template_args: Map<String, Value>,
    #[serde(flatten, skip_serializing)]
    unknown: Map<String, Value>,
}

/// Sampling settings; what is absent is as the model wishes.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    #[serde(flatten)]
    wishes: Wishes,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_tokens: Option<usize>,
    #[serde(flatten, skip_serializing)]
    unknown: Map<String, Value>,
}

impl Sampling {
    /// The settings in force. What has no effect at temperature 0 is left out.
    pub fn of(params: &SamplingParams, max_tokens: Option<usize>) -> Self {
        let drawn = params.temperature != 0.0;
        let wishes = Wishes {
            temperature: Some(params.temperature),
            top_p: drawn.then_some(params.top_p),
            top_k: drawn.then_some(params.top_k),
            min_p: drawn.then_some(params.min_p),
            repetition_penalty: Some(params.repetition_penalty),
            seed: Some(params.seed),
        };
        Self::wished(wishes, max_tokens)
    }

    /// Settings as far as somebody asked for them.
    pub fn wished(wishes: Wishes, max_tokens: Option<usize>) -> Self {
        Self { wishes, max_tokens, unknown: Map::new() }
    }
}

impl Saved {
    /// A conversation as it is now; `variables` are those of the template, tools among them.
    pub fn new(
        model: &str,
        messages: &[Message],
        sampling: Sampling,
        mut variables: Map<String, Value>,
    ) -> Self {
        Self {
            schema: Some(SCHEMA.into()),
            model: Some(model.into()),
            messages: messages.to_vec(),
            sampling,
            tools: variables.shift_remove("tools"),
            template_args: variables,
            unknown: Map::new(),
        }
    }

    /// Reads `path`; `-` is standard input. [`Code::ConversationInvalid`] for what is none.
    pub fn read(path: &Path, report: &Report) -> Result<Self> {
        let (name, text) = input::file(path)?;
        Self::parse(&text, report).map_err(|e| e.within(name))
    }

    /// The text of a file, in which a bare list is the messages. A field that nobody knows is warned about.
    fn parse(text: &str, report: &Report) -> Result<Self> {
        let none = |have: String| invalid("no conversation", have);
        let value = match template::json(text).map_err(|e| none(e.to_string()))? {
            Value::Array(messages) => json!({ "messages": messages }),
            value => value,
        };
        let saved: Self = serde_json::from_value(value).map_err(|e| none(e.to_string()))?;
        if let Some(other) = saved.schema.as_ref().filter(|schema| *schema != SCHEMA) {
            return Err(invalid("another kind of file", format!("the schema {other:?}")));
        }
        if let Some(tools) = &saved.tools {
            prompt::check(tools).map_err(|have| invalid("tools", have).need("a JSON list of objects"))?;
        }
        let role = |m: &Message| !matches!(&*m.role, "system" | "user" | "assistant" | "tool");
        if let Some(at) = saved.messages.iter().position(role) {
            return Err(invalid(&format!("messages[{at}]: role"), format!("{:?}", saved.messages[at].role))
                .need("system, user, assistant or tool"));
        }
        for (place, unknown) in [("", &saved.unknown), ("sampling.", &saved.sampling.unknown)] {
            for name in unknown.keys() {
                report.warn(&format!("{place}{name} of the conversation is not known and has no effect"));
            }
        }
        Ok(saved)
    }

    /// Writes a file that appears complete or not at all. One that exists is replaced with `over` only;
    /// else [`Code::Usage`].
    pub fn write(&self, path: &Path, over: bool) -> Result<()> {
        let failed = |e: &io::Error| Error::new(Code::Io, format!("{}: {e}", path.display()));
        let text = serde_json::to_string_pretty(self)
            .map_err(|e| Error::new(Code::Internal, format!("the conversation: {e}")))?;
        let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut file = NamedTempFile::new_in(dir).map_err(|e| uncreated(path, dir, &e))?;
        let written = file.write_all(text.as_bytes()).and_then(|()| file.write_all(b"\n"));
        written.and_then(|()| file.as_file().sync_all()).map_err(|e| failed(&e))?;
        let named = if over { file.persist(path) } else { file.persist_noclobber(path) };
        match named {
            Ok(_) => Ok(()),
            Err(e) if !over && e.error.kind() == io::ErrorKind::AlreadyExists => {
                Err(Error::new(Code::Usage, format!("{}: exists", path.display()))
                    .need("a name that is free")
                    .fix(format!("/save! {} overwrites it", path.display())))
            }
            Err(e) => Err(failed(&e.error)),
        }
    }

    /// The options with what the file says where they are silent, its system message among it.
    pub fn over(&self, args: &AnswerArgs) -> AnswerArgs {
        let (args, own) = (args.clone(), &self.sampling);
        let Wishes { temperature, top_p, top_k, min_p, repetition_penalty, seed } =
            args.wishes().or(&own.wishes);
        AnswerArgs {
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty,
            seed,
            max_tokens: args.max_tokens.or(own.max_tokens),
            system: args.system.or_else(|| self.system().map(str::to_owned)),
            ..args
        }
    }

    /// What the chat template is given besides the messages.
    pub fn variables(&self) -> Map<String, Value> {
        let tools = self.tools.iter().map(|tools| ("tools".to_owned(), tools.clone()));
        self.template_args.clone().into_iter().chain(tools).collect()
    }

    /// The system message, if it begins with one.
    fn system(&self) -> Option<&str> {
        self.messages.first().filter(|m| m.role == "system").map(|m| m.content.as_str())
    }

    /// What the user said, in order. [`Code::ConversationInvalid`] where answering these again would not be
    /// the same conversation.
    pub fn turns(&self) -> Result<Vec<String>> {
        let rest = &self.messages[usize::from(self.system().is_some())..];
        if let Some(other) = rest.iter().find(|m| !matches!(&*m.role, "user" | "assistant")) {
            return Err(invalid(
                "not a conversation of turns",
                format!("a message of the role {}", other.role),
            )
            .need("a system message, then user and assistant messages"));
        }
        let turns: Vec<_> = rest.iter().filter(|m| m.role == "user").map(|m| m.content.clone()).collect();
        if turns.is_empty() { Err(nobody_asks()) } else { Ok(turns) }
    }

    /// Everything said, with `system` in the place of its system message.
    pub fn messages_under(&self, system: Option<&str>) -> Vec<Message> {
        let said = &self.messages[usize::from(self.system().is_some())..];
        system.map(|s| Message::new("system", s)).into_iter().chain(said.iter().cloned()).collect()
    }

    /// The same up to the last message that wants an answer.
    pub fn question(&self, system: Option<&str>) -> Result<Vec<Message>> {
        let mut messages = self.messages_under(system);
        let last = messages.iter().rposition(|m| matches!(&*m.role, "user" | "tool"));
        messages.truncate(last.ok_or_else(nobody_asks)? + 1);
        Ok(messages)
    }

    /// A line about a model that is not the one of the file.
    pub fn tell_of_other_model(&self, name: &str, report: &Report) {
        if let Some(other) = self.model.as_deref().filter(|m| *m != name) {
            report.warn(&format!("the conversation was held with {other}; {name} goes on with it"));
        }
    }
}

/// What is played in a conversation: the user messages of a conversation file, or one a line of a text.
pub struct Turns {
    /// What the user says.
    pub messages: Vec<String>,
    /// The conversation file they are from.
    pub saved: Option<Saved>,
}

impl Turns {
    /// Reads `path`; `-` is standard input.
    pub fn read(path: &Path, report: &Report) -> Result<Self> {
        let (name, text) = input::file(path)?;
        if !is_conversation(&text) {
            let messages = input::turns(&name, &text)?;
            if messages.iter().all(|line| matches!(template::json(line), Ok(Value::Object(_)))) {
                report.insist(&format!(
                    "{name}: every line is a JSON object, and the model gets it as a text; a conversation is one list \
                     of messages"
                ));
            }
            return Ok(Self { messages, saved: None });
        }
        let saved = Saved::parse(&text, report).map_err(|e| e.within(&name))?;
        let messages = saved.turns().map_err(|e| e.within(&name))?;
        Ok(Self { messages, saved: Some(saved) })
    }
}

/// A path as it is typed at a prompt, where no shell knows what `~/` is.
pub fn typed_path(text: &str) -> PathBuf {
    match (text.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(text),
    }
}

/// Whether a text is JSON that can only be meant as a conversation, of this form or another.
fn is_conversation(text: &str) -> bool {
    match template::json(text) {
        Ok(Value::Object(fields)) => {
            let schema = fields.get("schema").and_then(Value::as_str);
            fields.contains_key("messages") || schema.is_some_and(|s| s.starts_with("q4.conversation/"))
        }
        Ok(Value::Array(list)) => list.first().is_some_and(|m| m.get("role").is_some()),
        _ => false,
    }
}

/// A file beside `path` was refused; its name, which nobody asked for, stays out of the text.
fn uncreated(path: &Path, dir: &Path, e: &io::Error) -> Error {
    let text = e.to_string();
    // tempfile puts it behind the system's words.
    let system = text.split(" at path ").next().unwrap_or_default();
    let error = Error::new(Code::Io, format!("{}: {system}", path.display()));
    if e.kind() == io::ErrorKind::NotFound { error.fix(format!("mkdir -p {}", dir.display())) } else { error }
}

fn nobody_asks() -> Error {
    invalid("nobody asks anything", "no user message".into()).need("at least one user message")
}

fn invalid(what: &str, have: String) -> Error {
    Error::new(Code::ConversationInvalid, what)
        .need(r#"{"messages": [{"role": "user", "content": "..."}, ...]}, or such a list alone"#)
        .have(have)
        .fix("/save FILE in q4 chat writes one; docs/chat.md describes it")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let cli = crate::args::parse(["q4", "-q", "chat"].map(Into::into).to_vec()).expect("parses");
        Report::new(&cli.global)
    }

    fn parse(value: &Value) -> Result<Saved> {
        Saved::parse(&value.to_string(), &report())
    }

    #[test]
    fn what_is_written_is_read() -> Result<()> {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("talk.json");
        let params =
            SamplingParams { temperature: 0.7, top_p: 0.8, seed: u64::MAX, ..SamplingParams::default() };
        let mut messages = vec![Message::new("user", "談談\n\"UFO\""), Message::new("assistant", "a")];
        messages[1].extra.insert("finish_reason".into(), "interrupted".into());
        let args = json!({"enable_thinking": false, "tools": [{"type": "function"}]});
        let args = args.as_object().expect("an object");
        let saved = Saved::new("demo", &messages, Sampling::of(&params, Some(9)), args.clone());
        saved.write(&path, false)?;
        let again = Saved::read(&path, &report())?;
        assert_eq!((&again.messages, &again.sampling), (&messages, &saved.sampling));
        assert_eq!((again.model.as_deref(), &again.variables()), (Some("demo"), args));
        assert_eq!(saved.write(&path, false).expect_err("exists").code(), Code::Usage);
        saved.write(&path, true)?;
        assert_eq!(std::fs::read_dir(dir.path()).expect("listing").count(), 1, "nothing is left behind");
        let e = saved.write(&dir.path().join("absent/talk.json"), false).expect_err("no folder").to_string();
        assert!(e.contains("mkdir -p") && !e.contains(" at path "), "{e}");
        Ok(())
    }

    #[test]
    fn files_that_are_none_are_refused() {
        let user = json!({"role": "user", "content": "x"});
        for bad in [
            json!(7),
            json!([7]),
            json!({"messages": 7}),
            json!({"messages": [user], "tools": {"name": "f"}}),
            json!({"schema": "q4.conversation/2", "messages": [user]}),
            json!({"schema": SCHEMA}),
            json!({"schema": 1, "messages": [user]}),
            json!({"schema": SCHEMA, "messages": [{"content": "x"}]}),
            json!({"schema": SCHEMA, "messages": [{"role": "User", "content": "x"}]}),
            json!({"schema": SCHEMA, "messages": [{"role": "user", "content": 7}]}),
            json!({"schema": SCHEMA, "messages": [user], "sampling": {"temperature": "warm"}}),
        ] {
            let e = parse(&bad).expect_err("refused");
            assert_eq!(e.code(), Code::ConversationInvalid, "{bad}");
            assert!(e.parts().any(|(part, _)| part == "have"), "{e}");
        }
        assert!(Saved::parse("{", &report()).is_err());
        for good in
            [json!([user]), json!({"messages": [user]}), json!({"schema": SCHEMA, "messages": [user]})]
        {
            let saved = parse(&good).unwrap_or_else(|e| panic!("{good}: {e}"));
            assert_eq!(saved.messages, [Message::new("user", "x")]);
        }
    }

    #[test]
    fn a_question_ends_with_who_asks() -> Result<()> {
        let said = |roles: &[&str]| {
            let messages: Vec<_> = roles.iter().map(|r| json!({"role": r, "content": r})).collect();
            parse(&json!({"schema": SCHEMA, "messages": messages}))
        };
        assert_eq!(said(&["system", "user", "assistant", "user"])?.question(Some("other"))?.len(), 4);
        assert_eq!(said(&["user", "assistant"])?.question(None)?.len(), 1, "the answer is given anew");
        assert_eq!(said(&["system", "user", "assistant", "user"])?.turns()?, ["user", "user"]);
        for none in [&["system"][..], &["assistant"], &[]] {
            assert!(said(none)?.question(None).is_err() && said(none)?.turns().is_err());
        }
        assert!(said(&["user", "assistant", "tool"])?.turns().is_err());
        Ok(())
    }

    #[test]
    fn a_text_of_turns_is_none_by_chance() {
        for text in ["{\"a\": 1}\nWho are you?\n", "{\"schema\": \"other\"}", "[\"role\"]", "[]", "7"] {
            assert!(!is_conversation(text), "{text}");
        }
        for text in [r#"{"schema": "q4.conversation/7"}"#, r#"{"messages": 7}"#, r#"[{"role": "user"}]"#] {
            assert!(is_conversation(text), "{text}");
        }
    }
}
