//! What is asked, whatever the dialect: every dialect parses into this.
use crate::constraint::Constraint;
use crate::fields::Fields;
use crate::refusal::{Refusal, shown};
use q4_model::batch::Nudges;
use q4_model::template::Message;
use q4_model::wishes::Wishes;
use serde_json::{Map, Value};

/// Stop strings of one request.
pub const MOST_STOPS: usize = 16;
/// Answers to one prompt.
pub const MOST_ANSWERS: usize = 8;
/// Tokens with a bias.
pub const MOST_BIASES: usize = 1024;
/// Likely tokens at one place.
pub const MOST_LIKELY: usize = 20;

/// A conversation as the template takes it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Talk {
    /// The turns.
    pub messages: Vec<Message>,
    /// `[{"type": "function", "function": {...}}]`, never empty.
    pub tools: Option<Value>,
    /// Variables of the template that were asked for.
    pub variables: Map<String, Value>,
}

/// What is to be continued.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// A conversation.
    Talk(Talk),
    /// A text as it is.
    Text(String),
    /// Tokens as they are.
    Ids(Vec<u32>),
}

/// The sampling that the fields all dialects share ask for.
fn wishes(f: &Fields) -> Result<Wishes, Refusal> {
    // -1 keeps all, as 0 does.
    let top_k = f.whole("top_k", -1..=1 << 24)?.map(|k| usize::try_from(k).unwrap_or(0));
    Ok(Wishes {
        temperature: f.number("temperature")?,
        top_p: f.number("top_p")?,
        top_k,
        min_p: f.number("min_p")?,
        repetition_penalty: f.number("repetition_penalty")?,
        seed: f.seed("seed")?,
    })
}

/// What is added to logits.
fn nudges(f: &Fields) -> Result<Nudges, Refusal> {
    Ok(Nudges {
        frequency: penalty(f, "frequency_penalty")?,
        presence: penalty(f, "presence_penalty")?,
        bias: biases(f)?,
    })
}

fn penalty(f: &Fields, name: &str) -> Result<f32, Refusal> {
    match f.number(name)?.unwrap_or(0.0) {
        by if (-2.0..=2.0).contains(&by) => Ok(by),
        _ => Err(f.wrong(name, "a number from -2 to 2")),
    }
}

/// `logit_bias`: token ids, as the keys of an object can only be texts, and what each gets.
fn biases(f: &Fields) -> Result<Vec<(u32, f32)>, Refusal> {
    let Some(fields) = f.object("logit_bias")? else { return Ok(Vec::new()) };
    if fields.map().len() > MOST_BIASES {
        return Err(f.wrong("logit_bias", &format!("at most {MOST_BIASES} tokens")));
    }
    let bias = |name: &String| {
        let id = name.parse().map_err(|_| f.wrong("logit_bias", "token ids as names"))?;
        match fields.number(name)? {
            Some(by) if (-100.0..=100.0).contains(&by) => Ok((id, by)),
            _ => Err(f.wrong("logit_bias", "numbers from -100 to 100")),
        }
    };
    fields.map().keys().map(bias).collect()
}

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    /// What to continue; each on its own.
    pub prompts: Vec<Prompt>,
    /// Answers to each prompt.
    pub n: usize,
    /// Tokens of an answer at most; absent is the model's wish, else what the context holds.
    pub max_tokens: Option<usize>,
    /// How to draw; what is not asked for is the model's.
    pub wishes: Wishes,
    /// What is added to logits.
    pub nudges: Nudges,
    /// Texts that end an answer.
    pub stop: Vec<String>,
    /// Whether the model's own end does not end an answer, as in measurements.
    pub ignore_eos: bool,
    /// Likely tokens to tell at each place; the drawn one is told in any case.
    pub logprobs: Option<usize>,
    /// Whether the prompt is repeated before the answer, weighed if the answer is.
    pub echo: bool,
    /// Whether caches of others may be read and this one's kept.
    pub reuse: bool,
    /// Whether an answer may hold several calls of tools.
    pub parallel_calls: bool,
    /// What the answer must be.
    pub constraint: Option<Constraint>,
}

impl Ask {
    /// One answer to one prompt, everything else as the model wishes.
    pub fn new(prompt: Prompt) -> Self {
        Self {
            prompts: vec![prompt],
            n: 1,
            max_tokens: None,
            wishes: Wishes::default(),
            nudges: Nudges::default(),
            stop: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            echo: false,
            reuse: true,
            parallel_calls: true,
            constraint: None,
        }
    }

    /// The fields that mean the same in every dialect: sampling, reuse, `ignore_eos`.
    pub fn read_shared(&mut self, f: &Fields) -> Result<(), Refusal> {
        self.wishes = wishes(f)?;
        self.nudges = nudges(f)?;
        self.ignore_eos = f.flag("ignore_eos")?.unwrap_or(false);
        self.reuse = f.flag("q4_reuse")?.unwrap_or(true) && f.flag("cache_prompt")?.unwrap_or(true);
        Ok(())
    }
}

/// Text of a field `content`: a text, or a list of parts of the `kinds` that hold a text. Nothing is empty.
///
/// # Errors
/// 400 for pictures and other parts that are no text.
pub fn text_of(f: &Fields, name: &str, kinds: &[&str]) -> Result<String, Refusal> {
    match f.get(name) {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(_)) => {
            let parts = f.objects(name)?.unwrap_or_default();
            let texts = parts.iter().map(|part| part_text(part, kinds)).collect::<Result<Vec<_>, _>>()?;
            Ok(texts.join("\n"))
        }
        Some(_) => Err(f.wrong(name, "a text or a list of parts")),
    }
}

fn part_text(part: &Fields, kinds: &[&str]) -> Result<String, Refusal> {
    let kind = part.needed_text("type")?;
    if kinds.contains(&kind) {
        return Ok(part.needed_text(if kind == "refusal" { "refusal" } else { "text" })?.to_owned());
    }
    Err(no_text(part, kind))
}

/// The refusal of a part that this model cannot read.
pub fn no_text(part: &Fields, kind: &str) -> Refusal {
    let path = part.path("type");
    let kind = shown(&Value::from(kind));
    let what = format!("{path}: this model reads text only, have {kind}; send text parts");
    Refusal::unsupported(&path, what)
}

/// The arguments of a call as a template takes them: an object where the text is one.
pub fn arguments(text: &str) -> Value {
    match q4_model::template::json(text) {
        Ok(object @ Value::Object(_)) => object,
        _ => Value::from(text),
    }
}

/// A tool as templates know it.
pub fn function(name: &str, description: Option<&str>, parameters: Option<&Value>) -> Value {
    let mut function = Map::new();
    function.insert("name".to_owned(), name.into());
    if let Some(description) = description {
        function.insert("description".to_owned(), description.into());
    }
    let none = || serde_json::json!({"type": "object", "properties": {}});
    function.insert("parameters".to_owned(), parameters.cloned().unwrap_or_else(none));
    serde_json::json!({"type": "function", "function": function})
}

/// A call as templates know it.
pub fn call(id: &str, name: &str, arguments: Value) -> Value {
    serde_json::json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}
