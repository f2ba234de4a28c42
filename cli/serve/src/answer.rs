//! Answers as they come: one stream of happenings for all answers to a request, whatever the dialect.
use crate::ask::Ask;
use crate::memory::Held;
use crate::metrics::Outcome;
use crate::prepare::{Given, Job, prepare};
use crate::refusal::{Kind, Refusal};
use crate::server::{Phase, Server};
use crate::trail::Trail;
use crate::words;
use q4_model::batch::{Event, Sink, Weighed};
use q4_model::generate::{Answer, FinishReason};
use q4_model::reply::{self, ReplyParser};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, watch};

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Text.
    Text(String),
    /// A thought.
    Thought(String),
    /// A call begins. One that is damaged or cut never becomes [`Called`](Self::Called).
    Call {
        /// Its number in the answer.
        index: usize,
        /// Its name among all calls, without the prefix of a dialect.
        id: String,
        /// The tool.
        name: String,
    },
    /// More JSON text of a call's arguments.
    Arguments {
        /// Number of the call.
        index: usize,
        /// The text.
        delta: String,
    },
    /// A call is complete.
    Called {
        /// Its number.
        index: usize,
    },
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it.
    Stop,
    /// A stop string did: this one.
    StopString(Option<String>),
    /// It was cut.
    Length,
    /// It waits for the results of calls.
    Calls,
}

/// Tokens of one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt.
    pub prompt: usize,
    /// Those of them that were in the cache before.
    pub cached: usize,
    /// Of the answer.
    pub answer: usize,
    /// Those of them that were thoughts.
    pub thought: usize,
}

/// The end of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct End {
    /// Why.
    pub finish: Finish,
    /// What it took.
    pub usage: Usage,
}

/// What happens to one answer, in this order: a start, steps, an end.
#[derive(Clone, Debug, PartialEq)]
pub enum Happened {
    /// The prompt is in the cache; with its tokens, where they are to be weighed.
    Started {
        /// The tokens of the prompt.
        prompt: Vec<Weighed>,
        /// Tokens of prompt and cache, as far as they are known.
        usage: Usage,
    },
    /// A token, and what became sure with it.
    Step {
        /// May be none.
        parts: Vec<Part>,
        /// The token, if it is weighed.
        token: Option<Weighed>,
    },
    /// The last of it.
    Ended {
        /// What was held back until now.
        parts: Vec<Part>,
        /// Why, and what it took.
        end: End,
    },
}

/// Hears of one answer for the engine.
struct Ear {
    choice: usize,
    to: UnboundedSender<(usize, Event)>,
}

impl Sink for Ear {
    fn tell(&mut self, event: Event) {
        // Nobody may be left to hear it, which the engine is told by `is_gone`.
        let _ = self.to.send((self.choice, event));
    }
    fn is_gone(&self) -> bool {
        self.to.is_closed()
    }
}

/// All answers to one request. Dropping them tells the engine that nobody listens any longer.
pub struct Answers {
    server: Arc<Server>,
    trail: Arc<Trail>,
    heard: UnboundedReceiver<(usize, Event)>,
    phase: watch::Receiver<Phase>,
    prompts: Vec<Given>,
    stop: Vec<String>,
    logprobs: Option<usize>,
    progress: Vec<Progress>,
    /// What the prompts take.
    _held: Held,
}

impl Answers {
    /// Gives the engine all requests of a job.
    ///
    /// # Errors
    /// 429 where the queue is full; then none of them is answered.
    fn begin(server: Arc<Server>, trail: Arc<Trail>, job: Job, held: Held) -> Result<Self, Refusal> {
        let (to, heard) = unbounded_channel();
        let each = job.requests.len() / job.prompts.len().max(1);
        let progress = (0..job.requests.len())
            .map(|choice| Progress::new(&job.prompts[choice / each], job.parallel_calls))
            .collect();
        for (choice, request) in job.requests.into_iter().enumerate() {
            let sink = Box::new(Ear { choice, to: to.clone() });
            if let Err(busy) = server.engine.submit(request, sink) {
                let refusal = Refusal::new(Kind::Busy, "too many requests wait; try again later");
                return Err(refusal.coded("queue_full").again_after(busy.retry_after));
            }
        }
        let phase = server.phase.subscribe();
        let (prompts, stop, logprobs) = (job.prompts, job.stop, job.logprobs);
        Ok(Self { server, trail, heard, phase, prompts, stop, logprobs, progress, _held: held })
    }

