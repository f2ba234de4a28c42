//! Who is computed in which step.
//!
//! Every step has one row of each sequence that decodes, and chunks of prompts in what is left of its rows,
//! in the order in which they were admitted; beside those who decode, chunks far into a prompt are short
//! enough that their attention costs no more than the products of a whole step. A request is admitted when
//! the cache has pages for all of its prompt; where decoding needs a page and there is none, the sequence
//! that was admitted last gives its own back and waits at the front: it is computed again, with the same
//! bits, and goes on where it was.
use super::nudges::Nudging;
use super::pages::{Chain, Pages};
use super::{Event, PAGE, Part, Request, Sequences, Sink, Weighed, finite};
use crate::draft::{Draft, FinishReason};
use crate::likelihood::logprob;
use crate::likely::Ranking;
use crate::sampling::Sampler;
use crate::tokenizer::Tokenizer;
use q4_core::{Code, Error, Result};
use std::collections::VecDeque;
use std::time::Instant;
use std::{iter, mem};

/// What bounds a step.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Sequences that are computed at once, at most.
    pub sequences: usize,
    /// Rows of a step, at least as many as sequences.
    pub rows: usize,
    /// Rows of a step whose logits are kept, at least as many as sequences.
    pub logit_rows: usize,
    /// Positions a sequence may have.
    pub context: usize,
    /// Pages of the cache; a whole sequence must fit.
    pub pages: usize,
    /// Positions whose attention costs a row what its products cost
    /// ([`Shape::balance`](crate::executor::Shape::balance)).
    pub balance: usize,
}

/// Where a scheduler stands, and what it did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Sequences in the cache.
    pub running: usize,
    /// Requests that wait for room.
    pub waiting: usize,
    /// Pages that somebody reads or writes.
    pub pages_used: usize,
    /// Pages there are.
    pub pages: usize,
    /// Prompt tokens that were asked for.
    pub prompt_tokens: u64,
    /// Prompt tokens whose keys and values were there already.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub answer_tokens: u64,
    /// Requests that were answered, or failed.
    pub ended: u64,
    /// Times a sequence gave its pages back to go on later.
    pub preempted: u64,
    /// Steps.
    pub steps: u64,
}

/// Answers requests, many at once.
pub struct Scheduler<'a> {
    engine: Box<dyn Sequences>,
    tokenizer: &'a Tokenizer,
    options: Options,
    pages: Pages,
    /// Numbers of the engine's sequences that nobody has.
    free: Vec<usize>,
    waiting: VecDeque<Sequence<'a>>,
    /// In the order of admission.
    running: Vec<Sequence<'a>>,
    gauges: Gauges,
    /// Of the step: tokens, whose they are, and rows with logits.
    ids: Vec<u32>,
    parts: Vec<Part>,
    rows: Vec<usize>,
}

/// A request on its way.
struct Sequence<'a> {
    sink: Box<dyn Sink>,
    sampler: Sampler,
    nudging: Nudging,
    draft: Draft<'a>,
    /// Prompt and answer.
    tokens: Vec<u32>,
    reuse: bool,
    /// Probabilities of the prompt's own tokens, where they are asked for, until they are told.
    prompt: Option<Vec<Weighed>>,
    /// Whether those of the answer are asked for.
    weighs_answer: bool,
    /// Tokens that are named beside each of them.
    top: usize,
    started: bool,
    /// Tokens of the prompt that were in the cache when it was first admitted.
    cached: usize,
    /// When it was admitted, then when its first token came.
    since: Instant,
    place: Place,
    /// Rows of the step that is being made, and the first of those with logits.
    step: (usize, usize),
}

/// What a sequence has of the engine and of its cache.
#[derive(Default)]
struct Place {
    number: usize,
    pages: Vec<u32>,
    /// Tokens whose keys and values are there.
    computed: usize,
    /// Names all tokens of the pages that were kept, of which there are so many.
    chain: Chain,
    kept: usize,
}

impl<'a> Scheduler<'a> {
    /// Over `engine`, which was made for `options`.
    pub fn new(engine: Box<dyn Sequences>, tokenizer: &'a Tokenizer, options: Options) -> Self {
        let sequences = options.sequences;
        assert!(options.rows >= sequences && options.logit_rows >= sequences, "a row for each sequence");
        assert!(options.pages * PAGE >= options.context, "a whole sequence in the cache");
        Self {
            engine,
            tokenizer,
            options,
            pages: Pages::new(options.pages),
            free: (0..sequences).rev().collect(),
            waiting: VecDeque::new(),
            running: Vec::with_capacity(sequences),
            gauges: Gauges { pages: options.pages, ..Gauges::default() },
            ids: Vec::with_capacity(options.rows),
            parts: Vec::with_capacity(sequences),
            rows: Vec::with_capacity(options.logit_rows),
        }
    }

