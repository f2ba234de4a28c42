//! The exported table from the outside: panics become statuses and end the backend, errors have texts, tasks
//! run on the lent threads.
#![allow(clippy::unwrap_used)]
use q4_core::{
    Activations, BackendDescriptor, Code, DType, Dense, Device, Error, ExecContext, ExecPath, HostEnv,
    LinearSpec, OpSet, Part, PreparedGroup, PreparedInfo, PreparedWeight, ProbeItem, Q4Backend, Q4Schema,
    Q4Weight, Reject, RejectCode, Result, Segment, SegmentData, SegmentSpec, TensorView, TensorViewMut,
    ThreadPool, Verdict,
};
use q4_plugin_sdk::abi::{self, Q4BackendV1, Q4Interface, Q4Matrix, Q4Str, Q4TaskFn, status};
use q4_plugin_sdk::lend::{self, LentEnv, LentSpec, LentWeight};
use q4_plugin_sdk::message;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

/// Does to its caller what the first input says.
struct Faulty(BackendDescriptor);
struct Weight(PreparedInfo);

q4_plugin_sdk::export_backend!(Faulty::new(), name = "faulty", version = "1", vendor = "tests");

impl Faulty {
    fn new() -> Self {
        Self(BackendDescriptor {
            name: "faulty".into(),
            version: "1".into(),
            vendor: "tests".into(),
            priority: 3,
            offers: vec![
                ("dense".into(), ExecPath::DequantMatmul),
                ("secret".into(), ExecPath::NativeKernel),
            ],
        })
    }
}

impl Q4Backend for Faulty {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.0
    }
    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem> {
        vec![ProbeItem { id: "arch".into(), reasons: Vec::new(), detail: env.arch.clone() }]
    }
    fn can_prepare(&self, spec: &LinearSpec, _: ExecPath, _: &HostEnv) -> Verdict {
        if spec.k == 4 {
            return Ok(());
        }
        Err(vec![Reject::new(RejectCode::ShapeUnsupported, "k = 4", format!("k = {}", spec.k)); 2])
    }
    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        _: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        Ok(Box::new(Weight(PreparedInfo {
            backend: "faulty".into(),
            path,
            activations: spec.activations,
            n: w.n(),
            k: w.k,
            resident_bytes: 17,
            ops: OpSet::ALL,
        })))
    }
    fn group(
        &self,
        weights: &[Arc<dyn PreparedWeight>],
        _: &mut ExecContext<'_>,
    ) -> Result<Option<Box<dyn PreparedGroup>>> {
        Ok((weights.len() != 5).then(|| Box::new(Group(weights.to_vec())) as _))
    }
}

/// Writes the number of the weight that a row belongs to.
struct Group(Vec<Arc<dyn PreparedWeight>>);

impl PreparedGroup for Group {
    fn workspace(&self, m: usize) -> usize {
        m * self.0.len()
    }
    fn forward(
        &self,
        x: TensorView<'_>,
        offsets: TensorView<'_>,
        mut y: TensorViewMut<'_>,
        _: &mut ExecContext<'_>,
    ) -> Result<()> {
        let at = offsets.as_slice::<i32>()?;
        for r in 0..x.as_matrix()?.0 {
            assert!(x.row::<f32>(r)?[0] != 1.0, "row {r} of a group");
            y.row_mut::<f32>(r)?[0] = (at.iter().filter(|from| **from as usize <= r).count() - 1) as f32;
        }
        Ok(())
    }
}

