//! Answers that must have a form have it, whatever the model would rather say: schemas drawn at random, many
//! answers at once, and a judge that knows nothing of grammars.
#[path = "support/company.rs"]
mod company;
mod support;

use company::{Asker, CONTEXT, Model, demo};
use q4_core::isa::Isa;
use q4_core::{Code, Result};
use q4_model::batch::{Nudges, Request};
use q4_model::constraint::{Constraint, Thoughts};
use q4_model::generate::{FinishReason, Limits};
use q4_model::sampling::SamplingParams;
use serde_json::{Map, Value, json};

const SCHEMAS: usize = 40;
const SEEDS: usize = 4;

/// A schema for each number, of all that the judge below knows.
struct Draws(u64);

impl Draws {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n
    }

    fn schema(&mut self, depth: usize) -> Value {
        let low = self.below(20) as i64 - 10;
        let high = low + self.below(30) as i64;
        match self.below(if depth == 0 { 7 } else { 11 }) {
            0 => json!({"type": "string", "minLength": self.below(3), "maxLength": 3 + self.below(6)}),
            1 => json!({"type": "integer", "minimum": low, "maximum": high}),
            2 => json!({"type": "number", "exclusiveMinimum": low, "maximum": high + 1}),
            3 => json!({"enum": ["a", "b c", 7, null, true]}),
            4 => json!({"type": ["boolean", "null"]}),
            5 => json!({"const": {"k": [1, "x"]}}),
            6 => json!({"type": "string", "pattern": "^[a-f]{2,4}-[0-9]{1,3}$"}),
            7 | 8 => {
                let mut properties = Map::new();
                let names = ["id", "name", "a\"b", "né"];
                for name in &names[..1 + self.below(names.len())] {
                    properties.insert((*name).to_owned(), self.schema(depth - 1));
                }
                let required: Vec<_> = properties.keys().filter(|_| self.below(3) > 0).cloned().collect();
                json!({"type": "object", "properties": properties, "required": required,
                    "additionalProperties": false})
            }
            9 => {
                let least = self.below(2);
                json!({"type": "array", "items": self.schema(depth - 1), "minItems": least,
                    "maxItems": least + self.below(3)})
            }
            _ => json!({"anyOf": [self.schema(depth - 1), self.schema(depth - 1)]}),
        }
    }
}

/// Whether a schema admits a value, with no more than JSON Schema says.
fn admits(schema: &Value, value: &Value) -> bool {
    let number = |name: &str| schema.get(name).and_then(Value::as_f64);
    let least = |name: &str, have: usize| number(name).is_none_or(|n| have as f64 >= n);
    let most = |name: &str, have: usize| number(name).is_none_or(|n| have as f64 <= n);
    let kinds = match schema.get("type") {
        None => Vec::new(),
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        Some(kind) => vec![kind.as_str().expect("a type")],
    };
    let is = |kind: &&str| match *kind {
        "string" => value.is_string(),
        "integer" => value.as_f64().is_some_and(|n| n.fract() == 0.0),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("the judge knows no {other}"),
    };
    let list = |name: &str| schema.get(name).and_then(Value::as_array);
    let general = (kinds.is_empty() || kinds.iter().any(is))
        && list("enum").is_none_or(|all| all.contains(value))
        && schema.get("const").is_none_or(|only| only == value)
        && list("anyOf").is_none_or(|all| all.iter().any(|one| admits(one, value)));
    general
        && match value {
            Value::String(text) => {
                let count = text.chars().count();
                let pattern = schema.get("pattern").and_then(Value::as_str);
                let fits = |p: &str| regex::Regex::new(p).expect("a pattern").is_match(text);
                least("minLength", count) && most("maxLength", count) && pattern.is_none_or(fits)
            }
            Value::Number(n) => {
                let n = n.as_f64().expect("finite");
                number("minimum").is_none_or(|m| n >= m)
                    && number("maximum").is_none_or(|m| n <= m)
                    && number("exclusiveMinimum").is_none_or(|m| n > m)
            }
            Value::Array(items) => {
                least("minItems", items.len())
                    && most("maxItems", items.len())
                    && schema.get("items").is_none_or(|of| items.iter().all(|item| admits(of, item)))
            }
            Value::Object(fields) => {
                let properties = schema.get("properties").and_then(Value::as_object);
                let closed = schema.get("additionalProperties") == Some(&Value::Bool(false));
                list("required")
                    .is_none_or(|all| all.iter().all(|n| value.get(n.as_str().expect("a name")).is_some()))
                    && fields.iter().all(|(name, field)| match properties.and_then(|p| p.get(name)) {
                        Some(of) => admits(of, field),
                        None => !closed,
                    })
            }
            _ => true,
        }
}

fn request(model: &Model, constraint: &Constraint, seed: u64) -> Result<Request> {
    Ok(Request {
        prompt: model.tokenizer.encode("<|im_start|>user\nWho are you?<|im_end|>\n", false)?,
        params: SamplingParams {
            temperature: if seed == 0 { 0.0 } else { 1.0 },
            repetition_penalty: if seed % 2 == 0 { 1.0 } else { 1.2 },
            seed,
            ..SamplingParams::default()
        },
        // What would lift any token, and what would have it said: neither does.
        nudges: Nudges {
            bias: vec![(40, 100.0)],
            presence: if seed % 2 == 0 { 0.0 } else { 1.0 },
            frequency: 0.0,
        },
        limits: Limits {
            max_tokens: CONTEXT,
            stop_ids: model.stop_ids.clone(),
            form: Some(model.grammars.compile(&model.tokenizer, constraint, Thoughts::None)?),
            ..Limits::default()
        },
        reuse: true,
        prompt_logprobs: false,
    })
}

