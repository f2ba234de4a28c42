//! From the contract to core: what a program lent, checked and as the types a backend is written against.
use crate::{codes, message};
use q4_core::formats::{Wire, kind};
use q4_core::memory::UnifiedMemory;
use q4_core::{
    ActGlobal, ActQuant, Activations, BuiltinOptions, Code, CudaDevice, CudaTools, DType, Device, Error,
    ExecPath, Found, Fp8Inputs, FuseSet, Fusion, GlobalScale, HostEnv, LinearSpec, OpSet, Part, Q4Schema,
    Result, RmsNorm, Segment, SegmentData, SegmentSpec, TensorView, TensorViewMut,
};
use q4_plugin_abi as abi;
use q4_plugin_abi::{
    Prefixed, Q4CudaDevice, Q4Env, Q4Exec, Q4Found, Q4Fusion, Q4LinearSpec, Q4Matrix, Q4Options, Q4Segment,
    Q4Weight,
};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Most row segments a product has; more is a damaged spec.
const MAX_SEGMENTS: u64 = 4096;
/// Longest text that is taken over.
const MAX_TEXT: usize = 4096;

/// A size-prefixed structure, or an error that names it.
///
/// # Safety
/// As [`abi::read`].
pub unsafe fn read<T: Prefixed>(from: *const T, what: &str) -> Result<T> {
    // SAFETY: forwarded to the caller.
    unsafe { abi::read(from) }.ok_or_else(|| {
        Error::new(Code::LibraryRefused, what)
            .need(format!("an aligned structure of at least {} bytes", T::MIN))
            .have(if from.is_null() { "NULL" } else { "a shorter or misaligned one" })
    })
}

/// The product and the path that are asked for.
///
/// # Safety
/// `raw` and what it points to are as `q4_linear_spec` says.
pub unsafe fn spec(raw: *const Q4LinearSpec) -> Result<(LinearSpec, ExecPath)> {
    // SAFETY: forwarded to the caller.
    let raw = unsafe { read(raw, "spec of a product") }?;
    if raw.n_segments == 0 || raw.n_segments > MAX_SEGMENTS || raw.segment_rows.is_null() {
        return Err(invalid("row segments", raw.n_segments));
    }
    let count = raw.n_segments as usize;
    // SAFETY: the contract gives both arrays `n_segments` elements.
    let rows = unsafe { std::slice::from_raw_parts(raw.segment_rows, count) };
    let mut segments = Vec::with_capacity(count);
    for (i, &rows) in rows.iter().enumerate() {
        // SAFETY: as above; NULL stands for no names.
        let name = (!raw.segment_names.is_null()).then(|| unsafe { *raw.segment_names.add(i) });
        // SAFETY: a text of the caller.
        let name = name.map_or_else(String::new, |n| unsafe { message::text(n, MAX_TEXT) }.into_owned());
        segments.push(SegmentSpec { name, rows: size(rows, "rows")? });
    }
    let spec = LinearSpec {
        segments,
        schema: schema(&raw)?,
        k: size(raw.k, "in features")?,
        max_m: size(raw.max_m, "rows of a call")?,
        x: known(codes::dtype_from(raw.x_dtype), "input type", raw.x_dtype)?,
        y: known(codes::dtype_from(raw.y_dtype), "output type", raw.y_dtype)?,
        activations: activations(&raw)?,
        device: known(codes::device_from(raw.device_type, raw.device_id), "device", raw.device_type)?,
        ops: OpSet(
            u8::try_from(raw.ops)
                .ok()
                .filter(|o| *o <= OpSet::ALL.0)
                .ok_or_else(|| invalid("ops", raw.ops))?,
        ),
    };
    if spec.n() as u64 != raw.n {
        return Err(invalid("out features other than the sum of the segments", raw.n));
    }
    Ok((spec, known(codes::path_from(raw.path), "path", raw.path)?))
}