    /// The prompts that are answered, each by the same number of answers.
    pub fn prompts(&self) -> &[Given] {
        &self.prompts
    }
    /// How many answers there are.
    pub fn len(&self) -> usize {
        self.progress.len()
    }
    /// The model and its tokenizer.
    pub fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// What happens next, and to which answer; `None` once all are over.
    ///
    /// # Errors
    /// What ends all of them.
    pub async fn next(&mut self) -> Option<Result<(usize, Happened), Refusal>> {
        if self.progress.iter().all(|p| p.is_over) {
            return None;
        }
        let cut = async { drop(self.phase.wait_for(|phase| *phase == Phase::Cut).await) };
        let heard = tokio::select! {
            biased;
            heard = self.heard.recv() => Some(heard),
            () = cut => None,
        };
        let Some(heard) = heard else {
            self.abandon(Outcome::Abort);
            return Some(Err(Refusal::draining()));
        };
        let Some((choice, event)) = heard else {
            self.abandon(Outcome::Error);
            return Some(Err(Refusal::new(Kind::Fault, "the engine has stopped")));
        };
        Some(self.take(choice, event).map(|happened| (choice, happened)))
    }

    fn take(&mut self, choice: usize, event: Event) -> Result<Happened, Refusal> {
        let most = self.logprobs;
        let weighed = |mut token: Weighed| {
            token.top.truncate(most.unwrap_or(0));
            token
        };
        let progress = &mut self.progress[choice];
        match event {
            Event::Started { cached, prompt } => {
                progress.usage.cached = cached;
                progress.started = Some(Instant::now());
                self.trail.started(progress.usage.prompt, cached);
                self.server.metrics.started(progress.usage.prompt);
                let prompt = prompt.into_iter().map(weighed).collect();
                Ok(Happened::Started { prompt, usage: progress.usage })
            }
            Event::Token { token, text } => {
                progress.clock(&self.server);
                let parts = progress.read(&text);
                Ok(Happened::Step { parts, token: most.is_some().then(|| weighed(token)) })
            }
            Event::Ended { answer, .. } if answer.finish == FinishReason::Interrupted => {
                self.abandon(Outcome::Abort);
                Err(Refusal::draining())
            }
            Event::Ended { text, answer } => {
                let mut parts = progress.read(&text);
                parts.extend(progress.finish());
                let finish = self.finish(choice, &answer);
                let outcome = if finish == Finish::Length { Outcome::Length } else { Outcome::Stop };
                let progress = &mut self.progress[choice];
                if let Some(started) = progress.started {
                    let before = started - progress.asked;
                    self.server.metrics.queued(before.saturating_sub(answer.prefill));
                }
                progress.over(outcome, &self.server, &self.trail);
                Ok(Happened::Ended { parts, end: End { finish, usage: progress.usage } })
            }
            Event::Failed(error) => {
                tracing::error!(id = self.trail.id, %error, "an answer failed");
                self.abandon(Outcome::Error);
                Err(error.into())
            }
        }
    }

    fn finish(&self, choice: usize, answer: &Answer) -> Finish {
        match answer.finish {
            FinishReason::Length | FinishReason::Context | FinishReason::Interrupted => Finish::Length,
            FinishReason::StopString => Finish::StopString(self.stopped_by(answer)),
            FinishReason::Stop if self.progress[choice].calls > 0 => Finish::Calls,
            FinishReason::Stop => Finish::Stop,
        }
    }

    /// The stop string behind the text of an answer.
    fn stopped_by(&self, answer: &Answer) -> Option<String> {
        let all = self.server.served.tokenizer.decode(&answer.ids, true).ok()?;
        let rest = all.strip_prefix(&answer.text)?;
        self.stop.iter().filter(|stop| rest.starts_with(stop.as_str())).max_by_key(|s| s.len()).cloned()
    }

    fn abandon(&mut self, outcome: Outcome) {
        for progress in self.progress.iter_mut().filter(|p| !p.is_over) {
            progress.over(outcome, &self.server, &self.trail);
        }
        self.heard.close();
    }
}

