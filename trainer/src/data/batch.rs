//! Samples to rows of fixed length, rows to batches; a cursor that says where to go on.
use super::{Cursor, Dataset, Sample};
use q4_core::{Code, Error, Result};
use serde::{Deserialize, Serialize};

/// Target of a position that is not learnt.
pub const IGNORE: i64 = -100;

/// How samples share rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packing {
    /// One sample a row, padded.
    Rows,
    /// As many as fit; attention stays within a document, positions begin anew with each.
    #[default]
    Documents,
    /// All samples as one stream, each followed by the end of text, cut into windows; attention crosses
    /// documents. Training joins them in another order each epoch, so that no sample can be known by the
    /// one before it.
    Stream,
}

/// One batch, row-major `[rows, seq]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Rows.
    pub rows: usize,
    /// Positions a row has.
    pub seq: usize,
    /// Input ids.
    pub ids: Vec<i64>,
    /// The token to predict at each position, or [`IGNORE`].
    pub targets: Vec<i64>,
    /// Position within the document.
    pub positions: Vec<i64>,
    /// Document within the row, from 0; -1 is padding. A query attends to earlier keys of its own document.
    pub documents: Vec<i32>,
    /// Targets that are not [`IGNORE`].
    pub supervised: usize,
}

impl Batch {
    fn padded(rows: usize, seq: usize, pad: u32) -> Self {
        let n = rows * seq;
        Self {
            rows,
            seq,
            ids: vec![i64::from(pad); n],
            targets: vec![IGNORE; n],
            positions: vec![0; n],
            documents: vec![-1; n],
            supervised: 0,
        }
    }

    /// Puts a sample into a row; its last token is a target only.
    fn put(&mut self, row: usize, start: usize, document: i32, sample: &Sample) {
        let len = (sample.ids.len() - 1).min(self.seq - start);
        for i in 0..len {
            let at = row * self.seq + start + i;
            self.ids[at] = i64::from(sample.ids[i]);
            self.positions[at] = i as i64;
            self.documents[at] = document;
            if sample.supervised[i + 1] {
                self.targets[at] = i64::from(sample.ids[i + 1]);
                self.supervised += 1;
            }
        }
    }

    /// Positions that hold a token.
    pub fn tokens(&self) -> usize {
        self.documents.iter().filter(|d| **d >= 0).count()
    }

    /// Whether a row holds more than one document.
    pub fn is_packed(&self) -> bool {
        self.documents.iter().any(|d| *d > 0)
    }
}

/// What a loader makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Rows of a batch.
    pub rows: usize,
    /// Positions of a row.
    pub seq: usize,
    /// How samples share rows.
    pub packing: Packing,
    /// Fixes the order of every epoch.
    pub seed: u64,
    /// Permute each epoch; else the order of the files.
    pub shuffle: bool,
    /// Id of padding.
    pub pad: u32,
}

/// Batches without end; after the last sample of an epoch comes the first of the next.
#[derive(Clone, Debug)]
pub struct Loader<'a> {
    data: &'a Dataset,
    options: LoaderOptions,
    cursor: Cursor,
    order: Vec<u32>,
    stream: Sample,
}

impl<'a> Loader<'a> {
    /// A loader at the beginning. [`Code::Usage`] when the data cannot fill a row.
    pub fn new(data: &'a Dataset, options: LoaderOptions) -> Result<Self> {
        let stream = Sample { ids: Vec::new(), supervised: Vec::new() };
        let mut loader = Self { data, options, cursor: Cursor::default(), order: Vec::new(), stream };
        loader.begin();
        let longest = data.samples.iter().map(|s| s.ids.len()).max().unwrap_or(0);
        let problem = match options.packing {
            _ if options.rows == 0 || options.seq == 0 => Some("at least one row and one position"),
            Packing::Stream if loader.items() == 0 => Some("more tokens than one window has"),
            Packing::Rows | Packing::Documents if longest > options.seq + 1 => {
                Some("samples that fit into a row")
            }
            _ => None,
        };
        if let Some(need) = problem {
            return Err(Error::new(Code::Usage, "training data").need(need).have(format!(
                "{options:?}; longest sample {longest}, {} tokens in all",
                data.report.tokens
            )));
        }
        Ok(loader)
    }

    /// The order of the cursor's epoch.
    fn begin(&mut self) {
        let LoaderOptions { packing, seed, shuffle, .. } = self.options;
        self.order = self.data.order(seed, self.cursor.epoch, shuffle);
        if packing == Packing::Stream {
            self.stream = joined(self.data, &self.order);
        }
    }

    /// Samples or windows of an epoch.
    pub fn items(&self) -> usize {
        match self.options.packing {
            Packing::Stream => self.stream.ids.len().saturating_sub(1) / self.options.seq,
            _ => self.data.samples.len(),
        }
    }

