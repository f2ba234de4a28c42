//! Turns token ids into text as they arrive, never showing half a character.
//!
//! A token of a byte-level vocabulary may hold a third of a Chinese character: text is only what is complete.
use super::Tokenizer;
use q4_core::{Code, Error, Result};
use std::collections::HashMap;

/// Incremental decoder of one answer. All pieces together equal [`Tokenizer::decode`] of all ids.
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// Byte-level: the beginning of a character that is not complete, at most 3 bytes.
    bytes: Vec<u8>,
    /// Other decoders: ids since the text before last was shown, because a piece may depend on its
    /// predecessor.
    window: Vec<u32>,
    /// Length in ids and in bytes of the part of the window that was shown.
    shown: (usize, usize),
}

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, bytes: Vec::with_capacity(256), window: Vec::new(), shown: (0, 0) }
    }

    /// Takes the next token; text if some became complete.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`]; [`Code::TokenizerInvalid`] also where a decoder rewrites text that was
    /// already shown.
    pub fn push(&mut self, id: u32) -> Result<Option<String>> {
        let Some(table) = &self.tokenizer.bytes else { return self.push_window(id) };
        if !(self.skip_special && self.tokenizer.is_special(id)) {
            self.bytes.extend_from_slice(table.of(id));
        }
        let complete = complete_len(&self.bytes);
        if complete == 0 {
            return Ok(None);
        }
        let text = String::from_utf8_lossy(&self.bytes[..complete]).into_owned();
        self.bytes.drain(..complete);
        Ok(Some(text))
    }

    /// The end of the answer: what never became complete, as replacement characters. The stream starts anew.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn finish(&mut self) -> Result<String> {
        if self.tokenizer.bytes.is_some() {
            let rest = String::from_utf8_lossy(&self.bytes).into_owned();
            self.bytes.clear();
            return Ok(rest);
        }
        let text = self.tokenizer.decode(&self.window, self.skip_special)?;
        let rest = unshown(&text, self.shown.1)?.to_owned();
        self.window.clear();
        self.shown = (0, 0);
        Ok(rest)
    }

    fn push_window(&mut self, id: u32) -> Result<Option<String>> {
        self.window.push(id);
        // A run of byte tokens is decoded as a whole: it may turn invalid until another token ends it.
        let open = self.tokenizer.inner.id_to_token(id).is_some_and(|t| t.starts_with("<0x") && t.len() == 6);
        if open {
            return Ok(None);
        }
        let text = self.tokenizer.decode(&self.window, self.skip_special)?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(None);
        }
        let piece = unshown(&text, self.shown.1)?.to_owned();
        if piece.is_empty() {
            return Ok(None);
        }
        self.window.drain(..self.shown.0);
        let length = self.tokenizer.decode(&self.window, self.skip_special)?.len();
        self.shown = (self.window.len(), length);
        Ok(Some(piece))
    }
}

fn unshown(text: &str, shown: usize) -> Result<&str> {
    text.get(shown..).ok_or_else(|| {
        Error::new(Code::TokenizerInvalid, "tokenizer.json: the decoder rewrites text that was already shown")
            .need("a decoder whose output only grows")
    })
}

/// Bytes before a character at the end that further bytes could complete.
fn complete_len(bytes: &[u8]) -> usize {
    let mut at = 0;
    loop {
        match std::str::from_utf8(&bytes[at..]) {
            Ok(_) => return bytes.len(),
            Err(e) => match e.error_len() {
                None => return at + e.valid_up_to(),
                Some(n) => at += e.valid_up_to() + n,
            },
        }
    }
}

/// The bytes every token of a byte-level vocabulary stands for, in one allocation.
pub(super) struct TokenBytes {
    ends: Vec<u32>,
    bytes: Vec<u8>,
}