impl PreparedWeight for Weight {
    fn info(&self) -> &PreparedInfo {
        &self.0
    }
    fn workspace(&self, m: usize) -> usize {
        assert!(m < 100, "too many rows");
        m * 8
    }
    fn forward(&self, x: TensorView<'_>, mut y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        if cx.device != Device::Cpu {
            let place = |v: &TensorView<'_>| format!("{} on {}", v.as_ptr().addr(), v.device());
            let scratch = cx.workspace.as_ref().map(|w| place(&w.as_view()));
            let (x, y) = (format!("{} {:?}", place(&x), x.as_matrix()?), place(&y.as_view()));
            let seen = format!("{x}; {y}; {scratch:?}; stream {} of {}", cx.stream, cx.device);
            return Err(Error::new(Code::Unsupported, seen));
        }
        match x.row::<f32>(0)?[0] {
            1.0 => panic!("row {} of {}", 5, 4),
            2.0 => cx.threads.run(8, &|i| assert!(i != 6, "task {i}")),
            3.0 => return Err(Error::new(Code::NonFinite, "x").need("finite").have("nan")),
            _ => {
                let done = AtomicUsize::new(0);
                cx.threads.run(5, &|i| {
                    done.fetch_add(1 << (8 * i), Ordering::Relaxed);
                });
                let all = done.into_inner() == 0x01_0101_0101;
                y.row_mut::<f32>(0)?[0] = if all { cx.threads.threads() as f32 } else { -1.0 };
            }
        }
        Ok(())
    }
    fn backward_input(&self, _: TensorView<'_>, _: TensorViewMut<'_>, _: &mut ExecContext<'_>) -> Result<()> {
        Err(Error::new(Code::Unsupported, "backward"))
    }
    fn dequantize(&self, _: TensorViewMut<'_>, _: &mut ExecContext<'_>) -> Result<()> {
        Ok(())
    }
}

fn table() -> Q4BackendV1 {
    static TABLE: LazyLock<Q4BackendV1> = LazyLock::new(|| {
        let mut out = Q4Interface {
            struct_size: size_of::<Q4Interface>(),
            abi_minor: 0,
            reserved: 0,
            table: ptr::null(),
        };
        // SAFETY: a live structure that states its size.
        unsafe {
            assert_eq!(__q4_plugin_query(2, 1, &mut out), status::ABI);
            assert_eq!(__q4_plugin_query(1, 9, &mut out), status::ABI);
            assert_eq!(__q4_plugin_query(1, 1, ptr::null_mut()), status::ABI);
            assert_eq!(__q4_plugin_query(1, 1, &mut out), status::OK);
        }
        // Here the library's panic hook is that of the tests as well, and they want to be heard.
        drop(std::panic::take_hook());
        // SAFETY: success promises a table that lives for ever.
        unsafe { *out.table.cast::<Q4BackendV1>() }
    });
    *TABLE
}

fn spec(k: usize) -> LinearSpec {
    LinearSpec {
        segments: vec![SegmentSpec { name: "w".into(), rows: 1 }],
        schema: Q4Schema::Dense(Dense { dtype: DType::F32 }),
        k,
        max_m: 1,
        x: DType::F32,
        y: DType::F32,
        activations: Activations::Native,
        device: Device::Cpu,
        ops: OpSet::FORWARD,
    }
}

/// A backend and a weight of its own, as a program has them.
struct Session {
    backend: *mut abi::Q4Backend,
    weight: *mut abi::Q4Prepared,
}

impl Session {
    fn new() -> Self {
        let (t, spec, pool, values) = (table(), spec(4), ThreadPool::new(1), [0f32; 4]);
        let data = SegmentData::default().with(Part::Codes, TensorView::of(&values, &[1, 4]).unwrap());
        let segments = [Segment { rows: 1, data }];
        let w = Q4Weight { schema: spec.schema, k: 4, segments: &segments };
        let (lent, weight) =
            (LentSpec::new(&spec, ExecPath::DequantMatmul).unwrap(), LentWeight::new(&w).unwrap());
        let mut out = Self { backend: ptr::null_mut(), weight: ptr::null_mut() };
        let mut cx = ExecContext::cpu(&pool);
        let exec = lend::exec(&mut cx).unwrap();
        let no = ptr::null_mut();
        // SAFETY: live structures of this test.
        unsafe {
            assert_eq!(t.create.unwrap()(&mut out.backend, no), status::OK);
            let prepare = t.prepare.unwrap();
            assert_eq!(
                prepare(out.backend, lent.raw(), weight.raw(), &exec, &mut out.weight, no),
                status::OK
            );
        }
        out
    }

