//! A tokenizer that was put together again encodes as the one that the file was made from.
mod support;

use q4_core::Code;
use q4_gguf::{Gguf, config, tokenizer, tokenizer_config, weights};
use serde_json::{Value, json};
use support::{File, small};
use tokenizers::Tokenizer;

const QWEN2: &[u8] = include_bytes!("../golden/qwen2.gguf");
const GPT2: &[u8] = include_bytes!("../golden/gpt2.gguf");
/// Lists of a text, its ids with the first, and its ids with the second.
const TEXTS: &str = include_str!("../golden/texts.json");

fn rebuilt(bytes: &[u8]) -> Tokenizer {
    let gguf = Gguf::parse("a.gguf", bytes).expect("a file");
    let json = tokenizer(&gguf).expect("a tokenizer").to_string();
    Tokenizer::from_bytes(json).expect("one that loads")
}

fn refused(file: &File) -> String {
    let bytes = file.bytes();
    let gguf = Gguf::parse("a.gguf", &bytes).expect("a file");
    let error = tokenizer(&gguf).expect_err("must be refused");
    assert_eq!(error.code(), Code::TokenizerInvalid);
    error.to_string()
}

fn ids(t: &Tokenizer, text: &str) -> Vec<u32> {
    t.encode(text, true).expect("encodes").get_ids().to_vec()
}

#[test]
fn golden_texts() {
    let texts: Vec<(String, Vec<u32>, Vec<u32>)> = serde_json::from_str(TEXTS).expect("the golden file");
    assert_eq!(texts.len(), 500);
    let (qwen2, gpt2) = (rebuilt(QWEN2), rebuilt(GPT2));
    let mut differ = 0;
    for (text, by_qwen2, by_gpt2) in &texts {
        assert_eq!(ids(&qwen2, text), *by_qwen2, "{text:?}");
        assert_eq!(ids(&gpt2, text), *by_gpt2, "{text:?}");
        differ += usize::from(by_qwen2 != by_gpt2);
    }
    // The two cut texts differently, which the texts must show.
    assert!(differ > 50, "{differ}");
}

#[test]
fn golden_model() {
    let gguf = Gguf::parse("qwen2.gguf", QWEN2).expect("a file");
    let c = config(&gguf).expect("a configuration");
    assert_eq!(
        (&c["hidden_size"], &c["vocab_size"], &c["rope_theta"]),
        (&json!(2), &json!(1448), &json!(1e6))
    );
    assert_eq!((&c["rms_norm_eps"], &c["eos_token_id"]), (&json!(1e-6), &json!(2)));
    let weights = weights(&gguf).expect("distinct");
    let bytes = |i: usize| &QWEN2[weights[i].1.range.clone()];
    let embedding: Vec<u16> = bytes(0).as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
    assert_eq!(
        (embedding.len(), embedding[1], embedding[2], embedding[2047]),
        (2896, 0x3c00, 0x4000, 0x67ff)
    );
    assert_eq!(weights[1].0, "model.norm.weight");
    assert_eq!(bytes(1), [0.5f32.to_le_bytes(), (-1.25f32).to_le_bytes()].concat());
    let c = tokenizer_config(&gguf).expect("valid");
    assert_eq!(c["eos_token"], "<|im_end|>");
    assert!(c["chat_template"].as_str().is_some_and(|t| t.contains("messages")));
}

