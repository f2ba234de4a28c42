//! Every layout, as it is meant and as it is broken.
use super::*;

/// What the model sees of the only row, with what is learnt in brackets.
fn seen(p: &Parts, name: &str, text: &str) -> Result<String> {
    let path = p.file(name, text);
    let parts = Text {
        tokenizer: &p.tokenizer,
        template: &p.template,
        end_of_text: p.tokenizer.id_of("<|endoftext|>").expect("token"),
        end_of_turn: "<|im_end|>",
    };
    let shown = preview(&[path], &parts, &PLAIN, 1, &ThreadPool::new(1))?;
    let text = shown[0].render(false);
    Ok(text.split_once('\n').expect("a heading").1.to_owned())
}

fn chat(turns: &[(&str, &str)]) -> String {
    let turn = |(role, text): &(&str, &str)| match *role {
        "assistant" => format!("<|im_start|>assistant\n⟦{text}<|im_end|>⟧\n"),
        "silent" => format!("<|im_start|>assistant\n{text}<|im_end|>\n"),
        role => format!("<|im_start|>{role}\n{text}<|im_end|>\n"),
    };
    turns.iter().map(turn).collect()
}

#[test]
fn every_layout_is_the_conversation_it_means() {
    let p = Parts::new("");
    let ask = [("user", "a"), ("assistant", "b")];
    let more = [("system", "s"), ("user", "x"), ("assistant", "y"), ("user", "a"), ("assistant", "b")];
    let rows: [(&str, &[(&str, &str)]); 14] = [
        (r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#, &ask),
        (
            r#"{"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
            &ask,
        ),
        (
            r#"{"system": "s", "conversations": [{"from": "user", "value": "x"}, {"from": "assistant", "value": "y"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#,
            &more,
        ),
        (
            r#"{"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": null}]}"#,
            &more,
        ),
        (
            r#"{"system": "s", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y", "weight": 0}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#,
            &[("system", "s"), ("user", "x"), ("silent", "y"), ("user", "a"), ("assistant", "b")],
        ),
        (r#"{"instruction": "a", "input": "", "output": "b"}"#, &ask),
        (r#"{"instruction": "a", "output": "b", "text": ""}"#, &ask),
        (r#"{"instruction": "a", "input": "in", "output": "b"}"#, &[("user", "a\nin"), ("assistant", "b")]),
        (r#"{"system": "s", "instruction": "a", "output": "b", "history": [["x", "y"]]}"#, &more),
        (r#"{"prompt": "a", "completion": "b", "label": 3}"#, &ask),
        (r#"{"prompt": "a", "response": "b", "system": null}"#, &ask),
        (
            r#"{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}"#,
            &[("user", "x"), ("silent", "y"), ("user", "a"), ("assistant", "b")],
        ),
        (
            r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b", "name": null}], "tools": "[]"}"#,
            &ask,
        ),
        (
            r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": null}], "tools": null}"#,
            &ask,
        ),
    ];
    for (i, (row, turns)) in rows.iter().enumerate() {
        assert_eq!(seen(&p, "a.jsonl", row).expect(row), chat(turns), "row {i}");
        // The same as a list over lines, with what the row has behind another.
        let list = format!("[\n  {row}\n]\n");
        assert_eq!(seen(&p, "a.json", &list).expect(row), chat(turns), "row {i} of a list");
    }
}

#[test]
fn calls_of_functions_reach_the_template() {
    let source = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + (m.tool_calls[0].function.name if \
                  m.tool_calls else m.content) + '<|im_end|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- \
                  '<|im_start|>assistant\n' -}}{%- endif -%}";
    let p = Parts::new(source);
    let row = r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{\"name\": \"clock\", \"arguments\": {}}"}, {"from": "observation", "value": "12"}, {"from": "gpt", "value": "noon"}], "tools": "[{\"name\": \"clock\"}]"}"#;
    let want = chat(&[("user", "a"), ("assistant", "clock"), ("tool", "12"), ("assistant", "noon")]);
    assert_eq!(seen(&p, "a.jsonl", row).expect("loaded"), want);
}

/// Ten wrong rows of each layout: each names its line and what would be right.
#[test]
fn wrong_rows_name_their_line_and_the_fix() {
    let p = Parts::new("");
    let good = r#"{"prompt": "a", "completion": "b"}"#;
    for (row, says) in include_str!("wrong.tsv").lines().filter_map(|l| l.split_once('\t')) {
        let text = format!("{good}\n\n{row}\n");
        let e = p.load("wrong.jsonl", &text, PLAIN).expect_err(row).to_string();
        assert!(
            e.contains("wrong.jsonl") && e.contains("line 3") | e.contains("wrong.jsonl:3"),
            "{row}: {e}"
        );
        assert!(e.contains(says), "{row}: need {says}, have {e}");
        assert!(e.contains("need") || e.contains("fix"), "{row}: {e}");
        let list = format!("[{good},\n\n{row}]");
        let e = p.load("wrong.json", &list, PLAIN).expect_err(row).to_string();
        assert!(e.contains("line 3") || e.contains("wrong.json:3"), "{row}: {e}");
    }
}

#[test]
fn parquet_is_read_as_the_rows_it_holds() {
    let p = Parts::new("");
    let files = [
        &include_bytes!("../../tests/data/messages.parquet")[..],
        include_bytes!("../../tests/data/gzip.parquet"),
        // Its library is C.
        #[cfg(feature = "zstd")]
        include_bytes!("../../tests/data/zstd.parquet"),
    ];
    for file in files {
        let data = p.load("a.parquet", file, PLAIN).expect("loaded");
        let learnt: Vec<_> = data.samples.iter().map(|s| p.learnt(s)).collect();
        assert_eq!(learnt, ["I am q4.<|im_end|>", "c<|im_end|>"]);
    }
    let bytes = include_bytes!("../../tests/data/bytes.parquet");
    let e = p.load("b.parquet", bytes, PLAIN).expect_err("bytes are no text").to_string();
    assert!(e.contains("row 1") && e.contains("bytes"), "{e}");
    for cut in [0, 4, 100, bytes.len() - 1] {
        let e = p.load("c.parquet", &bytes[..cut], PLAIN).expect_err("cut off");
        assert_eq!(e.code(), Code::Container, "{e}");
    }
    let mut flipped = include_bytes!("../../tests/data/messages.parquet").to_vec();
    for i in (0..flipped.len()).step_by(7) {
        flipped[i] ^= 0x5a;
        // Whatever it says, it says it without falling over.
        let _ = p.load("d.parquet", &flipped, PLAIN);
        flipped[i] ^= 0x5a;
    }
    let e = p.load("a.jsonl", bytes, PLAIN).expect_err("another name").to_string();
    assert!(e.contains("Parquet"), "{e}");
}

#[test]
fn files_that_are_no_rows_say_what_they_are() {
    let p = Parts::new("");
    for (name, bytes, says) in [
        ("a.json", &b"{\n \"prompt\": \"a\",\n \"completion\": \"b\"\n}\n"[..], "jq -c"),
        ("b.json", b"[{\"prompt\": \"a\", \"completion\": \"b\"},]", "line 1"),
        ("c.json", b"[\n{\"prompt\": \"a\"\n", "line"),
        ("d.jsonl", b"\x1f\x8b\x08", "gunzip"),
        ("e.jsonl", b"\x28\xb5\x2f\xfd\x00", "zstd -d"),
        ("f.jsonl", b"PK\x03\x04", "unzip"),
        ("g.arrow", b"ARROW1\0\0", "to_parquet"),
        ("h.csv", b"prompt,completion\na,b\n", "line 1"),
        ("i.json", b"[\n1\n]", "line 2"),
        ("j.json", b"[]", "nothing to learn"),
    ] {
        let e = p.load(name, bytes, PLAIN).expect_err(name).to_string();
        assert!(e.contains(says), "{name}: need {says}, have {e}");
    }
}

#[test]
fn a_preview_shows_what_is_lost() {
    let p = Parts::new("");
    let path = p.file("a.jsonl", CHAT);
    let parts =
        Text { tokenizer: &p.tokenizer, template: &p.template, end_of_text: 0, end_of_turn: "<|im_end|>" };
    let options = LoadOptions { max_len: Some(8), ..PLAIN };
    let shown = preview(&[path.clone(), path], &parts, &options, 6, &ThreadPool::new(2)).expect("shown");
    assert_eq!(shown.len(), 6);
    assert!(
        shown[1].note.as_deref().is_some_and(|n| n.contains("cut") && n.contains("dropped")),
        "{shown:?}"
    );
    assert!(shown[4].place.ends_with("a.jsonl:1") && shown[0].ids.len() <= 8);
    let learnt = |s: &Shown| s.spans.iter().any(|s| s.learnt);
    assert!(shown.iter().all(|s| learnt(s) == (s.learnt > 0)));
    assert!(shown.iter().any(|s| s.render(true).contains("\u{1b}[32m")));
}
