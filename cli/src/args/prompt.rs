//! Options that decide what a prompt becomes, and those of `q4 tokenize`.
use super::ModelArgs;
use clap::{Args, ValueHint};
use serde_json::Value;
use std::path::PathBuf;

/// Names that a template gets from the conversation itself.
const TAKEN: [&str; 3] = ["messages", "add_generation_prompt", "tools"];

/// What a chat template is given besides the messages.
#[derive(Args, Clone, Debug, Default)]
pub struct PromptArgs {
    /// A variable of the chat template, e.g. enable_thinking=false; JSON where it is JSON, else text; may be
    /// repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    pub template_arg: Vec<(String, Value)>,
    /// Tools the model may call: a file with a JSON list, as transformers takes it.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub tools: Option<PathBuf>,
}

/// `q4 tokenize`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
A text becomes the tokens that `q4 generate --raw` would compute: names of special tokens become
those tokens, and none is added. A conversation is put into the chat template first. Text and ids
are read from standard input where they are `-` or absent.

Examples:
  q4 tokenize demo 'Who are you?'
  q4 tokenize ./model - < text.txt --json
  q4 tokenize demo --decode 12,7,45
  q4 tokenize ./model --conversation chat.json --tools tools.json --template-arg enable_thinking=false")]
pub struct TokenizeArgs {
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// The text; `-` is standard input.
    #[arg(conflicts_with = "conversation")]
    pub text: Option<String>,
    /// TEXT is token ids, with commas or blanks between; print what they say.
    #[arg(long, conflicts_with = "conversation")]
    pub decode: bool,
    /// A file with messages as JSON, a list or an object with `messages` and perhaps `tools`; `-` is
    /// standard input.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub conversation: Option<PathBuf>,
    /// Do not begin the model's answer.
    #[arg(long, requires = "conversation")]
    pub no_generation_prompt: bool,
    /// What the template is given.
    #[command(flatten)]
    pub prompt: PromptArgs,
}

fn variable(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text.split_once('=').ok_or("need NAME=VALUE")?;
    let mut chars = name.chars();
    let starts = chars.next().is_some_and(|c| c.is_alphabetic() || c == '_');
    if !starts || !chars.all(|c| c.is_alphanumeric() || c == '_') {
        return Err(format!("`{name}` cannot be the name of a variable"));
    }
    if TAKEN.contains(&name) {
        let how = if name == "tools" { "--tools FILE gives it" } else { "the conversation decides it" };
        return Err(format!("`{name}`: {how}"));
    }
    let value = q4_model::template::json(value).unwrap_or_else(|_| Value::from(value));
    Ok((name.to_owned(), value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_json_where_they_are() {
        for (text, name, value) in [
            ("enable_thinking=false", "enable_thinking", Value::from(false)),
            ("a=b=c", "a", "b=c".into()),
            ("n=12", "n", 12.into()),
            ("n=\"12\"", "n", "12".into()),
            ("empty=", "empty", "".into()),
            ("list=[1, null]", "list", serde_json::json!([1, null])),
        ] {
            assert_eq!(variable(text), Ok((name.to_owned(), value)), "{text}");
        }
        for bad in ["a", "=1", "a b=1", "1a=1", "messages=[]", "tools=[]"] {
            assert!(variable(bad).is_err(), "{bad}");
        }
    }
}
