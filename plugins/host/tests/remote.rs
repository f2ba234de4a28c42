//! A library in a process of its own: right ones compute what they compute anywhere, and whatever a wrong one
//! does to its process, this one lives and says what happened.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]
mod built;

use q4_core::formats::int4::Zeros;
use q4_core::{
    Activations, Candidate, Code, DType, Device, Error, ExecContext, ExecPath, HostEnv, Int4, LinearSpec,
    Nvfp4, Nvfp4Parts, OpSet, OwnedParts, Part, PreparedWeight, Q4Backend, Q4Schema, Q4Weight, RejectCode,
    Result, ScaleLayout, Segment, SegmentSpec, TensorView, TensorViewMut, ThreadPool,
};
use q4_plugin_host::remote::{Isolation, Remote};
use q4_plugin_host::{Loader, Refusal, TableCases};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const PATH: ExecPath = ExecPath::FusedDequant;
const N: usize = 48;
const K: usize = 64;
const M: usize = 4;

fn how(is_judged: bool, seconds: u64) -> Isolation {
    Isolation {
        program: env!("CARGO_BIN_EXE_q4-plugin-probe").into(),
        args: Vec::new(),
        limit: Duration::from_secs(seconds),
        is_judged,
    }
}

fn start(path: &Path, is_judged: bool) -> Result<Remote, Refusal> {
    Remote::start(&Loader::default().examine(path)?, &how(is_judged, 60))
}

fn spec(ops: OpSet) -> LinearSpec {
    LinearSpec {
        segments: vec![SegmentSpec { name: "a.q_proj".into(), rows: N }],
        schema: Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: None }),
        k: K,
        max_m: M,
        x: DType::F32,
        y: DType::F32,
        activations: Activations::Native,
        device: Device::Cpu,
        ops,
    }
}

fn prepare(b: &dyn Q4Backend, ops: OpSet) -> Result<Box<dyn PreparedWeight>, Error> {
    let codes: Vec<u8> = (0..N * K / 2).map(|i| ((i * 151) >> 2) as u8).collect();
    let scales: Vec<u8> = (0..N * K / 16).map(|i| 0x30 + (i % 16) as u8).collect();
    let data = Nvfp4Parts {
        codes: TensorView::of(&codes, &[N, K / 2])?,
        scales: TensorView::of_bytes(&scales, DType::F8E4M3, &[N, K / 16])?,
        global: None,
    }
    .into();
    let (segments, spec, pool) = ([Segment { rows: N, data }], spec(ops), ThreadPool::new(2));
    let w = Q4Weight { schema: spec.schema, k: K, segments: &segments };
    b.prepare(&w, &spec, PATH, &mut ExecContext::cpu(&pool))
}

fn input(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 32.0).collect()
}

/// y of `m` rows, `gap` elements apart, `threads` threads.
fn forward(w: &dyn PreparedWeight, m: usize, gap: usize, threads: usize) -> Result<Vec<f32>, Error> {
    let (x, pool) = (input(m * (K + gap)), ThreadPool::new(threads));
    let mut y = vec![-1.0; m * (N + gap)];
    let mut cx = ExecContext::cpu(&pool);
    w.forward(
        TensorView::matrix(&x, m, K, K + gap)?,
        TensorViewMut::matrix(&mut y, m, N, N + gap)?,
        &mut cx,
    )?;
    Ok(y)
}

fn all_of(w: &dyn PreparedWeight) -> Result<Vec<Vec<f32>>, Error> {
    let (pool, dy) = (ThreadPool::new(2), input(M * N));
    let (mut dx, mut out) = (vec![0f32; M * K], vec![0f32; N * K]);
    let mut cx = ExecContext::cpu(&pool);
    w.backward_input(TensorView::of(&dy, &[M, N])?, TensorViewMut::of(&mut dx, &[M, K])?, &mut cx)?;
    w.dequantize(TensorViewMut::of(&mut out, &[N, K])?, &mut cx)?;
    Ok(vec![forward(w, 1, 0, 1)?, forward(w, M, 0, 2)?, forward(w, 3, 5, 3)?, dx, out])
}

fn good(dir: &Path) -> PathBuf {
    built::example(dir, "good", &[], &[])
}

