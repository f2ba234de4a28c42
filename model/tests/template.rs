//! Chat templates against prompts rendered by transformers, and against Jinja's rules where engines differ.
use q4_core::Code;
use q4_model::arch::qwen3::QWEN3;
use q4_model::template::{ChatTemplate, Message};
use serde_json::{Map, Value, json};
use std::path::Path;

fn render(source: &str, messages: &[Message]) -> String {
    ChatTemplate::compile(source)
        .expect("compiles")
        .render(messages, None, true, &Map::new())
        .expect("renders")
}

/// Renders a template whose only message says "a b c".
fn says(source: &str) -> String {
    render(source, &[Message::new("user", "a b c")])
}

fn error(source: &str) -> String {
    let failed = match ChatTemplate::compile(source) {
        Ok(template) => template.render(&[Message::new("user", "a")], None, true, &Map::new()).map(|_| ()),
        Err(e) => Err(e),
    };
    let failed = failed.expect_err(source);
    assert_eq!(failed.code(), Code::TemplateInvalid);
    failed.to_string()
}

#[test]
fn qwen3_renders_every_golden_case() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/golden/chat_template.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(path).expect("golden file")).expect("json");
    let cases = golden["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 8);
    for case in cases {
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).expect("messages");
        let tools = Some(&case["tools"]).filter(|t| !t.is_null());
        let generate = case["add_generation_prompt"].as_bool().expect("flag");
        let prompt = ChatTemplate::of(QWEN3.template.source).render(&messages, tools, generate, &Map::new());
        assert_eq!(prompt.as_deref(), Ok(case["rendered"].as_str().expect("text")), "case {}", case["name"]);
    }
}

#[test]
fn the_built_in_template_passes_its_own_bounds() {
    ChatTemplate::compile(QWEN3.template.source).expect("compiles");
    let long: Vec<Message> =
        (0..2000).map(|i| Message::new(["user", "assistant"][i % 2], "word ".repeat(200))).collect();
    let prompt = ChatTemplate::of(QWEN3.template.source)
        .render(&long, None, true, &Map::new())
        .expect("a long conversation fits");
    assert!(prompt.len() > 2_000_000);
}

#[test]
fn the_demo_model_template_and_its_directory() {
    let source = "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] \
                  + '<|im_end|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}\
                  {%- endif -%}";
    let messages = [Message::new("system", "Be brief."), Message::new("user", "談談UFO")];
    let expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n談談UFO<|im_end|>\n\
                    <|im_start|>assistant\n";
    assert_eq!(render(source, &messages), expected);
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/demo");
    let own = std::fs::read_to_string(dir.join("chat_template.jinja")).expect("readable");
    assert_eq!(render(&own, &messages), expected);
}

#[test]
fn templates_inside_tokenizer_config_are_found() {
    let text = |config: Value| {
        let found = ChatTemplate::from_tokenizer_config(config.to_string().as_bytes())?;
        found.map(|t| t.render(&[], None, false, &Map::new())).transpose()
    };
    assert_eq!(text(json!({"chat_template": "one"})), Ok(Some("one".into())));
    let named = json!([{"name": "rag", "template": "two"}, {"name": "default", "template": "three"}]);
    assert_eq!(text(json!({"chat_template": named})), Ok(Some("three".into())));
    assert_eq!(text(json!({"eos_token": "x"})), Ok(None));
    for wrong in
        [json!({"chat_template": 7}), json!({"chat_template": [{"name": "rag", "template": "x"}]}), json!([])]
    {
        assert_eq!(text(wrong).expect_err("refused").code(), Code::TemplateInvalid);
    }
}

#[test]
fn messages_keep_what_they_carry() {
    let message: Message = serde_json::from_value(json!({
        "role": "assistant", "content": null, "reasoning_content": "hm", "name": "x",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1.0}}}],
    }))
    .expect("a message");
    assert_eq!((message.content.as_str(), message.extra["name"].as_str()), ("", Some("x")));
    let source = "{% set m = messages[0] %}{{ m.reasoning_content }},{{ m.name }},{{ m.tool_calls[0].function.arguments | tojson }}";
    assert_eq!(render(source, &[message]), r#"hm,x,{"a": 1.0}"#);
    assert_eq!(render("{{ messages[0].tool_calls is defined }}", &[Message::new("user", "")]), "False");
}

