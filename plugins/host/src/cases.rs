//! Checks of a table that only its loader can make, for level L0 of a conformance run: structures of other sizes, numbers
//! that do not exist yet, buffers that are too small. Each is what an older or a newer program would do.
use crate::library::Query;
use crate::table::{Table, checked};
use q4_core::{
    Absmax, Activations, Code, DType, Device, Error, ExecContext, ExecPath, HostEnv, LinearSpec, NibbleOrder,
    OpSet, Q4Schema, Q4Weight, Result, ScaleLayout, Segment, SegmentData, SegmentSpec, TensorView,
    ThreadPool,
};
use q4_plugin_abi as abi;
use q4_plugin_abi::{
    ABI_MAJOR, INTERFACE_BACKEND, Q4Error, Q4Exec, Q4Interface, Q4LinearSpec, Q4Matrix, Q4PreparedInfo,
    Q4Status, Q4Str, status,
};
use q4_plugin_sdk::lend::{self, LentEnv, LentSpec, LentWeight};
use std::ffi::c_void;
use std::mem::size_of;
use std::ptr;

/// The checks of one library. They make backends and weights of their own; run them where a crash is no disaster.
#[derive(Clone)]
pub struct TableCases {
    table: Table,
    query: Query,
}

type Check = fn(&TableCases) -> Result<()>;
type Edit = fn(&mut Q4LinearSpec);

const CASES: [(&str, Check); 13] = [
    ("query-of-an-unknown-major", |t| t.no_interface(ABI_MAJOR + 1, INTERFACE_BACKEND)),
    ("query-of-an-unknown-interface", |t| t.no_interface(ABI_MAJOR, u32::MAX)),
    ("query-repeats", TableCases::query_repeats),
    ("two-backends", TableCases::two_backends),
    ("longer-spec", TableCases::longer_spec),
    ("shorter-spec", TableCases::shorter_spec),
    ("unknown-numbers", TableCases::unknown_numbers),
    ("error-buffers", TableCases::error_buffers),
    ("longer-segments", TableCases::longer_segments),
    ("longer-info", TableCases::longer_info),
    ("longer-operands", TableCases::longer_operands),
    ("overlapping-operands", TableCases::overlapping_operands),
    ("no-threads", TableCases::no_threads),
];

/// Out features, in segments of the same bytes.
const N: usize = 64;
const SEGMENTS: usize = 2;
const K: usize = 256;
const M: usize = 2;

/// A structure as a newer program has it: its size says more than the library knows, and there is something there.
#[repr(C)]
#[derive(Clone, Copy)]
struct Newer<T> {
    known: T,
    later: [u64; 8],
}

impl<T> Newer<T> {
    const GARBAGE: [u64; 8] = [0xa5a5_a5a5_a5a5_a5a5; 8];
    fn of(known: T) -> Self {
        Self { known, later: Self::GARBAGE }
    }
}

impl TableCases {
    pub(crate) fn new(table: Table, query: Query) -> Self {
        Self { table, query }
    }

    /// Names of the checks, stable and unique; those of every library.
    pub fn names() -> Vec<String> {
        CASES.iter().map(|(name, _)| (*name).to_owned()).collect()
    }

    /// The same.
    pub fn cases(&self) -> Vec<String> {
        Self::names()
    }

    /// Runs one. The error says what is wrong.
    pub fn run(&self, case: &str) -> Result<()> {
        match CASES.iter().find(|(name, _)| *name == case) {
            Some((_, check)) => check(self),
            None => Err(Error::new(Code::Usage, format!("no check of a table is named `{case}`"))),
        }
    }

    fn no_interface(&self, major: u32, id: u32) -> Result<()> {
        let (code, _) = self.ask(major, id);
        expect("query", code == status::ABI, "Q4_E_ABI", || format!("status {code}"))
    }

    fn query_repeats(&self) -> Result<()> {
        let (first, again) = (self.ask(ABI_MAJOR, INTERFACE_BACKEND), self.ask(ABI_MAJOR, INTERFACE_BACKEND));
        expect("query", first.0 == status::OK && first == again, "the same table twice", || {
            format!("status {} and {:p}, then status {} and {:p}", first.0, first.1, again.0, again.1)
        })
    }

