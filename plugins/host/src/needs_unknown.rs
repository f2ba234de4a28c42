//! What a library loads besides itself, where nobody can read it from the file: nothing is examined there, so
//! nothing is loaded.
use crate::file::Opened;
use q4_core::Reject;
use std::path::PathBuf;

/// A library that another one needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// As the other one names it: a soname, or an absolute path.
    pub name: String,
    /// The file, without links.
    pub path: PathBuf,
    /// SHA-256 of its bytes, in hexadecimal.
    pub sha256: String,
    /// It has that name itself, so that a copy of it is as good as the file.
    pub by_name: bool,
}

/// Never asked.
pub fn of(_: &Opened) -> Result<Vec<Need>, Vec<Reject>> {
    Ok(Vec::new())
}

/// What the system's loader has in this process: unknown.
pub struct LinkMap;

impl LinkMap {
    /// Now.
    pub fn now() -> Self {
        Self
    }

    /// Never asked.
    pub fn has(&self, _: &Need) -> bool {
        false
    }

    /// Never asked.
    pub fn is_expected(&self, _: &Self, _: &[PathBuf], _: &[Need]) -> Result<(), Reject> {
        Ok(())
    }
}
