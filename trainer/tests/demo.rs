//! The demo model knows the small talk of the corpus it was trained on, and its stories are read back and
//! replayed.
use q4_core::memory::Budget;
use q4_core::{
    BuiltinOptions, ComputePath, DType, Device, Dispatch, OpSet, Policy, Registry, Result, ThreadPool,
};
use q4_model::checkpoint::{Checkpoint, OpenOptions};
use q4_model::cpu::KvType;
use q4_model::generate::{Limits, generate};
use q4_model::load::{ContextOptions, load};
use q4_model::plan::{ActivationRequest, Plan, PlanOptions};
use q4_model::runner::Runner;
use q4_model::sampling::{Sampler, SamplingParams};
use q4_model::template::{ChatTemplate, Message};
use q4_model::text;
use q4_model::tokenizer::Tokenizer;
use q4_nvfp4_kernel as _;
use q4_trainer::behaviour::{Answer, Case, Suite};
use q4_trainer::corpus::{Story, suite};
use serde_json::Map;
use std::path::Path;
use std::sync::Arc;

const CHUNK: usize = 64;

struct Demo {
    runner: Runner,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    stop: Vec<u32>,
    vocab: usize,
}

impl Demo {
    fn open() -> Result<Self> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo");
        let checkpoint = Checkpoint::open(&dir, &OpenOptions::default())?;
        let policy = Policy { compute: ComputePath::KernelOnly, ..Policy::default() };
        let dispatch = Dispatch::new(Registry::builtin(&BuiltinOptions::default())?, policy);
        let options = PlanOptions {
            activations: ActivationRequest::Native,
            dtype: DType::F32,
            device: Device::Cpu,
            quantize: None,
            max_rows: CHUNK,
            ops: OpSet::FORWARD,
        };
        let plan = Plan::new(&checkpoint, &dispatch, &options)?;
        let (threads, memory) = (Arc::new(ThreadPool::new(2)), Budget::of_machine());
        let loaded = load(&checkpoint, &plan, &dispatch, &options, threads, &memory, &mut |_, _| {})?;
        let shape =
            ContextOptions { context: 512, chunk: CHUNK, all_logits: false, kv: KvType::F32, many: None };
        Ok(Self {
            runner: loaded.runner(shape, &memory)?,
            tokenizer: text::tokenizer(&checkpoint)?,
            template: text::template(&checkpoint)?.expect("the demo has a template"),
            stop: checkpoint.config().eos_token_ids.clone(),
            vocab: checkpoint.config().vocab_size,
        })
    }
}

impl Answer for Demo {
    fn answer(&mut self, prompt: &str) -> Result<String> {
        let text = self.template.render(&[Message::new("user", prompt)], None, true, &Map::new())?;
        let ids = self.tokenizer.encode(&text, false)?;
        let mut sampler = Sampler::new(SamplingParams::default(), self.vocab)?;
        let limits = Limits { max_tokens: 400, stop_ids: self.stop.clone(), ..Limits::default() };
        self.runner.truncate(0);
        Ok(generate(&mut self.runner, &self.tokenizer, &ids, &mut sampler, &limits, &mut |_| {})?.text)
    }
}

#[test]
fn it_answers_what_it_has_learnt() -> Result<()> {
    let talk = suite().into_iter().filter(|c| c.group != "story");
    let (reserved, learnt): (Vec<Case>, Vec<Case>) = talk.partition(|c| c.group.ends_with("-heldout"));
    assert_eq!((learnt.len(), reserved.len()), (1105, 87));
    let mut demo = Demo::open()?;
    for case in learnt {
        assert_eq!(demo.answer(&case.prompt)?, case.must[0], "{}", case.prompt);
    }
    // Wordings it has never seen: it answered 59, and all that it cannot know.
    let report = Suite { cases: reserved }.run(&mut demo)?;
    let right = report.outcomes.iter().filter(|o| o.passed).count();
    assert!(right >= 55, "{right} of 87: {:?}", report.outcomes);
    Ok(())
}

/// What the model that was built in before it answered.
const FORMER: &str = include_str!("data/former.jsonl");

#[test]
fn it_answers_what_the_demo_before_it_answered() -> Result<()> {
    let former = Suite::parse(FORMER)?.cases;
    let (mut demo, mut right) = (Demo::open()?, 0);
    for case in &former {
        let answer = demo.answer(&case.prompt)?;
        right += usize::from(answer == case.must[0]);
        if answer != case.must[0] {
            println!("{}: {answer}; before: {}", case.prompt, case.must[0]);
        }
    }
    println!("former questions {right} of {}", former.len());
    assert!(right * 100 >= former.len() * 99, "{right} of {}", former.len());
    Ok(())
}

#[test]
fn its_stories_hold_together() -> Result<()> {
    let mut demo = Demo::open()?;
    let (mut asked, mut named, mut whole) = ([0; 2], 0, [0; 2]);
    for case in suite().iter().filter(|c| c.group == "story") {
        let told = demo.answer(&case.prompt)?;
        let chinese = usize::from(!case.prompt.is_ascii());
        let about = told.contains(&case.must[0]);
        let read = Story::parse(&told);
        asked[chinese] += 1;
        named += usize::from(about);
        whole[chinese] += usize::from(about && read.is_ok());
        if let Err(why) = read {
            println!("{}\n  {told}\n  {why}", case.prompt);
        }
    }
    assert_eq!(asked, [13, 13]);
    // Seen: 25 name what was asked for; 10 English and 5 Chinese ones also contradict nothing they told
    // before. Colours and names are draws between equals, so that the last bit of a logit can choose
    // another story: hence two less.
    assert!(named >= 23, "{named} stories are about what was asked for");
    assert!(whole[0] >= 8 && whole[1] >= 3, "English and Chinese that hold together: {whole:?} of {asked:?}");
    Ok(())
}
