//! What a certificate is about, and what voids it.
use super::*;
use crate::{Options, TypeLimits, liars, run};
use q4_core::{Code, CudaDevice, DType, OpSet, Result, ThreadPool};

fn machine_with(feature: &str) -> HostEnv {
    HostEnv { arch: "x86_64".into(), cpu_features: vec![feature.into()], ..HostEnv::default() }
}

fn library() -> Library {
    Library { path: "/opt/libacme.so".into(), sha256: "ab".repeat(32), needs: Vec::new() }
}

/// bf16, blocks of 256, forward.
fn limits() -> Limits {
    let bf16 = TypeLimits { dtype: "bfloat16".into(), backward: false, dequantize: false };
    Limits {
        encodings: vec!["any".into()],
        quantizers: vec!["any".into()],
        types: vec![bf16],
        segments: 3,
        n_multiple: 1,
        k_multiple: 256,
        max_m: Some(16),
    }
}

fn certificate() -> Certificate {
    let env = machine_with("avx2");
    Certificate {
        schema: SCHEMA.into(),
        backend: "acme".into(),
        version: "1.2.0".into(),
        sha256: library().sha256,
        needs: Vec::new(),
        suite: crate::SUITE_VERSION.into(),
        profile: Profile::Inference,
        claims: vec![Proven { claim: "nvfp4@1/native/cpu/fused-dequant".into(), limits: limits() }],
        machine: machine(&env),
        facts: facts(&env),
        device: None,
    }
}

/// What `find` says of `library`, on the machine of [`certificate`].
fn found(all: &Certificates, library: &Library) -> std::result::Result<(), String> {
    let found = all.find("acme", "1.2.0", library, (&machine_with("avx2"), Device::Cpu), Profile::Inference);
    found.map(|_| ()).map_err(|r| {
        assert_eq!(r.code, RejectCode::ConformanceMissing);
        assert!(r.need.contains(&format!("q4 conformance --plugin {}", library.path)), "{r}");
        r.have.into_owned()
    })
}

#[test]
fn one_byte_of_the_library_voids_a_certificate() -> Result<()> {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("libacme.so");
    fs::write(&file, b"machine code").expect("written");
    let library = Library::of(&file)?;
    assert_eq!(library.sha256.len(), 64);
    let all = Certificates::under(dir.path());
    all.write(&Certificate { sha256: library.sha256.clone(), ..certificate() })?;
    assert_eq!(found(&all, &library), Ok(()));
    fs::write(&file, b"machine codf").expect("written");
    let why = found(&all, &Library::of(&file)?).expect_err("other bytes");
    assert!(why.contains("void: library bytes"), "{why}");
    Ok(())
}

#[test]
fn everything_a_certificate_is_about_can_void_it() {
    let c = certificate();
    let (env, now) = (machine_with("avx2"), Profile::Inference);
    let valid = |c: &Certificate, backend: &str, version: &str, env: &HostEnv, profile| {
        c.valid_for(backend, version, &library(), env, profile)
    };
    assert_eq!(valid(&c, "acme", "1.2.0", &env, now), Ok(()));
    // What a machine may lend to a process is not what it is.
    let lent = HostEnv { processors: 7, ..env.clone() };
    assert_eq!(valid(&c, "acme", "1.2.0", &lent, now), Ok(()));
    let major = crate::SUITE_VERSION.split('.').next().unwrap_or_default();
    let minor = Certificate { suite: format!("{major}.99.3"), ..c.clone() };
    assert_eq!(valid(&minor, "acme", "1.2.0", &env, now), Ok(()));
    let changed = |change: fn(&mut Certificate)| {
        let mut c = c.clone();
        change(&mut c);
        valid(&c, "acme", "1.2.0", &env, now)
    };
    for (why, result) in [
        ("backend", valid(&c, "acne", "1.2.0", &env, now)),
        ("version", valid(&c, "acme", "1.2.1", &env, now)),
        ("certified with avx2, now with avx512f", valid(&c, "acme", "1.2.0", &machine_with("avx512f"), now)),
        ("profile", valid(&c, "acme", "1.2.0", &env, Profile::Training)),
        ("suite", changed(|c| c.suite = "999.0.0".into())),
        ("schema", changed(|c| c.schema = "q4.certificate/1".into())),
        ("no claim", changed(|c| c.claims = vec![])),
        ("library bytes", changed(|c| c.sha256 = "cd".repeat(32))),
    ] {
        assert!(result.expect_err(why).contains(why), "{why}");
    }
}

