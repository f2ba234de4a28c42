use super::*;
use crate::reply::{self, Part, ReplyParser};
use q4_core::Code;
use serde_json::json;

mod hostile;

fn tokenizer() -> Tokenizer {
    Tokenizer::from_bytes(include_bytes!("../../../tests/data/demo/tokenizer.json")).expect("demo")
}

/// A tokenizer and what was compiled for it.
struct House {
    tokenizer: Tokenizer,
    grammars: Grammars,
    end: u32,
}

impl House {
    fn new() -> Self {
        let tokenizer = tokenizer();
        let end = tokenizer.id_of("<|im_end|>").expect("a token");
        Self { tokenizer, grammars: Grammars::default(), end }
    }

    fn compile(&self, constraint: &Constraint) -> Result<Grammar> {
        self.grammars.compile(&self.tokenizer, constraint, Thoughts::None)
    }

    fn grammar(&self, constraint: &Constraint) -> Grammar {
        self.compile(constraint).unwrap_or_else(|e| panic!("{constraint:?}: {e}"))
    }

    /// Tokens there are for a model with a few rows more than the tokenizer has ids.
    fn rows(&self) -> usize {
        self.tokenizer.highest_id() as usize + 9
    }

    /// What may come next; `None` where the answer is complete.
    fn allowed(&self, matcher: &mut Matcher) -> Option<Vec<u32>> {
        let mut logits = vec![0.5; self.rows()];
        matcher.mask(&mut logits, &[self.end]).expect("goes on").then(|| {
            assert!(logits.iter().all(|l| *l == 0.5 || *l == f32::NEG_INFINITY));
            (0..).zip(logits).filter(|(_, l)| *l == 0.5).map(|(id, _)| id).collect()
        })
    }

    /// An answer of tokens drawn at random, which prefers to end; with whether it ended within 600 tokens.
    fn walk(&self, grammar: &Grammar, seed: u64) -> (String, bool) {
        let (mut matcher, mut ids) = (grammar.matcher(), Vec::new());
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as usize % below
        };
        while ids.len() < 600 {
            let Some(allowed) = self.allowed(&mut matcher) else { return (self.text(&ids), true) };
            let id = allowed[next(allowed.len())];
            let may_end = allowed.contains(&self.end);
            if id == self.end || may_end && next(4) == 0 {
                return (self.text(&ids), true);
            }
            ids.push(id);
            if !matcher.accept(id).expect("admitted") {
                return (self.text(&ids), true);
            }
        }
        (self.text(&ids), false)
    }

    fn text(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids, true).expect("decodes")
    }

    /// Takes the tokens of a text one by one; where one is not admitted, its index.
    fn takes(&self, matcher: &mut Matcher, text: &str) -> std::result::Result<(), usize> {
        for (i, id) in self.tokenizer.encode(text, false).expect("encodes").into_iter().enumerate() {
            let admitted =
                !matcher.is_over() && self.allowed(matcher).is_some_and(|allowed| allowed.contains(&id));
            if !admitted || matcher.accept(id).is_err() {
                return Err(i);
            }
        }
        Ok(())
    }

    /// Whether a text is one of the grammar, as a whole.
    fn admits(&self, grammar: &Grammar, text: &str) -> bool {
        let mut matcher = grammar.matcher();
        self.takes(&mut matcher, text).is_ok()
            && (matcher.is_over()
                || self.allowed(&mut matcher).is_none_or(|allowed| allowed.contains(&self.end)))
    }
}

