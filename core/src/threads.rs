//! A small pool of threads that costs microseconds a call. Kernels use it through [`crate::ExecContext`] and
//! start no threads of their own; results never depend on how many there are.
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Runs numbered tasks on the calling thread and `threads - 1` helpers.
pub struct ThreadPool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// One call at a time; a second caller, or a task that calls back, runs its tasks by itself.
    busy: AtomicBool,
    /// Somebody else's threads instead of helpers.
    lent: Option<Lent>,
}

/// Where the threads of [`ThreadPool::lent`] come from.
struct Lent {
    threads: fn() -> usize,
    run: fn(usize, Body<'_>),
}

type Body<'a> = &'a (dyn Fn(usize) + Sync);

/// Pieces for each thread that work is split into: the last one is what threads wait for.
const PIECES: usize = 16;

/// What a thread has left of a call's tasks. It takes them one after the other, because neighbours often read
/// neighbouring memory, which the last one has fetched ahead; who is done takes over half of what another has
/// left.
#[repr(align(64))]
#[derive(Default)]
struct Share(AtomicU64);

struct Shared {
    /// Counts calls; a helper waits for it to change.
    epoch: AtomicU64,
    /// The call's task function; `None` as soon as its last task is claimed.
    body: Mutex<Option<Body<'static>>>,
    /// By thread, the caller's first.
    shares: Box<[Share]>,
    /// Helpers between taking a body and letting go of it.
    inside: AtomicUsize,
    /// Helpers that have started.
    ready: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    /// Helpers that wait on `wake`: waking nobody is a system call too.
    asleep: AtomicUsize,
    sleepers: Mutex<()>,
    wake: Condvar,
}

/// How long a thread spins before it lets go of its processor: longer than the gap between two products of a
/// decode step, shorter than what a thread that shares the processor would notice.
const SPIN: Duration = Duration::from_micros(40);
/// Turns between two looks at the clock.
const TURNS: u32 = 32;

impl ThreadPool {
    /// A pool of `threads` in all, the caller included; at least one.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            epoch: AtomicU64::new(0),
            body: Mutex::new(None),
            shares: (0..threads.max(1)).map(|_| Share::default()).collect(),
            inside: AtomicUsize::new(0),
            ready: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            asleep: AtomicUsize::new(0),
            sleepers: Mutex::new(()),
            wake: Condvar::new(),
        });
        let spawn = |i| {
            let shared = shared.clone();
            std::thread::Builder::new().name(format!("q4-{i}")).spawn(move || shared.help(i))
        };
        // A machine that refuses a thread still computes, on fewer.
        let helpers: Vec<_> = (1..threads).map_while(|i| spawn(i).ok()).collect();
        // A thread allocates while it starts; from here on none does.
        let mut guard = shared.sleepers.lock().unwrap_or_else(|e| e.into_inner());
        while shared.ready.load(Ordering::Acquire) < helpers.len() {
            guard = shared.wake.wait(guard).unwrap_or_else(|e| e.into_inner());
        }
        drop(guard);
        Self { shared, helpers, busy: AtomicBool::new(false), lent: None }
    }

    /// A pool without threads of its own: `threads` says how many there are at the moment, the caller
    /// included, and `run` does what [`Self::run`] says. For a library that is lent the threads of the
    /// program it was loaded into.
    pub fn lent(threads: fn() -> usize, run: fn(usize, &(dyn Fn(usize) + Sync))) -> Self {
        let mut pool = Self::new(1);
        pool.lent = Some(Lent { threads, run });
        pool
    }

    /// Threads that work on a call, the caller included.
    pub fn threads(&self) -> usize {
        self.lent.as_ref().map_or(self.helpers.len() + 1, |lent| (lent.threads)().max(1))
    }

    /// Runs `body(0)` to `body(tasks - 1)`, below 2^32, each once, in any order, and returns when all are
    /// done. Panics when a task panicked. Allocates nothing.
    pub fn run(&self, tasks: usize, body: Body<'_>) {
        if let Some(lent) = self.lent.as_ref().filter(|_| tasks > 1) {
            return (lent.run)(tasks, body);
        }
        assert!(u32::try_from(tasks).is_ok(), "fewer than 2^32 tasks, not {tasks}");
        if tasks <= 1 || self.helpers.is_empty() || self.busy.swap(true, Ordering::Acquire) {
            (0..tasks).for_each(body);
            return;
        }
        let s = &*self.shared;
        // SAFETY: only the lifetime changes. `withdraw` below takes the reference back, and returns when no
        // helper that took it is still inside.
        let body: Body<'static> = unsafe { std::mem::transmute::<Body<'_>, Body<'static>>(body) };
        let threads = self.helpers.len() + 1;
        for (t, share) in s.shares.iter().enumerate().take(threads) {
            share.set(tasks * t / threads..tasks * (t + 1) / threads);
        }
        *s.body.lock().unwrap_or_else(|e| e.into_inner()) = Some(body);
        s.announce();
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| s.claim(0, body)));
        s.withdraw();
        let helper_panicked = s.panicked.swap(false, Ordering::Relaxed);
        self.busy.store(false, Ordering::Release);
        if let Err(payload) = own {
            std::panic::resume_unwind(payload);
        }
        assert!(!helper_panicked, "a task of the thread pool panicked");
    }

    /// Splits `0..len` into ranges of at least `least` items and runs `body(start, end)` on each.
    pub fn split(&self, len: usize, least: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        let pieces = (len / least.max(1)).clamp(1, self.threads() * PIECES);
        let size = len.div_ceil(pieces);
        self.run(pieces, &|i| {
            let (start, end) = (i * size, ((i + 1) * size).min(len));
            if start < end {
                body(start, end);
            }
        });
    }
}

