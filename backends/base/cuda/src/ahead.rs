//! Work that begins before someone asks for what it makes.
use std::ffi::c_int;
use std::sync::{Mutex, OnceLock};
use std::thread::{Builder, JoinHandle};

static RUNNING: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());

/// Runs `work` on a thread of its own, e.g. a compiler. The process does not end before it does: libraries
/// must not be torn down while it is in them. Where no thread can be had, nothing happens: who needs what
/// `work` makes has to be able to make it.
pub fn ahead(work: impl FnOnce() + Send + 'static) {
    static WAITS: OnceLock<bool> = OnceLock::new();
    // SAFETY: the function is there as long as this library is, at whose end it is called too.
    if !*WAITS.get_or_init(|| unsafe { atexit(wait) } == 0) {
        return;
    }
    if let Ok(thread) = Builder::new().name("q4-ahead".into()).spawn(work) {
        RUNNING.lock().unwrap_or_else(|e| e.into_inner()).push(thread);
    }
}

unsafe extern "C" {
    fn atexit(f: extern "C" fn()) -> c_int;
}

extern "C" fn wait() {
    let running = std::mem::take(&mut *RUNNING.lock().unwrap_or_else(|e| e.into_inner()));
    for thread in running {
        // What became of it is for those who need what it made.
        let _ = thread.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    /// What waits at the end of the process waits for all of it, also where one panics.
    #[test]
    fn what_was_begun_is_done_at_the_end() {
        static DONE: AtomicU32 = AtomicU32::new(0);
        for i in 0..4 {
            ahead(move || {
                std::thread::sleep(Duration::from_millis(20));
                DONE.fetch_add(1, Ordering::Relaxed);
                assert!(i != 2, "on purpose");
            });
        }
        wait();
        assert_eq!(DONE.load(Ordering::Relaxed), 4);
    }
}
