//! {{name}}: NVFP4 weights, inputs as they are (W4A16), on the CPU. This file is the interface, kernel.rs the
//! arithmetic. q4_plugin.h has the rules, q4_plugin.rs the same structures; what is refused here is refused
//! in `check`, with reasons.
mod kernel;
mod operand;
#[allow(dead_code, unused_imports)] // numbers and structures that this backend has no use for
mod q4_plugin;

use kernel::{GROUP, Packed, TILE};
use operand::Operand;
use q4_plugin::*;
use std::ffi::c_void;
use std::mem::size_of;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{ptr, slice};

const NAME: &str = "{{name}}";
const VERSION: &str = env!("CARGO_PKG_VERSION");
const VENDOR: &str = "{{vendor}}";

#[unsafe(no_mangle)]
pub static q4_plugin_descriptor: Q4Descriptor = Q4Descriptor::new(NAME, VERSION, VENDOR);

/// What `Q4Backend` points to: handles of your driver, if there are any.
struct Backend;

/// What `Q4Prepared` points to.
struct Prepared {
    w: Packed,
    max_m: u64,
    x_dtype: u32,
    y_dtype: u32,
}

// ---- errors: inside they are values, at the border a status and a text; nothing unwinds out of here ----

struct Failure(Q4Status, &'static str);

fn require(holds: bool, status: Q4Status, text: &'static str) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(Failure(status, text)) }
}

fn guarded(err: *mut Q4Error, body: impl FnOnce() -> Result<(), Failure>) -> Q4Status {
    let (code, text) = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => (status::OK, ""),
        Ok(Err(Failure(code, text))) => (code, text),
        Err(_) => (status::PANICKED, "a panic"),
    };
    // SAFETY: NULL, or a buffer of the caller that states its size.
    if let Some(err) = unsafe { err.as_mut() }
        && err.struct_size >= size_of::<Q4Error>()
    {
        if !err.ptr.is_null() {
            // SAFETY: `cap` bytes are writable.
            unsafe { ptr::copy_nonoverlapping(text.as_ptr(), err.ptr, text.len().min(err.cap)) };
        }
        (err.len, err.native_code) = (text.len(), 0);
    }
    code
}

/// A structure of the caller, as far as both sides know it.
///
/// # Safety
/// As [`read`].
unsafe fn known<T: Prefixed>(from: *const T) -> Result<T, Failure> {
    // SAFETY: the caller's.
    unsafe { read(from) }.ok_or(Failure(status::ABI, "a structure of an unknown version"))
}

// ---- which products: every reason, and the same ones whoever asks ----

fn is_float(number: u32) -> bool {
    [dtype::F32, dtype::F16, dtype::BF16].contains(&number)
}

/// Every reason against a product: code, need, have.
fn check(s: &Q4LinearSpec, rows: &[u64]) -> Vec<(&'static str, &'static str, String)> {
    let mut all = Vec::new();
    let mut need = |holds: bool, code, need, have: String| {
        if !holds {
            all.push((code, need, have));
        }
    };
    let is_nvfp4 = s.schema == schema::NVFP4 && s.schema_revision == 1;
    need(is_nvfp4, "schema-unsupported", "nvfp4@1", format!("schema {}", s.schema));
    need(s.path == path::FUSED_DEQUANT, "path-unsupported", "fused-dequant", format!("path {}", s.path));
    let have = format!("activations {}", s.activations);
    need(s.activations == activations::NATIVE, "activations-unsupported", "native activations", have);
    let others = s.ops & !(op::FORWARD | op::DEQUANTIZE);
    need(others == 0, "op-unsupported", "forward and dequantize", format!("ops {}", s.ops));
    let have = format!("x of type {}, y of type {}", s.x_dtype, s.y_dtype);
    let are_floats = is_float(s.x_dtype) && is_float(s.y_dtype);
    need(are_floats, "dtype-unsupported", "float32, float16 or bfloat16", have);
    let is_layout = [scale_layout::ROW_MAJOR, scale_layout::TILES_128X4].contains(&s.scale_layout);
    let have = format!("layout {}", s.scale_layout);
    need(is_layout, "layout-unsupported", "row-major scales or tiles of 128 x 4", have);
    need(s.device_type == DEVICE_CPU, "device-absent", "the CPU", format!("device type {}", s.device_type));
    let is_whole = s.k > 0 && s.k % GROUP as u64 == 0;
    need(is_whole, "shape-unsupported", "k % 16 == 0, k > 0", format!("k = {}", s.k));
    let is_some = !rows.is_empty() && s.max_m > 0 && !rows.contains(&0);
    let have = format!("segments of {rows:?} rows, {} rows in a call", s.max_m);
    need(is_some, "shape-unsupported", "rows in every segment and in a call", have);
    // An instruction set: ask env.cpu_features in can_prepare, a list of words (q4_plugin.h has all there
    // are), and the CPU itself in prepare, which has no env. The code of such a reason is "device-arch".
    all
}