impl Shared {
    fn announce(&self) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
        // A helper counts itself before it looks at the epoch for the last time: one of the two is seen.
        if self.asleep.load(Ordering::SeqCst) != 0 {
            drop(self.sleepers.lock());
            self.wake.notify_all();
        }
    }

    fn claim(&self, thread: usize, body: Body<'_>) {
        let own = &self.shares[thread];
        loop {
            while let Some(i) = own.first() {
                body(i);
            }
            let (before, after) = self.shares.split_at(thread);
            let Some(half) = after.iter().chain(before).find_map(Share::half) else { return };
            own.set(half);
        }
    }

    fn help(&self, thread: usize) {
        let mut seen = 0;
        let guard = self.sleepers.lock();
        self.ready.fetch_add(1, Ordering::Release);
        self.wake.notify_all();
        drop(guard);
        loop {
            seen = self.await_call(seen);
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            // Counted before the body is taken, so that `withdraw` either sees this helper or leaves it
            // nothing to take.
            self.inside.fetch_add(1, Ordering::SeqCst);
            let body = *self.body.lock().unwrap_or_else(|e| e.into_inner());
            if let Some(body) = body
                && std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.claim(thread, body)))
                    .is_err()
            {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.inside.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Ends a call whose tasks are all claimed: waits for helpers that work on one, not for those that came
    /// too late or never woke, because on a busy machine they may not run for milliseconds.
    fn withdraw(&self) {
        *self.body.lock().unwrap_or_else(|e| e.into_inner()) = None;
        let idle = || self.inside.load(Ordering::SeqCst) == 0;
        // A helper that lost its processor in the middle of a task may be waiting for this one.
        while !spin_until(idle) {
            std::thread::yield_now();
        }
    }

    fn await_call(&self, seen: u64) -> u64 {
        if spin_until(|| self.epoch.load(Ordering::Acquire) != seen) {
            return self.epoch.load(Ordering::Acquire);
        }
        let mut guard = self.sleepers.lock().unwrap_or_else(|e| e.into_inner());
        self.asleep.fetch_add(1, Ordering::SeqCst);
        loop {
            let now = self.epoch.load(Ordering::SeqCst);
            if now != seen {
                self.asleep.fetch_sub(1, Ordering::SeqCst);
                return now;
            }
            guard = self.wake.wait(guard).unwrap_or_else(|e| e.into_inner());
        }
    }
}

impl Share {
    /// Gives an empty share these tasks, or any share before a call. Nobody else changes it then.
    fn set(&self, tasks: Range<usize>) {
        self.0.store((tasks.start as u64) << 32 | tasks.end as u64, Ordering::Relaxed);
    }

    /// Takes the first task.
    fn first(&self) -> Option<usize> {
        self.take(|tasks| tasks.start + 1..tasks.end).map(|tasks| tasks.start)
    }

    /// Takes the last half of the tasks.
    fn half(&self) -> Option<Range<usize>> {
        let middle = |tasks: &Range<usize>| tasks.start + tasks.len() / 2;
        self.take(|tasks| tasks.start..middle(&tasks)).map(|tasks| middle(&tasks)..tasks.end)
    }

