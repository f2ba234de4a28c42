//! Tokenizer, chat template and sampling wishes: opened and used as `q4 generate` would, and held against
//! each other.
use super::{Severity, Verifier};
use crate::template::Message;
use crate::text::{self, GENERATION, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG};
use crate::tokenizer::Tokenizer;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::Value;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;

/// What is asked and answered in the conversation that every template must render.
const TURNS: [(&str, &str); 3] =
    [("user", "Who are you?"), ("assistant", "I am a language model."), ("user", "你好！ What is 2 + 2?")];
const SYSTEM: &str = "You are a helpful assistant.";

impl Verifier<'_> {
    /// Everything about the text files.
    pub(super) fn words(&mut self) {
        let ends = self.generation();
        let tokenizer = match self.tokenizer.take() {
            Some(Ok(tokenizer)) => tokenizer,
            Some(Err(e)) => return self.error(TOKENIZER, &e),
            None => {
                let message = "the model has no tokenizer beside it: it can be computed with, not talked to";
                return self.add("tokenizer-missing", Severity::Note, TOKENIZER, message.into());
            }
        };
        // What the library has loaded parses again; a part that does not is one it does not look at.
        let file = self.c.file(TOKENIZER).and_then(|bytes| serde_json::from_slice::<File>(&bytes).ok());
        if let Some(file) = &file {
            self.vocabulary(file, &tokenizer);
            self.ends(&ends, file, &tokenizer);
        }
        self.template(&tokenizer);
    }

    /// Checks the sampling wishes; all ids that end an answer.
    fn generation(&mut self) -> BTreeSet<u32> {
        let config = self.c.config();
        let mut ends: BTreeSet<u32> = config.eos_token_ids.iter().copied().collect();
        match text::generation(self.c) {
            Err(e) => self.error(GENERATION, &e),
            Ok(g) => {
                let lacks = config.eos_token_ids.iter().any(|id| !g.eos_token_ids.contains(id));
                if lacks && !g.eos_token_ids.is_empty() {
                    let message = format!(
                        "eos_token_id {:?} lacks some of config.json's {:?}",
                        g.eos_token_ids, config.eos_token_ids
                    );
                    self.add("eos-mismatch", Severity::Warning, GENERATION, message);
                }
                ends.extend(g.eos_token_ids);
            }
        }
        if ends.is_empty() {
            let message = "no eos_token_id: answers end at their token limit";
            self.add("eos-missing", Severity::Warning, "config.json", message.into());
        }
        ends
    }

    /// An id that ends answers must be a token that no text contains.
    fn ends(&mut self, ends: &BTreeSet<u32>, file: &File, tokenizer: &Tokenizer) {
        for id in ends {
            let message = match tokenizer.token_of(*id) {
                None => format!("{id} ends answers, and the tokenizer has no such token"),
                Some(_) if file.added_tokens.iter().any(|a| a.id == *id) => continue,
                Some(token) => format!("{id} ends answers, and is the ordinary text `{token}`"),
            };
            self.add("eos-ordinary", Severity::Warning, "eos_token_id", message);
        }
    }

    fn vocabulary(&mut self, file: &File, tokenizer: &Tokenizer) {
        let mut warn = |code, message| self.add(code, Severity::Warning, TOKENIZER, message);
        let lost: Vec<_> =
            file.added_tokens.iter().filter(|a| tokenizer.id_of(&a.content) != Some(a.id)).collect();
        if let Some(first) = lost.first() {
            let have = tokenizer.id_of(&first.content).map_or("none".to_owned(), |id| id.to_string());
            warn(
                "added-token",
                format!(
                    "`{}` is declared as id {} and is given id {have}; {} added tokens are like that",
                    first.content,
                    first.id,
                    lost.len()
                ),
            );
        }
        if file.is_byte_level("decoder")
            && !file.is_byte_level("normalizer")
            && !file.is_byte_level("pre_tokenizer")
        {
            let message =
                "the decoder is ByteLevel, and no pre_tokenizer or normalizer turns text into its alphabet";
            warn("byte-level", message.into());
        }
        let Some(vocab) = file.model.vocab.0.as_ref().filter(|_| file.model.is_bpe()) else { return };
        if file.model.merges.is_empty() {
            let added: HashSet<_> = file.added_tokens.iter().map(|a| a.content.as_str()).collect();
            let unreachable = |t: &&String| t.chars().nth(1).is_some() && !added.contains(t.as_str());
            let count = vocab.keys().filter(unreachable).count();
            if count > 0 && !file.model.ignore_merges {
                warn("merges-missing", format!("there are no merges: {count} tokens can never be made"));
            }
        } else if let Some(message) = disorder(&file.model, vocab) {
            warn("merges-order", message);
        }
    }

    /// Compiles the template, renders a conversation with and without a system message, and looks for tokens
    /// in it.
    fn template(&mut self, tokenizer: &Tokenizer) {
        let subject = if self.c.file(TEMPLATE).is_some() { TEMPLATE } else { TOKENIZER_CONFIG };
        let variables = match text::variables(self.c) {
            Ok(variables) => variables,
            Err(e) => return self.error(TOKENIZER_CONFIG, &e),
        };
        let template = match text::template(self.c) {
            Ok(Some(template)) => template,
            Ok(None) => {
                let own = &self.c.config().arch.template;
                if tokenizer.id_of(own.marker).is_none() {
                    let family = own.family;
                    let message =
                        format!("no chat template, and the tokenizer has none of the tokens of {family}'s");
                    self.add("template-missing", Severity::Note, subject, message);
                    return;
                }
                text::of_family(self.c)
            }
            Err(e) => return self.error(subject, &e),
        };
        let turns: Vec<Message> = TURNS.iter().map(|(role, text)| Message::new(*role, *text)).collect();
        let with_system = [vec![Message::new("system", SYSTEM)], turns.clone()].concat();
        let prompt = match template.render(&turns[..1], None, true, &variables) {
            Ok(prompt) => prompt,
            Err(e) => return self.error(subject, &e),
        };
        for (what, messages, severity) in [
            ("a conversation of two turns", &turns[..], Severity::Warning),
            ("a system message", &with_system[..2], Severity::Note),
        ] {
            if let Err(e) = template.render(messages, None, true, &variables) {
                self.add("template-refuses", severity, subject, format!("refuses {what}: {e}"));
            }
        }
        self.prompt(subject, &prompt, tokenizer);
    }

    fn prompt(&mut self, subject: &str, prompt: &str, tokenizer: &Tokenizer) {
        let ids = match tokenizer.encode(prompt, false) {
            Ok(ids) => ids,
            Err(e) => return self.error(TOKENIZER, &e),
        };
        if !prompt.contains(TURNS[0].1) {
            let message = "what the user says is not in the prompt";
            self.add("template-drops", Severity::Warning, subject, message.into());
        }
        let strangers: BTreeSet<_> = markers(prompt).filter(|m| tokenizer.id_of(m).is_none()).collect();
        if !strangers.is_empty() {
            let names: Vec<_> = strangers.into_iter().take(8).collect();
            let message = format!("writes {}, which the tokenizer reads as ordinary text", names.join(", "));
            self.add("template-markers", Severity::Warning, subject, message);
        } else if !ids.iter().any(|id| tokenizer.is_special(*id)) && tokenizer.has_special() {
            let message = "no special token is in the prompt, though the tokenizer has some";
            self.add("template-markers", Severity::Warning, subject, message.into());
        }
    }
}