fn schema(raw: &Q4LinearSpec) -> Result<Q4Schema> {
    let name = known(codes::schema_from(raw.schema, raw.schema_revision), "schema", raw.schema)?;
    let wire = Wire {
        scale_layout: codes::layout_from(raw.scale_layout),
        global: match raw.global_convention {
            abi::convention::NONE => Some(None),
            other => codes::convention_from(other).map(Some),
        },
        nibble_order: codes::order_from(raw.nibble_order),
        block: raw.block,
        nested_block: raw.nested_block,
        dense: codes::dtype_from(raw.dense_dtype),
        scales: codes::dtype_from(raw.scale_dtype),
    };
    let kind = known(kind(name), "schema", raw.schema)?;
    (kind.from_wire)(name, &wire).map_err(|field| {
        let have = match field {
            "scale layout" => raw.scale_layout,
            "convention" => raw.global_convention,
            "nibble order" => raw.nibble_order,
            "type of scales" => raw.scale_dtype,
            _ => raw.dense_dtype,
        };
        invalid(field, have)
    })
}

fn activations(raw: &Q4LinearSpec) -> Result<Activations> {
    match raw.activations {
        abi::activations::NATIVE => Ok(Activations::Native),
        abi::activations::INT8 => Ok(Activations::Int8),
        abi::activations::NVFP4 => {
            let rule = known(codes::rule_from(raw.act_rule), "rule", raw.act_rule)?;
            let global = match raw.act_global_kind {
                abi::global_kind::NONE => ActGlobal::None,
                abi::global_kind::PER_CALL => ActGlobal::PerCall,
                abi::global_kind::STATIC => ActGlobal::Static(fixed(raw)?),
                other => return Err(invalid("source of a per-tensor scale", other)),
            };
            Ok(Activations::Nvfp4(ActQuant { rule, global }))
        }
        abi::activations::FP8 => Ok(Activations::Fp8(match raw.act_global_kind {
            abi::global_kind::PER_ROW => Fp8Inputs::PerRow,
            abi::global_kind::PER_BLOCK => Fp8Inputs::PerBlock,
            abi::global_kind::STATIC => Fp8Inputs::Static(fixed(raw)?),
            other => return Err(invalid("source of the scale of FP8 inputs", other)),
        })),
        other => Err(invalid("activations", other)),
    }
}

/// The scale of the inputs that a spec has with `STATIC`.
fn fixed(raw: &Q4LinearSpec) -> Result<GlobalScale> {
    let of = raw.act_global_convention;
    GlobalScale::new(known(codes::convention_from(of), "convention", of)?, raw.act_global)
}

fn optional(convention: u32) -> Result<Option<q4_core::Convention>> {
    match convention {
        abi::convention::NONE => Ok(None),
        other => known(codes::convention_from(other), "convention", other).map(Some),
    }
}

/// The segments of a weight of `spec`, with views of the lent bytes.
///
/// # Safety
/// `raw` and what it points to are as `q4_weight` says and live for `'a`.
pub unsafe fn segments<'a>(raw: *const Q4Weight, spec: &LinearSpec) -> Result<Vec<Segment<'a>>> {
    // SAFETY: forwarded to the caller.
    let raw = unsafe { read(raw, "weight") }?;
    if raw.n_segments != spec.segments.len() as u64 || raw.segments.is_null() || !raw.segments.is_aligned() {
        return Err(invalid("segments of a weight", raw.n_segments));
    }
    // SAFETY: at least one segment, which begins with the stride of all.
    let stride = unsafe { raw.segments.cast::<usize>().read() };
    let at = |i: usize| raw.segments.cast::<u8>().wrapping_add(i * stride).cast::<Q4Segment>();
    (0..spec.segments.len())
        .map(|i| {
            // SAFETY: the contract puts a segment there.
            let s = unsafe { read(at(i), "segment of a weight") }?;
            // SAFETY: forwarded to the caller.
            unsafe { segment(&s, spec) }
        })
        .collect()
}