#[test]
fn what_it_loads_besides_itself_can_void_it() {
    let need = |name: &str, bytes: &str| Needed {
        name: name.into(),
        path: format!("/opt/{name}"),
        sha256: bytes.repeat(32),
    };
    let with = |needs: &[Needed]| Library { needs: needs.to_vec(), ..library() };
    let c = Certificate { needs: vec![need("a.so", "aa"), need("b.so", "bb")], ..certificate() };
    let valid = |needs: &[Needed]| {
        c.valid_for("acme", "1.2.0", &with(needs), &machine_with("avx2"), Profile::Inference)
    };
    assert_eq!(valid(&c.needs), Ok(()));
    let elsewhere = Needed { path: "/tmp/a.so".into(), ..need("a.so", "aa") };
    for (needs, why) in [
        (vec![need("a.so", "aa"), need("b.so", "cc")], "b.so, which it loads: certified /opt/b.so sha256 bb"),
        (vec![need("a.so", "aa")], "now none"),
        (vec![need("a.so", "aa"), need("b.so", "bb"), need("c.so", "cc")], "certified none, now /opt/c.so"),
        (vec![elsewhere, need("b.so", "bb")], "now /tmp/a.so"),
    ] {
        let said = valid(&needs).expect_err(why);
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn without_a_certificate_nobody_passes() {
    let dir = tempfile::tempdir().expect("a directory");
    let library = library();
    for dir in [dir.path(), Path::new("/nowhere/at/all")] {
        let (all, env) = (Certificates::under(dir), HostEnv::default());
        let find = |env: &HostEnv, profile| {
            all.find("acme", "1.0.0", &library, (env, Device::Cpu), profile).expect_err("nothing there")
        };
        let reject = find(&env, Profile::Training);
        assert!(reject.have.starts_with("none in"), "{reject}");
        assert!(reject.need.ends_with("--plugin /opt/libacme.so --profile training"), "{reject}");
        let capability = (9, 0);
        let device = CudaDevice { ordinal: 0, capability, name: "GPU".into(), memory: 1 << 34 };
        let reject = find(&HostEnv { cuda: vec![device], ..env }, Profile::Inference);
        assert!(reject.need.ends_with("--plugin /opt/libacme.so --device cuda"), "{reject}");
    }
}

/// Who writes a certificate without the key has none, and is told so; whatever lies in the folder, nothing
/// hangs.
#[test]
fn only_what_the_key_sealed_counts() -> Result<()> {
    let dir = tempfile::tempdir().expect("a directory");
    let (all, folder) = (Certificates::under(dir.path()), dir.path().join("certificates"));
    fs::create_dir(&folder).expect("made");
    let file = folder.join("forged.json");
    let why = |text: &str| {
        fs::write(&file, text).expect("written");
        found(&all, &library()).expect_err("none")
    };
    let forged = serde_json::to_value(certificate()).expect("JSON");
    // Before anybody made a key, as a constructor of the first library ever would.
    assert!(why(&forged.to_string()).contains("seal: made with a key that is not in"));
    let key = Key::open_or_make(dir.path())?;
    for text in [forged.to_string(), Key::open_or_make(&dir.path().join("other"))?.seal(&certificate())?] {
        assert!(why(&text).contains("seal: not written by q4 conformance of this user"));
    }
    let whole = key.seal(&certificate())?;
    fs::write(&file, &whole).expect("written");
    assert_eq!(found(&all, &library()), Ok(()));
    for (from, to) in
        [("\"avx2\"", "\"avx9\""), ("native", "int8"), ("1.2.0", "1.2.1"), ("inference", "training")]
    {
        assert!(whole.contains(from));
        assert!(why(&whole.replace(from, to)).contains("seal: not written"), "{to}");
    }
    let old = "{\"schema\":\"q4.certificate/1\",\"backend\":\"acme\",\"sha256\":\"00\"}";
    assert!(why(old).contains("schema: certified q4.certificate/1, now q4.certificate/2"));
    for none in ["", "[]", "{}", "\u{1b}[2J", "{\"schema\":7,\"backend\":\"acme\"}"] {
        assert!(why(none).starts_with("one that is void: no"), "{none}");
    }
    assert!(why("{\"schema\":\"q4.certificate/1\",\"backend\":\"other\"}").starts_with("none in"));
    assert!(why(&" ".repeat(1 << 21)).contains("more than 1048576 bytes"));
    #[cfg(unix)]
    for (link, says) in [("/dev/zero", "a device"), ("/", "a directory")] {
        fs::remove_file(&file).expect("removed");
        std::os::unix::fs::symlink(link, &file).expect("a link");
        assert!(found(&all, &library()).expect_err(link).contains(says));
    }
    all.write(&certificate())?;
    assert_eq!(found(&all, &library()), Ok(()), "beside all that");
    fs::remove_file(Key::path(dir.path())).expect("removed");
    assert!(found(&all, &library()).expect_err("no key").contains("seal: made with a key"));
    Ok(())
}

#[test]
fn products_of_other_kinds_are_not_covered() {
    let schema = q4_core::formats::encodings("nvfp4")[0];
    let plain = crate::limits::plain_spec(schema, q4_core::Activations::Native, q4_core::Device::Cpu);
    let spec = LinearSpec { x: DType::BF16, y: DType::BF16, ..plain.clone() };
    let c = certificate();
    assert_eq!(c.covers(&spec, ExecPath::FusedDequant), Ok(()));
    for (spec, says) in [
        (plain, "bfloat16"),
        (LinearSpec { k: 768 + 128, ..spec.clone() }, "in features % 256 == 0"),
        (LinearSpec { max_m: 17, ..spec.clone() }, "at most 16 rows"),
        (LinearSpec { ops: OpSet::FORWARD.with(OpSet::BACKWARD_INPUT), ..spec.clone() }, "operations"),
    ] {
        let reasons = c.covers(&spec, ExecPath::FusedDequant).expect_err("outside");
        assert!(reasons[0].need.contains(says), "{}", reasons[0]);
    }
    for (spec, path) in [
        (spec.clone(), ExecPath::DequantMatmul),
        (LinearSpec { activations: q4_core::Activations::Int8, ..spec.clone() }, ExecPath::FusedDequant),
        (LinearSpec { device: q4_core::Device::Cuda(0), ..spec.clone() }, ExecPath::FusedDequant),
        (
            LinearSpec { schema: q4_core::formats::encodings("nf4")[0], ..spec.clone() },
            ExecPath::FusedDequant,
        ),
    ] {
        let reasons = c.covers(&spec, path).expect_err("not certified");
        assert_eq!(reasons[0].code, RejectCode::ConformanceMissing, "{}", reasons[0]);
    }
}

#[test]
fn only_a_complete_run_without_failures_certifies() -> Result<()> {
    let (env, threads) = (HostEnv::default(), ThreadPool::new(1));
    let mut report = run(
        &*liars::honest(),
        &Options { levels: vec![crate::Level::L0], ..Options::of(Profile::Inference) },
        &env,
        &threads,
    );
    assert!(report.conformant, "{}", report.text());
    assert_eq!(Certificate::of(&report).expect_err("a part of it").code(), Code::ConformanceFailed);
    report.complete = true;
    assert_eq!(Certificate::of(&report)?, [], "no library, no certificate");
    report.backends[0].library = Some(library());
    assert_eq!(Certificate::of(&report)?.len(), 1);
    report.waived = 1;
    assert!(Certificate::of(&report).is_err());
    (report.waived, report.conformant) = (0, false);
    assert!(Certificate::of(&report).is_err());
    Ok(())
}