#[test]
fn a_token_may_come_exactly_where_it_leads_to_a_choice() {
    let house = House::new();
    let choices = ["yes", "yesterday", "no", "north", "né", "你好"].map(str::to_owned).to_vec();
    let grammar = house.grammar(&Constraint::Choice(choices.clone()));
    let mut prefixes: Vec<Vec<u32>> = vec![Vec::new()];
    let mut complete = 0;
    while let Some(prefix) = prefixes.pop() {
        let mut matcher = grammar.matcher();
        let mut over = false;
        for id in &prefix {
            house.allowed(&mut matcher);
            over = !matcher.accept(*id).expect("admitted");
        }
        let bytes = |ids: &[u32]| -> Vec<u8> {
            ids.iter().flat_map(|id| house.tokenizer.bytes_of(*id).expect("bytes")).copied().collect()
        };
        let said = bytes(&prefix);
        let is_choice = choices.iter().any(|c| c.as_bytes() == said);
        let is_longest = !choices.iter().any(|c| c.len() > said.len() && c.as_bytes().starts_with(&said));
        complete += usize::from(is_choice);
        assert_eq!(over, is_choice && is_longest, "{said:?}");
        if over {
            continue;
        }
        let allowed = house.allowed(&mut matcher).expect("goes on");
        assert_eq!(allowed.contains(&house.end), is_choice, "{said:?}");
        for id in 0..house.rows() as u32 {
            if id == house.end {
                continue;
            }
            let fits = id <= house.tokenizer.highest_id() && !house.tokenizer.is_special(id) && {
                let longer = bytes(&[prefix.as_slice(), &[id]].concat());
                longer.len() > said.len() && choices.iter().any(|c| c.as_bytes().starts_with(&longer))
            };
            assert_eq!(allowed.contains(&id), fits, "{id} behind {said:?}");
            if fits {
                prefixes.push([prefix.as_slice(), &[id]].concat());
            }
        }
    }
    assert!(complete >= choices.len());
}

#[test]
fn a_pattern_is_matched_as_a_whole() {
    let house = House::new();
    for pattern in ["[0-9]{3}-[a-c]+", "^[0-9]{3}-[a-c]+$"] {
        let grammar = house.grammar(&Constraint::Regex(pattern.to_owned()));
        for (text, fits) in
            [("123-abc", true), ("123-", false), ("12-a", false), ("123-a ", false), ("x123-a", false)]
        {
            assert_eq!(house.admits(&grammar, text), fits, "{pattern}: {text}");
        }
    }
    let grammar = house.grammar(&Constraint::Regex(r"a\$".to_owned()));
    assert!(house.admits(&grammar, "a$") && !house.admits(&grammar, "a"));
    let grammar = house.grammar(&Constraint::Regex("(yes|no)/[^/]*".to_owned()));
    assert!(house.admits(&grammar, "yes/né") && !house.admits(&grammar, "no/a/b"));
}

#[test]
fn a_grammar_may_end_and_go_on() {
    let house = House::new();
    let lark = "start: item (\",\" item)*\nitem: /[a-z]+/ | \"(\" start \")\"\n";
    let grammar = house.grammar(&Constraint::Grammar(lark.to_owned()));
    for (text, fits) in [("a", true), ("a,(b,c),d", true), ("a,", false), ("(a", false), ("a)", false)] {
        assert_eq!(house.admits(&grammar, text), fits, "{text}");
    }
    let gbnf = Constraint::Grammar("root ::= \"a\"".to_owned());
    let e = house.compile(&gbnf).expect_err("another language").to_string();
    assert!(e.contains("GBNF"), "{e}");
}

#[test]
fn a_schema_is_kept_to_by_whatever_is_drawn() {
    let house = House::new();
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["kind", "n", "tags"],
        "properties": {
            "kind": {"enum": ["a", "b"]},
            "n": {"type": "integer", "minimum": -3, "maximum": 12},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
            "deep": {"$ref": "#/$defs/deep"}},
        "$defs": {"deep": {"type": "object", "required": ["x"], "additionalProperties": false,
            "properties": {"x": {"type": ["null", "boolean"]}}}}});
    let grammar = house.grammar(&Constraint::JsonSchema(schema));
    let mut ended = 0;
    for seed in 1..30 {
        let (text, whole) = house.walk(&grammar, seed);
        if !whole {
            continue;
        }
        ended += 1;
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{seed}: {e}: {text}"));
        assert!(matches!(value["kind"].as_str(), Some("a" | "b")), "{text}");
        assert!(
            value["n"].as_f64().is_some_and(|n| n.fract() == 0.0 && (-3.0..=12.0).contains(&n)),
            "{text}"
        );
        let tags = value["tags"].as_array().expect("a list");
        assert!(tags.len() <= 3 && tags.iter().all(|t| t.as_str().expect("a text").chars().count() <= 5));
        let deep = value.get("deep").is_none_or(|d| d["x"].is_null() || d["x"].is_boolean());
        assert!(deep && value.as_object().expect("an object").len() <= 4, "{text}");
    }
    assert!(ended > 25, "{ended}");
}

