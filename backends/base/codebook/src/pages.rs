//! Memory of packed weights: zeroed pages straight from the system, huge ones where they fill one. Nothing is
//! written before the packing itself writes it, so its threads share the cost of the first touch.
use bytemuck::Pod;
use memmap2::{MmapMut, MmapOptions};
use q4_core::pages::{HUGE_PAGE, advise_huge};
use q4_core::{Code, Error, Result};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// A zeroed slice.
pub(crate) struct Pages<T> {
    map: MmapMut,
    start: usize,
    bytes: usize,
    _items: PhantomData<T>,
}

impl<T: Pod> Pages<T> {
    /// `len` zeroes, at least one.
    pub fn zeroed(len: usize) -> Result<Self> {
        let no_memory = |have: String| {
            Error::new(Code::OutOfMemory, "packed weight").need(format!("{len} lines")).have(have)
        };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| no_memory("an overflow".into()))?;
        let slack = if bytes >= HUGE_PAGE { HUGE_PAGE } else { 0 };
        let map = MmapOptions::new().len(bytes.saturating_add(slack)).map_anon();
        let map = map.map_err(|e| no_memory(e.to_string()))?;
        let start = if slack > 0 { map.as_ptr().align_offset(HUGE_PAGE) } else { 0 };
        if slack > 0 {
            advise_huge(map.as_ptr().addr() + start, bytes);
        }
        Ok(Self { map, start, bytes, _items: PhantomData })
    }
}

impl<T: Pod> Deref for Pages<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.map[self.start..][..self.bytes])
    }
}

impl<T: Pod> DerefMut for Pages<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.map[self.start..][..self.bytes])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prepare::Line;

    #[test]
    fn pages_of_any_size_are_zeroed_and_writable() -> Result<()> {
        for len in [1, 7, HUGE_PAGE / 64 - 1, HUGE_PAGE / 64, HUGE_PAGE / 64 + 1] {
            let mut pages = Pages::<Line<u32>>::zeroed(len)?;
            assert!(pages.len() == len && pages.iter().all(|l| l.0 == [0; 16]), "{len}");
            pages[len - 1].0[15] = 7;
            assert_eq!(pages[len - 1].0[15], 7);
        }
        assert!(Pages::<Line<u32>>::zeroed(usize::MAX / 64).is_err());
        Ok(())
    }
}