unsafe fn segment<'a>(s: &Q4Segment, spec: &LinearSpec) -> Result<Segment<'a>> {
    let mut data = SegmentData::default().with_offset(s.nested_offset);
    // What there has to be, whatever the extents: sizes are checked with the weight.
    for part in spec.schema.parts(0, 0) {
        let (ptr, bytes) = match part.part {
            Part::Codes => (s.codes, s.codes_bytes),
            Part::Scales => (s.scales, s.scales_bytes),
            Part::Map => (s.nested_map, s.nested_map_bytes),
            Part::SecondScales => (s.nested_absmax, s.nested_absmax_bytes),
            Part::Zeros => (s.zeros, s.zeros_bytes),
        };
        // SAFETY: every pointer of a segment is good for the bytes beside it.
        data = data.with(part.part, unsafe { bytes_view(ptr, bytes, part.dtype) }?);
    }
    if spec.schema.wire().global.is_some() {
        let convention = optional(s.global_convention)?;
        data.global = convention.map(|c| GlobalScale::new(c, s.global_scale)).transpose()?;
    }
    Ok(Segment { rows: size(s.rows, "rows")?, data })
}

/// A part of a stored weight: in host memory, whatever device the product is for.
unsafe fn bytes_view<'a>(ptr: *const c_void, bytes: u64, dtype: DType) -> Result<TensorView<'a>> {
    let bytes = size(bytes, "bytes of a weight")?;
    let Some(data) = NonNull::new(ptr.cast_mut()) else {
        return Err(invalid("part of a weight at NULL", bytes));
    };
    let len = (bytes / dtype.size()) as i64;
    // SAFETY: forwarded to the caller.
    unsafe { TensorView::from_raw(data, bytes, Device::Cpu, dtype, &[len], &[1]) }
}

/// Facts about a machine.
///
/// # Safety
/// `raw` and what it points to are as `q4_env` says.
pub unsafe fn env(raw: *const Q4Env) -> Result<HostEnv> {
    // SAFETY: forwarded to the caller.
    let raw = unsafe { read(raw, "facts about the machine") }?;
    // SAFETY: texts of the caller.
    let text = |t| unsafe { message::text(t, MAX_TEXT) };
    let (mut cuda, mut tools) = (Vec::new(), CudaTools::default());
    if raw.n_cuda > 0 && !raw.cuda.is_null() && raw.cuda.is_aligned() {
        // SAFETY: at least one device, which begins with the stride of all.
        let stride = unsafe { raw.cuda.cast::<usize>().read() };
        for i in 0..raw.n_cuda.min(MAX_SEGMENTS) as usize {
            let at = raw.cuda.cast::<u8>().wrapping_add(i * stride).cast::<Q4CudaDevice>();
            // SAFETY: the contract puts a device there.
            let d = unsafe { read(at, "CUDA device") }?;
            let unusable = text(d.unusable);
            if !unusable.is_empty() {
                tools.unusable.insert(d.ordinal, unusable.into_owned());
            }
            cuda.push(CudaDevice {
                ordinal: d.ordinal,
                capability: (d.cc_major, d.cc_minor),
                name: text(d.name).into_owned(),
                memory: d.memory,
            });
        }
    }
    let found = |f: Q4Found| match f.version {
        0 => Found::No(text(f.missing).into_owned()),
        version => Found::Yes(version),
    };
    (tools.nvrtc, tools.cublaslt) = (found(raw.nvrtc), found(raw.cublaslt));
    Ok(HostEnv {
        arch: text(raw.arch).into_owned(),
        cpu_features: text(raw.cpu_features).split_whitespace().map(str::to_owned).collect(),
        processors: raw.processors as usize,
        cuda,
        cuda_driver: Some(raw.cuda_driver).filter(|v| *v != 0),
        cuda_missing: Some(text(raw.cuda_missing).into_owned()).filter(|t| !t.is_empty()),
        cuda_tools: tools,
        ..HostEnv::default()
    })
}