    fn forward(&self, first: f32) -> (abi::Q4Status, String, f32) {
        let (x, mut y, pool) = ([first, 0.0, 0.0, 0.0], [0f32], ThreadPool::new(2));
        let xm = lend::matrix(&TensorView::of(&x, &[1, 4]).unwrap()).unwrap();
        let ym = lend::matrix_mut(&mut TensorViewMut::of(&mut y, &[1, 1]).unwrap()).unwrap();
        let (status, text) = self.call(&xm, &ym, &pool);
        (status, text, y[0])
    }

    fn call(&self, x: &Q4Matrix, y: &Q4Matrix, pool: &ThreadPool) -> (abi::Q4Status, String) {
        let mut cx = ExecContext::cpu(pool);
        let (exec, mut message) = (lend::exec(&mut cx).unwrap(), message::Message::new());
        let mut raw = message.raw();
        // SAFETY: live structures of this test.
        let status = unsafe { table().forward.unwrap()(self.weight, x, y, &exec, &mut raw) };
        (status, message.text(&raw).into_owned())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: made by the same table, once; the weight first.
        unsafe {
            table().release.unwrap()(self.weight);
            table().destroy.unwrap()(self.backend);
        }
    }
}

#[test]
fn the_table_says_what_the_descriptor_says() {
    let t = table();
    // SAFETY: texts that live for ever.
    let text = |s| unsafe { message::text(s, 99) }.into_owned();
    assert_eq!([text(t.name), text(t.version), text(t.vendor)], ["faulty", "1", "tests"]);
    assert_eq!((t.priority, t.n_offers), (3, 1), "what has no number is not offered");
    assert_eq!(&Q4_PLUGIN_DESCRIPTOR.name[..7], b"faulty\0");
}

#[test]
fn a_panic_ends_its_backend_and_no_other() {
    let (session, other) = (Session::new(), Session::new());
    let (code, text, _) = session.forward(1.0);
    assert_eq!(code, status::PANICKED);
    assert!(text.contains("row 5 of 4"), "{text}");
    let (code, text, _) = session.forward(0.0);
    assert_eq!((code, &*text), (status::PANICKED, "an earlier call panicked"));
    assert_eq!(other.forward(0.0).0, status::OK);
    // SAFETY: a live weight.
    let bytes = |m| unsafe { table().workspace.unwrap()(other.weight, m) };
    assert_eq!((bytes(3), bytes(100)), (24, abi::WORKSPACE_OVERFLOW));
    assert_eq!(other.forward(0.0).0, status::PANICKED);
}

#[test]
fn a_panic_in_a_task_stays_in_the_library() {
    let session = Session::new();
    let (code, text, _) = session.forward(2.0);
    assert_eq!(code, status::PANICKED);
    assert!(text.contains("task 6"), "{text}");
}

#[test]
fn errors_keep_their_kind_and_their_text() {
    let session = Session::new();
    let (code, text, _) = session.forward(3.0);
    assert_eq!((code, &*text), (status::NON_FINITE, "x; need finite; have nan"));
    let (code, text, y) = session.forward(0.0);
    assert_eq!((code, &*text, y), (status::OK, "", 2.0), "an error is not the end; both threads are lent");
}