    fn two_backends(&self) -> Result<()> {
        let (first, second) = (self.session()?, self.session()?);
        let before = second.forward(&second.exec_of(Some(1)))?;
        drop(first);
        let after = second.forward(&second.exec_of(Some(1)))?;
        same("a product after another backend was destroyed", &before, &after)
    }

    fn longer_spec(&self) -> Result<()> {
        let (served, path) = small(&self.table)?;
        // No path of any schema is on all devices.
        let refused = LinearSpec { device: Device::Cuda(u32::MAX), ..served.clone() };
        for spec in [served, refused] {
            let lent = LentSpec::new(&spec, path)?;
            let mut newer = Newer::of(*lent.raw());
            newer.known.struct_size = size_of_val(&newer);
            let (exact, longer) = (self.verdict(lent.raw())?, self.verdict((&raw const newer).cast())?);
            let words = |(code, reasons): (Q4Status, usize)| format!("status {code} with {reasons} reasons");
            expect("verdict on a longer spec", exact == longer, &words(exact), || words(longer))?;
        }
        Ok(())
    }

    fn shorter_spec(&self) -> Result<()> {
        let (spec, path) = small(&self.table)?;
        let lent = LentSpec::new(&spec, path)?;
        let mut raw = *lent.raw();
        raw.struct_size = size_of::<usize>() * 4;
        let (code, _) = self.verdict(&raw)?;
        expect("verdict on a spec shorter than its first version", code != status::OK, "an error", || {
            "consent".into()
        })
    }

    fn unknown_numbers(&self) -> Result<()> {
        let edits: [(&str, Edit); 6] = [
            ("schema", |s| s.schema = 999),
            ("schema revision", |s| s.schema_revision = 999),
            ("path", |s| s.path = 999),
            ("activations", |s| s.activations = 999),
            ("x_dtype", |s| s.x_dtype = 999),
            ("device_type", |s| s.device_type = 999),
        ];
        let (spec, path) = small(&self.table)?;
        let lent = LentSpec::new(&spec, path)?;
        for (what, edit) in edits {
            let mut raw = *lent.raw();
            edit(&mut raw);
            let (code, _) = self.verdict(&raw)?;
            expect(&format!("verdict on an unknown {what}"), code != status::OK, "a refusal", || {
                "consent".into()
            })?;
        }
        Ok(())
    }

    /// The whole length is told, nothing is written past `cap`, and no buffer at all is allowed.
    fn error_buffers(&self) -> Result<()> {
        let session = self.session()?;
        let (mut x, y) = session.operands();
        x.cols += 1;
        let exec = session.exec_of(Some(1));
        let fails = |cap: usize| -> Result<(Vec<u8>, usize)> {
            let mut room = vec![0xeeu8; 4096];
            let mut err = Q4Error {
                struct_size: size_of::<Q4Error>(),
                ptr: room.as_mut_ptr(),
                cap,
                len: 0,
                native_code: 0,
            };
            let code = session.call(&x, &y, &exec, &mut err)?;
            expect("a product of operands that do not fit", code != status::OK, "an error", || {
                "success".into()
            })?;
            Ok((room, err.len))
        };
        let ((long, full), (short, told)) = (fails(4096)?, fails(3)?);
        let need = format!("{full} bytes told, at most 3 written");
        let shown = String::from_utf8_lossy(&short[..8]).into_owned();
        let fits =
            full > 0 && told == full && short[3..].iter().all(|b| *b == 0xee) && long[..2] == short[..2];
        expect("text of an error in 3 bytes", fits, &need, || {
            format!("{told} told, `{shown}` in the buffer")
        })?;
        let code = session.call(&x, &y, &exec, ptr::null_mut())?;
        expect("an error without a buffer", code != status::OK, "an error", || "success".into())
    }

