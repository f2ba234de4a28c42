//! From core to the contract: a program lends its specs, weights, operands and threads to a library for one
//! call.
use crate::codes;
use q4_core::memory::UnifiedMemory;
use q4_core::{
    ActGlobal, Activations, BuiltinOptions, Code, DType, Device, Error, ExecContext, ExecPath, Found,
    Fp8Inputs, Fusion, HostEnv, LinearSpec, Part, Q4Schema, Q4Weight, Result, TensorView, TensorViewMut,
    ThreadPool,
};
use q4_plugin_abi as abi;
use q4_plugin_abi::{
    Q4CudaDevice, Q4Env, Q4Exec, Q4Found, Q4Fusion, Q4LinearSpec, Q4Matrix, Q4Options, Q4Segment, Q4Str,
    Q4TaskFn, Q4Weight as RawWeight,
};
use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::size_of;
use std::ptr;

/// A spec and a path as numbers.
pub struct LentSpec<'a> {
    raw: Q4LinearSpec,
    _rows: Vec<u64>,
    _names: Vec<Q4Str>,
    _spec: PhantomData<&'a LinearSpec>,
}

impl<'a> LentSpec<'a> {
    /// Fails for what the contract has no number for.
    pub fn new(spec: &'a LinearSpec, path: ExecPath) -> Result<Self> {
        let rows: Vec<u64> = spec.segments.iter().map(|s| s.rows as u64).collect();
        let names: Vec<Q4Str> = spec.segments.iter().map(|s| Q4Str::new(&s.name)).collect();
        let id = spec.schema.id();
        let (schema, schema_revision) = number(codes::schema_to(id.name), "schema", &id)?;
        let (device_type, device_id) = number(codes::device_to(spec.device), "device", &spec.device)?;
        let mut raw = Q4LinearSpec {
            struct_size: size_of::<Q4LinearSpec>(),
            schema,
            schema_revision,
            scale_layout: 0,
            global_convention: 0,
            nibble_order: 0,
            block: 0,
            nested_block: 0,
            dense_dtype: 0,
            n_segments: rows.len() as u64,
            segment_rows: rows.as_ptr(),
            segment_names: names.as_ptr(),
            n: spec.n() as u64,
            k: spec.k as u64,
            max_m: spec.max_m as u64,
            x_dtype: number(codes::dtype_to(spec.x), "input type", &spec.x)?,
            y_dtype: number(codes::dtype_to(spec.y), "output type", &spec.y)?,
            path: number(codes::path_to(path), "path", &path)?,
            ops: u32::from(spec.ops.0),
            activations: abi::activations::NATIVE,
            act_rule: 0,
            act_global_kind: abi::global_kind::NONE,
            act_global_convention: 0,
            act_global: 0.0,
            device_type,
            device_id,
            scale_dtype: 0,
        };
        encoding(&mut raw, &spec.schema)?;
        activations(&mut raw, &spec.activations)?;
        Ok(Self { raw, _rows: rows, _names: names, _spec: PhantomData })
    }
    /// For a call.
    pub fn raw(&self) -> &Q4LinearSpec {
        &self.raw
    }
}

fn encoding(raw: &mut Q4LinearSpec, schema: &Q4Schema) -> Result<()> {
    let wire = schema.wire();
    if let Some(layout) = wire.scale_layout {
        raw.scale_layout = number(codes::layout_to(layout), "scale layout", schema)?;
    }
    if let Some(convention) = wire.global.flatten() {
        raw.global_convention = number(codes::convention_to(convention), "convention", schema)?;
    }
    if let Some(order) = wire.nibble_order {
        raw.nibble_order = number(codes::order_to(order), "nibble order", schema)?;
    }
    if let Some(dtype) = wire.dense {
        raw.dense_dtype = number(codes::dtype_to(dtype), "dense type", &dtype)?;
    }
    if let Some(dtype) = wire.scales {
        raw.scale_dtype = number(codes::dtype_to(dtype), "type of scales", &dtype)?;
    }
    (raw.block, raw.nested_block) = (wire.block, wire.nested_block);
    Ok(())
}

