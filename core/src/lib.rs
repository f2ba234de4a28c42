//! What a 4-bit weight is and who may multiply by it: formats, views, backend traits, selection.
//!
//! No shared library is opened here, no CUDA and no torch are known. Everything above this crate agrees on
//! these types:
//!
//! * [`formats`] turns codes into numbers, exactly; [`Q4Schema`] says which codes, [`Q4Weight`] borrows them;
//! * [`Q4Backend`] and [`PreparedWeight`] are what a kernel author implements;
//! * [`select`] decides once per layer, [`Dispatch`] checks and prepares, [`Q4Linear`] is the only caller of
//!   a backend;
//! * [`oracle`] is the exact product, [`selfcheck`] the gate built on it; [`rows`] are operands in f32,
//!   [`exponential`] is what runs between products in more than one crate.
pub mod asked;
mod backend;
pub mod conduct;
pub mod detect;
pub mod device;
mod error;
pub mod exponential;
pub mod formats;
mod fusion;
mod host;
pub mod isa;
mod linear;
pub mod memory;
mod null;
pub mod oracle;
pub mod pages;
mod parts;
mod registry;
mod reject;
pub mod rows;
mod scale;
mod schema;
mod scratch;
mod select;
pub mod selfcheck;
pub mod stage;
pub mod stderr;
mod tensor;
mod threads;
mod weight;
mod wide;

pub use backend::{
    BackendDescriptor, Candidate, ComputePath, ExecContext, ExecPath, Footprint, LinearSpec, OpSet,
    PreparedGroup, PreparedInfo, PreparedWeight, ProbeItem, Q4Backend, SegmentSpec,
};
pub use error::{Code, Error, Result};
pub use formats::Q4Schema;
pub use formats::dense::Dense;
pub use formats::fp8::Fp8;
pub use formats::ggml::Ggml;
pub use formats::int4::Int4;
pub use formats::mxfp4::Mxfp4;
pub use formats::nf4::{Absmax, Nf4, Nf4Parts};
pub use formats::nvfp4::{Nvfp4, Nvfp4Parts};
pub use fusion::{FuseSet, Fusion, RmsNorm};
#[cfg(target_arch = "x86_64")]
pub use host::has_tiles;
pub use host::{CudaDevice, CudaTools, Found, HostEnv, LibraryFacts, VendorDevice, processors};
pub use linear::{Dispatch, Executed, ExecutionCounter, Q4Group, Q4Linear};
pub use null::NullBackend;
pub use parts::{OwnedParts, Part, SegmentData, f32s, read_floats};
pub use registry::{BUILTINS, Built, BuiltinOptions, Registration, Registry};
pub use reject::{Reject, RejectCode, Verdict};
pub use scale::{Convention, GlobalScale, Rule};
pub use schema::{ActGlobal, ActQuant, Activations, Fp8Inputs, NibbleOrder, ScaleLayout, SchemaId};
pub use scratch::Scratch;
pub use select::{Overrides, Policy, Rejection, Selection, SelectionError, matches, select};
pub use tensor::{DType, Device, Element, MAX_RANK, TensorView, TensorViewMut};
pub use threads::ThreadPool;
pub use weight::{Q4Weight, RowDecoder, Segment};

#[doc(hidden)]
pub use inventory;
