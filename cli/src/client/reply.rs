//! An answer, put together from what its events tell.
use super::Address;
use q4_core::{Code, Error, Result};
use serde_json::{Value, json};

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// What the model thinks before it answers.
    Thought(String),
    /// What the user is told.
    Text(String),
}

/// Tokens, as the server counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt, the template's among them.
    pub prompt: usize,
    /// Of the prompt, those that the server had computed before.
    pub cached: usize,
    /// Of the answer.
    pub answer: usize,
}

/// All that is known of an answer.
#[derive(Debug, Default)]
pub struct Reply {
    /// What the user is told.
    pub text: String,
    /// What the model thought.
    pub thoughts: String,
    /// Calls of tools: id, name and arguments.
    calls: Vec<[String; 3]>,
    /// Why it ended, once it did.
    pub finish: Option<String>,
    /// Once the server counts.
    pub usage: Option<Usage>,
}

impl Reply {
    /// Takes the document of an event, and says what is new.
    pub fn take(&mut self, event: &Value) -> Vec<Piece> {
        if let Some(usage) = event.get("usage").filter(|usage| usage.is_object()) {
            let count = |path: &str| usage.pointer(path).and_then(Value::as_u64).unwrap_or(0) as usize;
            self.usage = Some(Usage {
                prompt: count("/prompt_tokens"),
                cached: count("/prompt_tokens_details/cached_tokens"),
                answer: count("/completion_tokens"),
            });
        }
        let choice = &event["choices"][0];
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish = Some(reason.to_owned());
        }
        let delta = &choice["delta"];
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            self.call(call);
        }
        let text = |names: &[&str]| names.iter().find_map(|n| delta[*n].as_str()).filter(|t| !t.is_empty());
        let mut pieces = Vec::new();
        if let Some(thought) = text(&["reasoning_content", "reasoning"]) {
            self.thoughts.push_str(thought);
            pieces.push(Piece::Thought(thought.to_owned()));
        }
        if let Some(said) = text(&["content"]) {
            self.text.push_str(said);
            pieces.push(Piece::Text(said.to_owned()));
        }
        pieces
    }

    fn call(&mut self, call: &Value) {
        // A call at a place far away would be memory for nothing.
        let at = call["index"].as_u64().map_or(self.calls.len(), |i| i as usize).min(self.calls.len());
        if at == self.calls.len() {
            self.calls.push(Default::default());
        }
        for (place, path) in ["/id", "/function/name", "/function/arguments"].iter().enumerate() {
            if let Some(more) = call.pointer(path).and_then(Value::as_str) {
                self.calls[at][place].push_str(more);
            }
        }
    }

    /// Whether there is anything of an answer.
    pub fn is_begun(&self) -> bool {
        !self.text.is_empty() || !self.thoughts.is_empty() || !self.calls.is_empty()
    }

    /// The calls in OpenAI's form, if there are any.
    pub fn calls(&self) -> Option<Value> {
        let call = |[id, name, arguments]: &[String; 3]| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        (!self.calls.is_empty()).then(|| self.calls.iter().map(call).collect())
    }

    /// The calls as a model writes them.
    pub fn calls_as_text(&self) -> String {
        let call = |[_, name, arguments]: &[String; 3]| {
            format!("<tool_call>\n{{\"name\": {}, \"arguments\": {arguments}}}\n</tool_call>", json!(name))
        };
        self.calls.iter().map(call).collect::<Vec<_>>().join("\n")
    }

    /// Fails where the server stopped talking and did not say that the answer is over.
    ///
    /// # Errors
    /// [`Code::ServerFailed`].
    pub fn require_end(&self, at: &Address) -> Result<()> {
        match self.finish {
            Some(_) => Ok(()),
            None => Err(Error::new(Code::ServerFailed, format!("{at}: the answer ended in the middle"))
                .need("a finish_reason in its last event")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(delta: &Value) -> Value {
        json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}], "usage": null})
    }

    #[test]
    fn thoughts_and_text_come_apart_and_are_counted() {
        let at = Address::parse("http://x").expect("an address");
        let mut reply = Reply::default();
        let events = [
            delta(&json!({"role": "assistant", "content": ""})),
            delta(&json!({"reasoning": "h", "reasoning_content": "h"})),
            delta(&json!({"reasoning": "m"})),
            delta(&json!({"content": "Yes"})),
            json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
            json!({"choices": [], "usage": {"prompt_tokens": 13, "completion_tokens": 4,
                   "prompt_tokens_details": {"cached_tokens": 6}}}),
            json!({"choices": [], "usage": null}),
            json!([7]),
        ];
        let pieces: Vec<_> = events.iter().flat_map(|event| reply.take(event)).collect();
        let thought = |t: &str| Piece::Thought(t.to_owned());
        assert_eq!(pieces, [thought("h"), thought("m"), Piece::Text("Yes".to_owned())]);
        assert_eq!((&*reply.thoughts, &*reply.text), ("hm", "Yes"));
        assert_eq!(reply.usage, Some(Usage { prompt: 13, cached: 6, answer: 4 }));
        assert!(reply.is_begun() && reply.require_end(&at).is_ok());
        assert!(Reply::default().require_end(&at).is_err());
    }

    #[test]
    fn calls_grow_by_deltas() {
        let mut reply = Reply::default();
        for calls in [
            json!([{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]),
            json!([{"index": 0, "function": {"arguments": "{\"x\":"}}]),
            json!([{"index": 0, "function": {"arguments": "1}"}}, {"index": 99, "function": {"name": "g"}}]),
        ] {
            reply.take(&delta(&json!({"tool_calls": calls})));
        }
        let calls = reply.calls().expect("calls");
        assert_eq!(calls[0]["function"], json!({"name": "f", "arguments": "{\"x\":1}"}));
        assert_eq!((calls.as_array().map(Vec::len), &calls[1]["function"]["name"]), (Some(2), &"g".into()));
        assert!(
            reply.calls_as_text().starts_with("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\":1}}")
        );
    }
}
