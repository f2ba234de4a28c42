//! How long what goes into a grammar may be, how it is written there, and what the library says about it.
use q4_core::{Code, Error, Result};

/// Bytes of a grammar or a pattern.
pub const SOURCE_LIMIT: usize = 64 << 10;
/// Bytes of a schema, or of all schemas of tools together.
pub const SCHEMA_LIMIT: usize = 256 << 10;

/// What is longer than `most` bytes is refused.
pub fn within(len: usize, most: usize, what: &str) -> Result<()> {
    if len <= most {
        return Ok(());
    }
    let too_long = Error::new(Code::Usage, format!("{what}: too long"));
    Err(too_long.need(format!("at most {most} bytes")).have(format!("{len} bytes")))
}

/// A text as a grammar of Lark has it.
pub fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// What the library says, without what it says to those who debug it.
pub fn plain(why: &str) -> String {
    let words = ["\n<state>", "\n<non-verbose/>", "\n<backtrace>"];
    let end = words.iter().filter_map(|word| why.find(word)).min().unwrap_or(why.len());
    why[..end].split_whitespace().collect::<Vec<_>>().join(" ").chars().take(300).collect()
}
