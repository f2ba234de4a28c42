//! Checks of the memory of a library's own devices: what is copied there comes back, and nothing else moves.
use super::session::Backend;
use super::{Check, TableCases, expect, need};
use crate::calls::checked;
use q4_core::{Code, Error, Result};
use q4_plugin_abi::{Q4Device, Q4Status, Q4Str, status};
use q4_plugin_sdk::message;
use std::ffi::c_void;
use std::ptr;

pub(super) const CASES: [(&str, Check); 5] = [
    ("device-says-the-same", TableCases::device_says_the_same),
    ("device-memory-keeps-bytes", TableCases::device_memory_keeps_bytes),
    ("device-memory-is-apart", TableCases::device_memory_is_apart),
    ("device-memory-is-given-back", TableCases::device_memory_is_given_back),
    ("device-memory-ends", TableCases::device_memory_ends),
];

/// The device that the checks use.
const FIRST: u32 = 0;
/// What addresses are a multiple of.
const ALIGN: usize = 256;
/// Bytes of allocations: less and more than a word, a page and a copy engine's block, on no boundary.
const SIZES: [usize; 6] = [1, 3, 255, 4097, 65_521, 1_000_003];
/// Bytes around what a copy writes on the host.
const GUARD: usize = 64;

/// Facts of a device: name, fingerprint, bytes, and those that are free.
type Facts = (String, String, u64, u64);

impl Backend<'_> {
    /// Whether the library has a device of its own.
    pub fn has_device(&self) -> bool {
        matches!(self.device(FIRST), Ok(Some(_)))
    }

    fn device(&self, id: u32) -> Result<Option<Facts>> {
        let entry = need(self.table.api.device, "device")?;
        let none = Q4Str { ptr: ptr::null(), len: 0 };
        let struct_size = size_of::<Q4Device>();
        let mut raw = Q4Device { struct_size, name: none, fingerprint: none, memory_bytes: 0, free_bytes: 0 };
        // SAFETY: a live backend, and a structure that states its size; NULL is allowed.
        match unsafe { entry(self.raw, id, &mut raw, ptr::null_mut()) } {
            status::OK => {}
            status::UNSUPPORTED => return Ok(None),
            other => return Err(Error::new(Code::BackendFailed, "device").have(format!("status {other}"))),
        }
        // SAFETY: texts of the library, which live as long as its backend.
        let [name, fingerprint] =
            [raw.name, raw.fingerprint].map(|t| unsafe { message::text(t, 256) }.into_owned());
        Ok(Some((name, fingerprint, raw.memory_bytes, raw.free_bytes)))
    }

    fn first(&self) -> Result<Facts> {
        self.device(FIRST)?.ok_or_else(|| Error::new(Code::DeviceMissing, "device 0").have("none any more"))
    }

    /// Status, and the address that was written.
    fn try_alloc(&self, bytes: u64) -> Result<(Q4Status, *mut c_void)> {
        let (alloc, mut at) = (need(self.table.api.device_alloc, "device_alloc")?, ptr::null_mut());
        // SAFETY: a live backend and a place for an address.
        let code = unsafe { alloc(self.raw, FIRST, bytes, &mut at, ptr::null_mut()) };
        Ok((code, at))
    }

    pub fn alloc(&self, bytes: u64) -> Result<*mut c_void> {
        let (code, at) = self.try_alloc(bytes)?;
        let fits = code == status::OK && !at.is_null() && at.addr() % ALIGN == 0;
        expect("device_alloc", fits, &format!("{bytes} bytes at a multiple of {ALIGN}"), || {
            format!("status {code} and {at:p}")
        })?;
        Ok(at)
    }

    pub fn free(&self, at: *mut c_void) -> Result<()> {
        let free = need(self.table.api.device_free, "device_free")?;
        // SAFETY: what `device_alloc` gave, once.
        checked("device_free", |err| unsafe { free(self.raw, FIRST, at, err) }).map_err(|e| e.1)
    }

    pub fn copy_in(&self, to: *mut c_void, from: &[u8]) -> Result<()> {
        let (copy, len) = (need(self.table.api.copy_in, "copy_in")?, from.len() as u64);
        let from = from.as_ptr().cast();
        // SAFETY: bytes of an allocation, and as many of ours.
        checked("copy_in", |err| unsafe { copy(self.raw, FIRST, to, from, len, err) }).map_err(|e| e.1)
    }

    pub fn copy_out(&self, to: &mut [u8], from: *mut c_void) -> Result<()> {
        let (copy, len) = (need(self.table.api.copy_out, "copy_out")?, to.len() as u64);
        let to = to.as_mut_ptr().cast();
        // SAFETY: as above.
        checked("copy_out", |err| unsafe { copy(self.raw, FIRST, to, from, len, err) }).map_err(|e| e.1)
    }

    pub fn synchronize(&self) -> Result<()> {
        let wait = need(self.table.api.synchronize, "synchronize")?;
        // SAFETY: a live backend.
        checked("synchronize", |err| unsafe { wait(self.raw, FIRST, err) }).map_err(|e| e.1)
    }

    /// `len` bytes of the device, read between guards.
    fn read(&self, from: *mut c_void, len: usize) -> Result<Vec<u8>> {
        let mut room = vec![0xeeu8; len + 2 * GUARD];
        self.copy_out(&mut room[GUARD..GUARD + len], from)?;
        let is_kept = |b: &[u8]| b.iter().all(|b| *b == 0xee);
        let kept = is_kept(&room[..GUARD]) && is_kept(&room[GUARD + len..]);
        expect("copy_out", kept, &format!("{len} bytes of the host written"), || "others too".into())?;
        Ok(room[GUARD..GUARD + len].to_vec())
    }

    /// Fails unless the device has `want` there.
    fn holds(&self, what: &str, at: *mut c_void, want: &[u8]) -> Result<()> {
        let have = self.read(at, want.len())?;
        let first = have.iter().zip(want).position(|(a, b)| a != b);
        expect(what, first.is_none(), "the bytes that were copied there", || {
            let i = first.unwrap_or_default();
            format!("byte {i} of {}: {:#04x}, not {:#04x}", want.len(), have[i], want[i])
        })
    }
}