#[test]
fn arguments_given_as_text_are_not_quoted_again() {
    let call =
        json!([{"function": {"name": "f", "arguments": "{\"a\": 1}"}}, {"name": "g", "arguments": {}}]);
    let message = Message { tool_calls: Some(call), ..Message::new("assistant", "Well.") };
    let prompt = ChatTemplate::of(QWEN3.template.source)
        .render(&[message], None, false, &Map::new())
        .expect("renders");
    let calls = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>\n\
                 <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
    assert_eq!(prompt, format!("<|im_start|>assistant\nWell.\n{calls}<|im_end|>\n"));
}

#[test]
fn block_tags_take_their_line_with_them() {
    assert_eq!(says("a\n  {% if true %}\nb\n  {% endif %}\nc\n"), "a\nb\nc");
    assert_eq!(says("{{ bos_token }}x"), "x");
    let mut extra = Map::new();
    extra.insert("bos_token".into(), "<s>".into());
    extra.insert("enable_thinking".into(), false.into());
    let template = ChatTemplate::compile("{{ bos_token }}{{ enable_thinking }}").expect("compiles");
    assert_eq!(template.render(&[], None, false, &extra).as_deref(), Ok("<s>False"));
}

#[test]
fn operators_keep_their_meaning_under_guard() {
    for (source, expected) in [
        (
            "{{ 1 + 2 * 3 }},{{ 1.5 + 1 }},{{ true + 1 }},{{ 7 // 2 }},{{ 7 % 4 }},{{ -2 * 3 }}",
            "7,2.5,2,3,3,-6",
        ),
        ("{{ 'a' + 'b' ~ 1 ~ none ~ true }}", "ab1NoneTrue"),
        ("{{ '-' * 3 }}{{ 2 * 'ab' }}{{ 'x' * -1 }}", "---abab"),
        ("{{ ([1] + [2, 3]) | length }},{{ ([0] * 3) | join('') }}", "3,000"),
        (
            "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "10",
        ),
        ("{% for m in messages[::-1] %}{{ m.content[2:] }}{% endfor %}", "b c"),
        ("{{ messages[0]['content'].split(' ')[-1] }}{{ messages[0].content.startswith('a') }}", "cTrue"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages | map(attribute='role') | join(',') | upper }}", "USER"),
        (
            "{{ ' x ' | trim }}{{ ' y '.strip() }}{{ 'aXa' | replace('X', '--') }}{{ 'aaa'.replace('a', 'b', 2) }}",
            "xya--abba",
        ),
        ("{{ 'a,b'.split(',') | join('+') }}{{ '-'.join(['x', 'y']) }}", "a+bx-y"),
        ("{% macro f(x, y=2) %}[{{ x }}{{ y }}]{% endmacro %}{{ f(1) }}{{ f('a', y='b') }}", "[12][ab]"),
        (
            "{% set x %}{% for i in range(3) %}{{ i }}.{% endfor %}{% endset %}{{ x | replace('.', '') }}",
            "012",
        ),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}", "AB"),
        ("{{ nothing is defined }}{{ nothing | default('d') }}{{ messages[0].none is none }}", "FalsedFalse"),
        (
            "{{ 'b' in 'abc' }}{{ 'role' in messages[0] }}{{ 1 < 2 < 3 }}{{ not (1 == 1.0) }}",
            "TrueTrueTrueFalse",
        ),
        (
            "{{ {'a': 1}.items() | list | length }}{% for k, v in {'a': 1, 'b': 2} | items %}{{ k }}{{ v }}{% endfor %}",
            "1a1b2",
        ),
        ("{{ {'a': [1, 'é']} | tojson }}{{ [1] | tojson(indent=2) }}", "{\"a\": [1, \"é\"]}[\n  1\n]"),
        ("{{ 'a\nb' | indent(2) }}{{ 'a\nb' | indent(width=3, first=true) }}", "a\n  b   a\n   b"),
        ("{{ 'yes' if messages else 'no' }}{{ 'x' if false }}", "yes"),
        ("{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}", "3"),
        ("{% macro w() %}<{{ caller() }}>{% endmacro %}{% call w() %}in{% endcall %}", "<in>"),
        (
            "{% for a in [1, [2, [3]]] recursive %}{% if a is number %}{{ a }}{% else %}{{ loop(a) }}{% endif %}{% endfor %}",
            "123",
        ),
        ("{% set d = dict(a=1) %}{{ d.get('a') }}{{ d.get('b', 9) }}{{ d['a'] }}", "191"),
    ] {
        assert_eq!(says(source), expected, "{source}");
    }
}