impl Server {
    /// Gives the engine what is asked. `work` is given back once the prompts are there, `held` with the
    /// answers.
    ///
    /// # Errors
    /// 400 for what cannot be, 429 where the queue or memory is full, 503 before the engine is ready.
    pub async fn ask(
        self: &Arc<Self>,
        ask: Ask,
        trail: &Arc<Trail>,
        mut held: Held,
        work: OwnedSemaphorePermit,
    ) -> Result<Answers, Refusal> {
        if let Some(refusal) = self.unready() {
            return Err(refusal);
        }
        let (most, answers) = (self.engine.capacity(), ask.prompts.len().saturating_mul(ask.n));
        if answers > most {
            // Trying again would not help.
            let need = format!("at most {most} answers in one request, as --parallel and --queue hold");
            return Err(Refusal::field(if ask.n > 1 { "n" } else { "prompt" }, &need, answers));
        }
        let (job, held) = self
            .aside(move |server| {
                let job = prepare(&server.served, &server.options, ask)?;
                held.keep(job.bytes())?;
                drop(work);
                Ok((job, held))
            })
            .await?;
        Answers::begin(self.clone(), trail.clone(), job, held)
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.abandon(Outcome::Abort);
    }
}

/// How far one answer is.
struct Progress {
    asked: Instant,
    started: Option<Instant>,
    first: Option<Instant>,
    last: Option<Instant>,
    parser: Option<ReplyParser>,
    parallel_calls: bool,
    /// Calls that are complete.
    calls: usize,
    usage: Usage,
    /// Tokens whose text has not come out yet.
    pending: usize,
    is_over: bool,
}

impl Progress {
    fn new(prompt: &Given, parallel_calls: bool) -> Self {
        Self {
            asked: Instant::now(),
            started: None,
            first: None,
            last: None,
            parser: prompt.reading.clone().map(ReplyParser::new),
            parallel_calls,
            calls: 0,
            usage: Usage { prompt: prompt.ids.len(), ..Usage::default() },
            pending: 0,
            is_over: false,
        }
    }

    fn clock(&mut self, server: &Server) {
        let now = Instant::now();
        match self.last {
            None => server.metrics.first_token(now - self.asked),
            Some(last) => server.metrics.next_token(now - last),
        }
        self.first.get_or_insert(now);
        self.last = Some(now);
        self.usage.answer += 1;
        self.pending += 1;
    }

    fn read(&mut self, text: &str) -> Vec<Part> {
        match &mut self.parser {
            None if text.is_empty() => Vec::new(),
            None => vec![Part::Text(text.to_owned())],
            Some(parser) => {
                let parts = parser.push(text);
                self.named(parts)
            }
        }
    }

    fn finish(&mut self) -> Vec<Part> {
        let parts = self.parser.as_mut().map(ReplyParser::finish).unwrap_or_default();
        self.named(parts)
    }

    /// Gives calls their ids, leaves out those that are too many, counts thoughts.
    fn named(&mut self, parts: Vec<reply::Part>) -> Vec<Part> {
        let is_kept = |index: usize| index == 0 || self.parallel_calls;
        let mut kept = Vec::with_capacity(parts.len());
        for part in parts {
            if matches!(part, reply::Part::Reasoning(_)) {
                self.usage.thought += self.pending;
            }
            self.pending = 0;
            kept.extend(match part {
                reply::Part::Text(text) | reply::Part::Reasoning(text) if text.is_empty() => None,
                reply::Part::Text(text) => Some(Part::Text(text)),
                reply::Part::Reasoning(text) => Some(Part::Thought(text)),
                reply::Part::CallStart { index, name } if is_kept(index) => {
                    Some(Part::Call { index, id: words::name(""), name })
                }
                reply::Part::CallArguments { index, delta } if is_kept(index) => {
                    Some(Part::Arguments { index, delta })
                }
                reply::Part::CallEnd { index } if is_kept(index) => {
                    self.calls += 1;
                    Some(Part::Called { index })
                }
                _ => None,
            });
        }
        kept
    }

    fn over(&mut self, outcome: Outcome, server: &Server, trail: &Trail) {
        self.is_over = true;
        let decode = self.first.zip(self.last).map(|(first, last)| last - first).unwrap_or_default();
        server.metrics.over(outcome, self.asked.elapsed(), decode, self.usage.answer);
        trail.over(outcome, self.usage.answer);
    }
}
