//! An engine without a model.
use crate::engine::{Busy, Engine, Readiness};
use crate::served::Served;
use q4_core::{Code, Error};
use q4_model::batch::{Event, Gauges, Request, Sink, Weighed};
use q4_model::constraint::Grammars;
use q4_model::generate::{Answer, FinishReason};
use q4_model::generation::GenerationConfig;
use q4_model::likely::{Likely, Ranking};
use q4_model::stop::StopMatcher;
use q4_model::template::ChatTemplate;
use q4_model::tokenizer::Tokenizer;
use serde_json::{Map, json};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Positions of a sequence.
pub const CONTEXT: usize = 200;

/// How the engine behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// Answers at once.
    Quick,
    /// Has no room.
    Full,
    /// Says one token and waits until nobody listens any longer.
    Endless,
    /// Fails after a few tokens.
    Failing,
    /// Says one token a millisecond.
    Slow,
    /// Has a bug.
    Panicking,
    /// Says nothing at all and forgets who asked.
    Silent,
    /// Has room for one.
    Small,
    /// Ends everything where it stands.
    Ending,
}

/// Says the same to everybody.
pub struct Scripted {
    pub served: Arc<Served>,
    pub mood: Mood,
    pub readiness: Mutex<Readiness>,
    /// What it was asked.
    pub asked: Mutex<Vec<Request>>,
    /// How many have left before their answer was over.
    pub left: Arc<AtomicUsize>,
    pub text: String,
    pub capacity: usize,
}

pub fn tokenizer() -> Tokenizer {
    Tokenizer::from_bytes(include_bytes!("../../../demo/tokenizer.json")).expect("the demo's tokenizer")
}

fn served() -> Served {
    let template = "{% if tools %}{{ tools | tojson }}\n{% endif %}\
                    {% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>\
                    {% if enable_thinking %}<think>\n{% endif %}";
    let tokenizer = tokenizer();
    Served {
        name: "demo".to_owned(),
        stop_ids: vec![tokenizer.id_of("<|im_end|>").expect("a token")],
        tokenizer,
        grammars: Grammars::default(),
        template: ChatTemplate::compile(template).expect("compiles"),
        variables: Map::new(),
        generation: GenerationConfig::default(),
        context: CONTEXT,
        explain: json!({"schema": "q4.explain/1"}),
        certificates: json!({"schema": "q4.certificates/1"}),
        created: 7,
    }
}

impl Scripted {
    pub fn saying(text: &str) -> Self {
        Self {
            served: Arc::new(served()),
            mood: Mood::Quick,
            readiness: Mutex::new(Readiness::Ready),
            asked: Mutex::default(),
            left: Arc::default(),
            text: text.to_owned(),
            capacity: 1000,
        }
    }
    pub fn in_mood(mood: Mood) -> Self {
        Self { mood, ..Self::saying("Hello, you.") }
    }
    pub fn last(&self) -> Request {
        self.asked.lock().expect("lock").last().expect("asked").clone()
    }
    /// The prompt of the last request as a text.
    pub fn prompt(&self) -> String {
        self.served.tokenizer.decode(&self.last().prompt, false).expect("decodes")
    }
}

impl Engine for Scripted {
    fn submit(&self, request: Request, mut sink: Box<dyn Sink>) -> Result<(), Busy> {
        let has_one = !self.asked.lock().expect("lock").is_empty();
        if self.mood == Mood::Full || self.mood == Mood::Small && has_one {
            return Err(Busy { retry_after: 3 });
        }
        assert!(self.mood != Mood::Panicking, "a bug");
        self.asked.lock().expect("lock").push(request.clone());
        if self.mood == Mood::Silent {
            return Ok(());
        }
        let (served, text, mood, left) =
            (self.served.clone(), self.text.clone(), self.mood, self.left.clone());
        let mut work = move || {
            if !answer(&served, &text, mood, &request, sink.as_mut()) {
                left.fetch_add(1, SeqCst);
            }
        };
        match mood {
            Mood::Endless | Mood::Slow | Mood::Small => drop(std::thread::spawn(work)),
            _ => work(),
        }
        Ok(())
    }
    fn capacity(&self) -> usize {
        self.capacity
    }
    fn gauges(&self) -> Gauges {
        let (pages_used, pages) = (2, 4);
        let (prompt_tokens, cached_tokens) = (10, 4);
        Gauges {
            running: 1,
            waiting: 2,
            pages_used,
            pages,
            prompt_tokens,
            cached_tokens,
            ..Gauges::default()
        }
    }
    fn readiness(&self) -> Readiness {
        self.readiness.lock().expect("lock").clone()
    }
}