    /// Leaves `rest` of the tasks; what there was before, unless it was nothing. A word says all there is to
    /// know, so it does not matter whether it has changed in between and is the same again.
    fn take(&self, rest: impl Fn(Range<usize>) -> Range<usize>) -> Option<Range<usize>> {
        let tasks = |word: u64| (word >> 32) as usize..(word & u64::from(u32::MAX)) as usize;
        let left = |word| {
            let rest = (!tasks(word).is_empty()).then(|| rest(tasks(word)))?;
            Some((rest.start as u64) << 32 | rest.end as u64)
        };
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).ok().map(tasks)
    }
}

/// Spins until `done` or for [`SPIN`]; what `done` said last.
fn spin_until(done: impl Fn() -> bool) -> bool {
    if done() {
        return true;
    }
    let start = Instant::now();
    loop {
        for _ in 0..TURNS {
            std::hint::spin_loop();
            if done() {
                return true;
            }
        }
        if start.elapsed() >= SPIN {
            return false;
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.announce();
        for h in self.helpers.drain(..) {
            let _ = h.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let pool = ThreadPool::new(threads);
            for tasks in [0, 1, 2, 3, 100] {
                let hits: Vec<_> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                for _ in 0..50 {
                    pool.run(tasks, &|i| {
                        hits[i].fetch_add(1, Ordering::Relaxed);
                    });
                }
                assert!(
                    hits.iter().all(|h| h.load(Ordering::Relaxed) == 50),
                    "{threads} threads, {tasks} tasks"
                );
            }
        }
    }

    #[test]
    fn a_share_is_taken_from_the_front_by_its_owner_and_halved_by_others() {
        let share = Share::default();
        assert_eq!((share.first(), share.half()), (None, None));
        share.set(7..12);
        assert_eq!((share.first(), share.half(), share.first()), (Some(7), Some(10..12), Some(8)));
        assert_eq!((share.half(), share.first(), share.half()), (Some(9..10), None, None));
    }

    #[test]
    fn who_is_done_takes_over_what_a_slow_thread_has_left() {
        let pool = ThreadPool::new(3);
        for slow in [0, 5, 11] {
            let hits: Vec<_> = (0..12).map(|_| AtomicU32::new(0)).collect();
            pool.run(hits.len(), &|i| {
                hits[i].fetch_add(1, Ordering::Relaxed);
                // The others are done before it: only they can have been taken over.
                while i == slow && hits.iter().any(|h| h.load(Ordering::Relaxed) == 0) {
                    std::thread::yield_now();
                }
            });
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1), "{slow}");
        }
    }

    #[test]
    fn a_task_may_call_the_pool_again() {
        let pool = ThreadPool::new(3);
        let hits = AtomicU32::new(0);
        pool.run(4, &|_| {
            pool.run(5, &|_| {
                hits.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(hits.into_inner(), 20);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_leaves_the_pool_usable() {
        let pool = ThreadPool::new(3);
        for _ in 0..20 {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                pool.run(8, &|i| {
                    if i == 5 {
                        std::panic::resume_unwind(Box::new(()))
                    }
                });
            }));
            assert!(caught.is_err());
        }
        let hits = AtomicU32::new(0);
        pool.run(8, &|_| {
            hits.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(hits.into_inner(), 8);
    }

    #[test]
    fn lent_threads_are_asked_for_and_used() {
        static CALLS: AtomicU32 = AtomicU32::new(0);
        let pool = ThreadPool::lent(
            || 7,
            |tasks, body| {
                CALLS.fetch_add(1, Ordering::Relaxed);
                (0..tasks).rev().for_each(body);
            },
        );
        let order = Mutex::new(Vec::new());
        pool.run(3, &|i| order.lock().expect("no task panics").push(i));
        pool.run(1, &|i| order.lock().expect("no task panics").push(i));
        assert_eq!((pool.threads(), order.into_inner().expect("as above")), (7, vec![2, 1, 0, 0]));
        assert_eq!(CALLS.load(Ordering::Relaxed), 1, "one task needs nobody else");
    }

    #[test]
    fn ranges_cover_everything_once() {
        let pool = ThreadPool::new(2);
        for len in [0, 1, 7, 64, 1000] {
            let hits: Vec<_> = (0..len).map(|_| AtomicU32::new(0)).collect();
            pool.split(len, 8, &|a, b| {
                for h in &hits[a..b] {
                    h.fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1), "{len}");
        }
    }
}
