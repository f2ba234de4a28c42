//! Turns a panic of a foreign library into a value and keeps its message off the terminal.
//!
//! Parsers of tokenizers panic on crafted files; the user must see one error of ours and nothing else.
use q4_core::{Code, Error, Result};
use std::{
    any::Any,
    cell::Cell,
    panic::{self, AssertUnwindSafe},
    sync::Once,
    thread,
};

/// Address space for the stack of [`deeply`]; pages that are not used cost nothing.
const STACK: usize = 256 << 20;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`; a panic in it comes back as its message. Only this thread is silenced, and only while `f` runs.
pub(crate) fn quietly<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !QUIET.try_with(Cell::get).unwrap_or(false) {
                previous(info);
            }
        }));
    });
    let before = QUIET.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(f));
    QUIET.set(before);
    result.map_err(|payload| message(&*payload))
}

/// Runs `work` on a stack of its own that nothing of a bounded size exhausts, for what recurses over foreign
/// texts and is freed recursively. `what` names it in errors; a panic becomes what `failed` makes of its
/// message.
pub(crate) fn deeply<T: Send>(
    what: &str,
    failed: impl Fn(String) -> Error + Sync,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let run = || quietly(work).unwrap_or_else(|panic| Err(failed(panic)));
    thread::scope(|scope| {
        let thread = thread::Builder::new().name(what.replace(' ', "-")).stack_size(STACK);
        let thread = thread.spawn_scoped(scope, run);
        let thread = thread.map_err(|e| Error::new(Code::OutOfMemory, format!("{what}: no thread: {e}")))?;
        thread.join().unwrap_or_else(|_| Err(failed("a panic".to_owned())))
    })
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text =
        payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(|s| &**s));
    text.unwrap_or("a panic without a message").chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_becomes_its_message_and_nesting_restores_the_flag() {
        let outer = quietly(|| {
            assert_eq!(quietly(|| panic!("inner {}", 1)), Err::<(), _>("inner 1".into()));
            assert!(QUIET.get());
            7
        });
        assert_eq!(outer, Ok(7));
        assert!(!QUIET.get());
    }
}
