//! What a process keeps of freed memory neither hides a leak nor looks like one. By itself and on the main
//! thread, where cases run: the allocator keeps memory for each thread, and other tests would give it back.

fn main() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    linux::what_is_kept_is_not_counted();
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod linux {
    use q4_conformance::memory::{keep, resident, watch};
    use std::hint::black_box;

    const BYTES: usize = 24 << 20;

    pub fn what_is_kept_is_not_counted() {
        keep();
        let before = resident().expect("Linux says");
        drop(block());
        let (kept, after) = (with_kept(), resident().expect("Linux says"));
        assert!(kept > before + BYTES as u64 / 2, "nothing is kept: {before}, {kept}");
        assert!(after < before + BYTES as u64 / 4, "what is free is counted: {before}, {after}");
        drop(block());
        let taken = watch(|| std::mem::forget(block()));
        assert!(taken.resident_left.is_some_and(|b| b > BYTES as u64 / 2), "a leak is hidden: {taken:?}");
        let taken = watch(|| drop(block()));
        assert!(taken.resident_left.is_some_and(|b| b < BYTES as u64 / 4), "a leak without one: {taken:?}");
        println!("what is kept is not counted: ok");
    }

    fn block() -> Vec<u8> {
        black_box(vec![1; BYTES])
    }

    /// As the system has it.
    fn with_kept() -> u64 {
        let text = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line of it");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
    }
}
