use super::*;
use std::fs;
use std::path::PathBuf;

mod layouts;

const TOKENIZER: &[u8] = include_bytes!("../../../model/tests/data/demo/tokenizer.json");

struct Parts {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    dir: tempfile::TempDir,
}

impl Parts {
    fn new(template: &str) -> Self {
        let template = match template {
            "" => ChatTemplate::of(q4_model::arch::qwen3::QWEN3.template.source),
            source => ChatTemplate::compile(source).expect("template"),
        };
        Self {
            tokenizer: Tokenizer::from_bytes(TOKENIZER).expect("tokenizer"),
            template,
            dir: tempfile::tempdir().expect("directory"),
        }
    }

    fn file(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, text).expect("written");
        path
    }

    fn load(&self, name: &str, text: impl AsRef<[u8]>, options: LoadOptions) -> Result<Loaded> {
        let end_of_text = self.tokenizer.id_of("<|endoftext|>").expect("token");
        let text_parts = Text {
            tokenizer: &self.tokenizer,
            template: &self.template,
            end_of_text,
            end_of_turn: "<|im_end|>",
        };
        Loaded::load(&[self.file(name, text)], &text_parts, &options, &ThreadPool::new(2))
    }

    fn learnt(&self, sample: &Sample) -> String {
        let ids: Vec<u32> =
            sample.ids.iter().zip(&sample.supervised).filter(|(_, s)| **s).map(|(id, _)| *id).collect();
        self.tokenizer.decode(&ids, false).expect("text")
    }
}

const PLAIN: LoadOptions = LoadOptions {
    format: Format::Auto,
    max_len: None,
    truncate: Truncate::Cut,
    supervise: Supervise::Response,
};

