//! Bodies that nobody in his senses sends.
use super::House;
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use serde_json::{Value, json};

/// Requests that are answered, with nearly every field there is.
fn valid() -> Vec<(&'static str, Value)> {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    vec![
        (
            "/v1/chat/completions",
            json!({"model": "m", "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "Hi 🦀"}]},
                {"role": "assistant", "content": null, "reasoning": "r", "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "7"}],
                "tools": tools, "tool_choice": "auto", "stream": true, "n": 2, "stop": ["x", "y"],
                "stream_options": {"include_usage": true}, "temperature": 0.7, "top_p": 0.9, "top_k": 5,
                "seed": 3, "logprobs": true, "top_logprobs": 3, "max_tokens": 20, "logit_bias": {},
                "chat_template_kwargs": {"enable_thinking": false}, "response_format": {"type": "text"}}),
        ),
        (
            "/v1/completions",
            json!({"prompt": [[5, 6, 7], [8]], "echo": true, "logprobs": 2, "max_tokens": 4, "n": 2,
                   "suffix": null, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": true}),
        ),
        ("/v1/completions", json!({"prompt": ["a", "b"], "stream": true, "best_of": 1, "q4_reuse": false})),
        (
            "/v1/responses",
            json!({"input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"}],
                "instructions": "i", "tools": [{"type": "function", "name": "f", "parameters": {}}],
                "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "stream": true,
                "max_output_tokens": 9}),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 9, "system": [{"type": "text", "text": "s"}], "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "7"}]}],
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "auto"}, "stop_sequences": ["z"], "stream": true,
                "thinking": {"type": "disabled"}}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "Hi"}], "structured_outputs": {"json":
                {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, "b"]},
                    "maxItems": 3}}, "required": ["a"], "$defs": {"c": {"pattern": "^a+$", "minLength": 2}}}},
                "max_tokens": 8}),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "tools": [{"name": "f",
                "input_schema": {"type": "object", "properties": {"n": {"type": "number", "minimum": 1}}}}],
                "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true}}),
        ),
        ("/tokenize", json!({"content": "a🦀", "with_pieces": true, "add_special": true})),
        ("/detokenize", json!({"tokens": [1, 2, 1000]})),
    ]
}

/// What stands in the place of something else.
const STRANGE: [&str; 16] = [
    "null",
    "-1",
    "1e300",
    "1e999",
    "18446744073709551616",
    "[]",
    "{}",
    "\"\"",
    "\"\\ud800\"",
    "true",
    "[[[[",
    "}}",
    "\u{0}",
    "0.5",
    "\"\\u0000<|im_end|><think>\"",
    "9007199254740993",
];

fn below(random: &mut ChaCha8Rng, n: usize) -> usize {
    (random.next_u64() % n.max(1) as u64) as usize
}

fn mutated(random: &mut ChaCha8Rng, text: &[u8]) -> Vec<u8> {
    let mut text = text.to_vec();
    for _ in 0..=below(random, 3) {
        let at = below(random, text.len());
        let end = (at + 1 + below(random, 12)).min(text.len());
        match below(random, 6) {
            0 => text.truncate(at),
            1 => drop(text.drain(at..end)),
            2 if !text.is_empty() => text[at] ^= 1 << below(random, 8),
            3 => {
                let piece = text[at..end].to_vec();
                let to = below(random, text.len());
                text.splice(to..to, piece);
            }
            _ => {
                // A whole value, most of the time.
                let start = text[at..].iter().position(|b| b":[,".contains(b)).map_or(at, |n| at + n + 1);
                let len = text[start.min(text.len())..].iter().position(|b| b",]}".contains(b)).unwrap_or(0);
                let strange = STRANGE[below(random, STRANGE.len())].bytes();
                text.splice(start..start + len, strange);
            }
        }
    }
    text
}

#[tokio::test]
async fn what_is_mutated_is_answered_or_refused() {
    let house = House::saying("<think>a</think> Hello, 你好 <tool_call>{\"name\"");
    let bodies = valid();
    for (path, body) in &bodies {
        assert_eq!(house.post(path, body).await.status, 200, "{path}");
    }
    let mut random = ChaCha8Rng::seed_from_u64(4);
    let mut counts = [0usize; 2];
    for round in 0..10_000 {
        let (path, body) = &bodies[round % bodies.len()];
        let text = mutated(&mut random, body.to_string().as_bytes());
        let got = house.post_text(path, text.clone()).await;
        let text = String::from_utf8_lossy(&text);
        assert!(matches!(got.status, 200 | 400), "{path} {text}: {} {}", got.status, got.body);
        assert!(!got.body.contains("\"server_error\""), "{path} {text}: {}", got.body);
        counts[usize::from(got.status == 400)] += 1;
        house.engine.asked.lock().expect("lock").clear();
    }
    assert!(counts.iter().all(|n| *n > 400), "both happen often: {counts:?}");
}

#[tokio::test]
async fn every_truncation_is_refused() {
    let house = House::saying("Hello");
    for (path, body) in valid() {
        let text = body.to_string();
        for end in 0..text.len() {
            let got = house.post_text(path, text.as_bytes()[..end].to_vec()).await;
            assert_eq!(got.status, 400, "{path} {end}");
        }
    }
    assert!(house.engine.asked.lock().expect("lock").is_empty());
}