impl TokenBytes {
    /// Decodes all tokens. A token with a character outside of the byte alphabet stands for its own text.
    pub(super) fn new(inner: &tokenizers::Tokenizer) -> Self {
        let alphabet: HashMap<char, u8> = byte_alphabet().collect();
        let highest = inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let mut table = Self { ends: Vec::with_capacity(highest), bytes: Vec::new() };
        for id in 0..highest {
            if let Some(token) = inner.id_to_token(id as u32) {
                let start = table.bytes.len();
                for c in token.chars() {
                    match alphabet.get(&c) {
                        Some(byte) => table.bytes.push(*byte),
                        None => {
                            table.bytes.truncate(start);
                            table.bytes.extend_from_slice(token.as_bytes());
                            break;
                        }
                    }
                }
            }
            table.ends.push(table.bytes.len() as u32);
        }
        table
    }

    /// The bytes of every token.
    pub(super) fn all(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.ends.len() as u32).map(|id| self.of(id))
    }

    pub(super) fn of(&self, id: u32) -> &[u8] {
        let Some(&end) = self.ends.get(id as usize) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] };
        &self.bytes[start as usize..end as usize]
    }
}

/// GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on.
fn byte_alphabet() -> impl Iterator<Item = (char, u8)> {
    let mut next = 0x100u32;
    (0..=255u8).map(move |byte| {
        let itself = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if itself { u32::from(byte) } else { next };
        next += u32::from(!itself);
        (char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER), byte)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::{
        ChaCha8Rng,
        rand_core::{Rng, SeedableRng},
    };

    fn demo() -> Tokenizer {
        Tokenizer::from_bytes(include_bytes!("../../../tests/data/demo/tokenizer.json")).expect("demo")
    }

    /// Byte fallback as in vocabularies made by SentencePiece: no byte-level decoder.
    fn fallback() -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        for byte in 0..=255u8 {
            vocab.insert(format!("<0x{byte:02X}>"), byte.into());
        }
        for (i, token) in ["▁", "a", "b", "▁a"].iter().enumerate() {
            vocab.insert((*token).into(), (256 + i).into());
        }
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "post_processor": null,
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "pre_tokenizer": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "byte_fallback": true, "fuse_unk": true, "vocab": vocab, "merges": ["▁ a"]},
        });
        Tokenizer::from_bytes(json.to_string().as_bytes()).expect("fallback")
    }

    fn streamed(t: &Tokenizer, ids: &[u32], skip: bool) -> Vec<String> {
        let mut stream = t.stream(skip);
        let mut pieces: Vec<String> = ids.iter().filter_map(|id| stream.push(*id).expect("push")).collect();
        pieces.push(stream.finish().expect("finish"));
        pieces
    }

    #[test]
    fn characters_split_over_tokens_are_held_back() {
        for t in [demo(), fallback()] {
            let ids = t.encode("a 龘靐齉 b", false).expect("encodes");
            assert!(ids.len() > 9, "the text must need several tokens for a character");
            let pieces = streamed(&t, &ids, false);
            assert!(pieces.iter().all(|p| !p.contains(char::REPLACEMENT_CHARACTER)), "{pieces:?}");
            assert_eq!(pieces.concat(), "a 龘靐齉 b");
        }
    }

    #[test]
    fn pieces_add_up_to_the_whole_for_any_ids() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for (t, rounds) in [(demo(), 400), (fallback(), 100)] {
            for round in 0..rounds {
                let n = rng.next_u32() as usize % 24;
                let ids: Vec<u32> = (0..n).map(|_| rng.next_u32() % (t.vocab_size() as u32 + 3)).collect();
                let skip = round % 2 == 0;
                assert_eq!(
                    streamed(&t, &ids, skip).concat(),
                    t.decode(&ids, skip).expect("decodes"),
                    "{ids:?}"
                );
            }
        }
    }

    #[test]
    fn an_unfinished_character_comes_at_the_end() {
        let t = demo();
        let ids = t.encode("龘", false).expect("encodes");
        assert_eq!(streamed(&t, &ids[..1], false), [t.decode(&ids[..1], false).expect("decodes")]);
        assert_eq!(complete_len(b"ab\xE4\xB8"), 2);
        assert_eq!(complete_len(b"\xFF\xE4\xFFa"), 4);
    }
}
