//! `tokenizer.json`: text to token ids and back.
//!
//! The library that reads the file panics on crafted ones, so it only sees what an audit let through,
//! silenced.
use crate::quiet::quietly;
use q4_core::{Code, Error, Result};
use q4_files::files;
use std::fmt;

mod audit;
mod bound;
mod stream;

pub use stream::DecodeStream;

/// Bytes a `tokenizer.json` may have.
const FILE_LIMIT: usize = 64 << 20;
/// Bytes of text per call of [`Tokenizer::encode`].
const TEXT_LIMIT: usize = 16 << 20;
/// Exercises letters, digits, punctuation, white space, several scripts and a split character at load time.
const PROBE: &str = "Hello, World 0123! \n\t don't 你好，世界 émoji 🦀\r\n  <|x|>";

/// A tokenizer that has proven at load time that it can encode and decode.
///
/// ```
/// use q4_text::tokenizer::Tokenizer;
///
/// let tokenizer = Tokenizer::from_bytes(include_bytes!("../../tests/data/demo/tokenizer.json"))?;
/// let ids = tokenizer.encode("Who are you?", false)?;
/// assert_eq!(tokenizer.decode(&ids, false)?, "Who are you?");
///
/// // Tokens that steer the model are no text.
/// let end = tokenizer.id_of("<|im_end|>").unwrap();
/// assert!(tokenizer.is_special(end));
/// assert_eq!(tokenizer.decode(&[end], true)?, "");
/// # Ok::<(), q4_core::Error>(())
/// ```
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    special: Vec<u32>,
    highest: u32,
    /// Bytes of every token, if the decoder is plain byte-level: then streams need no library call.
    bytes: Option<stream::TokenBytes>,
    bound: Option<bound::Bound>,
}

impl Tokenizer {
    /// Parses the content of a `tokenizer.json`. Truncation and padding are switched off: they would lose
    /// text.
    ///
    /// # Errors
    /// [`Code::TokenizerInvalid`] for damage, excess, and whatever makes the library fail or panic.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        files::within(bytes, FILE_LIMIT, "tokenizer.json", Code::TokenizerInvalid)?;
        let audit::Facts { byte_level, highest, kept } = audit::audit(bytes)?;
        let mut inner = guarded("loading", || tokenizers::Tokenizer::from_bytes(bytes))?;
        guarded("loading", || inner.with_truncation(None).map(|_| ()))?;
        inner.with_padding(None);
        let mut special: Vec<u32> =
            inner.get_added_tokens_decoder().iter().filter(|(_, t)| t.special).map(|(id, _)| *id).collect();
        special.sort_unstable();
        let bytes = byte_level.then(|| stream::TokenBytes::new(&inner));
        let bound = bytes.as_ref().and_then(|tokens| bound::Bound::new(kept, tokens));
        let tokenizer = Self { inner, special, bytes, bound, highest };
        let ids = tokenizer.encode(PROBE, true)?;
        tokenizer.decode(&ids, false)?;
        Ok(tokenizer)
    }

    /// Token ids of at most 16 MiB of text; `add_special` lets the post-processor add its tokens.
    ///
    /// # Errors
    /// [`Code::Usage`] for a longer text, [`Code::TokenizerInvalid`] where the library fails.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        if text.len() > TEXT_LIMIT {
            return Err(Error::new(Code::Usage, "text: too long for one call")
                .need(format!("at most {TEXT_LIMIT} bytes"))
                .have(format!("{} bytes", text.len())));
        }
        Ok(guarded("encoding", || self.inner.encode_fast(text, add_special))?.get_ids().to_vec())
    }

    /// Tokens that `text` has at least, told in one pass over its bytes; 0 where the vocabulary promises
    /// nothing about that.
    pub fn least(&self, text: &str) -> usize {
        self.bound.as_ref().map_or(0, |bound| bound.of(text))
    }

    /// Text of token ids; `skip_special` leaves special tokens out. Unknown ids contribute nothing.
    ///
    /// # Errors
    /// [`Code::TokenizerInvalid`] where the library fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        guarded("decoding", || self.inner.decode(ids, skip_special))
    }

    /// A decoder for one growing answer.
    pub fn stream(&self, skip_special: bool) -> DecodeStream<'_> {
        DecodeStream::new(self, skip_special)
    }

    /// Id of a token given by its exact text.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Number of tokens, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The largest id that the file gives a token.
    pub fn highest_id(&self) -> u32 {
        self.highest
    }

    /// Whether any token steers the model.
    pub fn has_special(&self) -> bool {
        !self.special.is_empty()
    }

    /// Text of one token as the vocabulary spells it.
    pub fn token_of(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The bytes a token of a byte-level vocabulary stands for, which may be half a character; `None` for
    /// other vocabularies, whose tokens are no bytes.
    pub fn bytes_of(&self, id: u32) -> Option<&[u8]> {
        self.bytes.as_ref().map(|table| table.of(id))
    }

    /// Whether the token steers the model and is no text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.binary_search(&id).is_ok()
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

/// Runs a library call; its error or panic becomes [`Code::TokenizerInvalid`].
fn guarded<T, E: fmt::Display>(doing: &str, call: impl FnOnce() -> Result<T, E>) -> Result<T> {
    let failed = |why: String| {
        Error::new(Code::TokenizerInvalid, format!("tokenizer.json: {doing} failed"))
            .need("a tokenizer that can encode and decode any text")
            .have(why.chars().take(300).collect::<String>())
    };
    match quietly(call) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => Err(failed(e.to_string())),
        Err(panic) => Err(failed(format!("a panic: {panic}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMO: &[u8] = include_bytes!("../../tests/data/demo/tokenizer.json");

    #[test]
    fn text_survives_the_round_trip() {
        let t = Tokenizer::from_bytes(DEMO).expect("demo");
        assert_eq!(t.vocab_size(), 1440);
        for text in ["", "Who are you?", "  two  spaces\n\n", "談談UFO", "😀é\u{301}", PROBE] {
            let ids = t.encode(text, true).expect("encodes");
            assert_eq!(t.decode(&ids, true).expect("decodes"), text);
        }
    }

    #[test]
    fn special_tokens_are_known_and_skipped() {
        let t = Tokenizer::from_bytes(DEMO).expect("demo");
        let end = t.id_of("<|im_end|>").expect("a token");
        assert!(t.is_special(end) && !t.is_special(end + 100));
        assert_eq!(t.encode("<|im_end|>", false).expect("encodes"), [end]);
        assert_eq!(t.decode(&[end], true).expect("decodes"), "");
        assert_eq!(t.decode(&[end], false).expect("decodes"), "<|im_end|>");
        assert_eq!(t.id_of("no such token"), None);
    }

    #[test]
    fn the_bytes_of_all_tokens_are_the_bytes_of_the_text() {
        let t = Tokenizer::from_bytes(DEMO).expect("demo");
        let ids = t.encode(PROBE, false).expect("encodes");
        let bytes: Vec<u8> =
            ids.iter().flat_map(|id| t.bytes_of(*id).expect("byte-level")).copied().collect();
        assert_eq!(bytes, PROBE.as_bytes());
    }
}
