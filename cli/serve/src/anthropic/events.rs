//! The events of a message, block by block.
use super::{message, stop, usage};
use crate::answer::{End, Happened, Part, Usage};
use crate::dialect::Dialect;
use crate::refusal::Refusal;
use crate::stream::{Frame, Render};
use crate::words::name;
use serde_json::{Value, json};
use std::collections::VecDeque;

/// Kinds of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Thought,
    Call,
}

/// Writes one message.
pub struct Events {
    model: String,
    prompt: usize,
    open: Option<Kind>,
    /// Blocks that are closed.
    closed: usize,
    end: Option<End>,
}

impl Events {
    /// Before anything has happened; the prompt has so many tokens.
    pub fn new(model: String, prompt: usize) -> Self {
        Self { model, prompt, open: None, closed: 0, end: None }
    }

    fn begin_block(&mut self, kind: Kind, block: Value, out: &mut VecDeque<Frame>) {
        self.close(out);
        let data = json!({"type": "content_block_start", "index": self.closed, "content_block": block});
        out.push_back(Frame::named("content_block_start", &data));
        self.open = Some(kind);
    }

    fn delta(&self, delta: Value, out: &mut VecDeque<Frame>) {
        let data = json!({"type": "content_block_delta", "index": self.closed, "delta": delta});
        out.push_back(Frame::named("content_block_delta", &data));
    }

    fn close(&mut self, out: &mut VecDeque<Frame>) {
        match self.open.take() {
            None => return,
            // Clients that send a thought back want it signed; nobody here looks at that.
            Some(Kind::Thought) => self.delta(json!({"type": "signature_delta", "signature": ""}), out),
            Some(_) => {}
        }
        let data = json!({"type": "content_block_stop", "index": self.closed});
        out.push_back(Frame::named("content_block_stop", &data));
        self.closed += 1;
    }

    fn part(&mut self, part: Part, out: &mut VecDeque<Frame>) {
        match part {
            Part::Text(text) => {
                if self.open != Some(Kind::Text) {
                    self.begin_block(Kind::Text, json!({"type": "text", "text": ""}), out);
                }
                self.delta(json!({"type": "text_delta", "text": text}), out);
            }
            Part::Thought(text) => {
                if self.open != Some(Kind::Thought) {
                    let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                    self.begin_block(Kind::Thought, block, out);
                }
                self.delta(json!({"type": "thinking_delta", "thinking": text}), out);
            }
            Part::Call { id, name, .. } => {
                let id = format!("toolu_{id}");
                let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                self.begin_block(Kind::Call, block, out);
            }
            Part::Arguments { delta, .. } => {
                self.delta(json!({"type": "input_json_delta", "partial_json": delta}), out);
            }
            Part::Called { .. } => self.close(out),
        }
    }
}

impl Render for Events {
    fn begin(&mut self, out: &mut VecDeque<Frame>) {
        let so_far = Usage { prompt: self.prompt, ..Usage::default() };
        let begun = message(&name("msg_"), &self.model, so_far);
        out.push_back(Frame::named("message_start", &json!({"type": "message_start", "message": begun})));
        out.push_back(Frame::named("ping", &json!({"type": "ping"})));
    }

    fn happened(&mut self, _: usize, what: Happened, out: &mut VecDeque<Frame>) {
        match what {
            Happened::Started { .. } => {}
            Happened::Step { parts, .. } => parts.into_iter().for_each(|part| self.part(part, out)),
            Happened::Ended { parts, end } => {
                parts.into_iter().for_each(|part| self.part(part, out));
                self.close(out);
                self.end = Some(end);
            }
        }
    }

    fn end(&mut self, out: &mut VecDeque<Frame>) {
        if let Some(end) = &self.end {
            let (reason, sequence) = stop(end);
            let data = json!({
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": usage(end.usage),
            });
            out.push_back(Frame::named("message_delta", &data));
        }
        out.push_back(Frame::named("message_stop", &json!({"type": "message_stop"})));
    }

    fn failed(&mut self, refusal: &Refusal, out: &mut VecDeque<Frame>) {
        out.push_back(Frame::named("error", &Dialect::Anthropic.document(refusal)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::calls;

    #[test]
    fn blocks_open_grow_and_close() {
        insta::assert_snapshot!(calls::rendered(Events::new("demo".to_owned(), 9)));
    }

    #[test]
    fn the_input_of_a_call_is_an_object() {
        let blocks: Vec<Value> = calls::whole().blocks.iter().map(super::super::block).collect();
        insta::assert_snapshot!(serde_json::to_string_pretty(&blocks).expect("JSON"));
    }
}