#[test]
fn a_number_that_is_left_out_does_not_come() {
    let house = House::new();
    let bounds = ["exclusiveMinimum", "minimum", "maximum", "exclusiveMaximum"];
    let mut compiled = 0;
    for low in [-2.0, -0.5, 0.0, 0.5, 3.0] {
        for high in [-1.5, -1.0, 0.0, 0.25, 1.0, 3.5, 4.0, 12.0] {
            for (from, to) in [(0, 2), (0, 3), (1, 2), (1, 3)] {
                let schema = json!({"type": "number", bounds[from]: low, bounds[to]: high});
                let grammar = house.compile(&Constraint::JsonSchema(schema.clone()));
                let Some(grammar) = grammar.ok().filter(|_| low < high) else { continue };
                compiled += 1;
                for quarter in -12..=52 {
                    let value = f64::from(quarter) / 4.0;
                    let is_in = (if from == 0 { value > low } else { value >= low })
                        && (if to == 3 { value < high } else { value <= high });
                    for text in [format!("{value}"), format!("{value:.1}"), format!("{value:.2}")] {
                        // Not every way to write a number has to come, but nothing else may.
                        let comes = house.admits(&grammar, &text);
                        assert!(is_in || !comes, "{schema}: {text}");
                    }
                    assert!(!is_in || house.admits(&grammar, &format!("{value}")), "{schema}: {value}");
                }
            }
        }
    }
    assert!(compiled > 60, "{compiled}");
}

#[test]
fn an_object_has_the_properties_that_its_schema_names() {
    let house = House::new();
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    let list = json!({"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/city"}, {"type": "null"}]},
        "$defs": {"city": city}});
    let (known, more) = (r#"{"city": "Oslo"}"#, r#"{"city": "Oslo", "x": 1}"#);
    let with = |field: &str, value: Value| {
        let mut schema = city.clone();
        schema[field] = value;
        schema
    };
    for (schema, of, opens) in [
        (city.clone(), "", false),
        (list, "[]", false),
        (with("additionalProperties", true.into()), "", true),
        (with("additionalProperties", json!({"type": "integer"})), "", true),
        (with("required", json!(["city", "x"])), "", true),
        // Nobody knows all properties of what is said in two places.
        (json!({"allOf": [city, {"type": "object", "properties": {"x": {"type": "integer"}}}]}), "", true),
    ] {
        let grammar = house.grammar(&Constraint::JsonSchema(schema.clone()));
        let text = |inner: &str| if of.is_empty() { inner.to_owned() } else { format!("[{inner}]") };
        assert_eq!(house.admits(&grammar, &text(more)), opens, "{schema}");
        let is_enough = schema["required"].as_array().is_none_or(|names| names.len() < 2);
        assert_eq!(house.admits(&grammar, &text(known)), is_enough, "{schema}");
    }
    let any = house.grammar(&Constraint::JsonSchema(json!({"type": "object"})));
    assert!(house.admits(&any, more));
}

#[test]
fn any_object_is_an_object_and_white_space_ends() {
    let house = House::new();
    let grammar = house.grammar(&Constraint::JsonObject);
    assert!(house.admits(&grammar, "{\"a\": [1, {\"b\": null}], \"c\": \"né\"}"));
    assert!(house.admits(&grammar, "{\n  \"a\": 1\n}"));
    assert!(!house.admits(&grammar, "[1]") && !house.admits(&grammar, "{\"a\":  1}"));
}

