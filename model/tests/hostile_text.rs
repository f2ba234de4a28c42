//! Damaged and malicious text files of a model: every one must end in an error of the model kind, quietly, in
//! bounded memory, and without taking the process down.
use q4_core::{Error, Result};
use q4_heap::{COUNTED, Heap};
use q4_model::{
    config::DecoderConfig,
    generation::GenerationConfig,
    template::{ChatTemplate, Message},
    tokenizer::Tokenizer,
};
use serde_json::{Map, Value, json};
use std::{
    panic,
    sync::{
        Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::Duration,
};

const CONFIG: &str = include_str!("data/demo/config.json");
const GENERATION: &str = include_str!("data/demo/generation_config.json");
const TOKENIZER: &str = include_str!("data/demo/tokenizer.json");
const MEMORY: usize = 256 << 20;

#[global_allocator]
static HEAP: Heap = COUNTED;
static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Runs cases one after the other and collects what went wrong with any of them.
struct Trial {
    _alone: MutexGuard<'static, ()>,
    cases: usize,
    wrong: Vec<String>,
}

impl Trial {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        // The library silences panics it expects and passes all others on to the hook that was there before.
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            panic::set_hook(Box::new(|_| {
                PANICS.fetch_add(1, Relaxed);
            }))
        });
        Self { _alone: alone, cases: 0, wrong: Vec::new() }
    }

    /// `work` must end in an error with exit code 4 whose text contains `names`.
    fn refuses<T>(&mut self, case: &str, names: &str, work: impl FnOnce() -> Result<T> + Send + 'static) {
        self.cases += 1;
        let (panics, live) = (PANICS.load(Relaxed), q4_heap::begin());
        let (send, receive) = mpsc::channel();
        let worker = thread::spawn(move || {
            // Only a test that hangs waits in vain; then this thread is left behind.
            let _ = send.send(work().map(|_| ()));
        });
        let end: Option<Result<(), Error>> = receive.recv_timeout(Duration::from_secs(120)).ok();
        let peak = q4_heap::peak().saturating_sub(live);
        let mut wrong = |what: String| self.wrong.push(format!("{case}: {what}"));
        match end {
            None if worker.is_finished() => wrong("panicked".into()),
            None => wrong("hangs".into()),
            Some(Ok(())) => wrong("was accepted".into()),
            Some(Err(e)) => {
                if e.code().exit() != 4 || !e.to_string().contains(names) {
                    wrong(format!("no error about {names}: {e}"));
                }
            }
        }
        if peak > MEMORY {
            wrong(format!("took {peak} bytes"));
        }
        if PANICS.load(Relaxed) != panics {
            wrong("printed a panic".into());
        }
    }

    fn end(self, at_least: usize) {
        // The hook above swallows the message of a failing assertion.
        eprintln!("{}", self.wrong.join("\n"));
        assert!(self.wrong.is_empty());
        assert!(self.cases >= at_least, "only {} cases ran", self.cases);
    }
}

/// The text cut at every twentieth, as (percent, beginning).
fn cuts(text: &'static str) -> impl Iterator<Item = (usize, &'static [u8])> {
    (0..20).map(move |i| (i * 5, &text.as_bytes()[..text.len() * i / 20]))
}

