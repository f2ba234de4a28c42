//! The token ids of many texts, a JSON string a line on stdin and a JSON array a line on stdout, so that
//! other tokenizers can be held against a model's.
//!
//! ```console
//! $ cargo run --release -p q4-model --example ids -- MODEL < texts.jsonl > ids.jsonl
//! ```
use q4_core::{Code, Error, Result};
use q4_model::checkpoint::{Checkpoint, OpenOptions};
use q4_model::text;
use std::io::{BufRead, BufWriter, Write, stdin, stdout};
use std::path::PathBuf;

fn main() -> Result<()> {
    let model = std::env::args_os().nth(1).map(PathBuf::from);
    let model = model.ok_or_else(|| Error::new(Code::Usage, "ids MODEL").need("a model"))?;
    let checkpoint = Checkpoint::open(&model, &OpenOptions::default())?;
    let tokenizer = text::tokenizer(&checkpoint)?;
    let mut out = BufWriter::new(stdout().lock());
    let broken = |e: std::io::Error| Error::new(Code::Io, e.to_string());
    for line in stdin().lock().lines() {
        let text: String = serde_json::from_str(&line.map_err(broken)?)
            .map_err(|e| Error::new(Code::Usage, format!("a line of stdin: {e}")).need("a JSON string"))?;
        let ids = tokenizer.encode(&text, false)?;
        writeln!(out, "{}", serde_json::json!(ids)).map_err(broken)?;
    }
    out.flush().map_err(broken)
}
