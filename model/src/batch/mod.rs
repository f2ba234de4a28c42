//! Many sequences at once over one model: a cache in pages, steps that mix chunks of prompts with decoding
//! rows, and the order in which all of that happens.
//!
//! On the CPU an answer does not depend on who else is served: a row's sums have their own order, whoever
//! shares a step, however its prompt was cut, and wherever its pages lie. [`company`] says where that does
//! not hold.
pub mod company;
mod nudges;
mod pages;
mod request;
mod scheduler;

pub use crate::places::Part;
use crate::sampling::Sampler;
use crate::scan;
pub use nudges::Nudges;
use q4_core::{Code, Error, Result};
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
    /// `ContextFull` where a sequence lacks the pages for its rows, and those of backends and devices;
    /// nothing is committed then.
    fn step(&mut self, ids: &[u32], parts: &[Part], logits: &[usize]) -> Result<()>;
    /// Logits of number `i` of the rows that the last step was asked for, `[vocab]`; waits for them. What is
    /// written to them is gone with the next call.
    ///
    /// # Errors
    /// Those of the device.
    fn logits(&mut self, i: usize) -> Result<&mut [f32]>;
    /// The next token by `sampler` from number `i` of them, which a penalty on `recent` changes; waits for
    /// it. A device that does this draws what the sampler draws from the same logits.
    ///
    /// # Errors
    /// `NonFinite` where the logits cannot be used, those of the device and of [`Sampler::sample`].
    fn sample(&mut self, i: usize, sampler: &mut Sampler, recent: &[u32]) -> Result<u32> {
        let logits = self.logits(i)?;
        finite(logits)?;
        sampler.sample(logits, recent)
    }
    /// Tokens there are.
    fn vocab(&self) -> usize;
    /// Gives a sequence one more page.
    fn add_page(&mut self, sequence: usize, page: u32);
    /// Says that the first `len` positions of a sequence are valid: another one wrote its pages.
    fn adopt(&mut self, sequence: usize, len: usize);
    /// Takes all pages of a sequence away.
    fn clear(&mut self, sequence: usize);
}

/// The logits, if all of them are finite.
fn finite(logits: &[f32]) -> Result<&[f32]> {
    match scan::first(logits, |l| !l.is_finite()) {
        None => Ok(logits),
        Some(at) => Err(non_finite(&format!("{} for token {at}", logits[at]))),
    }
}

/// `have` is what they are instead.
pub(crate) fn non_finite(have: &str) -> Error {
    Error::new(Code::NonFinite, "logits are not finite")
        .need("finite logits")
        .have(have)
        .fix("`q4 generate` with the same prompt names the layer")
}