#[test]
fn what_is_computed_elsewhere_is_what_is_computed_here() {
    let dir = tempfile::tempdir().unwrap();
    let path = good(dir.path());
    let Candidate::Live(here) = q4_plugin_host::load(&path).unwrap().candidate else { unreachable!() };
    let want = all_of(&*prepare(&*here, OpSet::ALL).unwrap()).unwrap();
    for is_judged in [false, true] {
        let remote = start(&path, is_judged).unwrap();
        let (a, b) = (here.descriptor(), remote.descriptor());
        assert_eq!(
            (&a.name, &a.version, a.priority, &a.offers),
            (&b.name, &b.version, b.priority, &b.offers)
        );
        let w = prepare(&remote, OpSet::ALL).unwrap();
        assert_eq!(all_of(&*w).unwrap(), want);
        // The same reasons, and the same words.
        let (env, mut odd) = (HostEnv::collect(), spec(OpSet::FORWARD));
        odd.k = 40;
        let verdict = remote.can_prepare(&odd, PATH, &env);
        assert_eq!(verdict, here.can_prepare(&odd, PATH, &env));
        assert_eq!(verdict.unwrap_err()[0].code, RejectCode::ShapeUnsupported);
        for case in TableCases::names(false) {
            remote.table_case(&case).unwrap();
        }
        assert!(remote.table_case("no-such-case").is_err());
        assert_eq!(remote.lost(), None);
        let process = PathBuf::from(format!("/proc/{}", remote.process()));
        assert!(process.exists());
        drop((w, remote));
        assert!(!process.exists(), "it ends with the last that uses it");
    }
}

#[test]
fn zero_points_reach_the_other_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = built::groups::acme_int4(dir.path());
    let Candidate::Live(here) = q4_plugin_host::load(&path).unwrap().candidate else { unreachable!() };
    let remote = start(&path, true).unwrap();
    for scales in [DType::F32, DType::F16, DType::BF16] {
        let schema = Q4Schema::Int4(Int4 { group: 32, scales, zeros: Zeros::Points });
        let codes = (0..N * K / 2).map(|i| ((i * 151) >> 2) as u8).collect();
        // Finite in every type.
        let bytes = (0..N * K / 32 * scales.size()).map(|i| (i * 37 % 64) as u8).collect();
        let zeros = (0..N * K / 32).map(|i| (i % 16) as u8).collect();
        let parts = OwnedParts::default()
            .with(Part::Codes, DType::U8, &[N, K / 2], codes)
            .with(Part::Scales, scales, &[N, K / 32], bytes)
            .with(Part::Zeros, DType::U8, &[N, K / 32], zeros);
        let computed = |b: &dyn Q4Backend| {
            let (segments, pool) = ([Segment { rows: N, data: parts.lend().unwrap() }], ThreadPool::new(2));
            let spec = LinearSpec { schema, ..spec(OpSet::FORWARD) };
            let w = Q4Weight { schema, k: K, segments: &segments };
            let w = b.prepare(&w, &spec, PATH, &mut ExecContext::cpu(&pool)).unwrap();
            forward(&*w, M, 0, 2).unwrap()
        };
        let (want, have) = (computed(&*here), computed(&remote));
        assert!(have == want && want.iter().any(|y| *y != 0.0), "{scales}");
    }
}

#[test]
fn many_threads_call_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let remote = start(&good(dir.path()), true).unwrap();
    let w = prepare(&remote, OpSet::FORWARD).unwrap();
    let want: Vec<_> = (1..=M).map(|m| forward(&*w, m, 0, 1).unwrap()).collect();
    std::thread::scope(|scope| {
        for t in 0..12 {
            let (w, want, remote) = (&*w, &want, &remote);
            scope.spawn(move || {
                for call in 0..20 {
                    let m = (t + call) % M + 1;
                    assert_eq!(forward(w, m, 0, 1).unwrap(), want[m - 1]);
                }
                prepare(remote, OpSet::FORWARD).unwrap();
            });
        }
    });
}

