//! Says what the pieces of a model's answer are while they come: reasoning, text, calls of tools.
//!
//! Reasoning is what stands in `<think>` at the beginning, calls and all. Calls come in Qwen's two forms,
//! JSON and tags, both between `<tool_call>` and `</tool_call>`. The text is read once, a character at a
//! time: what comes out does not depend on how it was cut, and nothing told is ever taken back.
//!
//! White space is dropped before a call where nothing but calls or reasoning came before it, and at the end
//! behind a call.
//!
//! A call that is damaged before its name was told is [`Part::Text`] as the model wrote it. One that was
//! begun has no [`Part::CallEnd`]: from the damage on the answer is text. A begun call that the end of the
//! answer cuts ends in silence, but a value that waited for its own end, and would be lost, becomes text.
mod hermes;
mod json;
mod telling;
#[cfg(test)]
mod tests;
mod xml;

use hermes::Hermes;
use serde_json::Value;
use telling::{Tag, Telling};
use xml::Xml;
pub(crate) use xml::types;

/// What is known of an answer before it begins.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The prompt ended inside an open `<think>`.
    pub thinking: bool,
    /// Tools were offered: calls are looked for. Without, they are text.
    pub tools: bool,
    /// The `tools` list in OpenAI's form: which parameters are strings, where a call does not show it.
    pub schemas: Option<Value>,
}

/// A piece of an answer. Neighbours of one kind belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// What the user is told.
    Text(String),
    /// What the model thought before, without the tags and the newlines that set them off.
    Reasoning(String),
    /// A call begins.
    CallStart {
        /// Counts the calls of the answer from 0.
        index: usize,
        /// The function, never empty; whether it was offered is not looked at.
        name: String,
    },
    /// More of a call's arguments. Before a [`Part::CallEnd`] they make up one JSON object.
    CallArguments {
        /// Which call.
        index: usize,
        /// JSON text, to be put after what came before.
        delta: String,
    },
    /// A call is complete. One that is damaged or cut after its start has none.
    CallEnd {
        /// Which call.
        index: usize,
    },
}

/// Reads one answer.
#[derive(Clone, Debug)]
pub struct ReplyParser {
    options: Options,
    state: State,
    telling: Telling,
    #[cfg(test)]
    steps: usize,
}

#[derive(Clone, Debug)]
enum State {
    /// Nothing but white space yet: `<think>` may come.
    Start,
    /// Behind `<think>`, whose newlines are dropped.
    Opened,
    Reasoning,
    /// Behind `</think>`, whose newlines are dropped.
    Closed,
    /// Only white space since the beginning or the last call; before a call it is dropped.
    Gap,
    Text,
    Call(Call),
}

#[derive(Clone, Debug)]
enum Call {
    /// Behind `<tool_call>`.
    Open,
    Hermes(Hermes),
    Xml(Xml),
    /// Before `</tool_call>`.
    Close,
}

/// What a character was to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    More,
    Complete,
    Damage,
}

impl ReplyParser {
    /// Waits for the beginning of an answer.
    pub fn new(options: Options) -> Self {
        let telling = Telling::default();
        Self {
            options,
            state: State::Start,
            telling,
            #[cfg(test)]
            steps: 0,
        }
    }

