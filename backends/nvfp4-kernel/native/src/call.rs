//! What crosses the C boundary: size-prefixed structs in, error texts and reasons out, the caller's threads
//! and scratch. All of the checking of raw arguments is here.
use crate::abi;
use half::{bf16, f16, slice::HalfFloatSliceExt};
use q4_core::{Code, DType};
use std::ffi::{CString, c_char, c_void};
use std::fmt::Display;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::{cell::Cell, ptr, slice};

/// A failure on its way to the caller.
#[derive(Debug)]
pub struct Fail {
    /// `abi::E_*`.
    pub status: abi::Status,
    /// What, need, have.
    pub text: String,
    /// The driver's status with `E_CUDA`, else 0.
    pub native: i64,
}

/// Result of everything behind the table.
pub type Outcome<T = ()> = Result<T, Fail>;

impl Fail {
    /// A bad argument.
    pub fn invalid(what: impl Display, need: impl Display, have: impl Display) -> Self {
        Self::of(abi::E_INVALID, format!("{what}: need {need}; have {have}"))
    }
    /// A bug or a broken promise of the caller's threads.
    pub fn internal(text: impl Into<String>) -> Self {
        Self::of(abi::E_INTERNAL, text.into())
    }
    /// Memory that cannot be had.
    pub fn no_memory(bytes: usize) -> Self {
        Self::of(abi::E_NOMEM, format!("memory: need {bytes} bytes; have fewer"))
    }
    fn of(status: abi::Status, text: String) -> Self {
        Self { status, text, native: 0 }
    }
}

impl From<q4_core::Error> for Fail {
    fn from(e: q4_core::Error) -> Self {
        let status = match e.code() {
            Code::OutOfMemory => abi::E_NOMEM,
            Code::Internal => abi::E_INTERNAL,
            Code::BackendFailed | Code::DeviceMissing => abi::E_CUDA,
            Code::Unsupported => abi::E_UNSUPPORTED,
            _ => abi::E_INVALID,
        };
        let mut text = String::new();
        for (name, part) in e.parts() {
            match name {
                "what" => text.push_str(part),
                _ => text.push_str(&format!("; {name} {part}")),
            }
        }
        let native = if matches!(status, abi::E_CUDA | abi::E_NOMEM) { q4_cuda::last_status() } else { 0 };
        Self { status, text, native }
    }
}

/// One reason why a description cannot be served.
#[derive(Clone, Debug)]
pub struct Finding {
    /// Stable code, as in the header.
    pub code: &'static str,
    /// What would do.
    pub need: String,
    /// What there is.
    pub have: String,
    /// Not a limit of this library but a mistake.
    pub is_mistake: bool,
}

impl Finding {
    /// A limit of this build, device or shape.
    pub fn limit(code: &'static str, need: impl Into<String>, have: impl Into<String>) -> Self {
        Self { code, need: need.into(), have: have.into(), is_mistake: false }
    }
    /// A description that contradicts itself or the header.
    pub fn mistake(need: impl Into<String>, have: impl Into<String>) -> Self {
        Self { code: "invalid-argument", need: need.into(), have: have.into(), is_mistake: true }
    }
}

impl From<Vec<Finding>> for Fail {
    fn from(all: Vec<Finding>) -> Self {
        let status = if all.iter().any(|f| f.is_mistake) { abi::E_INVALID } else { abi::E_UNSUPPORTED };
        let lines: Vec<_> =
            all.iter().map(|f| format!("{}: need {}; have {}", f.code, f.need, f.have)).collect();
        Self::of(status, lines.join("\n"))
    }
}

/// The caller's receiver of reasons.
pub struct Sink(pub Option<abi::ReasonFn>, pub *mut c_void);

impl Sink {
    /// Hands over every finding and turns them into the failure of the call.
    pub fn report(&self, all: Vec<Finding>) -> Fail {
        if let Some(receive) = self.0 {
            for f in &all {
                let [code, need, have] =
                    [f.code, &f.need, &f.have].map(|s| CString::new(s).unwrap_or_default());
                // SAFETY: three NUL-terminated texts that live until it returns.
                unsafe { receive(self.1, code.as_ptr(), need.as_ptr(), have.as_ptr()) };
            }
        }
        all.into()
    }
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs the body of an exported function: nothing unwinds out of it or prints, and `error` tells what
/// happened.
///
/// # Safety
/// `error` is NULL or a size-prefixed error whose buffer has `cap` bytes.
pub unsafe fn entry(error: *mut abi::Error, body: impl FnOnce() -> Outcome) -> abi::Status {
    let outcome =
        guarded(body).unwrap_or_else(|panic| Err(Fail::internal(format!("a bug in libNVFP4: {panic}"))));
    // SAFETY: forwarded.
    unsafe { describe(error, outcome.as_ref().err()) };
    outcome.map_or_else(|f| f.status, |()| abi::OK)
}

/// Runs `body`; Err is the message of its panic.
pub fn guarded<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    let outer = INSIDE.replace(true);
    let result = catch_unwind(AssertUnwindSafe(body));
    INSIDE.set(outer);
    result.map_err(|payload| match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(s), _) => (*s).to_owned(),
        (_, Some(s)) => s.clone(),
        _ => "panic".to_owned(),
    })
}

