//! Contexts: chunks, warm caches and conversations give what one computation from nothing gives.
mod support;

use q4_core::isa::Isa;
use q4_core::{Code, ComputePath, DType, Result};
use q4_model::checkpoint::{Bytes, Checkpoint, OpenOptions};
use q4_model::generate::{Answer, Conversation, FinishReason, Limits, generate};
use q4_model::plan::ActivationRequest;
use q4_model::sampling::{Sampler, SamplingParams};
use q4_model::template::{ChatTemplate, Message};
use q4_model::text;
use q4_model::tokenizer::Tokenizer;
use std::sync::atomic::{AtomicBool, Ordering};
use support::{Setup, golden};

#[test]
fn a_prompt_gives_the_same_bits_however_it_is_cut() -> Result<()> {
    // The tile unit adds more than eight rows in another order: docs/numerics.md.
    let isa = Isa::available().find(|isa| *isa != Isa::Amx).map(Isa::name);
    for (path, activations) in [
        ("qwen3_tiny_a/nvfp4_modelopt", ActivationRequest::Native),
        ("qwen3_tiny_a/nvfp4_modelopt", ActivationRequest::Int8),
        ("qwen3_tiny_a/nvfp4_modelopt", ActivationRequest::Auto),
        ("qwen3_tiny_b/nf4_bnb", ActivationRequest::Native),
    ] {
        let ids: Vec<u32> = (0..41).map(|i| (i * 7 + 3) % 190).collect();
        let mut all: Vec<Vec<f32>> = Vec::new();
        for (chunk, threads, split) in [(64, 1, 41), (64, 2, 41), (8, 3, 41), (64, 2, 1), (64, 2, 13)] {
            let setup = Setup {
                activations,
                chunk,
                threads,
                isa,
                compute: ComputePath::KernelOnly,
                ..Setup::default()
            };
            let (_d, mut runner) = setup.open(path)?;
            for part in ids.chunks(split) {
                runner.accept(part)?;
            }
            assert_eq!(runner.tokens(), &ids[..]);
            all.push(runner.logits()?.to_vec());
        }
        for other in &all[1..] {
            let same = all[0].iter().zip(other).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(
                same,
                "{path} {activations:?}: logits depend on how the prompt was cut or on the threads"
            );
        }
    }
    Ok(())
}

#[test]
fn a_step_on_a_warm_cache_does_not_see_the_future() -> Result<()> {
    let setup = Setup::default();
    let (_d, mut whole) = setup.open("qwen3_tiny_a")?;
    whole.accept(&[1, 2, 3, 4, 5, 6])?;
    let (_d, mut warm) = setup.open("qwen3_tiny_a")?;
    warm.accept(&[1, 2, 3])?;
    warm.accept(&[4, 5, 6])?;
    let worst = whole
        .logits()?
        .to_vec()
        .iter()
        .zip(warm.logits()?.iter())
        .fold(0f32, |w, (a, b)| w.max((a - b).abs()));
    assert!(worst < 1e-4, "{worst}");
    Ok(())
}

#[test]
fn a_full_context_is_an_error_that_changes_nothing() -> Result<()> {
    let setup = Setup { context: 8, chunk: 4, ..Setup::default() };
    let (_d, mut runner) = setup.open("qwen3_tiny_a")?;
    runner.accept(&[1, 2, 3])?;
    let e = runner.accept(&[4; 6]).expect_err("9 of 8 positions");
    assert_eq!(e.code(), Code::ContextFull);
    assert_eq!(runner.tokens(), &[1, 2, 3]);
    runner.accept(&[4; 5])?;
    assert_eq!(runner.tokens().len(), 8);
    assert!(runner.decode(1).is_err());
    Ok(())
}

struct Demo {
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    template: ChatTemplate,
}

fn demo() -> Result<Demo> {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo");
    let checkpoint = Checkpoint::open(&dir, &OpenOptions::default())?;
    let tokenizer = text::tokenizer(&checkpoint)?;
    let template = text::template(&checkpoint)?.expect("the demo has a template");
    Ok(Demo { checkpoint, tokenizer, template })
}

fn limits(max_tokens: usize) -> Limits {
    Limits { max_tokens, stop_ids: vec![2, 0], ..Limits::default() }
}

fn native(context: usize, chunk: usize) -> Setup {
    Setup { context, chunk, activations: ActivationRequest::Native, ..Setup::default() }
}

const TURNS: [&str; 8] = [
    "Who are you?",
    "Who am I?",
    "你是誰",
    "What color is the sky?",
    "談談UFO",
    "What is 7 plus 8?",
    "我是誰",
    "Tell me a story about a UFO.",
];

