//! Options that say what an answer must be.
use clap::Args;
use std::path::PathBuf;

/// One of them at most; each answer keeps to it.
#[derive(Args, Clone, Debug, Default)]
#[group(id = "form", multiple = false, conflicts_with = "show_prompt")]
pub struct FormArgs {
    /// The answer is JSON of this schema, which is JSON itself or a file.
    #[arg(long, value_name = "JSON|FILE")]
    pub json_schema: Option<String>,
    /// The answer is a text that this pattern matches as a whole.
    #[arg(long, value_name = "PATTERN")]
    pub regex: Option<String>,
    /// The answer is this text, or another that is named so; may be repeated.
    #[arg(long, value_name = "TEXT")]
    pub choice: Vec<String>,
    /// The answer is a text of the grammar in this file, in llguidance's dialect of Lark.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub grammar: Option<PathBuf>,
}
