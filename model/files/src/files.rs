//! Reads the small text files of a model directory, never more than their bound.
//!
//! A bound on the bytes is the first line of defence: everything parsed later is at most proportional to it.
use q4_core::{Code, Error, Result};
use std::{fs::File, io::Read, path::Path};

/// The whole regular file as bytes; anything else might never end, or never begin.
///
/// # Errors
/// `code` for more than `limit` bytes and for what is no regular file, [`Code::ModelMissing`] without it,
/// [`Code::Io`].
pub fn read(path: &Path, limit: usize, code: Code) -> Result<Vec<u8>> {
    if !std::fs::metadata(path).map_err(|e| Error::io(path, &e))?.is_file() {
        return Err(Error::new(code, path.display().to_string())
            .need("a regular file")
            .have("something else"));
    }
    let file = File::open(path).map_err(|e| Error::io(path, &e))?;
    let mut bytes = Vec::new();
    file.take(limit as u64 + 1).read_to_end(&mut bytes).map_err(|e| Error::io(path, &e))?;
    within(&bytes, limit, &path.display().to_string(), code)?;
    Ok(bytes)
}

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
