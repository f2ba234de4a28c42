//! Several sequences on the device: one cache in pages, steps with rows of many, tokens chosen and drawn
//! there.
//!
//! A step takes one copy of small numbers along (ids, positions, page numbers) and hands tokens over; logits
//! leave the device where somebody asks for them. Rows that are a sequence's only one come first: all of them
//! are one launch of the kernel that decodes, and what is left, pieces of prompts, is another. A step of
//! nothing else is a graph, recorded when a step of as many rows comes for the second time.
use super::draw::Draw;
use super::executor::{Step, lay_runs};
use super::outbox::{Choice, Outbox, Ticket};
use super::slots::other_bytes;
use super::state::{Staged, State};
use super::{CudaCache, CudaExecutor, CudaModel, CudaTensor};
use crate::batch::{PAGE, Sequences, non_finite};
use crate::executor::{Logits, Slots};
use crate::places::{Part, Places};
use crate::runner::Context;
use crate::sampling::Sampler;
use q4_core::{Code, Error, Q4Linear, Result};
use q4_cuda::{Graph, Pinned};
use std::sync::Arc;

/// A shared model with a cache for many.
pub struct CudaSequences {
    model: Arc<CudaModel>,
    executor: CudaExecutor,
    cache: CudaCache,
    slots: Slots<CudaTensor>,
    /// Where each row of the step that was asked for is computed.
    order: Vec<usize>,
    /// Where the rows are whose logits are kept.
    picks: Vec<usize>,
    outbox: Outbox,
    /// Of each of them, the choice to wait for.
    tickets: Vec<Ticket>,
    /// By the rows of a step that decodes alone.
    graphs: Vec<Recorded>,
    /// A row of logits.
    logits: Pinned,
    /// Made when a token is first drawn.
    draw: Option<Draw>,
    /// Positions of a sequence.
    context: usize,
}

/// A step of so many rows, one of each sequence, all with logits.
#[derive(Default)]
enum Recorded {
    #[default]
    Never,
    /// Every kernel it takes has been loaded.
    Ran,
    As(Graph),
}

impl CudaSequences {
    /// `cx.sizes.sequences` sequences of up to `cx.sizes.context` positions, which share `pages` pages.
    pub fn new(model: Arc<CudaModel>, cx: Context<'_>, pages: usize) -> Result<Self> {
        let Context { sizes, threads, rotation, budget, .. } = cx;
        let (gpu, s, dtype) = (&model.kernels.gpu, &model.graph.shape, model.kernels.dtype);
        let layout = model.layout(sizes.rows, sizes.logit_rows);
        let rest = layout.bytes() as u64 + other_bytes(s, &sizes);
        model.has_room(pages * PAGE, rest, budget.left())?;
        let cache = CudaCache::shared(gpu, dtype, s, &sizes, pages)?;
        let (slots, scratch) = layout.allocate(gpu)?;
        let state = State::shared(gpu, s.vocab, &sizes)?;
        let outbox = Outbox::new(gpu, sizes.logit_rows)?;
        let logits = Pinned::new(gpu, 4 * s.vocab)?;
        let executor = CudaExecutor::new(&model.kernels, threads, sizes, scratch, rotation, state)?;
        let mut graphs = Vec::new();
        graphs.resize_with(sizes.sequences, Recorded::default);
        Ok(Self {
            executor,
            cache,
            slots,
            order: Vec::with_capacity(sizes.rows),
            picks: Vec::with_capacity(sizes.logit_rows),
            outbox,
            tickets: Vec::with_capacity(sizes.logit_rows),
            graphs,
            logits,
            draw: None,
            context: sizes.context,
            model,
        })
    }

    /// Enqueues a step whose rows were placed.
    fn issue(&mut self, ids: &[u32]) -> Result<()> {
        let (graph, picks) = (&self.model.graph, &self.picks);
        let which = if picks.is_empty() { Logits::Skip } else { Logits::Rows(picks) };
        graph.forward(&mut self.executor, ids, &mut self.cache, &mut self.slots, which)?;
        match picks.len() {
            0 => Ok(()),
            count => self.executor.choose(&self.slots, (None, 0), count, &self.outbox),
        }
    }

