//! Where batches come from.
use super::super::engine::Rows;
use super::super::loss::Target;
use super::Run;
use crate::config::{Config, DataConfig};
use crate::data::{Batch, Cursor, Dataset, Loader, LoaderOptions};
use crate::rng::{Philox, streams};
use q4_core::{Code, Error, Result};
use tch::Tensor;

/// A batch as the engine takes it.
pub(super) fn rows<'a>(b: &'a Batch, ids: &'a [u32], wanted: Option<&'a Tensor>) -> Rows<'a> {
    Rows {
        rows: b.rows,
        seq: b.seq,
        ids,
        positions: &b.positions,
        documents: b.documents.iter().any(|d| *d != 0).then_some(&b.documents),
        target: wanted.map_or(Target::Tokens(&b.targets), Target::Hidden),
    }
}

/// Batches of the data from its beginning.
pub(super) fn loader<'a>(c: &Config, data: &'a Dataset) -> Result<Loader<'a>> {
    let DataConfig { rows, seq, packing, shuffle, .. } = c.data;
    Loader::new(data, LoaderOptions { rows, seq, packing, seed: c.train.seed, shuffle, pad: 0 })
}

/// Batches of the data, or random tokens for a shape without a tokenizer.
pub(super) enum Source<'a> {
    Data(Loader<'a>),
    Random { rows: usize, seq: usize, vocab: u32, seed: u64, at: u64 },
}

impl<'a> Source<'a> {
    pub fn new(run: &Run<'_>, data: Option<&'a Dataset>) -> Result<Self> {
        let (d, seed) = (&run.c.data, run.c.train.seed);
        match data {
            Some(data) => Ok(Self::Data(loader(run.c, data)?)),
            None if run.c.model.shape.is_some() => {
                let vocab = run.base.config.vocab_size as u32;
                Ok(Self::Random { rows: d.rows, seq: d.seq, vocab, seed, at: 0 })
            }
            None => Err(Error::new(Code::Usage, "nothing to learn from").need("data.train")),
        }
    }

    pub fn next(&mut self) -> Result<Batch> {
        match self {
            Self::Data(loader) => Ok(loader.next_batch()),
            Self::Random { rows, seq, vocab, seed, at } => {
                let rng = Philox::new(*seed, *at, streams::SAMPLE);
                *at += 1;
                let n = *rows * *seq;
                let token = |i: usize| i64::from(rng.below(i as u64, *vocab));
                Ok(Batch {
                    rows: *rows,
                    seq: *seq,
                    ids: (0..n).map(token).collect(),
                    targets: (1..=n).map(token).collect(),
                    positions: (0..n).map(|i| (i % *seq) as i64).collect(),
                    documents: vec![0; n],
                    supervised: n,
                })
            }
        }
    }

    pub fn cursor(&self) -> Cursor {
        match self {
            Self::Data(loader) => loader.cursor(),
            Self::Random { at, .. } => Cursor { epoch: 0, index: *at },
        }
    }

    pub fn seek(&mut self, cursor: Cursor) {
        match self {
            Self::Data(loader) => loader.seek(cursor),
            Self::Random { at, .. } => *at = cursor.index,
        }
    }
}
