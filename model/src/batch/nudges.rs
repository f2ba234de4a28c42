//! What is added to logits before a token is drawn: biases of single tokens, and penalties of what an answer
//! has said already.
use q4_core::{Code, Error, Result};
use std::collections::HashMap;

/// Additions to logits; [`Default`] adds nothing. The rules are those of OpenAI's API: `logit[t] += bias[t] -
/// frequency * count(t) - presence * (count(t) > 0)`, with the counts of the answer alone, not of the prompt.
/// The penalty of repetition, which divides, comes behind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Nudges {
    /// Off for each time a token was said, -2 to 2.
    pub frequency: f32,
    /// Off once for every token that was said, -2 to 2.
    pub presence: f32,
    /// Tokens, and what each gets, -100 to 100.
    pub bias: Vec<(u32, f32)>,
}

impl Nudges {
    /// Checks that everything has a meaning.
    ///
    /// # Errors
    /// [`Code::Usage`] with the name of what has none.
    pub fn validate(&self, vocab: usize) -> Result<()> {
        let wrong = |what: &str, need: String, have: String| {
            Err(Error::new(Code::Usage, format!("{what} has no meaning")).need(need).have(have))
        };
        for (name, value) in [("frequency_penalty", self.frequency), ("presence_penalty", self.presence)] {
            if !(-2.0..=2.0).contains(&value) {
                return wrong(name, "a number from -2 to 2".to_owned(), value.to_string());
            }
        }
        for (id, bias) in &self.bias {
            if *id as usize >= vocab {
                return wrong("logit_bias", format!("token ids below {vocab}"), id.to_string());
            }
            if !(-100.0..=100.0).contains(bias) {
                return wrong("logit_bias", "numbers from -100 to 100".to_owned(), bias.to_string());
            }
        }
        Ok(())
    }
}

/// Nudges with the counts of one answer.
pub(super) struct Nudging {
    nudges: Nudges,
    counts: HashMap<u32, u32>,
}

impl Nudging {
    pub(super) fn new(nudges: Nudges) -> Self {
        Self { nudges, counts: HashMap::new() }
    }

    /// Whether logits are to be changed at all.
    pub(super) fn changes(&self) -> bool {
        self.nudges != Nudges::default()
    }

    /// A token was said.
    pub(super) fn said(&mut self, id: u32) {
        if self.nudges.frequency != 0.0 || self.nudges.presence != 0.0 {
            *self.counts.entry(id).or_default() += 1;
        }
    }

    /// Changes `logits`, `[vocab]`. A finite logit stays finite.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        let Nudges { frequency, presence, bias } = &self.nudges;
        // Each token by itself, so that the order in which a map has them changes nothing.
        let off = |(id, count): (&u32, &u32)| (*id, -(frequency * *count as f32 + presence));
        for (id, by) in bias.iter().copied().chain(self.counts.iter().map(off)) {
            let logit = &mut logits[id as usize];
            *logit = (*logit + by).clamp(f32::MIN, f32::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_counts_and_biases_are_added() {
        let nudges = Nudges { frequency: 0.5, presence: 0.25, bias: vec![(0, 3.0), (2, -100.0)] };
        let mut nudging = Nudging::new(nudges);
        let mut logits = [1.0, 1.0, 1.0, f32::MAX];
        nudging.apply(&mut logits);
        assert_eq!(logits, [4.0, 1.0, -99.0, f32::MAX]);
        [1, 1, 0].into_iter().for_each(|id| nudging.said(id));
        let mut logits = [1.0; 4];
        nudging.apply(&mut logits);
        assert_eq!(logits, [3.25, -0.25, -99.0, 1.0]);
    }

    #[test]
    fn what_has_no_meaning_is_named() {
        let cases = [
            (Nudges { frequency: 2.5, ..Nudges::default() }, "frequency_penalty"),
            (Nudges { presence: f32::NAN, ..Nudges::default() }, "presence_penalty"),
            (Nudges { bias: vec![(8, 1.0)], ..Nudges::default() }, "below 8"),
            (Nudges { bias: vec![(7, 101.0)], ..Nudges::default() }, "-100 to 100"),
        ];
        for (nudges, word) in cases {
            let e = nudges.validate(8).expect_err(word).to_string();
            assert!(e.contains(word), "{e}");
        }
        assert!(Nudges { bias: vec![(7, -100.0)], presence: -2.0, frequency: 2.0 }.validate(8).is_ok());
    }
}