    fn longer_segments(&self) -> Result<()> {
        let (spec, path) = small(&self.table)?;
        let stored = Stored::new(spec.schema);
        let segments = stored.segments(spec.schema)?;
        let w = Q4Weight { schema: spec.schema, k: K, segments: &segments };
        let (lent, weight) = (LentSpec::new(&spec, path)?, LentWeight::new(&w)?);
        let exact = self.session()?;
        // SAFETY: a lent weight has the segments of its spec.
        let lent_segments = unsafe { std::slice::from_raw_parts(weight.raw().segments, SEGMENTS) };
        let mut longer: Vec<_> = lent_segments.iter().map(|s| Newer::of(*s)).collect();
        longer.iter_mut().for_each(|s| s.known.struct_size = size_of_val(s));
        let mut newer = Newer::of(*weight.raw());
        newer.known.struct_size = size_of_val(&newer);
        newer.known.segments = longer.as_ptr().cast();
        let longer = self.prepared(&lent, (&raw const newer).cast())?;
        let (exact, longer) =
            (exact.forward(&exact.exec_of(Some(1)))?, longer.forward(&longer.exec_of(Some(1)))?);
        same("a product of a longer weight", &exact, &longer)
    }

    fn longer_info(&self) -> Result<()> {
        let session = self.session()?;
        // SAFETY: all-zero bytes are a valid value.
        let mut newer = Newer::of(unsafe { std::mem::zeroed::<Q4PreparedInfo>() });
        newer.known.struct_size = size_of_val(&newer);
        let info = need(self.table.api.info, "info")?;
        // SAFETY: a live weight, and a structure that states its size.
        checked("info", |err| unsafe { info(session.weight, (&raw mut newer).cast(), err) })
            .map_err(|e| e.1)?;
        let kept = newer.later == Newer::<()>::GARBAGE && newer.known.struct_size == size_of_val(&newer);
        expect("info of a longer structure", kept, "nothing written past what is known", || {
            "something was".into()
        })?;
        expect("info", newer.known.n == N as u64, "n = 64", || format!("n = {}", newer.known.n))
    }

    fn longer_operands(&self) -> Result<()> {
        let session = self.session()?;
        let exact = session.forward(&session.exec_of(Some(1)))?;
        let operands = session.operands();
        let (mut x, mut y) = (Newer::of(operands.0), Newer::of(operands.1));
        let mut exec = Newer::of(session.exec_of(Some(1)));
        x.known.struct_size = size_of_val(&x);
        y.known.struct_size = size_of_val(&y);
        exec.known.struct_size = size_of_val(&exec);
        session.y.borrow_mut().fill(f32::NAN);
        let (x, y, exec) = ((&raw const x).cast(), (&raw const y).cast(), (&raw const exec).cast());
        let code = session.call(x, y, exec, ptr::null_mut())?;
        expect("a product of longer structures", code == status::OK, "success", || format!("status {code}"))?;
        same("a product of longer structures", &exact, &session.y.borrow())
    }

    /// Operands that share bytes are refused; those that only touch are not.
    fn overlapping_operands(&self) -> Result<()> {
        let session = self.session()?;
        let exec = session.exec_of(Some(1));
        let exact = session.forward(&exec)?;
        let (x, y) = session.operands();
        let mut both = [session.x.as_slice(), &[f32::NAN; M * N]].concat();
        let first = both.as_mut_ptr();
        let at = |m: Q4Matrix, element: usize| Q4Matrix { data: first.wrapping_add(element).cast(), ..m };
        let code = session.call(&at(x, 0), &at(y, M * K), &exec, ptr::null_mut())?;
        expect("a product of operands that touch", code == status::OK, "success", || {
            format!("status {code}")
        })?;
        same("a product of operands that touch", &exact, &both[M * K..])?;
        let inside = Q4Matrix { data: exec.workspace, ..y };
        for (what, x, y) in [
            ("the same memory", at(x, 0), at(y, 0)),
            ("one element in common", at(x, 0), at(y, M * K - 1)),
            ("one element in common, the output first", at(x, M * N - 1), at(y, 0)),
            ("an output in the workspace", x, inside),
        ] {
            let code = session.call(&x, &y, &exec, ptr::null_mut())?;
            expect(&format!("a product with {what}"), code != status::OK, "an error", || "success".into())?;
        }
        Ok(())
    }

