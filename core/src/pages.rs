//! Large pages for memory that is read in long streams, where the system gives them.

/// Bytes of a page of the size that makes a difference to a stream of weights.
pub const HUGE_PAGE: usize = 2 << 20;

/// Asks for huge pages behind the `bytes` bytes from `address`; what fills none at either end is left out. A
/// hint: who refuses it, or has no such pages, costs speed and nothing else.
pub fn advise_huge(address: usize, bytes: usize) {
    let (first, end) = (address.next_multiple_of(HUGE_PAGE), address.saturating_add(bytes));
    let whole = end.saturating_sub(first) / HUGE_PAGE * HUGE_PAGE;
    if whole > 0 {
        system::advise_huge(first, whole);
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::ffi::c_int;

    pub fn advise_huge(address: usize, bytes: usize) {
        const MADV_HUGEPAGE: c_int = 14;
        unsafe extern "C" {
            fn madvise(address: usize, bytes: usize, advice: c_int) -> c_int;
        }
        // SAFETY: no byte of memory is read or written, whoever's it is.
        unsafe { madvise(address, bytes, MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub fn advise_huge(_: usize, _: usize) {}
}
