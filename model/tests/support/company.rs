//! The demo model for many, and those who ask it.
#![allow(dead_code)]
use crate::support::Setup;
use q4_core::Result;
use q4_core::isa::Isa;
use q4_core::memory::Budget;
use q4_model::batch::{Event, Options, Request, Scheduler, Sequences, Sink, Weighed};
use q4_model::checkpoint::{Checkpoint, OpenOptions};
use q4_model::constraint::Grammars;
use q4_model::generate::{Answer, generate};
use q4_model::load::{ContextOptions, Loaded, Many};
use q4_model::sampling::Sampler;
use q4_model::text;
use q4_model::tokenizer::Tokenizer;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

pub const CONTEXT: usize = 192;

/// What one asker was told.
#[derive(Default)]
pub struct Told {
    pub text: String,
    pub ids: Vec<u32>,
    pub prompt: Vec<Weighed>,
    pub tokens: Vec<Weighed>,
    pub cached: Option<usize>,
    pub answer: Option<Answer>,
    pub failed: Option<q4_core::Error>,
}

#[derive(Clone, Default)]
pub struct Asker {
    pub told: Arc<Mutex<Told>>,
    pub leaves_after: Option<usize>,
    pub gone: Arc<AtomicBool>,
}

impl Sink for Asker {
    fn tell(&mut self, event: Event) {
        let mut told = self.told.lock().expect("one thread");
        match event {
            Event::Started { cached, prompt } => (told.cached, told.prompt) = (Some(cached), prompt),
            Event::Token { token, text } => {
                told.text.push_str(&text);
                told.ids.push(token.id);
                told.tokens.push(token);
                let leaves = self.leaves_after.is_some_and(|n| told.ids.len() >= n);
                self.gone.store(leaves, Ordering::Relaxed);
            }
            Event::Ended { text, answer } => {
                told.text.push_str(&text);
                told.answer = Some(*answer);
            }
            Event::Failed(e) => told.failed = Some(e),
        }
    }
    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
}

pub struct Model {
    pub loaded: Loaded,
    pub tokenizer: Tokenizer,
    pub vocab: usize,
    pub stop_ids: Vec<u32>,
    pub grammars: Grammars,
}

/// The demo model, and sequences of [`CONTEXT`] positions.
pub fn demo(isa: Isa, threads: usize) -> Result<Model> {
    let setup = Setup { isa: Some(isa.name()), threads, chunk: 64, context: CONTEXT, ..Setup::default() };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo");
    let checkpoint = Checkpoint::open(&path, &OpenOptions::default())?;
    let dispatch = setup.dispatch()?;
    let loaded = setup.load(&checkpoint, &dispatch)?;
    let stop_ids = text::generation(&checkpoint)?.eos_token_ids;
    let (tokenizer, vocab) = (text::tokenizer(&checkpoint)?, checkpoint.config().vocab_size);
    Ok(Model { loaded, tokenizer, vocab, stop_ids, grammars: Grammars::default() })
}

impl Model {
    pub fn scheduler(&self, sequences: usize, rows: usize, pages: usize) -> Result<Scheduler<'_>> {
        let (engine, options) = self.engine(sequences, rows, pages)?;
        Ok(Scheduler::new(engine, &self.tokenizer, options))
    }

    pub fn engine(
        &self,
        sequences: usize,
        rows: usize,
        pages: usize,
    ) -> Result<(Box<dyn Sequences>, Options)> {
        let many = Many { sequences, pages };
        let sizes = ContextOptions {
            context: CONTEXT,
            chunk: rows,
            all_logits: false,
            kv: q4_model::cpu::KvType::F16,
            many: Some(many),
        };
        let engine = self.loaded.sequences(sizes, many, &Budget::of_machine())?;
        let logit_rows = sizes.logit_rows();
        let balance = self.loaded.model.shape().balance();
        Ok((engine, Options { sequences, rows, logit_rows, context: CONTEXT, pages, balance }))
    }

    /// What [`generate`] answers.
    pub fn alone(&self, request: &Request) -> Result<Answer> {
        let sizes = ContextOptions {
            context: CONTEXT,
            chunk: 64,
            all_logits: false,
            kv: q4_model::cpu::KvType::F16,
            many: None,
        };
        let mut runner = self.loaded.runner(sizes, &Budget::of_machine())?;
        let mut sampler = Sampler::new(request.params.clone(), self.vocab)?;
        let Request { prompt, limits, .. } = request;
        generate(&mut runner, &self.tokenizer, prompt, &mut sampler, limits, &mut |_| {})
    }
}
