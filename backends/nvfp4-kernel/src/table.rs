//! The functions of libNVFP4 behind types that own what they return: convert, call, convert back, nothing
//! else.
use crate::abi;
use q4_core::{Code, Device, Error, Reject, RejectCode, Result};
use std::borrow::Cow;
use std::ffi::{CStr, c_char, c_void};
use std::mem::{offset_of, size_of};
use std::ptr;

/// A checked table: every entry that is called is there.
pub struct Table {
    api: abi::Api,
}

// SAFETY: function pointers and one pointer to constant text of a library that is never unloaded.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

/// `(need, have)` of one contradiction.
type Problem = (String, String);

/// Bytes of a table that has every entry we call.
const NEEDED: usize = offset_of!(abi::Api, dequantize) + size_of::<abi::TaskFn>();

macro_rules! entry {
    ($self:ident . $name:ident) => {
        $self
            .api
            .$name
            .ok_or_else(|| Error::new(Code::Internal, concat!("libNVFP4 table without ", stringify!($name))))
    };
}

impl Table {
    /// Copies the table out, after checking its size, version and every entry that is called, and reads the
    /// library's version text.
    ///
    /// # Safety
    /// `raw` addresses a table that starts with its size and lives for ever.
    pub unsafe fn adopt(raw: *const abi::Api) -> Result<(Self, String), Vec<Problem>> {
        if !raw.is_aligned() {
            return Err(vec![(
                format!("a table aligned to {} bytes", align_of::<abi::Api>()),
                format!("{raw:p}"),
            )]);
        }
        // SAFETY: the caller vouches for the first field.
        let size = unsafe { raw.cast::<usize>().read() };
        if size < NEEDED {
            return Err(vec![(format!("a table of at least {NEEDED} bytes"), format!("struct_size {size}"))]);
        }
        // SAFETY: all-zero bytes are a valid table: numbers, a null pointer and absent functions.
        let mut api: abi::Api = unsafe { std::mem::zeroed() };
        // SAFETY: both sides have that many bytes; entries we do not know are left out, entries it lacks stay
        // absent.
        unsafe {
            ptr::copy_nonoverlapping(raw.cast::<u8>(), (&raw mut api).cast(), size.min(size_of::<abi::Api>()))
        };
        let mut problems = Vec::new();
        if api.abi_major != abi::ABI_MAJOR {
            problems.push((
                format!("abi_major {}", abi::ABI_MAJOR),
                format!("{}.{}", api.abi_major, api.abi_minor),
            ));
        }
        let called = [
            ("ctx_create", api.ctx_create.is_some()),
            ("ctx_destroy", api.ctx_destroy.is_some()),
            ("device_info", api.device_info.is_some()),
            ("prepare", api.prepare.is_some()),
            ("release", api.release.is_some()),
            ("weight_bytes", api.weight_bytes.is_some()),
            ("workspace", api.workspace.is_some()),
            ("forward", api.forward.is_some()),
            ("backward_input", api.backward_input.is_some()),
            ("dequantize", api.dequantize.is_some()),
        ];
        for (name, _) in called.iter().filter(|(_, set)| !set) {
            problems.push((format!("a function `{name}`"), "NULL".into()));
        }
        // SAFETY: a C string of the library, or NULL.
        let version =
            unsafe { text(api.version) }.map_err(|have| problems.push(("a version in UTF-8".into(), have)));
        match version {
            Ok(version) if problems.is_empty() => Ok((Self { api }, version)),
            _ => Err(problems),
        }
    }

    /// Minor version of the library's ABI.
    pub fn minor(&self) -> u32 {
        self.api.abi_minor
    }

