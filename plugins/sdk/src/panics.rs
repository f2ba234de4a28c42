//! No panic leaves a library: it becomes a status and a text, and whoever it came from is never used again.
use crate::{codes, message};
use q4_core::Result;
use q4_plugin_abi::{Q4Error, Q4Status, status};
use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

/// Runs `body`, turns its error into a status and a text, and its panic into the end of this backend.
///
/// # Safety
/// `err` is as the contract says.
pub(crate) unsafe fn guarded(
    poisoned: &AtomicBool,
    err: *mut Q4Error,
    body: impl FnOnce() -> Result<()>,
) -> Q4Status {
    let (status, text) = if poisoned.load(Ordering::Relaxed) {
        (status::PANICKED, "an earlier call panicked".to_owned())
    } else {
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(Ok(())) => (status::OK, String::new()),
            Ok(Err(e)) => (codes::status_to(e.code()), message::line(&e)),
            Err(payload) => {
                poisoned.store(true, Ordering::Relaxed);
                (status::PANICKED, told(payload))
            }
        }
    };
    // SAFETY: forwarded to the caller.
    unsafe { message::write(err, &text, 0) };
    status
}

thread_local! {
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// A library prints nothing: its panics are told to the caller. The hook is that of the library's own
/// standard library.
pub(crate) fn quiet() {
    std::panic::set_hook(Box::new(|info| {
        // A thread that is ending has no place for it any more.
        let _ = LAST_PANIC.try_with(|last| {
            if let Ok(mut last) = last.try_borrow_mut() {
                *last = info.to_string().replace('\n', " ");
            }
        });
    }));
}

/// Text of a panic: what the hook saw on this thread, or the payload of one that came from another.
fn told(payload: Box<dyn Any + Send>) -> String {
    let seen = LAST_PANIC.try_with(|last| last.try_borrow_mut().map(|mut l| std::mem::take(&mut *l)));
    let text = seen.ok().and_then(std::result::Result::ok).filter(|t| !t.is_empty()).unwrap_or_else(|| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("without a text").to_owned()
    });
    // A payload may panic when it is dropped.
    std::mem::forget(payload);
    text
}

/// What `body` gives, or nothing and `poisoned` set where it panics.
pub(crate) fn quietly<R>(poisoned: &AtomicBool, body: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(body))
        .inspect_err(|_| poisoned.store(true, Ordering::Relaxed))
        .map_err(std::mem::forget)
        .ok()
}