#[test]
fn what_cannot_be_kept_to_is_refused_by_name() {
    let house = House::new();
    for (schema, word) in [
        (json!({"type": "array", "uniqueItems": true}), "uniqueItems"),
        (json!({"not": {"type": "string"}}), "not"),
        (json!({"if": {"type": "string"}, "then": {}}), "if"),
        (
            json!({"type": "object", "properties": {"a": {"type": "object", "propertyNames": {}}}}),
            "propertyNames",
        ),
        (json!({"type": "string", "format": "unheard-of"}), "unheard-of"),
        (json!({"type": "text"}), "text"),
        (json!({"type": "string", "pattern": "("}), "("),
        (json!({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (json!({"$ref": "#/$defs/absent"}), "absent"),
        (json!({"$ref": "https://example.org/schema"}), "example.org"),
        (json!({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}), "oneOf"),
        (json!({"x-guidance": {"lenient": true}, "not": {}}), "x-guidance"),
        (json!({"properties": {"a": {"$id": "b", "$ref": "#/$defs/c"}}}), "$id"),
        (json!({"type": "integer", "minimum": 5, "maximum": 4}), "minimum"),
        (json!({"type": "number", "exclusiveMinimum": 5, "maximum": 5.5}), "exclusiveMinimum 5"),
        (json!({"minimum": -11.5, "exclusiveMaximum": -11.0}), "exclusiveMaximum -11"),
        (json!(false), "nothing"),
        (json!([]), "object"),
    ] {
        let e = house.compile(&Constraint::JsonSchema(schema.clone())).expect_err(word);
        assert_eq!(e.code(), Code::Usage, "{schema}: {e}");
        assert!(e.to_string().contains(word) && !e.to_string().contains("<non-verbose"), "{schema}: {e}");
    }
    for bad in [
        Constraint::Choice(Vec::new()),
        Constraint::Choice(vec![String::new()]),
        Constraint::Choice(vec!["a".to_owned(); MOST_CHOICES + 1]),
        Constraint::Regex("a{2".to_owned()),
        Constraint::Grammar("begin: \"a\"".to_owned()),
        Constraint::Grammar(String::new()),
    ] {
        assert_eq!(house.compile(&bad).expect_err("refused").code(), Code::Usage, "{bad:?}");
    }
}

#[test]
fn the_form_begins_behind_thoughts() {
    let house = House::new();
    let choice = Constraint::Choice(vec!["yes".to_owned()]);
    let begun = house.grammars.compile(&house.tokenizer, &choice, Thoughts::Begun).expect("compiles");
    for (text, fits) in [
        ("I < think.</think>\n\nyes", true),
        ("</think>yes", true),
        ("no</thin</think>\nyes", true),
        ("</think>\n\n\nyes", false),
        ("</think> yes", false),
        ("yes", false),
    ] {
        let mut matcher = begun.matcher();
        let taken = house.takes(&mut matcher, text);
        assert_eq!(taken.is_ok() && matcher.is_over(), fits, "{text}: {taken:?}");
    }
    // Nothing ends thoughts but their end, and no token leads from them into what was not looked at.
    let mut matcher = begun.matcher();
    let allowed = house.allowed(&mut matcher).expect("goes on");
    assert!(!allowed.contains(&house.end) && allowed.len() > 1000);
    assert!(allowed.iter().all(|id| *id <= house.tokenizer.highest_id()));
    house.takes(&mut matcher, "well</think").expect("a thought");
    for id in house.allowed(&mut matcher).expect("goes on") {
        let bytes = house.tokenizer.bytes_of(id).expect("bytes");
        let leaves = bytes.first() == Some(&b'>') && bytes[1..].iter().any(|b| *b != b'\n');
        assert!(!leaves, "{:?}", String::from_utf8_lossy(bytes));
    }
}

#[test]
fn what_comes_before_a_form_is_seen_from_the_prompt() {
    let hybrid = ChatTemplate::compile("{% if enable_thinking is false %}x{% endif %}").expect("compiles");
    let plain = ChatTemplate::compile("{{ messages }}").expect("compiles");
    for (prompt, template, thoughts) in [
        ("<|im_start|>assistant\n<think>\n", &plain, Thoughts::Begun),
        ("<|im_start|>assistant\n", &plain, Thoughts::None),
        ("<|im_start|>assistant\n", &hybrid, Thoughts::Possible),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", &hybrid, Thoughts::None),
    ] {
        assert_eq!(Thoughts::of(prompt, template), thoughts, "{prompt}");
    }
}

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
            "properties": {
                "city": {"type": "string", "minLength": 1, "maxLength": 8},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "place": {"$ref": "#/$defs/place"}},
            "required": ["city", "unit"], "additionalProperties": false,
            "$defs": {"place": {"type": "object", "properties": {"x": {"type": "boolean"}},
                "required": ["x"], "additionalProperties": false}}}}},
        {"type": "function", "function": {"name": "now"}},
    ])
}

