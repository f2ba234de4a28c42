//! The typed events of a response, in their order.
use super::told::Told;
use super::{Envelope, call, message, status, text_part, thought, thought_part};
use crate::answer::{End, Happened, Part};
use crate::refusal::Refusal;
use crate::stream::{Frame, Render};
use crate::words::name;
use serde_json::{Value, json};
use std::collections::VecDeque;

/// The item that grows.
enum Open {
    Text { id: String, text: String, logprobs: Vec<Value> },
    Thought { id: String, text: String },
    Call { id: String, call: String, tool: String, arguments: String },
}

/// Writes one answer.
pub struct Events {
    envelope: Envelope,
    sequence: usize,
    open: Option<Open>,
    /// Items that are complete.
    output: Vec<Value>,
    end: Option<End>,
    /// Where tokens are told with their texts.
    told: Option<Told>,
}

impl Events {
    /// Before anything has happened.
    pub fn new(envelope: Envelope, told: Option<Told>) -> Self {
        Self { envelope, sequence: 0, open: None, output: Vec::new(), end: None, told }
    }

    /// The response once the answer is over, as who does not read events gets it: with no call that is not
    /// complete, for nobody should run one.
    pub fn whole(mut self) -> Value {
        self.output.retain(|item| item["type"] != "function_call" || item["status"] == "completed");
        let status = self.end.as_ref().map_or("failed", status);
        self.envelope.document(status, self.output, self.end.as_ref(), None)
    }

    fn send(&mut self, kind: &'static str, mut fields: Value, out: &mut VecDeque<Frame>) {
        let mut data = json!({"type": kind, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Value::Object(data), Value::Object(fields)) = (&mut data, &mut fields) {
            data.append(fields);
        }
        out.push_back(Frame::named(kind, &data));
    }

    fn state(&mut self, kind: &'static str, error: Option<&Refusal>, out: &mut VecDeque<Frame>) {
        let status = kind.trim_start_matches("response.");
        let status = if status == "created" { "in_progress" } else { status };
        let document = self.envelope.document(status, self.output.clone(), self.end.as_ref(), error);
        self.send(kind, json!({"response": document}), out);
    }

    fn part(&mut self, part: Part, out: &mut VecDeque<Frame>) {
        if let (Some(told), false) = (&mut self.told, matches!(part, Part::Text(_))) {
            told.other();
        }
        let at = |id: &str, index: usize| json!({"item_id": id, "output_index": index, "content_index": 0});
        match part {
            Part::Text(delta) => {
                let is_begun = matches!(self.open, Some(Open::Text { .. }));
                if !is_begun {
                    self.leave(out);
                    let open = Open::Text { id: name("msg_"), text: String::new(), logprobs: Vec::new() };
                    self.begin(open, out);
                }
                let more = self.told.as_mut().map(|told| told.text(&delta, is_begun)).unwrap_or_default();
                if let Some(Open::Text { id, text, logprobs }) = &mut self.open {
                    text.push_str(&delta);
                    let mut fields = at(id, self.output.len());
                    fields["delta"] = delta.into();
                    fields["logprobs"] = more.as_slice().into();
                    logprobs.extend(more);
                    self.send("response.output_text.delta", fields, out);
                }
            }
            Part::Thought(delta) => {
                if !matches!(self.open, Some(Open::Thought { .. })) {
                    self.leave(out);
                    self.begin(Open::Thought { id: name("rs_"), text: String::new() }, out);
                }
                if let Some(Open::Thought { id, text }) = &mut self.open {
                    text.push_str(&delta);
                    let mut fields = at(id, self.output.len());
                    fields["delta"] = delta.into();
                    self.send("response.reasoning_text.delta", fields, out);
                }
            }
            Part::Call { id, name: tool, .. } => {
                self.leave(out);
                let open = Open::Call { id: name("fc_"), call: id, tool, arguments: String::new() };
                self.begin(open, out);
            }
            Part::Arguments { delta, .. } => {
                if let Some(Open::Call { id, arguments, .. }) = &mut self.open {
                    arguments.push_str(&delta);
                    let fields = json!({"item_id": id, "output_index": self.output.len(), "delta": delta});
                    self.send("response.function_call_arguments.delta", fields, out);
                }
            }
            Part::Called { .. } => self.close("completed", out),
        }
    }

    fn begin(&mut self, open: Open, out: &mut VecDeque<Frame>) {
        let index = self.output.len();
        let (item, part) = match &open {
            Open::Text { id, .. } => (message(id, "in_progress", None), Some((id, text_part("", &[])))),
            Open::Thought { id, .. } => (thought(id, "in_progress", None), Some((id, thought_part("")))),
            Open::Call { id, call: name, tool, .. } => (call(id, name, tool, "", "in_progress"), None),
        };
        self.send("response.output_item.added", json!({"output_index": index, "item": item}), out);
        if let Some((id, part)) = part {
            let fields = json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
            self.send("response.content_part.added", fields, out);
        }
        self.open = Some(open);
    }

    /// Closes an item because another one comes: a call that is still open then is damaged.
    fn leave(&mut self, out: &mut VecDeque<Frame>) {
        let is_call = matches!(self.open, Some(Open::Call { .. }));
        self.close(if is_call { "incomplete" } else { "completed" }, out);
    }

    fn close(&mut self, status: &str, out: &mut VecDeque<Frame>) {
        let Some(open) = self.open.take() else { return };
        let index = self.output.len();
        let mut close_part = |kind, id: &str, text: &str, part: &Value| {
            let at = json!({"item_id": id, "output_index": index, "content_index": 0});
            let (mut whole, mut done) = (at.clone(), at);
            whole["text"] = text.into();
            if let Some(logprobs) = part.get("logprobs") {
                whole["logprobs"] = logprobs.clone();
            }
            self.send(kind, whole, out);
            done["part"] = part.clone();
            self.send("response.content_part.done", done, out);
        };
        let item = match &open {
            Open::Text { id, text, logprobs } => {
                let part = text_part(text, logprobs);
                close_part("response.output_text.done", id, text, &part);
                message(id, status, Some(part))
            }
            Open::Thought { id, text } => {
                close_part("response.reasoning_text.done", id, text, &thought_part(text));
                thought(id, status, Some(text))
            }
            Open::Call { id, call: name, tool, arguments } => {
                let fields = json!({
                    "item_id": id, "output_index": index, "name": tool, "arguments": arguments,
                });
                self.send("response.function_call_arguments.done", fields, out);
                call(id, name, tool, arguments, status)
            }
        };
        self.send("response.output_item.done", json!({"output_index": index, "item": item}), out);
        self.output.push(item);
    }
}

impl Render for Events {
    fn begin(&mut self, out: &mut VecDeque<Frame>) {
        self.state("response.created", None, out);
        self.state("response.in_progress", None, out);
    }