    /// Takes the next piece. Text that may still become a tag is held back.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        text.chars().for_each(|c| self.take(c));
        self.telling.parts()
    }

    /// The end of the answer: what was held back is told as what it is without more.
    pub fn finish(&mut self) -> Vec<Part> {
        if self.options.thinking && matches!(self.state, State::Start) {
            self.again(State::Opened);
        }
        let telling = &mut self.telling;
        match std::mem::replace(&mut self.state, State::Text) {
            State::Opened | State::Reasoning => telling.reasoning(),
            State::Call(Call::Hermes(hermes)) if hermes.in_value() => telling.text(),
            State::Call(Call::Xml(xml)) if xml.in_value() => telling.text(),
            State::Call(_) if telling.begun() => telling.drop_held(),
            State::Gap if telling.after_call() && !telling.in_tag() => telling.drop_held(),
            _ => telling.text(),
        }
        telling.parts()
    }

    fn take(&mut self, c: char) {
        #[cfg(test)]
        {
            self.steps += 1;
        }
        let telling = &mut self.telling;
        telling.hold(c);
        match &mut self.state {
            State::Start => match telling.tag(&["<think>"]) {
                Tag::Whole { .. } => self.pass(State::Opened),
                Tag::Begun => {}
                Tag::None if c.is_whitespace() => {}
                Tag::None | Tag::Broken if self.options.thinking => self.again(State::Opened),
                Tag::None | Tag::Broken => self.again(self.body()),
            },
            State::Opened | State::Closed if c == '\n' => telling.drop_held(),
            State::Opened => self.again(State::Reasoning),
            State::Closed => self.again(self.body()),
            State::Reasoning => match telling.tag(&["</think>"]) {
                Tag::Whole { .. } => self.pass(State::Closed),
                Tag::Begun => {}
                // Newlines are dropped before the end.
                Tag::None if c == '\n' => {}
                Tag::None => telling.reasoning(),
                Tag::Broken => {
                    telling.unhold(c);
                    telling.reasoning();
                    self.take(c);
                }
            },
            State::Gap | State::Text => self.take_text(c),
            State::Call(_) => self.take_call(c),
        }
    }

    fn take_text(&mut self, c: char) {
        let telling = &mut self.telling;
        match telling.tag(if self.options.tools { &["<tool_call>"] } else { &[] }) {
            // Held with the white space before: a call without a name is text.
            Tag::Whole { .. } => self.state = State::Call(Call::Open),
            Tag::Begun => {}
            Tag::None if c.is_whitespace() && matches!(self.state, State::Gap) => {}
            Tag::None => {
                telling.text();
                self.state = State::Text;
            }
            Tag::Broken => {
                telling.unhold(c);
                telling.text();
                self.state = State::Text;
                self.take(c);
            }
        }
    }

    fn take_call(&mut self, c: char) {
        let (State::Call(call), telling) = (&mut self.state, &mut self.telling) else { return };
        let step = match call {
            Call::Hermes(hermes) => hermes.step(c, telling),
            Call::Xml(xml) => xml.step(c, telling, self.options.schemas.as_ref()),
            Call::Open if c == '{' && !telling.in_tag() => {
                let mut hermes = Hermes::default();
                let step = hermes.step(c, telling);
                *call = Call::Hermes(hermes);
                step
            }
            Call::Open | Call::Close => {
                let open = matches!(call, Call::Open);
                match telling.tag(&[if open { "<function=" } else { "</tool_call>" }]) {
                    Tag::Whole { .. } if open => {
                        *call = Call::Xml(Xml::default());
                        Step::More
                    }
                    Tag::Whole { .. } => {
                        telling.end();
                        self.state = State::Gap;
                        return;
                    }
                    Tag::Begun => Step::More,
                    Tag::None if c.is_whitespace() => Step::More,
                    Tag::None | Tag::Broken => Step::Damage,
                }
            }
        };
        match step {
            Step::More => {}
            Step::Complete => self.pass(State::Call(Call::Close)),
            Step::Damage => {
                let rest = telling.damage(c);
                self.state = State::Text;
                rest.chars().for_each(|c| self.take(c));
            }
        }
    }

    /// Where an answer goes on that does not think, or no longer.
    fn body(&self) -> State {
        if self.options.tools { State::Gap } else { State::Text }
    }

    /// Goes on behind what is held.
    fn pass(&mut self, state: State) {
        self.telling.drop_held();
        self.state = state;
    }

    /// Reads what is held once more, as `state` does. No way through the states comes here more than twice.
    fn again(&mut self, state: State) {
        self.state = state;
        self.telling.take_held().chars().for_each(|c| self.take(c));
    }
}
