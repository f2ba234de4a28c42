//! A seeded corpus: short stories that keep track of who has what and who is where, questions on them, and
//! small talk, in English and 正體中文. All of it is written here; nothing is downloaded.
//!
//! Every choice is a uniform draw from a list, so the corpus knows how many nats it took to choose it: no
//! model can be better on average, and how far one is above that is a number that means something. Stories
//! are made of frames that also read: [`Story::parse`] turns a text back into events and replays them, which
//! checks what a model writes as well.
//!
//! Held out: stories whose first owner, thing and place form a reserved combination, and wordings of
//! questions. Both occur in the validation split only.
use crate::rng::{Philox, streams};
use dice::Dice;
use q4_core::{Code, Error, Result};
use q4_model::template::Message;
use serde::Serialize;
use serde_json::json;
use std::fs;
use std::path::Path;

mod chat;
mod dice;
mod frames;
mod story;
mod suite;
#[cfg(test)]
mod tests;
mod unknown;
mod words;

pub use story::Story;
pub use suite::suite;

/// How much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Rows to learn from.
    pub train: usize,
    /// Held-out rows.
    pub valid: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { train: 80_000, valid: 1_000 }
    }
}

/// One row.
#[derive(Clone, Debug, PartialEq)]
pub enum Document {
    /// A story.
    Text(String),
    /// A conversation.
    Chat(Vec<Message>),
}

/// One row and what it took to choose it.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// The row.
    pub document: Document,
    /// Nats of all choices.
    pub nats: f64,
    /// Contains a reserved combination or wording.
    pub held_out: bool,
}

/// Both splits.
#[derive(Clone, Debug, PartialEq)]
pub struct Corpus {
    /// To learn from; nothing in it is held out.
    pub train: Vec<Item>,
    /// Half of it is held out, half is like `train`.
    pub valid: Vec<Item>,
    seed: u64,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Fixes every row.
    pub seed: u64,
    /// Rows of `train.jsonl`.
    pub train_rows: usize,
    /// Rows of `valid.jsonl`.
    pub valid_rows: usize,
    /// Rows of `valid.jsonl` with something `train.jsonl` does not have.
    pub held_out_rows: usize,
    /// Bytes of text in `train.jsonl`.
    pub train_bytes: usize,
    /// Nats of the choices in `valid.jsonl`: divided by its tokens, a loss below which is luck.
    pub valid_nats: f64,
}

/// Generates both splits. The same seed gives the same rows, and a longer split begins with the shorter one's
/// rows.
pub fn generate(seed: u64, sizes: Sizes) -> Corpus {
    let draw = |split: u64, i: usize, wish: &dyn Fn(&Item) -> bool| {
        let mut dice = Dice::new(Philox::new(seed, split, streams::FREE ^ i as u32));
        // A wish is refused one time in ten or so; the nats count the accepted draw only.
        loop {
            dice.nats = 0.0;
            let item = one(&mut dice, split == 1);
            if wish(&item) {
                return item;
            }
        }
    };
    let train = (0..sizes.train).map(|i| draw(0, i, &|item| !item.held_out)).collect();
    let valid = (0..sizes.valid).map(|i| draw(1, i, &|item| item.held_out == (i % 2 == 0))).collect();
    Corpus { train, valid, seed }
}

/// A row. `all` allows reserved wordings, too.
fn one(dice: &mut Dice, all: bool) -> Item {
    // Stories are long: with seven rows in ten, small talk is half of the tokens.
    let (document, held_out) = match dice.below(24) {
        0 | 1 => {
            let story = Story::draw(dice);
            (Document::Text(story.text()), story.is_reserved())
        }
        2 | 3 => {
            let story = Story::draw(dice);
            let (question, answer) = story.question(dice);
            let gap = if story.is_chinese() { "" } else { " " };
            let turns = vec![
                Message::new("user", format!("{}{gap}{question}", story.text())),
                Message::new("assistant", answer),
            ];
            (Document::Chat(turns), story.is_reserved())
        }
        4..=6 => {
            let story = Story::draw(dice);
            (
                Document::Chat(vec![
                    Message::new("user", story.request(dice)),
                    Message::new("assistant", story.text()),
                ]),
                story.is_reserved(),
            )
        }
        _ => chat::draw(dice, all),
    };
    Item { document, nats: dice.nats, held_out }
}

impl Corpus {
    /// Writes `train.jsonl`, `valid.jsonl`, `behaviour.jsonl` (the [`suite`]) and `corpus.json` (the
    /// [`Report`]) into a new or empty directory.
    pub fn write(&self, dir: &Path) -> Result<Report> {
        let failed =
            |path: &Path, e: &std::io::Error| Error::new(Code::Io, format!("{}: {e}", path.display()));
        fs::create_dir_all(dir).map_err(|e| failed(dir, &e))?;
        if fs::read_dir(dir).map_err(|e| failed(dir, &e))?.next().is_some() {
            return Err(Error::new(Code::Usage, format!("{}: not empty", dir.display()))
                .need("a new or empty directory"));
        }
        let write = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).map_err(|e| failed(&path, &e))
        };
        let (train, valid) = (lines(&self.train), lines(&self.valid));
        write("train.jsonl", &train)?;
        write("valid.jsonl", &valid)?;
        write(
            "behaviour.jsonl",
            &suite().iter().map(|case| format!("{}\n", json!(case))).collect::<String>(),
        )?;
        let report = Report {
            seed: self.seed,
            train_rows: self.train.len(),
            valid_rows: self.valid.len(),
            held_out_rows: self.valid.iter().filter(|i| i.held_out).count(),
            train_bytes: train.len(),
            valid_nats: self.valid.iter().map(|i| i.nats).sum(),
        };
        let text =
            serde_json::to_string_pretty(&report).map_err(|e| Error::new(Code::Internal, e.to_string()))?;
        write("corpus.json", &format!("{text}\n"))?;
        Ok(report)
    }
}

impl Document {
    /// The row as a JSON object.
    pub fn json(&self) -> serde_json::Value {
        match self {
            Self::Text(text) => json!({ "text": text }),
            Self::Chat(turns) => json!({ "messages": turns }),
        }
    }
}

fn lines(items: &[Item]) -> String {
    items.iter().map(|i| format!("{}\n", i.document.json())).collect()
}