    fn no_threads(&self) -> Result<()> {
        let session = self.session()?;
        let (lent, none) =
            (session.forward(&session.exec_of(Some(3)))?, session.forward(&session.exec_of(None))?);
        same("a product without threads", &lent, &none)
    }

    fn ask(&self, major: u32, id: u32) -> (Q4Status, *const c_void) {
        let mut out = Q4Interface {
            struct_size: size_of::<Q4Interface>(),
            abi_minor: abi::ABI_MINOR,
            reserved: 0,
            table: ptr::null(),
        };
        ((self.query)(major, id, &mut out), out.table)
    }

    /// Status and number of reasons.
    fn verdict(&self, spec: *const Q4LinearSpec) -> Result<(Q4Status, usize)> {
        let backend = Backend::new(&self.table)?;
        verdict(&self.table, backend.raw, spec)
    }

    fn session(&self) -> Result<Session<'_>> {
        let (spec, path) = small(&self.table)?;
        let stored = Stored::new(spec.schema);
        let segments = stored.segments(spec.schema)?;
        let w = Q4Weight { schema: spec.schema, k: K, segments: &segments };
        let (lent, weight) = (LentSpec::new(&spec, path)?, LentWeight::new(&w)?);
        self.prepared(&lent, weight.raw())
    }

    fn prepared(&self, lent: &LentSpec<'_>, weight: *const abi::Q4Weight) -> Result<Session<'_>> {
        let backend = Backend::new(&self.table)?;
        let prepare = need(self.table.api.prepare, "prepare")?;
        let (pool, mut out) = (ThreadPool::new(1), ptr::null_mut());
        let exec = lend::exec(&mut ExecContext::cpu(&pool))?;
        // SAFETY: a live backend; spec, weight and context outlive the call.
        checked("prepare", |err| unsafe { prepare(backend.raw, lent.raw(), weight, &exec, &mut out, err) })
            .map_err(|e| e.1)?;
        expect("prepare", !out.is_null(), "a weight", || "NULL and success".into())?;
        Session::new(backend, out)
    }
}

/// A backend of a check.
struct Backend<'t> {
    table: &'t Table,
    raw: *mut abi::Q4Backend,
}

impl<'t> Backend<'t> {
    fn new(table: &'t Table) -> Result<Self> {
        let (create, mut raw) = (need(table.api.create, "create")?, ptr::null_mut());
        // SAFETY: a place for a pointer.
        checked("create", |err| unsafe { create(&mut raw, err) }).map_err(|e| e.1)?;
        expect("create", !raw.is_null(), "a backend", || "NULL and success".into())?;
        Ok(Self { table, raw })
    }
}

impl Drop for Backend<'_> {
    fn drop(&mut self) {
        if let Some(destroy) = self.table.api.destroy {
            // SAFETY: created by the same table, destroyed once; weights go first.
            unsafe { destroy(self.raw) }
        }
    }
}

/// A weight of a check, its operands and its scratch.
struct Session<'t> {
    weight: *mut abi::Q4Prepared,
    backend: Backend<'t>,
    x: Vec<f32>,
    y: std::cell::RefCell<Vec<f32>>,
    scratch: std::cell::RefCell<Vec<u64>>,
    pool: ThreadPool,
}

impl<'t> Session<'t> {
    fn new(backend: Backend<'t>, weight: *mut abi::Q4Prepared) -> Result<Self> {
        let workspace = need(backend.table.api.workspace, "workspace")?;
        // SAFETY: a live weight.
        let bytes = unsafe { workspace(weight, M as u64) };
        let fits = bytes < 1 << 30;
        let out = Self {
            weight,
            backend,
            x: (0..M * K).map(|i| ((i * 37 % 101) as f32 - 50.0) / 32.0).collect(),
            y: vec![f32::NAN; M * N].into(),
            // An output fits in.
            scratch: vec![0u64; if fits { bytes as usize / 8 + 16 + M * N } else { 0 }].into(),
            pool: ThreadPool::new(3),
        };
        expect("workspace", fits, "less than 1 GiB for a small product", || format!("{bytes} bytes"))
            .map(|()| out)
    }