#[test]
fn configurations() {
    let mut trial = Trial::new();
    for (percent, bytes) in cuts(CONFIG) {
        trial.refuses(&format!("config cut at {percent} %"), "config.json", move || {
            DecoderConfig::parse(bytes)
        });
    }
    for (percent, bytes) in cuts(GENERATION) {
        let parse = move || GenerationConfig::parse(bytes, 2048);
        trial.refuses(&format!("generation config cut at {percent} %"), "generation_config.json", parse);
    }
    for (field, value) in [
        ("hidden_size", "\"256\""),
        ("hidden_size", "-256"),
        ("hidden_size", "256.5"),
        ("hidden_size", "18446744073709551615"),
        ("hidden_size", "1e300"),
        ("num_hidden_layers", "0"),
        ("num_hidden_layers", "1025"),
        ("num_attention_heads", "[4]"),
        ("num_key_value_heads", "0"),
        ("head_dim", "null, \"head_dim\": 63"),
        ("vocab_size", "4294967296"),
        ("rms_norm_eps", "0"),
        ("rms_norm_eps", "1e-60"),
        ("rope_theta", "\"1e6\""),
        ("rope_theta", "0"),
        ("rope_parameters", "[]"),
        ("rope_parameters", "{\"rope_type\": \"yarn\", \"factor\": 0, \"rope_theta\": 1e6}"),
        ("tie_word_embeddings", "\"yes\""),
        ("eos_token_id", "-1"),
        ("eos_token_id", "[2, null]"),
        ("eos_token_id", "4294967298"),
        ("bos_token_id", "[0, 1]"),
        ("dtype", "17"),
        ("quantization_config", "\"nvfp4\""),
        ("hidden_act", "{}"),
        ("model_type", "\"llama\""),
        ("num_experts", "128"),
        ("layer_types", "\"full_attention\""),
    ] {
        let text = CONFIG.replacen('{', &format!("{{\"{field}\": {value},"), 1);
        // The later of two equal keys would win.
        let text = text.replace(&format!("\n  \"{field}\":"), &format!("\n  \"unused_{}\":", text.len()));
        trial.refuses(&format!("{field} = {value}"), field, move || DecoderConfig::parse(text.as_bytes()));
    }
    for value in ["NaN", "Infinity", "1e999", "\"0.7\"", "-0.1", "[]"] {
        let text = format!("{{\"temperature\": {value}}}");
        let parse = move || GenerationConfig::parse(text.as_bytes(), 2048);
        trial.refuses(&format!("temperature = {value}"), "generation_config.json", parse);
    }
    for (name, text) in [
        ("a list", "[]".to_owned()),
        ("nothing", String::new()),
        ("deep nesting", format!("{{\"a\": {}", "[".repeat(100_000))),
        ("deep objects", "{\"a\":".repeat(100_000)),
        ("zero bytes", "\0".repeat(100)),
        ("a large file", format!("{{\"a\": \"{}\"}}", "x".repeat(2 << 20))),
    ] {
        let copy = text.clone();
        trial.refuses(name, "config.json", move || DecoderConfig::parse(text.as_bytes()));
        trial.refuses(name, "generation_config.json", move || GenerationConfig::parse(copy.as_bytes(), 2048));
    }
    trial.refuses("not UTF-8", "config.json", || DecoderConfig::parse(b"{\"model_type\": \"\xff\"}"));
    trial.end(80);
}

/// The demo tokenizer with one top-level field replaced.
fn tokenizer_with(field: &str, value: Value) -> Vec<u8> {
    let mut json: Value = serde_json::from_str(TOKENIZER).expect("demo tokenizer");
    json[field] = value;
    json.to_string().into_bytes()
}

/// The demo tokenizer with one field of its model replaced.
fn model_with(field: &str, value: Value) -> Vec<u8> {
    let mut json: Value = serde_json::from_str(TOKENIZER).expect("demo tokenizer");
    json["model"][field] = value;
    json.to_string().into_bytes()
}

