//! Whole pages between two that nobody may touch: who reads or writes beside them is ended by the system.
use std::ffi::c_void;

/// Some pages.
pub(crate) struct Pages {
    /// The one in front.
    base: *mut c_void,
    /// Bytes of all of them, the outer two included.
    len: usize,
    is_sealed: bool,
}

// SAFETY: a unique allocation.
unsafe impl Send for Pages {}
// SAFETY: shared only for reading.
unsafe impl Sync for Pages {}

impl Pages {
    /// At least `bytes` bytes.
    pub fn new(bytes: usize) -> Option<Self> {
        let page = system::page();
        let len = bytes.next_multiple_of(page) + 2 * page;
        let pages = Self { base: system::reserve(len)?, len, is_sealed: false };
        // SAFETY: pages of that range.
        unsafe { system::allow(pages.start().cast(), pages.inner(), true) }.then_some(pages)
    }
    fn start(&self) -> *mut u8 {
        // SAFETY: the range begins with a whole page.
        unsafe { self.base.cast::<u8>().add(system::page()) }
    }
    fn inner(&self) -> usize {
        self.len - 2 * system::page()
    }
    /// Bytes that may be read.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: readable pages of a range that lives as long as this.
        unsafe { std::slice::from_raw_parts(self.start(), self.inner()) }
    }
    /// Bytes that may be written; panics once they are sealed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(!self.is_sealed, "a buffer that is read-only by now");
        // SAFETY: as above, writable, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.inner()) }
    }
    /// Read-only from now on.
    pub fn seal(&mut self) {
        // SAFETY: pages of this range, which nobody writes from now on.
        self.is_sealed = unsafe { system::allow(self.start().cast(), self.inner(), false) };
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the whole range, and no borrow of it is left.
        unsafe { system::release(self.base, self.len) };
    }
}

#[cfg(unix)]
mod system {
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
    use std::ffi::c_void;

    pub fn page() -> usize {
        rustix::param::page_size()
    }

    /// Pages that nobody may touch.
    pub fn reserve(len: usize) -> Option<*mut c_void> {
        // SAFETY: a new mapping; nothing else is there.
        unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE) }.ok()
    }

    /// Lets them be read, and written if `write`; whether that could be had.
    ///
    /// # Safety
    /// Whole pages of a range of [`reserve`]; no reference is left to what may no longer be done.
    pub unsafe fn allow(at: *mut c_void, len: usize, write: bool) -> bool {
        let read = MprotectFlags::READ;
        // SAFETY: the caller's.
        unsafe { mprotect(at, len, if write { read | MprotectFlags::WRITE } else { read }) }.is_ok()
    }

    /// Gives a whole range back.
    ///
    /// # Safety
    /// As [`reserve`] gave it, and no reference to it is left.
    pub unsafe fn release(at: *mut c_void, len: usize) {
        // SAFETY: the caller's. What cannot be unmapped stays.
        let _ = unsafe { munmap(at, len) };
    }
}

#[cfg(windows)]
mod system {
    use std::ffi::c_void;

    #[link(name = "kernel32")]
    unsafe extern "system" {
        fn VirtualAlloc(at: *mut c_void, len: usize, kind: u32, protection: u32) -> *mut c_void;
        fn VirtualProtect(at: *mut c_void, len: usize, protection: u32, before: *mut u32) -> i32;
        fn VirtualFree(at: *mut c_void, len: usize, kind: u32) -> i32;
    }
    const MEM_COMMIT_RESERVE: u32 = 0x3000;
    const MEM_RELEASE: u32 = 0x8000;
    const PAGE_NOACCESS: u32 = 0x01;
    const PAGE_READONLY: u32 = 0x02;
    const PAGE_READWRITE: u32 = 0x04;

    /// Of every processor that Windows runs on.
    pub fn page() -> usize {
        4096
    }

    /// Pages that nobody may touch.
    pub fn reserve(len: usize) -> Option<*mut c_void> {
        // SAFETY: a new range; nothing else is there.
        let at = unsafe { VirtualAlloc(std::ptr::null_mut(), len, MEM_COMMIT_RESERVE, PAGE_NOACCESS) };
        (!at.is_null()).then_some(at)
    }

    /// Lets them be read, and written if `write`; whether that could be had.
    ///
    /// # Safety
    /// Whole pages of a range of [`reserve`]; no reference is left to what may no longer be done.
    pub unsafe fn allow(at: *mut c_void, len: usize, write: bool) -> bool {
        let (mut before, protection) = (0, if write { PAGE_READWRITE } else { PAGE_READONLY });
        // SAFETY: the caller's; the last argument is a place for a number.
        unsafe { VirtualProtect(at, len, protection, &raw mut before) != 0 }
    }

    /// Gives a whole range back.
    ///
    /// # Safety
    /// As [`reserve`] gave it, and no reference to it is left.
    pub unsafe fn release(at: *mut c_void, _: usize) {
        // SAFETY: the caller's. What cannot be freed stays.
        unsafe { VirtualFree(at, 0, MEM_RELEASE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_writable_until_they_are_sealed() {
        for bytes in [1, 4096, 70_000] {
            let mut pages = Pages::new(bytes).expect("memory");
            assert!(pages.bytes().len() >= bytes && pages.bytes().iter().all(|b| *b == 0));
            pages.bytes_mut().fill(7);
            pages.seal();
            assert!(pages.is_sealed && pages.bytes().iter().all(|b| *b == 7));
        }
    }
}
