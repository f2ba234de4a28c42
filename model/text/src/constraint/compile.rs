//! From what is asked to what tokens are matched with, under bounds.
use super::lexicon::{Lexicon, Marks};
use super::words::{SOURCE_LIMIT, plain, quoted, within};
use super::{Constraint, MOST_CHOICES, Matcher, Thoughts, calls, schema};
use crate::quiet::deeply;
use llguidance::TokenParser;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use q4_core::{Code, Error, Result};
use serde_json::json;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// A constraint that compiled; cheap to clone.
#[derive(Clone)]
pub struct Grammar {
    compiled: Arc<Mutex<TokenParser>>,
    marks: Arc<Marks>,
    thoughts: Thoughts,
    name: &'static str,
}

impl Grammar {
    /// At the beginning of an answer. What one matcher learns of the grammar the others do not know, so that
    /// none depends on its company.
    pub fn matcher(&self) -> Matcher {
        let parser = self.compiled.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        Matcher::new(parser, self.marks.clone(), self.thoughts, self.name)
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("of", &self.name).field("thoughts", &self.thoughts).finish()
    }
}

pub(super) fn compile(lexicon: &Lexicon, constraint: &Constraint, thoughts: Thoughts) -> Result<Grammar> {
    let name = constraint.name();
    let refused = |why: String| {
        Error::new(Code::Usage, format!("{name} cannot be kept to"))
            .need("one that is whole and within bounds, with nothing that only a check afterwards can tell")
            .have(plain(&why))
    };
    let compiled = deeply("grammar", refused, || {
        let source = source(constraint)?;
        let mut parser = lexicon.factory.create_parser(source).map_err(|e| refused(format!("{e:#}")))?;
        if let Some(first) = parser.grammar_warnings().into_iter().next() {
            return Err(refused(first));
        }
        parser.start_without_prompt();
        Ok(parser)
    })?;
    let compiled = Arc::new(Mutex::new(compiled));
    let grammar = Grammar { compiled, marks: lexicon.marks.clone(), thoughts, name };
    // Something has to be drawn first: what admits nothing is told before anybody waits for it.
    grammar.matcher().begin()?;
    Ok(grammar)
}

fn source(constraint: &Constraint) -> Result<TopLevelGrammar> {
    Ok(match constraint {
        Constraint::JsonObject => {
            TopLevelGrammar::from_json_schema(schema::checked(&json!({"type": "object"}))?)
        }
        Constraint::JsonSchema(of) => TopLevelGrammar::from_json_schema(schema::checked(of)?),
        Constraint::Regex(pattern) => {
            within(pattern.len(), SOURCE_LIMIT, "a pattern")?;
            TopLevelGrammar::from_regex(unanchored(pattern))
        }
        Constraint::Choice(texts) => TopLevelGrammar::from_lark(choice(texts)?),
        Constraint::Grammar(lark) => {
            within(lark.len(), SOURCE_LIMIT, "a grammar")?;
            if lark.contains("::=") {
                return Err(Error::new(Code::Usage, "a grammar cannot be kept to")
                    .need("llguidance's dialect of Lark, e.g. start: \"yes\" | \"no\"")
                    .have("what looks like GBNF"));
            }
            TopLevelGrammar::from_grammar(GrammarWithLexer {
                name: Some("grammar".to_owned()),
                ..GrammarWithLexer::from_lark(lark.clone())
            })
        }
        Constraint::Calls(calls) => calls::source(calls)?,
    })
}

/// A pattern is matched as a whole, so what holds it to the ends of the text says nothing new.
fn unanchored(pattern: &str) -> &str {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    match pattern.strip_suffix('$') {
        Some(rest) if rest.bytes().rev().take_while(|b| *b == b'\\').count() % 2 == 0 => rest,
        _ => pattern,
    }
}

fn choice(texts: &[String]) -> Result<String> {
    let need = |have: &str| {
        let need = format!("1 to {MOST_CHOICES} texts, none of them empty");
        Err(Error::new(Code::Usage, "a list of choices").need(need).have(have))
    };
    if texts.is_empty() || texts.len() > MOST_CHOICES {
        return need(&format!("{} texts", texts.len()));
    }
    if texts.iter().any(String::is_empty) {
        return need("an empty text");
    }
    within(texts.iter().map(String::len).sum(), SOURCE_LIMIT, "a list of choices")?;
    let quoted: Vec<_> = texts.iter().map(|text| quoted(text)).collect();
    Ok(format!("start: CHOICE\nCHOICE: {}\n", quoted.join(" | ")))
}
