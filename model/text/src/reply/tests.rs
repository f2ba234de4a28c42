//! Whole answers, as they should be read. `cuts` reads them in pieces.
mod cuts;

use super::{Part::*, *};
use serde_json::json;

/// Takes an answer in pieces and puts neighbours of one kind together.
fn read<'a>(options: &Options, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Part> {
    let mut parser = ReplyParser::new(options.clone());
    let mut parts: Vec<Part> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    parts.extend(parser.finish());
    merged(parts)
}

fn merged(parts: Vec<Part>) -> Vec<Part> {
    let mut all = Vec::new();
    for part in parts {
        match (all.last_mut(), part) {
            (Some(Text(a)), Text(b)) | (Some(Reasoning(a)), Reasoning(b)) => a.push_str(&b),
            (Some(CallArguments { index: i, delta: a }), CallArguments { index, delta: b })
                if *i == index =>
            {
                a.push_str(&b);
            }
            (_, part) => all.push(part),
        }
    }
    all
}

fn tools() -> Options {
    Options { tools: true, ..Options::default() }
}

fn thinking() -> Options {
    Options { thinking: true, tools: true, schemas: None }
}

fn text(text: &str) -> Part {
    Text(text.into())
}

fn reasoning(text: &str) -> Part {
    Reasoning(text.into())
}

fn call(index: usize, name: &str, arguments: &str) -> [Part; 3] {
    let [start, more] = begun(index, name, arguments);
    [start, more, CallEnd { index }]
}

fn begun(index: usize, name: &str, arguments: &str) -> [Part; 2] {
    [CallStart { index, name: name.into() }, CallArguments { index, delta: arguments.into() }]
}

#[test]
fn reasoning_ends_at_its_tag_and_loses_the_newlines_around() {
    let parts = [reasoning("Let me\n\nsee."), text("Yes.\n")];
    assert_eq!(read(&tools(), ["<think>\n\nLet me\n\nsee.\n\n</think>\n\nYes.\n"]), parts);
    assert_eq!(read(&tools(), [" \n<think>Let me\n\nsee.</think>Yes.\n"]), parts);
    assert_eq!(read(&thinking(), ["Let me\n\nsee.\n</think>\n\nYes.\n"]), parts);
    assert_eq!(read(&thinking(), ["<think>\nLet me\n\nsee.\n</think>\n\nYes.\n"]), parts, "opened again");
    assert_eq!(read(&tools(), ["<think>\n\n</think>\n\nYes."]), [text("Yes.")]);
    assert_eq!(read(&thinking(), ["</think>Yes."]), [text("Yes.")]);
    assert_eq!(read(&thinking(), ["\n \n</think>\n Yes."]), [reasoning(" "), text(" Yes.")]);
}

#[test]
fn reasoning_without_an_end_is_all_there_is() {
    assert_eq!(read(&tools(), ["<think>\na </thin\n"]), [reasoning("a </thin\n")]);
    assert_eq!(read(&thinking(), ["a\n<tool_call>"]), [reasoning("a\n<tool_call>")]);
    assert_eq!(read(&thinking(), [" <thin"]), [reasoning(" <thin")]);
    assert_eq!(read(&thinking(), [" <"]), [reasoning(" <")]);
    assert_eq!(read(&thinking(), ["\n"]), []);
    assert_eq!(read(&thinking(), []), []);
}

#[test]
fn a_think_tag_that_does_not_begin_the_answer_is_text() {
    for answer in [
        "So <think>\na</think> b",
        "</think> a",
        "<<think>",
        " <thinking>",
        "a\n</think>\n\nb",
        " \n",
        "<think",
    ] {
        assert_eq!(read(&tools(), [answer]), [text(answer)]);
    }
    let again = "<think>a</think><think>b</think>";
    assert_eq!(read(&tools(), [again]), [reasoning("a"), text("<think>b</think>")]);
}