#[test]
fn eight_turns_equal_a_run_from_scratch_and_compute_only_what_is_new() -> Result<()> {
    let demo = demo()?;
    let setup = native(1024, 64);
    let dispatch = setup.dispatch()?;
    let loaded = setup.load(&demo.checkpoint, &dispatch)?;
    let (mut warm, mut cold) = (setup.runner(&loaded)?, setup.runner(&loaded)?);
    let params = SamplingParams::default();
    let vocab = demo.checkpoint.config().vocab_size;
    let variables = serde_json::Map::new();
    let mut talk = Conversation::new(&mut warm, &demo.tokenizer, &demo.template, &variables, None);
    let mut computed = 0;
    for (i, turn) in TURNS.iter().enumerate() {
        let held = talk.runner().tokens().len();
        let mut sampler = Sampler::new(params.clone(), vocab)?;
        let answer = talk.turn(turn, &params, &mut sampler, &limits(80), &mut |_| {})?;
        // Only the new message and the closing of the answer go through the prompt path.
        let tokens = talk.runner().tokens().len();
        let prefilled = talk.runner().prefilled() - computed;
        computed = talk.runner().prefilled();
        assert_eq!(prefilled + answer.ids.len(), tokens - held, "turn {i} computed tokens the cache had");
        // From nothing: the whole conversation as one prompt.
        let mut messages = talk.messages().to_vec();
        messages.pop();
        let text = demo.template.render(&messages, None, true, &variables)?;
        let ids = demo.tokenizer.encode(&text, false)?;
        cold.truncate(0);
        let mut sampler = Sampler::new(params.clone(), vocab)?;
        let fresh = generate(&mut cold, &demo.tokenizer, &ids, &mut sampler, &limits(80), &mut |_| {})?;
        assert_eq!(answer.ids, fresh.ids, "turn {i}: {:?} against {:?}", answer.text, fresh.text);
        let closed = demo.template.render(talk.messages(), None, false, &variables)?;
        if answer.finish == FinishReason::Stop {
            assert_eq!(
                talk.runner().tokens(),
                demo.tokenizer.encode(&closed, false)?,
                "turn {i} is not closed"
            );
        }
    }
    Ok(())
}

#[test]
fn stop_strings_cut_the_answer_and_the_next_turn_goes_on() -> Result<()> {
    let demo = demo()?;
    let setup = native(512, 64);
    let dispatch = setup.dispatch()?;
    let loaded = setup.load(&demo.checkpoint, &dispatch)?;
    let mut runner = setup.runner(&loaded)?;
    let params = SamplingParams::default();
    let mut sampler = Sampler::new(params.clone(), demo.checkpoint.config().vocab_size)?;
    let variables = serde_json::Map::new();
    let mut talk = Conversation::new(&mut runner, &demo.tokenizer, &demo.template, &variables, None);
    let limits = Limits { stop_strings: vec!["demo".into()], ..limits(40) };
    let mut streamed = String::new();
    let answer = talk.turn("Who are you?", &params, &mut sampler, &limits, &mut |t| streamed.push_str(t))?;
    assert_eq!((answer.finish, answer.text.as_str()), (FinishReason::StopString, "I am the q4 "));
    assert_eq!(streamed, answer.text);
    let next = talk.turn("What color is the sky?", &params, &mut sampler, &limits, &mut |_| {})?;
    assert!(!next.text.is_empty());
    Ok(())
}

#[test]
fn an_interrupted_answer_is_kept_and_the_conversation_goes_on_as_if_it_were_all() -> Result<()> {
    static STOP: AtomicBool = AtomicBool::new(false);
    let demo = demo()?;
    let setup = native(1024, 4);
    let dispatch = setup.dispatch()?;
    let loaded = setup.load(&demo.checkpoint, &dispatch)?;
    let (mut warm, mut cold) = (setup.runner(&loaded)?, setup.runner(&loaded)?);
    let params = SamplingParams::default();
    let mut sampler = Sampler::new(params.clone(), demo.checkpoint.config().vocab_size)?;
    let variables = serde_json::Map::new();
    let limits = Limits { interrupt: Some(&STOP), ..limits(40) };
    let mut talk = Conversation::new(&mut warm, &demo.tokenizer, &demo.template, &variables, None);
    let mut heard = String::new();
    let answer = talk.turn("Who are you?", &params, &mut sampler, &limits, &mut |t| {
        heard.push_str(t);
        STOP.store(true, Ordering::Relaxed);
    })?;
    assert_eq!((answer.finish, &answer.text), (FinishReason::Interrupted, &heard));
    assert_eq!((talk.messages().len(), &talk.messages()[1].content), (2, &heard));
    assert_eq!(talk.messages()[1].extra["finish_reason"], "interrupted");
    // Still asked to stop: nothing of the prompt is computed, and nobody has said anything.
    let held = talk.runner().tokens().to_vec();
    let none = talk.turn("Who am I?", &params, &mut sampler, &limits, &mut |_| {})?;
    assert_eq!((none.finish, none.ids.len()), (FinishReason::Interrupted, 0));
    assert_eq!((talk.messages().len(), talk.runner().tokens()), (2, &held[..]));
    STOP.store(false, Ordering::Relaxed);
    let next = talk.turn("Who am I?", &params, &mut sampler, &limits, &mut |_| {})?;
    let text = demo.template.render(&talk.messages()[..3], None, true, &variables)?;
    let ids = demo.tokenizer.encode(&text, false)?;
    let fresh = generate(&mut cold, &demo.tokenizer, &ids, &mut sampler, &limits, &mut |_| {})?;
    assert_eq!(next.ids, fresh.ids);
    Ok(())
}