/// # Safety
/// `segment_rows` has `n_segments` elements.
unsafe fn rows_of(s: &Q4LinearSpec) -> &[u64] {
    if s.n_segments == 0 {
        return &[];
    }
    // SAFETY: the caller's.
    unsafe { slice::from_raw_parts(s.segment_rows, s.n_segments as usize) }
}

unsafe extern "C" fn can_prepare(
    _: *const Q4Backend,
    spec: *const Q4LinearSpec,
    _: *const Q4Env,
    sink: Q4RejectSink,
    user: *mut c_void,
    err: *mut Q4Error,
) -> Q4Status {
    guarded(err, || {
        // SAFETY: a structure that states its size, with as many segments as it says.
        let spec = unsafe { known(spec) }?;
        // SAFETY: as above.
        let reasons = check(&spec, unsafe { rows_of(&spec) });
        for (code, need, have) in &reasons {
            let [code, need, have] =
                [*code, *need, have.as_str()].map(|t| Q4Str { ptr: t.as_ptr(), len: t.len() });
            // SAFETY: the caller's function, with the caller's pointer and texts that outlive the call.
            unsafe { sink(user, code, need, have) };
        }
        require(reasons.is_empty(), status::UNSUPPORTED, "see the reasons")
    })
}

// ---- weights: repacked once, nothing of the caller's is kept ----

/// Value of the E4M3 bytes 0x00 to 0x7e.
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3), f32::from(byte & 7));
    if exponent == 0 { mantissa / 512.0 } else { (8.0 + mantissa) * 2f32.powi(exponent - 10) }
}

/// Byte of a block scale in tiles of 128 rows by 4 scales.
fn tiled(row: usize, group: usize, groups: usize) -> usize {
    let tile = row / 128 * groups.div_ceil(4) + group / 4;
    tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4
}

impl Packed {
    /// Adds the rows of one segment.
    fn take(&mut self, spec: &Q4LinearSpec, s: &Q4Segment) -> Result<(), Failure> {
        let (rows, groups) = (s.rows as usize, self.k / GROUP);
        let is_tiled = spec.scale_layout == scale_layout::TILES_128X4;
        let stored =
            if is_tiled { rows.next_multiple_of(128) * groups.next_multiple_of(4) } else { rows * groups };
        let fits = s.codes_bytes as usize == rows * self.k / 2 && s.scales_bytes as usize == stored;
        require(fits, status::INVALID_ARGUMENT, "other bytes than rows and k say")?;
        let is_same = s.global_convention == spec.global_convention;
        require(is_same, status::INVALID_ARGUMENT, "another convention than the spec says")?;
        // SAFETY: as many bytes as the segment says, of any alignment.
        let (codes, scales) = unsafe {
            (
                slice::from_raw_parts(s.codes.cast::<u8>(), rows * self.k / 2),
                slice::from_raw_parts(s.scales.cast::<u8>(), stored),
            )
        };
        self.codes.extend_from_slice(codes);
        let is_scale = s.global_scale.is_finite() && s.global_scale > 0.0;
        let what = "a per-tensor scale that is not finite and above 0";
        require(is_scale || s.global_convention == convention::NONE, status::SCALE_INVALID, what)?;
        for row in 0..rows {
            for group in 0..groups {
                let byte = scales[if is_tiled { tiled(row, group, groups) } else { row * groups + group }];
                // A set sign bit, -0 included, or NaN.
                require(byte < 0x7f, status::SCALE_INVALID, "a block scale is NaN or negative")?;
                self.scales.push(match s.global_convention {
                    convention::MULTIPLY => e4m3(byte) * s.global_scale,
                    convention::DIVIDE => e4m3(byte) / s.global_scale,
                    _ => e4m3(byte),
                });
            }
        }
        Ok(())
    }
}