    /// A context for `device`, running `isa` when it is given, with weights in managed memory of a GPU when
    /// that is asked for. Err: every reason of the library.
    pub fn ctx_create(
        &'static self,
        device: Device,
        isa: Option<&CStr>,
        is_managed: bool,
    ) -> Result<Ctx, Vec<Reject>> {
        let (device_type, ordinal) = match device {
            Device::Cpu => (abi::DEVICE_CPU, 0),
            Device::Cuda(i) => (abi::DEVICE_CUDA, i32::try_from(i).unwrap_or(i32::MAX)),
            other => {
                return Err(vec![Reject::new(RejectCode::DeviceAbsent, "cpu or cuda", other.to_string())]);
            }
        };
        let desc = abi::CtxDesc {
            struct_size: size_of::<abi::CtxDesc>(),
            device_type,
            device: ordinal,
            flags: if is_managed && device != Device::Cpu { abi::CTX_MANAGED } else { 0 },
            reserved: 0,
            isa: isa.map_or(ptr::null(), CStr::as_ptr),
        };
        let internal = |what: String| {
            vec![Reject::new(RejectCode::Internal, format!("a libNVFP4 context for {device}"), what)]
        };
        let create = entry!(self.ctx_create).map_err(|e| internal(e.to_string()))?;
        let (mut ctx, mut reasons, mut message) = (ptr::null_mut(), Vec::<Reject>::new(), Message::new());
        let mut error = message.raw();
        let user = (&raw mut reasons).cast();
        // SAFETY: every pointer is to a live local of the type the header names; `collect` fits `user`.
        let status = unsafe { create(&desc, &mut ctx, Some(collect), user, &mut error) };
        if status == abi::OK && !ctx.is_null() {
            return Ok(Ctx { table: self, ctx });
        }
        if reasons.is_empty() {
            reasons = internal(format!("status {status}: {}", message.text(&error)));
        }
        Err(reasons)
    }

    /// What a context can do.
    pub fn device_info(&self, ctx: &Ctx) -> Result<Info> {
        // SAFETY: all-zero bytes are a valid description.
        let mut info: abi::DeviceInfo = unsafe { std::mem::zeroed() };
        info.struct_size = size_of::<abi::DeviceInfo>();
        let call = entry!(self.device_info)?;
        // SAFETY: a live context and locals of the types the header names.
        checked("device_info", |error| unsafe { call(ctx.ctx, &mut info, error) })?;
        Ok(Info {
            capability: (info.cc_major.unsigned_abs(), info.cc_minor.unsigned_abs()),
            paths: info.paths,
            activations: info.activations,
            has_native_image: info.has_native_image != 0,
            isa: fixed(&info.isa),
            isa_available: fixed(&info.isa_available),
            build: fixed(&info.build),
        })
    }

    /// Every reason why a context takes no weight on the native path; what it is asked about has nothing else
    /// to refuse.
    pub fn native_refusals(&self, ctx: &Ctx) -> Vec<Reject> {
        let segment = abi::Segment {
            struct_size: size_of::<abi::Segment>(),
            rows: 128,
            codes: ptr::null(),
            codes_bytes: 0,
            scales: ptr::null(),
            scales_bytes: 0,
            global_scale: 0.0,
            global_convention: abi::CONVENTION_NONE,
            scale_layout: abi::SCALE_ROW_MAJOR,
            reserved: 0,
        };
        let desc = abi::WeightDesc {
            struct_size: size_of::<abi::WeightDesc>(),
            n: 128,
            k: 256,
            segments: &raw const segment,
            n_segments: 1,
            path: abi::PATH_NATIVE,
            activations: abi::ACT_NVFP4,
            x_dtype: abi::BF16,
            y_dtype: abi::BF16,
            act_rule: abi::RULE_MODELOPT,
            act_global_kind: abi::GLOBAL_NONE,
            act_global: 0.0,
            act_global_convention: abi::CONVENTION_NONE,
            max_m: 1,
            reserved: 0,
        };
        let mut reasons = Vec::<Reject>::new();
        let user = (&raw mut reasons).cast();
        if let Some(call) = self.api.can_prepare {
            // SAFETY: a live context, a description whose segment lives, and `collect` fits `user`.
            unsafe { call(ctx.ctx, &desc, Some(collect), user, ptr::null_mut()) };
        }
        reasons
    }

