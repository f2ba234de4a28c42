//! How few tokens a text can have, told without making them.
use super::audit::Kept;
use super::stream::TokenBytes;

/// A whole token.
const ONE: u64 = 1 << 32;
/// Bytes that composing (NFC) makes one of, at most: three and a half, as with U+1FBE U+0308 U+0301.
const COMPOSED: u64 = 4;

/// For each byte the share that it has, at least, of the token it ends up in: one over the length of the
/// longest token that holds such a byte. However a text is cut, the shares of its bytes sum up to no more
/// than a token for each piece.
pub(super) struct Bound {
    shares: [u64; 256],
    is_composed: bool,
}

impl Bound {
    /// `None` where tokens need not hold all of a text.
    pub(super) fn new(kept: Kept, tokens: &TokenBytes) -> Option<Self> {
        let mut longest = [0u64; 256];
        let mut is_single = [false; 256];
        for token in tokens.all() {
            for byte in token {
                let longest = &mut longest[usize::from(*byte)];
                *longest = (*longest).max(token.len() as u64);
            }
            if let [byte] = token {
                is_single[usize::from(*byte)] = true;
            }
        }
        // A byte that no token stands for is left out of a text, or is a part of who knows what.
        if kept == Kept::Unknown || is_single.contains(&false) {
            return None;
        }
        Some(Self { shares: longest.map(|n| ONE / n), is_composed: kept == Kept::Composed })
    }

    /// Tokens of `text` at least.
    pub(super) fn of(&self, text: &str) -> usize {
        let bytes = text.as_bytes();
        let shares: u64 = match self.is_composed {
            false => bytes.iter().map(|byte| self.shares[usize::from(*byte)]).sum(),
            true => self.composed(bytes),
        };
        shares.div_ceil(ONE) as usize
    }

    /// ASCII stays what it is, unless a mark follows that may become one with it; of the rest nothing is
    /// known but how far it may shrink.
    fn composed(&self, bytes: &[u8]) -> u64 {
        let least = self.shares.iter().min().copied().unwrap_or(0);
        let next = bytes.iter().skip(1).map(Some).chain([None]);
        let share = |(byte, next): (&u8, Option<&u8>)| {
            let is_alone = next.is_none_or(u8::is_ascii);
            match byte.is_ascii() {
                true if is_alone => self.shares[usize::from(*byte)],
                true => 0,
                false => least / COMPOSED,
            }
        };
        bytes.iter().zip(next).map(share).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use serde_json::{Value, json};

    const DEMO: &[u8] = include_bytes!("../../../tests/data/demo/tokenizer.json");

    fn changed(change: impl FnOnce(&mut Value)) -> Tokenizer {
        let mut file: Value = serde_json::from_slice(DEMO).expect("JSON");
        change(&mut file);
        Tokenizer::from_bytes(file.to_string().as_bytes()).expect("loads")
    }

    /// Texts that are hard on a bound: what shrinks, and what is one long token.
    fn texts() -> Vec<String> {
        let marks = "\u{1fbe}\u{308}\u{301}".repeat(50);
        let singles = "\u{212a}\u{1fef}\u{37e}\u{2f800}".repeat(50);
        let hangul = "\u{1112}\u{1161}\u{11ab}".repeat(50);
        let spaces = " ".repeat(500);
        let words = "the same internationalization of   the\n\nwords ".repeat(30);
        let mut all = vec![marks, singles, hangul, spaces, words, "e\u{301}".repeat(90), "你好".repeat(80)];
        all.extend(["", "a", "<|im_end|><|im_end|>", "\0\u{1}\u{7f}", "naïve 🦀"].map(str::to_owned));
        all.push(all.concat());
        all
    }

    #[test]
    fn no_text_has_fewer_tokens() {
        let composing = |file: &mut Value| file["normalizer"] = json!({"type": "NFC"});
        for tokenizer in [changed(|_| ()), changed(composing)] {
            for text in texts() {
                let (least, tokens) =
                    (tokenizer.least(&text), tokenizer.encode(&text, false).expect("encodes"));
                assert!(least <= tokens.len(), "{text:?}: {least} of {}", tokens.len());
                assert!(least > 0 || text.len() < 2, "{text:?}");
            }
        }
    }

    #[test]
    fn words_count_for_more_than_their_longest_token() {
        let tokenizer = changed(|_| ());
        let text = "one and another ".repeat(100);
        let tokens = tokenizer.encode(&text, false).expect("encodes").len();
        assert!(tokenizer.least(&text) * 8 > tokens, "{} of {tokens}", tokenizer.least(&text));
    }

    #[test]
    fn nothing_is_promised_where_a_text_loses_something() {
        let strips = |file: &mut Value| file["added_tokens"][0]["lstrip"] = true.into();
        let lowers = |file: &mut Value| {
            file["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true});
        };
        let removes = |file: &mut Value| {
            let pattern = json!({"String": " "});
            let split = json!({"type": "Split", "pattern": pattern, "behavior": "Removed", "invert": false});
            let bytes = file["pre_tokenizer"].clone();
            file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, bytes]});
        };
        for tokenizer in [changed(strips), changed(lowers), changed(removes)] {
            assert_eq!(tokenizer.least(&"word ".repeat(1000)), 0);
        }
    }
}