    fn operands(&self) -> (Q4Matrix, Q4Matrix) {
        let matrix = |data: *mut c_void, cols: usize| Q4Matrix {
            struct_size: size_of::<Q4Matrix>(),
            data,
            bytes: (4 * M * cols) as u64,
            rows: M as u64,
            cols: cols as u64,
            ld: cols as u64,
            dtype: abi::dtype::F32,
            device_type: abi::DEVICE_CPU,
            device_id: 0,
            reserved: 0,
        };
        let y = self.y.borrow_mut().as_mut_ptr();
        (matrix(self.x.as_ptr().cast_mut().cast(), K), matrix(y.cast(), N))
    }

    /// A context with so many threads; `None`: without a function to run them.
    fn exec_of(&self, threads: Option<u32>) -> Q4Exec {
        let mut scratch = self.scratch.borrow_mut();
        let at = scratch.as_ptr().align_offset(64);
        let bytes = (scratch.len() - at) * 8;
        let context = lend::exec(&mut ExecContext::cpu(&self.pool)).ok();
        Q4Exec {
            struct_size: size_of::<Q4Exec>(),
            stream: ptr::null_mut(),
            workspace: scratch[at..].as_mut_ptr().cast(),
            workspace_bytes: bytes as u64,
            parallel: context.and_then(|c| c.parallel).filter(|_| threads.is_some()),
            parallel_user: ptr::from_ref(&self.pool).cast_mut().cast(),
            threads: threads.unwrap_or(0),
            device_type: abi::DEVICE_CPU,
            device_id: 0,
            reserved: 0,
        }
    }

    fn forward(&self, exec: &Q4Exec) -> Result<Vec<f32>> {
        let (x, y) = self.operands();
        self.y.borrow_mut().fill(f32::NAN);
        let code = self.call(&x, &y, exec, ptr::null_mut())?;
        expect("forward", code == status::OK, "success", || format!("status {code}"))?;
        Ok(self.y.borrow().clone())
    }

    fn call(
        &self,
        x: *const Q4Matrix,
        y: *const Q4Matrix,
        exec: *const Q4Exec,
        err: *mut Q4Error,
    ) -> Result<Q4Status> {
        let forward = need(self.backend.table.api.forward, "forward")?;
        // SAFETY: a live weight; operands and scratch are buffers of this run, and the structures state their sizes.
        Ok(unsafe { forward(self.weight, x, y, exec, err) })
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if let Some(release) = self.backend.table.api.release {
            // SAFETY: prepared by the same table, released once, before its backend.
            unsafe { release(self.weight) }
        }
    }
}

/// A small product the library accepts.
fn small(table: &Table) -> Result<(LinearSpec, ExecPath)> {
    let backend = Backend::new(table)?;
    for (schema, path) in &table.offers {
        for activations in [Activations::Native, Activations::Int8] {
            let spec = LinearSpec {
                segments: vec![SegmentSpec { name: "check".into(), rows: N / SEGMENTS }; SEGMENTS],
                schema: schema_of(schema),
                k: K,
                max_m: M,
                x: DType::F32,
                y: DType::F32,
                activations,
                device: Device::Cpu,
                ops: OpSet::FORWARD,
            };
            let lent = LentSpec::new(&spec, *path)?;
            if verdict(table, backend.raw, lent.raw())?.0 == status::OK {
                return Ok((spec, *path));
            }
        }
    }
    Err(Error::new(Code::ConformanceFailed, "checks of the table")
        .need(format!("a product of [{N}, {K}] in float32 on the CPU that is accepted"))
        .have("none"))
}

fn schema_of(name: &str) -> Q4Schema {
    match name {
        "nvfp4" => Q4Schema::Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: None },
        "nf4" => Q4Schema::Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: None },
        "nf4-dq" => Q4Schema::Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: Some(256) },
        _ => Q4Schema::Dense { dtype: DType::F32 },
    }
}