    /// Takes a request, behind those that wait. One that can never be answered is told so at once.
    pub fn submit(&mut self, request: Request, mut sink: Box<dyn Sink>) {
        let (sampler, draft) = match self.begin(&request) {
            Ok(begun) => begun,
            Err(e) => return sink.tell(Event::Failed(e)),
        };
        let Request { prompt, limits, nudges, reuse, prompt_logprobs, .. } = request;
        self.gauges.prompt_tokens += prompt.len() as u64;
        self.waiting.push_back(Sequence {
            sink,
            sampler,
            nudging: Nudging::new(nudges),
            draft,
            tokens: prompt,
            // What is in the cache has no logits any longer.
            reuse: reuse && !prompt_logprobs,
            weighs_answer: prompt_logprobs || limits.top_logprobs > 0,
            top: limits.top_logprobs,
            prompt: prompt_logprobs.then(Vec::new),
            started: false,
            cached: 0,
            since: Instant::now(),
            place: Place::default(),
            step: (0, 0),
        });
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Where it stands.
    pub fn gauges(&self) -> Gauges {
        Gauges {
            running: self.running.len(),
            waiting: self.waiting.len(),
            pages_used: self.pages.count() - self.pages.available(),
            ..self.gauges
        }
    }

    /// Makes one step, and tells everybody what it was for him. Whoever is gone is dropped before it. A step
    /// that fails is made again for each sequence by itself, and those that still fail are told.
    pub fn step(&mut self) {
        self.drop_the_gone();
        self.admit();
        self.plan();
        if self.parts.is_empty() {
            return;
        }
        self.gauges.steps += 1;
        match self.engine.step(&self.ids, &self.parts, &self.rows) {
            Ok(()) => self.each_of_step(|_, _| Ok(())),
            Err(e) if self.parts.len() == 1 => self.each_of_step(|_, _| Err(e.clone())),
            Err(_) => self.each_of_step(Self::step_alone),
        }
    }

    /// Ends every answer where it stands, and tells so.
    pub fn interrupt(&mut self) {
        let waiting = mem::take(&mut self.waiting);
        let running = (0..self.running.len()).rev().map(|at| self.remove(at)).collect::<Vec<_>>();
        for mut sequence in waiting.into_iter().chain(running) {
            sequence.draft.end(FinishReason::Interrupted);
            sequence.finish();
        }
    }

    /// What a request needs besides a place, or why it can never be answered.
    fn begin(&self, request: &Request) -> Result<(Sampler, Draft<'a>)> {
        let (prompt, context, vocab) = (&request.prompt, self.options.context, self.engine.vocab());
        if prompt.is_empty() {
            return Err(Error::new(Code::Usage, "the prompt is empty").need("at least one token"));
        }
        if prompt.len() > context {
            return Err(Error::new(Code::ContextFull, "the prompt does not fit into the context")
                .need(format!("{} positions", prompt.len()))
                .have(format!("{context} positions"))
                .fix("raise --context up to max_position_embeddings of config.json, or shorten the prompt"));
        }
        if let Some(id) = prompt.iter().find(|id| **id as usize >= vocab) {
            let need = format!("below {vocab}");
            return Err(Error::new(Code::ValueInvalid, "token id").need(need).have(id.to_string()));
        }
        request.nudges.validate(vocab)?;
        let sampler = Sampler::new(request.params.clone(), vocab)?;
        let draft = Draft::new(self.tokenizer, &request.limits, prompt, context - prompt.len())?;
        Ok((sampler, draft))
    }

    fn drop_the_gone(&mut self) {
        self.waiting.retain(|sequence| !sequence.sink.is_gone());
        for at in (0..self.running.len()).rev() {
            if self.running[at].sink.is_gone() {
                self.remove(at);
            }
        }
    }

    /// Admits those who wait, in their order, while there is room for the first of them.
    fn admit(&mut self) {
        while let Some(mut sequence) = self.waiting.pop_front() {
            if self.free.is_empty() || !self.gives_pages(&mut sequence) {
                self.waiting.push_front(sequence);
                return;
            }
            let Some(number) = self.free.pop() else { return };
            sequence.place.number = number;
            sequence.place.pages.iter().for_each(|page| self.engine.add_page(number, *page));
            self.engine.adopt(number, sequence.place.computed);
            if !sequence.started {
                sequence.since = Instant::now();
                sequence.cached = sequence.place.computed;
                self.gauges.cached_tokens += sequence.cached as u64;
            }
            self.running.push(sequence);
        }
    }

    /// Pages for all tokens of a sequence, those that are there already among them; none where they do not
    /// suffice.
    fn gives_pages(&mut self, sequence: &mut Sequence<'a>) -> bool {
        // One token is left to compute, or there would be no logits.
        let (tokens, place) = (&sequence.tokens, &mut sequence.place);
        let shared = if sequence.reuse { &tokens[..tokens.len() - 1] } else { &[] };
        let (mut pages, chain) = self.pages.find(shared);
        let kept = pages.len();
        let missing = tokens.len().div_ceil(PAGE) - kept;
        // Those who run will want pages too: one each keeps them from taking these back at once.
        if missing + self.running.len() > self.pages.available() {
            self.pages.release(&pages);
            return false;
        }
        pages.extend((0..missing).map_while(|_| self.pages.take()));
        *place = Place { number: 0, computed: kept * PAGE, pages, chain, kept };
        true
    }

    /// Decides who has which rows of the next step.
    fn plan(&mut self) {
        self.running.iter_mut().for_each(|s| s.step = (0, 0));
        let mut at = 0;
        // Whoever decodes has a row, and a page for it.
        while at < self.running.len() {
            let sequence = &self.running[at];
            let is_full = sequence.place.computed == sequence.place.pages.len() * PAGE;
            if sequence.is_decoding() && is_full {
                match self.pages.take() {
                    Some(page) => {
                        let place = &mut self.running[at].place;
                        place.pages.push(page);
                        self.engine.add_page(place.number, page);
                    }
                    None => {
                        self.preempt();
                        continue; // the one that is looked at may be gone
                    }
                }
            }
            at += 1;
        }
        let decoding = self.running.iter().filter(|s| s.is_decoding()).count();
        let (mut left, mut weighed) = (self.options.rows - decoding, self.options.logit_rows - decoding);
        // Positions that rows of prompts may look at, all together; nobody waits where nobody decodes.
        let mut looks = match decoding {
            0 => usize::MAX,
            _ => self.options.rows.saturating_mul(self.options.balance),
        };
        self.ids.clear();
        self.parts.clear();
        self.rows.clear();
        for sequence in &mut self.running {
            let pending = &sequence.tokens[sequence.place.computed..];
            let all = sequence.prompt.is_some();
            let near = (looks / (sequence.place.computed + left).max(1)).max(1);
            let count = match sequence.is_decoding() {
                true => 1,
                false if all => pending.len().min(left).min(near).min(weighed),
                false => pending.len().min(left).min(near),
            };
            // Its last row has logits.
            let ends = count == pending.len();
            if count == 0 || (!sequence.is_decoding() && ends && weighed == 0) {
                continue;
            }
            if !sequence.is_decoding() {
                left -= count;
                looks = looks.saturating_sub(count * (sequence.place.computed + count));
                weighed -= if all { count } else { usize::from(ends) };
            }
            sequence.step = (count, self.rows.len());
            let first = self.ids.len();
            self.ids.extend_from_slice(&pending[..count]);
            self.parts.push(Part { sequence: sequence.place.number, rows: count });
            match (all, ends) {
                (true, _) => self.rows.extend(first..first + count),
                (false, true) => self.rows.push(first + count - 1),
                (false, false) => {}
            }
        }
    }

    /// The sequence that was admitted last gives its pages back and waits at the front.
    fn preempt(&mut self) {
        let Some(last) = self.running.len().checked_sub(1) else { return };
        let mut sequence = self.remove(last);
        // A prompt that was not computed to its end is weighed again from its beginning.
        sequence.prompt.iter_mut().for_each(Vec::clear);
        self.gauges.preempted += 1;
        self.waiting.push_front(sequence);
    }

    /// Takes a sequence out of the engine and its pages with it.
    fn remove(&mut self, at: usize) -> Sequence<'a> {
        let mut sequence = self.running.remove(at);
        let place = mem::take(&mut sequence.place);
        self.engine.clear(place.number);
        self.free.push(place.number);
        self.pages.release(&place.pages);
        sequence
    }

