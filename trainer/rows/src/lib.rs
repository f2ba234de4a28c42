//! Rows of conversations, texts and pairs as people keep them, and what a model reads of each.
//!
//! A row of a file becomes a [`Sample`]: token ids, and which of them are to be learnt. In a conversation
//! these are the assistant's answers, each with the token that ends its turn: a model that never sees it
//! never stops. Files are untrusted: whatever is wrong is named with file and line.
//!
//! Who trains and who evaluates read the same rows through this, and so mean the same tokens.
use q4_core::{Code, Error, Result, ThreadPool};
use q4_text::template::ChatTemplate;
use q4_text::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use std::fmt;

mod encode;
mod layout;
mod parquet;
mod preview;
mod read;
#[cfg(test)]
mod tests;

pub use layout::{Chat, Row, Unused};
pub use preview::{Shown, preview};
pub use read::{Read, read_rows};

/// What the lines of a file are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// `.tsv` is [`Format::Tsv`], `.txt` is [`Format::Text`], `.parquet` is [`Format::Parquet`], all else
    /// [`Format::Jsonl`].
    #[default]
    Auto,
    /// JSON objects, one a line or all in one list.
    Jsonl,
    /// The same objects as rows of columns.
    Parquet,
    /// A document a line.
    Text,
    /// Prompt, tab, answer; `#` begins a comment.
    Tsv,
}

/// Which tokens are learnt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Supervise {
    /// Answers and their end of turn; all of a plain text.
    #[default]
    Response,
    /// Every token.
    All,
}

/// What happens to a sample that is longer than a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Truncate {
    /// Its end is cut off, and counted; what has nothing left to learn is dropped, and counted.
    #[default]
    Cut,
    /// It is dropped, and counted.
    Drop,
    /// It is an error.
    Error,
}

/// The parts of a model that turn text into ids.
#[derive(Clone, Copy)]
pub struct Text<'a> {
    /// Tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Chat template.
    pub template: &'a ChatTemplate,
    /// Ends a document: `<|endoftext|>`.
    pub end_of_text: u32,
    /// Ends a turn, by its text: `<|im_end|>`.
    pub end_of_turn: &'a str,
}

/// Ends a turn in the models that are read.
pub const END_OF_TURN: &str = "<|im_end|>";

impl<'a> Text<'a> {
    /// Of a model whose configuration names `ends` as ends of a text.
    ///
    /// # Errors
    /// [`Code::TokenizerInvalid`] where nothing ends a document.
    pub fn new(tokenizer: &'a Tokenizer, template: &'a ChatTemplate, ends: &[u32]) -> Result<Self> {
        let end_of_text = tokenizer.id_of("<|endoftext|>").or_else(|| ends.last().copied());
        let end_of_text = end_of_text.ok_or_else(|| {
            Error::new(Code::TokenizerInvalid, "tokenizer.json: nothing ends a document")
                .need("<|endoftext|>")
        })?;
        Ok(Self { tokenizer, template, end_of_text, end_of_turn: END_OF_TURN })
    }
}

/// How samples are made.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// What the lines are.
    pub format: Format,
    /// Tokens a sample may have; windows of a stream have no limit.
    pub max_len: Option<usize>,
    /// What happens beyond that.
    pub truncate: Truncate,
    /// What is learnt.
    pub supervise: Supervise,
}

/// One row of a file as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Whether the token is to be predicted from those before it.
    pub supervised: Vec<bool>,
}

/// What loading did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Rows read.
    pub rows: usize,
    /// Rows whose end was cut off.
    pub cut: usize,
    /// Tokens that were cut off.
    pub cut_tokens: usize,
    /// Rows left out.
    pub dropped: usize,
    /// Tokens kept.
    pub tokens: usize,
    /// Tokens that are learnt.
    pub supervised: usize,
}

/// All samples, in the order of the files.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// Samples.
    pub samples: Vec<Sample>,
    /// What loading did.
    pub report: Report,
    /// Samples of each file.
    pub counts: Vec<usize>,
    /// What the files have and nothing was made of, a line each.
    pub notes: Vec<String>,
}

impl Loaded {
    /// Reads and tokenises `paths`, on all threads.
    ///
    /// # Errors
    /// With file and line: not UTF-8, not JSON, fields missing, a template that fails, a special token inside
    /// a text, no end of turn after an answer, a sample too long under [`Truncate::Error`]; files without
    /// any usable row.
    pub fn load<P: AsRef<std::path::Path>>(
        paths: &[P],
        text: &Text<'_>,
        options: &LoadOptions,
        threads: &ThreadPool,
    ) -> Result<Self> {
        let mut data = Self::default();
        for path in paths {
            let path = path.as_ref();
            let (read, before) = (read_rows(path, options.format)?, data.samples.len());
            if !read.unused.is_empty() {
                let list: Vec<_> =
                    read.unused.iter().map(|(name, n)| format!("`{name}` in {n} rows")).collect();
                data.notes.push(format!("{}: fields that are not used: {}", path.display(), list.join(", ")));
            }
            for (at, sample) in encode::all(&read.rows, text, options, threads) {
                let taken = sample.and_then(|sample| data.take(sample, options));
                taken.map_err(|e| e.within(read.place(path, at)))?;
            }
            data.counts.push(data.samples.len() - before);
        }
        if data.samples.is_empty() {
            let names: Vec<_> = paths.iter().map(|p| p.as_ref().display().to_string()).collect();
            return Err(Error::new(Code::Container, format!("{}: nothing to learn from", names.join(", ")))
                .need("at least one row with a token to learn")
                .have(data.report.to_string()));
        }
        Ok(data)
    }

    fn take(&mut self, mut sample: Sample, options: &LoadOptions) -> Result<()> {
        self.report.rows += 1;
        let len = sample.ids.len();
        if let Some(max) = options.max_len.filter(|max| *max < len) {
            match options.truncate {
                Truncate::Error => {
                    return Err(Error::new(Code::ContextFull, "sample")
                        .need(format!("at most {max} tokens"))
                        .have(format!("{len}"))
                        .fix("raise data.seq, or set data.truncate to cut or drop"));
                }
                Truncate::Drop => {
                    self.report.dropped += 1;
                    return Ok(());
                }
                Truncate::Cut => {
                    sample.ids.truncate(max);
                    sample.supervised.truncate(max);
                    self.report.cut += 1;
                    self.report.cut_tokens += len - max;
                }
            }
        }
        // The first token has nothing before it to be predicted from.
        let supervised = sample.supervised.iter().skip(1).filter(|s| **s).count();
        if supervised == 0 {
            self.report.dropped += 1;
            return Ok(());
        }
        self.report.tokens += sample.ids.len();
        self.report.supervised += supervised;
        self.samples.push(sample);
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, cut, cut_tokens, dropped, tokens, supervised } = self;
        write!(f, "{rows} rows, {tokens} tokens, {supervised} of them learnt; ")?;
        write!(f, "{cut} rows cut by {cut_tokens} tokens, {dropped} dropped")
    }
}
