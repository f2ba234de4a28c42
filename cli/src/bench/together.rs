//! Sequences that decode together in `q4 bench`, greedily, as the users of a server do.
use super::{PROMPT, Subject, prompt};
use crate::args::BenchArgs;
use q4_core::Result;
use q4_core::memory::Budget;
use q4_model::batch::{PAGE, Part, Sequences};
use q4_model::load::{ContextOptions, Many};
use q4_model::sampling::{Sampler, SamplingParams};

pub(super) struct Together {
    engine: Box<dyn Sequences>,
    sampler: Sampler,
    parts: Vec<Part>,
    rows: Vec<usize>,
    /// Next token of every sequence.
    ids: Vec<u32>,
}

impl Together {
    /// `n` sequences behind prompts of [`PROMPT`] tokens, in steps of up to `chunk` rows.
    pub fn new(subject: &Subject, args: &BenchArgs, n: usize, chunk: usize, budget: &Budget) -> Result<Self> {
        let s = &subject.shape;
        let pages = pages(args);
        let many = Many { sequences: n, pages: n * pages };
        let context = pages * PAGE;
        let options = ContextOptions { context, chunk, all_logits: false, kv: subject.kv, many: None };
        let mut engine = subject.loaded.sequences(options, many, budget)?;
        let mut sampler = Sampler::new(SamplingParams::default(), s.vocab)?;
        let mut ids = Vec::new();
        for sequence in 0..n {
            (0..pages).for_each(|page| engine.add_page(sequence, (sequence * pages + page) as u32));
            let mut prompt = prompt(PROMPT, s);
            prompt.rotate_left(sequence % PROMPT); // no two of the first alike
            let pieces = prompt.chunks(chunk);
            let last = pieces.len() - 1;
            for (i, ids) in pieces.enumerate() {
                let end = [ids.len() - 1];
                let picks = if i == last { &end[..] } else { &[] };
                engine.step(ids, &[Part { sequence, rows: ids.len() }], picks)?;
            }
            ids.push(engine.sample(0, &mut sampler, &[])?);
        }
        let parts = (0..n).map(|sequence| Part { sequence, rows: 1 }).collect();
        Ok(Self { engine, sampler, parts, rows: (0..n).collect(), ids })
    }

    /// Accepts the chosen token of every sequence and chooses the next ones.
    pub fn step(&mut self) -> Result<()> {
        self.engine.step(&self.ids, &self.parts, &self.rows)?;
        for (i, id) in self.ids.iter_mut().enumerate() {
            *id = self.engine.sample(i, &mut self.sampler, &[])?;
        }
        Ok(())
    }
}

/// Pages of the cache of one sequence: its prompt and what all repetitions decode, one after the other.
pub(super) fn pages(args: &BenchArgs) -> usize {
    (PROMPT + (args.repetitions + 1) * args.decode + 1).div_ceil(PAGE)
}