    /// The same for a step of `rows` rows that decodes alone.
    fn replay(&mut self, ids: &[u32]) -> Result<()> {
        let at = ids.len() - 1;
        match self.graphs[at] {
            Recorded::Never => {
                self.issue(ids)?;
                self.graphs[at] = Recorded::Ran;
                return Ok(());
            }
            // Recording counts as the first replay: it counts calls and runs none.
            Recorded::Ran => {
                self.executor.begin_recording()?;
                let body = self.issue(ids);
                let graph = self.executor.end_recording();
                body?;
                self.graphs[at] = Recorded::As(graph?);
            }
            Recorded::As(_) => {
                self.model.products().for_each(Q4Linear::replayed);
                self.cache.places.commit();
            }
        }
        let Recorded::As(graph) = &mut self.graphs[at] else {
            return Err(Error::new(Code::Internal, "a step that was not recorded"));
        };
        graph.launch(self.executor.stream.raw())
    }

    /// What the last step chose for number `i` of its rows; waits for it.
    fn choice(&self, i: usize) -> Result<Choice> {
        let ticket = self.tickets.get(i).ok_or_else(|| {
            Error::new(Code::Internal, "logits that were not asked for").have(format!("number {i}"))
        })?;
        self.outbox.wait(i, *ticket, &self.executor.stream)
    }
}

impl Sequences for CudaSequences {
    fn step(&mut self, ids: &[u32], parts: &[Part], logits: &[usize]) -> Result<()> {
        let vocab = self.vocab();
        if let Some(bad) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::new(Code::ValueInvalid, "token id")
                .need(format!("below {vocab}"))
                .have(bad.to_string()));
        }
        self.cache.places.place(parts)?;
        let singles = arrange(parts, &mut self.order);
        self.picks.clear();
        self.picks.extend(logits.iter().map(|row| self.order[*row]));
        self.tickets.clear();
        let (places, order, picks) = (&self.cache.places, &self.order, &self.picks);
        let mut runs = 0;
        self.executor.place_many(|staged| {
            let numbers;
            (runs, numbers) = stage(staged, (ids, order, picks), places);
            numbers
        })?;
        self.executor.step = Step::Many { singles, runs };
        let decodes_alone = singles == ids.len() && picks.len() == singles;
        if decodes_alone && picks.iter().enumerate().all(|(i, row)| i == *row) {
            self.replay(ids)?;
        } else {
            self.issue(ids)?;
        }
        self.tickets.extend((0..logits.len()).map(|i| self.outbox.issue(i)));
        Ok(())
    }

    fn logits(&mut self, i: usize) -> Result<&mut [f32]> {
        let vocab = self.vocab();
        // SAFETY: a row of the slot is as long as the host's copy, which is read after the wait.
        unsafe { self.logits.receive(self.slots.logits.row(i), 4 * vocab, self.executor.stream.raw())? };
        self.executor.stream.synchronize()?;
        Ok(self.logits.as_mut_slice())
    }

    fn sample(&mut self, i: usize, sampler: &mut Sampler, recent: &[u32]) -> Result<u32> {
        let refused = |choice: Choice| match choice.finite {
            true => Ok(choice.token),
            false => Err(non_finite("NaN or infinity")),
        };
        let likeliest = refused(self.choice(i)?)?;
        if sampler.is_greedy() {
            return Ok(likeliest);
        }
        // On the host: the most likely token after a penalty.
        if sampler.params().temperature == 0.0 {
            return sampler.sample(self.logits(i)?, recent);
        }
        let vocab = self.vocab();
        let draw = match &mut self.draw {
            Some(draw) => draw,
            none => none.insert(Draw::new(&self.model.kernels.gpu, vocab, self.context)?),
        };
        self.executor.draw(draw, &self.slots, (None, i), (sampler, recent), &self.outbox)?;
        let ticket = self.outbox.issue(i);
        refused(self.outbox.wait(i, ticket, &self.executor.stream)?)
    }

    fn vocab(&self) -> usize {
        self.model.graph.shape.vocab
    }
    fn add_page(&mut self, sequence: usize, page: u32) {
        self.cache.places.add_page(sequence, page);
    }
    fn adopt(&mut self, sequence: usize, len: usize) {
        self.cache.places.adopt(sequence, len);
    }
    fn clear(&mut self, sequence: usize) {
        self.cache.places.clear(sequence);
    }
}