fn activations(raw: &mut Q4LinearSpec, wanted: &Activations) -> Result<()> {
    raw.activations = activation_kind(wanted);
    let (kind, fixed) = match wanted {
        Activations::Native | Activations::Int8 => return Ok(()),
        Activations::Nvfp4(act) => {
            raw.act_rule = number(codes::rule_to(act.rule), "rule", &act.rule.as_str())?;
            match act.global {
                ActGlobal::None => (abi::global_kind::NONE, None),
                ActGlobal::PerCall => (abi::global_kind::PER_CALL, None),
                ActGlobal::Static(g) => (abi::global_kind::STATIC, Some(g)),
            }
        }
        Activations::Fp8(Fp8Inputs::PerRow) => (abi::global_kind::PER_ROW, None),
        Activations::Fp8(Fp8Inputs::PerBlock) => (abi::global_kind::PER_BLOCK, None),
        Activations::Fp8(Fp8Inputs::Static(g)) => (abi::global_kind::STATIC, Some(*g)),
    };
    raw.act_global_kind = kind;
    if let Some(g) = fixed {
        raw.act_global = g.value();
        raw.act_global_convention = number(codes::convention_to(g.convention()), "convention", &wanted)?;
    }
    Ok(())
}

/// Number of an activation format, its quantiser aside.
pub fn activation_kind(activations: &Activations) -> u32 {
    match activations {
        Activations::Native => abi::activations::NATIVE,
        Activations::Int8 => abi::activations::INT8,
        Activations::Nvfp4(_) => abi::activations::NVFP4,
        Activations::Fp8(_) => abi::activations::FP8,
    }
}

/// A stored weight as pointers.
pub struct LentWeight<'a> {
    raw: RawWeight,
    _segments: Vec<Q4Segment>,
    _weight: PhantomData<&'a [u8]>,
}

impl<'a> LentWeight<'a> {
    /// Validates `w` first: a library is never handed parts that contradict their schema.
    pub fn new(w: &Q4Weight<'a>) -> Result<Self> {
        w.validate()?;
        let segments = w.segments.iter().map(segment).collect::<Result<Vec<_>>>()?;
        let raw = RawWeight {
            struct_size: size_of::<RawWeight>(),
            n_segments: segments.len() as u64,
            segments: segments.as_ptr(),
        };
        Ok(Self { raw, _segments: segments, _weight: PhantomData })
    }
    /// For a call.
    pub fn raw(&self) -> &RawWeight {
        &self.raw
    }
}

fn segment(s: &q4_core::Segment<'_>) -> Result<Q4Segment> {
    let mut out = Q4Segment {
        struct_size: size_of::<Q4Segment>(),
        rows: s.rows as u64,
        codes: ptr::null(),
        codes_bytes: 0,
        scales: ptr::null(),
        scales_bytes: 0,
        nested_map: ptr::null(),
        nested_map_bytes: 0,
        nested_absmax: ptr::null(),
        nested_absmax_bytes: 0,
        nested_offset: 0.0,
        global_scale: 0.0,
        global_convention: abi::convention::NONE,
        reserved: 0,
        zeros: ptr::null(),
        zeros_bytes: 0,
    };
    for (part, view) in s.data.parts() {
        let lent = bytes(view)?;
        match part {
            Part::Codes => (out.codes, out.codes_bytes) = lent,
            Part::Scales => (out.scales, out.scales_bytes) = lent,
            Part::Map => (out.nested_map, out.nested_map_bytes) = lent,
            Part::SecondScales => (out.nested_absmax, out.nested_absmax_bytes) = lent,
            Part::Zeros => (out.zeros, out.zeros_bytes) = lent,
        }
    }
    out.nested_offset = s.data.offset;
    if let Some(g) = s.data.global {
        out.global_scale = g.value();
        let convention = g.convention();
        out.global_convention = number(codes::convention_to(convention), "convention", &convention)?;
    }
    Ok(out)
}

fn bytes(view: &TensorView<'_>) -> Result<(*const c_void, u64)> {
    if !view.is_contiguous() || view.device() != Device::Cpu {
        return Err(Error::new(Code::ShapeMismatch, "part of a weight")
            .need("contiguous, in host memory")
            .have(format!("{view:?}")));
    }
    Ok((view.as_ptr(), (view.len() * view.dtype().size()) as u64))
}

