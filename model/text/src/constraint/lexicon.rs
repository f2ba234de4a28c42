//! The bytes of all tokens as a tree, which is what grammars are matched against.
use crate::quiet::deeply;
use crate::tokenizer::Tokenizer;
use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokRxInfo, TokTrie};
use q4_core::{Code, Error, Result};
use std::sync::Arc;

/// What one grammar may take. Compiling takes less than a second of a core and a mask less than 50 ms where
/// all of it is used, an automaton some 2 kB a state.
fn limits() -> ParserLimits {
    ParserLimits {
        // What an ambiguous grammar costs grows with its cube: 2000 of them take seconds a token.
        max_items_in_row: 500,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 20_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// What ends thoughts.
pub const CLOSE: &[u8] = b"</think>";

/// Where the end of thoughts ends in `text`.
pub fn find_close(text: &[u8]) -> Option<usize> {
    text.windows(CLOSE.len()).position(|at| at == CLOSE).map(|at| at + CLOSE.len())
}

/// Whether `text` ends thoughts and goes on with something that newlines are not.
pub fn leaves(text: &[u8]) -> bool {
    find_close(text).is_some_and(|end| text[end..].iter().any(|b| *b != b'\n'))
}

/// A tokenizer as grammars see it. Tokens that steer the model are no text to them, and ids that the
/// tokenizer does not have are no tokens.
pub struct Lexicon {
    pub factory: ParserFactory,
    /// What thoughts need; for vocabularies that have it as one token.
    pub marks: Arc<Marks>,
}

/// Tokens around thoughts.
#[derive(Debug, Default)]
pub struct Marks {
    /// `<think>`.
    pub open: Option<u32>,
    /// A newline, and two.
    pub newlines: Vec<(u32, usize)>,
    /// Tokens with a `>` that something else than newlines follows: those that may end thoughts and go on.
    pub beyond: Vec<u32>,
    /// Those of them that do so whatever came before.
    pub always: Vec<u32>,
}

impl Lexicon {
    pub fn new(tokenizer: &Tokenizer) -> Result<Self> {
        if tokenizer.bytes_of(0).is_none() {
            return Err(Error::new(Code::Unsupported, "answers in a form")
                .need("a byte-level tokenizer, as Qwen's models have")
                .have("a tokenizer.json whose tokens are no bytes"));
        }
        let failed = |why: String| {
            Error::new(Code::TokenizerInvalid, "tokenizer.json: no tree of its tokens can be made").have(why)
        };
        deeply("token tree", failed, || {
            let words = words(tokenizer);
            let marks = Arc::new(Marks::of(&words));
            // The library wants a token for the end. It gets one that nobody has: which tokens end an answer
            // is the request's business.
            let size = words.len() as u32;
            let trie = TokTrie::from(&TokRxInfo::new(size, size - 1), &words);
            let env = Arc::new(ApproximateTokEnv::new(trie));
            let caps = InferenceCapabilities::default();
            let factory = ParserFactory::new(&(env as _), caps, &SlicedBiasComputer::general_slices());
            let mut factory = factory.map_err(|e| failed(e.to_string()))?;
            factory.quiet();
            *factory.limits_mut() = limits();
            Ok(Self { factory, marks })
        })
    }
}

/// The bytes of each token as text, and one more token that has none. Tokens that steer are marked as the
/// library wants it, so that a grammar of Lark can name them.
fn words(tokenizer: &Tokenizer) -> Vec<Vec<u8>> {
    let word = |id: u32| match tokenizer.bytes_of(id) {
        Some(_) if tokenizer.is_special(id) => {
            let name = tokenizer.token_of(id).unwrap_or_default();
            [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat()
        }
        // The mark is no byte of any text.
        Some(bytes) if bytes.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) => bytes.to_vec(),
        _ => Vec::new(),
    };
    (0..=tokenizer.highest_id()).map(word).chain([Vec::new()]).collect()
}

impl Marks {
    fn of(words: &[Vec<u8>]) -> Self {
        let ids = || words.iter().zip(0u32..);
        let goes_on = |word: &[u8]| {
            let tail = word.iter().position(|b| *b == b'>').map_or(&[][..], |at| &word[at + 1..]);
            tail.iter().any(|b| *b != b'\n')
        };
        Self {
            open: ids().find(|(word, _)| word.as_slice() == b"<think>").map(|(_, id)| id),
            newlines: ids()
                .filter(|(word, _)| matches!(word.as_slice(), b"\n" | b"\n\n"))
                .map(|(word, id)| (id, word.len()))
                .collect(),
            beyond: ids().filter(|(word, _)| goes_on(word)).map(|(_, id)| id).collect(),
            always: ids().filter(|(word, _)| leaves(word)).map(|(_, id)| id).collect(),
        }
    }
}