/// Keeps panics that [`guarded`] turns into errors from being printed by the default hook; others print as
/// before.
pub fn quiet_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::thread::panicking() {
            return;
        }
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !INSIDE.try_with(Cell::get).unwrap_or(false) {
                before(info);
            }
        }));
    });
}

unsafe fn describe(error: *mut abi::Error, failure: Option<&Fail>) {
    if error.is_null() {
        return;
    }
    // SAFETY: size-prefixed, by contract.
    let Ok(mut e) = (unsafe { read(error, "error") }) else { return };
    let text = failure.map_or("", |f| f.text.as_str());
    if !e.ptr.is_null() && e.cap > 0 {
        let mut end = text.len().min(e.cap - 1);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        // SAFETY: `end` is below `cap`, the size of the buffer.
        unsafe {
            ptr::copy_nonoverlapping(text.as_ptr(), e.ptr.cast(), end);
            *e.ptr.add(end) = 0;
        }
    }
    (e.len, e.native_code) = (text.len(), failure.map_or(0, |f| f.native));
    // SAFETY: as above.
    unsafe { write(error, &e) };
}

/// Structs that begin with their size.
///
/// # Safety
/// `repr(C)`, the first field is `struct_size: usize`, and all-zero bytes are a valid value.
pub unsafe trait Prefixed: Copy {}
macro_rules! prefixed {
    ($($t:ident)*) => { $(
        // SAFETY: integers, floats, raw pointers and optional functions behind a `struct_size`.
        unsafe impl Prefixed for abi::$t {}
    )* };
}
prefixed!(Error CtxDesc Segment WeightDesc Matrix Exec DeviceInfo Quantizer Quantized Fusion);

/// The struct at `p` as this library knows it; fields the caller does not have are zero.
///
/// # Safety
/// `p` is NULL or addresses as many bytes as its `struct_size` says.
pub unsafe fn read<T: Prefixed>(p: *const T, name: &str) -> Outcome<T> {
    if p.is_null() {
        return Err(Fail::invalid(name, "a pointer", "NULL"));
    }
    // SAFETY: by contract, and `Prefixed` makes zero bytes valid.
    unsafe {
        let size = p.cast::<usize>().read_unaligned();
        if size < size_of::<usize>() {
            return Err(Fail::invalid(name, "struct_size = sizeof(struct)", size));
        }
        let mut value = MaybeUninit::<T>::zeroed();
        ptr::copy_nonoverlapping(p.cast::<u8>(), value.as_mut_ptr().cast(), size.min(size_of::<T>()));
        Ok(value.assume_init())
    }
}

/// Writes back a struct that [`read`] gave, as much of it as the caller has.
///
/// # Safety
/// As there, and the bytes are writable.
pub unsafe fn write<T: Prefixed>(p: *mut T, value: &T) {
    // SAFETY: by contract.
    unsafe {
        let size = p.cast::<usize>().read_unaligned().min(size_of::<T>());
        ptr::copy_nonoverlapping(ptr::from_ref(value).cast::<u8>(), p.cast(), size);
    }
}

/// Copies a text into a fixed field, cut and NUL-terminated.
pub fn fixed<const N: usize>(text: &str) -> [c_char; N] {
    let mut out = [0; N];
    for (to, from) in out[..N - 1].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
    out
}

/// `nvfp4_dtype`.
pub fn dtype(code: u32) -> Option<DType> {
    match code {
        abi::F32 => Some(DType::F32),
        abi::F16 => Some(DType::F16),
        abi::BF16 => Some(DType::BF16),
        _ => None,
    }
}

/// A checked `nvfp4_matrix`.
#[derive(Clone, Copy)]
pub struct Mat {
    data: *mut u8,
    /// Rows, at least 1.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements from one row to the next.
    pub ld: usize,
    /// f32, f16 or bf16.
    pub dtype: DType,
}

// SAFETY: an address and sizes; who dereferences it states why that is not a race.
unsafe impl Send for Mat {}
// SAFETY: as above.
unsafe impl Sync for Mat {}