/// Facts about a machine as C data.
pub struct LentEnv<'a> {
    raw: Q4Env,
    _features: String,
    _cuda: Vec<Q4CudaDevice>,
    _env: PhantomData<&'a HostEnv>,
}

impl<'a> LentEnv<'a> {
    /// `env` for one call.
    pub fn new(env: &'a HostEnv) -> Self {
        let features = env.cpu_features.join(" ");
        let device = |d: &q4_core::CudaDevice| Q4CudaDevice {
            struct_size: size_of::<Q4CudaDevice>(),
            ordinal: d.ordinal,
            cc_major: d.capability.0,
            cc_minor: d.capability.1,
            reserved: 0,
            memory: d.memory,
            name: Q4Str::new(&d.name),
            unusable: Q4Str::new(env.cuda_tools.unusable.get(&d.ordinal).map_or("", String::as_str)),
        };
        let found = |f: &'a Found| match f {
            Found::Yes(version) => Q4Found { version: *version, reserved: 0, missing: Q4Str::new("") },
            Found::No(why) => Q4Found { version: 0, reserved: 0, missing: Q4Str::new(why) },
        };
        let cuda: Vec<_> = env.cuda.iter().map(device).collect();
        let raw = Q4Env {
            struct_size: size_of::<Q4Env>(),
            arch: Q4Str::new(&env.arch),
            cpu_features: Q4Str::new(&features),
            processors: u32::try_from(env.processors).unwrap_or(u32::MAX),
            cuda_driver: env.cuda_driver.unwrap_or(0),
            n_cuda: cuda.len() as u64,
            cuda: cuda.as_ptr(),
            cuda_missing: Q4Str::new(env.cuda_missing.as_deref().unwrap_or("")),
            nvrtc: found(&env.cuda_tools.nvrtc),
            cublaslt: found(&env.cuda_tools.cublaslt),
        };
        Self { raw, _features: features, _cuda: cuda, _env: PhantomData }
    }
    /// For a call.
    pub fn raw(&self) -> &Q4Env {
        &self.raw
    }
}

/// What a backend is made with. Good while `options` are borrowed.
pub fn options(options: &BuiltinOptions) -> Q4Options {
    Q4Options {
        struct_size: size_of::<Q4Options>(),
        isa: Q4Str::new(options.isa.as_deref().unwrap_or("")),
        has_cuda: u32::from(options.cuda.is_some()),
        cuda: options.cuda.unwrap_or(0),
        unified_memory: match options.unified_memory {
            UnifiedMemory::Disabled => abi::unified_memory::DISABLED,
            UnifiedMemory::Prefer => abi::unified_memory::PREFER,
            UnifiedMemory::Require => abi::unified_memory::REQUIRE,
        },
        reserved: 0,
    }
}

/// What a product does besides multiplying; `norm` is [`norm_weight`] of the same. Good while both are
/// borrowed.
pub fn fusion(fusion: &Fusion<'_>, norm: Option<&Q4Matrix>) -> Q4Fusion {
    Q4Fusion {
        struct_size: size_of::<Q4Fusion>(),
        parts: u32::from(fusion.set().0),
        norm_eps: fusion.norm.map_or(0.0, |n| n.eps),
        norm_weight: norm.map_or(ptr::null(), ptr::from_ref),
    }
}

/// The weight of a norm, as one row.
pub fn norm_weight(fusion: &Fusion<'_>) -> Result<Option<Q4Matrix>> {
    let Some(norm) = &fusion.norm else { return Ok(None) };
    let w = norm.weight;
    if !w.is_contiguous() {
        return Err(Error::new(Code::ShapeMismatch, "weight of a norm")
            .need("contiguous elements")
            .have(format!("{w:?}")));
    }
    let (device_type, device_id) = number(codes::device_to(w.device()), "device", &w)?;
    let cols = w.len() as u64;
    Ok(Some(Q4Matrix {
        struct_size: size_of::<Q4Matrix>(),
        data: w.as_ptr().cast_mut(),
        bytes: w.nbytes() as u64,
        rows: 1,
        cols,
        ld: cols,
        dtype: number(codes::dtype_to(w.dtype()), "operand type", &w)?,
        device_type,
        device_id,
        reserved: 0,
    }))
}