#[test]
fn other_messages_keep_the_cache_of_what_they_share() -> Result<()> {
    let demo = demo()?;
    let setup = native(1024, 64);
    let dispatch = setup.dispatch()?;
    let loaded = setup.load(&demo.checkpoint, &dispatch)?;
    let mut runner = setup.runner(&loaded)?;
    let params = SamplingParams::default();
    let mut sampler = Sampler::new(params.clone(), demo.checkpoint.config().vocab_size)?;
    let variables = serde_json::Map::new();
    let mut talk = Conversation::new(&mut runner, &demo.tokenizer, &demo.template, &variables, None);
    let mut say = |talk: &mut Conversation<'_>, said: &str| {
        talk.turn(said, &params, &mut sampler, &limits(80), &mut |_| {})
    };
    say(&mut talk, TURNS[0])?;
    let (first, held) = (talk.messages().to_vec(), talk.runner().tokens().to_vec());
    let second = say(&mut talk, TURNS[1])?;
    let (both, computed) = (talk.messages().to_vec(), talk.runner().prefilled());
    assert_eq!(talk.set_messages(first)?, held.len());
    assert_eq!(talk.runner().tokens(), held);
    assert_eq!(say(&mut talk, TURNS[1])?.ids, second.ids);
    assert_eq!(talk.runner().prefilled() - computed, both_closing(&demo, &second)?, "only the exchange anew");
    assert_eq!(talk.messages(), both);
    // Nobody has asked yet: nothing to compute, and nothing for a template to refuse.
    assert_eq!(talk.set_messages(vec![Message::new("system", "Be brief.")])?, 0);
    assert!(talk.runner().tokens().is_empty());
    Ok(())
}

/// Tokens of the second exchange that are not its answer.
fn both_closing(demo: &Demo, answer: &Answer) -> Result<usize> {
    let messages = [Message::new("user", TURNS[1]), Message::new("assistant", &answer.text)];
    let text = demo.template.render(&messages, None, false, &serde_json::Map::new())?;
    Ok(demo.tokenizer.encode(&text, false)?.len() - answer.ids.len())
}

#[test]
fn non_finite_values_name_the_layer_that_made_them() -> Result<()> {
    // A finite norm weight so large that layer 1's product overflows.
    let dir = golden("qwen3_tiny_a");
    let read = |name: &str| std::fs::read(dir.join(name)).expect("recorded model");
    let mut weights = read("model.safetensors");
    let header = u64::from_le_bytes(*weights.first_chunk().expect("length")) as usize;
    let text = String::from_utf8(weights[8..8 + header].to_vec()).expect("JSON");
    let table: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let at = table["model.layers.1.post_attention_layernorm.weight"]["data_offsets"][0]
        .as_u64()
        .expect("offset") as usize;
    weights[8 + header + at..][..4].copy_from_slice(&3e38f32.to_le_bytes());
    let files = vec![
        ("model.safetensors".to_owned(), Bytes::from(weights)),
        ("config.json".to_owned(), Bytes::from(read("config.json"))),
    ];
    let checkpoint = Checkpoint::from_files("overflow", files)?;
    let setup = Setup::default();
    let dispatch = setup.dispatch()?;
    let mut runner = setup.runner(&setup.load(&checkpoint, &dispatch)?)?;
    let e = runner.accept(&[1, 2, 3]).expect_err("infinite activations");
    assert_eq!(e.code(), Code::NonFinite);
    assert!(e.what().contains("model.layers.1."), "{e}");
    assert!(runner.tokens().is_empty());
    Ok(())
}

#[test]
fn sixteen_bit_outputs_are_rounded_and_stay_close() -> Result<()> {
    let logits = |dtype| -> Result<Vec<f32>> {
        let setup = Setup { dtype, compute: ComputePath::KernelOnly, ..Setup::default() };
        let (_d, mut r) = setup.open("qwen3_tiny_b/nf4_bnb")?;
        r.accept(&[3, 1, 4, 1, 5])?;
        Ok(r.logits()?.to_vec())
    };
    let exact = logits(DType::F32)?;
    let size = exact.iter().fold(0f32, |a, v| a.max(v.abs()));
    for (dtype, relative) in [(DType::F16, 0.01), (DType::BF16, 0.08)] {
        let worst = exact.iter().zip(logits(dtype)?).fold(0f32, |w, (a, b)| w.max((a - b).abs()));
        assert!(worst > 0.0, "{dtype} outputs were not rounded");
        assert!(worst < relative * size, "{dtype}: {worst} of {size}");
    }
    Ok(())
}
