//! What a step reads and leaves besides activations: small arrays of u32 side by side on the device, those it
//! reads filled by one copy from host memory.
use super::kernels::{Chosen, Embedding, argmax_blocks};
use super::outbox::Outbox;
use crate::batch::PAGE;
use crate::executor::Sizes;
use q4_core::Result;
use q4_cuda::{Buffer, Gpu, Pinned};
use std::sync::Arc;

/// Rows of a `Run` of `cuda/runs.cuh`.
pub(super) const RUN: usize = 128;

/// Of one context.
pub(super) struct State {
    buffer: Buffer,
    /// What the next step reads, as it will be on the device.
    staged: Pinned,
    /// Rows that a token is chosen for, at most.
    choosers: usize,
    /// Blocks that choose for a row, and u64 for each.
    blocks: u32,
    keys: Buffer,
    at: At,
}

/// Numbers of first words. Before them are turns, tokens, flags and records of all choosers.
struct At {
    non_finite: usize,
    /// From here on it is copied.
    runs: usize,
    position: usize,
    ids: usize,
    lists: usize,
    picks: usize,
    numbers: usize,
    end: usize,
}

/// What a step reads, in host memory, for its largest step.
pub(super) struct Staged<'a> {
    /// `Run`s of `cuda/runs.cuh`.
    pub runs: &'a mut [[u32; 4]],
    /// Where rows stand: the first of one sequence, or each of many.
    pub position: &'a mut [u32],
    /// Tokens of rows.
    pub ids: &'a mut [u32],
    /// Where the page numbers of a row's sequence begin.
    pub lists: &'a mut [u32],
    /// Rows whose logits are kept.
    pub picks: &'a mut [u32],
    /// Page numbers of sequences, one list after the other.
    pub numbers: &'a mut [u32],
}

impl State {
    /// Of one sequence, whose steps have up to `rows` rows.
    pub fn alone(gpu: &Arc<Gpu>, vocab: usize, rows: usize) -> Result<Self> {
        Self::new(gpu, vocab, 1, [4 * rows.div_ceil(RUN), 1, rows, 0, 0, 0])
    }

    /// Of many.
    pub fn shared(gpu: &Arc<Gpu>, vocab: usize, sizes: &Sizes) -> Result<Self> {
        let Sizes { rows, logit_rows, sequences, context, .. } = *sizes;
        let runs = rows.div_ceil(RUN) + sequences;
        let numbers = sequences * context.div_ceil(PAGE);
        Self::new(gpu, vocab, logit_rows, [4 * runs, rows, rows, rows, logit_rows, numbers])
    }

    /// `words` of what is copied, in the order of [`At`].
    fn new(gpu: &Arc<Gpu>, vocab: usize, choosers: usize, words: [usize; 6]) -> Result<Self> {
        let non_finite = 4 * choosers;
        let runs = (non_finite + 1).next_multiple_of(4);
        let mut end = runs;
        let [runs, position, ids, lists, picks, numbers] = words.map(|words| {
            end += words;
            end - words
        });
        let at = At { non_finite, runs, position, ids, lists, picks, numbers, end };
        let blocks = argmax_blocks(gpu, vocab, choosers);
        Ok(Self {
            buffer: Buffer::zeroed(gpu, 4 * end)?,
            staged: Pinned::new(gpu, 4 * (end - runs))?,
            keys: Buffer::zeroed(gpu, 8 * choosers * blocks as usize)?,
            choosers,
            blocks,
            at,
        })
    }

    /// What the next step reads. The last copy of it is done.
    pub fn stage(&mut self) -> Staged<'_> {
        let at = &self.at;
        let all = &mut self.staged.as_mut_slice::<u32>()[..at.end - at.runs];
        let (runs, all) = all.split_at_mut(at.position - at.runs);
        let (position, all) = all.split_at_mut(at.ids - at.position);
        let (ids, all) = all.split_at_mut(at.lists - at.ids);
        let (lists, all) = all.split_at_mut(at.picks - at.lists);
        let (picks, numbers) = all.split_at_mut(at.numbers - at.picks);
        Staged { runs: runs.as_chunks_mut().0, position, ids, lists, picks, numbers }
    }

    /// Enqueues the copy of what one sequence reads for `rows` rows.
    ///
    /// # Safety
    /// Nobody stages anything before it is done.
    pub unsafe fn send_rows(&self, rows: usize, stream: usize) -> Result<()> {
        // SAFETY: by contract.
        unsafe { self.send(self.at.ids + rows, stream) }
    }
    /// Enqueues the copy of all that many read, `numbers` page numbers among it.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn send_all(&self, numbers: usize, stream: usize) -> Result<()> {
        // SAFETY: by contract.
        unsafe { self.send(self.at.numbers + numbers, stream) }
    }
    /// # Safety
    /// As above.
    unsafe fn send(&self, end: usize, stream: usize) -> Result<()> {
        assert!(end <= self.at.end);
        // SAFETY: inside the buffer by the line above; the rest by contract.
        unsafe { self.staged.send(0, self.runs(), 4 * (end - self.at.runs), stream) }
    }

    /// What choosing needs from row `row` on.
    pub fn chosen(&self, row: usize, outbox: &Outbox, embedding: Embedding) -> Chosen {
        let of = |array| self.word(array * self.choosers + row);
        Chosen {
            keys: self.keys.ptr() + 8 * row as u64 * u64::from(self.blocks),
            blocks: self.blocks,
            turns: of(0),
            token: of(1),
            flags: of(2),
            records: of(3),
            position: self.position() + 4 * row as u64,
            out: outbox.address() + 8 * row as u64,
            stride: outbox.sequences() as u32,
            embedding,
        }
    }

    pub fn runs(&self) -> u64 {
        self.word(self.at.runs)
    }
    pub fn position(&self) -> u64 {
        self.word(self.at.position)
    }
    pub fn ids(&self) -> u64 {
        self.word(self.at.ids)
    }
    pub fn lists(&self) -> u64 {
        self.word(self.at.lists)
    }
    pub fn picks(&self) -> u64 {
        self.word(self.at.picks)
    }
    pub fn numbers(&self) -> u64 {
        self.word(self.at.numbers)
    }
    fn word(&self, at: usize) -> u64 {
        self.buffer.ptr() + 4 * at as u64
    }

    /// Says on the device that every value is finite; waits.
    pub fn clear_non_finite(&self) -> Result<u64> {
        self.buffer.upload(4 * self.at.non_finite, &[0u32])?;
        Ok(self.word(self.at.non_finite))
    }
    /// Whether a kernel said otherwise; all work is done.
    pub fn is_non_finite(&self) -> Result<bool> {
        let mut flag = [0u32];
        self.buffer.download(4 * self.at.non_finite, &mut flag)?;
        Ok(flag != [0])
    }
}

#[test]
fn runs_have_as_many_rows_there() {
    assert!(include_str!("../../cuda/runs.cuh").starts_with(&format!("// Up to {RUN} rows")));
}
