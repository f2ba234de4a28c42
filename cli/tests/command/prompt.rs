//! What a model is given: `--show-prompt`, `--template-arg`, `--tools`, `q4 tokenize`, and what it would have
//! said first.
use crate::{document, err, json, out, q4, run};
use serde_json::{Value, json as value};
use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};
use tempfile::TempDir;

/// The demo model with another chat template.
fn model(template: &str) -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo");
    for file in std::fs::read_dir(demo).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let name = dir.path().to_str().unwrap().to_owned();
    (dir, name)
}

const TEMPLATE: &str = "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}\
    <think></think>{% endif %}{% endif %}";

/// Runs `q4` with `input` on its standard input.
fn piped(args: &[&str], input: &str) -> Output {
    let mut child =
        q4().args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn the_prompt_is_shown_as_the_model_gets_it() {
    let args = ["-p", "Who are you?", "--system", "Be brief."];
    let shown = json("generate", &[&args[..], &["--show-prompt"]].concat());
    let want = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(shown["prompt"], want);
    assert!(shown.get("text").is_none() && shown.get("executed").is_none(), "nothing ran: {shown}");
    let ran = json("generate", &[&args[..], &["-n", "1"]].concat());
    assert_eq!(ran["prompt_ids"], shown["prompt_ids"]);
    assert_eq!(shown["prompt_tokens"], ran["prompt_tokens"]);
    assert_eq!(ran["prompt_ids"].as_array().unwrap().len() as u64, ran["prompt_tokens"].as_u64().unwrap());

    let text = out(&run(&["generate", "-p", "Who?", "--raw", "--show-prompt"]));
    let ids = json("tokenize", &["demo", "Who?"])["ids"].clone();
    let ids: Vec<_> = ids.as_array().unwrap().iter().map(Value::to_string).collect();
    assert_eq!(text, format!("Who?\n{} tokens: {}\n", ids.len(), ids.join(",")));
}

#[test]
fn variables_and_tools_reach_the_template() {
    let (dir, name) = model(TEMPLATE);
    let tools = dir.path().join("tools.json");
    std::fs::write(
        &tools,
        r#"[{"type": "function", "n": 123456789012345678901234567890, "x": -0, "y": 1e999}]"#,
    )
    .unwrap();
    let tools = tools.to_str().unwrap();
    let base = ["generate", name.as_str(), "-p", "Hi", "--show-prompt", "--json"];
    let shown = |more: &[&str]| {
        let output = run(&[&base[..], more].concat());
        assert!(output.status.success(), "{}", err(&output));
        (document("generate", &output)["prompt"].as_str().unwrap().to_owned(), err(&output))
    };
    let (plain, said) = shown(&[]);
    assert_eq!((plain.contains("think"), plain.contains("tools"), said.as_str()), (false, false, ""));
    assert!(shown(&["--template-arg", "enable_thinking=false"]).0.ends_with("<think></think>"));
    assert_eq!(shown(&["--template-arg", "enable_thinking=true"]).0, plain);
    let (with_tools, said) = shown(&["--tools", tools]);
    let list = r#"<tools>[{"type": "function", "n": 123456789012345678901234567890, "x": 0, "y": Infinity}]</tools>"#;
    assert!(with_tools.starts_with(list) && said.is_empty(), "{with_tools} {said}");
    // A slip in a name would change nothing and say nothing.
    assert!(shown(&["--template-arg", "enable_thinkng=false"]).1.contains("never looks at it"));
    // The same in a conversation of the terminal: its first turn computes that many tokens.
    let chat =
        piped(&["chat", &name, "--json", "-n", "1", "--template-arg", "enable_thinking=false"], "Hi\n");
    assert!(chat.status.success(), "{}", err(&chat));
    let args = [name.as_str(), "-p", "Hi", "--show-prompt", "--template-arg", "enable_thinking=false"];
    assert_eq!(document("chat", &chat)["prompt_tokens"], json("generate", &args)["prompt_tokens"]);
}

#[test]
fn a_template_without_tools_says_that_nobody_sees_them() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tools.json");
    std::fs::write(&file, r#"[{"type": "function"}]"#).unwrap();
    let output = run(&["generate", "-q", "-p", "Hi", "--show-prompt", "--tools", file.to_str().unwrap()]);
    assert!(output.status.success() && err(&output).contains("knows no tools"), "{}", err(&output));
}

#[test]
fn what_cannot_be_given_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tools.json");
    for (text, said) in [("{}", "another kind of JSON"), ("[1]", "item 0"), ("[", "EOF"), ("", "EOF")] {
        std::fs::write(&file, text).unwrap();
        let output = run(&["generate", "-p", "Hi", "--tools", file.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(
            err(&output).contains("need: a JSON list") && err(&output).contains(said),
            "{}",
            err(&output)
        );
    }
    let status = |args: &[&str]| run(args).status.code();
    let missing = dir.path().join("missing");
    assert_eq!(status(&["generate", "-p", "Hi", "--tools", missing.to_str().unwrap()]), Some(8));
    for bad in ["enable_thinking", "a-b=1", "messages=[]", "tools=[]"] {
        assert_eq!(status(&["generate", "-p", "Hi", "--template-arg", bad]), Some(2), "{bad}");
    }
    assert_eq!(status(&["generate", "-p", "Hi", "--raw", "--template-arg", "a=1"]), Some(2));
    assert_eq!(status(&["generate", "--turns", "-", "--show-prompt"]), Some(2));
    assert_eq!(status(&["generate", "-p", "Hi", "--top-logprobs", "0"]), Some(2));
    assert_eq!(status(&["tokenize", "demo", "Hi", "--template-arg", "a=1"]), Some(2));
    assert_eq!(status(&["tokenize", "demo", "Hi", "--conversation", "x"]), Some(2));
    let none = piped(&["tokenize", "demo", "--conversation", "-"], "7");
    assert!(none.status.code() == Some(4) && err(&none).contains("Q4-E0214"), "{}", err(&none));
}

#[test]
fn texts_become_tokens_and_tokens_texts() {
    let text = "Who are you? 談談<|im_end|>";
    let report = json("tokenize", &["demo", text]);
    let ids = report["ids"].as_array().unwrap();
    assert_eq!(report["tokens"], ids.len());
    let pieces = report["pieces"].as_array().unwrap();
    assert_eq!(pieces.iter().map(|p| p["id"].clone()).collect::<Vec<_>>(), *ids);
    let last = pieces.last().unwrap();
    assert_eq!((&last["text"], &last["special"]), (&"<|im_end|>".into(), &true.into()));
    assert!(pieces[..pieces.len() - 1].iter().all(|p| p["special"] == false), "{report}");
    let list: Vec<_> = ids.iter().map(Value::to_string).collect();
    let back = run(&["tokenize", "demo", "--decode", &list.join(",")]);
    assert_eq!(out(&back), format!("{text}\n"));
    assert_eq!(json("tokenize", &["demo", "--decode", &list.join(" ")])["ids"], report["ids"]);

    let table = out(&run(&["tokenize", "demo", "Who are you?"]));
    assert!(table.contains("\"Who\"") || table.contains("\"W\""), "{table}");
    assert!(table.lines().last().unwrap().contains(" tokens: "), "{table}");
    assert_eq!(out(&piped(&["tokenize", "demo", "-"], "Who are you?\n")), table);
    assert_eq!(out(&piped(&["tokenize"], "Who are you?")), table);

    for bad in ["1,x", "99999999", "-1", ","] {
        let output = piped(&["tokenize", "demo", "--decode"], bad);
        assert_eq!(output.status.code(), Some(2), "{bad}");
        assert!(err(&output).contains("need: whole numbers"), "{}", err(&output));
    }
}

#[test]
fn a_conversation_becomes_tokens() {
    let (dir, name) = model(TEMPLATE);
    let file = dir.path().join("chat.json");
    let messages = value!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": null}]);
    std::fs::write(&file, messages.to_string()).unwrap();
    let file = file.to_str().unwrap();
    let report = json("tokenize", &[&name, "--conversation", file, "--no-generation-prompt"]);
    assert_eq!(report["text"], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n");
    let with_tools = value!({"messages": messages, "tools": [{"name": "f"}]}).to_string();
    let output = piped(&["tokenize", &name, "--conversation", "-", "--json"], &with_tools);
    let text = document("tokenize", &output)["text"].as_str().unwrap().to_owned();
    assert!(
        text.starts_with("<tools>[{\"name\": \"f\"}]</tools>\n") && text.ends_with("assistant\n"),
        "{text}"
    );
}

#[test]
fn the_likeliest_tokens_are_those_of_the_logits() {
    let args = ["-p", "Who are you?", "-n", "3", "--top-logprobs", "4", "--kv-cache", "float32"];
    let report = json("generate", &args);
    let steps = report["top_logprobs"].as_array().unwrap();
    let ids = report["token_ids"].as_array().unwrap();
    assert_eq!((steps.len(), ids.len()), (3, 3));
    for (step, id) in steps.iter().zip(ids) {
        let step = step.as_array().unwrap();
        assert_eq!((step.len(), &step[0]["id"]), (4, id), "greedy takes the first");
        let logprobs: Vec<_> = step.iter().map(|c| c["logprob"].as_f64().unwrap()).collect();
        assert!(logprobs.is_sorted_by(|a, b| a >= b) && logprobs[0] < 0.0, "{logprobs:?}");
    }
    // The same number from the logits as they are.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("logits.safetensors");
    let prompt: Vec<_> = report["prompt_ids"].as_array().unwrap().iter().map(Value::to_string).collect();
    json("logits", &["demo", "--ids", &prompt.join(","), "--out", file.to_str().unwrap()]);
    let bytes = std::fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor("logits").unwrap();
    let vocab = tensor.shape()[1];
    let row = &tensor.data()[tensor.data().len() - 4 * vocab..];
    let row: Vec<f64> =
        row.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect();
    let whole = row.iter().map(|l| l.exp()).sum::<f64>().ln();
    for candidate in steps[0].as_array().unwrap() {
        let exact = row[candidate["id"].as_u64().unwrap() as usize] - whole;
        assert!((candidate["logprob"].as_f64().unwrap() - exact).abs() < 1e-4, "{candidate}: {exact}");
    }
    let text = out(&run(&["generate", "-p", "Who are you?", "-n", "1", "--top-logprobs", "2"]));
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!(lines[1].contains("logprob") && lines[2].trim_start().starts_with('1'), "{text}");
    assert!(json("generate", &["-p", "Hi", "-n", "1"]).get("top_logprobs").is_none());
}