/// What the fault in the example, at the start of its `forward`, is told as.
fn in_forward(dir: &Path, name: &str, body: &str) -> Error {
    let call = "const q4_exec *exec, q4_error *err)\n{";
    let source = built::acme_c_source();
    let at = source.find("static q4_status forward(").unwrap();
    let open = at + source[at..].find('{').unwrap() + 1;
    assert!(source[at..open].contains("const q4_matrix *x") && call.ends_with('{'));
    let source = format!("#include <unistd.h>\n{}{body}{}", &source[..open], &source[open..]);
    let remote = start(&built::compile(dir, name, &[], &source), true).unwrap();
    let w = prepare(&remote, OpSet::FORWARD).unwrap();
    // Rows and columns that place operands against the end, then against the start.
    let end = forward(&*w, 4, 0, 1);
    let start = end.and_then(|_| forward(&*w, 3, 0, 1));
    start.unwrap_err()
}

#[test]
fn what_touches_more_than_it_was_lent_is_found_out() {
    let dir = tempfile::tempdir().unwrap();
    let told = |name: &str, body: &str| in_forward(dir.path(), name, body).to_string();
    for (name, body) in [
        ("restores-x", "volatile float *f = (float *)x->data; float v = *f; *f = 7; *f = v;"),
        ("reads-behind-x", "volatile char c = ((volatile char *)x->data)[x->bytes + 64];"),
        ("reads-before-x", "volatile char c = ((volatile char *)x->data)[-64];"),
        ("writes-behind-y", "((volatile char *)y->data)[y->bytes + 64] = 0;"),
        ("reads-before-y", "volatile char c = ((volatile char *)y->data)[-64];"),
    ] {
        assert!(told(name, body).contains("signal: 11 (SIGSEGV)"), "{name}: {}", told(name, body));
    }
    // Between the operand and the page.
    let e = told("writes-beside-y", "((volatile char *)y->data)[y->bytes] = 0;");
    assert!(e.contains("SIGSEGV") || e.contains("a byte outside the output was written"), "{e}");
    let edit = (
        "const q4_segment *s, uint64_t first, q4_error *err)\n{\n    uint64_t groups",
        "const q4_segment *s, uint64_t first, q4_error *err)\n{\n    *(volatile char *)s->codes = 0;\n    uint64_t groups",
    );
    let remote = start(&built::example(dir.path(), "writes-codes", &[], &[edit]), true).unwrap();
    let e = prepare(&remote, OpSet::FORWARD).err().unwrap().to_string();
    assert!(e.contains("signal: 11"), "{e}");
}

/// The calls of the stub, and where their bodies begin.
const CALLS: [(&str, &str); 6] = [
    ("can_prepare", "const q4_env *e, q4_reject_fn sink, void *user, q4_error *err)\n{"),
    ("prepare", "const q4_exec *x, q4_prepared **out, q4_error *err)\n{"),
    ("info", "q4_prepared_info *o, q4_error *err)\n{"),
    ("workspace", "uint64_t m) {"),
    ("forward", "const q4_matrix *y, const q4_exec *e, q4_error *err)\n{"),
    ("dequantize", "const q4_matrix *o, const q4_exec *e, q4_error *err)\n{"),
];

fn every_call(remote: &Remote) -> Result<(), Error> {
    let verdict = remote.can_prepare(&spec(OpSet::FORWARD), PATH, &HostEnv::collect());
    verdict.map_err(|r| Error::new(Code::Unsupported, "can_prepare").have(r[0].to_string()))?;
    let w = prepare(remote, OpSet::FORWARD)?;
    w.workspace(3);
    forward(&*w, 1, 0, 1)?;
    let pool = ThreadPool::new(1);
    w.dequantize(TensorViewMut::of(&mut vec![0f32; N * K], &[N, K])?, &mut ExecContext::cpu(&pool))
}

