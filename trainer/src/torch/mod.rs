//! Training through libtorch.
pub mod activations;
pub mod adapter;
pub mod answer;
pub mod device;
pub mod engine;
pub mod executor;
pub mod export;
pub mod frozen;
pub mod kernels;
mod laid;
pub mod loss;
pub mod moving;
pub mod peft;
pub mod phases;
pub mod products;
pub mod ranks;
pub mod run;
pub mod session;
pub mod trained;
pub mod weights;

pub use executor::{TorchCache, TorchExecutor, TorchNorm};

use q4_core::{Code, Error, Result};
use tch::{Kind, TchError, Tensor};

/// libtorch's errors as ours.
pub(crate) trait Tch<T> {
    /// Running out of memory keeps its exit code; anything else libtorch refuses is a failure of the backend.
    fn t(self) -> Result<T>;
}

impl<T> Tch<T> for Result<T, TchError> {
    fn t(self) -> Result<T> {
        self.map_err(|e| {
            let text = e.to_string();
            let first = text.lines().next().unwrap_or_default().to_owned();
            if text.contains("out of memory") || text.contains("can't allocate memory") {
                Error::new(Code::OutOfMemory, "libtorch ran out of memory")
                    .have(first)
                    .fix("a smaller preset (--preset full-24g, lora-8g) or fewer rows a step")
            } else {
                Error::new(Code::BackendFailed, format!("libtorch: {first}"))
            }
        })
    }
}

/// The same elements in memory of their own.
pub(crate) fn copied(t: &Tensor) -> Result<Tensor> {
    let mut own = t.f_empty_like().t()?;
    own.f_copy_(t).t()?;
    Ok(own)
}

/// The elements of a contiguous CPU tensor of f32.
pub(crate) fn floats(t: &Tensor) -> Result<&[f32]> {
    slice(t, Kind::Float)
}

/// The same to write. The tensor must not be used elsewhere meanwhile.
#[allow(clippy::mut_from_ref)] // a Tensor is a handle: its elements are as mutable behind `&` as behind `&mut`
pub(crate) fn floats_mut(t: &Tensor) -> Result<&mut [f32]> {
    slice_mut(t, Kind::Float)
}

/// The elements of a contiguous CPU tensor, whose kind must be the one that `T` stands for.
pub(crate) fn slice<T>(t: &Tensor, kind: Kind) -> Result<&[T]> {
    let len = checked::<T>(t, kind)?;
    if len == 0 {
        // Nothing has an address.
        return Ok(&[]);
    }
    // SAFETY: contiguous, on the host, `len` elements of a type as wide as T; the borrow keeps the storage
    // alive.
    Ok(unsafe { std::slice::from_raw_parts(t.data_ptr().cast(), len) })
}

/// The same to write. The tensor must not be used elsewhere meanwhile.
#[allow(clippy::mut_from_ref)]
pub(crate) fn slice_mut<T>(t: &Tensor, kind: Kind) -> Result<&mut [T]> {
    let len = checked::<T>(t, kind)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as above; callers hold the only handle in use.
    Ok(unsafe { std::slice::from_raw_parts_mut(t.data_ptr().cast(), len) })
}

fn checked<T>(t: &Tensor, kind: Kind) -> Result<usize> {
    if t.kind() == kind
        && kind.elt_size_in_bytes() == size_of::<T>()
        && t.is_contiguous()
        && t.device() == tch::Device::Cpu
    {
        return Ok(t.numel());
    }
    Err(Error::new(Code::Internal, "a tensor is read as a slice")
        .need(format!("contiguous {kind:?} on the CPU"))
        .have(format!("{:?} on {:?}", t.kind(), t.device())))
}