/// What a backend is made with.
///
/// # Safety
/// `raw` and what it points to are as `q4_options` says.
pub unsafe fn options(raw: *const Q4Options) -> Result<BuiltinOptions> {
    // SAFETY: forwarded to the caller.
    let raw = unsafe { read(raw, "options of a backend") }?;
    // SAFETY: a text of the caller.
    let isa = unsafe { message::text(raw.isa, MAX_TEXT) }.into_owned();
    let unified_memory = match raw.unified_memory {
        abi::unified_memory::DISABLED => UnifiedMemory::Disabled,
        abi::unified_memory::PREFER => UnifiedMemory::Prefer,
        abi::unified_memory::REQUIRE => UnifiedMemory::Require,
        other => return Err(invalid("unified memory", other)),
    };
    Ok(BuiltinOptions {
        isa: Some(isa).filter(|name| !name.is_empty()),
        cuda: (raw.has_cuda != 0).then_some(raw.cuda),
        unified_memory,
        ..BuiltinOptions::default()
    })
}

/// The parts of a fused product; `None` for bits that nothing stands for.
pub fn fuse_set(parts: u32) -> Option<FuseSet> {
    u8::try_from(parts).ok().map(FuseSet).filter(|set| FuseSet::ALL.contains(*set))
}

/// What a product does besides multiplying.
///
/// # Safety
/// `raw` and what it points to are as `q4_fusion` says and live for `'a`.
pub unsafe fn fusion<'a>(raw: *const Q4Fusion) -> Result<Fusion<'a>> {
    // SAFETY: forwarded to the caller.
    let raw = unsafe { read(raw, "parts of a fused product") }?;
    let set = fuse_set(raw.parts).ok_or_else(|| {
        Error::new(Code::Unsupported, "a fused product")
            .need("parts that this interface knows")
            .have(format!("{:#b}", raw.parts))
    })?;
    if set.contains(FuseSet::NORM) == raw.norm_weight.is_null() {
        return Err(invalid("weight of a norm, exactly where there is one", raw.parts));
    }
    let norm = if raw.norm_weight.is_null() {
        None
    } else {
        // SAFETY: forwarded to the caller.
        Some(RmsNorm { weight: unsafe { view(raw.norm_weight) }?, eps: raw.norm_eps })
    };
    let (gate, accumulate) = (set.contains(FuseSet::GATE), set.contains(FuseSet::ACCUMULATE));
    Ok(Fusion { norm, gate, accumulate })
}

/// An operand to read.
///
/// # Safety
/// `raw` and what it points to are as `q4_matrix` says and live for `'a`.
pub unsafe fn view<'a>(raw: *const Q4Matrix) -> Result<TensorView<'a>> {
    // SAFETY: forwarded to the caller.
    let m = unsafe { read(raw, "operand") }?;
    let (data, shape, strides, dtype, device) = operand(&m)?;
    // SAFETY: forwarded to the caller; bounds are checked there.
    unsafe { TensorView::from_raw(data, size(m.bytes, "bytes")?, device, dtype, &shape, &strides) }
}

/// An operand to write.
///
/// # Safety
/// As [`view`], and nobody else uses those bytes for `'a`.
pub unsafe fn view_mut<'a>(raw: *const Q4Matrix) -> Result<TensorViewMut<'a>> {
    // SAFETY: forwarded to the caller.
    let m = unsafe { read(raw, "operand") }?;
    let (data, shape, strides, dtype, device) = operand(&m)?;
    // SAFETY: forwarded to the caller; bounds are checked there.
    unsafe { TensorViewMut::from_raw(data, size(m.bytes, "bytes")?, device, dtype, &shape, &strides) }
}

