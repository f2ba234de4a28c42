//! Devices that a library brings, and their memory: what it says is compared with what it said before, what
//! it hands out with what it has handed out, and with the program's own memory.
use crate::instance::Instance;
use q4_core::device::{DeviceBytes, DeviceMemory};
use q4_core::{Code, Device, Error, Reject, RejectCode, Result, VendorDevice};
use q4_plugin_abi::{Q4Device, Q4Str, status};
use q4_plugin_sdk::message;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

/// Devices that one library may have.
const MOST: u32 = 64;
/// Longest name and fingerprint.
const MAX_TEXT: usize = 256;
/// What allocations are a multiple of.
const ALIGN: u64 = 256;
/// Bytes of a call's stack that no device memory may be in.
const STACK: u64 = 1 << 16;

/// A device as it says it is now, and bytes that are free there; `None` from the first number on that is
/// none.
pub(crate) fn ask(i: &Instance, device: u32) -> Result<Option<(VendorDevice, u64)>> {
    let Some(entry) = i.table.api.device else { return Ok(None) };
    let none = Q4Str { ptr: ptr::null(), len: 0 };
    let struct_size = size_of::<Q4Device>();
    let mut raw = Q4Device { struct_size, name: none, fingerprint: none, memory_bytes: 0, free_bytes: 0 };
    let mut ended = false;
    i.call("device", |err| {
        // SAFETY: a live backend, and a structure that states its size.
        let status = unsafe { entry(i.raw, device, &mut raw, err) };
        ended = status == status::UNSUPPORTED;
        if ended { status::OK } else { status }
    })?;
    if ended {
        return Ok(None);
    }
    // SAFETY: texts of the library, which live as long as its backend.
    let [name, fingerprint] = [raw.name, raw.fingerprint].map(|t| unsafe { message::text(t, MAX_TEXT) });
    let is_line =
        |t: &str| !t.is_empty() && !t.chars().any(|c| c.is_control() || c == char::REPLACEMENT_CHARACTER);
    let fits = raw.name.len <= MAX_TEXT && raw.fingerprint.len <= MAX_TEXT;
    if !fits || !is_line(&name) || !is_line(&fingerprint) || raw.free_bytes > raw.memory_bytes {
        return Err(Error::new(Code::BackendFailed, format!("device {device}"))
            .need(format!(
                "a name and a fingerprint of 1 to {MAX_TEXT} bytes, and no more free than there is"
            ))
            .have(format!(
                "`{}`, `{}`, {} of {} bytes",
                name.escape_debug(),
                fingerprint.escape_debug(),
                raw.free_bytes,
                raw.memory_bytes
            )));
    }
    let (name, fingerprint) = (name.into_owned(), fingerprint.into_owned());
    let facts =
        VendorDevice { device: Device::vendor(&i.name, device), name, fingerprint, memory: raw.memory_bytes };
    Ok(Some((facts, raw.free_bytes)))
}

/// Every device of a library that has just been created.
pub(crate) fn all(i: &Instance) -> std::result::Result<Vec<VendorDevice>, Reject> {
    let refuse = |have: String| {
        Reject::new(RejectCode::DeviceAbsent, format!("at most {MOST} devices that say what they are"), have)
    };
    let mut found = Vec::new();
    for device in 0..=MOST {
        match ask(i, device) {
            Ok(Some((facts, _))) => found.push(facts),
            Ok(None) => return Ok(found),
            Err(e) => return Err(refuse(message::line(&e))),
        }
    }
    Err(refuse("more".into()))
}

/// Memory of one of them.
pub(crate) struct Memory {
    pub instance: Arc<Instance>,
    pub device: u32,
    /// As it was when the library was loaded.
    pub facts: VendorDevice,
}

impl Memory {
    fn wrong(&self, what: &str, need: impl Into<String>, have: String) -> Error {
        Error::new(Code::BackendFailed, format!("{}: {what}", self.facts.device)).need(need).have(have)
    }
}

