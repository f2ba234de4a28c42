//! What a piece of code takes of memory: exactly, where the executable counts its allocations, and as the
//! system sees it.
//!
//! A shared library has an allocator of its own, so the count alone would believe it; the system's view alone
//! is blind to small things. The suite uses both.
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, Ordering};

/// The system's allocator, counting. An executable that wants exact numbers installs it:
/// `#[global_allocator] static A: CountingAllocator = CountingAllocator;`
pub struct CountingAllocator;

static LIVE: AtomicI64 = AtomicI64::new(0);
static PEAK: AtomicI64 = AtomicI64::new(0);
static IN_USE: AtomicI64 = AtomicI64::new(0);

fn add(bytes: usize) {
    IN_USE.store(1, Ordering::Relaxed);
    let now = LIVE.fetch_add(bytes as i64, Ordering::Relaxed) + bytes as i64;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator with the same arguments.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: forwarded.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: forwarded.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: forwarded.
        unsafe { System.dealloc(p, layout) }
    }
    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size);
        LIVE.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: forwarded.
        unsafe { System.realloc(p, layout, size) }
    }
}

/// Bytes taken while something ran; `None` where nobody counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Most bytes allocated at once, above those at the start.
    pub allocated_peak: Option<u64>,
    /// Bytes allocated and not freed at the end.
    pub allocated_left: Option<u64>,
    /// Most resident bytes of the process, above those at the start.
    pub resident_peak: Option<u64>,
    /// Resident bytes at the end, above those at the start.
    pub resident_left: Option<u64>,
}

/// Runs `body` and says what it took. Exact only while nothing else of the process allocates.
pub fn watch(body: impl FnOnce()) -> Taken {
    watch_in(None, body)
}

/// The same for the process with this number, if there is one, whose allocations nobody counts.
pub fn watch_in(process: Option<u32>, body: impl FnOnce()) -> Taken {
    let counts = IN_USE.load(Ordering::Relaxed) == 1 && process.is_none();
    let name = process.map_or_else(|| "self".to_owned(), |id| id.to_string());
    let resident = || resident_of(&name);
    let before = resident();
    // A peak that cannot be reset is no signal: what is resident at the end remains one.
    let resets = std::fs::write(format!("/proc/{name}/clear_refs"), "5").is_ok();
    let live = LIVE.load(Ordering::Relaxed);
    PEAK.store(live, Ordering::Relaxed);
    body();
    let above = |now: i64| u64::try_from(now - live).unwrap_or(0);
    let counted = |bytes: i64| counts.then(|| above(bytes));
    let grown = |now: Option<u64>| now.zip(before).map(|(now, before)| now.saturating_sub(before));
    let left = grown(resident());
    Taken {
        allocated_peak: counted(PEAK.load(Ordering::Relaxed)),
        allocated_left: counted(LIVE.load(Ordering::Relaxed)),
        resident_peak: if resets { grown(field_of(&name, "VmHWM:")) } else { left },
        resident_left: left,
    }
}

/// Has this process keep what it frees, for its next case: cases take and free buffers of megabytes by the
/// thousand, and where pages are slow to be had, a sixth of their time went into having them again (two cores of
/// a Zen 3). What is resident is told without what is kept.
pub fn keep() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: numbers of the allocator, which it takes at any time.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 256 << 20);
    }
}

/// Gives the system what is free.
fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the allocator's own, at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Resident bytes of this process; `None` where the system does not say.
pub fn resident() -> Option<u64> {
    resident_of("self")
}

/// Resident bytes of the process with this id, or of this one, `self`, which keeps nothing from then on that is
/// free.
pub(crate) fn resident_of(process: &str) -> Option<u64> {
    if process == "self" {
        give_back();
    }
    field_of(process, "VmRSS:")
}

/// Resident bytes of it and of all that it started: a library may be in a process of its own.
pub(crate) fn resident_of_all(process: &str) -> Option<u64> {
    let own = resident_of(process)?;
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let children = threads.filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
    let of = |text: String| text.split_whitespace().filter_map(resident_of_all).sum::<u64>();
    Some(own + children.map(of).sum::<u64>())
}

fn field_of(process: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_block_is_seen_while_it_lives_and_when_it_stays() {
        const BYTES: usize = 64 << 20;
        let mut kept = Vec::new();
        let taken = watch(|| kept = vec![1u8; BYTES]);
        // Where the system reports memory at all, most of the block is there; other tests run beside this
        // one.
        assert!(taken.resident_left.is_none_or(|b| b > BYTES as u64 / 2), "{taken:?}");
        drop(kept);
        let taken = watch(|| drop(std::hint::black_box(vec![1u8; BYTES])));
        let resets = std::fs::write("/proc/self/clear_refs", "5").is_ok();
        assert!(!resets || taken.resident_peak.is_none_or(|b| b > BYTES as u64 / 2), "{taken:?}");
    }
}
