//! What a run is made from, by content.
use q4_core::{Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

/// The model and the data of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sources {
    /// SHA-256 of configuration, tokenizer, template and, where training begins with them, weights; empty
    /// for a named shape.
    pub model: String,
    /// Files that are learnt from.
    pub train: Files,
    /// Held-out files.
    pub valid: Files,
}

/// Some files and how many rows they have together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Files {
    /// In the order they are read.
    pub files: Vec<Mark>,
    /// Rows of all.
    pub rows: usize,
}

/// A file by its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// As it was named.
    pub path: PathBuf,
    /// Size.
    pub bytes: u64,
    /// Hash.
    pub sha256: String,
}

impl Files {
    /// Hashes every file.
    pub fn of(paths: &[PathBuf], rows: usize) -> Result<Self> {
        let files = paths.iter().map(|p| Mark::of(p)).collect::<Result<_>>()?;
        Ok(Self { files, rows })
    }
}

impl std::fmt::Display for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes: u64 = self.files.iter().map(|m| m.bytes).sum();
        let hashes: Vec<_> = self.files.iter().map(|m| short(&m.sha256)).collect();
        match hashes.len() {
            0 => write!(f, "no file"),
            _ => write!(f, "{} rows, {bytes} bytes, SHA-256 {}", self.rows, hashes.join(" + ")),
        }
    }
}

impl Mark {
    fn of(path: &Path) -> Result<Self> {
        let (bytes, sha256) = hash(path).map_err(|e| Error::io(path, &e))?;
        Ok(Self { path: path.to_owned(), bytes, sha256 })
    }
}

/// Bytes and SHA-256 of a file.
pub(crate) fn hash(path: &Path) -> io::Result<(u64, String)> {
    let mut hash = Sha256::new();
    let bytes = io::copy(&mut BufReader::with_capacity(1 << 20, File::open(path)?), &mut hash)?;
    Ok((bytes, format!("{:x}", hash.finalize())))
}

/// A hash as people are shown it.
pub(crate) fn short(hash: &str) -> String {
    if hash.is_empty() { "none".into() } else { hash.chars().take(12).collect() }
}