#[test]
fn json_calls_are_told_in_the_models_own_characters() {
    let arguments = r#"{"city" : "Zürich \u00e9\n", "days":[1, 2.50]}"#;
    let answer = format!("Look:\n<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}}}\n</tool_call>");
    let parts = [&[text("Look:\n")][..], &call(0, "f", arguments)].concat();
    assert_eq!(read(&tools(), [answer.as_str()]), parts);
    let calls = "<tool_call>{\"name\": \"a\", \"arguments\": {}}</tool_call>\n";
    let parts =
        [&call(0, "a", "{}")[..], &call(1, "a", "{}"), &[text("\nand\n")], &call(2, "a", "{}")].concat();
    assert_eq!(read(&tools(), [format!(" {calls}{calls}and\n{calls}").as_str()]), parts);
    let thought = format!("I call <tool_call>.\n</think>\n\n \n{calls}");
    let parts = [&[reasoning("I call <tool_call>.")][..], &call(0, "a", "{}")].concat();
    assert_eq!(read(&thinking(), [thought.as_str()]), parts);
}

#[test]
fn tags_and_braces_inside_of_strings_end_nothing() {
    let arguments = r#"{"a": "</tool_call>}]{[\"}", "</tool_call>": {"b": "<tool_call>\\"}}"#;
    let answer = format!("<tool_call>{{\"name\": \"f\", \"arguments\": {arguments}}}</tool_call>");
    assert_eq!(read(&tools(), [answer.as_str()]), call(0, "f", arguments));
    let answer = "<tool_call><function=f><parameter=a>\n</function></tool_call>\n</param\n</parameter>\n\
                  </function></tool_call>";
    assert_eq!(read(&tools(), [answer]), call(0, "f", r#"{"a": "</function></tool_call>\n</param"}"#));
}

#[test]
fn arguments_may_come_first_or_as_a_string_or_not_at_all() {
    let of = |call: &str| read(&tools(), [format!("<tool_call>{call}</tool_call>").as_str()]);
    assert_eq!(
        of(r#"{"arguments": {"a": [1]}, "id": {"name": 3}, "name": "f"}"#),
        call(0, "f", r#"{"a": [1]}"#)
    );
    assert_eq!(
        of(r#"{"name": "\u0066", "arguments": "{\"a\": \"\\u00e9\\n\"}"}"#),
        call(0, "f", r#"{"a": "\u00e9\n"}"#)
    );
    assert_eq!(of(r#"{"arguments": "{\"a\": 1}", "name": "f"}"#), call(0, "f", r#"{"a": 1}"#));
    for none in
        [r#"{"name": "f"}"#, r#"{"arguments": null, "name": "f"}"#, r#"{"name": "f", "arguments": ""}"#]
    {
        assert_eq!(of(none), call(0, "f", "{}"), "{none}");
    }
    let twice = r#"{"name": "f", "name": "g", "arguments": {"a": 1}, "arguments": {"b": 1}}"#;
    assert_eq!(of(twice), call(0, "f", r#"{"a": 1}"#));
}

#[test]
fn a_call_is_told_as_soon_as_it_is_known() {
    let mut parser = ReplyParser::new(tools());
    assert_eq!(parser.push("Hi <"), [text("Hi ")]);
    assert_eq!(parser.push("b> <tool_call"), [text("<b> ")]);
    assert_eq!(parser.push(">\n{\"name\": \"f"), []);
    assert_eq!(parser.push("\", \"argum"), [CallStart { index: 0, name: "f".into() }]);
    assert_eq!(parser.push("ents\": {\"a\": \"b"), [CallArguments { index: 0, delta: "{\"a\": \"b".into() }]);
    assert_eq!(parser.push("\\"), [CallArguments { index: 0, delta: "\\".into() }]);
    assert_eq!(parser.push("n\"}}\n</tool_call"), [CallArguments { index: 0, delta: "n\"}".into() }]);
    assert_eq!(parser.push("> "), [CallEnd { index: 0 }]);
    assert_eq!(parser.push("<tool_call><function=g"), []);
    assert_eq!(parser.push("><parameter=a>1"), [CallStart { index: 1, name: "g".into() }]);
    assert_eq!(parser.push("2</parameter>"), [CallArguments { index: 1, delta: "{\"a\": 12".into() }]);
    assert_eq!(parser.push("</function>"), [CallArguments { index: 1, delta: "}".into() }]);
    assert_eq!(parser.push("</tool_call>\n"), [CallEnd { index: 1 }]);
    assert_eq!(parser.finish(), []);
    let mut parser = ReplyParser::new(thinking());
    assert_eq!(parser.push("\nSo\n\n"), [reasoning("So")]);
    assert_eq!(parser.push("on\n<"), [reasoning("\n\non")]);
    assert_eq!(parser.push("/think>\n"), []);
    assert_eq!(parser.push("\nA"), [text("A")]);
}

#[test]
fn values_between_tags_become_json() {
    let value = |value: &str, schema: Value| {
        let tool = |name: &str, schema: &Value| {
            let parameters = json!({"type": "object", "properties": {"a": schema}});
            json!({"type": "function", "function": {"name": name, "parameters": parameters}})
        };
        let schemas = json!([tool("g", &json!({"type": "string"})), tool("f", &schema)]);
        let options = Options { tools: true, thinking: false, schemas: Some(schemas) };
        let answer = format!(
            "<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        );
        let parts = read(&options, [answer.as_str()]);
        let [CallStart { .. }, CallArguments { delta, .. }, CallEnd { .. }] = &parts[..] else {
            panic!("{parts:?}")
        };
        let json: Value = serde_json::from_str(delta).expect("valid");
        (json["a"].clone(), delta["{\"a\": ".len()..delta.len() - 1].to_string())
    };
    let integer = || json!({"type": "integer"});
    for own in ["12", "-0.50", "1e3", "true", "null", "[1,\n 2]", "{\"b\": \"\\u00e9\"}", " 7 "] {
        assert_eq!(value(own, integer()).1, own.trim());
        assert_eq!(value(own, json!({"type": ["string", "number"]})).1, own.trim());
        assert_eq!(value(own, json!({"type": "string"})).0, own);
    }
    for string in
        ["", "two\nlines\n", "\n\n", "\"quoted\"", "12a", "True", "1e999", "é\t\u{1}\\", "[1", " a "]
    {
        assert_eq!(value(string, integer()).0, string);
        assert_eq!(value(string, json!({"type": "string"})).0, string);
    }
    for optional in
        [json!({"anyOf": [{"type": "string"}, {"type": "null"}]}), json!({"type": ["string", "null"]})]
    {
        assert_eq!(value("12", optional.clone()).0, "12");
        assert_eq!(value("null", optional).0, Value::Null);
    }
    assert_eq!(value("12", json!(true)).0, 12);
    assert_eq!(value("12", json!({"type": 3, "anyOf": {}})).0, 12);
}

#[test]
fn calls_between_tags_have_any_number_of_parameters() {
    let answer = "<tool_call>\n<function=write file>\n<parameter=\"p>\n1\n</parameter>\n\
                  <parameter=b>x</parameter>\n</function>\n</tool_call>\n\
                  <tool_call>\n<function=now>\n</function>\n</tool_call>";
    let parts = [call(0, "write file", r#"{"\"p": 1, "b": "x"}"#), call(1, "now", "{}")].concat();
    assert_eq!(read(&tools(), [answer]), parts);
    for schemas in [json!(null), json!([1, {"function": 2}, {"function": {"name": "now", "parameters": []}}])]
    {
        let options = Options { schemas: Some(schemas), ..tools() };
        assert_eq!(read(&options, [answer]), parts);
    }
}

#[test]
fn a_tag_may_follow_one_that_has_only_begun() {
    let answer =
        "<think>a<</think>b<tool<tool_call><function=f><parameter=a>1 </</parameter></function></tool_call>";
    let parts = [&[reasoning("a<"), text("b<tool")][..], &call(0, "f", r#"{"a": "1 </"}"#)].concat();
    assert_eq!(read(&tools(), [answer]), parts);
}

#[test]
fn a_call_without_a_name_is_text() {
    for answer in [
        "<tool_call>",
        "\n <tool_call>\n",
        "a <tool_call>\n{\"arguments\": {\"a\": 1}}\n</tool_call> b",
        "<tool_call>\n{}\n</tool_call>",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": 7}</tool_call>",
        "<tool_call>{\"name\": \"\\ud800\"}</tool_call>",
        "<tool_call>{\"arguments\": [], \"name\": \"f\"}</tool_call>",
        "<tool_call>{\"arguments\": \"[]\", \"name\": \"f\"}</tool_call>",
        "<tool_call>{\"name\": \"f",
        "<tool_call>{'name': 'f'}</tool_call>",
        "<tool_call>[{\"name\": \"f\"}]</tool_call>",
        "<tool_call>f()</tool_call>",
        "<tool_call>\n<function=>\n</function></tool_call>",
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=a<b></function></tool_call>",
        "<tool_call>\n<fun{\"name\": \"f\"}",
        "<tool_call></tool_call>",
        "<tool_call><tool_",
        "</tool_call>",
        "<tool_calls>",
        "< tool_call>{\"name\": \"f\"}",
    ] {
        assert_eq!(read(&tools(), [answer]), [text(answer)]);
        let after = [call(0, "f", "{}").to_vec(), vec![text(answer)]].concat();
        assert_eq!(read(&tools(), ["<tool_call>{\"name\": \"f\"}</tool_call>", answer]), after);
    }
    let whole = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    assert_eq!(read(&Options::default(), [whole]), [text(whole)], "without tools");
    let next = ["<tool_call>\n", whole].concat();
    assert_eq!(
        read(&tools(), [next.as_str()]),
        [vec![text("<tool_call>\n")], call(0, "f", "{}").to_vec()].concat()
    );
}

#[test]
fn a_damaged_call_that_was_begun_has_no_end_and_the_rest_is_text() {
    for (answer, arguments, rest) in [
        ("{\"name\": \"f\", \"arguments\": {\"a\": 1}</tool_call>", "{\"a\": 1}", "</tool_call>"),
        ("{\"name\": \"f\", \"arguments\": {\"a\": 1}}}</tool_call>", "{\"a\": 1}", "}</tool_call>"),
        ("{\"name\": \"f\", \"arguments\": {\"a\": tru}}", "{\"a\": tru", "}}"),
        ("{\"name\": \"f\", \"arguments\": {\"a\": \"\n\"}}", "{\"a\": \"", "\n\"}}"),
        ("{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_cull>", "{\"a\": 1}", "\n</tool_cull>"),
        ("<function=f><parameter=a>1</parameter></functions>", "{\"a\": 1", "</functions>"),
        ("<function=f><parameter=a>1</parameter><b>\n", "{\"a\": 1", "<b>\n"),
        ("<function=f><parameter=a>1</parameter><parameter=>\n", "{\"a\": 1", "<parameter=>\n"),
        ("<function=f><parameter=a>1</parameter></function>\nx", "{\"a\": 1}", "\nx"),
    ] {
        let answer = format!("<tool_call>{answer}<tool_call>\n<function=g></function></tool_call>");
        let parts = [&begun(0, "f", arguments)[..], &[text(rest)], &call(1, "g", "{}")].concat();
        assert_eq!(read(&tools(), [answer.as_str()]), parts);
    }
    let answer = "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>";
    let parts = [CallStart { index: 0, name: "f".into() }, text(", \"arguments\": [1]}</tool_call>")];
    assert_eq!(read(&tools(), [answer]), parts);
}

#[test]
fn a_call_that_the_end_cuts_has_no_end() {
    for (answer, arguments) in [
        ("{\"name\": \"f\", \"arguments\": {\"a\": 1}}", "{\"a\": 1}"),
        ("{\"name\": \"f\", \"arguments\": {\"a\": \"b</tool_c", "{\"a\": \"b</tool_c"),
        ("{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call", "{\"a\": 1}"),
        ("<function=f><parameter=a>1</parameter></func", "{\"a\": 1"),
        ("<function=f><parameter=a>1</parameter>\n<parameter=b", "{\"a\": 1"),
        ("<function=f><parameter=a>1</parameter></function>", "{\"a\": 1}"),
    ] {
        assert_eq!(read(&tools(), ["<tool_call>", answer]), begun(0, "f", arguments));
    }
    let open = "<tool_call><function=f><parameter=a>1</parameter>\n<parameter=b>\nlong</param";
    let parts = [&begun(0, "f", "{\"a\": 1")[..], &[text("\n<parameter=b>\nlong</param")]].concat();
    assert_eq!(read(&tools(), [open]), parts, "a value is not lost");
    let open = "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1";
    let parts = [CallStart { index: 0, name: "f".into() }, text(", \"arguments\": \"{\\\"a\\\": 1")];
    assert_eq!(read(&tools(), [open]), parts, "nor one in a string");
}
