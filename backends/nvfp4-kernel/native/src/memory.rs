//! Memory of packed weights. A backend packs them side by side on huge pages: a product of a small model is
//! smaller than one such page, and page walks would be a tenth of its time.
use q4_core::pages::{HUGE_PAGE, advise_huge};
use q4_core::{Code, Error, Result};
use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// What is reserved at once; pages that no weight reaches are never touched.
const CHUNK: usize = 16 * HUGE_PAGE;
/// A cache line.
const LINE: usize = 64;

/// Where the weights of a backend are put. A chunk is freed with the last weight in it; the one that is being
/// filled starts anew.
#[derive(Default)]
pub struct Arena {
    current: Mutex<Option<(Arc<Chunk>, usize)>>,
}

impl Arena {
    /// Uninitialised bytes, cache-line aligned.
    pub fn take(&self, bytes: usize) -> Result<Packed> {
        if bytes > CHUNK / 2 {
            return Packed::alone(bytes);
        }
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((chunk, used)) = &mut *current
            && Arc::get_mut(chunk).is_some()
        {
            // Nobody else has it: its weights are gone, and what read them is done.
            *used = 0;
        }
        let (chunk, used) = match current.take() {
            Some((chunk, used)) if used + bytes <= CHUNK => (chunk, used),
            _ => (Arc::new(Chunk::new(CHUNK)?), 0),
        };
        // SAFETY: at most the size of the chunk.
        let at = unsafe { chunk.at.add(used) };
        *current = Some((chunk.clone(), (used + bytes).next_multiple_of(LINE)));
        Ok(Packed { at, bytes, _owner: chunk })
    }
}

/// Bytes that are written once, while a weight is built, and then only read.
pub struct Packed {
    at: NonNull<u8>,
    bytes: usize,
    _owner: Arc<Chunk>,
}

// SAFETY: plain bytes that no other `Packed` has; shared references only read.
unsafe impl Send for Packed {}
// SAFETY: as above.
unsafe impl Sync for Packed {}

impl Packed {
    /// Uninitialised bytes of their own, cache-line aligned.
    pub fn alone(bytes: usize) -> Result<Self> {
        let chunk = Arc::new(Chunk::new(bytes)?);
        Ok(Self { at: chunk.at, bytes, _owner: chunk })
    }
    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }
    /// How many.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// One allocation.
struct Chunk {
    at: NonNull<u8>,
    layout: Layout,
}

// SAFETY: an address; who may use which bytes is said by `Packed`.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Uninitialised, on huge pages where it fills one.
    fn new(bytes: usize) -> Result<Self> {
        let none = || Error::new(Code::OutOfMemory, "packed weight").need(format!("{bytes} bytes"));
        let align = if bytes >= HUGE_PAGE { HUGE_PAGE } else { LINE };
        let layout = Layout::from_size_align(bytes, align).ok().filter(|l| l.size() > 0);
        let layout = layout.ok_or_else(none)?;
        // SAFETY: the size is not zero.
        let at = NonNull::new(unsafe { alloc(layout) }).ok_or_else(none)?;
        if align == HUGE_PAGE {
            advise_huge(at.as_ptr().addr(), bytes);
        }
        Ok(Self { at, layout })
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.at.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_released_is_used_again() {
        let arena = Arena::default();
        let first = arena.take(1000).expect("memory").as_ptr();
        let kept = arena.take(1000).expect("memory");
        assert_eq!(kept.as_ptr(), first, "nothing was left in the chunk");
        let second = arena.take(1000).expect("memory").as_ptr();
        assert_ne!(second, first, "one weight is alive");
        drop(kept);
        assert_eq!(arena.take(CHUNK / 2).expect("memory").as_ptr(), first);
    }

    #[test]
    fn weights_never_share_a_byte_and_outlive_their_arena() {
        let arena = Arena::default();
        let sizes = [1, 64, 576, 3 * HUGE_PAGE + 5, CHUNK / 2, CHUNK / 2, CHUNK / 2 + 1, 77];
        let all: Vec<_> = sizes.iter().map(|&s| arena.take(s).expect("memory")).collect();
        drop(arena);
        for (p, size) in all.iter().zip(sizes) {
            assert_eq!((p.bytes(), p.as_ptr().addr() % LINE), (size, 0));
            // SAFETY: the first and last byte are inside.
            unsafe { (p.as_ptr().write(1), p.as_ptr().add(size - 1).write(1)) };
        }
        let mut ranges: Vec<_> = all.iter().map(|p| (p.as_ptr().addr(), p.bytes())).collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "{ranges:?}");
        assert!(Packed::alone(0).is_err() && Packed::alone(usize::MAX).is_err());
    }
}