    /// Repacks a weight.
    ///
    /// # Safety
    /// Every pointer in `desc` and `exec` is good for the bytes stated beside it.
    pub unsafe fn prepare(
        &'static self,
        ctx: &Ctx,
        desc: &abi::WeightDesc,
        exec: &abi::Exec,
    ) -> Result<Weight> {
        let (call, mut weight) = (entry!(self.prepare)?, ptr::null_mut());
        // SAFETY: forwarded to the caller; `weight` is a live local.
        checked("prepare", |error| unsafe { call(ctx.ctx, desc, exec, &mut weight, error) })?;
        if weight.is_null() {
            return Err(Error::new(Code::BackendFailed, "libNVFP4 prepare")
                .need("a weight")
                .have("NULL and success"));
        }
        Ok(Weight { table: self, weight })
    }
}

/// What a context said about itself.
pub struct Info {
    /// Compute capability; zeros on the CPU.
    pub capability: (u32, u32),
    /// Bits `1 << abi::PATH_*`.
    pub paths: u32,
    /// Bits `1 << abi::ACT_*`.
    pub activations: u32,
    /// Machine code for this very device is in the file.
    pub has_native_image: bool,
    /// Instruction set it runs.
    pub isa: String,
    /// Those it could run, best first, separated by commas.
    pub isa_available: String,
    /// How it was compiled.
    pub build: String,
}

/// A context. Used by one thread at a time: nothing here takes it by value or shares it.
pub struct Ctx {
    table: &'static Table,
    ctx: *mut abi::Ctx,
}

// SAFETY: the header ties a context to one thread at a time, not to one thread; it is not `Sync`.
unsafe impl Send for Ctx {}

impl Drop for Ctx {
    fn drop(&mut self) {
        if let Some(destroy) = self.table.api.ctx_destroy {
            // SAFETY: created by the same table, destroyed once.
            unsafe { destroy(self.ctx) }
        }
    }
}

/// A prepared weight of the library. Immutable, so any number of threads may call it.
pub struct Weight {
    table: &'static Table,
    weight: *mut abi::Weight,
}

// SAFETY: the header allows any thread to call a weight and to release it.
unsafe impl Send for Weight {}
// SAFETY: the header allows many threads at once.
unsafe impl Sync for Weight {}

impl Drop for Weight {
    fn drop(&mut self) {
        if let Some(release) = self.table.api.release {
            // SAFETY: created by the same table; `&mut self` proves that no call on it is running.
            unsafe { release(self.weight) }
        }
    }
}

impl Weight {
    /// Memory it keeps.
    pub fn bytes(&self) -> u64 {
        // SAFETY: a live weight.
        self.table.api.weight_bytes.map_or(0, |f| unsafe { f(self.weight) })
    }

    /// Scratch bytes for `m` rows; `usize::MAX` when that overflows.
    pub fn workspace(&self, m: usize) -> usize {
        // SAFETY: a live weight.
        let bytes = self.table.api.workspace.map_or(0, |f| unsafe { f(self.weight, m as u64) });
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// `y = x W^T`.
    ///
    /// # Safety
    /// Every pointer is good for the bytes stated beside it, `y` and the workspace for writing.
    pub unsafe fn forward(&self, x: &abi::Matrix, y: &abi::Matrix, exec: &abi::Exec) -> Result<()> {
        let (table, weight) = (self.table, self.weight);
        let call = entry!(table.forward)?;
        // SAFETY: forwarded to the caller.
        checked("forward", |error| unsafe { call(weight, x, y, exec, error) })
    }

    /// Whether a call of `m` rows may fuse exactly `parts`; a library of ABI 1.0 fuses nothing.
    pub fn fuses(&self, m: usize, parts: u32) -> bool {
        let api = &self.table.api;
        // SAFETY: a live weight.
        api.forward_fused.is_some()
            && api.fuses.is_some_and(|f| unsafe { f(self.weight, m as u64, parts) } == 1)
    }

    /// `forward` with what `fusion` adds.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn forward_fused(
        &self,
        x: &abi::Matrix,
        fusion: &abi::Fusion,
        y: &abi::Matrix,
        exec: &abi::Exec,
    ) -> Result<()> {
        let (table, weight) = (self.table, self.weight);
        let call = entry!(table.forward_fused)?;
        // SAFETY: forwarded to the caller.
        checked("forward_fused", |error| unsafe { call(weight, x, fusion, y, exec, error) })
    }

