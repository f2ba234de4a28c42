use super::House;
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn a_text_is_continued_as_it_is() {
    let house = House::saying(" there. <think>x</think>");
    let got = house.post(PATH, &json!({"prompt": "Hello", "max_tokens": 50})).await;
    assert_eq!(house.engine.prompt(), "Hello");
    insta::assert_snapshot!(got.stable());
}

#[tokio::test]
async fn sixteen_tokens_are_made_unless_more_are_asked_for() {
    let house = House::saying("a");
    house.post(PATH, &json!({"prompt": "Hello"})).await;
    assert_eq!(house.engine.last().limits.max_tokens, 16);
}

#[tokio::test]
async fn prompts_have_four_forms() {
    let house = House::saying("!");
    let ids = |text: &str| super::engine::tokenizer().encode(text, false).expect("encodes");
    let (one, two) = (ids("Hello"), ids("you"));
    for (prompt, prompts) in [
        (json!("Hello"), vec![&one]),
        (json!(["Hello", "you"]), vec![&one, &two]),
        (json!(one), vec![&one]),
        (json!([one, two]), vec![&one, &two]),
    ] {
        house.engine.asked.lock().expect("lock").clear();
        let got = house.post(PATH, &json!({"prompt": prompt, "n": 2})).await.json();
        let asked: Vec<Vec<u32>> =
            house.engine.asked.lock().expect("lock").iter().map(|r| r.prompt.clone()).collect();
        let expected: Vec<Vec<u32>> =
            prompts.iter().flat_map(|ids| [(*ids).clone(), (*ids).clone()]).collect();
        assert_eq!(asked, expected, "{prompt}");
        assert_eq!(got["choices"].as_array().map(Vec::len), Some(expected.len()));
        let tokens: usize = prompts.iter().map(|ids| ids.len()).sum();
        assert_eq!(got["usage"]["prompt_tokens"], tokens);
    }
}

/// What lm-eval asks for: how likely a model finds a text that it is given as tokens.
#[tokio::test]
async fn a_prompt_is_weighed_where_it_is_repeated() {
    let ids = super::engine::tokenizer().encode("Hello, 你 x", false).expect("encodes");
    for (max_tokens, answered) in [(0, 0), (1, 1)] {
        let house = House::saying("yes");
        let body = json!({"prompt": [ids], "echo": true, "logprobs": 1, "max_tokens": max_tokens,
                          "temperature": 0, "seed": 1234});
        let got = house.post(PATH, &body).await;
        assert_eq!(got.status, 200, "{}", got.body);
        let choice = &got.json()["choices"][0];
        let list = |name: &str| choice["logprobs"][name].as_array().expect("a list").clone();
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(list(name).len(), ids.len() + answered, "{name}");
        }
        assert_eq!(
            (list("token_logprobs")[0].clone(), list("top_logprobs")[0].clone()),
            (Value::Null, Value::Null)
        );
        let text: Vec<char> = choice["text"].as_str().expect("a text").chars().collect();
        for ((token, offset), top) in list("tokens").iter().zip(list("text_offset")).zip(list("top_logprobs"))
        {
            let (token, offset) =
                (token.as_str().expect("a text"), offset.as_u64().expect("a place") as usize);
            let there: String = text[offset..].iter().take(token.chars().count()).collect();
            assert_eq!(there, token, "at {offset}");
            // The token itself is among the likely ones.
            assert!(top.is_null() || top.get(token).is_some(), "{top}");
        }
        assert!(house.engine.last().prompt_logprobs);
        assert_eq!(house.engine.last().limits.top_logprobs, 1);
    }
}

#[tokio::test]
async fn half_characters_are_told_by_their_bytes() {
    let body = json!({"prompt": "a", "logprobs": 0});
    let got = House::saying("🦀").post(PATH, &body).await.json();
    let tokens = got["choices"][0]["logprobs"]["tokens"].to_string();
    assert!(tokens.contains(r"bytes:\\xf0"), "{tokens}");
}

#[tokio::test]
async fn a_stream_repeats_its_prompt_first() {
    let body = json!({"prompt": "Hello", "echo": true, "logprobs": 1, "max_tokens": 2, "stream": true,
                      "stream_options": {"include_usage": true}});
    insta::assert_snapshot!(House::saying(", you.").post(PATH, &body).await.stable());
}

#[tokio::test]
async fn measurements_go_on_behind_the_end() {
    let house = House::saying("a b");
    let got = house.post(PATH, &json!({"prompt": "x", "max_tokens": 9, "ignore_eos": true})).await.json();
    assert_eq!(got["usage"]["completion_tokens"], 9);
    assert_eq!(got["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn what_cannot_be_continued_is_refused() {
    let house = House::saying("a");
    let long = "word ".repeat(300);
    for (body, part) in [
        (json!({}), "prompt: need a text, a list of texts"),
        (json!({"prompt": []}), "prompt: need a text"),
        (json!({"prompt": [1, "a"]}), "prompt: need a text"),
        (json!({"prompt": [1, -2]}), "prompt: need a text"),
        (json!({"prompt": [["a"]]}), "prompt: need a text"),
        (json!({"prompt": [4_000_000]}), "prompt: need token ids up to"),
        (json!({"prompt": ""}), "at least one token"),
        (json!({"prompt": [[]]}), "at least one token"),
        (json!({"prompt": vec!["a"; 129]}), "1 to 128 answers"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix: not supported"),
        (json!({"prompt": "a", "best_of": 3}), "best_of: not supported"),
        (json!({"prompt": "a", "max_tokens": 0}), "at least 1 without echo"),
        (json!({"prompt": "a", "logprobs": 21}), "from 0 to 20"),
        (json!({"prompt": long}), "Q4-E0212: the prompt is too long"),
    ] {
        let (status, message) = house.post(PATH, &body).await.error();
        assert_eq!(status, 400, "{message}");
        assert!(message.contains(part), "{message}");
    }
    let full = house.post(PATH, &json!({"prompt": long})).await.json();
    assert_eq!(full["error"]["code"], "context_length_exceeded");
    assert!(house.engine.asked.lock().expect("lock").is_empty());
}