impl Mat {
    /// Checks `p`: any number of rows, `cols` columns, `dtype` where one is given.
    ///
    /// # Safety
    /// As [`read`].
    pub unsafe fn read(
        p: *const abi::Matrix,
        name: &str,
        cols: Option<usize>,
        want: Option<DType>,
    ) -> Outcome<Self> {
        // SAFETY: forwarded.
        let m = unsafe { read(p, name)? };
        let Some(dtype) = dtype(m.dtype) else {
            return Err(Fail::invalid(name, "dtype 1 (f32), 2 (f16) or 3 (bf16)", m.dtype));
        };
        if want.is_some_and(|w| w != dtype) {
            return Err(Fail::invalid(name, want.unwrap_or(dtype), dtype));
        }
        if m.reserved != 0 {
            return Err(Fail::invalid(name, "reserved = 0", m.reserved));
        }
        if m.rows == 0 || m.cols == 0 || cols.is_some_and(|c| c as u64 != m.cols) {
            let cols = cols.map_or("at least one".into(), |c| c.to_string());
            return Err(Fail::invalid(
                name,
                format!("at least one row, {cols} columns"),
                format!("[{}, {}]", m.rows, m.cols),
            ));
        }
        if m.ld < m.cols {
            return Err(Fail::invalid(name, format!("ld >= {}", m.cols), m.ld));
        }
        let span = (m.rows - 1).checked_mul(m.ld).and_then(|v| v.checked_add(m.cols));
        let bytes = span.and_then(|v| v.checked_mul(dtype.size() as u64)).filter(|&b| b <= isize::MAX as u64);
        match bytes {
            Some(need) if need <= m.bytes => {}
            Some(need) => {
                return Err(Fail::invalid(name, format!("{need} bytes"), format!("{} bytes", m.bytes)));
            }
            None => {
                return Err(Fail::invalid(
                    name,
                    "a size that fits the address space",
                    format!("{} rows, ld = {}", m.rows, m.ld),
                ));
            }
        }
        if m.data.is_null() || m.data.addr() % dtype.size() != 0 {
            let have = if m.data.is_null() { "NULL".into() } else { format!("{:p}", m.data) };
            return Err(Fail::invalid(name, format!("data aligned to {} bytes", dtype.size()), have));
        }
        let (rows, cols, ld) = (m.rows as usize, m.cols as usize, m.ld as usize);
        Ok(Self { data: m.data.cast(), rows, cols, ld, dtype })
    }

    /// Address of the first element.
    pub fn address(&self) -> u64 {
        self.data.addr() as u64
    }

    /// The same elements at another address, rows `ld` apart.
    pub fn moved(&self, to: u64, ld: usize) -> Self {
        Self { data: std::ptr::without_provenance_mut(to as usize), ld, ..*self }
    }

    /// `count` of its rows from `first` on.
    pub fn rows_from(&self, first: usize, count: usize) -> Self {
        debug_assert!(first + count <= self.rows);
        // The address may be a device's: it is only computed with.
        Self { data: self.data.wrapping_add(first * self.ld * self.dtype.size()), rows: count, ..*self }
    }

    /// First element of f32 data.
    pub fn floats(&self) -> *const f32 {
        debug_assert_eq!(self.dtype, DType::F32);
        self.data.cast()
    }

    /// Elements from (`row`, `col`) on, widened.
    ///
    /// # Safety
    /// They are inside the matrix and nobody writes them.
    pub unsafe fn load(&self, row: usize, col: usize, out: &mut [f32]) {
        // SAFETY: inside, by contract.
        unsafe {
            let p = self.data.add((row * self.ld + col) * self.dtype.size());
            match self.dtype {
                DType::F16 => slice::from_raw_parts(p.cast::<f16>(), out.len()).convert_to_f32_slice(out),
                DType::BF16 => slice::from_raw_parts(p.cast::<bf16>(), out.len()).convert_to_f32_slice(out),
                _ => out.copy_from_slice(slice::from_raw_parts(p.cast::<f32>(), out.len())),
            }
        }
    }

    /// Writes elements from (`row`, `col`) on, each rounded once.
    ///
    /// # Safety
    /// They are inside the matrix and nobody else touches them.
    pub unsafe fn store(&self, row: usize, col: usize, values: &[f32]) {
        // SAFETY: inside, by contract.
        unsafe {
            let p = self.data.add((row * self.ld + col) * self.dtype.size());
            match self.dtype {
                DType::F16 => {
                    slice::from_raw_parts_mut(p.cast::<f16>(), values.len()).convert_from_f32_slice(values)
                }
                DType::BF16 => {
                    slice::from_raw_parts_mut(p.cast::<bf16>(), values.len()).convert_from_f32_slice(values)
                }
                _ => slice::from_raw_parts_mut(p.cast::<f32>(), values.len()).copy_from_slice(values),
            }
        }
    }

