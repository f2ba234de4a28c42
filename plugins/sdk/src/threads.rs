//! The program's threads, as seen from inside a library: a pool that runs its tasks through the callback of
//! the current call.
use q4_core::ThreadPool;
use q4_plugin_abi::{Q4Exec, Q4Parallel};
use std::any::Any;
use std::cell::Cell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{LazyLock, Mutex};

/// What the current call on this thread was lent.
#[derive(Clone, Copy)]
struct Lent {
    run: Q4Parallel,
    user: *mut c_void,
    threads: u32,
}

thread_local! {
    static LENT: Cell<Option<Lent>> = const { Cell::new(None) };
}

/// The pool a backend finds in its context: the threads that the program lent to the call that is running on
/// this thread, or this thread alone.
pub(crate) static POOL: LazyLock<ThreadPool> = LazyLock::new(|| ThreadPool::lent(count, run));

fn count() -> usize {
    LENT.get().map_or(1, |lent| lent.threads as usize)
}

fn run(tasks: usize, body: &(dyn Fn(usize) + Sync)) {
    let Some(lent) = LENT.get() else { return (0..tasks).for_each(body) };
    let job = Job { body, panic: Mutex::new(None) };
    // SAFETY: `run` and `user` belong to the call that is running; `job` outlives it, because `run` returns
    // after the last task.
    unsafe { (lent.run)(lent.user, tasks, task, (&raw const job).cast_mut().cast()) };
    if let Some(payload) = job.panic.into_inner().unwrap_or_else(|e| e.into_inner()) {
        resume_unwind(payload);
    }
}

/// Lends the threads of `exec` to everything `body` calls on this thread.
pub(crate) fn during<R>(exec: &Q4Exec, body: impl FnOnce() -> R) -> R {
    struct Restore(Option<Lent>);
    impl Drop for Restore {
        fn drop(&mut self) {
            LENT.set(self.0);
        }
    }
    let lent = exec.parallel.map(|run| Lent { run, user: exec.parallel_user, threads: exec.threads });
    let _restore = Restore(LENT.replace(lent));
    body()
}

struct Job<'a> {
    body: &'a (dyn Fn(usize) + Sync),
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// One task on a thread of the program: nothing may unwind into it.
unsafe extern "C" fn task(job: *mut c_void, index: usize) {
    // SAFETY: `run` passed its job, which is alive until all tasks are done and is shared as `Sync` allows.
    let job = unsafe { &*job.cast::<Job<'_>>() };
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (job.body)(index))) {
        *job.panic.lock().unwrap_or_else(|e| e.into_inner()) = Some(payload);
    }
}