    fn happened(&mut self, _: usize, what: Happened, out: &mut VecDeque<Frame>) {
        match what {
            Happened::Started { .. } => {}
            Happened::Step { parts, token } => {
                if let Some(told) = &mut self.told {
                    told.add(token);
                }
                parts.into_iter().for_each(|part| self.part(part, out));
            }
            Happened::Ended { parts, end } => {
                parts.into_iter().for_each(|part| self.part(part, out));
                match status(&end) {
                    "completed" => self.leave(out),
                    cut => self.close(cut, out),
                }
                self.end = Some(end);
            }
        }
    }

    fn end(&mut self, out: &mut VecDeque<Frame>) {
        let is_cut = self.end.as_ref().is_some_and(|end| status(end) == "incomplete");
        self.state(if is_cut { "response.incomplete" } else { "response.completed" }, None, out);
    }

    fn failed(&mut self, refusal: &Refusal, out: &mut VecDeque<Frame>) {
        self.close("incomplete", out);
        self.state("response.failed", Some(refusal), out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::calls;
    use q4_model::sampling::SamplingParams;

    fn events() -> Events {
        Events::new(Envelope::new("demo", &json!({}), &SamplingParams::default()).expect("an object"), None)
    }

    #[test]
    fn every_item_is_added_grows_and_is_done() {
        insta::assert_snapshot!(calls::rendered(events()));
    }

    #[test]
    fn a_call_that_is_not_complete_is_in_no_whole_answer() {
        let mut events = events();
        let mut happenings = calls::happenings();
        // The second call comes before the first is complete.
        happenings.remove(6);
        happenings.into_iter().for_each(|what| events.happened(0, what, &mut VecDeque::new()));
        let whole = events.whole();
        let kinds: Vec<_> =
            whole["output"].as_array().expect("items").iter().map(|item| &item["type"]).collect();
        assert_eq!(kinds, ["reasoning", "message", "function_call"]);
        assert_eq!((&whole["output"][2]["arguments"], &whole["status"]), (&json!("{}"), &json!("completed")));
    }
}
