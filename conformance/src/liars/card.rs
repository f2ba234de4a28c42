//! A device of the correct backend: memory of the host under another name, which calls are told addresses of
//! and copies go to and from.
use q4_core::device::{DeviceBytes, DeviceMemory};
use q4_core::{Device, Result, VendorDevice};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What of the memory of a device can be exchanged.
#[derive(Clone, Copy)]
pub(super) struct CardParts {
    /// How many of so many bytes are copied there.
    pub upload: fn(usize) -> usize,
    /// From where, and how many, bytes are copied back, of so many from a place on.
    pub download: fn(usize, usize) -> (usize, usize),
    /// An allocation lies where the one before it does, if that is long enough.
    pub shares: bool,
    /// What is given back does not become free.
    pub leaks: bool,
    /// A dense copy of a weight is kept there.
    pub copies: bool,
    /// A product writes the byte behind y.
    pub writes_on: bool,
    /// A product writes to x.
    pub spoils: bool,
    /// A product writes to the offsets of a group.
    pub bends: bool,
}

/// Nothing exchanged.
pub(super) const RIGHT: CardParts = CardParts {
    upload: |count| count,
    download: |at, count| (at, count),
    shares: false,
    leaks: false,
    copies: false,
    writes_on: false,
    spoils: false,
    bends: false,
};

/// Bytes that the device has.
const ALL: u64 = 1 << 34;
/// What allocations are a multiple of.
const ALIGN: usize = 256;

/// The device.
pub(super) struct Card {
    pub parts: CardParts,
    /// Its backend.
    name: String,
    used: AtomicU64,
    last: Mutex<Weak<Block>>,
}

/// Words of the host, as long as somebody has them.
struct Block(Mutex<Vec<u128>>);

/// So many bytes that are not free. A weight is kept elsewhere and takes no more than that.
pub(super) struct Room {
    card: Arc<Card>,
    len: usize,
}

/// An allocation.
struct Bytes {
    room: Room,
    block: Arc<Block>,
}

impl Card {
    pub fn new(name: &str, parts: CardParts) -> Arc<Self> {
        Arc::new(Self { parts, name: name.to_owned(), used: AtomicU64::new(0), last: Mutex::default() })
    }
    pub fn device(&self) -> Device {
        Device::vendor(&self.name, 0)
    }
    pub fn facts(&self) -> VendorDevice {
        let name = "memory of the host".to_owned();
        VendorDevice { device: self.device(), fingerprint: name.clone(), name, memory: ALL }
    }
    pub fn reserve(self: &Arc<Self>, len: usize) -> Room {
        self.used.fetch_add(len as u64, Ordering::Relaxed);
        Room { card: self.clone(), len }
    }
    fn alloc(self: &Arc<Self>, len: usize) -> Bytes {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let before = last.upgrade().filter(|b| self.parts.shares && b.len() >= len + ALIGN);
        let block = before.unwrap_or_else(|| {
            let room = if self.parts.shares { len.max(1 << 20) } else { len };
            Arc::new(Block(Mutex::new(vec![0; (room + ALIGN).div_ceil(16)])))
        });
        *last = Arc::downgrade(&block);
        Bytes { room: self.reserve(len), block }
    }
}

impl Block {
    fn len(&self) -> usize {
        16 * self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
    /// The first byte at a multiple of [`ALIGN`], which stays where it is.
    fn start(&self) -> *mut u8 {
        let mut words = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let first = words.as_mut_ptr().cast::<u8>();
        first.wrapping_add(first.align_offset(ALIGN))
    }
}

/// The memory of the card, as the suite is given it.
pub(super) struct Memory(pub Arc<Card>);

impl DeviceMemory for Memory {
    fn alloc(&self, len: usize) -> Result<Box<dyn DeviceBytes>> {
        Ok(Box::new(self.0.alloc(len)))
    }
    fn stream(&self) -> usize {
        0
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn free(&self) -> Result<u64> {
        Ok(ALL.saturating_sub(self.0.used.load(Ordering::Relaxed)))
    }
}

impl DeviceBytes for Bytes {
    fn address(&self) -> u64 {
        self.block.start().addr() as u64
    }
    fn upload(&self, at: usize, data: &[u8]) -> Result<()> {
        let count = (self.room.card.parts.upload)(data.len());
        assert!(at + count <= self.room.len && count <= data.len());
        // SAFETY: `len` bytes are ours, and no product runs meanwhile.
        unsafe { self.block.start().add(at).copy_from_nonoverlapping(data.as_ptr(), count) };
        Ok(())
    }
    fn download(&self, at: usize, out: &mut [u8]) -> Result<()> {
        let (at, count) = (self.room.card.parts.download)(at, out.len());
        assert!(at + count <= self.room.len && count <= out.len());
        // SAFETY: as above.
        unsafe { self.block.start().add(at).copy_to_nonoverlapping(out.as_mut_ptr(), count) };
        Ok(())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if !self.card.parts.leaks {
            self.card.used.fetch_sub(self.len as u64, Ordering::Relaxed);
        }
    }
}