impl DeviceMemory for Memory {
    fn alloc(&self, len: usize) -> Result<Box<dyn DeviceBytes>> {
        let i = &self.instance;
        let Some(alloc) = i.table.api.device_alloc else { return Err(i.lacks("device_alloc")) };
        let mut at: *mut c_void = ptr::null_mut();
        let len = len.max(1) as u64;
        crate::remote::uncounted(|| {
            // SAFETY: a live backend and a place for an address.
            i.call("device_alloc", |err| unsafe { alloc(i.raw, self.device, len, &mut at, err) })
        })?;
        let address = at.addr() as u64;
        let end = address.checked_add(len).filter(|_| address != 0 && address % ALIGN == 0);
        let Some(end) = end else {
            let need = format!("{len} bytes at a multiple of {ALIGN} that is not 0");
            return Err(self.wrong("device_alloc", need, format!("{address:#x}")));
        };
        let here = (&raw const at).addr() as u64;
        if address < here.saturating_add(STACK) && here.saturating_sub(STACK) < end {
            let have = format!("{address:#x}, on the stack of the call");
            return Err(self.wrong("device_alloc", "memory of the device", have));
        }
        if let Some(other) = i.live.within(self.device, &(address..end)) {
            let have = format!("{address:#x}..{end:#x}, of which {other:#x?} is in use");
            return Err(self.wrong("device_alloc", "memory that nobody else has", have));
        }
        i.live.lock().insert((self.device, address), len);
        let memory = Self { instance: i.clone(), device: self.device, facts: self.facts.clone() };
        Ok(Box::new(Bytes { memory, address, len }))
    }

    fn stream(&self) -> usize {
        0
    }

    fn synchronize(&self) -> Result<()> {
        let i = &self.instance;
        let Some(synchronize) = i.table.api.synchronize else { return Err(i.lacks("synchronize")) };
        crate::remote::uncounted(|| {
            // SAFETY: a live backend.
            i.call("synchronize", |err| unsafe { synchronize(i.raw, self.device, err) })
        })
    }

    fn free(&self) -> Result<u64> {
        match ask(&self.instance, self.device)? {
            Some((now, free)) if now == self.facts => Ok(free),
            Some((now, _)) => {
                let said =
                    |d: &VendorDevice| format!("`{}`, `{}`, {} bytes", d.name, d.fingerprint, d.memory);
                Err(self.wrong("device", said(&self.facts), said(&now)))
            }
            None => Err(self.wrong("device", "the device that was there", "none".into())),
        }
    }
}

/// An allocation.
struct Bytes {
    memory: Memory,
    address: u64,
    len: u64,
}

impl Bytes {
    /// Address of byte `at`, for a copy of as many bytes as `host` has.
    fn place(&self, at: usize, host: &[u8]) -> Result<*mut c_void> {
        let end = (at as u64).checked_add(host.len() as u64).filter(|end| *end <= self.len);
        if end.is_none() {
            let have = format!("{} bytes from byte {at} on", host.len());
            return Err(self.memory.wrong("copy", format!("at most {} bytes", self.len), have));
        }
        let range = host.as_ptr().addr() as u64..(host.as_ptr().addr() + host.len()) as u64;
        if let Some(device) = self.memory.instance.live.within(self.memory.device, &range) {
            let have = format!("{device:#x?}, where the program has {range:#x?}");
            return Err(self.memory.wrong("device_alloc", "memory of the device", have));
        }
        Ok(ptr::without_provenance_mut(self.address as usize + at))
    }
}

impl DeviceBytes for Bytes {
    fn address(&self) -> u64 {
        self.address
    }

    fn upload(&self, at: usize, data: &[u8]) -> Result<()> {
        let (i, device) = (&self.memory.instance, self.memory.device);
        let Some(copy) = i.table.api.copy_in else { return Err(i.lacks("copy_in")) };
        let (to, from, len) = (self.place(at, data)?, data.as_ptr().cast(), data.len() as u64);
        crate::remote::uncounted(|| {
            // SAFETY: a live backend, bytes of an allocation of its own, and as many of ours.
            i.call("copy_in", |err| unsafe { copy(i.raw, device, to, from, len, err) })
        })
    }

    fn download(&self, at: usize, out: &mut [u8]) -> Result<()> {
        let (i, device) = (&self.memory.instance, self.memory.device);
        let Some(copy) = i.table.api.copy_out else { return Err(i.lacks("copy_out")) };
        let from = self.place(at, out)?.cast_const();
        let (to, len) = (out.as_mut_ptr().cast(), out.len() as u64);
        crate::remote::uncounted(|| {
            // SAFETY: as above; those of ours are writable.
            i.call("copy_out", |err| unsafe { copy(i.raw, device, to, from, len, err) })
        })
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        let (i, device) = (&self.memory.instance, self.memory.device);
        i.live.lock().remove(&(device, self.address));
        if let Some(free) = i.table.api.device_free {
            let at = ptr::without_provenance_mut(self.address as usize);
            let done = crate::remote::uncounted(|| {
                // SAFETY: what `device_alloc` gave, once. Who cannot take it back has less, and shows it.
                i.call("device_free", |err| unsafe { free(i.raw, device, at, err) })
            });
            if let Err(e) = done {
                tracing::warn!(error = %message::line(&e), "memory of a device was not taken back");
            }
        }
    }
}