#[test]
fn strftime_now_gives_a_date() {
    let date = says("{{ strftime_now('%Y-%m-%d') }}");
    assert!(date.len() == 10 && date.as_str() > "2024-01-01", "{date}");
    assert!(error("{{ strftime_now('%Q') }}").contains("%Q"));
}

#[test]
fn errors_name_the_line() {
    for (source, line, text) in [
        ("a\nb\n{% if %}", 3, "syntax error"),
        ("a\n{{ raise_exception('roles must alternate') }}", 2, "roles must alternate"),
        ("\n\n\n{{ messages[0].content + 1 }}", 4, "+ does not work between string and number"),
        ("\n{{ messages | nonsense }}", 2, "nonsense"),
        ("\n{{ nonsense() }}", 2, "nonsense"),
        ("\n\n{% include 'other' %}", 3, "include"),
        ("\n{{ nothing.at.all }}", 2, "undefined"),
    ] {
        let have = error(source);
        assert!(have.contains("chat template") && have.contains(&format!("line {line}")), "{source}: {have}");
        assert!(have.contains(text), "{source}: {have}");
    }
}

#[test]
fn values_are_tested_sliced_and_printed_as_in_jinja2() {
    for (source, text) in [
        (
            "{{ none is iterable }} {{ x is iterable }} {{ 'ab' is iterable }} {{ 7 is iterable }}",
            "False True True False",
        ),
        (
            "{{ 'abc' is sequence }} {{ {} is sequence }} {{ [] is sequence }} {{ none is sequence }}",
            "True True True False",
        ),
        ("{% if tools is iterable and tools | length > 0 %}tools{% else %}no tools{% endif %}", "no tools"),
        ("{{ x | length }}{{ 'abc' | count }}", "03"),
        (
            "{{ ''[::-1] }}|{{ [][::-1] }}|{{ 'abc'[::-1] }}|{{ 'abcdef'[1:-1:2] }}|{{ [1, 2, 3][-2:] }}",
            "|[]|cba|bd|[2, 3]",
        ),
        ("{{ 'abc'[5:] }}{{ 'abc'[:-9] }}{{ '談談UFO'[1:3] }}", "談U"),
        ("{{ 0.0000001 }} {{ 1e16 }} {{ 0.5 }} {{ 3 }}", "1e-07 1e+16 0.5 3"),
        ("{{ 'prefix-x'.removeprefix('prefix-') }} {{ 'x.py'.removesuffix('.py') }}", "x x"),
    ] {
        let lower = |text: &str| text.replace("True", "true").replace("False", "false");
        assert_eq!(lower(&says(source)), lower(text), "{source}");
    }
    assert!(error("{{ none | length }}").contains("length"));
    assert!(error("{{ 'a'[::0] }}").contains("step"));
}

#[test]
fn numbers_of_tools_come_out_as_they_went_in() {
    let tools: Value =
        serde_json::from_str(r#"[{"x": 92853.18241295399, "y": 0.1, "z": 18446744073709551615}]"#)
            .expect("json");
    let template = ChatTemplate::compile("{{ tools | tojson }}").expect("compiles");
    let text = template.render(&[], Some(&tools), false, &Map::new()).expect("renders");
    assert_eq!(text, r#"[{"x": 92853.18241295399, "y": 0.1, "z": 18446744073709551615}]"#);
}
