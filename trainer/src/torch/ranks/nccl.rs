//! Tensors of CUDA devices, through NCCL, which is loaded when a run needs it. On libtorch's stream, so that
//! what is sent is finished and what is received is waited for without a word; nothing overlaps.
//!
//! The few functions are looked up here: cudarc does not look for `libnccl.so.2`, the only name that
//! PyTorch's wheels install it under.
use super::super::Tch;
use super::gloo::Store;
use super::{Collectives, Pending};
use libloading::Library;
use q4_core::{Code, Error, Result};
use q4_cuda::Gpu;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

/// `ncclUniqueId`: where the ranks meet.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

type Comm = *mut c_void;
type Stream = *mut c_void;

/// `ncclUint8` and `ncclFloat32`.
const BYTE: c_int = 1;
const FLOAT: c_int = 7;

/// What of `nccl.h` is used.
struct Functions {
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Comm, Stream) -> c_int,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> c_int,
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
        Ok(Self { nccl, comm, size, device: Device::Cuda(ordinal), gpu })
    }
}

impl Collectives for Nccl {
    fn all_to_all(&self, send: Tensor, give: &[usize], take: &[usize]) -> Result<Pending> {
        let out = Tensor::f_empty([take.iter().sum::<usize>() as i64], (Kind::Float, self.device)).t()?;
        let fits = send.kind() == Kind::Float && send.is_contiguous() && send.device() == self.device;
        if !fits || send.numel() != give.iter().sum::<usize>() {
            return Err(Error::new(Code::Internal, "all-to-all of what is not f32"));
        }
        self.gpu.bind()?;
        let n = &self.nccl;
        // SAFETY: has no conditions.
        n.check(unsafe { (n.group_start)() }, "group")?;
        let (mut from, mut to) = (send.data_ptr().cast::<f32>(), out.data_ptr().cast::<f32>());
        for (rank, (give, take)) in give.iter().zip(take).enumerate() {
            let rank = rank as c_int;
            // SAFETY: as many f32 as counted, in tensors of this device that libtorch does not give to others
            // before its stream, the default one, is behind this.
            unsafe {
                if *give > 0 {
                    n.check((n.send)(from.cast(), *give, FLOAT, rank, self.comm, null_mut()), "send")?;
                }
                if *take > 0 {
                    n.check((n.recv)(to.cast(), *take, FLOAT, rank, self.comm, null_mut()), "receive")?;
                }
                (from, to) = (from.add(*give), to.add(*take));
            }
        }
        // SAFETY: ends the group above.
        n.check(unsafe { (n.group_end)() }, "all-to-all")?;
        Ok(Pending { out, _send: send, work: None })
    }

    fn all_gather(&self, mine: &Tensor) -> Result<Tensor> {
        let out = Tensor::f_empty([(mine.numel() * self.size) as i64], (Kind::Uint8, self.device)).t()?;
        let mine = mine.f_contiguous().t()?;
        if mine.kind() != Kind::Uint8 || mine.device() != self.device {
            return Err(Error::new(Code::Internal, "all-gather of what is no bytes"));
        }
        self.gpu.bind()?;
        let (from, to) = (mine.data_ptr().cast_const(), out.data_ptr());
        // SAFETY: as above.
        let status = unsafe { (self.nccl.all_gather)(from, to, mine.numel(), BYTE, self.comm, null_mut()) };
        self.nccl.check(status, "all-gather")?;
        Ok(out)
    }
}
