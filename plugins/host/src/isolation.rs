//! What is said of a library in a process of its own, whatever system this is.
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// First argument of the process that serves a library.
pub const VERB: &str = "isolated";

/// How a library gets a process of its own.
#[derive(Clone, Debug)]
pub struct Isolation {
    /// An executable that calls [`serve_main`](crate::remote::serve_main) when its first argument is
    /// [`VERB`], and words before that.
    pub program: PathBuf,
    /// Those words.
    pub args: Vec<OsString>,
    /// Longest time of one call.
    pub limit: Duration,
    /// Operands lie against pages that nobody may touch, outputs are poisoned, and what is around them is
    /// compared: for a suite. Else calls are as fast as they can be.
    pub is_judged: bool,
}

/// How a process that serves a library was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// It did not answer in time and was killed.
    pub is_hang: bool,
    /// What became of it: `the process ended: signal: 11 (SIGSEGV)`.
    pub have: String,
}