    /// `dx = dy W`.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn backward_input(&self, dy: &abi::Matrix, dx: &abi::Matrix, exec: &abi::Exec) -> Result<()> {
        let (table, weight) = (self.table, self.weight);
        let call = entry!(table.backward_input)?;
        // SAFETY: forwarded to the caller.
        checked("backward_input", |error| unsafe { call(weight, dy, dx, exec, error) })
    }

    /// The decoded matrix.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn dequantize(&self, out: &abi::Matrix, exec: &abi::Exec) -> Result<()> {
        let (table, weight) = (self.table, self.weight);
        let call = entry!(table.dequantize)?;
        // SAFETY: forwarded to the caller.
        checked("dequantize", |error| unsafe { call(weight, out, exec, error) })
    }
}

/// Lends a message buffer to `call` and turns its status into a result. Allocates only for an error.
fn checked(what: &str, call: impl FnOnce(*mut abi::Error) -> abi::Status) -> Result<()> {
    let mut message = Message::new();
    let mut error = message.raw();
    let status = call(&mut error);
    if status == abi::OK {
        return Ok(());
    }
    let code = match status {
        abi::E_UNSUPPORTED => Code::Unsupported,
        abi::E_NOMEM => Code::OutOfMemory,
        abi::E_ABI => Code::LibraryRefused,
        _ => Code::BackendFailed,
    };
    let mut have = format!("status {status}: {}", message.text(&error));
    if status == abi::E_CUDA {
        have += &format!(" (CUresult {})", error.native_code);
    }
    Err(Error::new(code, format!("libNVFP4 {what}")).have(have))
}

/// Room for the text of one failure, on the caller's stack.
struct Message([u8; 512]);

impl Message {
    fn new() -> Self {
        Self([0; 512])
    }
    fn raw(&mut self) -> abi::Error {
        let (ptr, cap) = (self.0.as_mut_ptr().cast(), self.0.len());
        abi::Error { struct_size: size_of::<abi::Error>(), ptr, cap, len: 0, native_code: 0 }
    }
    fn text(&self, error: &abi::Error) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.0[..error.len.min(self.0.len() - 1)])
    }
}

/// Receives one reason of the library; `user` is a `Vec<Reject>`.
unsafe extern "C" fn collect(
    user: *mut c_void,
    code: *const c_char,
    need: *const c_char,
    have: *const c_char,
) {
    // SAFETY: `user` is what `ctx_create` passed, and the library calls on its thread before it returns.
    let reasons = unsafe { &mut *user.cast::<Vec<Reject>>() };
    // SAFETY: C strings that live until this function returns, or NULL.
    let [code, need, have] = [code, need, have].map(|p| unsafe { text(p) }.unwrap_or_else(|problem| problem));
    reasons.push(Reject::new(RejectCode::parse(&code).unwrap_or(RejectCode::Internal), need, have));
}

/// A C string as text. Err: what it is instead.
///
/// # Safety
/// `p` is NULL or a C string.
unsafe fn text(p: *const c_char) -> Result<String, String> {
    if p.is_null() {
        return Err("NULL".into());
    }
    // SAFETY: not NULL; the caller vouches for the rest.
    let bytes = unsafe { CStr::from_ptr(p) };
    bytes.to_str().map(str::to_owned).map_err(|_| format!("not UTF-8: {:?}", bytes.to_string_lossy()))
}

/// The text in a fixed array, up to its first NUL.
fn fixed(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().flat_map(|c| c.to_ne_bytes()).take_while(|&b| b != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