#[test]
fn every_answer_is_of_its_schema_or_cut() -> Result<()> {
    let model = demo(Isa::available().next().unwrap_or(Isa::Portable), 2)?;
    let mut draws = Draws(0x5eed);
    let schemas: Vec<Value> = (0..SCHEMAS).map(|_| draws.schema(2)).collect();
    let mut scheduler = model.scheduler(16, 64, 48)?;
    let mut asked = Vec::new();
    for schema in &schemas {
        for seed in 0..SEEDS as u64 {
            let asker = Asker::default();
            let request = request(&model, &Constraint::JsonSchema(schema.clone()), seed)?;
            scheduler.submit(request, Box::new(asker.clone()));
            asked.push((schema, seed, asker));
        }
    }
    while !scheduler.is_idle() {
        scheduler.step();
    }
    let mut whole = 0;
    for (schema, seed, asker) in &asked {
        let told = asker.told.lock().expect("one thread");
        let answer = told.answer.as_ref().unwrap_or_else(|| panic!("{schema}, {seed}: {:?}", told.failed));
        match answer.finish {
            FinishReason::Stop => {
                let value = serde_json::from_str(&answer.text);
                let value: Value = value.unwrap_or_else(|e| panic!("{schema}, {seed}: {e}: {}", answer.text));
                assert!(admits(schema, &value), "{schema}, {seed}: {}", answer.text);
                whole += 1;
            }
            FinishReason::Length | FinishReason::Context => {}
            other => panic!("{schema}, {seed}: {other:?}"),
        }
    }
    assert!(whole * 10 > SCHEMAS * SEEDS * 8, "{whole} of {} ended", SCHEMAS * SEEDS);
    Ok(())
}

#[test]
fn the_judge_can_say_no() {
    for (schema, value) in [
        (json!({"type": "integer"}), json!(1.5)),
        (json!({"type": "string", "maxLength": 2}), json!("abc")),
        (json!({"type": "string", "pattern": "^a$"}), json!("b")),
        (json!({"type": "number", "exclusiveMinimum": 1}), json!(1)),
        (json!({"type": "object", "required": ["a"]}), json!({})),
        (json!({"properties": {}, "additionalProperties": false}), json!({"a": 1})),
        (json!({"items": {"type": "null"}}), json!([null, 1])),
        (json!({"anyOf": [{"type": "null"}, {"const": 1}]}), json!(2)),
        (json!({"enum": [1, "a"]}), json!("b")),
    ] {
        assert!(!admits(&schema, &value), "{schema} {value}");
    }
}

#[test]
fn a_form_that_is_complete_ends_an_answer_that_nothing_else_ends() -> Result<()> {
    let model = demo(Isa::Portable, 1)?;
    let mut scheduler = model.scheduler(2, 16, 6)?;
    for (pattern, ends, finish) in [
        ("(ab){3}", Vec::new(), FinishReason::Stop),
        ("(ab){3}", model.stop_ids.clone(), FinishReason::Stop),
        // It may end, and nothing says so.
        ("(ab)+", Vec::new(), FinishReason::Length),
    ] {
        let asker = Asker::default();
        let mut request = request(&model, &Constraint::Regex(pattern.to_owned()), 0)?;
        (request.limits.stop_ids, request.limits.max_tokens) = (ends, 20);
        let alone = model.alone(&Request { nudges: Nudges::default(), ..request.clone() })?;
        scheduler.submit(request, Box::new(asker.clone()));
        while !scheduler.is_idle() {
            scheduler.step();
        }
        let told = asker.told.lock().expect("one thread");
        let answer = told.answer.as_ref().expect("an answer");
        assert_eq!((answer.finish, alone.finish), (finish, finish), "{pattern}: {:?}", answer.text);
        if finish == FinishReason::Stop {
            assert_eq!((answer.text.as_str(), alone.text.as_str()), ("ababab", "ababab"));
        }
    }
    Ok(())
}

#[test]
fn a_form_that_goes_nowhere_fails_its_request_alone() -> Result<()> {
    let model = demo(Isa::Portable, 1)?;
    let mut scheduler = model.scheduler(2, 16, 6)?;
    // More ambiguous with every letter, until a step would take more work than it may.
    let lark = "start: s\ns: s s s | s s | \"a\" | \"b\"\n".to_owned();
    let mut bad = request(&model, &Constraint::Grammar(lark), 0)?;
    bad.limits.stop_ids = Vec::new();
    let good = request(&model, &Constraint::Regex("[ab]{30}".to_owned()), 0)?;
    let (first, second) = (Asker::default(), Asker::default());
    scheduler.submit(bad, Box::new(first.clone()));
    scheduler.submit(good, Box::new(second.clone()));
    while !scheduler.is_idle() {
        scheduler.step();
    }
    let (first, second) = (first.told.lock().expect("one"), second.told.lock().expect("one"));
    match (&first.failed, &first.answer) {
        (Some(e), None) => assert_eq!(e.code(), Code::Usage, "{e}"),
        (None, Some(answer)) => assert!(answer.finish.is_cut(), "{:?}", answer.finish),
        other => panic!("{other:?}"),
    }
    let answer = second.answer.as_ref().expect("an answer");
    assert_eq!((answer.finish, answer.text.len()), (FinishReason::Stop, 30));
    Ok(())
}