impl Drop for CudaSequences {
    fn drop(&mut self) {
        // A step may be running, and what it reads and writes is about to go. After a fault nothing runs.
        let _ = self.executor.stream.synchronize();
    }
}

/// Where each row goes in a step: those that are a sequence's only one first. How many they are.
fn arrange(parts: &[Part], order: &mut Vec<usize>) -> usize {
    let singles = parts.iter().filter(|part| part.rows == 1).count();
    let (mut single, mut rest) = (0, singles);
    order.clear();
    for part in parts {
        let at = if part.rows == 1 { &mut single } else { &mut rest };
        order.extend(*at..*at + part.rows);
        *at += part.rows;
    }
    singles
}

/// Says what a step reads: rows as `order` has them. How many runs and page numbers there are.
fn stage(
    to: Staged<'_>,
    (ids, order, picks): (&[u32], &[usize], &[usize]),
    places: &Places,
) -> (usize, usize) {
    let (mut row, mut runs, mut numbers) = (0, 0, 0);
    for part in places.parts() {
        let pages = places.pages(part.sequence);
        let first = places.len(part.sequence);
        let list = numbers;
        // No more than its positions take: a sequence may have pages for later.
        let pages = &pages[..(first + part.rows).div_ceil(PAGE)];
        to.numbers[list..][..pages.len()].copy_from_slice(pages);
        numbers += pages.len();
        for i in 0..part.rows {
            let at = order[row + i];
            to.ids[at] = ids[row + i];
            to.position[at] = (first + i) as u32;
            to.lists[at] = list as u32;
        }
        if part.rows > 1 {
            runs += lay_runs(&mut to.runs[runs..], order[row], part.rows, first, list);
        }
        row += part.rows;
    }
    for (to, row) in to.picks.iter_mut().zip(picks) {
        *to = *row as u32;
    }
    (runs, numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_step_are_staged_where_they_are_computed() -> Result<()> {
        let mut places = Places::many((PAGE, 8), (3, 400), 300);
        for (sequence, pages) in [(0, &[5, 2][..]), (1, &[7, 1, 4]), (2, &[0])] {
            pages.iter().for_each(|page| places.add_page(sequence, *page));
        }
        places.adopt(0, 64);
        places.adopt(1, 10);
        places.adopt(2, 63);
        let part = |sequence, rows| Part { sequence, rows };
        let parts = [part(0, 1), part(1, 150), part(2, 1)];
        places.place(&parts)?;
        let mut order = Vec::new();
        assert_eq!(arrange(&parts, &mut order), 2);
        assert_eq!((order[0], order[1], order[150], order[151]), (0, 2, 151, 1));
        let ids: Vec<u32> = (1000..1152).collect();
        let mut words = [[0u32; 300]; 5];
        let [position, to, lists, picked, numbers] = &mut words;
        let mut runs = [[0u32; 4]; 4];
        let staged = Staged { runs: &mut runs, position, ids: to, lists, picks: picked, numbers };
        let picks: Vec<usize> = [0, 150, 151].iter().map(|row| order[*row]).collect();
        assert_eq!(stage(staged, (&ids, &order, &picks), &places), (2, 6));
        let [position, to, lists, picked, numbers] = &words;
        assert_eq!(numbers[..6], [5, 2, 7, 1, 4, 0]);
        assert_eq!((to[0], to[1], to[2], to[151]), (1000, 1151, 1001, 1150));
        assert_eq!((position[0], position[1], position[2], position[151]), (64, 63, 10, 159));
        assert_eq!((lists[0], lists[1], lists[2], lists[151]), (0, 5, 2, 2));
        assert_eq!(picked[..3], [0, 151, 1]);
        // The last rows first, for they see most.
        assert_eq!(runs[..2], [[130, 22, 138, 2], [2, 128, 10, 2]]);
        Ok(())
    }
}