/// A token that gets less likely with its id.
fn weigh(served: &Served, id: u32, top: usize) -> Weighed {
    let logprob = |id: u32| -0.125 * (1 + id % 8) as f32;
    let mut likely: Vec<Likely> =
        [id, 40, 41, 42].map(|id| Likely { id, logprob: logprob(id) }).into_iter().collect();
    likely.sort_by(|a, b| b.logprob.total_cmp(&a.logprob).then(a.id.cmp(&b.id)));
    likely.dedup();
    likely.truncate(top);
    assert!(id <= served.tokenizer.highest_id());
    Weighed { id, logprob: Some(logprob(id)), top: likely }
}

/// Whether somebody listened to the end.
fn answer(served: &Served, text: &str, mood: Mood, request: &Request, sink: &mut dyn Sink) -> bool {
    let top = request.limits.top_logprobs;
    let mut prompt = Vec::new();
    if request.prompt_logprobs {
        prompt.extend(request.prompt.iter().map(|id| weigh(served, *id, top)));
        (prompt[0].logprob, prompt[0].top) = (None, Vec::new());
    }
    let cached = if request.reuse { request.prompt.len() / 2 } else { 0 };
    sink.tell(Event::Started { cached, prompt });
    let script = served.tokenizer.encode(text, false).expect("encodes");
    let ends = !request.limits.stop_ids.is_empty();
    let script = script.iter().copied().cycle().take(if ends { script.len() } else { usize::MAX });
    let mut stream = served.tokenizer.stream(true);
    let mut matcher = StopMatcher::new(&request.limits.stop_strings).expect("valid");
    let (mut all, mut ids) = (String::new(), Vec::new());
    let mut finish = FinishReason::Stop;
    for id in script {
        if ids.len() == request.limits.max_tokens {
            finish = FinishReason::Length;
            break;
        }
        if mood == Mood::Failing && ids.len() == 2 {
            sink.tell(Event::Failed(Error::new(Code::NonFinite, "logits").have("NaN")));
            return true;
        }
        if mood == Mood::Ending && ids.len() == 2 {
            finish = FinishReason::Interrupted;
            break;
        }
        if mood == Mood::Slow {
            std::thread::sleep(Duration::from_millis(1));
        }
        while matches!(mood, Mood::Endless | Mood::Small) && ids.len() == 1 && !sink.is_gone() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if sink.is_gone() {
            return false;
        }
        ids.push(id);
        let piece = stream.push(id).expect("decodes").unwrap_or_default();
        let matched = matcher.push(&piece);
        all.push_str(&matched.emit);
        let token = weigh(served, id, top);
        sink.tell(Event::Token { token, text: matched.emit });
        if matched.stopped.is_some() {
            finish = FinishReason::StopString;
            break;
        }
    }
    let mut text = String::new();
    if finish != FinishReason::StopString {
        text = matcher.push(&stream.finish().expect("decodes")).emit;
        text.push_str(&matcher.finish());
    }
    all.push_str(&text);
    let answer = Answer {
        text: all,
        ids,
        prompt_tokens: request.prompt.len() - cached,
        finish,
        likely: Ranking::default(),
        prefill: Duration::ZERO,
        decode: Duration::ZERO,
    };
    sink.tell(Event::Ended { text, answer: Box::new(answer) });
    true
}