/// Where the rows of each of `count` weights begin, and where the last ones end.
///
/// # Safety
/// `raw` addresses `count + 1` numbers on `device` for `'a`.
pub unsafe fn offsets<'a>(raw: *const i32, count: usize, device: Device) -> Result<TensorView<'a>> {
    let Some(data) = NonNull::new(raw.cast_mut()).filter(|data| data.is_aligned()) else {
        return Err(invalid("offsets", format!("{raw:p}")));
    };
    let bytes = (count + 1) * size_of::<i32>();
    // SAFETY: forwarded to the caller.
    unsafe { TensorView::from_raw(data.cast(), bytes, device, DType::I32, &[count as i64 + 1], &[1]) }
}

type Operand = (NonNull<c_void>, [i64; 2], [i64; 2], DType, Device);

fn operand(m: &Q4Matrix) -> Result<Operand> {
    let data = NonNull::new(m.data).ok_or_else(|| invalid("operand at NULL", m.bytes))?;
    let dtype = known(codes::dtype_from(m.dtype), "operand type", m.dtype)?;
    if m.data.addr() % dtype.size() != 0 {
        return Err(invalid("operand that is not aligned for its type", format!("{:p}", m.data)));
    }
    let extent = |v: u64| i64::try_from(v).map_err(|_| invalid("extent", v));
    if m.ld < m.cols {
        return Err(invalid("leading stride", m.ld));
    }
    Ok((
        data,
        [extent(m.rows)?, extent(m.cols)?],
        [extent(m.ld)?, 1],
        dtype,
        known(codes::device_from(m.device_type, m.device_id), "device", m.device_type)?,
    ))
}

/// Operands of a call, its scratch among them, at most.
pub const OPERANDS: usize = 4;

/// Fails unless operands and scratch share no byte, from the first element of each to its last.
pub fn apart(operands: [Option<&TensorView<'_>>; OPERANDS]) -> Result<()> {
    let reach = |view: &TensorView<'_>| {
        let start = view.as_ptr() as usize;
        (start, start + view.span())
    };
    let reaches = operands.map(|view| view.map_or((0, 0), reach));
    for (i, a) in reaches.iter().enumerate() {
        for b in &reaches[..i] {
            if a.0 < b.1 && b.0 < a.1 {
                return Err(shared(a, b));
            }
        }
    }
    Ok(())
}

#[cold]
fn shared(a: &(usize, usize), b: &(usize, usize)) -> Error {
    Error::new(Code::ShapeMismatch, "operands of a plugin call")
        .need("operands and scratch that share no byte")
        .have(format!("{:#x?} and {:#x?}", a.0..a.1, b.0..b.1))
}

/// Scratch of a call and the device it runs on.
///
/// # Safety
/// `exec` is as `q4_exec` says and its workspace lives for `'a`.
pub unsafe fn workspace<'a>(exec: &Q4Exec) -> Result<(Device, Option<TensorViewMut<'a>>)> {
    let device = known(codes::device_from(exec.device_type, exec.device_id), "device", exec.device_type)?;
    let Some(data) = NonNull::new(exec.workspace) else { return Ok((device, None)) };
    let bytes = size(exec.workspace_bytes, "workspace")?;
    // SAFETY: forwarded to the caller.
    let view = unsafe { TensorViewMut::from_raw(data, bytes, device, DType::U8, &[bytes as i64], &[1]) }?;
    Ok((device, Some(view)))
}

fn size(value: u64, what: &str) -> Result<usize> {
    usize::try_from(value).ok().filter(|v| *v <= isize::MAX as usize).ok_or_else(|| invalid(what, value))
}

fn known<T>(value: Option<T>, what: &str, number: u32) -> Result<T> {
    value.ok_or_else(|| invalid(what, number))
}

fn invalid(what: &str, have: impl std::fmt::Display) -> Error {
    Error::new(Code::ShapeMismatch, format!("plugin call: {what}"))
        .need(format!("a value of interface {}.{}", abi::ABI_MAJOR, abi::ABI_MINOR))
        .have(have.to_string())
}
