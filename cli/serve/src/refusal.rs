//! Why a request is not answered, in words that every dialect can render.
use q4_core::{Code, Error};
use serde_json::Value;

/// What kind of refusal it is; decides the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request contradicts itself, or asks for what does not exist.
    Invalid,
    /// No key, or none that counts.
    Key,
    /// A page of another site asks.
    Origin,
    /// Nothing is there.
    Missing,
    /// Something is there, but not for this method.
    Method,
    /// The body took too long.
    Slow,
    /// The body is too long.
    TooLarge,
    /// The queue is full.
    Busy,
    /// Not ready yet, or not any longer.
    Unready,
    /// The engine failed.
    Fault,
}

impl Kind {
    /// Status of HTTP.
    pub fn status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::Key => 401,
            Self::Origin => 403,
            Self::Missing => 404,
            Self::Method => 405,
            Self::Slow => 408,
            Self::TooLarge => 413,
            Self::Busy => 429,
            Self::Fault => 500,
            Self::Unready => 503,
        }
    }
}

/// A refusal. It is also what a stream that fails ends with.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// Decides the status and the types of the dialects.
    pub kind: Kind,
    /// What happened, what was needed and found, in one line.
    pub message: String,
    /// Path of the field that is to blame, such as `messages[2].content`.
    pub param: Option<String>,
    /// A word for programs.
    pub code: Option<String>,
    /// Seconds after which to try again.
    pub retry_after: Option<u64>,
}

impl Refusal {
    /// A refusal with nothing but a message.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, code: None, retry_after: None }
    }
    /// A field that cannot be what it is.
    pub fn field(path: &str, need: &str, have: impl std::fmt::Display) -> Self {
        let message = format!("{path}: need {need}, have {have}");
        Self { param: Some(path.to_owned()), ..Self::new(Kind::Invalid, message) }
    }
    /// A field that asks for what does not exist here.
    pub fn unsupported(path: &str, what: impl Into<String>) -> Self {
        let refusal = Self { param: Some(path.to_owned()), ..Self::new(Kind::Invalid, what) };
        refusal.coded("unsupported")
    }
    /// With a word for programs.
    pub fn coded(mut self, code: &str) -> Self {
        self.code = Some(code.to_owned());
        self
    }
    /// With a time to try again, in seconds.
    pub fn again_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }
    /// What is said while answers in flight are all that is still served.
    pub fn draining() -> Self {
        Self::new(Kind::Unready, "the server is shutting down").coded("shutting_down").again_after(5)
    }
}

/// Whether whoever asked can do something about it.
fn is_askers(code: Code) -> bool {
    matches!(code, Code::Usage | Code::ContextFull | Code::TemplateInvalid | Code::Unsupported)
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let kind = if is_askers(error.code()) { Kind::Invalid } else { Kind::Fault };
        let mut message = format!("{}: {}", error.code().id(), error.what());
        for (name, text) in error.parts().filter(|(name, _)| *name != "what") {
            message.push_str(&format!("; {name}: {}", text.replace('\n', " ")));
        }
        // The word that clients look for before they shorten a conversation.
        let full = error.code() == Code::ContextFull;
        let code = if full { "context_length_exceeded" } else { error.code().id() };
        Self::new(kind, message).coded(code)
    }
}

/// A value as a message shows it: its kind, and itself where it is short.
pub fn shown(value: &Value) -> String {
    let kind = match value {
        Value::Null => return "null".to_owned(),
        Value::Object(_) => return "an object".to_owned(),
        Value::Array(items) => return format!("a list of {}", items.len()),
        Value::Bool(_) => "",
        Value::Number(_) => "the number ",
        Value::String(_) => "the text ",
    };
    let text = value.to_string();
    let short: String = text.chars().take(60).collect();
    let more = if short.len() < text.len() { "..." } else { "" };
    format!("{kind}{short}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_error_keeps_its_parts_and_its_code() {
        let error = Error::new(Code::NonFinite, "logits").need("numbers").have("NaN").fix("q4 verify");
        let refusal = Refusal::from(error);
        assert_eq!(refusal.kind.status(), 500);
        assert_eq!(refusal.message, "Q4-E0211: logits; need: numbers; have: NaN; fix: q4 verify");
        assert_eq!(refusal.code.as_deref(), Some("Q4-E0211"));
    }

    #[test]
    fn a_full_context_has_the_word_that_clients_know() {
        let refusal = Refusal::from(Error::new(Code::ContextFull, "the prompt"));
        assert_eq!(refusal.kind, Kind::Invalid);
        assert_eq!(refusal.code.as_deref(), Some("context_length_exceeded"));
    }

    #[test]
    fn long_values_are_cut_at_characters() {
        let long = json!("é".repeat(500));
        assert!(shown(&long).chars().count() < 80);
        assert_eq!(shown(&json!(7)), "the number 7");
        assert_eq!(shown(&json!([1, 2])), "a list of 2");
    }
}