#[test]
fn operands_that_lie_are_refused_before_they_are_touched() {
    let (session, pool, x, mut y) = (Session::new(), ThreadPool::new(1), [0f32; 4], [0f32]);
    let good = lend::matrix(&TensorView::of(&x, &[1, 4]).unwrap()).unwrap();
    let ym = lend::matrix_mut(&mut TensorViewMut::of(&mut y, &[1, 1]).unwrap()).unwrap();
    let edits: [fn(&mut Q4Matrix); 6] = [
        |m| m.struct_size = 16,
        |m| m.bytes -= 1,
        |m| m.rows = u64::MAX,
        |m| m.ld = 3,
        |m| m.dtype = 0,
        |m| m.data = ptr::null_mut(),
    ];
    for (i, edit) in edits.iter().enumerate() {
        let mut bad = good;
        edit(&mut bad);
        let (code, text) = session.call(&bad, &ym, &pool);
        let want = if i == 0 { status::ABI } else { status::INVALID_ARGUMENT };
        assert_eq!(code, want, "edit {i}: {text}");
    }
    assert_eq!(session.call(&good, &ym, &pool).0, status::OK);
}

#[test]
fn a_call_on_a_device_has_its_pointers_and_its_stream() {
    let (session, pool) = (Session::new(), ThreadPool::new(1));
    let view = |at: usize, bytes, dtype, shape: &[i64], strides: &[i64]| {
        let place = ptr::NonNull::new(ptr::without_provenance_mut(at)).unwrap();
        // SAFETY: addresses of a device that is not there; nobody reads them.
        unsafe { TensorViewMut::from_raw(place, bytes, Device::Cuda(1), dtype, shape, strides) }.unwrap()
    };
    let x = view(0x7000_1000, 40, DType::BF16, &[2, 4], &[9, 1]);
    let xm = lend::matrix(&x.as_view()).unwrap();
    let ym = lend::matrix_mut(&mut view(0x7000_2000, 8, DType::F32, &[2, 1], &[1, 1])).unwrap();
    let mut cx = ExecContext::on(Device::Cuda(1), 0x5000, &pool);
    cx.workspace = Some(view(0x7000_3000, 256, DType::U8, &[256], &[1]));
    let (exec, mut message) = (lend::exec(&mut cx).unwrap(), message::Message::new());
    let mut raw = message.raw();
    // SAFETY: live structures of this test; this weight touches no memory of a device.
    let status = unsafe { table().forward.unwrap()(session.weight, &xm, &ym, &exec, &mut raw) };
    assert_eq!(status, status::UNSUPPORTED);
    let [x, y, scratch] = [0x7000_1000u32, 0x7000_2000, 0x7000_3000];
    let want = format!(
        "{x} on cuda:1 (2, 4, 9); {y} on cuda:1; Some(\"{scratch} on cuda:1\"); stream 20480 of cuda:1"
    );
    assert_eq!(message.text(&raw), want);
}

#[test]
fn tasks_run_on_the_lent_threads() {
    static RAN: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn backwards(_: *mut c_void, tasks: usize, body: Q4TaskFn, arg: *mut c_void) {
        for task in (0..tasks).rev() {
            RAN.fetch_add(1, Ordering::Relaxed);
            // SAFETY: what the library handed over.
            unsafe { body(arg, task) };
        }
    }
    let (session, pool, x, mut y) = (Session::new(), ThreadPool::new(1), [0f32; 4], [0f32]);
    let xm = lend::matrix(&TensorView::of(&x, &[1, 4]).unwrap()).unwrap();
    let ym = lend::matrix_mut(&mut TensorViewMut::of(&mut y, &[1, 1]).unwrap()).unwrap();
    let mut cx = ExecContext::cpu(&pool);
    let mut exec = lend::exec(&mut cx).unwrap();
    exec.parallel = Some(backwards);
    exec.threads = 3;
    let forward = table().forward.unwrap();
    // SAFETY: live structures of this test; no message is wanted.
    unsafe { assert_eq!(forward(session.weight, &xm, &ym, &exec, ptr::null_mut()), status::OK) };
    assert_eq!((RAN.load(Ordering::Relaxed), y[0]), (5, 3.0));
    // SAFETY: as above; without a context the tasks run here.
    unsafe { assert_eq!(forward(session.weight, &xm, &ym, ptr::null(), ptr::null_mut()), status::OK) };
    assert_eq!((RAN.load(Ordering::Relaxed), y[0]), (5, 1.0));
}

