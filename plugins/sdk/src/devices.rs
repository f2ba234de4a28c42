//! Memory of a backend's own devices behind the C table: allocations by address, so that a program may name
//! any byte of one.
use crate::borrow;
use q4_core::device::{DeviceBytes, DeviceMemory};
use q4_core::{Code, Error, Q4Backend, Result, VendorDevice};
use q4_plugin_abi::{Q4Device, Q4Str};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard};

/// The devices of one backend, and what programs have allocated there.
pub(crate) struct Devices {
    all: Vec<VendorDevice>,
    live: Mutex<BTreeMap<(u32, u64), Arc<Allocation>>>,
}

struct Allocation {
    bytes: Box<dyn DeviceBytes>,
    len: u64,
}

impl Devices {
    pub fn of(backend: &dyn Q4Backend) -> Self {
        Self { all: backend.devices(), live: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(u32, u64), Arc<Allocation>>> {
        self.live.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn memory(&self, backend: &dyn Q4Backend, id: u32) -> Result<(&VendorDevice, Arc<dyn DeviceMemory>)> {
        let facts = self.all.get(id as usize).ok_or_else(|| {
            Error::new(Code::Unsupported, "device")
                .need(format!("one of {}", self.all.len()))
                .have(id.to_string())
        })?;
        Ok((facts, backend.memory(facts.device)?))
    }

    /// Answers `device`.
    ///
    /// # Safety
    /// `out` is as the contract says.
    pub unsafe fn tell(&self, backend: &dyn Q4Backend, id: u32, out: *mut Q4Device) -> Result<()> {
        // SAFETY: forwarded to the caller.
        let given = unsafe { borrow::read(out, "place for a device") }?;
        let (facts, memory) = self.memory(backend, id)?;
        let told = Q4Device {
            struct_size: given.struct_size,
            name: Q4Str::new(&facts.name),
            fingerprint: Q4Str::new(&facts.fingerprint),
            memory_bytes: facts.memory,
            free_bytes: memory.free()?,
        };
        // SAFETY: `read` found all fields of the first version, and those are all there are.
        unsafe { *out = told };
        Ok(())
    }

    /// Answers `device_alloc`.
    pub fn alloc(&self, backend: &dyn Q4Backend, id: u32, len: u64) -> Result<u64> {
        let (_, memory) = self.memory(backend, id)?;
        let wanted = usize::try_from(len).ok().filter(|len| *len as u64 <= memory.free().unwrap_or(0));
        let bytes = memory.alloc(wanted.ok_or_else(|| {
            Error::new(Code::OutOfMemory, "memory of a device").need(format!("{len} bytes"))
        })?)?;
        let at = bytes.address();
        self.lock().insert((id, at), Arc::new(Allocation { bytes, len }));
        Ok(at)
    }

    /// Answers `device_free`.
    pub fn free(&self, id: u32, at: *mut c_void) -> Result<()> {
        let gone = self.lock().remove(&(id, at.addr() as u64));
        gone.map(drop).ok_or_else(|| unknown(at.addr(), 0))
    }

    /// The allocation with `len` bytes from an address on, and how far from its start that is.
    fn find(&self, id: u32, address: usize, len: u64) -> Result<(Arc<Allocation>, usize)> {
        let live = self.lock();
        let before = live.range((id, 0)..=(id, address as u64)).next_back();
        let (&(_, start), found) = before.ok_or_else(|| unknown(address, len))?;
        let at = address as u64 - start;
        let fits = at.checked_add(len).is_some_and(|end| end <= found.len);
        if fits { Ok((found.clone(), at as usize)) } else { Err(unknown(address, len)) }
    }

    /// Answers `copy_in`.
    ///
    /// # Safety
    /// `from` has `len` readable bytes.
    pub unsafe fn copy_in(&self, id: u32, to: *mut c_void, from: *const c_void, len: u64) -> Result<()> {
        let (found, at) = self.find(id, to.addr(), len)?;
        // SAFETY: forwarded to the caller; no allocation is longer than an address can say.
        found.bytes.upload(at, unsafe { std::slice::from_raw_parts(from.cast(), len as usize) })
    }

    /// Answers `copy_out`.
    ///
    /// # Safety
    /// `to` has `len` writable bytes that nobody else uses.
    pub unsafe fn copy_out(&self, id: u32, to: *mut c_void, from: *const c_void, len: u64) -> Result<()> {
        let (found, at) = self.find(id, from.addr(), len)?;
        // SAFETY: as above.
        found.bytes.download(at, unsafe { std::slice::from_raw_parts_mut(to.cast(), len as usize) })
    }

    /// Answers `synchronize`.
    pub fn synchronize(&self, backend: &dyn Q4Backend, id: u32) -> Result<()> {
        self.memory(backend, id)?.1.synchronize()
    }
}

fn unknown(address: usize, len: u64) -> Error {
    Error::new(Code::ShapeMismatch, "memory of a device")
        .need("bytes of one allocation")
        .have(format!("{len} bytes at {address:#x}"))
}