#[test]
fn tokenizers() {
    let mut trial = Trial::new();
    for (percent, bytes) in cuts(TOKENIZER) {
        trial.refuses(&format!("tokenizer cut at {percent} %"), "tokenizer.json", move || {
            Tokenizer::from_bytes(bytes)
        });
    }
    let nested = |depth: usize| {
        let inner = "{\"type\":\"Sequence\",\"normalizers\":[".repeat(depth) + &"]}".repeat(depth);
        format!(
            "{{\"normalizer\":{inner},\"model\":{{\"type\":\"BPE\",\"vocab\":{{\"a\":0}},\"merges\":[]}}}}"
        )
    };
    let doubling: Vec<Value> =
        (0..30).map(|_| json!({"type": "Replace", "pattern": {"String": "l"}, "content": "ll"})).collect();
    let repeated: Vec<Value> = (0..1000).map(|_| json!({"Sequence": {"id": "A", "type_id": 0}})).collect();
    let template = |single: Value, special: Value| {
        json!({"type": "TemplateProcessing", "single": single, "pair": [{"Sequence": {"id": "A", "type_id": 0}},
               {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": special})
    };
    let unknown = template(
        json!([{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]),
        json!({}),
    );
    let truncation = json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 4});
    let regex = |pattern: String| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let huge: Map<String, Value> = (0..(1 << 20) + 1).map(|i| (format!("t{i}"), i.into())).collect();
    for (name, bytes) in [
        // Refused before the library would panic.
        ("FixedLength of 0", tokenizer_with("pre_tokenizer", json!({"type": "FixedLength", "length": 0}))),
        ("a stride as long as the window", tokenizer_with("truncation", truncation)),
        // Structure.
        ("nested 10,000 deep", nested(10_000).into_bytes()),
        ("nested 65 deep", nested(40).into_bytes()),
        ("brackets only", "[".repeat(1 << 20).into_bytes()),
        ("no model", b"{\"version\":\"1.0\"}".to_vec()),
        ("a list", b"[]".to_vec()),
        ("not UTF-8", b"{\"model\": \"\xff\xfe\"}".to_vec()),
        ("unknown model type", model_with("type", "Magic".into())),
        ("unknown normalizer", tokenizer_with("normalizer", json!({"type": "Magic"}))),
        ("a vocabulary of words", model_with("vocab", json!({"a": "b"}))),
        ("an empty vocabulary", model_with("vocab", json!({}))),
        ("a negative id", model_with("vocab", json!({"a": -1}))),
        ("a fractional id", model_with("vocab", json!({"a": 0.5}))),
        ("an enormous id", model_with("vocab", json!({"a": 4294967295u32}))),
        ("an id beyond 32 bits", model_with("vocab", json!({"a": 1u64 << 40}))),
        (
            "an enormous added id",
            tokenizer_with("added_tokens", json!([{"id": 4294967295u32, "content": "x", "special": true}])),
        ),
        ("merges of unknown tokens", model_with("merges", json!([["qqq", "www"]]))),
        ("merges of three", model_with("merges", json!([["a", "b", "c"]]))),
        ("merges that are numbers", model_with("merges", json!([1, 2, 3]))),
        ("random dropout", model_with("dropout", json!(0.5))),
        ("an impossible dropout", model_with("dropout", json!(7))),
        ("a million and one tokens", model_with("vocab", Value::Object(huge))),
        // Growth.
        (
            "thirty doublings",
            tokenizer_with("normalizer", json!({"type": "Sequence", "normalizers": doubling.clone()})),
        ),
        (
            "thirty doublings of the answer",
            tokenizer_with("decoder", json!({"type": "Sequence", "decoders": doubling})),
        ),
        (
            "the text a thousand times",
            tokenizer_with("post_processor", template(Value::Array(repeated), json!({}))),
        ),
        (
            "a long prepended text",
            tokenizer_with("normalizer", json!({"type": "Prepend", "prepend": "x".repeat(1 << 20)})),
        ),
        // Patterns.
        ("a broken pattern", tokenizer_with("pre_tokenizer", regex("(".into()))),
        ("a pattern of a megabyte", tokenizer_with("pre_tokenizer", regex("a|".repeat(1 << 19)))),
        (
            "a pattern with nested counts",
            tokenizer_with("pre_tokenizer", regex("(?:(?:(?:\\w{99}){99}){99}){99}".into())),
        ),
        ("a deep pattern", tokenizer_with("pre_tokenizer", regex("(".repeat(8000) + &")".repeat(8000)))),
    ] {
        trial.refuses(name, "tokenizer.json", move || Tokenizer::from_bytes(&bytes));
    }
    let long_merge = json!({"type": "BPE", "vocab": {"a": 0, "bb": 1}, "merges": [["a", "bb"]]});
    for (name, bytes) in [
        ("a merge longer than any token", tokenizer_with("model", long_merge)),
        ("a template with an absent special token", tokenizer_with("post_processor", unknown)),
    ] {
        trial.refuses(name, "a panic: ", move || Tokenizer::from_bytes(&bytes));
    }
    trial.end(50);
}

#[test]
fn templates() {
    let mut trial = Trial::new();
    let many = |text: &str, n: usize| text.repeat(n);
    let loops = |inner: &str| {
        format!(
            "{{% for i in range(100000) %}}{{% for j in range(100000) %}}{inner}{{% endfor %}}{{% endfor %}}"
        )
    };
    let grow = |step: &str, end: &str| {
        format!(
            "{{% set ns = namespace(s='x', l=[1]) %}}{{% for i in range(60) %}}{{% set {step} %}}{{% endfor %}}{end}"
        )
    };
    let big = "{% set s = 'x' * 4000000 %}";
    for (name, source) in [
        // Text out of nothing.
        ("a long repetition", "{{ 'x' * 100000000 }}".to_owned()),
        ("a repetition that is not used", "{% set s = 'x' * 100000000 %}".into()),
        ("a repetition with the number first", "{{ 100000000 * 'x' }}".into()),
        ("many repetitions", many("{{ 'x' * 90000000 }}", 500)),
        ("a repeated repetition", "{{ 'x' * 9999 * 9999 * 9999 }}".into()),
        ("a repetition of a product", "{{ 'x' * (9999 * 9999) }}".into()),
        ("a repeated list", "{{ [0] * 100000000 }}".into()),
        ("doubling with +", grow("ns.s = ns.s + ns.s", "")),
        ("doubling with ~", grow("ns.s = ns.s ~ ns.s", "")),
        ("doubling with join", grow("ns.s = [ns.s, ns.s] | join", "")),
        ("doubling with a method", grow("ns.s = ns.s.join(['', '', ''])", "") + big + "{{ s.join([s, s, s, s, s, s, s, s, s, s]) }}{{ s.join(range(99)) }}"),
        ("squaring with replace", grow("ns.s = ns.s | replace('x', ns.s ~ 'x')", "")),
        ("squaring with a replace method", grow("ns.s = ns.s.replace('x', ns.s ~ 'x')", "")),
        ("doubling in a row", format!("{{% set s = 'x' %}}{}", many("{% set s = s ~ s %}", 60))),
        ("doubling in nested scopes", format!("{{% set s = 'x' %}}{}{}", many("{% with s = s ~ s %}", 40), many("{% endwith %}", 40))),
        ("doubling in captures", format!("{{% set s = 'x' %}}{}", many("{% set s %}{{ s }}{{ s }}{% endset %}", 60))),
        ("doubling macros", "{% macro m(s, n) %}{% if n %}{{ m(s ~ s, n - 1) }}{% endif %}{% endmacro %}{{ m('x', 45) }}".into()),
        ("raw text in a loop", format!("{{% for i in range(100000) %}}{}{{% endfor %}}", many("y", 200_000))),
        ("captured raw text in a loop", format!("{{% set x %}}{{% for i in range(100000) %}}{}{{% endfor %}}{{% endset %}}", many("y", 200_000))),
        ("a wide join", format!("{big}{{{{ range(100000) | join(s) }}}}")),
        ("a mapped join", format!("{big}{{{{ [range(9)] * 100000 | map('join', s) | list }}}}")),
        ("a mapped upper", format!("{big}{{{{ ([s] * 100) | map('upper') | list }}}}")),
        ("a wide indent", "{{ 'a\nb' | indent(1000000000) }}".into()),
        ("a wide named indent", "{{ 'a\nb' | indent(width=1000000000) }}".into()),
        ("a wide format", "{{ '{:1000000000}'.format(1) }}".into()),
        ("a format filter", "{{ '%1000000000d' | format(1) }}".into()),
        ("a wide tojson", "{{ [[[1]]] | tojson(indent=1000000000) }}".into()),
        ("kept slices", format!("{big}{{% set ns = namespace(l=[]) %}}{{% for i in range(1000) %}}{{% set ns.l = ns.l + [s[1:]] %}}{{% endfor %}}")),
        ("kept splits", format!("{big}{}", many("{% set a = s.split('x') %}", 50))),
        ("kept lists", (0..8000).map(|i| format!("{{% set a{i} = range(100000) | list %}}")).collect()),
        ("kept characters", format!("{big}{}", (0..300).map(|i| format!("{{% set a{i} = s | list %}}")).collect::<String>())),
        ("a prompt of many megabytes", format!("{}{{{{ s }}}}{{{{ s }}}}", big)),
        // Structure out of nothing.
        ("doubling a list", grow("ns.l = ns.l + ns.l", "{{ ns.l | length }}")),
        ("a list of itself twice", grow("ns.l = [ns.l, ns.l]", "{{ ns.l }}")),
        ("a list of itself twice as JSON", grow("ns.l = [ns.l, ns.l]", "{{ ns.l | tojson }}")),
        ("two such lists compared", grow("ns.l = [ns.l, ns.l]", "") + &grow("ns.l = [ns.l, ns.l]", "{{ ns.l == ns.l }}")),
        ("a map of itself twice", grow("ns.l = {'a': ns.l, 'b': ns.l}", "{{ ns.l | string }}")),
        ("a deep list", "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = [ns.l] %}{% endfor %}".into()),
        ("a deep list in a row", format!("{{% set l = [] %}}{}{{{{ l }}}}", many("{% set l = [l] %}", 9000))),
        ("a namespace in itself", "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}".into()),
        ("a namespace in a list in itself", "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns }}".into()),
        ("namespaces in each other", "{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = b %}{{ a == b }}".into()),
        // Time.
        ("nested loops", loops("{{ i }}")),
        ("empty nested loops", loops("")),
        ("endless macros", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".into()),
        ("two macros in each other", "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}".into()),
        ("an endless loop call", "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}".into()),
        ("long comparisons", format!("{big}{{% set t = s ~ 'y' %}}{{% set l = [s, s, s, s, s, s] %}}{{% for i in range(90000) %}}{{% if t in l %}}{{% endif %}}{{% if t in l %}}{{% endif %}}{{% endfor %}}")),
        ("long mapped tests", "{% set l = range(99999) | list %}{{ l | select('in', l | map('string') | list) | list }}{{ range(99999) | reject('in', l | map('string') | list) | list }}".into()),
        // Syntax.
        ("nested ifs", many("{% if true %}", 6000) + &many("{% endif %}", 6000)),
        ("nested parentheses", format!("{{{{ {}1{} }}}}", many("(", 6000), many(")", 6000))),
        ("nested lists", format!("{{{{ {}1{} }}}}", many("[", 6000), many("]", 6000))),
        ("a chain of operators", format!("{{{{ a{} }}}}", many("~a", 120_000))),
        ("a chain of differences", format!("{{{{ a{} }}}}", many("-1", 120_000))),
        ("a chain of attributes", format!("{{{{ a{} }}}}", many(".a", 120_000))),
        ("a chain of filters", format!("{{{{ a{} }}}}", many("|e", 120_000))),
        ("a chain of not", format!("{{{{ {}a }}}}", many("not ", 60_000))),
        ("a chain of minus", format!("{{{{ {}a }}}}", many("-", 200_000))),
        ("a chain of powers", format!("{{{{ a{} }}}}", many("**a", 80_000))),
        ("a chain of elif", format!("{{% if a %}}{}{{% endif %}}", many("{% elif a %}", 20_000))),
        ("a chain of if expressions", format!("{{{{ {}a }}}}", many("a if a else ", 20_000))),
        ("an open block", "{% for m in messages %}".into()),
        ("an open string", "{{ 'abc }}".into()),
        ("an open comment", "{# abc".into()),
        ("a large file", many("x", (256 << 10) + 1)),
        ("another file", "{% include '/etc/passwd' %}".into()),
        ("a parent file", "{% extends 'base' %}".into()),
        ("an import", "{% import 'a' as a %}".into()),
        // Meaning.
        ("a refusal", "{{ raise_exception('no') }}".into()),
        ("an unknown filter", "{{ messages | explode }}".into()),
        ("an unknown method", "{{ messages[0].content.encode() }}".into()),
        ("Python's back door", "{{ messages.__class__.__mro__[1].__subclasses__() }}".into()),
        ("the engine's state", "{{ debug() }}".into()),
        ("a number out of range", "{{ 170141183460469231731687303715884105727 * 2 }}".into()),
        ("a division by zero", "{{ 1 // 0 }}".into()),
        ("JSON of a function", "{{ range | tojson }}".into()),
    ] {
        trial.refuses(name, "chat template", move || {
            let messages = [Message::new("user", "hello")];
            ChatTemplate::compile(&source)?.render(&messages, None, true, &Map::new())
        });
    }
    for (name, config) in [
        ("a template that is a number", "{\"chat_template\": 7}"),
        ("a list without default", "{\"chat_template\": [{\"name\": \"x\", \"template\": \"y\"}]}"),
        ("a broken template", "{\"chat_template\": \"{% if %}\"}"),
        ("no JSON", "{\"chat_template\": "),
    ] {
        trial.refuses(name, "tokenizer_config.json", move || {
            ChatTemplate::from_tokenizer_config(config.as_bytes())
        });
    }
    trial.end(70);
}
