//! `q4 tokenize`: what a text is to a model, and what token ids say.
use crate::args::TokenizeArgs;
use crate::context::Context;
use crate::conversation::Saved;
use crate::input;
use crate::prompt;
use crate::report::{Outcome, stdout};
use crate::text::Text;
use q4_core::{Code, Error, Result};
use q4_model::tokenizer::Tokenizer;
use serde::Serialize;

/// The document of `--json`.
#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    text: &'a str,
    tokens: usize,
    ids: &'a [u32],
    pieces: Vec<Piece>,
}

/// One token.
#[derive(Serialize)]
pub struct Piece {
    /// Its id.
    pub id: u32,
    /// As the vocabulary spells it; null for an id without a token.
    pub token: Option<String>,
    /// What it says alone; a part of a character is `\u{fffd}`.
    pub text: String,
    /// Whether it steers the model and is no text.
    pub special: bool,
}

/// Runs the verb.
pub fn run(cx: &Context, args: &TokenizeArgs) -> Result<Outcome> {
    let checkpoint = cx.open(&args.model)?;
    let mut text = Text::of(&checkpoint)?;
    let (said, ids) = if let Some(path) = &args.conversation {
        let saved = Saved::read(path, cx.report())?;
        let template = text.template(&checkpoint)?;
        text.variables.extend(saved.variables());
        prompt::give(&mut text.variables, &args.prompt, &template, cx.report())?;
        let tools = text.variables.get("tools");
        let said = template.render(&saved.messages, tools, !args.no_generation_prompt, &text.variables)?;
        let ids = text.tokenizer.encode(&said, false)?;
        (said, ids)
    } else {
        if !args.prompt.template_arg.is_empty() || args.prompt.tools.is_some() {
            return Err(Error::new(Code::Usage, "--template-arg and --tools are about a chat template")
                .need("--conversation FILE")
                .fix("leave them out: a text is taken as it is"));
        }
        let given = args.text.as_deref().filter(|text| *text != "-");
        let given = input::text(given, "TEXT", "q4 tokenize MODEL 'Who are you?'")?;
        if args.decode {
            let ids = ids(&given, &text.tokenizer)?;
            (text.tokenizer.decode(&ids, false)?, ids)
        } else {
            let ids = text.tokenizer.encode(&given, false)?;
            (given, ids)
        }
    };
    let pieces = ids.iter().map(|id| piece(&text.tokenizer, *id)).collect::<Result<Vec<_>>>()?;
    if cx.report().is_json() {
        let body = Body { model: checkpoint.name(), text: &said, tokens: ids.len(), ids: &ids, pieces };
        cx.report().document("tokenize", &body)?;
    } else if args.decode {
        stdout(&format!("{said}\n"))?;
    } else {
        cx.report().text(&table(&pieces))?;
    }
    Ok(Outcome::Done)
}

/// A token with what it says.
pub fn piece(tokenizer: &Tokenizer, id: u32) -> Result<Piece> {
    let (token, special) = (tokenizer.token_of(id), tokenizer.is_special(id));
    Ok(Piece { id, token, text: tokenizer.decode(&[id], false)?, special })
}

fn table(pieces: &[Piece]) -> String {
    let mut out = String::new();
    for piece in pieces {
        // A part of a character says more as the vocabulary spells it.
        let spelt = piece.token.as_ref().filter(|_| piece.text.contains(char::REPLACEMENT_CHARACTER));
        out.push_str(&format!("{:>8}  {}\n", piece.id, quoted(spelt.unwrap_or(&piece.text))));
    }
    let ids: Vec<_> = pieces.iter().map(|p| p.id.to_string()).collect();
    out.push_str(&format!("{} tokens: {}\n", pieces.len(), ids.join(",")));
    out
}

/// A text on one line, in quotes as JSON has them.
pub fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn ids(text: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let wrong = |have: &str| {
        Error::new(Code::Usage, "token ids")
            .need(format!("whole numbers up to {}, with commas or blanks between", tokenizer.highest_id()))
            .have(have)
    };
    let words: Vec<_> =
        text.split(|c: char| c == ',' || c.is_whitespace()).filter(|w| !w.is_empty()).collect();
    if words.is_empty() {
        return Err(wrong("none"));
    }
    let known = |id: &u32| tokenizer.token_of(*id).is_some();
    words.iter().map(|word| word.parse().ok().filter(known).ok_or_else(|| wrong(word))).collect()
}