/// Status and number of reasons.
fn verdict(
    table: &Table,
    backend: *const abi::Q4Backend,
    spec: *const Q4LinearSpec,
) -> Result<(Q4Status, usize)> {
    unsafe extern "C" fn count(user: *mut c_void, _: Q4Str, _: Q4Str, _: Q4Str) {
        // SAFETY: what `verdict` passed.
        unsafe { *user.cast::<usize>() += 1 };
    }
    let can_prepare = need(table.api.can_prepare, "can_prepare")?;
    let (facts, mut reasons) = (HostEnv::collect(), 0usize);
    let env = LentEnv::new(&facts);
    let user = (&raw mut reasons).cast();
    // SAFETY: a live backend, structures that state their sizes, and the sink that fits `user`; NULL is allowed.
    let code = unsafe { can_prepare(backend, spec, env.raw(), count, user, ptr::null_mut()) };
    Ok((code, reasons))
}

/// Bytes of a segment in any encoding.
struct Stored {
    codes: Vec<u8>,
    scales: Vec<u8>,
    floats: Vec<f32>,
}

const ROWS: usize = N / SEGMENTS;

impl Stored {
    fn new(schema: Q4Schema) -> Self {
        let bytes = |n: usize, f: fn(usize) -> u8| (0..n).map(f).collect::<Vec<_>>();
        let dense = matches!(schema, Q4Schema::Dense { .. });
        Self {
            codes: bytes(ROWS * K / 2, |i| ((i * 151) >> 2) as u8),
            scales: bytes(ROWS * K / 16, |i| 0x30 + (i % 16) as u8),
            floats: (0..if dense { ROWS * K } else { 256 }).map(|i| 0.25 + (i % 7) as f32 / 8.0).collect(),
        }
    }

    fn segments(&self, schema: Q4Schema) -> Result<[Segment<'_>; SEGMENTS]> {
        let one = || -> Result<_> { Ok(Segment { rows: ROWS, data: self.data(schema)? }) };
        Ok([one()?, one()?])
    }

    fn data(&self, schema: Q4Schema) -> Result<SegmentData<'_>> {
        let (blocks, codes) = (ROWS * K / 64, TensorView::of(&self.codes, &[self.codes.len()])?);
        Ok(match schema {
            Q4Schema::Nvfp4 { .. } => SegmentData::Nvfp4 {
                codes,
                scales: TensorView::of_bytes(&self.scales, DType::F8E4M3, &[self.scales.len()])?,
                global: None,
            },
            Q4Schema::Nf4 { nested: None, .. } => SegmentData::Nf4 {
                codes,
                absmax: Absmax::Plain(TensorView::of(&self.floats[..blocks], &[blocks])?),
            },
            Q4Schema::Nf4 { .. } => SegmentData::Nf4 {
                codes,
                absmax: Absmax::Nested {
                    codes: TensorView::of(&self.scales[..blocks], &[blocks])?,
                    map: TensorView::of(&self.floats, &[256])?,
                    absmax: TensorView::of(&self.floats[..1], &[1])?,
                    offset: 0.5,
                    block: 256,
                },
            },
            _ => SegmentData::Dense { weight: TensorView::of(&self.floats, &[ROWS, K])? },
        })
    }
}

fn need<F>(entry: Option<F>, name: &str) -> Result<F> {
    entry.ok_or_else(|| Error::new(Code::Internal, format!("a table without `{name}` was adopted")))
}

fn expect(what: &str, holds: bool, need: &str, have: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::new(Code::ConformanceFailed, what).need(need).have(have())) }
}

fn same(what: &str, a: &[f32], b: &[f32]) -> Result<()> {
    let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let first = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
    expect(what, bits(a) == bits(b) && !a.iter().any(|v| v.is_nan()), "the same bits, all written", || {
        first.map_or_else(
            || "outputs that were not written".into(),
            |i| format!("y[{i}]: {:e} and {:e}", a[i], b[i]),
        )
    })
}