#[test]
fn every_reason_crosses() {
    unsafe extern "C" fn sink(user: *mut c_void, code: Q4Str, need: Q4Str, have: Q4Str) {
        // SAFETY: what this test passed, and texts that live until this returns.
        unsafe {
            let texts = [code, need, have].map(|t| message::text(t, 99).into_owned());
            (*user.cast::<Vec<[String; 3]>>()).push(texts);
        }
    }
    let (session, env, spec) = (Session::new(), HostEnv::default(), spec(5));
    let (lent, env) = (LentSpec::new(&spec, ExecPath::DequantMatmul).unwrap(), LentEnv::new(&env));
    let mut reasons: Vec<[String; 3]> = Vec::new();
    let can_prepare = table().can_prepare.unwrap();
    let user = (&raw mut reasons).cast();
    // SAFETY: live structures of this test, and the sink that fits `user`.
    let status = unsafe { can_prepare(session.backend, lent.raw(), env.raw(), sink, user, ptr::null_mut()) };
    assert_eq!(status, status::UNSUPPORTED);
    assert_eq!(reasons, vec![["shape-unsupported", "k = 4", "k = 5"].map(String::from); 2]);
}

#[test]
fn several_weights_are_one_call() {
    let (session, pool) = (Session::new(), ThreadPool::new(1));
    let mut cx = ExecContext::cpu(&pool);
    let exec = lend::exec(&mut cx).unwrap();
    let t = table();
    let make = |count: usize| {
        let (weights, mut out) = (vec![session.weight.cast_const(); count], ptr::null_mut());
        let group = t.group.unwrap();
        // SAFETY: a live backend and as many live weights of it.
        let code = unsafe {
            group(session.backend, weights.as_ptr(), count as u64, &exec, &mut out, ptr::null_mut())
        };
        (code, out)
    };
    assert_eq!(make(0).0, status::INVALID_ARGUMENT);
    assert_eq!(make(5).0, status::UNSUPPORTED, "these are left to the caller");
    let (code, group) = make(3);
    assert_eq!(code, status::OK);
    // SAFETY: a live group.
    assert_eq!(unsafe { t.group_workspace.unwrap()(group, 7) }, 21);
    let (mut x, mut y) = ([0f32; 16], [9f32; 4]);
    let mut call = |x: &[f32], offsets: *const i32| {
        let xm = lend::matrix(&TensorView::of(x, &[4, 4]).unwrap()).unwrap();
        let ym = lend::matrix_mut(&mut TensorViewMut::of(&mut y, &[4, 1]).unwrap()).unwrap();
        // SAFETY: a live group, and operands of this test.
        let code = unsafe { t.forward_grouped.unwrap()(group, &xm, offsets, &ym, &exec, ptr::null_mut()) };
        (code, y)
    };
    for wrong in [[0, 1, 5, 4], [1, 1, 2, 4], [0, 1, 2, 3], [0, 1, 2, 5], [0, -1, 2, 4]] {
        assert_eq!(call(&x, wrong.as_ptr()), (status::INVALID_ARGUMENT, [9.0; 4]), "{wrong:?}");
    }
    assert_eq!(call(&x, ptr::null()).0, status::INVALID_ARGUMENT);
    assert_eq!(call(&x, [0i32, 1, 1, 4].as_ptr()), (status::OK, [0.0, 2.0, 2.0, 2.0]));
    // Offsets among the numbers of x.
    assert_eq!(call(&x, x.as_ptr().cast()).0, status::INVALID_ARGUMENT);
    x[4] = 1.0;
    assert_eq!(call(&x, [0i32, 4, 4, 4].as_ptr()).0, status::PANICKED);
    // SAFETY: made by the same table, released once, before its weight.
    unsafe { t.release_group.unwrap()(group) };
    assert_eq!(make(2).0, status::PANICKED, "the backend is not used any more");
}