#[test]
fn a_process_that_ends_is_told_from_one_that_answers() {
    let dir = tempfile::tempdir().unwrap();
    for (call, start_of_body) in CALLS {
        for (how, body, says) in [
            ("exits", "_exit(0);", "exit status: 0"),
            ("forges-a-status", "_exit(64);", "exit status: 64"),
            ("leaves", "exit(0);", "exit status: 0"),
            ("aborts", "abort();", "signal: 6"),
            ("faults", "*(volatile int *)8 = 1;", "signal: 11"),
            ("closes", "for (int i = 0; i < 99; i++) close(i); for (;;) pause();", "the process"),
            ("leaves-a-child", "if (fork()) _exit(0); sleep(3); _exit(0);", "exit status: 0"),
            ("complains", "write(2, \"why\\033[2J\", 7); _exit(3);", "why[2J"),
        ] {
            let edit = (start_of_body, &*format!("{start_of_body} {body}"));
            let remote = start(&built::stub(dir.path(), &format!("{call}-{how}"), &[edit]), false).unwrap();
            let begun = Instant::now();
            let error = every_call(&remote).err();
            let loss = remote.lost().unwrap_or_else(|| panic!("{call} {how}: {error:?}"));
            assert!(loss.have.contains(says) && !loss.is_hang, "{call} {how}: {loss:?}");
            let error = forward_or_not(&remote, error);
            assert!(error.contains(says), "{call} {how}: {error}");
            assert!(begun.elapsed() < Duration::from_secs(20), "nobody waits for who is gone");
        }
    }
}

/// The error of a call, or of the one behind one that cannot fail.
fn forward_or_not(remote: &Remote, error: Option<Error>) -> String {
    error.or_else(|| every_call(remote).err()).unwrap().to_string()
}

#[test]
fn a_call_that_does_not_end_is_ended() {
    let dir = tempfile::tempdir().unwrap();
    let (_, body) = CALLS[4];
    let edit = (body, &*format!("{body} for (;;) pause();"));
    let path = built::stub(dir.path(), "hangs", &[edit]);
    let remote = Remote::start(&Loader::default().examine(&path).unwrap(), &how(true, 1)).unwrap();
    let e = every_call(&remote).unwrap_err();
    assert_eq!(e.code(), Code::BackendFailed);
    assert!(e.to_string().contains("no answer within 1 s"), "{e}");
    assert!(remote.lost().unwrap().is_hang);
    let later = every_call(&remote).unwrap_err().to_string();
    assert!(later.contains("no answer within 1 s"), "{later}");
}

#[test]
fn a_library_that_does_not_load_there_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (name, body, code, says) in [
        ("exits", "_exit(0);", RejectCode::DiedInProbe, "exit status: 0"),
        ("faults", "*(volatile int *)8 = 1;", RejectCode::DiedInProbe, "signal: 11"),
        (
            "says-yes",
            "for (int i = 0; i < 64; i++) write(i, \"\\4\\0\\0\\0oko\\0\", 8);",
            RejectCode::DiedInProbe,
            "makes no sense",
        ),
    ] {
        let text = format!("__attribute__((constructor)) static void early(void) {{ {body} }}");
        let refusal = start(&built::stub(dir.path(), name, &[("/*EARLY*/", &text)]), true).err().unwrap();
        assert_eq!(refusal.reasons[0].code, code, "{name}: {refusal}");
        assert!(refusal.reasons[0].have.contains(says), "{name}: {refusal}");
    }
    // Another file than the one that was looked at.
    let path = built::stub(dir.path(), "changes", &[]);
    let found = Loader::default().examine(&path).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let refusal = Remote::start(&found, &how(true, 60)).err().unwrap();
    assert!(refusal.reasons[0].need.contains("the library that was examined"), "{refusal}");
}

/// Answers on every descriptor that it finds, all the time: frames that are whole, cut, endless, or nonsense.
#[test]
fn answers_of_anybody_are_numbers_that_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    for (name, frame) in [
        ("done", "\"\\4\\0\\0\\0\\157\\153\\0\\0\", 8"),
        ("endless", "\"\\377\\377\\377\\377\\157\\153\\0\\0\", 8"),
        ("many-reasons", "\"\\10\\0\\0\\0\\157\\153\\0\\0\\377\\377\\377\\377\", 12"),
        ("cut", "\"\\377\\0\\0\\0\", 4"),
    ] {
        let text = format!(
            "#include <pthread.h>\nstatic void *talk(void *a) {{ for (int n = 0; n < 2000; n++) {{ for (int i = 3; i < 40; i++) send(i, {frame}, 0x4040); usleep(500); }} return 0; }}\n#include <sys/socket.h>\n"
        );
        let (_, body) = CALLS[4];
        let begin = "static pthread_t t; if (!t) pthread_create(&t, 0, talk, 0); usleep(3000);";
        let edits = [
            ("/*EARLY*/", &*format!("#include <sys/socket.h>\n{text}")),
            (body, &*format!("{body} {begin}")),
        ];
        let remote = start(&built::stub(dir.path(), name, &edits), true).unwrap();
        // Whatever comes of it, this process lives, and nothing is believed that is not there: the stub
        // computes nothing.
        for _ in 0..20 {
            if let Ok(w) = prepare(&remote, OpSet::FORWARD)
                && let Ok(y) = forward(&*w, 1, 0, 1)
            {
                assert!(y.iter().all(|v| *v == -1.0), "{name}");
            }
        }
        assert!(remote.lost().is_some(), "{name}");
    }
}