    /// What the step means to each sequence that is in it: `made` says whether it was made.
    fn each_of_step(&mut self, made: impl Fn(&mut Self, usize) -> Result<()>) {
        let mut at = 0;
        while at < self.running.len() {
            if self.running[at].step.0 == 0 {
                at += 1;
                continue;
            }
            match made(self, at).and_then(|()| self.advance(at)) {
                Ok(true) => {
                    at += 1;
                    continue;
                }
                Ok(false) => self.remove(at).finish(),
                Err(e) => self.remove(at).sink.tell(Event::Failed(e)),
            }
            self.gauges.ended += 1;
        }
    }

    /// The step of one sequence, without the others.
    fn step_alone(&mut self, at: usize) -> Result<()> {
        let sequence = &mut self.running[at];
        let pending = &sequence.tokens[sequence.place.computed..];
        let count = sequence.step.0;
        let first = if sequence.prompt.is_some() { 0 } else { count - 1 };
        self.rows.clear();
        if sequence.prompt.is_some() || count == pending.len() {
            self.rows.extend(first..count);
        }
        let part = Part { sequence: sequence.place.number, rows: count };
        sequence.step = (count, 0);
        self.engine.step(&pending[..count], &[part], &self.rows)
    }

    /// Behind a step that has rows of a sequence; false where its answer ends.
    fn advance(&mut self, at: usize) -> Result<bool> {
        let sequence = &mut self.running[at];
        let (count, first) = sequence.step;
        sequence.place.computed += count;
        if sequence.reuse {
            sequence.place.keep(&sequence.tokens, &mut self.pages);
        }
        let before = sequence.draft.answer.ids.len();
        let goes_on = sequence.after_step(&mut *self.engine, first);
        self.gauges.answer_tokens += (sequence.draft.answer.ids.len() - before) as u64;
        goes_on
    }
}

