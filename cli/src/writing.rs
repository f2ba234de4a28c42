//! Writing a model with a progress bar: Ctrl-C stops the work, which then leaves nothing behind.
use crate::context::Context;
use crate::signals;
use q4_core::{Code, Error, Result};
use q4_model::export::Progress;

/// Runs `work`, whose progress is shown as `doing`.
pub fn write<R>(
    cx: &Context,
    doing: &'static str,
    work: impl FnOnce(&mut dyn FnMut(Progress<'_>) -> Result<()>) -> Result<R>,
) -> Result<R> {
    let bar = cx.report().bar(doing);
    let hold = signals::cleanup();
    let result = work(&mut |p| {
        bar.set_length(p.total as u64);
        bar.set_position(p.done as u64);
        match signals::interrupted() {
            true => Err(Error::new(Code::Io, "interrupted")),
            false => Ok(()),
        }
    });
    drop(hold);
    bar.finish_and_clear();
    result
}