#[test]
fn calls_are_calls_and_their_arguments_keep_to_the_schema() {
    let house = House::new();
    let mut names = Vec::new();
    for (form, named, several) in [
        (CallForm::Json, None, true),
        (CallForm::Json, Some("weather"), false),
        (CallForm::Tags, None, true),
        (CallForm::Tags, Some("weather"), false),
    ] {
        let calls = Calls { tools: tools(), named: named.map(str::to_owned), several, form };
        let grammar = house.grammar(&Constraint::Calls(calls));
        let mut ended = 0;
        for seed in 1..20 {
            let (text, whole) = house.walk(&grammar, seed);
            if !whole {
                continue;
            }
            ended += 1;
            let options = reply::Options { tools: true, schemas: Some(tools()), ..Default::default() };
            let mut parser = ReplyParser::new(options);
            let parts = [parser.push(&text), parser.finish()].concat();
            let (mut begun, mut over, mut arguments) = (Vec::new(), 0, vec![String::new(); 99]);
            for part in parts {
                match part {
                    Part::CallStart { name, .. } => begun.push(name),
                    Part::CallArguments { index, delta } => arguments[index].push_str(&delta),
                    Part::CallEnd { .. } => over += 1,
                    Part::Text(text) | Part::Reasoning(text) => panic!("{form:?}: a text: {text:?}"),
                }
            }
            assert!(over == begun.len() && over > 0 && (several || over == 1), "{form:?}: {text}");
            for (name, arguments) in begun.iter().zip(&arguments) {
                assert!(named.is_none_or(|named| named == name));
                let arguments: Value = serde_json::from_str(arguments).expect("JSON");
                if name == "weather" {
                    let city = arguments["city"].as_str().expect("a city").chars().count();
                    assert!((1..=8).contains(&city), "{form:?}: {text}");
                    assert!(matches!(arguments["unit"].as_str(), Some("celsius" | "fahrenheit")), "{text}");
                    assert!(
                        arguments.get("days").is_none_or(|d| (1..=9).contains(&d.as_i64().expect("days")))
                    );
                    assert!(arguments.get("place").is_none_or(|p| p["x"].is_boolean()), "{text}");
                }
            }
            names.extend(begun);
        }
        assert!(ended > 10, "{form:?} {named:?}: {ended}");
    }
    assert!(names.contains(&"now".to_owned()), "{names:?}");
}

#[test]
fn calls_that_cannot_be_held_to_their_schema_are_refused() {
    let house = House::new();
    let refused = |form, parameters: Value| {
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
        let calls = Calls { tools, named: None, several: true, form };
        house.compile(&Constraint::Calls(calls)).expect_err("refused").to_string()
    };
    let with = |a: Value| json!({"type": "object", "properties": {"a": a}});
    for (form, parameters, word) in [
        (CallForm::Json, with(json!({"type": "array", "uniqueItems": true})), "uniqueItems"),
        (CallForm::Json, json!({"type": "string"}), "type"),
        (CallForm::Tags, with(json!({"type": "string", "pattern": "a+"})), "pattern"),
        (CallForm::Tags, with(json!({})), "without a type"),
        (CallForm::Tags, with(json!({"type": ["string", "integer"]})), "or something else"),
        (CallForm::Tags, json!({"type": "object", "minProperties": 1}), "minProperties"),
        (CallForm::Tags, json!({"type": "object", "required": ["a"]}), "required"),
    ] {
        let e = refused(form, parameters);
        assert!(e.contains(word) && e.contains('f'), "{e}");
    }
    let none = Calls { tools: json!([]), named: None, several: true, form: CallForm::Json };
    assert!(house.compile(&Constraint::Calls(none)).is_err());
}