/// `<|name|>` and the bracketed words that other models use for them.
fn markers(prompt: &str) -> impl Iterator<Item = &str> {
    let bars = prompt.match_indices("<|").filter_map(|(at, _)| {
        let end = prompt[at..].find("|>")? + 2;
        Some(&prompt[at..at + end]).filter(|m| m.len() <= 64 && !m.contains(char::is_whitespace))
    });
    let words = ["[INST]", "[/INST]", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>"];
    bars.chain(words.into_iter().filter(|w| prompt.contains(w)))
}

/// Merges are learned one after the other and each makes the next id: a vocabulary in which nearly all do and
/// some do not had ids exchanged, one in which few do belongs to other merges. Results that exist already are
/// no new ids.
fn disorder(model: &Model, vocab: &HashMap<String, u32>) -> Option<String> {
    let mut made = HashSet::new();
    let ids: Vec<(u32, String)> = model
        .merges
        .iter()
        .filter_map(|Merge(a, b)| {
            let token = format!("{a}{b}");
            let id = *vocab.get(&token)?;
            made.insert(id).then_some((id, token))
        })
        .collect();
    let wrong: Vec<_> = ids.windows(2).filter(|pair| pair[1].0 < pair[0].0).map(|pair| &pair[1]).collect();
    let (_, token) = wrong.first()?;
    Some(format!(
        "{} of {} merges make a token whose id is below that of the merge before, `{token}` first: ids were exchanged, or \
         the vocabulary belongs to other merges",
        wrong.len(),
        ids.len()
    ))
}

/// A `tokenizer.json` as far as it is held against itself.
#[derive(Deserialize)]
struct File {
    model: Model,
    #[serde(default, deserialize_with = "or_default")]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
}

impl File {
    fn is_byte_level(&self, part: &str) -> bool {
        let mut open = vec![match part {
            "normalizer" => &self.normalizer,
            "pre_tokenizer" => &self.pre_tokenizer,
            _ => &self.decoder,
        }];
        while let Some(value) = open.pop() {
            match value {
                Value::Object(map) if map.get("type").is_some_and(|t| t == "ByteLevel") => return true,
                Value::Object(map) => open.extend(map.values()),
                Value::Array(list) => open.extend(list),
                _ => {}
            }
        }
        false
    }
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: Vocab,
    #[serde(default, deserialize_with = "or_default")]
    merges: Vec<Merge>,
    #[serde(default, deserialize_with = "or_default")]
    ignore_merges: bool,
}

impl Model {
    fn is_bpe(&self) -> bool {
        self.kind.as_deref().is_none_or(|k| k == "BPE")
    }
}

fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(d: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(d)?.unwrap_or_default())
}

/// Ids by token; nothing of a vocabulary that is a list.
struct Vocab(Option<HashMap<String, u32>>);

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Ids;
        impl<'de> Visitor<'de> for Ids {
            type Value = Vocab;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vocabulary")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab, A::Error> {
                let mut ids = HashMap::new();
                while let Some((token, id)) = map.next_entry()? {
                    ids.insert(token, id);
                }
                Ok(Vocab(Some(ids)))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vocab, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Vocab(None))
            }
        }
        d.deserialize_any(Ids)
    }
}

/// Two tokens that become one.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Spelling {
            Pair(String, String),
            Text(String),
        }
        match Spelling::deserialize(d)? {
            Spelling::Pair(a, b) => Ok(Merge(a, b)),
            Spelling::Text(text) => match text.split_once(' ') {
                Some((a, b)) => Ok(Merge(a.to_owned(), b.to_owned())),
                None => Err(D::Error::custom("a merge of two tokens")),
            },
        }
    }
}
