//! The heap of a test: how often it was asked, and what it held at most.
//!
//! A test that wants to know has `#[global_allocator] static HEAP: q4_heap::Heap = q4_heap::COUNTED;` and is
//! alone in its process, or counts what its own thread does. Asking for more room counts as asking anew.
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// The system's allocator, which tells somebody of every request and of everything that is given back. Both
/// are told bytes, as asked for, and may not use the heap.
#[derive(Debug)]
pub struct Heap {
    /// Before memory is taken.
    pub asked: fn(usize),
    /// Before it is given back.
    pub freed: fn(usize),
}

/// Counts, for the functions of this crate.
pub const COUNTED: Heap = Heap { asked: count, freed: uncount };

static CALLS: AtomicUsize = AtomicUsize::new(0);
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static HERE: Cell<usize> = const { Cell::new(0) };
}

/// Requests so far, of all threads.
pub fn calls() -> usize {
    CALLS.load(SeqCst)
}

/// Requests of this thread.
pub fn calls_here() -> usize {
    HERE.get()
}

/// Bytes that are taken now; from here on [`peak`] is about what follows.
pub fn begin() -> usize {
    let live = LIVE.load(SeqCst);
    PEAK.store(live, SeqCst);
    live
}

/// The most bytes that were taken at once since [`begin`].
pub fn peak() -> usize {
    PEAK.load(SeqCst)
}

/// What the system's allocator takes for a request: its own word and the rounding are in it.
fn taken(bytes: usize) -> usize {
    (bytes + 8).next_multiple_of(16).max(32)
}

fn count(bytes: usize) {
    CALLS.fetch_add(1, SeqCst);
    // A thread that ends has no counter any longer.
    let _ = HERE.try_with(|here| here.set(here.get() + 1));
    let live = LIVE.fetch_add(taken(bytes), SeqCst) + taken(bytes);
    PEAK.fetch_max(live, SeqCst);
}

fn uncount(bytes: usize) {
    LIVE.fetch_sub(taken(bytes), SeqCst);
}

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        (self.asked)(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        (self.freed)(layout.size());
        // SAFETY: `memory` came from `alloc` above, which is the system's.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static HEAP: Heap = COUNTED;

    #[test]
    fn what_a_vector_does_is_counted() {
        let (calls, here, live) = (calls(), calls_here(), begin());
        let mut bytes = Vec::<u8>::with_capacity(1000);
        assert_eq!(calls_here() - here, 1);
        bytes.reserve_exact(5000);
        // The old one lives until the new one is written.
        assert!(peak() - live >= 6000, "{}", peak() - live);
        drop(bytes);
        assert_eq!(calls_here() - here, 2);
        assert!(super::calls() - calls >= 2);
    }
}
