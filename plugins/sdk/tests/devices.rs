//! A backend's own devices behind the exported table: addresses with offsets, both directions, refusals.
#![allow(clippy::unwrap_used)]
use q4_core::device::{DeviceBytes, DeviceMemory};
use q4_core::{
    BackendDescriptor, Code, Device, Error, ExecContext, ExecPath, HostEnv, LinearSpec, PreparedWeight,
    ProbeItem, Q4Backend, Q4Weight, Result, VendorDevice, Verdict,
};
use q4_plugin_sdk::abi::{Q4BackendV1, Q4Device, Q4Interface, Q4Str, status};
use q4_plugin_sdk::message;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

const MEMORY: u64 = 1 << 20;

struct Card(BackendDescriptor, Arc<Room>);

/// Bytes that are taken, and the next address.
#[derive(Default)]
struct Room {
    taken: AtomicU64,
    next: AtomicU64,
}

q4_plugin_sdk::export_backend!(Card::new(), name = "card", version = "1", vendor = "tests");

impl Card {
    fn new() -> Self {
        let descriptor = BackendDescriptor {
            name: "card".into(),
            version: "1".into(),
            vendor: "tests".into(),
            priority: 0,
            offers: vec![("dense".into(), ExecPath::Reference)],
        };
        Self(descriptor, Arc::default())
    }
}

impl Q4Backend for Card {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.0
    }
    fn probe(&self, _: &HostEnv) -> Vec<ProbeItem> {
        Vec::new()
    }
    fn can_prepare(&self, _: &LinearSpec, _: ExecPath, _: &HostEnv) -> Verdict {
        Ok(())
    }
    fn devices(&self) -> Vec<VendorDevice> {
        let device = Device::vendor("card", 0);
        vec![VendorDevice { device, name: "Card".into(), fingerprint: "card 7".into(), memory: MEMORY }]
    }
    fn memory(&self, _: Device) -> Result<Arc<dyn DeviceMemory>> {
        Ok(Arc::new(Memory(self.1.clone())))
    }
    fn prepare(
        &self,
        _: &Q4Weight<'_>,
        _: &LinearSpec,
        _: ExecPath,
        _: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        Err(Error::new(Code::Unsupported, "prepare"))
    }
}

struct Memory(Arc<Room>);

struct Bytes {
    room: Arc<Room>,
    at: u64,
    held: Mutex<Vec<u8>>,
}

impl DeviceMemory for Memory {
    fn alloc(&self, len: usize) -> Result<Box<dyn DeviceBytes>> {
        self.0.taken.fetch_add(len as u64, Ordering::Relaxed);
        // Numbers that are no addresses of this process.
        let at = (self.0.next.fetch_add(1, Ordering::Relaxed) + 1) << 60;
        Ok(Box::new(Bytes { room: self.0.clone(), at, held: vec![0; len].into() }))
    }
    fn stream(&self) -> usize {
        0
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn free(&self) -> Result<u64> {
        Ok(MEMORY - self.0.taken.load(Ordering::Relaxed))
    }
}

impl DeviceBytes for Bytes {
    fn address(&self) -> u64 {
        self.at
    }
    fn upload(&self, at: usize, data: &[u8]) -> Result<()> {
        self.held.lock().unwrap()[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }
    fn download(&self, at: usize, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(&self.held.lock().unwrap()[at..at + out.len()]);
        Ok(())
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.room.taken.fetch_sub(self.held.lock().unwrap().len() as u64, Ordering::Relaxed);
    }
}

fn table() -> Q4BackendV1 {
    let struct_size = size_of::<Q4Interface>();
    let mut out = Q4Interface { struct_size, abi_minor: 2, reserved: 0, table: ptr::null() };
    // SAFETY: a live structure that states its size; success promises a table that lives for ever.
    let table = unsafe {
        assert_eq!(__q4_plugin_query(1, 1, &mut out), status::OK);
        *out.table.cast::<Q4BackendV1>()
    };
    // Here the library's panic hook is that of the tests as well, and they want to be heard.
    drop(std::panic::take_hook());
    table
}

#[test]
fn memory_of_a_device_is_reached_through_the_table() {
    let (t, mut b, none) = (table(), ptr::null_mut(), ptr::null_mut());
    let text = Q4Str { ptr: ptr::null(), len: 0 };
    let struct_size = size_of::<Q4Device>();
    let mut told = Q4Device { struct_size, name: text, fingerprint: text, memory_bytes: 0, free_bytes: 0 };
    // SAFETY: live structures, buffers of the lengths that are passed, and addresses that are numbers.
    unsafe {
        assert_eq!(t.create.unwrap()(&mut b, none), status::OK);
        let device = t.device.unwrap();
        assert_eq!(device(b, 1, &mut told, none), status::UNSUPPORTED);
        assert_eq!(device(b, 0, &mut told, none), status::OK);
        assert_eq!(
            (&*message::text(told.name, 99), &*message::text(told.fingerprint, 99)),
            ("Card", "card 7")
        );
        assert_eq!((told.memory_bytes, told.free_bytes), (MEMORY, MEMORY));
        let (alloc, free) = (t.device_alloc.unwrap(), t.device_free.unwrap());
        let (copy_in, copy_out) = (t.copy_in.unwrap(), t.copy_out.unwrap());
        let mut at = none.cast();
        for (id, len, code) in [(1, 16, status::UNSUPPORTED), (0, MEMORY + 1, status::OUT_OF_MEMORY)] {
            assert_eq!(alloc(b, id, len, &mut at, none), code);
        }
        assert_eq!(alloc(b, 0, 1000, &mut at, none), status::OK);
        let (bytes, mut back) = ([1u8, 2, 3, 4, 5], [0u8; 5]);
        let middle = at.wrapping_byte_add(100);
        assert_eq!(copy_in(b, 0, middle, bytes.as_ptr().cast(), 5, none), status::OK);
        let from = at.wrapping_byte_add(102).cast_const();
        assert_eq!(copy_out(b, 0, back.as_mut_ptr().cast(), from, 3, none), status::OK);
        assert_eq!(back, [3, 4, 5, 0, 0]);
        // Past the end, before the start, and of another device.
        for (id, to) in [(0, 996), (0, usize::MAX), (3, 0)] {
            let to = at.wrapping_byte_add(to);
            assert_eq!(copy_in(b, id, to, bytes.as_ptr().cast(), 5, none), status::INVALID_ARGUMENT);
        }
        assert_eq!(t.synchronize.unwrap()(b, 0, none), status::OK);
        assert_eq!(device(b, 0, &mut told, none), status::OK);
        assert_eq!(told.free_bytes, MEMORY - 1000);
        assert_eq!(free(b, 0, at, none), status::OK);
        assert_eq!(free(b, 0, at, none), status::INVALID_ARGUMENT, "once");
        assert_eq!(device(b, 0, &mut told, none), status::OK);
        assert_eq!(told.free_bytes, MEMORY);
        t.destroy.unwrap()(b);
    }
}