unsafe extern "C" fn prepare(
    _: *const Q4Backend,
    spec: *const Q4LinearSpec,
    weight: *const Q4Weight,
    _: *const Q4Exec,
    out: *mut *mut Q4Prepared,
    err: *mut Q4Error,
) -> Q4Status {
    guarded(err, || {
        // SAFETY: structures that state their sizes.
        let (spec, weight) = unsafe { (known(spec)?, known(weight)?) };
        // SAFETY: as many segments as the spec says.
        let reasons = check(&spec, unsafe { rows_of(&spec) });
        require(reasons.is_empty(), status::UNSUPPORTED, "can_prepare refuses this product")?;
        let (n, k) = (spec.n as usize, spec.k as usize);
        let is_shape = n > 0 && n <= usize::MAX / 8 / k && weight.n_segments == spec.n_segments;
        require(is_shape, status::INVALID_ARGUMENT, "a shape that contradicts itself")?;
        let mut w = Packed {
            n,
            k,
            codes: Vec::with_capacity(n * (k / 2)),
            scales: Vec::with_capacity(n * (k / GROUP)),
        };
        // SAFETY: at least one segment.
        let apart = unsafe { (*weight.segments).struct_size };
        for i in 0..weight.n_segments as usize {
            // Elements are as far apart as the first one says: the program may know more fields.
            let at = weight.segments.wrapping_byte_add(i * apart);
            // SAFETY: inside of the array, and states its size.
            w.take(&spec, &unsafe { known(at) }?)?;
        }
        require(w.scales.len() == n * (k / GROUP), status::INVALID_ARGUMENT, "other rows than n")?;
        let (max_m, x_dtype, y_dtype) = (spec.max_m, spec.x_dtype, spec.y_dtype);
        let prepared = Box::new(Prepared { w, max_m, x_dtype, y_dtype });
        // SAFETY: a place for a pointer.
        unsafe { *out = Box::into_raw(prepared).cast() };
        Ok(())
    })
}

unsafe extern "C" fn release(p: *mut Q4Prepared) {
    if !p.is_null() {
        // SAFETY: from `prepare`, released once.
        drop(unsafe { Box::from_raw(p.cast::<Prepared>()) });
    }
}

/// # Safety
/// From [`prepare`], not released yet.
unsafe fn of<'a>(p: *const Q4Prepared) -> &'a Prepared {
    // SAFETY: the caller's.
    unsafe { &*p.cast() }
}

unsafe extern "C" fn info(p: *const Q4Prepared, out: *mut Q4PreparedInfo, err: *mut Q4Error) -> Q4Status {
    guarded(err, || {
        // SAFETY: a live weight and a structure that states its size.
        let (w, given) = unsafe { (&of(p).w, known(out)?) };
        let facts = Q4PreparedInfo {
            struct_size: given.struct_size,
            n: w.n as u64,
            k: w.k as u64,
            resident_bytes: (size_of::<Prepared>() + w.codes.len() + 4 * w.scales.len()) as u64,
            path: path::FUSED_DEQUANT,
            activations: activations::NATIVE,
            ops: op::FORWARD | op::DEQUANTIZE,
            reserved: 0,
        };
        // SAFETY: at least as large.
        unsafe { *out = facts };
        Ok(())
    })
}

// ---- calls: no allocation, the caller's threads, the same bits for any number of them ----

