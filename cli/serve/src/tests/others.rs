use super::House;
use serde_json::json;

#[tokio::test]
async fn texts_become_tokens_and_texts_again() {
    let house = House::saying("");
    let ids = house.engine.served.tokenizer.encode("Hello, 🦀", false).expect("encodes");
    let ours = house.post("/tokenize", &json!({"prompt": "Hello, 🦀"})).await.json();
    assert_eq!((&ours["tokens"], &ours["count"]), (&json!(ids), &json!(ids.len())));
    assert_eq!(ours["max_model_len"], super::engine::CONTEXT);
    let strings = json!({"prompt": "Hello", "return_token_strs": true});
    assert_eq!(house.post("/tokenize", &strings).await.json()["token_strs"], json!(["Hello"]));
    let llama = house.post("/tokenize", &json!({"content": "a🦀", "with_pieces": true})).await.json();
    assert_eq!(llama["tokens"][0]["piece"], "a");
    assert_eq!(llama["tokens"][1]["piece"][0], 0xf0, "bytes, where they are no text");
    let back = house.post("/detokenize", &json!({"tokens": ids})).await.json();
    assert_eq!((&back["prompt"], &back["content"]), (&json!("Hello, 🦀"), &json!("Hello, 🦀")));
    let talk = json!({"messages": [{"role": "user", "content": "Hi"}]});
    let count = house.post("/tokenize", &talk).await.json()["count"].clone();
    house.post("/v1/chat/completions", &talk).await;
    assert_eq!(count, house.engine.last().prompt.len());
    for (path, body, part) in [
        ("/tokenize", json!({}), "prompt: need a text"),
        ("/tokenize", json!({"prompt": 7}), "prompt: need a text"),
        ("/detokenize", json!({}), "tokens: need a list of token ids"),
        ("/detokenize", json!({"tokens": [1, -1]}), "tokens[1]: need a token id"),
    ] {
        let (status, message) = house.post(path, &body).await.error();
        assert_eq!(status, 400);
        assert!(message.contains(part), "{message}");
    }
    for (tokens, part) in [
        (json!([1, 4_000_000_000_u32]), "tokens[1]: need the id of a token of this model, have 4000000000"),
        (json!([1440]), "tokens[0]: need the id of a token of this model, have 1440"),
        (json!([0, 1, 1_u64 << 40]), "tokens[2]: need a token id, have the number 1099511627776"),
    ] {
        let (status, message) = house.post("/detokenize", &json!({"tokens": tokens})).await.error();
        assert_eq!((status, message.as_str()), (400, part));
    }
}

/// What lm-eval reads before it measures over completions.
#[tokio::test]
async fn the_tokenizer_is_described() {
    let house = House::saying("");
    let got = house.get("/tokenizer_info").await.json();
    let template = house.engine.served.template.source();
    assert_eq!((&got["eos_token"], &got["chat_template"]), (&json!("<|im_end|>"), &json!(template)));
    for absent in ["bos_token", "pad_token"] {
        assert_eq!(got.get(absent), Some(&json!(null)), "{absent}");
    }
    let end = json!({"prompt": got["eos_token"], "add_special_tokens": false});
    let ids = house.post("/tokenize", &end).await.json()["tokens"].clone();
    assert_eq!(ids, json!(house.engine.served.stop_ids));
    assert_eq!(house.post("/detokenize", &json!({"tokens": ids})).await.json()["prompt"], "<|im_end|>");
}

#[tokio::test]
async fn the_model_is_listed_in_both_ways() {
    let house = House::saying("");
    insta::assert_snapshot!(house.get("/v1/models").await.body);
    assert_eq!(house.get("/v1/models/demo").await.json()["id"], "demo");
    let got = house.get("/v1/models/org/other").await;
    assert_eq!((got.status, got.json()["error"]["code"].as_str()), (404, Some("model_not_found")));
    assert!(got.error().1.contains("\"org/other\""));
    // What is no text is refused like any other name.
    let got = house.get("/v1/models/%ff").await;
    assert_eq!((got.status, got.json()["error"]["code"].as_str()), (404, Some("model_not_found")));
}

#[tokio::test]
async fn probes_answer() {
    let house = House::saying("");
    assert_eq!(house.get("/health").await.json()["status"], "ok");
    assert_eq!(house.get("/ready").await.json()["model"], "demo");
    assert_eq!(house.get("/version").await.json()["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(house.get("/v1/q4/explain").await.json()["schema"], "q4.explain/1");
    assert_eq!(house.get("/v1/q4/certificates").await.json()["schema"], "q4.certificates/1");
}

#[tokio::test]
async fn figures_follow_the_answers() {
    let house = House::saying("Hello, you.");
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "n": 2});
    house.post("/v1/chat/completions", &body).await;
    house.post("/v1/chat/completions", &json!({})).await;
    let got = house.get("/metrics").await;
    assert_eq!(got.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
    let tokens = house.engine.last().prompt.len() * 2;
    for line in [
        "vllm:num_requests_running 1".to_owned(),
        "vllm:num_requests_waiting 2".to_owned(),
        "q4_kv_cache_usage_perc 0.5".to_owned(),
        "vllm:prefix_cache_hits_total 4".to_owned(),
        format!("vllm:prompt_tokens_total {tokens}"),
        "vllm:generation_tokens_total 8".to_owned(),
        "vllm:request_success_total{finished_reason=\"stop\"} 2".to_owned(),
        "vllm:time_to_first_token_seconds_count 2".to_owned(),
        "vllm:inter_token_latency_seconds_count 6".to_owned(),
        "vllm:e2e_request_latency_seconds_count 2".to_owned(),
        "vllm:request_queue_time_seconds_count 2".to_owned(),
        "q4_http_responses_total{class=\"2xx\"} 1".to_owned(),
        "q4_http_responses_total{class=\"4xx\"} 1".to_owned(),
    ] {
        assert!(got.body.lines().any(|l| l == line), "{line} is missing in\n{}", got.body);
    }
}

#[tokio::test]
async fn the_page_takes_nothing_from_elsewhere() {
    let house = House::saying("");
    let page = house.get("/").await;
    assert_eq!(page.header("content-type"), "text/html; charset=utf-8");
    assert!(page.header("content-security-policy").starts_with("default-src 'none'; script-src 'self'"));
    assert_eq!(page.header("x-content-type-options"), "nosniff");
    // What the policy forbids would silently do nothing.
    for inline in ["<style", "style=\"", "onclick=", "javascript:", "src=\"http", "href=\"http"] {
        assert!(!page.body.contains(inline), "{inline}");
    }
    let named = regex::Regex::new("(?:src|href|from) ?=? ?[\"'](/[^\"']+)").expect("valid");
    let mut found = 0;
    for (path, text, _) in crate::page::FILES {
        assert_eq!(house.get(path).await.body, text);
        for name in named.captures_iter(text) {
            assert_eq!(house.get(&name[1]).await.status, 200, "{path} wants {}", &name[1]);
            found += 1;
        }
    }
    assert!(found >= 4, "{found} files are named by others");
    assert!(page.body.matches("<script").count() == page.body.matches("src=\"/").count());
    assert_eq!(house.get("/app.js").await.header("content-type"), "text/javascript; charset=utf-8");
    assert_eq!(house.get("/style.css").await.header("content-type"), "text/css; charset=utf-8");
}
