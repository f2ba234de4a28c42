//! Memory that two processes see: the client writes operands there, the server lends them to the library.
//!
//! What a library only reads is sealed against every other mapping that could write, before its process knows
//! of it; around what it was lent are pages that nobody may touch.
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

/// Bytes that are never touched, before and behind what is lent.
const GUARD: usize = 1 << 16;

/// What operands keep of their address: kernels look at it.
pub const ALIGN: usize = 64;

/// Bytes of a page.
pub fn page() -> usize {
    rustix::param::page_size()
}

/// The client's side.
pub struct Shared {
    file: OwnedFd,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: an address of bytes that this value owns, as far as this process goes.
unsafe impl Send for Shared {}

impl Shared {
    /// At least `len` bytes of zeros; the other side may write there if it is `writable`.
    pub fn new(len: usize, writable: bool) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(page());
        let file = memfd_create("q4-operands", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping where the system likes; the file is as long and will stay so.
        let at = unsafe { mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, &file, 0) }?;
        let out = Self { at: NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?, file, len };
        let future = if writable { SealFlags::empty() } else { SealFlags::FUTURE_WRITE };
        fcntl_add_seals(&out.file, future | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        Ok(out)
    }
    pub fn len(&self) -> usize {
        self.len
    }
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
    /// Address of byte `at`, good for `len` more.
    fn at(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "{at} + {len} of {}", self.len);
        self.at.as_ptr().wrapping_add(at)
    }
    /// Writes `data` from byte `at` on.
    pub fn write(&mut self, at: usize, data: &[u8]) {
        // SAFETY: `at` checked the bounds; `data` is not in this mapping.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), self.at(at, data.len()), data.len()) }
    }
    /// Fills `len` bytes.
    pub fn fill(&mut self, at: usize, len: usize, value: u8) {
        // SAFETY: as above.
        unsafe { ptr::write_bytes(self.at(at, len), value, len) }
    }
    /// Copies from byte `at` on to `out`, once: the other side may go on writing.
    ///
    /// # Safety
    /// `out` has `len` writable bytes outside of this mapping.
    pub unsafe fn read(&self, at: usize, out: *mut u8, len: usize) {
        // SAFETY: bounds were checked, the rest is the caller's.
        unsafe { ptr::copy_nonoverlapping(self.at(at, len), out, len) }
    }
    /// The first byte from `at` on, of `len`, that is not `value`.
    pub fn other_than(&self, at: usize, len: usize, value: u8) -> Option<usize> {
        let first = self.at(at, len);
        // SAFETY: inside of the mapping; volatile, because the other side may write.
        (0..len).find(|i| unsafe { first.wrapping_add(*i).read_volatile() } != value).map(|i| at + i)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made; no reference to it is ever handed out.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.len) };
    }
}

/// Where `len` bytes go among `capacity`, `phase` bytes behind a multiple of [`ALIGN`]: as close to the end,
/// or to the start, as that allows. `None` when they do not fit.
pub fn place(capacity: usize, len: usize, phase: usize, at_end: bool) -> Option<usize> {
    let phase = phase % ALIGN;
    let last = capacity.checked_sub(len)?;
    let last = last.checked_sub((last + ALIGN - phase) % ALIGN)?;
    Some(if at_end { last } else { phase })
}

/// The server's side: pieces of a file between pages without any permission.
pub struct Lent {
    whole: NonNull<u8>,
    len: usize,
    first: usize,
}

// SAFETY: an address; whoever uses it knows what is there.
unsafe impl Send for Lent {}

impl Lent {
    /// Maps `pieces` of `file`, each a range of whole pages, at their distances.
    pub fn map(file: &OwnedFd, len: usize, pieces: &[(usize, usize)], writable: bool) -> io::Result<Self> {
        let have = File::from(file.try_clone()?).metadata()?.len();
        let fits =
            |&(at, n): &(usize, usize)| at % page() == 0 && at.checked_add(n).is_some_and(|e| e <= len);
        if len as u64 > have || !pieces.iter().all(fits) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let total = len.next_multiple_of(page()) + 2 * GUARD;
        // SAFETY: a reservation where the system likes.
        let whole = unsafe { mmap_anonymous(ptr::null_mut(), total, ProtFlags::empty(), MapFlags::PRIVATE) }?;
        let whole = NonNull::new(whole.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let out = Self { whole, len: total, first: GUARD };
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        for &(at, n) in pieces.iter().filter(|p| p.1 > 0) {
            let place = out.at(at).cast();
            // SAFETY: replaces pages of the reservation above, which nothing else uses.
            unsafe { mmap(place, n, prot, MapFlags::SHARED | MapFlags::FIXED, file, at as u64) }?;
        }
        Ok(out)
    }
    /// Address of a byte of the file.
    pub fn at(&self, at: usize) -> *mut u8 {
        self.whole.as_ptr().wrapping_add(self.first + at)
    }
    /// Bytes of the file.
    pub fn capacity(&self) -> usize {
        self.len - 2 * GUARD
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: the reservation that `map` made, with what it put there.
        let _ = unsafe { munmap(self.whole.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_keep_the_address_and_touch_an_edge() {
        for (len, phase) in [(1, 0), (100, 12), (4096, 0), (4000, 60)] {
            let (first, last) = (place(8192, len, phase, false), place(8192, len, phase, true));
            assert_eq!(first, Some(phase));
            let last = last.expect("fits");
            assert!(last % ALIGN == phase && last + len <= 8192 && last + len + ALIGN > 8192, "{last}");
        }
        assert_eq!(place(4096, 4097, 0, true), None);
    }

    #[test]
    fn what_is_lent_for_reading_cannot_be_mapped_for_writing() -> io::Result<()> {
        let mut shared = Shared::new(100, false)?;
        shared.write(10, &[1, 2, 3]);
        let file = shared.file().try_clone_to_owned()?;
        assert!(Lent::map(&file, shared.len(), &[(0, page())], true).is_err());
        assert!(Lent::map(&file, shared.len() + 1, &[], false).is_err());
        let lent = Lent::map(&file, shared.len(), &[(0, page())], false)?;
        // SAFETY: mapped for reading.
        assert_eq!(unsafe { lent.at(11).read() }, 2);
        assert_eq!(shared.other_than(0, 13, 0), Some(10));
        let mut back = [0; 3];
        // SAFETY: three bytes.
        unsafe { shared.read(10, back.as_mut_ptr(), 3) };
        assert_eq!(back, [1, 2, 3]);
        assert!(rustix::io::pwrite(&file, b"x", 0).is_err());
        Ok(())
    }
}