/// An operand to read. Good while the view's bytes are borrowed.
pub fn matrix(view: &TensorView<'_>) -> Result<Q4Matrix> {
    let (rows, cols, ld) = view.as_matrix()?;
    let (device_type, device_id) = number(codes::device_to(view.device()), "device", view)?;
    Ok(Q4Matrix {
        struct_size: size_of::<Q4Matrix>(),
        data: view.as_ptr().cast_mut(),
        bytes: view.nbytes() as u64,
        rows: rows as u64,
        cols: cols as u64,
        // The stride of a single row means nothing and may be anything.
        ld: if rows > 1 { ld } else { cols } as u64,
        dtype: number(codes::dtype_to(view.dtype()), "operand type", view)?,
        device_type,
        device_id,
        reserved: 0,
    })
}

/// An operand to write.
pub fn matrix_mut(view: &mut TensorViewMut<'_>) -> Result<Q4Matrix> {
    Ok(Q4Matrix { data: view.as_mut_ptr(), ..matrix(&view.as_view())? })
}

/// Where the rows of each weight of a group begin, and where the last ones end. Good while the view's bytes
/// are borrowed.
pub fn offsets(view: &TensorView<'_>, count: usize) -> Result<*const i32> {
    let data = view.as_ptr().cast::<i32>();
    if view.dtype() == DType::I32 && view.is_contiguous() && view.len() == count + 1 && data.is_aligned() {
        return Ok(data);
    }
    Err(Error::new(Code::ShapeMismatch, "offsets of a grouped product")
        .need(format!("i32[{}], aligned", count + 1))
        .have(format!("{view:?}")))
}

/// What a call may use. Good while `cx` is borrowed.
pub fn exec(cx: &mut ExecContext<'_>) -> Result<Q4Exec> {
    let (device_type, device_id) = number(codes::device_to(cx.device), "device", &cx.device)?;
    let (workspace, workspace_bytes) = match &mut cx.workspace {
        Some(w) => (w.as_mut_ptr(), w.as_view().nbytes() as u64),
        None => (ptr::null_mut(), 0),
    };
    Ok(Q4Exec {
        struct_size: size_of::<Q4Exec>(),
        stream: cx.stream as *mut c_void,
        workspace,
        workspace_bytes,
        parallel: Some(parallel),
        parallel_user: ptr::from_ref(cx.threads).cast_mut().cast(),
        threads: u32::try_from(cx.threads.threads()).unwrap_or(u32::MAX),
        device_type,
        device_id,
        reserved: 0,
    })
}

/// Runs a library's tasks on a [`ThreadPool`]; `user` is one.
unsafe extern "C" fn parallel(user: *mut c_void, tasks: usize, body: Q4TaskFn, arg: *mut c_void) {
    struct Argument(*mut c_void);
    // SAFETY: the contract says that tasks run on any threads, so the library shares what `arg` points to.
    unsafe impl Sync for Argument {}
    impl Argument {
        fn get(&self) -> *mut c_void {
            self.0
        }
    }
    // SAFETY: `exec` put a pool there that is borrowed for the whole call.
    let pool = unsafe { &*user.cast::<ThreadPool>() };
    let arg = Argument(arg);
    // SAFETY: the library's own function with the library's own argument.
    pool.run(tasks, &|task| unsafe { body(arg.get(), task) });
}

fn number<T>(known: Option<T>, what: &str, value: &dyn std::fmt::Debug) -> Result<T> {
    known.ok_or_else(|| unknown(what, value))
}

fn unknown(what: &str, value: &dyn std::fmt::Debug) -> Error {
    Error::new(Code::Unsupported, format!("{what} of a plugin call"))
        .need(format!("one that interface {}.{} has a number for", abi::ABI_MAJOR, abi::ABI_MINOR))
        .have(format!("{value:?}"))
}
