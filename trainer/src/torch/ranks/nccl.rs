//! Tensors of CUDA devices, through NCCL, which is loaded when a run needs it. It has a stream of its own, so
//! that blocks are computed on libtorch's while what others sent or wait for travels; the two wait for each
//! other by events, and the host for neither, numbers aside.
//!
//! The few functions are looked up here: cudarc does not look for `libnccl.so.2`, the only name that
//! PyTorch's wheels install it under.
use super::super::Tch;
use super::gloo::Store;
use super::{Collectives, Numbers, Pending, Piece};
use libloading::Library;
use q4_core::{Code, Error, Result};
use q4_cuda::{Event, Gpu, Pinned, Stream};
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

/// `ncclUniqueId`: where the ranks meet.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

type Comm = *mut c_void;
type RawStream = *mut c_void;

/// `ncclUint8`.
const BYTE: c_int = 1;

/// libtorch's.
const DEFAULT: usize = 0;

/// What of `nccl.h` is used.
struct Functions {
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Comm, RawStream) -> c_int,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Comm, RawStream) -> c_int,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, RawStream) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    _library: Library,
}

impl Functions {
    fn load() -> Result<Self> {
        let names = ["libnccl.so.2", "libnccl.so"];
        // SAFETY: NCCL has no initialisers that need anything.
        let library =
            names.into_iter().find_map(|name| unsafe { Library::new(name) }.ok()).ok_or_else(|| {
                Error::new(Code::LibraryRefused, "ranks on CUDA devices: NCCL cannot be loaded")
                    .need("libnccl.so.2, which is part of a PyTorch for CUDA")
                    .fix("LD_LIBRARY_PATH=.../site-packages/nvidia/nccl/lib, beside libtorch's own folder")
            })?;
        macro_rules! get {
            ($name:literal) => {
                // SAFETY: the signature is that of nccl.h, since NCCL 2.7; the library lives as long as this.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }
                    .map_err(|e| Error::new(Code::LibraryRefused, "NCCL").have(e.to_string()))?
            };
        }
        Ok(Self {
            unique_id: get!("ncclGetUniqueId"),
            init: get!("ncclCommInitRank"),
            send: get!("ncclSend"),
            recv: get!("ncclRecv"),
            all_gather: get!("ncclAllGather"),
            group_start: get!("ncclGroupStart"),
            group_end: get!("ncclGroupEnd"),
            error: get!("ncclGetErrorString"),
            _library: library,
        })
    }

    fn check(&self, status: c_int, what: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: a static string, for any number.
        let text = unsafe { CStr::from_ptr((self.error)(status)) };
        Err(Error::new(Code::RankLost, format!("NCCL: {what}")).have(text.to_string_lossy()))
    }
}

/// The ranks' devices, connected.
pub(super) struct Nccl {
    nccl: Functions,
    comm: Comm,
    size: usize,
    device: Device,
    gpu: Arc<Gpu>,
    stream: Stream,
    /// Memory of the host that numbers arrived in.
    spare: Rc<RefCell<Vec<Pinned>>>,
}

impl Nccl {
    /// Connects device `ordinal` of every rank.
    pub fn new(store: &Store, rank: usize, size: usize, ordinal: usize) -> Result<Self> {
        let (nccl, gpu) = (Functions::load()?, Gpu::open(ordinal as u32)?);
        gpu.bind()?;
        let mut id = UniqueId([0; 128]);
        if rank == 0 {
            // SAFETY: writes 128 bytes.
            nccl.check(unsafe { (nccl.unique_id)(&mut id) }, "unique id")?;
            store.set("nccl", &id.0)?;
        } else {
            store.get("nccl", &mut id.0)?;
        }
        let mut comm = null_mut();
        // SAFETY: the device is bound; every rank calls this with the same id and its own number.
        nccl.check(unsafe { (nccl.init)(&mut comm, size as c_int, id, rank as c_int) }, "connecting")?;
        let stream = Stream::new(&gpu)?;
        Ok(Self { nccl, comm, size, device: Device::Cuda(ordinal), gpu, stream, spare: Rc::default() })
    }

    /// What comes now is behind all that libtorch was told to do, memory that it gives out again included.
    fn begin(&self) -> Result<RawStream> {
        Event::record(&self.gpu, DEFAULT)?.precede(self.stream.raw())?;
        Ok(self.stream.raw() as RawStream)
    }

    fn reached(&self) -> Result<Event> {
        Event::record(&self.gpu, self.stream.raw())
    }