/// Runs `body(first, end)` over parts of `0..items` on the caller's threads. The split may depend on their
/// number, results may not.
fn parallel<F: Fn(usize, usize) + Sync>(exec: Option<&Q4Exec>, items: usize, body: F) -> Result<(), Failure> {
    struct Job<F> {
        body: F,
        items: usize,
        piece: usize,
        panicked: std::sync::atomic::AtomicBool,
    }
    unsafe extern "C" fn task<F: Fn(usize, usize) + Sync>(arg: *mut c_void, task: usize) {
        // SAFETY: the job below, which outlives all tasks.
        let job = unsafe { &*arg.cast::<Job<F>>() };
        let first = task * job.piece;
        let end = (first + job.piece).min(job.items);
        // This may be a thread of the program.
        if catch_unwind(AssertUnwindSafe(|| (job.body)(first, end))).is_err() {
            job.panicked.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let lent = exec.and_then(|e| Some((e.parallel?, e.parallel_user, e.threads as usize)));
    let pieces = lent.map_or(1, |l| 4 * l.2).clamp(1, items);
    let piece = items.div_ceil(pieces);
    let job = Job { body, items, piece, panicked: false.into() };
    let arg = (&raw const job).cast_mut().cast();
    match lent {
        // SAFETY: the caller's function with the caller's pointer; it returns when all tasks are done.
        Some((run, user, _)) if items > piece => unsafe { run(user, items.div_ceil(piece), task::<F>, arg) },
        // SAFETY: all items are one piece.
        _ => unsafe { task::<F>(arg, 0) },
    }
    require(!job.panicked.into_inner(), status::PANICKED, "a panic in a task")
}

unsafe extern "C" fn workspace(p: *const Q4Prepared, m: u64) -> u64 {
    // SAFETY: a live weight.
    let p = unsafe { of(p) };
    // Inputs of 16 bits are widened a tile at a time.
    if p.x_dtype == dtype::F32 { 0 } else { m.min(TILE as u64) * p.w.k as u64 * 4 }
}

unsafe extern "C" fn forward(
    p: *const Q4Prepared,
    x: *const Q4Matrix,
    y: *const Q4Matrix,
    exec: *const Q4Exec,
    err: *mut Q4Error,
) -> Q4Status {
    guarded(err, || {
        // SAFETY: a live weight; structures that state their sizes; there may be no context.
        let (need, p, x, y, exec) = unsafe {
            let exec = if exec.is_null() { None } else { Some(known(exec)?) };
            (workspace(p, (*x).rows), of(p), known(x)?, known(y)?, exec)
        };
        let (k, n) = (p.w.k, p.w.n);
        let are_types = x.dtype == p.x_dtype && y.dtype == p.y_dtype && x.rows <= p.max_m;
        let operands = Operand::new(&x, x.rows, k).zip(Operand::new(&y, x.rows, n));
        let operands = operands.filter(|_| are_types);
        let Some((x, y)) = operands else {
            return Err(Failure(status::INVALID_ARGUMENT, "operands that do not fit the weight"));
        };
        let scratch = exec.map_or((ptr::null_mut(), 0), |e| (e.workspace, e.workspace_bytes));
        let overlap = x.overlaps(y.range()) || [&x, &y].iter().any(|o| o.overlaps((scratch.0 as usize, scratch.1 as usize)));
        require(!overlap, status::INVALID_ARGUMENT, "operands that overlap")?;
        let is_room = need == 0 || (!scratch.0.is_null() && scratch.1 >= need);
        require(is_room, status::INVALID_ARGUMENT, "a workspace that is too small")?;
        for first in (0..x.rows()).step_by(TILE) {
            let rows = TILE.min(x.rows() - first);
            let mut tile: [&[f32]; TILE] = [&[]; TILE];
            for (r, row) in tile.iter_mut().enumerate().take(rows) {
                *row = match x.f32_row(first + r) {
                    Some(row) => row,
                    None => {
                        // SAFETY: 64-byte aligned scratch with room for a tile, which shares no byte with an
                        // operand.
                        let wide = unsafe { slice::from_raw_parts_mut(scratch.0.cast::<f32>().add(r * k), k) };
                        x.widen(first + r, wide);
                        wide
                    }
                };
            }
            let (tile, y) = (&tile[..rows], &y);
            parallel(exec.as_ref(), n, |start, end| {
                for row in start..end {
                    for (r, sum) in p.w.row(row, tile).into_iter().enumerate().take(rows) {
                        y.store(first + r, row, sum);
                    }
                }
            })?;
        }
        Ok(())
    })
}

unsafe extern "C" fn dequantize(
    p: *const Q4Prepared,
    out: *const Q4Matrix,
    exec: *const Q4Exec,
    err: *mut Q4Error,
) -> Q4Status {
    guarded(err, || {
        // SAFETY: a live weight; structures that state their sizes; there may be no context.
        let (w, out, exec) = unsafe {
            (&of(p).w, known(out)?, if exec.is_null() { None } else { Some(known(exec)?) })
        };
        let Some(out) = Operand::new(&out, w.n as u64, w.k) else {
            return Err(Failure(status::INVALID_ARGUMENT, "an output that does not fit the weight"));
        };
        let scratch = exec.map_or((0, 0), |e| (e.workspace as usize, e.workspace_bytes as usize));
        require(!out.overlaps(scratch), status::INVALID_ARGUMENT, "operands that overlap")?;
        parallel(exec.as_ref(), w.n, |start, end| {
            for row in start..end {
                for group in 0..w.k / GROUP {
                    for (i, v) in w.decode(row, group).into_iter().enumerate() {
                        out.store(row, group * GROUP + i, v);
                    }
                }
            }
        })
    })
}

// ---- the table ----

unsafe extern "C" fn create(out: *mut *mut Q4Backend, err: *mut Q4Error) -> Q4Status {
    guarded(err, || {
        // SAFETY: a place for a pointer.
        unsafe { *out = Box::into_raw(Box::new(Backend)).cast() };
        Ok(())
    })
}

unsafe extern "C" fn destroy(b: *mut Q4Backend) {
    // SAFETY: from `create`, destroyed once.
    drop(unsafe { Box::from_raw(b.cast::<Backend>()) });
}

/// (schema, revision, path) that `can_prepare` may ever accept.
static OFFERS: [Q4Offer; 1] =
    [Q4Offer { schema: schema::NVFP4, revision: 1, path: path::FUSED_DEQUANT, reserved: 0 }];

static TABLE: Q4BackendV1 = Q4BackendV1 {
    struct_size: size_of::<Q4BackendV1>(),
    abi_major: ABI_MAJOR,
    abi_minor: ABI_MINOR,
    name: Q4Str::new(NAME),
    version: Q4Str::new(VERSION),
    vendor: Q4Str::new(VENDOR),
    priority: -20, // below the kernels q4 comes with, which have 0
    reserved: 0,
    n_offers: OFFERS.len() as u64,
    offers: OFFERS.as_ptr(),
    create: Some(create),
    destroy: Some(destroy),
    can_prepare: Some(can_prepare),
    prepare: Some(prepare),
    release: Some(release),
    info: Some(info),
    workspace: Some(workspace),
    forward: Some(forward),
    dequantize: Some(dequantize),
    backward_input: None, // inference only
    probe: None,
    create_with: None,
    footprint: None,
    fuses: None,
    forward_fused: None,
    device: None, // and memory of its own: the CPU is all it serves
    device_alloc: None,
    device_free: None,
    copy_in: None,
    copy_out: None,
    synchronize: None,
    group: None, // nor weights of experts in one call
    release_group: None,
    group_workspace: None,
    forward_grouped: None,
};

/// # Safety
/// `out` states its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn q4_plugin_query(abi_major: u32, id: u32, out: *mut Q4Interface) -> Q4Status {
    // SAFETY: the caller's.
    let Some(out) = (unsafe { out.as_mut() }) else { return status::ABI };
    if abi_major != ABI_MAJOR || id != INTERFACE_BACKEND || out.struct_size < size_of::<Q4Interface>() {
        return status::ABI;
    }
    out.abi_minor = ABI_MINOR;
    out.table = (&raw const TABLE).cast();
    status::OK
}