#[test]
fn kinds_of_tokens() {
    let t = rebuilt(QWEN2);
    let added = t.get_added_tokens_decoder();
    let special = |id: u32| added.get(&id).map(|t| t.special);
    assert_eq!(
        [special(0), special(2), special(1440), special(1442)],
        [Some(true), Some(true), Some(false), Some(false)]
    );
    assert_eq!(t.token_to_id("[PAD1447]"), None);
    assert_eq!(t.get_vocab_size(true), 1443);
    assert_eq!(t.decode(&[2, 1440, 891], true).expect("decodes"), "<think>Who");

    // Fillers as older files have them, and added tokens that stand anywhere.
    let tokens = ["<think>", "[PAD1]", "a", "[PAD9]", "<|end|>", "[PAD5]", "b"];
    let file = small()
        .without("tokenizer.ggml.tokens")
        .without("tokenizer.ggml.token_type")
        .without("tokenizer.ggml.merges")
        .texts("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &[4, 4, 1, 4, 3, 5, 1])
        .texts("tokenizer.ggml.merges", &[]);
    let t = rebuilt(&file.bytes());
    assert_eq!(ids(&t, "a<|end|>b<think>[PAD9][PAD1]"), [2, 4, 6, 0, 3]);
}

#[test]
fn tokens_around_a_text() {
    let with = |bos: bool, eos: bool| {
        let file = small()
            .u32("tokenizer.ggml.bos_token_id", 5)
            .flag("tokenizer.ggml.add_bos_token", bos)
            .flag("tokenizer.ggml.add_eos_token", eos);
        rebuilt(&file.bytes())
    };
    assert_eq!(ids(&with(false, false), "abb"), [3]);
    assert_eq!(ids(&with(true, false), "abb"), [5, 3]);
    assert_eq!(ids(&with(false, true), "abb"), [3, 4]);
    assert_eq!(ids(&with(true, true), "abba"), [5, 3, 0, 4]);
    let pair = with(true, true).encode(("a", "b"), true).expect("encodes");
    assert_eq!(pair.get_ids(), [5, 0, 4, 5, 1, 4]);
    let text = refused(&small().flag("tokenizer.ggml.add_bos_token", true));
    assert!(text.contains("an id in tokenizer.ggml.bos_token_id"), "{text}");
    assert!(refused(&small().u32("tokenizer.ggml.add_bos_token", 1)).contains("true or false"));
}

#[test]
fn other_tokenizers_are_refused_by_name() {
    let other = |key: &str, value: &str| refused(&small().without(key).text(key, value));
    let text = other("tokenizer.ggml.model", "llama");
    assert!(text.contains("need: `gpt2`\n  have: `llama`") && text.contains("fix: "), "{text}");
    let text = other("tokenizer.ggml.pre", "deepseek-r1-qwen");
    assert!(text.contains("need: `qwen2` or `gpt-2`\n  have: `deepseek-r1-qwen`"), "{text}");
    assert!(refused(&small().without("tokenizer.ggml.pre")).contains("have: nothing"));
    assert!(
        refused(&small().without("tokenizer.ggml.model").u32("tokenizer.ggml.model", 1)).contains("have: 1")
    );
}

#[test]
fn contradictions_are_refused() {
    let tokens = |texts: &[&str], kinds: &[i32]| {
        let file = small().without("tokenizer.ggml.tokens").without("tokenizer.ggml.token_type");
        refused(&file.texts("tokenizer.ggml.tokens", texts).i32s("tokenizer.ggml.token_type", kinds))
    };
    assert!(tokens(&["a", "b", "a"], &[1, 1, 1]).contains("`a` as 0 and as 2"));
    assert!(tokens(&["a", "b"], &[1]).contains("have: nothing for `b`"));
    assert!(tokens(&["a", "b"], &[1, 1, 1]).contains("more of them"));
    assert!(tokens(&["a", "b"], &[1, 6]).contains("have: 6 for `b`"));
    assert!(tokens(&["a", "b"], &[1, -1]).contains("have: nothing for `b`"));
    assert!(refused(&small().without("tokenizer.ggml.tokens")).contains("2^20 texts"));
    assert!(refused(&small().without("tokenizer.ggml.token_type")).contains("one a token"));

    let merges = |texts: &[&str]| {
        refused(&small().without("tokenizer.ggml.merges").texts("tokenizer.ggml.merges", texts))
    };
    for bad in ["ab", "a  b", "a ", " b", "a c", "b a", "a b b"] {
        assert!(merges(&["a b", bad]).contains(&format!("have: `{bad}`, the 1th")), "{bad}");
    }
    assert!(refused(&small().without("tokenizer.ggml.merges")).contains("have: nothing"));
    let wrong = small().without("tokenizer.ggml.merges").i32s("tokenizer.ggml.merges", &[1, 2]);
    assert!(refused(&wrong).contains("an array of 2 values of type 5"));
}

#[test]
fn the_file_is_as_qwen_publishes_it() {
    let gguf = Gguf::parse("qwen2.gguf", QWEN2).expect("a file");
    let json = tokenizer(&gguf).expect("a tokenizer");
    let keys: Vec<_> = json.as_object().expect("an object").keys().collect();
    let expected = [
        "version",
        "truncation",
        "padding",
        "added_tokens",
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
        "model",
    ];
    assert_eq!(keys, expected);
    assert_eq!(json["model"]["merges"][0], "h e");
    assert_eq!(json["added_tokens"].as_array().map(Vec::len), Some(6));
    assert_eq!(json["post_processor"]["type"], "ByteLevel");
    assert_eq!(json["truncation"], Value::Null);
}
