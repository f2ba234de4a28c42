//! A library in a process of its own. [`Remote`] is a backend whose every call is a question to that process:
//! it maps the library, this one maps nothing of it, and what comes back is numbers that are checked like
//! everything else a library says.
//!
//! ```text
//! Remote ── Link ── 8 sockets ── server threads ── Plugin ── the library
//!              └─ memory: x is written here and only read there, y and the workspace are written there
//! ```
//!
//! `wire` is what crosses the sockets, `port` one end of one, `memory` where operands lie, `process` the
//! other process as its parent sees it. On this side `client` is the backend, `link` its questions and how a
//! process is lost, `weight` a weight and its calls; `server` is the other side, and `count` counts what the
//! library does of what a call must not.
mod client;
#[cfg(all(target_pointer_width = "64", target_env = "gnu"))]
mod count;
#[cfg(not(all(target_pointer_width = "64", target_env = "gnu")))]
mod count {
    //! Not counted here.
    use std::collections::BTreeSet;
    pub fn counts() -> [u64; 3] {
        [0; 3]
    }
    pub fn objects() -> BTreeSet<usize> {
        BTreeSet::new()
    }
    pub fn install(_: &BTreeSet<usize>) {}
    pub fn uncounted<R>(body: impl FnOnce() -> R) -> R {
        body()
    }
}
mod link;
mod memory;
mod port;
mod process;
mod server;
mod weight;
mod wire;

pub use crate::isolation::{Isolation, Loss, VERB};
pub use client::Remote;
pub(crate) use count::uncounted;
pub use server::serve_main;
use std::sync::{Mutex, MutexGuard};

/// Keeps other processes of this user away from this one's memory and files, those that it starts included: a
/// library that is judged may run as the same user.
pub fn shield() {
    use rustix::process::{DumpableBehavior, set_dumpable_behavior};
    // A system that refuses protects nobody; nothing else depends on it.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}

/// What a thread that panicked has left is as good as it was.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// A number that nobody can guess.
fn secret() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The keys are random.
    std::hash::RandomState::new().build_hasher().finish()
}
