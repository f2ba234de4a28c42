//! Many sequences at once: every answer is the one it gets alone, whoever shares its steps.
#[path = "support/company.rs"]
mod company;
mod support;

use company::{Asker, CONTEXT, Model, Told, demo};
use q4_core::isa::Isa;
use q4_core::memory::Budget;
use q4_core::{Code, Error, Result};
use q4_model::batch::{Nudges, Options, PAGE, Part, Request, Scheduler, Sequences, Weighed};
use q4_model::constraint::{Constraint, Thoughts};
use q4_model::generate::{Answer, FinishReason, Limits};
use q4_model::likelihood::logprob;
use q4_model::load::ContextOptions;
use q4_model::sampling::SamplingParams;
use serde_json::json;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

impl Model {
    /// Questions and stories of many lengths, drawn in many ways; some begin alike, some must have a form.
    fn requests(&self, count: usize) -> Result<Vec<Request>> {
        let says = ["Who are you?", "Tell me a story about a cat and a boat.", "你是誰", "What is 3 plus 4?"];
        let system = "You are a patient helper who answers in one short sentence. ".repeat(4);
        (0..count)
            .map(|i| {
                let begins = if i % 3 == 0 { system.as_str() } else { "" };
                let prompt = format!("{begins}<|im_start|>user\n{} {i}<|im_end|>\n", says[i % says.len()]);
                let temperature = [0.0, 0.8][i % 2];
                let params = SamplingParams {
                    temperature,
                    top_k: 40,
                    top_p: 0.95,
                    repetition_penalty: [1.0, 1.1][i % 5 / 4],
                    seed: i as u64,
                    ..SamplingParams::default()
                };
                let form = match i % 16 {
                    3 => Some(Constraint::JsonSchema(json!({
                        "type": "object", "required": ["n", "s"], "additionalProperties": false,
                        "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 30}}}))),
                    6 => Some(Constraint::Regex("[a-z]{2,9}( [a-z]{2,9}){3,12}[.]".to_owned())),
                    11 => Some(Constraint::Grammar("start: /[a-z]+/ (\",\" start)?\n".to_owned())),
                    _ => None,
                };
                let compile = |form| self.grammars.compile(&self.tokenizer, &form, Thoughts::None);
                let limits = Limits {
                    form: form.map(compile).transpose()?,
                    // Four in a row go on until they want pages that there are not.
                    max_tokens: if i % 12 > 7 { 120 } else { [7, 24][i % 2] },
                    stop_ids: if i % 12 > 7 { Vec::new() } else { self.stop_ids.clone() },
                    stop_strings: if i % 7 == 6 { vec!["e".to_owned()] } else { Vec::new() },
                    ..Limits::default()
                };
                let prompt = self.tokenizer.encode(&prompt, false)?;
                let nudges = Nudges::default();
                Ok(Request { prompt, params, nudges, limits, reuse: i % 6 != 5, prompt_logprobs: false })
            })
            .collect()
    }
}

fn same(told: &Told, alone: &Answer, what: &str) {
    let answer = told.answer.as_ref().unwrap_or_else(|| panic!("{what}: {:?}", told.failed));
    assert_eq!(answer.ids, alone.ids, "{what}");
    assert_eq!((&answer.text, answer.finish), (&alone.text, alone.finish), "{what}");
    assert_eq!((&told.text, &told.ids), (&answer.text, &answer.ids), "{what}: told piece by piece");
}

/// Of instruction sets whose rows do not depend on their company: tiles add up otherwise from nine rows on.
fn sets() -> impl Iterator<Item = Isa> {
    Isa::available().filter(|isa| *isa != Isa::Amx)
}

#[test]
fn every_answer_is_the_one_it_gets_alone() -> Result<()> {
    for (i, isa) in sets().enumerate() {
        let one = demo(isa, 1)?;
        let requests = one.requests(if i == 0 { 48 } else { 8 })?;
        let alone: Vec<_> = requests.iter().map(|r| one.alone(r)).collect::<Result<_>>()?;
        let two = demo(isa, 2)?;
        // Many or few at once, steps of many or few rows, a cache that holds all or makes them wait and give
        // their pages back.
        let ways = [(&two, 16, 16, 5), (&one, 8, 64, 40), (&two, 3, 5, 3)];
        let mut preempted = 0;
        for (model, sequences, rows, pages) in ways.into_iter().take(if i == 0 { 3 } else { 1 }) {
            let what = |i| format!("{isa:?}, request {i}, {sequences} sequences, {rows} rows, {pages} pages");
            let mut scheduler = model.scheduler(sequences, rows, pages)?;
            let askers: Vec<Asker> = requests.iter().map(|_| Asker::default()).collect();
            // Somebody leaves in the middle of an answer, somebody else before his turn.
            let deserters = [Some(3), Some(0)].map(|leaves_after| Asker { leaves_after, ..Asker::default() });
            deserters[1].gone.store(true, Ordering::Relaxed);
            for (i, (request, asker)) in requests.iter().zip(&askers).enumerate() {
                if let Some(deserter) = deserters.get(i) {
                    scheduler.submit(request.clone(), Box::new(deserter.clone()));
                }
                scheduler.submit(request.clone(), Box::new(asker.clone()));
                if i % 5 == 0 {
                    scheduler.step();
                }
            }
            while !scheduler.is_idle() {
                scheduler.step();
            }
            for (i, (asker, alone)) in askers.iter().zip(&alone).enumerate() {
                same(&asker.told.lock().expect("one thread"), alone, &what(i));
            }
            let gauges = scheduler.gauges();
            assert_eq!((gauges.running, gauges.waiting, gauges.pages_used), (0, 0, 0), "{}", what(0));
            assert!(gauges.cached_tokens > 0, "{}: nothing was shared", what(0));
            preempted += gauges.preempted;
            let left = deserters[0].told.lock().expect("one thread");
            assert!(left.answer.is_none() && left.ids.len() == 3, "{}: told {:?}", what(0), left.ids);
            assert!(deserters[1].told.lock().expect("one thread").cached.is_none(), "was never begun");
        }
        assert!(preempted > 0 || i > 0, "nobody gave pages back");
    }
    Ok(())
}

#[test]
fn a_second_turn_computes_what_is_new() -> Result<()> {
    let model = demo(Isa::Portable, 2)?;
    let mut scheduler = model.scheduler(4, 64, 12)?;
    let mut request = model.requests(1)?.remove(0);
    let run = |scheduler: &mut Scheduler<'_>, request: &Request| {
        let asker = Asker::default();
        scheduler.submit(request.clone(), Box::new(asker.clone()));
        while !scheduler.is_idle() {
            scheduler.step();
        }
        asker
    };
    let first = run(&mut scheduler, &request);
    assert_eq!(first.told.lock().expect("one thread").cached, Some(0));
    let again = run(&mut scheduler, &request);
    let kept = (request.prompt.len() - 1) / PAGE * PAGE;
    assert!(kept > 0, "a prompt of {} tokens", request.prompt.len());
    assert_eq!(again.told.lock().expect("one thread").cached, Some(kept));
    assert_eq!(first.told.lock().expect("one thread").ids, again.told.lock().expect("one thread").ids);
    request.reuse = false;
    let without = run(&mut scheduler, &request);
    assert_eq!(without.told.lock().expect("one thread").cached, Some(0), "switched off");
    Ok(())
}

#[test]
fn tokens_are_weighed_as_the_logits_say() -> Result<()> {
    let model = demo(Isa::Portable, 2)?;
    let mut request = model.requests(2)?.remove(1);
    request.prompt_logprobs = true;
    request.limits.top_logprobs = 3;
    let mut scheduler = model.scheduler(40, 64, 12)?;
    let asker = Asker::default();
    scheduler.submit(request.clone(), Box::new(asker.clone()));
    while !scheduler.is_idle() {
        scheduler.step();
    }
    let told = asker.told.lock().expect("one thread");
    let sizes = ContextOptions {
        context: CONTEXT,
        chunk: 64,
        all_logits: true,
        kv: q4_model::cpu::KvType::F16,
        many: None,
    };
    let mut runner = model.loaded.runner(sizes, &Budget::of_machine())?;
    let all = [&request.prompt[..], &told.ids].concat();
    let mut want = Vec::new();
    runner.accept_all(&all, &mut |rows| {
        want.extend(rows.chunks_exact(model.vocab).map(<[f32]>::to_vec));
    })?;
    let weighed: Vec<&Weighed> = told.prompt.iter().chain(&told.tokens).collect();
    assert_eq!(weighed.iter().map(|w| w.id).collect::<Vec<_>>(), all);
    assert_eq!(weighed[0].logprob, None);
    for (w, logits) in weighed[1..].iter().zip(&want) {
        assert_eq!(w.logprob, Some(logprob(logits, w.id)), "token {}", w.id);
        assert_eq!(w.top.len(), 3);
        assert!(w.top.windows(2).all(|p| p[0].logprob >= p[1].logprob), "{:?}", w.top);
    }
    Ok(())
}

type Before = dyn FnMut(&[u32], &[Part]) -> Result<()> + Send;

/// Is asked before each step, of which it is told tokens and rows.
struct Asking(Box<dyn Sequences>, Box<Before>);

impl Sequences for Asking {
    fn step(&mut self, ids: &[u32], parts: &[Part], logits: &[usize]) -> Result<()> {
        (self.1)(ids, parts)?;
        self.0.step(ids, parts, logits)
    }
    fn logits(&mut self, i: usize) -> Result<&mut [f32]> {
        self.0.logits(i)
    }
    fn vocab(&self) -> usize {
        self.0.vocab()
    }
    fn add_page(&mut self, sequence: usize, page: u32) {
        self.0.add_page(sequence, page);
    }
    fn adopt(&mut self, sequence: usize, len: usize) {
        self.0.adopt(sequence, len);
    }
    fn clear(&mut self, sequence: usize) {
        self.0.clear(sequence);
    }
}

/// Alone a prompt comes in whole steps; beside somebody who decodes, in fewer rows the farther it is.
#[test]
fn a_long_prompt_lets_others_decode() -> Result<()> {
    const ROWS: usize = 32;
    let model = demo(Isa::Portable, 1)?;
    let (engine, options) = model.engine(2, ROWS, 8)?;
    // Attention is dear here: 32 rows may look at 512 positions.
    let options = Options { balance: 16, ..options };
    let steps = Arc::new(Mutex::new(Vec::new()));
    let noted = steps.clone();
    let before = move |_: &[u32], parts: &[Part]| {
        noted.lock().expect("one thread").push(parts.to_vec());
        Ok(())
    };
    let engine = Asking(engine, Box::new(before));
    let mut scheduler = Scheduler::new(Box::new(engine), &model.tokenizer, options);
    let request = |prompt: Vec<u32>, tokens: usize| {
        let limits = Limits { max_tokens: tokens, ..Limits::default() };
        let (params, nudges) = (SamplingParams::default(), Nudges::default());
        Request { prompt, params, nudges, limits, reuse: true, prompt_logprobs: false }
    };
    let long: Vec<u32> = (0..160).map(|i| 3 + i * 7 % 1400).collect();
    let asked = [request(vec![5, 6, 7], 100), request(long.clone(), 4)];
    let mut askers = Vec::new();
    for request in &asked {
        let asker = Asker::default();
        scheduler.submit(request.clone(), Box::new(asker.clone()));
        askers.push(asker);
        // The second comes when the first one decodes.
        scheduler.step();
    }
    while !scheduler.is_idle() {
        scheduler.step();
    }
    let mut computed = 0;
    for parts in steps.lock().expect("one thread").iter() {
        if let [_, prompt] = parts[..]
            && computed < long.len()
        {
            assert!(prompt.rows * (computed + prompt.rows) <= ROWS * 16 || prompt.rows == 1, "{parts:?}");
            assert!(computed > 0 || prompt.rows > 8, "it begins with much: {parts:?}");
            computed += prompt.rows;
        }
    }
    assert_eq!(computed, long.len());
    for (asker, request) in askers.iter().zip(&asked) {
        same(&asker.told.lock().expect("one thread"), &model.alone(request)?, "in short chunks");
    }
    // Nobody else: whole steps.
    steps.lock().expect("one thread").clear();
    scheduler.submit(Request { reuse: false, ..asked[1].clone() }, Box::new(Asker::default()));
    (0..long.len() / ROWS).for_each(|_| scheduler.step());
    assert!(steps.lock().expect("one thread").iter().all(|parts| parts[0].rows == ROWS));
    Ok(())
}

#[test]
fn who_fails_fails_alone() -> Result<()> {
    let model = demo(Isa::Portable, 1)?;
    let (engine, options) = model.engine(4, 16, 12)?;
    let requests = model.requests(6)?;
    let poison = requests.iter().flat_map(|r| &r.prompt).max().map_or(0, |id| id + 1);
    // Every step with a certain token fails.
    let before = move |ids: &[u32], _: &[Part]| match ids.contains(&poison) {
        true => Err(Error::new(Code::NonFinite, "poison")),
        false => Ok(()),
    };
    let engine = Asking(engine, Box::new(before));
    let mut scheduler = Scheduler::new(Box::new(engine), &model.tokenizer, options);
    let mut asked = Vec::new();
    for (i, request) in requests.iter().enumerate() {
        let mut request = request.clone();
        request.prompt_logprobs = i == 4;
        if i == 2 {
            request.prompt.insert(7, poison);
        }
        let asker = Asker::default();
        scheduler.submit(request, Box::new(asker.clone()));
        asked.push(asker);
    }
    while !scheduler.is_idle() {
        scheduler.step();
    }
    for (i, (asker, request)) in asked.iter().zip(&requests).enumerate() {
        let told = asker.told.lock().expect("one thread");
        match i {
            2 => assert_eq!(told.failed.as_ref().map(Error::code), Some(Code::NonFinite)),
            _ => same(&told, &model.alone(request)?, &format!("request {i}")),
        }
    }
    assert_eq!(scheduler.gauges().pages_used, 0);
    Ok(())
}

#[test]
fn nudges_decide_what_is_said() -> Result<()> {
    let model = demo(Isa::Portable, 1)?;
    let mut scheduler = model.scheduler(4, 64, 12)?;
    let mut base = model.requests(1)?.remove(0);
    base.limits = Limits { max_tokens: 24, ..Limits::default() };
    let mut said = |nudges: Nudges| {
        let asker = Asker::default();
        scheduler.submit(Request { nudges, ..base.clone() }, Box::new(asker.clone()));
        while !scheduler.is_idle() {
            scheduler.step();
        }
        let told = asker.told.lock().expect("one thread");
        told.ids.clone()
    };
    let plain = said(Nudges::default());
    let banned = said(Nudges { bias: vec![(plain[0], -100.0)], ..Nudges::default() });
    assert!(!banned.contains(&plain[0]), "{banned:?}");
    let forced = said(Nudges { bias: vec![(7, 100.0)], ..Nudges::default() });
    assert_eq!(forced, [7; 24]);
    // What was said often loses to what was said seldom.
    let bias = vec![(7, 100.0), (9, 90.0)];
    let count = |ids: &[u32], id| ids.iter().filter(|i| **i == id).count();
    let strong = said(Nudges { bias: bias.clone(), ..Nudges::default() });
    let tired = said(Nudges { bias, frequency: 2.0, presence: 2.0 });
    assert!(count(&tired, 7) > 0 && count(&tired, 9) > count(&strong, 9), "{tired:?} and {strong:?}");
    Ok(())
}

#[test]
fn what_cannot_be_answered_is_told_at_once() -> Result<()> {
    let model = demo(Isa::Portable, 1)?;
    let mut scheduler = model.scheduler(2, 8, 3)?;
    let good = model.requests(1)?.remove(0);
    let cases = [
        (Request { prompt: Vec::new(), ..good.clone() }, Code::Usage),
        (Request { prompt: vec![1; CONTEXT + 1], ..good.clone() }, Code::ContextFull),
        (Request { prompt: vec![model.vocab as u32], ..good.clone() }, Code::ValueInvalid),
        (
            Request { params: SamplingParams { top_p: 0.0, ..good.params.clone() }, ..good.clone() },
            Code::Usage,
        ),
        (
            Request {
                limits: Limits { stop_strings: vec![String::new()], ..good.limits.clone() },
                ..good.clone()
            },
            Code::Usage,
        ),
    ];
    for (request, code) in cases {
        let asker = Asker::default();
        scheduler.submit(request, Box::new(asker.clone()));
        let told = asker.told.lock().expect("one thread");
        assert_eq!(told.failed.as_ref().map(q4_core::Error::code), Some(code));
        assert!(scheduler.is_idle());
    }
    // A prompt that fills the context has no room for an answer, which is not an error.
    let asker = Asker::default();
    let prompt = good.prompt.iter().copied().cycle().take(CONTEXT).collect();
    scheduler.submit(Request { prompt, ..good.clone() }, Box::new(asker.clone()));
    while !scheduler.is_idle() {
        scheduler.step();
    }
    let told = asker.told.lock().expect("one thread");
    let answer = told.answer.as_ref().expect("an answer");
    assert_eq!((answer.finish, answer.ids.len()), (FinishReason::Context, 0));
    Ok(())
}

#[test]
fn answers_that_are_interrupted_say_so() -> Result<()> {
    static TOLD: AtomicUsize = AtomicUsize::new(0);
    let model = demo(Isa::Portable, 1)?;
    let mut scheduler = model.scheduler(2, 16, 6)?;
    let askers: Vec<Asker> = (0..4).map(|_| Asker::default()).collect();
    for (request, asker) in model.requests(4)?.into_iter().zip(&askers) {
        let limits = Limits { max_tokens: 60, stop_ids: Vec::new(), ..Limits::default() };
        scheduler.submit(Request { limits, ..request }, Box::new(asker.clone()));
    }
    for _ in 0..12 {
        scheduler.step();
    }
    scheduler.interrupt();
    assert!(scheduler.is_idle());
    for asker in &askers {
        let told = asker.told.lock().expect("one thread");
        let answer = told.answer.as_ref().expect("an end");
        assert_eq!(answer.finish, FinishReason::Interrupted);
        assert_eq!(answer.text, told.text);
        TOLD.fetch_add(answer.ids.len(), Ordering::Relaxed);
    }
    assert!(TOLD.load(Ordering::Relaxed) > 0, "two of them had begun");
    assert_eq!(scheduler.gauges().pages_used, 0);
    Ok(())
}