impl Place {
    /// Keeps the pages that became full.
    fn keep(&mut self, tokens: &[u32], pages: &mut Pages) {
        while (self.kept + 1) * PAGE <= self.computed {
            let tokens = &tokens[self.kept * PAGE..][..PAGE];
            self.chain = pages.keep(self.pages[self.kept], self.chain, tokens);
            self.kept += 1;
        }
    }
}

impl Sequence<'_> {
    /// Whether its prompt is computed, and all that is missing is the token that was drawn last.
    fn is_decoding(&self) -> bool {
        self.started && self.tokens.len() - self.place.computed == 1
    }

    /// Behind a step whose logits of this sequence begin at `first`; false where the answer ends.
    fn after_step(&mut self, engine: &mut dyn Sequences, first: usize) -> Result<bool> {
        let (count, computed) = (self.step.0, self.place.computed);
        let last = first + if self.prompt.is_some() { count - 1 } else { 0 };
        if let Some(weighed) = &mut self.prompt {
            let next = self.tokens.iter().skip(computed - count + 1).take(count);
            for (i, id) in next.enumerate() {
                weighed.push(weigh(*id, finite(engine.logits(first + i)?)?, self.top));
            }
        }
        if computed < self.tokens.len() {
            return Ok(true);
        }
        if !self.started {
            self.start();
        }
        if !self.draft.has_room() {
            return Ok(false);
        }
        let mut whole = None;
        let is_bound = self.draft.is_bound();
        let id = if self.weighs_answer || is_bound || self.draft.looks() || self.nudging.changes() {
            let logits = engine.logits(last)?;
            self.draft.look(finite(logits)?)?;
            // Before the draw, which may change the logits.
            whole = self.weighs_answer.then(|| logits.to_vec());
            self.nudging.apply(logits);
            if !self.draft.bind(logits)? {
                return Ok(false);
            }
            self.sampler.sample(logits, &self.tokens)?
        } else {
            engine.sample(last, &mut self.sampler, &self.tokens)?
        };
        if !self.draft.take(id)? {
            return Ok(false);
        }
        self.nudging.said(id);
        self.tokens.push(id);
        let text = self.draft.spell(id)?;
        let logprob = whole.map(|logits| logprob(&logits, id));
        let top = self.draft.answer.likely.steps().last().unwrap_or_default().to_vec();
        self.sink.tell(Event::Token { token: Weighed { id, logprob, top }, text });
        Ok(self.draft.has_room())
    }

    fn start(&mut self) {
        self.started = true;
        self.draft.answer.prefill = self.since.elapsed();
        self.since = Instant::now();
        // Nothing precedes the first token.
        let first = Weighed { id: self.tokens[0], logprob: None, top: Vec::new() };
        let prompt = self.prompt.take().map(|rest| iter::once(first).chain(rest).collect());
        self.sink.tell(Event::Started { cached: self.cached, prompt: prompt.unwrap_or_default() });
    }

    /// Tells the end.
    fn finish(mut self) {
        match self.draft.finish() {
            Ok(text) => {
                self.draft.answer.decode = self.since.elapsed();
                let answer = Box::new(self.draft.answer);
                self.sink.tell(Event::Ended { text, answer });
            }
            Err(e) => self.sink.tell(Event::Failed(e)),
        }
    }
}

fn weigh(id: u32, logits: &[f32], top: usize) -> Weighed {
    let mut ranking = Ranking::new(top, 1);
    ranking.look(logits);
    let top = ranking.steps().next().map_or_else(Vec::new, <[_]>::to_vec);
    Weighed { id, logprob: Some(logprob(logits, id)), top }
}