/// What is known of the process tells what the library does to it.
#[test]
fn what_a_library_does_to_its_process_is_seen() {
    let dir = tempfile::tempdir().unwrap();
    let includes = (
        "#include <unistd.h>",
        "#define _GNU_SOURCE\n#include <unistd.h>\n#include <signal.h>\n#include <fcntl.h>\n#include <pthread.h>\n#include <locale.h>\n#include <sys/stat.h>\n#include <sys/resource.h>\n#include <sys/wait.h>\n#include <fenv.h>\nstatic void *idle(void *a) { sleep(9); return a; }",
    );
    let changed = |name: &str, edits: &[(&str, &str)]| -> Vec<String> {
        let path = built::stub(dir.path(), name, &[&[includes][..], edits].concat());
        let remote = start(&path, true).unwrap();
        drop(every_call(&remote));
        let (before, mut after) = (remote.facts_before(), remote.facts().unwrap());
        // The last calls made one for two threads.
        std::thread::sleep(Duration::from_millis(5));
        after = remote.facts().unwrap_or(after);
        let differs = |name: &&String| before.get(*name) != after.get(*name);
        after
            .keys()
            .filter(differs)
            .filter(|n| !["threads", "allocations"].contains(&&***n))
            .cloned()
            .collect()
    };
    assert_eq!(changed("nothing", &[]), Vec::<String>::new());
    let path = built::stub(
        dir.path(),
        "allocates",
        &[(CALLS[4].1, &format!("{} void *volatile v = malloc(99); free(v);", CALLS[4].1))],
    );
    let remote = start(&path, true).unwrap();
    let w = prepare(&remote, OpSet::FORWARD).unwrap();
    let count = || remote.facts().unwrap()["allocations"].parse::<u64>().unwrap();
    let before = count();
    (0..5).for_each(|_| drop(forward(&*w, 1, 0, 1).unwrap()));
    assert_eq!(count(), before + 5);
    let (_, body) = CALLS[4];
    for (what, code) in [
        ("umask", "umask(0);"),
        ("working directory", "chdir(\"/\");"),
        ("environment", "setenv(\"ACME\", \"1\", 1);"),
        ("locale", "setlocale(LC_ALL, \"C.UTF-8\");"),
        // Not SIGINT: a shell starts what it runs in the background without it.
        ("ignored signals", "signal(SIGUSR1, SIG_IGN);"),
        ("handled signals", "signal(SIGTERM, (void (*)(int))exit);"),
        ("open files", "open(\"/dev/null\", 0);"),
        ("child processes", "if (!fork()) _exit(0); wait(0);"),
        (
            "resource limits",
            "struct rlimit r; getrlimit(RLIMIT_CORE, &r); r.rlim_cur = r.rlim_max = 4096; setrlimit(RLIMIT_CORE, &r);",
        ),
        ("threads that it started", "pthread_t t; pthread_create(&t, 0, idle, 0);"),
        ("processes that it started", "system(\"exit 0\");"),
        ("bytes on its standard output", "write(1, \"hello\\n\", 6);"),
        ("bytes on its standard error", "write(2, \"hello\\n\", 6);"),
        (
            "calls that changed how their thread rounds",
            "static int n; __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() ^ 0x8000);",
        ),
    ] {
        if code.contains("ia32") && !cfg!(target_arch = "x86_64") {
            continue;
        }
        let name = what.replace(' ', "-");
        let got = changed(&name, &[(body, &format!("{body} {code}"))]);
        assert!(got.iter().any(|n| n == what), "{what}: {got:?}");
    }
}