fn pattern(len: usize, salt: usize) -> Vec<u8> {
    (0..len).map(|i| ((i.wrapping_mul(167) + i / 251 + salt * 59) % 253) as u8).collect()
}

impl TableCases {
    fn device_says_the_same(&self) -> Result<()> {
        let backend = Backend::new(&self.table)?;
        let (name, fingerprint, memory, free) = backend.first()?;
        let is_told = !name.is_empty() && !fingerprint.is_empty() && free <= memory;
        expect("device", is_told, "a name, a fingerprint, and no more free than there is", || {
            format!("`{name}`, `{fingerprint}`, {free} of {memory} bytes")
        })?;
        let at = backend.alloc(1 << 16)?;
        let again = [backend.first(), Backend::new(&self.table)?.first()];
        backend.free(at)?;
        for now in again {
            let now = now?;
            let same = (&now.0, &now.1, now.2) == (&name, &fingerprint, memory);
            expect(
                "device asked again",
                same,
                &format!("`{name}`, `{fingerprint}`, {memory} bytes"),
                || format!("`{}`, `{}`, {} bytes", now.0, now.1, now.2),
            )?;
        }
        let last = (1..=64).find(|id| matches!(backend.device(*id), Ok(None)));
        let beyond = last.is_some() && matches!(backend.device(u32::MAX), Ok(None));
        expect("device past the last one", beyond, "Q4_E_UNSUPPORTED", || "a device, or another error".into())
    }

    /// Whole allocations, and any part of them.
    fn device_memory_keeps_bytes(&self) -> Result<()> {
        let backend = Backend::new(&self.table)?;
        for (salt, len) in SIZES.into_iter().enumerate() {
            let (at, mut want) = (backend.alloc(len as u64)?, pattern(len, salt));
            backend.copy_in(at, &want)?;
            backend.synchronize()?;
            backend.holds("what was copied to a device", at, &want)?;
            // A part in the middle; what lies around it stays.
            let (from, to) = (len / 3, len - len / 7);
            let part = pattern(to - from, salt + 100);
            want[from..to].copy_from_slice(&part);
            backend.copy_in(at.wrapping_byte_add(from), &part)?;
            backend.holds("a device after a part of it was written", at, &want)?;
            backend.holds("a part of a device", at.wrapping_byte_add(from), &part)?;
            let last = at.wrapping_byte_add(len - 1);
            backend.holds("the last byte of an allocation", last, &want[len - 1..])?;
            backend.free(at)?;
        }
        Ok(())
    }

    /// Many at once: none shares a byte with another one.
    fn device_memory_is_apart(&self) -> Result<()> {
        let backend = Backend::new(&self.table)?;
        let mut live: Vec<(*mut c_void, Vec<u8>)> = Vec::new();
        for round in 0..40 {
            let len = SIZES[round % 5];
            let at = backend.alloc(len as u64)?;
            let (start, end) = (at.addr(), at.addr() + len);
            let taken = live.iter().find(|(at, held)| at.addr() < end && start < at.addr() + held.len());
            expect("device_alloc", taken.is_none(), "memory that nobody has", || {
                format!("{at:p}, inside of an allocation that is in use")
            })?;
            let bytes = pattern(len, round);
            backend.copy_in(at, &bytes)?;
            live.push((at, bytes));
            if round % 3 == 2 {
                let (gone, _) = live.swap_remove(round % live.len());
                backend.free(gone)?;
            }
        }
        for (at, bytes) in &live {
            backend.holds("an allocation beside others", *at, bytes)?;
        }
        live.into_iter().try_for_each(|(at, _)| backend.free(at))
    }

    fn device_memory_is_given_back(&self) -> Result<()> {
        let backend = Backend::new(&self.table)?;
        let round = || backend.alloc(1 << 20).and_then(|at| backend.free(at));
        // What a first allocation sets up stays.
        round()?;
        let before = backend.first()?.3;
        (0..64).try_for_each(|_| round())?;
        let after = backend.first()?.3;
        expect(
            "64 allocations that were given back",
            after >= before,
            &format!("{before} bytes free"),
            || format!("{after} bytes free"),
        )?;
        let at = backend.alloc(1 << 20)?;
        let with = backend.first()?.3;
        backend.free(at)?;
        expect("free_bytes beside an allocation of 1 MiB", with < before, "less than before", || {
            format!("{before} bytes, then {with}")
        })
    }

    /// More than there is is refused, and what was there stays.
    fn device_memory_ends(&self) -> Result<()> {
        let backend = Backend::new(&self.table)?;
        let (at, bytes) = (backend.alloc(4097)?, pattern(4097, 7));
        backend.copy_in(at, &bytes)?;
        let memory = backend.first()?.2;
        for len in [memory.saturating_add(1), u64::MAX, u64::MAX - 255, 1 << 63] {
            let code = backend.try_alloc(len)?.0;
            expect(
                &format!("device_alloc of {len} bytes"),
                code == status::OUT_OF_MEMORY,
                "Q4_E_NOMEM",
                || format!("status {code}"),
            )?;
        }
        backend.holds("an allocation after others were refused", at, &bytes)?;
        backend.free(at)
    }
}