    /// Adds to f32 elements from (`row`, `col`) on.
    ///
    /// # Safety
    /// They are inside the matrix and nobody else touches them.
    pub unsafe fn add(&self, row: usize, col: usize, values: &[f32]) {
        // SAFETY: inside, by contract.
        let to = unsafe {
            slice::from_raw_parts_mut(self.floats().cast_mut().add(row * self.ld + col), values.len())
        };
        for (to, v) in to.iter_mut().zip(values) {
            *to += v;
        }
    }
}

/// A checked `nvfp4_exec`.
#[derive(Clone, Copy)]
pub struct Exec {
    parallel: Option<abi::ParallelFn>,
    user: *mut c_void,
    threads: usize,
    stream: usize,
    workspace: *mut u8,
    workspace_bytes: u64,
}

impl Exec {
    /// NULL is this thread alone without scratch.
    ///
    /// # Safety
    /// As [`read`].
    pub unsafe fn read(p: *const abi::Exec) -> Outcome<Self> {
        if p.is_null() {
            return Ok(Self {
                parallel: None,
                user: ptr::null_mut(),
                threads: 1,
                stream: 0,
                workspace: ptr::null_mut(),
                workspace_bytes: 0,
            });
        }
        // SAFETY: forwarded.
        let e = unsafe { read(p, "exec")? };
        if e.reserved != 0 {
            return Err(Fail::invalid("exec", "reserved = 0", e.reserved));
        }
        Ok(Self {
            parallel: e.parallel,
            user: e.parallel_user,
            threads: if e.parallel.is_some() { e.threads.max(1) as usize } else { 1 },
            stream: e.stream.addr(),
            workspace: e.workspace.cast(),
            workspace_bytes: e.workspace_bytes,
        })
    }

    /// The caller's queue, for CUDA.
    pub fn stream(&self) -> usize {
        self.stream
    }

    /// Scratch of at least `need` bytes, 64-byte aligned.
    pub fn scratch(&self, need: u64) -> Outcome<*mut u8> {
        self.scratch_aligned(need, 64)
    }

    /// The same on `align` bytes: the device's address where the call runs there.
    pub fn scratch_aligned(&self, need: u64, align: usize) -> Outcome<*mut u8> {
        if need == 0 {
            return Ok(ptr::null_mut());
        }
        if self.workspace.is_null() || self.workspace_bytes < need {
            let have = if self.workspace.is_null() { 0 } else { self.workspace_bytes };
            return Err(Fail::invalid("workspace", format!("{need} bytes"), format!("{have} bytes")));
        }
        if self.workspace.addr() % align != 0 {
            let need = format!("{align}-byte alignment");
            return Err(Fail::invalid("workspace", need, format!("{:p}", self.workspace)));
        }
        Ok(self.workspace)
    }

    /// How many tasks to make of `items`: a few per thread, so that a late thread costs little.
    pub fn tasks(&self, items: usize) -> usize {
        self.tasks_of(4, items)
    }

    /// The same with `each` tasks per thread.
    pub fn tasks_of(&self, each: usize, items: usize) -> usize {
        if self.threads == 1 { items.min(1) } else { items.min(self.threads.saturating_mul(each)) }
    }

    /// Runs `body(0)` to `body(tasks - 1)`, each once. Allocates nothing.
    pub fn run<F: Fn(usize) + Sync>(&self, tasks: usize, body: F) -> Outcome {
        let Some(parallel) = self.parallel.filter(|_| tasks > 1) else {
            (0..tasks).for_each(body);
            return Ok(());
        };
        let job = Job { body: &body, tasks, done: AtomicUsize::new(0), failed: AtomicBool::new(false) };
        // SAFETY: the header's contract: every task has ended when it returns, so `job` outlives its uses.
        unsafe { parallel(self.user, tasks, task::<F>, ptr::from_ref(&job).cast_mut().cast()) };
        let done = job.done.load(Ordering::Acquire);
        if job.failed.load(Ordering::Relaxed) || done != tasks {
            return Err(Fail::internal(format!(
                "parallel: need {tasks} tasks done once; have {done}, or one panicked"
            )));
        }
        Ok(())
    }
}

struct Job<'a, F> {
    body: &'a F,
    tasks: usize,
    done: AtomicUsize,
    failed: AtomicBool,
}

unsafe extern "C" fn task<F: Fn(usize) + Sync>(arg: *mut c_void, index: usize) {
    // SAFETY: `run` passes a job of this very type and waits for us.
    let job = unsafe { &*arg.cast::<Job<'_, F>>() };
    if index >= job.tasks || guarded(|| (job.body)(index)).is_err() {
        job.failed.store(true, Ordering::Relaxed);
    }
    job.done.fetch_add(1, Ordering::Release);
}

/// Part `t` of `0..items` cut into `tasks` nearly equal ranges.
pub fn part(items: usize, tasks: usize, t: usize) -> std::ops::Range<usize> {
    let cut = |i: usize| items / tasks * i + (items % tasks).min(i);
    cut(t)..cut(t + 1)
}
