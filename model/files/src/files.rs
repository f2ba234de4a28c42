//! A bound on the bytes of what is read from a model directory.
//!
//! It is the first line of defence: everything parsed later is at most proportional to it.
use q4_core::{Code, Error, Result};

/// Checks that what `subject` names has at most `limit` bytes.
///
/// # Errors
/// `code` for more.
pub fn within(bytes: &[u8], limit: usize, subject: &str, code: Code) -> Result<()> {
    if bytes.len() <= limit {
        return Ok(());
    }
    Err(Error::new(code, format!("{subject}: the file is too large"))
        .need(format!("at most {limit} bytes"))
        .have(format!("{} bytes or more", bytes.len())))
}
