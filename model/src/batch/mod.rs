//! Many sequences at once over one model: a cache in pages, steps that mix chunks of prompts with decoding
//! rows, and the order in which all of that happens.
//!
//! An answer does not depend on who else is served: a row's sums have their own order, whoever shares a step,
//! however its prompt was cut, and wherever its pages lie.
pub mod company;
mod nudges;
mod pages;
mod request;
mod scheduler;

pub use crate::cpu::Part;
pub use nudges::Nudges;
use q4_core::Result;
pub use request::{Event, Request, Sink, Weighed};
pub use scheduler::{Gauges, Options, Scheduler};

/// Positions of a page of the cache: what sequences that begin alike share is a multiple of it.
pub const PAGE: usize = 64;

/// The cache of many sequences and the steps over it, on one device. Whose a page is, is the
/// [`Scheduler`]'s business.
pub trait Sequences: Send {
    /// Runs `ids`, the rows of all `parts` one after the other, behind what their sequences hold, commits
    /// them, and keeps the logits of the rows `logits`.
    ///
    /// # Errors
    /// `ContextFull` where a sequence lacks the pages for its rows, and those of backends and devices; nothing
    /// is committed then.
    fn step(&mut self, ids: &[u32], parts: &[Part], logits: &[usize]) -> Result<()>;
    /// Logits of number `i` of the rows that the last step was asked for, `[vocab]`; waits for them.
    ///
    /// # Errors
    /// Those of the device.
    fn logits(&mut self, i: usize) -> Result<&mut [f32]>;
    /// Tokens there are.
    fn vocab(&self) -> usize;
    /// Gives a sequence one more page.
    fn add_page(&mut self, sequence: usize, page: u32);
    /// Says that the first `len` positions of a sequence are valid: another one wrote its pages.
    fn adopt(&mut self, sequence: usize, len: usize);
    /// Takes all pages of a sequence away.
    fn clear(&mut self, sequence: usize);
}