    /// Where the next batch begins.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Goes on at a cursor of a loader with the same data and options.
    pub fn seek(&mut self, cursor: Cursor) {
        let before = self.cursor.epoch;
        self.cursor = cursor;
        if cursor.epoch != before {
            self.begin();
        }
        // Epochs of a stream that is drawn by weight need not have one number of windows.
        while self.cursor.index >= self.items() as u64 {
            self.cursor =
                Cursor { epoch: self.cursor.epoch + 1, index: self.cursor.index - self.items() as u64 };
            self.begin();
        }
    }

    /// Batches from here until all data was seen `epochs` times: the last may go on into the next epoch.
    pub fn batches(&mut self, epochs: f64) -> u64 {
        let LoaderOptions { rows, seq, packing, .. } = self.options;
        let items = self.items() as f64;
        let end = (epochs * items).ceil().max(1.0);
        if packing != Packing::Documents {
            return (end / rows as f64).ceil() as u64;
        }
        let mut batches = 0;
        while self.cursor.epoch as f64 * items + (self.cursor.index as f64) < end {
            for _ in 0..rows {
                let mut used = 0;
                loop {
                    let inputs =
                        self.data.samples[self.order[self.cursor.index as usize] as usize].ids.len() - 1;
                    if used > 0 && used + inputs > seq {
                        break;
                    }
                    used += inputs;
                    self.seek(Cursor { index: self.cursor.index + 1, ..self.cursor });
                }
            }
            batches += 1;
        }
        batches
    }

    /// The next batch.
    pub fn next_batch(&mut self) -> Batch {
        let LoaderOptions { rows, seq, packing, pad, .. } = self.options;
        let mut batch = Batch::padded(rows, seq, pad);
        for row in 0..rows {
            let (mut start, mut document) = (0, 0);
            loop {
                let item = self.cursor.index as usize;
                let window;
                let sample = match packing {
                    Packing::Stream => {
                        window = cut(&self.stream, item * seq, seq + 1);
                        &window
                    }
                    _ => &self.data.samples[self.order[item] as usize],
                };
                let inputs = sample.ids.len() - 1;
                if document > 0 && start + inputs > seq {
                    break;
                }
                batch.put(row, start, document, sample);
                self.seek(Cursor { index: self.cursor.index + 1, ..self.cursor });
                (start, document) = (start + inputs, document + 1);
                if packing != Packing::Documents {
                    break;
                }
            }
        }
        batch
    }
}

/// The data once, in the order of the files; the last batch may have fewer rows. Of a stream, the last window
/// may be short.
pub fn eval_batches<'a>(
    data: &'a Dataset,
    rows: usize,
    seq: usize,
    packing: Packing,
    pad: u32,
) -> impl Iterator<Item = Batch> + 'a {
    let samples: Vec<Sample> = match packing {
        Packing::Stream => {
            let stream = joined(data, &data.order(0, 0, false));
            (0..stream.ids.len().saturating_sub(1)).step_by(seq).map(|at| cut(&stream, at, seq + 1)).collect()
        }
        _ => data.samples.clone(),
    };
    let mut next = 0;
    std::iter::from_fn(move || {
        // Rows as lists of samples, so that the last batch has no row of padding.
        let mut filled: Vec<Vec<usize>> = Vec::new();
        while filled.len() < rows && next < samples.len() {
            let (mut row, mut used) = (Vec::new(), 0);
            while next < samples.len()
                && (row.is_empty()
                    || packing == Packing::Documents && used + samples[next].ids.len() - 1 <= seq)
            {
                used += samples[next].ids.len() - 1;
                row.push(next);
                next += 1;
            }
            filled.push(row);
        }
        if filled.is_empty() {
            return None;
        }
        let mut batch = Batch::padded(filled.len(), seq, pad);
        for (r, row) in filled.iter().enumerate() {
            let mut start = 0;
            for (d, s) in row.iter().enumerate() {
                batch.put(r, start, d as i32, &samples[*s]);
                start += samples[*s].ids.len() - 1;
            }
        }
        Some(batch)
    })
}

fn joined(data: &Dataset, order: &[u32]) -> Sample {
    let mut all = Sample { ids: Vec::new(), supervised: Vec::new() };
    for s in order.iter().map(|i| &data.samples[*i as usize]) {
        all.ids.extend(&s.ids);
        all.supervised.extend(&s.supervised);
        let (id, supervised) = data.separator;
        if s.ids.last() != Some(&id) {
            all.ids.push(id);
            all.supervised.push(supervised);
        }
    }
    all
}

fn cut(stream: &Sample, at: usize, len: usize) -> Sample {
    let end = (at + len).min(stream.ids.len());
    Sample { ids: stream.ids[at..end].to_vec(), supervised: stream.supervised[at..end].to_vec() }
}