    fn here(&self, t: &Tensor) -> Result<usize> {
        match t.is_contiguous() && t.device() == self.device {
            true => Ok(t.numel() * t.kind().elt_size_in_bytes()),
            false => Err(Error::new(Code::Internal, "a tensor between ranks")
                .need(format!("contiguous on {:?}", self.device))
                .have(format!("{:?} on {:?}", t.size(), t.device()))),
        }
    }
}

impl Collectives for Nccl {
    fn exchange(&self, give: Vec<(usize, Tensor)>, take: &[Piece]) -> Result<Pending> {
        let empty = |p: &Piece| Tensor::f_empty([p.len as i64], (p.kind, self.device)).t();
        let taken: Vec<Tensor> = take.iter().map(empty).collect::<Result<_>>()?;
        let (n, stream) = (&self.nccl, self.begin()?);
        // SAFETY: has no conditions.
        n.check(unsafe { (n.group_start)() }, "group")?;
        for (rank, t) in &give {
            let (from, len) = (t.data_ptr(), self.here(t)?);
            // SAFETY: as many bytes as counted, in a tensor that lives until libtorch's stream is behind
            // this.
            let status = unsafe { (n.send)(from, len, BYTE, *rank as c_int, self.comm, stream) };
            n.check(status, "send")?;
        }
        for (p, t) in take.iter().zip(&taken) {
            let (to, len) = (t.data_ptr(), self.here(t)?);
            // SAFETY: as above.
            let status = unsafe { (n.recv)(to, len, BYTE, p.rank as c_int, self.comm, stream) };
            n.check(status, "receive")?;
        }
        // SAFETY: ends the group above.
        n.check(unsafe { (n.group_end)() }, "exchange")?;
        Ok(Pending::Device(Travelling { there: self.reached()?, taken, _given: give }))
    }

    fn gather(&self, mine: &Tensor) -> Result<Numbers> {
        let all = Tensor::f_empty([(mine.numel() * self.size) as i64], (Kind::Double, self.device)).t()?;
        let (len, bytes) = (self.here(mine)?, self.here(&all)?);
        if len * self.size != bytes {
            return Err(Error::new(Code::Internal, "numbers between ranks").need("f64"));
        }
        let fits = |p: &Pinned| p.as_slice::<u8>().len() >= bytes;
        let found = self.spare.borrow().iter().position(fits);
        let to = match found {
            Some(i) => self.spare.borrow_mut().swap_remove(i),
            None => Pinned::new(&self.gpu, bytes.next_multiple_of(1 << 16))?,
        };
        let (stream, from, out) = (self.begin()?, mine.data_ptr().cast_const(), all.data_ptr());
        // SAFETY: as many bytes as counted, in tensors that live until the host has waited for this.
        unsafe {
            let status = (self.nccl.all_gather)(from, out, len, BYTE, self.comm, stream);
            self.nccl.check(status, "gather")?;
            to.receive(out as u64, bytes, self.stream.raw())?;
        }
        let here = self.reached()?;
        let keep = [mine.shallow_clone(), all];
        Ok(Numbers::Device(Reading {
            here,
            to: Some(to),
            count: bytes / 8,
            spare: self.spare.clone(),
            _keep: keep,
        }))
    }
}

/// Tensors that NCCL's stream reads and writes.
pub(in crate::torch) struct Travelling {
    there: Event,
    taken: Vec<Tensor>,
    _given: Vec<(usize, Tensor)>,
}

impl Travelling {
    /// What libtorch is told to do from here on finds what others sent.
    pub fn wait(mut self) -> Result<Vec<Tensor>> {
        self.there.precede(DEFAULT)?;
        Ok(std::mem::take(&mut self.taken))
    }
}

impl Drop for Travelling {
    fn drop(&mut self) {
        // Their memory is given out again in the order of libtorch's stream. Where that fails the device is
        // lost, and the next call says so.
        let _: Result<()> = self.there.precede(DEFAULT);
    }
}

/// Numbers that the host will have.
pub(in crate::torch) struct Reading {
    here: Event,
    to: Option<Pinned>,
    count: usize,
    spare: Rc<RefCell<Vec<Pinned>>>,
    _keep: [Tensor; 2],
}

impl Reading {
    /// All ranks', one behind the other. Waits for what was enqueued before they were, and no more.
    pub fn wait(self) -> Result<Vec<f64>> {
        self.here.wait()?;
        let to = self.to.as_ref().map(|p| p.as_slice::<f64>()).unwrap_or_default();
        Ok(to[..self.count.min(to.len())].to_vec())
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        // Nobody may write to memory that is given out again.
        match self.here.wait() {
            Ok(()) => self.spare.borrow_mut().extend(self.to.take()),
            Err(_) => std::mem::forget(self.to.take()),
        }
    }
}