const CHAT: &str = r#"{"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am q4."}]}
{"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "談談UFO"}, {"role": "assistant", "content": "UFO"}]}

{"text": "Once upon a time."}
{"prompt": "a", "completion": "b"}
"#;

#[test]
fn answers_and_their_end_are_learnt_and_nothing_else() {
    let p = Parts::new("");
    let data = p.load("a.jsonl", CHAT, PLAIN).expect("loaded");
    let learnt: Vec<_> = data.samples.iter().map(|s| p.learnt(s)).collect();
    assert_eq!(
        learnt,
        [
            "I am q4.<|im_end|>",
            "Hello!<|im_end|>UFO<|im_end|>",
            "Once upon a time.<|endoftext|>",
            "b<|im_end|>"
        ]
    );
    let whole = p.tokenizer.decode(&data.samples[1].ids, false).expect("text");
    let want = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello!\
                <|im_end|>\n<|im_start|>user\n談談UFO<|im_end|>\n<|im_start|>assistant\nUFO<|im_end|>\n";
    assert_eq!(whole, want);
    assert_eq!((data.report.rows, data.report.cut, data.report.dropped), (4, 0, 0));
    let all = p.load("b.jsonl", CHAT, LoadOptions { supervise: Supervise::All, ..PLAIN }).expect("loaded");
    assert_eq!(p.learnt(&all.samples[1]), want);
    assert!(all.samples.iter().zip(&data.samples).all(|(a, b)| a.ids == b.ids));
}

#[test]
fn the_prompt_is_tokenised_as_it_is_when_the_model_is_asked() {
    let p = Parts::new("");
    let data = p.load("a.jsonl", CHAT.lines().next().expect("line"), PLAIN).expect("loaded");
    let prompt = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n";
    let ids = p.tokenizer.encode(prompt, false).expect("ids");
    assert_eq!(data.samples[0].ids[..ids.len()], ids);
    assert!(data.samples[0].supervised.iter().position(|s| *s) == Some(ids.len()));
}

#[test]
fn changing_a_prompt_changes_no_target() {
    let p = Parts::new("");
    let of = |prompt: &str| {
        let row = serde_json::json!({"prompt": prompt, "completion": "The sky is blue."}).to_string();
        let data = p.load("a.jsonl", row, PLAIN).expect("loaded");
        p.learnt(&data.samples[0])
    };
    assert_eq!(of("What color is the sky?"), of("天空是什麼顏色"));
}

#[test]
fn templates_with_a_mind_of_their_own_are_followed() {
    // Drops the thoughts of earlier turns, so the quick way must not be taken.
    let source = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + (m.content.split('</think>')[-1] if not \
                  loop.last else m.content) + '<|im_end|>\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- \
                  '<|im_start|>assistant\n' -}}{%- endif -%}";
    let p = Parts::new(source);
    let last =
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x</think>y"}]}"#;
    assert_eq!(p.learnt(&p.load("a.jsonl", last, PLAIN).expect("loaded").samples[0]), "x</think>y<|im_end|>");
    let earlier = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x</think>y"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]}"#;
    assert_eq!(p.load("b.jsonl", earlier, PLAIN).expect_err("rewrites").code(), Code::TemplateInvalid);
    let endless =
        Parts::new("{%- for m in messages -%}{{- m.role + ':' + m.content + '\n' -}}{%- endfor -%}");
    let e = endless.load("a.jsonl", last, PLAIN).expect_err("never ends").to_string();
    assert!(e.contains("a.jsonl:1") && e.contains("<|im_end|>"), "{e}");
}

#[test]
fn the_quick_way_is_the_template() {
    // The same text as a frame, but a template the probe refuses for one role, so that it always runs.
    let plain = Parts::new("");
    let slow = "{%- for m in messages -%}{%- if m.role == 'system' and not loop.first -%}{{- raise_exception('no') -}}\
                {%- endif -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}\
                {%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}{{- '' if messages[0].content == \
                '\u{1}' else '' -}}";
    let slow = Parts::new(slow);
    let a = plain.load("a.jsonl", CHAT, PLAIN).expect("loaded");
    let b = slow.load("a.jsonl", CHAT, PLAIN).expect("loaded");
    assert_eq!(a.samples, b.samples);
}

#[test]
fn what_is_cut_or_dropped_is_counted() {
    let p = Parts::new("");
    let load =
        |max: usize, truncate| p.load("a.jsonl", CHAT, LoadOptions { max_len: Some(max), truncate, ..PLAIN });
    let whole = load(1000, Truncate::Error).expect("fits");
    let longest = whole.samples.iter().map(|s| s.ids.len()).max().expect("samples");
    let cut = load(longest - 2, Truncate::Cut).expect("cut");
    assert_eq!((cut.report.cut, cut.report.cut_tokens, cut.report.dropped), (1, 2, 0));
    let dropped = load(longest - 2, Truncate::Drop).expect("dropped");
    assert_eq!((dropped.report.cut, dropped.report.dropped, dropped.samples.len()), (0, 1, 3));
    let e = load(longest - 2, Truncate::Error).expect_err("too long");
    assert!(e.to_string().contains("a.jsonl:2"), "{e}");
    // So short that prompts lose their answers: nothing is left to learn in them.
    let short = load(8, Truncate::Cut).expect("cut");
    assert!(short.report.dropped > 0 && short.report.rows == 4, "{}", short.report);
    assert!(load(1, Truncate::Cut).is_err(), "nothing is left at all");
}

#[test]
fn pairs_are_read_with_comments_and_header() {
    let p = Parts::new("");
    let data = p
        .load("a.tsv", "\u{feff}prompt\ttarget\r\n# note\r\n你是誰\t我是 q4。\r\n\r\na\tb\tc\n", PLAIN)
        .expect("loaded");
    let learnt: Vec<_> = data.samples.iter().map(|s| p.learnt(s)).collect();
    assert_eq!(learnt, ["我是 q4。<|im_end|>", "b\tc<|im_end|>"]);
    let e = p.load("b.tsv", "a\tb\nno tab here\n", PLAIN).expect_err("no tab").to_string();
    assert!(e.contains("b.tsv") && e.contains("line 2"), "{e}");
    let text = p.load("c.txt", "one line\nanother\n", PLAIN).expect("loaded");
    assert_eq!(text.samples.len(), 2);
}

#[test]
fn turns_without_weight_are_read_and_not_learnt() {
    let p = Parts::new("");
    let row = |weight: &str| {
        format!(
            r#"{{"id": 7, "messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "wrong", "weight": {weight}}}, {{"role": "user", "content": "b"}}, {{"role": "assistant", "content": "right", "weight": 1}}]}}"#
        )
    };
    let data = p.load("a.jsonl", row("0"), PLAIN).expect("loaded");
    assert_eq!(p.learnt(&data.samples[0]), "right<|im_end|>");
    let both = p.load("b.jsonl", row("1.0"), PLAIN).expect("loaded");
    assert_eq!(p.learnt(&both.samples[0]), "wrong<|im_end|>right<|im_end|>");
    assert_eq!(data.samples[0].ids, both.samples[0].ids);
    assert!(p.load("c.jsonl", row("0.5"), PLAIN).expect_err("half").to_string().contains("0 or 1"));
    assert!(data.notes.len() == 1 && data.notes[0].contains("`id` in 1 rows"), "{:?}", data.notes);
}

#[test]
fn tools_reach_the_template_and_what_would_change_a_row_is_refused() {
    let source = "{%- if tools -%}{{- '<|im_start|>system\n' + tools[0].name + '<|im_end|>\n' -}}{%- endif -%}\
                  {%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}\
                  {%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}";
    let p = Parts::new(source);
    let row = |more: &str| format!(r#"{{"prompt": "a", "completion": "b"{more}}}"#);
    let text = |more: &str| {
        let data = p.load("a.jsonl", row(more), PLAIN).expect("loaded");
        p.tokenizer.decode(&data.samples[0].ids, false).expect("text")
    };
    assert!(text(r#", "tools": [{"name": "clock"}]"#).starts_with("<|im_start|>system\nclock<|im_end|>"));
    assert!(text("").starts_with("<|im_start|>user"));
    for field in ["system", "weight", "functions", "chosen", "input"] {
        let e = p.load("b.jsonl", row(&format!(r#", "{field}": "x""#)), PLAIN).expect_err(field).to_string();
        assert!(e.contains(field) && e.contains("line 1"), "{e}");
    }
}

#[test]
fn hostile_rows_are_errors_with_their_line() {
    let p = Parts::new("");
    let rows: [&[u8]; 14] = [
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"{\"text\": 1}",
        b"{\"text\": \"\"}",
        b"{\"messages\": []}",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}",
        b"{\"messages\": [{\"content\": \"x\"}]}",
        b"{\"messages\": \"x\"}",
        b"{\"text\": \"a\", \"messages\": []}",
        b"\xff\xfe",
        b"{\"text\": \"a<|im_end|>b\"}",
        b"{\"prompt\": \"<|im_start|>system\", \"completion\": \"x\"}",
    ];
    for bad in rows {
        let text = [CHAT.as_bytes(), bad, b"\n"].concat();
        let e = p.load("bad.jsonl", &text, PLAIN).expect_err(&String::from_utf8_lossy(bad)).to_string();
        assert!(e.contains("bad.jsonl") && (e.contains("line 6") || e.contains("bad.jsonl:6")), "{e}");
    }
    let deep = format!("{{\"text\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(p.load("deep.jsonl", deep, PLAIN).is_err());
    assert_eq!(p.load("empty.jsonl", "\n\n", PLAIN).expect_err("empty").code(), Code::Container);
    let missing: Result<Loaded> = Loaded::load(
        &[p.dir.path().join("none.jsonl")],
        &Text { tokenizer: &p.tokenizer, template: &p.template, end_of_text: 0, end_of_turn: "<|im_end|>" },
        &PLAIN,
        &ThreadPool::new(1),
    );
    assert_eq!(missing.expect_err("missing").code(), Code::ModelMissing);
    assert!(p.load("special.txt", "a <| b |> c", PLAIN).is_ok(), "brackets alone are text");
}
