//! The first rows as the model will see them: what the template made of each, and which of it is learnt.
use super::{LoadOptions, Text, Truncate, encode, read_rows};
use q4_core::{Result, ThreadPool};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::path::Path;

/// A row as it is trained on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    /// File and line.
    pub place: String,
    /// Tokens that are kept.
    pub tokens: usize,
    /// Tokens of these that are learnt.
    pub learnt: usize,
    /// What became of it, where it is not whole: `cut by 12 tokens`, `dropped: ...`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Its text in spans, learnt and not in turns.
    pub spans: Vec<Span>,
    /// Token ids.
    pub ids: Vec<u32>,
}

/// Text of tokens that are all learnt, or none of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Decoded, special tokens and all.
    pub text: String,
    /// Whether it is learnt.
    pub learnt: bool,
}

/// The first `n` rows of the files, in their order.
///
/// # Errors
/// As [`super::Loaded::load`], for files up to the one that has row `n`.
pub fn preview<P: AsRef<Path>>(
    paths: &[P],
    text: &Text<'_>,
    options: &LoadOptions,
    n: usize,
    threads: &ThreadPool,
) -> Result<Vec<Shown>> {
    let mut shown = Vec::new();
    for path in paths {
        if shown.len() == n {
            break;
        }
        let path = path.as_ref();
        let read = read_rows(path, options.format)?;
        let rows = &read.rows[..read.rows.len().min(n - shown.len())];
        for (at, sample) in encode::all(rows, text, options, threads) {
            let place = read.place(path, at);
            let sample = sample.map_err(|e| e.within(&place))?;
            shown.push(one(place, sample.ids, sample.supervised, text, options)?);
        }
    }
    Ok(shown)
}

fn one(
    place: String,
    mut ids: Vec<u32>,
    mut supervised: Vec<bool>,
    text: &Text<'_>,
    options: &LoadOptions,
) -> Result<Shown> {
    let mut note = None;
    if let Some(max) = options.max_len.filter(|max| *max < ids.len()) {
        let beyond = ids.len() - max;
        note = Some(match options.truncate {
            Truncate::Cut => format!("cut by {beyond} tokens"),
            Truncate::Drop => format!("dropped: {beyond} tokens too long"),
            Truncate::Error => format!("an error: {beyond} tokens too long"),
        });
        ids.truncate(max);
        supervised.truncate(max);
    }
    // Nothing stands before the first token that it could be predicted from.
    if let Some(first) = supervised.first_mut() {
        *first = false;
    }
    let learnt = supervised.iter().filter(|s| **s).count();
    if learnt == 0 {
        note = Some(format!("{}dropped: nothing to learn", note.map_or(String::new(), |n| n + ", ")));
    }
    let mut spans = Vec::new();
    let mut begin = 0;
    for i in 1..=ids.len() {
        if i == ids.len() || supervised[i] != supervised[begin] {
            spans.push(Span {
                text: text.tokenizer.decode(&ids[begin..i], false)?,
                learnt: supervised[begin],
            });
            begin = i;
        }
    }
    Ok(Shown { place, tokens: ids.len(), learnt, note, spans, ids })
}

impl Shown {
    /// For people: what is learnt in green where there are colours, else between ⟦ and ⟧.
    pub fn render(&self, colour: bool) -> String {
        let (open, close) = if colour { ("\u{1b}[32m", "\u{1b}[0m") } else { ("⟦", "⟧") };
        let mut out = format!("{}: {} tokens, {} of them learnt", self.place, self.tokens, self.learnt);
        if let Some(note) = &self.note {
            let _ = write!(out, "; {note}");
        }
        out.push('\n');
        for span in &self.spans {
            // A row is somebody else's text: it moves no cursor here.
            let text = span.text.replace(|c: char| c.is_control() && c != '\n' && c != '\t', "\u{fffd}");
            match span.learnt {
                true => out.extend([open, &text, close]),
                false => out += &text,
            }
        }
        out
    }
}
