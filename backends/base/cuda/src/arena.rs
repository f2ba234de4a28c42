//! Memory of weights and tables side by side: the driver rounds a block of its own up to 2 MiB.
//!
//! One range of addresses a device, as long as its memory. Pages are mapped where something lies and given
//! back when nothing does.
use crate::{check, driver};
use q4_core::{Code, Device, Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;

/// Bytes between places.
const ALIGNMENT: usize = 256;

/// Places in one range of addresses of a device.
pub(crate) struct Arena {
    device: Device,
    base: u64,
    page: usize,
    properties: driver::CUmemAllocationProp,
    space: Mutex<Space>,
}

// SAFETY: the properties hold no pointer anyone follows.
unsafe impl Send for Arena {}
// SAFETY: as above; the rest is behind a lock.
unsafe impl Sync for Arena {}

impl Arena {
    /// Reserves addresses for the `all` bytes of `device`, whose context is current; `None` where it does not
    /// let us map pages.
    pub fn new(device: Device, handle: driver::CUdevice, all: u64) -> Option<Self> {
        let which = driver::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        if !matches!(crate::libraries::attribute(handle, which), Ok(1)) {
            return None;
        }
        // SAFETY: all-zero is a valid value of it, meaning nothing special.
        let mut properties: driver::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = driver::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = location(handle);
        let (mut page, mut base) = (0, 0);
        let minimum = driver::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: a context is current; out pointers are valid.
        unsafe {
            check(driver::cuMemGetAllocationGranularity(&mut page, &properties, minimum), "page size")
                .ok()?;
            let bytes = (all as usize).next_multiple_of(page);
            check(driver::cuMemAddressReserve(&mut base, bytes, 0, 0, 0), "cuMemAddressReserve").ok()?;
            Some(Self { device, base, page, properties, space: Mutex::new(Space::new(bytes)) })
        }
    }

    /// The address of `len` bytes of unspecified content; the device's context is current.
    pub fn take(&self, len: usize) -> Result<u64> {
        let mut space = self.space.lock().unwrap_or_else(|e| e.into_inner());
        let place = space.take(len).ok_or_else(|| {
            Error::new(Code::OutOfMemory, format!("memory of {}", self.device)).need(format!("{len} bytes"))
        })?;
        for gap in space.unmapped(&place, self.page) {
            if let Err(e) = self.map(&gap) {
                self.give_back(&mut space, place);
                return Err(e);
            }
            space.pages.insert(gap.start, gap.end);
        }
        Ok(self.base + place.start as u64)
    }

    /// Frees what `take` gave; the context is current, and no work that uses it is under way.
    pub fn free(&self, at: u64, len: usize) {
        let start = (at - self.base) as usize;
        let mut space = self.space.lock().unwrap_or_else(|e| e.into_inner());
        self.give_back(&mut space, start..start + rounded(len));
    }

    fn give_back(&self, space: &mut Space, place: Range<usize>) {
        for page in space.give(place) {
            // SAFETY: mapped by `map`, exactly so; nothing lies there and no work is under way.
            unsafe { driver::cuMemUnmap(self.base + page.start as u64, page.len()) };
        }
    }

    fn map(&self, pages: &Range<usize>) -> Result<()> {
        let (at, len, mut handle) = (self.base + pages.start as u64, pages.len(), 0);
        let access = driver::CUmemAccessDesc {
            location: self.properties.location,
            flags: driver::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: a context is current; the range is ours and not mapped; out pointers are valid. The mapping
        // keeps the memory when its handle is gone.
        unsafe {
            check(driver::cuMemCreate(&mut handle, len, &self.properties, 0), "cuMemCreate")?;
            let mapped = check(driver::cuMemMap(at, len, 0, handle, 0), "cuMemMap");
            driver::cuMemRelease(handle);
            mapped?;
            check(driver::cuMemSetAccess(at, len, &access, 1), "cuMemSetAccess").inspect_err(|_| {
                driver::cuMemUnmap(at, len);
            })
        }
    }
}

fn location(id: driver::CUdevice) -> driver::CUmemLocation {
    driver::CUmemLocation { type_: driver::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE, id }
}

fn rounded(len: usize) -> usize {
    len.max(1).next_multiple_of(ALIGNMENT)
}

/// Which bytes are taken and which are mapped.
struct Space {
    /// Start and end of every hole; holes do not touch.
    holes: BTreeMap<usize, usize>,
    /// Start and end of every mapping.
    pages: BTreeMap<usize, usize>,
}

impl Space {
    fn new(bytes: usize) -> Self {
        Self { holes: BTreeMap::from([(0, bytes)]), pages: BTreeMap::new() }
    }

    /// The first hole's start that has room for `len` bytes.
    fn take(&mut self, len: usize) -> Option<Range<usize>> {
        let len = rounded(len);
        let (start, end) = self.holes.iter().map(|(s, e)| (*s, *e)).find(|(s, e)| e - s >= len)?;
        self.holes.remove(&start);
        if end > start + len {
            self.holes.insert(start + len, end);
        }
        Some(start..start + len)
    }

    /// Whole pages under `place` that are not mapped.
    fn unmapped(&self, place: &Range<usize>, page: usize) -> Vec<Range<usize>> {
        let (mut at, end) = (place.start / page * page, place.end.next_multiple_of(page));
        let mut gaps = Vec::new();
        // The mapping before may reach in.
        if let Some((_, before)) = self.pages.range(..=at).next_back() {
            at = at.max(*before).min(end);
        }
        for (start, next) in self.pages.range(at..end) {
            if *start > at {
                gaps.push(at..*start);
            }
            at = *next;
        }
        if at < end {
            gaps.push(at..end);
        }
        gaps
    }

    /// Makes `place` a hole; the mappings in which nothing lies any more, which are forgotten.
    fn give(&mut self, place: Range<usize>) -> Vec<Range<usize>> {
        let (mut start, mut end) = (place.start, place.end);
        if let Some((s, _)) = self.holes.range(..start).next_back().filter(|(_, e)| **e == start) {
            start = *s;
        }
        if let Some(e) = self.holes.remove(&end) {
            end = e;
        }
        self.holes.insert(start, end);
        let empty: Vec<_> =
            self.pages.range(start..end).filter(|(_, e)| **e <= end).map(|(s, e)| *s..*e).collect();
        for page in &empty {
            self.pages.remove(&page.start);
        }
        empty
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    /// Takes `len` bytes and maps what is missing, as `Arena::take` does.
    fn take(s: &mut Space, len: usize) -> (Range<usize>, usize) {
        let place = s.take(len).unwrap();
        let gaps = s.unmapped(&place, PAGE);
        for gap in &gaps {
            assert_eq!((gap.start % PAGE, gap.end % PAGE), (0, 0));
            s.pages.insert(gap.start, gap.end);
        }
        (place, gaps.iter().map(Range::len).sum())
    }

    #[test]
    fn neighbours_share_pages() {
        let mut s = Space::new(10 * PAGE);
        assert_eq!(take(&mut s, 5000), (0..5120, 2 * PAGE));
        assert_eq!(take(&mut s, 3000), (5120..8192, 0));
        assert_eq!(take(&mut s, 1), (8192..8448, PAGE));
        assert_eq!(s.take(10 * PAGE), None);
        assert_eq!(s.give(5120..8192), [], "both pages still have a neighbour");
        assert_eq!(take(&mut s, 2000), (5120..7168, 0), "the first hole with room");
        assert_eq!(s.give(0..5120), []);
        assert_eq!(s.give(5120..7168).as_slice(), std::slice::from_ref(&(0..8192)));
        assert_eq!(s.give(8192..8448).as_slice(), std::slice::from_ref(&(8192..12288)));
        assert_eq!((s.holes, s.pages), (BTreeMap::from([(0, 10 * PAGE)]), BTreeMap::new()));
    }

    #[test]
    fn what_is_taken_never_overlaps_and_is_mapped() {
        let (mut s, mut taken, mut seed) = (Space::new(1 << 20), Vec::<Range<usize>>::new(), 1u64);
        for _ in 0..2000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let pick = (seed >> 33) as usize;
            if pick % 3 == 0 && !taken.is_empty() {
                let gone = taken.swap_remove(pick % taken.len());
                for page in s.give(gone) {
                    assert!(taken.iter().all(|t| t.end <= page.start || page.end <= t.start));
                }
            } else if let Some(place) = s.take(pick % 20_000) {
                for gap in s.unmapped(&place, PAGE) {
                    assert!(s.pages.iter().all(|(a, b)| *b <= gap.start || gap.end <= *a));
                    s.pages.insert(gap.start, gap.end);
                }
                assert!(taken.iter().all(|t| t.end <= place.start || place.end <= t.start));
                assert!(s.unmapped(&place, PAGE).is_empty());
                taken.push(place);
            }
        }
    }
}
