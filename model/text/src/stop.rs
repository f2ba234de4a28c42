//! Ends an answer at a stop string, also where the string is spread over several tokens.
//!
//! Text that may still become a stop string is held back, so nothing printed ever has to be taken back.
use q4_core::{Code, Error, Result};

/// Watches a stream of text for stop strings.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    stopped: Option<usize>,
}

/// What to do after a piece of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matched {
    /// Text that may be shown now.
    pub emit: String,
    /// Index of the stop string that ended the answer. Nothing is emitted after it.
    pub stopped: Option<usize>,
}

impl StopMatcher {
    /// At most 64 stop strings of 1 to 1024 bytes.
    ///
    /// # Errors
    /// [`Code::Usage`] for others.
    pub fn new(stops: &[String]) -> Result<Self> {
        let bad = stops.iter().find(|s| s.is_empty() || s.len() > 1024).map(|s| format!("{} bytes", s.len()));
        if let Some(have) = bad.or_else(|| (stops.len() > 64).then(|| format!("{} strings", stops.len()))) {
            return Err(Error::new(Code::Usage, "stop strings: out of bounds")
                .need("at most 64 strings of 1 to 1024 bytes")
                .have(have));
        }
        Ok(Self { stops: stops.to_vec(), held: String::new(), stopped: None })
    }

    /// Takes the next piece of text. The stop string that is complete first wins, the longest of several:
    /// the result does not depend on how the text was cut into pieces.
    pub fn push(&mut self, piece: &str) -> Matched {
        if self.stopped.is_some() {
            return Matched { emit: String::new(), stopped: self.stopped };
        }
        self.held.push_str(piece);
        let ends = self.stops.iter().enumerate().filter_map(|(i, stop)| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, i))
        });
        if let Some((_, start, index)) = ends.min() {
            self.stopped = Some(index);
            self.held.truncate(start);
            return Matched { emit: std::mem::take(&mut self.held), stopped: self.stopped };
        }
        let rest = self.held.split_off(self.held.len() - self.possible_prefix());
        Matched { emit: std::mem::replace(&mut self.held, rest), stopped: None }
    }

    /// The end of the stream: what was held back is text after all. Empty after a stop.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes at the end of the held text that begin a stop string.
    fn possible_prefix(&self) -> usize {
        let begins = |stop: &String| {
            let longest = (stop.len() - 1).min(self.held.len());
            (1..=longest).rev().find(|&n| self.held.as_bytes().ends_with(&stop.as_bytes()[..n])).unwrap_or(0)
        };
        // A prefix that ends inside a character cannot match whole characters, so the cut is at a boundary.
        self.stops.iter().map(begins).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(&stops.iter().map(|s| s.to_string()).collect::<Vec<_>>()).expect("valid")
    }

    /// All text that comes out, and what stopped it.
    fn run<'a>(stops: &[&str], pieces: impl IntoIterator<Item = &'a str>) -> (String, Option<usize>) {
        let mut m = matcher(stops);
        let (mut text, mut stopped) = (String::new(), None);
        for piece in pieces {
            let out = m.push(piece);
            text += &out.emit;
            stopped = out.stopped;
        }
        text += &m.finish();
        (text, stopped)
    }

    #[test]
    fn a_possible_beginning_is_held_back() {
        let mut m = matcher(&["END"]);
        assert_eq!(m.push("say E"), Matched { emit: "say ".into(), stopped: None });
        assert_eq!(m.push("N"), Matched { emit: String::new(), stopped: None });
        assert_eq!(m.push("ough E"), Matched { emit: "ENough ".into(), stopped: None });
        assert_eq!(m.push("ND more"), Matched { emit: String::new(), stopped: Some(0) });
        assert_eq!(m.push("late"), Matched { emit: String::new(), stopped: Some(0) });
        assert_eq!(m.finish(), "");
    }

    #[test]
    fn without_a_match_everything_comes_out() {
        assert_eq!(run(&["\n\nUser"], ["a\n", "\n", "Us"]), ("a\n\nUs".into(), None));
        assert_eq!(run(&[], ["a", "b"]), ("ab".into(), None));
    }

    #[test]
    fn repeated_beginnings_do_not_hide_a_match() {
        assert_eq!(run(&["aab"], ["a", "a", "a", "b", "x"]), ("a".into(), Some(0)));
    }

    #[test]
    fn every_cut_of_the_text_gives_the_same_answer() {
        for (stops, text) in [
            (vec!["。再見", "見了"], "你好。再聊，再見了。再見！"),
            (vec!["abc", "b"], "xxabcb"),
            (vec!["bc", "abc"], "zabcz"),
            (vec!["é"], "e\u{301}èé!"),
        ] {
            let whole = run(&stops, [text]);
            let chars: Vec<String> = text.chars().map(String::from).collect();
            assert_eq!(run(&stops, chars.iter().map(|s| s.as_str())), whole);
            for (i, _) in text.char_indices() {
                assert_eq!(run(&stops, [&text[..i], &text[i..]]), whole, "cut at {i}");
            }
        }
    }

    #[test]
    fn the_first_complete_string_wins() {
        assert_eq!(run(&["abc", "b"], ["xabc"]), ("xa".into(), Some(1)));
        assert_eq!(run(&["bc", "abc"], ["zabcz"]), ("z".into(), Some(1)));
    }

    #[test]
    fn unusable_stop_strings_are_refused() {
        for stops in [vec![String::new()], vec!["x".repeat(1025)], vec!["a".to_string(); 65]] {
            assert_eq!(StopMatcher::new(&stops).expect_err("refused").code(), Code::Usage);
        }
    }
}
