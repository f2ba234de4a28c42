//! `q4 chat` at a terminal and in a pipe, and conversations as files.
#[cfg(unix)]
mod hands;
mod replay;
#[cfg(unix)]
pub mod terminal;
